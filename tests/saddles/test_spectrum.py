import math
import re

import numpy as np
import pytest
from saddle_problems import symmetric

import gpulab as gl
from gpulab.saddles.spectrum import ZERO, estimated_index

PROBES = 40


@pytest.fixture(scope="module")
def spectrum(known):
    return gl.saddles.spectral_density(known[0], probes=PROBES, steps=40, seed=2, progress=False)


def moments(spectrum, highest):
    """The means of λ, λ², … over all eigenvalues, and their standard errors over probes."""
    powers = spectrum.nodes[..., None] ** np.arange(1, highest + 1)
    values = (spectrum.weights[..., None] * powers).sum(1)
    return values.mean(0), values.std(0, ddof=1) / math.sqrt(len(values))


def test_moments_are_within_the_sampling_error(known, spectrum):
    _, values = known
    truth = np.array([float((values**p).mean()) for p in range(1, 7)])
    means, errors = moments(spectrum, 6)
    assert (np.abs(means - truth) / errors < 4).all()
    assert (errors < 0.3 * np.abs(means).max()).all()


def test_a_quadrature_of_m_steps_is_exact_for_polynomials_below_degree_2m(known):
    H, _ = known
    spectrum = gl.saddles.spectral_density(H, probes=3, steps=4, seed=5)
    signs = gl.saddles.operators.random_signs(H.shape[0], 3, H, 5)
    moved, scale = signs, max(abs(end) for end in spectrum.extremes)
    for power in range(1, 8):
        moved = H @ moved
        direct = (signs * moved).sum(0) / H.shape[0]
        quadrature = (spectrum.weights * spectrum.nodes**power).sum(1)
        assert np.abs(quadrature - direct.numpy()).max() < 1e-12 * scale**power


def test_weights_and_density_integrate_to_one_with_the_shares_and_ends_of_the_matrix(known, spectrum):
    _, values = known
    assert np.abs(spectrum.weights.sum(1) - 1).max() < 1e-12
    grid, density, error = spectrum.density()
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-3)
    assert (error >= 0).all()
    for x in np.quantile(values.numpy(), [0.001, 0.01, 0.99, 0.999]):  # away from the crowd at zero
        share = spectrum.mass_below(x)
        assert abs(share.value - (values < x).double().mean().item()) < 4 * share.error + 2e-3
    assert spectrum.extremes == pytest.approx((float(values[0]), float(values[-1])), abs=1e-8)


@pytest.mark.parametrize("steps", [1, 2, 5, 120])
@pytest.mark.parametrize("values", [[0.0] * 30, [2.0] * 30, [-1.0] * 10 + [0.0] * 15 + [4.0] * 5, [7.0]])
def test_repeated_and_zero_eigenvalues(values, steps):
    spectrum = gl.saddles.spectral_density(symmetric(values), probes=4, steps=steps)
    assert np.isfinite(spectrum.nodes).all()
    low, high = spectrum.extremes
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    if steps > 3:
        for x in (-0.5, 0.5, 4.5):
            share = spectrum.mass_below(x)
            assert abs(share.value - np.mean(np.array(values) < x)) <= 5 * share.error + 1e-9


def test_probes_are_the_same_on_every_device_and_for_every_seed_others():
    A = symmetric(np.linspace(-1, 1, 50))
    one, same, other = (gl.saddles.spectral_density(A, probes=2, steps=5, seed=seed) for seed in (0, 0, 1))
    assert (one.nodes == same.nodes).all()
    assert not (one.nodes == other.nodes).any()


def test_the_index_of_a_network_is_estimated_with_an_error_that_holds(known):
    H, values = known
    threshold = ZERO * float(values.abs().max())
    truth = int((values < -threshold).sum())
    misses = []
    for seed in range(4):
        index = estimated_index(gl.saddles.spectral_density(H, seed=seed, steps=60, progress=False))
        assert not index.exact
        assert index.threshold == pytest.approx(threshold)
        misses.append(abs(index.value - truth) / index.error)
    assert np.median(misses) < 2


def test_an_estimated_index_says_how_many_signs_it_cannot_tell(monkeypatch):
    """Of 68 negative eigenvalues 37 are closer to zero than it can see: not "31 are negative"."""
    monkeypatch.setattr("gpulab.saddles.spectrum.SMALL", 100)
    values = [*np.linspace(-1, -0.1, 31), *np.linspace(-1e-3, -1e-4, 37), *np.linspace(0.1, 1, 132)]
    index = gl.saddles.index(symmetric(values), progress=False)
    assert abs(index.value - 31) < 3 * index.error
    assert abs(index.zero - 37) < 12
    said = (
        rf"about {int(index)} ± \d+ of 200 eigenvalues are below -1.0e-02; some \d+ are closer to zero, and their signs"
    )
    assert re.match(said, repr(index))


def test_the_index_of_a_small_matrix_is_counted_and_a_gap_around_zero_makes_the_estimate_sharp(monkeypatch):
    index = gl.saddles.index(symmetric([-1.0] * 3 + [0.0] * 5 + [2.0] * 4))
    assert (int(index), index.zero, index.error, index.exact) == (3, 5, 0, True)
    assert index.fraction == 0.25
    assert repr(index).startswith("3 of 12 eigenvalues are negative, 5 within")
    monkeypatch.setattr("gpulab.saddles.spectrum.SMALL", 200)
    values = np.concatenate([np.linspace(-3, -1, 100), np.linspace(1, 2, 200)])
    index = gl.saddles.index(symmetric(values), probes=20)
    assert not index.exact
    assert abs(int(index) - 100) < 4 * index.error
    assert index.error < 7.5
