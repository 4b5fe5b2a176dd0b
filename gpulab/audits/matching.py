"""Match the values of two executions in float64: equal, equal in another order, or parts of each other.

Nothing is compared but float64 references, so that two values which are one coincide to some ten digits, whatever the
precision of the executions. References without rounding are independent of the order and the names of the operations
that led to them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from gpulab.audits import tolerances as tol
from gpulab.audits.graphs import Graph
from gpulab.audits.values import Value

Tolerance = Callable[[Value], float]
FEWEST_OF_A_PART = 4  # numbers; fewer may be found anywhere by chance
LARGEST_TOLERANCE = 1e6
REACH = 12  # operations beyond what has a counterpart, among whose values parts are looked for


def same(x: Value, y: Value, tolerance: Tolerance) -> bool:
    """Whether two values are one in float64, number by number in the order of memory."""
    if x.reference is None or y.reference is None or x.reference.shape != y.reference.shape or x.count != y.count:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        apart = x.reference - y.reference
        unequal = ~((x.reference == y.reference) | (np.isnan(x.reference) & np.isnan(y.reference)))
        size_x, size_y = np.linalg.norm(x.reference[unequal]), np.linalg.norm(y.reference[unequal])
        distance = np.linalg.norm(apart[unequal])
    if not unequal.any():
        return True
    if not np.isfinite(distance):
        return False
    allowed = max(size_x * tolerance(x), size_y * tolerance(y))
    return bool(distance <= allowed)


class Matches:
    """For each value of one execution the values of the other one that are the same, or have the same numbers.

    Args:
        graphs: Of the two executions.
        tolerance: How far two references of one value may be apart, relative to it.

    Attributes:
        equal: The counterparts in the same order of memory, by value, for the values of both executions.
        known: The values that have a counterpart in any form.
        rearranged: Values with the numbers of a value of the other execution, but in an order that no transposition
            makes, such as flipped ones.
    """

    def __init__(self, graphs: tuple[Graph, Graph], tolerance: Tolerance) -> None:
        self.graphs, self.tolerance = graphs, tolerance
        self.equal: dict[Value, list[Value]] = defaultdict(list)
        self.known: set[Value] = set()
        self.rearranged: set[Value] = set()
        first, second = (graph.values() for graph in graphs)
        self._match_wholes(first, second)
        self.rearranged -= self.known

    def _match_wholes(self, first: Sequence[Value], second: Sequence[Value]) -> None:
        groups: dict[int, list[Value]] = defaultdict(list)
        for value in second:
            if value.total:
                groups[value.count].append(value)
        tables = {count: _Table(group, self.tolerance) for count, group in groups.items()}
        for value in first:
            if not value.total or value.count not in tables:
                continue
            near = tables[value.count].near(value, self.tolerance(value))
            equal = [other for other in near if same(value, other, self.tolerance)]
            for other in equal:
                self.equal[value].append(other)
                self.equal[other].append(value)
            transposed = [] if equal else [other for other in near if is_transposed(value, other, self.tolerance)]
            if equal or transposed:
                self.known |= {value, *equal, *transposed}
            elif not value.tells_little:
                turned = [other for other in near if is_transposed(value, other, self.tolerance) is False]
                self.rearranged.update([value, *turned] if turned else [])

    def match_parts(self) -> None:
        """Find values that are a slice of a value of the other execution, or are covered by slices of several."""
        everything = [graph.values() for graph in self.graphs]
        for side, graph in enumerate(self.graphs):
            others = everything[1 - side]
            self.known |= self._parts(graph, [v for v in others if v.profiles and not v.is_rounding_alone])

    def _parts(self, graph: Graph, others: Sequence[Value]) -> set[Value]:
        depth: dict[Value, int] = {}
        found: set[Value] = set()
        others = sorted(others, key=lambda value: value.count)
        for value in graph.values():
            node = graph.maker.get(value)
            before = max((depth.get(v, 0) for v in node.inputs), default=0) if node else 0
            depth[value] = 0 if value in self.known else before + (node is None or not node.op.is_view)
            is_loose = self.tolerance(value) > tol.SHARP_ENOUGH
            if (
                is_loose
                or value in self.known
                or depth[value] > REACH
                or value.tells_little
                or value.count < FEWEST_OF_A_PART
            ):
                continue
            if is_part(value, others, self.tolerance) or is_covered(value, others, self.tolerance):
                found.add(value)
                depth[value] = 0
        return found


class _Table:
    """The sums of several values of one size, as arrays."""

    def __init__(self, values: Sequence[Value], tolerance: Tolerance) -> None:
        self.values = values
        self.totals = np.array([value.total for value in values])
        self.tolerances = np.array([tolerance(value) for value in values])

    def near(self, value: Value, tolerance: float) -> list[Value]:
        """Those whose sums are the value's, as far as the tolerances go."""
        allowed = np.minimum(4 * np.maximum(self.tolerances, tolerance), 1e9)
        squares = np.maximum(self.totals[:, 1], value.total[1])
        with np.errstate(invalid="ignore", over="ignore"):
            scale = np.stack([np.sqrt(value.count * squares), squares], 1)
            bounds = np.stack([allowed, 2 * allowed * np.maximum(1.0, allowed)], 1) * scale + 1e-300
            close = np.abs(self.totals - np.array(value.total)) <= bounds
        are_finite, is_finite = np.isfinite(self.totals).all(1), np.isfinite(value.total).all()
        return [
            self.values[int(place)] for place in np.flatnonzero(close.all(1) & are_finite if is_finite else ~are_finite)
        ]


def is_transposed(x: Value, y: Value, tolerance: Tolerance) -> bool | None:
    """Whether two values of equal sums may be one with its dimensions in another order, and none of them turned round.

    None where they have no dimension of one size, so that it cannot be told.
    """
    if x.is_rounding_alone and y.is_rounding_alone:
        return True
    if max(tolerance(x), tolerance(y)) > tol.SHARP_ENOUGH:
        return None
    allowed = 8 * max(tolerance(x), tolerance(y), 1e-9)
    squares = max(x.total[1], y.total[1])
    if not math.isfinite(squares):
        return None
    bounds = allowed * np.array([[math.sqrt(x.count * squares)], [squares]])

    def alike(p: np.ndarray, q: np.ndarray) -> bool:
        return p.shape == q.shape and bool((np.abs(p - q) <= bounds).all())

    sizes = {profile.shape[1] for profile in y.profiles.values()}
    compared = [profile for profile in x.profiles.values() if profile.shape[1] in sizes]
    if not compared:
        return None
    return all(any(alike(p, q) for q in y.profiles.values()) for p in compared)


def _slices(part: Value, whole: Value, tolerance: Tolerance) -> Iterator[tuple[int, int, int]]:
    """Where a value may be a slice of another one: dimension, first index and length, by sums and sums of squares."""
    if not np.isfinite(part.total).all():
        return
    allowed = 4 * max(tolerance(part), tolerance(whole), 1e-9)
    for dim, profile in whole.profiles.items():
        size = profile.shape[1]
        for_each = whole.count // size
        if not for_each or part.count % for_each or part.count >= whole.count or not np.isfinite(profile).all():
            continue
        length = part.count // for_each
        running = np.concatenate([np.zeros((2, 1)), np.cumsum(profile, 1)], 1)
        sums = running[:, length:] - running[:, :-length]
        scale = math.sqrt(part.count * part.total[1]), part.total[1]
        whole_scale = math.sqrt(whole.count * whole.total[1]), whole.total[1]
        with np.errstate(invalid="ignore"):
            hit = np.abs(sums[0] - part.total[0]) <= allowed * scale[0] + 1e-12 * whole_scale[0]
            hit &= np.abs(sums[1] - part.total[1]) <= allowed * scale[1] + 1e-13 * whole_scale[1]
        for start in np.flatnonzero(hit):
            yield dim, int(start), length


def is_part(value: Value, others: Sequence[Value], tolerance: Tolerance) -> bool:
    """Whether a value is a slice of one of the others."""
    return any(next(_slices(value, whole, tolerance), None) for whole in others if whole.count > value.count)


def is_covered(value: Value, others: Sequence[Value], tolerance: Tolerance) -> bool:
    """Whether slices of a value that are among the others make up all of it, but for rounding."""
    if not value.profiles or not np.isfinite(value.total).all():
        return False
    covered = {dim: profile[1] <= 1e-24 * value.total[1] for dim, profile in value.profiles.items()}
    for part in others:
        if FEWEST_OF_A_PART <= part.count < value.count and not part.is_constant:
            for dim, start, length in _slices(part, value, tolerance):
                covered[dim][start : start + length] = True
            if any(of_dim.all() for of_dim in covered.values()):
                return True
    return False


def tolerance_of(graph: Graph, uncertain: Mapping[Value, float]) -> Tolerance:
    """How far another reference of a value may be from this one, relative to it.

    An exact reference coincides with another one to ten digits. Where the operation that made a value loses digits, as
    by subtracting, so does float64; how many shows in how far the recorded numbers are from the reference. Of values
    that consist of roundings, two need not coincide.

    Args:
        graph: The execution.
        uncertain: Values whose references are less certain, and how far off they may be.
    """
    cache: dict[Value, float] = {}

    def tolerance(value: Value) -> float:
        if value not in cache:
            if value in graph.rounding_alone:
                cache[value] = LARGEST_TOLERANCE
            elif value in uncertain:
                cache[value] = uncertain[value] * _condition(graph, value)
            else:
                cache[value] = tol.COINCIDES + min(LARGEST_TOLERANCE, tol.COINCIDES_BY_ROUNDING * value.deviation)
        return cache[value]

    return tolerance


def _condition(graph: Graph, value: Value) -> float:
    """How many times as large as those of its inputs the relative roundings of a value may be, by its error bound."""
    node = graph.maker.get(value)
    bound = (node.op.bound or 0.0) if node else 0.0
    unit = tol.SHORT_SIZE if value.dtype in tol.SHORT else 64 * tol.ROUNDOFF
    return max(1.0, bound / unit) if math.isfinite(bound) else 1.0
