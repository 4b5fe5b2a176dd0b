"""CUDA graphs, which launch many kernels at once: a window's updates, or a linear map."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpulab._torch_internals import Nested, clear_cublas_workspaces, tree_leaves, tree_map_only
from gpulab.data._feed import Loader
from gpulab.models._base import Trainable

# What `torch.cuda.graph_pool_handle` returns. Its class is private, and torch 2.6 has none.
GraphPool: TypeAlias = Any

# Capturing waits for the whole device and changes what all graphs share, so threads do it one at a
# time.
CAPTURE_LOCK = threading.Lock()


class WindowEngine(Protocol):
    """The interface of an engine whose windows the fast engines compute.

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


class CudaGraphEngine:
    """An engine that captures another engine's updates as CUDA graphs, one for each window shape.

    Of that engine it uses `update` and the window on the device: one that overrides `batches` to
    change frames, or parameters' buffers, cannot be captured.
    """

    def __init__(self, engine: WindowEngine) -> None:
        self.engine = engine
        self.gradient_methods = engine.gradient_methods | {"captured"}
        self.graph: tuple[torch.Size, Graph] | None = None  # for windows of the last shape

    def train_window(self, frames: np.ndarray, state: Nested) -> tuple[Tensor, Nested]:
        """Train on one window; losses and state are valid until the next call."""
        window = torch.from_numpy(frames)
        if self.graph is None or self.graph[0] != window.shape:
            arguments = (window.to(self.engine.loader.device), state)
            self.graph = window.shape, Graph(self._update, arguments, self.engine.changed_tensors())
        return self.graph[1](window, state)

    def _update(self, window: Tensor, state: Nested) -> tuple[Tensor, Nested]:
        """The captured computation: from bytes to losses, leaving the state for the next window."""
        scaled = self.engine.loader.quotients
        assert scaled is not None, "graphs are captured on a GPU, where quotients are looked up"
        losses, new_state = self.engine.update(
            self.engine.model.batches(scaled[window.int()]), state
        )
        _copy_into(state, new_state)
        return losses, state


def _copy_into(targets: Nested, sources: Nested) -> None:
    """Copy nested tensors into those that a graph holds."""
    for target, source in zip(tree_leaves(targets), tree_leaves(sources), strict=True):
        if isinstance(target, Tensor) and target is not source:
            # From memory that the device reads by itself, nobody waits for the copy.
            target.copy_(source if source.is_cuda else source.pin_memory(), non_blocking=True)


class Graph:
    """`function(*inputs)`, captured for inputs of one shape: it does the same, to the same bits.

    Args:
        function: It may not wait for the device. What it reads and writes has to stay as long as
            this: a graph knows addresses, and holds on to nothing.
        inputs: Tensors on a CUDA device, also in lists and tuples; and None.
        changed_tensors: Every tensor that `function` changes. It is called once to warm up, and
            these are restored.
        pool: Of the memory that it works in, which graphs can share that are replayed one after the
            other.

    References:
        Gray 2019, *Getting started with CUDA graphs*; Nguyen et al. 2021, *Accelerating PyTorch
            with CUDA graphs*.
    """

    def __init__(
        self,
        function: Callable[..., Nested],
        inputs: Sequence[Nested],
        changed_tensors: Iterable[Tensor] = (),
        pool: GraphPool | None = None,
    ) -> None:
        self.inputs = tree_map_only(Tensor, torch.clone, tuple(inputs))
        saved = [(tensor, tensor.detach().clone()) for tensor in changed_tensors]
        current_stream = torch.cuda.current_stream()
        # The current stream of a thread, or a new one in place of the default stream, which cannot
        # be captured.
        side_stream = (
            current_stream if current_stream != torch.cuda.default_stream() else torch.cuda.Stream()
        )
        side_stream.wait_stream(current_stream)
        with torch.cuda.stream(side_stream):
            function(*self.inputs)
        current_stream.wait_stream(side_stream)
        with torch.no_grad():
            while saved:  # each copy is released at once, because capturing needs its memory
                Tensor.copy_(*saved.pop())
        self.graph = torch.cuda.CUDAGraph()
        with CAPTURE_LOCK:
            # cuBLAS has a workspace a stream: another graph captured on this one would use it, too.
            clear_cublas_workspaces()
            with torch.cuda.graph(
                self.graph, pool=pool, stream=side_stream, capture_error_mode="relaxed"
            ):
                self.outputs = function(*self.inputs)
            clear_cublas_workspaces()

    def __call__(self, *inputs: Nested) -> Nested:
        """Return the results for inputs of the same shapes, valid until the next call."""
        _copy_into(self.inputs, inputs)
        self.graph.replay()
        return self.outputs
