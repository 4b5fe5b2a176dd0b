import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.models.autoencoders import COVARIANCES, EPSILON, covariance, whiten

CPU, TF32 = "cpu:threads=1", "cpu:threads=1,emulate=tf32"


def codes(count=60, width=5, mean=0.5, spread=0.1):
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(count, width, generator=generator) @ torch.randn(
        width, width, generator=generator
    )
    return mean + spread * mixed


@pytest.mark.parametrize("how", COVARIANCES)
def test_covariance_of_each_kind_is_that_of_numpy(how):
    x = codes()
    expected = torch.from_numpy(np.cov(x.double().numpy().T, bias=True)).float()
    torch.testing.assert_close(covariance(x, how), expected, rtol=1e-4, atol=1e-6)


def test_whiten_gives_uncorrelated_codes_of_variance_one_or_nan():
    x = codes().double()
    white = whiten(x, covariance(x, "centred"))
    assert white.mean(0).abs().max() < 1e-12
    expected = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(
        white.T @ white / len(white), expected, rtol=0, atol=2 * EPSILON / 0.01**2
    )
    x = codes(width=2)
    white = whiten(x, torch.diag(torch.tensor([1.0, -1e-3])))
    assert white.shape == x.shape
    assert white.isnan().all()
    assert whiten(x, torch.diag(torch.tensor([1.0, 0.0]))).isfinite().all(), (
        "epsilon makes up for a variance of zero"
    )


def test_whitener_batches_have_at_least_the_size_asked_for():
    for count, sizes in ((200, [50] * 4), (120, [60, 60]), (97, [97]), (30, [30])):
        window = torch.arange(count, dtype=torch.float32)
        batches = list(gl.models.Whitener().batches(window))
        assert [len(batch) for batch in batches] == sizes
        assert (torch.cat(batches) == window).all()


def trained(setting, seed, how="one-pass"):
    options = {"profile": "smoke", "model_options": {"covariance": how}, "progress": False}
    return gl.train("whitener", setting=setting, seed=seed, **options)


@pytest.mark.parametrize("seed", range(5))
def test_whitener_learns_in_float32_and_diverges_in_tf32_unless_cured(seed):
    fine, lost = trained(CPU, seed), trained(TF32, seed)
    assert fine.status == "finished"
    images = torch.from_numpy(next(gl.load("digits").windows(500)).frames) / 255
    assert fine.heldout_loss < 0.75 * images.var(0).mean()  # the loss of the mean image
    assert (lost.status, lost.record["diverged_at"] <= 40) == ("diverged", True)
    for cure in ("float32", "centred") if seed < 2 else ():
        assert trained(TF32, seed, cure).final_loss == pytest.approx(fine.final_loss, rel=0.05)


@torch.no_grad()
def test_covariance_centred_has_no_negative_eigenvalue_under_rounding():
    x = 100 + codes(width=20)
    with gl.emulate("tf32"):
        lowest = {
            how: torch.linalg.eigvalsh(covariance(x, how).double()).min().item()
            for how in COVARIANCES
        }
    assert lowest["one-pass"] < -EPSILON
    assert lowest["centred"] > -1e-7 < lowest["float32"] + 1e-2


@torch.no_grad()
def test_float32_products_are_those_without_an_emulation():
    x = codes()
    plain = x.T @ x
    with gl.setting(TF32):
        rounded = x.T @ x
        with gl.float32_products():
            assert (x.T @ x == plain).all()
        assert (x.T @ x == rounded).all()
    assert not (rounded == plain).all()
