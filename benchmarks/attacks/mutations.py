"""Damaged and hostile versions of a file's content, drawn by Hypothesis: blind ones, and ones that know the format."""

from __future__ import annotations

import copy
import functools
import gzip
import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

# JSON texts in the place of a value: some of them no `json.dumps` would write.
HOSTILE = [
    *('""', '"text"', '"1"', "[]", "[1, 2]", "{}", "null", "true", "0", "-1", "-0.0", "1e999", "NaN", "Infinity"),
    *(
        "1" + 400 * "0",
        "1" + 5000 * "0",
        2000 * "[" + 2000 * "]",
        100 * '{"a":' + "1" + 100 * "}",
        '"' + 9**6 * "x" + '"',
    ),
    *(
        r'"\ud800"',
        r'"\u001b[31mred\u0007"',
        r'"\u202eback"',
        '"[/red]"',
        r'"$\\frac{$"',
        '"<script>alert(1)</script>"',
    ),
    *('"../../outside"', '"/dev/zero"', r'"a\nb"', r'"\u0000"', "[[1], {}]", '{"a": {"b": null}}', "2026", "1e-400"),
]
LARGE = 1 << 31


def blind(draw: Any, content: bytes) -> tuple[str, bytes]:
    """Damage that knows nothing: of a disk, a line, a copy that was broken off."""
    size = max(len(content), 1)
    place = draw(st.integers(0, size - 1))
    length = draw(st.sampled_from([1, 4, 16, 64, 512, 4096]))
    kind = draw(
        st.sampled_from(["flip", "flip", "flip", "byte", "cut", "head", "empty", "double", "zeros", "swap", "more"])
    )
    if kind == "flip":
        bit = draw(st.integers(0, 7))
        return f"bit {bit} of byte {place} flipped", content[:place] + bytes([content[place] ^ 1 << bit]) + content[
            place + 1 :
        ]
    if kind == "byte":
        value = draw(st.binary(min_size=1, max_size=8))
        return f"byte {place} on became {value!r}", content[:place] + value + content[place + len(value) :]
    if kind == "cut":
        return f"cut to {place} bytes", content[:place]
    if kind == "head":
        return f"the first {place} bytes gone", content[place:]
    if kind == "empty":
        return "emptied", b""
    if kind == "double":
        return "twice in the file", content + content
    if kind == "zeros":
        return f"{length} bytes at {place} zeroed", content[:place] + bytes(
            len(content[place : place + length])
        ) + content[place + length :]
    if kind == "swap":
        other = draw(st.integers(0, size - 1))
        one, two = sorted((place, other))
        length = min(length, two - one, size - two)
        swapped = content[:one] + content[two : two + length] + content[one + length : two]
        return f"{length} bytes at {one} and {two} swapped", swapped + content[one : one + length] + content[
            two + length :
        ]
    added = draw(st.binary(min_size=1, max_size=64))
    return f"{added!r} put in at {place}", content[:place] + added + content[place:]


# --- that know the format ---------------------------------------------------------------------------------------------


def json_text(draw: Any, document: Any) -> tuple[str, bytes]:
    """A document with a value replaced, left out or added somewhere."""
    document, mark = copy.deepcopy(document), "a mark that no document holds"
    path = draw(st.sampled_from(list(_places(document))))
    kind = draw(st.sampled_from(["replace", "replace", "replace", "delete", "rename", "add"]))
    raw = draw(st.sampled_from(HOSTILE) | _json().map(json.dumps))
    inside = document
    for step in path[:-1]:
        inside = inside[step]
    if not path:
        return f"all became {raw:.60}", raw.encode("utf-8", "surrogatepass")
    if kind == "replace":
        inside[path[-1]] = mark
    elif kind == "add" and isinstance(inside, dict):
        inside[draw(st.sampled_from(["more", "", "__class__", "\x1b[31m", "[/red]"]))] = mark
    elif kind == "rename" and isinstance(inside, dict):
        inside["another"] = inside.pop(path[-1])
    else:
        del inside[path[-1]]
    text = json.dumps(document, indent=1).replace(json.dumps(mark), raw)
    return f"{kind} {'.'.join(map(str, path))} {raw if kind in ('replace', 'add') else '':.60}", text.encode(
        "utf-8", "surrogatepass"
    )


def _json() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    )


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for name, part in inner:
        yield from _places(part, (*path, name))


def json_file(draw: Any, content: bytes) -> tuple[str, bytes]:
    """Another JSON document."""
    return json_text(draw, json.loads(content))


def parquet(draw: Any, content: bytes) -> tuple[str, bytes]:
    """Other columns, rows or notes in a Parquet file that is whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(content))
    notes = dict(table.schema.metadata or {})
    kind = draw(
        st.sampled_from(["drop", "rename", "type", "null", "rows", "reverse", "value", "double", "notes", "notes"])
    )
    name = draw(st.sampled_from(table.column_names))
    place, what = table.column_names.index(name), f"{kind} {name}"
    column = table[name]
    with_name = table.schema.names
    if kind == "notes" and notes:
        key = draw(st.sampled_from(sorted(notes)))
        try:
            said, notes[key] = json_text(draw, json.loads(notes[key]))
        except ValueError:
            said, notes[key] = "no JSON", b"{}"
        what = f"notes: {said}"
        table = table.replace_schema_metadata(notes)
    elif kind == "drop":
        table = table.drop_columns([name])
    elif kind == "rename":
        table = table.rename_columns([f"{n}x" if n == name else n for n in with_name])
    elif kind == "type":
        into = draw(st.sampled_from(["string", "float64", "int8", "binary", "list", "struct", "half", "time"]))
        table, what = table.set_column(place, name, _cast(pa, column, into)), f"type {name} {into}"
    elif kind == "null":
        table = table.set_column(place, name, pa.nulls(len(table), column.type))
    elif kind == "rows":
        table = table.slice(0, draw(st.integers(0, len(table) - 1)))
    elif kind == "reverse":
        table = table.take(list(range(len(table)))[::-1])
    elif kind == "double":
        table = table.append_column(name, column)
    else:
        value = draw(
            st.sampled_from([-1, 0, 10**9, float("nan"), float("inf"), "../../x", "\x1b[31m", "[/red]", None, b"\xff"])
        )
        row = draw(st.integers(0, len(table) - 1))
        what = f"row {row} of {name} became {value!r}"
        values = column.to_pylist()
        values[row] = value
        try:
            table = table.set_column(place, name, pa.array(values, column.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            table = table.set_column(place, name, pa.array([str(value)] * len(table)))
    stream = io.BytesIO()
    pq.write_table(table, stream, compression="zstd", use_dictionary=False)
    return what, stream.getvalue()


def _cast(pa: Any, column: Any, into: str) -> Any:
    count = len(column)
    made = {
        "string": lambda: pa.array([str(value) for value in column.to_pylist()]),
        "float64": lambda: pa.array(np.zeros(count)),
        "int8": lambda: pa.array(np.zeros(count, np.int8)),
        "binary": lambda: pa.array([b"\xff\xfe"] * count),
        "list": lambda: pa.array([[value] for value in column.to_pylist()]),
        "struct": lambda: pa.array([{"a": value} for value in column.to_pylist()]),
        "half": lambda: pa.array(np.zeros(count, np.float16)),
        "time": lambda: pa.array(np.zeros(count, "datetime64[ns]")),
    }
    return made[into]()


def safetensors(draw: Any, content: bytes) -> tuple[str, bytes]:
    """Another header: shapes, types, offsets, names, or its length."""
    (length,) = struct.unpack("<Q", content[:8])
    what, header = json_text(draw, json.loads(content[8 : 8 + length]))
    promised = draw(st.sampled_from([len(header), len(header), 0, length + 1, 10**8 - 1, 2**63]))
    return f"header ({promised}): {what}", struct.pack("<Q", promised) + header + content[8 + length :]


def npz(draw: Any, content: bytes) -> tuple[str, bytes]:
    """A NumPy archive with a member of another type, shape or compression."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw(st.sampled_from(sorted(members)))
    kind = draw(
        st.sampled_from(
            [
                "object",
                "fields",
                "complex",
                "text",
                "nan",
                "0d",
                "huge",
                "huge",
                "flag",
                "method",
                "drop",
                "add",
                "zeros",
            ]
        )
    )
    array = np.lib.format.read_array(io.BytesIO(members[name]))
    fields = np.zeros(array.shape, [("a", "f4"), ("b", "i8")])
    other = {
        "object": array.astype(object),
        "fields": fields,
        "complex": array.astype(complex),
        "text": array.astype(str),
    }
    other |= {"nan": array * np.nan, "0d": np.float32(1)}
    if kind in other:
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.asarray(other[kind]), allow_pickle=True)
        members[name] = stream.getvalue()
    elif kind == "huge":
        shape = draw(
            st.sampled_from(
                ["(1000000000, 3, 3, 3)", "(-1,)", "(99999999999,)", "(" + 40 * "2," + ")", "(1000000000, 0)"]
            )
        )
        head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
        members[name] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head) + 1) + head + b"\n" + members[name][128:]
        kind += f" {shape}"
    elif kind == "drop":
        del members[name]
    elif kind == "add":
        members[draw(st.sampled_from(["more.npy", "../../outside.npy", "ConvP9/W.npy", "no-array.txt"]))] = members[
            name
        ]
    stream = io.BytesIO(bomb() if kind == "zeros" else b"")
    with zipfile.ZipFile(stream, "a", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    packed = bytearray(stream.getvalue())
    for magic, flag, method in ((b"PK\x03\x04", 6, 8), (b"PK\x01\x02", 8, 10)):
        place = packed.find(magic)
        if kind == "flag":
            packed[place + flag] |= 1
        elif kind == "method":
            packed[place + method] = 99
    return f"{kind} {name}", bytes(packed)


@functools.cache
def bomb() -> bytes:
    """An archive with a member that unpacks to a few hundred times its size."""
    stream = io.BytesIO()
    packed = zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with packed, packed.open("zeros.npy", "w", force_zip64=True) as member:
        for _ in range(20):
            member.write(bytes(1 << 26))
    return stream.getvalue()


def idx(draw: Any, content: bytes) -> tuple[str, bytes]:
    """Another header, or an archive of far more than it should hold."""
    if draw(st.sampled_from(6 * [False] + [True])):
        zeros = gzip.compress(bytes(1 << 24), 9)
        return "a bomb of 3 GiB", 192 * zeros
    header = draw(st.lists(st.sampled_from([0, 1, 28, 30, 2051, 2049, LARGE, 2**32 - 1]), min_size=4, max_size=4))
    return f"header {header}", gzip.compress(struct.pack(">4I", *header) + gzip.decompress(content)[16:])


def image(draw: Any, content: bytes) -> tuple[str, bytes]:  # noqa: ARG001
    """What is no such image, under its name."""
    png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">2I", 60_000, 60_000) + b"\x08\x02\0\0\0"
    import zlib

    bomb = png + struct.pack(">I", zlib.crc32(png[12:])) + struct.pack(">I", 10) + b"IDAT" + zlib.compress(b"")[:10]
    gigantic = png[:16] + struct.pack(">2I", 2**31 - 1, 2**31 - 1) + png[24:]
    gigantic += struct.pack(">I", zlib.crc32(gigantic[12:]))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n(hit) print showpage\n%%EOF\n"
    others = [
        bomb,
        gigantic,
        postscript,
        b"%PDF-1.4\n",
        b"<svg/>",
        b"GIF89a\x10\0\x10\0\0\0\0,",
        b"PK\x03\x04",
        b"P6 16 16 255\n",
    ]
    number = draw(st.integers(0, len(others) - 1))
    return f"another content: {others[number][:12]!r}", others[number]


CSV = [
    b"\xff\xfe",
    b"\x00",
    b'"',
    b",,,,",
    b"\r",
    b"\x1b[31m",
    b"[/red]",
    b"nan",
    b"inf",
    b"1e999",
    b"$\\frac$",
    5000 * b"9",
    b"=1+1",
    b"\xed\xa0\x80",
]


def csv(draw: Any, content: bytes) -> tuple[str, bytes]:
    """A cell of a table replaced."""
    lines = [line.split(b",") for line in content.splitlines()]
    row = draw(st.integers(0, len(lines) - 1))
    column = draw(st.integers(0, len(lines[row]) - 1))
    lines[row][column] = value = draw(st.sampled_from(CSV))
    return f"cell {row}, {column}: {value[:20]!r}", b"\n".join(map(b",".join, lines))


@st.composite
def mutations(draw: Any, content: bytes, knows: Callable[..., Any] | None) -> tuple[str, bytes]:
    """A mutation of a content: what was done, and what became of it."""
    if knows and draw(st.booleans()):
        return knows(draw, content)
    return blind(draw, content)
