"""One run: one training, from one seed, under one setting.

`train` makes a `Plan` of what it was asked for, which `step.Trainer` carries out window by window, and keeps the
result in a store.
"""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from gpulab.data.datasets import Data
from gpulab.diagnostics import guards
from gpulab.errors import UsageError
from gpulab.models.base import Trainable
from gpulab.passports import passport
from gpulab.settings import Setting
from gpulab.store import identities, records, run_files
from gpulab.store.object_store import Remote, remote
from gpulab.training import parallel
from gpulab.training.functions import TrainingFunction, is_function
from gpulab.training.plan import Plan, plan_run
from gpulab.training.protocol import Specification
from gpulab.training.step import told

CHECKPOINT_SECONDS = 10.0


@dataclass
class Run:
    """What one training left.

    Attributes:
        model: The trained network, on the CPU; None where a function of your own trained.
        data: What it learned from; None likewise.
        history: A row for each window: `window`, `step` (updates so far), `loss` (mean squared error per frame,
            averaged over the window), `seconds`.
        record: Everything that is written to the store's `run.json`.
        path: The run's folder, where it was kept.
    """

    model: Any
    data: Any
    history: pd.DataFrame
    record: dict[str, Any]
    path: Path | None = None

    @property
    def status(self) -> str:
        """`finished` or `diverged`."""
        return self.record["status"]

    @property
    def final_loss(self) -> float:
        """The mean of the loss over the last fifth of the windows; NaN when diverged."""
        return self._summary("final_loss")

    @property
    def heldout_loss(self) -> float:
        """The mean squared error per held-out frame after training; NaN when diverged."""
        return self._summary("heldout_loss")

    def _summary(self, name: str) -> float:
        value = self.record["summary"][name]
        return math.nan if value is None else value

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers that a function of your own gave; none when diverged."""
        return self.record.get("metrics") or {}

    @torch.no_grad()
    def predict(self, data: Data | None = None) -> tuple[Tensor, Tensor]:
        """What the trained model makes of the held-out part of the data, in float32.

        Returns:
            For a sequence both are (T, 1, C, H, W), in [0, 1]: the frames from the second on, and the prediction
            of each made from the frames before it. For images both are (N, C, H, W): images, reconstructions.
        """
        data = self.data if data is None else data
        if self.model is None or data is None:
            raise UsageError(f"{self.record['experiment']} trained a network that gpulab does not know")
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


def train(
    net: Trainable | TrainingFunction | Callable[..., Any] | str,
    data: Data | str | None = None,
    setting: Setting | str = "cpu",
    seed: int = 0,
    profile: str = "quick",
    *,
    frames: int | None = None,
    learning_rate: float | None = None,
    window: int | None = None,
    data_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    rerun: int = 0,
    store: str | Path | None = None,
    resume: bool = True,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    keep_weights: bool = True,
    guard: bool = False,
    watch: Callable[[Trainable, int], None] | None = None,
    progress: bool | Callable[[int, float], None] = True,
    command: str | None = None,
    registered: str | Path | None = None,
    **factors: Any,
) -> Run:
    """Train a copy of a network by the published protocol, and return the run.

    PredNet: windows of 20 frames, one update each, the state carried from window to window; Adam with
    learning rate 1e-3, beta 0.9 and 0.999, eps 1e-8; a batch of one. The autoencoder: one image per
    update; the whitener: 50. The loss reported is the mean squared error per frame. `final_loss` is its mean over
    the last fifth of the windows. A loss that is not finite ends the run as `diverged`.

    With a `store`, the run is kept there, an interrupted one resumes from its last checkpoint, and one that is
    already there is returned without training (unless it was kept without the weights that `keep_weights` asks for).

    A training of your own is a function `train(seed, setting)`, or the text `"my_training.py:train"`, with parameters
    in any order: the `seed`, from which torch's, NumPy's and Python's random numbers are drawn already; the `setting`,
    if wanted, which is in force already (`setting.device`, `setting.dtype`); a `folder`, if wanted, which a killed run
    leaves as it is, for checkpoints; and options with defaults, where one that names a file stands for its content
    (other files that it opens are not noticed). It returns a number, or a dict of them, or yields
    these as it goes: the mean of the last fifth counts. One called `loss` is the run's `final_loss`, too. What is not
    finite, an `ArithmeticError` or a `LinAlgError` ends it as `diverged`. Nothing of the protocol above is used.

    Args:
        net: A training of your own; or `"autoencoder"`, `"prednet"`, `"whitener"`, or a module derived from
            `Trainable`. The weights of a fresh network are drawn from `seed`; a network that holds loaded weights
            starts from those. `net` itself is left as it was, so that the next training starts from the same place.
        data: A name, or loaded data; the profile's where it is left out, as the next four are.
        setting: Where and how to compute, such as `cuda:tf32=off`.
        seed: Draws the initial weights and the order of images.
        profile: How long and on what: `smoke`, `quick` or `paper`.
        frames: How many frames or images to train on.
        learning_rate: Adam's.
        window: How many frames or images there are between two looks at the loss: of PredNet those of an update.
        data_options: Options of `gpulab.load`.
        model_options: Options of the model named, or of a training of your own, which takes them as keywords, too.
        rerun: Numbers repetitions of the same run.
        store: A folder in which runs are kept, or `s3://bucket/prefix`, which keeps no weights.
        resume: Whether to go on from a checkpoint, and to take a run that is there.
        checkpoint_seconds: Time between checkpoints.
        keep_weights: Whether the store keeps the trained weights.
        guard: Whether a tensor that is overwritten between its saving and the backward pass ends the run with
            `OverwrittenError`; see `gpulab.guard`. What is computed stays the same bits. A run that is in the
            store already is trained again, for it may have been kept without a guard.
        watch: Called with the model and the number of updates, before the first and after each window.
        progress: True for a bar; or called with (frames done, loss).
        command: Noted in the record; by default the command line that makes this run, where there is one.
        registered: A file in which question, endpoint, margin, seeds and stopping were laid down; its name and digest
            are noted in the record of a run that is made now (see `gpulab.store.records.registration`). One that the
            store has already stays as it is.
        **factors: What a device may do otherwise: `loader`, how frames reach it (see `gpulab.data.feed`); `flip`
            changes the last bit of the initial weight of that number; `fast=False` has every gradient computed by
            autograd, which PredNet otherwise does in fewer operations, equal up to rounding, unless a guard, a trace
            or an emulation has to see each of them; `draws` says whose generator draws the
            initial weights, the `cpu`'s or the `device`'s own, which gives other numbers from the same seed; `devices`,
            how many share each batch, a process each (see `gpulab.training.parallel`): under `cpu` or `cuda` on this
            machine, or those that torchrun has started, and the result is that of one up to rounding.

    Raises:
        UsageError: For what makes no sense, before anything is trained.
        GpulabError: For a setting that cannot run here, or a store that cannot be written.

    Examples:
        >>> run = train("autoencoder", profile="smoke", progress=False)
        >>> run.status, len(run.history)
        ('finished', 20)
    """
    notes = {"command": command, **records.registration(registered)}
    chosen = {"frames": frames, "learning_rate": learning_rate, "window": window, **factors}
    keep = Keeping.at(store, resume=resume, checkpoint_seconds=checkpoint_seconds, weights=keep_weights)
    if isinstance(net, TrainingFunction) or is_function(net):
        if watch or data_options:
            raise UsageError("watch and data_options go with gpulab's own networks")
        options = {name: value for name, value in {"data": data, **chosen}.items() if value is not None}
        training = net if isinstance(net, TrainingFunction) else TrainingFunction(net)
        options = training.checked(options | (model_options or {}))
        return _call(training, Setting.parse(setting), seed, rerun, options, keep, guard, progress, notes)
    chosen |= {"data_options": data_options, "model_options": model_options}
    chosen["devices"] = devices = parallel.count(factors.get("devices"))
    plan, usual = planned(net, data, setting, seed, profile, rerun, **chosen)
    notes["command"] = usual if command is None else command
    if devices > 1 and not parallel.started_here():
        if watch:
            raise UsageError("watch looks at a model in this process: have torchrun start the processes")
        job: dict[str, Any] = {"net": net, "data": data, "setting": str(plan.setting), "seed": seed, "profile": profile}
        job |= {"rerun": rerun, "resume": resume, "checkpoint_seconds": checkpoint_seconds, "guard": guard, **chosen}
        job |= {"command": notes["command"], "registered": registered}
        return _launched(plan, job, keep, progress)
    with under(plan.setting, plan.model.threads), parallel.join(plan.setting, devices) as group:
        return _last(in_turns(plan, notes, keep, group, guard, watch, progress))


@dataclass(frozen=True)
class Keeping:
    """Where a run of gpulab's own networks is kept, and how; as `train` says."""

    store: Path | None
    there: Remote | None = None
    resume: bool = True
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    weights: bool = True
    shared: bool = False  # whether others train on the device at the same time, so that its speed says nothing

    @classmethod
    def at(cls, store: str | Path | None, **how: Any) -> Keeping:
        """For a store as `train` takes it: a folder, one in object storage, or none."""
        there = remote(store)
        if there:
            return cls(there.work, there, **how)
        return cls(None if store is None else Path(store), **how)


def planned(
    net: Any, data: Data | str | None, setting: Setting | str, seed: int, profile: str, rerun: int, **chosen: Any
) -> tuple[Plan, str | None]:
    """The plan of a training, and the command line that makes it, where there is one."""
    with torch.random.fork_rng(devices=[]):  # the random numbers of the caller are left alone
        plan = plan_run(net, data, setting=setting, seed=seed, profile=profile, rerun=rerun, **chosen)
    if not isinstance(net, str) or not (data is None or isinstance(data, str)):
        return plan, None
    given = {name: value for name, value in {"data": data, **chosen}.items() if value is not None}
    return plan, Specification(net, str(plan.setting), seed, profile, rerun, given).command()


@contextlib.contextmanager
def under(setting: Setting, threads: int | None) -> Iterator[None]:
    """What trainings of gpulab's own networks need in force; `threads` is how many such a network can use."""
    with setting.apply(), torch.random.fork_rng(devices=[]):
        if setting.threads is None and threads:
            torch.set_num_threads(min(threads, torch.get_num_threads()))
        yield


def in_turns(
    plan: Plan,
    notes: dict[str, str | None],
    keep: Keeping,
    group: parallel.Group,
    guard: bool = False,
    watch: Callable[[Trainable, int], None] | None = None,
    progress: bool | Callable[[int, float], None] = False,
) -> Generator[None, None, Run]:
    """Carry out a plan, `under` what it needs, in turns with others: see `Trainer.turns`.

    Args:
        plan, keep: What to train, and where it is kept.
        notes: Texts that the record keeps beside what identifies the run, such as its `command`.
        group: The processes that share the training.
        guard, watch, progress: As of `train`.

    Returns:
        The run.
    """
    plan.begin()
    identity = plan.identity(passport())
    group.agree({**identity.record, "id": None}, "another training to do")
    record = run_files.begun(identity, passport(), **notes)
    if existing := group.ask(lambda: _existing_run(keep, guard, identity, keep.weights)):
        run = _with_model(plan, *existing)
        return run if group.rank == 0 else replace(run, path=None)
    folder = keep.store if group.rank == 0 else None  # of several processes the first keeps the run
    file = None if folder is None or identity.unknown else run_files.checkpoint_file(folder, identity.id)
    torch.manual_seed(plan.seed)
    trainer = parallel.trainer(plan, group)
    if file is not None and keep.resume and file.exists():
        spare = replace(plan, model=copy.deepcopy(plan.model))
        if run_files.resume(file, trainer.restore):
            record["resumed_at"] = trainer.windows_done
        else:  # which may have left it half restored
            plan = spare
            trainer = parallel.trainer(plan, group)
    trainer.crowded = keep.shared
    if isinstance(trainer, parallel.DataParallel):
        trainer.share()
    with guards.guard() if guard else contextlib.nullcontext():
        yield from trainer.turns(file, keep.checkpoint_seconds, progress if group.rank == 0 else False, watch)
    record |= trainer.outcome()
    if keep.shared:
        record |= {"shared": True, "summary": record["summary"] | {"frames_per_second": None}}
    plan.data.check_unchanged()
    history = _history(trainer.history)
    plan.model.fresh = False
    run = Run(plan.model.cpu(), plan.data, history, record)
    if folder is not None:
        run.path = run_files.write_run(folder, record, history, plan.model.state_dict() if keep.weights else None)
        if file is not None:
            file.unlink(missing_ok=True)
        if keep.there:
            keep.there.push(run.path)
    return run


def _last(turns: Generator[None, None, Run]) -> Run:
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def _launched(plan: Plan, job: dict[str, Any], keep: Keeping, progress: bool | Callable[[int, float], None]) -> Run:
    """The run that several processes on this machine make, and put into a store."""
    parallel.check_devices(plan.setting, plan.factors["devices"])
    plan.begin()
    parallel.check_divides(plan)
    if existing := _existing_run(keep, job["guard"], plan.identity(passport()), keep.weights):
        return _with_model(plan, *existing)
    with contextlib.ExitStack() as stack:
        folder = keep.store or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tell = stack.enter_context(told(progress, total=plan.frames // plan.window * plan.window, unit="frame"))
        # The trained weights come back through the store.
        job["store"] = keep.there.url if keep.there else str(folder)
        name = parallel.launch(job, plan.factors["devices"], tell)[0]
        run = _with_model(plan, *_read(folder / name))
        if not keep.weights:
            (folder / name / run_files.WEIGHTS).unlink(missing_ok=True)
        if keep.store is None:
            run.path = None
    return run


def _history(rows: list[tuple[int, int, float, float]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["window", "step", "loss", "seconds"]).astype({"seconds": "float32"})


def _call(
    training: TrainingFunction,
    setting: Setting,
    seed: int,
    rerun: int,
    options: dict[str, Any],
    keep: Keeping,
    guard: bool,
    progress: bool | Callable[[int, float], None],
    notes: dict[str, str | None],
) -> Run:
    """One run of a function of the user's."""
    here, files = passport(), None
    identity = training.identity(here, setting, seed, rerun, options)
    if existing := _existing_run(keep, guard, identity):
        return existing[0]
    if keep.store is not None and "folder" in training.takes and not identity.unknown:
        files = run_files.files_folder(keep.store, identity.id, keep.resume)
    with contextlib.ExitStack() as stack:
        stack.enter_context(setting.apply())
        notes["command"] = notes["command"] or training.command(setting, seed, rerun, options)
        record = run_files.begun(identity, here, **notes)
        stack.enter_context(guards.guard() if guard else contextlib.nullcontext())
        tell = stack.enter_context(told(progress, unit="step"))
        begin = time.perf_counter()
        metrics, rows = training.call(setting, seed, options, files, tell)
        summary = {name: (metrics or {}).get(name) for name in ("final_loss", "heldout_loss")}
        record |= {"status": "diverged" if metrics is None else "finished", "metrics": metrics}
        record |= {"summary": summary | {"seconds": time.perf_counter() - begin}}
        record |= {"diverged_at": len(rows)} if metrics is None else {}
    run = Run(None, None, _history(rows), record)
    if keep.store is not None:
        run.path = run_files.write_run(keep.store, record, run.history, own_files=files)
        if keep.there:
            keep.there.push(run.path)
    return run


Stored = tuple[Run, dict[str, Tensor] | None]  # without a model, whose weights come second


def _existing_run(
    keep: Keeping, guard: bool, identity: identities.Identity, with_weights: bool | None = None
) -> Stored | None:
    """A run that was done before, unless it is to be done again; it is uploaded where that was cut off."""
    if keep.store is None or guard or not keep.resume:
        return None
    if keep.there:
        keep.there.fetch(identity)
    folder = run_files.find(keep.store, identity, with_weights)
    if keep.there and folder:
        keep.there.push(folder)
    return None if folder is None else _read(folder)


def _read(folder: Path) -> Stored:
    weights = run_files.read_weights(folder) if (folder / run_files.WEIGHTS).is_file() else None
    record, history = run_files.read_run(folder)
    return Run(None, None, history, record, folder), weights


def _with_model(plan: Plan, run: Run, weights: dict[str, Tensor] | None) -> Run:
    """A stored run with its model, which is untrained where no weights were kept."""
    if weights is not None:
        plan.model.to(dtype=plan.setting.dtype).load_state_dict(weights)
    return replace(run, model=plan.model, data=plan.data)
