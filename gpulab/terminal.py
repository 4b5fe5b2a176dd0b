"""What commands print: texts and tables, whatever is in them, on a terminal or where nobody reads any more."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from gpulab import files
from gpulab.errors import GpulabError, printable

if TYPE_CHECKING:
    import pandas as pd

    from gpulab.report import Report

MOST_DRAWN = 500  # rows with lines around them, which take time; more are aligned only


@contextlib.contextmanager
def printing(stream: IO[str]) -> Iterator[None]:
    """A disk that is full is met once: not again when Python ends. A command that nobody reads goes on to its end."""
    try:
        with files.writing("standard output"):
            yield
    except BrokenPipeError:  # `gpulab runs | head`
        files.write_nowhere(stream)
    except GpulabError:
        files.write_nowhere(stream)
        if stream is not sys.stderr:  # else the exit status would be that of what was to be said
            raise


def say(text: object, to: IO[str] | None = None) -> None:
    """Print a text, whatever is in it: it may come from a file of a stranger's."""
    with printing(to or sys.stdout):
        print(printable(str(text)), file=to, flush=True)  # who reads a pipe reads it now


def save_plot(result: Report, file: Path | None) -> None:
    """Draw a result into a file, where one was asked for, and say so where a table is not disturbed."""
    if file:
        result.plot().save(file)
        say(f"picture in {file}", sys.stderr)


def say_csv(frame: pd.DataFrame) -> None:
    """Print a table with all its columns."""
    say(frame.to_csv(index=False, lineterminator="\n").removesuffix("\n"))


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
    say_table(f"{len(frame)} runs{where}", columns, cells)


def say_table(title: str, columns: list[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table of texts."""
    names, *cells = [[printable(cell) for cell in row] for row in (columns, *rows)]
    if len(cells) > MOST_DRAWN:
        widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
        say("\n".join([title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in (names, *cells))]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*names, title=title, show_header=any(names))
    for row in cells:
        table.add_row(*row)
    # Piped into a file there is no terminal whose width to keep to. A cell is shown as it is: `[/red]` is no markup.
    width = None if Console().is_terminal else 200
    with printing(sys.stdout), contextlib.suppress(SystemExit):  # with which rich ends where nobody reads
        Console(width=width, markup=False, emoji=False, highlight=False).print(table)
