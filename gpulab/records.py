"""Recorded data of every kind, with its provenance: the one place that reads `data/`.

A table is a Parquet file whose own description holds the passport and the command that made it. Packed runs are
such a table, with a row a run: what many runs share (passports, commands, configurations) is there once.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.errors import DataError, GpulabError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

FORMAT = 1
PACKAGE = Path(__file__).parent
DATA = PACKAGE.parent / "data" if (PACKAGE.parent / "data").is_dir() else PACKAGE / "recorded"

SHARED = ("passport", "arithmetic", "command", "configuration")  # of a run, kept once for all that have the same
PLAIN = ("id", "experiment", "profile", "setting", "seed", "rerun", "status", "diverged_at", "started")
SUMMARY = ("final_loss", "heldout_loss", "seconds", "frames_per_second", "weights")
HISTORY = ("window", "step", "loss", "seconds")


def recorded_folder(name: str) -> Path:
    """The folder `data/NAME` of the checkout, or its copy inside the installed package."""
    return DATA / name


def machine(passport: Mapping[str, Any], kind: str = "") -> str:
    """What did the work: the GPUs of a machine where it has any, or what `kind` of device says."""
    if kind == "cpu" or not (kind or passport["gpus"]):
        return passport["cpu"]["model"]
    return ", ".join(gpu["name"] for gpu in passport["gpus"])


# --- JSON ------------------------------------------------------------------------------------------------


def read_json(file: Path, format: int = FORMAT) -> dict[str, Any]:  # noqa: A002
    """A recorded JSON document; `DataError`, naming the file, for a damaged or foreign one."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from None
    if not isinstance(document, dict) or document.get("format") != format:
        version = document.get("format") if isinstance(document, dict) else document
        raise DataError(f"{file}: format {version!r}; this gpulab reads format {format}")
    return document


def read_documents(name: str) -> list[dict[str, Any]]:
    """All JSON documents in the folder `data/NAME`."""
    return [read_json(file) for file in sorted(recorded_folder(name).glob("*.json"))]


def write_json(file: Path, document: Mapping[str, Any]) -> None:
    """Write a document with its format, whose folder is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"format": FORMAT, **document}, indent=1) + "\n", encoding="utf-8")


# --- tables ----------------------------------------------------------------------------------------------


def write_table(file: Path, table: pd.DataFrame | pyarrow.Table, record: dict[str, Any], **options: Any) -> None:
    """Write a table with its record (passport, command, …) in the file's own description; whole or not at all.

    `options` are those of pyarrow's `ParquetWriter`.
    """
    import pyarrow
    import pyarrow.parquet

    rows = table if isinstance(table, pyarrow.Table) else pyarrow.Table.from_pandas(table, preserve_index=False)
    rows = rows.replace_schema_metadata(None)
    unfinished = file.with_suffix(".unfinished")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        options = {"compression": "zstd", "store_schema": False, **options}
        with pyarrow.parquet.ParquetWriter(unfinished, rows.schema, **options) as writer:
            writer.write_table(rows)
            writer.add_key_value_metadata({"gpulab": json.dumps({"format": FORMAT, **record})})
        unfinished.replace(file)
    except OSError as error:
        raise GpulabError(f"{file.parent} cannot be written: {error}") from None


def read_rows(file: Path, columns: Iterable[str] | None = None) -> tuple[pyarrow.Table, dict[str, Any]]:
    """A table, or some columns of it, and its record; `DataError`, naming the file, for a damaged or foreign one."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            record = json.loads((opened.metadata.metadata or {}).get(b"gpulab", b"null"))
            rows = opened.read(None if columns is None else list(columns))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: cannot be read: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise DataError(f"{file}: not a recording of format {FORMAT}, which this gpulab reads")
    return rows, record


def read_table(file: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A table and its record, with the machine's passport."""
    rows, record = read_rows(file)
    if "passport" not in record:
        raise DataError(f"{file}: not a recording of format {FORMAT}, which this gpulab reads")
    return rows.to_pandas(), record


def read_tables(folder: Path) -> Iterator[tuple[pd.DataFrame, dict[str, Any]]]:
    """All tables of a folder, with their records; damaged files are named in a warning and skipped."""
    for file in sorted(folder.glob("*.parquet")):
        try:
            yield read_table(file)
        except DataError as error:
            warnings.warn(f"skipped: {error}", stacklevel=3)


# --- packed runs -----------------------------------------------------------------------------------------


def pack_runs(file: Path, runs: Iterable[tuple[Mapping[str, Any], pd.DataFrame]]) -> int:
    """Write runs, each a record and a history, into one file, and return how many they are."""
    import pyarrow

    shared: dict[str, dict[str, int]] = {name: {} for name in SHARED}
    rows = []
    for record, history in runs:
        more = {name: value for name, value in record.items() if name not in (*SHARED, *PLAIN, "summary")}
        row = {name: record.get(name) for name in PLAIN} | {name: record["summary"].get(name) for name in SUMMARY}
        row["more"] = json.dumps(more)
        for name, values in shared.items():
            row[name] = values.setdefault(json.dumps(record.get(name)), len(values))
        rows.append(row | {f"history_{name}": history[name].to_numpy() for name in HISTORY})
    rows.sort(key=lambda row: (row["experiment"], row["profile"], row["setting"], row["seed"], row["id"]))
    # Losses do not repeat, so dictionaries gain nothing; splitting the bytes of numbers halves the file.
    encodings = dict(zip(HISTORY, 2 * ["DELTA_BINARY_PACKED"] + 2 * ["BYTE_STREAM_SPLIT"], strict=True))
    write_table(
        file,
        pyarrow.Table.from_pylist(rows),
        {name: [json.loads(value) for value in values] for name, values in shared.items()},
        compression_level=19,
        use_dictionary=[*PLAIN, *SUMMARY, *SHARED, "more"],
        column_encoding={f"history_{name}.list.element": encoding for name, encoding in encodings.items()},
    )
    return len(rows)


def packed_runs(file: Path) -> list[dict[str, Any]]:
    """The records of the runs in a file that `pack_runs` wrote."""
    try:
        table, shared = read_rows(file, [*PLAIN, *SUMMARY, *SHARED, "more"])
        return [
            {name: row[name] for name in PLAIN}
            | {name: shared[name][row[name]] for name in SHARED}
            | {"summary": {name: row[name] for name in SUMMARY}}
            | json.loads(row["more"])
            for row in table.to_pylist()
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"{file}: not a file of packed runs: {error!r}") from None


def packed_histories(file: Path) -> dict[str, pd.DataFrame]:
    """The histories of the runs in such a file, by id."""
    import pandas as pd

    table, _ = read_rows(file, ["id", *(f"history_{name}" for name in HISTORY)])
    columns = {name: table[f"history_{name}"] for name in HISTORY}
    return {
        run: pd.DataFrame({name: lists[place].values.to_numpy() for name, lists in columns.items()})
        for place, run in enumerate(table["id"].to_pylist())
    }
