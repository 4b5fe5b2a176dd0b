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
from tqdm.auto import tqdm

from gpulab.data.datasets import load
from gpulab.diagnostics.guards import guard
from gpulab.errors import OverwrittenError
from gpulab.models import Autoencoder
from gpulab.settings import Setting
from gpulab.stats.verdicts import Verdict, verdict
from gpulab.training import parallel
from gpulab.training.asynchronous import Memory, descend
from gpulab.training.batches import fit_law, noise_scale, steps_to_target
from gpulab.training.model_parallel import SplitTrainer, memory_per_part
from gpulab.training.plan import plan_run
from gpulab.training.run import train
from gpulab.training.step import Adam, Trainer

PARTS = ("training/parallel.py", "training/step.py", "training/plan.py", "models", "data")  # on which `times` depends
WARM_UP = 2  # windows
SMALL = {"model_options": {"channels": [3, 8, 16], "size": [24, 32]}, "data_options": {"size": [24, 32]}}
WAYS: dict[str, dict[str, Any]] = {
    "synchronous": {"mode": "synchronous"},
    "lock-free": {"mode": "lock-free"},
    "bounded, delay 4": {"mode": "bounded", "delay": 4},
}


# --- data-parallel ---------------------------------------------------------------------------------------


def same_end(devices: Iterable[int] = (2,), setting: str = "cpu", **options: Any) -> pd.DataFrame:
    """How far training on several devices ends from one, in float32 and float64.

    A row for each precision and number of devices: `precision`, `devices`, `weights` (the largest difference of a
    weight), `final_loss` and `heldout_loss` (the differences). `options` are those of `gpulab.train`; by default a
    small autoencoder with batches of 7 images, which do not divide.
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
            row = {"precision": precision, "devices": count}
            row["weights"] = max((one - other).abs().max().item() for one, other in pairs)
            row |= {name: abs(getattr(run, name) - getattr(alone, name)) for name in ("final_loss", "heldout_loss")}
            rows.append(row)
    return pd.DataFrame(rows)


def scaling_table(
    devices: Iterable[int] = (1, 2),
    setting: str = "cpu:threads=1",
    batch_size: int = 8,
    frames: int = 5,
    weak: bool = False,
    updates: int = 10,
    progress: bool = True,
    **options: Any,
) -> pd.DataFrame:
    """How long an update of PredNet takes on one device and on several, and where the time goes.

    Args:
        devices: Numbers of devices to compare.
        setting: `cpu` or `cuda`, with its options.
        batch_size: Films in a batch: of all devices (strong scaling), or of each of them (`weak`).
        frames: Of a film.
        weak: Whether the batch grows with the devices.
        updates: That are timed, twice: once as they are, once with a barrier before the devices communicate.
        progress: Whether to show a bar.
        **options: Of PredNet (`model_options`) and its data (`data_options`).

    Returns:
        A row for each number of devices: `devices`, `batch`, `seconds` an update, of which the mean device spends
        `compute`, `wait` (for the slowest) and `communicate`; `frames_per_second`; `speedup` of that over the first
        row, `ideal`, and `efficiency`, their quotient.
    """
    rows = []
    for count in tqdm(list(devices), leave=False, disable=not progress):
        batch = batch_size * (count if weak else 1)
        what: dict[str, Any] = {**SMALL, **options}
        what["model_options"] = what["model_options"] | {"batch_size": batch}
        what |= {"net": "prednet", "profile": "smoke", "window": batch * frames}
        what["frames"] = 2 * what["window"]
        job = {"net": "gpulab.companion.scale_out:times", "setting": setting, "seed": 0}
        answers = parallel.launch(job | {"model_options": {"task": json.dumps(what), "updates": updates}}, count)
        mean = {name: sum(answer[name] for answer in answers) / count for name in answers[0] if name != "final_loss"}
        rows.append({"devices": count, "batch": batch, **mean, "frames_per_second": batch * frames / mean["update"]})
    table = pd.DataFrame(rows).rename(columns={"update": "seconds"})
    speedup = table.frames_per_second / table.frames_per_second[0]
    ideal = table.devices / table.devices[0]
    return table.assign(speedup=speedup, ideal=ideal, efficiency=speedup / ideal)


def times(seed: int, setting: Setting, task: str = "{}", updates: int = 10) -> dict[str, float]:
    """Seconds of an update in one of the processes of `scaling_table`, which calls it."""
    size = int(os.environ["WORLD_SIZE"])
    with parallel.join(setting, size) as group:
        plan = plan_run(**json.loads(task), setting=setting, seed=seed, devices=size)
        plan.begin()
        trainer = Trainer(plan) if size == 1 else parallel.DataParallel(plan, group)
        windows = plan.data.windows(plan.window, seed)
        for _ in range(WARM_UP):
            trainer._look(trainer._launch(next(windows)))
        ready = [next(windows) for _ in range(updates)]

        def timed() -> float:
            begin = time.perf_counter()
            for window in ready:
                trainer._look(trainer._launch(window))  # which ends with a look at the device
            return (time.perf_counter() - begin) / updates

        seconds = timed()
        if not isinstance(trainer, parallel.DataParallel):
            return {"update": seconds, "compute": seconds, "wait": 0.0, "communicate": 0.0}
        trainer.timed, trainer.times = True, dict.fromkeys(trainer.times, 0.0)
        timed()
        return {"update": seconds, **{name: total / updates for name, total in trainer.times.items()}}


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
    for seed, name in tqdm(jobs, leave=False, disable=not progress):
        descent = descend(seed=seed, **{**ways[name], **options})
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
    device and in parts), and MiB of `weights`, `optimizer` and `activations` in a step.
    """
    rows = []
    for name in ("autoencoder", "prednet"):
        given: dict[str, Any] = {"frames": frames, "fast": False, "profile": "smoke", "setting": devices[0]}

        def trained(make: Any, name: str = name, given: dict[str, Any] = given) -> Trainer:
            plan = plan_run(name, **given)
            plan.begin()
            trainer: Trainer = make(plan)
            trainer.run(None, 60.0, False)
            return trainer

        alone, parts = trained(Trainer), trained(lambda plan: SplitTrainer(plan, devices))
        whole, apart = (sum(loss for _, _, loss, _ in t.history) / t.windows_done for t in (alone, parts))
        window = parts.loader.window(next(parts.data.windows(parts.window)).frames)
        kept = memory_per_part(parts.model.train(), next(iter(parts.model.batches(window))), len(devices))
        for number, (device, part) in enumerate(zip(devices, kept, strict=True)):
            mib = {kind: size / 2**20 for kind, size in part.items()}
            rows.append({"network": name, "part": number, "device": device, "whole": whole, "parts": apart, **mib})
    return pd.DataFrame(rows)


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
        and `critical_batch` (B) of that law, beside `noise_begin` and `noise_target`: the simple noise scale of the
        fresh network, and of the one that reached the target with the largest batch.
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
