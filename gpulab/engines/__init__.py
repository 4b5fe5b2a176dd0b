"""Optional, faster engines.

Everything also works without this package, only more slowly
(`tests/engines/test_without_engines.py`).

`fastest` computes the windows of a training run: PredNet's gradient analytically, in fewer
operations (`_prednet_windows`, `_prednet_kernels`), and on a GPU a window's updates as one CUDA
graph (`_graphs`). `hessian_product` derives the derivative of a gradient once, for any number of
vectors (`hessian_forward`). No other package uses an engine by name. This package does not import
`gpulab.training` or `gpulab.store`: the protocols in this module list the attributes that it uses.
"""

from __future__ import annotations

import copy
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gpulab._torch_internals import Nested, has_computation_observers
from gpulab.engines._graphs import CudaGraphEngine, WindowEngine
from gpulab.engines._prednet_windows import WindowGradients, is_unmodified
from gpulab.engines.hessian_forward import linearize_gradient as hessian_product
from gpulab.models import MODELS, PredNet

__all__ = ["fastest", "hessian_product"]


class NotingEngine(WindowEngine, Protocol):
    """An engine that records how it computes gradients; see `gpulab.training.loop.BatchEngine`."""

    used_methods: set[str]


class FastestEngine:
    """Computes each window with the fastest engine that agrees up to rounding, and records it.

    Args:
        autograd_engine: The engine that computes windows as they were published, with its `model`,
            `loader` and `update`; see `gpulab.training.loop.BatchEngine`.
        has_exclusive_device: Whether no other training keeps the device busy.
    """

    def __init__(self, autograd_engine: NotingEngine, has_exclusive_device: bool = True) -> None:
        self.autograd_engine = autograd_engine
        self.loader = autograd_engine.loader
        self.on_gpu = self.loader.device.startswith("cuda")
        # On a CPU, experiments on reused buffers and their control runs are left to autograd,
        # because they demonstrate an effect of autograd itself.
        supported_loaders = ("window", "copied", "imitated") if self.on_gpu else ("window",)
        self.supports_loader = self.loader.name in supported_loaders
        self.analytic_engine = AnalyticEngine(autograd_engine, streams=has_exclusive_device)
        # Each graph engine is stored under the engine whose updates it captures.
        self.graph_engines: dict[WindowEngine, CudaGraphEngine] = {}

    def train_window(self, frames: np.ndarray, state: Nested) -> tuple[Tensor, Nested]:
        """Train on one window: see `gpulab.training.loop.Engine`."""
        engine = self.choose_engine(state)
        self.autograd_engine.used_methods |= engine.gradient_methods
        return engine.train_window(frames, state)

    def choose_engine(self, state: Nested) -> WindowEngine | CudaGraphEngine:
        """Choose the engine for the next window, with or without a CUDA graph.

        The choice may differ between windows, because observers may be activated in the meantime.
        """
        engine = self.choose_uncaptured_engine()
        if not self.on_gpu or not self.may_be_fast():
            return engine
        # A graph needs a state that consists of tensors. The first window of a sequence has None.
        model = self.autograd_engine.model
        begins_sequence = model.sequential and state is None
        # Only gpulab's own networks, without modifications, are known to be capturable.
        is_known = engine is self.analytic_engine or (
            type(model) in MODELS.values() and is_unmodified(model)
        )
        if begins_sequence or not is_known:
            return engine
        return self.graph_engines.setdefault(engine, CudaGraphEngine(engine))

    def choose_uncaptured_engine(self) -> WindowEngine:
        """Choose the engine for the next window if operations are launched one by one."""
        has_analytic_gradient = self.may_be_fast() and WindowGradients.supports(
            self.autograd_engine.model
        )
        return self.analytic_engine if has_analytic_gradient else self.autograd_engine

    def may_be_fast(self) -> bool:
        """Return whether a faster engine may replace autograd for this loader and model.

        No active observer may need to see every operation. A loader that reuses a buffer is
        supported only in combination with the analytic gradient.
        """
        is_unobserved = self.supports_loader and not has_computation_observers()
        return is_unobserved and (
            self.loader.name == "window" or WindowGradients.supports(self.autograd_engine.model)
        )


class AnalyticEngine:
    """Computes windows of a PredNet that `WindowGradients.supports`.

    Args:
        autograd_engine: The engine whose updates are made, with analytic gradients. Its loader is
            `window`, `copied` or `imitated`. With `imitated`, gradients are computed as if all
            frames shared one buffer.
        streams: Whether kernels run concurrently on a GPU, which helps only if no other network
            keeps it busy.
    """

    gradient_methods = frozenset({"written out"})

    def __init__(self, autograd_engine: WindowEngine, streams: bool = True) -> None:
        self.model = autograd_engine.model
        self.loader = autograd_engine.loader
        self.streams = streams
        # The updates are made by a copy of the engine, whose gradients are the analytic ones.
        updating_engine = copy.copy(autograd_engine)
        updating_engine.gradients = self.gradients  # type: ignore[attr-defined]  # an evaluation does not call it
        self.update = updating_engine.update
        self.changed_tensors = updating_engine.changed_tensors
        # The shape of the latest batch, and the gradients with their buffers for this shape.
        self.batch_shape: torch.Size | None = None
        self.window_gradients: WindowGradients | None = None

    def train_window(self, frames: np.ndarray, state: Nested) -> tuple[Tensor, Nested]:
        """Train on one window, given as one tensor: see `gpulab.training.loop.Engine`."""
        return self.update(self.model.batches(self.loader.window(frames)), state)

    def gradients(self, batch: Tensor, state: Nested) -> tuple[Tensor, Nested]:
        """Add the gradients of a batch to `.grad`; return each frame's loss and the new state."""
        if self.window_gradients is None or self.batch_shape != batch.shape:
            # `FastestEngine` uses this engine only for models that `WindowGradients` supports.
            assert isinstance(self.model, PredNet)
            self.window_gradients = WindowGradients(
                self.model,
                batch,
                frames_share_memory=self.loader.name == "imitated",
                streams=self.streams,
            )
            self.batch_shape = batch.shape
        return self.window_gradients(batch, state)


fastest = FastestEngine
