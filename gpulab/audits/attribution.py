"""How much of the difference in a step's results each operation causes, and the order of the findings.

The difference in loss, gradients and updates is passed back along the graphs of both executions, as relevance is passed
back in a network: of the difference that arrives at a value, the operation that made it keeps the share that its own
error makes of it, and passes the rest on to its inputs, by how far these are off. Shares are of squares, as independent
errors add up. A value that the other execution has as well is compared with its counterpart, any other with its own
float64 reference. All shares add up to one.

References:
    S. Bach et al. 2015, On pixel-wise explanations for non-linear classifier decisions by layer-wise relevance
    propagation, PLoS ONE 10(7).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpulab.audits import tolerances as tol
from gpulab.audits.comparison import INFINITY, Comparison
from gpulab.audits.diagnosis import SCALER, UPDATE_LOST, is_nonfinite_on_one_side, rounded_before
from gpulab.audits.findings import KINDS, Finding, placed
from gpulab.audits.graphs import Node
from gpulab.audits.traces import Operation
from gpulab.audits.values import Value

# What is found where results differ in float64. No rounding explains that.
SOURCE_KINDS = ("mismatch", "other data", "different random numbers", "cause not found", "cannot be told")
MAX_VISITS = 16  # of one pair of values
Pair = tuple[Value | None, Value | None]  # a value of the first side and its counterpart; None where it has none


class Attribution:
    """How much of the difference in a step's results each operation makes.

    Attributes:
        total: The difference in all results.
        kept: What each operation makes of it.
        from_data: What goes back to data and weights, by the value.
        from_sources: What is in results that differ in float64.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.kept: dict[Operation, float] = defaultdict(float)
        self.from_data: dict[Value, float] = defaultdict(float)
        self.from_sources = 0.0
        self._arrived: dict[Pair, float] = defaultdict(float)
        self._waiting: list[tuple[float, int, Pair]] = []
        self._numbers = itertools.count()
        self._visits: dict[Pair, int] = defaultdict(int)
        self.total = self._begin()
        while self._waiting:
            _, _, pair = heapq.heappop(self._waiting)
            amount = self._arrived.pop(pair, 0.0)
            if amount:
                self._pass_back(pair, amount)

    def share(self, finding: Finding, siblings: Sequence[Finding]) -> float:
        """The share of the difference that a finding explains, or NaN if there is no difference or no way to tell.

        Args:
            finding: A finding about an operation.
            siblings: All findings.
        """
        if finding.op is None:
            return finding.share
        if not self.total or finding.kind in ("rounding", "not finite") or finding.detail.startswith(UPDATE_LOST):
            return math.nan  # the rounding of an update counts for the operation that made it
        if finding.is_pairwise and self.from_sources:
            alike = [other for other in siblings if other.is_pairwise]
            return self.from_sources / self.total if len(alike) == 1 else math.nan
        kept = sum(self.kept[op] for op in (finding.op, *finding.others))
        own = math.hypot(*(_own_error(op) for op in (finding.op, *finding.others)))
        return kept * (_share_explained(finding.size, own) if own else 1.0) / self.total

    def _begin(self) -> float:
        """Loss, gradients and what was updated count by how far each of these is apart as a whole, relative to it."""
        comparison, total = self.comparison, 0.0
        groups: dict[str, list[tuple[bool, Value, Value]]] = defaultdict(list)
        for result in comparison.results:
            pairs = zip(comparison.values(result.a), comparison.values(result.b), strict=False)
            groups[result.group] += [(result.agrees, x, y) for x, y in pairs]
        for of_group in groups.values():
            with np.errstate(over="ignore"):
                sizes = [float(np.linalg.norm(np.nan_to_num(x.sketch))) for _, x, _ in of_group]
            gaps = [comparison.gap(x, y) for _, x, y in of_group]
            apart = [gap * (size or 1.0) if gap else 0.0 for gap, size in zip(gaps, sizes, strict=True)]
            amount = min(1.0, math.hypot(*apart) / (math.hypot(*sizes) or 1.0))  # 1 where nobody can tell how far
            for (agrees, x, y), fraction in zip(of_group, _fractions(apart), strict=True):
                if agrees:
                    self._arrive((x, y), amount * fraction)
                else:
                    self.from_sources += amount * fraction
            total += amount
        return total

    def _arrive(self, pair: Pair, amount: float) -> None:
        if not amount:
            return
        if pair not in self._arrived:
            heapq.heappush(self._waiting, (-self._place(pair), next(self._numbers), pair))
        self._arrived[pair] += amount

    def _place(self, pair: Pair) -> float:
        """How late a value was made: from 0 for data to 1 for what was made last."""
        nodes = [(graph, graph.maker.get(v)) for graph, v in zip(self.comparison.graphs, pair, strict=True) if v]
        return max((node.number / len(graph.nodes) for graph, node in nodes if node), default=-1.0)

    def _pass_back(self, pair: Pair, amount: float) -> None:
        """Leave with the operations that made a value what they make of a difference, and pass on the rest."""
        nodes = [graph.maker.get(v) if v else None for graph, v in zip(self.comparison.graphs, pair, strict=True)]
        if not any(nodes):
            value = max((v for v in pair if v is not None), key=lambda v: v.deviation)
            self.from_data[value] += amount
            return
        inputs = self._inputs(nodes)
        gaps = [self._apart(other) for other in inputs]
        own = [self._own_error(node) if node else 0.0 for node in nodes]
        self._visits[pair] += 1
        # A value that is made again later may lead back to itself.
        is_end = not any(gaps) or self._visits[pair] > MAX_VISITS
        share = 1.0 if is_end else _share_explained(math.hypot(*own), self._apart(pair))
        parts = (
            _fractions(own)
            if any(own)
            else [float(node is not None) / sum(n is not None for n in nodes) for node in nodes]
        )
        for node, part in zip(nodes, parts, strict=True):
            if node is not None:
                self.kept[node.op] += amount * share * part
        for other, fraction in zip(inputs, _fractions(gaps), strict=True):
            self._arrive(other, amount * (1 - share) * fraction)

    def _inputs(self, nodes: Sequence[Node | None]) -> list[Pair]:
        """What two operations were given: pairs of values that are one in float64, and the others alone."""
        pairs: dict[Pair, None] = {}
        for side, node in enumerate(nodes):
            other_node = nodes[1 - side]
            for value in node.inputs if node else ():
                if not value.is_float_or_complex:
                    continue
                equal = self.comparison.matches.equal.get(value, [])
                there = [other for other in equal if other_node and other in other_node.inputs]
                graph = self.comparison.graphs[1 - side]
                other = min(
                    there or equal, key=lambda v: graph.maker[v].number if v in graph.maker else -1, default=None
                )
                pairs[(other, value) if side else (value, other)] = None
        return list(pairs)

    def _apart(self, pair: Pair) -> float:
        """How far the recorded numbers of a value are from its counterpart's, or from its own reference."""
        x, y = pair
        if x is not None and y is not None:
            return self.comparison.gap(x, y)
        value = x if y is None else y
        assert value is not None
        return value.deviation

    def _own_error(self, node: Node) -> float:
        """An operation's own error; if it was not measured, how much further off its result is than its inputs."""
        error = _own_error(node.op)
        if error or node.op.error is not None or node.op.is_view:
            return error
        before = max((value.deviation for value in node.inputs if value.is_float_or_complex), default=0.0)
        after = max((value.deviation for value in node.outputs), default=0.0)
        return math.sqrt(max(0.0, after**2 - before**2)) if math.isfinite(after) else math.inf


def _own_error(op: Operation) -> float:
    """What the own error of an operation and what does not repeat of it make, relative to its result.

    >>> once = Operation("mm", "forward", "", "", [], [], [], "float32", error=3.0, spread=4.0)
    >>> _own_error(once), _own_error(replace(once, error=math.nan))
    (5.0, inf)
    """
    sizes = [op.error or 0.0, op.spread or 0.0]
    return math.inf if any(map(math.isnan, sizes)) else math.hypot(*sizes)


def _share_explained(size: float, apart: float) -> float:
    """The share of a difference, in squares, that something of a size explains; all where the size is not known.

    >>> _share_explained(1.0, 2.0), _share_explained(math.inf, 2.0)
    (0.25, 1.0)
    """
    if math.isnan(size) or math.isinf(size):
        return 1.0
    return min(1.0, (size / apart) ** 2) if apart else 0.0


def _fractions(sizes: list[float]) -> list[float]:
    """What each makes of the sum of all, in squares; what is infinite makes all of it.

    >>> _fractions([3.0, 4.0]), _fractions([1.0, math.inf]), _fractions([0.0])
    ([0.36, 0.64], [0.0, 1.0], [0.0])
    """
    if any(map(math.isinf, sizes)):
        sizes = [float(math.isinf(size)) for size in sizes]
    most = max(sizes, default=0.0)
    squares = [(size / most) ** 2 if most else 0.0 for size in sizes]
    return [square / sum(squares) if most else 0.0 for square in squares]


# --- the order of findings -----------------------------------------------------------------------------------


def ranked(comparison: Comparison, findings: Sequence[Finding]) -> list[Finding]:
    """The findings of a comparison, what explains most of the difference first."""
    attribution = Attribution(comparison)
    lost, becomes = _lost_before_nan(comparison)
    findings = [*findings, *_rounded_data(comparison, attribution)]
    findings = [
        replace(f, share=attribution.share(f, findings), detail=f.detail + becomes * (f.op is lost)) for f in findings
    ]
    findings = _with_conversions(comparison, _with_the_rest(attribution, findings))
    begins = min((comparison.position[f.op] for f in findings if f.kind == "not finite" and f.op), default=0)

    def order(finding: Finding) -> tuple[int, float, int]:
        if finding.kind == "mismatch" and finding.op and comparison.position[finding.op] < begins:
            return -2, 0.0, 0
        if finding.is_pairwise and finding.kind in SOURCE_KINDS and not is_nonfinite_on_one_side(comparison):
            return 1, -2.0, 0  # in the order in which the executions begin to differ
        tier = 1 if finding.op and finding.op is lost else _tier(comparison, finding)
        # Of shares that are shown as the same, the first operation's comes first, and what follows from it later.
        return tier, -round(np.nan_to_num(finding.share), 2), KINDS.index(finding.kind)

    return sorted(findings, key=order)


def _rounded_data(comparison: Comparison, attribution: Attribution) -> list[Finding]:
    """Data and weights that a setting rounded to a short format before the step began (`decoder_in_bfloat16`)."""
    found: dict[tuple[str, str], Finding] = {}
    for value, amount in attribution.from_data.items():
        side = int(value in comparison.graphs[1].users)
        user = next(iter(comparison.graphs[side].users.get(value, [])), None)
        if user is None or value.dtype not in tol.SHORT_FORMATS or value.deviation <= tol.SAME_VALUE_TOLERANCE:
            continue
        op, trace = user.op, comparison.traces[side]
        detail = (
            f"was given data or weights that are {value.deviation:.1e} (relative) from those in float32, as rounding "
            f"them to {value.dtype} makes it"
        )
        advice = (
            f"keep what {op.module or op.line or 'the step'} is given in float32 if it was meant to be: it is a "
            "parameter or buffer, or in the batch"
        )
        share = amount / attribution.total
        before = found.get((trace.title, op.module))
        if before is not None:
            share += before.share
        place = trace.title, op.name, op.phase, op.module, op.line
        finding = Finding("reduced precision", *place, math.nan, detail, advice, size=value.deviation, share=share)
        found[trace.title, op.module] = finding
    return list(found.values())


def _with_conversions(comparison: Comparison, findings: Sequence[Finding]) -> list[Finding]:
    """The findings, where the share of a conversion to a short format counts for the operation that it was made for.

    Autocast converts what a product is given, so that the rounding of the conversion is that of the product.
    """
    by_op = {finding.op: place for place, finding in enumerate(findings) if finding.kind == "reduced precision"}
    shares = [finding.share for finding in findings]
    for place, finding in enumerate(findings):
        op = finding.op
        if op is None or op.name != "_to_copy" or op.dtype not in tol.SHORT_FORMATS:
            continue
        if finding.kind == "reduced precision" and finding.share > 0:
            user = _user_of(comparison, op)
            other = by_op.get(user) if user is not None else None
            if other is not None and findings[other].setting == finding.setting:
                shares[other] = np.nansum([shares[other], shares[place]])
                shares[place] = 0.0
    return [replace(finding, share=float(share)) for finding, share in zip(findings, shares, strict=True)]


def _user_of(comparison: Comparison, op: Operation) -> Operation | None:
    """The first operation that computes with what a conversion made, perhaps through views of it."""
    graph = comparison.graphs[comparison.side_of[op]]
    front = list(graph.node_of[op].outputs)
    for value in front:  # which grows
        for node in graph.users.get(value, []):
            if not node.op.is_view:
                return node.op
            front += [other for other in node.outputs if other not in front]
    return None


def _with_the_rest(attribution: Attribution, findings: list[Finding]) -> list[Finding]:
    """The findings, of which `rounding` gets the share of the difference that goes back to no other."""
    told = sum(f.share for f in findings if not math.isnan(f.share))
    rest = max(0.0, 1.0 - told) if attribution.total else math.nan
    return [replace(f, share=rest) if f.kind == "rounding" else f for f in findings]


def _tier(comparison: Comparison, finding: Finding) -> int:
    """Where a finding stands before shares are compared; the smallest number comes first.

    First comes what was wrong before another operation made NaN or infinity of it, and then these. Then wrong memory,
    which may explain everything. Then what made a NaN of one setting alone possible, what has no
    bound, and a mismatch that explains most of the difference. Among reduced precision a cast, and a product of factors
    that were rounded before, come after what they are parts of.
    What does not repeat itself, and makes next to nothing of the difference, comes after the rounding that makes it;
    so does another valid answer, unless some result is further apart than roundings lead.
    """
    if finding.kind in ("not finite", "overwritten"):
        return -1 if finding.kind == "not finite" else 0
    if not finding.has_bound or (finding.kind == "mismatch" and finding.share >= tol.EXPLAINED_SHARE):
        return 1
    if finding.kind == "reduced precision" and finding.op:
        if finding.detail.startswith(UPDATE_LOST):
            return 1
        return 3 if finding.op.name == "_to_copy" else 2 + 2 * finding.op.has_rounded_factors
    if finding.kind == "nondeterminism":
        return 6 if finding.share < tol.NEGLIGIBLE_SHARE and not comparison.differing else 2
    if finding.kind == "another valid answer":
        return (
            2 if any(comparison.apart(result) > tol.MIN_UNEXPLAINED_DIFFERENCE for result in comparison.results) else 6
        )
    return 5 if finding.kind == "rounding" else 2


def _lost_before_nan(comparison: Comparison) -> tuple[Operation | None, str]:
    """The operation that lost the digits before a NaN or infinity of one side alone, and what is said of that."""
    op = rounded_before(comparison)
    if op is None or not is_nonfinite_on_one_side(comparison):
        return None, ""
    ((side, origin),) = comparison.not_finite.items()
    first, skipped = origin.first, _skipped(comparison, side)
    what = INFINITY if origin.infinity else origin.what
    if origin.cancelled is not None:
        becomes = f"{placed(first)} turns the result into {what}"
        return origin.cancelled, f"; its terms cancel, so that nearly all digits are lost, and {becomes}{skipped}"
    if op is first:
        return op, f"; it turns numbers beyond the range of {op.dtype} into {what}{skipped}"
    return op, f"; {placed(first)} turns the result into {what}{skipped}"


def _skipped(comparison: Comparison, side: int) -> str:
    """What is said of updates that a gradient scaler skipped."""
    if not any(op.name == SCALER for op in comparison.traces[side].operations):
        return ""
    skipped = [result for result in comparison.differing if result.group == "updated"]
    return f"; the gradient scaler skipped the step, so {len(skipped)} parameters keep their values" if skipped else ""
