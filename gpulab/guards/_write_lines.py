"""Finds the lines of the user's program that write into memory which a guard watches.

Writes by torch are operations, which the guard sees. Writes by NumPy or another library are not.
They are found with a trace function, which is called whenever a line of the user's program begins
or a function returns. It compares a sample of the bytes of each piece of watched memory. If the
sample has changed, the previous line is the one that wrote; if several threads are running, it is
the current line of one of them. Only files that are not installed are traced. Nothing is traced if
a debugger or a coverage tool already traces the program.
"""

from __future__ import annotations

import itertools
import sys
import threading
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from gpulab._torch_internals import Span, StorageWeakRef, span_of, storage_alive, uncompiled
from gpulab.guards._call_sites import Line, is_user_file, line_of, stack_frames, user_line
from gpulab.guards._fingerprints import host_memory
from gpulab.guards._holders import spans_overlap

COMPARED_BYTES = 128  # about how many bytes of each piece of watched memory are compared
MAX_KEPT_WRITES = 8  # the latest writes that are kept for each memory
MAX_WATCHED = 16  # pieces of memory that are watched; a larger number would slow down every line
MAX_WRITES = 10_000  # writes of torch that are kept; if there are more, the older half is dropped

if TYPE_CHECKING:
    from _typeshed import TraceFunction

_clock = itertools.count()


def next_time() -> int:
    """Return a number that grows with each call, which orders events in time."""
    return next(_clock)


@dataclass
class _WatchedMemory:
    """A piece of memory that is watched for changes.

    Attributes:
        span: The address of its first byte, and the address after its last byte.
        storages: The storages over this memory. Any of them keeps it alive.
        sample: About `COMPARED_BYTES` bytes of the memory, at equal distances.
        writes: For each of the latest writes, its time and the lines that may have written.
    """

    span: Span
    storages: list[StorageWeakRef]
    sample: bytes = b""
    writes: list[tuple[int, list[Line]]] = field(default_factory=list)

    def has_changed(self) -> bool:
        """Take a new sample of the memory, and return whether it differs from the last one."""
        # A reference to a storage keeps the memory alive while it is read.
        storage = next(filter(None, map(storage_alive, self.storages)), None)
        if storage is None:
            return False
        start, stop = self.span
        # The step is made odd, so that the sample contains different bytes of the elements.
        step = (stop - start) // COMPARED_BYTES | 1
        previous_sample = self.sample
        self.sample = bytes(memoryview(host_memory(start, stop))[::step])
        return bool(previous_sample) and previous_sample != self.sample

    def add_write(self, lines: list[Line]) -> None:
        """Record that one of these lines has just written here; keep only the latest writes."""
        self.writes = [*self.writes[1 - MAX_KEPT_WRITES :], (next_time(), lines)]


class WriteLines:
    """Records the lines that wrote into watched memory, for `writers_since`.

    Attributes:
        is_tracing: Whether lines of the user's program are traced, so that writes by NumPy can be
            attributed to lines.
    """

    def __init__(self) -> None:
        self.watched: dict[int, _WatchedMemory] = {}  # by the address of the memory
        self.torch_writes: dict[Span, tuple[int, Line]] = {}
        self.current_lines: dict[int, Line] = {}  # the line that each thread began last
        self.lock = threading.RLock()
        self.start_count = 0
        self.is_tracing = False

    def start(self) -> None:
        """Allow tracing, which begins in each thread when memory is first watched there."""
        with self.lock:
            self.start_count += 1

    def stop(self) -> None:
        """Undo one call of `start`; the last one ends the tracing."""
        with self.lock:
            self.start_count -= 1
            if self.start_count or not self.is_tracing:
                return
            self.is_tracing = False
            threading.settrace(None)
        if sys.gettrace() == self._trace:
            sys.settrace(None)
        for frame in stack_frames():
            if frame.f_trace == self._trace:
                frame.f_trace = None

    def watch(self, storage: StorageWeakRef, span: Span) -> None:
        """Watch a piece of host memory for changes from now on, and start tracing this thread."""
        with self.lock:
            watched = self.watched.pop(span[0], None)
            if watched is None or watched.span != span:
                watched = _WatchedMemory(span, [])
            watched.storages = [
                storage,
                *(reference for reference in watched.storages if not reference.expired()),
            ]
            if watched.has_changed():  # It was watched before, and a line has written since.
                watched.add_write(self._candidate_lines(threading.get_ident()))
            self.watched[span[0]] = watched
            # Memory that was watched longest ago comes first in the dictionary.
            while len(self.watched) > MAX_WATCHED:
                del self.watched[next(iter(self.watched))]
        self._start_tracing()

    def record_torch_writes(self, tensors: list[Tensor]) -> None:
        """Record that an operation of torch has just written into tensors."""
        spans = [span for span in map(span_of, tensors) if span != (0, 0)]
        if not spans:
            return
        line = user_line()
        with self.lock:
            for span in spans:
                self.torch_writes.pop(span, None)
                self.torch_writes[span] = next_time(), line
            if len(self.torch_writes) > MAX_WRITES:
                self.torch_writes = dict(
                    itertools.islice(self.torch_writes.items(), MAX_WRITES // 2, None)
                )
            # New samples are taken, so that this write is not attributed to another line.
            for watched in self.watched.values():
                if (
                    any(spans_overlap(watched.span, span) for span in spans)
                    and watched.has_changed()
                ):
                    watched.add_write([line])

    def writers_since(self, span: Span, since: int) -> list[Line]:
        """Return the lines that may have made the latest write into a span after a time.

        The time is a number from `next_time`. The list is empty if no such write is known.
        """
        self._attribute_changes(threading.get_ident())
        writes: list[tuple[int, list[Line]]] = []
        with self.lock:
            for watched in self.watched.values():
                if spans_overlap(watched.span, span):
                    writes += watched.writes
            for written_span, (time, line) in self.torch_writes.items():
                if spans_overlap(written_span, span):
                    writes.append((time, [line]))
        time, lines = max(writes, key=lambda write: write[0], default=(-1, []))
        return lines if time > since else []

    # --- following lines --------------------------------------------------------------------------

    def _start_tracing(self) -> None:
        """Trace this thread and those it starts, unless another tool already traces it."""
        if sys.gettrace() is not None or not self.start_count:
            return
        self.is_tracing = True
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        user_frames = [frame for frame in stack_frames() if is_user_file(frame.f_code.co_filename)]
        for frame in user_frames:
            frame.f_trace = self._trace
        if user_frames:
            self.current_lines[threading.get_ident()] = line_of(user_frames[0])

    @uncompiled
    def _trace(self, frame: types.FrameType, event: str, _: object) -> TraceFunction | None:
        """Attribute changes of memory to lines; this is the trace function, called by Python.

        Python calls it for every function, and for the lines and returns of functions for which it
        returns itself: those of user code.
        """
        if not is_user_file(frame.f_code.co_filename):
            return None
        if not self.is_tracing:  # `stop` was called in another thread.
            sys.settrace(None)
            return None
        if event != "call":
            thread = threading.get_ident()
            next_frame = frame if event == "line" else _calling_user_frame(frame)
            next_line = None if next_frame is None else line_of(next_frame)
            self._attribute_changes(thread, next_line, has_ended=next_frame is None)
        return self._trace

    def _attribute_changes(
        self, thread: int, next_line: Line | None = None, has_ended: bool = False
    ) -> None:
        """Attribute changes to the current lines, then set this thread's line to `next_line`.

        `has_ended` says whether this thread has no further known line.
        """
        with self.lock:
            for watched in self.watched.values():
                if watched.has_changed():
                    watched.add_write(self._candidate_lines(thread))
            if next_line is not None:
                self.current_lines[thread] = next_line
            elif has_ended:
                self.current_lines.pop(thread, None)

    def _candidate_lines(self, thread: int) -> list[Line]:
        """Return the current line of this thread, and then those of the other threads."""
        other_lines = [line for ident, line in self.current_lines.items() if ident != thread]
        lines = [self.current_lines.get(thread), *other_lines]
        return list(dict.fromkeys(line for line in lines if line is not None))


def _calling_user_frame(frame: types.FrameType) -> types.FrameType | None:
    """Return the nearest caller of a frame that is user code, or None if no caller is."""
    caller = frame.f_back
    while caller is not None and not is_user_file(caller.f_code.co_filename):
        caller = caller.f_back
    return caller
