"""Which factor does it? Each one changed alone, from the same weights: one step of it, and the final loss.

A factor is anything that a device may do otherwise without being wrong. Factors of a GPU come from recordings
where there is none.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpulab import records
from gpulab.companion.findings import SAME, SIZES, WORDS, CheckedSentences, Part, listed, span
from gpulab.companion.first_windows import FirstWindow
from gpulab.companion.growths import flipped
from gpulab.data.jpeg import available_decoders
from gpulab.device.operations import measure
from gpulab.errors import GpulabError, UsageError
from gpulab.numerics.sums import bit_of, first_bit
from gpulab.passports import passport
from gpulab.progress import Progress
from gpulab.report import Report
from gpulab.report import table as html_table
from gpulab.settings import Setting, cpu_flags
from gpulab.stats.verdicts import DECISIONS, Verdict, verdict
from gpulab.training import store as stores
from gpulab.training.experiment import Experiment
from gpulab.training.protocol import FACTORS
from gpulab.training.run import train

MEASURED = ("conversions", "repeatability", "fused", "decoders")
STEP_SEEDS = 3  # one step is cheap, but one seed proves nothing
MADE_HERE, RECORDED, NOT_RECORDED = "made here", "recorded", "not recorded"
IN_SD = {"effect": "difference", "low": "low", "high": "high", "largest": "largest_difference"}


@dataclass(frozen=True)
class Factor:
    """One thing that is changed, on a `kind` of device: options of `gpulab.train` before and after."""

    name: str
    base: dict[str, Any]
    change: dict[str, Any]
    kind: str = "cpu"

    def runs_here(self) -> bool:
        """Whether this machine can do both."""
        decoder, change = _flat(self.change).get("decoder"), Setting.parse(self.change["setting"])
        if decoder and decoder not in available_decoders():
            return False
        if change.isa:  # the older instructions are another setting on a newer CPU only
            return {"avx2", "avx512f"} <= cpu_flags()
        try:
            Setting.parse(self.base["setting"]).check()
            change.check()
        except GpulabError:
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


CPU, GPU = "cpu:threads=1", "cuda:tf32=off,deterministic=on"


def _jpeg(setting: str, decoder: str) -> dict[str, Any]:
    return {"setting": setting, "data": "jpeg:walk", "data_options": {"decoder": decoder}}


def factors(net: str = "prednet", profile: str = "quick") -> list[Factor]:
    """The factors that are asked about: those of a CPU, then those of a GPU.

    >>> factors()[0].name
    'CPU threads'
    """
    on_cpu, on_gpu = {"setting": CPU}, {"setting": GPU}
    bit = {"flip": flipped(net, profile)}
    every = [
        Factor("CPU threads", on_cpu, {"setting": "cpu"}),
        Factor("CPU instruction set", on_cpu, {"setting": f"{CPU},isa=avx2"}),
        Factor("determinism", on_cpu, {"setting": f"{CPU},deterministic=on"}),
        Factor("order of summation", on_cpu, {"setting": f"{CPU},order=split-4"}),
        Factor("TF32", on_cpu, {"setting": f"{CPU},emulate=tf32"}),
        Factor("one bit of one weight", on_cpu, on_cpu | bit),
        Factor("image decoder", _jpeg(CPU, "pillow"), _jpeg(CPU, "av")),
        Factor("cuDNN", on_gpu, {"setting": "cuda:tf32=off,cudnn=off,deterministic=on"}, "cuda"),
        Factor("TF32", on_gpu, {"setting": "cuda:tf32=on,deterministic=on"}, "cuda"),
        Factor("determinism", on_gpu, {"setting": "cuda:tf32=off,deterministic=off"}, "cuda"),
        Factor("one bit of one weight", on_gpu, on_gpu | bit, "cuda"),
        Factor("image decoder", _jpeg(GPU, "pillow"), _jpeg(GPU, "nvjpeg"), "cuda"),
        Factor("who draws the weights", on_gpu, on_gpu | {"draws": "device"}, "cuda"),
        Factor("the device itself", on_gpu, {"setting": CPU}, "cuda"),
    ]
    return every if net == "prednet" else [factor for factor in every if factor.name != "image decoder"]


def first_step(setting: str, net: str, profile: str, seeds: int, file: str, options: dict[str, Any]) -> None:
    """Write the first step's `losses` (seeds, frames) and `gradient` (seeds, weights) to a safetensors file."""
    losses, gradients = [], []
    for seed in range(seeds):
        computed = FirstWindow(net, seed=seed, profile=profile, setting=setting, **options).gradient(setting)
        losses.append(computed.losses.float())
        gradients.append(torch.cat([g.reshape(-1) for _, g in sorted(computed.gradient.items())]))
    save_file({"losses": torch.stack(losses), "gradient": torch.stack(gradients)}, file)


def step_rows(chosen: list[Factor], net: str, profile: str, progress: bool) -> list[dict[str, Any]]:
    """One step of each factor, on the seed that it moves most: see `FactorTable`."""

    @functools.cache
    def steps_under(level_json: str) -> dict[str, Tensor]:
        options = json.loads(level_json)
        setting = options.pop("setting")
        with tempfile.TemporaryDirectory() as scratch:
            file = str(Path(scratch) / "step.safetensors")
            measure(first_step, setting, net=net, profile=profile, seeds=STEP_SEEDS, file=file, options=options)
            return load_file(file)

    rows = []
    for factor in Progress(chosen, unit="factor", leave=False, disable=not progress):
        words = level(factor.change)
        levels = factor.base | {"setting": "cpu:precision=float64"}, factor.base, factor.change
        try:
            exact, base, change = (steps_under(json.dumps(options, sort_keys=True)) for options in levels)
        except RuntimeError as error:  # torch's: a device lacks an operation under this setting
            warnings.warn(f"{factor.name}, {words}: cannot be done here: {error}", stacklevel=3)
            continue
        distances = []
        for truth, a, b in zip(exact["gradient"], base["gradient"], change["gradient"], strict=True):
            moved, off, base_off = (b - a).norm() / a.norm(), (b - truth).norm(), (a - truth).norm()
            distances.append([float(moved), float(off / truth.norm()), float(base_off / truth.norm())])
        step_moved, step_error, base_error = max(distances, key=lambda distance: distance[0])
        pairs = zip(base["losses"].flatten(), change["losses"].flatten(), strict=True)
        differing = [bit for a, b in pairs if (bit := first_bit(a, b)) is not None]
        emulated = Setting.parse(factor.change["setting"]).emulated
        rows.append(
            {"factor": factor.name, "change": words, "base": level(factor.base), "emulated": emulated}
            | {"loss_bit": min(differing, default=None), "gradient_bit": bit_of(step_moved)}
            | {"step_moved": step_moved, "step_error": step_error, "base_error": base_error}
        )
    return rows


def trained_levels(
    chosen: list[Factor], net: str, profile: str, seeds: int, options: dict[str, Any], progress: bool
) -> pd.DataFrame:
    """The runs of all levels, in this process where settings and workers allow it: every flag is restored after one."""
    levels = [side for factor in chosen for side in (factor.base, factor.change)]
    names: list[str] = []
    for side in {json.dumps(side, sort_keys=True): side for side in levels}.values():
        variant = {name: value for name, value in side.items() if name != "setting"}
        exp = Experiment(net, [side["setting"]], seeds, profile, variants=[variant], **options)
        if exp.workers > 1 or Setting.parse(side["setting"]).isa:
            names += exp.run(progress).id.tolist()
        else:
            bar = Progress(exp.jobs(), desc=level(side), unit="run", leave=False, disable=not progress)
            names += [train(**job, progress=False).record["id"] for job in bar]
    runs = stores.runs(exp.folder)
    return runs[runs.id.isin(names)]


def _of_level(frame: pd.DataFrame, options: dict[str, Any]) -> pd.DataFrame:
    """The runs of a frame that were made under a level."""
    flat = _flat(options)
    jpeg = frame.data.str.startswith("jpeg:")
    fits = (frame.setting == options["setting"]) & (frame.rerun == 0) & (jpeg if "data" in flat else ~jpeg)
    for name, option in FACTORS.items():
        if option.of == "run" or name in flat:
            value = flat.get(name, option.usual)
            fits &= frame[name].isna() if value is None else frame[name] == value
    return frame[fits]


def _verdicts(frame: pd.DataFrame, chosen: list[Factor]) -> dict[str, Verdict]:
    """A verdict for each base on all that is compared with it, so that Holm's correction sees all."""
    verdicts: dict[str, Verdict] = {}
    for name, base in {level(factor.base): factor.base for factor in chosen}.items():
        levels = {name: base} | {level(factor.change): factor.change for factor in chosen if factor.base == base}
        parts = [_of_level(frame, options).assign(change=words) for words, options in levels.items()]
        runs = pd.concat(parts, ignore_index=True)
        if (runs.change == name).any() and runs.change.nunique() > 1:
            verdicts[name] = verdict(runs, factor="change", reference=name)
    return verdicts


@dataclass(frozen=True, eq=False)
class FactorTable(Report):
    """Factors, each changed alone; `table` has a row per factor and place where it was measured.

    `factor`, `change` (in words), `base`; `source` (`made here`, `recorded` or `not recorded`), `emulated`,
    `machine`, `profile`. One step, of a few seeds the one that moves most: `loss_bit` (the first bit in which the loss
    of any frame differs on any of them, see `gpulab.numerics.first_bit`), `step_moved` (relative distance of the
    gradients), `gradient_bit` (the bit that this reaches), `step_error` and `base_error` (relative distances to the
    base's gradient in float64). The final loss: `seeds`, `effect` (mean difference) with its interval `low`, `high`,
    and `largest` (of any seed), in standard deviations between seeds; `same_bits` (seeds whose trained weights are
    identical); `decision`.
    """

    table: pd.DataFrame
    verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)  # behind it, by source and base

    plots = "gpulab.companion.floating_point_figures"

    def finding(self, *sources: str) -> CheckedSentences:
        """What the verdicts allow one to say, in sentences; of some sources if they are named."""
        table = self.table[self.table.source.isin(sources)] if sources else self.table
        return CheckedSentences(_said(table), [*_statistics(table)])

    def __str__(self) -> str:
        return str(self.finding())

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        shown = _shown(self.table)
        return {"text/plain": shown.to_string(index=False), "text/html": html_table(shown)}, {}


def factor_table(
    net: str = "prednet",
    profile: str = "quick",
    seeds: int = 6,
    frames: int | None = None,
    store: str | Path | None = None,
    recorded: bool = True,
    progress: bool = True,
) -> FactorTable:
    """Change each factor alone, from the same weights, and say what it does to a step and to the final loss.

    This machine measures what it can: one step of a few seeds, and `seeds` trainings per level. Decisions are those
    of `gpulab.verdict`, corrected for the number of factors with the same base (Holm).

    Args:
        net: A model's name.
        profile: `smoke` takes a minute on two cores, `quick` several times that.
        seeds: How many trainings per level.
        frames: How many to train on, instead of the profile's.
        store: Where the trainings are kept and resumed from.
        recorded: Add what other machines measured, and a row for each factor of which nothing is known.
        progress: Show bars.

    Examples:
        >>> table = factor_table("autoencoder", "smoke", seeds=2, frames=20, recorded=False, progress=False).table
        >>> table[table.base == "cpu:threads=1"].set_index("factor").loc["determinism", "same_bits"].item()
        2
    """
    every = factors(net, profile)
    here = [factor for factor in every if factor.runs_here()]
    steps = step_rows(here, net, profile, progress)
    options = {"store": store, "options": {} if frames is None else {"frames": frames}}
    runs = trained_levels(here, net, profile, seeds, options, progress)
    rows, verdicts = _with_verdicts(steps, _verdicts(runs, here), MADE_HERE, profile, passport())
    if recorded:
        for record in recorded_factors():
            if record["network"] == net:
                more, theirs = _recorded_rows(record)
                rows += more
                verdicts |= theirs
        measured = {row["factor"] for row in rows}
        missing = {"source": NOT_RECORDED, "decision": NOT_RECORDED}
        for factor in every:
            if factor.name not in measured:
                words = {"change": level(factor.change), "base": level(factor.base)}
                rows.append({"factor": factor.name, **words, **missing})
    order = [factor.name for factor in every]
    table = pd.DataFrame(sorted(rows, key=lambda row: order.index(row["factor"])))
    counts = {"loss_bit", "gradient_bit", "seeds", "same_bits"} & set(table)
    return FactorTable(table.astype(dict.fromkeys(counts, "Int64")), verdicts)


def _with_verdicts(
    steps: list[dict[str, Any]], verdicts: dict[str, Verdict], source: str, profile: str, machine: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], Verdict]]:
    """Rows of one step, each with the verdict on the final loss; and the verdicts by source and base."""
    rows = []
    for step in steps:
        device = records.machine(machine, step["base"].partition(":")[0])
        effect: dict[str, Any] = {"seeds": 0, "decision": NOT_RECORDED}
        judged = verdicts.get(step["base"])
        if judged is not None and step["change"] in judged.decisions:
            row = judged.table.set_index("change").loc[step["change"]]
            unit = judged.between_seeds or math.nan
            effect = {"seeds": int(row.seeds)}
            effect |= {name: float(row[column]) / unit for name, column in IN_SD.items()}
            effect |= {"same_bits": int(row.same_bits), "decision": row.decision}
        rows.append({"source": source, "profile": profile, "machine": device, **step, **effect})
    return rows, {(source, base): judged for base, judged in verdicts.items()}


def recorded_factors() -> list[dict[str, Any]]:
    """What `benchmarks/record_factors.py` wrote on other machines; a damaged file is a `DataError`."""
    return records.read_documents("factors")


def recorded_measurements(name: str) -> pd.DataFrame:
    """One of the tables that other machines recorded, with the columns `machine` and `torch`.

    Args:
        name: `conversions`, `repeatability`, `fused` or `decoders`: see `byte_round_trip`, `repeatability`,
            `fused_operations` and `compare_decoders`.

    Raises:
        UsageError: For another name.

    Examples:
        >>> "machine" in recorded_measurements("conversions")
        True
    """
    if name not in MEASURED:
        raise UsageError(f"measurement {name!r}: expected one of {', '.join(MEASURED)}")
    parts = []
    for record in recorded_factors():
        there = record["passport"]
        machine = records.machine(there, record["kind"])
        parts.append(pd.DataFrame(record[name]).assign(machine=machine, torch=there["software"]["torch"]))
    return pd.concat(parts, ignore_index=True)


def recorded_products() -> pd.DataFrame:
    """How much of an NVIDIA H200's products the emulation of them explains, as `benchmarks/compare_products.py` found.

    Returns:
        For normal numbers, a row for each operation, format asked for and format used: see `benchmarks/products.md`.

    Examples:
        >>> table = recorded_products()
        >>> bool((table["least explained"][table.used == "tf32"] > 0.99).all())
        True
    """
    comparison = records.read_json(records.recorded_folder("gpu_products") / "comparison.json")
    return pd.DataFrame(comparison["table"]).drop(columns="inputs")


def _recorded_rows(record: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[tuple[str, str], Verdict]]:
    """A recording's steps, with the verdicts on the recorded runs of the same machine."""
    net, profile, there = record["network"], record["profile"], record["passport"]
    runs = stores.runs(records.recorded_folder("factors")).assign(recorded=True)
    gpus = ", ".join(gpu["name"] for gpu in there["gpus"])
    same = (runs.cpu == there["cpu"]["model"]) & (runs.torch == there["software"]["torch"])
    same &= (runs.gpu.fillna("") == gpus) & (runs.profile == profile) & (runs.experiment == net)
    same &= runs.frames == record["frames"]
    stepped = {(step["change"], step["base"]) for step in record["steps"]}
    chosen = [factor for factor in factors(net, profile) if (level(factor.change), level(factor.base)) in stepped]
    return _with_verdicts(record["steps"], _verdicts(runs[same], chosen), RECORDED, profile, there)


def _said(table: pd.DataFrame) -> list[tuple[str, Part]]:
    """A sentence for each machine: which factors came to which decision."""
    parts: list[tuple[str, Part]] = []
    for (source, machine, profile), rows in _by_machine(table):
        decisions = rows.decision.where(~_same_bits(rows), SAME)
        said = []
        for decision in (SAME, *DECISIONS[::-1], NOT_RECORDED):
            some = rows[decisions == decision]
            if len(some):
                words = WORDS.get(decision, decision)
                words = words.format(block="seed", seeds=span(rows.seeds), needed="", within="")
                said.append(f"{listed(_names(some))}: {words}")
        parts.append((f"{source.capitalize()} on {machine}, {SIZES[profile]}", f"{'; '.join(said)}."))
    if missing := sorted(set(table.factor[table.source == NOT_RECORDED])):
        parts.append(("Not recorded", f"{listed(missing)}."))
    return parts


def _statistics(table: pd.DataFrame) -> Iterator[str]:
    """How far each factor moved a seed, a line for each machine."""
    for (source, machine, _), rows in _by_machine(table):
        trained = rows[(rows.seeds > 0) & ~_same_bits(rows)]
        words = []
        for name, row in zip(_names(trained), trained.itertuples(), strict=True):
            interval = f" [{row.low:.1g}, {row.high:.1g}]" if row.low == row.low else ""  # few seeds have none
            words.append(f"{name} {row.effect:+.1g}{interval}")
        where = f"{source.capitalize()} on {machine}, {span(rows.seeds)} seeds"
        yield f"{where}, in standard deviations between seeds: {'; '.join(words)}."


def _by_machine(table: pd.DataFrame) -> Any:
    return table[table.source != NOT_RECORDED].groupby(["source", "machine", "profile"], sort=False)


def _same_bits(rows: pd.DataFrame) -> pd.Series:
    return (rows.seeds > 0) & (rows.same_bits == rows.seeds)


def _names(rows: pd.DataFrame) -> list[str]:
    return [f"{row.factor}{' (emulated)' if row.emulated else ''}" for row in rows.itertuples()]


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table as a reader wants it: few columns, few digits."""

    def bit(value: Any) -> str:
        return "same" if pd.isna(value) else f"bit {value}"

    measured = table.source != NOT_RECORDED
    source = [f"{s}, emulated" if e is True else s for s, e in zip(table.source, table.emulated, strict=True)]
    shown = table[["factor", "change"]].assign(source=source)
    shown["first bit, loss"] = table.loss_bit.map(bit).where(measured, "")
    shown["first bit, gradient"] = table.gradient_bit.map(bit).where(measured, "")
    shown["error of one step"] = table.step_error.map("{:.1e}".format).where(measured, "")
    shown["of the base"] = table.base_error.map("{:.1e}".format).where(measured, "")
    shown["effect on the loss (sd)"] = table.effect.map("{:+.1g}".format).where(table.seeds > 0, "")
    shown["seeds"], shown["same bits"] = table.seeds.where(measured), table.same_bits.where(table.seeds > 0)
    shown["verdict"] = table.decision
    return shown.astype(object).where(shown.notna(), "")
