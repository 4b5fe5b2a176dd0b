"""Hogwild: what it ends at, and that what is lost is counted."""

import os
import pathlib

import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.models import Autoencoder
from gpulab.training import asynchronous, parallel
from gpulab.training.asynchronous import Memory, descend, work

SMALL = {"updates": 20, "hidden": (8,)}
several = pytest.mark.slow("two processes")


class Here:
    """This process instead of one that is started."""

    devices = 1

    def do(self, job):
        return [work(job["seed"], gl.Setting.parse(job["setting"]), **job["model_options"])]


@pytest.fixture(scope="module")
def two():
    with parallel.Processes("cpu:threads=1", 2) as processes:
        yield processes


def sequential(updates, workers=1, seed=0, rate=1.0):
    """Plain gradient descent by torch's own optimiser, on the sum of so many batches' gradients."""
    model = Autoencoder((8,))
    model.draw_weights(torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), rate)
    images, losses = gl.load("digits", size=(28, 28)), []
    windows = images.windows(20, seed)
    for _ in range(updates // workers):
        optimizer.zero_grad()
        for _ in range(workers):
            batch = torch.from_numpy(next(windows).frames).float() / 255
            loss, _, _ = model.training_loss(batch, None)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    heldout = next(iter(images.heldout(10**6))).frames
    with torch.no_grad():
        return losses, model.training_loss(torch.from_numpy(heldout).float() / 255, None)[0].item()


def check_descent(descent, workers):
    losses, heldout = sequential(20, workers)
    mine = descent.history.sort_values(["update", "worker"]).loss
    np.testing.assert_allclose(mine, losses, rtol=1e-5)
    assert descent.summary["heldout_loss"] == pytest.approx(heldout, rel=1e-5)
    assert (descent.summary["lost"], descent.summary["staleness"]) == (0, 0)


@pytest.mark.parametrize("options", [{}, {"guard": True}, {"mode": "bounded", "delay": 0}, {"mode": "synchronous"}])
def test_without_a_race_it_is_gradient_descent(options, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    descent = descend(workers=1, processes=Here(), **SMALL, **options)
    check_descent(descent, 1)
    assert descent.summary["overwritten_steps"] == pytest.approx(0.0 if "guard" in options else np.nan, nan_ok=True)


@several
def test_two_that_wait_for_each_other_sum_their_gradients(two):
    check_descent(descend("synchronous", processes=two, **SMALL), 2)


@several
def test_lock_free_workers_learn_and_read_old_weights(two):
    descent = descend("lock-free", guard=True, updates=300, processes=two)
    assert len(descent.history) == 300
    assert descent.history.groupby("worker").size().tolist() == [150, 150]
    assert descent.history.loss.tail(20).mean() < 0.8 * descent.history.loss.head(20).mean()
    assert descent.summary["staleness"] > 0
    assert 0 <= descent.summary["overwritten_steps"] < 1
    assert 0 <= descent.summary["lost_share"] < 0.5


@several
def test_a_bounded_worker_is_never_further_ahead(two):
    """At most 2 × delay + 1 updates of one other come in between; an update ends after the one it had to wait for."""
    history = descend("bounded", delay=1, processes=two, **SMALL).history
    assert history.staleness.max() <= 3
    ended = history.set_index(["worker", "update"]).seconds
    for worker, update in ended.index[ended.index.get_level_values("update") >= 2]:
        assert ended[worker, update] > ended[1 - worker, update - 2]


HAMMER_SIZE = 64


def hammer(seed, setting, memory="", updates=20_000):  # noqa: ARG001
    """Nothing but additions, in one of two processes."""
    shared = Memory(pathlib.Path(memory), torch.nn.Linear(HAMMER_SIZE, 1, bias=False), 2)
    shared.clocks[int(os.environ["RANK"])] = 0
    while int(shared.clocks.min()) < 0:
        pass
    one = torch.ones(HAMMER_SIZE)
    for _ in range(updates):
        shared.add(one)
    return 0.0


@several
def test_a_lost_update_is_lost_with_its_count(two, tmp_path):
    """Weights and counts begin at 0 and are both raised by 1: they stay equal only if both are lost together."""
    model = torch.nn.Linear(HAMMER_SIZE, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    shared = Memory(tmp_path, model, 2, create=True)
    two.do({"net": f"{__file__}:hammer", "setting": "cpu:threads=1", "model_options": {"memory": str(tmp_path)}})
    assert torch.equal(shared.pairs[:, 0], shared.pairs[:, 1])
    assert shared.pairs[:, 1].max() <= 40_000
    assert shared.pairs[:, 1].min() > 20_000 * 0.9


def test_an_update_that_is_overwritten_is_missed_in_the_count(tmp_path):
    model = torch.nn.Linear(3, 1, bias=False)
    one, other = (Memory(tmp_path, model, 2, create=first) for first in (True, False))
    read = other.pairs.clone()
    one.add(torch.ones(3))
    other.pairs.copy_(read + 1)  # it had read before the one wrote
    assert one.pairs[:, 1].tolist() == [1, 1, 1], "of two updates"


def test_the_guard_names_memory_that_another_worker_changed(tmp_path):
    model, image = Autoencoder((8,)), torch.rand(5, 1, 28, 28)
    mine, theirs = (Memory(tmp_path, model, 2, create=first) for first in (True, False))
    for parameter, view in zip(model.parameters(), mine.views(model), strict=True):
        parameter.data = view
    with gl.guard(on="raise"):
        loss, _, _ = model.training_loss(image, None)
        theirs.add(torch.full((len(theirs.pairs),), 1e-3))
        with pytest.raises(gl.OverwrittenError, match="overwritten since it was saved"):
            loss.backward()
    with gl.guard(on="raise"):
        model.training_loss(image, None)[0].backward()  # nobody wrote


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "wild"}, "mode 'wild': expected one of lock-free"),
        ({"mode": "bounded"}, "delay=None with mode 'bounded'"),
        ({"updates": 5}, "updates=5: expected a multiple of 2"),
        ({"workers": 0}, "workers=0"),
        ({"data": "walk"}, "'walk' is a sequence"),
    ],
)
def test_nonsense_is_refused(options, words, monkeypatch):
    monkeypatch.setattr(asynchronous.parallel, "launch", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(gl.UsageError, match=words):
        descend(**options)
