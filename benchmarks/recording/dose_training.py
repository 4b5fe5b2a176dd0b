"""The training of a cell of the dose–response experiment: a window length and a speed of motion.

There are twelve cells.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpulab.data._base import Window
from gpulab.data._feed import Loader
from gpulab.settings import Setting
from gpulab.training import loop
from gpulab.training._networks import NetworkRun
from gpulab.training.loop import Training

EVERY = 10  # the bias is measured at every tenth window of a training


def bias_and_loss(
    seed: int, setting: Setting, window: int = 20, speed: float = 1.0, size: str = "quick"
) -> dict[str, float]:
    """Return the final losses with copied frames and with shared memory, and the gradient's bias.

    `bias` is the relative distance between the gradients with shared memory and with copies, at the
    weights and the state of the training on copies. It is the mean over every tenth window of that
    training. `bias_first` is the distance at the first window.
    """
    sharing = "reused" if setting.kind == "cpu" else "imitated"
    spec = NetworkRun.plan(
        "prednet", setting=setting, seed=seed, profile=size, data_options={"speed": speed}
    )

    def with_loader(loader: str) -> NetworkRun:
        return dataclasses.replace(spec, window=window, factors={**spec.factors, "loader": loader})

    biases: list[float] = []

    def look(training: Training) -> None:
        done = len(training.history)
        if done == 0 or (done % EVERY == EVERY // 2 and done < spec.frames // window):
            upcoming = next(spec.data.windows(window, seed, done))
            right, wrong = (
                gradient(spec, training, upcoming, loader) for loader in ("copied", sharing)
            )
            biases.append(float((wrong - right).norm() / right.norm()))

    losses = {
        "copied": final_loss(with_loader("copied"), look),
        "shared": final_loss(with_loader(sharing)),
    }
    first, *later = biases
    return {**losses, "bias": math.fsum(later) / len(later), "bias_first": first}


def gradient(spec: NetworkRun, training: Training, window: Window, loader: str) -> Tensor:
    """Return the gradient of a window at the current weights and state, as a flat vector."""
    (batch,) = Loader(loader, spec.setting).batches(training.model, window.frames)
    training.model.zero_grad()
    state = None if window.restart else training.state
    training.model.training_loss(batch, state)[0].backward()  # type: ignore[arg-type]
    return torch.cat([p.grad.flatten() for p in training.model.parameters() if p.grad is not None])


def final_loss(spec: NetworkRun, look: Callable[[Training], None] = lambda _: None) -> float:
    """Train, calling the observer before the first window and after each; NaN if it diverged."""
    training = spec.init_training()
    look(training)
    loop.train(
        training,
        spec.remaining_windows(training),
        spec.select_engine(training),
        lambda: look(training),
    )
    loss = spec.summarize(training, spec.evaluate(training))["summary"]["final_loss"]
    return math.nan if loss is None else loss
