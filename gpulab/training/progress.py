"""How far the runs of an experiment are, and how long the others will take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

from gpulab.report import Progress

FEWEST = 0.05  # share of a run after which its speed says how long such a run takes
ALMOST = 0.99  # share up to which a run is shown that takes longer than those before it
NOTE_SECONDS = 0.5  # between two notes of a run
FORMAT = "{percentage:3.0f}%|{bar}| {desc}"

# What is called with the share of the run that is done; contexts keep threads that train at the same time apart.
Listener = Callable[[float], None]
LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def noted_in(file: Path | None) -> Iterator[None]:
    """Inside, a training writes its share that is done into a file, for another process; None writes nothing."""
    noted_at = float("-inf")

    def note(share: float) -> None:
        nonlocal noted_at
        now = time.monotonic()
        if file is not None and now - noted_at >= NOTE_SECONDS:
            noted_at = now
            with contextlib.suppress(OSError):  # a bar that stands still is no reason to end a training
                file.write_text(f"{share:.6f}")

    token = LISTENER.set(note)
    try:
        yield
    finally:
        LISTENER.reset(token)


def tell_share(share: float) -> None:
    """Say how much of a run is done, to whom it concerns."""
    listener = LISTENER.get()
    if listener is not None:
        listener(share)


def read_share(file: Path) -> float:
    """What a run has written; 0 where it has not written yet, or is writing now."""
    try:
        return min(1.0, max(0.0, float(file.read_text())))
    except (OSError, ValueError):
        return 0.0


class RunClock:
    """The times of an experiment's runs, of which each setting has its own.

    Args:
        settings: The setting of each run.
        at_once: How many runs are trained at the same time.
        now: The clock, in seconds.

    Examples:
        >>> time = iter([0.0, 10.0, 10.0, 10.0, 12.0])
        >>> clock = RunClock(["cpu", "cpu", "cuda"], at_once=1, now=lambda: next(time))
        >>> clock.begin(0), clock.end(0), clock.begin(1)
        (None, None, None)
        >>> clock.seconds_left({1: 0.0})  # ten for the second run, and as many are guessed for the one under cuda
        20.0
        >>> clock.shares({1: 0.0})
        {1: 0.2}
    """

    def __init__(self, settings: Sequence[str], at_once: int, now: Callable[[], float] = time.monotonic) -> None:
        self.settings, self.at_once, self.now = list(settings), at_once, now
        self.begun: dict[int, float] = {}
        self.waiting = set(range(len(settings)))
        self.seconds: dict[str, list[float]] = {}  # of the runs that ended, by setting

    def skip(self, number: int) -> None:
        """Count a run as done that was not trained here."""
        self.waiting.discard(number)
        self.begun.pop(number, None)

    def begin(self, number: int) -> None:
        """Note that a run begins."""
        self.waiting.discard(number)
        self.begun[number] = self.now()

    def end(self, number: int) -> None:
        """Note that a run has ended."""
        begun = self.begun.pop(number, None)
        self.waiting.discard(number)
        if begun is not None:
            self.seconds.setdefault(self.settings[number], []).append(self.now() - begun)

    def shares(self, noted: dict[int, float]) -> dict[int, float]:
        """How much of each run under way is done: as it has noted, or by the time that such runs take.

        A run under a setting that is new approaches its end ever more slowly, so that its bar moves.
        """
        now, known = self.now(), self._known(noted, None)
        usual = _mean(known.values())
        shares = {}
        for number, begun in list(self.begun.items()):
            elapsed, expected = now - begun, known.get(self.settings[number])
            if share := noted.get(number, 0.0):
                shares[number] = share
            elif expected:
                shares[number] = min(ALMOST, elapsed / expected)
            else:
                shares[number] = elapsed / (elapsed + usual) if usual else 0.0
        return shares

    def seconds_left(self, noted: dict[int, float]) -> float | None:
        """How long the runs that are not done will take; None where nobody knows yet."""
        now = self.now()
        known = self._known(noted, now)
        usual = _mean(known.values())
        if not usual:
            return None
        for number, begun in list(self.begun.items()):  # a run takes no less than it has taken
            setting = self.settings[number]
            known[setting] = max(known.get(setting, usual), now - begun)
        left = sum(known.get(self.settings[number], usual) for number in self.waiting)
        for number, begun in list(self.begun.items()):
            share, elapsed = noted.get(number, 0.0), now - begun
            if share >= FEWEST:
                left += elapsed * (1 - share) / share
            else:
                left += known[self.settings[number]] - elapsed
        return left / max(1, min(self.at_once, len(self.waiting) + len(self.begun)))

    def _known(self, noted: dict[int, float], now: float | None) -> dict[str, float]:
        """How long a run takes under each setting of which that is known: from runs that ended, or one under way."""
        known = {setting: sum(seconds) / len(seconds) for setting, seconds in list(self.seconds.items())}
        if now is not None:
            for number, begun in list(self.begun.items()):
                share = noted.get(number, 0.0)
                if share >= FEWEST:
                    known.setdefault(self.settings[number], (now - begun) / share)
        return known


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def show(bar: Progress, clock: RunClock, n_ended: int, noted: dict[int, float], began: float) -> None:
    """Move a bar to where the runs are, and say how long the others will take."""
    bar.n = max(bar.n, min(bar.total, n_ended + sum(clock.shares(noted).values())))
    left = clock.seconds_left(noted) if n_ended < bar.total else 0.0
    rest = f", about {_minutes(left)} left" if left is not None else ""
    bar.set_description_str(f"{n_ended} of {bar.total} runs, {_minutes(time.monotonic() - began)}{rest}")


def _minutes(seconds: float) -> str:
    """A time.

    >>> _minutes(5.4), _minutes(83), _minutes(7384)
    ('0:05', '1:23', '2:03:04')
    """
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
