"""The progress of an experiment's runs, and the time that remains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

from gpulab.report import Progress

MIN_SHARE = 0.05  # the least finished share of a run from which its duration is estimated
MAX_SHARE = 0.99  # the largest share that is estimated for a run that does not report its own
REPORT_SECONDS = 0.5  # seconds between two reports of a run
BAR_FORMAT = "{percentage:3.0f}%|{bar}| {desc}"

# A function that is called with the finished share of a run. Each thread that trains has its own
# listener, in a context variable.
Listener = Callable[[float], None]
LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def write_share_to(file: Path | None) -> Iterator[None]:
    """Let training runs inside the block write their progress to a file for another process.

    Nothing is written if the file is None.
    """
    written_at = float("-inf")

    def write_share(share: float) -> None:
        """Write the share, unless the last one was written less than `REPORT_SECONDS` ago."""
        nonlocal written_at
        now = time.monotonic()
        if file is not None and now - written_at >= REPORT_SECONDS:
            written_at = now
            # A failure to report progress must not end a training run.
            with contextlib.suppress(OSError):
                file.write_text(f"{share:.6f}")

    token = LISTENER.set(write_share)
    try:
        yield
    finally:
        LISTENER.reset(token)


def report_share(share: float) -> None:
    """Report the finished share of a run to the listener of this context, if there is one."""
    listener = LISTENER.get()
    if listener is not None:
        listener(share)


def read_share(file: Path) -> float:
    """Read the progress that a run has written; 0 if it has not written yet, or is writing now."""
    try:
        return min(1.0, max(0.0, float(file.read_text())))
    except (OSError, ValueError):
        return 0.0


class RunClock:
    """Measures the durations of an experiment's runs, and estimates the time that remains.

    Durations are kept for each setting separately.

    Args:
        settings: The setting of each run.
        n_parallel: The number of runs that are trained at the same time.
        clock: A function that returns the time in seconds.

    Examples:
        >>> time = iter([0.0, 10.0, 10.0, 10.0, 12.0])
        >>> clock = RunClock(["cpu", "cpu", "cuda"], n_parallel=1, clock=lambda: next(time))
        >>> clock.start_run(0), clock.end_run(0), clock.start_run(1)
        (None, None, None)
        >>> # Ten seconds for the second run, and ten as a guess for the run under cuda
        >>> clock.seconds_left({1: 0.0})
        20.0
        >>> clock.shares({1: 0.0})
        {1: 0.2}
    """

    def __init__(
        self, settings: Sequence[str], n_parallel: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = list(settings)
        self.n_parallel = n_parallel
        self.clock = clock
        self.started: dict[int, float] = {}
        self.pending = set(range(len(settings)))
        self.seconds: dict[str, list[float]] = {}  # the durations of finished runs, by setting

    def skip(self, number: int) -> None:
        """Count a run as done without a duration, because it was not trained here."""
        self.pending.discard(number)
        self.started.pop(number, None)

    def start_run(self, number: int) -> None:
        """Record that a run begins now."""
        self.pending.discard(number)
        self.started[number] = self.clock()

    def end_run(self, number: int) -> None:
        """Record that a run has ended now, and keep its duration."""
        started = self.started.pop(number, None)
        self.pending.discard(number)
        if started is not None:
            self.seconds.setdefault(self.settings[number], []).append(self.clock() - started)

    def shares(self, reported_shares: dict[int, float]) -> dict[int, float]:
        """Return the finished share of each active run, by the number of the run.

        A run that does not report its share gets an estimate from the durations of finished runs
        under the same setting. If there are none, the estimate is t / (t + typical), where t is the
        elapsed time and `typical` the mean duration under other settings. It always grows and never
        reaches 1.
        """
        now = self.clock()
        seconds_by_setting = self._seconds_by_setting(reported_shares, None)
        typical = _mean(seconds_by_setting.values())
        shares = {}
        for number, started in list(self.started.items()):
            elapsed = now - started
            expected = seconds_by_setting.get(self.settings[number])
            share = reported_shares.get(number, 0.0)
            if share:
                shares[number] = share
            elif expected:
                shares[number] = min(MAX_SHARE, elapsed / expected)
            else:
                shares[number] = elapsed / (elapsed + typical) if typical else 0.0
        return shares

    def seconds_left(self, reported_shares: dict[int, float]) -> float | None:
        """Estimate the seconds until all runs are finished; None if nothing is known yet."""
        now = self.clock()
        seconds_by_setting = self._seconds_by_setting(reported_shares, now)
        typical = _mean(seconds_by_setting.values())
        if not typical:
            return None
        # An estimate is at least the time that an active run under the setting has taken already.
        # The items are copied to a list, because other threads start and end runs meanwhile.
        for number, started in list(self.started.items()):
            setting = self.settings[number]
            seconds_by_setting[setting] = max(
                seconds_by_setting.get(setting, typical), now - started
            )
        run_seconds_left = sum(
            seconds_by_setting.get(self.settings[number], typical) for number in self.pending
        )
        for number, started in list(self.started.items()):
            share = reported_shares.get(number, 0.0)
            elapsed = now - started
            if share >= MIN_SHARE:
                # A share s took t seconds, so the remaining 1 − s takes t (1 − s) / s.
                run_seconds_left += elapsed * (1 - share) / share
            else:
                run_seconds_left += seconds_by_setting[self.settings[number]] - elapsed
        n_runs_left = len(self.pending) + len(self.started)
        return run_seconds_left / max(1, min(self.n_parallel, n_runs_left))

    def _seconds_by_setting(
        self, reported_shares: dict[int, float], now: float | None
    ) -> dict[str, float]:
        """Compute the mean duration of a run for each setting for which it is known.

        It is the mean over finished runs. If there are none and `now` is given, it is extrapolated
        from an active run that has reported at least `MIN_SHARE`.
        """
        seconds_by_setting = {
            setting: sum(seconds) / len(seconds) for setting, seconds in list(self.seconds.items())
        }
        if now is not None:
            for number, started in list(self.started.items()):
                share = reported_shares.get(number, 0.0)
                if share >= MIN_SHARE:
                    seconds_by_setting.setdefault(self.settings[number], (now - started) / share)
        return seconds_by_setting


def _mean(values: Collection[float]) -> float:
    """Return the mean of numbers; 0 if there are none."""
    return sum(values) / len(values) if values else 0.0


def update_bar(
    bar: Progress,
    clock: RunClock,
    n_ended: int,
    reported_shares: dict[int, float],
    started_at: float,
) -> None:
    """Set a bar to the finished share of all runs, and describe the time that remains.

    The bar never moves backwards.
    """
    n_finished = n_ended + sum(clock.shares(reported_shares).values())  # with shares of active runs
    bar.n = max(bar.n, min(bar.total, n_finished))
    seconds_left = clock.seconds_left(reported_shares) if n_ended < bar.total else 0.0
    time_left = f", about {_minutes(seconds_left)} left" if seconds_left is not None else ""
    bar.set_description_str(
        f"{n_ended} of {bar.total} runs, {_minutes(time.monotonic() - started_at)}{time_left}"
    )


def _minutes(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours if there are any.

    >>> _minutes(5.4), _minutes(83), _minutes(7384)
    ('0:05', '1:23', '2:03:04')
    """
    total_minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(total_minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{remaining_seconds:02d}"
    return f"{minutes}:{remaining_seconds:02d}"
