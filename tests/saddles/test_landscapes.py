import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import gpulab as gl
from tests.saddles._helpers import scaled_data

DATA = scaled_data(60, 2.0, 1.6, 1.2, 0.9)


SADDLE = gl.saddles.linear_autoencoder_saddle(DATA, [1])


@pytest.mark.parametrize("angle", [0, 30, 90])
def test_landscape_at_a_saddle_has_its_curvatures_and_slices_that_follow_them(angle):
    around = gl.saddles.landscape(SADDLE.model, nn.functional.mse_loss, (DATA, DATA))
    assert around.curvatures == pytest.approx(
        (SADDLE.curvature, float(SADDLE.eigenvalues[-1])), rel=1e-4
    )
    line = around.slice(angle, extent=1e-3, places=5)
    assert line.distance.tolist() == pytest.approx([-1e-3, -5e-4, 0, 5e-4, 1e-3])
    np.testing.assert_allclose(line.loss - SADDLE.loss, line.quadratic - SADDLE.loss, atol=1e-8)
    assert np.sign(line.loss.iloc[0] - SADDLE.loss) == np.sign(around.curvature(angle))


def test_landscape_slice_is_around_the_weights_that_the_landscape_was_made_for():
    net = nn.Linear(4, 4, bias=False).double()
    around = gl.saddles.landscape(net, lambda: (net(DATA) - DATA).square().mean())
    first = around.slice(90, extent=1.0)
    # with the slope, for a quadratic loss
    np.testing.assert_allclose(first.loss, first.quadratic, rtol=1e-12)
    after = net.weight.detach().add_(1.0).clone()
    np.testing.assert_array_equal(around.slice(90, extent=1.0).loss, first.loss)
    assert torch.equal(net.weight, after)


def test_surface_has_the_loss_at_every_place():
    around = gl.saddles.surface(SADDLE, extent=0.2, places=2)
    weights = parameters_to_vector(SADDLE.model.parameters())
    for row, column in ((0, 0), (1, 3), (4, 2)):
        moved = copy.deepcopy(SADDLE.model)
        by = around.along[column] * SADDLE.direction + around.across[row] * SADDLE.steepest
        vector_to_parameters(weights + by, moved.parameters())
        assert around.losses[row, column] == pytest.approx(
            SADDLE.objective(moved).item(), rel=1e-12
        )
    assert str(around) == f"A saddle at loss {SADDLE.loss:.4g}: 1 of 8 directions lead down"
    assert around.plot().alt.startswith(str(around))
