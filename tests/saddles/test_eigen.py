import pytest
import torch
from saddle_problems import symmetric

import gpulab as gl


def test_extreme_eigenpairs_of_networks_agree_with_the_dense_matrix(small_hessian, known):
    H, values = known
    ends = values[[0, -1]]
    for dtype, within in ((torch.float64, 1e-8), (torch.float32, 1e-5)):
        found, vectors = gl.saddles.extreme_eigenpairs(small_hessian[0](dtype))
        assert vectors.dtype == dtype
        assert (found - ends).abs().max() < within * max(1, float(values.abs().max()))
    found, vectors = gl.saddles.extreme_eigenpairs(H)
    assert found.dtype == torch.float64
    assert (found - ends).abs().max() < 1e-8
    assert (H @ vectors - vectors * found).norm(dim=0).max() < 1e-8
    assert (vectors.T @ vectors - torch.eye(2, dtype=torch.float64)).abs().max() < 1e-8


REPEATED = {
    "zero": [0.0] * 40,
    "identity": [1.0] * 40,
    "least almost zero": [1e-9] + [0.1 + 0.01 * i for i in range(90)],
    "greatest almost zero": [-1.0] * 60 + [0.0] * 40,
    "as far below as above": [-2.0] * 30 + [0.1 * i for i in range(20)] + [2.0] * 30,
    "low rank": [0.0] * 100 + [1.0, 1.0, -1.0],
    "one": [3.0],
    "two": [-1.0, 2.0],
}


@pytest.mark.parametrize("name", REPEATED)
def test_extreme_eigenpairs_of_repeated_and_zero_eigenvalues(name):
    values = torch.tensor(REPEATED[name], dtype=torch.float64).sort().values
    A = symmetric(values)
    found, vectors = gl.saddles.extreme_eigenpairs(A)
    assert (found - values[[0, -1]]).abs().max() < 1e-8
    assert (A @ vectors - vectors * found).norm(dim=0).max() < 1e-8


def test_extreme_eigenpairs_repeat_and_are_orthogonal():
    A = symmetric(torch.linspace(-1, 1, 100)).float()
    assert torch.equal(gl.saddles.extreme_eigenpairs(A)[1], gl.saddles.extreme_eigenpairs(A)[1])
    with gl.setting("cpu:emulate=bfloat16"):
        _, vectors = gl.saddles.extreme_eigenpairs(A, tolerance=0.02)
    assert (vectors.T @ vectors - torch.eye(2)).abs().max() < 0.1


def test_extreme_eigenpairs_that_are_not_found_are_an_error(monkeypatch):
    monkeypatch.setattr("gpulab.saddles.eigen.RESTARTS", 1)
    with pytest.raises(gl.DataError, match=r"no eigenvector to a tolerance of 4e-11: .*; allow a larger one"):
        gl.saddles.extreme_eigenpairs(torch.diag(torch.linspace(0, 1, 500).double() ** 2))
