import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.device import operations
from gpulab.device.operations import FORMATS, byte_round_trip, fused_share


def test_what_an_operation_fuses_is_measured():
    rows = {row["operation"]: row for row in fused_share("cpu", 2000)}
    plain = rows["a * b + c"]
    assert plain["rounded_twice"] == 1.0 > plain["rounded_once"], "two operations cannot be fused eagerly"
    assert all(0 <= row["rounded_once"] <= 1 for row in rows.values())


def test_an_older_instruction_set_fuses_nothing():
    if "sse4_1" not in gl.passport()["cpu"]["vector_extensions"]:
        pytest.skip("no such CPU")
    table = gl.device.fused_operations(("cpu:isa=sse4",), count=1000)
    assert (table.rounded_twice == 1).all()
    assert (table.rounded_once < 1).all()


def test_operations_on_one_thread_repeat_themselves():
    table = gl.device.repeatability(("cpu:threads=1",), times=3)
    assert (table.results == 1).all()
    assert (table.spread == 0).all()


def test_an_operation_that_does_not_repeat_itself_is_counted(monkeypatch):
    results = iter(torch.tensor([1.0, 2.0, 1.0, 4.0]))
    monkeypatch.setattr(torch.Tensor, "sum", lambda *_: next(results))
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: [torch.zeros(1)])
    monkeypatch.setattr(torch.nn.functional, "conv2d", lambda *_: torch.zeros(1))
    monkeypatch.setattr(torch.Tensor, "square", lambda *_: type("Squares", (), {"sum": lambda _: None})())
    row = gl.device.repeatability(("cpu",), times=4).set_index("operation").loc["sum"]
    assert row.results == 3
    assert row.spread == 3.0


@pytest.fixture(scope="module")
def table():
    return byte_round_trip().set_index(["way", "format"])


def test_every_way_in_every_format_is_tried(table):
    assert len(table) == 5 * len(FORMATS) == len(table.index.unique())
    assert (table.device == "cpu").all()


def test_the_numbers_are_those_of_numpy(table):
    pixels = np.arange(256, dtype=np.float32)
    divided, multiplied = pixels / np.float32(255), pixels * np.float32(1 / 255)
    assert table.loc[("x * (1 / 255)", "float32"), "as_division"] == (divided == multiplied).sum() < 256
    assert table.loc[("x / 255", "float32"), "as_division"] == 256
    assert table.loc[("x * (1 / 255)", "float32"), "returned"] == (np.rint(multiplied * 255) == pixels).sum()
    assert table.loc[("x * (1 / 255)", "float32"), "cut"] == (np.trunc(multiplied * np.float32(255)) == pixels).sum()


def test_a_conversion_that_loses_bytes_is_seen(monkeypatch):
    monkeypatch.setattr(operations, "_to_numbers", lambda x, _, dtype: {"lossy": (x // 2 * 2).to(dtype) / 255})
    assert byte_round_trip().set_index("format").loc["float32", "returned"] == 128


def test_a_device_that_is_not_here_is_told():
    with pytest.raises(gl.UsageError, match="tpu"):
        byte_round_trip("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(gl.GpulabError, match="cannot run here"):
            byte_round_trip("cuda")
