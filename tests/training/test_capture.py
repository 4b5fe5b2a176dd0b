"""A window in a CUDA graph against the same window, kernel by kernel."""

import pytest
import torch

import gpulab as gl
from gpulab.training import checkpoints
from gpulab.training.engines import Engines
from gpulab.training.plan import plan_run
from gpulab.training.run import set_up, train_to_the_end

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")


def trained(model, **options):
    return gl.train(model, profile="smoke", progress=False, **{"setting": "cuda:tf32=off"} | options)


@pytest.mark.parametrize("model", ["autoencoder", "whitener"])
def test_the_same_kernels_leave_the_same_bits(model):
    fast, plain = (trained(model, fast=fast) for fast in (True, False))
    assert (fast.record["captured"], plain.record["captured"]) == (True, False)
    assert fast.history.loss.tolist() == plain.history.loss.tolist()
    assert fast.record["summary"]["weights"] == plain.record["summary"]["weights"]


@pytest.mark.parametrize("loader", ["window", "copied", "imitated"])
@pytest.mark.parametrize("setting", ["cuda:tf32=off", "cuda:tf32=on", "cuda:cudnn=off", "cuda:precision=float64"])
def test_prednet_learns_the_same(setting, loader):
    fast, plain = (trained("prednet", setting=setting, loader=loader, fast=fast) for fast in (True, False))
    assert (fast.record["captured"], fast.record["gradients"]) == (True, "written out")
    assert fast.history.loss.tolist() == pytest.approx(
        plain.history.loss.tolist(), rel=1e-2 if "on" in setting else 1e-4
    )


def test_what_has_to_be_seen_is_not_captured():
    assert not trained("prednet", frames=60, guard=True).record["captured"]
    assert not trained("prednet", frames=60, loader="reused").record["captured"]
    assert not trained("autoencoder", frames=60, loader="imitated").record["captured"]


@pytest.mark.parametrize("model", ["autoencoder", "prednet"])
def test_a_training_goes_on_from_a_checkpoint(model):
    def trained(windows, after=None):
        plan = plan_run(model, frames=20 * windows, seed=1, profile="smoke", setting="cuda:tf32=off,deterministic=on")
        plan.draw_weights()
        training = set_up(plan)
        if after:
            checkpoints.restore(training, *checkpoints.checkpoint(after))
        train_to_the_end(plan, training, Engines(plan, training))
        return training

    with gl.setting("cuda:tf32=off,deterministic=on"):
        whole, half = trained(8), trained(4)
        again = trained(8, after=half)
    found, expected = ([note.loss for note in training.history] for training in (again, whole))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_not_finite_ends_the_training():
    run = trained("prednet", learning_rate=1e30)
    assert run.status == "diverged"
    assert run.record["diverged_at"] <= len(run.history) + 1
