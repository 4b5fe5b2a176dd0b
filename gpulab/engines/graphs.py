"""What Python launches kernel by kernel, launched at once: a window's updates, or a linear map, as one CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpulab._torch_internals import Nested, clear_cublas_workspaces, tree_leaves, tree_map_only
from gpulab.data.feed import Loader
from gpulab.models.base import Trainable

# What `torch.cuda.graph_pool_handle` returns. Its class is private, and torch 2.6 has none.
GraphPool: TypeAlias = Any

# Capturing waits for the whole device and changes what all graphs share, so threads do it one at a time.
CAPTURING = threading.Lock()


class WindowEngine(Protocol):
    """What the fast engines use of an engine whose windows they compute.

    Attributes:
        gradient_methods: How it computes gradients, such as `autograd`.
        model: What is trained.
        loader: Brings frames to the device.
    """

    gradient_methods: frozenset[str]
    model: Trainable
    loader: Loader

    def train_window(self, frames: np.ndarray, state: Nested) -> tuple[Tensor, Nested]:
        """Update the weights by the frames of a window; return losses and the state after it."""

    def update(self, batches: Iterable[Tensor], state: Nested) -> tuple[Tensor, Nested]:
        """Return the losses of the batches, and the state after the last."""

    def changed_tensors(self) -> list[Tensor]:
        """Return the tensors, besides gradients and states, that `update` changes."""


class Captured:
    """An engine that computes windows as another one does, whose updates it captures for each new shape of windows.

    Of that engine it uses `update` and the window on the device: one that overrides `batches` to change frames, or
    parameters' buffers, cannot be captured.
    """

    def __init__(self, engine: WindowEngine) -> None:
        self.engine = engine
        self.gradient_methods = engine.gradient_methods | {"captured"}
        self.graph: tuple[torch.Size, Graph] | None = None  # for windows of the last shape

    def train_window(self, frames: np.ndarray, state: Nested) -> tuple[Tensor, Nested]:
        """As of `Engine`; losses and state are valid until the next call."""
        window = torch.from_numpy(frames)
        if self.graph is None or self.graph[0] != window.shape:
            arguments = (window.to(self.engine.loader.device), state)
            self.graph = window.shape, Graph(self._update, arguments, self.engine.changed_tensors())
        return self.graph[1](window, state)

    def _update(self, window: Tensor, state: Nested) -> tuple[Tensor, Nested]:
        """What is captured: from bytes to losses, with the state left where the next window finds it."""
        scaled = self.engine.loader.quotients
        assert scaled is not None, "graphs are captured on a GPU, where quotients are looked up"
        losses, after = self.engine.update(self.engine.model.batches(scaled[window.int()]), state)
        _fill(state, after)
        return losses, state


def _fill(held: Nested, given: Nested) -> None:
    """Copy nested tensors into those that a graph holds."""
    for tensor, new in zip(tree_leaves(held), tree_leaves(given), strict=True):
        if isinstance(tensor, Tensor) and tensor is not new:
            # From memory that the device reads by itself, nobody waits for the copy.
            tensor.copy_(new if new.is_cuda else new.pin_memory(), non_blocking=True)


class Graph:
    """`function(*inputs)`, captured for inputs of one shape: it does the same, to the same bits.

    Args:
        function: It may not wait for the device. What it reads and writes has to stay as long as this: a graph knows
            addresses, and holds on to nothing.
        inputs: Tensors on a CUDA device, also in lists and tuples; and None.
        changed: Every tensor that `function` changes: capturing calls it once to warm up, and puts these back.
        pool: Of the memory that it works in, which graphs can share that are replayed one after the other.

    References:
        Gray 2019, *Getting started with CUDA graphs*; Nguyen et al. 2021, *Accelerating PyTorch with CUDA graphs*.
    """

    def __init__(
        self,
        function: Callable[..., Nested],
        inputs: Sequence[Nested],
        changed: Iterable[Tensor] = (),
        pool: GraphPool | None = None,
    ) -> None:
        self.inputs = tree_map_only(Tensor, torch.clone, tuple(inputs))
        kept = [(tensor, tensor.detach().clone()) for tensor in changed]
        current = torch.cuda.current_stream()
        # A thread's own stream, which no other thread launches on; or one beside the default, which is never captured.
        aside = current if current != torch.cuda.default_stream() else torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            function(*self.inputs)
        current.wait_stream(aside)
        with torch.no_grad():
            while kept:  # whose memory capturing needs
                Tensor.copy_(*kept.pop())
        self.graph = torch.cuda.CUDAGraph()
        with CAPTURING:
            # cuBLAS has a workspace a stream: another graph captured on this one would use it, too.
            clear_cublas_workspaces()
            with torch.cuda.graph(self.graph, pool=pool, stream=aside, capture_error_mode="relaxed"):
                self.outputs = function(*self.inputs)
            clear_cublas_workspaces()

    def __call__(self, *inputs: Nested) -> Nested:
        """What the function returns for inputs of the same shapes, valid until the next call."""
        _fill(self.inputs, inputs)
        self.graph.replay()
        return self.outputs
