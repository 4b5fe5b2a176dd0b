"""Is what an audit found the cause? The step done again, with one line of it put right at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from gpulab.audits.attribution import operations_of
from gpulab.audits.comparison import Comparison
from gpulab.audits.count_sketch import mapped, rounds, tensors
from gpulab.audits.findings import Finding
from gpulab.audits.judgement import Judgement
from gpulab.audits.operations import RESULT, Call
from gpulab.audits.recording import perform
from gpulab.audits.tracer import Tracer
from gpulab.audits.traces import Trace
from gpulab.audits.twins import in_float64, outcome
from gpulab.settings import Setting

MOST = 8  # lines that are put right, one at a time
IN_FLOAT64 = "in float64"


@dataclass(frozen=True)
class Confirmation:
    """What goes when one line is put right: the shares of the difference in the `loss` and in the `gradients`.

    `how` says what was done to `operations` of the line: computed in float64, or given the other side's results.
    """

    line: str
    how: str
    operations: int
    loss: float
    gradients: float

    @property
    def share(self) -> float:
        """The larger of the two shares; nothing where neither could be measured."""
        shares = [share for share in (self.loss, self.gradients) if not math.isnan(share)]
        return max(shares, default=0.0)

    def __str__(self) -> str:
        shares = (("loss", self.loss), ("gradients", self.gradients))
        texts = [
            f"{share:.0%} of the difference in the {name} goes"
            if share >= 0
            else f"that in the {name} grows by {-share:.0%}"
            for name, share in shares
            if not math.isnan(share)
        ]
        return f"{self.line}\n      {self.operations} operations {self.how}: {' and '.join(texts) or 'nothing to see'}"


def confirm(
    step: Callable[..., Any], judgement: Judgement, findings: Iterable[Finding], progress: bool = True
) -> list[Confirmation]:
    """Put the lines of the findings right, each alone and then all together; what explains most comes first.

    An operation that is wrong by itself is computed in float64; one that is right by itself, and other than under
    the first setting, is given the results that the first setting had in its place.
    """
    from gpulab.progress import Progress

    a, b = judgement.comparison.a, judgement.comparison.b
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.op is not None and finding.kind not in ("rounding", "overwritten"):
            groups.setdefault(finding.place, []).append(finding)
    lines = list(groups.items())[:MOST]
    if len(lines) > 1:
        lines.append((f"all {len(lines)} lines", [finding for _, group in lines for finding in group]))
    before = _differences(a, b)
    confirmations = []
    for line, group in Progress(lines, unit="line", leave=False, disable=not progress):
        exact, instead = _exact(judgement, group), _instead(judgement, group)
        after = _differences(_again(step, a, exact[0], {}), _again(step, b, exact[1], _values(step, a, instead)))
        count = len(exact[0] | exact[1]) + len(instead)
        how = " and ".join(
            ([IN_FLOAT64] if any(exact) else []) + ([f"with the results of {a.title}"] if instead else [])
        )
        loss, gradients = (1 - y / x if x else math.nan for x, y in zip(before, after, strict=True))
        if count:
            confirmations.append(Confirmation(line, how, count, loss, gradients))
    return sorted(confirmations, key=lambda one: -one.share)


def _differences(a: Trace, b: Trace) -> tuple[float, float]:
    """How far apart loss and gradients are; what was updated, for steps without gradients."""

    def results(trace: Trace) -> dict[tuple[str, str], np.ndarray]:
        ops = [op for op in trace.operations if op.phase == RESULT]
        return {(op.name, op.module): trace.sketches[op.outputs[-1]] for op in ops}

    results_of_both = results(a), results(b)
    common = [
        key
        for key in results_of_both[0]
        if key in results_of_both[1] and results_of_both[0][key].shape == results_of_both[1][key].shape
    ]
    gradient_name = "gradient" if any(name == "gradient" for name, _ in common) else "updated"
    gradients = [key for key in common if key[0] == gradient_name]
    losses = [key for key in common if key[0] not in ("gradient", "updated")]

    def apart(keys: list[tuple[str, str]]) -> float:
        return math.hypot(*(float(np.linalg.norm(results_of_both[1][key] - results_of_both[0][key])) for key in keys))

    return apart(losses), apart(gradients)


def _exact(judgement: Judgement, group: Iterable[Finding]) -> tuple[set[int], set[int]]:
    """The places under both settings of operations that are wrong by themselves."""
    comparison = judgement.comparison
    positions: tuple[set[int], set[int]] = set(), set()
    for finding in group:
        assert finding.op is not None
        if finding.op in judgement.wrong_alone and not finding.op.random:
            for op in operations_of(finding, comparison):
                positions[comparison.trace_of(op) is comparison.b].add(comparison.position[op])
    return positions


def _instead(judgement: Judgement, group: Iterable[Finding]) -> dict[tuple[int, int], tuple[int, int]]:
    """For results of the second setting, by place and number, those of the first that stand for them."""
    comparison = judgement.comparison
    instead: dict[tuple[int, int], tuple[int, int]] = {}
    for finding in group:
        assert finding.op is not None
        if finding.op in judgement.wrong_alone and not finding.op.random:
            continue
        if finding.instead:
            first_results = [_first_result(comparison, side, value) for side, value in enumerate(finding.instead)]
            if first_results[0] and first_results[1]:
                instead[first_results[1]] = first_results[0]
        elif pair := comparison.partners.get(finding.op):
            a, b = (comparison.position[op] for op in pair)
            instead |= {(b, number): (a, number) for number in range(min(len(op.outputs) for op in pair))}
    return instead


def _first_result(comparison: Comparison, side: int, value: str) -> tuple[int, int] | None:
    """The place and the number of the result that a value was first."""
    for op in comparison.sources[side].get(value, ()):
        if value in op.outputs:
            return comparison.position[op], op.outputs.index(value)
    return None


def _values(
    step: Callable[..., Any], trace: Trace, instead: dict[tuple[int, int], tuple[int, int]]
) -> dict[tuple[int, int], Tensor]:
    """The results of one setting that another is given."""
    saved_results: dict[tuple[int, int], Tensor] = {}

    def keep(call: Call) -> None:
        saved_results.update({(call.position, number): t.detach().clone() for number, t in enumerate(call.results)})

    if not instead:
        return {}
    source_positions = {position for position, _ in instead.values()}
    watcher = Tracer({}, change=lambda call: keep(call) if call.position in source_positions else None)
    perform(step, Setting.parse(trace.setting), watcher)
    return {target: saved_results[source] for target, source in instead.items() if source in saved_results}


def _again(step: Callable[..., Any], trace: Trace, exact: set[int], values: dict[tuple[int, int], Tensor]) -> Trace:
    """The step once more, with some operations in float64 and some results replaced."""
    if not exact and not values:
        return trace

    def put_right(call: Call) -> None:
        if call.position in exact:
            placed, named = mapped(in_float64, call.arguments)
            right = tensors(outcome(call.operation, placed, call.operation(*placed, **named)))
            for t, exact_result in zip(call.results, right, strict=False):
                if rounds(t):
                    t.data.copy_(exact_result)
        for number, t in enumerate(call.results):
            if (call.position, number) in values:
                t.data.copy_(values[call.position, number])

    return perform(step, Setting.parse(trace.setting), Tracer({}, change=put_right))
