"""The atlas: what settings change on many machines, each by itself and all together.

A machine's effect is the mean over seeds of the difference in the logarithm of the final loss, of pairs that differ in
nothing but the setting: 0.01 is one per cent more. It has that unit on every machine and for every network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

import gpulab.stats.tests as inference
from gpulab.records import recorded_folder
from gpulab.report import Report
from gpulab.report import table as html_table
from gpulab.stats.meta import MetaAnalysis, meta_analysis
from gpulab.stats.pairs import pair
from gpulab.stats.verdicts import p_text
from gpulab.training.protocol import FACTORS
from gpulab.training.sharing import atlas_folder
from gpulab.training.store import recorded_runs, runs

PLAIN = ("cpu", "cpu:threads=1", "cuda:tf32=off", "cuda:tf32=off,deterministic=on", "cuda")  # references, in order
FEWEST = 5  # seeds, below which a standard error is too uncertain to weigh a machine with
EFFECT = ["experiment", "profile", "protocol", "variant", "reference", "setting"]


def atlas(folder: str | Path | None = None) -> pd.DataFrame:
    """The runs that are shipped with gpulab and those that `gpulab merge` added, as `gpulab.runs`.

    Args:
        folder: By default where `gpulab merge` adds them.
    """
    merged = [runs(each).assign(recorded=True) for each in (recorded_folder("atlas"), folder or atlas_folder())]
    frames = [frame for frame in (recorded_runs(), *merged) if len(frame)]
    return pd.concat(frames, ignore_index=True).drop_duplicates("id")


def atlas_table(frame: pd.DataFrame, reference: str | None = None, alpha: float = 0.05) -> pd.DataFrame:
    """Machines × settings: how far each setting moves the final loss there, from the same seeds.

    Args:
        frame: Runs, from `atlas` or `gpulab.runs`.
        reference: A setting; by default, for each kind of device, a plain one that the machine ran.
        alpha: Of the intervals, each by itself at 1 − alpha (Student's).

    Returns:
        A row for each machine (its chips and version of torch) and setting: `experiment`, `profile`, `protocol`,
        `variant` (other factors that were not as usual), `reference`, `setting`, `machine`, `seeds`, `effect` with
        `low`, `high` and standard `error`, `same_bits` (seeds with identical weights), `diverged` and
        `reference_diverged` (of the seeds of both), and `pooled`: whether it counts in `atlas_verdict`.
    """
    frame = frame[(frame.rerun == 0) & ~(frame.final_loss <= 0)]
    usual = {name: factor.usual for name, factor in FACTORS.items()}
    changed = [
        ", ".join(
            f"{name}={value}"
            for name, value in zip(usual, values, strict=True)
            if value is not None and value == value and value != usual[name]
        )
        for values in frame[list(usual)].itertuples(index=False)
    ]
    frame = frame.assign(variant=changed, machine=[*map(_machine, frame.cpu, frame.gpu, frame.torch)])
    alike = ["experiment", "profile", "protocol", "variant", "machine"]
    rows = []
    for key, group in frame.groupby(alike if reference else [*alike, "device"], sort=False):
        settings = set(group.setting)
        plain = reference or next((setting for setting in PLAIN if setting in settings), None)
        if plain in settings and len(settings) > 1:
            common = dict(zip(alike, key, strict=False)) | {"reference": plain}
            rows += [common | effect for effect in _effects(group.drop_duplicates(["setting", "seed"]), plain, alpha)]
    columns = [*EFFECT, "machine", "seeds", "effect", "low", "high", "error", "same_bits", "diverged"]
    table = pd.DataFrame(rows, columns=[*columns, "reference_diverged", "pooled"])
    return table.astype({"pooled": bool}).sort_values([*EFFECT, "machine"], ignore_index=True)


def _machine(cpu: str, gpu: str | float | None, torch: str) -> str:
    """What makes a machine: its chips, each kind once, and its version of torch."""
    short = cpu.replace("(R)", "").replace("(TM)", "").replace(" CPU", "").removesuffix(" Processor")
    gpus = dict.fromkeys(gpu.split(", ")) if isinstance(gpu, str) else []
    return f"{' + '.join([short, *gpus])}, torch {torch.partition('+')[0]}"


def _effects(frame: pd.DataFrame, reference: str | None, alpha: float) -> Iterator[dict[str, Any]]:
    """What each other setting changes in runs that differ in setting and seed only."""
    _, _, pairs, _, _ = pair(frame.assign(log_loss=np.log(frame.final_loss)), "log_loss", "setting", "seed", reference)
    for setting, both in pairs.groupby("setting"):
        differences = both.difference.dropna().to_numpy(float)
        low, high = inference.skewed_t_interval(differences, alpha, corrected=False)
        error = inference.sample_sd(differences) / math.sqrt(max(1, len(differences)))
        yield {
            "setting": setting,
            "seeds": len(differences),
            "effect": differences.mean() if len(differences) else math.nan,
            "low": low,
            "high": high,
            "error": error,
            "same_bits": int(both.same_bits.sum()),
            "diverged": int(both.other_diverged.sum()),
            "reference_diverged": int(both.reference_diverged.sum()),
            "pooled": bool(len(differences) >= FEWEST and error > 0),
        }


@dataclass(frozen=True, eq=False)
class AtlasVerdict(Report):
    """What a setting changes over machines. `print` says it, `plot()` draws it, a notebook shows both.

    Attributes:
        machines: From `atlas_table`.
        pooled: A row for each comparison with two machines or more: what `gpulab.stats.meta.MetaAnalysis` says, and
            `p_holm`, its p corrected for the number of rows (Holm).
        alpha: The level of significance.
    """

    machines: pd.DataFrame
    pooled: pd.DataFrame
    alpha: float
    plots: ClassVar[str] = "gpulab.companion.atlas_figures"

    def __str__(self) -> str:
        if self.machines.empty:
            return "No machine has the same seeds under two settings: there is nothing to compare."
        pooled = {tuple(row[name] for name in EFFECT): row for row in self.pooled.to_dict("records")}
        return "\n".join(
            _sentence(key, rows, pooled.get(key), self.alpha) for key, rows in self.machines.groupby(EFFECT)
        )

    def html(self) -> str:
        """Sentences, table and figure."""
        figure = self.plot().html() if len(self.machines) else ""
        return super().html() + html_table(self.machines.drop(columns=["protocol"])) + figure


def atlas_verdict(frame: pd.DataFrame, reference: str | None = None, alpha: float = 0.05) -> AtlasVerdict:
    """Say over machines what each setting changes: a random-effects meta-analysis, not a vote.

    The machines' effects are weighed by their standard errors and by tau, how far apart the machines are. Machines
    with fewer than five seeds are shown and not pooled; neither are those where a setting changed not one bit of any
    run: there is no error to weigh them by, and the question is what it changes where it changes something. Versions
    of torch count as machines of their own.

    Args:
        frame: Runs, from `atlas` or `gpulab.runs`.
        reference: As in `atlas_table`.
        alpha: The level of significance.
    """
    table = atlas_table(frame, reference, alpha)
    rows = []
    for key, some in table[table.pooled].groupby(EFFECT):
        if len(some) > 1:
            rows.append(dict(zip(EFFECT, key, strict=True)) | asdict(meta_analysis(some.effect, some.error, alpha)))
    pooled = pd.DataFrame(rows, columns=[*EFFECT, *MetaAnalysis.__dataclass_fields__])
    return AtlasVerdict(table, pooled.assign(p_holm=inference.holm(list(pooled.p))), alpha)


def comparison(key: Any) -> str:
    """What is compared, in words, from the values of `EFFECT`."""
    experiment, profile, _, variant, reference, setting = key
    return f"{experiment}, {profile} size{', ' + variant if variant else ''}: {setting} against {reference}"


def percent(*effects: float) -> str:
    """Differences of logarithms as changes in per cent, the ends of an interval in brackets."""
    texts = [f"{100 * math.expm1(effect):+.2g}" for effect in effects]
    return f"{texts[0]} %" + (f" [{', '.join(texts[1:])}]" if len(texts) > 1 else "")


def _sentence(key: Any, rows: pd.DataFrame, pooled: dict[str, Any] | None, alpha: float) -> str:
    text, used = f"{comparison(key)}: ", rows[rows.pooled]
    exact = rows[(rows.error == 0) & (rows.effect == 0) & (rows.seeds > 1)]
    few = rows[~rows.pooled & ~rows.index.isin(exact.index)]
    if pooled:
        what = "changes the final loss" if pooled["p_holm"] <= alpha else "no change of the final loss is shown"
        text += f"over {len(used)} machines {what}, {percent(pooled['effect'], pooled['low'], pooled['high'])}"
        text += f", corrected p = {p_text(pooled['p_holm'], alpha)}; between machines tau = {100 * pooled['tau']:.2g} %"
        text += f" [{100 * pooled['tau_low']:.2g}, {100 * pooled['tau_high']:.2g}], I² = {pooled['i2']:.0%}"
        text += f" (Q = {pooled['q']:.3g}, p = {p_text(pooled['p_heterogeneous'])})"
        if pooled["studies"] > 2:
            ends = percent(pooled["effect"], pooled["predicted_low"], pooled["predicted_high"]).partition("[")[2]
            text += f"; another machine is expected in [{ends}"
    elif len(used):
        one = used.iloc[0]
        text += f"one machine, {one.machine}, so there is nothing to pool; there "
        text += f"{percent(one.effect, one.low, one.high)} over {one.seeds} seeds"
    else:
        text += "nothing to pool"
    if len(exact):
        text += f". Not one bit changed on {', '.join(exact.machine)}"
    if len(few):
        seeds = ", ".join(f"{row.machine} ({row.seeds})" for row in few.itertuples())
        text += f". Fewer than {FEWEST} seeds, not pooled: {seeds}"
    lost = {
        name: int(rows[column].sum()) for name, column in zip(key[4:], ("reference_diverged", "diverged"), strict=True)
    }
    if any(lost.values()):
        text += f". Diverged, and in no effect: {', '.join(f'{n} under {name}' for name, n in lost.items())}"
    return f"{text}."
