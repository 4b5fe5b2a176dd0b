import io
import json
import math
import pickle
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from plant_faults import drawn
from small_steps import seeded
from torch import nn

import gpulab as gl
from gpulab.audits import traces
from gpulab.files import UNSEALED, seal

KEY = traces.KEY


def recorded(file, inputs):
    return gl.record(gl.Step(seeded(lambda: nn.Linear(20, 30)), inputs), file=file, progress=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "one.trace"
    recorded(path, drawn(5, 20))
    return path


@pytest.mark.parametrize("inputs", [drawn(5, 20), torch.tensor([[math.nan, math.inf, *[1.0] * 18]])])
def test_trace_is_read_as_it_was_written(inputs, tmp_path):
    trace = recorded(tmp_path / "deep" / "one.trace", inputs)
    read = gl.audits.Trace.load(str(tmp_path / "deep" / "one.trace"))
    rest = dict.fromkeys(("sketches", "operations", "reference"))
    assert {**vars(read), **rest} == {**vars(trace), **rest}
    assert repr(read.operations) == repr(trace.operations), "NaN and all"
    assert repr(read.reference) == repr(trace.reference)
    assert read.sketches.keys() == trace.sketches.keys()
    for name, sketch in trace.sketches.items():
        np.testing.assert_array_equal(read.sketches[name], sketch)
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["one.trace"], "no scratch file is left"


def refused(file, *words):
    with pytest.raises(gl.DataError) as error:
        gl.audits.Trace.load(file)
    assert [word for word in (str(file), *words) if word not in str(error.value)] == []


def test_trace_that_was_cut_short_or_changed_anywhere_is_refused(file, tmp_path):
    content, other = file.read_bytes(), tmp_path / "cut.trace"
    for place in [0, 1, 3, 4, 5, len(content) // 2, len(content) - 9, len(content) - 4, len(content) - 1]:
        other.write_bytes(content[:place])
        refused(other)
    other.write_bytes(content + b"more")
    refused(other)
    for place in range(4, len(content) // 2, len(content) // 8):  # where the columns are
        other.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        refused(other)


@pytest.mark.parametrize("content", [b'{"format": 1}', b"Call me Ishmael.", pickle.dumps({"a": 1})])
def test_what_is_no_trace_is_refused(content, tmp_path):
    (tmp_path / "a.trace").write_bytes(content)
    refused(tmp_path / "a.trace", "not a trace", "gpulab record")


def test_table_that_is_no_trace_is_refused(tmp_path):
    pq.write_table(pa.table({"name": ["addmm"]}), tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", "not a trace", "gpulab record")


def test_trace_that_is_missing_is_refused(tmp_path):
    refused(tmp_path / "missing.trace", "No such file")


def test_trace_that_is_too_large_to_be_read_is_refused(file, monkeypatch):
    monkeypatch.setattr(traces, "LARGEST", 100)
    refused(file, "too large")


def rewritten(file, into, notes=None, **columns):
    """The file with other notes (a change of them, or a text), and other values in its columns, sealed again."""
    table = pq.read_table(file)
    text = table.schema.metadata[KEY.encode()].decode()
    if notes is not None:
        text = notes if isinstance(notes, str) else json.dumps(json.loads(text) | notes)
    text = re.sub(r"sealed by xxh3 \w{32}", UNSEALED, text)
    for name, change in columns.items():
        field = table.schema.field(name)
        values = pa.array(change(table[name].to_pylist()), field.type)
        table = table.set_column(table.schema.get_field_index(name), field, values)
    whole = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({KEY: text}), whole)
    into.write_bytes(seal(whole.getvalue()) if UNSEALED in text else whole.getvalue())
    return into


def first(value):
    return lambda values: [value, *values[1:]]


def other(**fields):
    return lambda values: [json.dumps(json.loads(values[0]) | fields), *values[1:]]


NOTES = [{"format": 2}, {"setting": "gpu"}, {"arithmetic": 3}, {"overwritten": [{"operation": 3}]}]
NOTES += [json.dumps({"setting": "cpu"}), "[1, 2]", "{", "[" * 100_000, '{"format": ' + "9" * 5000 + "}"]
DAMAGED = {
    **{f"notes {str(notes)[:24]}": {"notes": notes} for notes in NOTES},
    "no seal": {"notes": {"seal": "none"}},
    "a value without a sketch": {"operation": other(inputs=["another", "one more"])},
    "an error in words": {"operation": other(error="small")},
    "a sketch too many": {"sketches": first([[1.0]] * 9)},
    **{f"arguments {value}": {"operation": other(arguments=value)} for value in ("(Tensor, 1)", [1])},
    **{f"operation {text[:9]}": {"operation": first(text)} for text in ("{", "1", "[" * 100_000)},
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_trace_that_was_damaged_and_sealed_again_is_refused(file, tmp_path, damage):
    assert gl.audits.Trace.load(rewritten(file, tmp_path / "same.trace")).operations
    refused(rewritten(file, tmp_path / "damaged.trace", **DAMAGED[damage]), *["its checksum"] * (damage == "no seal"))
