"""CUDA graphs that launch many kernels at once, for a window's updates or for a linear map."""

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

# The type that `torch.cuda.graph_pool_handle` returns. Its class is private; torch 2.6 has none.
GraphPool: TypeAlias = Any

# Capturing waits for the whole device and changes state that all graphs share, so only one thread
# captures at a time.
CAPTURE_LOCK = threading.Lock()


class WindowEngine(Protocol):
    """The interface of an engine whose windows the fast engines compute.

    Attributes:
        gradient_methods: How it computes gradients, such as `autograd`.
        model: The model that is trained.
        loader: Brings frames to the device.
    """

    gradient_methods: frozenset[str]
    model: Trainable
    loader: Loader

    def train_window(self, frames: np.ndarray, state: Nested) -> tuple[Tensor, Nested]:
        """Update the weights using the frames of a window; return losses and the state after it."""

    def update(self, batches: Iterable[Tensor], state: Nested) -> tuple[Tensor, Nested]:
        """Return the losses of the batches, and the state after the last."""

    def changed_tensors(self) -> list[Tensor]:
        """Return the tensors, other than gradients and states, that `update` changes."""


class CudaGraphEngine:
    """Captures another engine's updates as a CUDA graph, and replays it for each window.

    It keeps the graph of the latest window shape. It uses the other engine's `update` and the
    window on the device. An engine that overrides `batches` to change frames, or changes the
    buffers of parameters, cannot be captured.
    """

    def __init__(self, engine: WindowEngine) -> None:
        self.engine = engine
        self.gradient_methods = engine.gradient_methods | {"captured"}
        self.graph: Graph | None = None
        self.graph_shape: torch.Size | None = None  # the shape of the windows of this graph

    def train_window(self, frames: np.ndarray, state: Nested) -> tuple[Tensor, Nested]:
        """Train on one window and return losses and state, which are valid until the next call."""
        window = torch.from_numpy(frames)
        if self.graph is None or self.graph_shape != window.shape:
            inputs = (window.to(self.engine.loader.device), state)
            self.graph = Graph(self._update, inputs, self.engine.changed_tensors())
            self.graph_shape = window.shape
        return self.graph(window, state)

    def _update(self, window: Tensor, state: Nested) -> tuple[Tensor, Nested]:
        """Compute the losses from a window of bytes; this is the computation that is captured.

        The new state is written into `state`, where the next replay reads it.
        """
        quotients = self.engine.loader.quotients  # the number in [0, 1] for each value of a byte
        assert quotients is not None, "graphs are captured on a GPU, where quotients are looked up"
        frames = quotients[window.int()]
        losses, new_state = self.engine.update(self.engine.model.batches(frames), state)
        _copy_into(state, new_state)
        return losses, state


def _copy_into(targets: Nested, sources: Nested) -> None:
    """Copy nested tensors into the tensors that a graph holds.

    Both have the same structure. A tensor is not copied if the graph's own tensor is passed back to
    it, such as the state that the last call returned.
    """
    for target, source in zip(tree_leaves(targets), tree_leaves(sources), strict=True):
        if isinstance(target, Tensor) and target is not source:
            # The device reads pinned memory on its own, so the host does not wait for the copy.
            target.copy_(source if source.is_cuda else source.pin_memory(), non_blocking=True)


class Graph:
    """Captures `function(*inputs)` for inputs of one shape; a replay returns the same bits.

    Args:
        function: The function to capture. It may not wait for the device. The tensors that it reads
            and writes must live as long as the graph, which stores only their addresses.
        inputs: Tensors on a CUDA device, also in lists and tuples, and None.
        changed_tensors: Every tensor that `function` changes. The function is called once to warm
            up, and these tensors are restored afterwards.
        pool: The memory pool that the graph works in. Graphs that are replayed one after the other
            can share a pool.

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
        # The default stream cannot be captured, so a new stream is used instead.
        side_stream = (
            current_stream if current_stream != torch.cuda.default_stream() else torch.cuda.Stream()
        )
        side_stream.wait_stream(current_stream)
        with torch.cuda.stream(side_stream):
            function(*self.inputs)  # the call that warms up
        current_stream.wait_stream(side_stream)
        with torch.no_grad():
            while saved:  # each copy is released at once, because capturing needs its memory
                tensor, original = saved.pop()
                tensor.copy_(original)
                del original
        self.graph = torch.cuda.CUDAGraph()
        with CAPTURE_LOCK:
            # cuBLAS keeps one workspace per stream. Without clearing, graphs that are captured on
            # the same stream would share a workspace.
            clear_cublas_workspaces()
            # With `relaxed`, memory may be allocated during the capture, also by other threads.
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
