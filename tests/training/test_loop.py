"""The training loop alone: compared with a loop that is written here, and with a custom engine."""

import copy
import html
import inspect
import json
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import companion
from gpulab.data._feed import Loader
from gpulab.training import loop
from gpulab.training._networks import NetworkRun
from gpulab.training.loop import AutogradEngine

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "03_autoencoder.ipynb"


def planned(model, **options):
    spec = NetworkRun.plan(
        model, profile="smoke", frames=100, setting="cpu:precision=float64", **options
    )
    spec.draw_weights()
    return spec


@pytest.mark.parametrize("model", ["autoencoder", "prednet"])
def test_loop_gives_the_losses_of_a_loop_written_out(model):
    spec = planned(model)
    net, losses, state = copy.deepcopy(spec.model).double(), [], None
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for window in spec.remaining_windows(spec.init_training()):
        of_window = []
        for batch in net.batches((torch.from_numpy(window.frames).float() / 255).double()):
            optimizer.zero_grad()
            loss, per_frame, state = net.training_loss(batch, state)
            loss.backward()
            optimizer.step()
            of_window.append(per_frame.mean().item())
        losses.append(sum(of_window) / len(of_window))
    training = spec.init_training()
    loop.train(
        training,
        spec.remaining_windows(training),
        AutogradEngine(training, Loader("window", spec.setting)),
    )
    assert [note.loss for note in training.history] == pytest.approx(losses, rel=1e-12)
    assert [note.window for note in training.history] == [0, 1, 2, 3, 4]
    assert training.step == (100 if model == "autoencoder" else 5)
    assert (training.diverged_at, training.gradient_methods) == (None, {"autograd"})


class Telling:
    """An engine that trains nothing and returns given losses."""

    def __init__(self, *losses):
        self.losses, self.states = iter(losses), []

    def train_window(self, frames, state):
        assert frames.dtype == np.uint8
        self.states.append(state)
        return torch.tensor(next(self.losses), dtype=torch.float64), len(self.states)


def test_loop_engine_is_an_object_with_one_method_that_is_given_the_state():
    spec = planned("prednet")
    training, engine, seen = spec.init_training(), Telling([1.0], [2.0], [3.0], [4.0], [5.0]), []
    loop.train(
        training,
        spec.remaining_windows(training),
        engine,
        lambda: seen.append((training.step, training.inside_window)),
    )
    assert engine.states == [None, 1, 2, 3, 4], "the state goes from window to window"
    assert seen == [(1, False), (2, False), (3, False), (4, False), (5, False)]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_loop_ends_at_a_loss_that_is_not_finite_also_when_seldom_checked(wrong):
    notes, looks = [], []
    for loss_sync_interval in (0.0, 1000.0):
        spec = planned("autoencoder")
        training = spec.init_training()
        training.loss_sync_interval = loss_sync_interval
        engine = Telling([1.0, 3.0], [2.0, 2.0], [4.0, wrong], [1.0, 1.0], [1.0, 1.0])
        loop.train(
            training,
            spec.remaining_windows(training),
            engine,
            partial(looks.append, loss_sync_interval),
        )
        notes.append([(note.window, note.step, note.loss) for note in training.history])
        seconds = [note.seconds for note in training.history]
        assert seconds == sorted(seconds)
        assert (training.diverged_at, training.inside_window) == (6, False)
        assert training.windows_after_divergence == (2 if loss_sync_interval else 0)
        assert (
            spec.summarize(training, math.nan)["windows_after_divergence"]
            == training.windows_after_divergence
        )
    assert str(notes[0]) == str(notes[1]) == str([(0, 2, 2.0), (1, 4, 2.0), (2, 6, wrong)])
    assert looks == [0.0, 0.0, 0.0, 1000.0], (
        "after each window, and once if the losses are copied only at the end"
    )


def test_loop_is_what_notebook_03_shows_in_a_fold():
    parts = (loop.train, AutogradEngine.update, AutogradEngine.gradients)
    code = "\n".join(inspect.getsource(part) for part in parts)
    cells = {cell["id"]: cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]}
    names = {"loop": loop, "companion": companion}
    *statements, expression = cells["03-loop"]["source"]
    exec("".join(statements), names)
    shown = eval(expression, names)
    assert str(shown) == code
    fold = r"<details><summary>[^<]+</summary><pre>(.*)</pre></details>"
    assert html.unescape(re.fullmatch(fold, shown.words(), re.DOTALL)[1]) == code
