import copy

import numpy as np
import pytest
import torch
from saddle_problems import scaled_data
from torch import nn

import gpulab as gl


@pytest.fixture(scope="module")
def saddle():
    return gl.saddles.linear_autoencoder_saddle(scaled_data(60, 2.0, 1.6, 1.2, 0.9), [1])


@pytest.fixture(scope="module")
def around(saddle):
    return gl.saddles.landscape(saddle.model, nn.functional.mse_loss, saddle.batch)


def test_curvatures_and_loss_are_those_of_theory(saddle, around):
    assert around.loss == pytest.approx(saddle.loss)
    assert around.curvatures[0] == pytest.approx(saddle.curvature, rel=1e-4)
    assert around.curvatures[1] == pytest.approx(float(saddle.eigenvalues[-1]), rel=1e-4)
    assert around.gradient.norm() < 1e-12


def test_a_surface_has_the_loss_at_every_place(saddle):
    around = gl.saddles.surface(saddle, extent=0.2, places=2)
    weights = torch.nn.utils.parameters_to_vector(saddle.model.parameters())
    for row, column in ((0, 0), (1, 3), (4, 2)):
        moved = copy.deepcopy(saddle.model)
        by = around.along[column] * saddle.direction + around.across[row] * saddle.steepest
        torch.nn.utils.vector_to_parameters(weights + by, moved.parameters())
        assert around.losses[row, column] == pytest.approx(saddle.objective(moved).item(), rel=1e-12)


def test_a_minimum_has_no_such_surface():
    minimum = gl.saddles.linear_autoencoder_saddle(torch.diag(torch.tensor([4.0, 3.0, 2.0])), [0])
    with pytest.raises(gl.UsageError, match=r"the least curvature is .*landscape"):
        gl.saddles.surface(minimum)


@pytest.mark.parametrize("angle", [0, 30, 90])
def test_a_short_slice_is_its_quadratic(around, angle):
    line = around.slice(angle, extent=1e-3, places=5)
    assert line.distance.tolist() == pytest.approx([-1e-3, -5e-4, 0, 5e-4, 1e-3])
    np.testing.assert_allclose(line.loss - around.loss, line.quadratic - around.loss, atol=1e-8)
    assert np.sign(line.loss.iloc[0] - around.loss) == np.sign(around.curvature(angle))


def test_a_slice_is_around_the_weights_it_was_made_for(saddle):
    net = nn.Linear(4, 4, bias=False).double()
    x = saddle.data
    around = gl.saddles.landscape(net, lambda: (net(x) - x).square().mean())
    first = around.slice(90, extent=1.0)
    with torch.no_grad():
        net.weight.add_(1.0)
    after = net.weight.clone()
    np.testing.assert_array_equal(around.slice(90, extent=1.0).loss, first.loss)
    assert torch.equal(net.weight, after)


def test_a_surface_is_the_loss_in_the_plane_of_two_eigenvectors(saddle):
    surface = gl.saddles.surface(saddle, extent=1e-2, places=1)
    assert surface.losses.shape == (3, 3)
    assert surface.losses[1, 1] == pytest.approx(saddle.loss, abs=1e-14)
    bend = surface.losses[[0, 1], [1, 0]] - surface.loss, surface.losses[[2, 1], [1, 2]] - surface.loss
    for differences in bend:  # up across, down along
        places = np.array([surface.across[0], surface.along[0]])
        assert differences == pytest.approx(np.array(surface.curvatures)[::-1] * places**2 / 2, rel=1e-2)
    assert surface.losses[0, 0] == pytest.approx(surface.loss + bend[0].sum(), abs=1e-6)
    assert str(surface) == f"A saddle at loss {saddle.loss:.4g}: 1 of 8 directions lead down"
    picture = surface.plot()
    assert picture.alt.startswith(str(surface))
    assert len(picture.png()) < 150_000
