"""Memory whose changes a guard finds by comparing it with a copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from gpulab._torch_internals import Span, StorageWeakRef, storage_alive
from gpulab.guards._call_sites import Line
from gpulab.guards._fingerprints import BLOCK_BYTES, host_memory, memory_digest

WORD_BYTES = 8  # bytes that are compared at a time to find out which have changed
MAX_KEPT_WRITES = 64  # the latest writes that are kept for each memory
MAX_PARTS = 64  # parts of the addresses of a write before they are joined


class Addresses(NamedTuple):
    """Addresses of bytes, as intervals.

    Attributes:
        starts: The first address of each interval, int64 (n,).
        stops: The address after the last one of each interval, int64 (n,).
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def joined(cls, parts: Iterable[Addresses]) -> Self:
        """Return the addresses that are in any of several parts.

        >>> first = Addresses(np.array([0, 90]), np.array([9, 99]))
        >>> Addresses.joined([first, Addresses(np.array([7]), np.array([20]))])
        Addresses(starts=array([ 0, 90]), stops=array([20, 99]))
        """
        starts, stops = map(np.concatenate, zip(*parts, strict=True))
        order = np.argsort(starts, kind="stable")
        sorted_starts = starts[order]
        # The largest stop so far: an interval may lie within an earlier one.
        reached = np.maximum.accumulate(stops[order])
        # A joined interval consists of intervals without gaps between them. Its first one begins
        # after everything reached so far. Its last one comes before the first of the next.
        is_first = np.append(True, sorted_starts[1:] > reached[:-1])
        is_last = np.append(is_first[1:], True)
        return cls(sorted_starts[is_first], reached[is_last])

    def overlap(self, span: Span) -> bool:
        """Return whether any of the addresses is in a span."""
        return bool(((self.starts < span[1]) & (self.stops > span[0])).any())


class Block:
    """A piece of memory of at most `BLOCK_BYTES` bytes, and a copy of its last known content.

    Attributes:
        span: The address of its first byte, and the address after its last byte.
        line_count: The number of lines that had begun when it was last compared.
    """

    def __init__(self, span: Span, line_count: int) -> None:
        self.span = span
        self.line_count = line_count
        self._copy_content()

    def _copy_content(self) -> None:
        self._content = bytes(host_memory(*self.span))
        self._digest = xxhash.xxh3_64_intdigest(self._content)

    def changes(self) -> Addresses | None:
        """Return the addresses of the bytes that have changed since the last call, or None."""
        if memory_digest(*self.span) == self._digest:
            return None
        previous = self._content
        self._copy_content()
        return _differing_addresses(previous, self._content, self.span[0])


def _differing_addresses(previous: bytes, current: bytes, start: int) -> Addresses | None:
    """Return the addresses of the bytes that differ, or None if none do.

    Each interval begins and ends with a byte that differs. Up to 14 equal bytes inside it count as
    well, because a new value may have some of the bytes of the old one.

    Args:
        previous: The previous content.
        current: The current content, of the same length.
        start: The address of the first byte.

    >>> _differing_addresses(bytes(32), bytes(3) + b"xy" + bytes(20) + b"z" + bytes(6), 100)
    Addresses(starts=array([103, 125]), stops=array([105, 126]))
    """
    padding = bytes(-len(current) % WORD_BYTES)
    old_words = np.frombuffer(previous + padding, np.uint64)
    new_words = np.frombuffer(current + padding, np.uint64)
    # Each run of words that differ begins at an edge, and the next edge is the word after it.
    edges = np.flatnonzero(np.diff(old_words != new_words, prepend=False, append=False))
    if not len(edges):
        return None
    first_words = edges[::2]
    last_words = edges[1::2] - 1
    old_bytes = old_words.view(np.uint8).reshape(-1, WORD_BYTES)
    new_bytes = new_words.view(np.uint8).reshape(-1, WORD_BYTES)
    # `argmax` finds the first byte that differs, so it counts the equal bytes before this one: from
    # the beginning of a run's first word, and from the end of its last word.
    equal_before = (old_bytes[first_words] != new_bytes[first_words]).argmax(1)
    equal_after = (old_bytes[last_words] != new_bytes[last_words])[:, ::-1].argmax(1)
    return Addresses(
        starts=start + WORD_BYTES * first_words + equal_before,
        stops=start + WORD_BYTES * (last_words + 1) - equal_after,
    )


class WatchedMemory:
    """A piece of memory that is watched for changes.

    Attributes:
        span: The address of its first byte, and the address after its last byte.
        storages: The storages over this memory. Any of them keeps it alive.
        blocks: The blocks that are compared, by their addresses.
        digests: The digest of each block when a tensor was last created over the memory. Empty if
            all blocks are compared.
        writes: The latest writes. The keys are the time, and the lines of which one wrote.
    """

    def __init__(self, span: Span) -> None:
        self.span = span
        self.storages: list[StorageWeakRef] = []
        self.blocks: dict[int, Block] = {}
        self.digests: dict[int, int] = {}
        self.writes: dict[tuple[int, tuple[Line, ...]], list[Addresses]] = {}

    def keep_alive(self) -> object:
        """Return an object that keeps the memory alive; None if it has been freed."""
        return next(filter(None, map(storage_alive, self.storages)), None)

    def choose_blocks(self, starts: Iterable[int], line_count: int) -> None:
        """Compare the blocks that begin at these addresses from now on, in this order."""
        self.blocks = {
            start: self.blocks.get(start)
            or Block((start, min(start + BLOCK_BYTES, self.span[1])), line_count)
            for start in starts
        }

    def changed_blocks(self, digests: dict[int, int]) -> list[int]:
        """Return which blocks have other digests than when a tensor was last created here.

        Only blocks that are not compared are returned, by their addresses.
        """
        return [
            start
            for start, digest in digests.items()
            if start not in self.blocks and self.digests.get(start, digest) != digest
        ]

    def add_write(self, time: int, lines: tuple[Line, ...], addresses: Addresses) -> None:
        """Record that one of these lines has just written here; keep only the latest writes."""
        parts = self.writes.setdefault((time, lines), [])
        parts.append(addresses)
        if len(parts) > MAX_PARTS:
            parts[:] = [Addresses.joined(parts)]
        if len(self.writes) > MAX_KEPT_WRITES:
            del self.writes[next(iter(self.writes))]
