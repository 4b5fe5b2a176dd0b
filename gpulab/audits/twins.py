"""An operation in float64: the same call on the same arguments, which is what its result is held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gpulab.audits.count_sketch import WITH_FLOAT64, leaves, mapped, rounds, where_float64_is

SMALLEST = torch.tensor(1, dtype=torch.int32).view(torch.float32)  # the smallest subnormal number


class Twin:
    """An operation and its arguments in float64, to be called on these as they are or changed.

    It returns so many of the results as are compared. `compute` may be another function of the same arguments.
    """

    def __init__(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], results: int) -> None:
        self.operation, self.results, self.compute = operation, results, operation
        self.args, self.kwargs = mapped(in_float64, (list(args), kwargs))
        self.in_place = writes(operation)

    @cached_property
    def named(self) -> dict[str, Any]:
        """All arguments by name."""
        return named_arguments(self.operation, self.args, self.kwargs)

    @property
    def numbers(self) -> list[Tensor]:
        """The tensors of numbers that rounding can touch."""
        return [t for t in leaves((self.args, self.kwargs)) if rounds(t)]

    def __call__(
        self, change: Callable[[Tensor], Tensor] = lambda x: x, positions: Sequence[int] | None = None
    ) -> list[Tensor]:
        """The results of arguments that are changed first, all or those at some places."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) and rounds(value) else value

        args, kwargs = (self.args, self.kwargs)
        if self.in_place:  # what the operation overwrites is still needed
            args, kwargs = mapped(lambda value: value.clone() if isinstance(value, Tensor) else value, (args, kwargs))
        args = [mapped(changed, arg) if positions is None or i in positions else arg for i, arg in enumerate(args)]
        out = self.compute(*args, **(mapped(changed, kwargs) if positions is None else kwargs))
        if gave_up(self.operation, out):
            raise RuntimeError("a factorisation failed")
        return rounded_results(outcome(self.operation, args, out))[: self.results]


def in_float64(value: Any) -> Any:
    """A tensor of real or complex numbers in float64, any other as it is; both on a device that has float64."""
    if isinstance(value, torch.device):
        return value if value.type in WITH_FLOAT64 else torch.device("cpu")
    if not isinstance(value, Tensor):
        return value
    value = where_float64_is(value.detach())
    if value.is_complex():
        return value.to(torch.complex128)
    if value.dtype == torch.float32 and not SMALLEST.double():  # a cast takes subnormal numbers for zero then, too
        bits = value.view(torch.int32)
        sizes = (bits & 0x7FFFFF).double() * 2.0**-149
        return torch.where(bits & 0x7F800000 == 0, torch.where(bits < 0, -sizes, sizes), value.double())
    return value.double() if value.is_floating_point() else value


def writes(operation: Any) -> bool:
    """Whether an operation writes to its arguments; a batch normalisation does, and its schema does not say so."""
    return operation._schema.is_mutable or "batch_norm" in operation._schema.name


def outcome(operation: Any, args: Sequence[Any], out: Any) -> Any:
    """What an operation returned; what it wrote to, for one that returns nothing, as optimizers' do."""
    if out is not None:
        return out[:1] if operation._schema.name == "aten::_ctc_loss" else out  # the rest has gaps
    named = zip(operation._schema.arguments, args, strict=False)
    return [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]


def named_arguments(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of its schema, defaults included."""
    defaults = {argument.name: argument.default_value for argument in operation._schema.arguments}
    placed = {argument.name: value for argument, value in zip(operation._schema.arguments, args, strict=False)}
    return defaults | placed | kwargs


def rounded_results(out: Any) -> list[Tensor]:
    """The tensors that an operation returned whose numbers are rounded."""
    return [where_float64_is(t.detach()) for t in leaves(out) if rounds(t) and t.numel()]


def gave_up(operation: Any, out: Any) -> bool:
    """Whether a routine of linear algebra says that it failed: its result named `info` is not zero."""
    names = [value.name for value in operation._schema.returns]
    return "info" in names and bool(out[names.index("info")].any())


def norm(tensor: Tensor) -> float:
    """The Euclidean norm of all numbers, computed in float64."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=wide))


def distance(result: Tensor, exact: Tensor) -> float:
    """The norm of the difference; where both are infinite with one sign, or both NaN, nothing."""
    gap = exact - result
    apart = norm(gap)
    if not math.isnan(apart):
        return apart
    same = (result == exact) | (result.isnan() & exact.isnan())
    return norm(torch.where(same, 0.0, gap))
