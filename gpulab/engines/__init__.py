"""Faster ways to the same numbers. Without this folder everything works, only slower, which a test holds.

`fastest` computes the windows of a training: PredNet's gradient by formulas in fewer operations (`prednet_windows`,
`prednet_kernels`), and on a GPU a window's updates as one CUDA graph (`graphs`). `hessian_product` works out the
derivative of a gradient once, for any number of vectors (`hessian_forward`). No other room knows an engine by name,
and this one knows nothing of trainings and stores: what it is given has the few attributes that it uses.
"""

from __future__ import annotations

import copy
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gpulab._torch_internals import Nested, has_computation_observers
from gpulab.engines.graphs import Captured, WindowEngine
from gpulab.engines.hessian_forward import linearize_gradient as hessian_product
from gpulab.engines.prednet_windows import Windows, is_plain
from gpulab.models import MODELS, PredNet

__all__ = ["fastest", "hessian_product"]


class NotingEngine(WindowEngine, Protocol):
    """An engine that notes how gradients were computed; see `gpulab.training.loop.BatchEngine`."""

    used_methods: set[str]


class Fastest:
    """Computes each window the fastest way that gives what `plain` gives, up to rounding, and notes which it was.

    Args:
        plain: The engine that computes windows as they were published, with its `model`, `loader` and `update`; see
            `gpulab.training.loop.BatchEngine`.
        alone: Whether no other training keeps the device busy.
    """

    def __init__(self, plain: NotingEngine, alone: bool = True) -> None:
        self.plain, self.loader = plain, plain.loader
        self.on_gpu = self.loader.device.startswith("cuda")
        # On a CPU a buffer that is reused is shown at work, by autograd; so is what that is compared with.
        followed = ("window", "copied", "imitated") if self.on_gpu else ("window",)
        self.followed = self.loader.name in followed
        self.written_out = WrittenOut(plain, streams=alone)
        self.captured: dict[WindowEngine, Captured] = {}  # by the engine whose updates each captures

    def train_window(self, frames: np.ndarray, state: Nested) -> tuple[Tensor, Nested]:
        """As of `gpulab.training.loop.Engine`."""
        engine = self.choose(state)
        self.plain.used_methods |= engine.gradient_methods
        return engine.train_window(frames, state)

    def choose(self, state: Nested) -> WindowEngine | Captured:
        """The engine for the next window, whose state is this; another may be, once somebody watches."""
        engine = self.uncaptured()
        if not self.on_gpu or not self.may_be_fast():
            return engine
        # A graph is captured for a state of tensors; with None, a sequence begins.
        begins = self.plain.model.sequential and state is None
        ours = engine is self.written_out or (type(self.plain.model) in MODELS.values() and is_plain(self.plain.model))
        return self.captured.setdefault(engine, Captured(engine)) if ours and not begins else engine

    def uncaptured(self) -> WindowEngine:
        """The engine for the next window where each operation is launched by itself."""
        follows = self.may_be_fast() and Windows.follows(self.plain.model)
        return self.written_out if follows else self.plain

    def may_be_fast(self) -> bool:
        """Whether nobody has to see every operation, and no frames have to go through a buffer."""
        unseen = self.followed and not has_computation_observers()
        return unseen and (self.loader.name == "window" or Windows.follows(self.plain.model))


class WrittenOut:
    """Computes windows of a PredNet that `Windows.follows`.

    Args:
        plain: The engine whose updates it does, with its own gradients. The loader is `window` or `copied`; or
            `imitated`, for the gradients of frames that lie in one memory.
        streams: Whether kernels run beside each other on a GPU: not where other networks keep it busy.
    """

    gradient_methods = frozenset({"written out"})

    def __init__(self, plain: WindowEngine, streams: bool = True) -> None:
        self.model, self.loader, self.streams = plain.model, plain.loader, streams
        self.plain = copy.copy(plain)
        self.plain.gradients = self.gradients  # type: ignore[attr-defined]  # no evaluation computes any
        self.update = self.plain.update
        self.changed_tensors = self.plain.changed_tensors
        self.windows: tuple[torch.Size, Windows] | None = None  # for batches of the last shape

    def train_window(self, frames: np.ndarray, state: Nested) -> tuple[Tensor, Nested]:
        """As of `gpulab.training.loop.Engine`. Frames of every loader come in one tensor: the formulas know where."""
        return self.update(self.model.batches(self.loader.window(frames)), state)

    def gradients(self, batch: Tensor, state: Nested) -> tuple[Tensor, Nested]:
        """Put the gradients of a batch's loss into `.grad`: the loss of each frame, and the state after it."""
        if self.windows is None or self.windows[0] != batch.shape:
            assert isinstance(self.model, PredNet), "`Windows` follows no other network"
            self.windows = batch.shape, Windows(self.model, batch, self.loader.name == "imitated", self.streams)
        return self.windows[1](batch, state)


fastest = Fastest
