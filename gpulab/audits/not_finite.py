"""NaN and infinity among the results of a step: which operation made them, and of what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpulab.audits.count_sketch import LARGEST, SKETCH
from gpulab.audits.operations import RESULT, Operation
from gpulab.audits.traces import Trace

NAN, INFINITY = "NaN", "infinity"


@dataclass(frozen=True)
class NotFinite:
    """Where a trace's NaN or infinity comes from.

    Attributes:
        what: `NAN` or `INFINITY`.
        op: The operation that made it of numbers; if none did, the first that was given it.
        made: Whether the operation made it.
        infinity: The operation that made the infinity of which it made NaN; None where that was put in or is none.
        results: The results that are not finite: the loss first, then gradients and what was updated.
    """

    what: str
    op: Operation
    made: bool
    infinity: Operation | None
    results: list[Operation]


def find_not_finite(trace: Trace) -> NotFinite | None:
    """The origin of what is not finite in a trace's loss, or else in its gradients; None where all are finite."""
    nans = {value for op in trace.operations if op.nans for value in op.outputs}
    nans |= {value for value, sketch in trace.sketches.items() if np.isnan(sketch).any()}
    infinities = {value for value, sketch in trace.sketches.items() if is_infinite(sketch)}
    results = [op for op in trace.operations if op.phase == RESULT and (nans | infinities) & set(op.outputs)]
    if not results:
        return None
    results.sort(key=lambda op: op.name in ("gradient", "updated"))
    losses = [op for op in results if op.name not in ("gradient", "updated")]
    values = {value for op in losses or results for value in op.outputs}
    what, bad = (NAN, nans) if nans & values else (INFINITY, infinities)
    origin, made = _origin(trace, bad)
    infinite = infinities & set(origin.inputs) if made and what == NAN else set()
    makers = [op for op in trace.operations if op.phase != RESULT and infinite & set(op.outputs)]
    infinity = next((op for op in makers if not infinities & set(op.inputs)), None)
    return NotFinite(what, origin, made, infinity, results)


def is_infinite(sketch: np.ndarray) -> bool:
    """Whether a value has infinity in it, which counts as `LARGEST` in the sketch of a large tensor."""
    if sketch.size < SKETCH:
        return bool(np.isinf(sketch).any())
    return bool((np.abs(np.nan_to_num(sketch, posinf=LARGEST, neginf=-LARGEST)) >= LARGEST / 2).any())


def _origin(trace: Trace, bad: set[str]) -> tuple[Operation, bool]:
    """The first operation that made one of these values of others; without one, the first that has one."""
    for op in trace.operations:
        if op.phase != RESULT and bad & set(op.outputs) and not bad & set(op.inputs):
            return op, True
    return next(op for op in trace.operations if bad & set(op.values)), False
