"""Tensors over memory that others write, read after it was written.

`torch.from_numpy`, `as_tensor`, `frombuffer` and DLPack copy nothing: the tensor is the array's memory. Who fills one
array again and again, and makes a tensor of it each time, has many tensors with one content, the last. No gradient
need be involved: a replay buffer, a list of observations that is stacked later. Torch's own count of changes does not
see it, because torch did not write.

A tensor over such memory is *born* when it is made. It is read *stale* when an operation reads it, its content is
another than when it was born or last read, and meanwhile another tensor was born in the same memory, which may be gone:
whoever made that one wanted the new content, so the old one was to keep the old. A single tensor that is filled through
NumPy and read again and again is a view on purpose, and no finding.
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
from gpulab.guards.async_copies import CopiesUnderWay
from gpulab.guards.call_sites import Line, user_line
from gpulab.guards.findings import Overwritten
from gpulab.guards.fingerprints import memory, memory_digest
from gpulab.guards.torch_patches import add_listener, is_copying, is_listening, remove_listener
from gpulab.guards.write_lines import WriteLines, now

MADE = torch.ops.aten.lift_fresh.default  # by `from_numpy` and `as_tensor`, whatever name they were imported by
OVERWRITING = {"copy_", "fill_", "zero_"}  # whose first argument is not read
BLOCK = 1 << 16  # bytes that have one number
FEW = 1000  # pieces of memory, after which those are dropped that are gone

_births_lock = threading.Lock()  # held while the notes on tensors over foreign memory change


@dataclass
class _Birth:
    """A tensor over foreign memory: where it lies, what was in it when it was last read rightly, and who made it."""

    storage: StorageWeakRef
    memory: Span
    version: int
    line: Line
    digests: dict[int, int] = field(default_factory=dict)  # for each block of the memory, by its address
    content: bytes = b""  # of a small memory
    time: int = field(default_factory=now)  # when its content was last remembered

    def remember(self, span: Span) -> None:
        """Take what is in a part of the memory now for right."""
        self.time = now()
        self.digests |= self.look(span)
        if self.memory[1] - self.memory[0] <= BLOCK:
            self.content = bytes(memory(*self.memory))

    def look(self, span: Span) -> dict[int, int]:
        """What is now in the blocks in which a part of the memory lies."""
        begin, end = self.memory
        begins = range(begin + (span[0] - begin) // BLOCK * BLOCK, span[1], BLOCK)
        return {begin: memory_digest(begin, min(begin + BLOCK, end)) for begin in begins}

    def differs(self, tensor: Tensor) -> bool:
        """Whether a tensor's content is another than is remembered.

        Of a memory above `BLOCK` bytes only digests are kept: there a change beside the tensor counts, too.
        """
        if self.look(span_of(tensor)).items() <= self.digests.items():  # no block has changed
            return False
        now = memory(*self.memory)
        return not self.content or self.elements(tensor, now) != self.elements(tensor, self.content)

    def elements(self, tensor: Tensor, source: bytes | ctypes.Array[ctypes.c_char]) -> bytes:
        """A tensor's elements as bytes, read from `source`: the memory itself, or the copy kept of it."""
        width = tensor.element_size()
        strides = tuple(width * stride for stride in tensor.stride())
        offset = tensor.data_ptr() - self.memory[0]
        return np.ndarray(tuple(tensor.shape), f"V{width}", memoryview(source), offset, strides).tobytes()


class SharedReads(UncompiledDispatchMode):
    """Inside, tensors that are made without a copy are noted, and what every operation reads is checked.

    `tell` hears of every stale read, and of every use of memory whose copy from or to a GPU goes on. A read takes time
    in proportion to what is read, whatever the size of the memory. May be entered again, and in several threads.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__()
        self.tell = tell
        self.copies = CopiesUnderWay(tell)
        self.checked = self.unchecked = 0
        self.write_lines = WriteLines()
        self.births: dict[int, list[_Birth]] = {}  # by the address of the memory: who lives, and the latest

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
        super().__exit__(kind, error, trace)
        remove_listener(self)
        self.write_lines.stop()
        if not is_listening(self):
            self.copies.end()
        if kind is None:
            self.copies.settle()

    def __torch_dispatch__(
        self,
        operation: OpOverload,
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: dict[str, Nested] | None = None,
    ) -> Nested:
        """Check what an operation reads, and run it."""
        kwargs = kwargs or {}
        if operation is MADE:
            self.birth_of(args[0])
        if not operation.is_view:  # which reads no number
            read = args[1:] if operation.overloadpacket.__name__ in OVERWRITING else args
            lists = (value if isinstance(value, list | tuple) else (value,) for value in (*read, *kwargs.values()))
            values = itertools.chain.from_iterable(lists)
            tensors = [value for value in values if isinstance(value, Tensor) and value.is_cpu]
            self.check(tensors, operation.overloadpacket.__name__)
        result = operation(*args, **kwargs)
        if is_mutable(operation):
            self.write_lines.note(written_tensors(operation, args, kwargs))
        self.copies.note(operation, args, kwargs, result)
        return result

    def birth_of(self, tensor: Tensor) -> _Birth | None:
        """What is known of the memory of a tensor; None where torch itself owns it."""
        if not tensor.is_cpu or not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage.resizable() or not storage.nbytes():
            return None
        address = storage.data_ptr()
        for birth in self.births.get(address, ()):
            if birth.storage.cdata == storage_identity(storage):
                return birth
        memory = address, address + storage.nbytes()
        birth = _Birth(StorageWeakRef(storage), memory, version_of(tensor), user_line())
        birth.remember(memory)
        self.write_lines.watch(birth.storage, memory)
        if not is_copying():
            with _births_lock:
                if len(self.births) % FEW == 0:
                    self.births = {key: births for key, births in self.births.items() if any(map(_lives, births))}
                self.births[address] = [*filter(_lives, self.births.get(address, ())), birth]
        return birth

    def on_tensor_created(self, tensor: Tensor) -> None:
        """Note a tensor that may share the memory of another library."""
        self.birth_of(tensor)

    def on_tensor_shared(self, tensor: Tensor) -> None:
        """Note a tensor whose memory another library has been given."""
        self.birth_of(tensor)

    def on_tensor_read(self, tensor: Tensor, function: str) -> None:
        """Check a tensor that a function is about to read without torch."""
        self.check([tensor], function)

    def check(self, tensors: list[Tensor], name: str) -> None:
        """Look at what an operation of this name is about to read."""
        self.unchecked += sum(not is_plain(tensor) for tensor in tensors)
        births = [self.birth_of(tensor) for tensor in tensors]
        places = [birth.memory[0] for birth in births if birth]
        for tensor, birth in zip(tensors, births, strict=True):
            if birth is None or not tensor.numel():
                continue
            self.checked += 1
            if version_of(tensor) != birth.version:  # torch wrote there itself
                birth.version = version_of(tensor)
                birth.remember(birth.memory)
            if not birth.differs(tensor):
                continue
            latest = self.births.get(birth.memory[0], [birth])[-1]
            if latest is birth:
                birth.remember(span_of(tensor))
            else:
                cause = "together" if places.count(birth.memory[0]) > 1 else "stale"
                lines = {"made by": birth.line, "made again by": latest.line, "read by": user_line()}
                self.tell(Overwritten.of(cause, name, tensor, lines), span_of(tensor), birth.time)
        self.copies.check(tensors, name)


def _lives(birth: _Birth) -> bool:
    """Whether the tensor that was born is still there, or another over the same storage."""
    return not birth.storage.expired()
