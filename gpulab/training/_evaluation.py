"""The loss of a trained network on the held-out part of its data."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from gpulab.data._base import Data
from gpulab.data._feed import Feed, Loader, prefetch
from gpulab.models._base import Trainable
from gpulab.settings import Setting
from gpulab.training._engine_selection import select_engine
from gpulab.training.loop import BatchEngine, ModelState


class EvaluationEngine(BatchEngine):
    """An engine that computes the losses of a window's frames without updating the weights.

    It has no optimiser and computes no gradients, so a faster engine, which differs only in how
    gradients are computed, gives the same losses.
    """

    def __init__(self, model: Trainable, loader: Loader) -> None:
        self.model = model
        self.loader = loader
        self.used_methods = set()

    @torch.no_grad()
    def update(
        self, batches: Iterable[Tensor | Feed], state: ModelState
    ) -> tuple[Tensor, ModelState]:
        """Return the loss of each frame of all batches, and the state after the last batch."""
        losses = []
        for batch in batches:
            _, per_frame, state = self.model.training_loss(batch, state)
            losses.append(per_frame)
        return torch.cat(losses), state


def heldout_loss(
    model: Trainable, data: Data, window: int, setting: Setting, fast: bool = True
) -> float:
    """Return the mean squared error per held-out frame, and leave the model in eval mode.

    The frames are predicted in windows of `window` frames.

    If `fast` is true, a faster engine may compute the loss; results agree up to rounding.
    """
    model.eval()
    engine = select_engine(EvaluationEngine(model, Loader("window", setting)), setting, fast)
    state: ModelState = None
    losses = []
    for frames, restart in prefetch(data.heldout(window), setting, data):
        per_frame, state = engine.train_window(frames, None if restart else state)
        # A CUDA graph would overwrite the losses of this window with those of the next one.
        losses.append(per_frame.clone())
    # This synchronises with the device once instead of once per window.
    values = torch.cat(losses).tolist()
    return math.fsum(values) / len(values)
