"""The ledger of a search: a JSON line for each loss and for each trial that ended, from which all is rebuilt.

    {"ledger": 2, "search": {…}, "seal": …}                                    what is searched for, once
    {"point": {"learning_rate": 0.001}, "seed": 3, "loss": 0.0123, "seal": …}  null where the run diverged
    {"point": {"learning_rate": 0.001}, "state": "finished", …, "seal": …}     or pruned, or failed

A line is on the disk before the search goes on, so a search that is killed loses the training that it was at
and no other. What a killed process left of a line is dropped. Each line is sealed, and says after which it stands;
those of ledger 1 did not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from gpulab import files
from gpulab.errors import DataError, GpulabError, UsageError
from gpulab.training.search import Point, SearchProblem, key

LEDGER = 2
LARGEST = 1 << 30  # bytes


class LedgerError(GpulabError):
    """The ledger cannot be written: there is no going on."""


@dataclass
class Trial:
    """One point of the space, and what training there gave."""

    point: Point
    losses: dict[int, float]  # by seed, NaN for a diverged run
    number: int
    within: float | None = None  # the distance that points had to stay under when this one was proposed
    state: str = "running"  # then `finished`, `pruned` or `failed`
    note: str = ""  # why it was pruned or failed
    violation: float | None = None  # how far it is from equivalent, 0 or less where it is
    fresh_alpha: float | None = None  # of the verdict on fresh seeds, where there was one
    confirmed: bool = False


class TrialLog:
    """The trials of a search problem, as a context: inside it, nobody else may use the file.

    `tried` are the trials that have ended, in their order. One that failed before this process came is not among
    them: its point is one of `left`. The losses of what failed or was killed stay known.
    """

    def __init__(self, file: Path, problem: SearchProblem) -> None:
        self.file, self.problem = file, problem
        self.tried: list[Trial] = []
        self.losses: dict[str, dict[int, float]] = {}  # of a point
        self.next_number = 0
        self.last = b""  # line

    def __enter__(self) -> TrialLog:
        with contextlib.ExitStack() as stack:
            with files.writing(self.file):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                if os.path.lexists(self.file):
                    files.read(self.file, LARGEST)  # which says what is no file
                try:
                    stack.enter_context(FileLock(f"{self.file}.lock", timeout=0))
                except Timeout:
                    raise UsageError(f"{self.file}: another process is at work on this study") from None
                self.stream = stack.enter_context(self.file.open("a+b", buffering=0))
            self._read()
            self.left = [trial.point for trial in self.tried if trial.state == "failed"]
            self.tried = [trial for trial in self.tried if trial.state != "failed"]
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def begin(self, point: Point, number: int | None = None, within: float | None = None) -> Trial:
        """A trial of this point, with the losses that are known of it."""
        number = self.next_number if number is None else number
        return Trial(point, self.losses.setdefault(key(point), {}), number, within)

    def add_loss(self, trial: Trial, seed: int, loss: float) -> None:
        """Write down the loss from one seed."""
        self._write({"point": trial.point, "seed": seed, "loss": loss if math.isfinite(loss) else None})

    def end(self, trial: Trial, state: str, **outcome: Any) -> None:
        """Write down how a trial ended; `outcome` are other fields of `Trial`."""
        event = {"point": trial.point, "number": trial.number, "within": trial.within, "state": state}
        self._write(event | outcome)

    def _write(self, event: dict[str, Any]) -> None:
        self._append(event)
        self._take_in(event)

    def _append(self, document: dict[str, Any]) -> None:
        """Add a line to the file; one that cannot be written whole leaves nothing behind."""
        line = self._sealed(document) + b"\n"
        size = self.stream.seek(0, os.SEEK_END)
        with self._writing():
            try:
                if self.stream.write(line) < len(line):
                    raise OSError(errno.ENOSPC, "the disk is full")
                os.fsync(self.stream.fileno())
            except OSError:
                self.stream.truncate(size)
                raise
        self.last = bytes(line)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with files.writing(self.file):
                yield
        except GpulabError as error:
            raise LedgerError(error) from None

    def _take_in(self, event: dict[str, Any]) -> None:
        """Bring the trials up to date with a line; an error for one that is none of this search."""
        point = self.problem.from_json(event["point"])
        losses = self.losses.setdefault(key(point), {})
        if "seed" in event:
            losses[event["seed"]] = math.nan if event["loss"] is None else float(event["loss"])
            return
        trial = Trial(**{**event, "point": point, "losses": losses})
        needed = {*self.problem.seeds, *(self.problem.fresh if trial.fresh_alpha else ())}
        if trial.state == "finished" and (missing := needed - losses.keys()):
            raise ValueError(f"no loss of seed {min(missing)}")
        self.tried.append(trial)
        self.next_number = trial.number + 1

    def _read(self) -> None:
        """Rebuild the trials. A file that is not a ledger of this problem stays as it is."""
        header = {"ledger": LEDGER, "search": self.problem.identity}
        self.stream.seek(0)
        *lines, torn = self.stream.read().split(b"\n")
        if not lines and not self._sealed(header).startswith(torn):
            lines = [torn]
        version = LEDGER
        for number, line in enumerate(lines, 1):
            where = f"{self.file} (not a whole study of gl.reproduce; move it away to begin anew), line {number}"
            document = files.read_json(where, line)
            try:
                if number == 1:
                    version = self._version(document)
                files.check_seal(where, line, required=version != 1)
                document.pop("seal", None)
                if document.pop("after", None) != (self._after() if version != 1 else None):
                    raise ValueError("what stood before it is missing")
                self.last = line
                if number == 1:
                    self._check_problem(document)
                else:
                    self._take_in(document)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{where}: {type(error).__name__}: {error}") from None
        self.stream.truncate(self.stream.tell() - len(torn))
        if not lines:
            self._append(header)

    def _version(self, header: dict[str, Any]) -> int:
        """Of the ledger that begins so."""
        if "op_code" in header:
            raise DataError(
                f"{self.file}: a study of gpulab 0.1 (a journal of Optuna), which this gpulab does not read; name "
                "another file (runs of gpulab's own networks that are in the store are not trained again)"
            )
        if header["ledger"] not in (1, LEDGER):
            raise ValueError(f"ledger {header['ledger']!r}; this gpulab reads 1 and {LEDGER}")
        return header["ledger"]

    def _check_problem(self, header: dict[str, Any]) -> None:
        if other := [name for name, value in self.problem.identity.items() if header["search"].get(name) != value]:
            raise DataError(f"{self.file}: a study with another {', another '.join(other)}; name another file")

    def _sealed(self, document: dict[str, Any]) -> bytearray:
        whole = {**document, "after": self._after(), "seal": files.UNSEALED}
        return files.seal(json.dumps(whole, allow_nan=False).encode())

    def _after(self) -> str:
        """A word for the line before, so that none can be left out, doubled or put elsewhere."""
        return xxhash.xxh32_hexdigest(self.last.rstrip(b"\n"))
