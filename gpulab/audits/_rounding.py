"""An operation's forward error: its distance from the float64 result, and a rounding bound.

Both get the inputs that the operation had, so that earlier errors do not count as errors of the
operation. The bound allows sums in any order and every algorithm that libraries document for the
operation.
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
from gpulab.audits._count_sketch import is_float_or_complex, perturbation_factors
from gpulab.audits._float64_calls import (
    Float64Reference,
    difference_norm,
    find_rounded_results,
    max_index_repeats,
    norm,
)
from gpulab.audits._formulas import attend
from gpulab.numerics._emulation import MATRIX_PRODUCTS, SUMS_WITH_PRODUCTS, round_factor_to
from gpulab.numerics._formats import round_to, rounded_format

# Higham and Mary's lambda: rounding errors that behave as random almost never exceed the bound with
# this factor.
SAFETY_FACTOR = 4.0
MIN_EXPLAINED_SHARE = (
    0.5  # a number format is named as the cause of an error that it explains by at least this share
)
SMALL_RESULT_SIZE = (
    32  # numbers; one format in four explains half of the errors of fewer numbers by chance
)
MIN_SMALL_RESULT_EXPLAINED_SHARE = (
    0.99  # the share that a format must explain of the error of a small result
)
FLUSHED = "float32_ftz"  # float32 whose subnormal numbers, those below 1.2e-38, are taken for zero

# The operands that are multiplied with each other, by position. Any other operand, such as a bias,
# is added.
PRODUCT_OPERANDS: dict[str, tuple[int, ...]] = dict.fromkeys(MATRIX_PRODUCTS, (0, 1))
PRODUCT_OPERANDS |= dict.fromkeys(SUMS_WITH_PRODUCTS, (1, 2))
PRODUCT_OPERANDS |= {"convolution": (0, 1), "convolution_backward": (0, 1, 2)}
ATTENTION_OPERANDS: dict[str, tuple[int, ...]] = {
    f"_scaled_dot_product_{kernel}": (0, 1, 2)
    for kernel in (
        "efficient_attention",
        "flash_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
    )
}
ROUNDED_OPERANDS: dict[str, tuple[int, ...]] = PRODUCT_OPERANDS | ATTENTION_OPERANDS
# Operations with many consecutive products: perturbing their inputs does not show the rounding of
# these products.
RECURRENT = {
    f"{kernel}{suffix}"
    for kernel in ("_cudnn_rnn", "mkldnn_rnn_layer", "miopen_rnn")
    for suffix in ("", "_backward")
}
# Sums that a GPU's atomics, and a CPU, add up sequentially. Equal numbers then round in the same
# way and not at random, so that the sum of n of them may be off by n roundings.
SUMS_BY_INDEX = {
    "embedding_dense_backward",
    "index_add",
    "index_put",
    "_index_put_impl",
    "scatter_add",
}
# The formats that hardware multiplies in when it is asked for float32, how it gets there, and the
# result's format.
HARDWARE_ROUNDINGS = (
    ("tf32", "nearest", None),
    ("tf32", "away", None),  # ties go one way, which biases sums
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
    """The worst error of one operation against float64, relative to the exact result's norm.

    `bound` is the error that rounding explains, in the same unit, and `max_bound` the largest bound
    of all results. `format` is the short number format that a product was computed in. It is known
    by the error if the kernel rounded the factors, or by the factors if these were rounded before
    (`has_rounded_factors`). For any operation it is `FLUSHED` if subnormal numbers were flushed to
    zero. A value is None if it does not apply: there is no float64 reference, or the operation is
    no product.
    """

    error: float | None = None
    bound: float | None = None
    format: str | None = None
    has_rounded_factors: bool = False
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
        return Accuracy()  # libraries differ in what a failed factorisation returns
    if name == "convolution_backward":  # oneDNN also returns gradients that were not requested
        out = [
            gradient for gradient, is_requested in zip(out, args[10], strict=True) if is_requested
        ]
    results = find_rounded_results(out)
    results = results[:1] if name in ATTENTION_OPERANDS else results
    reference = Float64Reference(operation, args, kwargs, len(results))
    if name in ATTENTION_OPERANDS:
        reference.compute = _attention(operation)
    elif name == "_to_copy" and is_float_or_complex(args[0]):
        reference.compute = _return_input  # the exact result of a conversion is what it converts
    try:
        answer = reference.check_definition(name, out)
        if answer is not None:
            error, roundings = answer
            unit = torch.finfo(args[0].dtype).eps / 2 if is_float_or_complex(args[0]) else 0.0
            return Accuracy(
                error=error, bound=None if roundings is None else SAFETY_FACTOR * roundings * unit
            )
        return _compare_with_reference(name, args, results, reference)
    except RuntimeError:  # a kernel of one device alone, or none for float64
        return Accuracy()


def _compare_with_reference(
    name: str, args: Sequence[Nested], results: list[Tensor], reference: Float64Reference
) -> Accuracy:
    """The error of the worst result, and the number format that explains it."""
    exact = reference()
    sizes = list(map(norm, exact))
    has_same_shapes = [e.shape for e in exact] == [r.shape for r in results]
    if not exact or not has_same_shapes or not all(map(math.isfinite, sizes)):
        return Accuracy()
    unit = max(torch.finfo(result.dtype).eps / 2 for result in results)
    has_same_sizes = [t.numel() for t in reference.float_tensors] == [r.numel() for r in results]
    if has_same_sizes and not any(map(difference_norm, results, exact)):  # such as a copy
        return Accuracy(error=0.0, bound=unit)
    terms = (
        _count_products(name, args)
        if name in PRODUCT_OPERANDS
        else _longest_sums(name, reference, exact)
    )
    growth_factors = SAFETY_FACTOR * np.sqrt(np.maximum(1.0, terms))
    if name in PRODUCT_OPERANDS:
        bounds = growth_factors * _product_perturbations(reference, unit)
    else:
        perturbations = _measure_perturbations(name, reference, exact, unit)
        bounds = growth_factors * (
            perturbations + _one_pass_variance_loss(name, reference, exact, unit)
        )
        if name in SUMS_BY_INDEX:
            bounds[0] += terms[0] * unit * sizes[0]
    # Numbers below the smallest subnormal number of the format underflow. On a unit that flushes
    # subnormal numbers, so do all below the smallest normal one.
    formats = [torch.finfo(result.dtype) for result in results]
    underflow = (
        growth_factors * np.sqrt([e.numel() for e in exact]) * [f.smallest_normal for f in formats]
    )
    bounds = bounds + underflow * [f.eps for f in formats]
    # Numbers beyond the range of the format overflow.
    exact = [
        torch.where(tensor.abs() > finfo.max, tensor * math.inf, tensor)
        for tensor, finfo in zip(exact, formats, strict=True)
    ]
    errors = list(map(difference_norm, results, exact))
    ratios = [
        Accuracy(error=error, bound=bound).ratio
        for error, bound in zip(errors, bounds, strict=True)
    ]
    worst = int(np.argmax(np.array(ratios, float)))  # NaN is the largest
    error = errors[worst]
    bound = float(bounds[worst])
    size = norm(exact[worst]) or 1.0
    if math.isnan(bound):  # the inputs lie next to some for which the operation has no result
        return Accuracy()
    max_bound = float(max(bounds / [norm(e) or 1.0 for e in exact]))
    accuracy = Accuracy(error=error / size, bound=bound / size, max_bound=max_bound)
    factors = [args[index] for index in ROUNDED_OPERANDS.get(name, ())]
    if error > bound and _is_flushed(reference, results[worst], worst, bound + underflow[worst]):
        accuracy.format = FLUSHED
    elif factors and all(factor.dtype == torch.float32 for factor in factors):
        # If a format shorter than float32 was used, the error is at least half of one rounding. If
        # all products have one sign, the sum of n of them hides it best: the error is then at least
        # 2^-12 / sqrt(n) of the result.
        growth_factor = growth_factors[worst] if name in PRODUCT_OPERANDS else SAFETY_FACTOR
        if not error <= max(bound / 2, SAFETY_FACTOR * 2.0**-15 * sizes[worst]) / growth_factor:
            # If factors overflowed the error is NaN; the format that overflows in the same places
            # explains all of it.
            worst_error = math.inf if math.isnan(error) else error
            accuracy.format = _explaining_format(
                ROUNDED_OPERANDS[name], reference, results[worst], worst_error, worst
            )
        if accuracy.format is None:
            accuracy.format = next(filter(None, map(rounded_format, factors)), None)
            accuracy.has_rounded_factors = accuracy.format is not None
    return accuracy


def _return_input(x: Tensor, **_: Nested) -> Tensor:
    return x


# --- error bounds ---------------------------------------------------------------------------------


def _count_products(name: str, args: Sequence[Nested]) -> list[float]:
    """How many products are summed in each element of each result."""
    if name == "convolution":
        weight = args[1]
        transposed = args[6]
        groups = args[8]
        return [weight.numel() / (weight.shape[1] * groups if transposed else weight.shape[0])]
    if name == "convolution_backward":
        gradient = args[0]
        weight = args[2]
        transposed = args[7]
        groups = args[9]
        output_mask = args[10]
        positions = gradient.numel() / gradient.shape[1]
        inputs = weight.numel() / (weight.shape[0] if transposed else weight.shape[1] * groups)
        counts = (inputs, positions, positions)
        return [
            count for count, is_requested in zip(counts, output_mask, strict=True) if is_requested
        ]
    matrix = args[PRODUCT_OPERANDS[name][0]]
    if name == "addbmm":  # sums over the batch as well
        return [matrix.shape[-1] * len(matrix)]
    return [matrix.shape[-1]]


def _longest_sums(name: str, reference: Float64Reference, exact: list[Tensor]) -> list[float]:
    """The most terms summed for one number of each result, for operations without products.

    This is the ratio of the numbers of inputs and results, or what the arguments say if the shapes
    do not show it.
    """
    inputs = reference.float_tensors
    arguments = reference.arguments
    largest_size = max((t.numel() for t in inputs), default=1)
    longest = 1.0
    dims = arguments.get("dim")
    for dim in [dims] if isinstance(dims, int) else dims or ():  # running sums, softmax, transforms
        lengths = [t.shape[dim] for t in inputs if -t.dim() <= dim < t.dim()]
        longest *= max(lengths, default=1)
    if name in SUMS_BY_INDEX:
        longest = (
            min(longest, max_index_repeats(arguments))
            if "dim" in arguments
            else max_index_repeats(arguments)
        )
    elif "norm" in name:
        # The means of a normalisation, one for each group, are among its arguments or results.
        longest = largest_size / min(t.numel() for t in (*inputs, *exact) if t.numel())
    elif "ctc_loss" in name:
        longest = arguments["log_probs"].shape[0]
    elif "linalg" in name or "cdist" in name or "solve" in name:
        longest = max(size for t in inputs for size in t.shape[-2:])
    elif "upsample" in name and "nearest" not in name:
        # The position between two pixels is rounded too.
        longest = max(size for t in (*inputs, *exact) for size in t.shape[2:]) ** 2
        return [longest * max(1.0, largest_size / e.numel()) for e in exact]
    return [max(1.0, longest, largest_size / e.numel()) for e in exact]


def _product_perturbations(reference: Float64Reference, unit: float) -> np.ndarray:
    """The norms of u |A| |B|; times sqrt(n), they bound the error for any order of summation.

    See Higham and Mary 2019 (SIAM J. Sci. Comput. 41(5)).

    Because these are norms, the bound also covers convolutions by Winograd's algorithm (Barabasz et
    al. 2020, ACM TOMS 46(4)) and by the Fourier transform, and complex products by three real ones
    (Higham 1992, SIAM J. Matrix Anal. Appl. 13(3)).
    """
    return unit * np.array([norm(product) for product in reference(torch.abs)])


def _measure_perturbations(
    name: str, reference: Float64Reference, exact: list[Tensor], unit: float
) -> np.ndarray:
    """The norms of the changes if inputs and result are off by one rounding each.

    The roundings have random signs, in two draws, so that a lucky draw does not hide a movement. In
    a third one they have one sign, which sums the absolute values of the terms of a sum: its
    roundings can be as large, because its terms may be added in any order. No number grows above 1,
    since some kernels reject a probability above 1.
    """
    draws = itertools.count()

    def shrink_at_random(x: Tensor) -> Tensor:
        return x * (perturbation_factors(x, next(draws), unit) - unit)

    def lower(x: Tensor) -> Tensor:
        return x * (1 - unit * torch.sgn(x).conj())

    changes = [shrink_at_random, shrink_at_random]
    if torch.Tag.pointwise not in reference.operation.tags:
        changes.append(lower)
    perturbed_results = [reference(change) for change in changes]
    perturbations = [
        math.hypot(*(norm(perturbed - exact_result) for perturbed in perturbed_versions))
        for exact_result, *perturbed_versions in zip(exact, *perturbed_results, strict=True)
    ]
    sizes = list(map(norm, exact))
    if name in ATTENTION_OPERANDS:
        # Averages cancel, their roundings do not; a GPU's quick exponential is 2 ulp off (CUDA
        # guide).
        sizes = [4 * norm(t) for t in reference(torch.abs, (2,))]
    return np.array(perturbations) + unit * np.array(sizes)


def _one_pass_variance_loss(
    name: str, reference: Float64Reference, exact: list[Tensor], unit: float
) -> np.ndarray:
    """The loss of digits if a variance is the mean of squares minus the squared mean.

    oneDNN documents that for its batch normalisation, and compilers generate it for others (Chan,
    Golub, LeVeque 1983, American Statistician 37(3)). The loss is in units of the roundings of a
    sum.
    """
    losses = np.zeros(len(exact))
    if "norm" in name and "backward" not in name and name != "_foreach_norm" and len(exact) > 2:
        x = reference.args[0]
        result, _, reciprocal = exact[:3]  # the result, the means and the reciprocal deviations
        if "batch" in name:
            x = x.transpose(0, 1)
        result = result.transpose(0, 1)
        x, result = (t.reshape(reciprocal.numel(), -1) for t in (x, result))
        # The root mean square in units of the standard deviation.
        steepness = x.square().mean(1).sqrt() * reciprocal.flatten()
        amplification = steepness + steepness.square() / 2
        losses[0] = unit * norm(amplification * torch.linalg.vector_norm(result, dim=1))
        losses[2] = unit * norm(amplification * reciprocal.flatten())
    return losses


# --- which number format --------------------------------------------------------------------------


def _is_flushed(
    reference: Float64Reference, result: Tensor, output_index: int, bound: float
) -> bool:
    """Whether flushing subnormal numbers to zero explains a result.

    The bound includes the loss of these numbers.
    """
    smallest = torch.finfo(result.dtype).smallest_normal
    flushed = reference(lambda x: torch.where(x.abs() < smallest, 0.0, x))[output_index]
    return result.dtype != torch.float16 and difference_norm(result, flushed) <= bound


def _explaining_format(
    factor_positions: Sequence[int],
    reference: Float64Reference,
    result: Tensor,
    error: float,
    output_index: int,
) -> str | None:
    """The format whose rounding of the factors explains the error best, and at least half."""
    is_small = result.numel() <= SMALL_RESULT_SIZE
    best_format = None
    max_remaining = 1 - (MIN_SMALL_RESULT_EXPLAINED_SHARE if is_small else MIN_EXPLAINED_SHARE)
    for format_, mode, result_format in HARDWARE_ROUNDINGS:

        def round_factor(x: Tensor, format_: str = format_, mode: str = mode) -> Tensor:
            return round_factor_to(x.float(), format_, mode).double()

        candidate = reference(round_factor, factor_positions)[output_index]
        if result_format is not None:  # the result overflows beyond the range of its format
            candidate = round_to(candidate.float(), result_format).double()
        remaining = (difference_norm(result, candidate) / error) ** 2
        # TF32 and float16 often round to the same numbers, so a later format has to be clearly
        # better.
        if remaining < (max_remaining if best_format is None else max_remaining / 2):
            best_format = format_
            max_remaining = remaining
    return best_format


def _attention(operation: OpOverload) -> Callable[..., Tensor]:
    """Attention as a formula, for kernels that exist on one device or for float32 only."""

    def compute(*args: Nested, **kwargs: Nested) -> Tensor:
        return attend(named_arguments(operation, args, kwargs))

    return compute
