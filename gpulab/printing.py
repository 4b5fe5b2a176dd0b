"""What the command line prints: texts of strangers made safe, and tables of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

from gpulab.errors import printable

if TYPE_CHECKING:
    import pandas as pd

    from gpulab.report import Report


def say(text: object, to: IO[str] | None = None) -> None:
    """Print a text, whatever is in it: it may come from a file of a stranger's."""
    print(printable(str(text)), file=to or sys.stdout, flush=True)  # who reads a pipe reads it now


def say_runs(frame: pd.DataFrame, where: str = "") -> None:
    """Print a table of runs: their factors that are not all the same, and the metrics of functions."""
    from gpulab.store import runs as stores
    from gpulab.store.factors import FACTORS

    differing = [name for name in ("rerun", *FACTORS) if frame[name].nunique(dropna=False) > 1]
    of_functions = [name for name in frame.columns if name not in (*stores.COLUMNS, "options", "loss")]
    columns = ["experiment", "profile", "setting", "seed", *differing, "status", "final_loss"]
    columns += [*(of_functions or ["heldout_loss"]), "seconds", "machine"]
    say(f"{len(frame)} runs{where}\n{frame[columns].to_string(index=False, float_format='{:.5g}'.format)}")


def save_plot(result: Report, file: Path | None) -> None:
    """Draw a result into a file, where one was asked for, and say so where a table is not disturbed."""
    if file:
        result.plot().save(file)
        say(f"picture in {file}", sys.stderr)
