"""An operation beside its exact twin: the same inputs in float64, and how far rounding may lead.

An error is measured against the operation itself in float64, from the very inputs that it got, so
that what went wrong earlier is not held against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gpulab.numerics.emulation import rounded_factor
from gpulab.numerics.formats import round_to, rounded_format

SAFETY = 4.0  # Higham and Mary's lambda: beyond it, rounding errors that behave as random are all but impossible
EXPLAINED = 0.5  # the share of an error that a number format must account for to be named as its cause
FEW, FEW_EXPLAINED = 32, 0.99  # of so few numbers' errors, one format in four explains half by chance

# The operands that are multiplied with each other, by position. What else there is (a bias) is added.
PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addmv": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
}
ATTENTION = ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")
FACTORS = PRODUCTS | {f"_scaled_dot_product_{kind}": (0, 1, 2) for kind in ATTENTION}
# Eigenvectors are right with either sign: two right answers may be far apart.
AMBIGUOUS = {"_linalg_eigh", "_linalg_svd", "linalg_eig"}
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
class Examined:
    """One operation's error against float64, relative to the size of the exact result.

    `bound` is the error that rounding explains, in the same unit. `format` is the short number format
    that a product was computed in: by the error, when its kernel rounded the factors, or by the factors,
    when they had been `rounded_before`. None where there is nothing to say: no twin in float64, no product.
    """

    error: float | None = None
    bound: float | None = None
    format: str | None = None
    rounded_before: bool = False


def examine(
    operation: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> Examined:
    """Compare what an operation returned with its twin in float64, run on the CPU.

    `args` and `kwargs` are those of the call, before it changed any of them; `name` is the operation's
    bare name, such as `convolution`.
    """
    if name in AMBIGUOUS:
        return Examined()
    if name == "convolution_backward":  # oneDNN computes gradients that nobody asked for, and returns them
        out = [gradient for gradient, asked in zip(out, args[10], strict=True) if asked]
    made = _floating(out)
    exact_args, exact_kwargs = _exact(list(args), kwargs)
    if name in FACTORS and name not in PRODUCTS:
        operation, made = _attention(operation), made[:1]
    try:
        twin = operation(*exact_args, **exact_kwargs)
    except (RuntimeError, NotImplementedError):
        return Examined()  # a kernel of one device alone, or none for float64
    if _gave_up(operation, out) or _gave_up(operation, twin):
        return Examined()  # what a factorisation leaves when it fails is each library's own
    exact = _floating(twin)
    if len(exact) != len(made) or any(e.shape != m.shape for e, m in zip(exact, made, strict=True)):
        return Examined()
    if not exact or not all(math.isfinite(_norm(e)) for e in exact):
        return Examined()
    again = _Again(operation, name, exact_args, exact_kwargs)
    factors = [args[place] for place in FACTORS.get(name, ())]
    try:
        bounds = _product_bounds(again, args, made) if name in PRODUCTS else _other_bounds(again, exact, made)
    except (RuntimeError, NotImplementedError):
        return Examined()
    exact = [_overflowing(e, m.dtype) for e, m in zip(exact, made, strict=True)]
    results = [(_distance(m, e), SAFETY * _norm(b), _norm(e)) for m, e, b in zip(made, exact, bounds, strict=True)]
    worst = max(range(len(results)), key=lambda place: _ratio(results[place][0], results[place][1]))
    error, bound, size = results[worst]
    if math.isnan(bound):  # next to inputs for which there is no result
        return Examined()
    found = before = None
    if factors and all(factor.dtype == torch.float32 for factor in factors):
        # Where a format shorter than float32 was used, the error is at least half of one rounding.
        suspicious = (
            0.5 * bound / (SAFETY * math.sqrt(max(1, _inner(name, args)[worst]))) if name in PRODUCTS else bound
        )
        if not error <= suspicious:
            # Where factors overflowed the error is NaN, and the format that overflows there leaves none of it.
            found = _explaining_format(again, made[worst], math.inf if math.isnan(error) else error, worst)
        before = next(filter(None, map(rounded_format, factors)), None)
    scale = size or 1.0
    return Examined(error / scale, bound / scale, found or before, found is None and before is not None)


def _ratio(error: float, bound: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / bound if bound else (math.inf if error else 0.0)


class _Again:
    """Runs the twin once more, on inputs that are changed first."""

    def __init__(self, operation: Callable[..., Any], name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.operation, self.name, self.args, self.kwargs = operation, name, args, kwargs

    def __call__(self, change: Callable[[Tensor], Tensor], only: Sequence[int] | None = None) -> list[Tensor]:
        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value

        args = [
            tree_map(changed, value) if only is None or place in only else value
            for place, value in enumerate(self.args)
        ]
        return _floating(self.operation(*args, **self.kwargs))


def _product_bounds(again: _Again, args: Sequence[Any], made: list[Tensor]) -> list[Tensor]:
    """sqrt(n) u |A| |B|, the bound of Higham and Mary 2019 (SIAM J. Sci. Comput. 41(5)) without its factor."""
    unit = max(_roundoff(tensor.dtype) for tensor in made)
    lost = max(_underflow(tensor.dtype) for tensor in made)
    sizes = again(torch.abs)
    return [math.sqrt(n) * (unit * size + lost) for n, size in zip(_inner(again.name, args), sizes, strict=True)]


def _other_bounds(again: _Again, exact: list[Tensor], made: list[Tensor]) -> list[Tensor]:
    """How far the result moves when every input is off by one rounding, and one more for the result.

    Summed over n terms, sqrt(n) as much. Two draws, so that one lucky sign does not hide a movement.
    """
    unit = max(_roundoff(tensor.dtype) for tensor in made)
    lost = max(_underflow(tensor.dtype) for tensor in made)
    generator = torch.Generator().manual_seed(0)

    def nudged(x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8).to(x.dtype)
        return x * (1 + unit * (2 * signs - 1))

    moves = [[(n - e).abs() for n, e in zip(again(nudged), exact, strict=True)] for _ in range(2)]
    given = [t for t in tree_flatten(again.args)[0] if isinstance(t, Tensor)]
    inputs = max((t.numel() for t in given), default=1)
    roots = [max(1.0, math.sqrt(inputs / max(1, e.numel()))) for e in exact]
    if "upsample" in again.name and "nearest" not in again.name:  # the place between two pixels is rounded too
        roots = [root * max(size for t in (*given, *exact) for size in t.shape[2:]) for root in roots]
    # Sums over n terms of one sign go wrong by sqrt(n) roundings of the sum, wherever the terms cancel.
    return [
        root * (torch.maximum(first, second) + unit * e.abs() + lost)
        for root, first, second, e in zip(roots, *moves, exact, strict=True)
    ]


def _inner(name: str, args: Sequence[Any]) -> list[float]:
    """How many products are summed in each element of each result."""
    if name == "convolution":
        weight, transposed, groups = args[1], args[6], args[8]
        return [weight.numel() / (weight.shape[1] * groups if transposed else weight.shape[0])]
    if name == "convolution_backward":
        gradient, weight, transposed, groups, wanted = args[0], args[2], args[7], args[9], args[10]
        summed = gradient.numel() / gradient.shape[1]
        inputs = weight.numel() / (weight.shape[0] if transposed else weight.shape[1] * groups)
        inner = [inputs, summed, summed]
        return [n for n, asked in zip(inner, wanted, strict=True) if asked]
    return [args[PRODUCTS[name][0]].shape[-1]]


def _explaining_format(again: _Again, made: Tensor, error: float, place: int) -> str | None:
    """The format whose rounding of the factors explains the error best, if any explains half of it."""
    best, least = None, 1 - (EXPLAINED if made.numel() > FEW else FEW_EXPLAINED)
    for format_, mode, result in ROUNDINGS:

        def rounded(x: Tensor, format_: str = format_, mode: str = mode) -> Tensor:
            return rounded_factor(x.float(), format_, mode).double()

        candidate = again(rounded, FACTORS[again.name])[place]
        if result is not None:  # it overflows where the format ends
            candidate = round_to(candidate.float(), result).double()
        left = (_distance(made, candidate) / error) ** 2
        if left < (least if best is None else least / 2):  # TF32 and float16 often round alike
            best, least = format_, left
    return best


def _attention(operation: Any) -> Callable[..., Tensor]:
    """Scaled dot-product attention as written down, for kernels that exist on one device or for float32 alone."""
    names = [argument.name for argument in operation._schema.arguments]

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        named = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = args[:3]
        mask, causal = named.get("attn_mask", named.get("attn_bias")), named.get("is_causal", False)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=named.get("scale")
        )

    return attend


def _exact(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    def upcast(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("cpu", torch.float64 if value.is_floating_point() else None, copy=True)

    leaves, form = tree_flatten((args, kwargs))
    exact_args, exact_kwargs = tree_unflatten([upcast(leaf) for leaf in leaves], form)
    return exact_args, exact_kwargs


def _floating(out: Any) -> list[Tensor]:
    return [
        t.detach().to("cpu")
        for t in tree_flatten(out)[0]
        if isinstance(t, Tensor) and t.is_floating_point() and t.numel()
    ]


def _gave_up(operation: Any, out: Any) -> bool:
    """Whether a routine of linear algebra says that it failed: its result named `info` is not zero."""
    schema = getattr(operation, "_schema", None)
    names = [value.name for value in schema.returns] if schema is not None else []
    return "info" in names and bool(out[names.index("info")].any())


def _distance(made: Tensor, exact: Tensor) -> float:
    """The norm of the difference; where both are infinite with one sign, or both NaN, nothing."""
    gap = made.double() - exact
    same = (made.double() == exact) | (made.isnan() & exact.isnan())
    return _norm(torch.where(same, torch.zeros_like(gap), gap))


def _overflowing(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Infinite where the format has no number as large."""
    return torch.where(exact.abs() > torch.finfo(dtype).max, exact * math.inf, exact)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _underflow(dtype: torch.dtype) -> float:
    """What may be lost where numbers are too small: all that is subnormal; float16 has few numbers else."""
    format_ = torch.finfo(dtype)
    return format_.smallest_normal * (format_.eps if dtype == torch.float16 else 1)
