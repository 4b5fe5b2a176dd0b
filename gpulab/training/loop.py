"""The training loop: window after window of frames, the loss, its gradient, Adam's step, and the
loss noted.

How a window is computed is an *engine*: an object with a method `train_window`. `AutogradEngine`
computes it as it was published, and is the reference for all others, which give the same up to
rounding, only faster. Checkpoints, progress and interruptions are in `_supervision`, around the
loop.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gpulab.data._base import Window
from gpulab.data._feed import Feed, Loader
from gpulab.models._base import Trainable
from gpulab.steps import trainable_parameters
from gpulab.training._adam import Adam

State = list[list[Tensor]] | None  # of each layer some tensors; None where a sequence begins


class WindowRecord(NamedTuple):
    """The number of a window, the updates so far, its loss per frame, and the seconds so far."""

    window: int
    step: int
    loss: float
    seconds: float


@dataclass
class Training:
    """A training under way: all that must survive an interruption.

    Attributes:
        model: On its device, with the weights that it begins from.
        learning_rate: Adam's.
        optimizer: Adam, which has seen nothing yet.
        state: What the network carries to the next window; None where a sequence begins.
        step: Updates so far.
        history: A note for each window.
        diverged_at: The update whose loss was not finite, if there was one.
        windows_after_divergence: How many windows were computed after the one with that update,
            before a look at the losses noticed it. They are not noted, and the weights are those
            after them.
        gradient_methods: How gradients were computed so far, such as `autograd`.
        inside_window: Whether a window has begun that is not noted yet.
        look_every: Seconds between two looks at the losses. A look waits for the device, and then
            that for a window, so a GPU is not looked at after every window; a CPU is, and computes
            none after a divergence.
    """

    model: Trainable
    learning_rate: float
    state: State = None
    step: int = 0
    history: list[WindowRecord] = field(default_factory=list)
    diverged_at: int | None = None
    windows_after_divergence: int = 0
    gradient_methods: set[str] = field(default_factory=set)
    inside_window: bool = False
    look_every: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = Adam(trainable_parameters(self.model), self.learning_rate)

    def note(self, losses: list[float], seconds: float) -> None:
        """Note the losses of a window's updates, their mean or the first that is not finite; and
        the window's time.
        """
        diverged_updates = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        if diverged_updates:
            self.diverged_at = self.step + diverged_updates[0] + 1
        loss = losses[diverged_updates[0]] if diverged_updates else math.fsum(losses) / len(losses)
        self.step += len(losses)
        seconds += self.history[-1].seconds if self.history else 0.0
        self.history.append(WindowRecord(len(self.history), self.step, loss, seconds))


class Engine(Protocol):
    """A way to compute a window."""

    def train_window(self, frames: np.ndarray, state: State) -> tuple[Tensor, State]:
        """Update the weights by the frames of a window, bytes (t, C, H, W).

        Returns:
            The mean loss per frame of each update, which a device may still compute; and the state
            after the window.
        """


def train(
    training: Training,
    windows: Iterable[Window],
    engine: Engine,
    after_window: Callable[[], None] = lambda: None,
) -> None:
    """Train on one window after another, until the last, or a loss that is not finite.

    Args:
        training: What is trained; it is at the end of the last window whenever `after_window` is
            called.
        windows: What is left to train on.
        engine: Computes the updates of a window.
        after_window: Called after a window, when its losses and those of all windows before it are
            noted.
    """
    training.model.train()
    unseen, looked = list[Tensor](), time.perf_counter()
    for window in itertools.chain(windows, [None]):
        if window is not None:
            training.inside_window = True
            state = None if window.restart else training.state
            losses, training.state = engine.train_window(window.frames, state)
            unseen.append(losses.clone())  # the next window may write there
        if unseen and (window is None or time.perf_counter() - looked >= training.look_every):
            # a copy that waits for it would keep other threads from launching meanwhile
            if losses.is_cuda:
                torch.cuda.current_stream(losses.device).synchronize()
            before, looked, count = looked, time.perf_counter(), len(unseen)
            while unseen and training.diverged_at is None:
                training.note(unseen.pop(0).tolist(), (looked - before) / count)
            training.windows_after_divergence = len(unseen)
            training.inside_window = False
            after_window()
        if training.diverged_at is not None:
            return


class BatchEngine(ABC):
    """An engine that hands the batches of a window to `update`, and notes how it computes
    gradients.

    Attributes:
        model: What is trained.
        loader: Brings frames to the device.
        used_methods: How gradients were computed so far; `train_window` adds to it.
    """

    gradient_methods: frozenset[str] = frozenset()
    model: Trainable
    loader: Loader
    used_methods: set[str]

    def train_window(self, frames: np.ndarray, state: State) -> tuple[Tensor, State]:
        """As of `Engine`. An update sees one image of many, or all frames of a film at once."""
        self.used_methods |= self.gradient_methods
        return self.update(self.loader.batches(self.model, frames), state)

    @abstractmethod
    def update(self, batches: Iterable[Tensor | Feed], state: State) -> tuple[Tensor, State]:
        """Return the losses of the batches, and the state after the last."""

    def changed_tensors(self) -> list[Tensor]:
        """Return the tensors, besides gradients and states, that `update` changes."""
        return []


class AutogradEngine(BatchEngine):
    """Computes a window as it was published: autograd's gradients, an update for each batch."""

    gradient_methods = frozenset({"autograd"})

    def __init__(self, training: Training, loader: Loader) -> None:
        self.model = training.model
        self.loader = loader
        self.optimizer = training.optimizer
        self.used_methods = training.gradient_methods

    def update(self, batches: Iterable[Tensor | Feed], state: State) -> tuple[Tensor, State]:
        """An update for each batch: their losses, and the state after the last."""
        losses = []
        for batch in batches:
            per_frame, state = self.gradients(batch, state)
            self.optimizer.step()
            losses.append(
                per_frame.double().mean() if per_frame.device.type != "mps" else per_frame.mean()
            )
        return torch.stack(losses), state

    def gradients(self, batch: Tensor | Feed, state: State) -> tuple[Tensor, State]:
        """Put the gradients of a batch's loss into `.grad`: the loss of each frame, and the state
        after it.

        The state comes back cut off from the graph: backpropagation through time goes no further
        back than a window.
        """
        self.model.zero_grad()
        loss, per_frame, state = self.model.training_loss(batch, state)
        # as torch advises: what was cast is followed back
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        return per_frame, state

    def changed_tensors(self) -> list[Tensor]:
        """Return the weights and the moments of Adam."""
        return [*self.model.parameters(), *itertools.chain(*self.optimizer.state.values())]
