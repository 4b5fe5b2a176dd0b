"""Checks of the exercises in `05_the_anomaly.ipynb`."""

from __future__ import annotations

from companion.exercises.answers import Answer, exercise, judged, near, need, number, pair, shown
from gpulab.audits import Audit


@exercise("05-1", "(overwritten, copied), the sums of the twenty tensors without and with a copy")
def _window_sums(answer: Answer) -> str:
    overwritten, copied = 20 * 20, sum(range(1, 21))  # all hold the last frame; each holds its own
    first, second = (number(value) for value in pair(answer))
    need(
        first != copied,
        f"{first:g} is the sum of all frames, but the tensors share the buffer's memory",
    )
    near(first, overwritten, {19 * 20: "this counts nineteen frames, but the window has twenty"})
    near(
        second,
        copied,
        {
            overwritten: "a copy does not change when the buffer does",
            190: "the frames are 1 to 20, not 0 to 19",
        },
    )
    return f"{overwritten} is twenty times the last frame, because all twenty tensors hold it."


@exercise("05-2", "the audit of two traces, gl.audit(copied, overwritten)")
def _found_by_audit(answer: Answer) -> str:
    need(
        isinstance(answer, Audit),
        f"{shown(answer)} is not an audit: record both loaders and compare them with gl.audit",
    )
    faults = [bool(trace.overwritten) for trace in (answer.a, answer.b)]
    need(any(faults), "neither trace has overwritten frames: record one with the loader 'reused'")
    need(not all(faults), "both traces have overwritten frames: record one with 'copied'")
    finding = next(finding for finding in answer.findings if finding.kind == "overwritten")
    return f"the audit names {finding.operation} ({finding.phase}). No loss would have shown it."


@exercise(
    "05-3",
    "a verdict by loader, 'reused' against 'copied', on data other than the walk, at least six"
    " seeds",
)
def _helpful_fault(answer: Answer) -> str:
    found = judged(answer, "loader")
    need(
        found.reference == "copied",
        f"the reference is {found.reference!r}, but a fault is measured against the correct loader",
    )
    need(
        "reused" in found.decisions, f"'reused' is not among {', '.join(map(str, found.decisions))}"
    )
    data = set(found.runs.data)
    need(
        data != {"walk"},
        "these runs were trained on the walk, which the notebook covers: use other data",
    )
    row = found.table[found.table.loader == "reused"].iloc[0]
    return (
        f"{row.decision}, with a mean difference of {row.difference:+.2g}; a negative difference"
        " means that overwritten frames helped. Two networks that have learned nothing are alike,"
        " whatever their gradients were."
    )
