"""What Python launches kernel by kernel, launched at once: a window's updates, or a linear map, as one CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

# Capturing waits for the whole device and changes what all graphs share, so threads do it one at a time.
CAPTURING = threading.Lock()


class Captured:
    """An engine that computes windows as another one does, whose updates it captures for each new shape of windows.

    Of that engine it uses `update` and the window on the device: one that overrides `batches` to change frames, or
    parameters' buffers, cannot be captured.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.gradient_methods = engine.gradient_methods | {"captured"}
        self.graph: tuple[torch.Size, Graph] | None = None  # for windows of the last shape

    def train_window(self, frames: np.ndarray, state: Any) -> tuple[Tensor, Any]:
        """As of `Engine`; losses and state are valid until the next call."""
        window = torch.from_numpy(frames)
        if self.graph is None or self.graph[0] != window.shape:
            arguments = (window.to(self.engine.loader.device), state)
            self.graph = window.shape, Graph(self._update, arguments, self.engine.changed_tensors())
        return self.graph[1](window, state)

    def _update(self, window: Tensor, state: Any) -> tuple[Tensor, Any]:
        """What is captured: from bytes to losses, with the state left where the next window finds it."""
        losses, after = self.engine.update(self.engine.model.batches(self.engine.loader.scaled[window.int()]), state)
        _fill(state, after)
        return losses, state


def _fill(held: Any, given: Any) -> None:
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
        self, function: Callable[..., Any], inputs: Sequence[Any], changed: Iterable[Tensor] = (), pool: Any = None
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
            torch._C._cuda_clearCublasWorkspaces()
            with torch.cuda.graph(self.graph, pool=pool, stream=aside, capture_error_mode="relaxed"):
                self.outputs = function(*self.inputs)
            torch._C._cuda_clearCublasWorkspaces()

    def __call__(self, *inputs: Any) -> Any:
        """What the function returns for inputs of the same shapes, valid until the next call."""
        _fill(self.inputs, inputs)
        self.graph.replay()
        return self.outputs
