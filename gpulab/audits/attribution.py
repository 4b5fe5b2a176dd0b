"""Which finding explains how much of the difference in a step's results, and in which order they are told.

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
from dataclasses import dataclass, field, replace

import numpy as np

from gpulab.audits import tolerances as tol
from gpulab.audits.comparison import Comparison, or_infinite
from gpulab.audits.findings import DETAILS, KINDS, Finding
from gpulab.audits.judgement import Judgement
from gpulab.audits.operations import RESULT, Operation

Values = tuple[str, str]  # the names of a value under the first setting, and of what stands for it under the second


def _amounts() -> dict[Operation, dict[Values, float]]:
    return defaultdict(lambda: defaultdict(float))


@dataclass
class Kept:
    """Where a difference goes back to: what operations keep, for their own error and as others than their twins.

    `others` are the operations that were found side by side, and `begins` those between which results begin to part
    without a cause: what their inputs make is not held against them. `arrived` is on its way: by the operation of the
    first setting, the values that it made and what arrived there.
    """

    others: set[Operation]
    begins: set[Operation]
    own: dict[Operation, float] = field(default_factory=lambda: defaultdict(float))
    between: dict[Operation, float] = field(default_factory=lambda: defaultdict(float))
    arrived: dict[Operation, dict[Values, float]] = field(default_factory=_amounts)
    total: float = 0.0
    lost: float = 0.0  # goes back to nothing that is known


def attribute(
    comparison: Comparison, findings: list[Finding], results: list[tuple[Operation, Operation]]
) -> list[float]:
    """How much of the difference in some results goes back to each finding; NaN where there is no difference."""
    partners = comparison.partners
    others = {op for f in findings if f.side_by_side and f.op for op in partners.get(f.op, (f.op,))}
    kept = Kept(others, {op for f in findings if f.kind == "cause not found" and f.op for op in partners[f.op]})
    _begin(comparison, kept, results)
    for a, b in reversed(comparison.matched):
        for values, amount in kept.arrived[a].items():
            _pass_back(comparison, kept, a, b, values, amount)
    return [_share(comparison, kept, finding) for finding in findings]


def _share(comparison: Comparison, kept: Kept, finding: Finding) -> float:
    if finding.op is None or not kept.total or finding.kind in ("rounding", "not finite"):
        return math.nan
    if finding.kind == "cause not found":
        return (kept.between[finding.op] + kept.lost) / kept.total
    if finding.side_by_side:
        return kept.between[finding.op] / kept.total
    amounts = [kept.own[op] * _square(finding.size, _own(op)) for op in operations_of(finding, comparison)]
    return sum(amounts) / kept.total


def _begin(comparison: Comparison, kept: Kept, results: list[tuple[Operation, Operation]]) -> None:
    """Loss, gradients and what was updated count by how far each of these is apart as a whole, relative to its size."""
    groups: dict[str, list[tuple[Operation, Values]]] = defaultdict(list)
    for a, b in results:
        group = a.name if a.name in ("gradient", "updated") else "loss"
        groups[group] += [(a, values) for values in zip(a.outputs, b.outputs, strict=False)]
    for group_results in groups.values():
        apart = [_apart(comparison, *values) for _, values in group_results]
        size = math.hypot(*(float(np.linalg.norm(comparison.a.sketches[x])) for _, (x, _) in group_results))
        whole = math.hypot(*apart)
        amount = min(1.0, whole / size) if size and math.isfinite(whole) and math.isfinite(size) else float(whole > 0)
        for (a, values), fraction in zip(group_results, _fractions(apart), strict=True):
            kept.arrived[a][values] += amount * fraction
        kept.total += amount


def _apart(comparison: Comparison, x: str, y: str) -> float:
    """The norm of the difference of two values; infinite where one of them alone has NaN or infinity."""
    first, second = comparison.a.sketches[x], comparison.b.sketches[y]
    if first.shape != second.shape:
        return math.inf
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid="ignore", over="ignore"):
        return or_infinite(float(np.linalg.norm(np.where(same, 0.0, second - first))))


def _pass_back(
    comparison: Comparison,
    kept: Kept,
    a: Operation,
    b: Operation,
    values: Values,
    amount: float,
) -> None:
    """Leave with a pair of operations what they make of a difference, and pass the rest on to what they were given."""
    result = a.phase == RESULT
    inputs = [values] if result else [pair for pair in zip(a.inputs, b.inputs, strict=False) if pair[0] != pair[1]]
    gaps = [or_infinite(comparison.gap(*pair)) for pair in inputs]
    apart = or_infinite(comparison.gap(*values))
    own = 0.0
    if not result:
        own = _square(math.hypot(_own(a), _own(b)), apart)
        for op, fraction in zip((a, b), _fractions([_own(a), _own(b)]), strict=True):
            kept.own[op] += amount * own * fraction
    if kept.others & {a, b}:
        begins = a in kept.begins
        inherited = [g for pair, g in zip(inputs, gaps, strict=True) if begins or comparison.common(*pair, a)]
        excess = max(0.0, 1 - own - _square(tol.INHERITED * math.hypot(0.0, *inherited), apart))
        kept.between[a] += amount * excess
        kept.between[b] += amount * excess
        own += excess
    if not any(gaps):
        kept.lost += amount * (1 - own)
    for pair, fraction in zip(inputs, _fractions(gaps), strict=True):
        if fraction and own < 1:
            _arrive(comparison, kept, pair, amount * (1 - own) * fraction, a)


def _arrive(comparison: Comparison, kept: Kept, values: Values, amount: float, user: Operation) -> None:
    """Bring an amount to who made two values: a pair of operations, or those of one setting alone before them."""
    if common := comparison.common(*values, user):
        kept.arrived[common[0]][values] += amount
        return
    stretch = comparison.stretch(*values)
    alone = [*stretch.alone[1], *stretch.alone[0]]
    before = [entry for entry in stretch.before if comparison.gap_before(entry)]
    sizes = [*map(_own, alone), *(or_infinite(comparison.gap_before(entry)) for entry in before)]
    inherited = amount * _square(tol.INHERITED * math.hypot(0.0, *sizes), or_infinite(comparison.gap(*values)))
    makers = (comparison.maker(1, values[1]), comparison.maker(0, values[0]), *alone)
    blamed = next((op for op in makers if op in kept.others), None)
    if blamed is not None:
        kept.between[blamed] += amount - inherited
    else:
        kept.lost += amount - inherited
    fractions = _fractions(sizes)
    for op, fraction in zip(alone, fractions, strict=False):
        kept.own[op] += inherited * fraction
    for (a, b, number), fraction in zip(before, fractions[len(alone) :], strict=True):
        kept.arrived[a][a.outputs[number], b.outputs[number]] += inherited * fraction


def _own(op: Operation) -> float:
    """What an operation's own error and what does not repeat of it make, relative to its result."""
    return math.hypot(or_infinite(op.error or 0.0), or_infinite(op.spread or 0.0))


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


def ranked(judgement: Judgement) -> list[Finding]:
    """The findings of a comparison, what explains most of the difference first."""
    comparison, findings = judgement.comparison, judgement.findings
    results = [(a, b) for a, b in comparison.matched if a.phase == RESULT]
    if judgement.unexplained is not None:  # what is explained by other findings is no finding
        shares = attribute(comparison, findings, [judgement.unexplained])
        known = [share for f, share in zip(findings, shares, strict=True) if f.kind != "cause not found"]
        if sum(share for share in known if not math.isnan(share)) >= tol.EXPLAINED:
            findings = [finding for finding in findings if finding.kind != "cause not found"]
    shares = attribute(comparison, findings, results)
    findings = [replace(finding, share=share) for finding, share in zip(findings, shares, strict=True)]
    lost, becomes = _lost_before_nan(judgement)
    findings = [replace(f, detail=f.detail + becomes) if lost is not None and f.op is lost else f for f in findings]
    of_line: dict[tuple[str, str], float] = defaultdict(float)
    for finding in findings:
        of_line[finding.kind, finding.place] += 0.0 if math.isnan(finding.share) else finding.share
    parted = any(
        a in judgement.parted
        or any(or_infinite(gap) > tol.UNEXPLAINED for gap in comparison.gaps(a.outputs, b.outputs))
        for a, b in results
    )

    def order(finding: Finding) -> tuple[object, ...]:
        return (
            _tier(judgement, finding, parted, lost),
            -of_line[finding.kind, finding.place],
            0.0 if math.isnan(finding.share) else -finding.share,
            KINDS.index(finding.kind),
            -finding.ratio if finding.ratio > 1 else 0.0,
        )

    return sorted(findings, key=order)


def _tier(judgement: Judgement, finding: Finding, parted: bool, lost: Operation | None) -> int:
    """Where a finding stands before shares are compared; the smallest number comes first.

    First comes what was wrong before another operation made NaN or infinity of it, and then these. Then wrong memory,
    which may explain everything. Then what made a NaN of one setting alone possible (`lost` precision), what has no
    bound, and a mismatch that explains most of the difference. Among reduced precision a cast, and a product of factors
    that were rounded before, come after what they are parts of.
    What does not repeat itself, and makes next to nothing of the difference, comes after the rounding that makes it;
    so does another valid answer, unless some result has `parted` by more than roundings lead.
    """
    position, op = judgement.comparison.position, finding.op
    origins = [position[other.op] for other in judgement.findings if other.kind == "not finite" and other.op]
    if finding.kind == "mismatch" and op in judgement.wrong_alone and position[op] < min(origins, default=0):
        return -2
    if finding.kind == "not finite":
        return -1
    if finding.kind == "overwritten":
        return 0
    if (
        not finding.bounded
        or (lost is not None and op is lost)
        or (finding.kind == "mismatch" and finding.share >= tol.EXPLAINED)
    ):
        return 1
    if finding.kind == "reduced precision" and op and (op.name == "_to_copy" or op.rounded_before):
        return 3 if op.name == "_to_copy" else 4
    if finding.kind == "rounding":
        return 5
    negligible = finding.kind == "nondeterminism" and finding.share < tol.LITTLE
    return 6 if negligible or (finding.kind == "another valid answer" and not parted) else 2


def _lost_before_nan(judgement: Judgement) -> tuple[Operation | None, str]:
    """The nearest operation before a NaN of one setting alone that lost precision, and what is said of that."""
    if len(judgement.not_finite) != 1:
        return None, ""
    ((side, origin),) = judgement.not_finite.items()
    front = [origin.op]
    for op in front:  # which grows
        if op.format or op.dtype in tol.SHORT:
            name, phase, line = origin.op.name, origin.op.phase, origin.op.line
            return op, DETAILS["becomes NaN"].format(name=name, phase=phase, line=line)
        makers = [judgement.comparison.maker(side, value) for value in op.inputs]
        front += [maker for maker in dict.fromkeys(makers) if maker and maker not in front]
    return None, ""


def operations_of(finding: Finding, comparison: Comparison) -> tuple[Operation, ...]:
    """The operations that a finding is about: one, or the same one under both settings."""
    if finding.op is None:
        return ()
    return comparison.partners.get(finding.op, (finding.op,)) if finding.under_both else (finding.op,)
