"""Recorded data of every kind, with its provenance: the one place that reads `data/`.

A table is a Parquet file whose own description holds the passport and the command that made it. Packed runs are
such a table, with a row a run: what many runs share (passports, commands, configurations) is there once.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import files
from gpulab.errors import DataError, UsageError
from gpulab.passports import passport
from gpulab.store import schemas

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow

FORMAT = 2
PACKAGE = Path(__file__).parents[1]
DATA = PACKAGE.parent / "data" if (PACKAGE.parent / "data").is_dir() else PACKAGE / "recorded"
LARGEST = 1 << 28  # numbers in a column

SHARED = ("passport", "arithmetic", "command", "configuration")  # of a run, kept once for all that have the same
PLAIN = ("id", "experiment", "profile", "setting", "seed", "rerun", "status", "diverged_at", "started")
SUMMARY = ("final_loss", "heldout_loss", "seconds", "frames_per_second", "weights")
HISTORY = ("window", "step", "loss", "seconds")
PACKED = "not a file of packed runs"

LAID_DOWN = ("Question", "Endpoint", "Margin", "Seeds", "Stopping")  # the headings of a registration


def recorded_folder(name: str) -> Path:
    """The folder `data/NAME` of the checkout, or its copy inside the installed package."""
    return DATA / name


def shipped(file: str | Path) -> Path:
    """A file; or where there is no checkout, the copy inside the installed package of one that our examples name."""
    folder, *rest = Path(file).parts or (".",)
    copy = PACKAGE.joinpath("recorded", *rest)
    return copy if folder in ("benchmarks", "data") and copy.is_file() and not Path(file).exists() else Path(file)


def machine(passport: Mapping[str, Any], kind: str = "") -> str:
    """What did the work: the GPUs of a machine where it has any, each kind once, or what `kind` of device says."""
    if kind == "cpu" or not (kind or passport["gpus"]):
        return passport["cpu"]["model"]
    return ", ".join(dict.fromkeys(gpu["name"] for gpu in passport["gpus"]))


def registration(file: str | Path | None) -> dict[str, str]:
    """What a run's record keeps of the registration that it is made under, if any: its file's name, and SHA-256.

    A registration is a Markdown file, such as `data/registered/NAME.md`, with the headings of `LAID_DOWN`. It is
    written before the first run; whoever changes it later changes its digest, which the runs still have.

    Raises:
        UsageError: For a file that is not there, or that lacks one of the headings.
    """
    if file is None:
        return {}
    try:
        content = Path(file).read_bytes()
        headings = re.findall(r"^## (.+?)\s*$", content.decode(), re.MULTILINE)
    except (OSError, ValueError) as error:  # the latter for what is no UTF-8, or a name with a NUL in it
        raise UsageError(f"registration {str(file)!r}: cannot be read: {error}") from None
    missing = [heading for heading in LAID_DOWN if heading not in headings]
    if missing:
        raise UsageError(
            f"registration {str(file)!r} has no heading '## {missing[0]}'; it needs {', '.join(LAID_DOWN)}"
        )
    return {"registered": f"{Path(file).stem} {hashlib.sha256(content).hexdigest()}"}


# --- JSON ------------------------------------------------------------------------------------------------


def read_json(file: str | Path, most: int = files.MOST) -> dict[str, Any]:
    """A recorded JSON document of at most `most` bytes; `DataError`, naming it, for a damaged or foreign one."""
    content = files.read(file, most)
    document = files.read_json(file, content)
    _check_format(file, document, content)
    document.pop("seal", None)
    return document


def _check_format(file: str | Path, document: Any, content: bytes) -> None:
    """Raise `DataError` unless the document, whose file has this content, is one that this gpulab reads, unchanged."""
    version = document.get("format") if isinstance(document, dict) else document
    if version != FORMAT:
        raise DataError(f"{file}: format {str(version)[:20]!r}; this gpulab reads {FORMAT}")
    files.check_seal(file, content)


def measured(device: str, **tables: Any) -> dict[str, Any]:
    """What this machine measured on a device, to be kept by `write_json` in `data/measured/KIND-MACHINE.json`.

    Args:
        device: Its kind, such as `cpu`.
        tables: Each a list of rows, or a list for each column; `rows`, where there is one only. Other values, too.

    Returns:
        These, with the `passport`, the name of the `machine` and the `command` that is running.
    """
    machine_passport = passport()
    command = shlex.join(["python", *sys.argv])
    return {"machine": machine(machine_passport, device), "command": command, "passport": machine_passport, **tables}


def read_measured(kind: str) -> list[dict[str, Any]]:
    """What was measured of a kind: the documents `data/measured/KIND-*.json`."""
    return [read_json(file) for file in sorted(recorded_folder("measured").glob(f"{kind}-*.json"))]


def recorded_table(kind: str, table: str = "rows") -> pd.DataFrame:
    """A table of all that was measured of a kind, with the `machine` that recorded each row."""
    import pandas as pd

    documents = [document for document in read_measured(kind) if table in document]
    tables = [pd.DataFrame(document[table]).assign(machine=document["machine"]) for document in documents]
    return pd.concat(tables, ignore_index=True).assign(recorded=True)


def write_json(file: Path, document: Mapping[str, Any]) -> None:
    """Write a document with its format and seal, whose folder is made if need be; whole or not at all."""
    sealed = {**document, "format": FORMAT, "seal": files.UNSEALED}
    files.write(file, files.seal(json.dumps(sealed, indent=1).encode() + b"\n"))


# --- tables ----------------------------------------------------------------------------------------------


def write_table(file: Path, table: pd.DataFrame | pyarrow.Table, record: dict[str, Any], **options: Any) -> None:
    """Write a table with its record (passport, command, …) in the file's own description; whole or not at all.

    `options` are those of pyarrow's `ParquetWriter`.
    """
    files.write(file, as_table(table, record, **options))


def as_table(table: pd.DataFrame | pyarrow.Table, record: dict[str, Any], **options: Any) -> bytes:
    """The content of such a file."""
    import pyarrow
    import pyarrow.parquet

    rows = table if isinstance(table, pyarrow.Table) else pyarrow.Table.from_pandas(table, preserve_index=False)
    rows = rows.replace_schema_metadata(None)
    options = {"compression": "zstd", "store_schema": False, **options}
    content, notes = io.BytesIO(), {"format": FORMAT, **record, "seal": files.UNSEALED}
    with pyarrow.parquet.ParquetWriter(content, rows.schema, **options) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({"gpulab": json.dumps(notes)})
    return files.seal(content.getvalue())


def read_rows(file: Path, columns: list[str] | None = None) -> tuple[pyarrow.Table, dict[str, Any]]:
    """A table, or some columns of it, and its record; `DataError`, naming the file, for a damaged or foreign one."""
    import pyarrow
    import pyarrow.parquet

    content = files.read(file)
    with files.reading(file), pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)) as opened:
        notes = (opened.metadata.metadata or {}).get(b"gpulab")
        if notes is None:
            raise DataError(f"{file}: not a recording of gpulab's")
        record = files.read_json(file, notes)
        _check_format(file, record, content)
        check_size(file, opened.metadata)
        rows = opened.read(columns, use_threads=False)  # threads cost more than they save
    return rows, record


def check_size(file: str | Path, metadata: pyarrow.parquet.FileMetaData, most: int = LARGEST) -> None:
    """Raise `DataError` for a Parquet file that would unpack into more than anything that gpulab writes."""
    for number in range(metadata.num_columns):
        chunks = [metadata.row_group(group).column(number) for group in range(metadata.num_row_groups)]
        numbers = sum(chunk.num_values for chunk in chunks)
        if numbers > most or sum(chunk.total_uncompressed_size for chunk in chunks) > 8 * most:
            raise DataError(f"{file}: too large: more than {most} numbers in a column")


def read_table(file: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A table and its record, with the machine's passport."""
    rows, record = read_rows(file)
    schemas.check(schemas.Recording, record, file)
    return rows.to_pandas(), record


def read_tables(folder: Path) -> Iterator[tuple[pd.DataFrame, dict[str, Any]]]:
    """All tables of a folder, with their records; damaged files are named in a warning and skipped."""
    for file in sorted(folder.glob("*.parquet")):
        try:
            yield read_table(file)
        except DataError as error:
            warnings.warn(f"skipped: {error}", stacklevel=3)


# --- packed runs -----------------------------------------------------------------------------------------


def pack_runs(file: Path, runs: Iterable[tuple[Mapping[str, Any], pyarrow.Table]]) -> int:
    """Write runs, each a record and a history, into one file, and return how many they are."""
    runs = list(runs)
    files.write(file, packed(runs))
    return len(runs)


def packed(runs: Iterable[tuple[Mapping[str, Any], pyarrow.Table]], compressed: bool = True) -> bytes:
    """The content of such a file.

    The seconds of a history are rounded to 1/1024: further digits say nothing, and are a fifth of a file. What is
    not `compressed` cannot become larger than it is, whoever wrote it.
    """
    import pyarrow

    shared: dict[str, dict[str, int]] = {name: {} for name in SHARED}
    rows = []
    for record, history in runs:
        other_fields = {name: value for name, value in record.items() if name not in (*SHARED, *PLAIN, "summary")}
        row = {name: record.get(name) for name in PLAIN} | {name: record["summary"].get(name) for name in SUMMARY}
        row["more"] = json.dumps(other_fields)
        for name, values in shared.items():
            row[name] = values.setdefault(json.dumps(record.get(name)), len(values))
        columns = {f"history_{name}": history[name].to_numpy() for name in HISTORY}
        rows.append(row | columns | {"history_seconds": (columns["history_seconds"] * 1024).round() / 1024})
    rows.sort(key=lambda row: (row["experiment"], row["profile"], row["setting"], row["seed"], row["id"]))
    # Losses do not repeat, so dictionaries gain nothing; splitting the bytes of numbers halves the file.
    encodings = dict(zip(HISTORY, 2 * ["DELTA_BINARY_PACKED"] + 2 * ["BYTE_STREAM_SPLIT"], strict=True))
    return as_table(
        pyarrow.Table.from_pylist(rows),
        {name: [json.loads(value) for value in values] for name, values in shared.items()},
        **({"compression_level": 19} if compressed else {"compression": "none"}),
        use_dictionary=[*PLAIN, *SUMMARY, *SHARED, "more"],
        column_encoding={f"history_{name}.list.element": encoding for name, encoding in encodings.items()},
    )


def packed_runs(file: Path) -> list[dict[str, Any]]:
    """The records of the runs in a file that `pack_runs` wrote; none where it is another recording of gpulab's."""
    with files.reading(file, PACKED):
        table, shared = read_rows(file, [*PLAIN, *SUMMARY, *SHARED, "more"])
        if "id" in shared:
            return []
        documents = [
            {name: row[name] for name in PLAIN}
            | {name: shared[name][row[name]] for name in SHARED}
            | {"summary": {name: row[name] for name in SUMMARY}}
            | files.read_json(file, row["more"].encode())
            for row in table.to_pylist()
        ]
    return [schemas.check(schemas.Run, record, file) for record in documents]


def packed_histories(file: Path) -> dict[str, pyarrow.Table]:
    """The histories of the runs in such a file, by id."""
    import pyarrow

    table, _ = read_rows(file, ["id", *(f"history_{name}" for name in HISTORY)])
    with files.reading(file, PACKED):
        columns = {name: table[f"history_{name}"] for name in HISTORY}
        return {
            run: check_history(file, pyarrow.table({name: lists[row].values for name, lists in columns.items()}))
            for row, run in enumerate(table["id"].to_pylist())
        }


def check_history(file: str | Path, rows: pyarrow.Table) -> pyarrow.Table:
    """A run's history as numbers; `DataError`, naming the file, for a table that is none."""
    import pyarrow as pa

    with files.reading(file, "not a history"):
        seconds = pa.float32() if rows.schema.field("seconds").type == pa.float32() else pa.float64()
        kinds = zip(HISTORY, (pa.int64(), pa.int64(), pa.float64(), seconds), strict=True)
        history = rows.select(HISTORY).cast(pa.schema(kinds))
    if history["window"].null_count or history["step"].null_count:  # a loss may be NaN, which is written so
        raise DataError(f"{file}: a history with empty cells")
    return history
