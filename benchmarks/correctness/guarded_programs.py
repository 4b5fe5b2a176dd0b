"""Programs under `gl.guard`, and whether its report is as expected."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gpulab as gl
from benchmarks.measuring import made_by, show, table


class Program(NamedTuple):
    """A program, and the expected report of the guard. The line of a fault ends in `# here`."""

    program: Callable[..., Any]
    thread: str = ""  # the public thread about the fault
    cause: str = ""  # the expected cause of a finding; empty if nothing is wrong


def guarded(case: Program, *given: Any) -> dict[str, Any]:
    """Return whether the guard's report on a program was right, and whether a fault was located."""
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        case.program(*given)
    causes = {finding.cause for finding in report.findings}
    row = {
        "program": case.program.__name__,
        "thread": case.thread,
        "expected": case.cause or "nothing",
    }
    right = case.cause in causes if case.cause else not causes
    placed = any(finding.line.text.endswith("# here") for finding in report.findings)
    said = ", ".join(sorted(causes)) or "nothing"
    return {**row, "said": said, "as expected": right, "placed": placed if case.cause else None}


def show_guarded(title: str, page: Path | None, rows: list[dict[str, Any]]) -> None:
    """Print the rows of `guarded` with a summary, and put them on a page."""
    wrong, right = (
        [row for row in rows if (row["placed"] is not None) is fault] for fault in (True, False)
    )
    text = (
        f"{sum(row['as expected'] for row in wrong)} of {len(wrong)} faults are found and "
        f"{sum(row['placed'] for row in wrong)} are located; {len(right)} correct programs give "
        f"{sum(not row['as expected'] for row in right)} false alarms. {made_by()}"
    )
    marks = {True: "yes", False: "**no**", None: ""}
    cells = [[marks.get(cell, cell) for cell in row.values()] for row in rows]
    show(title, page, measured=f"{text}\n\n{table('|'.join(rows[0]), cells)}")
