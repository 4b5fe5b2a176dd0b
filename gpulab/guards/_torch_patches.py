"""Replaces functions of torch that a dispatch mode does not see, while there are listeners.

Three kinds of calls matter to a guard but are not operations of torch's dispatcher: creating a
tensor over memory of another library (`torch.from_numpy`), reading a tensor without torch
(`Tensor.numpy`), and querying whether a GPU is done (`Event.query`). While there is a listener,
these functions are replaced by functions that also notify the listeners.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from gpulab._torch_internals import Nested, uncompiled
from gpulab.guards._async_copies import on_gpu_wait

StreamOrEvent: TypeAlias = torch.cuda.Stream | torch.cuda.Event


class Listener(Protocol):
    """The interface of an object that is notified of these calls."""

    def on_tensor_created(self, tensor: Tensor) -> None:
        """Handle a tensor that was created and may share the memory of another library."""

    def on_tensor_shared(self, tensor: Tensor) -> None:
        """Handle a tensor whose memory was given to another library, which may write to it."""

    def on_tensor_read(self, tensor: Tensor, function: str) -> None:
        """Handle a tensor that a function is about to read without torch."""


_listeners: list[Listener] = []  # one entry for each time that a listener was added, by any thread
_lock = threading.Lock()  # held while functions are replaced and restored
_thread = threading.local()
_originals = contextlib.ExitStack()  # restores the functions of torch


def is_listening(listener: Listener) -> bool:
    """Return whether a listener was added more often than it was removed."""
    return listener in _listeners


def is_copying() -> bool:
    """Return whether this thread is inside `torch.tensor`, which wraps memory only to copy it."""
    return getattr(_thread, "is_copying", False)


def add_listener(listener: Listener) -> None:
    """Notify a listener of all further calls; the first listener replaces torch's functions."""
    with _lock:
        if not _listeners:
            for owner, name, replacement in REPLACEMENTS:
                original = getattr(owner, name)
                setattr(owner, name, _wrap(original, replacement))
                _originals.callback(setattr, owner, name, original)
        _listeners.append(listener)


def remove_listener(listener: Listener) -> None:
    """Undo one call of `add_listener`; the last one restores torch's functions."""
    with _lock:
        _listeners.remove(listener)
        if not _listeners:
            _originals.close()


def _wrap(
    original: Callable[..., Nested], replacement: Callable[..., Nested]
) -> Callable[..., Nested]:
    """Return a function that calls `replacement` with the original function and the arguments."""

    @functools.wraps(original)
    def wrapper(*args: Nested, **kwargs: Nested) -> Nested:
        return replacement(original, *args, **kwargs)

    return uncompiled(wrapper)


def _on_alias_created(original: Callable[..., Tensor], *args: Nested, **kwargs: Nested) -> Tensor:
    """Call a function that creates a tensor, and notify the listeners of it."""
    tensor = original(*args, **kwargs)
    for listener in _listeners:
        listener.on_tensor_created(tensor)
    return tensor


def _on_copy_created(original: Callable[..., Tensor], *args: Nested, **kwargs: Nested) -> Tensor:
    """Call a function that copies foreign memory; `is_copying` is true during the call."""
    _thread.is_copying = True
    try:
        return original(*args, **kwargs)
    finally:
        _thread.is_copying = False


def _on_host_read(
    original: Callable[..., Nested], tensor: Tensor, *args: Nested, **kwargs: Nested
) -> Nested:
    """Notify the listeners of a read, and call the function that reads the tensor."""
    for listener in _listeners:
        listener.on_tensor_read(tensor, original.__name__)
    returned = original(tensor, *args, **kwargs)
    # The returned array shares the memory, so NumPy may write to it later.
    if original.__name__ == "numpy":
        for listener in _listeners:
            listener.on_tensor_shared(tensor)
    return returned


def _on_query(original: Callable[[StreamOrEvent], bool], stream_or_event: StreamOrEvent) -> bool:
    """Call `query`; the answer that a GPU is done counts as a wait for it."""
    finished = original(stream_or_event)
    if finished:
        on_gpu_wait()
    return finished


REPLACEMENTS: list[tuple[types.ModuleType | type, str, Callable[..., Nested]]] = [
    *(
        (torch, name, _on_alias_created)
        for name in ("from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack")
    ),
    (torch, "tensor", _on_copy_created),
    (torch.utils.dlpack, "from_dlpack", _on_alias_created),
    *((Tensor, name, _on_host_read) for name in ("numpy", "tolist")),
    *((kind, "query", _on_query) for kind in (torch.cuda.Event, torch.cuda.Stream)),
]
