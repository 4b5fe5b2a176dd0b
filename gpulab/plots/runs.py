"""Runs under several settings: their losses, how they came about, and what a setting changed."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from gpulab.plots.style import (
    BESIDE,
    FAINT,
    INK,
    Look,
    canvas,
    colour,
    decades,
    finished,
    is_recorded,
    key,
    level_colours,
    loss_scale,
    metric_label,
    origin_keys,
    points,
    setting_order,
)
from gpulab.report import Picture
from gpulab.stats.verdicts import Verdict, check_one_protocol

NO_DIFFERENCE = 1e-12  # where a difference of exactly nothing is drawn on a logarithmic axis, if nothing else is
CHANGE_COLOURS = ("#0072B2", "#E69F00", "#222222", "#CC79A7", "#009E73")


def losses(frame: pd.DataFrame, metric: str = "final_loss", title: str | None = None) -> Picture:
    """Each seed's loss under each setting, the same seeds joined by thin lines.

    Args:
        frame: Runs of one experiment and profile, from `gpulab.runs` or `gpulab.recorded_runs`.
        metric: The column to draw.
        title: Instead of the one that says how far the seeds are apart.

    Raises:
        UsageError: Where the frame mixes experiments, profiles or protocols.
    """
    check_one_protocol(frame)
    frame = frame[frame.rerun == 0].astype({metric: float})
    order = setting_order(frame)
    frame["place"] = frame.setting.map(order.index)
    figure, (axes,) = canvas(1, height=3.6)
    for _, seed in frame.drop_duplicates(["setting", "seed"]).sort_values("place").groupby("seed"):
        axes.plot(seed.place, seed[metric], color=FAINT, lw=0.7, zorder=1)
    for (setting, recorded), runs in frame.groupby(["setting", "recorded"]):
        place = runs.place.iloc[0] + (0.15 if recorded and not frame.recorded.all() else 0.0)
        points(axes, np.full(len(runs), place), runs[metric], colour(setting), recorded, alpha=0.9)
        if diverged := int((runs.status == "diverged").sum()):
            top = (place, 0.98)
            axes.annotate(f"{diverged} diverged", top, xycoords=("data", "axes fraction"), ha="center", va="top")
    loss_scale(axes)
    axes.set_xticks(range(len(order)), [re.sub("[:=,]", "\n", setting) for setting in order], fontsize=8)
    axes.set(xlim=(-0.6, len(order) - 0.4), ylabel=metric_label(metric))
    by_setting = frame.groupby("setting")[metric]
    headline = f"From seed to seed the loss varies up to {(by_setting.max() / by_setting.min()).max():.1f}-fold"
    wide = frame.pivot_table(index="seed", columns="setting", values=metric)
    along_lines, between_seeds = (wide.max(axis=axis) - wide.min(axis=axis) for axis in (1, 0))
    if len(wide) > 1 and along_lines.max() < 0.1 * between_seeds.max():
        headline += "; along a line it hardly moves"
    alt = f"{metric} of each seed under {', '.join(order)}; the same seeds joined by lines."
    return finished(figure, title or headline, alt, origin_keys(frame), columns=1)


def differences(verdict: Verdict) -> Picture:
    """How far each level of a verdict, such as each setting, moves each seed's loss, and how far seeds are apart.

    The axis is logarithmic; a difference of exactly nothing is drawn at the left edge.

    Args:
        verdict: From `gpulab.verdict`.
    """
    factor, metric, reference = verdict.factor, verdict.metric, verdict.reference
    again = verdict.reruns.assign(**{factor: f"{reference} again"})
    pairs = pd.concat([verdict.pairs, again], ignore_index=True)
    levels = [*verdict.table[factor], *again[factor].unique()]
    tints = level_colours(factor, [reference, *verdict.table[factor]])
    sizes = pairs.difference.abs()
    smallest = sizes[sizes > 0].min()
    edge = smallest / 10 if smallest == smallest else NO_DIFFERENCE
    hollow = bool(is_recorded(verdict.runs).all())
    figure, (axes,) = canvas(1, height=1.3 + 0.42 * (len(levels) + 1))
    for place, level in enumerate(levels):
        shown = sizes[pairs[factor] == level].astype(float)
        tint = tints.get(level, tints[reference])
        points(axes, shown.where(shown > 0, edge), np.full(len(shown), place), tint, hollow, alpha=0.9)
    base = verdict.runs[verdict.runs[factor] == reference][metric].to_numpy()
    between = np.abs(base[:, None] - base)[np.triu_indices(len(base), 1)]
    axes.scatter(between, np.full(len(between), len(levels)), color=INK, s=14, alpha=0.5, marker="|", zorder=3)
    axes.axvline(verdict.between_seeds, color=INK, lw=1, ls="--", zorder=1)
    above: Look = {"va": "center", "fontsize": 8, "annotation_clip": False}
    axes.annotate("standard deviation\nbetween seeds ", (verdict.between_seeds, -0.55), ha="right", **above)
    if (sizes == 0).any():
        axes.axvline(edge, color=FAINT, lw=0.8)
        axes.annotate(" exactly the same", (edge, -0.55), color=INK, **above)
    axes.set_yticks(range(len(levels) + 1), [*levels, "one seed against another"])
    axes.set(xscale="log", ylim=(len(levels) + 0.6, -0.9))
    axes.set(xlabel=f"change of {metric.replace('_', ' ')} against {reference}, same seed (mean squared error)")
    headline = f"The largest change of setting is {verdict.ratio:.2g} of the spread between seeds"
    if np.isnan(verdict.ratio):
        headline = "One seed has no spread to compare with"
    alt = f"Change of {metric} against {reference} for {', '.join(levels)}, and between seeds, on a logarithmic axis."
    return finished(figure, headline, alt, origin_keys(verdict.runs), columns=1)


def curves(
    histories: pd.DataFrame, baseline: float | None = None, baseline_label: str = "", factor: str = "setting"
) -> Picture:
    """The loss of every run while it learns, a thin line each; reruns are left out.

    Args:
        histories: From `gpulab.training.history`, of one experiment.
        baseline: A loss to draw as a reference line.
        baseline_label: What it is.
        factor: What colours stand for: `setting` or `loader`.
    """
    histories = histories[histories.rerun == 0]
    figure, (axes,) = canvas(1, height=3.6)
    levels = setting_order(histories) if factor == "setting" else list(histories[factor].unique())
    colours = level_colours(factor, levels)
    for _, run in histories.groupby("id"):
        smooth = run.loss.rolling(max(1, len(run) // 60), min_periods=1).mean()
        axes.plot(run.frames_seen, smooth, color=colours[run[factor].iloc[0]], lw=0.9, alpha=0.7)
    if baseline is not None:
        axes.axhline(baseline, color=INK, lw=1, ls=":")
        axes.annotate(baseline_label, (0.01, baseline), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    loss_scale(axes)
    seen = "frames seen" if histories.experiment.iloc[0] == "prednet" else "images seen"
    axes.set(xlabel=seen, ylabel=metric_label("loss"))
    ends = histories.groupby("id").loss.last()
    counts = f"{len(levels)} {factor}s × {histories.seed.nunique()} seeds"
    headline = f"{counts}: the runs end {ends.max() / ends.min():.1f}-fold apart"
    alt = f"Loss against frames seen, one line for each of {len(ends)} runs, coloured by {factor}."
    return finished(figure, headline, alt, [key(level, color=tint) for level, tint in colours.items()], columns=4)


def growth(frame: pd.DataFrame) -> Picture:
    """The distance between two trainings as they go on, a line for each seed.

    Args:
        frame: From `gpulab.growth`, one network or two below each other.
    """
    networks = list(frame.network.unique())[:2]
    tints = dict(zip(frame.change.unique(), CHANGE_COLOURS, strict=False))
    figure, panels = canvas(len(networks), height=3.6, share_rows=True)
    for axes, network in zip(panels, networks, strict=True):
        for (change, _), line in frame[frame.network == network].groupby(["change", "seed"], sort=False):
            shown = line[line.distance > 0]
            axes.plot(shown.step, shown.distance, color=tints[change], lw=1.1, alpha=0.85)
        axes.axhline(2.0**-24, color=FAINT, lw=0.8, ls=":")
        decades(axes.yaxis, 8)
        axes.set_title(network, fontsize=9)
        axes.set_xlabel("updates of the weights")
    panels[0].set_ylabel("distance of the weights, relative")
    panels[-1].annotate(" one\n rounding", (1, 2.0**-24), fontsize=7, **BESIDE)
    first = frame.change.iloc[0]
    grown = []
    for network, some in frame[frame.change == first].sort_values("step").groupby("network", sort=False):
        ends = some.groupby("seed").distance.agg(["first", "last"])
        times = (ends["last"] / ends["first"]).median()
        grown.append(f"{network} {times:,.0f}-fold" if times >= 2 else f"{network} not")
    keys = [key(change, color=tint) for change, tint in tints.items()]
    keys[0].set_label(f"{first} (a line for each of {frame.seed.nunique()} seeds)")
    alt = f"Relative distance of the weights of two trainings against updates, for {', '.join(tints)}."
    headline = f"{first[0].upper()}{first[1:]}: the difference grew in {', in '.join(grown)}"
    return finished(figure, headline, alt, keys, columns=3)
