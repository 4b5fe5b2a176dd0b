import math

import pytest
import torch
from saddle_problems import symmetric

import gpulab as gl
from gpulab.saddles import eigen as krylov


def wanted(values, k, which):
    below = {"smallest": k, "largest": 0, "both": math.ceil(k / 2)}[which]
    return torch.cat([values[:below], values[len(values) - (k - below) :]])


@pytest.mark.parametrize("which", krylov.WHICH)
@pytest.mark.parametrize("k", [1, 5])
def test_extreme_eigenpairs_of_networks_agree_with_the_dense_matrix(small_hessian, known, which, k):
    H, values = known
    for dtype, within in ((torch.float64, 1e-8), (torch.float32, 1e-5)):
        pairs = gl.saddles.lanczos(small_hessian[0](dtype), k, which)
        assert pairs.converged
        assert pairs.vectors.dtype == dtype
        assert (pairs.values - wanted(values, k, which)).abs().max() < within * max(1, float(values.abs().max()))
    pairs = gl.saddles.lanczos(H, k, which)
    assert pairs.converged
    assert (pairs.values - wanted(values, k, which)).abs().max() < 1e-8
    assert ((H @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0) - pairs.residuals).abs().max() < 1e-12
    assert (pairs.vectors.T @ pairs.vectors - torch.eye(k, dtype=torch.float64)).abs().max() < 1e-8
    assert pairs.products < len(values)


REPEATED = {
    "zero": [0.0] * 40,
    "identity": [1.0] * 40,
    "seven, a crowd of zeros, five": [-2.0] * 7 + [0.0] * 150 + [3.0] * 5 + [0.02 * i for i in range(45)],
    "two values": [-2.0] * 70 + [3.0] * 70,
    "low rank": [0.0] * 100 + [1.0, 1.0, -1.0],
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("which", krylov.WHICH)
def test_repeated_and_zero_eigenvalues_are_found_as_often_as_they_occur(name, which):
    values = torch.tensor(REPEATED[name], dtype=torch.float64).sort().values
    pairs = gl.saddles.lanczos(symmetric(values), 9, which)
    assert (pairs.values - wanted(values, 9, which)).abs().max() < 1e-8
    assert torch.linalg.matrix_rank(pairs.vectors) == 9


@pytest.mark.parametrize("which", krylov.WHICH)
def test_every_eigenvalue_of_a_small_matrix(which):
    for n, k in [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3), *((12, k) for k in range(1, 13))]:
        values = torch.linspace(-1, 2, n, dtype=torch.float64)
        pairs = gl.saddles.lanczos(symmetric(values), k, which)
        assert (pairs.values - wanted(values, k, which)).abs().max() < 1e-10


def test_too_few_products_are_told():
    pairs = gl.saddles.lanczos(torch.diag(torch.linspace(0, 1, 500) ** 2), 2, max_products=60)
    assert not pairs.converged
    assert "NOT converged" in repr(pairs)
    assert pairs.products <= 64


def test_a_seed_gives_the_same_bits_and_vectors_are_orthogonal_whatever_the_arithmetic_of_the_setting():
    A = symmetric(torch.linspace(-1, 1, 100)).float()
    one, same, other = (gl.saddles.lanczos(A, 2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.vectors, same.vectors)
    assert not torch.equal(one.vectors, other.vectors)
    with gl.setting("cpu:emulate=bfloat16"):
        vectors = gl.saddles.lanczos(A, 4, tolerance=0.02).vectors
    assert (vectors.T @ vectors - torch.eye(4)).abs().max() < 1e-5
