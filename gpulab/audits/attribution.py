"""Which finding explains how much of the difference in a step's results, from what two traces hold.

The difference in loss, gradients and what was updated is passed back along the values, as relevance is passed back in a
network: of the difference that arrives at what an operation made, the operation keeps the share that its own error
makes of it, and passes the rest on to what it was given, by how far that is apart. All in squares, as independent
errors add up. Where the operations themselves were found to be others, they keep what their inputs cannot have made.

References:
    S. Bach et al. 2015, On pixel-wise explanations for non-linear classifier decisions by layer-wise relevance
    propagation, PLoS ONE 10(7).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gpulab.audits.comparison import Comparison, or_infinite
from gpulab.audits.findings import KINDS, Finding
from gpulab.audits.judgement import Judge
from gpulab.audits.tolerances import (
    CAST_ALONE,
    EXPLAINED,
    INHERITED,
    LITTLE,
    SHORT,
    UNEXPLAINED,
)
from gpulab.audits.tracer import RESULT, Operation

Values = tuple[str, str]  # the names of a value under the first setting, and of what stands for it under the second


class Attribution:
    """The difference of some results passed back to where it comes from.

    Args:
        comparison: The two traces.
        findings: What was found about them.
        results: The results whose difference is passed back; by default all that the step is for. Loss, gradients and
            what was updated count by how far each of these is apart as a whole, relative to its size.
    """

    def __init__(
        self, comparison: Comparison, findings: list[Finding], results: list[tuple[Operation, Operation]] | None = None
    ) -> None:
        self.comparison = comparison
        self.number = {id(op): number for number, pair in enumerate(comparison.pairs) for op in (pair.a, pair.b) if op}
        self.found_between = {
            id(op)
            for finding in findings
            if finding.side_by_side
            for op in comparison.partners.get(id(finding.op), (finding.op,))
        }
        # Where results begin to part without a cause: there what the inputs make is not held against the operation.
        self.begins = {id(finding.op) for finding in findings if finding.kind == "cause not found"}
        # What arrives at the values that a pair of operations made, by the number of the pair.
        self.arrived: dict[int, dict[Values, float]] = defaultdict(lambda: defaultdict(float))
        # What operations keep that were found side by side, and what those of one setting alone keep for their errors.
        self.kept_between: dict[int, float] = defaultdict(float)
        self.kept_alone: dict[int, float] = defaultdict(float)
        self.total = self._begin(results)
        self.lost = 0.0  # what goes back to nothing that is known
        for number in reversed(range(len(comparison.pairs))):
            pair = comparison.pairs[number]
            if pair.a and pair.b:
                for values, amount in self.arrived[number].items():
                    self._pass_back(pair.a, pair.b, values, amount)

    def share(self, finding: Finding) -> float:
        """How much of the difference goes back to a finding; NaN where there is no difference."""
        op = finding.op
        if op is None or not self.total or finding.kind in ("rounding", "not finite"):
            return math.nan
        if finding.kind == "cause not found":
            return (self.kept_between[id(op)] + self.lost) / self.total
        if finding.side_by_side:
            return self.kept_between[id(op)] / self.total
        if id(op) in self.comparison.partners:
            arrived = self.arrived[self.number[id(op)]]
            attributed = 0.0
            for values, amount in arrived.items():
                apart = self._gap(*values)
                attributed += amount * _square(finding.size, apart)
        else:
            attributed = self.kept_alone[id(op)] * _square(finding.size, math.sqrt(_own_square(op)))
        return attributed / self.total

    def _begin(self, results: list[tuple[Operation, Operation]] | None) -> float:
        """Give every result its part of the difference, and return the sum of them."""
        groups: dict[str, list[tuple[Operation, Operation]]] = defaultdict(list)
        for a, b in results or self.comparison.matched:
            if a.phase == RESULT:
                groups[a.name if a.name in ("gradient", "updated") else "loss"].append((a, b))
        total = 0.0
        for pairs in groups.values():
            values = [value_pair for a, b in pairs for value_pair in zip(a.outputs, b.outputs, strict=False)]
            apart = [self._apart(*value_pair) for value_pair in values]
            size = math.hypot(*(float(np.linalg.norm(self.comparison.a.sketches[x])) for x, _ in values))
            total_distance = math.hypot(*apart)
            if not total_distance:
                continue
            amount = (
                min(1.0, total_distance / size)
                if size and math.isfinite(total_distance) and math.isfinite(size)
                else 1.0
            )
            owners = [self.number[id(a)] for a, b in pairs for _ in zip(a.outputs, b.outputs, strict=False)]
            for number, value_pair, fraction in zip(owners, values, _fractions(apart), strict=True):
                if fraction:
                    self.arrived[number][value_pair] += amount * fraction
            total += amount
        return total

    def _apart(self, x: str, y: str) -> float:
        """The norm of the difference of two values; infinite where one of them alone has NaN or infinity."""
        first, second = self.comparison.a.sketches[x], self.comparison.b.sketches[y]
        if first.shape != second.shape:
            return math.inf
        same = (first == second) | (np.isnan(first) & np.isnan(second))
        with np.errstate(invalid="ignore", over="ignore"):
            return or_infinite(float(np.linalg.norm(np.where(same, 0.0, second - first))))

    def _gap(self, x: str, y: str) -> float:
        """How far two values are apart, relative; infinite where one of their makers alone made NaN."""
        return or_infinite(self.comparison.gap(x, y))

    def _pass_back(self, a: Operation, b: Operation, values: Values, amount: float) -> None:
        comparison = self.comparison
        input_pairs = [values] if a.phase == RESULT else [*zip(a.inputs, b.inputs, strict=False)]
        input_pairs = [value_pair for value_pair in input_pairs if value_pair[0] != value_pair[1]]
        gaps = [self._gap(*value_pair) for value_pair in input_pairs]
        apart = self._gap(*values)
        own = 0.0 if a.phase == RESULT else _square(math.sqrt(_own_square(a) + _own_square(b)), apart)
        between = next((id(op) for op in (b, a) if id(op) in self.found_between), None)
        if between is not None:
            inherited = [
                gap
                for value_pair, gap in zip(input_pairs, gaps, strict=True)
                if between in self.begins or comparison.common(*value_pair, a)
            ]
            excess = max(0.0, 1 - own - _square(INHERITED * math.hypot(0.0, *inherited), apart))
            self.kept_between[id(a)] += amount * excess
            self.kept_between[id(b)] += amount * excess
            own += excess
        if not any(gaps):
            self.lost += amount * (1 - own)
            return
        for value_pair, fraction in zip(input_pairs, _fractions(gaps), strict=True):
            if fraction and own < 1:
                self._arrive(value_pair, amount * (1 - own) * fraction, a)

    def _arrive(self, values: Values, amount: float, user: Operation) -> None:
        """Bring an amount to who made two values: a pair of operations, or those of one setting alone before them."""
        common = self.comparison.common(*values, user)
        if common:
            self.arrived[self.number[id(common[0])]][values] += amount
            return
        stretch = self.comparison.stretch(*values)
        alone = [*stretch.alone_b, *stretch.alone_a]
        before = [entry for entry in stretch.before if entry[2]]
        squares = [*map(_own_square, alone), *(or_infinite(gap) ** 2 for _, _, gap in before)]
        inherited = _square(INHERITED * math.sqrt(sum(squares)), self._gap(*values))
        makers = [self.comparison.maker(1, values[1]), self.comparison.maker(0, values[0])]
        blamed = [op for op in (*makers, *alone) if op is not None and id(op) in self.found_between]
        excess = amount * (1 - inherited)
        if blamed:
            self.kept_between[id(blamed[0])] += excess
        else:
            self.lost += excess
        fractions = _fractions([math.sqrt(square) for square in squares])
        for op, fraction in zip(alone, fractions, strict=False):
            self.kept_alone[id(op)] += (amount - excess) * fraction
        for (op, number, _), fraction in zip(before, fractions[len(alone) :], strict=True):
            a, b = self.comparison.partners[id(op)]
            self.arrived[self.number[id(a)]][a.outputs[number], b.outputs[number]] += (amount - excess) * fraction


def _own_square(op: Operation) -> float:
    """The square of what an operation's own error and what does not repeat of it make, relative to its result."""
    sizes = or_infinite(op.error or 0.0), or_infinite(op.spread or 0.0)
    return sum(size**2 for size in sizes)


def _square(size: float, apart: float) -> float:
    """The share of a difference, in squares, that something of a size explains; all where the size is not known."""
    if math.isnan(size) or math.isinf(size):
        return 1.0
    return min(1.0, (size / apart) ** 2) if apart else 0.0


def _fractions(sizes: list[float]) -> list[float]:
    """What each makes of the sum of all, in squares; what is infinite makes all of it."""
    if any(map(math.isinf, sizes)):
        sizes = [float(math.isinf(size)) for size in sizes]
    most = max(sizes, default=0.0)
    squares = [(size / most) ** 2 if most else 0.0 for size in sizes]
    return [square / sum(squares) if most else 0.0 for square in squares]


# --- the order of findings -----------------------------------------------------------------------------------


def ranked(judge: Judge, confirmed: Mapping[str, float] | None = None) -> list[Finding]:
    """The findings of a comparison, what explains most of the difference first, and after each what it explains.

    Args:
        judge: What was found.
        confirmed: How much of the difference went when a line was put right, by the line; for findings of other lines
            it is estimated.
    """
    comparison = judge.comparison
    attribution = Attribution(comparison, judge.findings)
    findings = [replace(finding, share=attribution.share(finding)) for finding in judge.findings]
    weights = {id(finding): finding.share for finding in findings}
    explainers = _explainers(judge, findings, weights)
    # Results that part without a cause of their own are no finding where what was found explains them.
    findings = [finding for finding in findings if finding.kind != "cause not found" or id(finding) not in explainers]
    of_line: dict[tuple[str, str], float] = defaultdict(float)
    for finding in findings:
        first = _first_explainer(finding, explainers)
        of_line[first.kind, first.place] += 0.0 if math.isnan(weights[id(finding)]) else weights[id(finding)]

    parted = any(
        id(a) in judge.parted or any(or_infinite(gap) > UNEXPLAINED for gap in comparison.gaps(a.outputs, b.outputs))
        for a, b in comparison.matched
        if a.phase == RESULT
    )

    origins = [comparison.position[id(f.op)] for f in findings if f.kind == "not finite"]

    def tier(finding: Finding) -> int:
        wrong = finding.kind == "mismatch" and id(finding.op) in judge.wrong_alone
        if wrong and comparison.position[id(finding.op)] < min(origins, default=0):
            return -2  # what was wrong before another operation made NaN or infinity of it
        return _tier(finding, None in comparison.first_nan and id(finding.op) in comparison.nan_causes, parted)

    def order(finding: Finding) -> tuple[object, ...]:
        share = of_line[finding.kind, finding.place]
        share = (confirmed or {}).get(finding.place, share)
        own = weights[id(finding)]
        return (
            tier(finding),
            -share,
            0.0 if math.isnan(own) else -own,
            KINDS.index(finding.kind),
            -finding.ratio if finding.ratio > 1 else 0.0,
        )

    final_findings: list[Finding] = []

    def tell(finding: Finding, explainer: Finding | None) -> None:
        final = replace(finding, explained_by=explainer)
        final_findings.append(final)
        for candidate in ordered:
            if explainers.get(id(candidate)) is finding:
                tell(candidate, final)

    ordered = sorted(findings, key=order)
    for finding in ordered:
        if id(finding) not in explainers:
            tell(finding, None)
    return final_findings


def _tier(finding: Finding, causes_nan: bool, parted: bool) -> int:
    """Where a finding stands before shares are compared; the smallest number comes first.

    First comes wrong memory, which may explain everything. Then what has no bound, what becomes NaN under one setting
    alone, and a mismatch that explains most of the difference; a missing result, which has no bound either, is as
    often a consequence of such a mismatch. What does not repeat itself, and makes next to nothing of the difference,
    comes after the rounding that makes it; so does another valid answer, unless some result has `parted` by more than
    roundings lead.
    """
    if finding.kind == "not finite":
        return -1
    if finding.kind == "rounding":
        return 3
    if finding.kind == "nondeterminism" and finding.share < LITTLE:
        return 4
    if finding.kind == "another valid answer" and not parted:
        return 4
    if finding.kind == "overwritten":
        return 0
    return 1 if causes_nan or not finding.bounded or (finding.kind == "mismatch" and finding.share >= EXPLAINED) else 2


def _first_explainer(finding: Finding, explainers: Mapping[int, Finding]) -> Finding:
    while id(finding) in explainers:
        finding = explainers[id(finding)]
    return finding


def _explainers(judge: Judge, findings: list[Finding], weights: Mapping[int, float]) -> dict[int, Finding]:
    """For findings that are consequences or parts of others, by their id, these others."""
    explainers = {}
    short = {
        id(op): finding for finding in findings if _is_short(finding) for op in operations_of(finding, judge.comparison)
    }
    for finding in findings:
        explainer = None
        if finding.kind == "cause not found":
            explainer = _explainer_of_rest(judge, findings)
        elif finding.kind == "reduced precision" and finding.op is not None and finding.op.rounded_before:
            explainer = _rounded_by(judge.comparison, finding, short)
        elif _is_short(finding) and finding.operation == "_to_copy":
            explainer = _cast_for(judge.comparison, finding, short, weights)
        if explainer is not None and explainer is not finding:
            explainers[id(finding)] = explainer
    return explainers


def operations_of(finding: Finding, comparison: Comparison) -> tuple[Operation, ...]:
    """The operations that a finding is about: one, or the same one under both settings."""
    if finding.op is None:
        return ()
    return comparison.partners.get(id(finding.op), (finding.op,)) if finding.under_both else (finding.op,)


def _is_short(finding: Finding) -> bool:
    """Whether a finding is that an operation computed in a short type, rather than with rounded factors."""
    return finding.kind == "reduced precision" and finding.op is not None and finding.op.dtype in SHORT


def _explainer_of_rest(judge: Judge, findings: list[Finding]) -> Finding | None:
    """The finding to which results go back that part without a cause of their own; None where too little does."""
    if judge.unexplained is None:
        return None
    attribution = Attribution(judge.comparison, findings, [judge.unexplained])
    candidates = [finding for finding in findings if finding.kind not in ("rounding", "cause not found")]
    shares = [attribution.share(finding) for finding in candidates]
    return candidates[shares.index(max(shares))] if sum(shares) >= EXPLAINED else None


def _rounded_by(comparison: Comparison, finding: Finding, short: Mapping[int, Finding]) -> Finding | None:
    """The finding about what rounded a product's factors before, if nothing but copies lies between."""
    assert finding.op is not None
    side = int(comparison.trace_of[id(finding.op)] is comparison.b)
    front = list(finding.op.inputs)
    for value in front:  # which grows
        maker = comparison.maker(side, value)
        if maker is not None and id(maker) in short:
            return short[id(maker)]
        if maker is not None and not maker.error and not maker.random:
            front += [input_value for input_value in maker.inputs if input_value not in front]
    return None


def _cast_for(
    comparison: Comparison, finding: Finding, short: Mapping[int, Finding], weights: Mapping[int, float]
) -> Finding | None:
    """The finding about the operation in a short type that a cast to it was made for; None for a cast that is worse."""
    assert finding.op is not None
    trace = comparison.trace_of[id(finding.op)]
    values, users = set(finding.op.outputs), []
    for op in trace.operations[comparison.position[id(finding.op)] + 1 :]:
        if values.isdisjoint(op.inputs):
            continue
        if id(op) in short and op.name != "_to_copy":
            users.append(short[id(op)])
        elif op.error is None and op.dtype == finding.op.dtype:  # a view
            values.update(op.outputs)
    users = [user for user in users if finding.size <= CAST_ALONE * user.size]
    return max(users, key=lambda user: (weights[id(user)], user.size), default=None)
