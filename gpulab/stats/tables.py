"""Tables of runs that other programs wrote: CSV, TSV and Parquet files."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pandas as pd

from gpulab import files
from gpulab.errors import DataError, UsageError


def read_table(file: str | Path) -> pd.DataFrame:
    r"""A table of runs, a row each, as `gpulab.verdict` takes it; columns keep their names.

    Text may be separated by commas, semicolons (then decimals have a comma) or tabs. An empty cell is missing, which is
    not the same as NaN.

    Args:
        file: A .parquet, or text in UTF-8 with a header: a run table exported by Weights & Biases, what
            `mlflow.search_runs().to_csv` or `mlflow experiments csv` wrote, or any other.

    Raises:
        DataError: For a file that cannot be read, is empty or has columns of one name.
        UsageError: For a column `State` with runs that did not finish.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = Path(folder.name) / "runs.csv"
        >>> _ = file.write_text("device;seed;loss\ncpu;0;0,5\ncuda;0;0,6\n")
        >>> read_table(file).values.tolist()
        [['cpu', 0, 0.5], ['cuda', 0, 0.6]]
    """
    file = Path(file)
    content = files.read(file)
    with files.reading(file, "cannot be read as a table"):
        parquet = file.suffix == ".parquet"
        frame = pd.read_parquet(io.BytesIO(content)) if parquet else _read_text(content.decode("utf-8-sig"))
    if frame.empty:
        raise DataError(f"{file}: no runs in it; expected a header and a row per run")
    if "status" not in frame and "State" in frame and set(frame["State"].str.lower()) - {"finished"}:
        raise UsageError(f"{file}: column 'State' has runs that did not finish: rename it to 'status', which says so")
    return frame


def _read_text(text: str) -> pd.DataFrame:
    first_line = text.partition("\n")[0]
    separator = max(",;\t", key=lambda mark: len(next(csv.reader([first_line], delimiter=mark), [])))
    header = [name.strip() for name in next(csv.reader([first_line], delimiter=separator), [])]
    if twice := sorted({name for name in header if name and header.count(name) > 1}):
        raise ValueError(f"more than one column is called {', '.join(twice)}")
    # Of the words that pandas takes for nothing, None is a fine name for a level and NaN is a loss.
    nothing = {"keep_default_na": False, "na_values": [""], "dtype_backend": "numpy_nullable"}
    options = {"skipinitialspace": True, "index_col": False, "decimal": "," if separator == ";" else "."}
    return pd.read_csv(io.StringIO(text, newline=""), sep=separator, **nothing, **options).rename(columns=str.strip)
