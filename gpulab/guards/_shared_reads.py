"""Detects reads of tensors whose memory another library has overwritten.

`torch.from_numpy`, `as_tensor`, `frombuffer` and DLPack copy nothing: the tensor uses the memory of
the array. If a program keeps refilling one array and makes a tensor from it each time, all these
tensors have the latest content. This happens without gradients too, for example in a replay
buffer or a list of observations that is stacked later. Torch's version counter does not change,
because torch did not write.

The guard tracks each tensor over such memory from its creation. A read is *stale* if the content
differs from what it was at the creation or the last read, and another tensor has since been created
over the same memory. Creating it shows that new content was intended, so the earlier tensor was
meant to keep its values. A single tensor that is filled through NumPy and read repeatedly is an
intended view, and is not reported.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from gpulab._torch_internals import (
    Nested,
    OpOverload,
    Span,
    StorageWeakRef,
    UncompiledDispatchMode,
    is_mutable,
    is_plain,
    span_of,
    storage_identity,
    version_of,
    written_tensors,
)
from gpulab.guards._async_copies import AsyncCopyTracker
from gpulab.guards._call_sites import Line, user_line
from gpulab.guards._findings import Overwritten
from gpulab.guards._fingerprints import BLOCK_BYTES, block_digests, host_memory
from gpulab.guards._torch_patches import add_listener, is_copying, is_listening, remove_listener
from gpulab.guards._write_lines import WriteLines, next_time

# `from_numpy` and `as_tensor` call this operation, whatever name they were imported under.
LIFT_FRESH = torch.ops.aten.lift_fresh.default
OVERWRITING_OPERATIONS = {"copy_", "fill_", "zero_"}  # their first argument is not read
PRUNE_INTERVAL = 1000  # tracked addresses between two removals of freed buffers

_tracked_lock = threading.Lock()  # held while `SharedReads.tracked` changes


@dataclass
class _TrackedBuffer:
    """A tensor over foreign memory, and its last valid content.

    Attributes:
        storage: The tensor's storage.
        memory: The memory of the storage.
        version: Torch's version counter when the content was last valid.
        line: The line that created the tensor.
        digests: The digest of each block of the memory, by the address of the block.
        content: The content, if the memory has at most `BLOCK_BYTES` bytes; otherwise empty.
        time: The time at which the content was last remembered.
    """

    storage: StorageWeakRef
    memory: Span
    version: int
    line: Line
    digests: dict[int, int] = field(default_factory=dict)
    content: bytes = b""
    time: int = field(default_factory=next_time)

    def remember(self, span: Span) -> None:
        """Remember the current content of the blocks that a span overlaps as valid."""
        self.time = next_time()
        self.digests |= block_digests(self.memory, span)
        if self.memory[1] - self.memory[0] <= BLOCK_BYTES:
            self.content = bytes(host_memory(*self.memory))

    def differs(self, tensor: Tensor) -> bool:
        """Return whether a tensor's content differs from the remembered content.

        If the memory is larger than `BLOCK_BYTES` bytes, only digests of its blocks are kept. A
        change of other elements in the same block then also counts as a difference.
        """
        # The current digests are a subset of the remembered ones if no block has changed.
        if block_digests(self.memory, span_of(tensor)).items() <= self.digests.items():
            return False
        current_memory = host_memory(*self.memory)
        return not self.content or self.elements(tensor, current_memory) != self.elements(
            tensor, self.content
        )

    def elements(self, tensor: Tensor, source: bytes | ctypes.Array[ctypes.c_char]) -> bytes:
        """Return a tensor's elements as bytes, read from the memory itself or from a saved copy."""
        width = tensor.element_size()
        strides = tuple(width * stride for stride in tensor.stride())
        offset = tensor.data_ptr() - self.memory[0]
        return np.ndarray(
            tuple(tensor.shape), f"V{width}", memoryview(source), offset, strides
        ).tobytes()


class SharedReads(UncompiledDispatchMode):
    """Tracks tensors over foreign memory inside a block, and checks the reads of every operation.

    `report` is called with every stale read, and with every use of memory while its copy from or to
    a GPU is in progress. The time of a check is proportional to the size of the tensor that is
    read, not to that of its memory. The block may be entered again, and in several threads.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        super().__init__()
        self.report = report
        self.async_copies = AsyncCopyTracker(report)
        self.checked = 0
        self.unchecked = 0
        self.write_lines = WriteLines()
        # For each address, the buffers that still exist, and the latest one in any case.
        self.tracked: dict[int, list[_TrackedBuffer]] = {}

    def __enter__(self) -> Self:
        add_listener(self)
        self.write_lines.start()
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the block in this thread; the last thread to leave ends the tracking."""
        super().__exit__(kind, error, trace)
        remove_listener(self)
        self.write_lines.stop()
        # Other threads may still be inside.
        if not is_listening(self):
            self.async_copies.stop()
        # Findings must not hide another error.
        if kind is None:
            self.async_copies.flush()

    def __torch_dispatch__(
        self,
        operation: OpOverload,
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: dict[str, Nested] | None = None,
    ) -> Nested:
        """Check what an operation reads, and run it."""
        kwargs = kwargs or {}
        if operation is LIFT_FRESH:
            self.track(args[0])
        if not operation.is_view:  # An operation that makes a view reads no elements.
            name = operation.overloadpacket.__name__
            inputs = args[1:] if name in OVERWRITING_OPERATIONS else args
            lists = (
                value if isinstance(value, list | tuple) else (value,)
                for value in (*inputs, *kwargs.values())
            )
            values = itertools.chain.from_iterable(lists)
            tensors = [value for value in values if isinstance(value, Tensor) and value.is_cpu]
            self.check(tensors, name)
        result = operation(*args, **kwargs)
        if is_mutable(operation):
            self.write_lines.record_torch_writes(written_tensors(operation, args, kwargs))
        self.async_copies.record_copy(operation, args, kwargs, result)
        return result

    def track(self, tensor: Tensor) -> _TrackedBuffer | None:
        """Track the memory of a tensor from now on, and return its buffer.

        Returns None if torch itself owns the memory, which is then not tracked.
        """
        if not tensor.is_cpu or not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        # torch can resize a storage only if it owns the memory.
        if storage.resizable() or not storage.nbytes():
            return None
        address = storage.data_ptr()
        for buffer in self.tracked.get(address, ()):
            if buffer.storage.cdata == storage_identity(storage):
                return buffer
        memory = address, address + storage.nbytes()
        buffer = _TrackedBuffer(StorageWeakRef(storage), memory, version_of(tensor), user_line())
        buffer.remember(memory)
        self.write_lines.watch(buffer.storage, memory, buffer.digests)
        # Inside `torch.tensor` the tensor over foreign memory exists only to be copied.
        if not is_copying():
            self._add_buffer(buffer)
        return buffer

    def _add_buffer(self, buffer: _TrackedBuffer) -> None:
        """Add the latest buffer of an address, and drop buffers that no longer exist."""
        address, _ = buffer.memory
        with _tracked_lock:
            # Addresses at which tensors no longer exist are removed from time to time.
            if len(self.tracked) % PRUNE_INTERVAL == 0:
                self.tracked = {
                    key: buffers
                    for key, buffers in self.tracked.items()
                    if any(map(_is_alive, buffers))
                }
            self.tracked[address] = [*filter(_is_alive, self.tracked.get(address, ())), buffer]

    def on_tensor_created(self, tensor: Tensor) -> None:
        """Track a tensor that may share the memory of another library."""
        self.track(tensor)

    def on_tensor_shared(self, tensor: Tensor) -> None:
        """Track a tensor whose memory was given to another library."""
        self.track(tensor)

    def on_tensor_read(self, tensor: Tensor, function: str) -> None:
        """Check a tensor that a function is about to read without torch."""
        self.check([tensor], function)

    def check(self, tensors: list[Tensor], name: str) -> None:
        """Report the tensors with stale content that an operation is about to read.

        `name` is the name of the operation. The cause is `together` if the operation reads several
        tensors over the same memory, and `stale` otherwise.
        """
        self.unchecked += sum(not is_plain(tensor) for tensor in tensors)
        buffers = [self.track(tensor) for tensor in tensors]
        addresses = [buffer.memory[0] for buffer in buffers if buffer]
        for tensor, buffer in zip(tensors, buffers, strict=True):
            if buffer is None or not tensor.numel():
                continue
            self.checked += 1
            if version_of(tensor) != buffer.version:  # torch itself wrote, so the content is valid.
                buffer.version = version_of(tensor)
                buffer.remember(buffer.memory)
            if not buffer.differs(tensor):
                continue
            # The buffers of an address are in the order in which they were created.
            latest = self.tracked.get(buffer.memory[0], [buffer])[-1]
            if latest is buffer:  # No newer tensor over this memory: the change was intended.
                buffer.remember(span_of(tensor))
            else:
                cause = "together" if addresses.count(buffer.memory[0]) > 1 else "stale"
                lines = {
                    "made by": buffer.line,
                    "made again by": latest.line,
                    "read by": user_line(),
                }
                self.report(
                    Overwritten.of(cause, name, tensor, lines), span_of(tensor), buffer.time
                )
        self.async_copies.check_host_reads(tensors, name)


def _is_alive(buffer: _TrackedBuffer) -> bool:
    """Return whether a tensor over the buffer's storage still exists."""
    return not buffer.storage.expired()
