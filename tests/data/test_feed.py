import contextlib
import threading
import time

import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.data._feed import Loader, _prefetch_in_thread
from gpulab.errors import DataError
from gpulab.models._chainer import chainer_views
from gpulab.run_options import LOADERS
from gpulab.settings import Setting
from gpulab.training._planning import plan_run

BUFFERED = ("copied", "reused", "imitated")
# With such small networks, several threads would spend their time waiting for each other.
SETTING = "cpu:threads=1"
SMALL = {"profile": "smoke", "frames": 20, "progress": False}
CPU = gl.Setting.parse(SETTING)


def small_net():
    return gl.models.PredNet(channels=(3, 4, 8), size=(12, 16))


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_loader_gives_the_same_numbers_in_the_precision_of_the_setting(precision):
    """In float32, each byte k becomes the number nearest to k / 255."""
    setting = gl.Setting.parse(f"cpu:precision={precision}")
    given = (
        np.random.default_rng(0)
        .permutation(np.arange(5 * 256, dtype=np.uint8))
        .reshape(5, 1, 16, 16)
    )
    window = Loader("window", setting).window(given)
    assert window.dtype == getattr(torch, precision)
    if precision == "float32":
        assert (window.numpy() == (given / 255).astype(np.float32)).all()
    for name in BUFFERED:
        feed = Loader(name, setting).feed(given)
        assert len(feed) == len(given)
        seen = torch.cat([tensor.clone() for tensor in feed])
        assert seen.dtype == window.dtype
        assert torch.equal(seen, window)


@pytest.mark.parametrize("setting", ["cuda", "cuda:precision=float64", "cpu"])
def test_loader_on_a_gpu_gives_the_same_numbers_from_bytes(setting):
    """Without a GPU, the lookup in the table is tested on the CPU."""
    setting = Setting.parse(setting)
    here = (
        setting if torch.cuda.is_available() else Setting.parse(str(setting).replace("cuda", "cpu"))
    )
    looked_up, divided = Loader("window", here), Loader("window", Setting.parse("cpu"))
    looked_up.quotients = divided.window(np.arange(256, dtype=np.uint8)).to(here.device, here.dtype)
    frames = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 4), dtype=np.uint8)
    assert (looked_up.window(frames).cpu() == divided.window(frames).to(here.dtype)).all()
    if here.kind == "cuda":
        assert (Loader("window", here).quotients == looked_up.quotients).all()


@pytest.mark.parametrize(("net", "options"), [("whitener", {}), ("autoencoder", {"batch_size": 2})])
def test_loader_copied_is_refused_where_an_update_sees_several_frames(net, options):
    with pytest.raises(
        gl.UsageError, match=r"loader 'copied' passes one frame at a time, but .* batch_size=1"
    ):
        plan_run(net, profile="smoke", loader="copied", model_options=options)


SAME = [
    ("prednet", "float32", ["window copied", "reused imitated"]),
    # NumPy has no bfloat16, so its buffer is copied in the conversion, and no memory is shared.
    ("prednet", "bfloat16", ["window copied reused", "imitated"]),
    # Each image has its own graph: nothing is written between its forward and backward pass.
    ("autoencoder", "float32", ["window copied reused imitated"]),
]


@pytest.mark.parametrize(("kind", "precision", "same"), SAME)
def test_loader_kinds_that_train_to_the_same_bits_are_those_listed(kind, precision, same):
    net, loaders = small_net() if kind == "prednet" else gl.models.Autoencoder(hidden=(8,)), {}
    setting = f"{SETTING},precision={precision}"
    for loader in LOADERS:
        run = gl.train(net, seed=1, loader=loader, setting=setting, fast=False, **SMALL)
        loaders.setdefault(run.record["summary"]["weights"], []).append(loader)
    assert [" ".join(names) for names in loaders.values()] == same


@pytest.mark.parametrize("loader", LOADERS)
def test_loader_reused_is_found_by_the_guard_and_copied_is_not(loader):
    overwrites = loader in ("reused", "imitated")
    with pytest.raises(gl.OverwrittenError) if overwrites else contextlib.nullcontext(), gl.guard():
        gl.train(small_net(), setting=SETTING, loader=loader, **SMALL)


@pytest.fixture(scope="module")
def chainer(real_data):
    with np.load(real_data("chainer/prednet_small_expected.npz")) as archive:
        expected = {name: archive[name] for name in archive.files}
    return gl.models.PredNet.from_chainer(real_data("chainer/prednet_small.model")), expected


@pytest.mark.parametrize("name", BUFFERED)
def test_loader_gradients_are_those_of_the_authors_loop_in_chainer(chainer, name):
    """Compare with gradients from Chainer itself, with copied frames and with a reused buffer."""
    net, expected = chainer
    loader = Loader(name, CPU)
    scaled = expected["frames"]
    feed = loader.feed(np.rint(scaled * 255).astype(np.uint8))
    feed.frames = scaled * np.float32(255)  # not whole bytes, exact up to one rounding
    net.zero_grad()
    net.training_loss(feed, None)[0].backward()
    mine = chainer_views(net, lambda parameter: parameter.grad)
    prefix = f"grad_{'copied' if name == 'copied' else 'reused'}/predictor/"
    theirs = {
        key.removeprefix(prefix): value for key, value in expected.items() if key.startswith(prefix)
    }
    assert mine.keys() == theirs.keys()
    apart = {
        key: np.linalg.norm(mine[key].numpy() - theirs[key]) / np.linalg.norm(theirs[key])
        for key in mine
    }
    assert {key: value for key, value in apart.items() if not value < 1e-6} == {}


def test_prefetch_in_thread_makes_one_window_ahead_and_raises_its_error():
    made = []

    def windows():
        for number in range(12):
            made.append(number)
            yield number
        raise DataError("clip.mp4: truncated")

    before, coming = threading.active_count(), _prefetch_in_thread(windows())
    for number in range(12):
        assert next(coming) == number
        deadline = time.monotonic() + 20
        while len(made) < min(number + 2, 12) and time.monotonic() < deadline:
            time.sleep(0.01)  # the next one is prepared meanwhile
        assert len(made) == min(number + 2, 12)
    with pytest.raises(DataError, match="truncated"):
        next(coming)
    assert threading.active_count() == before
