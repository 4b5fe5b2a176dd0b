import pandas as pd
import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import gpulab as gl
from gpulab.device import place, rooflines
from gpulab.device.rooflines import OperationCounter

EDGE = 64


def ceilings(bandwidth=100.0, peak=1000.0, launch=1e-6, setting="cpu"):
    """A roofline with known ceilings: GB/s, Gflop/s of float32 products, seconds of a launch."""
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


def test_one_product_is_counted():
    found = place(product(), ceilings(), repeats=2)
    assert found.flop == {"float32": 2 * EDGE**3}
    assert found.moved == 3 * 4 * EDGE**2
    assert found.operations == 1
    assert found.intensity == 2 * EDGE**3 / (3 * 4 * EDGE**2)
    assert found.at_least == {
        "memory": pytest.approx(found.moved / 100e9),
        "arithmetic": pytest.approx(2 * EDGE**3 / 1000e9),
        "launches": 1e-6,
    }
    assert found.gflops == pytest.approx(2 * EDGE**3 / found.seconds / 1e9)
    roof = found.gflops / found.reached
    assert roof == pytest.approx(1000), "the larger of the two float32 ceilings; the step stands right of the ridge"


@pytest.mark.parametrize(
    ("bound", "options"),
    [("launches", {}), ("arithmetic", {"launch": 1e-12}), ("memory", {"launch": 1e-12, "bandwidth": 10.0})],
)
def test_what_takes_longest_at_its_ceiling_is_the_bound_and_the_report_is_drawn_and_shown(bound, options):
    found = place(product(), ceilings(**options), repeats=2)
    roof, _ = found.plot().figure.axes
    assert found.bound == bound
    assert f"ound by {bound}" in str(found)
    (star,) = roof.collections
    assert star.get_offsets().tolist() == [[pytest.approx(found.intensity), pytest.approx(found.gflops)]]


def test_each_precision_has_its_ceiling():
    both = product(), product(torch.bfloat16)
    found = place(lambda: [one() for one in both], ceilings(), repeats=2)
    assert found.flop == {"float32": 2 * EDGE**3, "bfloat16": 2 * EDGE**3}
    assert found.at_least["arithmetic"] == pytest.approx(2 * EDGE**3 * (1 / 1000e9 + 1 / 4000e9))
    with pytest.raises(gl.UsageError, match="float64: there are ceilings of bfloat16, float32 alone"):
        place(product(torch.float64), ceilings(), repeats=2)


def counted(step):
    with OperationCounter() as counter:
        step()
    return counter.operations, counter.moved


def test_views_and_new_memory_are_no_operations_and_each_byte_counts_once():
    x, numbers = torch.ones(EDGE, EDGE), 4 * EDGE**2
    assert counted(lambda: x.t().reshape(-1, 1)[3:]) == (1, 2 * numbers), "a transposed one is copied to be flat"
    assert counted(lambda: x.view(-1).detach().expand(5, -1)) == (0, 0)
    assert counted(lambda: x.add_(1)) == (1, 2 * numbers)
    assert counted(lambda: x.zero_()) == (1, numbers), "what it held before is not read"
    assert counted(lambda: x + x) == (1, 2 * numbers), "one tensor is read once"
    assert counted(lambda: torch.ones(EDGE).expand(EDGE, EDGE) + x) == (2, 4 * EDGE + 4 * EDGE + 2 * numbers)
    weights = [torch.ones(EDGE, requires_grad=True) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(EDGE)
    optimizer = torch.optim.SGD(weights, lr=0.1, foreach=True)
    optimizer.step()
    operations, moved = counted(optimizer.step)
    assert (operations, moved) == (1, 3 * 3 * 4 * EDGE), "reads weights and gradients, writes weights, and returns none"


def resnet18():
    return torchvision.models.resnet18()(torch.randn(2, 3, 32, 32)).square().mean()


def prednet():
    net, frames = gl.models.PredNet(channels=(3, 4, 8), size=(12, 16)), torch.rand(3, 1, 3, 12, 16)
    return net.training_loss(frames, None)[0]


def transformer():
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)(torch.randn(5, 2, 16)).square().mean()


@pytest.mark.parametrize("loss", [resnet18, prednet, transformer])
def test_flop_are_those_of_torchs_counter(loss):
    with FlopCounterMode(display=False) as reference:
        loss().backward()
    found = place(lambda: loss().backward(), ceilings(), repeats=2)
    assert sum(found.flop.values()) == reference.get_total_flops()
    assert not any(getattr(torch.ops.aten, name) in flop_registry for name in found.unknown)
    assert found.operations > 20


def test_a_step_is_left_as_it_was_and_begins_without_gradients():
    model = nn.Linear(4, 2)
    before = [p.clone() for p in model.parameters()]
    found = place(gl.Step(model, (torch.ones(3, 4), torch.zeros(3, 2)), F.mse_loss), ceilings(), repeats=2)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    model.zero_grad()
    with OperationCounter() as counter:
        F.mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 2)).backward()
    assert found.operations == counter.operations - 2, "the two tensors of the batch are there already"


def test_a_setting_measures_its_roofline_and_other_ceilings_are_refused(monkeypatch):
    asked = []
    monkeypatch.setattr(rooflines, "roofline", lambda *a, **_: asked.append(a) or ceilings(setting="cpu:threads=1"))
    assert place(product(), "cpu:threads=1", repeats=2).setting == "cpu:threads=1"
    assert asked == [("cpu:threads=1",)]
    with pytest.raises(gl.UsageError, match="ceilings of NVIDIA H200"):
        place(product(), ceilings().assign(machine="NVIDIA H200"))


def test_a_step_whose_products_are_none_or_have_no_formula():
    found = place(lambda: torch.fft.fft(torch.ones(8, dtype=torch.complex64)), ceilings(), repeats=2)
    assert found.unknown == ("_fft_c2c",)
    assert "torch has no formula: the FLOP of _fft_c2c" in str(found)
    x = torch.ones(1000)
    found = place(lambda: x + 1, ceilings(), repeats=2)
    assert (found.flop, found.gflops) == ({}, 0.0)
    assert found.reached == pytest.approx(found.at_least["memory"] / found.seconds)
