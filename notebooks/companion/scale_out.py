"""Notebook 08, many devices: the programs it runs, what was recorded of them elsewhere, and the limit of batches."""

from __future__ import annotations

import ast
import itertools
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
import torch
from IPython.display import Markdown
from torch import Tensor

import gpulab as gl
from companion.findings import setting_in_text, span
from gpulab.models import Autoencoder
from gpulab.models.base import Trainable
from gpulab.plots import style
from gpulab.plots.names import setting_words
from gpulab.plots.style import FAINT, INK, Look
from gpulab.report import Picture, Progress
from gpulab.store.recorded import read_json, read_measured

PROGRAMS = Path(__file__).parents[1] / "programs"
MARKERS = {"small": "o", "quick": "s", "paper": "D"}  # of PredNet's sizes
TINTS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # of ways to descend


# --- the programs ----------------------------------------------------------------------------------------


def program_source(name: str, *functions: str) -> Markdown:
    """The source of some functions or classes of `programs/NAME.py`, as they stand there."""
    text = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
    definitions = {
        node.name: node for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    if unknown := set(functions) - definitions.keys():
        raise gl.UsageError(f"{name}.py has no {', '.join(sorted(unknown))}: expected some of {', '.join(definitions)}")
    pieces = []
    for function in functions:
        node = definitions[function]
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        pieces.append("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    source = "\n\n\n".join(pieces)
    return Markdown(f"```python\n{source}\n```")


def run_program(name: str, *arguments: Any) -> dict[str, pd.DataFrame]:
    """Run `programs/NAME.py` with these arguments, print what it prints, and return the tables that it records.

    Raises:
        GpulabError: With what the program says, where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        command = [sys.executable, str(PROGRAMS / f"{name}.py"), *map(str, arguments), "--record", str(record)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        if done.returncode:
            raise gl.GpulabError(f"{name}.py {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        print(done.stdout.strip())
        document = read_json(record)
    tables = {key: value for key, value in document.items() if isinstance(value, list)}
    return {key: _from_document(value, document, "here") for key, value in tables.items()}


def recorded_scale_out(table: str = "scaling") -> pd.DataFrame:
    """What was recorded elsewhere, by the programs or by an earlier version of gpulab; empty where nothing was.

    `scaling` and `ends` are of data_parallel, `parts` of model_parallel, `descents` and `curve` of hogwild, `serving`
    of serve.
    """
    origins = {"scale_out": "recorded by an earlier version", "programs": "recorded"}
    tables = [
        _from_document(document[table], document, origin)
        for kind, origin in origins.items()
        for document in read_measured(kind)
        if table in document
    ]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _from_document(rows: list[dict[str, Any]], document: dict[str, Any], origin: str) -> pd.DataFrame:
    """The rows with the machine that measured them, and whether that was here."""
    return pd.DataFrame(rows).assign(machine=document["machine"], origin=origin, recorded=origin != "here")


def atlas_plan(price: float) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """What the whole atlas costs, as `benchmarks/plan_atlas.py` worked it out, at this price of a GPU for an hour.

    What the recorded runs took, a row an experiment; the plan, a row a number of `gpus`: `hours_low`, `hours_high`,
    `money_low`, `money_high` and `idle`, the share of the paid time (of the high guess) in which GPUs have nothing left
    to do; and in sentences, where its assumptions end.
    """
    if not price > 0:
        raise gl.UsageError(f"price={price}: expected more than 0")
    (document,) = read_measured("atlas_plan")
    plan = pd.DataFrame(document["plan"])
    for guess in ("low", "high"):
        plan[f"money_{guess}"] = plan[f"hours_{guess}"] * plan.gpus * price
    return pd.DataFrame(document["rates"]), plan, document["limits"]


# --- large batches ---------------------------------------------------------------------------------------


def noise_scale(model: Trainable, examples: Tensor, batch_size: int = 16) -> tuple[float, float]:
    """The squared length of a model's gradient, |G|², and the trace of the covariance of one example's gradient, tr Σ.

    Their quotient tr Σ / |G|² is the simple noise scale: in a batch of so many examples the noise is as large as the
    gradient. A gradient averaged over b examples has the squared length |G|² + tr Σ / b in expectation. It is measured
    for small batches and for all examples (n, …) together, and the two equations are solved. Both estimates are without
    bias, so |G|² can come out below zero.

    Source: McCandlish, Kaplan, Amodei et al. 2018 (arXiv 1812.06162), appendix A.1.
    """
    everything, count = len(examples), len(examples) // batch_size
    if count < 2 or everything % batch_size:
        raise gl.UsageError(f"{everything} examples in batches of {batch_size}: expected two or more full batches")
    total, small = torch.zeros(()), 0.0
    for batch in examples.split(batch_size):
        gradients = torch.autograd.grad(model.training_loss(batch, None)[0], [*model.parameters()])
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).double()
        small += flat.square().sum().item() / count
        total = total + flat / count
    large = total.square().sum().item()
    gradient = (everything * large - batch_size * small) / (everything - batch_size)
    return gradient, (small - large) / (1 / batch_size - 1 / everything)


def steps_to_target(
    model: Trainable, target: float, batch_size: int, learning_rate: float, seed: int = 0, most: int = 3000
) -> float:
    """Train a model on digits with Adam until its held-out loss is at most `target`: how many updates; NaN if never.

    The loss is computed after updates 1, 2, 3 and so on, and from the fortieth on after every twentieth more updates.
    """
    data = gl.load("digits", size=(28, 28))
    heldout = torch.cat([_pixels(window) for window in data.heldout(1000)])
    optimizer, look = torch.optim.Adam(model.parameters(), learning_rate, fused=True), 1
    for step, window in zip(range(1, most + 1), data.windows(batch_size, seed), strict=False):
        optimizer.zero_grad()
        model.training_loss(_pixels(window), None)[0].backward()
        optimizer.step()
        if step == look:
            with torch.no_grad():
                loss = model.training_loss(heldout, None)[0].item()
            if loss <= target:
                return step
            if not math.isfinite(loss):
                break
            look += max(1, step // 20)
    return math.nan


def _pixels(window: Any) -> Tensor:
    return torch.from_numpy(window.frames).float() / 255


def fit_law(batch_sizes: Sequence[float], steps: Sequence[float]) -> tuple[float, float]:
    """S_min and B of the law S = S_min (1 + B / batch size), by least squares of the logarithm of S.

    >>> fit_law([1, 10, 100], [100 * (1 + 20 / size) for size in [1, 10, 100]])
    (100.0, 20.0)
    """
    from scipy.optimize import curve_fit

    if len(batch_sizes) < 3 or not all(map(math.isfinite, steps)):
        raise gl.UsageError(f"{len(steps)} numbers of steps {list(steps)}: expected three or more, all finite")

    def law(size: Any, least: float, noise: float) -> Any:
        return least + np.logaddexp(0, noise - np.log(size))

    start = [math.log(min(steps)), math.log(batch_sizes[len(batch_sizes) // 2])]
    (least, noise), _ = curve_fit(law, np.array(batch_sizes, float), np.log(steps), p0=start)
    return round(math.exp(least), 6), round(math.exp(noise), 6)


def large_batches(
    target: float = 0.03,
    batch_sizes: Sequence[int] = (1, 4, 16, 64, 256),
    learning_rates: Sequence[float] = (3e-4, 1e-3, 2e-3, 4e-3),
    seeds: Iterable[int] = (0,),
    most: int = 3000,
    progress: bool = True,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Steps to a target against the batch size, and the noise scale of the gradient beside it.

    Of each seed and batch size the best learning rate's row: `steps`, `examples` and `law`, the steps by S_min (1 + B /
    batch), fitted to those that reached the target. And of each seed `least_steps` (S_min) and `critical_batch` (B) of
    that law, and `law_off`, by what share it misses a measured number at most; `noise_begin` and `noise_target`: the
    simple noise scale of the fresh network, and of the one that the largest batch brought to the target.
    """
    tables, law_rows = [], []
    for seed in seeds:
        rows, trained = [], {}
        examples = _pixels(next(gl.load("digits", size=(28, 28)).windows(1024, seed + 1)))
        grid = [*itertools.product(batch_sizes, learning_rates)]
        for size, rate in Progress(grid, leave=False, disable=not progress):
            model = trained[size, rate] = _fresh(seed)
            steps = steps_to_target(model, target, size, rate, seed, most)
            rows.append({"batch_size": size, "learning_rate": rate, "steps": steps, "examples": steps * size})
        best = pd.DataFrame(rows).sort_values("steps").drop_duplicates("batch_size")
        best = best.sort_values("batch_size", ignore_index=True)
        reached = best.dropna(subset="steps")
        least, critical = fit_law(reached.batch_size.tolist(), reached.steps.tolist())
        best["law"] = least * (1 + critical / best.batch_size)
        last = reached.iloc[-1]
        row = {"seed": seed, "least_steps": least, "critical_batch": critical}
        row["law_off"] = (best.law / best.steps - 1).abs().max()
        row["noise_begin"] = _noise(_fresh(seed), examples)
        row["noise_target"] = _noise(trained[int(last.batch_size), last.learning_rate], examples)
        law_rows.append(row)
        tables.append(best.assign(seed=seed))
    return pd.concat(tables, ignore_index=True), pd.DataFrame(law_rows)


def _fresh(seed: int) -> Autoencoder:
    model = Autoencoder((32,))
    model.draw_weights(torch.Generator().manual_seed(seed))
    return model


def _noise(model: Trainable, examples: Tensor) -> float:
    """The noise scale in examples; infinite where the estimate of |G|² is not above zero."""
    gradient, variance = noise_scale(model, examples)
    return variance / gradient if gradient > 0 else math.inf


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


@style.themed
def scaling_lines(frame: pd.DataFrame) -> Picture:
    """How many times as much several devices do, against the ideal line: strong scaling beside weak."""
    figure, panels = style.canvas(2, height=4.0, sharey=True)
    most_devices = int(frame.devices.max())
    ticks = sorted({1, *frame.devices})
    name = "PredNet " + frame["size"] + ", " + frame.setting.map(setting_words) + ", " + frame.machine
    name += " (" + frame.origin + ")"
    frame = frame.assign(name=name).sort_values("devices", kind="stable")
    titles = {"strong": "strong: one batch, divided", "weak": "weak: a batch for each"}
    for axes, (scaling, title) in zip(panels, titles.items(), strict=True):
        for (words, size, setting, recorded), rows in frame[frame.scaling == scaling].groupby(
            ["name", "size", "setting", "recorded"], sort=False
        ):
            tint = style.colour(setting)
            look: Look = {"color": tint, "marker": MARKERS[size], "mfc": "white" if recorded else tint}
            axes.plot(rows.devices, rows.speedup, label=words, **look)
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
    return style.finished(figure, headline, alt)


@style.themed
def descent_losses(curve: pd.DataFrame) -> Picture:
    """The loss per update and per second of each way in `curve`: a thin line a seed, a thick one the mean."""
    figure, panels = style.canvas(2, height=3.6, sharey=True)
    tints = dict(zip(dict.fromkeys(curve.way), TINTS, strict=False))
    mean = curve.groupby(["way", "piece"])[["step", "seconds", "loss"]].mean().reset_index()
    for axes, column in zip(panels, ("step", "seconds"), strict=True):
        look: Look = {"x": column, "y": "loss", "hue": "way", "palette": tints, "estimator": None, "ax": axes}
        sns.lineplot(curve, units="seed", lw=0.5, alpha=0.4, legend=False, **look)
        sns.lineplot(mean, lw=2, **look)
        axes.set(xlabel="updates of all workers" if column == "step" else "seconds", xlim=(0, None))
    panels[0].set_ylabel("loss of a batch (mean squared error)")
    style.log_scale(panels[0].yaxis)
    seconds = curve.groupby(["way", "seed"]).seconds.max().groupby("way").mean()
    times = ", ".join(f"{time:.2g} s {way}" for way, time in seconds.items())
    headline = f"As many updates take, on average over the seeds, {times}"
    alt = f"Loss per update and per second of {', '.join(tints)} gradient descent."
    return style.finished(figure, headline, alt)


@style.themed
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
        axes.set(xlabel="batch size", ylabel=label)
        style.log_scales(axes)
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


def scale_finding(ends: pd.DataFrame, scaling: pd.DataFrame, descents: pd.DataFrame, found: pd.DataFrame) -> str:
    """What was measured here, then what was recorded, in sentences: `found` is the second of `large_batches`."""
    largest_differences = ends.groupby("precision").weights.max()
    recorded = style.is_recorded(scaling)
    lines = [
        f"Training on {span(ends.devices)} devices ends where it does on one: no weight is off by more than "
        f"{largest_differences.float32:.1e} in float32 and {largest_differences.float64:.1e} in float64.",
        *(f"Here, {line}" for line in _scaling_sentences(scaling[~recorded])),
    ]
    mean = descents.groupby("way")[["updates_per_second", "age", "lost_share"]].mean()
    synchronous, free = mean.loc["synchronous"], mean.loc["lock-free"]
    lines.append(
        f"Descent lock-free: {free.updates_per_second / synchronous.updates_per_second:.2f} times the updates a second "
        f"of workers that wait for each other. A gradient is {free.age:.2f} updates old when it is applied; of all "
        f"changes a share of {free.lost_share:.1e} was lost (synchronous: {synchronous.lost_share:.1e}, by rounding)."
    )
    middle = found.median()
    lines.append(
        f"By the law, a batch of {middle.critical_batch:.0f} images takes twice the fewest updates "
        f"({middle.least_steps:.0f}). The law misses a measured number by up to {found.law_off.max():.0%}. "
        f"The gradient's noise scale is {middle.noise_begin:.0f} at first, and {middle.noise_target:.0f} at the target."
    )
    for (origin, machine, setting), rows in scaling[recorded].groupby(["origin", "machine", "setting"], sort=False):
        heading = f"{origin.capitalize()} on {machine}, {setting_in_text(setting)}"
        lines += [f"{heading}: {line}" for line in _scaling_sentences(rows)]
    return "\n".join(lines)


def _scaling_sentences(scaling: pd.DataFrame) -> list[str]:
    """What the most devices bring, a sentence a size."""
    lines = []
    for size, rows in scaling.groupby("size", sort=False):
        last = rows[rows.devices == rows.devices.max()].drop_duplicates("scaling").set_index("scaling")
        strong, weak = last.loc["strong"], last.loc["weak"]
        lines.append(
            f"{strong.devices} devices train a {size} PredNet {strong.speedup:.2f} times as fast as one where they "
            f"divide a batch of {strong.batch}, {weak.speedup:.2f} times where each has as large a batch. "
            f"Of a divided update {max(0, 1 - strong.compute / strong.seconds):.0%} is waiting and communication."
        )
    return lines
