"""The surroundings of the training loop: progress, periodic checkpoints and interruptions."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from gpulab.data._base import Window
from gpulab.report import Progress
from gpulab.training import loop
from gpulab.training._checkpoints import save_checkpoint
from gpulab.training._planned_run import Watch
from gpulab.training._progress import report_share

CHECKPOINT_SECONDS = 10.0  # seconds between two checkpoints of a run
# Seconds between two copies of losses from a GPU. With a `watch` they are copied after each window.
LOSS_SYNC_SECONDS = 0.1


class Supervisor:
    """Shows the progress of a training run, calls the user's `watch`, and saves checkpoints.

    Args:
        training: The training.
        window: The number of frames in a window.
        bar: The progress bar, in frames.
        watch: The user's function; None if there is none.
        checkpoint: The file for checkpoints; None to save none.
        total: The number of frames of the whole training run.
    """

    def __init__(
        self,
        training: loop.Training,
        window: int,
        bar: Progress,
        watch: Watch | None,
        checkpoint: Path | None,
        total: int,
    ) -> None:
        self.training = training
        self.window = window
        self.total = max(1, total)
        self.bar = bar
        self.watch = watch
        self.checkpoint = checkpoint
        self.saved_at = time.monotonic()

    def call_watch(self) -> None:
        """Call the user's function with the model and the number of updates so far."""
        if self.watch is not None:
            self.watch(self.training.model, self.training.step)

    def after_window(self) -> None:
        """Report progress, call `watch`, and save a checkpoint if one is due."""
        history = self.training.history
        frames_done = len(history) * self.window
        self.bar.set_postfix(loss=f"{history[-1].loss:.3g}", refresh=False)
        self.bar.update(frames_done - self.bar.n)  # the bar takes the increase
        report_share(frames_done / self.total)
        self.call_watch()
        if time.monotonic() - self.saved_at >= CHECKPOINT_SECONDS:
            self.save()

    def save(self) -> None:
        """Save a checkpoint now."""
        save_checkpoint(self.training, self.checkpoint)
        self.saved_at = time.monotonic()


def supervise(
    training: loop.Training,
    windows: Iterable[Window],
    engine: loop.Engine,
    *,
    window: int,
    total: int,
    watch: Watch | None = None,
    checkpoint: Path | None = None,
    progress: bool = True,
) -> None:
    """Train with a progress bar; save a checkpoint every ten seconds and on interruption.

    Args:
        training: The training, which may have been resumed from a checkpoint.
        windows: The windows that the training has not seen yet.
        engine: The engine that computes the updates of a window.
        window: The number of frames in a window.
        total: The number of frames of the whole training run.
        watch: As for `gpulab.train`.
        checkpoint: The file for checkpoints; None for no checkpoints.
        progress: Whether to show a progress bar.
    """
    with Progress(total=total, unit="frame", leave=False, disable=not progress) as bar:
        supervisor = Supervisor(training, window, bar, watch, checkpoint, total)
        supervisor.call_watch()
        try:
            loop.train(training, windows, engine, supervisor.after_window)
        except KeyboardInterrupt:
            supervisor.save()
            raise
