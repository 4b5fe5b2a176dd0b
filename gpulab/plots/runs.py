"""Runs under several settings: their losses, how they came about, and what a setting changed."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.ticker import MaxNLocator

from gpulab.plots.style import (
    BESIDE,
    FAINT,
    INK,
    Look,
    canvas,
    colour,
    decades,
    end_labels,
    finished,
    is_recorded,
    key,
    level_colours,
    loss_scale,
    margin_key,
    metric_label,
    origin_keys,
    points,
    power_of_ten,
    setting_order,
)
from gpulab.report import Picture
from gpulab.stats.verdicts import Verdict, check_one_protocol

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
    axes.set(xlim=(-0.6, len(order) - 0.4), ylabel=metric_label(metric, frame.experiment))
    by_setting = frame.groupby("setting")[metric]
    headline = f"From seed to seed the loss varies up to {(by_setting.max() / by_setting.min()).max():.1f}-fold"
    wide = frame.pivot_table(index="seed", columns="setting", values=metric)
    along_lines, between_seeds = (wide.max(axis=axis) - wide.min(axis=axis) for axis in (1, 0))
    if len(wide) > 1 and along_lines.max() < 0.1 * between_seeds.max():
        headline += "; along a line it hardly moves"
    alt = f"{metric} of each seed under {', '.join(order)}; the same seeds joined by lines."
    return finished(figure, title or headline, alt, origin_keys(frame), columns=1)


def differences(verdict: Verdict) -> Picture:
    """How far each level of a verdict, such as each setting, moves each seed's loss, beside how far seeds are apart.

    On one linear scale, with the margin as a band. The largest change stands beside its row.

    Args:
        verdict: From `gpulab.verdict`.
    """
    factor, metric, reference = verdict.factor, verdict.metric, verdict.reference
    again = verdict.reruns.assign(**{factor: f"{reference} again"})
    pairs = pd.concat([verdict.pairs, again], ignore_index=True)
    levels = [*verdict.table[factor], *again[factor].unique()]
    tints = level_colours(factor, [reference, *verdict.table[factor]])
    hollow = bool(is_recorded(verdict.runs).all())
    figure, (axes,) = canvas(1, height=1.5 + 0.4 * (len(levels) + 1))
    axes.axvline(0, color=INK, lw=0.8, zorder=1)
    for place, level in enumerate(levels):
        shown = pairs.difference[pairs[factor] == level].dropna().astype(float)
        heights = place + (np.linspace(-0.15, 0.15, len(shown)) if len(shown) > 1 else np.zeros(len(shown)))
        points(axes, shown, heights, tints.get(level, tints[reference]), hollow, s=18, alpha=0.9)
        largest = shown.abs().max()
        said = f"largest {largest:.2g}" if largest > 0 else "exactly the same" if largest == 0 else "no pair"
        axes.annotate(f" {said}", (1, place), fontsize=8, **BESIDE)
    base = verdict.runs[verdict.runs[factor] == reference][metric].to_numpy(float)
    between = (base[:, None] - base)[~np.eye(len(base), dtype=bool)]
    axes.scatter(between, np.full(len(between), len(levels)), color=INK, s=40, alpha=0.5, marker="|", zorder=3)
    axes.annotate(f" standard deviation {verdict.between_seeds:.2g}", (1, len(levels)), fontsize=8, **BESIDE)
    margin = verdict.table.margin.max()
    keys: list[Artist] = [*origin_keys(verdict.runs)]
    if margin > 0:
        axes.axvspan(-margin, margin, color=FAINT, alpha=0.3, lw=0, zorder=0)
        keys.append(margin_key(margin))
    axes.xaxis.set_major_locator(MaxNLocator(6, symmetric=True))
    axes.set_yticks(range(len(levels) + 1), [*levels, "one seed against another"], fontsize=8)
    axes.set(ylim=(len(levels) + 0.6, -0.6))
    unit = metric_label(metric, verdict.runs.get("experiment", ()))
    axes.set_xlabel(f"change of the same seed against {reference}: {unit}", fontsize=8)
    headline = f"The largest change of setting is {verdict.ratio:.2g} of the spread between seeds"
    if np.isnan(verdict.ratio):
        headline = "One seed has no spread to compare with"
    alt = f"Change of {metric} against {reference} for {', '.join(levels)}, and between seeds. {headline}."
    return finished(figure, headline, alt, keys)


def curves(
    histories: pd.DataFrame, baseline: float | None = None, baseline_label: str = "", factor: str = "setting"
) -> Picture:
    """The loss of every run while it learns, a thin line each, and the median over seeds; reruns are left out.

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
        axes.plot(run.frames_seen, smooth, color=colours[run[factor].iloc[0]], lw=0.6, alpha=0.5)
    ends: list[tuple[str, float, Look]] = []
    for level, runs in histories.groupby(factor):
        middle = runs.groupby("frames_seen").loss.median()
        middle = middle.rolling(max(1, len(middle) // 60), min_periods=1).mean()
        axes.plot(middle.index, middle, color=colours[level], lw=2)
        ends.append((str(level), middle.iloc[-1], {"color": colours[level], "lw": 2}))
    if baseline is not None:
        axes.axhline(baseline, color=INK, lw=1, ls=":")
        ends.append((baseline_label, baseline, {"color": INK, "lw": 1, "ls": ":"}))
    loss_scale(axes)
    end_labels(axes, ends)
    seen = "frames seen" if histories.experiment.iloc[0] == "prednet" else "images seen"
    axes.set(xlabel=seen, ylabel=metric_label("loss", histories.experiment))
    last = histories.groupby("id").loss.last()
    counts = f"{len(levels)} {factor}{'s' if len(levels) > 1 else ''} × {histories.seed.nunique()} seeds"
    headline = f"{counts}: the runs end {last.max() / last.min():.1f}-fold apart"
    alt = f"Loss against frames seen, one line for each of {len(last)} runs, coloured by {factor}. {headline}."
    return finished(figure, headline, alt)


def growth(frame: pd.DataFrame) -> Picture:
    """The distance between two trainings as they go on, a line for each seed.

    Args:
        frame: From `gpulab.training.growth`, one network or two below each other.
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


def side_by_side(settings: Sequence[str], losses: Sequence[Sequence[tuple[int, float]]], total: int) -> Picture:
    """Two trainings that go on at the same time: their losses so far, and how far these are apart.

    Args:
        settings: The two.
        losses: Of each, pairs of frames seen and loss, as they came.
        total: How many frames there will be.
    """
    figure, (left, right) = canvas(2, height=3.4)
    tints = colour(settings[0]), colour(settings[1])
    looks: tuple[Look, Look] = {"lw": 3.5}, {"lw": 1.5, "ls": (0, (4, 3))}
    for tint, look, setting, rows in zip(tints, looks, settings, losses, strict=True):
        left.plot(*np.reshape(rows, (-1, 2)).T, color=tint, label=setting, **look)
    both = [(seen, abs(a - b)) for (seen, a), (_, b) in zip(*losses, strict=False)]
    seen, apart = np.reshape(both, (-1, 2)).T
    right.plot(seen, np.where(apart > 0, apart, np.nan), color=INK, lw=1.3, marker=".", ms=4)
    right.set(yscale="log", ylim=(1e-10, 1))
    right.set_yticks([10.0**n for n in range(-10, 1, 2)], map(power_of_ten, range(-10, 1, 2)))
    right.minorticks_off()
    if len(apart):
        loss_scale(left)
    else:
        left.set_yticks([])
    for axes in (left, right):
        axes.set(xlim=(0, total))
        axes.set_xlabel("frames or images seen", fontsize=9)
        axes.tick_params(labelsize=8)
    left.set_ylabel("loss (mean squared error)", fontsize=9)
    right.set_ylabel("difference of the losses", fontsize=9)
    headline = "Nothing is trained yet"
    if len(apart):
        latest = f"{apart[-1]:.1e}" if apart[-1] else "nothing"
        headline = f"After {seen[-1]:,.0f} of {total:,} the losses are {latest} apart"
    alt = f"The losses of two trainings, under {settings[0]} and {settings[1]}, and their difference. {headline}."
    return finished(figure, headline, alt, left.get_legend_handles_labels()[0])
