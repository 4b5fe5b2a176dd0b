"""Finds the lines of the user's program that write into memory which a guard watches.

Writes by torch are operations, which the guard sees. Writes by NumPy or another library are not.
They are found with a trace function, which is called whenever a line of the user's program begins
or a function returns. It compares the watched memory with a copy. If a byte has changed since the
previous line began, the previous line is the one that wrote; if several threads are running, it is
the current line of one of them. Only files that are not installed are traced. Nothing is traced if
a debugger or a coverage tool already traces the program.

The time for this is limited, for all guards together. While it lasts, every block of memory is
compared after every line. Afterwards, only the first block of each of the latest pieces of memory
is compared, until time is available again. A change that is found after several lines is attributed
to none of them. Instead, its block is suspected: from then on it is the first one to be compared,
so that a program that repeats itself shows the line in its next repetition. Memory of more than
`MAX_BLOCKS` blocks is compared in part, in blocks that are chosen anew whenever a tensor is created
over it.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from gpulab._torch_internals import Span, StorageWeakRef, span_of, uncompiled
from gpulab.guards._call_sites import (
    Line,
    is_generated,
    is_user_file,
    line_of,
    stack_frames,
    user_line,
)
from gpulab.guards._fingerprints import block_digests, block_starts
from gpulab.guards._holders import spans_overlap
from gpulab.guards._watched_memory import Addresses, Block, WatchedMemory

MAX_BLOCKS = 64  # blocks of a piece of memory that are compared, in addition to suspected ones
MAX_SUSPECTS = 16  # blocks in which lines that are not known have written
MAX_WATCHED = 256  # pieces of memory that are watched
MAX_ALWAYS_COMPARED = 16  # pieces of memory that are compared when no time is available
MAX_WRITES = 10_000  # writes of torch that are kept; if there are more, the older half is dropped
COMPARING_SHARE = 0.1  # of the running time, which comparing may take
MAX_COMPARING_SECONDS = 1.0  # the time for comparing at the beginning, and the most that is saved
MIN_COMPARING_SECONDS = 0.1  # the time for comparing that must be available before it resumes

if TYPE_CHECKING:
    from _typeshed import TraceFunction


class _Clock:
    """Numbers that order events in time."""

    def __init__(self) -> None:
        self.now = 0
        self.lock = threading.Lock()

    def next(self) -> int:
        """Return the present number, and begin the next one."""
        with self.lock:
            self.now += 1
            return self.now - 1


_clock = _Clock()
next_time = _clock.next


class _TimeLimit:
    """Limits the time for comparing to a share of the running time.

    Attributes:
        has_time: Whether all memory may be compared.
    """

    def __init__(self) -> None:
        self.available = MAX_COMPARING_SECONDS
        self.has_time = True
        self.started = time.perf_counter()

    def start(self) -> None:
        """Note that comparing begins."""
        now = time.perf_counter()
        earned = COMPARING_SHARE * (now - self.started)
        self.available = min(self.available + earned, MAX_COMPARING_SECONDS)
        self.has_time |= self.available >= MIN_COMPARING_SECONDS
        self.started = now

    def stop(self) -> None:
        """Note that comparing has ended."""
        if self.has_time:
            self.available -= time.perf_counter() - self.started
            self.has_time = self.available > 0


_time_limit = _TimeLimit()  # for all guards together, because a program may use one in each step


class WriteLines:
    """Records the lines that wrote into watched memory, for `writers_since`.

    Attributes:
        is_tracing: Whether lines of the user's program are traced, so that writes by NumPy can be
            attributed to lines.
    """

    def __init__(self) -> None:
        self.watched: dict[int, WatchedMemory] = {}  # by the address of the memory
        self.torch_writes: dict[tuple[Span, Line], int] = {}  # the time of each
        self.current_lines: dict[int, Line] = {}  # the line that each thread began last
        self.line_count = 0  # lines that have begun, in all threads
        # The addresses of blocks in which lines that are not known have written, the latest last.
        self.suspects: dict[int, None] = {}
        self.random = random.Random(0)  # it chooses the blocks to compare
        self.lock = threading.RLock()
        self.start_count = 0
        self.is_tracing = False

    def start(self) -> None:
        """Allow tracing, which begins in each thread when memory is first watched there."""
        with self.lock:
            self.start_count += 1
            if self.start_count > 1 or not any(
                map(WatchedMemory.keep_alive, self.watched.values())
            ):
                return
            # Memory is still watched from the last time. Lines have written that were not traced.
            self._compare_all(threading.get_ident())
        self._start_tracing()

    def stop(self) -> None:
        """Undo one call of `start`; the last one ends the tracing."""
        with self.lock:
            self.start_count -= 1
            if self.start_count or not self.is_tracing:
                return
            self._compare_all(threading.get_ident())
            # Lines that run from now on are not traced, so changes are not attributed.
            self.line_count += 1
            self.current_lines.clear()
            self.is_tracing = False
            threading.settrace(None)
        if sys.gettrace() == self._trace:
            sys.settrace(None)
        for frame in stack_frames():
            if frame.f_trace == self._trace:
                frame.f_trace = None

    def watch(self, storage: StorageWeakRef, span: Span, digests: dict[int, int]) -> None:
        """Watch a piece of host memory for changes from now on, and start tracing this thread.

        `digests` are those of the blocks of the memory.
        """
        with self.lock:
            watched = self.watched.pop(span[0], None)
            if watched is None or watched.span != span or not watched.keep_alive():
                watched = WatchedMemory(span)
            # If it was watched before, a line may have written since.
            self._compare(watched, watched.blocks.values(), threading.get_ident())
            self._suspect(watched.changed_blocks(digests))
            watched.storages = [
                storage,
                *(reference for reference in watched.storages if not reference.expired()),
            ]
            watched.choose_blocks(self._blocks_to_compare(span), self.line_count)
            is_complete = len(watched.blocks) == len(digests)
            watched.digests = {} if is_complete else dict(digests)
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
                self.torch_writes.pop((span, line), None)
                self.torch_writes[span, line] = _clock.now
                # The memory is compared, so that this write is not attributed to another line.
                self._compare_span(span, line)
            if len(self.torch_writes) > MAX_WRITES:
                self.torch_writes = dict(
                    itertools.islice(self.torch_writes.items(), MAX_WRITES // 2, None)
                )

    def writers_since(self, span: Span, since: int) -> list[tuple[Line, ...]]:
        """Return the lines that have written into a span after a time, the earliest first.

        The time is a number from `next_time`. Each item is a tuple of lines of which one wrote. The
        list is empty if no write is known.
        """
        with self.lock:
            self._compare_span(span)
            writes = [
                (time, lines)
                for watched in self.watched.values()
                if spans_overlap(watched.span, span)
                for (time, lines), parts in watched.writes.items()
                if any(addresses.overlap(span) for addresses in parts)
            ]
            writes += [
                (time, (line,))
                for (written_span, line), time in self.torch_writes.items()
                if spans_overlap(written_span, span)
            ]
            for watched in self.watched.values():
                if watched.digests and spans_overlap(watched.span, span):
                    self._suspect(watched.changed_blocks(block_digests(watched.span, span)))
        writes.sort(key=lambda write: write[0])
        return list(dict.fromkeys(lines for time, lines in writes if time > since))

    # --- comparing memory -------------------------------------------------------------------------

    def _blocks_to_compare(self, span: Span) -> list[int]:
        """Choose the blocks of a piece of memory to compare, those that are suspected first."""
        starts = block_starts(span, span)
        step = -(-len(starts) // MAX_BLOCKS)
        chosen = starts[self.random.randrange(step) :: step]
        first = self.random.randrange(len(chosen))
        suspects = [start for start in reversed(self.suspects) if start in starts]
        return list(dict.fromkeys([*suspects, *chosen[first:], *chosen[:first]]))

    def _suspect(self, blocks: Iterable[int]) -> None:
        """Compare blocks, by their addresses, first whenever their memory is watched again."""
        for start in blocks:
            self.suspects.pop(start, None)
            self.suspects[start] = None
        while len(self.suspects) > MAX_SUSPECTS:
            del self.suspects[next(iter(self.suspects))]

    def _compare_span(self, span: Span, line: Line | None = None) -> None:
        """Compare the watched blocks that a span overlaps; see `_compare`."""
        for watched in self.watched.values():
            storage = watched.keep_alive() if spans_overlap(watched.span, span) else None
            if storage is not None:
                blocks = [
                    block for block in watched.blocks.values() if spans_overlap(block.span, span)
                ]
                self._compare(watched, blocks, threading.get_ident(), line)

    def _compare_all(self, thread: int) -> None:
        """Compare as much memory as there is time for, when a line of this thread ends."""
        memories = list(self.watched.values())
        _time_limit.start()
        if not _time_limit.has_time:
            memories = memories[-MAX_ALWAYS_COMPARED:]
        for watched in memories:
            # The object keeps the memory alive while it is read.
            storage = watched.keep_alive()
            if storage is None:
                self.watched.pop(watched.span[0], None)
                continue
            blocks: Iterable[Block] = watched.blocks.values()
            if not _time_limit.has_time:
                blocks = itertools.islice(blocks, 1)
            self._compare(watched, blocks, thread, is_end_of_line=True)
        _time_limit.stop()

    def _compare(
        self,
        watched: WatchedMemory,
        blocks: Iterable[Block],
        thread: int,
        line: Line | None = None,
        is_end_of_line: bool = False,
    ) -> None:
        """Find changes of blocks, and attribute them to the lines that are running.

        A change is attributed only if no line has ended since its block was last compared.
        Otherwise an earlier line may have made it, so the block is suspected instead.

        Args:
            watched: The memory to which the blocks belong.
            blocks: The blocks to compare.
            thread: The identifier of this thread.
            line: The current line of this thread, if it is known without tracing.
            is_end_of_line: Whether the current line of this thread ends now. The blocks then count
                as compared at the beginning of the next line.
        """
        changes: list[Addresses] = []
        for block in blocks:
            addresses = block.changes()
            if addresses and block.line_count == self.line_count:
                changes.append(addresses)
            elif addresses:
                self._suspect([block.span[0]])
            block.line_count = self.line_count + is_end_of_line
        if changes:
            lines = self._candidate_lines(thread, line)
            if lines:
                watched.add_write(_clock.now, lines, Addresses.joined(changes))

    def _candidate_lines(self, thread: int, line: Line | None) -> tuple[Line, ...]:
        """Return the lines that may have written into memory since the current lines began.

        These are the current lines of all threads, because any thread may have written.

        Args:
            thread: The identifier of this thread.
            line: The current line of this thread, if it is known without tracing. It replaces the
                line at which tracing saw the thread last.

        Returns:
            The distinct lines, beginning with that of this thread. The tuple is empty if another
            line may have written, because a thread runs code of the user that is not traced.
        """
        current_lines = dict(self.current_lines)
        if line is not None:
            current_lines[thread] = line
        for ident, frame in sys._current_frames().items():
            if ident not in current_lines and _user_frame(frame) is not None:
                return ()
        this_line = current_lines.pop(thread, None)
        candidates = list(current_lines.values())
        if this_line is not None:
            candidates.insert(0, this_line)
        return tuple(dict.fromkeys(candidates))  # without repetitions, in the same order

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
        if not is_user_file(frame.f_code.co_filename) or is_generated(frame):
            return None
        if not self.is_tracing:  # `stop` was called in another thread.
            sys.settrace(None)
            return None
        thread = threading.get_ident()
        if event == "call" and thread not in self.current_lines:
            self.current_lines[thread] = line_of(frame)
        # When a line has raised an exception, the next event says whether it is caught here.
        if event in ("line", "return"):
            next_frame = frame if event == "line" else _user_frame(frame.f_back)
            self._end_line(thread, None if next_frame is None else line_of(next_frame))
        return self._trace

    def _end_line(self, thread: int, next_line: Line | None) -> None:
        """Attribute changes to the current lines, then set the current line of this thread.

        `next_line` is the line that begins now, or None if no known line of this thread follows.
        """
        with self.lock:
            self._compare_all(thread)
            self.line_count += 1
            if next_line is None:
                self.current_lines.pop(thread, None)
            else:
                self.current_lines[thread] = next_line


def _user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the nearest frame of user code among a frame and its callers, or None."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
