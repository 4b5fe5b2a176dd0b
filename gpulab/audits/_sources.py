"""Find where two executions whose results differ in float64 begin to differ.

A value is certified if it has a counterpart in the other execution, or if all values that were
computed from it have one. A source is an operation on the path to a differing result, with
certified inputs and an output that is not certified. From common values, it computes something that
the other execution does not have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gpulab.audits import _tolerances as tol
from gpulab.audits._comparison import Comparison, differing_arguments, kernel_name
from gpulab.audits._float64_calls import DEFINITIONS
from gpulab.audits._graphs import Graph, Node
from gpulab.audits._traces import alignment_key
from gpulab.audits._values import Value, finite_distance

# Operations that read only the shape of an input, or the ranges of its numbers. Their outputs do
# not certify the input.
_SHAPE_READING_OPERATIONS = """
    empty_like eq full_like ge gt isfinite isinf isnan le lt ne new_full new_ones new_zeros
    ones_like rand_like randn_like zeros_like
"""
SHAPE_READING_OPERATIONS = frozenset(_SHAPE_READING_OPERATIONS.split())
# The positions of inputs of which an operation reads only the shape.
SHAPE_INPUT_POSITIONS = {"nll_loss_backward": 1, "nll_loss2d_backward": 1}
# Operations that discard some numbers of their input. A discarded number may be wrong although the
# output is right.
_SELECTING_OPERATIONS = """
    amax amin clamp_min diagonal embedding gather index index_select kthvalue masked_select max
    max_pool2d_with_indices min narrow relu select slice split split_with_sizes take topk unbind
    unsafe_split where
"""
SELECTING_OPERATIONS = frozenset(_SELECTING_OPERATIONS.split())
# Operations that map distant inputs to close outputs. Adam's first update depends only on signs, a
# normalisation removes scale and offset, and a softmax removes an offset.
_SCALE_FORGETTING_OPERATIONS = """
    addcdiv cudnn_batch_norm _foreach_addcdiv _foreach_sqrt _fused_adam _fused_adamw
    _log_softmax miopen_batch_norm native_batch_norm native_group_norm native_layer_norm
    _native_batch_norm_legit sgn sign _softmax sqrt
"""
SCALE_FORGETTING_OPERATIONS = frozenset(_SCALE_FORGETTING_OPERATIONS.split())


@dataclass(frozen=True, eq=False)
class Source:
    """A place where the executions begin to differ, on one side or both.

    Attributes:
        a: The operation of the first side whose result has no counterpart, if there is one.
        b: The operation of the second side whose result has no counterpart, if there is one.
        data_a: The data or weights of the first side without a counterpart, if there are any.
        data_b: The data or weights of the second side without a counterpart, if there are any.
        user: The operation that uses the data.
        share_inputs: Whether the operations of the two sides have an input in common.
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
    """The search for certified values and sources in one of two executions."""

    def __init__(self, comparison: Comparison, side: int) -> None:
        self.comparison = comparison
        self.side = side
        self.graph: Graph = comparison.graphs[side]
        self.matched_values = comparison.matches.matched_values

    @cached_property
    def foreign_values(self) -> set[Value]:
        """The values computed from data, random numbers or orders that only this side has."""
        foreign = {
            value
            for value in self.graph.values()
            if value in self.comparison.matches.permuted_values
        }
        for value in self.graph.users:
            if (
                value not in self.graph.maker
                and value not in self.matched_values
                and value.count > 1
            ):
                foreign.add(value)
        for node in self.graph.nodes:
            draws_other_numbers = node.op.is_random and not all(
                v in self.matched_values for v in node.outputs
            )
            if draws_other_numbers or not foreign.isdisjoint(node.inputs):
                foreign.update(value for value in node.outputs if value not in self.matched_values)
        return foreign

    @cached_property
    def certified_values(self) -> set[Value]:
        """The values that have a counterpart, or from which such values were computed.

        The operations are followed backwards. If all used outputs of an operation are certified,
        its inputs are certified as well, except for operations that discard information.
        """
        certified = self._directly_certified_values()
        result_values = {
            value
            for result in self.comparison.results
            for value in self.comparison.values(result.of_side(self.side))
        }
        for node in reversed(self.graph.nodes):
            if not self._certifies_inputs(node):
                continue
            used_outputs = [
                value
                for value in node.outputs
                if not value.is_uninformative
                and value not in node.inputs
                and (value in self.graph.users or value in result_values)
            ]
            if used_outputs and certified.issuperset(used_outputs):
                certified.update(self._implied_inputs(node, used_outputs))
        # Views of certified values are certified as well.
        for node in self.graph.nodes:
            if node.op.is_view and certified.issuperset(node.inputs):
                certified.update(
                    value for value in node.outputs if value not in self.foreign_values
                )
        return certified

    def _directly_certified_values(self) -> set[Value]:
        """Return the values that have a counterpart, and integers that depend on no input."""
        certified = {
            value
            for value in self.graph.values()
            if value in self.matched_values and self._is_conclusive(value)
        }
        for node in self.graph.nodes:
            if not node.op.is_random and (not node.inputs or node.op.name.endswith("_like")):
                certified.update(value for value in node.outputs if value.is_integral)
        return certified

    def _certifies_inputs(self, node: Node) -> bool:
        """Return whether certified outputs of an operation can certify its inputs.

        Values that are compared with a wide tolerance cannot, because they may be equal by chance.
        """
        if (
            node.op.is_random
            or node.op.name in SHAPE_READING_OPERATIONS
            or node.op.name in SCALE_FORGETTING_OPERATIONS
        ):
            return False
        return not any(
            self.comparison.tolerance(value) > tol.MAX_CERTIFYING_TOLERANCE
            for value in node.outputs
        )

    def _is_conclusive(self, value: Value) -> bool:
        """Return whether a value's counterpart is unlikely to be equal by chance.

        This is the case if the value has varied numbers, or if the counterpart is also data or was
        made by the same call.
        """
        if not value.is_uninformative or (value.is_pure_rounding and value.is_float_or_complex):
            return True
        node = self.graph.maker.get(value)
        counterparts = self.comparison.matches.equal.get(value, [])
        makers = [
            self.comparison.graphs[1 - self.side].maker.get(counterpart)
            for counterpart in counterparts
        ]
        if node is None:
            return None in makers
        return any(
            maker is not None
            and maker.op.name == node.op.name
            and not differing_arguments(node.op, maker.op)
            for maker in makers
        )

    def _implied_inputs(self, node: Node, outputs: Sequence[Value]) -> list[Value]:
        """Return the inputs of an operation that must be correct if its outputs are."""
        shape_position = SHAPE_INPUT_POSITIONS.get(node.op.name)
        n_outputs = sum(value.count for value in outputs)
        is_selecting = node.op.name in SELECTING_OPERATIONS
        return [
            value
            for position, value in enumerate(node.inputs)
            if position != shape_position
            and value not in self.foreign_values
            and not (is_selecting and n_outputs < value.count)
        ]

    def find_sources(
        self, differing: Sequence[Value]
    ) -> tuple[list[Node], list[tuple[Value, Node | None]]]:
        """Search backwards from differing values for operations and data where differences begin.

        Args:
            differing: The values of results that differ between the two sides.

        Returns:
            The operations in their order, and the data with the first operation that uses each.
        """
        nodes: dict[Node, None] = {}
        data: list[tuple[Value, Node | None]] = []
        visited: set[Value] = set()
        queue = deque(differing)
        while queue:
            value = queue.popleft()
            has_counterpart = value in self.matched_values and self._is_conclusive(value)
            if (
                value in visited
                or has_counterpart
                or (value in self.certified_values and value not in differing)
            ):
                continue
            visited.add(value)
            node = self.graph.maker.get(value)
            if node is None:
                if not _is_zero(value):
                    data.append((value, next(iter(self.graph.users.get(value, [])), None)))
                continue
            if self.certified_values.issuperset(node.inputs):
                nodes.setdefault(node)
            queue.extend(input_ for input_ in node.inputs if input_ not in self.certified_values)
        return sorted(nodes, key=lambda node: node.number), data


def _is_zero(value: Value) -> bool:
    """Return whether all numbers are zero, as in memory that was allocated to be written to.

    The buckets of `DistributedDataParallel` are an example. If zeros are data, the other side has
    different data in their place, and these are found.
    """
    return value.count > 1 and bool(value.total) and value.total[1] == 0.0


def find_sources(comparison: Comparison) -> list[Source]:
    """Find where the executions begin to differ: data, random numbers, then operations."""
    comparison.matches.match_parts()
    sides = [SideSearch(comparison, side) for side in (0, 1)]
    differing: list[list[Value]] = [[], []]
    for result in comparison.differing_results:
        if not (result.a and result.b) and not comparison.has_ranks:
            continue  # a result of one side only has no counterpart to compare with
        for side, op in enumerate((result.a, result.b)):
            differing[side] += comparison.values(op)
    nodes_a, data_a = sides[0].find_sources(differing[0])
    nodes_b, data_b = sides[1].find_sources(differing[1])
    return [
        *_pair_data(comparison, data_a, data_b),
        *_pair_operations(comparison, nodes_a, nodes_b),
    ]


def _pair_data(
    comparison: Comparison,
    data_a: Sequence[tuple[Value, Node | None]],
    data_b: Sequence[tuple[Value, Node | None]],
) -> list[Source]:
    """Pair data of equal shape on both sides, each with the closest data of the other side."""
    sources = []
    unpaired_b = list(data_b)
    for value, user in data_a:
        candidates = [
            (value_b, user_b) for value_b, user_b in unpaired_b if value_b.shape == value.shape
        ]
        value_b, user_b = min(
            candidates, key=lambda pair: comparison.gap(value, pair[0]), default=(None, None)
        )
        if value_b is not None:
            unpaired_b.remove((value_b, user_b))
        sources.append(Source(data_a=value, data_b=value_b, user=user_b or user))
    return sources + [Source(data_b=value, user=user) for value, user in unpaired_b]


def _pair_operations(
    comparison: Comparison, nodes_a: Sequence[Node], nodes_b: Sequence[Node]
) -> list[Source]:
    """Pair operations of both sides by common inputs and kernels.

    Random operations come first in the returned sources, then the others by their relative position
    in the executions.
    """
    graph_a, graph_b = comparison.graphs

    def similarity(a: Node, b: Node) -> int:
        """Rate how well two operations correspond; those with 0 are never paired.

        Only the order of the returned numbers matters.
        """
        inputs_a = _inputs_and_bases(graph_a, a)
        inputs_b = _inputs_and_bases(graph_b, b)
        counterparts = {
            w
            for value in inputs_a
            if not value.is_uninformative
            for w in comparison.matches.equal.get(value, ())
        }
        has_common_input = not counterparts.isdisjoint(inputs_b)
        is_same_kernel = kernel_name(a.op) == kernel_name(b.op)
        if has_common_input:
            if not is_same_kernel:
                return 2
            return 7 if alignment_key(a.op) == alignment_key(b.op) else 6
        return 1 if alignment_key(a.op) == alignment_key(b.op) else 0

    pairs: list[Source] = []
    unpaired_a = list(nodes_a)
    for b in nodes_b:
        closest = max(unpaired_a, key=lambda a: (similarity(a, b), -a.number), default=None)
        if closest is not None and similarity(closest, b):
            unpaired_a.remove(closest)
            pairs.append(Source(a=closest, b=b))
        else:
            pairs.append(Source(b=b))
    only_a = [Source(a=a) for a in unpaired_a]
    sources = [_with_same_call(comparison, source) for source in (*pairs, *only_a)]
    lengths = [len(graph.nodes) for graph in comparison.graphs]

    def sort_key(source: Source) -> tuple[bool, float]:
        """Return False for random operations, which thus come first, and the relative position."""
        positions = [
            node.number / length
            for node, length in zip((source.a, source.b), lengths, strict=True)
            if node
        ]
        return not any(node.op.is_random for node in source.nodes), min(positions)

    return _merge_first_sources(sorted(sources, key=sort_key))


def _merge_first_sources(sources: list[Source]) -> list[Source]:
    """Merge a one-sided first source with the first source that only the other side has.

    Random operations are not merged.
    """
    if not sources or (sources[0].a and sources[0].b):
        return sources
    first_source = sources[0]
    has_side_a = bool(first_source.a)
    one_sided = (source for source in sources[1:] if len(source.nodes) == 1)
    counterpart = next((source for source in one_sided if bool(source.a) != has_side_a), None)
    if counterpart is None:
        return sources
    if any(node.op.is_random for node in (*first_source.nodes, *counterpart.nodes)):
        return sources
    merged = Source(
        a=first_source.a or counterpart.a, b=first_source.b or counterpart.b, share_inputs=False
    )
    return [merged, *(source for source in sources[1:] if source is not counterpart)]


def _with_same_call(comparison: Comparison, source: Source) -> Source:
    """Complete a one-sided source by the same call on the other side, if there is just one."""
    if len(source.nodes) == 2:
        return source
    (node,) = source.nodes
    counterpart = same_call(comparison, node)
    if counterpart is None:
        return source
    if comparison.side_of[node.op]:
        return Source(a=counterpart, b=node)
    return Source(a=node, b=counterpart)


def same_call(comparison: Comparison, node: Node) -> Node | None:
    """Return the operation of the same line and name on the other side.

    The result is None unless each side has exactly one such operation.
    """
    side = comparison.side_of[node.op]

    def find_same_calls(graph: Graph) -> list[Node]:
        """Return the operations of an execution with the same line, phase, module and name."""
        key = (alignment_key(node.op), node.op.line)
        return [
            candidate
            for candidate in graph.nodes
            if (alignment_key(candidate.op), candidate.op.line) == key
        ]

    same_side_calls = find_same_calls(comparison.graphs[side])
    counterparts = find_same_calls(comparison.graphs[1 - side])
    return counterparts[0] if len(same_side_calls) == len(counterparts) == 1 else None


def _inputs_and_bases(graph: Graph, node: Node) -> set[Value]:
    """Return the inputs of an operation, and the values that these are views of."""
    visited = set(node.inputs)
    queue = deque(node.inputs)
    while queue:
        maker = graph.maker.get(queue.popleft())
        if maker is not None and maker.op.is_view:
            queue.extend(value for value in maker.inputs if value not in visited)
            visited.update(maker.inputs)
    return visited


def find_external_values(comparison: Comparison, sources: Sequence[Source]) -> dict[Value, float]:
    """Find values whose small differences do not come from the operations of the step.

    These are data that differ by rounding, and results of operations that differ negligibly, for
    example because they are nondeterministic.

    Returns:
        The values of both sides, each with the relative difference from its counterpart.
    """
    external_values: dict[Value, float] = {}
    for source in sources:
        x, y = source.data_a, source.data_b
        if x is not None and y is not None and x.is_float_or_complex:
            gap = finite_distance(y.sketch, x.sketch)
            if gap <= _max_external_gap(comparison, source):
                external_values |= {x: gap, y: gap}
        elif source.a and source.b and _is_negligible_difference(source.a, source.b, source):
            pairs = list(zip(source.a.outputs, source.b.outputs, strict=False))
            gaps = [
                finite_distance(w.reference, v.reference)
                for v, w in pairs
                if v.reference is not None and w.reference is not None
            ]
            gap = max(gaps, default=0.0)
            external_values |= dict.fromkeys((*source.a.outputs, *source.b.outputs), gap)
    return external_values


def _max_external_gap(comparison: Comparison, source: Source) -> float:
    """Return the largest difference of data that rounding can explain.

    Data may have been computed outside torch from earlier values of the step, whose deviations they
    then inherit.
    """
    deviations = [0.0]
    for graph, value in zip(comparison.graphs, (source.data_a, source.data_b), strict=True):
        users = graph.users.get(value, []) if value is not None else []
        first_use = min((node.number for node in users), default=0)
        earlier_values = (
            v for node in graph.nodes[:first_use] for v in node.outputs if not v.is_pure_rounding
        )
        deviations += [v.deviation for v in earlier_values if math.isfinite(v.deviation)]
    return max(
        tol.EXTERNAL_DATA_TOLERANCE,
        min(
            tol.MAX_EXTERNAL_DATA_TOLERANCE, tol.EXTERNAL_TOLERANCE_PER_DEVIATION * max(deviations)
        ),
    )


def _is_negligible_difference(a: Node, b: Node, source: Source) -> bool:
    """Return whether two operations compute the same function in spite of different results.

    There are three reasons: float arguments that differ by rounding; nondeterminism; and kernels of
    one operation whose float64 results differ by less than a few roundings of float32, because some
    kernels use constants in float32.
    """
    if _has_rounded_arguments(a, b) or _is_within_spread(source):
        return True
    pairs = list(zip(a.outputs, b.outputs, strict=False))
    if a.op.name != b.op.name:
        pairs = pairs[:1]  # kernels of two libraries return different auxiliary outputs
    gaps = [
        finite_distance(y.reference, x.reference)
        for x, y in pairs
        if x.is_float_or_complex
        and x.reference is not None
        and y.reference is not None
        and x.shape == y.shape
    ]
    # Equal numbers can have different indices, for example equal scores in `topk`.
    has_other_indices = a.op.name in DEFINITIONS and any(
        x.is_integral and finite_distance(y.sketch, x.sketch) > 0 for x, y in pairs
    )
    is_same_call = kernel_name(a.op) == kernel_name(b.op) and not differing_arguments(a.op, b.op)
    return (
        is_same_call
        and not has_other_indices
        and bool(gaps)
        and max(gaps) <= tol.SAME_VALUE_TOLERANCE
    )


def _is_within_spread(source: Source) -> bool:
    """Return whether two nondeterministic results differ about as much as repetitions do."""
    assert source.a is not None
    assert source.b is not None
    spread = max((node.op.spread or 0.0 for node in source.nodes), default=0.0)
    gaps = (
        finite_distance(w.reference, v.reference)
        for v, w in zip(source.a.outputs, source.b.outputs, strict=False)
        if v.reference is not None and w.reference is not None
    )
    is_same_kernel = kernel_name(source.a.op) == kernel_name(source.b.op)
    return (
        is_same_kernel
        and spread > 0
        and max(gaps, default=math.inf) <= tol.MAX_REPEAT_SPREAD_RATIO * spread
    )


def _has_rounded_arguments(a: Node, b: Node) -> bool:
    """Return whether the arguments of two calls differ, but only in floats and by rounding."""
    if a.op.name != b.op.name or a.op.arguments.keys() != b.op.arguments.keys():
        return False
    pairs = [(x, b.op.arguments[name]) for name, x in a.op.arguments.items()]
    pairs = [(x, y) for x, y in pairs if x != y]
    return bool(pairs) and all(
        isinstance(x, float)
        and isinstance(y, float)
        and abs(x - y) <= tol.EXTERNAL_DATA_TOLERANCE * abs(x)
        for x, y in pairs
    )
