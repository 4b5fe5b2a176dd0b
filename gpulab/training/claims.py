"""Who does which run: claims in a store, so that several experiments on it at once do no run twice.

A claim is a small file that only one process can make. Its holder touches it every few seconds; one that nobody
touches any more is another's to take. Clocks of different machines are never compared: who wants a claim watches
whether it changes. Two processes that hold the same claim in spite of all would do a run twice and lose nothing, for
the first to finish a run wins.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol

import psutil

from gpulab import files
from gpulab.errors import GpulabError

FOLDER = ".claims"
BEAT, STALE = 10.0, 120.0  # seconds: network file systems tell others of a change after a minute at most


class Place(Protocol):
    """Where claims are kept. Those on one run are numbered: who takes a dead one makes the next."""

    def found(self, name: str) -> dict[int, object]:
        """The numbers of the claims on a run, each with something that changes when it is touched."""

    def make(self, name: str, number: int) -> bool:
        """Make a claim; False where there is one of this number, whoever else makes it at the same moment."""

    def touch(self, name: str, number: int) -> None:
        """Show that its holder lives."""

    def remove(self, name: str, number: int) -> None:
        """Give it back, if it is still there."""

    def is_dead(self, name: str, number: int) -> bool:
        """Whether its holder is known to be gone, without waiting."""


def holder_of() -> bytes:
    """What a claim says of its holder, this process."""
    return f"{os.getpid()} {files.HERE}".encode()


def holder_is_gone(content: bytes) -> bool:
    """Whether it was a process of this machine that is gone; of another machine's nobody here can tell."""
    process, machine, *_ = [*content.split(), b"", b""]
    return machine == files.HERE.encode() and process.isdigit() and not psutil.pid_exists(int(process))


class InFolder:
    """Claims as files in a folder, which may be on a network file system."""

    def __init__(self, store: Path) -> None:
        self.folder = store / FOLDER

    def _file(self, name: str, number: int) -> Path:
        return self.folder / f"{name}.{number}"

    def found(self, name: str) -> dict[int, object]:
        """As `Place` says."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            mine = [entry for entry in entries if entry.name.rpartition(".")[0] == name]
            return {int(entry.name.rpartition(".")[2]): entry.stat().st_mtime_ns for entry in mine}
        return {}

    def make(self, name: str, number: int) -> bool:
        """As `Place` says."""
        file = self._file(name, number)
        with files.writing(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError), open(file, "xb") as claim:
                claim.write(holder_of())
                return True
        return False

    def touch(self, name: str, number: int) -> None:
        """As `Place` says."""
        os.utime(self._file(name, number))

    def remove(self, name: str, number: int) -> None:
        """As `Place` says."""
        self._file(name, number).unlink(missing_ok=True)

    def is_dead(self, name: str, number: int) -> bool:
        """As `Place` says."""
        with contextlib.suppress(OSError):
            return holder_is_gone(self._file(name, number).read_bytes())
        return False


class Claims:
    """The claims that this process holds, which it touches as long as it lives.

    Examples:
        >>> import tempfile
        >>> place = InFolder(Path(tempfile.mkdtemp()))
        >>> with Claims(place) as mine, Claims(place) as others:
        ...     mine.take("a-run"), others.take("a-run"), mine.release("a-run"), others.take("a-run")
        (True, False, None, True)
    """

    def __init__(self, place: Place) -> None:
        self.place, self.held = place, dict[str, int]()
        self.seen: dict[tuple[str, int], tuple[object, float]] = {}  # others' claims: how they were, since when
        self.ended = threading.Event()
        self.beat = threading.Thread(target=self._beat, daemon=True)

    def take(self, name: str) -> bool:
        """Claim a run; False where another does it."""
        there = self.place.found(name)
        last = max(there, default=0)
        if there and not (self._is_stale(name, last, there[last]) or self.place.is_dead(name, last)):
            return False
        if not self.place.make(name, last + 1):
            return False
        self.held[name] = last + 1
        return True

    def release(self, name: str) -> None:
        """Give a claim back, if it is held; the run is done, or somebody else's to try."""
        number = self.held.pop(name, 0)
        for each in range(1, number + 1):  # its own last: until then nobody else can make one
            with contextlib.suppress(OSError, GpulabError):
                self.place.remove(name, each)

    def _is_stale(self, name: str, number: int, now: object) -> bool:
        before, since = self.seen.setdefault((name, number), (now, time.monotonic()))
        if before != now:
            self.seen[name, number] = now, time.monotonic()
        return before == now and time.monotonic() - since > STALE

    def _beat(self) -> None:
        while not self.ended.wait(BEAT):
            for name, number in [*self.held.items()]:
                with contextlib.suppress(
                    OSError
                ):  # a file system that is away for a while, or a claim that was removed
                    self.place.touch(name, number)

    def __enter__(self) -> Claims:
        self.beat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self.beat.join()
        for name in [*self.held]:
            self.release(name)
