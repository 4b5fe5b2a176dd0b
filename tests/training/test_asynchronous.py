"""Hogwild: what it ends at, and that what is lost is counted."""

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
def test_a_bounded_worker_is_never_further_ahead(two):
    """At most 2 × delay + 1 updates of one other come in between; an update ends after the one it had to wait for."""
    history = descend("bounded", delay=1, processes=two, **SMALL).history
    assert history.staleness.max() <= 3
    ended = history.set_index(["worker", "update"]).seconds
    for worker, update in ended.index[ended.index.get_level_values("update") >= 2]:
        assert ended[worker, update] > ended[1 - worker, update - 2]


def test_an_update_that_is_overwritten_is_missed_in_the_count(tmp_path):
    model = torch.nn.Linear(3, 1, bias=False)
    one, other = (Memory(tmp_path, model, 2, create=first) for first in (True, False))
    read = other.pairs.clone()
    one.add(torch.ones(3))
    other.pairs.copy_(read + 1)  # it had read before the one wrote
    assert one.pairs[:, 1].tolist() == [1, 1, 1], "of two updates"


def test_a_sequence_is_refused_before_a_process_starts(monkeypatch):
    monkeypatch.setattr(asynchronous.parallel, "launch", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(gl.UsageError, match="'walk' is a sequence"):
        descend(data="walk")
