"""Programs that `gl.guard` watches, and whether it says of them what is expected."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gpulab as gl
from benchmarks.measuring import made_by, show, table


class Program(NamedTuple):
    """A program, and what the guard should say of it. Where a fault is, a line ends in `# here`."""

    program: Callable[..., Any]
    thread: str = ""  # where the fault was told of
    cause: str = ""  # expected: of a finding; empty where nothing is wrong


def guarded(case: Program, *given: Any) -> dict[str, Any]:
    """What the guard says of a program: whether it was right, and whether a fault was placed."""
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
    """Print the rows of `guarded` and what they come to, and put them on a page."""
    wrong, right = (
        [row for row in rows if (row["placed"] is not None) is fault] for fault in (True, False)
    )
    text = (
        f"Of {len(wrong)} faults {sum(row['as expected'] for row in wrong)} are caught and "
        f"{sum(row['placed'] for row in wrong)} placed; of {len(right)} right programs "
        f"{sum(not row['as expected'] for row in right)} give a false alarm. {made_by()}"
    )
    marks = {True: "yes", False: "**no**", None: ""}
    cells = [[marks.get(cell, cell) for cell in row.values()] for row in rows]
    show(title, page, measured=f"{text}\n\n{table('|'.join(rows[0]), cells)}")
