"""Compare two executions: find the results, values and operations that correspond in float64.

Results are compared first. Loss, returned values, gradients and updates are paired by their names,
by the initial values of the parameters, or as parts of each other. If all results agree in float64,
the two executions compute the same function, even if their operations differ.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from gpulab.audits import _tolerances as tol
from gpulab.audits._count_sketch import MAX_SKETCHED_NUMBER, SKETCH_SIZE
from gpulab.audits._graphs import Graph, Node
from gpulab.audits._matching import Matches, PartSearch, is_same_value, tolerance_of
from gpulab.audits._traces import (
    KERNEL_ALIASES,
    RANK,
    RANKS_NOTE,
    RESULT,
    TENSOR,
    Json,
    Operation,
    Trace,
    alignment_key,
)
from gpulab.audits._values import Value, finite_distance
from gpulab.settings import Setting

# Arguments that affect how and where an operation is executed, but not the function it computes.
_EXECUTION_ARGUMENTS = """
    allow_tf32 benchmark compute_log_sumexp cudnn_enabled deterministic generator
    grad_input_mask half_to_float memory_format non_blocking output_mask pin_memory
    return_debug_mask
"""
EXECUTION_ARGUMENTS = frozenset(_EXECUTION_ARGUMENTS.split())
SYNONYMS = {"epsilon": "eps", "exponential_average_factor": "momentum", "train": "training"}

NAN = "NaN"
INFINITY = "infinity"
LEAF_RESULTS = ("gradient", "updated")


@dataclass(frozen=True, eq=False)
class Result:
    """A result of the step on both sides, or on one side only.

    Attributes:
        a: The `RESULT` operation of the first trace, or None.
        b: The `RESULT` operation of the second trace, or None.
        agrees: Whether both sides are equal in float64, up to differences below float32 rounding.
        gap: The difference between both sides in float64, relative to their size.
        has_no_counterpart: Whether the other side has no such parameter or returned value.
    """

    a: Operation | None
    b: Operation | None
    agrees: bool
    gap: float = math.nan
    has_no_counterpart: bool = False

    @property
    def representative(self) -> Operation:
        """The operation of either side, from which common properties are read."""
        return self.a or self.b  # type: ignore[return-value]

    def of_side(self, side: int) -> Operation | None:
        """Return the `RESULT` operation of a side (0 or 1), or None."""
        return self.b if side else self.a

    @property
    def group(self) -> str:
        """The group of the result: `gradient`, `updated` or `loss`."""
        return self.representative.name if self.representative.name in LEAF_RESULTS else "loss"


@dataclass(frozen=True)
class OperationPair:
    """Two operations that compute the same value on both sides, or one without a counterpart."""

    a: Operation | None
    b: Operation | None

    @property
    def representative(self) -> Operation:
        """The operation of either side, from which common properties are read."""
        return self.a or self.b  # type: ignore[return-value]

    @property
    def operations(self) -> list[Operation]:
        """The one or two operations of the pair."""
        return [op for op in (self.a, self.b) if op is not None]


@dataclass(frozen=True)
class NotFinite:
    """The origin of the NaN or infinity in the results of a trace.

    Attributes:
        value_kind: `NAN` or `INFINITY`.
        op: The operation that produced it from finite numbers. If there is none, the first
            operation that received it.
        is_produced: Whether `op` produced it.
        infinity: The operation that produced the infinity from which `op` made NaN; None if there
            is no such operation.
        cancellation: The earlier operation whose result lost most of its digits, if there is one.
        results: The results that are not finite: the loss first, then gradients and updates.
        is_nonfinite_in_reference: Whether the float64 reference of any of the results is not finite
            or unknown.
    """

    value_kind: str
    op: Operation
    is_produced: bool
    infinity: Operation | None
    cancellation: Operation | None
    results: list[Operation]
    is_nonfinite_in_reference: bool

    @property
    def first_operation(self) -> Operation:
        """The operation that produced the infinity before a NaN, or else `op`."""
        return self.infinity or self.op


class Comparison:
    """Two traces: their results, and the values that agree in float64.

    Args:
        a: The first trace.
        b: The second trace.
        external_values: Values that come from outside torch or from nondeterministic operations,
            with the relative difference between the two sides. All values that follow from them are
            compared with a wider tolerance.
    """

    def __init__(
        self, a: Trace, b: Trace, external_values: Mapping[Value, float] = MappingProxyType({})
    ) -> None:
        self.a = a
        self.b = b
        self.traces = (a, b)
        self.graphs = (Graph(a), Graph(b))
        self.external_values = dict(external_values)
        self._short_format_sides = [_uses_short_format(trace) for trace in self.traces]
        self.uncertain = [
            graph.following({v for v in graph.trace.values.values() if not v.exact})
            for graph in self.graphs
        ]
        external_tolerance = min(
            1.0, tol.MAX_EXTERNAL_AMPLIFICATION * max(self.external_values.values(), default=0.0)
        )
        self._tolerances = [
            tolerance_of(
                graph,
                dict.fromkeys(graph.following(set(self.external_values)), external_tolerance)
                | dict.fromkeys(uncertain, self.inexact_tolerance([side])),
            )
            for side, (graph, uncertain) in enumerate(zip(self.graphs, self.uncertain, strict=True))
        ]
        self._values_of_first = set(a.values.values())
        self.side_of = {
            op: side for side, trace in enumerate(self.traces) for op in trace.operations
        }

    def tolerance(self, value: Value) -> float:
        """Return the relative distance up to which two references count as the same value."""
        side = 0 if value in self._values_of_first else 1
        return self._tolerances[side](value)

    def inexact_tolerance(self, sides: Sequence[int] = (0, 1)) -> float:
        """Return the relative difference that values without a reference may have.

        It is larger if any of the sides may compute in a short format.
        """
        float32_tolerance, short_format_tolerance = tol.INEXACT_TOLERANCES
        has_short_format = any(map(self.uses_short_format, sides))
        return short_format_tolerance if has_short_format else float32_tolerance

    # --- the two sides ----------------------------------------------------------------------------

    def uses_short_format(self, side: int) -> bool:
        """Return whether a side may compute in a format shorter than float32."""
        return self._short_format_sides[side]

    def trace_of(self, op: Operation) -> Trace:
        """Return the trace that an operation belongs to."""
        return self.traces[self.side_of[op]]

    def other_title(self, op: Operation) -> str:
        """Return the title of the trace that an operation does not belong to."""
        return self.traces[1 - self.side_of[op]].title

    def values(self, op: Operation | None) -> list[Value]:
        """Return the values of an operation's outputs, or of a result; empty for None."""
        return [self.trace_of(op).values[name] for name in op.outputs] if op else []

    @cached_property
    def position(self) -> dict[Operation, int]:
        """The index of each operation in its trace."""
        return {op: index for trace in self.traces for index, op in enumerate(trace.operations)}

    @cached_property
    def not_finite(self) -> dict[int, NotFinite]:
        """The origin of NaN or infinity in the results, by side (0 or 1)."""
        origins = {side: find_not_finite(graph) for side, graph in enumerate(self.graphs)}
        return {side: origin for side, origin in origins.items() if origin}

    # --- results ----------------------------------------------------------------------------------

    @cached_property
    def results(self) -> list[Result]:
        """The loss, other returned values, gradients and updates, and which of them agree."""
        result_ops = [
            [op for op in trace.operations if op.phase == RESULT] for trace in self.traces
        ]
        returned = [
            {(op.name, op.module): op for op in ops if op.name not in LEAF_RESULTS}
            for ops in result_ops
        ]
        results = [self._compare_result(a, b) for a, b in self._pair_returns(*returned)]
        leaves_a, leaves_b = (
            _find_leaves(trace, ops) for trace, ops in zip(self.traces, result_ops, strict=True)
        )
        pairs = self._pair_leaves(
            [leaf for leaf in leaves_a if not leaf.state],
            [leaf for leaf in leaves_b if not leaf.state],
        )
        for x, y in [*pairs, *_pair_states(leaves_a, leaves_b, pairs)]:
            gradients = (x.gradient if x else None, y.gradient if y else None)
            updates = (x.updated if x else None, y.updated if y else None)
            if any(gradients):
                results.append(self._compare_result(*gradients, starts=(x, y)))
            if any(updates):
                results.append(self._compare_result(*updates, starts=(x, y)))
        return self._accept_parts([result for result in results if not self._is_negligible(result)])

    def _pair_returns(
        self,
        returns_a: dict[tuple[str, str], Operation],
        returns_b: dict[tuple[str, str], Operation],
    ) -> list[tuple[Operation | None, Operation | None]]:
        """Pair returned values by name; if the programs differ, pair the others by content."""
        pairs: list[tuple[Operation | None, Operation | None]] = [
            (a, returns_b[key]) for key, a in returns_a.items() if key in returns_b
        ]
        unpaired_a = [a for key, a in returns_a.items() if key not in returns_b]
        unpaired_b = [b for key, b in returns_b.items() if key not in returns_a]
        for a in unpaired_a:
            candidates = [] if self.is_same_program else unpaired_b
            equal_results = (
                b for b in candidates if self._are_all_same(self.values(a), self.values(b))
            )
            counterpart = next(equal_results, None)
            if counterpart is not None:
                unpaired_b.remove(counterpart)
            pairs.append((a, counterpart))
        return [*pairs, *((None, b) for b in unpaired_b)]

    def _compare_result(
        self,
        a: Operation | None,
        b: Operation | None,
        starts: tuple[_Leaf | None, _Leaf | None] = (None, None),
    ) -> Result:
        """Compare a result of the two sides; `starts` are the leaves that the results belong to."""
        x = self.values(a)
        y = self.values(b)
        # A tensor that only one side has updated still has its initial value on the other side.
        if "updated" in {op.name for op in (a, b) if op}:
            start_a, start_b = starts
            if not x and start_a is not None:
                x = start_a.start
            if not y and start_b is not None:
                y = start_b.start
        if not x or len(x) != len(y):
            is_one_sided = a is None or b is None
            return Result(a, b, agrees=False, has_no_counterpart=is_one_sided and None in starts)
        pairs = list(zip(x, y, strict=True))
        agrees = all(
            is_same_value(v, w, self.tolerance) or self._differ_within_rounding(v, w)
            for v, w in pairs
        )
        return Result(a, b, agrees, gap=max(_reference_gap(v, w) for v, w in pairs))

    def _differ_within_rounding(self, x: Value, y: Value) -> bool:
        """Return whether two references differ by less than the rounding errors of float32.

        A constant with another precision causes such a difference. The tolerance is the deviation
        of the recorded value from its reference, on the more accurate side of those in float32.
        """
        float32_deviations = [
            value.deviation for side, value in enumerate((x, y)) if not self.uses_short_format(side)
        ]
        tolerance = tol.SAME_VALUE_TOLERANCE
        if float32_deviations:
            tolerance = max(tolerance, min(float32_deviations))
        return x.is_float_or_complex and _reference_gap(x, y) <= tolerance

    def _pair_leaves(
        self, leaves_a: list[_Leaf], leaves_b: list[_Leaf]
    ) -> list[tuple[_Leaf | None, _Leaf | None]]:
        """Pair parameters and buffers by initial value, and the remaining ones by results or name.

        Several leaves may have the same initial value, such as biases that are initialised with
        zeros. They are distinguished by their gradients, and then by their names. Only leaves of
        equal shape are paired.
        """
        unpaired_a = list(leaves_a)
        unpaired_b = list(leaves_b)
        pairs: list[tuple[_Leaf | None, _Leaf | None]] = []

        def have_same_name(x: _Leaf, y: _Leaf) -> bool:
            return x.name == y.name

        def have_same_start(x: _Leaf, y: _Leaf) -> bool:
            return bool(x.start) and self._are_all_same(x.start, y.start)

        def have_same_gradient(x: _Leaf, y: _Leaf) -> bool:
            return have_same_start(x, y) and self._are_all_same(
                self.values(x.gradient), self.values(y.gradient)
            )

        def have_same_results(x: _Leaf, y: _Leaf) -> bool:
            results = [self.values(leaf.gradient) + self.values(leaf.updated) for leaf in (x, y)]
            return bool(x.updated and y.updated) and self._are_all_same(*results)

        # The strictest rule comes first. Each rule pairs what the earlier rules left unpaired.
        rules: list[tuple[Callable[[_Leaf, _Leaf], bool], ...]] = [
            (have_same_name, have_same_gradient),
            (have_same_gradient,),
            (have_same_name, have_same_start),
            (have_same_start,),
            (have_same_results,),
            (have_same_name,),
        ]
        for conditions in rules:
            for x in list(unpaired_a):
                same_shape = (y for y in unpaired_b if y.shapes == x.shapes)
                y = next(
                    (y for y in same_shape if all(condition(x, y) for condition in conditions)),
                    None,
                )
                if y is not None:
                    unpaired_a.remove(x)
                    unpaired_b.remove(y)
                    pairs.append((x, y))
        replica_pairs = self._pair_replicas(pairs, unpaired_b)
        for _, replica in replica_pairs:
            unpaired_b.remove(replica)
        only_a = [(x, None) for x in unpaired_a]
        only_b = [(None, y) for y in unpaired_b]
        return [*pairs, *replica_pairs, *only_a, *only_b]

    def _pair_replicas(
        self, pairs: list[tuple[_Leaf | None, _Leaf | None]], unpaired_b: list[_Leaf]
    ) -> list[tuple[_Leaf, _Leaf]]:
        """Pair the copies of a parameter on later ranks.

        The copies of a parameter have the same name on all ranks, and the first rank's copy is
        paired already. A copy on a later rank gets the same counterpart, if their initial values
        agree. Only the second side is searched, because joined ranks are the second side when they
        are compared with a single process. Copies on the first side remain without a counterpart.
        """
        paired_with: dict[str, _Leaf] = {}  # the leaf of side a, by the name of its counterpart
        for x, y in pairs:
            if x is not None and y is not None:
                paired_with.setdefault(y.name, x)
        replica_pairs: list[tuple[_Leaf, _Leaf]] = []
        for replica in unpaired_b:
            parameter = paired_with.get(replica.name) if replica.is_replica else None
            if parameter is not None and self._are_all_same(parameter.start, replica.start):
                replica_pairs.append((parameter, replica))
        return replica_pairs

    def _are_all_same(self, values_a: list[Value], values_b: list[Value]) -> bool:
        """Return whether two lists have the same length and the same values in float64."""
        pairs = zip(values_a, values_b, strict=False)
        return len(values_a) == len(values_b) and all(
            is_same_value(x, y, self.tolerance) for x, y in pairs
        )

    def _is_negligible(self, result: Result) -> bool:
        """Return whether a result is a gradient of one side only that is zero up to rounding.

        A different program does not have to compute such a gradient.
        """
        if (result.a and result.b) or self.is_same_program:
            return False
        op = result.representative
        return op.name == "gradient" and all(value.is_pure_rounding for value in self.values(op))

    def _accept_parts(self, results: list[Result]) -> list[Result]:
        """Mark one-sided results that are parts of results of the other side as agreeing."""
        only_a = [result for result in results if result.b is None]
        only_b = [result for result in results if result.a is None]
        if not only_a or not only_b:
            return results
        values_a = [value for result in only_a for value in self.values(result.a)]
        values_b = [value for result in only_b for value in self.values(result.b)]
        parts = self._find_parts(values_a, values_b) | self._find_parts(values_b, values_a)
        agreeing = {
            r for r in (*only_a, *only_b) if parts.issuperset(self.values(r.representative))
        }
        return [Result(r.a, r.b, agrees=True) if r in agreeing else r for r in results]

    def _find_parts(self, values: list[Value], counterparts: list[Value]) -> set[Value]:
        """Return the values that are part of a counterpart, or that consist of counterparts."""
        search = PartSearch([value for value in counterparts if value.total], self.tolerance)
        return {value for value in values if search.contains(value) or search.covers(value)}

    @cached_property
    def is_same_program(self) -> bool:
        """Whether both traces are of the same step, so that they should have the same results."""
        return self.a.step == self.b.step

    @cached_property
    def has_ranks(self) -> bool:
        """Whether a trace was joined from ranks, whose parameters may be parts of whole ones."""
        return any(RANKS_NOTE in trace.notes for trace in self.traces)

    @cached_property
    def unpaired_results(self) -> list[Result]:
        """The results that only one of two programs has, such as additional parameters or outputs.

        Gradients and updates of ranks do not count. They must be equal to those of one process, or
        to parts of them.
        """
        if self.is_same_program:
            return []
        return [
            result
            for result in self.results
            if result.has_no_counterpart
            and not result.agrees
            and not (self.has_ranks and result.group != "loss")
        ]

    @cached_property
    def differing_results(self) -> list[Result]:
        """The results that do not agree in float64."""
        return [
            result
            for result in self.results
            if not result.agrees and result not in self.unpaired_results
        ]

    def recorded_gap(self, result: Result) -> float:
        """Return the relative difference of the recorded numbers; NaN for one-sided results."""
        if not (result.a and result.b):
            return math.nan
        return max(self.gaps(result.a, result.b))

    def gap(self, x: Value, y: Value) -> float:
        """Return the difference of two recorded values, relative to `x`, or to `y` if `x` is 0."""
        if x.content == y.content:
            return 0.0
        return _relative_gap(x.sketch, y.sketch)

    # --- corresponding values and operations ------------------------------------------------------

    @cached_property
    def matches(self) -> Matches:
        """The values that agree in float64."""
        return Matches(self.graphs, self.tolerance)

    @cached_property
    def partners(self) -> dict[Operation, Operation]:
        """The operations of both sides that compute the same values, in both directions.

        Operations with the same phase, module and name are paired first. No operation has more than
        one partner.
        """
        partners: dict[Operation, Operation] = {}
        graph_a, graph_b = self.graphs
        makers_in_b: dict[Value, list[Operation]] = defaultdict(list)
        for node in graph_b.nodes:
            for value in node.outputs:
                makers_in_b[value].append(node.op)

        def find_partner(node: Node, requires_same_call: bool) -> Operation | None:
            """Return an operation of b, still without a partner, that computes a value of a node.

            With `requires_same_call`, it must also have the node's phase, module and name.
            """
            key = alignment_key(node.op)
            for value in node.outputs:
                for equal_value in self.matches.equal.get(value, ()):
                    for op in makers_in_b[equal_value]:
                        if op in partners:
                            continue
                        if not requires_same_call or alignment_key(op) == key:
                            return op
            return None

        for requires_same_call in (True, False):
            for node in graph_a.nodes:
                if node.op in partners:
                    continue
                partner = find_partner(node, requires_same_call)
                if partner is not None:
                    partners[node.op] = partner
                    partners[partner] = node.op
        return partners

    @cached_property
    def pairs(self) -> list[OperationPair]:
        """The operations of both sides with their partners, followed by the results of both sides.

        The operations are in the order of `_merge_operations`.
        """
        operations_a, operations_b = (
            [op for op in trace.operations if op.phase != RESULT] for trace in self.traces
        )
        operation_pairs = _merge_operations(operations_a, operations_b, self.partners)
        result_pairs = [OperationPair(result.a, result.b) for result in self.results]
        return [*operation_pairs, *result_pairs]

    def gaps(self, a: Operation, b: Operation) -> list[float]:
        """Return the difference of each output of two operations; [0.0] without outputs."""
        pairs = zip(self.values(a), self.values(b), strict=False)
        return [self.gap(x, y) for x, y in pairs] or [0.0]


def _merge_operations(
    operations_a: list[Operation],
    operations_b: list[Operation],
    partners: Mapping[Operation, Operation],
) -> list[OperationPair]:
    """Merge the operations of two traces into one list, with partners in one pair.

    The operations of the first trace keep their order. An operation that only the second trace has
    is listed once all operations before it in the second trace are listed, and before the next
    pair.

    Args:
        operations_a: The operations of the first trace, in order.
        operations_b: The operations of the second trace, in order.
        partners: The partner of each operation that has one, in both directions.
    """
    pairs: list[OperationPair] = []
    remaining_b = deque(operations_b)
    paired_b: set[Operation] = set()  # operations of b that `pairs` has with their partners

    def list_unpaired_b() -> None:
        """List the operations of b without a partner, up to one whose pair is not listed yet."""
        while remaining_b:
            b = remaining_b[0]
            if b in partners and b not in paired_b:
                return
            remaining_b.popleft()
            if b not in partners:
                pairs.append(OperationPair(None, b))

    for a in operations_a:
        b = partners.get(a)
        if b is not None:
            list_unpaired_b()
            paired_b.add(b)
        pairs.append(OperationPair(a, b))
    list_unpaired_b()
    return pairs


def _reference_gap(x: Value, y: Value) -> float:
    """Return the relative difference of two float64 references; NaN if one is missing."""
    if x.reference is None or y.reference is None:
        return math.nan
    return _relative_gap(x.reference, y.reference)


def _relative_gap(x: np.ndarray, y: np.ndarray) -> float:
    """Return the distance of two sketches, relative to `x`, or to `y` if `x` is 0."""
    if x.any():
        return finite_distance(y, reference=x)
    return finite_distance(x, reference=y)


@dataclass(eq=False)
class _Leaf:
    """A parameter or buffer: its initial value, its gradient, and its update."""

    name: str
    start: list[Value]
    state: str = ""  # the name of an optimizer's state; empty for the parameter itself
    is_replica: bool = False  # whether it is a copy on a rank after the first
    gradient: Operation | None = None
    updated: Operation | None = None

    @property
    def shapes(self) -> list[list[int]]:
        return [value.shape for value in self.start]


def _uses_short_format(trace: Trace) -> bool:
    """Return whether a trace's setting or operations may use a format shorter than float32."""
    setting = Setting.parse(trace.setting)
    is_requested = bool(
        setting.emulated or setting.autocast or setting.precision in tol.SHORT_FORMATS
    )
    # A CPU ignores the flags of TF32.
    allows_tf32 = setting.kind == "cuda" and "tf32" in trace.arithmetic.values()
    return (
        is_requested or allows_tf32 or any(op.dtype in tol.SHORT_FORMATS for op in trace.operations)
    )


def _find_leaves(trace: Trace, results: list[Operation]) -> list[_Leaf]:
    """Collect the gradients and updates of a trace by the parameter or buffer they belong to."""
    leaves: dict[tuple[str, ...], _Leaf] = {}
    for op in results:
        if op.name in LEAF_RESULTS:
            key = (op.module, *op.inputs)
            start = [trace.values[name] for name in op.inputs]
            state = op.arguments.get("state", "")
            is_replica = bool(op.arguments.get(RANK))
            leaf = leaves.setdefault(key, _Leaf(op.module, start, state, is_replica))
            setattr(leaf, op.name, op)
    return list(leaves.values())


def _pair_states(
    leaves_a: list[_Leaf], leaves_b: list[_Leaf], pairs: list[tuple[_Leaf | None, _Leaf | None]]
) -> list[tuple[_Leaf | None, _Leaf | None]]:
    """Pair the states that the optimizers of both sides hold for corresponding parameters."""
    start_in_b = {tuple(x.start): tuple(y.start) for x, y in pairs if x and y}
    unpaired_states = [leaf for leaf in leaves_b if leaf.state]
    state_pairs: list[tuple[_Leaf | None, _Leaf | None]] = []
    for x in leaves_a:
        if x.state:
            start = start_in_b.get(tuple(x.start))
            y = next(
                (y for y in unpaired_states if y.state == x.state and tuple(y.start) == start), None
            )
            if y is not None:
                unpaired_states.remove(y)
            state_pairs.append((x, y))
    return [*state_pairs, *((None, y) for y in unpaired_states)]


def kernel_name(op: Operation) -> str:
    """Return the name of an operation; equivalent kernels of different libraries share a name."""
    return KERNEL_ALIASES.get(op.name, op.name)


# --- arguments ------------------------------------------------------------------------------------


def differing_arguments(a: Operation, b: Operation) -> dict[str, tuple[Json, Json]]:
    """Return the arguments whose values differ between two calls: both values by name.

    Only arguments that both calls have are compared, because other kernels and other versions of
    torch may have additional ones. Tensors are left out, and so are arguments that do not change
    the function that is computed, such as a memory format or the mask of requested gradients.
    """
    arguments_a, arguments_b = (
        {SYNONYMS.get(name, name): value for name, value in op.arguments.items()} for op in (a, b)
    )
    common_names = sorted((arguments_a.keys() & arguments_b.keys()) - EXECUTION_ARGUMENTS)
    common = {name: (arguments_a[name], arguments_b[name]) for name in common_names}
    if a.name != b.name:  # each kernel may substitute its own value for an argument that is None
        common = {name: pair for name, pair in common.items() if None not in pair}
    return {
        name: pair
        for name, pair in common.items()
        if repr(pair[0]) != repr(pair[1]) and TENSOR not in repr(pair)
    }


# --- NaN and infinity -----------------------------------------------------------------------------


def find_not_finite(graph: Graph) -> NotFinite | None:
    """Find the origin of NaN or infinity in a trace's loss, or else in its gradients, if any."""
    trace = graph.trace
    nans = {value for op in trace.operations if op.has_nan for value in op.outputs}
    nans |= {name for name, value in trace.values.items() if np.isnan(value.sketch).any()}
    infinities = {name for name, value in trace.values.items() if is_infinite(value.sketch)}
    results = [
        op
        for op in trace.operations
        if op.phase == RESULT and (nans | infinities) & set(op.outputs)
    ]
    if not results:
        return None
    # False sorts before True, so losses come before gradients and updates.
    results.sort(key=lambda op: op.name in LEAF_RESULTS)
    losses = [op for op in results if op.name not in LEAF_RESULTS]
    values = {value for op in losses or results for value in op.outputs}
    value_kind, nonfinite_names = (NAN, nans) if nans & values else (INFINITY, infinities)
    origin, is_produced = _find_origin(trace, nonfinite_names)
    infinity = None
    cancellation = None
    if is_produced:
        if value_kind == NAN:
            infinity = _find_infinity_source(graph, origin, infinities)
        cancellation = _find_cancellation(graph, infinity or origin)
    result_values = (trace.values[name] for op in results for name in op.outputs)
    is_nonfinite_in_reference = any(
        value.reference is None or not np.isfinite(value.total).all() for value in result_values
    )
    return NotFinite(
        value_kind=value_kind,
        op=origin,
        is_produced=is_produced,
        infinity=infinity,
        cancellation=cancellation,
        results=results,
        is_nonfinite_in_reference=is_nonfinite_in_reference,
    )


def _find_cancellation(graph: Graph, op: Operation) -> Operation | None:
    """Find the nearest earlier operation whose result lost most of its digits, if there is one.

    Cancellation is one cause of such a loss. The search is breadth-first: it goes back from the
    inputs of `op` to the operations that made them, then to the inputs of these, and so on.
    """
    queue = deque([op])
    visited = {op}
    while queue:
        earlier_op = queue.popleft()
        node = graph.node_of.get(earlier_op)
        if node is None:
            continue
        if earlier_op is not op and _loses_digits(node):
            return earlier_op
        for value in node.inputs:
            maker = graph.maker.get(value)
            if maker is not None and maker.op not in visited:
                visited.add(maker.op)
                queue.append(maker.op)
    return None


def _loses_digits(node: Node) -> bool:
    """Return whether the relative error of an output is far larger than that of the inputs."""
    outputs, inputs = (
        max(
            (
                value.deviation
                for value in values
                if value.is_float_or_complex and not is_infinite(value.sketch)
            ),
            default=0.0,
        )
        for values in (node.outputs, node.inputs)
    )
    return outputs > max(tol.MIN_DIGIT_LOSS_ERROR, tol.MIN_CANCELLATION_GROWTH * inputs)


def _find_infinity_source(graph: Graph, op: Operation, infinities: set[str]) -> Operation | None:
    """Find the operation that produced the infinity in another operation's inputs.

    The search goes back through the operations that passed the infinity on.
    """
    infinite = {graph.trace.values[name] for name in infinities}
    node = graph.node_of.get(op)
    queue = deque(value for value in node.inputs if value in infinite) if node else deque()
    visited = set(queue)
    while queue:
        node = graph.maker.get(queue.popleft())
        if node is None:
            continue
        infinite_inputs = [value for value in node.inputs if value in infinite]
        if not infinite_inputs:
            return node.op
        queue.extend(value for value in infinite_inputs if value not in visited)
        visited.update(infinite_inputs)
    return None


def is_infinite(sketch: np.ndarray) -> bool:
    """Return whether a value contains infinity, judged by its sketch.

    The sketch of a small tensor holds the numbers themselves. In the sketch of a large tensor,
    infinity counts as `MAX_SKETCHED_NUMBER`, and other terms of a sum may reduce it.
    """
    if sketch.size < SKETCH_SIZE:
        return bool(np.isinf(sketch).any())
    return bool(
        (
            np.abs(np.nan_to_num(sketch, posinf=MAX_SKETCHED_NUMBER, neginf=-MAX_SKETCHED_NUMBER))
            >= MAX_SKETCHED_NUMBER / 2
        ).any()
    )


def _find_origin(trace: Trace, nonfinite_names: set[str]) -> tuple[Operation, bool]:
    """Find the first operation that produced a non-finite value from finite inputs.

    Returns:
        The operation and True. If there is none, the first operation that reads or writes a
        non-finite value, and False.
    """
    for op in trace.operations:
        if (
            op.phase != RESULT
            and nonfinite_names & set(op.outputs)
            and not nonfinite_names & set(op.inputs)
        ):
            return op, True
    return next(op for op in trace.operations if nonfinite_names & set(op.values)), False
