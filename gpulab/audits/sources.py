"""Where two executions whose results differ in float64 begin to differ.

A value is certified if it has a counterpart in the other execution, or if all that was made of it has. A source is an
operation on the way to a differing result whose inputs are all certified, and whose output is not: of the same values
it makes something that the other execution has not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gpulab.audits import tolerances as tol
from gpulab.audits.comparison import Comparison, differing_arguments, kernel_name
from gpulab.audits.graphs import Graph, Node
from gpulab.audits.values import Value, finite_distance

# Operations that read of an input nothing but its shape, or where its numbers lie. What they make says nothing of it.
_SHAPE_READING_OPERATIONS = """
    empty_like eq full_like ge gt isfinite isinf isnan le lt ne new_full new_ones new_zeros ones_like rand_like
    randn_like zeros_like
"""
SHAPE_READING_OPERATIONS = frozenset(_SHAPE_READING_OPERATIONS.split())
# Inputs, by position, of which an operation reads nothing but the shape.
SHAPE_INPUT_POSITIONS = {"nll_loss_backward": 1, "nll_loss2d_backward": 1}
# Operations that leave out some of what they are given: a value that they leave out may be wrong.
_SELECTING_OPERATIONS = """
    amax amin clamp_min diagonal embedding gather index index_select kthvalue masked_select max
    max_pool2d_with_indices min narrow relu select slice split split_with_sizes take topk unbind unsafe_split where
"""
SELECTING_OPERATIONS = frozenset(_SELECTING_OPERATIONS.split())
# Operations that make of values which are far apart values that are close: those of Adam's first update are signs, a
# normalisation forgets size and offset, a softmax forgets an offset.
_SCALE_FORGETTING_OPERATIONS = """
    addcdiv cudnn_batch_norm _foreach_addcdiv _foreach_sqrt _fused_adam _fused_adamw _log_softmax miopen_batch_norm
    native_batch_norm native_group_norm native_layer_norm _native_batch_norm_legit sgn sign _softmax sqrt
"""
SCALE_FORGETTING_OPERATIONS = frozenset(_SCALE_FORGETTING_OPERATIONS.split())


@dataclass(frozen=True, eq=False)
class Source:
    """Where one side, or both, leave what the two have in common.

    Attributes:
        a: The first operation of the first side whose result has no counterpart, if there is one.
        b: That of the second side.
        data_a: The value from outside of the step of the first side that has no counterpart, if there is one.
        data_b: That of the second side.
        user: The operation that was given the data.
        share_inputs: Whether the operations of the two sides were given a value that both have.
    """

    a: Node | None = None
    b: Node | None = None
    data_a: Value | None = None
    data_b: Value | None = None
    user: Node | None = None
    share_inputs: bool = True

    @property
    def nodes(self) -> list[Node]:
        """The operations of both sides; those of the second side first."""
        return [node for node in (self.b, self.a) if node is not None]


class SideSearch:
    """One of two executions: what of its values is certified, and where it leaves the other one."""

    def __init__(self, comparison: Comparison, side: int) -> None:
        self.comparison, self.side = comparison, side
        self.graph: Graph = comparison.graphs[side]
        self.matched_values = comparison.matches.matched_values

    @cached_property
    def foreign_values(self) -> set[Value]:
        """Values that follow from data, random numbers or an order of numbers which the other execution has not."""
        found = {value for value in self.graph.values() if value in self.comparison.matches.permuted_values}
        for value in self.graph.users:
            if value not in self.graph.maker and value not in self.matched_values and value.count > 1:
                found.add(value)
        for node in self.graph.nodes:
            is_drawn = node.op.is_random and not all(value in self.matched_values for value in node.outputs)
            if is_drawn or not found.isdisjoint(node.inputs):
                found.update(value for value in node.outputs if value not in self.matched_values)
        return found

    @cached_property
    def certified_values(self) -> set[Value]:
        """Values that have a counterpart, or lead to one."""
        sure = {value for value in self.graph.values() if value in self.matched_values and self._is_conclusive(value)}
        for node in self.graph.nodes:
            if not node.op.is_random and (not node.inputs or node.op.name.endswith("_like")):
                sure.update(value for value in node.outputs if value.is_integral)
        final = {
            value
            for result in self.comparison.results
            for value in self.comparison.values((result.a, result.b)[self.side])
        }
        for node in reversed(self.graph.nodes):
            if (
                node.op.is_random
                or node.op.name in SHAPE_READING_OPERATIONS
                or node.op.name in SCALE_FORGETTING_OPERATIONS
            ):
                continue
            if any(self.comparison.tolerance(value) > tol.MAX_CERTIFYING_TOLERANCE for value in node.outputs):
                continue  # what is compared loosely may be equal by chance
            used = [
                value
                for value in node.outputs
                if not value.is_uninformative
                and value not in node.inputs
                and (value in self.graph.users or value in final)
            ]
            if used and sure.issuperset(used):
                sure.update(self._implied_inputs(node, used))
        for node in self.graph.nodes:
            if node.op.is_view and sure.issuperset(node.inputs):
                sure.update(value for value in node.outputs if value not in self.foreign_values)
        return sure

    def _is_conclusive(self, value: Value) -> bool:
        """Whether the counterpart of a value says something: it has various numbers, or the same call made it."""
        if not value.is_uninformative or (value.is_pure_rounding and value.is_float_or_complex):
            return True
        node, others = self.graph.maker.get(value), self.comparison.matches.equal.get(value, [])
        makers = [self.comparison.graphs[1 - self.side].maker.get(other) for other in others]
        if node is None:
            return None in makers
        return any(
            other is not None and other.op.name == node.op.name and not differing_arguments(node.op, other.op)
            for other in makers
        )

    def _implied_inputs(self, node: Node, outputs: Sequence[Value]) -> list[Value]:
        """The inputs of an operation that are right if its outputs are."""
        position = SHAPE_INPUT_POSITIONS.get(node.op.name)
        made = sum(value.count for value in outputs)
        return [
            value
            for place, value in enumerate(node.inputs)
            if place != position
            and value not in self.foreign_values
            and not (node.op.name in SELECTING_OPERATIONS and made < value.count)
        ]

    def find_sources(self, differing: Sequence[Value]) -> tuple[list[Node], list[tuple[Value, Node | None]]]:
        """The operations, and the data with who uses them, at which the way to differing values begins to differ."""
        nodes: dict[Node, None] = {}
        data: list[tuple[Value, Node | None]] = []
        seen: set[Value] = set()
        front = list(differing)
        for value in front:  # which grows
            is_there = value in self.matched_values and self._is_conclusive(value)
            if value in seen or is_there or (value in self.certified_values and value not in differing):
                continue
            seen.add(value)
            node = self.graph.maker.get(value)
            if node is None:
                data.append((value, next(iter(self.graph.users.get(value, [])), None)))
                continue
            if self.certified_values.issuperset(node.inputs):
                nodes.setdefault(node)
            front += [other for other in node.inputs if other not in self.certified_values]
        return sorted(nodes, key=lambda node: node.number), data


def find_sources(comparison: Comparison) -> list[Source]:
    """Where the executions begin to differ: data first, then random numbers, then operations in order."""
    comparison.matches.match_parts()
    sides = [SideSearch(comparison, side) for side in (0, 1)]
    differing: list[list[Value]] = [[], []]
    for result in comparison.differing_results:
        if not (result.a and result.b):
            continue  # what one side alone computes has nothing beside it
        for side, op in enumerate((result.a, result.b)):
            differing[side] += comparison.values(op)
    (of_a, data_a), (of_b, data_b) = (side.find_sources(values) for side, values in zip(sides, differing, strict=True))
    return [*_pair_data(comparison, data_a, data_b), *_pair_operations(comparison, of_a, of_b)]


def _pair_data(
    comparison: Comparison,
    data_a: Sequence[tuple[Value, Node | None]],
    data_b: Sequence[tuple[Value, Node | None]],
) -> list[Source]:
    """Data of both sides that stand in each other's place: of one shape, and nearest to each other."""
    found, left = [], list(data_b)
    for value, user in data_a:
        likely = [(other, used_by) for other, used_by in left if other.shape == value.shape]
        other, used_by = min(likely, key=lambda pair: comparison.gap(value, pair[0]), default=(None, None))
        if other is not None:
            left.remove((other, used_by))
        found.append(Source(data_a=value, data_b=other, user=used_by or user))
    return found + [Source(data_b=value, user=user) for value, user in left]


def _pair_operations(comparison: Comparison, of_a: Sequence[Node], of_b: Sequence[Node]) -> list[Source]:
    """Operations of both sides that begin with a value which they have in common."""

    def common(a: Node, b: Node) -> int:
        of_a, of_b = (_inputs_and_bases(graph, node) for graph, node in zip(comparison.graphs, (a, b), strict=True))
        counterparts = {
            w for value in of_a if not value.is_uninformative for w in comparison.matches.equal.get(value, ())
        }
        shared = bool(counterparts & of_b)
        alike = kernel_name(a.op) == kernel_name(b.op)
        in_place = (a.op.phase, a.op.module) == (b.op.phase, b.op.module)
        return 4 * (shared and alike) + 2 * shared + (alike and in_place)

    pairs, left = [], list(of_a)
    for b in of_b:
        a = max(left, key=lambda a: (common(a, b), -a.number), default=None)
        if a is not None and not common(a, b):
            a = None
        if a is not None:
            left.remove(a)
        pairs.append(Source(a=a, b=b))
    pairs += [Source(a=a) for a in left]
    pairs = [_with_same_call(comparison, source) for source in pairs]
    lengths = [len(graph.nodes) for graph in comparison.graphs]

    def rank(source: Source) -> tuple[bool, float]:
        places = [node.number / length for node, length in zip((source.a, source.b), lengths, strict=True) if node]
        return not any(node.op.is_random for node in source.nodes), min(places)

    return _merge_first_sources(sorted(pairs, key=rank))


def _merge_first_sources(sources: list[Source]) -> list[Source]:
    """The same; where the first is of one side alone, it is told with the first one of the other side alone."""
    if not sources or (sources[0].a and sources[0].b):
        return sources
    first = sources[0]
    other = next((s for s in sources[1:] if len(s.nodes) == 1 and bool(s.a) != bool(first.a)), None)
    if other is None or any(node.op.is_random for node in (*first.nodes, *other.nodes)):
        return sources
    both = Source(a=first.a or other.a, b=first.b or other.b, share_inputs=False)
    return [both, *(source for source in sources[1:] if source is not other)]


def _with_same_call(comparison: Comparison, source: Source) -> Source:
    """A source of one side alone, with the operation of the same line on the other side, if there is just one."""
    if len(source.nodes) == 2:
        return source
    (node,) = source.nodes
    side = comparison.side_of[node.op]

    def call(other: Node) -> tuple[str, ...]:
        return kernel_name(other.op), other.op.phase, other.op.module, other.op.line

    here, there = ([n for n in comparison.graphs[s].nodes if call(n) == call(node)] for s in (side, 1 - side))
    if len(here) != 1 or len(there) != 1:
        return source
    return Source(a=there[0], b=node) if side else Source(a=node, b=there[0])


def _inputs_and_bases(graph: Graph, node: Node) -> set[Value]:
    """What an operation was given, and what that is a view of."""
    found = set(node.inputs)
    front = list(node.inputs)
    for value in front:  # which grows
        maker = graph.maker.get(value)
        if maker is not None and maker.op.is_view:
            front += [other for other in maker.inputs if other not in found]
            found.update(maker.inputs)
    return found


def find_external_values(comparison: Comparison, sources: Sequence[Source]) -> dict[Value, float]:
    """The values that enter from outside of torch, or by a number that was read, and differ no more than by rounding.

    Returns:
        The values of both sides, and how far these are apart. So are those of operations that do not repeat themselves.
    """
    found: dict[Value, float] = {}
    for source in sources:
        x, y = source.data_a, source.data_b
        if x is not None and y is not None and x.is_float_or_complex:
            gap = finite_distance(y.sketch, x.sketch)
            if gap <= _max_external_gap(comparison, source):
                found |= {x: gap, y: gap}
        elif source.a and source.b and _is_negligible_difference(source.a, source.b, source):
            pairs = list(zip(source.a.outputs, source.b.outputs, strict=False))
            gaps = [
                finite_distance(w.reference, v.reference)
                for v, w in pairs
                if v.reference is not None and w.reference is not None
            ]
            gap = max(gaps, default=0.0)
            found |= dict.fromkeys((*source.a.outputs, *source.b.outputs), gap)
    return found


def _max_external_gap(comparison: Comparison, source: Source) -> float:
    """How far data may be apart that the program may have computed of values which were rounded before."""
    deviations = [0.0]
    for graph, value in zip(comparison.graphs, (source.data_a, source.data_b), strict=True):
        users = graph.users.get(value, []) if value is not None else []
        until = min((node.number for node in users), default=0)
        made = (v for node in graph.nodes[:until] for v in node.outputs if not v.is_pure_rounding)
        deviations += [v.deviation for v in made if math.isfinite(v.deviation)]
    return max(
        tol.EXTERNAL_DATA_TOLERANCE,
        min(tol.MAX_EXTERNAL_DATA_TOLERANCE, tol.EXTERNAL_TOLERANCE_PER_DEVIATION * max(deviations)),
    )


def _is_negligible_difference(a: Node, b: Node, source: Source) -> bool:
    """Whether two operations differ for a reason that is no other function.

    They were given floats that differ by roundings, or do not repeat themselves, or are kernels of one operation whose
    results in float64 differ by less than a rounding of float32: some kernels have their constants in float32.
    """
    if _has_rounded_arguments(a, b) or _is_within_spread(source):
        return True
    compared = None if a.op.name == b.op.name else 1  # kernels of two libraries keep other numbers beside the result
    pairs = list(zip(a.outputs, b.outputs, strict=False))[:compared]
    gaps = [
        finite_distance(y.reference, x.reference)
        for x, y in pairs
        if x.is_float_or_complex and x.reference is not None and y.reference is not None and x.shape == y.shape
    ]
    is_one_call = kernel_name(a.op) == kernel_name(b.op) and not differing_arguments(a.op, b.op)
    return is_one_call and bool(gaps) and max(gaps) <= tol.SAME_VALUE_TOLERANCE


def _is_within_spread(source: Source) -> bool:
    """Whether two operations that do not repeat themselves are as near as one of them is to itself."""
    assert source.a is not None
    assert source.b is not None
    spread = max((node.op.spread or 0.0 for node in source.nodes), default=0.0)
    gaps = (
        finite_distance(w.reference, v.reference)
        for v, w in zip(source.a.outputs, source.b.outputs, strict=False)
        if v.reference is not None and w.reference is not None
    )
    alike = kernel_name(source.a.op) == kernel_name(source.b.op)
    return alike and spread > 0 and max(gaps, default=math.inf) <= tol.MAX_REPEAT_SPREAD_RATIO * spread


def _has_rounded_arguments(a: Node, b: Node) -> bool:
    """Whether two calls have the same arguments but for floats that differ by roundings, as those read from tensors."""
    if a.op.name != b.op.name or a.op.arguments.keys() != b.op.arguments.keys():
        return False
    pairs = [(x, b.op.arguments[name]) for name, x in a.op.arguments.items() if x != b.op.arguments[name]]
    return bool(pairs) and all(
        isinstance(x, float) and isinstance(y, float) and abs(x - y) <= tol.EXTERNAL_DATA_TOLERANCE * abs(x)
        for x, y in pairs
    )
