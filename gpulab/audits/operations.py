"""What a trace holds of one operation of torch: what it was called with, what it made, and how exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

RESULT = "result"  # the phase of what is no operation: loss, gradients, and what was updated
TENSOR = "Tensor"  # what stands for one among an operation's arguments


@dataclass(kw_only=True)
class Accuracy:
    """One operation's error against float64, relative to the norm of the exact result, of the result that is worst.

    `bound` is the error that rounding explains, in the same unit; `loosest` that of the result that may be furthest
    off. `format` is the short number format that a product was computed in: by the error, when its kernel rounded the
    factors, or by the factors, when they had been `rounded_before`. Of any operation it is `FLUSHED` when subnormal
    numbers were taken for zero.
    None where there is nothing to say: no twin in float64, no product.
    """

    error: float | None = None
    bound: float | None = None
    format: str | None = None
    rounded_before: bool = False
    loosest: float | None = None

    @property
    def ratio(self) -> float | None:
        """The error in units of what rounding explains."""
        if self.error is None or self.bound is None:
            return None
        return self.error / self.bound if self.bound else (np.inf if self.error else 0.0)


@dataclass
class Operation(Accuracy):
    """What one operation did, and how exactly.

    `name` is torch's, without device or overload; `module` the path of the module that called it
    (for the backward pass: that called what is differentiated); `line` the line of the user's code;
    `inputs`, `outputs` and `changed` (inputs that it wrote to) name values of the trace. `arguments`
    are those of the call by the names of torch's schema, defaults included, as JSON has them (a tensor
    is "Tensor"). `repeats` says whether the operation gave the same bits when it was
    called again at once, and in the whole step done again as well. `nans`
    says whether there is a NaN in what it returned. `spread` is how far the results of two executions were apart,
    relative to the first, where they were not the same. `anew` says that it was given values that no operation
    made and that were others when the step was done again.

    In the phase `result` it is none, but what the step is for: the `loss`, a `gradient`, what was `updated`.
    """

    name: str
    phase: str
    module: str
    line: str
    inputs: list[str]
    outputs: list[str]
    shape: list[int]
    dtype: str
    arguments: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    random: bool = False
    repeats: bool | None = None
    nans: bool = False
    anew: bool = False
    spread: float | None = None
    __eq__, __hash__ = object.__eq__, object.__hash__  # each call is an operation of its own

    @property
    def values(self) -> list[str]:
        """The names of all values that it met."""
        return [*self.inputs, *self.outputs, *self.changed]


def as_json(argument: Any) -> Any:
    """An operation's argument as JSON: `TENSOR` for a tensor, None for what a setting may change or JSON lacks."""
    if isinstance(argument, Tensor):
        return TENSOR
    if isinstance(argument, list | tuple):
        return [as_json(item) for item in argument]
    return argument if isinstance(argument, bool | int | float | str) else None
