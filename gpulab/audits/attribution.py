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
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpulab.audits import tolerances as tol
from gpulab.audits.comparison import Comparison, Values
from gpulab.audits.findings import KINDS, Finding
from gpulab.audits.judgement import cause_not_found
from gpulab.audits.traces import Operation


class Attribution:
    """How much of the difference in a step's results each operation keeps: by itself, and as another than its twin."""

    def __init__(self, comparison: Comparison, findings: Sequence[Finding]) -> None:
        self.comparison = comparison
        # Each pair of operations by its first: how far those are apart that were found to be others than their twins,
        # what a pair keeps, what goes back to nothing (by who was given it), and what arrived at the values that a
        # pair made.
        self.others = {comparison.pair_of(f.op)[0]: f.size for f in findings if f.side_by_side and f.op}
        self.kept: dict[Operation, float] = defaultdict(float)
        self.lost: dict[Operation, float] = defaultdict(float)
        self.arrived: dict[Operation, dict[Values, float]] = defaultdict(lambda: defaultdict(float))
        self.total = self._begin()
        for a, b in reversed(comparison.matched):
            for values, amount in self.arrived[a].items():
                self._pass_back(a, b, values, amount)

    def share(self, finding: Finding) -> float:
        """How much of the difference goes back to a finding; NaN where there is none, or it cannot be told."""
        if finding.op is None or not self.total or finding.kind in ("rounding", "not finite"):
            return math.nan
        pair = self.comparison.pair_of(finding.op)
        as_another = self.others.get(pair[0], 0.0)
        own = math.hypot(_own_error(*pair), self.comparison.cast_error(finding.op))
        of_pair = math.hypot(own, 0.0 if math.isnan(as_another) else as_another)
        part = 1.0 if finding.side_by_side else _share_explained(finding.size, of_pair)
        return self.kept[pair[0]] * part / self.total

    def _begin(self) -> float:
        """Loss, gradients and what was updated count by how far each of these is apart as a whole, relative to it."""
        comparison, total = self.comparison, 0.0
        groups: dict[str, list[tuple[Operation, Values]]] = defaultdict(list)
        for a, b in comparison.results:
            group = a.name if a.name in ("gradient", "updated") else "loss"
            groups[group] += [(a, values) for values in zip(a.outputs, b.outputs, strict=False)]
        for of_group in groups.values():
            sizes = [float(np.linalg.norm(comparison.a.sketches[x])) for _, (x, _) in of_group]
            pairs = zip(of_group, sizes, strict=True)
            apart = [gap * (size or 1.0) if (gap := comparison.gap(values)) else 0.0 for (_, values), size in pairs]
            whole = math.hypot(*apart) / (math.hypot(*sizes) or 1.0)
            amount = min(1.0, whole)  # which is 1 where nobody can tell how far
            for (a, values), fraction in zip(of_group, _fractions(apart), strict=True):
                self._arrive(values, amount * fraction, a)
            total += amount
        return total

    def _pass_back(self, a: Operation, b: Operation, values: Values, amount: float) -> None:
        """Leave with a pair of operations what they make of a difference, and pass the rest to what they were given."""
        inputs = [pair for pair in self.comparison.inputs(a, b) if pair[0] != pair[1]]
        gaps, apart = list(map(self.comparison.gap, inputs)), self.comparison.gap(values)
        kept = _share_explained(_own_error(a, b), apart)
        if a in self.others and not any(self.comparison.common(*pair, a) for pair in inputs):
            kept = 1.0
        self.kept[a] += amount * kept
        for pair, fraction in zip(inputs, _fractions(gaps), strict=True):
            if fraction and kept < 1:
                self._arrive(pair, amount * (1 - kept) * fraction, a)

    def _arrive(self, values: Values, amount: float, user: Operation) -> None:
        """Bring an amount to who made two values: a pair of operations, or those of one setting alone before them."""
        comparison = self.comparison
        origin = comparison.origin(*values, user)
        casts = [comparison.cast_error(op) for op in origin.alone]
        before = origin.before
        if any(casts):  # a value that is also made again later, as by transposing twice, was there before that
            before = [(a, pair) for a, pair in before if comparison.position[a] < comparison.position[user]]
        gaps = [comparison.gap(pair) for _, pair in before]
        passed_on = tol.INHERITED * math.hypot(0.0, *map(_own_error, origin.alone), *gaps)
        explained = math.hypot(passed_on, tol.CONVERTED * math.hypot(0.0, *casts))
        inherited = amount * _share_explained(explained, comparison.gap(values))
        alone = [math.hypot(_own_error(op), cast) for op, cast in zip(origin.alone, casts, strict=True)]
        makers = (comparison.maker(1, values[1]), comparison.maker(0, values[0]), *origin.alone)
        blamed = [one for op in makers if op and (one := comparison.pair_of(op)[0]) in self.others]
        if blamed:
            self.kept[blamed[0]] += amount - inherited
        elif all(op.error is not None or len(op.inputs) < 2 for op in origin.alone):  # no kernel that nobody checked
            self.lost[user] += amount - inherited
        fractions = _fractions([*alone, *gaps])
        for op, fraction in zip(origin.alone, fractions, strict=False):
            self.kept[op] += inherited * fraction
        for (a, pair), fraction in zip(before, fractions[len(alone) :], strict=True):
            if fraction and comparison.position[a] < comparison.position[user]:
                self.arrived[a][pair] += inherited * fraction
            else:  # a value that is made again later, as by transposing twice, goes back to nothing that was before
                self.lost[user] += inherited * fraction


def _own_error(*operations: Operation) -> float:
    """What the own errors of operations and what does not repeat of them make, relative to their result.

    >>> once = Operation("mm", "forward", "", "", [], [], [], "float32", error=3.0, spread=4.0)
    >>> _own_error(once), _own_error(once, replace(once, error=math.nan))
    (5.0, inf)
    """
    sizes = [size or 0.0 for op in operations for size in (op.error, op.spread)]
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
    attribution = Attribution(comparison, findings)
    lost, becomes = _lost_before_nan(comparison)
    findings = [replace(f, share=attribution.share(f), detail=f.detail + becomes * (f.op is lost)) for f in findings]
    explained = any(f.kind not in ("reduced precision", "nondeterminism", "rounding") for f in findings)
    if not explained and not comparison.not_finite:
        findings += cause_not_found(comparison, attribution.lost, attribution.total)
    begins = min((comparison.position[f.op] for f in findings if f.kind == "not finite" and f.op), default=0)

    def order(finding: Finding) -> tuple[int, float, int]:
        if finding.kind == "mismatch" and finding.op and comparison.position[finding.op] < begins:
            return -2, 0.0, 0
        tier = 1 if finding.op and finding.op is lost else _tier(comparison, finding)
        # Of shares that are shown as the same, the first operation's comes first, and what follows from it later.
        return tier, -round(np.nan_to_num(finding.share), 2), KINDS.index(finding.kind)

    return sorted(findings, key=order)


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
    if not finding.bounded or (finding.kind == "mismatch" and finding.share >= tol.EXPLAINED):
        return 1
    if finding.kind == "reduced precision" and finding.op:
        return 3 if finding.op.name == "_to_copy" else 2 + 2 * finding.op.rounded_before
    if finding.kind == "nondeterminism":
        return 6 if finding.share < tol.LITTLE else 2
    if finding.kind == "another valid answer":
        gaps = (gap for a, b in comparison.results for gap in comparison.gaps(a.outputs, b.outputs))
        return 2 if any(gap > tol.UNEXPLAINED for gap in gaps) else 6
    return 5 if finding.kind == "rounding" else 2


def _lost_before_nan(comparison: Comparison) -> tuple[Operation | None, str]:
    """The nearest operation before a NaN of one setting alone that lost precision, and what is said of that."""
    if len(comparison.not_finite) != 1:
        return None, ""
    ((side, origin),) = comparison.not_finite.items()
    front = [origin.op]
    for op in front:  # which grows
        if op.format or op.dtype in tol.SHORT:
            what = f"{origin.op.name} ({origin.op.phase}), at {origin.op.line}"
            return op, f"; what follows from it becomes NaN in {what}"
        makers = [comparison.maker(side, value) for value in op.inputs]
        front += [maker for maker in dict.fromkeys(makers) if maker and maker not in front]
    return None, ""
