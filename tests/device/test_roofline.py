from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import gpulab as gl
from gpulab.device import _roofline as rooflines
from gpulab.device import place
from gpulab.device._roofline import OperationCounter
from gpulab.store.recorded import make_measurement, write_document

EDGE = 64
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no CUDA GPU"
)


@pytest.fixture(scope="module")
def small():
    """Measure every operation twice, with copies and matrices that take no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooflines, "COPY_BYTES", {"cpu": 2**20})
        patch.setattr(rooflines, "MAX_MATRIX_SIZE", {"cpu": 64})
        return gl.roofline("cpu:threads=1", repeats=2, progress=False)


def test_roofline_has_a_row_for_each_operation(small):
    assert set(small.kind) == {"memory", "matrix", "network", "precision", "launch"}
    assert (small.seconds > 0).all()
    np.testing.assert_allclose(small.intensity, small.flop / small.bytes)
    np.testing.assert_allclose(small.gflops * 1e9 * small.seconds, small.flop)
    np.testing.assert_allclose(small.gigabytes_per_second * 1e9 * small.seconds, small.bytes)


def test_roofline_counts_operations_and_bytes_in_every_precision(small):
    counts = small.set_index("operation")[["flop", "bytes"]].apply(tuple, axis=1)
    numbers = 2**20 // 4
    assert counts["copy"] == (0, 4 * 2 * numbers)
    assert counts["add"] == (numbers, 4 * 3 * numbers)
    # 3×3, 5·16 channels in, 4·16 out, on a map of 24×32
    flop, moved = 2 * 9 * 80 * 64 * 24 * 32, 4 * (9 * 80 * 64 + (80 + 64) * 24 * 32)
    assert counts["PredNet (quick), gates"] == (flop, moved)
    elsewhere = (
        gl.device.recorded_rooflines().query("kind == 'network'").set_index("operation").flop
    )
    assert (
        small[small.kind == "network"].set_index("operation").flop.to_dict() == elsewhere.to_dict()
    )
    precise = small[small.kind == "precision"]
    assert list(precise.precision) == ["float32", "bfloat16", "float16", "float64"]
    edges = precise.operation.str.extract(r"matrix product (\d+), ")[0].astype(int)
    assert (precise.flop == 2 * edges**3).all()
    assert (precise.bytes == 3 * np.array([4, 2, 2, 8]) * edges**2).all()
    assert set(small[~small.kind.isin(["matrix", "precision"])].precision) == {""}


@needs_cuda
def test_roofline_on_cuda_has_tf32(monkeypatch):
    monkeypatch.setattr(rooflines, "MAX_MATRIX_SIZE", {"cuda": 4096})
    frame = gl.roofline("cuda:tf32=off", repeats=3, progress=False)
    rates = frame[frame.kind == "precision"].set_index("precision").gflops
    assert set(rates.index) == {"float32", "tf32", "bfloat16", "float16", "float64"}
    assert rates.tf32 > 1.5 * rates.float32 or torch.cuda.get_device_capability() < (8, 0)
    assert set(frame[frame.kind == "matrix"].precision) == {"float32"}


def test_roofline_bounds_of_layers_left_and_right_of_the_ridge():
    columns = ["setting", "operation", "kind", "gigabytes_per_second", "gflops", "intensity"]
    rows = [("cpu", "copy", "memory", 10, 0.0, 0.0), ("cpu", "product", "matrix", 1.0, 100, 99.0)]
    rows += [
        ("cpu", "layer 0", "network", 8.0, 4.0, 0.5),
        ("cpu", "layer 1", "network", 2.5, 50.0, 20.0),
    ]
    rows += [
        ("cuda", "copy", "memory", 1000, 0.0, 0.0),
        ("cuda", "product", "matrix", 1.0, 50_000, 99.0),
    ]
    rows += [("cuda", "layer 1", "network", 250.0, 5000.0, 20.0)]
    assert gl.device.bounds(pd.DataFrame(rows, columns=columns)).to_numpy().tolist() == [
        ["layer 0", "cpu", 0.5, 10, "memory", 0.8],
        ["layer 1", "cpu", 20, 10, "arithmetic", 0.5],
        ["layer 1", "cuda", 20, 50, "memory", 0.25],
    ]


def test_roofline_bounds_layer_is_not_its_own_ceiling():
    rows = [
        ("cpu", "copy", "memory", 10.0, 0.0, 0.0),
        ("cpu", "product", "matrix", 1.0, 100.0, 99.0),
        ("cpu", "a product of one precision", "precision", 1.0, 900.0, 99.0),
        ("cpu", "fast layer", "network", 1.0, 150.0, 50.0),
        ("cpu", "layer in the cache", "network", 40.0, 20.0, 0.5),
        ("cpu", "slow layer", "network", 1.0, 25.0, 50.0),
    ]
    columns = ["setting", "operation", "kind", "gigabytes_per_second", "gflops", "intensity"]
    found = gl.device.bounds(pd.DataFrame(rows, columns=columns)).set_index("operation")
    assert found.reached["slow layer"] == 0.25  # of the product's 100, not of the fast layer's 150
    assert found.reached[["fast layer", "layer in the cache"]].isna().all()
    assert set(found.ridge) == {10.0}


def test_placement_states_no_share_above_the_roof():
    counts = {"operations": 3, "flop": {"float32": 10**9}, "moved": 10**8, "spread": 0.0}
    floors = {"memory": 0.004, "arithmetic": 0.005, "launches": 0.001}
    ends = {"at_least": floors, "unknown": (), "roofline": pd.DataFrame()}
    slow = gl.device.Placement("cpu", **counts, seconds=0.01, **ends)
    fast = gl.device.Placement("cpu", **counts, seconds=0.004, **ends)
    assert "50% of the roof" in str(slow)
    assert "faster than the roof" in str(fast)
    assert "125%" not in str(fast)
    assert "measure them again" in str(fast)
    assert "measure them again" not in str(slow)


def test_recorded_rooflines_are_shipped_and_one_is_read_back(small, tmp_path, monkeypatch):
    assert "NVIDIA H200" in set(gl.device.recorded_rooflines().machine)
    write_document(
        tmp_path / "measured" / "rooflines-here.json",
        make_measurement("cpu", rows=small.to_dict("records")),
    )
    monkeypatch.setattr("gpulab.store.recorded.DATA_FOLDER", tmp_path)
    back = gl.device.recorded_rooflines()
    assert set(back.machine) == {gl.passport()["cpu"]["model"]}, (
        "the setting was the CPU's, whatever else is there"
    )
    pd.testing.assert_frame_equal(back[small.columns], small)


# --- where a step stands --------------------------------------------------------------------------


def ceilings(bandwidth=100.0, peak=1000.0, launch=1e-6, setting="cpu"):
    """Return a roofline of known ceilings: GB/s, Gflop/s of float32 products, launch in seconds."""
    rows = [
        ("copy", "memory", 0.0, bandwidth, 1.0, ""),
        ("launch", "launch", 1e-9, 1e-9, launch, ""),
        ("matrix product 64", "matrix", peak, 1.0, 1.0, "float32"),
        ("matrix product 32, float32", "precision", peak / 2, 1.0, 1.0, "float32"),
        ("matrix product 64, bfloat16", "precision", 4 * peak, 1.0, 1.0, "bfloat16"),
    ]
    columns = ["operation", "kind", "gflops", "gigabytes_per_second", "seconds", "precision"]
    return pd.DataFrame(rows, columns=columns).assign(setting=setting)


def product(dtype=torch.float32):
    a, b = torch.ones(EDGE, EDGE, dtype=dtype), torch.ones(EDGE, EDGE, dtype=dtype)
    return lambda: a @ b


def test_place_counts_a_product_in_each_precision():
    found = place(product(), ceilings(), repeats=2)
    assert (found.flop, found.moved, found.operations) == (
        {"float32": 2 * EDGE**3},
        3 * 4 * EDGE**2,
        1,
    )
    floors = {"memory": found.moved / 100e9, "arithmetic": 2 * EDGE**3 / 1000e9, "launches": 1e-6}
    assert found.at_least == pytest.approx(floors)
    assert found.intensity == 2 * EDGE**3 / (3 * 4 * EDGE**2)
    assert found.gflops / found.reached == pytest.approx(1000), (
        "the larger of the two float32 ceilings"
    )
    found = place(lambda: (product()(), product(torch.bfloat16)()), ceilings(), repeats=2)
    assert found.flop == {"float32": 2 * EDGE**3, "bfloat16": 2 * EDGE**3}
    assert found.at_least["arithmetic"] == pytest.approx(2 * EDGE**3 * (1 / 1000e9 + 1 / 4000e9))


@pytest.mark.parametrize(
    ("bound", "options"),
    [
        ("launches", {}),
        ("arithmetic", {"launch": 1e-12}),
        ("memory", {"launch": 1e-12, "bandwidth": 10.0}),
    ],
)
def test_place_is_bound_by_what_takes_longest_and_drawn_there(bound, options):
    found = place(product(), ceilings(**options), repeats=2)
    roof, _ = found.plot().figure.axes
    assert found.bound == bound
    assert f"ound by {bound}" in str(found)
    (star,) = roof.collections
    assert star.get_offsets().tolist() == [
        [pytest.approx(found.intensity), pytest.approx(found.gflops)]
    ]


def counted(step):
    with OperationCounter() as counter:
        step()
    return counter.operations, counter.moved_bytes


def test_operation_counter_counts_each_byte_once_and_no_views():
    x, numbers = torch.ones(EDGE, EDGE), 4 * EDGE**2
    assert counted(lambda: x.t().reshape(-1, 1)[3:]) == (1, 2 * numbers), (
        "a transposed one is copied to be flat"
    )
    assert counted(lambda: x.view(-1).detach().expand(5, -1)) == (0, 0)
    assert counted(lambda: x.add_(1)) == (1, 2 * numbers)
    assert counted(lambda: x.zero_()) == (1, numbers), "what it held before is not read"
    assert counted(lambda: x + x) == (1, 2 * numbers), "one tensor is read once"
    assert counted(lambda: torch.ones(EDGE).expand(EDGE, EDGE) + x) == (
        2,
        4 * EDGE + 4 * EDGE + 2 * numbers,
    )
    weights = [torch.ones(EDGE, requires_grad=True) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(EDGE)
    step = torch.optim.SGD(weights, lr=0.1, foreach=True).step
    assert counted(step) == (1, 3 * 3 * 4 * EDGE), (
        "reads weights and gradients, writes weights, and returns none"
    )


LOSSES = {
    "resnet18": lambda: torchvision.models.resnet18()(torch.randn(2, 3, 32, 32)).square().mean(),
    "Transformer": lambda: (
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)(torch.randn(5, 2, 16)).square().mean()
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_place_counts_the_flop_of_torchs_counter(loss):
    with FlopCounterMode(display=False) as reference:
        loss().backward()
    found = place(lambda: loss().backward(), ceilings(), repeats=2)
    assert sum(found.flop.values()) == reference.get_total_flops()


def test_place_leaves_a_step_as_it_was_and_begins_without_gradients():
    model = nn.Linear(4, 2)
    before = [p.clone() for p in model.parameters()]
    found = place(
        gl.Step(model, (torch.ones(3, 4), torch.zeros(3, 2)), F.mse_loss), ceilings(), repeats=2
    )
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    bare, _ = counted(lambda: F.mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 2)).backward())
    assert found.operations == bare - 2, "the two tensors of the batch are there already"


def test_place_measures_the_roofline_of_a_setting(monkeypatch):
    monkeypatch.setattr(rooflines, "roofline", lambda setting: ceilings(setting=setting))
    assert place(product(), "cpu:threads=1", repeats=2).setting == "cpu:threads=1"


class RefusedCeilings(NamedTuple):
    """Arguments of `place` that do not fit, and a pattern of the error message."""

    id: str
    arguments: tuple
    message: str


REFUSED_CEILINGS = [
    RefusedCeilings(
        "another machine",
        (product(), ceilings().assign(machine="NVIDIA H200"), 2),
        "ceilings of NVIDIA H200",
    ),
    RefusedCeilings(
        "two settings",
        (product(), pd.concat([ceilings(), ceilings(setting="cuda")]), 2),
        "ceilings of cpu, cuda: expected",
    ),
    RefusedCeilings(
        "another precision",
        (product(torch.float64), ceilings(), 2),
        "products in float64: .*bfloat16, float32",
    ),
    RefusedCeilings("one repeat", (product(), ceilings(), 1), "repeats"),
]


@pytest.mark.parametrize("case", REFUSED_CEILINGS, ids=lambda case: case.id)
def test_place_refuses_ceilings_that_do_not_fit(case):
    with pytest.raises(gl.UsageError, match=case.message):
        place(*case.arguments)


def test_place_of_a_step_without_products_or_without_a_formula():
    found = place(
        lambda: torch.fft.fft(torch.ones(8, dtype=torch.complex64)), ceilings(), repeats=2
    )
    assert "torch has no formula: the FLOP of _fft_c2c" in str(found)
    x = torch.ones(1000)
    found = place(lambda: x + 1, ceilings(), repeats=2)
    assert (found.flop, found.gflops) == ({}, 0.0)
    assert found.reached == pytest.approx(found.at_least["memory"] / found.seconds)
