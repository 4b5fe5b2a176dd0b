"""Damaged and hostile versions of a content, as Hypothesis strategies: blind, or knowing the format."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

Strategy = st.SearchStrategy[bytes]
# JSON texts in the place of a value: some of them no `json.dumps` would write.
HOSTILE = [
    *('""', '"text"', '"1"', "[]", "[1, 2]", "{}", "null", "true", "0", "-1", "-0.0", "1e999", "NaN", "Infinity"),
    *(
        r'"\ud800"',
        r'"\u001b[31mred\u0007"',
        r'"\u202eback"',
        '"[/red]"',
        r'"$\\frac{$"',
        '"<script>alert(1)</script>"',
    ),
    *('"../../outside"', '"/dev/zero"', r'"a\nb"', r'"\u0000"', "[[1], {}]", '{"a": {"b": null}}', "2026", "1e-400"),
    *("1" + 400 * "0", "1" + 5000 * "0", 2000 * "[" + 2000 * "]", 100 * '{"a":' + "1" + 100 * "}"),
]


def blind(content: bytes) -> Strategy:
    """Damage that knows nothing: a bit flipped, the end cut off, a part cut out, overwritten, repeated or put in."""
    place, whole = st.integers(0, len(content) - 1), st.just(content)
    part = st.builds(lambda begin, size: content[begin : begin + size], place, st.integers(1, 4096))
    new = st.just(b"") | st.binary(max_size=64) | st.integers(1, 4096).map(bytes) | part | whole
    replaced = st.sampled_from([0, 1, 4, 64, 4096, len(content)])
    bits = st.integers(0, 7).map(lambda bit: 1 << bit)
    return st.one_of(
        st.builds(lambda at, bit: content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :], place, bits),
        place.map(lambda size: content[:size]),
        st.builds(lambda begin, size, new: content[:begin] + new + content[begin + size :], place, replaced, new),
    )


# --- that know the format ---------------------------------------------------------------------------------


@st.composite
def json_text(draw: Any, content: bytes) -> bytes:
    """A document with a value replaced, left out, renamed or added somewhere; or another one."""
    document, mark = json.loads(content), "a mark that no document holds"
    *way, last = draw(st.sampled_from([*_places(document)]))
    inside = functools.reduce(lambda value, step: value[step], way, document)
    kind = draw(st.sampled_from(["replace", "replace", "replace", "delete", "rename", "add", "another"]))
    if kind == "add" and isinstance(inside, dict):
        inside[draw(st.sampled_from(["more", "", "__class__", "\x1b[31m", "[/red]"]))] = mark
    elif kind == "rename" and isinstance(inside, dict):
        inside["another"] = inside.pop(last)
    elif kind == "delete":
        del inside[last]
    else:
        inside[last] = mark
    raw = draw(st.sampled_from(HOSTILE) | (st.floats() | st.text(max_size=5)).map(json.dumps))
    text = raw if kind == "another" else json.dumps(document, indent=1).replace(json.dumps(mark), raw)
    return text.encode("utf-8", "surrogatepass")


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for name, part in value.items() if isinstance(value, dict) else enumerate(value[:3]):
        yield (*path, name)
        if isinstance(part, dict | list):
            yield from _places(part, (*path, name))


@st.composite
def safetensors(draw: Any, content: bytes) -> bytes:
    """Another header: shapes, types, offsets, names, or its length."""
    (length,) = struct.unpack("<Q", content[:8])
    header = draw(json_text(content[8 : 8 + length]))
    promised = draw(st.sampled_from([len(header), len(header), 0, length + 1, 10**8 - 1, 2**63]))
    return struct.pack("<Q", promised) + header + content[8 + length :]
