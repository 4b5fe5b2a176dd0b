import itertools

import numpy as np
import pytest
import torch

import gpulab as gl

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


def test_any_matrix_of_numbers_will_do_and_a_saddle_says_what_it_is():
    rows = [[1, 2], [3, 5], [0, 1]]
    of_list, of_array = (
        gl.saddles.linear_autoencoder_saddle(data, [1]) for data in (rows, np.array(rows, dtype=np.float16))
    )
    assert of_list.loss == of_array.loss
    assert of_list.model.encoder.weight.dtype == torch.float64
    text = repr(gl.saddles.linear_autoencoder_saddle(PROBLEMS["distinct"], [0, 2]))
    assert "components held: 0, 2" in text
    assert "index 1" in text
    assert "held: none" in repr(gl.saddles.linear_autoencoder_saddle(PROBLEMS["distinct"], []))
