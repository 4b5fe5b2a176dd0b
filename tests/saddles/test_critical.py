"""Known critical points compared with the dense Hessian, and found ones compared with theory."""

import itertools

import pytest
import torch
from torch import nn

import gpulab as gl
from gpulab.saddles import _critical as critical
from gpulab.saddles._critical import find_critical_point
from tests.saddles._helpers import DOUBLE, Model, rand, scaled_data, symmetric

MSE = nn.functional.mse_loss
DATA = scaled_data(40, 3.0, 2.4, 1.9, 1.4, 1.0)


def network(seed):
    net = gl.models.LinearAutoencoder(5, 2)
    net.draw_weights(torch.Generator().manual_seed(seed))
    return net


def search(function, *start):
    """Search for a critical point of a function of a vector."""
    point = Model(lambda s, _: s.x, x=torch.tensor(start))
    return find_critical_point(point, lambda x, _: function(x), (DATA, None), progress=False)


def test_find_critical_point_from_random_starts_finds_losses_and_indices_of_theory():
    held = [
        components for size in range(3) for components in itertools.combinations(range(5), size)
    ]
    known = [
        gl.saddles.linear_autoencoder_saddle(DATA, components, hidden=2) for components in held
    ]
    indices = {}
    for seed in range(8):
        point = find_critical_point(network(seed), MSE, (DATA, DATA), progress=False)
        assert point.found
        assert point.hessian().gradient.square().sum() <= 1e-20
        (same,) = (saddle for saddle in known if abs(saddle.loss - point.loss) < 1e-9)
        if len(same.components) == 2:  # with fewer, the index is not unique
            assert point.index == same.index
        indices[same.components] = point.index
    assert len(indices) > 2, "not only the minimum is found"
    assert max(indices.values()) > 0


def test_find_critical_point_leaves_the_model_alone_and_says_if_steps_were_not_enough(monkeypatch):
    monkeypatch.setattr(critical, "MAX_STEPS", 2)
    net, same = network(0), network(0)
    point = find_critical_point(net, MSE, (DATA.float(), DATA.float()), progress=False)
    torch.testing.assert_close(
        dict(net.named_parameters()), dict(same.named_parameters()), rtol=0, atol=0
    )
    assert not point.found
    assert repr(point).startswith(f"No critical point at loss {point.loss:.6g}: after 2 steps")
    assert "search again from `model`" in point.message


NOWHERE = {
    "an inflexion": (lambda x: (x**3 + x).sum(), [0.0], "gradient-flat region: 100%"),
    "an inflexion along one axis": (
        lambda x: (x[0] ** 3 + x[0]) + x[1] ** 2,
        [0.0, 0.7],
        "gradient-flat region: 100%",
    ),
    "a linear loss": (lambda x: 3 * x.sum(), [1.0, 2.0], "gradient-flat region: 100%"),
    "a plateau without end": (lambda x: (-x[0]).exp(), [1.0], "on a plateau"),
}


@pytest.mark.parametrize("name", NOWHERE)
def test_find_critical_point_says_why_where_none_is_near(name):
    function, start, why = NOWHERE[name]
    point = search(function, *start)
    assert not point.found
    assert why in point.message


def test_find_critical_point_finds_a_minimum_whose_hessian_is_zero():
    assert search(lambda x: (x**4).sum(), 0.5).found


PROBLEMS = {
    "far from centred, in float32": (rand(40, 3) * torch.tensor([3.0, 1.5, 0.5]) + 10).float(),
    "equal moments": symmetric([2.0, 2.0, 1.0, 1.0]),
    "fewer samples than features": rand(2, 3),
    "nothing": torch.zeros(4, 3),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_linear_autoencoder_saddle_agrees_with_the_dense_hessian_for_every_set(name):
    data = PROBLEMS[name]
    features = range(data.shape[1])
    sets = [
        held for size in range(len(features) + 1) for held in itertools.combinations(features, size)
    ]
    for held, spare in itertools.product(sets, (0, 2)):
        saddle = gl.saddles.linear_autoencoder_saddle(data, held, hidden=max(1, len(held)) + spare)
        H = saddle.hessian()
        dense, (values, directions) = H.dense(), saddle.unstable
        computed = torch.linalg.eigvalsh(dense)
        scale = max(1.0, float(computed[-1]))
        assert H.gradient.norm() < 1e-12 * scale
        assert H.loss == pytest.approx(saddle.loss, abs=1e-12 * scale)
        assert torch.allclose(computed, saddle.eigenvalues, rtol=0, atol=1e-12 * scale)
        assert saddle.index == int((computed < -1e-11 * scale).sum())
        assert torch.allclose(dense @ directions, directions * values, rtol=0, atol=1e-12 * scale)
        assert torch.allclose(
            directions.T @ directions, torch.eye(len(values), dtype=DOUBLE), atol=1e-12
        )
        for vector, value in ((saddle.direction, computed[0]), (saddle.steepest, computed[-1])):
            assert vector.norm() == pytest.approx(1, abs=1e-14)
            assert (dense @ vector - value * vector).norm() < 1e-12 * scale
