"""What is trained in a cell of dose and response: see `benchmarks/record_dose.py`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpulab.data.datasets import Window
from gpulab.data.feed import Loader
from gpulab.models.base import Trainable
from gpulab.settings import Setting
from gpulab.training.plan import plan_run
from gpulab.training.step import Trainer

# What of gpulab a run depends on.
GPULAB_PARTS = (
    "settings.py",
    "data",
    "models/base.py",
    "models/prednet.py",
    "training/step.py",
    "training/protocol.py",
)
EVERY = 10  # windows along a training, the bias is looked at


def bias_and_loss(
    seed: int, setting: Setting, window: int = 20, speed: float = 1.0, size: str = "quick"
) -> dict[str, float]:
    """The final loss on copied frames and on shared memory, and how far sharing turns the gradient.

    `bias` is the relative distance of the gradient with shared memory to that with copies, at the weights and the
    state of the training on copies: mean of every tenth window along it. `bias_first` is that of the first window.
    """
    sharing = "reused" if setting.kind == "cpu" else "imitated"
    plan = plan_run("prednet", setting=setting, seed=seed, profile=size, data_options={"speed": speed})

    def trainer(loader: str) -> Trainer:
        plan.begin()  # the same weights each time
        return Trainer(dataclasses.replace(plan, window=window, factors={**plan.factors, "loader": loader}))

    biases: list[float] = []

    def look(model: Trainable, step: int) -> None:  # noqa: ARG001
        done = copied.windows_done
        if done == 0 or (done % EVERY == EVERY // 2 and done < copied.count):
            upcoming = next(copied.data.windows(window, seed, done))
            right, wrong = (gradient(copied, upcoming, loader) for loader in ("copied", sharing))
            biases.append(float((wrong - right).norm() / right.norm()))

    copied = trainer("copied")
    losses = {"copied": final_loss(copied, look), "shared": final_loss(trainer(sharing))}
    first, *later = biases
    return {**losses, "bias": math.fsum(later) / len(later), "bias_first": first}


def gradient(trainer: Trainer, window: Window, loader: str) -> Tensor:
    """Of a window at the weights and the state that there are, flat."""
    (batch,) = Loader(loader, trainer.setting).batches(trainer.model, window.frames)
    trainer.optimizer.zero_grad()
    trainer.model.training_loss(batch, None if window.restart else trainer.state)[0].backward()  # type: ignore[arg-type]
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def final_loss(trainer: Trainer, watch: Callable[[Trainable, int], None] | None = None) -> float:
    """Train to the end; NaN for a training that diverged."""
    trainer.run(None, math.inf, False, watch)
    found = trainer.outcome()["summary"]["final_loss"]
    return math.nan if found is None else found
