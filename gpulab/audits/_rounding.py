"""An operation's forward error: its distance from the float64 result, and a rounding bound.

Both are computed from the recorded inputs of the operation, so errors of earlier operations do not
count. The bound allows for sums in any order, and for every algorithm that libraries document for
the operation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpulab._torch_internals import (
    Nested,
    OpOverload,
    has_failed,
    named_arguments,
)
from gpulab.audits._count_sketch import is_float_or_complex, shrinking_factors
from gpulab.audits._float64_calls import (
    RESULTS_BEFORE_FACTORS,
    Float64Reference,
    difference_norm,
    max_index_repeats,
    norm,
    prepare_rounded_results,
)
from gpulab.audits._formulas import attend
from gpulab.guards._reentrancy import without_dispatch_modes
from gpulab.numerics._emulation import MATRIX_PRODUCTS, SUMS_WITH_PRODUCTS, round_factor_to
from gpulab.numerics._formats import round_to, rounded_format

# Higham and Mary's lambda: rounding errors that behave like random numbers almost never exceed the
# bound with this factor.
SAFETY_FACTOR = 4.0
# A number format is reported as the cause of an error if it explains at least this share of the
# error.
MIN_EXPLAINED_SHARE = 0.5
# A result with at most this many numbers is small. One format in four explains half of the error of
# a small result by chance, so a larger share is required.
SMALL_RESULT_SIZE = 32
MIN_SMALL_RESULT_EXPLAINED_SHARE = 0.99
FLUSHED = "float32_ftz"  # float32 with subnormal numbers (below 1.2e-38) flushed to zero

# The positions of the operands that are multiplied with each other. Any other operand, such as a
# bias, is added.
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
# Operations with many consecutive products: perturbing their inputs does not reveal the rounding of
# these products.
RECURRENT = {
    f"{kernel}{suffix}"
    for kernel in ("_cudnn_rnn", "mkldnn_rnn_layer", "miopen_rnn")
    for suffix in ("", "_backward")
}
# Sums whose terms are added one after the other, by a CPU or by a GPU's atomic operations. If the
# terms are equal, their rounding errors have one sign, so a sum of n terms may be off by n
# roundings.
SUMS_BY_INDEX = {
    "embedding_dense_backward",
    "index_add",
    "index_put",
    "_index_put_impl",
    "scatter_add",
}
# The formats in which hardware may compute products of float32 numbers: the format of the factors,
# the mode of rounding, and the format of the result (None for float32).
HARDWARE_ROUNDINGS = (
    ("tf32", "nearest", None),
    ("tf32", "away", None),  # ties are rounded away from zero, which biases sums
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
    """The error of one operation against float64, relative to the norm of the exact result.

    An attribute is None if it does not apply, because there is no float64 reference or because the
    operation is not a product.

    Attributes:
        error: The error of the result with the largest ratio of error to bound.
        bound: The error of this result that rounding explains.
        format: The short number format in which a product was computed, or `FLUSHED` if subnormal
            numbers were flushed to zero by any operation.
        has_rounded_factors: Whether `format` was found in the factors, which had already been
            rounded to it. If not, it was found in the error, so the kernel rounded the factors.
        max_bound: The largest bound of all results.
    """

    error: float | None = None
    bound: float | None = None
    format: str | None = None
    has_rounded_factors: bool = False
    max_bound: float | None = None

    @property
    def ratio(self) -> float | None:
        """The error divided by its bound; None if either is unknown."""
        if self.error is None or self.bound is None:
            return None
        return self.error / self.bound if self.bound else (np.inf if self.error else 0.0)


@without_dispatch_modes
def forward_error(
    operation: OpOverload, name: str, args: Sequence[Nested], kwargs: dict[str, Nested], out: Nested
) -> Accuracy:
    """Compare the result of an operation with the same operation in float64, on the same device.

    Args:
        operation: An overload of `torch.ops.aten`, or a custom operation.
        name: The name without namespace and overload, such as `convolution`.
        args: The positional arguments as they were before the call.
        kwargs: The named arguments as they were before the call.
        out: The returned values, or the written arguments of an operation that returns nothing.
    """
    if name in RECURRENT or has_failed(operation, out):
        return Accuracy()  # libraries differ in what a failed factorisation returns
    requested = requested_results(name, args, out)
    # None for all results. The other results of attention are data for its backward pass.
    n_results = 1 if name in ATTENTION_OPERANDS else RESULTS_BEFORE_FACTORS.get(name)
    results = prepare_rounded_results(requested)[:n_results]
    reference = Float64Reference(operation, args, kwargs, len(results))
    if name in ATTENTION_OPERANDS:
        reference.compute = _attention(operation)
    elif name == "_to_copy" and is_float_or_complex(args[0]):
        reference.compute = _return_input  # the exact result of a conversion is its input
    try:
        answer = reference.check_definition(name, requested)
        if answer is not None:
            error, roundings = answer
            unit = torch.finfo(args[0].dtype).eps / 2 if is_float_or_complex(args[0]) else 0.0
            return Accuracy(
                error=error, bound=None if roundings is None else SAFETY_FACTOR * roundings * unit
            )
        return _compare_with_reference(name, args, results, reference)
    except RuntimeError:  # there is no kernel for float64, or none on this device
        return Accuracy()


def _compare_with_reference(
    name: str, args: Sequence[Nested], results: list[Tensor], reference: Float64Reference
) -> Accuracy:
    """Compute the error of the worst result, and find the number format that explains it."""
    exact = reference()
    sizes = list(map(norm, exact))
    has_same_shapes = [e.shape for e in exact] == [r.shape for r in results]
    if not exact or not has_same_shapes or not all(map(math.isfinite, sizes)):
        return Accuracy()
    unit = max(torch.finfo(result.dtype).eps / 2 for result in results)
    has_same_sizes = [t.numel() for t in reference.float_tensors] == [r.numel() for r in results]
    # An operation that moves numbers without rounding, such as a copy, has no error.
    distances = list(map(difference_norm, results, exact))
    if has_same_sizes and not any(distances):
        return Accuracy(error=0.0, bound=unit)
    terms = count_terms(name, args, reference, exact)
    growth_factors = SAFETY_FACTOR * np.sqrt(np.maximum(1.0, terms))
    rounding_bounds = growth_factors * _rounding_effects(name, reference, exact, sizes, unit)
    if name in SUMS_BY_INDEX:
        rounding_bounds[0] += terms[0] * unit * sizes[0]
    # Numbers below the smallest subnormal number of the format underflow. On a unit that flushes
    # subnormal numbers, so do all below the smallest normal one.
    formats = [torch.finfo(result.dtype) for result in results]
    flush_bounds = (
        growth_factors * np.sqrt([e.numel() for e in exact]) * [f.smallest_normal for f in formats]
    )
    underflow_bounds = flush_bounds * [f.eps for f in formats]
    bounds = rounding_bounds + underflow_bounds
    # Numbers beyond the range of the format overflow. There are none if the norm is in the range.
    may_overflow = any(size > finfo.max for size, finfo in zip(sizes, formats, strict=True))
    expected = _overflow(exact, formats) if may_overflow else exact
    errors = list(map(difference_norm, results, expected)) if may_overflow else distances
    ratios = [
        Accuracy(error=error, bound=bound).ratio
        for error, bound in zip(errors, bounds, strict=True)
    ]
    worst = int(np.argmax(np.array(ratios, float)))  # NaN is the largest
    error = errors[worst]
    bound = float(bounds[worst])
    size = norm(expected[worst]) or 1.0
    if math.isnan(bound):  # a perturbed input lies outside the domain of the operation
        return Accuracy()
    max_bound = float(max(bounds / [norm(e) or 1.0 for e in expected]))
    accuracy = Accuracy(error=error / size, bound=bound / size, max_bound=max_bound)
    factors = [args[index] for index in ROUNDED_OPERANDS.get(name, ())]
    flush_bound = bound + flush_bounds[worst]
    if error > bound and _is_flushed(reference, results[worst], worst, flush_bound):
        accuracy.format = FLUSHED
    elif factors and all(factor.dtype == torch.float32 for factor in factors):
        # A format is searched for only if the error is large enough. In a format shorter than
        # float32, the error is at least half of one rounding. It is smallest for a sum of n
        # products of one sign, for which it is at least 2^-12 / sqrt(n) of the result.
        growth_factor = growth_factors[worst] if name in PRODUCT_OPERANDS else SAFETY_FACTOR
        least_error = max(bound / 2, SAFETY_FACTOR * 2.0**-15 * sizes[worst]) / growth_factor
        if not error <= least_error:  # above it, or NaN
            # If factors overflowed, the error is NaN. A format that overflows in the same places
            # explains the whole error, so finite remainders must count as zero: divide by infinity.
            worst_error = math.inf if math.isnan(error) else error
            accuracy.format = _explaining_format(
                ROUNDED_OPERANDS[name], reference, results[worst], worst_error, worst
            )
        if accuracy.format is None:
            accuracy.format = next(filter(None, map(rounded_format, factors)), None)
            accuracy.has_rounded_factors = accuracy.format is not None
    return accuracy


def _overflow(exact: list[Tensor], formats: list[torch.finfo]) -> list[Tensor]:
    """Replace the numbers beyond the range of each result's format by infinity."""
    return [
        torch.where(tensor.abs() > finfo.max, tensor * math.inf, tensor)
        for tensor, finfo in zip(exact, formats, strict=True)
    ]


def _return_input(x: Tensor, **_: Nested) -> Tensor:
    return x


def requested_results(name: str, args: Sequence[Nested], out: Nested) -> Nested:
    """Return the results that a call asked for.

    Only the results of `convolution_backward` may be more than these: oneDNN also computes
    gradients that the call's output mask leaves out.
    """
    if name != "convolution_backward":
        return out
    output_mask = args[10]
    return [
        gradient for gradient, is_requested in zip(out, output_mask, strict=True) if is_requested
    ]


# --- error bounds ---------------------------------------------------------------------------------


def count_terms(
    name: str, args: Sequence[Nested], reference: Float64Reference, exact: list[Tensor]
) -> list[float]:
    """Count or estimate the terms that are summed for one element of each result."""
    if name in PRODUCT_OPERANDS:
        return _count_products(name, args)
    return _longest_sums(name, reference, exact)


def _count_products(name: str, args: Sequence[Nested]) -> list[float]:
    """Count the products that are summed in each element of each result."""
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
    """Estimate the largest number of terms that are summed for one element of each result.

    It is used for operations without products. The estimate is the ratio of the sizes of inputs and
    results, or a number from the arguments if the shapes do not determine it.
    """
    inputs = reference.float_tensors
    largest_size = max((t.numel() for t in inputs), default=1)
    size_ratios = [max(1.0, largest_size / e.numel()) for e in exact]
    if "upsample" in name and "nearest" not in name:
        # The position between two pixels is rounded too.
        n_positions = max(size for t in (*inputs, *exact) for size in t.shape[2:]) ** 2
        return [n_positions * ratio for ratio in size_ratios]
    if "norm" in name:
        # The means of a normalisation, one for each group, are among its arguments or results.
        longest = largest_size / min(t.numel() for t in (*inputs, *exact) if t.numel())
    else:
        longest = _longest_sum(name, inputs, reference.arguments)
    return [max(longest, ratio) for ratio in size_ratios]


def _longest_sum(name: str, inputs: list[Tensor], arguments: dict[str, Nested]) -> float:
    """Estimate the largest number of summed terms from the arguments of an operation."""
    if name in SUMS_BY_INDEX:
        n_writes = max_index_repeats(arguments)
        return min(_summed_length(inputs, arguments), n_writes) if "dim" in arguments else n_writes
    if "ctc_loss" in name:
        return arguments["log_probs"].shape[0]
    if "linalg" in name or "cdist" in name or "solve" in name:
        return max(size for t in inputs for size in t.shape[-2:])
    return _summed_length(inputs, arguments)


def _summed_length(inputs: list[Tensor], arguments: dict[str, Nested]) -> float:
    """Return the number of elements along the dimensions of running sums, softmax or transforms.

    These are the dimensions in the argument `dim`; without it, the number is 1.
    """
    dims = arguments.get("dim")
    length = 1.0
    for dim in [dims] if isinstance(dims, int) else dims or ():
        sizes = [t.shape[dim] for t in inputs if -t.dim() <= dim < t.dim()]
        length *= max(sizes, default=1)
    return length


def _rounding_effects(
    name: str, reference: Float64Reference, exact: list[Tensor], sizes: list[float], unit: float
) -> np.ndarray:
    """Return how much single roundings change each result, without the growth of errors in sums."""
    if name in PRODUCT_OPERANDS:
        return _product_perturbations(reference, unit)
    perturbations = _measure_perturbations(name, reference, exact, sizes, unit)
    return perturbations + _one_pass_variance_loss(name, reference, exact, unit)


def _product_perturbations(reference: Float64Reference, unit: float) -> np.ndarray:
    """Compute the norms of u |A| |B|, where u is the unit roundoff, for each result.

    Multiplied by sqrt(n), they bound the error for any order of summation (Higham and Mary 2019,
    SIAM J. Sci. Comput. 41(5)).

    Because these are norms, the bound also covers convolutions by Winograd's algorithm (Barabasz et
    al. 2020, ACM TOMS 46(4)) and by the Fourier transform, and complex products by three real ones
    (Higham 1992, SIAM J. Matrix Anal. Appl. 13(3)).
    """
    return unit * np.array([norm(product) for product in reference(torch.abs)])


def _measure_perturbations(
    name: str, reference: Float64Reference, exact: list[Tensor], sizes: list[float], unit: float
) -> np.ndarray:
    """Measure how much each result changes if inputs and result are off by one rounding each.

    The inputs are perturbed three times. Two perturbations have random signs, because the effects
    of a single one may cancel by chance. The third has one sign, so that the effects on the terms
    of a sum add up; it is left out for pointwise operations.

    All perturbations reduce the absolute values of numbers, because some kernels reject a
    probability above 1. `sizes` are the norms of the exact results.
    """
    draws = itertools.count()

    def shrink_at_random(x: Tensor) -> Tensor:
        return x * shrinking_factors(x, next(draws), unit)

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
    if name in ATTENTION_OPERANDS:
        # The terms of an average may cancel, but their rounding errors do not. So the size is that
        # of the average of absolute values. The factor 4 allows for the fast exponential of a GPU,
        # whose error is 2 ulp (CUDA guide).
        sizes = [4 * norm(t) for t in reference(torch.abs, (2,))]
    return np.array(perturbations) + unit * np.array(sizes)


def _one_pass_variance_loss(
    name: str, reference: Float64Reference, exact: list[Tensor], unit: float
) -> np.ndarray:
    """Bound the errors of normalisations that compute a variance in one pass over the data.

    One pass means that the variance is the mean of squares minus the squared mean, a difference
    that cancels (Chan, Golub, LeVeque 1983, American Statistician 37(3)). oneDNN documents this
    algorithm for its batch normalisation, and compilers generate it for other normalisations. The
    errors are those for one rounding in each sum. They are zero for all other operations.
    """
    losses = np.zeros(len(exact))
    if "norm" in name and "backward" not in name and name != "_foreach_norm" and len(exact) > 2:
        x = reference.args[0]
        result, _, reciprocal = exact[:3]  # the result, the means and the reciprocal deviations
        if "batch" in name:
            x = x.transpose(0, 1)
        result = result.transpose(0, 1)
        x, result = (t.reshape(reciprocal.numel(), -1) for t in (x, result))
        # The root mean square divided by the standard deviation.
        steepness = x.square().mean(1).sqrt() * reciprocal.flatten()
        amplification = steepness + steepness.square() / 2
        losses[0] = unit * norm(amplification * torch.linalg.vector_norm(result, dim=1))
        losses[2] = unit * norm(amplification * reciprocal.flatten())
    return losses


# --- which number format --------------------------------------------------------------------------


def _is_flushed(
    reference: Float64Reference, result: Tensor, output_index: int, bound: float
) -> bool:
    """Return whether flushing subnormal numbers to zero explains a result.

    The inputs of the reference are flushed. `bound` allows for flushed intermediate results.
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
    """Find the format whose rounding of the factors explains the error best; None if none does.

    A format must explain at least half of the squared error, and more of it for a small result.
    """
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
    """Return attention as a formula, for kernels without float64 or for only one device."""

    def compute(*args: Nested, **kwargs: Nested) -> Tensor:
        return attend(named_arguments(operation, args, kwargs))

    return compute
