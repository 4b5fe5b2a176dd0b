import itertools

import pytest
import torch
from saddle_problems import scaled_data
from torch import nn

import gpulab as gl
from gpulab.saddles import critical as critical_points
from gpulab.saddles.critical import find_critical_point

MSE = nn.functional.mse_loss


@pytest.fixture(scope="module")
def data():
    return scaled_data(40, 3.0, 2.4, 1.9, 1.4, 1.0)


def network(seed, hidden=2):
    net = gl.models.LinearAutoencoder(5, hidden)
    net.draw_weights(torch.Generator().manual_seed(seed))
    return net


class Point(nn.Module):
    """A vector instead of a network; the loss is a function of it."""

    def __init__(self, *x):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(x, dtype=torch.float64))

    def forward(self, _):
        return self.x


def search(function, *start, **options):
    return find_critical_point(Point(*start), lambda x, _: function(x), (None, None), progress=False, **options)


@pytest.mark.parametrize(("largest", "seeds"), [(500, 8), (1, 4)], ids=["dense", "krylov"])
def test_from_random_starts_losses_and_indices_are_those_of_theory(data, largest, seeds, monkeypatch):
    monkeypatch.setattr(critical_points, "WRITTEN_OUT", largest)
    held = [components for size in range(3) for components in itertools.combinations(range(5), size)]
    known = [gl.saddles.linear_autoencoder_saddle(data, components, hidden=2) for components in held]
    losses = torch.tensor([saddle.loss for saddle in known])
    indices = {}
    for seed in range(seeds):
        point = find_critical_point(network(seed), MSE, (data, data), progress=False)
        assert point.kind == "critical point"
        assert point.hessian().gradient.square().sum() <= 1e-20
        assert point.history.squared_gradient_norm.is_monotonic_decreasing
        assert point.history.step.tolist() == list(range(len(point.history)))
        assert (losses - point.loss).abs().min() < 1e-9
        indices[round(point.loss, 9)] = len(point.unstable[0])
        for saddle in known:
            if len(saddle.components) == 2 and abs(saddle.loss - point.loss) < 1e-9:
                assert len(point.unstable[0]) == saddle.index
    assert len(indices) > 2, "not only the minimum is found"
    assert max(indices.values()) > 0
    assert indices.get(round(float(losses.min()), 9), 0) == 0


def test_the_model_is_left_alone_and_a_copy_returned_as_far_as_few_steps_lead(data):
    net = network(0)
    before = [parameter.clone() for parameter in net.parameters()]
    found = find_critical_point(net, MSE, (data.float(), data.float()), max_steps=2, progress=False)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, net.parameters(), strict=True))
    assert found.model.encoder.weight.dtype == torch.float64
    assert float(found.objective(found.model).detach()) == pytest.approx(found.loss, abs=1e-15)
    assert found.kind == "not converged"
    assert "2 steps were not enough" in found.message
    assert len(found.history) == 3


def test_a_saddle_of_a_function():
    found = search(lambda x: x[0] ** 2 - x[1] ** 2 + x[0] * x[1] ** 3, 0.3, 0.2)
    assert found.loss == pytest.approx(0, abs=1e-12)
    assert found.curvature == pytest.approx(-2)
    assert found.steepest.abs().tolist() == pytest.approx([1, 0], abs=1e-9)
    assert found.hessian().dense().diagonal().tolist() == pytest.approx([2, -2])
    assert search(lambda x: (x**4).sum(), 0.5).found, "a minimum whose Hessian is zero"


@pytest.mark.parametrize(
    ("function", "start", "why"),
    [
        (lambda x: (x**3 + x).sum(), [0.0], "linear"),  # no second derivative at its only inflexion
        (lambda x: (x**3 + x).sum(), [0.5], "kernel"),  # where the search ends at that inflexion
        (lambda x: (x[0] ** 3 + x[0]) + x[1] ** 2, [0.0, 0.7], "kernel"),
        (lambda x: x.abs().sum(), [1.0, 2.0], "linear"),  # everywhere
        (lambda x: (x - 9).relu().sum() + x.sum(), [0.0], "linear"),  # as far as a unit is dead
    ],
)
def test_where_the_gradient_cannot_get_smaller_is_no_critical_point(function, start, why):
    found = search(function, *start)
    assert found.kind == "gradient-flat region"
    assert not found.found
    assert found.squared_gradient_norm > 0.5
    assert repr(found).startswith("Gradient-flat region")
    assert "no critical point" in repr(found)
    assert why in found.message


def test_a_plateau_without_end_is_no_critical_point():
    found = search(lambda x: (-x[0]).exp() + x[1] ** 2, 1.0, 2.0)
    assert not found.found
    alone = search(lambda x: (-x[0]).exp(), 1.0, tolerance=1e-12)
    assert not alone.found
    assert "plateau" in alone.message
