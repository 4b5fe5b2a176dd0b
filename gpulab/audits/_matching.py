"""Match the float64 values of two executions: equal, reordered, or parts of each other.

Only float64 references are compared. References of the same value agree to about ten digits,
independently of the precision of the executions and of the order and names of their operations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gpulab.audits import _tolerances as tol
from gpulab.audits._graphs import Graph
from gpulab.audits._values import Value

Tolerance = Callable[[Value], float]
MIN_PART_SIZE = 4  # numbers; fewer may match by chance
MAX_TOLERANCE = 1e6
MAX_STRETCHES = 1 << 18  # sums that are compared at a time, which bounds the memory
# A slice with a smaller share of the sum of squares consists of rounding errors.
NEGLIGIBLE_SQUARES_SHARE = 1e-24
MAX_PART_DEPTH = 12  # values more operations after a matched value are not searched for parts


def is_same_value(x: Value, y: Value, tolerance: Tolerance) -> bool:
    """Return whether the references of two values agree, number by number in memory order."""
    if (
        x.reference is None
        or y.reference is None
        or x.reference.shape != y.reference.shape
        or x.count != y.count
    ):
        return False
    # The second value is the only row of candidates.
    (is_same,) = _are_same_sketches(
        x.reference, y.reference[None], tolerance(x), np.array([tolerance(y)])
    )
    return bool(is_same)


def _are_same_sketches(
    reference: np.ndarray, candidates: np.ndarray, tolerance: float, tolerances: np.ndarray
) -> np.ndarray:
    """For each row of candidates, return whether it equals the sketch of a value.

    NaN equals NaN, and infinity equals infinity. All other numbers are compared by the norm of
    their differences.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        unequal = ~((candidates == reference) | (np.isnan(candidates) & np.isnan(reference)))
        size = np.linalg.norm(np.where(unequal, reference, 0.0), axis=1)
        sizes = np.linalg.norm(np.where(unequal, candidates, 0.0), axis=1)
        distances = np.linalg.norm(np.where(unequal, reference - candidates, 0.0), axis=1)
        allowed = np.maximum(size * tolerance, sizes * tolerances)
        return ~unequal.any(axis=1) | (np.isfinite(distances) & (distances <= allowed))


class Matches:
    """The values of two executions that have the same numbers, in the same or another order.

    Args:
        graphs: The graphs of the two executions.
        tolerance: A function that returns the largest relative distance of a value's references.

    Attributes:
        equal: The counterparts of each value with the same numbers in the same memory order, for
            the values of both executions.
        matched_values: The values that have a counterpart in any form.
        permuted_values: Values with the numbers of a value of the other execution, but in an order
            that no transposition makes, such as flipped ones.
    """

    def __init__(self, graphs: tuple[Graph, Graph], tolerance: Tolerance) -> None:
        self.graphs = graphs
        self.tolerance = tolerance
        self.equal: dict[Value, list[Value]] = defaultdict(list)
        self.matched_values: set[Value] = set()
        self.permuted_values: set[Value] = set()
        values_a, values_b = (graph.values() for graph in graphs)
        self._match_wholes(values_a, values_b)
        self.permuted_values -= self.matched_values

    def _match_wholes(self, values_a: Sequence[Value], values_b: Sequence[Value]) -> None:
        """Find equal, transposed and permuted values of the same size."""
        groups: dict[tuple[int, int], list[Value]] = defaultdict(list)
        for value in values_b:
            if value.total and value.reference is not None:
                groups[value.count, value.reference.size].append(value)
        tables = {sizes: _ValueTable(group, self.tolerance) for sizes, group in groups.items()}
        for value in values_a:
            if not value.total or value.reference is None:
                continue
            table = tables.get((value.count, value.reference.size))
            if table is None:
                continue
            near, equal = table.find_near(value, value.reference, self.tolerance(value))
            for counterpart in equal:
                self.equal[value].append(counterpart)
                self.equal[counterpart].append(value)
            if equal:
                self.matched_values |= {value, *equal}
                continue
            answers = [(v, is_transposed(value, v, self.tolerance)) for v in near]
            transposed = [v for v, answer in answers if answer]
            permuted = [v for v, answer in answers if answer is False]  # None is undecided
            if transposed:
                self.matched_values |= {value, *transposed}
            elif permuted and not value.is_uninformative:
                self.permuted_values |= {value, *permuted}

    def match_parts(self) -> None:
        """Find values that are a slice of a value of the other side, or consist of such slices.

        They are added to `matched_values`.
        """
        all_values = [graph.values() for graph in self.graphs]
        for side, graph in enumerate(self.graphs):
            candidates = [v for v in all_values[1 - side] if v.profiles and not v.is_pure_rounding]
            self.matched_values |= self._find_parts(graph, PartSearch(candidates, self.tolerance))

    def _find_parts(self, graph: Graph, search: PartSearch) -> set[Value]:
        """Return the values of a graph that contain, or are, parts of the searched values.

        Values far from any matched value, by the number of operations, are not searched.
        """
        depth: dict[Value, int] = {}
        parts: set[Value] = set()
        for value in graph.values():
            node = graph.maker.get(value)
            input_depth = max((depth.get(v, 0) for v in node.inputs), default=0) if node else 0
            is_view = node is not None and node.op.is_view
            if value in self.matched_values:
                depth[value] = 0
            else:
                depth[value] = input_depth if is_view else input_depth + 1
            is_loose = self.tolerance(value) > tol.MAX_SUM_MATCHING_TOLERANCE
            if (
                is_loose
                or value in self.matched_values
                or depth[value] > MAX_PART_DEPTH
                or value.is_uninformative
                or value.count < MIN_PART_SIZE
            ):
                continue
            if search.contains(value) or search.covers(value):
                parts.add(value)
                depth[value] = 0
        return parts


class _ValueTable:
    """The sums and the sketches of several values of one size, as arrays."""

    def __init__(self, values: Sequence[Value], tolerance: Tolerance) -> None:
        self.values = values
        self.totals = np.array([value.total for value in values])
        self.are_finite = np.isfinite(self.totals).all(1)
        self.references = np.stack(
            [value.reference for value in values if value.reference is not None]
        )
        self.tolerances = np.array([tolerance(value) for value in values])

    def find_near(
        self, value: Value, reference: np.ndarray, tolerance: float
    ) -> tuple[list[Value], list[Value]]:
        """Return the values whose sums agree within the tolerance, and which of them are equal."""
        # The factor 4 and the small constant below allow for the rounding errors of the sums.
        allowed = np.minimum(4 * np.maximum(self.tolerances, tolerance), 1e9)
        squares = np.maximum(self.totals[:, 1], value.total[1])
        with np.errstate(invalid="ignore", over="ignore"):
            # In two columns, as in `totals`: those of the sums, and those of the sums of squares.
            scales = np.stack([np.sqrt(value.count * squares), squares], 1)
            relative_bounds = np.stack([allowed, 2 * allowed * np.maximum(1.0, allowed)], 1)
            distances = np.abs(self.totals - np.array(value.total))
            are_close = (distances <= relative_bounds * scales + 1e-300).all(1)
        is_finite = np.isfinite(value.total).all()
        indices = np.flatnonzero(are_close & self.are_finite if is_finite else ~self.are_finite)
        are_same = _are_same_sketches(
            reference, self.references[indices], tolerance, self.tolerances[indices]
        )
        near = [self.values[int(index)] for index in indices]
        return near, [
            candidate for candidate, is_same in zip(near, are_same, strict=True) if is_same
        ]


def is_transposed(x: Value, y: Value, tolerance: Tolerance) -> bool | None:
    """Return whether one of two values with equal sums may be a transposition of the other.

    Flipped dimensions do not count as a transposition.

    Returns:
        Whether all profiles agree; None if this cannot be decided, because the tolerance is too
        wide, the numbers are not finite, or the two have no profiled dimension of equal size.
    """
    if x.is_pure_rounding and y.is_pure_rounding:
        return True
    if max(tolerance(x), tolerance(y)) > tol.MAX_SUM_MATCHING_TOLERANCE:
        return None
    allowed = 8 * max(tolerance(x), tolerance(y), 1e-9)
    squares = max(x.total[1], y.total[1])
    if not math.isfinite(squares):
        return None
    bounds = allowed * np.array([[math.sqrt(x.count * squares)], [squares]])

    def are_close(p: np.ndarray, q: np.ndarray) -> bool:
        return p.shape == q.shape and bool((np.abs(p - q) <= bounds).all())

    sizes = {profile.shape[1] for profile in y.profiles.values()}
    compared = [profile for profile in x.profiles.values() if profile.shape[1] in sizes]
    if not compared:
        return None
    return all(any(are_close(p, q) for q in y.profiles.values()) for p in compared)


class PartSearch:
    """Search for values that contain another value as a slice, or that together cover it.

    A slice is recognised by its sum and its sum of squares. They equal the sums over a stretch of
    consecutive indices in a profile of the whole value.

    Args:
        values: The values to search, which have profiles.
        tolerance: A function that returns the largest relative distance of a value's references.
    """

    def __init__(self, values: Sequence[Value], tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        wholes: dict[tuple[int, int, int], list[Value]] = defaultdict(list)
        parts: dict[int, list[Value]] = defaultdict(list)
        for value in values:
            for dim, profile in value.profiles.items():
                if np.isfinite(profile).all():
                    wholes[value.count, dim, profile.shape[1]].append(value)
            if (
                value.count >= MIN_PART_SIZE
                and not value.is_constant
                and np.isfinite(value.total).all()
            ):
                parts[value.count].append(value)
        self.stretch_sums: list[_StretchSums] = []
        for (_, dim, size), group in wholes.items():
            n_values = max(1, MAX_STRETCHES // size)  # values in one `_StretchSums`
            for start in range(0, len(group), n_values):
                values_in_batch = group[start : start + n_values]
                self.stretch_sums.append(_StretchSums(values_in_batch, dim, tolerance))
        self.parts = {
            count: (
                np.array([value.total for value in group]),
                np.array([tolerance(value) for value in group]),
            )
            for count, group in sorted(parts.items())
        }

    def contains(self, part: Value) -> bool:
        """Return whether a value is a slice of one of the searched values."""
        if not part.total or not np.isfinite(part.total).all():
            return False
        totals = np.array([part.total])
        tolerances = np.array([self.tolerance(part)])
        for stretches in self.stretch_sums:
            length, remainder = divmod(part.count, stretches.n_per_index)
            if remainder or part.count >= stretches.count:
                continue  # not a whole number of indices, or not smaller than the whole
            if stretches.find(length, totals, tolerances).any():
                return True
        return False

    def covers(self, whole: Value) -> bool:
        """Return whether the searched values include slices that make up all of a value.

        Slices that consist of rounding errors do not have to be found.
        """
        if not whole.profiles or not np.isfinite(whole.total).all():
            return False
        return any(
            self._find_covered_indices(whole, dim).all()
            for dim, profile in whole.profiles.items()
            if np.isfinite(profile).all()
        )

    def _find_covered_indices(self, whole: Value, dim: int) -> np.ndarray:
        """Return for each index of a dimension whether a searched value includes the slice at it.

        Slices that consist of rounding errors count as included.
        """
        _, squares = whole.profiles[dim]
        is_covered = squares <= NEGLIGIBLE_SQUARES_SHARE * whole.total[1]
        stretches = _StretchSums([whole], dim, self.tolerance)
        for count, (totals, tolerances) in self.parts.items():
            length, remainder = divmod(count, stretches.n_per_index)
            if remainder or count >= whole.count:
                continue  # not a whole number of indices, or not smaller than the whole
            is_start = stretches.find(length, totals, tolerances).any(axis=0)
            for start in np.flatnonzero(is_start):
                is_covered[start : start + length] = True
        return is_covered


class _StretchSums:
    """The sums over stretches of consecutive indices along one dimension of several values.

    All values have the same number of elements and the same size along the dimension.

    Attributes:
        count: The number of elements of each value.
        n_per_index: The number of elements at each index of the dimension.
    """

    def __init__(self, wholes: Sequence[Value], dim: int, tolerance: Tolerance) -> None:
        profiles = np.stack([whole.profiles[dim] for whole in wholes])
        self.cumulative_sums = np.concatenate(
            [np.zeros((len(wholes), 2, 1)), np.cumsum(profiles, 2)], 2
        )
        self.tolerances = np.array([tolerance(whole) for whole in wholes])[:, None]
        squares = np.array([whole.total[1] for whole in wholes])[:, None]
        self.count = wholes[0].count
        self.n_per_index = self.count // profiles.shape[2]
        # The sizes that sums, and sums of squares, can have over a whole value.
        self.sum_scales = np.sqrt(self.count * squares)
        self.square_scales = squares

    def find(self, length: int, totals: np.ndarray, tolerances: np.ndarray) -> np.ndarray:
        """Find the stretches whose sums equal those of a part.

        Either there is one part and several wholes, or there are several parts and one whole.

        Args:
            length: The length of the stretches and of all parts.
            totals: The sums of the parts and of their squares, in two columns.
            tolerances: The tolerance of each part.

        Returns:
            A Boolean array with a row for each part or whole, and a column for each first index of
            a stretch.
        """
        sums, squares = np.moveaxis(
            self.cumulative_sums[:, :, length:] - self.cumulative_sums[:, :, :-length], 1, 0
        )
        allowed = 4 * np.maximum(np.maximum(tolerances[:, None], self.tolerances), 1e-9)
        total = totals[:, :1]
        total_squares = totals[:, 1:]
        size = np.sqrt(length * self.n_per_index * total_squares)
        hits = np.abs(sums - total) <= allowed * size + 1e-12 * self.sum_scales
        allowed_squares = allowed * total_squares + 1e-13 * self.square_scales
        hits &= np.abs(squares - total_squares) <= allowed_squares
        return hits


def tolerance_of(graph: Graph, uncertain: Mapping[Value, float]) -> Tolerance:
    """Return a function that computes the largest relative distance of a value's references.

    Exact references of the same value agree to about ten digits. If an operation loses digits, for
    example by cancellation, float64 loses as many as the recorded format. The deviation of the
    recorded numbers from the reference shows how many. Values that consist of rounding errors need
    not agree at all.

    Args:
        graph: The graph of the execution.
        uncertain: The values whose references are not exact, with the errors that they may have.
    """
    cache: dict[Value, float] = {}

    def tolerance(value: Value) -> float:
        """Return the largest relative distance of a value's references, computed once."""
        if value not in cache:
            if value in graph.pure_rounding_values:
                cache[value] = MAX_TOLERANCE
            elif value in uncertain:
                cache[value] = uncertain[value] * _condition(graph, value)
            else:
                cache[value] = tol.REFERENCE_TOLERANCE + min(
                    MAX_TOLERANCE, tol.REFERENCE_TOLERANCE_PER_DEVIATION * value.deviation
                )
        return cache[value]

    return tolerance


def _condition(graph: Graph, value: Value) -> float:
    """Return the factor by which the operation that made a value may amplify relative errors.

    It is the rounding bound of the operation in units of the roundoff, and at least 1.
    """
    node = graph.maker.get(value)
    bound = (node.op.bound or 0.0) if node else 0.0
    unit = (
        tol.SHORT_FORMAT_ROUNDOFF if value.dtype in tol.SHORT_FORMATS else 64 * tol.FLOAT32_ROUNDOFF
    )
    return max(1.0, bound / unit) if math.isfinite(bound) else 1.0
