"""Tables that other machines recorded, each with its passport and command: one Parquet file a measurement."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.errors import DataError, GpulabError

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
PACKAGE = Path(__file__).parent
DATA = PACKAGE.parent / "data" if (PACKAGE.parent / "data").is_dir() else PACKAGE / "recorded"


def recorded_folder(name: str) -> Path:
    """The folder `data/NAME` of the checkout, or its copy inside the installed package."""
    return DATA / name


def write_table(file: Path, table: pd.DataFrame, record: dict[str, Any]) -> None:
    """Write a table with its record (passport, command, …) in the file's own description; whole or not at all."""
    import pyarrow
    import pyarrow.parquet

    rows = pyarrow.Table.from_pandas(table, preserve_index=False).replace_schema_metadata(None)
    unfinished = file.with_suffix(".unfinished")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with pyarrow.parquet.ParquetWriter(unfinished, rows.schema, compression="zstd", store_schema=False) as writer:
            writer.write_table(rows)
            writer.add_key_value_metadata({"gpulab": json.dumps({"format": FORMAT, **record})})
        unfinished.replace(file)
    except OSError as error:
        raise GpulabError(f"{file.parent} cannot be written: {error}") from None


def read_table(file: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A table and its record; `DataError`, naming the file, for a damaged or foreign one."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            record = json.loads((opened.metadata.metadata or {}).get(b"gpulab", b"null"))
            table = opened.read()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: cannot be read: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT or "passport" not in record:
        raise DataError(f"{file}: not a recording of format {FORMAT}, which this gpulab reads")
    return table.to_pandas(), record


def read_tables(folder: Path) -> Iterator[tuple[pd.DataFrame, dict[str, Any]]]:
    """All tables of a folder, with their records; damaged files are named in a warning and skipped."""
    for file in sorted(folder.glob("*.parquet")):
        try:
            yield read_table(file)
        except DataError as error:
            warnings.warn(f"skipped: {error}", stacklevel=3)
