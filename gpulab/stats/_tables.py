"""Tables of runs from other programs: CSV, TSV and Parquet files, exports and folders."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gpulab import files
from gpulab.errors import DataError, UsageError
from gpulab.stats import _run_folders as run_folders
from gpulab.stats._run_folders import RUN_COLUMN, is_pattern
from gpulab.stats._selection import word_set

# The states of runs in the column `State` of Weights & Biases.
WANDB_STATES = word_set(
    "finished crashed failed killed running pending preempted preempting stopped"
)
# The name of a column in an exported chart of Weights & Biases, such as `calm-sun-6 - val/loss`.
# Columns with the lowest and highest values end in `__MIN` and `__MAX`.
WANDB_CHART = re.compile(r"(?P<run>.+) - (?P<metric>.+?)(?P<bound>__MIN|__MAX)?")


def read_table(file: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    r"""Read a table of runs for `gpulab.verdict`, with a row for each run, epoch or step.

    The columns of a text file may be separated by commas, tabs or semicolons. If they are separated
    by semicolons, numbers have a decimal comma. Columns keep their names. An empty cell is a
    missing value, which is not the same as NaN.

    A folder of runs, or a pattern such as `outputs/*/metrics.csv`, is read in the layout that Hydra
    and Lightning write. Each file is the table of one run, and the name of the run is put into the
    column `run`. Settings and seeds are read from `.hydra/overrides.yaml`, `.hydra/config.yaml`,
    `hparams.yaml` and `config.yaml` in the folders of the run, up to the given folder. Nested
    settings become columns such as `optimizer.lr`. If there are no such files, settings are read
    from the names of folders and files, such as `optimizer=adam,seed=3` and `seed_3`. If two files
    of one folder give a setting different values, the first in this list is used, with a note.

    Tables of runs and of charts exported from Weights & Biases can be read, and so can CSV files
    downloaded from TensorBoard's page, whose names contain the run and the tag.

    Args:
        file: A Parquet file (`.parquet`), or a text file in UTF-8 with a header, such as an export
            from Weights & Biases or the output of `mlflow.search_runs().to_csv` or `mlflow
            experiments csv`. It may also be a folder, a pattern, or a list of these.

    Returns:
        A data frame. Its `attrs["source"]` names what was read. Its `attrs["notes"]` has sentences
        on where values come from and what was left out, which a verdict repeats.

    Raises:
        DataError: If a file cannot be read, is empty or has two columns of the same name, or if a
            folder has no tables or has tables with different names.
        UsageError: If a column `State` has values that are not Weights & Biases states.
        GpulabError: If there are configuration files and PyYAML is not installed.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "runs.csv").write_text("device;seed;loss\ncpu;0;0,5\ncuda;0;0,6\n")
        >>> read_table(folder / "runs.csv").values.tolist()
        [['cpu', 0, 0.5], ['cuda', 0, 0.6]]
        >>> for seed in range(2):
        ...     run = folder / "outputs" / str(seed)
        ...     run.mkdir(parents=True)
        ...     _ = (run / "config.yaml").write_text(f"seed: {seed}\noptimizer: {{name: adam}}\n")
        ...     _ = (run / "metrics.csv").write_text("epoch,val_loss\n0,0.5\n1,0.4\n")
        >>> frame = read_table(folder / "outputs")
        >>> frame[["optimizer.name", "seed", "epoch", "val_loss"]].values.tolist()[-1]
        ['adam', 1, 1, 0.4]
        >>> print(*frame.attrs["notes"], sep="\n")
        2 tables were read (metrics.csv).
        Settings are from config.yaml: optimizer.name, seed.
    """
    names = [file] if isinstance(file, (str, Path)) else list(file)
    if not names:
        raise UsageError("no file to read: expected a table, a folder of runs or a pattern")
    source = ", ".join(map(str, names))
    if len(names) == 1 and not is_pattern(names[0]) and not os.path.isdir(names[0]):
        frame, notes = read_run(Path(names[0]))
    else:
        frame, notes = run_folders.read_runs(names, read_run)
    frame.attrs = {"source": source, "notes": tuple(notes)}
    return frame


def read_file(file: Path) -> pd.DataFrame:
    """Read the table in a file; `DataError` if it cannot be read or has no rows."""
    content = files.read(file)
    with files.convert_read_errors(file, "cannot be read as a table"):
        is_parquet = file.suffix == ".parquet"
        frame = (
            pd.read_parquet(io.BytesIO(content))
            if is_parquet
            else _read_text(content.decode("utf-8-sig"))
        )
    if frame.empty:
        raise DataError(f"{file}: contains no runs; expected a header and a row for each run")
    return frame


def read_run(file: Path) -> tuple[pd.DataFrame, list[str]]:
    """Read the table in a file, and return it with notes on how it was read."""
    frame, chart_notes = _melt_chart(read_file(file))
    frame, status_notes = _rename_state(frame, file)
    return frame, [*chart_notes, *status_notes]


def _rename_state(frame: pd.DataFrame, file: Path) -> tuple[pd.DataFrame, list[str]]:
    """Rename the column `State` of Weights & Biases to `status`.

    The table is left as it is if it has a `status`, or if all runs are `finished`.

    Returns:
        The table, and a note if the column was renamed.

    Raises:
        UsageError: If the column has values that are not Weights & Biases states.
    """
    if "status" in frame or "State" not in frame:
        return frame, []
    states = set(frame["State"].dropna().astype(str).str.lower())
    if states <= {"finished"}:
        return frame, []
    if not states <= WANDB_STATES:
        raise UsageError(
            f"{file}: column 'State' has values that are not Weights & Biases states; if it"
            " states which runs finished, rename it to 'status'"
        )
    renamed = frame.rename(columns={"State": "status"})
    return renamed, ["The status of each run is from the column State."]


def _melt_chart(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Convert a chart exported from Weights & Biases from wide to long form.

    The first column of such a table counts steps. Each further column has the values of one metric
    of one run, or their bounds, which are left out. The result has a row for each run and step. Its
    columns are the step, the run, the metrics, and the settings in the names of the runs. A table
    of any other form is returned unchanged.

    Returns:
        The table, and notes on the conversion. There are none if the table is unchanged.

    >>> chart = pd.DataFrame({"Step": [0, 1], "seed_0 - loss": [3, 2], "seed_1 - loss": [5, 4]})
    >>> melted, notes = _melt_chart(chart)
    >>> melted.values.tolist()
    [[0, 'seed_0', 3, 0], [1, 'seed_0', 2, 0], [0, 'seed_1', 5, 1], [1, 'seed_1', 4, 1]]
    >>> melted.columns.tolist()
    ['Step', 'run', 'loss', 'seed']
    >>> notes[1]
    'From the names of the runs: seed.'
    """
    step_column, *other_columns = map(str, frame.columns)
    matches = [match for match in map(WANDB_CHART.fullmatch, other_columns) if match]
    is_chart = bool(other_columns) and len(matches) == len(other_columns)
    if not is_chart:
        return frame, []
    metric_matches = [match for match in matches if not match["bound"]]
    n_bounds = len(matches) - len(metric_matches)
    metrics_by_run: dict[str, dict[str, pd.Series]] = {}
    for match in metric_matches:
        column = match[0]
        metrics_by_run.setdefault(match["run"], {})[match["metric"]] = frame[column]
    run_tables = []
    for run, metrics in metrics_by_run.items():
        run_table = pd.DataFrame({step_column: frame[step_column], RUN_COLUMN: run, **metrics})
        # The steps are those of all runs. At steps that this run did not log, it has no values.
        run_tables.append(run_table.dropna(subset=list(metrics), how="all"))
    melted = pd.concat(run_tables, ignore_index=True)
    with_settings = run_folders.add_settings_from_names(melted)

    notes = [f"{len(metrics_by_run)} runs were read from the columns of a chart."]
    if n_bounds:
        notes.append(
            f"Left out: {n_bounds} columns with the lowest and highest values (__MIN, __MAX)."
        )
    new_columns = [name for name in with_settings if name not in melted]
    if new_columns:
        notes.append(f"From the names of the runs: {', '.join(new_columns)}.")
    return with_settings, notes


def _read_text(text: str) -> pd.DataFrame:
    """Parse a table that is separated by commas, semicolons or tabs.

    The separator is the one that splits the first line into most columns.

    Raises:
        ValueError: If two columns have the same name.
    """
    # Monitor files of Stable-Baselines3 have comments before the header. Lines that begin with `#`
    # are removed only if the line after them has several columns.
    without_comments = re.sub(r"\A(#.*\n)*", "", text)
    if "," in without_comments.partition("\n")[0]:
        text = without_comments
    first_line = text.partition("\n")[0]

    def split_first_line(separator: str) -> list[str]:
        """Split the header; no names if the line is empty."""
        return next(csv.reader([first_line], delimiter=separator), [])

    separator = max(",;\t", key=lambda mark: len(split_first_line(mark)))
    header = [name.strip() for name in split_first_line(separator)]
    duplicates = sorted({name for name in header if name and header.count(name) > 1})
    if duplicates:
        raise ValueError(f"more than one column is called {', '.join(duplicates)}")
    # By default, pandas would also read `None` and `NaN` as missing values. But `None` may be the
    # name of a level, and `NaN` is the loss of a diverged run.
    missing_values = {
        "keep_default_na": False,
        "na_values": [""],
        "dtype_backend": "numpy_nullable",
    }
    options = {
        "skipinitialspace": True,
        "index_col": False,
        "decimal": "," if separator == ";" else ".",
    }
    frame = pd.read_csv(io.StringIO(text, newline=""), sep=separator, **missing_values, **options)
    return frame.rename(columns=str.strip)
