"""Many devices: data-parallel training measured, lock-free descent judged, networks in parts, the limit of batches."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from gpulab.data.base import Window
from gpulab.data.datasets import load
from gpulab.data.feed import Loader
from gpulab.diagnostics.guards import guard
from gpulab.errors import OverwrittenError, UsageError
from gpulab.models import Autoencoder
from gpulab.passports import passport
from gpulab.progress import Progress
from gpulab.settings import Setting
from gpulab.stats.verdicts import Verdict, verdict
from gpulab.store import records
from gpulab.training import loop, parallel
from gpulab.training.adam import Adam
from gpulab.training.asynchronous import Memory, descend
from gpulab.training.batches import fit_law, noise_scale, steps_to_target
from gpulab.training.data_parallel import DataParallel
from gpulab.training.engines import Engines
from gpulab.training.loop import Plain
from gpulab.training.model_parallel import begin_split, memory_per_part
from gpulab.training.plan import TRAINING_FILES, plan_run
from gpulab.training.request import train
from gpulab.training.run import set_up, train_to_the_end

PARTS = ("training/parallel.py", "training/plan.py", *TRAINING_FILES, "models", "data")  # on which `times` depends
WARM_UP = 2  # windows
TIMES = ["seconds", "compute", "wait", "communicate"]  # of an update
SIZES = {  # of PredNet: the channels of its layers, and of its frames height and width
    "small": ([3, 8, 16], [24, 32]),
    "quick": ([3, 16, 32], [48, 64]),
    "paper": ([3, 48, 96, 192], [120, 160]),
}
WAYS: dict[str, dict[str, Any]] = {
    "synchronous": {"mode": "synchronous"},
    "lock-free": {"mode": "lock-free"},
    "bounded, delay 4": {"mode": "bounded", "delay": 4},
}


# --- data-parallel ---------------------------------------------------------------------------------------


def device_counts(device: str = "auto") -> dict[str, list[int]]:
    """How many devices can be compared under which settings: processes on a CPU; GPUs where there are two or more.

    `device` asks for the `cpu` alone, or for `cuda` alone where it can be had.

    Examples:
        >>> device_counts("cpu")
        {'cpu:threads=1': [1, 2]}
    """
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    on_gpu = {"cuda:tf32=off": [count for count in (1, 2, 4, 8) if count <= gpus]} if gpus > 1 else {}
    return on_gpu if on_gpu and device == "cuda" else {"cpu:threads=1": [1, 2], **on_gpu}


def same_end(devices: Iterable[int] = (2,), setting: str = "cpu", **options: Any) -> pd.DataFrame:
    """How far training on several devices ends from one, in float32 and float64.

    A row for each precision and number of devices: `network`, `setting`, `precision`, `devices`, `weights` (the largest
    difference of a weight), `final_loss` and `heldout_loss` (the differences), `machine`, and `recorded`, which is
    False. `options` are those of `gpulab.train`; by default a small autoencoder with batches of 7 images, which do not
    divide.
    """
    usual = {"net": "autoencoder", "model_options": {"hidden": [16], "batch_size": 7}, "frames": 200}
    rows = []
    for precision in ("float32", "float64"):
        under = f"{setting}{',' if ':' in setting else ':'}precision={precision}"
        given: dict[str, Any] = {**usual, "profile": "smoke", "setting": under, "progress": False, **options}
        alone = train(**given)
        for count in devices:
            run = train(**given, devices=count)
            pairs = zip(run.model.state_dict().values(), alone.model.state_dict().values(), strict=True)
            row = {"network": given["net"], "setting": setting, "precision": precision, "devices": count}
            row["weights"] = max((one - other).abs().max().item() for one, other in pairs)
            row |= {name: abs(getattr(run, name) - getattr(alone, name)) for name in ("final_loss", "heldout_loss")}
            rows.append(row)
    return _here(pd.DataFrame(rows), setting)


def scaling_table(
    devices: Iterable[int] = (1, 2),
    setting: str = "cpu:threads=1",
    sizes: Sequence[str] = ("small",),
    batch_size: int = 8,
    frames: int = 5,
    updates: int = 10,
    progress: bool = True,
) -> pd.DataFrame:
    """How long an update of PredNet takes on one device and on several, and where the time goes.

    Args:
        devices: Numbers of devices to compare, each with the first.
        setting: `cpu` or `cuda`, with its options.
        sizes: Of PredNet: `small`, `quick` and `paper`.
        batch_size: Films in a batch: of all devices (strong scaling), and of each of them (weak).
        frames: Of a film.
        updates: That are timed, twice: once as they are, once with a barrier before the devices communicate.
        progress: Whether to show a bar.

    Returns:
        A row for each kind of `scaling`, `size` and number of `devices`: `batch`; `seconds` of an update; with the
        barrier, the mean device's seconds to `compute`, to `wait` for the slowest and to `communicate`;
        `frames_per_second`; its `speedup` over the first number of devices, and that over the `ideal`, `efficiency`;
        `setting`, `machine`, and `recorded`, which is False.
    """
    if unknown := set(sizes) - SIZES.keys():
        raise UsageError(f"sizes {', '.join(sorted(unknown))}: expected some of {', '.join(SIZES)}")
    rows = []
    for count in Progress(list(devices), leave=False, disable=not progress):
        with parallel.Processes(setting, count) as processes:
            for size in sizes:
                strong = _mean_times(processes, setting, size, batch_size, frames, updates)
                weak = strong
                if count > 1:
                    weak = _mean_times(processes, setting, size, batch_size * count, frames, updates)
                rows += [{"scaling": "strong", **strong}, {"scaling": "weak", **weak}]
    table = pd.DataFrame(rows).sort_values(["scaling", "size", "devices"], kind="stable", ignore_index=True)
    table["frames_per_second"] = table.batch * frames / table.seconds
    alone = table.groupby(["scaling", "size"])[["frames_per_second", "devices"]].transform("first")
    table["speedup"] = table.frames_per_second / alone.frames_per_second
    table["ideal"] = table.devices / alone.devices
    table["efficiency"] = table.speedup / table.ideal
    return _here(table.assign(setting=setting), setting)


def _mean_times(
    processes: parallel.Processes, setting: str, size: str, batch: int, frames: int, updates: int
) -> dict[str, Any]:
    """What `times` finds, the mean of the devices, and for what."""
    channels, frame = SIZES[size]
    what: dict[str, Any] = {"net": "prednet", "profile": "smoke", "window": batch * frames}
    what["model_options"] = {"channels": channels, "size": frame, "batch_size": batch}
    what |= {"data_options": {"size": frame}, "frames": 2 * batch * frames}
    job = {"net": "companion.scale_out:times", "setting": setting, "seed": 0}
    answers = processes.do(job | {"model_options": {"task": json.dumps(what), "updates": updates}})
    mean = pd.DataFrame(answers).rename(columns={"update": "seconds"})[TIMES].mean()
    return {"size": size, "devices": len(answers), "batch": batch, **mean}


def times(seed: int, setting: Setting, task: str = "{}", updates: int = 10) -> dict[str, float]:
    """Seconds of an update in one of the processes of `scaling_table`, which calls it."""
    size = int(os.environ["WORLD_SIZE"])
    with parallel.join(setting, size) as group:
        plan = plan_run(**json.loads(task), setting=setting, seed=seed, devices=size)
        plan.draw_weights()
        training = set_up(plan)
        engines = Engines(plan, training)
        engine = DataParallel(engines, group) if size > 1 else engines
        windows = plan.data.windows(plan.window, seed)

        def timed(windows: list[Window]) -> float:
            start = time.perf_counter()
            for _ in loop.train(training, windows, engine):
                pass  # each window ends with a look at the device
            return (time.perf_counter() - start) / len(windows)

        timed([next(windows) for _ in range(WARM_UP)])
        ready = [next(windows) for _ in range(updates)]
        seconds = timed(ready)
        if not isinstance(engine, DataParallel):
            return {"update": seconds, "compute": seconds, "wait": 0.0, "communicate": 0.0}
        engine.timed, engine.times = True, dict.fromkeys(engine.times, 0.0)
        whole = timed(ready)
        wait, communicate = (engine.times[name] / updates for name in ("wait", "communicate"))
        compute = whole - wait - communicate  # the optimizer's step, too
        return {"update": seconds, "compute": compute, "wait": wait, "communicate": communicate}


def recorded_scale_out(table: str = "scaling") -> pd.DataFrame:
    """What `benchmarks/scale_out.py` recorded on other machines; `recorded` is True.

    `table` is `scaling`, as of `scaling_table`; `ends`, as of `same_end`; or `parts`, as of `parts_table`.

    Examples:
        >>> recorded_scale_out("ends").machine.unique().tolist()
        ['NVIDIA H200']
    """
    return records.recorded_table("scale_out", table)


def atlas_plan(price: float) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """What the whole atlas costs on 1, 8 and 64 GPUs, as `benchmarks/plan_atlas.py` worked it out and recorded it.

    Returns:
        What the recorded runs took, a row an experiment; the plan at this price of one GPU for one hour, a row a number
        of `gpus`: `hours_low`, `hours_high`, `money_low`, `money_high` and `idle`, the share of the paid time (of the
        high guess) in which GPUs have nothing left to do; and in sentences, where its assumptions end.
    """
    if not price > 0:
        raise UsageError(f"price={price}: expected more than 0")
    document = records.read_json(records.recorded_folder("scale_out") / "atlas_plan.json")
    plan = pd.DataFrame(document["plan"])
    for guess in ("low", "high"):
        plan[f"money_{guess}"] = plan[f"hours_{guess}"] * plan.gpus * price
    return pd.DataFrame(document["rates"]), plan, document["limits"]


def _here(frame: pd.DataFrame, setting: str) -> pd.DataFrame:
    """With this machine's name, and that it was not recorded."""
    return frame.assign(machine=records.machine(passport(), Setting.parse(setting).kind), recorded=False)


# --- lock-free -------------------------------------------------------------------------------------------


def descent_runs(
    seeds: Iterable[int] = range(6), ways: dict[str, dict[str, Any]] = WAYS, progress: bool = True, **options: Any
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Gradient descent by several processes in each way, from each seed: what came out, and every update.

    `options` are those of `gpulab.training.descend`. The first frame has its `summary`, the second its `history`, with
    `way` and `seed`.
    """
    summaries, histories = [], []
    jobs = [(seed, name) for seed in seeds for name in ways]  # the ways take turns
    with parallel.Processes("cpu:threads=1", options.setdefault("workers", 2)) as processes:
        for seed, name in Progress(jobs, leave=False, disable=not progress):
            descent = descend(seed=seed, processes=processes, **{**ways[name], **options})
            summaries.append({"way": name, **descent.summary})
            histories.append(descent.history.assign(way=name, seed=seed))
    return pd.DataFrame(summaries), pd.concat(histories, ignore_index=True)


def descent_verdict(summaries: pd.DataFrame, metric: str = "heldout_loss") -> Verdict:
    """Whether a way ends elsewhere than synchronous descent, over the seeds: also of `updates_per_second`."""
    frame = summaries[["way", "seed", metric]]
    return verdict(frame, metric, factor="way", block="seed", reference="synchronous")


def descent_curves(histories: pd.DataFrame, pieces: int = 20) -> pd.DataFrame:
    """The loss per step and per second: the updates of each way and seed in so many pieces of equal number.

    A row for each way and piece: `step` (updates so far, of all workers) and `seconds` at its middle, and `loss`, all
    means over the seeds.
    """
    ordered = histories.sort_values("seconds")
    step = ordered.groupby(["way", "seed"]).cumcount()
    length = ordered.groupby(["way", "seed"]).seconds.transform("size")
    ordered = ordered.assign(step=step, piece=step * pieces // length)
    return ordered.groupby(["way", "piece"])[["step", "seconds", "loss"]].mean().reset_index()


def what_the_guard_says() -> str:
    """What `gpulab.guard` says when another worker changes the weights between a step's forward and backward pass."""
    model = Autoencoder((16,))
    images = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        mine, theirs = (Memory(Path(folder), model, 2, create=first) for first in (True, False))
        for parameter, view in zip(model.parameters(), mine.views(model), strict=True):
            parameter.data = view
        try:
            with guard():
                loss, _, _ = model.training_loss(images, None)
                theirs.add(torch.full((len(theirs.pairs),), 1e-3))
                loss.backward()
        except OverwrittenError as error:
            return str(error)
    return "nothing"


# --- in parts --------------------------------------------------------------------------------------------


def parts_table(devices: Sequence[str] = ("cpu", "cpu"), frames: int = 40) -> pd.DataFrame:
    """An autoencoder and a PredNet on one device and cut over several: the same losses, less memory on each.

    A row for each network and part: `network`, `part`, `device`, `whole` and `parts` (the mean loss of training on one
    device and in parts), MiB of `weights`, `optimizer` and `activations` in a step, `machine`, `recorded` (False).
    """
    rows = []
    for name in ("autoencoder", "prednet"):
        given: dict[str, Any] = {"frames": frames, "fast": False, "profile": "smoke", "setting": devices[0]}
        losses = []
        for split in (False, True):
            plan = plan_run(name, **given)
            plan.draw_weights()
            training = set_up(plan)
            engine = Plain(training, Loader("window", plan.setting))
            if split:
                training, engine = begin_split(plan, devices)
            train_to_the_end(plan, training, engine)
            losses.append(sum(note.loss for note in training.history) / len(training.history))
        whole, apart = losses
        window = next(plan.data.windows(plan.window)).frames
        batch: Any = next(iter(engine.batches(window)))
        kept = memory_per_part(training.model, batch, len(devices))
        for number, (device, part) in enumerate(zip(devices, kept, strict=True)):
            mib = {kind: size / 2**20 for kind, size in part.items()}
            rows.append({"network": name, "part": number, "device": device, "whole": whole, "parts": apart, **mib})
    return _here(pd.DataFrame(rows), devices[0])


# --- large batches ---------------------------------------------------------------------------------------


def large_batches(
    target: float = 0.03,
    batch_sizes: Sequence[int] = (1, 4, 16, 64, 256),
    learning_rates: Sequence[float] = (3e-4, 1e-3, 2e-3, 4e-3),
    seeds: Iterable[int] = (0,),
    most: int = 3000,
    progress: bool = True,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Steps to a target against the batch size, and the noise scale of the gradient beside it.

    Returns:
        Of each seed and batch size the best learning rate's row of `gpulab.training.steps_to_target`, with `law`: the
        steps by S_min (1 + B / batch), fitted to those that reached the target. And of each seed `least_steps` (S_min)
        and `critical_batch` (B) of that law, and `law_off`, by what share it misses a measured number at most; beside
        them `noise_begin` and `noise_target`: the simple noise scale of the fresh network, and of the one that reached
        the target with the largest batch.
    """
    data, tables, found = load("digits", size=(28, 28)), [], []
    for seed in seeds:
        model = Autoencoder((32,))
        model.draw_weights(torch.Generator().manual_seed(seed))
        table = steps_to_target(model, data, target, batch_sizes, learning_rates, seed, most, progress)
        best = table.sort_values("steps").drop_duplicates("batch_size").sort_values("batch_size", ignore_index=True)
        reached = best.dropna(subset="steps")
        least, critical = fit_law(reached.batch_size.tolist(), reached.steps.tolist())
        examples = torch.from_numpy(next(data.windows(1024, seed + 1)).frames).float() / 255
        row: dict[str, Any] = {"seed": seed, "least_steps": least, "critical_batch": critical}
        row["law_off"] = (least * (1 + critical / reached.batch_size) / reached.steps - 1).abs().max()
        row["noise_begin"] = noise_scale(model, examples, 16).scale
        last = reached.iloc[-1]
        optimizer = Adam([*model.parameters()], last.learning_rate)
        for _, window in zip(range(int(last.steps)), data.windows(int(last.batch_size), seed), strict=False):
            optimizer.zero_grad()
            model.training_loss(torch.from_numpy(window.frames).float() / 255, None)[0].backward()
            optimizer.step()
        row["noise_target"] = noise_scale(model, examples, 16).scale
        tables.append(best.assign(seed=seed, law=least * (1 + critical / best.batch_size)).drop(columns="best"))
        found.append(row)
    return pd.concat(tables, ignore_index=True), pd.DataFrame(found)


def batch_gains(
    critical_batch: float, batch_size: int = 8, devices: Iterable[int] = (1, 2, 4, 8, 16, 64)
) -> pd.DataFrame:
    """What devices with a batch each can bring at best, if nothing is waited for and communication is free.

    A row for each number of devices: `batch`, `steps` (over those of one device, by S_min (1 + B / batch)), `speedup`
    and `price`, how many times one device's time is paid for.

    Examples:
        >>> batch_gains(8.0, 8, (1, 2)).speedup.round(2).tolist()
        [1.0, 1.33]
    """
    table = pd.DataFrame({"devices": list(devices)})
    table["batch"] = batch_size * table.devices
    table["steps"] = (1 + critical_batch / table.batch) / (1 + critical_batch / batch_size)
    return table.assign(speedup=1 / table.steps, price=table.devices * table.steps)
