"""Critical points that theory knows, against the dense Hessian, and those that are searched for, against theory."""

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


def test_from_random_starts_losses_and_indices_are_those_of_theory(data):
    held = [components for size in range(3) for components in itertools.combinations(range(5), size)]
    known = [gl.saddles.linear_autoencoder_saddle(data, components, hidden=2) for components in held]
    losses = torch.tensor([saddle.loss for saddle in known])
    indices = {}
    for seed in range(8):
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


def test_the_model_is_left_alone_and_a_copy_returned_as_far_as_few_steps_lead(data, monkeypatch):
    monkeypatch.setattr(critical_points, "MOST_STEPS", 2)
    net = network(0)
    before = [parameter.clone() for parameter in net.parameters()]
    found = find_critical_point(net, MSE, (data.float(), data.float()), progress=False)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, net.parameters(), strict=True))
    assert float(found.objective(found.model).detach()) == pytest.approx(found.loss, abs=1e-15)
    assert found.kind == "not converged"


@pytest.mark.parametrize(
    ("function", "start", "why"),
    [
        (lambda x: (x**3 + x).sum(), [0.0], "linear"),  # no second derivative at its only inflexion
        (lambda x: (x[0] ** 3 + x[0]) + x[1] ** 2, [0.0, 0.7], "kernel"),
        (lambda x: x.abs().sum(), [1.0, 2.0], "linear"),  # everywhere
    ],
)
def test_where_the_gradient_cannot_get_smaller_is_no_critical_point(function, start, why):
    found = search(function, *start)
    assert found.kind == "gradient-flat region"
    assert not found.found
    assert found.squared_gradient_norm > 0.5
    assert why in found.message


def test_a_plateau_without_end_is_no_critical_point():
    assert not search(lambda x: (-x[0]).exp() + x[1] ** 2, 1.0, 2.0).found
    assert "plateau" in search(lambda x: (-x[0]).exp(), 1.0, tolerance=1e-12).message
    assert search(lambda x: (x**4).sum(), 0.5).found, "a minimum whose Hessian is zero"


FACTORS = torch.tensor([3.0, 1.5, 0.5])


def orthogonal(rows, columns):
    return torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64))[0]


def problems():
    torch.manual_seed(0)
    return {
        "distinct": torch.randn(40, 3, dtype=torch.float64) * FACTORS,
        "float32": torch.randn(40, 3) * FACTORS,
        "far from centred": torch.randn(40, 3, dtype=torch.float64) * FACTORS + 10,
        "equal moments": orthogonal(8, 4) * torch.tensor([2, 2, 1, 1]) @ orthogonal(4, 4),
        "fewer samples than features": torch.randn(2, 3),
        "one sample": torch.randn(1, 3),
        "nothing": torch.zeros(4, 3),
    }


PROBLEMS = problems()


def saddles(data):
    """Every set of components of every size, with a unit to spare and without."""
    features = data.shape[1]
    for size in range(features + 1):
        for components in itertools.combinations(range(features), size):
            for units in {max(1, size), 2, size + 2} - set(range(size)):
                yield gl.saddles.linear_autoencoder_saddle(data, components, hidden=units)


@pytest.mark.parametrize("name", PROBLEMS)
def test_theory_agrees_with_the_dense_hessian_for_every_set_of_components(name):
    data = PROBLEMS[name]
    for saddle in saddles(data):
        H = saddle.hessian()
        dense = H.dense()
        computed = torch.linalg.eigvalsh(dense)
        scale = max(1.0, float(computed[-1]))
        assert H.gradient.norm() < 1e-12 * scale
        assert H.loss == pytest.approx(saddle.loss, abs=1e-12 * scale)
        assert len(saddle.eigenvalues) == H.shape[0]
        assert torch.allclose(computed, saddle.eigenvalues, rtol=0, atol=1e-12 * scale)
        assert saddle.curvature == pytest.approx(float(computed[0]), abs=1e-12 * scale)
        assert saddle.index == int((computed < -1e-11 * scale).sum())
        assert saddle.direction.norm() == pytest.approx(1, abs=1e-14)
        assert (dense @ saddle.direction - saddle.curvature * saddle.direction).norm() < 1e-12 * scale
        values, directions = saddle.unstable
        assert len(values) == saddle.index
        assert torch.allclose(dense @ directions, directions * values, rtol=0, atol=1e-12 * scale)
        assert torch.allclose(directions.T @ directions, torch.eye(len(values), dtype=torch.float64), atol=1e-12)
        objective = saddle.objective(saddle.model)
        assert float(objective.detach()) == pytest.approx(saddle.loss, abs=1e-12 * scale)


def test_a_network_whose_hessian_is_too_large_to_write_out_is_refused():
    with pytest.raises(gl.UsageError, match=r"5,100 parameters: .* at most 5,000"):
        find_critical_point(nn.Linear(50, 100), MSE, (torch.ones(2, 50), torch.ones(2, 100)))
