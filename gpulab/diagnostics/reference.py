"""An operation's forward error: its result beside the same operation in float64, and how far rounding may lead.

The inputs of both are the very ones that the operation got, so that what went wrong earlier is not held against it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpulab.diagnostics.count_sketch import WITH_FLOAT64, factors, leaves, mapped, where_float64_is
from gpulab.numerics.emulation import MATRIX_PRODUCTS, SUMS_WITH_PRODUCTS, rounded_factor
from gpulab.numerics.formats import round_to, rounded_format

SAFETY = 4.0  # Higham and Mary's lambda: beyond it, rounding errors that behave as random are all but impossible
EXPLAINED = 0.5  # the share of an error that a number format must account for to be named as its cause
FEW, FEW_EXPLAINED = 32, 0.99  # of so few numbers' errors, one format in four explains half by chance

# The operands that are multiplied with each other, by position. What else there is (a bias) is added.
PRODUCTS: dict[str, tuple[int, ...]] = dict.fromkeys(MATRIX_PRODUCTS, (0, 1))
PRODUCTS |= dict.fromkeys(SUMS_WITH_PRODUCTS, (1, 2))
PRODUCTS |= {"convolution": (0, 1), "convolution_backward": (0, 1, 2)}
ATTENTION: dict[str, tuple[int, ...]] = {
    f"_scaled_dot_product_{kernel}": (0, 1, 2)
    for kernel in ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")
}
FACTORS: dict[str, tuple[int, ...]] = PRODUCTS | ATTENTION
# Eigenvectors are right with either sign, and those of equal values in any basis: right is what the definition says.
NOT_UNIQUE = {"_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_qr"}
# Many products one after the other, whose rounding no perturbation of the inputs shows.
RECURRENT = {
    f"{kernel}{way}" for kernel in ("_cudnn_rnn", "mkldnn_rnn_layer", "miopen_rnn") for way in ("", "_backward")
}
# The formats that hardware multiplies in when it is asked for float32, how it gets there, and the result's format.
ROUNDINGS = (
    ("tf32", "nearest", None),
    ("tf32", "truncate", None),
    ("bfloat16", "nearest", None),
    ("float16", "nearest", None),
    ("bfloat16", "nearest", "bfloat16"),
    ("float16", "nearest", "float16"),
    ("float8_e4m3fn", "nearest", None),
    ("float8_e5m2", "nearest", None),
)


@dataclass(frozen=True)
class ForwardError:
    """One operation's error against float64, relative to the norm of the exact result.

    `bound` is the error that rounding explains, in the same unit. `format` is the short number format
    that a product was computed in: by the error, when its kernel rounded the factors, or by the factors,
    when they had been `rounded_before`. None where there is nothing to say: no twin in float64, no product.
    """

    error: float | None = None
    bound: float | None = None
    format: str | None = None
    rounded_before: bool = False


def forward_error(
    operation: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> ForwardError:
    """Compare what an operation returned with the same operation in float64, on the same device.

    Args:
        operation: an overload of `torch.ops.aten`, or a custom one.
        name: its bare name, such as `convolution`.
        args: positional arguments of the call, before it changed any of them.
        kwargs: named arguments of the call.
        out: what it returned; or wrote, where it returns nothing.
    """
    unknown = ForwardError()
    if name in RECURRENT:
        return unknown
    if name in NOT_UNIQUE:
        return unknown if _gave_up(operation, out) else _against_its_definition(name, args, kwargs, out)
    if name == "convolution_backward":  # oneDNN computes gradients that nobody asked for, and returns them
        out = [gradient for gradient, needed in zip(out, args[10], strict=True) if needed]
    results = _floating(out)
    if name in ATTENTION:
        operation, results = _attention(operation), results[:1]
    exact_args, exact_kwargs = mapped(in_float64, (list(args), kwargs))
    in_place = writes(operation)

    def again(change: Callable[[Tensor], Tensor], places: Sequence[int] | None = None) -> list[Tensor]:
        """The results in float64 of arguments that are changed first, all or those at some places."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) and value.is_floating_point() else copied(value)

        def copied(value: Any) -> Any:  # what an operation in place overwrites is still needed
            return value.clone() if in_place and isinstance(value, Tensor) else value

        moved = [
            mapped(changed if places is None or place in places else copied, value)
            for place, value in enumerate(exact_args)
        ]
        twin = operation(*moved, **mapped(copied if places is not None else changed, exact_kwargs))
        if _gave_up(operation, twin):
            raise RuntimeError("a factorisation failed")
        return _floating(outcome(operation, moved, twin))

    try:
        if _gave_up(operation, out):
            return unknown  # what a factorisation leaves when it fails is each library's own
        exact = again(Tensor.clone if in_place else lambda value: value)
        if not exact or [e.shape for e in exact] != [r.shape for r in results]:
            return unknown
        sizes = list(map(_norm, exact))
        if not all(map(math.isfinite, sizes)):
            return unknown
        unit = max(torch.finfo(result.dtype).eps / 2 for result in results)
        lost = max(map(_underflow, results))
        if not any(map(_distance, results, exact)):  # such as copies: the rest would say nothing
            return ForwardError(0.0, unit)
        if name in PRODUCTS:
            # sqrt(n) u |A| |B|, the bound of Higham and Mary 2019 (SIAM J. Sci. Comput. 41(5)) without its factor.
            terms = _terms(name, args)
            bounds = [
                math.sqrt(n) * (unit * _norm(products) + lost * math.sqrt(products.numel()))
                for n, products in zip(terms, again(torch.abs), strict=True)
            ]
        else:
            bounds = _perturbation_bounds(name, again, exact_args, exact, sizes, unit, lost)
    except RuntimeError:  # a kernel of one device alone, or none for float64
        return unknown
    exact = [
        _overflowing(e, result.dtype) if not size <= torch.finfo(result.dtype).max else e
        for e, size, result in zip(exact, sizes, results, strict=True)
    ]
    errors = [(_distance(r, e), SAFETY * b) for r, e, b in zip(results, exact, bounds, strict=True)]
    worst = max(range(len(errors)), key=lambda place: _ratio(*errors[place]))
    error, bound = errors[worst]
    if math.isnan(bound):  # next to inputs for which there is no result
        return unknown
    by_kernel = before = None
    factors = [args[place] for place in FACTORS.get(name, ())]
    if factors and all(factor.dtype == torch.float32 for factor in factors):
        # Where a format shorter than float32 was used, the error is at least half of one rounding; and where all
        # products have one sign, which the sum of n of them hides best, 2^-12 / sqrt(n) of the result.
        half = 0.5 * bound / (SAFETY * math.sqrt(max(1, terms[worst]))) if name in PRODUCTS else bound
        shortest = 2.0**-15 / math.sqrt(max(1, terms[worst]) if name in PRODUCTS else 1) * sizes[worst]
        if not error <= max(half, shortest):
            # Where factors overflowed the error is NaN, and the format that overflows there leaves none of it.
            worst_error = math.inf if math.isnan(error) else error
            by_kernel = _explaining_format(FACTORS[name], again, results[worst], worst_error, worst)
        before = next(filter(None, map(rounded_format, factors)), None)
    size = _norm(exact[worst]) or 1.0
    return ForwardError(error / size, bound / size, by_kernel or before, by_kernel is None and before is not None)


def _against_its_definition(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Sequence[Tensor]
) -> ForwardError:
    """The error of a factorisation: how far its product is from the matrix, and its bases from orthogonal ones.

    Of an n × n matrix roundings lead to about n units in the last place of its size (Higham 2002, Accuracy and
    Stability of Numerical Algorithms, ch. 19): these algorithms are backward stable.
    """
    matrix, *parts = (in_float64(part) for part in (args[0], *out))
    if matrix.is_complex() or not all(part.numel() and bool(part.isfinite().all()) for part in (matrix, *parts)):
        return ForwardError()
    bases = parts[:1]
    if name == "linalg_qr":
        product = parts[0] @ parts[1]
    elif name == "_linalg_svd":
        rank = parts[1].shape[-1]
        product = parts[0][..., :rank] * parts[1].unsqueeze(-2) @ parts[2][..., :rank, :]
        bases = [parts[0], parts[2].mT]
    else:
        values, vectors = (part.to(torch.complex128) if part.is_complex() else part for part in parts)
        if name == "_linalg_eigh":  # which reads one triangle
            upper = "U" in (*args[1:2], kwargs.get("UPLO"))
            matrix = matrix.triu() + matrix.triu(1).mT if upper else matrix.tril() + matrix.tril(-1).mT
        matrix, product = matrix.to(vectors.dtype) @ vectors, vectors * values.unsqueeze(-2)
        bases = [vectors] if name == "_linalg_eigh" else []
    errors = [_norm((matrix - product).abs()) / (_norm(matrix.abs()) or 1.0)]
    for basis in bases:
        unity = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
        errors.append(_norm(basis.mT @ basis - unity) / math.sqrt(basis[..., 0, :].numel()))
    unit = torch.finfo(args[0].dtype).eps / 2
    return ForwardError(max(errors), SAFETY * max(args[0].shape[-2:]) * unit)


def _ratio(error: float, bound: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / bound if bound else (math.inf if error else 0.0)


def _terms(name: str, args: Sequence[Any]) -> list[float]:
    """How many products are summed in each element of each result."""
    if name == "convolution":
        weight, transposed, groups = args[1], args[6], args[8]
        return [weight.numel() / (weight.shape[1] * groups if transposed else weight.shape[0])]
    if name == "convolution_backward":
        gradient, weight, transposed, groups, needed = args[0], args[2], args[7], args[9], args[10]
        places = gradient.numel() / gradient.shape[1]
        inputs = weight.numel() / (weight.shape[0] if transposed else weight.shape[1] * groups)
        return [n for n, is_needed in zip((inputs, places, places), needed, strict=True) if is_needed]
    first = args[PRODUCTS[name][0]]
    return [first.shape[-1] * (len(first) if name == "addbmm" else 1)]  # which sums over the batch as well


def _perturbation_bounds(
    name: str,
    again: Callable[..., list[Tensor]],
    args: Sequence[Any],
    exact: list[Tensor],
    sizes: list[float],
    unit: float,
    lost: float,
) -> list[float]:
    """How far the result moves when every input is off by one rounding, and one more for the result.

    Summed over n terms, sqrt(n) as much. Two draws, so that one lucky sign does not hide a movement. Norms.
    """
    draws = itertools.count()

    def nudged(x: Tensor) -> Tensor:
        return x * factors(x, next(draws), unit)

    moves = [[_norm(n - e) for n, e in zip(again(nudged), exact, strict=True)] for _ in range(2)]
    inputs = leaves(args)
    most = max((t.numel() for t in inputs), default=1)
    roots = [max(1.0, math.sqrt(most / max(1, e.numel()))) for e in exact]
    if "upsample" in name and "nearest" not in name:  # the place between two pixels is rounded too
        roots = [root * max(size for t in (*inputs, *exact) for size in t.shape[2:]) for root in roots]
    if (
        name in ATTENTION
    ):  # averages cancel, their roundings do not; a GPU's quick exponential is 2 ulp off (CUDA guide)
        sizes = [4 * _norm(t) for t in again(torch.abs, (2,))]
    # Sums over n terms of one sign go wrong by sqrt(n) roundings of the sum, wherever the terms cancel.
    return [
        root * (math.hypot(first, second) + unit * size + lost * math.sqrt(e.numel()))
        for root, first, second, size, e in zip(roots, *moves, sizes, exact, strict=True)
    ]


def _explaining_format(
    places: Sequence[int], again: Callable[..., list[Tensor]], result: Tensor, error: float, place: int
) -> str | None:
    """The format whose rounding of the factors explains the error best, if any explains half of it."""
    best, least = None, 1 - (EXPLAINED if result.numel() > FEW else FEW_EXPLAINED)
    for format_, mode, of_result in ROUNDINGS:

        def rounded(x: Tensor, format_: str = format_, mode: str = mode) -> Tensor:
            return rounded_factor(x.float(), format_, mode).double()

        candidate = again(rounded, places)[place]
        if of_result is not None:  # it overflows where the format ends
            candidate = round_to(candidate.float(), of_result).double()
        left = (_distance(result, candidate) / error) ** 2
        if left < (least if best is None else least / 2):  # TF32 and float16 often round alike
            best, least = format_, left
    return best


def _attention(operation: Any) -> Callable[..., Tensor]:
    """Scaled dot-product attention as written down, for kernels that exist on one device or for float32 alone."""
    names = [argument.name for argument in operation._schema.arguments]

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        named = dict(zip(names, args, strict=False)) | kwargs
        mask, causal = named.get("attn_mask", named.get("attn_bias")), named.get("is_causal", False)
        query, key, value = args[:3]
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=named.get("scale")
        )

    return attend


def writes(operation: Any) -> bool:
    """Whether an operation writes to its arguments; a batch normalisation does, and its schema does not say so."""
    schema = getattr(operation, "_schema", None)
    return schema is not None and (schema.is_mutable or "batch_norm" in schema.name)


def outcome(operation: Any, args: Sequence[Any], out: Any) -> Any:
    """What an operation returned; what it wrote to, for one that returns nothing, as optimizers' do."""
    if out is not None:
        return out
    named = zip(operation._schema.arguments, args, strict=False)
    return [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]


def in_float64(value: Any) -> Any:
    """A tensor of real numbers in float64, any other as it is; both on a device that has float64."""
    if isinstance(value, torch.device):
        return value if value.type in WITH_FLOAT64 else torch.device("cpu")
    if not isinstance(value, Tensor):
        return value
    value = where_float64_is(value.detach())
    return value.double() if value.is_floating_point() else value


def _floating(out: Any) -> list[Tensor]:
    return [where_float64_is(t.detach()) for t in leaves(out) if t.is_floating_point() and t.numel()]


def _gave_up(operation: Any, out: Any) -> bool:
    """Whether a routine of linear algebra says that it failed: its result named `info` is not zero."""
    schema = getattr(operation, "_schema", None)
    names = [value.name for value in schema.returns] if schema is not None else []
    return "info" in names and bool(out[names.index("info")].any())


def _distance(result: Tensor, exact: Tensor) -> float:
    """The norm of the difference; where both are infinite with one sign, or both NaN, nothing."""
    gap = exact - result
    distance = _norm(gap)
    if not math.isnan(distance):
        return distance
    same = (result == exact) | (result.isnan() & exact.isnan())
    return _norm(torch.where(same, 0.0, gap))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _overflowing(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Infinite where the format has no number as large."""
    return torch.where(exact.abs() > torch.finfo(dtype).max, exact * math.inf, exact)


def _underflow(result: Tensor) -> float:
    """What may be lost where numbers are too small: all that is subnormal; float16 has few numbers else."""
    format_ = torch.finfo(result.dtype)
    return format_.smallest_normal * (format_.eps if result.dtype == torch.float16 else 1)
