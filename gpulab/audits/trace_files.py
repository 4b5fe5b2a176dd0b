"""A trace as a file: Parquet, one row an operation, with what concerns the whole step as JSON in its metadata.

A row has the fields of `Operation`, its arguments and defaults as JSON. `reference` says whether it belongs to the
step in float64. `sketches` are those of its values (inputs, outputs, changed) that no row before it names.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor
from typing_extensions import TypedDict

from gpulab import files
from gpulab.errors import DataError

if TYPE_CHECKING:
    import pyarrow

FORMAT = 5
KEY = "gpulab trace"
TENSOR = "Tensor"  # what stands for one among an operation's arguments
LARGEST = 1 << 27  # numbers in a column; of the largest networks that were recorded one has some 200,000
NO_TRACE = "`gpulab record` writes one"
OTHER_FORMAT = f"this gpulab reads format {FORMAT}: record the step again with it"


class Overwritten(TypedDict):
    """A tensor that the guard found overwritten."""

    operation: str
    line: str
    why: str
    remedy: str


class Trace(TypedDict):
    """The notes of a trace."""

    setting: str
    label: str
    overwritten: list[Overwritten]
    passport: dict[str, Any]
    arithmetic: dict[str, Any]
    notes: NotRequired[dict[str, str]]


def as_json(argument: Any) -> Any:
    """An operation's argument as JSON: `TENSOR` for a tensor, None for what a setting may change or JSON lacks."""
    if isinstance(argument, Tensor):
        return TENSOR
    if isinstance(argument, list | tuple):
        return [as_json(item) for item in argument]
    if isinstance(argument, complex):
        return str(argument)
    return argument if isinstance(argument, bool | int | float | str) else None


def by_name(
    schema: torch.FunctionSchema, placed: Iterable[Any], named: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a call by the names of the operation's schema, as JSON; and defaults for the others."""
    names = [argument.name for argument in schema.arguments]
    arguments = {name: as_json(value) for name, value in (*zip(names, placed, strict=False), *named.items())}
    omitted = [a for a in schema.arguments if a.has_default_value() and a.name not in arguments]
    return arguments, {a.name: as_json(a.default_value) for a in omitted}


@functools.cache
def _notes_check() -> TypeAdapter[Trace]:
    return TypeAdapter(Trace)


@functools.cache
def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    def lists(element_type: pyarrow.DataType) -> pyarrow.DataType:
        return pa.list_(pa.field("element", element_type, nullable=False))

    text, truth, number = pa.string(), pa.bool_(), pa.float64()
    columns = dict.fromkeys(("name", "phase", "module", "line", "dtype", "arguments", "defaults"), text)
    columns |= dict.fromkeys(("inputs", "outputs", "changed"), lists(text)) | {"shape": lists(pa.int64())}
    columns |= dict.fromkeys(("reference", "random", "steady", "rounded_before", "nans", "anew"), truth)
    columns |= {"sketches": lists(lists(number))}
    perhaps = {"repeats": truth, "error": number, "bound": number, "spread": number}
    perhaps |= {"format": text, "carried": lists(number)}
    return pa.schema(
        [pa.field(n, column_type, nullable=n in perhaps) for n, column_type in (columns | perhaps).items()]
    )


def write(
    file: str | Path,
    notes: Mapping[str, Any],
    rows: Iterable[dict[str, Any]],
    sketches: Mapping[str, np.ndarray],
) -> None:
    """Write a trace: notes on the step, a row for each operation, and the sketches of the values that they name.

    Whole or not at all.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    written: set[str] = set()
    records = []
    for row in rows:
        new = [value for value in _values(row) if value not in written]
        written.update(new)
        as_json = {name: json.dumps(row[name]) for name in ("arguments", "defaults")}
        records.append(row | as_json | {"sketches": [sketches[value] for value in new]})
    buffer, described = io.BytesIO(), {"format": FORMAT, **notes, "seal": files.UNSEALED}
    pq.write_table(
        pa.Table.from_pylist(records, _schema().with_metadata({KEY: json.dumps(described)})),
        buffer,
        compression="zstd",
        compression_level=19,
        use_dictionary=False,
        column_encoding={"sketches.list.element.list.element": "BYTE_STREAM_SPLIT"},
        data_page_size=1 << 26,
    )
    files.write(file, files.seal(buffer.getvalue()))


def read(
    file: str | Path, content: bytes | None = None, most: int | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, np.ndarray]]:
    """What `write` was given. Raises `DataError`, naming the file, for one that is missing, damaged or foreign.

    With its `content`, the file is a name and not opened. At `most` so many numbers may be in a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = files.read(file) if content is None else content
    if not content.startswith(b"PAR1"):
        raise DataError(f"{file}: not a trace; {NO_TRACE}")
    try:
        with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as opened:
            described = (opened.schema_arrow.metadata or {}).get(KEY.encode())
            if described is None:
                raise DataError(f"{file}: a Parquet file, but no trace; {NO_TRACE}")
            notes = files.read_json(file, described)
            if notes.pop("format") != FORMAT:
                raise DataError(f"{file}: a trace of another format; {OTHER_FORMAT}")
            files.check_seal(file, content)
            del notes["seal"]
            _notes_check().validate_python(notes, strict=True)
            if not opened.schema_arrow.equals(_schema()):
                raise ValueError("other columns than a trace has")
            files.check_table_size(file, opened.metadata, most or LARGEST)
            table = opened.read()
        arrays = table["sketches"].combine_chunks().flatten()
        starts = np.cumsum(arrays.value_lengths().to_numpy())[:-1]
        rows = [files.without_controls(row) for row in table.drop_columns(["sketches"]).to_pylist()]
        for row in rows:
            row |= {name: files.read_json(file, row[name].encode()) for name in ("arguments", "defaults")}
        names = dict.fromkeys(value for row in rows for value in _values(row))
        return notes, rows, dict(zip(names, np.split(arrays.flatten().to_numpy(), starts), strict=True))
    except OSError as error:
        raise DataError(f"{file}: not a trace that can be read (missing, or cut short?): {error}") from None
    except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file}: a damaged trace: {error!r}") from None


def _values(row: Mapping[str, Any]) -> dict[str, None]:
    return dict.fromkeys((*row["inputs"], *row["outputs"], *row["changed"]))
