"""Asynchronous copies between pinned memory and a GPU, and memory touched before they end.

With `non_blocking=True` and pinned memory, a copy between the host and a GPU is only queued when
the call returns. Until it is done, its source may not be written and its destination may not be
read; torch checks neither. Whether the copy was done in time depends on timing, so the guard does
not ask that. It reports a write or a read in a program that did not wait first (a happens-before
relation): by synchronising a device, a stream or an event, by `query()`, or by an operation that
waits, such as `.item()`.
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
    """A copy that was asked for: the host's side of it, and whether somebody has waited since."""

    finding: Overwritten  # what it is, if it is used too early
    storage: StorageWeakRef
    span: Span
    content: int  # a number that stands for what was in the memory
    event: torch.cuda.Event  # behind the copy
    was_waited_for: bool = False

    def is_complete(self) -> bool:
        """Whether the copy is safe: it was waited for and is done, or its memory is gone."""
        return self.storage.expired() or (self.was_waited_for and is_event_finished(self.event))

    def is_overwritten(self) -> bool:
        """Whether the source has changed since the copy was requested."""
        return self.finding.cause == "leaving" and memory_digest(*self.span) != self.content


class AsyncCopyTracker:
    """Tracks the asynchronous copies requested by the operations passed to `record_copy`.

    `report` is called with every finding. A finding of a wait is reported by the next
    `check_host_reads` or `flush`, because torch lets nothing be raised while it waits.
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
        """Track an operation that has just run if it is an asynchronous copy."""
        if operation is TO_COPY and kwargs.get("non_blocking"):
            target = result
            source = args[0]
        elif operation is torch.ops.aten.copy_.default and (
            kwargs.get("non_blocking") or args[2:] == (True,)
        ):
            target, source = args[:2]
        else:
            return
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
                _Copy(finding, StorageWeakRef(host.untyped_storage()), span, content, event)
            )

    def pending_copies(self) -> list[_Copy]:
        """The copies that are not complete; complete ones are dropped."""
        self.copies = [copy for copy in self.copies if not copy.is_complete()]
        return self.copies

    def check_host_reads(self, tensors: list[Tensor], name: str) -> None:
        """Report host tensors that are read before their copy has arrived, and overwritten ones."""
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
        """Somebody is about to wait, or has: what is overwritten now was overwritten too early."""
        with self.lock:
            self.check_overwritten("a wait", self.pending_copies())
            for copy in self.copies:
                copy.was_waited_for = True

    def check_overwritten(self, name: str, copies: list[_Copy]) -> None:
        """Find overwritten memory among the pending copies."""
        for copy in copies:
            if copy.is_overwritten():
                self.add_finding(copy, name)

    def add_finding(self, copy: _Copy, name: str) -> None:
        """Store a finding until it can be reported, once for each copy."""
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
        """Find what is overwritten and was never waited for; waits that come later are nobody's."""
        with self.lock:
            self.check_overwritten("the end of the guard", self.pending_copies())
            self.copies = []


_trackers: weakref.WeakSet[AsyncCopyTracker] = weakref.WeakSet()


@uncompiled
def on_gpu_wait(*_: object) -> None:
    """The program waits for a GPU."""
    for tracker in list(_trackers):
        tracker.on_gpu_wait()


@functools.cache
def _observe_gpu_waits() -> None:
    """Have torch report every wait for a GPU. It cannot be undone, so it is done only once."""
    register_gpu_wait_callback(on_gpu_wait)
