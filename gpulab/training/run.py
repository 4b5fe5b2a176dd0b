"""One run: one training of one of gpulab's own networks, from one seed, under one setting, in this process.

`train_network` asks the store whether the run is there, goes around the loop with checkpoints, progress and
interruptions, and keeps what came of it. `gpulab.training.request` calls it for `gpulab.train`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpulab.data.base import Data, Window
from gpulab.data.feed import Loader
from gpulab.diagnostics import guards
from gpulab.errors import UsageError
from gpulab.models.base import Trainable
from gpulab.passports import passport
from gpulab.progress import Progress
from gpulab.settings import Setting
from gpulab.store import identities
from gpulab.store import runs as stores
from gpulab.training import loop
from gpulab.training.engines import Engines
from gpulab.training.keeping import History, Keeping, StoredRun
from gpulab.training.loop import Engine, Training
from gpulab.training.protocol import LAST_FIFTH
from gpulab.training.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

HISTORY_TYPES = ("int64", "int64", "float64", "float32")  # of `WindowNote`


@dataclass
class Run:
    """What one training left: the model, the losses along the way, and the record. `gpulab.train` returns it.

    `print(run)` says it in one line.

    Attributes:
        model: The network on the CPU, as it was trained; with its initial weights where the run comes from a store that
            kept none. None for a training of your own.
        data: What the network learned from; None for a training of your own.
        columns: The history as arrays by name: `window`, `step`, `loss`, `seconds`; see `history`.
        record: Everything that a store writes into the run's `run.json`, as a dictionary: what was asked for, the
            passport of the machine, the command, and the results.
        path: The run's folder in the store; None where it was not kept.
        trained: Whether `model` has the trained weights.

    Examples:
        >>> import gpulab as gl
        >>> run = gl.train("autoencoder", profile="smoke", progress=False)
        >>> list(run.history)
        ['window', 'step', 'loss', 'seconds']
        >>> images, reconstructions = run.predict()
        >>> reconstructions.shape
        torch.Size([297, 1, 28, 28])
    """

    model: Any
    data: Any
    columns: History
    record: dict[str, Any]
    path: Path | None = None
    trained: bool = True

    @functools.cached_property
    def history(self) -> pd.DataFrame:
        """A data frame with a row for each window.

        Its columns are `window` (from 0), `step` (updates so far), `loss` (the mean squared error per frame, averaged
        over the window) and `seconds` (since the beginning). For a training of your own there is a row for each number
        that it yielded, or a single one.
        """
        import pandas as pd  # not for every process that trains: it takes a third of the time that torch takes to load

        return pd.DataFrame({name: self.columns[name] for name in loop.WindowNote._fields})

    @property
    def status(self) -> str:
        """How the training ended, `finished` or `diverged`."""
        return self.record["status"]

    @property
    def final_loss(self) -> float:
        """The mean of the loss over the last fifth of the windows; NaN when the run diverged.

        For a training of your own it is what that gave under the name `final_loss` or `loss`, or without a name, else
        NaN.
        """
        return self._summary("final_loss")

    @property
    def heldout_loss(self) -> float:
        """The mean squared error per held-out frame after training; NaN when the run diverged.

        For a training of your own it is what that gave under this name, else NaN.
        """
        return self._summary("heldout_loss")

    def _summary(self, name: str) -> float:
        value = self.record["summary"][name]
        return math.nan if value is None else value

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers that a training of your own gave, by name; empty when it diverged, and for gpulab's networks."""
        return self.record.get("metrics") or {}

    @torch.no_grad()
    def predict(self, data: Data | None = None) -> tuple[Tensor, Tensor]:
        """Compute what the trained model makes of the held-out part of the data, in float32 on the CPU.

        Args:
            data: Other data of the same frame size; by default those that the run learned from.

        Returns:
            Two tensors of numbers in [0, 1]. For a sequence both have the shape (T, 1, C, H, W) and are the frames from
            the second on, and the prediction of each from the frames before it. For images both have the shape (N, C,
            H, W) and are the images, and their reconstructions.

        Raises:
            UsageError: For a run of a training of your own, whose network gpulab does not have, and for one whose
                weights the store did not keep.
            DataError: For data that cannot be read.
        """
        data = self.data if data is None else data
        if self.model is None or data is None:
            raise UsageError(f"{self.record['experiment']} trained a network that gpulab does not know")
        if not self.trained:
            raise UsageError(f"the store kept no weights of {self.path}: train it again with keep_weights=True")
        model = copy.deepcopy(self.model).float().eval()
        length = self.record["configuration"]["window"]
        pieces = [w.frames if w.restart else w.frames[1:] for w in data.heldout(length)]
        inputs = torch.from_numpy(np.concatenate(pieces)).float().div(255)
        if not data.sequential:
            return inputs, model(inputs)
        predicted, _ = model(inputs[:-1, None])
        return inputs[1:, None], predicted

    def __repr__(self) -> str:
        record, summary = self.record, self.record["summary"]
        where = f"{record['experiment']} under {record['setting']}, seed {record['seed']}"
        if self.status == "diverged":
            return f"{where}: diverged at step {record['diverged_at']}"
        if self.model is None:
            numbers = [f"{name} {value:.5g}" for name, value in self.metrics.items()]
            return f"{where}: {', '.join(numbers)}, {summary['seconds']:.1f} s"
        speed = summary["frames_per_second"]
        how = "sharing its GPU" if speed is None else f"{speed:.0f} frames/s"
        losses = f"final loss {self.final_loss:.5f}, held out {self.heldout_loss:.5f}"
        since = record.get("resumed_at")
        resumed = f", resumed at frame {since * record['configuration']['window']}" if since else ""
        return f"{where}: {losses}, {summary['seconds']:.1f} s ({how}){resumed}"


# What a training is watched by: called with the model and the number of updates.
Watch = Callable[[Trainable, int], None]
# True for a bar, or what is called with (frames done, loss).
Told = bool | Callable[[int, float], None]


@contextlib.contextmanager
def under(setting: Setting, threads: int | None) -> Iterator[None]:
    """What trainings of gpulab's own networks need in force; `threads` is how many such a network can use."""
    with setting.apply(), torch.random.fork_rng(devices=[]):
        if setting.threads is None and threads:
            torch.set_num_threads(min(threads, torch.get_num_threads()))
        yield


def train_network(
    spec: RunSpec,
    notes: dict[str, str | None],
    keeping: Keeping,
    *,
    guard: bool = False,
    watch: Watch | None = None,
    progress: Told = False,
) -> Run:
    """Do what is planned, `under` what it needs.

    Args:
        spec: What to train.
        notes: Texts that the record keeps beside what identifies the run, such as its `command`.
        keeping: Where the run is kept.
        guard, watch, progress: As of `gpulab.train`.

    Returns:
        The run.
    """
    alone = has_its_device_alone(spec.setting)
    spec.draw_weights()
    identity = spec.identity(passport())
    existing = keeping.existing_run(identity, keeping.weights)
    if existing:
        return with_model(spec, existing)
    record = stores.begun(identity, passport(), **notes)
    if spec.own:  # gpulab's own networks never draw from torch's global generator, which threads would share
        torch.manual_seed(spec.seed)
    training = set_up(spec)
    if keeping.resume(identity, training):
        record["resumed_at"] = len(training.history)
    with guards.guard() if guard else contextlib.nullcontext(), told(progress, **bar_of(spec, training)) as tell:
        saved = time.monotonic()

        def after_window() -> None:
            nonlocal saved
            tell(len(training.history) * spec.window, training.history[-1].loss)
            if watch:
                watch(training.model, training.step)
            if training.diverged_at is None and time.monotonic() - saved >= keeping.checkpoint_seconds:
                keeping.save_checkpoint(identity, training)
                saved = time.monotonic()

        if watch:
            watch(training.model, training.step)
        engine = Engines(spec, training, alone)
        try:
            train_to_the_end(spec, training, engine, after_window)
        except KeyboardInterrupt:
            if _can_go_on(training):
                keeping.save_checkpoint(identity, training)
            raise
    record |= outcome(spec, training)
    if not alone:  # its speed is not that of one network
        record |= {"shared": True, "summary": record["summary"] | {"frames_per_second": None}}
    spec.data.check_unchanged()
    spec.model.fresh = False
    run = Run(spec.model.cpu(), spec.data, history_columns(training.history), record)
    run.path = keeping.keep(StoredRun(None, record, run.columns, spec.model.state_dict()))
    return run


def with_model(spec: RunSpec, stored: StoredRun) -> Run:
    """A run at rest with its model, which is untrained where no weights were kept."""
    folder, record, columns, weights = stored
    if weights is not None:
        spec.model.to(dtype=spec.setting.dtype).load_state_dict(weights)
    return Run(spec.model, spec.data, columns, record, folder, trained=weights is not None)


def history_columns(rows: Sequence[Any]) -> History:
    """The history of a run, given a row a window."""
    columns = zip(loop.WindowNote._fields, zip(*rows, strict=True) if rows else [()] * 4, HISTORY_TYPES, strict=True)
    return {name: np.array(values, kind) for name, values, kind in columns}


# --- around the loop ---------------------------------------------------------------------------------------


def set_up(spec: RunSpec) -> Training:
    """What is planned, with the network on its device, whose weights have been drawn already."""
    return Training(spec.model.to(spec.setting.device, spec.setting.dtype), spec.learning_rate)


def windows(spec: RunSpec, training: Training) -> Iterator[Window]:
    """What is left to train on."""
    done, count = len(training.history), spec.frames // spec.window
    return itertools.islice(_for_device(spec, spec.data.windows(spec.window, spec.seed, done)), count - done)


def train_to_the_end(
    spec: RunSpec, training: Training, engine: Engine, after_window: Callable[[], None] = lambda: None
) -> None:
    """Train on the windows that are left."""
    loop.train(training, windows(spec, training), engine, after_window)


def bar_of(spec: RunSpec, training: Training | None = None) -> dict[str, Any]:
    """The options of a bar that counts the frames of a training."""
    done = len(training.history) if training else 0
    return {"total": spec.frames // spec.window * spec.window, "initial": done * spec.window, "unit": "frame"}


@contextlib.contextmanager
def told(progress: Told, **bar_options: Any) -> Iterator[Callable[[int, float], None]]:
    """What hears (done so far, loss), and shows it as `gpulab.train`'s `progress` says."""
    with Progress(**bar_options, leave=False, disable=progress is not True) as bar:

        def tell(done: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3g}", refresh=False)
            bar.update(done - bar.n)
            if callable(progress):
                progress(done, loss)

        yield tell


def has_its_device_alone(setting: Setting) -> bool:
    """Whether no other training keeps the GPU busy: those that share one have each a stream of its own."""
    if setting.kind != "cuda":
        return True
    return torch.cuda.current_stream(setting.device) == torch.cuda.default_stream(setting.device)


def _can_go_on(training: Training) -> bool:
    """Whether nothing has changed since the last window ended, so that one can go on from there."""
    changing = next(training.model.buffers(), None) is not None
    between = bool(training.history) and not training.inside_window
    return between and not changing and training.diverged_at is None


def _for_device(spec: RunSpec, made: Iterator[Window]) -> Iterator[Window]:
    """The windows; where a device computes, the next is made meanwhile, by several threads.

    Trainings that share a device need no such threads: while one makes a window, others keep the device busy.
    """
    if spec.setting.kind == "cpu" or not has_its_device_alone(spec.setting):
        return made
    spec.data.threads = min(4, os.cpu_count() or 1)
    return ahead(made)


def ahead(made: Iterator[Window]) -> Iterator[Window]:
    """The same, each made while this thread waits for a device to be done with the one before."""
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(next, made, None)
        while True:
            window = upcoming.result()
            if window is None:
                return
            upcoming = pool.submit(next, made, None)
            yield window


def outcome(spec: RunSpec, training: Training) -> dict[str, Any]:
    """Status and summary for the record."""
    heldout = math.nan if training.diverged_at else heldout_loss(spec, training.model)
    if not math.isfinite(heldout) and training.diverged_at is None:
        training.diverged_at = training.step  # the last update ruined the weights, and no later loss shows it
    diverged, count = training.diverged_at is not None, spec.frames // spec.window
    last = [note.loss for note in training.history[-max(1, count // LAST_FIFTH) :]]
    return {
        "status": "diverged" if diverged else "finished",
        "gradients": " and ".join(sorted(training.ways - {"captured"})),
        "captured": "captured" in training.ways,
        "diverged_at": training.diverged_at,
        "summary": {
            # JSON has no NaN.
            "final_loss": None if diverged else math.fsum(last) / len(last),
            "heldout_loss": None if diverged else heldout,
            "seconds": training.history[-1].seconds,
            "frames_per_second": len(training.history) * spec.window / training.history[-1].seconds,
            "weights": identities.weights_digest(training.model.state_dict()),
        },
    }


@torch.no_grad()
def heldout_loss(spec: RunSpec, model: Trainable) -> float:
    """The mean squared error per held-out frame."""
    model.eval()
    loader = Loader("window", spec.setting)
    state, errors = None, []
    for window in _for_device(spec, spec.data.heldout(spec.window)):
        state = None if window.restart else state
        for batch in model.batches(loader.window(window.frames)):
            _, per_frame, state = model.training_loss(batch, state)
            errors.append(per_frame)
    values = torch.cat(errors).tolist()  # one look at the device, since every look waits for it
    return math.fsum(values) / len(values)
