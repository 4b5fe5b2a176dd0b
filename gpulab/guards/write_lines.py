"""Which lines of the user's program write into memory that a guard watches.

Torch's own writes are seen as operations. What NumPy or another library writes is no operation; it is noticed by the
first line of the user's that begins, or the first function that returns, after it: some bytes of each watched memory
are compared then, and the line that was at work before is the one that wrote. Where several threads are at work, it is
one of their lines. Only lines of files that are not installed are followed, and none where a debugger or a measurement
of coverage follows them already.
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
from gpulab.guards.call_sites import Line, is_user_file, stack_frames, user_line
from gpulab.guards.fingerprints import memory
from gpulab.guards.holders import overlap

BYTES = 128  # of a memory that are compared
KEPT_WRITES = 8  # of each memory, the latest
MAX_WATCHED = 16  # pieces of memory, the latest; more would slow every line
MAX_WRITES = 10_000  # of torch, after which the older half is forgotten

if TYPE_CHECKING:
    from _typeshed import TraceFunction

_clock = itertools.count()


def now() -> int:
    """A number that grows from call to call, to say what came before what."""
    return next(_clock)


@dataclass
class _Watched:
    """A piece of memory, some of its bytes as they were last seen, and the lines that may have changed it since."""

    span: Span
    storages: list[StorageWeakRef]  # over this memory, any of which keeps it
    seen: bytes = b""
    writes: list[tuple[int, list[Line]]] = field(default_factory=list)  # when, and the lines of which one wrote

    def look(self) -> bool:
        """Take up the bytes as they are now, and tell whether one has changed."""
        storage = next(filter(None, map(storage_alive, self.storages)), None)  # which keeps the memory while it is read
        if storage is None:
            return False
        begin, end = self.span
        step = (end - begin) // BYTES | 1  # odd, so that not always the same byte of a number is seen
        before = self.seen
        self.seen = bytes(memoryview(memory(begin, end))[::step])
        return bool(before) and before != self.seen

    def wrote(self, lines: list[Line]) -> None:
        """One of these lines has written there just now."""
        self.writes = [*self.writes[1 - KEPT_WRITES :], (now(), lines)]


class WriteLines:
    """The lines that wrote, as far as they are known; `lines_since` tells them.

    Attributes:
        is_followed: Whether lines of the user's program are followed, so that writes of NumPy can be placed.
    """

    def __init__(self) -> None:
        self.watched: dict[int, _Watched] = {}  # by the address of the memory
        self.of_torch: dict[Span, tuple[int, Line]] = {}
        self.at_work: dict[int, Line] = {}  # the line that each thread began last
        self.lock = threading.RLock()
        self.followers = 0
        self.is_followed = False

    def start(self) -> None:
        """Follow the lines of this thread, and of those that it starts, once there is something to watch."""
        with self.lock:
            self.followers += 1

    def stop(self) -> None:
        """End what one call of `start` began."""
        with self.lock:
            self.followers -= 1
            if self.followers or not self.is_followed:
                return
            self.is_followed = False
            threading.settrace(None)
        if sys.gettrace() == self._follow:
            sys.settrace(None)
        for frame in stack_frames():
            if frame.f_trace == self._follow:
                frame.f_trace = None

    def watch(self, storage: StorageWeakRef, span: Span) -> None:
        """Notice from now on what changes a piece of memory of the host."""
        with self.lock:
            watched = self.watched.pop(span[0], None)
            if watched is None or watched.span != span:
                watched = _Watched(span, [])
            watched.storages = [storage, *(other for other in watched.storages if not other.expired())]
            if watched.look():  # what lay there before is gone
                watched.wrote(self._lines_at_work(threading.get_ident()))
            self.watched[span[0]] = watched
            while len(self.watched) > MAX_WATCHED:
                del self.watched[next(iter(self.watched))]
        self._begin_to_follow()

    def note(self, tensors: list[Tensor]) -> None:
        """An operation of torch has just written into tensors."""
        spans = [span for tensor in tensors if (span := span_of(tensor)) != (0, 0)]
        if not spans:
            return
        line = user_line()
        with self.lock:
            for span in spans:
                self.of_torch.pop(span, None)
                self.of_torch[span] = now(), line
            if len(self.of_torch) > MAX_WRITES:
                self.of_torch = dict(itertools.islice(self.of_torch.items(), MAX_WRITES // 2, None))
            for watched in self.watched.values():
                if any(overlap(watched.span, span) for span in spans) and watched.look():
                    watched.wrote([line])

    def lines_since(self, span: Span, since: int) -> list[Line]:
        """The lines of which one has written into a piece of memory last, after a time that `now` gave."""
        self._look(threading.get_ident())
        writes: list[tuple[int, list[Line]]] = []
        with self.lock:
            for watched in self.watched.values():
                writes += watched.writes if overlap(watched.span, span) else []
            writes += [(time, [line]) for written, (time, line) in self.of_torch.items() if overlap(written, span)]
        time, lines = max(writes, key=lambda write: write[0], default=(-1, []))
        return lines if time > since else []

    # --- following lines ------------------------------------------------------------------------------------

    def _begin_to_follow(self) -> None:
        """Follow the lines of this thread, unless somebody else follows them."""
        if sys.gettrace() is not None or not self.followers:
            return
        self.is_followed = True
        threading.settrace(self._follow)
        sys.settrace(self._follow)
        users = [frame for frame in stack_frames() if is_user_file(frame.f_code.co_filename)]
        for frame in users:
            frame.f_trace = self._follow
        if users:
            self.at_work[threading.get_ident()] = _line_of(users[0])

    @uncompiled
    def _follow(self, frame: types.FrameType, event: str, _: object) -> TraceFunction | None:
        """What Python calls where a function begins, and in those of the user's where a line begins or one returns."""
        if not is_user_file(frame.f_code.co_filename):
            return None
        if not self.is_followed:
            sys.settrace(None)  # of this thread
            return None
        if event != "call":
            thread = threading.get_ident()
            following = frame if event == "line" else _user_outside(frame)
            self._look(thread, None if following is None else _line_of(following), has_ended=following is None)
        return self._follow

    def _look(self, thread: int, following: Line | None = None, has_ended: bool = False) -> None:
        """Look for changes, which the lines that are at work have made; then another line is, or the thread's ended."""
        with self.lock:
            for watched in self.watched.values():
                if watched.look():
                    watched.wrote(self._lines_at_work(thread))
            if following is not None:
                self.at_work[thread] = following
            elif has_ended:
                self.at_work.pop(thread, None)

    def _lines_at_work(self, thread: int) -> list[Line]:
        """The line that this thread is at, and those of the others."""
        lines = self.at_work.get(thread), *(line for other, line in self.at_work.items() if other != thread)
        return list(dict.fromkeys(line for line in lines if line is not None))


def _user_outside(frame: types.FrameType) -> types.FrameType | None:
    """The innermost of the user's frames that have called a frame."""
    outer = frame.f_back
    while outer is not None and not is_user_file(outer.f_code.co_filename):
        outer = outer.f_back
    return outer


def _line_of(frame: types.FrameType) -> Line:
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
