"""How frames reach the device: as whole windows, or frame by frame through a host buffer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gpulab.data._base import Data, Window
from gpulab.errors import UsageError
from gpulab.run_options import LOADERS
from gpulab.settings import Setting


class _Batching(Protocol):
    """The interface that a loader needs of a network; networks are in a higher layer."""

    @property
    def sequential(self) -> bool: ...

    def batches(self, window: Tensor) -> Iterable[Tensor]: ...


class Feed:
    """Frames (1, C, H, W), read on demand through a host buffer and converted by `to_device`."""

    def __init__(
        self, frames: np.ndarray, buffer: np.ndarray, to_device: Callable[[np.ndarray], Tensor]
    ) -> None:
        self.frames = frames
        self.buffer = buffer
        self.to_device = to_device

    def __len__(self) -> int:
        return len(self.frames)

    def __iter__(self) -> Iterator[Tensor]:
        for frame in self.frames:
            np.divide(frame[None], 255, out=self.buffer, dtype=np.float32)
            yield self.to_device(self.buffer)


class Loader:
    """Brings windows of bytes (t, C, H, W) to the device of a setting, scaled to [0, 1].

    - `window`: the whole window in one copy from host to device; gpulab's own way.
    - `reused`: the published loop: one NumPy buffer is filled and wrapped, `torch.as_tensor(buffer,
      device=device)`, frame by frame. On a CPU that copies nothing, so every time step of the graph
      holds the same memory.
    - `copied`: the same, from a copy of the buffer.
    - `imitated`: what `reused` does on a CPU, on any device: every frame is written into the same
      memory of the device, behind autograd's back.

    Args:
        name: Which of these.
        setting: Whose device and precision the tensors have.

    Raises:
        UsageError: For another name.

    Examples:
        >>> loader = Loader("reused", Setting.parse("cpu"))
        >>> first, second = loader.feed(np.stack([np.zeros((1, 2, 2)), np.full((1, 2, 2), 255)]))
        >>> first.max().item()
        1.0
    """

    def __init__(self, name: str, setting: Setting) -> None:
        if name not in LOADERS:
            raise UsageError(f"loader {name!r}: expected one of {', '.join(LOADERS)}")
        self.name = name
        self.device = setting.device
        self.dtype = setting.dtype
        self.device_buffer: Tensor | None = None  # of the loader `imitated`
        quotients = torch.arange(256, dtype=torch.float32).div_(255)
        self.quotients = quotients.to(self.device, self.dtype) if setting.kind == "cuda" else None

    def window(self, frames: np.ndarray) -> Tensor:
        """The frames as one new tensor."""
        if self.quotients is None:
            return torch.from_numpy(frames.astype(np.float32)).div_(255).to(self.device, self.dtype)
        # Bytes are less to move. A division on a GPU may round differently from one on the CPU, so
        # the quotients are looked up.
        return self.quotients[torch.from_numpy(frames).to(self.device).int()]

    def feed(self, frames: np.ndarray) -> Feed:
        """The frames one by one, through one buffer."""
        numpy_type = np.float64 if self.dtype == torch.float64 else np.float32
        return Feed(frames, np.empty((1, *frames.shape[1:]), numpy_type), self._to_device)

    def batches(self, model: _Batching, frames: np.ndarray) -> Iterable[Tensor | Feed]:
        """What each update of a model sees of a window."""
        if self.name == "window":
            return model.batches(self.window(frames))
        feed = self.feed(frames)
        return [feed] if model.sequential else feed

    def _to_device(self, buffer: np.ndarray) -> Tensor:
        if self.device_buffer is not None:
            # `.data` has a version counter of its own
            self.device_buffer.data.copy_(torch.from_numpy(buffer))
            return self.device_buffer
        host = buffer if self.name == "reused" else buffer.copy()
        tensor = torch.as_tensor(host, device=self.device, dtype=self.dtype)
        self.device_buffer = tensor if self.name == "imitated" else None
        return tensor


def has_exclusive_device(setting: Setting) -> bool:
    """Whether no other training uses the GPU: trainings that share one have a stream each."""
    device = setting.device
    return setting.kind != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(
        device
    )


def prefetch(windows: Iterator[Window], setting: Setting, data: Data) -> Iterator[Window]:
    """The windows of data; for another device, several threads prepare the next one in advance.

    Trainings that share a device need no such threads: while one makes a window, others keep the
    device busy.

    >>> windows = iter(())
    >>> prefetch(windows, Setting.parse("cpu"), None) is windows
    True
    """
    if setting.kind == "cpu" or not has_exclusive_device(setting):
        return windows
    data.threads = min(4, os.cpu_count() or 1)
    return _prefetch_in_thread(windows)


def _prefetch_in_thread(windows: Iterator[Window]) -> Iterator[Window]:
    """The same windows, each prepared while this thread waits for the device."""
    with ThreadPoolExecutor(1) as pool:
        window = pool.submit(next, windows, None).result()
        while window is not None:
            next_window = pool.submit(next, windows, None)
            yield window
            window = next_window.result()
