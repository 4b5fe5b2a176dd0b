"""Two traces of one step side by side: which operations stand for each other, and how far their values are apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gpulab.audits import tolerances as tol
from gpulab.audits.count_sketch import LARGEST, SKETCH, distance
from gpulab.audits.traces import RESULT, TENSOR, Json, Operation, Trace, aligned, call_of
from gpulab.errors import DataError
from gpulab.settings import Setting

# Arguments that say how to compute, where to put it or for whom, and not what.
_HOW = """
    allow_tf32 benchmark compute_log_sumexp cudnn_enabled deterministic generator grad_input_mask half_to_float
    memory_format non_blocking output_mask pin_memory return_debug_mask
"""
HOW = frozenset(_HOW.split())
SYNONYMS = {"epsilon": "eps", "exponential_average_factor": "momentum", "train": "training"}

NAN, INFINITY = "NaN", "infinity"
Values = tuple[str, str]  # the names of a value under the first setting, and of what stands for it under the second


@dataclass(frozen=True)
class Pair:
    """An operation under both settings, or under one alone."""

    a: Operation | None
    b: Operation | None

    @property
    def one(self) -> Operation:
        """Either of the two, for what they have in common."""
        return self.a or self.b  # type: ignore[return-value]

    @property
    def operations(self) -> list[Operation]:
        """Those of the two that ran."""
        return [op for op in (self.a, self.b) if op is not None]


@dataclass(frozen=True)
class Origin:
    """Where two values that should be one come from.

    `alone` are the operations that ran under one setting only, those of the second one first, and the nearest first.
    `before` are the pairs of operations that these began with, by the one of the first setting, with their values.
    """

    alone: list[Operation]
    before: list[tuple[Operation, Values]]


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


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two traces of one step: their operations in `pairs`, who made which value, and how far values are apart."""

    a: Trace
    b: Trace

    @cached_property
    def pairs(self) -> list[Pair]:
        """Operations of the two that stand for each other."""
        return [Pair(a, b) for a, b in aligned(self.a.operations, self.b.operations)]

    @cached_property
    def matched(self) -> list[tuple[Operation, Operation]]:
        """The operations that ran under both settings, in order."""
        return [(pair.a, pair.b) for pair in self.pairs if pair.a and pair.b]

    @cached_property
    def results(self) -> list[tuple[Operation, Operation]]:
        """What the step is for, under both settings."""
        return [(a, b) for a, b in self.matched if a.phase == RESULT]

    @cached_property
    def partners(self) -> dict[Operation, tuple[Operation, Operation]]:
        """The pair that a matched operation belongs to."""
        return {op: pair for pair in self.matched for op in pair}

    @cached_property
    def position(self) -> dict[Operation, int]:
        """The place of each operation in its trace."""
        return {op: place for trace in (self.a, self.b) for place, op in enumerate(trace.operations)}

    @cached_property
    def sources(self) -> tuple[dict[str, list[Operation]], dict[str, list[Operation]]]:
        """For each trace, the operations that a value came out of, in order."""
        sources: tuple[dict[str, list[Operation]], dict[str, list[Operation]]] = {}, {}
        for trace, of_value in zip((self.a, self.b), sources, strict=True):
            for op in trace.operations:
                for value in (*op.outputs, *op.changed):
                    if op.phase != RESULT:
                        of_value.setdefault(value, []).append(op)
        return sources

    @cached_property
    def not_finite(self) -> dict[int, NotFinite]:
        """By the number of the trace, where the NaN or infinity in its results comes from."""
        origins = {number: find_not_finite(trace) for number, trace in enumerate((self.a, self.b))}
        return {number: origin for number, origin in origins.items() if origin}

    @cached_property
    def short_setting(self) -> bool:
        """Whether one of the settings asks for a short number format."""
        return any(Setting.parse(trace.setting).precision in tol.SHORT for trace in (self.a, self.b))

    @cached_property
    def _calls(self) -> list[Counter[tuple[str, str, str]]]:
        return [Counter(map(call_of, trace.operations)) for trace in (self.a, self.b)]

    def pair_of(self, op: Operation) -> tuple[Operation, ...]:
        """The operations that stand for each other and of which this is one; or it alone."""
        return self.partners.get(op, (op,))

    def in_doubt(self, op: Operation) -> bool:
        """Whether its module called it more often under one setting: which call stands for which is a guess."""
        return self._calls[0][call_of(op)] != self._calls[1][call_of(op)]

    def trace_of(self, op: Operation) -> Trace:
        """The trace that an operation belongs to."""
        place = self.position[op]
        return self.a if place < len(self.a.operations) and self.a.operations[place] is op else self.b

    def other_title(self, op: Operation) -> str:
        """What the other setting is called."""
        return (self.b if self.trace_of(op) is self.a else self.a).title

    # --- how far values are apart ---------------------------------------------------------------------------

    def gap(self, values: Values) -> float:
        """How far two values are apart, relative to the first, or to the second where the first is nothing.

        Infinitely where they have no distance.
        """
        if values[0] == values[1]:
            return 0.0
        x, y = self.a.sketches[values[0]], self.b.sketches[values[1]]
        gap = distance(y, x) if x.any() else distance(x, y)
        return math.inf if math.isnan(gap) else gap

    def gaps(self, values_a: Iterable[str], values_b: Iterable[str]) -> list[float]:
        """How far values are apart, one by one."""
        return list(map(self.gap, zip(values_a, values_b, strict=False)))

    def cast_error(self, op: Operation) -> float:
        """How far a conversion to a shorter format moved its values, relative to them, if only one setting has it.

        It is 0 for any other operation. The error against float64 does not show it, because the float64 reference of a
        conversion is rounded in the same way.
        """
        is_conversion = op.name == "_to_copy" and op.dtype in tol.SHORT
        if op in self.partners or not (is_conversion and op.inputs and op.outputs):
            return 0.0
        sketches = self.trace_of(op).sketches
        moved = distance(sketches[op.outputs[0]], sketches[op.inputs[0]])
        return 0.0 if math.isnan(moved) else moved

    def same_bits(self, a: Operation, b: Operation) -> bool:
        """Whether two made the same; large tensors of two devices are known by their sketches."""
        return all(gap < tol.SAME_BITS for gap in self.gaps(a.outputs, b.outputs))

    def tolerance(self, a: Operation, b: Operation) -> float:
        """How far two right results may be apart, relative to the first, that were made of nearly the same.

        Each may be off by what rounding explains, and move as much again for every rounding that the inputs differ by.
        """
        if self.is_short(a, b):
            return tol.SHORT_SIZE
        of_inputs = max(self.gaps(a.inputs, b.inputs), default=0.0)
        bounds = sum(op.loosest or op.bound or 0.0 for op in (a, b))
        return max(tol.UNEXPLAINED, tol.ROOM * bounds * max(1.0, of_inputs / tol.ROUNDOFF))

    def is_short(self, a: Operation, b: Operation) -> bool:
        """Whether one of the two computes in a short number format, and the other does not; or a setting asks it."""
        return self.short_setting or (a.dtype != b.dtype and (a.dtype in tol.SHORT or b.dtype in tol.SHORT))

    def inputs(self, a: Operation, b: Operation) -> list[Values]:
        """What two were given in each other's place; kernels of two names take it in another order."""
        if a.name == b.name:
            return list(zip(a.inputs, b.inputs, strict=False))
        pairs = [(x, y, self.common(x, y, a)) for x in a.inputs for y in b.inputs]
        return [(x, y) for x, y, pair in pairs if pair and _place(pair[0], x) == _place(pair[1], y)]

    # --- where values come from -----------------------------------------------------------------------------

    def maker(self, side: int, value: str) -> Operation | None:
        """The operation that first made a value, if one did; not one that passes on what it was given."""
        return next((op for op in self.sources[side].get(value, ()) if value not in op.inputs), None)

    def common(self, x: str, y: str, user: Operation) -> tuple[Operation, Operation] | None:
        """The pair of operations that two values came out of before they were used, if there is one."""
        from_b = set(self.sources[1].get(y, ()))
        pairs = (self.partners.get(op) for op in self.sources[0].get(x, ()) if self.position[op] < self.position[user])
        return next((pair for pair in pairs if pair and pair[1] in from_b), None)

    def origin(self, x: str, y: str, user: Operation) -> Origin:
        """What led to two values that should be one: a pair of operations, or what ran under one setting alone."""
        if common := self.common(x, y, user):
            return Origin([], [(common[0], (x, y))])
        origin = Origin([], [])
        for side, front in ((1, [y]), (0, [x])):
            for value in front:  # which grows
                op = self.maker(side, value)
                if op in self.partners:
                    a, b = self.partners[op]
                    results = list(zip(a.outputs, b.outputs, strict=False))
                    origin.before.append((a, next((both for both in results if both[side] == value), results[0])))
                elif op is not None and op not in origin.alone:
                    origin.alone.append(op)
                    front += op.inputs
        return origin


# --- what differs ---------------------------------------------------------------------------------------------


def _place(op: Operation, value: str) -> int:
    """Which of the results of an operation a value is."""
    return [*op.outputs, *op.changed].index(value)


def differing(a: Operation, b: Operation) -> dict[str, tuple[Json, Json]]:
    """The arguments that two calls disagree on: name, and both values.

    Of those that both have: other kernels, and other versions of torch, may have more. Tensors are not compared, nor
    arguments that say how to compute something and not what, such as a memory format or the gradients that are
    asked for.
    """
    of_a, of_b = ({SYNONYMS.get(name, name): value for name, value in op.arguments.items()} for op in (a, b))
    common = {name: (of_a[name], of_b[name]) for name in sorted((of_a.keys() & of_b.keys()) - HOW)}
    # Each kernel may fill in what it was not given.
    told = {name: both for name, both in common.items() if a.name == b.name or None not in both}
    return {name: both for name, both in told.items() if repr(both[0]) != repr(both[1]) and TENSOR not in repr(both)}


def check_same_step(a: Trace, b: Trace) -> None:
    """Raise `DataError` for traces of steps that are not one and the same."""
    common = [(first, second) for first, second in aligned(a.reference, b.reference) if first and second]
    if 2 * len(common) < max(len(a.reference), len(b.reference)):
        raise DataError(
            f"the traces are of different steps: {len(common)} operations in common, of {len(a.reference)} and "
            f"{len(b.reference)}"
        )
    if any(op.repeats is False for trace in (a, b) for op in trace.operations):
        return  # a step that does not repeat itself may well begin differently
    for first, second in common:
        values = zip((*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=False)
        apart = max((distance(b.sketches[y], a.sketches[x]) for x, y in values), default=0.0)
        if first.random and apart > tol.SAME_STEP:
            return  # another version of torch may draw other numbers from one seed
        if first.phase == "forward" and (apart > tol.SAME_STEP or first.shape != second.shape):
            raise DataError(
                f"the traces are of different data or weights, or of different steps: {first.name} in "
                f"{first.module or first.line or 'the step'} has values {apart:.1e} apart in float64, of the shapes "
                f"{first.shape} and {second.shape}; use the same code, seeds and files on both machines"
            )


# --- NaN and infinity -----------------------------------------------------------------------------------------


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
    """The first operation that made a bad value from good inputs, and True; or the first that has one, and False."""
    for op in trace.operations:
        if op.phase != RESULT and bad & set(op.outputs) and not bad & set(op.inputs):
            return op, True
    return next(op for op in trace.operations if bad & set(op.values)), False
