"""A window in a CUDA graph against kernel by kernel."""

import pytest
import torch

import gpulab as gl

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")


def trained(model, **options):
    return gl.train(model, profile="smoke", progress=False, **{"setting": "cuda:tf32=off"} | options)


@needs_cuda
@pytest.mark.parametrize("model", ["autoencoder", "whitener"])
def test_the_same_kernels_leave_the_same_bits(model):
    fast, plain = (trained(model, fast=fast) for fast in (True, False))
    assert (fast.record["captured"], plain.record["captured"]) == (True, False)
    assert fast.history.loss.tolist() == plain.history.loss.tolist()
    assert fast.record["summary"]["weights"] == plain.record["summary"]["weights"]


@needs_cuda
@pytest.mark.parametrize("loader", ["window", "copied", "imitated"])
@pytest.mark.parametrize("setting", ["cuda:tf32=off", "cuda:tf32=on", "cuda:cudnn=off", "cuda:precision=float64"])
def test_prednet_learns_the_same(setting, loader):
    fast, plain = (trained("prednet", setting=setting, loader=loader, fast=fast) for fast in (True, False))
    assert (fast.record["captured"], fast.record["gradients"]) == (True, "written out")
    assert fast.history.loss.tolist() == pytest.approx(
        plain.history.loss.tolist(), rel=1e-2 if "on" in setting else 1e-4
    )


@needs_cuda
def test_what_has_to_be_seen_is_not_captured():
    with gl.guard():
        assert not trained("prednet", frames=60).record["captured"]
    assert not trained("prednet", frames=60, loader="reused").record["captured"]
    assert not trained("autoencoder", frames=60, loader="imitated").record["captured"]
