import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpulab as gl
from gpulab.saddles._operators import random_signs
from tests.saddles._helpers import DOUBLE, symmetric


def density(A, **options):
    return gl.saddles.spectral_density(A, progress=False, **options)


def test_spectral_density_of_m_lanczos_steps_is_exact_for_polynomials_below_degree_2m():
    H = symmetric(torch.linspace(-1, 3, 60) ** 3)
    spectrum = density(H, probes=3, steps=4, seed=5)
    signs = random_signs(H.shape[0], 3, H, 5)
    moved, scale = signs, max(abs(end) for end in spectrum.extremes)
    for power in range(1, 8):
        moved = H @ moved
        direct = (signs * moved).sum(0) / H.shape[0]
        quadrature = (spectrum.weights * spectrum.nodes**power).sum(1)
        assert np.abs(quadrature - direct.numpy()).max() < 1e-12 * scale**power


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1e-9, 0.5, 1.0, 4.0]), min_size=1, max_size=60),
    st.integers(1, 60),
)
def test_extreme_eigenpairs_and_spectral_density_of_repeated_and_zero_eigenvalues(values, steps):
    A, least, greatest = symmetric(values), min(values), max(values)
    found, vectors = gl.saddles.extreme_eigenpairs(A)
    assert found.tolist() == pytest.approx([least, greatest], abs=1e-8)
    assert (A @ vectors - vectors * found).norm(dim=0).max() < 1e-8
    spectrum = density(A, probes=4, steps=steps)
    assert np.isfinite(spectrum.nodes).all()
    low, high = spectrum.extremes
    assert least - 1e-9 <= low <= high <= greatest + 1e-9
    # With as many steps as there are different eigenvalues, the shares of each probe are exact.
    if steps > 7:
        exact, turn = torch.linalg.eigh(A)
        parts = (turn.T @ random_signs(len(values), 4, A, 0)).square().mean(1) / len(values)
        for x in (-0.7, 0.2, 4.5):
            assert spectrum.mass_below(x).value == pytest.approx(
                float(parts[exact < x].sum()), abs=1e-9
            )


def test_spectral_density_depends_on_its_seed_alone():
    one, same, other = (
        density(symmetric([-1.0, 1.0, 2.0]), probes=2, steps=2, seed=seed) for seed in (0, 0, 5)
    )
    assert (one.nodes == same.nodes).all()
    assert (one.nodes != other.nodes).any()
    assert math.isnan(density(symmetric([1.0, 2.0]), probes=1, steps=2).mass_below(1.5).error)


def test_index_estimate_says_how_many_signs_it_cannot_tell(monkeypatch):
    """37 of 68 negative eigenvalues are too close to zero, so it must not say "31 are negative"."""
    monkeypatch.setattr("gpulab.saddles._spectrum.MAX_COUNTED_SIZE", 100)
    values = [*np.linspace(-1, -0.1, 31), *np.linspace(-1e-3, -1e-4, 37), *np.linspace(0.1, 1, 132)]
    index = gl.saddles.index(symmetric(values), progress=False)
    assert abs(index.value - 31) < 3 * index.error
    assert abs(index.zero - 37) < 12
    said = (
        rf"about {int(index)} ± [1-9]\d* of 200 eigenvalues are below -1.0e-02; some \d+ are closer"
        r" to zero, and"
    )
    assert re.match(said, repr(index))


def test_index_of_a_small_matrix_is_counted():
    index = gl.saddles.index(symmetric([-1.0] * 3 + [0.0] * 5 + [2.0] * 4))
    assert (int(index), index.zero, index.error, index.exact) == (3, 5, 0, True)
    assert repr(index).startswith("3 of 12 eigenvalues are negative, 5 within")


def test_extreme_eigenpairs_of_a_network_agree_with_the_dense_matrix():
    model, inputs = (
        gl.models.PredNet(channels=(1, 2), size=(4, 4)),
        torch.rand(3, 1, 1, 4, 4, dtype=DOUBLE),
    )
    H = gl.hessian(model.double(), lambda: model.training_loss(inputs, None)[0])
    expected = torch.linalg.eigvalsh(H.dense())[[0, -1]]
    for like, within in ((H, 1e-8), (H.dense().float(), 1e-5)):
        found, vectors = gl.saddles.extreme_eigenpairs(like)
        assert vectors.dtype == like.dtype
        assert (found - expected).abs().max() < within * max(1, float(expected.abs().max()))


def test_extreme_eigenpairs_repeat_and_are_orthogonal():
    A = symmetric(torch.linspace(-1, 1, 100)).float()
    assert torch.equal(gl.saddles.extreme_eigenpairs(A)[1], gl.saddles.extreme_eigenpairs(A)[1])
    with gl.setting("cpu:emulate=bfloat16"):
        _, vectors = gl.saddles.extreme_eigenpairs(A, tolerance=0.02)
    assert (vectors.T @ vectors - torch.eye(2)).abs().max() < 0.1


def test_extreme_eigenpairs_that_are_not_found_are_an_error(monkeypatch):
    monkeypatch.setattr("gpulab.saddles._eigenpairs.MAX_RESTARTS", 1)
    with pytest.raises(
        gl.DataError, match=r"no eigenvector to a tolerance of 4e-11: .*; use a larger tolerance"
    ):
        gl.saddles.extreme_eigenpairs(torch.diag(torch.linspace(0, 1, 500).double() ** 2))
