import math
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import gpulab as gl
from gpulab.audits import _traces as traces
from tests.audits._helpers import drawn, seeded


def recorded(file, inputs):
    return gl.record(gl.Step(seeded(lambda: nn.Linear(20, 30)), inputs), file=file, progress=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "one.trace"
    recorded(path, drawn(5, 20))
    return path


@pytest.mark.parametrize(
    "inputs", [drawn(5, 20), torch.tensor([[math.nan, math.inf, *[1.0] * 18]])]
)
def test_trace_is_read_as_it_was_written(inputs, tmp_path):
    trace = recorded(tmp_path / "deep" / "one.trace", inputs)
    read = gl.audits.Trace.load(str(tmp_path / "deep" / "one.trace"))
    rest = dict.fromkeys(("values", "operations"))
    assert {**vars(read), **rest} == {**vars(trace), **rest}
    assert repr(read.operations) == repr(trace.operations), "NaN and all"
    assert read.values.keys() == trace.values.keys()
    for name, value in trace.values.items():
        other = read.values[name]
        assert (other.content, other.shape, other.dtype, other.exact) == (
            value.content,
            value.shape,
            value.dtype,
            value.exact,
        )
        np.testing.assert_array_equal(other.sketch, value.sketch)
        np.testing.assert_array_equal(other.reference, value.reference)
        np.testing.assert_array_equal(other.total, value.total)
        assert other.profiles.keys() == value.profiles.keys()
        for dim, profile in value.profiles.items():
            np.testing.assert_array_equal(other.profiles[dim], profile)
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["one.trace"], (
        "no scratch file is left"
    )


def refused(file, *words):
    with pytest.raises(gl.DataError) as error:
        gl.audits.Trace.load(file)
    assert [word for word in (str(file), *words) if word not in str(error.value)] == []


def test_trace_that_was_cut_short_or_changed_anywhere_is_refused(file, tmp_path):
    content, other = file.read_bytes(), tmp_path / "cut.trace"
    for place in [
        0,
        1,
        3,
        4,
        5,
        len(content) // 2,
        len(content) - 9,
        len(content) - 4,
        len(content) - 1,
    ]:
        other.write_bytes(content[:place])
        refused(other)
    other.write_bytes(content + b"more")
    refused(other)
    for place in range(4, len(content) // 2, len(content) // 8):  # the position of the columns
        other.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        refused(other)


@pytest.mark.parametrize("content", [b'{"format": 1}', b"Call me Ishmael.", pickle.dumps({"a": 1})])
def test_trace_load_refuses_other_files(content, tmp_path):
    (tmp_path / "a.trace").write_bytes(content)
    refused(tmp_path / "a.trace", "not a trace", "gpulab record")


def test_trace_load_refuses_other_tables(tmp_path):
    pq.write_table(pa.table({"name": ["addmm"]}), tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", "not a trace", "gpulab record")


def test_trace_that_is_missing_is_refused(tmp_path):
    refused(tmp_path / "missing.trace", "No such file")


def test_trace_that_is_too_large_to_be_read_is_refused(file, monkeypatch):
    monkeypatch.setattr(traces, "MAX_COLUMN_NUMBERS", 100)
    refused(file, "too large")


DAMAGED = {
    "no setting": lambda trace: setattr(trace, "setting", "gpu"),
    "no flags": lambda trace: setattr(trace, "arithmetic", 3),
    "no findings": lambda trace: setattr(trace, "overwritten", [{"operation": 3}]),
    "a value that is not there": lambda trace: trace.values.popitem(),
    "a value without a shape": lambda trace: setattr(trace.values["0"], "shape", "20"),
    "a dimension without sums": lambda trace: trace.values["0"].profiles.update(
        {5: np.zeros((2, 0))}
    ),
    "values too many": lambda trace: trace.operations[0].inputs.append("another"),
    "an error in words": lambda trace: setattr(trace.operations[0], "error", "small"),
    "arguments without names": lambda trace: setattr(
        trace.operations[0], "arguments", ["Tensor", 1]
    ),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_trace_that_is_sealed_and_makes_no_sense_is_refused(tmp_path, damage):
    trace = recorded(tmp_path / "damaged.trace", drawn(5, 20))
    assert gl.audits.Trace.load(tmp_path / "damaged.trace").operations
    damage(trace)
    trace.save(tmp_path / "damaged.trace")
    refused(tmp_path / "damaged.trace", "damaged")


def test_trace_of_another_format_is_refused(tmp_path, monkeypatch):
    trace = recorded(tmp_path / "one.trace", drawn(5, 20))
    monkeypatch.setattr(traces, "FORMAT", 5)
    trace.save(tmp_path / "one.trace")
    monkeypatch.undo()
    refused(tmp_path / "one.trace", "expected a trace of format")
