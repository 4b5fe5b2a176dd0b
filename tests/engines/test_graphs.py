"""A window in a CUDA graph compared with one computed kernel by kernel."""

import pytest
import torch

import gpulab as gl
from gpulab.data._feed import Loader
from gpulab.engines import fastest
from gpulab.store._run_identity import weights_digest
from gpulab.training._evaluation import EvaluationEngine, heldout_loss
from gpulab.training._networks import NetworkRun

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no CUDA GPU"
)


def trained(model, **options):
    return gl.train(
        model, profile="smoke", progress=False, **{"setting": "cuda:tf32=off"} | options
    )


WAYS = [("autoencoder", {}, 0), ("whitener", {}, 0), ("prednet", {"setting": "cuda:tf32=on"}, 1e-2)]
WAYS += [
    ("prednet", {"setting": f"cuda:{how}"}, 1e-4)
    for how in ("tf32=off", "cudnn=off", "precision=float64")
]
WAYS += [("prednet", {"loader": loader}, 1e-4) for loader in ("copied", "imitated")]


@needs_cuda
@pytest.mark.parametrize(("model", "options", "rounding"), WAYS)
def test_cuda_graph_training_is_that_of_kernel_by_kernel(model, options, rounding):
    """Results have the same bits if the kernels are the same; PredNet's gradients are analytic."""
    fast, plain = (trained(model, fast=fast, **options) for fast in (True, False))
    assert (fast.record["captured"], plain.record["captured"]) == (True, False)
    assert fast.history.loss.tolist() == pytest.approx(
        plain.history.loss.tolist(), rel=rounding, abs=0
    )
    assert rounding or fast.record["summary"]["weights"] == plain.record["summary"]["weights"]


@needs_cuda
def test_cuda_graph_is_not_captured_under_a_guard_or_with_shared_buffers():
    with gl.guard():
        assert not trained("prednet", frames=60).record["captured"]
    assert not trained("prednet", frames=60, loader="reused").record["captured"]
    assert not trained("autoencoder", frames=60, loader="imitated").record["captured"]


ON_GPU = [
    pytest.param(f"cuda:{how}", marks=needs_cuda)
    for how in ("tf32=off", "tf32=on", "precision=float64")
]


@pytest.mark.parametrize("setting", ["cpu", *ON_GPU])
@pytest.mark.parametrize("model", ["autoencoder", "whitener", "prednet"])
def test_evaluation_engine_gives_heldout_loss_to_the_same_bits(model, setting):
    options = {"frames": 700} if model == "prednet" else {}  # a tenth is held out
    spec = NetworkRun.plan(model, setting=setting, profile="smoke", **options)
    with spec.activate():
        spec.draw_weights()
        training, states = spec.init_training(), [None, None]
        weights = weights_digest(training.model.state_dict())
        plain = EvaluationEngine(training.model, Loader("window", spec.setting))
        engine, losses = fastest(plain), []
        for window in spec.data.heldout(spec.window):
            (found, states[0]), (expected, states[1]) = (
                one.train_window(window.frames, state)
                for one, state in zip((engine, plain), states, strict=True)
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            losses += expected.tolist()
        assert (len(losses) > spec.window, "captured" in plain.used_methods) == (
            True,
            setting != "cpu",
        )
        mean = sum(losses) / len(losses)  # TF32 ruins the whitener's
        assert heldout_loss(training.model, spec.data, spec.window, spec.setting) == pytest.approx(
            mean, rel=1e-12, nan_ok=True
        )
    assert (weights_digest(training.model.state_dict()), training.gradient_methods) == (
        weights,
        set(),
    )
