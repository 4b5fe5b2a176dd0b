"""Loaders, which copy frames to the device: as whole windows, or one by one through a buffer."""

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
    """The part of a network's interface that a loader uses.

    It is declared here because networks are in a higher layer, which this module cannot import.
    """

    @property
    def sequential(self) -> bool: ...

    def batches(self, window: Tensor) -> Iterable[Tensor]: ...


class Feed:
    """Frames of shape (1, C, H, W), one after the other through the same host buffer.

    Each iteration overwrites the buffer with the next frame, scaled to [0, 1], and passes it to
    `to_device`, whose result is yielded.
    """

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
    """Copies windows of frames, bytes of shape (t, C, H, W), to a device, scaled to [0, 1].

    There are four loaders:

    - `window`: Copy the whole window at once. This is the default.
    - `reused`: Write each frame into the same NumPy buffer, and convert the buffer by
      `torch.as_tensor(buffer, device=device)`, as in the published training loop. On a CPU this
      copies nothing, so all time steps of the graph share one memory, which is overwritten.
    - `copied`: Like `reused`, but each frame has its own copy of the buffer.
    - `imitated`: Do on any device what `reused` does on a CPU: write each frame into the same
      memory of the device without autograd noticing.

    Args:
        name: The name of the loader.
        setting: The setting whose device and precision the tensors have.

    Raises:
        UsageError: If there is no loader of this name.

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
        self.device_buffer: Tensor | None = None  # the shared memory of the loader `imitated`
        # The number in [0, 1] for each value of a byte. It is used on CUDA GPUs: see `window`.
        quotients = torch.arange(256, dtype=torch.float32).div_(255)
        self.quotients = quotients.to(self.device, self.dtype) if setting.kind == "cuda" else None

    def window(self, frames: np.ndarray) -> Tensor:
        """Return the frames as one new tensor on the device."""
        if self.quotients is None:
            return torch.from_numpy(frames.astype(np.float32)).div_(255).to(self.device, self.dtype)
        # Copying bytes is faster than copying floats. The quotients are looked up in a table from
        # the CPU, since a division on the GPU may round differently.
        return self.quotients[torch.from_numpy(frames).to(self.device).int()]

    def feed(self, frames: np.ndarray) -> Feed:
        """Return the frames as a `Feed`, which passes them through one buffer."""
        numpy_type = np.float64 if self.dtype == torch.float64 else np.float32
        return Feed(frames, np.empty((1, *frames.shape[1:]), numpy_type), self._to_device)

    def batches(self, model: _Batching, frames: np.ndarray) -> Iterable[Tensor | Feed]:
        """Return the batches of a window: the input of each update of a model."""
        if self.name == "window":
            return model.batches(self.window(frames))
        feed = self.feed(frames)
        return [feed] if model.sequential else feed

    def _to_device(self, buffer: np.ndarray) -> Tensor:
        """Convert the host buffer to a tensor on the device, as the loader requires."""
        if self.device_buffer is not None:  # `imitated`, from the second frame on
            # Autograd does not notice a write to `.data`, which has its own version counter.
            self.device_buffer.data.copy_(torch.from_numpy(buffer))
            return self.device_buffer
        # Only `reused` may share its memory with the tensor.
        host = buffer if self.name == "reused" else buffer.copy()
        tensor = torch.as_tensor(host, device=self.device, dtype=self.dtype)
        self.device_buffer = tensor if self.name == "imitated" else None
        return tensor


def has_exclusive_device(setting: Setting) -> bool:
    """Return whether no other training shares the GPU; always true on other devices.

    Training runs that share a GPU use their own streams, so the default stream means that this
    training is alone.
    """
    device = setting.device
    return setting.kind != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(
        device
    )


def prefetch(windows: Iterator[Window], setting: Setting, data: Data) -> Iterator[Window]:
    """Return the windows, prepared in advance by threads if that saves time.

    Threads are used for devices other than the CPU, and only if no other training run shares the
    device. Otherwise the other training runs keep the device busy while this one prepares a window.
    With threads, `data.threads` is set to at most four, so that the data may use several, too.

    >>> windows = iter(())
    >>> prefetch(windows, Setting.parse("cpu"), None) is windows
    True
    """
    if setting.kind == "cpu" or not has_exclusive_device(setting):
        return windows
    data.threads = min(4, os.cpu_count() or 1)
    return _prefetch_in_thread(windows)


def _prefetch_in_thread(windows: Iterator[Window]) -> Iterator[Window]:
    """Yield the windows; another thread prepares the next one while the current one is used."""
    with ThreadPoolExecutor(1) as pool:
        window = pool.submit(next, windows, None).result()
        while window is not None:
            next_window = pool.submit(next, windows, None)
            yield window
            window = next_window.result()
