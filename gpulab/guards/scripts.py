"""A script that knows nothing of gpulab, run under a guard: `gpulab guard script.py`."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from gpulab.errors import UsageError
from gpulab.guards.guards import Guard


def check_script(script: str | Path) -> None:
    """Raises `UsageError` where there is no such file."""
    if not Path(script).is_file():
        raise UsageError(f"{script}: no such script")


def run_script(script: str | Path, arguments: Sequence[str], report: Guard) -> None:
    """Run a script as Python would, with its arguments, inside the guard `report`.

    What the script raises comes out of here, `SystemExit` included; what was found so far is in the report. Whether
    there is such a file is asked by `check_script`, before.
    """
    script = Path(script)
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        with report:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = before


def json_lines(report: Guard) -> Iterator[str]:
    """Each finding as an object of JSON in a line.

    Examples:
        >>> list(json_lines(Guard()))
        []
    """
    for finding in report.findings:
        lines = {did: {**line._asdict(), "text": line.text} for did, line in finding.lines.items()}
        yield json.dumps({**asdict(finding), "lines": lines})
