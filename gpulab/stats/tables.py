"""Tables of runs from elsewhere: CSV, TSV or Parquet, as Weights & Biases and MLflow export them or anyone writes."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet
from pandas.api.types import is_bool_dtype

from gpulab import files
from gpulab.errors import DataError, UsageError
from gpulab.stats.pairs import NAME_THEM, find_column, run_states

MOST_CELLS, MOST_BYTES = 1 << 25, 1 << 28  # of a Parquet file, unpacked


def read_table(file: str | Path, metric: str) -> pd.DataFrame:
    r"""A table of runs, a row each, as `gpulab.verdict` takes it; columns keep their names.

    Text may be separated by commas, semicolons (then decimals may have a comma) or tabs. A run that finished with
    NaN or infinity as its metric diverged; one that finished with an empty cell is refused by `verdict`.

    Args:
        file: A .parquet, or text in UTF-8 with a header: a run table exported by Weights & Biases, what
            `mlflow.search_runs().to_csv` or `mlflow experiments csv` wrote, or any other.
        metric: The column that shall be numbers.

    Raises:
        DataError: For a file that cannot be read, is empty, has columns of one name or no number in a cell.
        UsageError: For a metric that is not there, or stands for several columns.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = Path(folder.name) / "runs.csv"
        >>> _ = file.write_text("device;seed;loss\ncpu;0;0,5\ncuda;0;NaN\n")
        >>> read_table(file, "loss").values.tolist()
        [['cpu', 0, 0.5], ['cuda', 0, nan]]
    """
    file = Path(file)
    try:
        content, comma = files.read(file), False
        if file.suffix == ".parquet":
            frame = _read_parquet(content)
        else:
            frame, comma = _read_text(content.decode("utf-8-sig"))
    except DataError:
        raise
    except Exception as error:  # almost anything, where what pandas notes in a Parquet file is damaged
        why = error if isinstance(error, ValueError) else repr(error)
        raise DataError(f"{file}: cannot be read as a table: {why}") from None
    if frame.empty:
        raise DataError(f"{file}: no runs in it; expected a header and a row per run")
    if "status" not in frame and "State" in frame and set(frame["State"].str.lower()) - {"finished"}:
        raise UsageError(f"{file}: column 'State' has runs that did not finish: rename it to 'status', which says so")
    cells = frame[metric := find_column(frame.columns, metric, NAME_THEM)].dropna().infer_objects()
    if not is_bool_dtype(cells):
        text = cells.map(str).str.strip()
        numbers = pd.to_numeric(text.str.replace(",", ".") if comma else text, errors="coerce")
        if len(wrong := text[numbers.isna() & (text.str.lower() != "nan")]):
            where = f"row {wrong.index[0] + 2} has {wrong.iloc[0]!r}"
            raise DataError(f"{file}: column {metric!r} is not of numbers: {where} (the header is row 1)")
        frame[metric] = numbers.reindex(frame.index)
        lost = frame.index.isin(numbers.index[~np.isfinite(numbers)])
        if (states := run_states(frame)) is not None:
            frame["status"] = states.mask(lost & (states == "finished"), "diverged")
    return frame


def _read_parquet(content: bytes) -> pd.DataFrame:
    """The columns that are no lists or records; `ValueError` for a table that would fill the memory."""
    source = pyarrow.BufferReader(content)
    with pyarrow.parquet.ParquetFile(source) as file:
        schema, metadata = file.schema_arrow, file.metadata
    # Not by `row_group(…).column(…)`, which at a flipped bit may end the process.
    sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    _check_size(metadata.num_rows * metadata.num_columns, sum(sizes))
    columns = [field for field in schema if not pyarrow.types.is_nested(field.type)]
    plain = [field.with_type(getattr(field.type, "value_type", field.type)) for field in columns]  # no dictionaries
    _check_distinct(names := [field.name for field in plain])
    # A text that stands in many cells is in the file once, and here, too, until it is known how long all are together.
    texts = [
        field.name for field in plain if field.type in (pyarrow.string(), pyarrow.large_string(), pyarrow.binary())
    ]
    with pyarrow.parquet.ParquetFile(source, read_dictionary=texts) as file:
        table = file.read(names, use_threads=False)
    for name in texts:
        _check_size(0, table[name].to_pandas().map(lambda text: len(str(text))).astype(float).sum())
    frame = table.cast(pyarrow.schema(plain, schema.metadata)).to_pandas()
    return frame.reset_index(drop=frame.index.names == [None])


def _check_distinct(names: list[str]) -> None:
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise ValueError(f"more than one column is called {', '.join(twice)}")


def _check_size(cells: int, size: float) -> None:
    if cells > MOST_CELLS or size > MOST_BYTES:
        raise ValueError(f"it is too large: more than {MOST_CELLS:,} cells, or {MOST_BYTES:,} bytes")


def _read_text(text: str) -> tuple[pd.DataFrame, bool]:
    """The table, and whether its decimals may have a comma."""
    first_line = text.partition("\n")[0]
    separator = max(",;\t", key=lambda mark: len(next(csv.reader([first_line], delimiter=mark), [])))
    header = [name.strip() for name in next(csv.reader([first_line], delimiter=separator), [])]
    _check_distinct(header)
    # Of the words that pandas takes for nothing, None is a fine name for a level and NaN is a loss.
    nothing = {"keep_default_na": False, "na_values": [""]}
    options = {"skipinitialspace": True, "index_col": False, "low_memory": False}
    frame = pd.read_csv(io.StringIO(text, newline=""), sep=separator, **nothing, **options)
    return frame.rename(columns=str.strip), separator != ","
