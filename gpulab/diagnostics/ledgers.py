"""Who holds memory: what was made, where, what is gone, and what stays from step to step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KINDS = ("parameters", "gradients", "optimizer state", "saved for backward", "other")
BEFORE = "there before"  # the line of what is older than the watch
RISES = 3  # steps after which more is held than after the one before, to call it a leak


@dataclass
class Origin:
    """What made a piece of memory, and what it is for, which may turn out later."""

    line: str
    kind: str = "other"


Tensors = Mapping[int, list[tuple[int, Origin]]]  # (bytes, origin) of tensors by address, in the order they came


@dataclass
class Piece:
    """A piece of memory: its bytes, and when it came, in events and in steps."""

    size: int
    origin: Origin
    born: int
    step: int


@dataclass
class Leak:
    """What a line made and what stays, more of it after each step or so.

    Attributes:
        line: that made it.
        kind: what it is for.
        steps: their numbers.
        held: after each of them, the bytes that were made in the steps before it.
        held_by_python: whether tensors of the program hold it; if not, a graph does that hangs on such a tensor.
        collected: whether it was gone once Python's collector of reference cycles had run.
    """

    line: str
    kind: str
    steps: list[int]
    held: list[int]
    held_by_python: bool = True
    collected: bool = False

    @property
    def rate(self) -> float:
        """Bytes more from step to step."""
        return (self.held[-1] - self.held[0]) / (len(self.held) - 1)


@dataclass
class Ledger:
    """Pieces of memory by a key of their own, their sum, and what was there when that was largest."""

    step: int = 1
    total: int = 0
    peak: int = 0
    peak_step: int = 1
    live: dict[Hashable, Piece] = field(default_factory=dict)
    held: list[Counter[str]] = field(default_factory=list)  # after each step, by line, what is older than it

    def __post_init__(self) -> None:
        self._events = itertools.count(1)
        self._peak_event = 0
        self._gone: list[Piece] = []  # that were there at the peak

    def born(self, key: Hashable, size: int, origin: Origin, before: bool = False) -> Piece:
        """A piece that is there from now on; of one from `before` the watch nothing was new."""
        self.died(key)
        piece = Piece(size, origin, 0 if before else next(self._events), 0 if before else self.step)
        self.live[key] = piece
        self._add(size)
        return piece

    def resized(self, piece: Piece, size: int) -> None:
        """A piece that has become larger or smaller."""
        more, piece.size = size - piece.size, size
        self._add(more)

    def _add(self, size: int) -> None:
        self.total += size
        if self.total > self.peak:
            self.peak, self.peak_step, self._peak_event = self.total, self.step, next(self._events)
            self._gone.clear()

    def died(self, key: Hashable) -> None:
        """What is gone; what nobody knew is none of it."""
        piece = self.live.pop(key, None)
        if piece is not None:
            self.total -= piece.size
            if piece.born <= self._peak_event:
                self._gone.append(piece)

    def mark(self) -> None:
        """The end of a step."""
        old = Counter[str]()
        for piece in list(self.live.values()):
            if 0 < piece.step < self.step:
                old[piece.origin.line] += piece.size
        self.held.append(old)
        self.step += 1

    def at_peak(self) -> Iterator[Piece]:
        """The pieces that were there when most was."""
        return (piece for piece in [*self.live.values(), *self._gone] if piece.born <= self._peak_event)

    def leaks(self) -> list[Leak]:
        """What grew in the second half of the steps, and in three of them at least, and never shrank; the worst first.

        What was made in the step before, such as a state that is carried on, is none of it; and what is made once,
        such as Adam's moments, does not grow.
        """
        found = []
        for line in set().union(*self.held):
            held = [old[line] for old in self.held]
            rises = np.diff(held)
            if (rises >= 0).all() and (rises > 0).sum() >= RISES and (rises[-(len(held) // 2) :] > 0).any():
                kinds = Counter[str]()
                for piece in self.old(line):
                    kinds[piece.origin.kind] += piece.size
                kind = kinds.most_common(1)[0][0] if kinds else "other"
                found.append(Leak(line, kind, list(range(1, len(held) + 1)), held))
        return sorted(found, key=lambda leak: -leak.rate)

    def old(self, line: str) -> Iterator[Piece]:
        """The pieces of a line that are there still, older than the last step."""
        pieces = list(self.live.values())
        return (p for p in pieces if p.origin.line == line and 0 < p.step < self.step - 1)


class Blocks:
    """A ledger of the blocks of CUDA's caching allocator, from torch's memory snapshots.

    What made a block is known from the tensor in it (`tensors`, by address, in the order in which they came); for
    memory that no tensor shows, such as a kernel's, from the frames in the snapshot.

    Args:
        snapshot: `torch.cuda.memory._snapshot()` at the beginning.
        device: its number.
        tensors: (bytes, origin) of the tensors there are, by address.
    """

    def __init__(self, snapshot: Mapping[str, Any], device: int, tensors: Tensors) -> None:
        self.ledger, self.device, self.read = Ledger(), device, len(snapshot["device_traces"][device])
        for segment in snapshot["segments"]:
            for block in segment["blocks"] if segment["device"] == device else ():
                if block["state"] == "active_allocated":
                    known = tensors.get(block["address"])
                    size = block.get("requested_size", block["size"])
                    self.ledger.born(block["address"], size, known[0][1] if known else Origin(BEFORE), before=True)

    def replay(self, snapshot: Mapping[str, Any], tensors: Tensors) -> None:
        """What was allocated and freed since the last time; `tensors` are those that came since then."""
        trace = snapshot["device_traces"][self.device]
        for entry in trace[self.read :]:
            address = entry.get("addr")
            if entry["action"] == "alloc":
                here = tensors.get(address, [])
                matches = bool(here) and here[0][0] == entry["size"]
                origin = here.pop(0)[1] if matches else Origin(_line(entry.get("frames", ())))
                self.ledger.born(address, entry["size"], origin)
            elif entry["action"] in ("free_requested", "free_completed"):
                self.ledger.died(address)
        self.read = len(trace)


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    from gpulab.numerics.lines import is_users, shown

    found = (shown(frame["filename"], frame["line"]) for frame in frames if is_users(frame["filename"]))
    return next(found, "")


def in_words(size: float) -> str:
    """Bytes in a unit that suits them.

    Examples:
        >>> in_words(12_345_678), in_words(12)
        ('12.3 MB', '12 B')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"
