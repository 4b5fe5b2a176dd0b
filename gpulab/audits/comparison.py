"""Two traces of one step side by side: which operations stand for each other, and how far their values are apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gpulab.audits.count_sketch import distance
from gpulab.audits.tolerances import (
    CARRIED,
    INHERITED,
    OF_DATA,
    ROUNDOFF,
    SAME_BITS,
    SAME_INPUTS,
    SAME_STEP,
    SAME_VALUE,
    SHORT,
    SHORT_SIZE,
    UNEXPLAINED,
)
from gpulab.audits.trace_files import TENSOR
from gpulab.audits.tracer import RESULT, Operation
from gpulab.audits.traces import TWINS, Trace, aligned
from gpulab.errors import DataError
from gpulab.settings import Setting

# Arguments that say how to compute, where to put it or for whom, and not what.
HOW = {
    "allow_tf32",
    "benchmark",
    "compute_log_sumexp",
    "cudnn_enabled",
    "deterministic",
    "generator",
    "grad_input_mask",
    "half_to_float",
    "memory_format",
    "non_blocking",
    "output_mask",
    "pin_memory",
    "return_debug_mask",
}
SYNONYMS = {"epsilon": "eps", "exponential_average_factor": "momentum", "train": "training"}


@dataclass(frozen=True)
class Pair:
    """An operation under both settings, or under one alone, and the same one in float64."""

    a: Operation | None
    b: Operation | None
    exact: Operation | None

    @property
    def one(self) -> Operation:
        """Either of the two, for what they have in common."""
        return self.a or self.b  # type: ignore[return-value]


@dataclass(frozen=True)
class Stretch:
    """The operations of one setting alone that lead to two values, the nearest first.

    `before` holds the operations of both that these began with: the first's, the number of its output that was used,
    and how far the two made that apart.
    """

    alone_a: list[Operation]
    alone_b: list[Operation]
    before: list[tuple[Operation, int, float]]


class Comparison:
    """Two traces of one step: their operations in `pairs`, who made which value, and how far values are apart.

    `first_nan` holds for each trace the operation that made the step's first NaN, or None; `nan_causes` by the
    operation that had lost precision before it, the one in which that became NaN.
    """

    def __init__(self, a: Trace, b: Trace) -> None:
        self.a, self.b = a, b
        self.pairs = list(_paired(a, b))
        self.trace_of = {id(op): trace for trace in (a, b) for op in trace.operations}
        self.position = {id(op): position for trace in (a, b) for position, op in enumerate(trace.operations)}
        self.matched = [(pair.a, pair.b) for pair in self.pairs if pair.a and pair.b]
        self.partners = {id(op): pair for pair in self.matched for op in pair}
        self.makers = _makers(a), _makers(b)
        self.sources = _makers(a, passed_on=True), _makers(b, passed_on=True)
        self.calls = Counter(map(_call, a.operations)), Counter(map(_call, b.operations))
        # Where the step makes other values each time, or computed with wrong memory, they may differ.
        unsteady = any(_makes_other_values(op) for trace in (a, b) for op in trace.operations)
        self.values_may_differ = bool(a.overwritten or b.overwritten or unsteady)
        births = [_first_nan(trace, makers) for trace, makers in zip((a, b), self.makers, strict=True)]
        self.first_nan = [born for born, _ in births]
        self.nan_causes = {id(cause): born for born, cause in births if cause is not None and born is not None}

    @cached_property
    def short_setting(self) -> bool:
        """Whether one of the settings asks for a short number format."""
        return any(Setting.parse(trace.setting).precision in SHORT for trace in (self.a, self.b))

    def other_trace(self, op: Operation) -> Trace:
        """The trace that an operation is not of."""
        return self.b if self.trace_of[id(op)] is self.a else self.a

    def gap(self, value_a: str, value_b: str) -> float:
        """How far two values are apart, relative to the first; to the second where the first is nothing."""
        if value_a == value_b:
            return 0.0
        x, y = self.a.sketches[value_a], self.b.sketches[value_b]
        return distance(y, x) if x.any() else distance(x, y)

    def gaps(self, values_a: Iterable[str], values_b: Iterable[str]) -> list[float]:
        """How far values are apart, one by one."""
        return [self.gap(x, y) for x, y in zip(values_a, values_b, strict=False)]

    def result_gaps(self, a: Operation, b: Operation) -> list[float]:
        """How far apart two made what they compute; twins do not share what they keep for the backward pass."""
        gaps = self.gaps(a.outputs, b.outputs)
        return gaps[:1] if a.name != b.name else gaps

    def input_gap(self, a: Operation, b: Operation) -> float:
        """How far apart the inputs of two are at most."""
        return max(map(or_infinite, self.gaps(a.inputs, b.inputs)), default=0.0)

    def same_bits(self, a: Operation, b: Operation) -> bool:
        """Whether two made the same; large tensors of two devices are known by their sketches."""
        return all(gap < SAME_BITS for gap in self.gaps(a.outputs, b.outputs))

    def same_results(self, a: Operation, b: Operation) -> bool:
        """Whether two made the same of the same, but for rounding; of other inputs, whether they compute nothing."""
        if a.random or b.random:
            return self.same_bits(a, b)
        of_inputs = self.input_gap(a, b)
        computes = a.bound is not None and b.bound is not None
        if of_inputs > SAME_INPUTS:
            return not computes
        results = self.gaps((*a.outputs, *a.changed), (*b.outputs, *b.changed))
        apart = max(map(or_infinite, results[:1] if a.name != b.name else results))
        if not computes:
            return apart <= max(SAME_VALUE, 4 * of_inputs)
        return apart <= self._by_rounding(a, b, of_inputs)

    def _by_rounding(self, a: Operation, b: Operation, of_inputs: float) -> float:
        """How far apart two right results may be, by the bounds of their kernels, of inputs that are so far apart."""
        bounds, errors = (a.bound or 0.0) + (b.bound or 0.0), (a.error or 0.0) + (b.error or 0.0)
        return bounds * max(1.0, of_inputs / ROUNDOFF) + errors

    def tolerance(self, a: Operation, b: Operation, number: int) -> float:
        """How far two right values, the outputs of this number, may be apart, relative to the first."""
        least, unknown = (SHORT_SIZE, SHORT_SIZE) if self.is_short(a, b) else (8 * ROUNDOFF, UNEXPLAINED)
        if a.carried is None or b.carried is None or number >= min(len(a.carried), len(b.carried)):
            before = largest([0.0, *self.gaps(a.inputs, b.inputs)])
            return max(unknown, INHERITED * before)
        values = self.a.sketches[a.outputs[number]], self.b.sketches[b.outputs[number]]
        size = next((size for size in map(float, map(np.linalg.norm, values)) if size), math.inf)  # as `gap` has it
        return max(least, CARRIED * (a.carried[number] + b.carried[number]) / size)

    def is_short(self, a: Operation, b: Operation) -> bool:
        """Whether one of the two computes in a short number format, and the other does not; or a setting asks it."""
        return self.short_setting or (a.dtype != b.dtype and (a.dtype in SHORT or b.dtype in SHORT))

    def in_doubt(self, op: Operation) -> bool:
        """Whether its module called it more often under one setting: which call stands for which is a guess."""
        return self.calls[0][_call(op)] != self.calls[1][_call(op)]

    def maker(self, side: int, value: str) -> Operation | None:
        """The operation that first made a value, if one did."""
        return next(iter(self.makers[side].get(value, ())), None)

    def common(self, x: str, y: str, user: Operation) -> tuple[Operation, Operation] | None:
        """The pair of operations that made two values before they were used, if one did."""
        made_b = {id(op) for op in self.sources[1].get(y, ())}
        pairs = (
            self.partners.get(id(op))
            for op in self.sources[0].get(x, ())
            if self.position[id(op)] < self.position[id(user)]
        )
        return next((pair for pair in pairs if pair and id(pair[1]) in made_b), None)

    def stretch(self, x: str, y: str) -> Stretch:
        """What ran under one setting alone and led to two values that should be one."""
        before: list[tuple[Operation, int, float]] = []
        alone: list[list[Operation]] = []
        for value, makers in zip((x, y), self.makers, strict=True):
            of_this: dict[int, Operation] = {}
            front = [value]
            for name in front:  # which grows
                op = next(iter(makers.get(name, ())), None)
                if op is not None and id(op) in self.partners:
                    a, b = self.partners[id(op)]
                    gaps = self.gaps(a.outputs, b.outputs)
                    used = [number for number, output in enumerate(op.outputs) if output == name and number < len(gaps)]
                    number = used[0] if used else 0
                    before.append((a, number, gaps[number]))
                elif op is not None and id(op) not in of_this:
                    of_this[id(op)] = op
                    front += op.inputs
            alone.append(list(of_this.values()))
        alone_a, alone_b = alone
        return Stretch(alone_a, alone_b, before)


def _makes_other_values(op: Operation) -> bool:
    """Whether an operation does not repeat itself, by more than rounding explains."""
    if op.repeats is not False:
        return False
    return op.anew or op.spread is None or op.spread > (op.bound or SAME_VALUE)


def or_infinite(gap: float) -> float:
    """A distance, or infinity where there is none."""
    return math.inf if math.isnan(gap) else gap


def _or_less(gap: float) -> float:
    return -1.0 if math.isnan(gap) else gap


def largest(gaps: list[float]) -> float:
    """The largest of some distances; NaN only where there is no other."""
    return max(gaps, key=_or_less)


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


def differing(a: Operation, b: Operation) -> dict[str, tuple[Any, Any]]:
    """The arguments that two calls disagree on: name, and both values.

    Tensors are not compared, nor arguments that say how to compute something and not what, such as a memory format or
    the gradients that are asked for, nor numbers that differ by a rounding. Two kernels of different names are compared
    in the arguments that they share; of those of one name, which versions of torch may give more arguments, a default
    is not held against nothing.
    """

    def named(values: dict[str, Any]) -> dict[str, Any]:
        return {SYNONYMS.get(name, name): value for name, value in values.items()}

    all_a, all_b = named(a.defaults | a.arguments), named(b.defaults | b.arguments)
    names = all_a.keys() & all_b.keys()
    kernels = a.name != b.name  # each of which may fill in what it was not given
    if names and not kernels:
        names |= a.arguments.keys() | b.arguments.keys()
    common_arguments = {
        name: (all_a.get(name, _Nothing()), all_b.get(name, _Nothing())) for name in sorted(names - HOW)
    }
    return {name: values for name, values in common_arguments.items() if not _agree(*values, kernels)}


def _agree(a: Any, b: Any, kernels: bool) -> bool:
    if repr(a) == repr(b) or TENSOR in repr((a, b)) or (kernels and None in (a, b)):
        return True
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return numbers and math.isclose(a, b, rel_tol=OF_DATA)


def check_same_step(a: Trace, b: Trace) -> None:
    """Raise `DataError` for traces of steps that are not one and the same."""
    pairs = aligned(a.reference, b.reference)
    common = [(first, second) for first, second in pairs if first is not None and second is not None]
    if 2 * len(common) < max(len(a.reference), len(b.reference)):
        raise DataError(
            f"the traces are of different steps: {len(common)} operations in common, of {len(a.reference)} and "
            f"{len(b.reference)}"
        )
    if any(op.repeats is False for trace in (a, b) for op in trace.operations):
        return  # a step that does not repeat itself may well begin differently
    for first, second in common:
        if first.phase != "forward" or first.random:
            continue
        name, where = first.name, first.module or first.line or "the step"
        if first.shape != second.shape:
            raise DataError(
                f"the traces are of different data: {name} in {where} makes {first.shape} in one and {second.shape} in "
                f"the other"
            )
        for argument, (value_a, value_b) in differing(first, second).items():
            if distance(b.sketches[second.outputs[0]], a.sketches[first.outputs[0]]) > SAME_STEP:
                raise DataError(
                    f"the traces are of different steps: even in float64, {name} in {where} is called with "
                    f"{argument}={value_a!r} in one and {argument}={value_b!r} in the other"
                )
        gaps = [distance(b.sketches[y], a.sketches[x]) for x, y in zip(first.inputs, second.inputs, strict=False)]
        apart = next((gap for gap in gaps if gap > SAME_STEP), None)
        if apart is not None:
            raise DataError(
                f"the traces are of different data or weights: {name} in {where} begins with values {apart:.1e} apart "
                f"in float64; use the same seeds and files on both machines"
            )


def _paired(a: Trace, b: Trace) -> Iterator[Pair]:
    """Operations of the two that stand for each other, each with the one in float64."""
    calls_a, calls_b = (Counter(map(_call, ops)) for ops in (a.operations, b.operations))
    exact: dict[int, Operation] = {}
    for trace in (a, b):
        for op, twin in aligned(trace.operations, a.reference):
            if op and twin and op.shape == twin.shape:
                exact[id(op)] = twin
    for op_a, op_b in aligned(a.operations, b.operations):
        # Where a module calls something more often under one setting, which call stands for which is a guess.
        guessed = op_a is not None and calls_a[_call(op_a)] != calls_b[_call(op_a)]
        if op_a and op_b and guessed and (op_a.shape != op_b.shape or _rearrange_other_values(a, op_a, b, op_b)):
            yield Pair(op_a, None, exact.get(id(op_a)))
            yield Pair(None, op_b, exact.get(id(op_b)))
        else:
            yield Pair(op_a, op_b, exact.get(id(op_a)) or exact.get(id(op_b)))


def _rearrange_other_values(a: Trace, op_a: Operation, b: Trace, op_b: Operation) -> bool:
    """Whether two operations compute nothing, as views, and were given what no rounding makes of each other."""
    if op_a.bound is not None or op_b.bound is not None or op_a.random or op_b.random:
        return False
    values = zip(op_a.inputs, op_b.inputs, strict=False)
    return any(x != y and not distance(b.sketches[y], a.sketches[x]) <= UNEXPLAINED for x, y in values)


def _call(op: Operation) -> tuple[str, str, str]:
    return op.phase, op.module, TWINS.get(op.name, op.name)


def _makers(trace: Trace, passed_on: bool = False) -> dict[str, list[Operation]]:
    """Which operations computed each value, in order; also those that passed on what they were given."""
    makers: dict[str, list[Operation]] = {}
    for op in trace.operations:
        for value in (*op.outputs, *op.changed):
            if op.phase != RESULT and (passed_on or value not in op.inputs):
                makers.setdefault(value, []).append(op)
    return makers


def _first_nan(trace: Trace, makers: dict[str, list[Operation]]) -> tuple[Operation | None, Operation | None]:
    """The operation that made the step's first NaN, and the nearest one before it that had lost precision.

    The way back is along the values; a NaN in what was given to the step is nobody's.
    """
    bad = {value for op in trace.operations if op.nans for value in op.outputs}
    born = next((op for op in trace.operations if op.nans and op.inputs and not bad & set(op.inputs)), None)
    front = [] if born is None else [born]
    visited = set(map(id, front))
    for op in front:  # which grows
        if op.format or op.dtype in SHORT:
            return born, op
        before = [makers[value][0] for value in op.inputs if value in makers]
        front += {id(maker): maker for maker in before if id(maker) not in visited}.values()
        visited |= set(map(id, before))
    return born, None
