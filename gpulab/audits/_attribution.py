"""Attribute the differences of a step's results to operations, and order the findings.

The difference in loss, gradients and updates is passed back along the graphs of both executions, as
layer-wise relevance propagation passes back relevance in a network. Each operation keeps the share
of the incoming difference that its own error explains. It passes the rest on to its inputs in
proportion to their differences. Shares refer to squared differences, because independent errors add
up in squares. A value with a counterpart in the other execution is compared with the counterpart,
and any other value with its own float64 reference. All shares add up to one.

References:
    S. Bach et al. 2015, On pixel-wise explanations for non-linear classifier decisions by
        layer-wise relevance propagation, PLoS ONE 10(7).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

import numpy as np

from gpulab.audits import _tolerances as tol
from gpulab.audits._comparison import INFINITY, Comparison
from gpulab.audits._diagnosis import (
    GRADIENT_SCALER_OPERATION,
    LOST_UPDATE_PREFIX,
    OUT_OF_RANGE_ADVICE,
    SCALER_ADVICE,
    digit_loss_finding,
    find_short_format_origin,
    is_nonfinite_on_one_side,
)
from gpulab.audits._findings import KINDS, Finding, operation_and_place
from gpulab.audits._graphs import Node
from gpulab.audits._traces import Operation
from gpulab.audits._values import Value
from gpulab.settings import Setting

# Functions that are not finite for some finite inputs.
_FUNCTIONS = """
    acos acosh asin atanh digamma div erfinv lgamma log log10 log1p log2 logit pow reciprocal rsqrt
    sqrt tan
"""
FUNCTIONS_WITH_A_DOMAIN = frozenset(_FUNCTIONS.split())
# Kinds of findings about results that differ in float64, which no rounding explains.
SOURCE_KINDS = (
    "mismatch",
    "other data",
    "different random numbers",
    "cause not found",
    "cannot be told",
)
MAX_VISITS = 16  # a pair of values that is visited more often keeps the whole difference
# A value of the first side and its counterpart; either may be None.
ValuePair = tuple[Value | None, Value | None]


class Attribution:
    """How much of the difference in a step's results each operation explains.

    Attributes:
        total: The difference in all results.
        attributed: The part of `total` that each operation explains.
        attributed_to_data: The part of `total` that data and weights explain, by value.
        attributed_to_sources: The part of `total` in results that differ in float64.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.attributed: dict[Operation, float] = defaultdict(float)
        self.attributed_to_data: dict[Value, float] = defaultdict(float)
        self.attributed_to_sources = 0.0
        self._incoming: dict[ValuePair, float] = defaultdict(float)
        self._queue: list[tuple[float, int, ValuePair]] = []
        self._tiebreakers = itertools.count()
        self._visits: dict[ValuePair, int] = defaultdict(int)
        self.total = self._add_result_gaps()
        while self._queue:
            _, _, pair = heapq.heappop(self._queue)
            amount = self._incoming.pop(pair, 0.0)
            if amount:
                self._pass_back(pair, amount)

    def share(self, finding: Finding, siblings: Sequence[Finding]) -> float:
        """Return the share of the difference that a finding explains; NaN if it is unknown.

        Args:
            finding: A finding about an operation.
            siblings: All findings.
        """
        if finding.op is None:
            return finding.share
        if (
            not self.total
            or finding.kind in ("rounding", "not finite")
            or finding.detail.startswith(LOST_UPDATE_PREFIX)
        ):
            # A lost update has no separate share. Its effect belongs to the operation that computed
            # the update.
            return math.nan
        if finding.is_pairwise and self.attributed_to_sources:
            n_pairwise = sum(sibling.is_pairwise for sibling in siblings)
            return self.attributed_to_sources / self.total if n_pairwise == 1 else math.nan
        operations = (finding.op, *finding.counterparts)
        amount = sum(self.attributed[op] for op in operations)
        error = math.hypot(*map(_measured_error, operations))
        share_of_error = _explained_share(finding.size, error) if error else 1.0
        return amount * share_of_error / self.total

    def _add_result_gaps(self) -> float:
        """Add the differences in loss, gradients and updates, relative to each group's size."""
        comparison = self.comparison
        total = 0.0
        groups: dict[str, list[tuple[bool, Value, Value]]] = defaultdict(list)
        for result in comparison.results:
            pairs = zip(comparison.values(result.a), comparison.values(result.b), strict=False)
            groups[result.group] += [(result.agrees, x, y) for x, y in pairs]
        for group in groups.values():
            with np.errstate(over="ignore"):
                sizes = [float(np.linalg.norm(np.nan_to_num(x.sketch))) for _, x, _ in group]
            gaps = [comparison.gap(x, y) for _, x, y in group]
            absolute_gaps = [
                gap * (size or 1.0) if gap else 0.0 for gap, size in zip(gaps, sizes, strict=True)
            ]
            # The amount is limited to 1, which also replaces a gap that is not finite.
            amount = min(1.0, math.hypot(*absolute_gaps) / (math.hypot(*sizes) or 1.0))
            for (agrees, x, y), fraction in zip(group, _fractions(absolute_gaps), strict=True):
                if agrees:
                    self._add_incoming((x, y), amount * fraction)
                else:
                    self.attributed_to_sources += amount * fraction
            total += amount
        return total

    def _add_incoming(self, pair: ValuePair, amount: float) -> None:
        """Add an amount to a pair's difference; queue the pair if it is not waiting already."""
        if not amount:
            return
        if pair not in self._incoming:
            heapq.heappush(
                self._queue, (-self._relative_position(pair), next(self._tiebreakers), pair)
            )
        self._incoming[pair] += amount

    def _relative_position(self, pair: ValuePair) -> float:
        """Return the relative position at which a value was made: -1 for data, up to 1."""
        nodes = [
            (graph, graph.maker.get(v))
            for graph, v in zip(self.comparison.graphs, pair, strict=True)
            if v
        ]
        return max((node.number / len(graph.nodes) for graph, node in nodes if node), default=-1.0)

    def _pass_back(self, pair: ValuePair, amount: float) -> None:
        """Attribute a difference to the makers of a value by their errors; pass on the rest."""
        nodes = [
            graph.maker.get(v) if v else None
            for graph, v in zip(self.comparison.graphs, pair, strict=True)
        ]
        if not any(nodes):
            value = max((v for v in pair if v is not None), key=lambda v: v.deviation)
            self.attributed_to_data[value] += amount
            return
        inputs = self._inputs(nodes)
        gaps = [self._recorded_gap(input_pair) for input_pair in inputs]
        errors = [self._estimate_error(node) if node else 0.0 for node in nodes]
        self._visits[pair] += 1
        # A value that is computed again later may lead back to itself, so visits are limited.
        is_end = not any(gaps) or self._visits[pair] > MAX_VISITS
        share = 1.0 if is_end else _explained_share(math.hypot(*errors), self._recorded_gap(pair))
        if any(errors):
            node_fractions = _fractions(errors)
        else:
            n_nodes = sum(node is not None for node in nodes)
            node_fractions = [0.0 if node is None else 1.0 / n_nodes for node in nodes]
        for node, fraction in zip(nodes, node_fractions, strict=True):
            if node is not None:
                self.attributed[node.op] += amount * share * fraction
        for input_pair, fraction in zip(inputs, _fractions(gaps), strict=True):
            self._add_incoming(input_pair, amount * (1 - share) * fraction)

    def _inputs(self, nodes: Sequence[Node | None]) -> list[ValuePair]:
        """Pair the inputs of two operations that agree in float64; other inputs stay single."""
        pairs: dict[ValuePair, None] = {}
        for side, node in enumerate(nodes):
            other_node = nodes[1 - side]
            for value in node.inputs if node else ():
                if not value.is_float_or_complex:
                    continue
                equal_values = self.comparison.matches.equal.get(value, [])
                equal_inputs = [v for v in equal_values if other_node and v in other_node.inputs]
                graph = self.comparison.graphs[1 - side]
                counterpart = min(
                    equal_inputs or equal_values,
                    key=lambda v: graph.maker[v].number if v in graph.maker else -1,
                    default=None,
                )
                pair = (counterpart, value) if side else (value, counterpart)
                pairs[pair] = None
        return list(pairs)

    def _recorded_gap(self, pair: ValuePair) -> float:
        """Return the relative difference between a value and its counterpart or reference."""
        x, y = pair
        if x is not None and y is not None:
            return self.comparison.gap(x, y)
        value = x if y is None else y
        assert value is not None
        return value.deviation

    def _estimate_error(self, node: Node) -> float:
        """Return an operation's measured error, or estimate it by the growth of the deviation."""
        error = _measured_error(node.op)
        if error or node.op.error is not None or node.op.is_view:
            return error
        input_deviation = max(
            (value.deviation for value in node.inputs if value.is_float_or_complex), default=0.0
        )
        output_deviation = max((value.deviation for value in node.outputs), default=0.0)
        if not math.isfinite(output_deviation):
            return math.inf
        return math.sqrt(max(0.0, output_deviation**2 - input_deviation**2))


def _measured_error(op: Operation) -> float:
    """Combine an operation's error and its spread in repetitions, both relative to the result.

    >>> operation = Operation("mm", "forward", "", "", [], [], [], "float32", error=3.0, spread=4.0)
    >>> _measured_error(operation), _measured_error(replace(operation, error=math.nan))
    (5.0, inf)
    """
    sizes = [op.error or 0.0, op.spread or 0.0]
    return math.inf if any(map(math.isnan, sizes)) else math.hypot(*sizes)


def _explained_share(size: float, difference: float) -> float:
    """Return the share of a squared difference that an error explains; 1 if the error is unknown.

    >>> _explained_share(1.0, 2.0), _explained_share(math.inf, 2.0)
    (0.25, 1.0)
    """
    if math.isnan(size) or math.isinf(size):
        return 1.0
    return min(1.0, (size / difference) ** 2) if difference else 0.0


def _fractions(sizes: list[float]) -> list[float]:
    """Return the fraction that the square of each size has of the sum of squares.

    Infinite sizes share the whole sum equally. If all sizes are zero, so are the fractions.

    >>> _fractions([3.0, 4.0]), _fractions([1.0, math.inf]), _fractions([0.0])
    ([0.36, 0.64], [0.0, 1.0], [0.0])
    """
    if any(map(math.isinf, sizes)):
        sizes = [float(math.isinf(size)) for size in sizes]
    largest = max(sizes, default=0.0)
    if not largest:
        return [0.0 for _ in sizes]
    # The division keeps the squares of very large and very small sizes within the range of floats.
    squares = [(size / largest) ** 2 for size in sizes]
    total = sum(squares)
    return [square / total for square in squares]


# --- the order of findings ------------------------------------------------------------------------


class Rank(IntEnum):
    """The rank of a finding in the result; findings of equal rank are ordered by their share."""

    BEFORE_NONFINITE = -2  # a mismatch before the operation that made NaN or infinity
    NONFINITE = -1
    OVERWRITTEN = 0
    CAUSE = 1  # explains most of the difference, or has no bound
    PARTIAL_CAUSE = 2
    CONVERSION = 3  # a conversion to a short format
    ROUNDED_FACTORS = 4  # a product whose factors were rounded by an earlier operation
    ROUNDING = 5
    NEGLIGIBLE = 6


def rank_findings(comparison: Comparison, findings: Sequence[Finding]) -> list[Finding]:
    """Compute the share of the difference that each finding explains, and order the findings."""
    attribution = Attribution(comparison)
    digit_loss_op, digit_loss_detail = _find_digit_loss(comparison)
    overflow_advice = _advise_on_overflow(comparison, digit_loss_op)
    all_findings = [*findings, *_rounded_data_findings(comparison, attribution)]
    if digit_loss_op is not None and all(f.op is not digit_loss_op for f in all_findings):
        # The operation is right for its inputs, but NaN or infinity begins there.
        all_findings.append(digit_loss_finding(comparison, digit_loss_op))

    def complete(finding: Finding) -> Finding:
        """Add the share of a finding and, at the operation that lost the digits, its effect."""
        share = attribution.share(finding, all_findings)
        if digit_loss_op is None or finding.op is not digit_loss_op:
            return replace(finding, share=share)
        detail = finding.detail + digit_loss_detail
        return replace(
            finding, share=share, detail=detail, advice=overflow_advice or finding.advice
        )

    completed = _assign_unattributed_share(attribution, list(map(complete, all_findings)))
    explained = _merge_conversion_shares(comparison, completed)
    nonfinite_positions = [
        comparison.position[f.op] for f in explained if f.kind == "not finite" and f.op
    ]
    first_nonfinite = min(nonfinite_positions, default=0)

    def sort_key(finding: Finding) -> tuple[Rank, float, int]:
        """Return the rank of a finding, its negated share, and the number of its kind."""
        if (
            finding.kind == "mismatch"
            and finding.op
            and comparison.position[finding.op] < first_nonfinite
        ):
            return Rank.BEFORE_NONFINITE, 0.0, 0
        if (
            finding.is_pairwise
            and finding.kind in SOURCE_KINDS
            and not is_nonfinite_on_one_side(comparison)
        ):
            # A key below that of any share, -1 to 0. Sorting is stable, so these findings stay in
            # the order in which the executions begin to differ.
            return Rank.CAUSE, -2.0, 0
        is_digit_loss = finding.op is not None and finding.op is digit_loss_op
        rank = Rank.CAUSE if is_digit_loss else _rank_of(comparison, finding)
        # Among shares that are displayed as equal, the earlier operation comes first.
        return rank, -round(np.nan_to_num(finding.share), 2), KINDS.index(finding.kind)

    return sorted(explained, key=sort_key)


def _rounded_data_findings(comparison: Comparison, attribution: Attribution) -> list[Finding]:
    """Make findings about data and weights that were rounded to a short format before the step.

    There is one finding for each setting and module. It describes the last of their values, and its
    share is that of all of them. `decoder_in_bfloat16` is an example.
    """
    findings: dict[tuple[str, str], Finding] = {}
    for value, amount in attribution.attributed_to_data.items():
        side = 1 if value in comparison.graphs[1].users else 0
        user = next(iter(comparison.graphs[side].users.get(value, [])), None)
        if (
            user is None
            or value.dtype not in tol.SHORT_FORMATS
            or value.deviation <= tol.SAME_VALUE_TOLERANCE
        ):
            continue
        op = user.op
        trace = comparison.traces[side]
        detail = (
            f"received data or weights that differ by {value.deviation:.1e} (relative) from those"
            f" in float32, because they were rounded to {value.dtype}"
        )
        setting = Setting.parse(trace.setting)
        if setting.precision == value.dtype:
            advice = (
                f"{setting} requests it; autocast={value.dtype} keeps parameters, buffers and the"
                " batch in float32"
            )
        else:
            advice = (
                f"keep the input of {op.module or op.line or 'the step'} in float32 if that was"
                " intended: it is a parameter, a buffer or part of the batch"
            )
        key = trace.title, op.module
        earlier_share = findings[key].share if key in findings else 0.0
        findings[key] = Finding(
            kind="reduced precision",
            setting=trace.title,
            operation=op.name,
            phase=op.phase,
            module=op.module,
            line=op.line,
            ratio=math.nan,
            detail=detail,
            advice=advice,
            size=value.deviation,
            share=earlier_share + amount / attribution.total,
        )
    return list(findings.values())


def _merge_conversion_shares(comparison: Comparison, findings: Sequence[Finding]) -> list[Finding]:
    """Add the share of a conversion to a short format to the operation that uses its result.

    Autocast converts the inputs of a product, so the rounding error of the conversion belongs to
    the product.
    """
    index_of = {
        finding.op: index
        for index, finding in enumerate(findings)
        if finding.kind == "reduced precision"
    }
    shares = [finding.share for finding in findings]
    for index, finding in enumerate(findings):
        op = finding.op
        if op is None or op.name != "_to_copy" or op.dtype not in tol.SHORT_FORMATS:
            continue
        if finding.kind == "reduced precision" and finding.share > 0:
            consumer = _find_consumer(comparison, op)
            target = index_of.get(consumer) if consumer is not None else None
            if target is not None and findings[target].setting == finding.setting:
                shares[target] = np.nansum([shares[target], shares[index]])
                shares[index] = 0.0
    return [
        replace(finding, share=float(share))
        for finding, share in zip(findings, shares, strict=True)
    ]


def _find_consumer(comparison: Comparison, op: Operation) -> Operation | None:
    """Find the first operation that uses the result of a conversion, directly or through views."""
    graph = comparison.graphs[comparison.side_of[op]]
    queue = deque(graph.node_of[op].outputs)
    visited = set(queue)
    while queue:
        for node in graph.users.get(queue.popleft(), []):
            if not node.op.is_view:
                return node.op
            queue.extend(value for value in node.outputs if value not in visited)
            visited.update(node.outputs)
    return None


def _assign_unattributed_share(attribution: Attribution, findings: list[Finding]) -> list[Finding]:
    """Give `rounding` the share of the difference that no other finding explains."""
    attributed_share = sum(f.share for f in findings if not math.isnan(f.share))
    unattributed_share = max(0.0, 1.0 - attributed_share) if attribution.total else math.nan
    return [replace(f, share=unattributed_share) if f.kind == "rounding" else f for f in findings]


def _rank_of(comparison: Comparison, finding: Finding) -> Rank:
    """Return the rank of a finding.

    A nondeterministic operation comes after rounding if it explains a negligible share of the
    difference and all results agree in float64. Another valid answer comes after rounding unless a
    recorded result differs by more than rounding explains.
    """
    if finding.kind == "not finite":
        return Rank.NONFINITE
    if finding.kind == "overwritten":
        return Rank.OVERWRITTEN
    if not finding.has_bound or (
        finding.kind == "mismatch" and finding.share >= tol.EXPLAINED_SHARE
    ):
        return Rank.CAUSE
    if finding.kind == "reduced precision" and finding.op:
        if finding.detail.startswith(LOST_UPDATE_PREFIX):
            return Rank.CAUSE
        if finding.op.name == "_to_copy":
            return Rank.CONVERSION
        return Rank.ROUNDED_FACTORS if finding.op.has_rounded_factors else Rank.PARTIAL_CAUSE
    if finding.kind == "nondeterminism":
        is_negligible = finding.share < tol.NEGLIGIBLE_SHARE and not comparison.differing_results
        return Rank.NEGLIGIBLE if is_negligible else Rank.PARTIAL_CAUSE
    if finding.kind == "another valid answer":
        gaps = [comparison.recorded_gap(result) for result in comparison.results]
        # A gap is NaN if only one side has the result. It then counts as negligible.
        is_negligible = not any(gap > tol.MIN_UNEXPLAINED_DIFFERENCE for gap in gaps)
        return Rank.NEGLIGIBLE if is_negligible else Rank.PARTIAL_CAUSE
    return Rank.ROUNDING if finding.kind == "rounding" else Rank.PARTIAL_CAUSE


def _find_digit_loss(comparison: Comparison) -> tuple[Operation | None, str]:
    """Find and describe the operation that lost the digits before a one-sided NaN or infinity."""
    op = find_short_format_origin(comparison)
    if op is None or not is_nonfinite_on_one_side(comparison):
        return None, ""
    # Exactly one side has NaN or infinity.
    ((side, origin),) = comparison.not_finite.items()
    first_operation = origin.first_operation
    skipped_updates = _describe_skipped_updates(comparison, side)
    value_kind = INFINITY if origin.infinity else origin.value_kind
    conversion = f"{operation_and_place(first_operation)} turns the result into {value_kind}"
    if origin.cancellation is not None:
        detail = f"; nearly all digits are lost in it, and {conversion}{skipped_updates}"
        return origin.cancellation, detail
    if op is first_operation and _is_outside_domain(op):
        detail = (
            f"; its inputs were rounded to numbers for which the exact result is {value_kind} too"
            f"{skipped_updates}"
        )
        return op, detail
    if op is first_operation and value_kind != INFINITY:
        return (
            op,
            f"; it turns finite numbers into {value_kind}, but float64 does not{skipped_updates}",
        )
    if op is first_operation:
        return (
            op,
            f"; it turns numbers beyond the range of {op.dtype} into {value_kind}{skipped_updates}",
        )
    return op, f"; {conversion}{skipped_updates}"


def _is_outside_domain(op: Operation) -> bool:
    """Return whether a function is not finite for its inputs in float64 either, such as log(0).

    Then there is no error, because a result that is not finite has no size. A result that overflows
    only in a short format has an error.
    """
    return op.error is None and op.name.rstrip("_") in FUNCTIONS_WITH_A_DOMAIN


def _advise_on_overflow(comparison: Comparison, op: Operation | None) -> str:
    """Return advice on numbers beyond the range of a short format; empty without overflow.

    Args:
        comparison: The comparison, with NaN or infinity on one side only if `op` is given.
        op: The operation that lost the digits, from `_find_digit_loss`; None if there is none.
    """
    if op is None:
        return ""
    # `_find_digit_loss` finds an operation only if exactly one side has NaN or infinity.
    ((side, origin),) = comparison.not_finite.items()
    has_infinity = origin.infinity is not None or origin.value_kind == INFINITY
    is_overflow = (
        op is origin.first_operation
        and origin.cancellation is None
        and has_infinity
        and not _is_outside_domain(op)
    )
    if not is_overflow:
        return ""
    if _describe_skipped_updates(comparison, side):
        return SCALER_ADVICE
    return OUT_OF_RANGE_ADVICE.format(op.dtype)


def _describe_skipped_updates(comparison: Comparison, side: int) -> str:
    """Describe the updates that a gradient scaler skipped; empty if it skipped none."""
    if not any(op.name == GRADIENT_SCALER_OPERATION for op in comparison.traces[side].operations):
        return ""
    skipped = [result for result in comparison.differing_results if result.group == "updated"]
    return (
        f"; the gradient scaler skipped the step, so {len(skipped)} parameters keep their values"
        if skipped
        else ""
    )
