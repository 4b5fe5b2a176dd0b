"""The training loop: for each window of frames it computes the loss, its gradient and Adam's step.

An *engine* computes a window; it is an object with a method `train_window`. `AutogradEngine`
computes it as in the published code. It is the reference for all other engines, which are faster
and agree with it up to rounding. Checkpoints, progress and interruptions are handled by
`_supervision`, which calls the loop.
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

# The state of a network: a list of tensors for each layer. None at the beginning of a sequence.
ModelState = list[list[Tensor]] | None


class WindowRecord(NamedTuple):
    """A row of the history.

    Attributes:
        window: The number of the window, from 0.
        step: The number of updates up to its end.
        loss: The mean loss per frame.
        seconds: The seconds from the beginning of the training to the end of the window.
    """

    window: int
    step: int
    loss: float
    seconds: float


@dataclass
class Training:
    """The state of a training run, which a checkpoint saves.

    Attributes:
        model: The network on its device, with its initial weights.
        learning_rate: The learning rate of Adam.
        optimizer: Adam, before the first update.
        state: The network's state for the next window; None at the beginning of a sequence.
        step: The number of updates so far.
        history: A record of each window so far.
        diverged_at: The number of the update whose loss was not finite, or None.
        windows_after_divergence: The number of windows that were computed after this update, before
            the losses were copied to the host. They are not in the history, but the weights have
            been updated with them.
        gradient_methods: The methods by which gradients were computed so far, such as `autograd`.
        inside_window: Whether a window has begun that is not in the history yet.
        loss_sync_interval: The least number of seconds between two copies of the losses to the
            host. On a CPU it is 0: losses are copied after every window, and the training stops at
            the window that diverged. On a GPU it is longer, because a copy waits for the device,
            and the device then waits for the next window.
    """

    model: Trainable
    learning_rate: float
    state: ModelState = None
    step: int = 0
    history: list[WindowRecord] = field(default_factory=list)
    diverged_at: int | None = None
    windows_after_divergence: int = 0
    gradient_methods: set[str] = field(default_factory=set)
    inside_window: bool = False
    loss_sync_interval: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = Adam(trainable_parameters(self.model), self.learning_rate)

    def record_window(self, losses: list[float], seconds: float) -> None:
        """Add a window to the history, and count its updates.

        Args:
            losses: The loss of each update. The loss of the window is their mean, or the first loss
                that is not finite.
            seconds: The seconds that the window took.
        """
        diverged_updates = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        if diverged_updates:
            first = diverged_updates[0]
            self.diverged_at = self.step + first + 1  # updates are counted from 1
            loss = losses[first]
        else:
            loss = math.fsum(losses) / len(losses)
        self.step += len(losses)
        seconds += self.history[-1].seconds if self.history else 0.0
        self.history.append(WindowRecord(len(self.history), self.step, loss, seconds))


class Engine(Protocol):
    """The interface of an object that computes a window."""

    def train_window(self, frames: np.ndarray, state: ModelState) -> tuple[Tensor, ModelState]:
        """Update the weights with the frames of a window, bytes of shape (t, C, H, W).

        Returns:
            The mean loss per frame of each update, which the device may still be computing, and the
            state after the window.
        """


def train(
    training: Training,
    windows: Iterable[Window],
    engine: Engine,
    after_window: Callable[[], None] = lambda: None,
) -> None:
    """Train on one window after another, until the last one or until a loss is not finite.

    Args:
        training: What is trained; it is at the end of the last window whenever `after_window` is
            called.
        windows: The windows that are left to train on.
        engine: Computes the updates of a window.
        after_window: Called after a window, when it and all windows before it are in the history.
    """
    training.model.train()
    pending_losses: list[Tensor] = []  # of windows that are not in the history yet
    last_sync = time.perf_counter()
    for window in itertools.chain(windows, [None]):
        if window is not None:
            training.inside_window = True
            state = None if window.restart else training.state
            losses, training.state = engine.train_window(window.frames, state)
            pending_losses.append(losses.clone())  # the next window may write there
        is_due = time.perf_counter() - last_sync >= training.loss_sync_interval
        if pending_losses and (window is None or is_due):
            if losses.is_cuda:
                # A copy that waits for the device would keep other threads from launching kernels.
                torch.cuda.current_stream(losses.device).synchronize()
            now = time.perf_counter()
            seconds_per_window = (now - last_sync) / len(pending_losses)
            last_sync = now
            while pending_losses and training.diverged_at is None:
                training.record_window(pending_losses.pop(0).tolist(), seconds_per_window)
            training.windows_after_divergence = len(pending_losses)
            training.inside_window = False
            after_window()
        if training.diverged_at is not None:
            return


class BatchEngine(ABC):
    """An engine that splits a window into batches and passes them to `update`.

    Attributes:
        gradient_methods: The methods by which this engine computes gradients.
        model: The network to train.
        loader: The loader, which copies frames to the device.
        used_methods: The methods by which gradients were computed so far; `train_window` adds those
            of this engine.
    """

    gradient_methods: frozenset[str] = frozenset()
    model: Trainable
    loader: Loader
    used_methods: set[str]

    def train_window(self, frames: np.ndarray, state: ModelState) -> tuple[Tensor, ModelState]:
        """Train on one window: see `Engine`.

        For a set of images, each batch has some of the images. For a film, one batch has all frames
        of the window.
        """
        self.used_methods |= self.gradient_methods
        return self.update(self.loader.batches(self.model, frames), state)

    @abstractmethod
    def update(
        self, batches: Iterable[Tensor | Feed], state: ModelState
    ) -> tuple[Tensor, ModelState]:
        """Compute all batches; return the loss of each, and the state after the last one."""

    def changed_tensors(self) -> list[Tensor]:
        """Return the tensors, besides gradients and states, that `update` changes."""
        return []


class AutogradEngine(BatchEngine):
    """Computes a window as in the published code: autograd's gradients, one update per batch."""

    gradient_methods = frozenset({"autograd"})

    def __init__(self, training: Training, loader: Loader) -> None:
        self.model = training.model
        self.loader = loader
        self.optimizer = training.optimizer
        self.used_methods = training.gradient_methods

    def update(
        self, batches: Iterable[Tensor | Feed], state: ModelState
    ) -> tuple[Tensor, ModelState]:
        """Update the weights once for each batch."""
        losses = []
        for batch in batches:
            per_frame, state = self.gradients(batch, state)
            self.optimizer.step()
            if per_frame.device.type != "mps":  # MPS has no float64
                per_frame = per_frame.double()
            losses.append(per_frame.mean())
        return torch.stack(losses), state

    def gradients(self, batch: Tensor | Feed, state: ModelState) -> tuple[Tensor, ModelState]:
        """Put the gradients of a batch's loss into `.grad`.

        Returns:
            The loss of each frame; and the state after the batch, detached from the graph, because
            backpropagation through time goes no further back than a window.
        """
        self.model.zero_grad()
        loss, per_frame, state = self.model.training_loss(batch, state)
        # torch recommends running `backward`, which follows the casts back, outside autocast.
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        return per_frame, state

    def changed_tensors(self) -> list[Tensor]:
        """Return the weights and the moments of Adam."""
        return [*self.model.parameters(), *itertools.chain(*self.optimizer.state.values())]
