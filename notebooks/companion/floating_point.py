"""Notebook 02: which factor does it? Sums in many orders, how one bit grows while training, what a GPU draws from a
seed, and each factor changed alone, from the same weights: one step of it, and the final loss.

A factor is anything that a device may do otherwise without being wrong. Those of a GPU come from recordings where there
is none.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
import torch
from torch import Tensor

import gpulab as gl
from companion.findings import SAME, SIZES, CheckedSentences, Part, by_decision, finding, listed, span
from companion.in_workers import first_step
from gpulab.models.base import Trainable
from gpulab.numerics.formats import ulp_distance
from gpulab.passports import machine as machine_of
from gpulab.plots import style
from gpulab.plots.style import BESIDE, FAINT, INK, ON_CPU, ON_GPU, Look
from gpulab.report import Picture, Progress, Report, draw
from gpulab.settings import cpu_flags
from gpulab.stats.verdicts import Verdict
from gpulab.store import runs as stores
from gpulab.store.identities import FACTORS
from gpulab.store.recorded import read_measured, recorded_table
from gpulab.training.spec import RunSpec, protocol

CPU, GPU = "cpu:threads=1", "cuda:tf32=off,deterministic=on"
SHOWN = 40  # moments of a training at which it is compared
# Where a bit is flipped. Many of an autoencoder's first weights see black pixels only.
FLIPPED = {"prednet": "conv_a.0.weight", "autoencoder": "layers.2.weight"}
OTHER_SEED = "another seed"
CHANGE_COLOURS = ("#0072B2", "#E69F00", "#222222", "#CC79A7", "#009E73")
BLOCK, LANES = 256, 4  # threads of a block in torch's kernels that draw; numbers that a thread draws at a time
MEASURED = ("conversions", "repeatability", "fused")
STEP_SEEDS = 3  # one step is cheap, but one seed proves nothing
MADE_HERE, RECORDED = "made here", "recorded"
CHANGES = {  # what was found of the factors of one machine, which are named after it
    SAME: "The same bits in every seed",
    "equivalent": "No difference that matters to the final loss ({seeds} seeds)",
    "different but negligible": "A difference, too small to matter",
    "inconclusive": "Not decided by {seeds} seeds",
    "different": "A difference ({seeds} seeds)",
}
IN_SD = {"effect": "difference", "low": "low", "high": "high", "largest": "largest_difference"}
SAME_STEP, SAME_LOSS = 3e-11, 1e-8  # where what keeps its bits is drawn: a gradient, a seed's final loss in sd


# --- orders of one sum -----------------------------------------------------------------------------------


@style.themed
def sums_figure(shuffled: Sequence[float], named: pd.Series) -> Picture:
    """How many ulps sums of the same numbers are off: in random orders, and in `named` ones, by their name."""
    values, counts = np.unique(shuffled, return_counts=True)
    figure, (axes,) = style.canvas()
    axes.bar(values, counts, width=0.8, color=style.colour("cpu:threads=1"))
    axes.axvline(0, color=INK, lw=1, ls="--")
    label: Look = {"va": "center", "fontsize": 7.5, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0}}
    for height, offset in enumerate(np.unique(named)):
        level = counts.max() * (1.12 + 0.11 * height)
        axes.plot([offset, offset], [0, level], color=ON_GPU, lw=0.8, zorder=0)
        side = "right" if offset > values.mean() else "left"
        axes.annotate(f"  {', '.join(named.index[named == offset])}  ", (offset, level), ha=side, **label)
        axes.plot(offset, level, marker="o", ms=4, color=ON_GPU, zorder=5)
    distance = "distance from the exact sum (units in the last place of float32)"
    axes.set(xlabel=distance, ylabel=f"how many of {len(shuffled)} random orders")
    right = counts[values == 0].sum() / len(shuffled)
    headline = f"{len(values)} different sums of the same numbers; {right:.0%} of the orders give the exact one"
    alt = f"Histogram of the error of {len(shuffled)} sums in random order, with named orders marked."
    return style.finished(figure, headline, alt)


# --- one bit, and how it grows ---------------------------------------------------------------------------


def growth(
    net: str = "prednet",
    seeds: int = 3,
    profile: str = "quick",
    frames: int | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """The distance between two trainings of the same seed, one of them changed a little, as they go on.

    `changes` names options of `gpulab.train` that one of the two has; without it they are the last bit of one initial
    weight, and float64. The distance between one seed and the next is there for scale. A row per change, seed and
    moment: `network`, `change`, `seed`, `step` (updates so far), `distance` of all weights (Euclidean, relative),
    `changed` (the share of weights with other bits), `ulps` (the median over the weights of the float32 numbers between
    the two).

    Source: Summers, Dinneen 2021, *Nondeterminism and instability in neural network optimization* (arXiv 2103.04514):
    one changed bit in the initial weights makes as much variability as any other source.

    >>> table = growth("autoencoder", seeds=1, profile="smoke", frames=40, progress=False)
    >>> one_bit = table[table.change == "one bit of one weight"]
    >>> bool(0 < one_bit.distance.iloc[0] < one_bit.distance.iloc[-1])
    True
    """
    if seeds < 1:
        raise gl.UsageError(f"seeds={seeds!r}: expected one or more")
    if changes is None:
        one_bit = {"flip": flipped(net, profile)}
        changes = {"one bit of one weight": one_bit, "float64": {"setting": "cpu:precision=float64"}}
    plan = protocol(net, profile)
    windows = (frames or plan.frames) // plan.window
    moments = set((np.geomspace(1, windows + 1, SHOWN).astype(int) - 1).tolist())
    shared: dict[str, Any] = {"profile": profile, "frames": frames, "setting": CPU, "progress": False}
    jobs = [*itertools.product(range(seeds), ["", *changes])]
    bases: list[dict[int, Tensor]] = []
    rows: list[dict[str, Any]] = []
    for seed, name in Progress(jobs, unit="training", leave=False, disable=not progress):
        snapshots = _snapshots(net, moments, {**shared, "seed": seed, **changes.get(name, {})})
        if name:
            rows += _distances(net, name, seed, bases[-1], snapshots)
        else:
            bases.append(snapshots)
    for seed, pair in enumerate(itertools.pairwise(bases)):
        rows += _distances(net, OTHER_SEED, seed, *pair)
    return pd.DataFrame(rows)


def flipped(net: str, profile: str) -> int:
    """The number of the weight whose last bit is changed: the first of the layer in `FLIPPED`."""
    with torch.random.fork_rng(devices=[]):
        model = RunSpec.of(net, profile=profile).model
    before = itertools.takewhile(lambda named: named[0] != FLIPPED[net], model.named_parameters())
    return sum(parameter.numel() for _, parameter in before)


def _snapshots(net: str, moments: set[int], options: dict[str, Any]) -> dict[int, Tensor]:
    """All weights of a training in one row, by the number of updates, at those windows."""
    snapshots: dict[int, Tensor] = {}
    windows = itertools.count()

    def watch(model: Trainable, step: int) -> None:
        if next(windows) in moments:
            snapshots[step] = torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu().float()

    gl.train(net, watch=watch, **options)
    return snapshots


def _distances(
    net: str, change: str, seed: int, base_snapshots: dict[int, Tensor], changed_snapshots: dict[int, Tensor]
) -> Iterator[dict[str, Any]]:
    """A row a moment: how far the weights of two trainings are apart."""
    for step, weights in changed_snapshots.items():
        before, ulps = base_snapshots[step].double(), ulp_distance(base_snapshots[step], weights)
        row: dict[str, Any] = {"network": net, "change": change, "seed": seed, "step": step}
        row["distance"] = float((before - weights.double()).norm() / before.norm())
        yield row | {"changed": float((ulps > 0).double().mean()), "ulps": float(ulps.double().median())}


@style.themed
def growth_figure(frame: pd.DataFrame) -> Picture:
    """The distance between two trainings as they go on, from `growth` of one network or two: a line for each seed."""
    networks = list(frame.network.unique())[:2]
    tints = dict(zip(frame.change.unique(), CHANGE_COLOURS, strict=False))
    first, grown = frame.change.iloc[0], []
    figure, panels = style.canvas(len(networks), height=3.6, sharey=True)
    for axes, network in zip(panels, networks, strict=True):
        lines = frame[(frame.network == network) & (frame.distance > 0)]
        look: Look = {"hue": "change", "palette": tints, "units": "seed", "estimator": None, "alpha": 0.85}
        sns.lineplot(lines, x="step", y="distance", ax=axes, legend=axes is panels[0], **look)
        axes.axhline(2.0**-24, color=FAINT, lw=0.8, ls=":")
        style.log_scale(axes.yaxis)
        axes.set(title=network, xlabel="updates of the weights")
        of_first = frame[(frame.network == network) & (frame.change == first)].sort_values("step")
        ends = of_first.groupby("seed").distance.agg(["first", "last"])
        times = (ends["last"] / ends["first"]).median()
        grown.append(f"{network} {times:,.0f}-fold" if times >= 2 else f"{network} not")
    panels[0].set_ylabel("distance of the weights, relative")
    panels[-1].annotate(" one\n rounding", (1, 2.0**-24), fontsize=7, **BESIDE)
    alt = f"Relative distance of the weights of two trainings against updates, for {', '.join(tints)}."
    headline = f"{first[0].upper()}{first[1:]}: the difference grew in {', in '.join(grown)}"
    headline += f"; {frame.seed.nunique()} seeds, a line each"
    return style.finished(figure, headline, alt, columns=3)


# --- what two GPUs draw from one seed --------------------------------------------------------------------

# How many threads a GPU runs, each with a random sequence of its own: multiprocessors, times the most that each can
# run. A tensor with more numbers goes round, and from the second round on another GPU's other thread fills a place.
THREADS = {
    "T4": 40 * 1024,
    "V100": 80 * 2048,
    "RTX 4090": 128 * 1536,
    "A100": 108 * 2048,
    "H100": 132 * 2048,
}


def cuda_uniform(seed: int, shape: Sequence[int], card: str) -> Tensor:
    """The numbers of `torch.manual_seed(seed); torch.rand(shape, device="cuda")` on a GPU, computed on a CPU.

    `card` is one of the models of GPU in `THREADS`. This follows torch's kernel thread by
    thread (ATen/native/cuda/DistributionTemplates.h, torch 2.15), of at most 2^29 numbers. A thread draws four numbers
    at a time, and cuRAND makes a float32 in (0, 1] of 32 random bits.

    >>> t4, h100 = cuda_uniform(0, (60_000,), "T4"), cuda_uniform(0, (60_000,), "H100")
    >>> bool((t4[:40_960] == h100[:40_960]).all()), bool((t4 == h100).all())
    (True, False)
    """
    count = math.prod(shape)
    threads = min(THREADS[card], math.ceil(count / BLOCK) * BLOCK)
    turns = np.arange(math.ceil(count / (LANES * threads)))[:, None]
    words = np.stack(philox((turns, 0, np.arange(threads), 0), (seed & 0xFFFFFFFF, seed >> 32)), axis=1)
    drawn = words.reshape(-1)[:count].astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    drawn[drawn == 1] = 0  # torch turns (0, 1] into [0, 1)
    return torch.from_numpy(drawn).reshape(tuple(shape))


def philox(counter: Sequence[np.ndarray | int], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox 4×32-10: four uint32 arrays of random bits for four counters that broadcast, and a seed's two halves.

    NumPy has Philox 4×64 alone. Source: Salmon, Moraes, Dror, Shaw 2011, *Parallel random numbers: as easy as 1, 2, 3*.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b, c, d = np.broadcast_arrays(*(np.asarray(number, dtype=np.uint64) for number in counter))
    for turn in range(10):
        first_key = np.uint64((key[0] + turn * 0x9E3779B9) % (1 << 32))
        second_key = np.uint64((key[1] + turn * 0xBB67AE85) % (1 << 32))
        of_a, of_c = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (of_c >> half) ^ b ^ first_key, of_c & low, (of_a >> half) ^ d ^ second_key, of_a & low
    return [word.astype(np.uint32) for word in (a, b, c, d)]


# --- each factor alone -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factor:
    """One thing that is changed, on a `kind` of device: options of `gpulab.train` before and after."""

    name: str
    base: dict[str, Any]
    change: dict[str, Any]
    kind: str = "cpu"

    def runs_here(self, recording: bool = False) -> bool:
        """Whether this machine can do both, in a notebook's time unless it is `recording`."""
        if "decoder" in _flat(self.change):  # recorded while a run could choose its decoder
            return False
        change = gl.Setting.parse(self.change["setting"])
        if change.compile and not recording:  # which takes a minute by itself
            return False
        if change.isa:  # the older instructions are another setting on a newer CPU only
            return {"avx2", "avx512f"} <= cpu_flags()
        try:
            gl.Setting.parse(self.base["setting"]).check()
            change.check()
        except gl.GpulabError:
            return False
        return True


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    return options | options.get("data_options", {})


def level(options: dict[str, Any]) -> str:
    """What makes a level, in words: the setting, and what is not as usual.

    >>> level({"setting": "cpu", "flip": 0})
    'cpu, flip 0'
    """
    flat = _flat(options)
    unusual = [f"{name} {flat[name]}" for name in FACTORS if flat.get(name) is not None]
    return ", ".join([options["setting"], *unusual])


def factors(net: str = "prednet", profile: str = "quick") -> list[Factor]:
    """The factors that are asked about: those of a CPU, then those of a GPU."""
    on_cpu, on_gpu, bit = {"setting": CPU}, {"setting": GPU}, {"flip": flipped(net, profile)}

    def jpeg(setting: str, decoder: str) -> dict[str, Any]:
        return {"setting": setting, "data": "jpeg:walk", "data_options": {"decoder": decoder}}

    all_factors = [
        Factor("CPU threads", on_cpu, {"setting": "cpu"}),
        Factor("CPU instruction set", on_cpu, {"setting": f"{CPU},isa=avx2"}),
        Factor("determinism", on_cpu, {"setting": f"{CPU},deterministic=on"}),
        Factor("order of summation", on_cpu, {"setting": f"{CPU},order=split-4"}),
        Factor("TF32", on_cpu, {"setting": f"{CPU},emulate=tf32"}),
        Factor("mixed precision", on_cpu, {"setting": f"{CPU},autocast=bfloat16"}),
        Factor("compilation", on_cpu, {"setting": f"{CPU},compile=inductor"}),
        Factor("one bit of one weight", on_cpu, on_cpu | bit),
        Factor("image decoder", jpeg(CPU, "pillow"), jpeg(CPU, "av")),
        Factor("cuDNN", on_gpu, {"setting": "cuda:tf32=off,cudnn=off,deterministic=on"}, "cuda"),
        Factor("TF32", on_gpu, {"setting": "cuda:tf32=on,deterministic=on"}, "cuda"),
        Factor("mixed precision", on_gpu, {"setting": f"{GPU},autocast=bfloat16"}, "cuda"),
        Factor("compilation", on_gpu, {"setting": f"{GPU},compile=inductor"}, "cuda"),
        Factor("determinism", on_gpu, {"setting": "cuda:tf32=off,deterministic=off"}, "cuda"),
        Factor("one bit of one weight", on_gpu, on_gpu | bit, "cuda"),
        Factor("image decoder", jpeg(GPU, "pillow"), jpeg(GPU, "nvjpeg"), "cuda"),
        Factor("who draws the weights", on_gpu, on_gpu | {"draws": "device"}, "cuda"),
        Factor("the device itself", on_gpu, {"setting": CPU}, "cuda"),
    ]
    return all_factors if net == "prednet" else [factor for factor in all_factors if factor.name != "image decoder"]


def measure(function: Callable[..., Any], setting: str, **arguments: Any) -> Any:
    """Call a function with a setting; in a fresh process where only that can have the setting.

    Raises `GpulabError` where that process dies. What the function raises is raised here, too.
    """
    from joblib.externals.loky import ProcessPoolExecutor

    if gl.Setting.parse(setting).isa is None:
        return function(setting, **arguments)
    try:
        with ProcessPoolExecutor(1, env=gl.Setting.parse(setting).environment()) as process:
            return process.submit(function, setting, **arguments).result()
    except BrokenProcessPool as error:
        raise gl.GpulabError(f"setting {setting!r}: its process ended: {error}") from error


def step_rows(chosen: list[Factor], net: str, profile: str, progress: bool) -> list[dict[str, Any]]:
    """One step of each factor, on the seed that it moves most: see `FactorTable`."""

    @functools.cache
    def steps_under(level_json: str) -> dict[str, Tensor]:
        options = json.loads(level_json)
        setting = options.pop("setting")
        steps = measure(first_step, setting, net=net, profile=profile, seeds=STEP_SEEDS, options=options)
        return {name: torch.from_numpy(numbers) for name, numbers in steps.items()}

    rows = []
    for factor in Progress(chosen, unit="factor", leave=False, disable=not progress):
        levels = factor.base | {"setting": "cpu:precision=float64"}, factor.base, factor.change
        exact, base, change = (steps_under(json.dumps(options, sort_keys=True)) for options in levels)
        truth, a, b = (step["gradient"] for step in (exact, base, change))
        relative_changes, exact_norm = (b - a).norm(dim=1) / a.norm(dim=1), truth.norm(dim=1)
        most_moved_seed = int(relative_changes.argmax())
        step_moved = float(relative_changes[most_moved_seed])
        step_error, base_error = (
            float(((gradient - truth).norm(dim=1) / exact_norm)[most_moved_seed]) for gradient in (b, a)
        )
        loss_ulps = int(ulp_distance(base["losses"], change["losses"]).max())
        loss_bit = max(0, 24 - loss_ulps.bit_length()) if loss_ulps else None
        gradient_bit = max(0, -math.floor(math.log2(step_moved))) if step_moved else None
        emulated = gl.Setting.parse(factor.change["setting"]).emulated
        rows.append(
            {"factor": factor.name, "change": level(factor.change), "base": level(factor.base), "emulated": emulated}
            | {"loss_bit": loss_bit, "gradient_bit": gradient_bit}
            | {"step_moved": step_moved, "step_error": step_error, "base_error": base_error}
        )
    return rows


def trained_levels(
    chosen: list[Factor], net: str, profile: str, seeds: int, options: dict[str, Any], progress: bool
) -> pd.DataFrame:
    """The runs of all levels, in this process where settings and workers allow it: every flag is restored after one."""
    levels = [level_options for factor in chosen for level_options in (factor.base, factor.change)]
    names: list[str] = []
    for level_options in {level(level_options): level_options for level_options in levels}.values():
        variant = {name: value for name, value in level_options.items() if name != "setting"}
        exp = gl.Experiment(net, [level_options["setting"]], seeds, profile, variants=[variant], **options)
        if exp.workers > 1 or gl.Setting.parse(level_options["setting"]).isa:
            names += exp.run(progress).id.tolist()
        else:
            bar = Progress(exp.jobs(), desc=level(level_options), unit="run", leave=False, disable=not progress)
            names += [gl.train(**job, progress=False).record["id"] for job in bar]
    runs = stores.runs(exp.folder)
    return runs[runs.id.isin(names)]


def _level_runs(frame: pd.DataFrame, options: dict[str, Any]) -> pd.DataFrame:
    """The runs of a frame that were made under a level, which `change` names."""
    flat = _flat(options)
    jpeg = frame.data.str.startswith("jpeg:")
    matches = (frame.setting == options["setting"]) & (frame.rerun == 0) & (jpeg if "data" in flat else ~jpeg)
    for name, option in FACTORS.items():
        if option.of == "run" or name in flat:
            value = flat.get(name, option.usual)
            matches &= frame[name].isna() if value is None else frame[name] == value
    return frame[matches].assign(change=level(options))


@dataclass(frozen=True, eq=False)
class FactorTable(Report):
    """Factors, each changed alone; `table` has a row per factor and place where it was measured.

    `factor`, `change` (in words), `base`; `source` (`made here` or `recorded`), `emulated`, `machine`, `profile`. One
    step, of a few seeds the one that moves most: `loss_bit` (the first bit of the fraction, 1 to 23, in which the loss
    of any frame differs; 0 for a factor of two and more), `step_moved` (relative distance of the gradients),
    `gradient_bit` (the bit that this reaches), `step_error` and `base_error` (relative distances to the base's gradient
    in float64). The final loss: `seeds`, `effect` (mean difference) with its interval `low`, `high`, and `largest` (of
    any seed), in standard deviations between seeds; `same_bits` (seeds whose trained weights are identical);
    `decision`.
    """

    table: pd.DataFrame
    verdicts: dict[tuple[str, str, str], Verdict]  # behind it, by source, machine and base

    plots = "companion.floating_point"

    def finding(self, *sources: str) -> CheckedSentences:
        """What the verdicts allow one to say, a sentence a machine; of some sources if they are named."""
        table = self.table[self.table.source.isin(sources)] if sources else self.table
        table = table.assign(name=table.factor + table.emulated.map({True: " (emulated)", False: ""}))
        sections: dict[str, Part] = {}
        numbers = []
        for (source, machine, profile), rows in table.groupby(["source", "machine", "profile"], sort=False):
            origin, seeds = f"{source.capitalize()} on {machine}", span(rows.seeds)
            sentences, effects = [], []
            for decision, decision_rows in by_decision(rows):
                words = CHANGES[decision].format(seeds=seeds)
                sentences.append(f"{words}: {listed(decision_rows['name'])}.")
            sections[f"{origin}, {SIZES[profile]}"] = sentences
            for row in rows[rows.same_bits != rows.seeds].itertuples():
                interval = f" [{row.low:.1g}, {row.high:.1g}]" if row.low == row.low else ""  # few seeds have none
                effects.append(f"{row.name} {row.effect:+.1g}{interval}")
            numbers.append(f"{origin}, {seeds} seeds, in standard deviations between seeds: {'; '.join(effects)}.")
        return finding(sections, numbers)

    def __str__(self) -> str:
        return str(self.finding())


def factor_table(
    net: str = "prednet",
    profile: str = "quick",
    seeds: int = 6,
    frames: int | None = None,
    store: str | Path | None = None,
    progress: bool = True,
) -> FactorTable:
    """Change each factor alone, from the same weights, and say what it does to a step and to the final loss.

    This machine measures what it can: one step of a few seeds, and `seeds` trainings per level, kept in a `store`. What
    other machines measured is added. Decisions are those of `gpulab.verdict`, corrected for the number of factors with
    the same base (Holm). `smoke` takes a minute on two cores, `quick` several times that.
    """
    all_factors = factors(net, profile)
    factors_here = [factor for factor in all_factors if factor.runs_here()]
    steps = step_rows(factors_here, net, profile, progress)
    options = {"store": store, "options": {} if frames is None else {"frames": frames}}
    runs = trained_levels(factors_here, net, profile, seeds, options, progress)
    judged = [_judged_factors(steps, runs, factors_here, MADE_HERE, profile, gl.passport())]
    recorded_runs = stores.recorded_runs("factors")
    for record in read_measured("factors"):
        if record["network"] == net:
            passport = record["passport"]
            same_machine = (recorded_runs.cpu == passport["cpu"]["model"]) & (
                recorded_runs.torch == passport["software"]["torch"]
            )
            same_machine &= recorded_runs.gpu.fillna("") == ", ".join(gpu["name"] for gpu in passport["gpus"])
            same_machine &= (
                (recorded_runs.experiment == net)
                & (recorded_runs.profile == record["profile"])
                & (recorded_runs.frames == record["frames"])
            )
            recorded_levels = {(step["change"], step["base"]) for step in record["steps"]}
            recorded_factors = factors(net, record["profile"])
            recorded_factors = [
                factor for factor in recorded_factors if (level(factor.change), level(factor.base)) in recorded_levels
            ]
            judged.append(
                _judged_factors(
                    record["steps"],
                    recorded_runs[same_machine],
                    recorded_factors,
                    RECORDED,
                    record["profile"],
                    passport,
                )
            )
    order = [factor.name for factor in all_factors]
    table = pd.concat([rows for rows, _ in judged], ignore_index=True)
    table = table.sort_values("factor", key=lambda names: names.map(order.index), kind="stable", ignore_index=True)
    counts = dict.fromkeys(("loss_bit", "gradient_bit", "seeds", "same_bits"), "Int64")
    verdicts = {key: base_verdict for _, by_base in judged for key, base_verdict in by_base.items()}
    return FactorTable(table.astype(counts), verdicts)


def _judged_factors(
    steps: list[dict[str, Any]],
    runs: pd.DataFrame,
    chosen: list[Factor],
    source: str,
    profile: str,
    machine: Mapping[str, Any],
) -> tuple[pd.DataFrame, dict[tuple[str, str, str], Verdict]]:
    """Rows of one step, each with the verdict on the final loss; and the verdicts by source, machine and base.

    A verdict for each base is on all that is compared with it, so that Holm's correction sees all.
    """
    verdicts, effects = {}, []
    for base, options in {level(factor.base): factor.base for factor in chosen}.items():
        levels = [options, *(factor.change for factor in chosen if factor.base == options)]
        compared = pd.concat([_level_runs(runs, level_options) for level_options in levels], ignore_index=True)
        device = machine_of(machine, base.partition(":")[0])
        verdicts[source, device, base] = judged = gl.verdict(compared, factor="change", reference=base)
        effect = judged.table[["change", "seeds", "same_bits", "decision"]].assign(base=base)
        in_sd = judged.table[[*IN_SD.values()]].div(judged.between_seeds or math.nan).to_numpy()
        effects.append(effect.assign(**dict(zip(IN_SD, in_sd.T, strict=True))))
    rows = pd.DataFrame(steps).merge(pd.concat(effects), on=["base", "change"])
    devices = [machine_of(machine, base.partition(":")[0]) for base in rows.base]
    return rows.assign(source=source, profile=profile, machine=devices), verdicts


def recorded_measurements(name: str) -> pd.DataFrame:
    """A table that other machines recorded: one of `MEASURED`, with the column `machine`."""
    if name not in MEASURED:
        raise gl.UsageError(f"measurement {name!r}: expected one of {', '.join(MEASURED)}")
    return recorded_table("factors", name)


def recorded_products() -> pd.DataFrame:
    """How much of an H200's products the emulation of them explains: see `benchmarks/products.md`."""
    return recorded_table("products", "comparison").drop(columns=["inputs", "machine", "recorded"])


@draw.register
@style.themed
def factor_effects(report: FactorTable) -> Picture:
    """Each factor changed alone: how far it moves the gradient of one step, and the final loss of each seed.

    A tick marks what rounding alone does to the gradient. What keeps its bits stands at the left edge.
    """
    tints = report.table.base.str.startswith("cuda").map({True: ON_GPU, False: ON_CPU})
    table = report.table.assign(recorded=report.table.source == RECORDED, tint=tints)
    count, names = table.factor.nunique(), []
    figure, (step_axes, loss_axes) = style.canvas(2, height=1.9 + 0.55 * count, sharey=True)
    for position, (factor, rows) in enumerate(table.groupby("factor", sort=False)):
        offsets = (np.arange(len(rows)) - (len(rows) - 1) / 2) * min(0.28, 0.8 / len(rows))
        step_axes.scatter(rows.base_error, position + offsets, marker="|", s=50, color=FAINT, zorder=2)
        for height, row in zip(position + offsets, rows.itertuples(), strict=True):
            look: Look = {"marker": "^" if row.emulated else "o", "hollow": row.recorded}
            style.points(step_axes, max(row.step_moved, SAME_STEP), height, row.tint, s=26, **look)
            loss_axes.annotate(f" {row.decision}", (1.0, height), fontsize=7, color=row.tint, **BESIDE)
            judged = report.verdicts[row.source, row.machine, row.base]
            seed_effects = judged.pairs.difference[judged.pairs.change == row.change].dropna().abs()
            in_sd = np.maximum(seed_effects / (judged.between_seeds or math.nan), SAME_LOSS)
            style.points(loss_axes, in_sd, np.full(len(seed_effects), height), row.tint, s=14, linewidths=0.9, **look)
        changed = ", ".join(dict.fromkeys(map(_changed_options, rows.base, rows.change)))
        names.append(f"{factor}\n{textwrap.fill(changed, 24)}")
        for axes in (step_axes, loss_axes) if position % 2 else ():
            axes.axhspan(position - 0.5, position + 0.5, color=FAINT, alpha=0.12, lw=0, zorder=0)
    label_look: Look = {"va": "center", "fontsize": 8, "annotation_clip": False}
    for axes, edge, powers, label in (
        (step_axes, SAME_STEP, range(-9, 2, 2), "change of one step's gradient (relative)"),
        (loss_axes, SAME_LOSS, range(-6, 3, 2), "change of a seed's final loss (sd)"),
    ):
        axes.set_xscale("log")
        axes.set_xticks([10.0**power for power in powers], [style.power_of_ten(10.0**power) for power in powers])
        axes.minorticks_off()
        axes.annotate("same bits", (edge, -0.7), ha="left", **label_look)
        axes.set(xlim=(edge / 3, 100), xlabel=label)
    step_axes.set_yticks(range(count), names)
    step_axes.set_ylim(count - 0.4, -0.55)
    loss_axes.axvline(0.25, color=FAINT, lw=0.9, ls=":")
    loss_axes.axvline(1, color=INK, lw=0.9, ls="--")
    loss_axes.annotate("margin ", (0.25, -0.7), ha="right", **label_look)
    loss_axes.annotate(" sd between seeds", (1, -0.7), ha="left", **label_look)
    loss_axes.tick_params(axis="y", left=False)
    keys = [style.key("rounding alone: distance of the base from float64", ls="", marker="|", color=FAINT, ms=8)]
    keys += style.origin_keys(table)
    if table.emulated.any():
        keys.append(style.key("emulated", ls="", marker="^", ms=5, color=FAINT))
    for device, tint in (("CPU", ON_CPU), ("GPU", ON_GPU)):
        if (tints == tint).any():
            keys.append(style.key(f"changed on a {device}", ls="", marker="s", ms=5, color=tint))
    decided = ", ".join(f"{n} {decision}" for decision, n in table.decision.value_counts().items())
    headline = f"Each factor alone, effect on the final loss: {decided}"
    alt = f"For each of {count} factors, how far one step and the final losses move."
    return style.finished(figure, headline, alt, keys)


def _changed_options(base: str, change: str) -> str:
    """What is changed, without what stays: of `cpu:threads=1,isa=avx2` against `cpu:threads=1`, `isa=avx2`."""
    before, after = (re.split(r"[:,] ?", side) for side in (base, change))
    if before[0] != after[0]:
        return change
    return ", ".join(option for option in after[1:] if option not in before) or f"without {', '.join(before[1:])}"
