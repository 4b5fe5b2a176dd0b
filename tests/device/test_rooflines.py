import numpy as np
import pandas as pd
import pytest
import torch

import gpulab as gl
from gpulab.device import rooflines as speed
from gpulab.store.recorded import measured, write_json

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")


@pytest.fixture(scope="module")
def small():
    """Every operation, measured twice each, with copies and matrices that take no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "COPY_BYTES", {"cpu": 2**20})
        patch.setattr(speed, "LARGEST_MATRIX", {"cpu": 64})
        return gl.roofline("cpu:threads=1", repeats=2, progress=False)


def test_a_roofline_has_a_row_an_operation_with_the_columns_documented(small):
    with pytest.raises(gl.UsageError, match="repeats"):
        gl.roofline("cpu", repeats=1)
    assert set(small.kind) == {"memory", "matrix", "network", "precision", "launch"}
    assert small.operation.is_unique
    assert (small.seconds > 0).all()
    pd.testing.assert_series_equal(small.intensity, small.flop / small.bytes, check_names=False)
    pd.testing.assert_series_equal(small.gflops * 1e9 * small.seconds, small.flop, check_names=False)
    pd.testing.assert_series_equal(small.gigabytes_per_second * 1e9 * small.seconds, small.bytes, check_names=False)


def test_operations_and_bytes_are_counted_in_every_precision(small):
    def counted(operation):
        row = small[small.operation == operation].iloc[0]
        return row.flop, row.bytes

    numbers = 2**20 // 4
    assert counted("copy") == (0, 4 * 2 * numbers)
    assert counted("add") == (numbers, 4 * 3 * numbers)
    assert counted("matrix product 32") == (2 * 32**3, 4 * 3 * 32**2)
    assert counted("autoencoder, first layer") == (2 * 784 * 128, 4 * (784 * 128 + 784 + 128))
    # 3×3, 5·16 channels in, 4·16 out, on a map of 24×32
    flop, moved = 2 * 9 * 80 * 64 * 24 * 32, 4 * (9 * 80 * 64 + (80 + 64) * 24 * 32)
    assert counted("PredNet (quick), gates") == (flop, moved)
    precise = small[small.kind == "precision"]
    assert list(precise.precision) == ["float32", "bfloat16", "float16", "float64"]
    edges = precise.operation.str.extract(r"matrix product (\d+), ")[0].astype(int)
    assert (precise.flop == 2 * edges**3).all()
    assert (precise.bytes == 3 * np.array([4, 2, 2, 8]) * edges**2).all()
    assert set(small[small.kind == "matrix"].precision) == {"float32"}
    assert set(small[~small.kind.isin(["matrix", "precision"])].precision) == {""}


@needs_cuda
def test_on_cuda_there_is_tf32():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "LARGEST_MATRIX", {"cuda": 4096})
        frame = gl.roofline("cuda:tf32=off", repeats=3, progress=False).set_index("operation")
    rates = frame[frame.kind == "precision"].set_index("precision").gflops
    assert set(rates.index) == {"float32", "tf32", "bfloat16", "float16", "float64"}
    assert rates.tf32 > 1.5 * rates.float32 or torch.cuda.get_device_capability() < (8, 0)
    assert set(frame[frame.kind == "matrix"].precision) == {"float32"}


def device(setting, bandwidth, peak, layers):
    """A roofline with known ceilings: GB/s, GFLOP/s, and layers of (intensity, GFLOP/s)."""
    rows = [("copy", "memory", bandwidth, 0.0, 0.0), ("product", "matrix", 1.0, peak, 99.0)]
    rows += [(f"layer {n}", "network", rate / share, rate, share) for n, (share, rate) in enumerate(layers)]
    columns = ["operation", "kind", "gigabytes_per_second", "gflops", "intensity"]
    return pd.DataFrame(rows, columns=columns).assign(setting=setting)


def test_a_layer_left_of_the_ridge_is_bound_by_memory_and_right_of_it_by_arithmetic():
    slow = device("cpu", bandwidth=10, peak=100, layers=[(0.5, 4.0), (20.0, 50.0)])
    fast = device("cuda", bandwidth=1000, peak=50_000, layers=[(0.5, 100.0), (20.0, 5000.0)])
    found = gl.device.bounds(pd.concat([slow, fast]))
    assert list(found) == ["operation", "setting", "intensity", "ridge", "bound", "reached"]
    assert found.values.tolist() == [
        ["layer 0", "cpu", 0.5, 10, "memory", 0.8],
        ["layer 1", "cpu", 20, 10, "arithmetic", 0.5],
        ["layer 0", "cuda", 0.5, 50, "memory", 0.2],
        ["layer 1", "cuda", 20, 50, "memory", 0.25],
    ]


def test_recorded_rooflines_are_shipped_and_one_is_read_back_with_its_machine(small, tmp_path, monkeypatch):
    shipped = gl.device.recorded_rooflines()
    assert "NVIDIA H200" in set(shipped.machine)
    assert set(gl.device.bounds(shipped[shipped.machine == "NVIDIA H200"]).bound) <= {"memory", "arithmetic"}
    write_json(tmp_path / "measured" / "rooflines-here.json", measured("cpu", rows=small.to_dict("records")))
    monkeypatch.setattr("gpulab.store.recorded.DATA", tmp_path)
    back = gl.device.recorded_rooflines()
    assert set(back.machine) == {gl.passport()["cpu"]["model"]}, "the setting was the CPU's, whatever else is there"
    pd.testing.assert_frame_equal(back[small.columns], small)
