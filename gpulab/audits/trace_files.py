"""A trace as a file: Parquet, one row an operation, with what concerns the whole step as JSON in its metadata.

A row has the fields of an `Operation` as JSON, says whether it belongs to the step in float64, and holds the sketches
of those of its values (inputs, outputs, changed) that no row before it names.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from gpulab import files
from gpulab.audits.operations import Operation
from gpulab.errors import DataError

FORMAT = 6
KEY = "gpulab trace"
LARGEST = 1 << 27  # numbers in a column; of the largest networks that were recorded one has some 200,000
NO_TRACE = "`gpulab record` writes one"
OTHER_FORMAT = f"this gpulab reads format {FORMAT}: record the step again with it"


class Overwritten(TypedDict):
    """A tensor that the guard found overwritten."""

    operation: str
    line: str
    why: str
    remedy: str


class Notes(TypedDict):
    """What a trace says of the whole step."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    setting: str
    label: str
    overwritten: list[Overwritten]
    passport: dict[str, Any]
    arithmetic: dict[str, Any]
    notes: NotRequired[dict[str, str]]


@functools.cache
def _checks() -> tuple[TypeAdapter[Notes], TypeAdapter[list[Operation]]]:
    return TypeAdapter(Notes), TypeAdapter(list[Operation])


def write(
    file: str | Path, notes: Mapping[str, Any], operations: Sequence[Sequence[Operation]], sketches: Mapping[str, Any]
) -> None:
    """Write a trace, whole or not at all: notes on the step, its operations and those in float64, and the sketches."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    seen: set[str] = set()
    rows = []
    for reference, ops in enumerate(operations):
        for op in ops:
            new = [sketches[value] for value in dict.fromkeys(op.values) if value not in seen]
            seen.update(op.values)
            rows.append({"operation": json.dumps(vars(op) | {"reference": bool(reference)}), "sketches": new})
    buffer, text = io.BytesIO(), json.dumps({"format": FORMAT, **notes, "seal": files.UNSEALED})
    sketch_type = pa.list_(pa.list_(pa.float64()))
    schema = pa.schema({"operation": pa.string(), "sketches": sketch_type}, {KEY: text})
    pq.write_table(
        pa.Table.from_pylist(rows, schema), buffer, use_dictionary=False, compression="zstd", compression_level=19
    )
    files.write(file, files.seal(buffer.getvalue()))


def read(
    file: str | Path, content: bytes | None = None, most: int | None = None
) -> tuple[dict[str, Any], tuple[list[Operation], list[Operation]], dict[str, np.ndarray]]:
    """What `write` was given. Raises `DataError`, naming the file, for one that is missing, damaged or foreign.

    With its `content`, the file is a name and not opened. At `most` so many numbers may be in a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = files.read(file) if content is None else content
    if not content.startswith(b"PAR1"):
        raise DataError(f"{file}: not a trace; {NO_TRACE}")
    with (
        files.reading(file, "a damaged trace"),
        pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as opened,
    ):
        text = (opened.schema_arrow.metadata or {}).get(KEY.encode())
        if text is None:
            raise DataError(f"{file}: a Parquet file, but no trace; {NO_TRACE}")
        notes = files.read_json(file, text)
        if notes.pop("format") != FORMAT:
            raise DataError(f"{file}: a trace of another format; {OTHER_FORMAT}")
        files.check_seal(file, content)
        del notes["seal"]
        files.check_table_size(file, opened.metadata, most or LARGEST)
        table = opened.read()
        check_notes, check_operations = _checks()
        check_notes.validate_python(notes, strict=True)
        rows = files.read_json(file, f"[{','.join(table['operation'].to_pylist())}]".encode())
        of_reference = [row.pop("reference") for row in rows]
        every = check_operations.validate_python(rows)
        halves = [[op for op, is_exact in zip(every, of_reference, strict=True) if is_exact == half] for half in (0, 1)]
        arrays = table["sketches"].combine_chunks().flatten()
        starts = np.cumsum(arrays.value_lengths().to_numpy())[:-1]
        names = dict.fromkeys(value for op in every for value in op.values)
        sketches = dict(zip(names, np.split(arrays.flatten().to_numpy(), starts), strict=True))
        return notes, (halves[0], halves[1]), sketches
