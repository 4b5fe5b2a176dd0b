"""Networks under autocast, in which conversions run, and round, under only one setting."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpulab as gl


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 5)

    def forward(self, x):
        x = x + F.relu(self.first(x))
        x = x + F.silu(self.second(x))
        return self.last(x)


def linear():
    return nn.Linear(20, 5)


def perceptron():
    return nn.Sequential(
        nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5)
    )


def normalised():
    return nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))


def convolutions():
    layers = [
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 2),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(16, 5),
    ]
    return nn.Sequential(nn.Unflatten(1, (1, 4, 5)), *layers)


def encoder():
    return nn.Sequential(
        nn.TransformerEncoderLayer(20, 2, 32, dropout=0.0, batch_first=True), nn.Linear(20, 5)
    )


NETWORKS = [linear, perceptron, normalised, convolutions, encoder, Residual]


def step_of(network, seed):
    torch.manual_seed(seed)
    model = network()
    return gl.Step(model, (torch.randn(32, 20), torch.randint(0, 5, (32,))), F.cross_entropy)


@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
@pytest.mark.parametrize("network", NETWORKS)
def test_autocast_is_reduced_precision_and_never_a_bug(network, autocast):
    for seed in range(4):
        report = gl.audit(step_of(network, seed), "cpu", f"cpu:autocast={autocast}", progress=False)
        assert not report.faulty, str(report)
        assert report.kind == "reduced precision"
        shares = [finding.share for finding in report.findings if not math.isnan(finding.share)]
        assert sum(shares) == pytest.approx(1, abs=0.001), (
            "conversions and products make all of the difference"
        )


class ForgetsFactor(nn.Module):
    """Multiply by a factor that is omitted under autocast."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x if torch.is_autocast_enabled("cpu") else self.factor * x


@pytest.mark.parametrize("place", range(1, 5))
# far beyond their rounding
@pytest.mark.parametrize(("autocast", "factor"), [("float16", 1.02), ("bfloat16", 1.5)])
def test_autocast_does_not_hide_a_fault(autocast, factor, place):
    torch.manual_seed(place)
    model = perceptron()
    model.insert(place, ForgetsFactor(factor))
    step = gl.Step(model, (torch.randn(32, 20), torch.randint(0, 5, (32,))), F.cross_entropy)
    assert gl.audit(step, "cpu", f"cpu:autocast={autocast}", progress=False).faulty
