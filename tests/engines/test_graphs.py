"""The loop: what is made ahead of it, and a window in a CUDA graph against kernel by kernel."""

import itertools
import threading

import pytest
import torch

import gpulab as gl
from gpulab.data.feed import made_meanwhile
from gpulab.errors import DataError


def test_windows_come_in_order_and_the_next_one_and_no_more_is_made_meanwhile():
    made, second = [], threading.Event()

    def windows():
        for number in itertools.count():
            made.append(number)
            if number == 1:
                second.set()
            yield number

    before, coming = threading.active_count(), made_meanwhile(windows())
    assert next(coming) == 0
    assert second.wait(60), "while the first is looked at"
    for number in range(1, 12):
        assert len(made) <= number + 1
        assert next(coming) == number
    coming.close()
    assert threading.active_count() == before
    assert list(made_meanwhile(iter(range(5)))) == [0, 1, 2, 3, 4]


def test_what_goes_wrong_there_is_said_here():
    def windows():
        yield 0
        raise DataError("clip.mp4: truncated")

    coming = made_meanwhile(windows())
    assert next(coming) == 0
    with pytest.raises(DataError, match="truncated"):
        next(coming)


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
    assert not trained("prednet", frames=60, guard=True).record["captured"]
    assert not trained("prednet", frames=60, loader="reused").record["captured"]
    assert not trained("autoencoder", frames=60, loader="imitated").record["captured"]
