"""An engine: PredNet's gradients by the formulas of `gpulab.engines.prednet_windows`, in fewer operations."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpulab.engines.prednet_windows import Windows


class WrittenOut:
    """Computes windows of a PredNet that `Windows.follows`.

    Args:
        plain: The engine whose updates it does, with its own gradients. The loader is `window` or `copied`; or
            `imitated`, for the gradients of frames that lie in one memory.
        streams: Whether kernels run beside each other on a GPU: not where other networks keep it busy.
    """

    ways = frozenset({"written out"})

    def __init__(self, plain: Any, streams: bool = True) -> None:
        self.model, self.optimizer, self.loader, self.streams = plain.model, plain.optimizer, plain.loader, streams
        self.plain = copy.copy(plain)
        self.plain.gradients = self.gradients
        self.windows: tuple[torch.Size, Windows] | None = None  # for batches of the last shape

    def train_window(self, frames: np.ndarray, state: Any) -> tuple[Tensor, Any]:
        """As of `gpulab.training.loop.Engine`. Frames of every loader come in one tensor: the formulas know where."""
        return self.update(self.model.batches(self.loader.window(frames)), state)

    def update(self, batches: Iterable[Tensor], state: Any) -> tuple[Tensor, Any]:
        """An update for each batch: their losses, and the state after the last."""
        return self.plain.update(batches, state)

    def gradients(self, batch: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Put the gradients of a batch's loss into `.grad`: the loss of each frame, and the state after it."""
        if self.windows is None or self.windows[0] != batch.shape:
            self.windows = batch.shape, Windows(self.model, batch, self.loader.name == "imitated", self.streams)
        return self.windows[1](batch, state)
