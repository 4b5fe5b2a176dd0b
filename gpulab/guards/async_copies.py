"""Asynchronous copies between pinned memory and a GPU, and memory that is touched before the copy is known to be done.

With `non_blocking=True` and pinned memory, a copy between the host and a GPU is only queued when the call returns.
Until it is done, its source may not be written and its destination may not be read; torch checks neither. Whether the
copy was done in time depends on timing, so the guard does not ask that. It reports a write or a read in a program that
did not wait first (a happens-before relation): by synchronising a device, a stream or an event, by `query()`, or by an
operation that waits, such as `.item()`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpulab._torch_internals import (
    TO_COPY,
    Nested,
    OpOverload,
    Span,
    StorageWeakRef,
    is_event_finished,
    is_plain,
    register_gpu_wait_callback,
    span_of,
    uncompiled,
)
from gpulab.guards.call_sites import user_line
from gpulab.guards.findings import Overwritten
from gpulab.guards.fingerprints import memory_digest
from gpulab.guards.holders import overlap


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
        return self.storage.expired() or (self.waited and is_event_finished(self.event))

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

    def note(self, operation: OpOverload, args: Sequence[Nested], kwargs: dict[str, Nested], result: Nested) -> None:
        """Look at an operation that was just run: is it a copy that goes on after it?"""
        if operation is TO_COPY and kwargs.get("non_blocking"):
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
def waiting(*_: object) -> None:
    """Somebody waits for a GPU."""
    for copies in list(_known):
        copies.waiting()


@functools.cache
def _hear_of_waits() -> None:
    """Have torch tell of every wait for a GPU from here on: there is no way to end that, hence once."""
    register_gpu_wait_callback(waiting)
