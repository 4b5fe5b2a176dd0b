"""Asynchronous copies between pinned memory and a GPU, and memory touched before they end.

With `non_blocking=True` and pinned memory, a copy between the host and a GPU is only queued when
the call returns. Until the copy is done, its source may not be written and its destination may not
be read; torch checks neither. Whether a copy happens to be done depends on timing, so the guard
does not rely on it. Instead it reports every write or read that the program makes without waiting
first (a happens-before relation). A program waits by synchronising a device, a stream or an event,
by calling `query()`, or by an operation that waits, such as `.item()`.
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
from gpulab.guards._call_sites import user_line
from gpulab.guards._findings import Overwritten
from gpulab.guards._fingerprints import memory_digest
from gpulab.guards._holders import spans_overlap


@dataclass
class _Copy:
    """A requested copy.

    Attributes:
        finding: The finding to report if the memory is used too early.
        storage: The storage on the host.
        span: The memory on the host.
        content: The digest of the memory when the copy was requested; 0 for a copy to the host.
        event: An event that was recorded after the copy.
        was_waited_for: Whether the program has waited for the GPU since the request.
    """

    finding: Overwritten
    storage: StorageWeakRef
    span: Span
    content: int
    event: torch.cuda.Event
    was_waited_for: bool = False

    def needs_checks(self) -> bool:
        """Return whether the program may still use the memory on the host too early.

        It cannot if this memory has been freed. Nor can it if the program has waited for a GPU and
        the copy has finished. Neither of these two facts alone shows that the program waited for
        the copy: a wait may have been for other work, and a copy may finish in time by chance.
        """
        if self.storage.expired():
            return False
        return not (self.was_waited_for and is_event_finished(self.event))

    def is_overwritten(self) -> bool:
        """Return whether the source, if it is on the host, has changed since the request."""
        return self.finding.cause == "leaving" and memory_digest(*self.span) != self.content


class AsyncCopyTracker:
    """Tracks the asynchronous copies requested by the operations passed to `record_copy`.

    `report` is called with every finding. A finding made during a wait is reported by the next
    `check_host_reads` or `flush`, because no error can be raised inside torch's callback for waits.
    """

    def __init__(self, report: Callable[[Overwritten], None]) -> None:
        self.report = report
        self.copies: list[_Copy] = []
        self.unreported: list[Overwritten] = []
        self.lock = threading.RLock()
        _trackers.add(self)

    def record_copy(
        self,
        operation: OpOverload,
        args: Sequence[Nested],
        kwargs: dict[str, Nested],
        result: Nested,
    ) -> None:
        """Track an operation that has just run, if it is an asynchronous copy.

        Memory that an earlier copy still uses is checked first.
        """
        tensors = _non_blocking_copy(operation, args, kwargs, result)
        if tensors is None:
            return
        target, source = tensors
        if target.is_cuda:
            cause = "leaving"
            host = source
            device = target
        else:
            cause = "arriving"
            host = target
            device = source
        is_asynchronous = device.is_cuda and host.is_cpu and is_plain(host) and host.is_pinned()
        if not is_asynchronous or torch.cuda.is_current_stream_capturing():
            return
        _observe_gpu_waits()
        span = span_of(host)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device.device))
        content = memory_digest(*span) if cause == "leaving" else 0
        name = operation.overloadpacket.__name__
        finding = Overwritten.of(cause, name, host, {"copied by": user_line()})
        with self.lock:
            self.check_overwritten(
                name, [copy for copy in self.pending_copies() if spans_overlap(copy.span, span)]
            )
            self.copies.append(
                _Copy(
                    finding=finding,
                    storage=StorageWeakRef(host.untyped_storage()),
                    span=span,
                    content=content,
                    event=event,
                )
            )

    def pending_copies(self) -> list[_Copy]:
        """Drop the copies that need no further checks, and return the others."""
        self.copies = [copy for copy in self.copies if copy.needs_checks()]
        return self.copies

    def check_host_reads(self, tensors: list[Tensor], name: str) -> None:
        """Report tensors on the host that are read before the program waited for a copy to them.

        Findings made during earlier waits are reported as well.
        """
        if not self.copies and not self.unreported:
            return
        with self.lock:
            spans = [span_of(tensor) for tensor in tensors]
            for copy in self.pending_copies():
                if copy.finding.cause == "arriving" and any(
                    spans_overlap(copy.span, span) for span in spans
                ):
                    self.add_finding(copy, name)
        self.flush()

    def on_gpu_wait(self) -> None:
        """Check for overwritten memory at a wait, and mark all copies as waited for.

        Memory that has changed by this time was overwritten before the wait, which is too early.
        """
        with self.lock:
            self.check_overwritten("a wait", self.pending_copies())
            for copy in self.copies:
                copy.was_waited_for = True

    def check_overwritten(self, name: str, copies: list[_Copy]) -> None:
        """Store a finding for each of these copies whose source was overwritten."""
        for copy in copies:
            if copy.is_overwritten():
                self.add_finding(copy, name)

    def add_finding(self, copy: _Copy, name: str) -> None:
        """Store a finding until it can be reported, and stop tracking its copy."""
        self.copies = [other_copy for other_copy in self.copies if other_copy is not copy]
        lines = {**copy.finding.lines, f"met by {name} in": user_line()}
        self.unreported.append(replace(copy.finding, operation=name, function=name, lines=lines))

    def flush(self) -> None:
        """Report the stored findings."""
        with self.lock:
            findings = self.unreported
            self.unreported = []
        for finding in findings:
            self.report(finding)

    def stop(self) -> None:
        """Check the copies that were never waited for, and stop tracking all copies."""
        with self.lock:
            self.check_overwritten("the end of the guard", self.pending_copies())
            self.copies = []


def _non_blocking_copy(
    operation: OpOverload, args: Sequence[Nested], kwargs: dict[str, Nested], result: Nested
) -> tuple[Tensor, Tensor] | None:
    """Return the target and the source of a copy with `non_blocking=True`; None for others."""
    if operation is TO_COPY and kwargs.get("non_blocking"):
        return result, args[0]
    if operation is torch.ops.aten.copy_.default:
        # `non_blocking` is the third parameter of `copy_`.
        is_non_blocking = kwargs.get("non_blocking") or args[2:] == (True,)
        if is_non_blocking:
            target, source = args[:2]
            return target, source
    return None


_trackers: weakref.WeakSet[AsyncCopyTracker] = weakref.WeakSet()


@uncompiled
def on_gpu_wait(*_: object) -> None:
    """Notify all trackers that the program waits for a GPU."""
    for tracker in list(_trackers):
        tracker.on_gpu_wait()


@functools.cache
def _observe_gpu_waits() -> None:
    """Have torch report every wait for a GPU; this cannot be undone, so it is done only once."""
    register_gpu_wait_callback(on_gpu_wait)
