"""An engine: PredNet's gradients by the formulas of `gpulab.models.prednet_windows`, in fewer operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpulab.data.feed import Feed, Loader
from gpulab.models.prednet_windows import Windows
from gpulab.training.loop import Plain, Training


class WrittenOut(Plain):
    """Computes windows of a PredNet that `Windows.follows`.

    Args:
        training: What is trained.
        loader: `window` or `copied`; or `imitated`, for the gradients of frames that lie in one memory.
        streams: Whether kernels run beside each other on a GPU: not where other networks keep it busy.
    """

    ways = frozenset({"written out"})

    def __init__(self, training: Training, loader: Loader, streams: bool = True) -> None:
        super().__init__(training, loader)
        self.streams = streams
        self.windows: tuple[torch.Size, Windows] | None = None  # for batches of the last shape

    def batches(self, frames: np.ndarray) -> Iterable[Tensor]:
        """Frames of every loader in one tensor: the formulas know which memory they would lie in."""
        return self.model.batches(self.loader.window(frames))

    def gradients(self, batch: Tensor | Feed, state: Any) -> tuple[Tensor, Any]:
        """As of `Plain`."""
        model: Any = self.model
        assert isinstance(batch, Tensor)
        if self.windows is None or self.windows[0] != batch.shape:
            self.windows = batch.shape, Windows(model, batch, self.loader.name == "imitated", self.streams)
        return self.windows[1](batch, state)
