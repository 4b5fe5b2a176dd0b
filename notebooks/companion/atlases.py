"""The atlas: what settings change on many machines, each by itself and all together.

A machine's effect is the mean over seeds of the difference in the logarithm of the final loss, of pairs that differ in
nothing but the setting: 0.01 is one per cent more. It has that unit on every machine and for every network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

import gpulab.stats.tests as inference
from companion.meta import ALPHA, MetaAnalysis, meta_analysis
from gpulab.errors import UsageError
from gpulab.plots.names import setting_words
from gpulab.plots.style import BESIDE, FAINT, INK, Look, canvas, colour, finished, key, themed
from gpulab.report import Picture, Report
from gpulab.report import table as html_table
from gpulab.stats.pairs import pair
from gpulab.stats.sentences import p_text
from gpulab.store.factors import FACTORS
from gpulab.store.recorded import recorded_folder
from gpulab.store.runs import recorded_runs, runs

PLAIN = ("cpu", "cpu:threads=1", "cuda:tf32=off", "cuda:tf32=off,deterministic=on", "cuda")  # references, in order
FEWEST = 5  # seeds, below which a standard error is too uncertain to weigh a machine with
EFFECT = ["experiment", "profile", "protocol", "variant", "reference", "setting"]


def atlas() -> pd.DataFrame:
    """The runs that are shipped with gpulab and those that others contributed to `data/atlas`, as `gpulab.runs`."""
    contributed = runs(recorded_folder("atlas")).assign(recorded=True)
    return pd.concat([recorded_runs(), contributed], ignore_index=True).drop_duplicates("id")


def atlas_table(frame: pd.DataFrame, reference: str | None = None) -> pd.DataFrame:
    """Machines × settings: how far each setting moves the final loss there, from the same seeds.

    `reference` is a setting; by default, for each kind of device, a plain one that the machine ran. A row for each
    machine (its chips and version of torch) and setting: `experiment`, `profile`, `protocol`, `variant` (other factors
    that were not as usual), `reference`, `setting`, `machine`, `seeds`, `effect` with `low`, `high` (95 %, Student's)
    and standard `error`, `same_bits` (seeds with identical weights), `diverged` and `reference_diverged` (of the seeds
    of both), and `pooled`: whether it counts in `atlas_verdict`.
    """
    frame = frame[(frame.rerun == 0) & ~(frame.final_loss <= 0)]
    factor_values = frame[[*FACTORS]].astype(object).where(frame[[*FACTORS]].notna(), None)
    changed = [
        ", ".join(f"{name}={value}" for name, value in row.items() if not FACTORS[name].says_nothing(value))
        for row in factor_values.to_dict("records")
    ]
    frame = frame.assign(variant=changed, machine=[*map(_machine, frame.cpu, frame.gpu, frame.torch)])
    group_columns = ["experiment", "profile", "protocol", "variant", "machine"]
    rows = []
    for values, group in frame.groupby(group_columns if reference else [*group_columns, "device"], sort=False):
        settings = set(group.setting)
        plain = reference or next((setting for setting in PLAIN if setting in settings), None)
        if plain and plain in settings and len(settings) > 1:
            common = dict(zip(group_columns, values, strict=False)) | {"reference": plain}
            rows += [common | effect for effect in _effects(group, plain)]
    columns = [*EFFECT, "machine", "seeds", "effect", "low", "high", "error", "same_bits", "diverged"]
    table = pd.DataFrame(rows, columns=[*columns, "reference_diverged", "pooled"])
    return table.astype({"pooled": bool}).sort_values([*EFFECT, "machine"], ignore_index=True)


def _machine(cpu: str, gpu: str | float | None, torch: str) -> str:
    """What makes a machine: its chips, each kind once, and its version of torch."""
    short = cpu.replace("(R)", "").replace("(TM)", "").replace(" CPU", "").removesuffix(" Processor")
    gpus = dict.fromkeys(gpu.split(", ")) if isinstance(gpu, str) else []
    return f"{' + '.join([short, *gpus])}, torch {torch.partition('+')[0]}"


def _source(path: str | Path) -> str:
    """What one machine has made: a file of packed runs; of runs in folders of their own the folder around them."""
    return str(path) if Path(path).suffix == ".parquet" else str(Path(path).parent)


def _effects(frame: pd.DataFrame, reference: str) -> Iterator[dict[str, Any]]:
    """What each other setting changes in runs that came together and differ in setting and seed only."""
    frame = frame.assign(log_loss=np.log(frame.final_loss))
    source_pairs = []
    sources = frame.path.map(_source) if "path" in frame else pd.Series("", frame.index)
    for _, source_runs in frame.groupby(sources, sort=False):  # chips of one name may be two machines
        if reference in set(source_runs.setting):
            first_runs = source_runs.drop_duplicates(["setting", "seed"])
            source_pairs.append(pair(first_runs, "log_loss", "setting", "seed", reference).pairs)
    pairs = pd.concat(source_pairs).drop_duplicates(["setting", "seed"])
    for setting, setting_pairs in pairs.groupby("setting"):
        differences = setting_pairs.difference.dropna().to_numpy(float)
        low, high = inference.skewed_t_interval(differences, ALPHA, corrected=False)
        error = inference.sample_sd(differences) / math.sqrt(max(1, len(differences)))
        yield {
            "setting": setting,
            "seeds": len(differences),
            "effect": differences.mean() if len(differences) else math.nan,
            "low": low,
            "high": high,
            "error": error,
            "same_bits": int(setting_pairs.same_bits.sum()),
            "diverged": int(setting_pairs.other_diverged.sum()),
            "reference_diverged": int(setting_pairs.reference_diverged.sum()),
            "pooled": bool(len(differences) >= FEWEST and error > 0),
        }


@dataclass(frozen=True, eq=False)
class AtlasVerdict(Report):
    """What a setting changes over machines. `print` says it, `plot()` draws it, a notebook shows both.

    `machines` is from `atlas_table`. `pooled` has a row for each comparison with two machines or more: what
    `companion.meta.MetaAnalysis` says, and `p_holm`, its p corrected for the number of rows (Holm).
    """

    machines: pd.DataFrame
    pooled: pd.DataFrame

    def __str__(self) -> str:
        if self.machines.empty:
            return "No machine has the same seeds under two settings: there is nothing to compare."
        pooled = {tuple(row[name] for name in EFFECT): row for row in self.pooled.to_dict("records")}
        return "\n".join(_sentence(key, rows, pooled.get(key)) for key, rows in self.machines.groupby(EFFECT))

    def plot(self) -> Picture:
        """A forest plot: each machine and setting with its effect and interval, and below them the pooled diamond.

        Hollow: not pooled. The scale is that of what is pooled; a longer interval leaves the figure.
        """
        if self.machines.empty:
            raise UsageError("no machine has the same seeds under two settings: there is nothing to draw")
        return _forest(self)

    def words(self) -> Markup:
        """Sentences and table."""
        return super().words() + html_table(self.machines.drop(columns=["protocol"]))

    def picture(self) -> Picture | None:
        """The forest plot, where there is something to compare."""
        return self.plot() if len(self.machines) else None


def atlas_verdict(frame: pd.DataFrame, reference: str | None = None) -> AtlasVerdict:
    """Say over machines what each setting changes: a random-effects meta-analysis, not a vote.

    The machines' effects are weighed by their standard errors and by tau, how far apart the machines are. Machines with
    fewer than five seeds are shown and not pooled; neither are those where a setting changed not one bit of any run:
    there is no error to weigh them by, and the question is what it changes where it changes something. Versions of
    torch count as machines of their own. `reference` is as in `atlas_table`.
    """
    table = atlas_table(frame, reference)
    rows = []
    for values, machines in table[table.pooled].groupby(EFFECT):
        if len(machines) > 1:
            rows.append(dict(zip(EFFECT, values, strict=True)) | asdict(meta_analysis(machines.effect, machines.error)))
    pooled = pd.DataFrame(rows, columns=[*EFFECT, *MetaAnalysis.__dataclass_fields__])
    return AtlasVerdict(table, pooled.assign(p_holm=inference.holm(list(pooled.p))))


def comparison(key: Any) -> str:
    """What is compared, in words, from the values of `EFFECT`."""
    experiment, profile, _, variant, reference, setting = key
    return f"{experiment}, {profile} size{', ' + variant if variant else ''}: {setting} against {reference}"


def percent(*effects: float) -> str:
    """Differences of logarithms as changes in per cent, the ends of an interval in brackets."""
    texts = [f"{100 * math.expm1(effect):+.2g}" for effect in effects]
    return f"{texts[0]} %" + (f" [{', '.join(texts[1:])}]" if len(texts) > 1 else "")


def _sentence(key: Any, rows: pd.DataFrame, pooled: dict[str, Any] | None) -> str:
    text, pooled_rows = f"{comparison(key)}: ", rows[rows.pooled]
    unchanged = rows[(rows.error == 0) & (rows.effect == 0) & (rows.seeds > 1)]
    too_few_seeds = rows[~rows.pooled & ~rows.index.isin(unchanged.index)]
    if pooled:
        outcome = "changes the final loss" if pooled["p_holm"] <= ALPHA else "no change of the final loss is shown"
        text += (
            f"over {len(pooled_rows)} machines {outcome}, {percent(pooled['effect'], pooled['low'], pooled['high'])}"
        )
        text += f", corrected p = {p_text(pooled['p_holm'])}; between machines tau = {100 * pooled['tau']:.2g} %"
        text += f" [{100 * pooled['tau_low']:.2g}, {100 * pooled['tau_high']:.2g}], I² = {pooled['i2']:.0%}"
        text += f" (Q = {pooled['q']:.3g}, p = {p_text(pooled['p_heterogeneous'])})"
        if pooled["studies"] > 2:
            ends = percent(pooled["effect"], pooled["predicted_low"], pooled["predicted_high"]).partition("[")[2]
            text += f"; another machine is expected in [{ends}"
    elif len(pooled_rows):
        only_row = pooled_rows.iloc[0]
        text += f"one machine, {only_row.machine}, so there is nothing to pool; there "
        text += f"{percent(only_row.effect, only_row.low, only_row.high)} over {only_row.seeds} seeds"
    else:
        text += "nothing to pool"
    if len(unchanged):
        text += f". Not one bit changed on {', '.join(unchanged.machine)}"
    if len(too_few_seeds):
        seeds = ", ".join(f"{row.machine} ({row.seeds})" for row in too_few_seeds.itertuples())
        text += f". Fewer than {FEWEST} seeds, not pooled: {seeds}"
    reference_diverged, setting_diverged = rows[["reference_diverged", "diverged"]].sum()
    reference, setting = key[4:]
    if reference_diverged or setting_diverged:
        text += (
            f". Diverged, and in no effect: {reference_diverged} under {reference}, {setting_diverged} under {setting}"
        )
    return f"{text}."


@themed
def _forest(verdict: AtlasVerdict) -> Picture:
    pooled = {tuple(row[name] for name in EFFECT): row for row in verdict.pooled.to_dict("records")}
    groups = [*verdict.machines.groupby(EFFECT)]
    lines = sum(len(rows) + 1.4 + (group in pooled) for group, rows in groups)
    figure, (axes,) = canvas(height=1.4 + 0.21 * lines)
    axes.axvline(0, color=INK, lw=0.8, zorder=1)
    y, ticks, names = 0.0, [], []
    for group, rows in groups:
        heading = comparison((*group[:4], *map(setting_words, group[4:])))
        look: Look = {"va": "center", "weight": "bold", "bbox": {"fc": "white", "ec": "none", "pad": 0.5}, "zorder": 6}
        axes.text(0, y, heading, transform=axes.get_yaxis_transform(), **look)
        tint = colour(group[-1])
        for row in rows.itertuples():
            y += 1
            axes.plot(in_percent([row.low, row.high]), [y, y], color=tint, lw=1.4, zorder=2)
            face = tint if row.pooled else "white"
            axes.plot(in_percent([row.effect]), [y], marker="o", ms=4.5, mfc=face, mec=tint, color=tint, zorder=3)
            effect_words = "same bits" if row.error == 0 and row.effect == 0 else percent(row.effect, row.low, row.high)
            axes.annotate(f"  {row.seeds} seeds, {effect_words}", (1, y), fontsize=7, **BESIDE)
            ticks.append(y)
            names.append(row.machine)
        if group in pooled:
            y += 1
            mean = pooled[group]
            low, middle, high = in_percent([mean["low"], mean["effect"], mean["high"]])
            expected = in_percent([mean["predicted_low"], mean["predicted_high"]])
            axes.plot(expected, [y, y], color=INK, lw=0.9, zorder=2)
            axes.fill([low, middle, high, middle], [y, y - 0.32, y, y + 0.32], color=INK, lw=0.5, zorder=3)
            label = f"  {percent(mean['effect'], mean['low'], mean['high'])}, I² {mean['i2']:.0%}"
            axes.annotate(label, (1, y), fontsize=7, fontweight="bold", **BESIDE)
            ticks.append(y)
            names.append(f"{mean['studies']} machines")
        y += 1.4
    axes.set_ylim(y - 0.7, -0.7)
    axes.set_yticks(ticks, names, fontsize=7)
    axes.tick_params(axis="y", left=False)
    axes.spines["left"].set_visible(False)
    pooled_ends = verdict.machines[["low", "high"]][verdict.machines.pooled].to_numpy(float)
    ends = [*pooled_ends.flat, *verdict.machines.effect, *verdict.pooled[["low", "high"]].to_numpy(float).flat]
    reach = 1.08 * max(1e-4, np.nanmax(np.abs(in_percent(ends))))  # of few seeds an interval may be any length
    axes.set_xlim(-reach, reach)
    axes.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.3g} %" if value else "0")
    axes.set_xlabel("change of the final loss against the reference, same seeds")
    count = verdict.machines.machine.nunique()
    shown = int((verdict.pooled.p_holm <= ALPHA).sum())
    headline = f"{len(groups)} comparisons on {count} machine{'s' * (count > 1)}: "
    look = {"marker": "o", "ms": 4.5}
    keys = [key("a machine, 95 % interval", color=FAINT, lw=1.4, **look)]
    if not verdict.machines.pooled.all():
        keys.append(key("not pooled: too few seeds, or the same bits", ls="", mfc="white", mec=FAINT, **look))
    if pooled:
        headline += f"{len(pooled)} pooled, {shown or 'none'} shown to change the loss"
        keys.append(key("over machines, interval of the mean", ls="", marker="D", color=INK, ms=6))
        keys.append(key("where another machine is expected", color=INK, lw=0.9))
    else:
        headline += "each on one only, nothing to pool"
    alt = "A forest plot: how far each setting moves the final loss on each machine, and over machines. "
    return finished(figure, headline, alt + headline + ".", keys)


def in_percent(effects: Any) -> np.ndarray:
    """Differences of logarithms as changes in per cent."""
    return 100 * np.expm1(np.asarray(effects, float))
