"""An operation's forward error: its result beside the same operation in float64, and how far rounding may lead.

The inputs of both are the very ones that the operation got, so that what went wrong earlier is not held against it.
A bound allows sums in any order and every algorithm that libraries document for the operation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpulab._torch_internals import Nested, OpOverload, has_failed, named_arguments
from gpulab.audits.count_sketch import factors, rounds
from gpulab.audits.formulas import attend
from gpulab.audits.twins import Float64Reference, distance, norm, repeats, rounded_results
from gpulab.numerics.emulation import MATRIX_PRODUCTS, SUMS_WITH_PRODUCTS, rounded_factor
from gpulab.numerics.formats import round_to, rounded_format

SAFETY_FACTOR = 4.0  # Higham and Mary's lambda: beyond it, rounding errors that behave as random are all but impossible
EXPLAINED = 0.5  # the share of an error that a number format must account for to be named as its cause
FEW, SMALL_RESULT_EXPLAINED_SHARE = 32, 0.99  # of so few numbers' errors, one format in four explains half by chance
FLUSHED = "float32_ftz"  # float32 whose subnormal numbers, those below 1.2e-38, are taken for zero

# The operands that are multiplied with each other, by position. What else there is (a bias) is added.
PRODUCTS: dict[str, tuple[int, ...]] = dict.fromkeys(MATRIX_PRODUCTS, (0, 1))
PRODUCTS |= dict.fromkeys(SUMS_WITH_PRODUCTS, (1, 2))
PRODUCTS |= {"convolution": (0, 1), "convolution_backward": (0, 1, 2)}
ATTENTION: dict[str, tuple[int, ...]] = {
    f"_scaled_dot_product_{kernel}": (0, 1, 2)
    for kernel in ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")
}
FACTORS: dict[str, tuple[int, ...]] = PRODUCTS | ATTENTION
# Many products one after the other, whose rounding no perturbation of the inputs shows.
RECURRENT = {
    f"{kernel}{suffix}" for kernel in ("_cudnn_rnn", "mkldnn_rnn_layer", "miopen_rnn") for suffix in ("", "_backward")
}
# Sums that a GPU's atomics, and a CPU, add up one number after the other. Equal numbers then round alike, and not at
# random: n of them may be off by n roundings.
SUMS_BY_INDEX = {"embedding_dense_backward", "index_add", "index_put", "_index_put_impl", "scatter_add"}
# The formats that hardware multiplies in when it is asked for float32, how it gets there, and the result's format.
HARDWARE_ROUNDINGS = (
    ("tf32", "nearest", None),
    ("tf32", "away", None),  # where most of what lies halfway goes one way, which is where sums feel it
    ("tf32", "truncate", None),
    ("bfloat16", "nearest", None),
    ("float16", "nearest", None),
    ("bfloat16", "nearest", "bfloat16"),
    ("float16", "nearest", "float16"),
    ("float8_e4m3fn", "nearest", None),
    ("float8_e5m2", "nearest", None),
)


@dataclass(kw_only=True)
class Accuracy:
    """One operation's error against float64, relative to the norm of the exact result, of the result that is worst.

    `bound` is the error that rounding explains, in the same unit; `max_bound` that of the result that may be furthest
    off. `format` is the short number format that a product was computed in: by the error, when its kernel rounded the
    factors, or by the factors, when they had been `rounded_before`. Of any operation it is `FLUSHED` when subnormal
    numbers were taken for zero.
    None where there is nothing to say: no reference in float64, no product.
    """

    error: float | None = None
    bound: float | None = None
    format: str | None = None
    rounded_before: bool = False
    max_bound: float | None = None

    @property
    def ratio(self) -> float | None:
        """The error in units of what rounding explains."""
        if self.error is None or self.bound is None:
            return None
        return self.error / self.bound if self.bound else (np.inf if self.error else 0.0)


def forward_error(
    operation: OpOverload, name: str, args: Sequence[Nested], kwargs: dict[str, Nested], out: Nested
) -> Accuracy:
    """Compare what an operation returned with the same operation in float64, on the same device.

    Args:
        operation: an overload of `torch.ops.aten`, or a custom one.
        name: its bare name, such as `convolution`.
        args: positional arguments of the call, before it changed any of them.
        kwargs: named arguments of the call.
        out: what it returned; or wrote, where it returns nothing.
    """
    if name in RECURRENT or has_failed(operation, out):
        return Accuracy()  # what a factorisation leaves when it fails is each library's own
    if name == "convolution_backward":  # oneDNN computes gradients that nobody asked for, and returns them
        out = [gradient for gradient, needed in zip(out, args[10], strict=True) if needed]
    results = rounded_results(out)
    results = results[:1] if name in ATTENTION else results
    reference = Float64Reference(operation, args, kwargs, len(results))
    if name in ATTENTION:
        reference.compute = _attention(operation)
    elif name == "_to_copy" and rounds(args[0]):
        reference.compute = lambda x, **_: x  # the exact result of a conversion is what it converts
    try:
        answer = reference.check_definition(name, out)
        if answer is not None:
            error, roundings = answer
            unit = torch.finfo(args[0].dtype).eps / 2 if rounds(args[0]) else 0.0
            return Accuracy(error=error, bound=None if roundings is None else SAFETY_FACTOR * roundings * unit)
        return _compare_with_reference(name, args, results, reference)
    except RuntimeError:  # a kernel of one device alone, or none for float64
        return Accuracy()


def _compare_with_reference(
    name: str, args: Sequence[Nested], results: list[Tensor], reference: Float64Reference
) -> Accuracy:
    """The error of that result which is worst, and what rounds as it does."""
    exact = reference()
    sizes = list(map(norm, exact))
    if not exact or [e.shape for e in exact] != [r.shape for r in results] or not all(map(math.isfinite, sizes)):
        return Accuracy()
    unit = max(torch.finfo(result.dtype).eps / 2 for result in results)
    copies = [t.numel() for t in reference.numbers] == [r.numel() for r in results]  # and nothing summed or subtracted
    if copies and not any(map(distance, results, exact)):  # the rest would say nothing
        return Accuracy(error=0.0, bound=unit)
    terms = _terms(name, args) if name in PRODUCTS else _longest_sums(name, reference, exact)
    reaches = SAFETY_FACTOR * np.sqrt(np.maximum(1.0, terms))
    if name in PRODUCTS:
        bounds = reaches * _moves_of_products(reference, unit)
    else:
        bounds = reaches * (_moves(name, reference, exact, unit) + _one_pass(name, reference, exact, unit))
        if name in SUMS_BY_INDEX:
            bounds[0] += terms[0] * unit * sizes[0]
    # Numbers too small for the format are lost: below the smallest subnormal one; and where a unit takes those for
    # zero, all below the smallest normal one.
    formats = [torch.finfo(result.dtype) for result in results]
    lost = reaches * np.sqrt([e.numel() for e in exact]) * [f.smallest_normal for f in formats]
    bounds = bounds + lost * [f.eps for f in formats]
    exact = [torch.where(e.abs() > f.max, e * math.inf, e) for e, f in zip(exact, formats, strict=True)]  # overflow
    errors = list(map(distance, results, exact))
    ratios = [Accuracy(error=error, bound=bound).ratio for error, bound in zip(errors, bounds, strict=True)]
    worst = int(np.argmax(np.array(ratios, float)))  # NaN is the largest
    error, bound, size = errors[worst], float(bounds[worst]), norm(exact[worst]) or 1.0
    if math.isnan(bound):  # next to inputs for which there is no result
        return Accuracy()
    max_bound = float(max(bounds / [norm(e) or 1.0 for e in exact]))
    seen = Accuracy(error=error / size, bound=bound / size, max_bound=max_bound)
    factors = [args[index] for index in FACTORS.get(name, ())]
    if error > bound and _is_flushed(reference, results[worst], worst, bound + lost[worst]):
        seen.format = FLUSHED
    elif factors and all(factor.dtype == torch.float32 for factor in factors):
        # Where a format shorter than float32 was used, the error is at least half of one rounding; and where all
        # products have one sign, which the sum of n of them hides best, 2^-12 / sqrt(n) of the result.
        reach = reaches[worst] if name in PRODUCTS else SAFETY_FACTOR
        if not error <= max(bound / 2, SAFETY_FACTOR * 2.0**-15 * sizes[worst]) / reach:
            # Where factors overflowed the error is NaN, and the format that overflows there leaves none of it.
            worst_error = math.inf if math.isnan(error) else error
            seen.format = _explaining_format(FACTORS[name], reference, results[worst], worst_error, worst)
        if seen.format is None:
            seen.format = next(filter(None, map(rounded_format, factors)), None)
            seen.rounded_before = seen.format is not None
    return seen


# --- how far rounding may lead --------------------------------------------------------------------------------


def _terms(name: str, args: Sequence[Nested]) -> list[float]:
    """How many products are summed in each element of each result."""
    if name == "convolution":
        weight, transposed, groups = args[1], args[6], args[8]
        return [weight.numel() / (weight.shape[1] * groups if transposed else weight.shape[0])]
    if name == "convolution_backward":
        gradient, weight, transposed, groups, needed = args[0], args[2], args[7], args[9], args[10]
        positions = gradient.numel() / gradient.shape[1]
        inputs = weight.numel() / (weight.shape[0] if transposed else weight.shape[1] * groups)
        return [n for n, is_needed in zip((inputs, positions, positions), needed, strict=True) if is_needed]
    first = args[PRODUCTS[name][0]]
    return [first.shape[-1] * (len(first) if name == "addbmm" else 1)]  # which sums over the batch as well


def _longest_sums(name: str, reference: Float64Reference, exact: list[Tensor]) -> list[float]:
    """How many numbers may be summed for each number of each result, of operations that are no products.

    As many as the inputs have for one of the result; and where shapes do not show it, as the arguments say.
    """
    numbers, arguments = reference.numbers, reference.named
    most, longest = max((t.numel() for t in numbers), default=1), 1.0
    dims = arguments.get("dim")
    for dim in [dims] if isinstance(dims, int) else dims or ():  # running sums, softmax, transforms
        longest *= max((t.shape[dim] for t in numbers if -t.dim() <= dim < t.dim()), default=1)
    if name in SUMS_BY_INDEX:
        longest = min(longest, repeats(arguments)) if "dim" in arguments else repeats(arguments)
    elif "norm" in name:  # whose means, one for each group, are among the arguments or the results
        longest = most / min(t.numel() for t in (*numbers, *exact) if t.numel())
    elif "ctc_loss" in name:
        longest = arguments["log_probs"].shape[0]
    elif "linalg" in name or "cdist" in name or "solve" in name:
        longest = max(size for t in numbers for size in t.shape[-2:])
    elif "upsample" in name and "nearest" not in name:  # the place between two pixels is rounded too
        longest = max(size for t in (*numbers, *exact) for size in t.shape[2:]) ** 2
        return [longest * max(1.0, most / e.numel()) for e in exact]
    return [max(1.0, longest, most / e.numel()) for e in exact]


def _moves_of_products(reference: Float64Reference, unit: float) -> np.ndarray:
    """The norms of u |A| |B|, of which sqrt(n) bound the error whatever the order of summation.

    See Higham and Mary 2019 (SIAM J. Sci. Comput. 41(5)).

    Of norms, it also leaves room for convolutions by Winograd's algorithm (Barabasz et al. 2020, ACM TOMS 46(4)) and by
    Fourier's transform, and for complex products by three real ones (Higham 1992, SIAM J. Matrix Anal. Appl. 13(3)).
    """
    return unit * np.array([norm(product) for product in reference(torch.abs)])


def _moves(name: str, reference: Float64Reference, exact: list[Tensor], unit: float) -> np.ndarray:
    """How far the result moves when every input is off by one rounding, and one more for the result. Norms.

    The roundings have random signs, in two draws, so that one lucky sign does not hide a movement; and then one sign,
    which sums the absolute values of what is summed: the roundings of a sum, whose terms may come in any order, can be
    as large. No number grows above 1, for some kernels stop at a probability that does.
    """
    draws = itertools.count()

    def shrunk(x: Tensor) -> Tensor:
        return x * (factors(x, next(draws), unit) - unit)

    def lowered(x: Tensor) -> Tensor:
        return x * (1 - unit * torch.sgn(x).conj())

    sums = torch.Tag.pointwise not in reference.operation.tags
    moved = [reference(change) for change in ([shrunk, shrunk, lowered] if sums else [shrunk, shrunk])]
    moves = np.array([math.hypot(*(norm(m - e) for m in of_one)) for e, *of_one in zip(exact, *moved, strict=True)])
    sizes = list(map(norm, exact))
    if name in ATTENTION:
        # Averages cancel, their roundings do not; a GPU's quick exponential is 2 ulp off (CUDA guide).
        sizes = [4 * norm(t) for t in reference(torch.abs, (2,))]
    return moves + unit * np.array(sizes)


def _one_pass(name: str, reference: Float64Reference, exact: list[Tensor], unit: float) -> np.ndarray:
    """What is lost where the variance is the mean of squares minus the square of the mean, which cancels.

    oneDNN documents that for its batch normalisation, and compilers make it of others (Chan, Golub, LeVeque 1983,
    American Statistician 37(3)). In units of the roundings of a sum.
    """
    lost = np.zeros(len(exact))
    if "norm" in name and "backward" not in name and name != "_foreach_norm" and len(exact) > 2:
        # These are the result, the means and the reciprocal deviations.
        x, result, _, reciprocal = reference.args[0], *exact[:3]
        if "batch" in name:
            x, result = x.transpose(0, 1), result.transpose(0, 1)
        x, result = (t.reshape(reciprocal.numel(), -1) for t in (x, result))
        steepness = x.square().mean(1).sqrt() * reciprocal.flatten()  # the numbers' size in units of their deviation
        by = steepness + steepness.square() / 2
        lost[0] = unit * norm(by * torch.linalg.vector_norm(result, dim=1))
        lost[2] = unit * norm(by * reciprocal.flatten())
    return lost


# --- which number format --------------------------------------------------------------------------------------


def _is_flushed(reference: Float64Reference, result: Tensor, output_index: int, bound: float) -> bool:
    """Whether taking subnormal numbers for zero explains a result; the bound allows those that it may lose."""
    smallest = torch.finfo(result.dtype).smallest_normal
    flushed = reference(lambda x: torch.where(x.abs() < smallest, 0.0, x))[output_index]
    return result.dtype != torch.float16 and distance(result, flushed) <= bound


def _explaining_format(
    factor_positions: Sequence[int], reference: Float64Reference, result: Tensor, error: float, output_index: int
) -> str | None:
    """The format whose rounding of the factors explains the error best, if any explains half of it."""
    best, least = None, 1 - (EXPLAINED if result.numel() > FEW else SMALL_RESULT_EXPLAINED_SHARE)
    for format_, mode, of_result in HARDWARE_ROUNDINGS:

        def rounded(x: Tensor, format_: str = format_, mode: str = mode) -> Tensor:
            return rounded_factor(x.float(), format_, mode).double()

        candidate = reference(rounded, factor_positions)[output_index]
        if of_result is not None:  # it overflows where the format ends
            candidate = round_to(candidate.float(), of_result).double()
        remaining = (distance(result, candidate) / error) ** 2
        if remaining < (least if best is None else least / 2):  # TF32 and float16 often round alike
            best, least = format_, remaining
    return best


def _attention(operation: OpOverload) -> Callable[..., Tensor]:
    """Scaled dot-product attention as written down, for kernels that exist on one device or for float32 alone."""
    return lambda *args, **kwargs: attend(named_arguments(operation, args, kwargs))
