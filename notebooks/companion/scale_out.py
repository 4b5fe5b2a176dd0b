"""Notebook 08, many devices: data-parallel training, lock-free descent, networks in parts, the limit of batches."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import gpulab as gl
from companion.findings import setting_in_text, span
from gpulab.data.feed import Loader
from gpulab.models import Autoencoder
from gpulab.plots import style
from gpulab.plots.style import FAINT, INK
from gpulab.progress import Progress
from gpulab.report import Picture
from gpulab.stats.verdicts import Verdict
from gpulab.store import records
from gpulab.training import parallel
from gpulab.training.adam import Adam
from gpulab.training.asynchronous import Memory, descend
from gpulab.training.batches import fit_law, noise_scale, steps_to_target
from gpulab.training.loop import Plain
from gpulab.training.model_parallel import begin_split, memory_per_part
from gpulab.training.plan import TRAINING_FILES, plan_run
from gpulab.training.run import set_up, train_to_the_end

PARTS = ("training/parallel.py", "training/plan.py", *TRAINING_FILES, "models", "data")  # on which `times` depends
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
MARKERS = {"small": "o", "quick": "s", "paper": "D"}  # of PredNet's sizes
DOES = {"compute": "#56B4E9", "wait": "#E69F00", "communicate": "#D55E00"}  # a device during an update
TINTS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # of ways to descend
PLACE = ["recorded", "machine", "setting", "size"]


# --- data-parallel ---------------------------------------------------------------------------------------


def device_counts(device: str = "auto") -> dict[str, list[int]]:
    """How many devices can be compared under which settings: processes on a CPU; GPUs where there are two or more.

    >>> device_counts("cpu")
    {'cpu:threads=1': [1, 2]}
    """
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    on_gpu = {"cuda:tf32=off": [count for count in (1, 2, 4, 8) if count <= gpus]} if gpus > 1 else {}
    return on_gpu if on_gpu and device == "cuda" else {"cpu:threads=1": [1, 2], **on_gpu}


def same_end(devices: Iterable[int] = (2,), setting: str = "cpu", **options: Any) -> pd.DataFrame:
    """How far training on several devices ends from one, in float32 and float64.

    A row for each precision and number of devices: `network`, `setting`, `precision`, `devices`, `weights` (the largest
    difference of a weight), `final_loss` and `heldout_loss` (the differences), `machine`, `recorded`. `options` are
    those of `gpulab.train`; by default a small autoencoder with batches of 7 images, which do not divide.
    """
    defaults = {"net": "autoencoder", "model_options": {"hidden": [16], "batch_size": 7}, "frames": 200}
    rows = []
    for precision in ("float32", "float64"):
        full_setting = f"{setting}{',' if ':' in setting else ':'}precision={precision}"
        training_options: dict[str, Any] = {
            **defaults,
            "profile": "smoke",
            "setting": full_setting,
            "progress": False,
            **options,
        }
        single_run = gl.train(**training_options)
        for count in devices:
            run = gl.train(**training_options, devices=count)
            pairs = zip(run.model.parameters(), single_run.model.parameters(), strict=True)
            weights = max((joint_weight - single_weight).abs().max().item() for joint_weight, single_weight in pairs)
            row = {"network": training_options["net"], "setting": setting, "precision": precision, "devices": count}
            losses = {
                name: abs(getattr(run, name) - getattr(single_run, name)) for name in ("final_loss", "heldout_loss")
            }
            rows.append({**row, "weights": weights, **losses})
    return _on_this_machine(pd.DataFrame(rows), setting)


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

    `batch_size` counts films, of so many `frames`, in a batch of all devices (strong scaling), and of each of them
    (weak). `updates` are timed twice: as they are, and with a barrier before the devices communicate. A row for each
    kind of `scaling`, `size` and number of `devices`: `batch`; `seconds` of an update; with the barrier, the mean
    device's seconds to `compute`, to `wait` for the slowest and to `communicate`; `frames_per_second`; its `speedup`
    over the first number of devices, and that over the `ideal`, `efficiency`; `setting`, `machine`, `recorded`.
    """
    if unknown := set(sizes) - SIZES.keys():
        raise gl.UsageError(f"sizes {', '.join(sorted(unknown))}: expected some of {', '.join(SIZES)}")
    rows = []
    for count in Progress(list(devices), leave=False, disable=not progress):
        with parallel.Processes(setting, count) as processes:
            for size in sizes:
                strong = _mean_times(processes, setting, size, batch_size, frames, updates)
                larger = batch_size * count
                weak = _mean_times(processes, setting, size, larger, frames, updates) if count > 1 else strong
                rows += [{"scaling": "strong", **strong}, {"scaling": "weak", **weak}]
    table = pd.DataFrame(rows).sort_values(["scaling", "size", "devices"], kind="stable", ignore_index=True)
    table["frames_per_second"] = table.batch * frames / table.seconds
    kinds = table.groupby(["scaling", "size"])
    table["speedup"] = table.frames_per_second / kinds.frames_per_second.transform("first")
    table["ideal"] = table.devices / kinds.devices.transform("first")
    return _on_this_machine(table.assign(efficiency=table.speedup / table.ideal, setting=setting), setting)


def _mean_times(
    processes: parallel.Processes, setting: str, size: str, batch: int, frames: int, updates: int
) -> dict[str, Any]:
    """What `times` finds, the mean of the devices, and for what."""
    channels, frame = SIZES[size]
    model = {"channels": channels, "size": frame, "batch_size": batch}
    length = {"window": batch * frames, "frames": 2 * batch * frames}
    task = {"net": "prednet", "profile": "smoke", "model_options": model, "data_options": {"size": frame}, **length}
    job = {"net": "companion.in_workers:times", "setting": setting, "seed": 0}
    answers = processes.do(job | {"model_options": {"task": json.dumps(task), "updates": updates}})
    mean = pd.DataFrame(answers).rename(columns={"update": "seconds"})[TIMES].mean()
    return {"size": size, "devices": len(answers), "batch": batch, **mean}


def recorded_scale_out(table: str = "scaling") -> pd.DataFrame:
    """What `benchmarks/record.py scale_out` recorded elsewhere: `scaling`, `ends` (of `same_end`) or `parts`."""
    return records.recorded_table("scale_out", table)


def atlas_plan(price: float) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """What the whole atlas costs, as `benchmarks/plan_atlas.py` worked it out, at this price of a GPU for an hour.

    What the recorded runs took, a row an experiment; the plan, a row a number of `gpus`: `hours_low`, `hours_high`,
    `money_low`, `money_high` and `idle`, the share of the paid time (of the high guess) in which GPUs have nothing left
    to do; and in sentences, where its assumptions end.
    """
    if not price > 0:
        raise gl.UsageError(f"price={price}: expected more than 0")
    (document,) = records.read_measured("atlas_plan")
    plan = pd.DataFrame(document["plan"])
    for guess in ("low", "high"):
        plan[f"money_{guess}"] = plan[f"hours_{guess}"] * plan.gpus * price
    return pd.DataFrame(document["rates"]), plan, document["limits"]


def _on_this_machine(frame: pd.DataFrame, setting: str) -> pd.DataFrame:
    """With this machine's name, and that it was not recorded."""
    return frame.assign(machine=records.machine(gl.passport(), gl.Setting.parse(setting).kind), recorded=False)


# --- lock-free -------------------------------------------------------------------------------------------


def descent_runs(
    seeds: Iterable[int] = range(6), ways: dict[str, dict[str, Any]] = WAYS, progress: bool = True, **options: Any
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Gradient descent by several processes in each way, from each seed: what came out, and every update.

    `options` are those of `gpulab.training.descend`. Its `summary` and its `history`, with `way` and `seed`.
    """
    summaries, histories = [], []
    jobs = [*itertools.product(seeds, ways)]  # the ways take turns
    with parallel.Processes("cpu:threads=1", options.setdefault("workers", 2)) as processes:
        for seed, name in Progress(jobs, leave=False, disable=not progress):
            descent = descend(seed=seed, processes=processes, **{**ways[name], **options})
            summaries.append({"way": name, **descent.summary})
            histories.append(descent.history.assign(way=name, seed=seed))
    return pd.DataFrame(summaries), pd.concat(histories, ignore_index=True)


def descent_verdict(summaries: pd.DataFrame, metric: str = "heldout_loss") -> Verdict:
    """Whether a way ends elsewhere than synchronous descent, over the seeds: also of `updates_per_second`."""
    frame = summaries[["way", "seed", metric]]
    return gl.verdict(frame, metric, factor="way", block="seed", reference="synchronous")


def descent_curves(histories: pd.DataFrame, pieces: int = 20) -> pd.DataFrame:
    """The loss per step and per second: the updates of each way and seed in so many pieces of equal number.

    A row for each way and piece: `step` (updates so far) and `seconds` at its middle, and `loss`, means over the seeds.
    """
    ordered = histories.sort_values("seconds")
    runs = ordered.groupby(["way", "seed"])
    step = runs.cumcount()
    ordered = ordered.assign(step=step, piece=step * pieces // runs.seconds.transform("size"))
    return ordered.groupby(["way", "piece"])[["step", "seconds", "loss"]].mean().reset_index()


def what_the_guard_says() -> str:
    """What `gpulab.guard` says when another worker changes the weights between a step's forward and backward pass."""
    model = Autoencoder((16,))
    images = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        own_memory, other_memory = (Memory(Path(folder), model, 2, create=first) for first in (True, False))
        for parameter, view in zip(model.parameters(), own_memory.views(model), strict=True):
            parameter.data = view
        try:
            with gl.guard():
                loss, _, _ = model.training_loss(images, None)
                other_memory.add(torch.full((len(other_memory.pairs),), 1e-3))
                loss.backward()
        except gl.OverwrittenError as error:
            return str(error)
    return "nothing"


# --- in parts --------------------------------------------------------------------------------------------


def parts_table(devices: Sequence[str] = ("cpu", "cpu"), frames: int = 40) -> pd.DataFrame:
    """An autoencoder and a PredNet on one device and cut over several: the same losses, less memory on each.

    A row for each network and part: `network`, `part`, `device`, `whole` and `parts` (the mean loss of training on one
    device and in parts), MiB of `weights`, `optimizer` and `activations` in a step, `machine`, `recorded`.
    """
    rows = []
    for name in ("autoencoder", "prednet"):
        losses = []
        for split in (False, True):
            plan = plan_run(name, frames=frames, fast=False, profile="smoke", setting=devices[0])
            plan.draw_weights()
            training = set_up(plan)
            engine = Plain(training, Loader("window", plan.setting))
            if split:
                training, engine = begin_split(plan, devices)
            train_to_the_end(plan, training, engine)
            losses.append(sum(update.loss for update in training.history) / len(training.history))
        common = {"network": name, "whole": losses[0], "parts": losses[1]}
        batch: Any = next(iter(engine.batches(next(plan.data.windows(plan.window)).frames)))
        memory_of_parts = memory_per_part(training.model, batch, len(devices))
        for number, (device, part_bytes) in enumerate(zip(devices, memory_of_parts, strict=True)):
            mib = {purpose: size / 2**20 for purpose, size in part_bytes.items()}
            rows.append({"network": name, "part": number, "device": device, **common, **mib})
    return _on_this_machine(pd.DataFrame(rows), devices[0])


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

    Of each seed and batch size the best learning rate's row of `gpulab.training.steps_to_target`, with `law`: the steps
    by S_min (1 + B / batch), fitted to those that reached the target. And of each seed `least_steps` (S_min) and
    `critical_batch` (B) of that law, and `law_off`, by what share it misses a measured number at most; `noise_begin`
    and `noise_target`: the simple noise scale of the fresh network, and of the one that the largest batch brought to
    the target.
    """
    data, tables, law_rows = gl.load("digits", size=(28, 28)), [], []
    for seed in seeds:
        model = Autoencoder((32,))
        model.draw_weights(torch.Generator().manual_seed(seed))
        table = steps_to_target(model, data, target, batch_sizes, learning_rates, seed, most, progress)
        best = table.sort_values("steps").drop_duplicates("batch_size").sort_values("batch_size", ignore_index=True)
        reached = best.dropna(subset="steps")
        least, critical = fit_law(reached.batch_size.tolist(), reached.steps.tolist())
        best["law"] = least * (1 + critical / best.batch_size)
        examples = torch.from_numpy(next(data.windows(1024, seed + 1)).frames).float() / 255
        noise_begin = noise_scale(model, examples, 16).scale
        last = reached.iloc[-1]
        optimizer = Adam([*model.parameters()], last.learning_rate)
        for _, window in zip(range(int(last.steps)), data.windows(int(last.batch_size), seed), strict=False):
            optimizer.zero_grad()
            model.training_loss(torch.from_numpy(window.frames).float() / 255, None)[0].backward()
            optimizer.step()
        row = {"seed": seed, "least_steps": least, "critical_batch": critical}
        row |= {"law_off": (best.law / best.steps - 1).abs().max(), "noise_begin": noise_begin}
        law_rows.append(row | {"noise_target": noise_scale(model, examples, 16).scale})
        tables.append(best.assign(seed=seed).drop(columns="best"))
    return pd.concat(tables, ignore_index=True), pd.DataFrame(law_rows)


def batch_gains(
    critical_batch: float, batch_size: int = 8, devices: Iterable[int] = (1, 2, 4, 8, 16, 64)
) -> pd.DataFrame:
    """What devices with a batch each can bring at best, if nothing is waited for and communication is free.

    A row for each number of devices: `batch`, `steps` (over those of one device, by S_min (1 + B / batch)), `speedup`
    and `price`, how many times one device's time is paid for.

    >>> batch_gains(8.0, 8, (1, 2)).speedup.round(2).tolist()
    [1.0, 1.33]
    """
    table = pd.DataFrame({"devices": list(devices)})
    table["batch"] = batch_size * table.devices
    table["steps"] = (1 + critical_batch / table.batch) / (1 + critical_batch / batch_size)
    return table.assign(speedup=1 / table.steps, price=table.devices * table.steps)


# --- figures and the finding ------------------------------------------------------------------------------


def scaling_lines(frame: pd.DataFrame) -> Picture:
    """How many times as much several devices do, against the ideal line: strong scaling beside weak."""
    figure, panels = style.canvas(2, height=4.0, share_rows=True)
    most_devices = int(frame.devices.max())
    ticks = sorted({1, *frame.devices})
    origin = frame.machine + frame.recorded.map({True: " (recorded)", False: ", here"})
    name = "PredNet " + frame["size"] + ", " + frame.setting + ", " + origin
    frame = frame.assign(name=name, marker=frame["size"].map(MARKERS))
    titles = {"strong": "strong: one batch, divided", "weak": "weak: a batch for each"}
    for axes, (scaling, title) in zip(panels, titles.items(), strict=True):
        style.named_lines(axes, frame[frame.scaling == scaling], "devices", "speedup")
        axes.plot([1, most_devices], [1, most_devices], color=FAINT, lw=1, ls="--", zorder=1, label="ideal")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(ticks, map(str, ticks))
        axes.set(title=title, xlabel="devices")
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].set(ylim=(0.85 * min(1.0, frame.speedup.min()), 1.15 * most_devices), ylabel="speedup over one device")
    headline = (
        f"{most_devices} devices do {span(frame[frame.devices == most_devices].speedup, '.2f')} times what one does"
    )
    alt = "Speedup against the number of devices, strong and weak scaling, beside the ideal line."
    keys, _ = panels[0].get_legend_handles_labels()
    return style.finished(figure, headline, alt, keys, columns=1 if len(keys) < 5 else 2, size=7.5)


def update_shares(frame: pd.DataFrame) -> Picture:
    """What share of an update several devices compute, wait and communicate; of the same frame."""
    table = frame[frame.devices > 1].sort_values([*PLACE, "scaling", "devices"], kind="stable", ignore_index=True)
    origin = (table.machine + ", recorded").where(table.recorded, "here")
    devices = table.devices.map("{} × ".format) + table.setting
    names = table["size"] + ", " + table.scaling + ", " + devices + ", " + origin
    shares = table[[*DOES]].set_axis(names)
    computing = (shares.compute / shares.sum(axis=1)).tolist()
    headline = f"Devices compute {span(computing, '.0%')} of an update, and wait or communicate the rest"
    label = "share of an update (right: a whole one, unobserved)"
    return style.stacked_shares(
        shares, table.seconds, DOES, label, headline, "Shares of computing, waiting, communicating."
    )


def descent_losses(histories: pd.DataFrame) -> Picture:
    """The loss per update and per second of each way in `descent_runs`: a thin line a seed, a thick one their mean."""
    figure, panels = style.canvas(2, height=3.6, share_rows=True)
    tints = dict(zip(dict.fromkeys(histories.way), TINTS, strict=False))
    mean = descent_curves(histories)
    seeds = pd.concat(descent_curves(rows).assign(seed=seed) for seed, rows in histories.groupby("seed"))
    for axes, column in zip(panels, ("step", "seconds"), strict=True):
        style.run_lines(axes, seeds, column, "loss", ["way", "seed"], tints, lw=0.5, alpha=0.4)
        style.run_lines(axes, mean, column, "loss", ["way"], tints, lw=1.8)
        axes.set(xlabel="updates of all workers" if column == "step" else "seconds", xlim=(0, None))
    panels[0].set_ylabel("loss of a batch (mean squared error)")
    style.log_scale(panels[0].yaxis, mean.loss.min(), mean.loss.max())
    seconds = histories.groupby(["way", "seed"]).seconds.max().groupby("way").mean()
    first = f"{seconds.idxmin()} is done first, in {seconds.min():.2g} s"
    headline = f"As many updates: {first}, the last in {seconds.max():.2g} s"
    alt = f"Loss per update and per second of {', '.join(tints)} gradient descent."
    return style.finished(figure, headline, alt, [style.key(way, color=tint, lw=1.8) for way, tint in tints.items()], 3)


def batch_law(table: pd.DataFrame, found: pd.DataFrame) -> Picture:
    """Updates to a target against the batch size, and what they cost in examples, with the law and the noise scale."""
    figure, panels = style.canvas(2, height=3.8)
    sizes = np.geomspace(table.batch_size.min(), table.batch_size.max(), 100)
    middle = found.median()
    marks = (
        ("noise at first", middle.noise_begin, ":"),
        ("noise at the target", middle.noise_target, "--"),
        ("critical batch", middle.critical_batch, "-"),
    )
    for axes, column, tint in zip(panels, ("steps", "examples"), ("#0072B2", "#D55E00"), strict=True):
        for row in found.itertuples():
            steps = row.least_steps * (1 + row.critical_batch / sizes)
            axes.plot(sizes, steps if column == "steps" else steps * sizes, color=tint, lw=1.2)
        style.points(axes, table.batch_size, table[column], tint)
        for _, size, dash in marks:
            axes.axvline(size if np.isfinite(size) else np.nan, color=INK, lw=0.9, ls=dash, zorder=1)
        label = f"{'updates' if column == 'steps' else column} to the target"
        axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel=label)
        axes.xaxis.set_major_formatter("{x:,g}")
        style.log_scale(axes.yaxis, table[column].min(), table[column].max())
    panels[0].axhline(middle.least_steps, color=FAINT, lw=0.9, ls=":")
    fewest = f"fewest: {middle.least_steps:.0f}"
    panels[0].annotate(fewest, (sizes[0], middle.least_steps), va="bottom", fontsize=8, color=INK)
    keys = [
        style.key(f"{name}: {f'{size:,.0f}' if np.isfinite(size) else 'none seen'}", color=INK, ls=dash, lw=0.9)
        for name, size, dash in marks
    ]
    critical = middle.critical_batch
    headline = f"A batch of {critical:.0f} takes twice the fewest updates, and twice the fewest examples"
    alt = "Updates and examples to a target loss against the batch size, with the fitted law."
    return style.finished(figure, headline, alt, keys, 3)


def scale_finding(ends: pd.DataFrame, scaling: pd.DataFrame, summaries: pd.DataFrame, found: pd.DataFrame) -> str:
    """What was measured here, then what was recorded, in sentences: `found` is the second of `large_batches`."""
    largest_differences = ends.groupby("precision").weights.max()
    recorded = style.is_recorded(scaling)
    lines = [
        f"Training on {span(ends.devices)} devices ends where it does on one: no weight is off by more than "
        f"{largest_differences.float32:.1e} in float32 and {largest_differences.float64:.1e} in float64.",
        *(f"Here, {line}" for line in _scaling_sentences(scaling[~recorded])),
    ]
    mean = summaries.groupby("way")[["updates_per_second", "staleness", "lost_share"]].mean()
    synchronous = mean.updates_per_second["synchronous"]
    for way, row in mean.drop("synchronous").iterrows():
        lines.append(
            f"Descent {way}: {row.updates_per_second / synchronous:.2f} times the updates a second of workers that "
            f"wait for each other. A gradient is {row.staleness:.2f} updates old when it is applied; "
            f"{row.lost_share:.1%} of a weight's updates are overwritten by another worker's."
        )
    middle = found.median()
    lines.append(
        f"By the law, a batch of {middle.critical_batch:.0f} images takes twice the fewest updates "
        f"({middle.least_steps:.0f}). The law misses a measured number by up to {found.law_off.max():.0%}. "
        f"The gradient's noise scale is {middle.noise_begin:.0f} at first, and {middle.noise_target:.0f} at the target."
    )
    for (machine, setting), rows in scaling[recorded].groupby(["machine", "setting"], sort=False):
        lines += [f"Recorded on {machine}, {setting_in_text(setting)}: {line}" for line in _scaling_sentences(rows)]
    return "\n".join(lines)


def _scaling_sentences(scaling: pd.DataFrame) -> list[str]:
    """What the most devices bring, a sentence a size."""
    lines = []
    for size, rows in scaling.groupby("size", sort=False):
        last = rows[rows.devices == rows.devices.max()].set_index("scaling")
        strong, weak = last.loc["strong"], last.loc["weak"]
        total = strong[[*DOES]].sum()
        lines.append(
            f"{strong.devices} devices train a {size} PredNet {strong.speedup:.2f} times as fast as one where they "
            f"divide a batch of {strong.batch}, {weak.speedup:.2f} times where each has as large a batch. "
            f"Of a divided update {strong.wait / total:.0%} is waiting, {strong.communicate / total:.0%} communication."
        )
    return lines
