"""What the command line prints: texts of strangers made safe, and tables of runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from gpulab import files
from gpulab.errors import GpulabError, printable

if TYPE_CHECKING:
    import pandas as pd

    from gpulab.report import Report


def say(text: object, to: IO[str] | None = None) -> None:
    """Print a text, whatever is in it: it may come from a file of a stranger's."""
    stream = to or sys.stdout
    try:
        with files.writing("standard output"):
            print(printable(str(text)), file=stream, flush=True)  # who reads a pipe reads it now
    except (BrokenPipeError, GpulabError) as error:
        files.write_nowhere(stream)  # a disk that is full is met once: not again when Python ends
        # A command that nobody reads any more, as in `gpulab runs | head`, goes on to its end.
        if stream is not sys.stderr and isinstance(error, GpulabError):
            raise


def say_runs(frame: pd.DataFrame, where: str = "") -> None:
    """Print a table of runs: their factors that are not all the same, and the metrics of functions."""
    from gpulab.store import runs as stores
    from gpulab.store.factors import FACTORS

    differing = [name for name in ("rerun", *FACTORS) if frame[name].nunique(dropna=False) > 1]
    of_functions = [name for name in frame.columns if name not in (*stores.COLUMNS, "options", "loss")]
    columns = ["experiment", "profile", "setting", "seed", *differing, "status", "final_loss"]
    columns += [*(of_functions or ["heldout_loss"]), "seconds", "machine"]
    rows = frame[columns].itertuples(index=False)
    cells = ([f"{v:.5g}" if isinstance(v, float) else str(v) for v in row] for row in rows)
    say(f"{len(frame)} runs{where}\n{aligned([columns, *cells])}")


def aligned(rows: Iterable[Iterable[str]]) -> str:
    """A table of texts in columns."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def save_plot(result: Report, file: Path | None) -> None:
    """Draw a result into a file, where one was asked for, and say so where a table is not disturbed."""
    if file:
        result.plot().save(file)
        say(f"picture in {file}", sys.stderr)
