"""Recorded data of every kind, with its provenance: the one place that reads `data/`.

There are three kinds of files: a JSON document; a table, which is a Parquet file whose metadata
contains the passport and the command that made it; and packed runs, a table with the record (as
JSON) and the history of each run.
"""

from __future__ import annotations

import functools
import io
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import files
from gpulab.errors import DataError
from gpulab.passports import machine, passport

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

# The version of all files: documents, tables, packed runs, runs, results and checkpoints.
FORMAT_VERSION = 3
PACKAGE_FOLDER = Path(__file__).parents[1]
DATA_FOLDER = (
    PACKAGE_FOLDER.parent / "data"
    if (PACKAGE_FOLDER.parent / "data").is_dir()
    else PACKAGE_FOLDER / "recorded"
)
# Arrays by the names of HISTORY_TYPES, or a table that has such columns: any class with
# `columns[name]`.
Columns = Any
HISTORY_TYPES = {
    "window": "int64",
    "step": "int64",
    "loss": "float64",
    "seconds": "float64",
}  # the columns of a history


def recorded_folder(name: str) -> Path:
    """Return the folder `data/NAME` of the checkout, or its copy inside the installed package."""
    return DATA_FOLDER / name


# --- JSON -----------------------------------------------------------------------------------------


def read_document(file: str | Path, max_bytes: int = files.MAX_FILE_BYTES) -> dict[str, Any]:
    """Read a recorded JSON document of at most `max_bytes`; `DataError` if damaged or foreign."""
    content = files.read(file, max_bytes)
    return check_document(file, files.read_json(file, content), content)


def check_document(file: str | Path, notes: object, content: bytes) -> dict[str, Any]:
    """Check the format and the seal of a file, and return its notes without these two keys.

    The keys are removed in place.

    Args:
        file: The file, for the message of an error.
        notes: The document, or the notes in the file's header, as read from JSON.
        content: All bytes of the file.

    Raises:
        DataError: If the format version is different, or the seal does not match the content.
    """
    # JSON that is not an object has no version. The message then shows the JSON instead.
    version = notes.pop("format", None) if isinstance(notes, dict) else notes
    if not isinstance(notes, dict) or version != FORMAT_VERSION:
        raise DataError(
            f"{file}: format {str(version)[:20]!r}; this version of gpulab reads {FORMAT_VERSION}"
        )
    files.check_seal(file, content)
    notes.pop("seal", None)
    return notes


def make_measurement(device: str, **tables: Any) -> dict[str, Any]:
    """Build the document of a measurement on this machine.

    Write it with `write_document` to the file `measured/KIND-MACHINE.json`.

    Args:
        device: The kind of the device, such as `cpu`.
        **tables: Tables by name, each a list of rows or a dictionary of columns. A single table is
            called `rows`. Other values are allowed, too.

    Returns:
        The tables, with the `passport`, the name of the `machine` and the running `command`.
    """
    machine_passport = passport()
    command = shlex.join(["python", *sys.argv])
    return {
        "machine": machine(machine_passport, device),
        "command": command,
        "passport": machine_passport,
        **tables,
    }


def read_measured(kind: str) -> list[dict[str, Any]]:
    """Read the measurements of a kind: the documents `data/measured/KIND-*.json`."""
    return [
        read_document(file) for file in sorted(recorded_folder("measured").glob(f"{kind}-*.json"))
    ]


def recorded_table(kind: str, table: str = "rows") -> pd.DataFrame:
    """Combine the tables of all measurements of a kind, with a column `machine`.

    >>> recorded_table("rooflines").index.is_unique
    True
    """
    import pandas as pd

    documents = [document for document in read_measured(kind) if table in document]
    tables = [
        pd.DataFrame(document[table]).assign(machine=document["machine"]) for document in documents
    ]
    return pd.concat(tables, ignore_index=True).assign(recorded=True)


def write_document(file: Path, document: Mapping[str, Any]) -> None:
    """Write a document atomically, with its format and seal; create its folder if necessary."""
    sealed = {**document, "format": FORMAT_VERSION, "seal": files.UNSEALED}
    files.write(file, files.seal(json.dumps(sealed, indent=1).encode() + b"\n"))


# --- tables ---------------------------------------------------------------------------------------


def write_table(
    file: Path, table: pd.DataFrame | pyarrow.Table, record: dict[str, Any], **options: Any
) -> None:
    """Write a table atomically, with its record (passport, command, …) in the file's metadata.

    `options` are those of pyarrow's `ParquetWriter`.
    """
    import pyarrow
    import pyarrow.parquet

    rows = (
        table
        if isinstance(table, pyarrow.Table)
        else pyarrow.Table.from_pandas(table, preserve_index=False)
    )
    notes = json.dumps({"format": FORMAT_VERSION, **record, "seal": files.UNSEALED})
    content = io.BytesIO()
    with pyarrow.parquet.ParquetWriter(
        content, rows.schema, compression="zstd", store_schema=False, **options
    ) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({"gpulab": notes})
    files.write(file, files.seal(content.getvalue()))


def read_rows(file: Path) -> tuple[pyarrow.Table, dict[str, Any]]:
    """Read a table and its record.

    Raises:
        DataError: If the file is damaged or foreign; the message names it.
    """
    import pyarrow
    import pyarrow.parquet

    content = files.read(file)
    with (
        files.convert_read_errors(file),
        pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)) as parquet_file,
    ):
        notes = (parquet_file.metadata.metadata or {}).get(b"gpulab")
        if notes is None:
            raise DataError(f"{file}: not a recording made by gpulab")
        record = check_document(file, files.read_json(file, notes), content)
        files.check_table_size(file, parquet_file.metadata)
        # For files of this size, starting threads takes longer than they save.
        return parquet_file.read(use_threads=False), record


def read_table(file: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read a table and its record, which must have a valid passport of a machine."""
    rows, record = read_rows(file)
    with files.convert_read_errors(file, "not a recorded table"):
        machine(record["passport"])
    return rows.to_pandas(), record


def read_tables(folder: Path) -> list[tuple[pd.DataFrame, dict[str, Any]]]:
    """Read all tables of a folder with their records, ordered by file name."""
    return [read_table(file) for file in sorted(folder.glob("*.parquet"))]


# --- packed runs ----------------------------------------------------------------------------------


def write_packed(file: Path, records: list[dict[str, Any]], histories: list[pyarrow.Table]) -> None:
    """Write runs into one file atomically.

    The seconds of a history are rounded to 1/1024. Further digits have no meaning, and would take
    up a fifth of the file.
    """
    import pyarrow

    columns: dict[str, Any] = {
        name: [history[name].to_numpy() for history in histories] for name in HISTORY_TYPES
    }
    columns["seconds"] = [(seconds * 1024).round() / 1024 for seconds in columns["seconds"]]
    rows = pyarrow.table({"record": [json.dumps(record) for record in records], **columns})
    # Byte stream split of these columns makes a file smaller by a sixth.
    split_columns = ["loss.list.element", "seconds.list.element"]
    write_table(
        file,
        rows,
        {},
        compression_level=19,
        use_dictionary=False,
        use_byte_stream_split=split_columns,
    )


def read_packed(file: Path) -> list[tuple[dict[str, Any], Callable[[], pyarrow.Table]]]:
    """Read packed runs as pairs of a record and a function that reads the history.

    The list is empty if the file is a recording of another kind.
    """
    table, _ = read_rows(file)
    if "record" not in table.column_names:
        return []
    with files.convert_read_errors(file, "not a file of packed runs"):
        records = [files.read_json(file, text.encode()) for text in table["record"].to_pylist()]
    return [
        (record, functools.partial(check_history, file, table, row))
        for row, record in enumerate(records)
    ]


def check_history(file: str | Path, columns: Columns, row: int | None = None) -> pyarrow.Table:
    """Build a history from columns, and check it.

    Args:
        file: The file, for the message of an error.
        columns: The columns of the history; or, if `row` is given, of packed runs, where each cell
            is a list with a column of a history.
        row: The number of the packed run.

    Raises:
        DataError: If columns are missing, have other types or empty cells. The message names the
            file.

    >>> import pyarrow
    >>> columns = {"window": [0, 1], "step": [1, 2], "loss": [0.5, None], "seconds": [0.1, 0.2]}
    >>> check_history("history.parquet", pyarrow.table(columns))
    Traceback (most recent call last):
    gpulab.errors.DataError: history.parquet: a history with empty cells
    """
    import pyarrow

    with files.convert_read_errors(file, "not a history"):
        values = {
            name: columns[name] if row is None else columns[name][row].values
            for name in HISTORY_TYPES
        }
        history = pyarrow.table(values)
        # A loss that is not a number is written as NaN, so cells are never empty.
        if any(column.null_count for column in history.columns):
            raise DataError(f"{file}: a history with empty cells")
        return history.cast(pyarrow.schema(HISTORY_TYPES.items()))
