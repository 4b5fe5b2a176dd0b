"""Tensors over memory that others write, read after it was written.

`torch.from_numpy`, `as_tensor`, `frombuffer` and DLPack copy nothing: the tensor is the array's memory. Who fills one
array again and again, and makes a tensor of it each time, has many tensors with one content, the last. No gradient
need be involved: a replay buffer, a list of observations that is stacked later. Torch's own count of changes does not
see it, because torch did not write.

A tensor over such memory is *born* when it is made. It is read *stale* when an operation reads it, its content is
another than when it was born or last read, and meanwhile another tensor was born in the same memory, which may be gone:
whoever made that one wanted the new content, so the old one was to keep the old. A single tensor that is filled through
NumPy and read again and again is a view on purpose, and no finding.

Copies that are under way are memory that others write, too. With `non_blocking=True` and pinned memory a copy between
the host and a GPU is only queued when the call returns. Until it is done its source may not be written, and its
destination may not be read; torch checks neither. Whether it was done in time is luck, so that is not asked: a finding
is a write or a read in a program that did not *wait* first, by a synchronisation of a device, a stream or an event, by
`query()`, or by an operation that waits, such as `.item()`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.cuda import _gpu_trace
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gpulab.guards.findings import Overwritten
from gpulab.guards.memory import Line, Span, is_plain, memory, memory_digest, overlap, span_of, uncompiled, user_line

MADE = torch.ops.aten.lift_fresh.default  # by `from_numpy` and `as_tensor`, whatever name they were imported by
OVERWRITING = {"copy_", "fill_", "zero_"}  # whose first argument is not read
BLOCK = 1 << 16  # bytes that have one number
FEW = 1000  # pieces of memory, after which those are dropped that are gone


@dataclass
class _Birth:
    """A tensor over foreign memory: where it lies, what was in it when it was last read rightly, and who made it."""

    storage: StorageWeakRef
    memory: Span
    version: int
    line: Line
    digests: dict[int, int] = field(default_factory=dict)  # for each block of the memory, by its address
    content: bytes = b""  # of a small memory

    def remember(self, span: Span) -> None:
        """Take what is in a part of the memory now for right."""
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

    def elements(self, tensor: Tensor, source: Any) -> bytes:
        """A tensor's elements as bytes, read from `source`: the memory itself, or the copy kept of it."""
        width = tensor.element_size()
        strides = tuple(width * stride for stride in tensor.stride())
        offset = tensor.data_ptr() - self.memory[0]
        return np.ndarray(tuple(tensor.shape), f"V{width}", source, offset, strides).tobytes()


class SharedReads(TorchDispatchMode):
    """Inside, tensors that are made without a copy are noted, and what every operation reads is checked.

    `tell` hears of every stale read, and of every use of memory whose copy from or to a GPU goes on. A read takes time
    in proportion to what is read, whatever the size of the memory. May be entered again, and in several threads.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__()
        self.tell = tell
        self.copies = CopiesUnderWay(tell)
        self.checked = self.unchecked = 0
        self.births: dict[int, list[_Birth]] = {}  # by the address of the memory: who lives, and the latest

    def __enter__(self) -> Self:
        _listen(self)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _leave(self)
        if self not in _listening:
            self.copies.end()
        if raised[0] is None:
            self.copies.settle()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would do what `uncompiled` does, and import the compiler for it

    @uncompiled
    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
            if birth.storage.cdata == storage._cdata:
                return birth
        memory = address, address + storage.nbytes()
        birth = _Birth(StorageWeakRef(storage), memory, tensor._version, user_line())
        birth.remember(memory)
        if not getattr(_thread, "copies", False):
            with _lock:
                if len(self.births) % FEW == 0:
                    self.births = {key: births for key, births in self.births.items() if any(map(_lives, births))}
                self.births[address] = [*filter(_lives, self.births.get(address, ())), birth]
        return birth

    def check(self, tensors: list[Tensor], name: str) -> None:
        """Look at what an operation of this name is about to read."""
        self.unchecked += sum(not is_plain(tensor) for tensor in tensors)
        births = [self.birth_of(tensor) for tensor in tensors]
        places = [birth.memory[0] for birth in births if birth]
        for tensor, birth in zip(tensors, births, strict=True):
            if birth is None or not tensor.numel():
                continue
            self.checked += 1
            if tensor._version != birth.version:  # torch wrote there itself
                birth.version = tensor._version
                birth.remember(birth.memory)
            if not birth.differs(tensor):
                continue
            latest = self.births.get(birth.memory[0], [birth])[-1]
            if latest is birth:
                birth.remember(span_of(tensor))
            else:
                cause = "together" if places.count(birth.memory[0]) > 1 else "stale"
                lines = {"made by": birth.line, "made again by": latest.line, "read by": user_line()}
                self.tell(Overwritten.of(cause, name, tensor, lines), span_of(tensor))
        self.copies.check(tensors, name)


def _lives(birth: _Birth) -> bool:
    """Whether the tensor that was born is still there, or another over the same storage."""
    return not birth.storage.expired()


# --- who makes tensors, who reads them without torch, who asks whether a copy is done ---------------------------

_listening: list[SharedReads] = []  # those that are entered, once for each time, whatever the thread
_lock = threading.Lock()
_thread = threading.local()


def _make(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    tensor = make(*args, **kwargs)
    for reads in list(_listening):
        reads.birth_of(tensor)
    return tensor


def _make_copy(make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    _thread.copies = True  # what is made of the memory now lives no longer than the call
    try:
        return make(*args, **kwargs)
    finally:
        _thread.copies = False


def _take(take: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    for reads in list(_listening):
        reads.check([tensor], take.__name__)
    return take(tensor, *args, **kwargs)


def _ask(query: Callable[[Any], bool], stream_or_event: Any) -> bool:
    if finished := query(stream_or_event):
        waiting()
    return finished


def _calling(call: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in the place of one of torch's functions: it calls another with that function before all else."""

    @functools.wraps(own)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return call(own, *args, **kwargs)

    return uncompiled(stand_in)


# What may make a tensor without a copy, and what torch does not tell of: replaced while somebody listens.
REPLACED: list[tuple[Any, str, Callable[..., Any]]] = [
    *((torch, name, _make) for name in ("from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack")),
    (torch, "tensor", _make_copy),
    (torch.utils.dlpack, "from_dlpack", _make),
    *((Tensor, name, _take) for name in ("numpy", "tolist")),
    *((kind, "query", _ask) for kind in (torch.cuda.Event, torch.cuda.Stream)),
]
_torchs_own = contextlib.ExitStack()  # puts them back


def _listen(reads: SharedReads) -> None:
    """Be told of all these. Threads may leave in another order than they came."""
    with _lock:
        if not _listening:
            for owner, name, call in REPLACED:
                own = getattr(owner, name)
                setattr(owner, name, _calling(call, own))
                _torchs_own.callback(setattr, owner, name, own)
        _listening.append(reads)


def _leave(reads: SharedReads) -> None:
    with _lock:
        _listening.remove(reads)
        if not _listening:
            _torchs_own.close()


# --- copies under way ------------------------------------------------------------------------------------


@dataclass
class _Copy:
    """A copy that was asked for: the host's side of it, and whether somebody has waited since."""

    finding: Overwritten  # what it is, if it is used too early
    storage: StorageWeakRef
    span: Span
    content: int  # a number that stands for what was in the memory
    event: torch.cuda.Event  # behind the copy
    waited: bool = False

    def over(self) -> bool:
        """Whether nothing can go wrong any more: it was waited for and is done, or its memory is gone."""
        return self.storage.expired() or (self.waited and torch._C._CudaEventBase.query(self.event))

    def overwritten(self) -> bool:
        """Whether the source holds something else than when the copy was asked for."""
        return self.finding.cause == "leaving" and memory_digest(*self.span) != self.content


class CopiesUnderWay:
    """What is being copied, as far as operations that are given to `note` have asked for it.

    `tell` hears of every finding. What a wait finds is told by the next `check` or `settle`: torch lets nothing be
    raised while it waits.
    """

    def __init__(self, tell: Callable[[Overwritten], None]) -> None:
        self.tell = tell
        self.copies: list[_Copy] = []
        self.untold: list[Overwritten] = []
        self.lock = threading.RLock()
        _known.add(self)

    def note(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Look at an operation that was just run: is it a copy that goes on after it?"""
        if operation is torch.ops.aten._to_copy.default and kwargs.get("non_blocking"):
            target, source = result, args[0]
        elif operation is torch.ops.aten.copy_.default and (kwargs.get("non_blocking") or args[2:] == (True,)):
            target, source = args[:2]
        else:
            return
        cause, host, device = ("leaving", source, target) if target.is_cuda else ("arriving", target, source)
        goes_on = device.is_cuda and host.is_cpu and is_plain(host) and host.is_pinned()
        if not goes_on or torch.cuda.is_current_stream_capturing():
            return
        _hear_of_waits()
        span, event = span_of(host), torch.cuda.Event()
        event.record(torch.cuda.current_stream(device.device))
        content = memory_digest(*span) if cause == "leaving" else 0
        name = operation.overloadpacket.__name__
        finding = Overwritten.of(cause, name, host, {"copied by": user_line()})
        with self.lock:
            self.compare(name, [copy for copy in self.under_way() if overlap(copy.span, span)])
            self.copies.append(_Copy(finding, StorageWeakRef(host.untyped_storage()), span, content, event))

    def under_way(self) -> list[_Copy]:
        """The copies with which something can still go wrong; the others are forgotten."""
        self.copies = [copy for copy in self.copies if not copy.over()]
        return self.copies

    def check(self, tensors: list[Tensor], name: str) -> None:
        """Tell of tensors of the host that are about to be read and have not arrived, and of what waits have found."""
        if not self.copies and not self.untold:
            return
        with self.lock:
            spans = [span_of(tensor) for tensor in tensors]
            for copy in self.under_way():
                if copy.finding.cause == "arriving" and any(overlap(copy.span, span) for span in spans):
                    self.find(copy, name)
        self.settle()

    def waiting(self) -> None:
        """Somebody is about to wait, or has: what is overwritten now was overwritten too early."""
        with self.lock:
            self.compare("a wait", self.under_way())
            for copy in self.copies:
                copy.waited = True

    def compare(self, name: str, copies: list[_Copy]) -> None:
        """Find what has been overwritten among copies that are under way."""
        for copy in copies:
            if copy.overwritten():
                self.find(copy, name)

    def find(self, copy: _Copy, name: str) -> None:
        """Keep a finding until it can be told, once for each copy."""
        self.copies = [other_copy for other_copy in self.copies if other_copy is not copy]
        lines = {**copy.finding.lines, f"met by {name} in": user_line()}
        self.untold.append(replace(copy.finding, operation=name, function=name, lines=lines))

    def settle(self) -> None:
        """Tell what was found."""
        with self.lock:
            findings, self.untold = self.untold, []
        for finding in findings:
            self.tell(finding)

    def end(self) -> None:
        """Find what is overwritten and was never waited for; waits that come later are nobody's."""
        with self.lock:
            self.compare("the end of the guard", self.under_way())
            self.copies = []


_known: weakref.WeakSet[CopiesUnderWay] = weakref.WeakSet()


@uncompiled
def waiting(*_: Any) -> None:
    """Somebody waits for a GPU."""
    for copies in list(_known):
        copies.waiting()


@functools.cache
def _hear_of_waits() -> None:
    """Have torch tell of every wait for a GPU from here on: there is no way to end that, hence once."""
    torch._C._activate_gpu_trace()
    for kind in ("device", "stream", "event"):
        getattr(_gpu_trace, f"register_callback_for_{kind}_synchronization")(waiting)
