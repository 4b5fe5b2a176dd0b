"""`gpulab.train`: what it is asked for goes to gpulab's own loop, to a function of the user's, or to processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpulab.data.base import Data
from gpulab.errors import UsageError
from gpulab.models.base import Trainable
from gpulab.passports import Passport, passport
from gpulab.settings import Setting
from gpulab.store import identities, records
from gpulab.training import data_parallel, parallel
from gpulab.training.engines import Engines
from gpulab.training.functions import TrainingFunction, is_function, run_function
from gpulab.training.keeping import CHECKPOINT_SECONDS
from gpulab.training.plan import plan_run, plan_with_command
from gpulab.training.protocol import FACTORS
from gpulab.training.run import MakeEngine, Run, Told, Watch, carry_out, under
from gpulab.training.uploads import keeping_in


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
    watch: Watch | None = None,
    progress: Told = True,
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
    how = {"use_checkpoints": resume, "checkpoint_seconds": checkpoint_seconds, "weights": keep_weights}
    keeping = keeping_in(store, take_existing=resume and not guard, **how)
    chosen = {"frames": frames, "learning_rate": learning_rate, "window": window, **factors}
    if isinstance(net, TrainingFunction) or is_function(net):
        if watch or data_options:
            raise UsageError("watch and data_options go with gpulab's own networks")
        training = net if isinstance(net, TrainingFunction) else TrainingFunction(net)
        options = {name: value for name, value in {"data": data, **chosen}.items() if value is not None}
        options = training.checked(options | (model_options or {}))
        return run_function(training, Setting.parse(setting), seed, rerun, options, keeping, guard, progress, notes)
    devices = parallel.count(factors.get("devices"))
    chosen |= {"data_options": data_options, "model_options": model_options, "devices": devices}
    plan, usual_command = plan_with_command(net, data, setting, seed, profile, rerun, **chosen)
    notes["command"] = usual_command if command is None else command
    if devices > 1 and not parallel.started_here():
        if watch:
            raise UsageError("watch looks at a model in this process: have torchrun start the processes")
        job: dict[str, Any] = {"net": net, "data": data, "setting": str(plan.setting), "seed": seed, "profile": profile}
        job |= {"rerun": rerun, "resume": resume, "checkpoint_seconds": checkpoint_seconds, "guard": guard, **chosen}
        job |= {"command": notes["command"], "registered": registered}
        return data_parallel.launched(plan, job, keeping, progress)
    with under(plan.setting, plan.model.threads), parallel.join(plan.setting, devices) as group:
        make_engine: MakeEngine = Engines
        if group.size > 1:
            keeping, make_engine = data_parallel.in_group(plan, keeping, group)
            progress = progress if group.rank == 0 else False
        turns = carry_out(plan, notes, keeping, make_engine, guard=guard, watch=watch, progress=progress)
        while True:
            try:
                next(turns)
            except StopIteration as end:
                return end.value


# A machine of no kind: a run has one name on it, whichever machine does it.
ANYWHERE = Passport(cpu={"model": ""}, gpus=[], software={"torch": "", "gpulab": ""})


def planned(net: str | TrainingFunction, **arguments: Any) -> identities.Identity:
    """What `train` would call a run with these arguments on this machine."""
    return planned_on([passport()], net, **arguments)[0]


def planned_on(machines: list[Passport], net: str | TrainingFunction, **arguments: Any) -> list[identities.Identity]:
    """The same on each of several machines, given by their passports."""
    if isinstance(net, TrainingFunction):
        setting, seed, rerun, options = (arguments[name] for name in ("setting", "seed", "rerun", "model_options"))
        return [net.identity(here, Setting.parse(setting), seed, rerun, options) for here in machines]
    own = {name for name in inspect.signature(plan_run).parameters if name != "factors"}
    own |= {name for name, option in FACTORS.items() if option.of == "run"}
    with torch.random.fork_rng(devices=[]):
        plan = plan_run(net, **{name: value for name, value in arguments.items() if name in own})
    return [plan.identity(here) for here in machines]
