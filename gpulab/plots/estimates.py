"""An estimation plot of a verdict: every seed, and beside it the paired differences."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from gpulab.plots.style import (
    CPU_COLOURS,
    FAINT,
    GPU_COLOURS,
    INK,
    OTHER_CPU,
    OTHER_GPU,
    Picture,
    canvas,
    colour,
    metric_label,
)
from gpulab.report import draw
from gpulab.stats.verdicts import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@draw.register
def estimation(seen: Verdict) -> Picture:
    """An estimation plot (Gardner and Altman 1986): every seed, and beside it the paired differences.

    Left, the metric of each seed under each level, the same seed joined by a thin line; diverged runs
    are crosses at the right edge. Right, the differences from the reference in standard deviations
    between seeds (in the metric's units where there is no such spread), their mean with its BCa
    interval, and the margin as a band; the axis is linear around zero and logarithmic outside where
    the differences are much smaller than the margin.
    """
    levels = [seen.reference, *seen.table[seen.factor]]
    figure, (left, right) = canvas(2, height=1.9 + 0.4 * len(levels), share_rows=True)
    tints = _level_colours(seen.factor, levels)
    _draw_seeds(left, seen, levels, tints)
    _draw_differences(right, seen, levels, tints)
    left.set_yticks(range(len(levels)), [_broken(str(level)) for level in levels], fontsize=8)
    left.set_ylim(len(levels) - 0.5, -0.5)
    right.tick_params(axis="y", left=False)
    right.spines["left"].set_visible(False)
    headline = _decided(seen)
    figure.suptitle(headline, fontsize=10)
    _estimation_key(figure, seen)
    return Picture(
        figure,
        f"{seen.metric} of each {seen.block} under {', '.join(map(str, levels))}, and the differences from "
        f"{seen.reference} with intervals and the margin. {headline}.",
    )


def _draw_seeds(axes: Axes, seen: Verdict, levels: list[Any], tints: dict[Any, str]) -> None:
    runs = seen.runs.assign(place=seen.runs[seen.factor].map({level: row for row, level in enumerate(levels)}))
    aside = _aside(seen)
    finished = runs[runs.status != "diverged"]
    if len(finished):
        low, high = finished[seen.metric].min(), finished[seen.metric].max()
        _plain_scale(axes, low, high)
    for block, some in finished.sort_values("place").groupby(seen.block):
        axes.plot(some[seen.metric], some.place + aside[block], color=FAINT, lw=0.5, alpha=0.7, zorder=1)
    for row in runs.to_dict("records"):
        level, height = row[seen.factor], row["place"] + aside[row[seen.block]]
        if row["status"] == "diverged":
            axes.scatter(
                0.97, height, marker="x", s=24, color=tints[level], transform=axes.get_yaxis_transform(), zorder=4
            )
    for (level, recorded), some in finished.assign(recorded=_recorded(finished)).groupby([seen.factor, "recorded"]):
        _marks(axes, some[seen.metric], some.place + some[seen.block].map(aside), tints[level], recorded, len(aside))
    if len(finished) < len(runs):
        axes.margins(x=0.12)  # room for the crosses
    axes.set_xlabel(metric_label(seen.metric), fontsize=8)
    axes.tick_params(axis="x", labelsize=8)


def _draw_differences(axes: Axes, seen: Verdict, levels: list[Any], tints: dict[Any, str]) -> None:
    in_sd = seen.between_seeds > 0
    unit = seen.between_seeds if in_sd else 1.0
    aside = _aside(seen)
    recorded = dict(zip(seen.runs[seen.factor], _recorded(seen.runs), strict=True))
    margin = float(seen.table.margin.iloc[0]) / unit if len(seen.table) else np.nan
    if margin == margin:
        axes.axvspan(-margin, margin, color=FAINT, alpha=0.18, lw=0, zorder=0)
    axes.axvline(0, color=INK, lw=0.8, zorder=1)
    for row in seen.table.to_dict("records"):
        level = row[seen.factor]
        some = seen.pairs[(seen.pairs[seen.factor] == level) & seen.pairs.difference.notna()]
        place = levels.index(level)
        heights = place - 0.08 + 0.8 * some[seen.block].map(aside)
        _marks(axes, some.difference / unit, heights, tints[level], recorded[level], len(aside))
        below = place + 0.33
        axes.plot([row["low"] / unit, row["high"] / unit], [below, below], color=INK, lw=1.8, zorder=4)
        axes.plot([row["difference"] / unit], [below], marker="D", ms=4, color=INK, zorder=5)
    _difference_scale(axes, np.abs(seen.pairs.difference.dropna().to_numpy(float)) / unit, margin)
    name = f"sd between {seen.block}s" if in_sd else metric_label(seen.metric)
    axes.set_xlabel(f"difference from {seen.reference} ({name})", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)


def _difference_scale(axes: Axes, sizes: np.ndarray, margin: float) -> None:
    """Linear; where the typical difference is under a hundredth of the widest thing shown, symlog."""
    widest = np.nanmax([*sizes, margin, 0.0])
    moved = sizes[sizes > 0]
    if not widest > 0:
        return
    axes.set_xlim(-1.15 * widest, 1.15 * widest)
    if not len(moved) or np.median(moved) > 0.01 * widest:
        axes.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
        return
    first = int(np.floor(np.log10(np.quantile(moved, 0.25))))
    last = int(np.floor(np.log10(widest)))
    axes.set_xscale("symlog", linthresh=10.0**first, linscale=0.5 + 0.3 * (last - first))
    axes.set_xlim(-2 * widest, 2 * widest)
    decades = np.unique([last, first])
    labels = [f"$10^{{{decade}}}$" for decade in decades]
    axes.set_xticks([*-(10.0**decades), 0, *10.0**decades], [*(f"−{label}" for label in labels), "0", *labels])
    axes.minorticks_off()


def _plain_scale(axes: Axes, low: float, high: float) -> None:
    """The horizontal axis logarithmic where it spans a factor of four or more, with plain numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(4))
    if (low, high) == (0, 1):
        axes.set_xticks([0, 1])
    if not low > 0 or high / low < 4:
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0) if high / low < 30 else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def _aside(seen: Verdict) -> dict[Any, float]:
    """How far above or below its row a seed is drawn, the same in every row."""
    blocks = sorted(seen.runs[seen.block].unique())
    return dict(zip(blocks, np.linspace(-0.2, 0.2, len(blocks)) if len(blocks) > 1 else [0.0], strict=True))


def _marks(axes: Axes, x: Any, y: Any, tint: str, recorded: bool, count: int) -> None:
    size = 20 if count <= 40 else 5
    face = "white" if recorded else tint
    axes.scatter(x, y, s=size, color=face, edgecolors=tint, linewidths=1.0, zorder=3, alpha=0.9)


def _recorded(runs: pd.DataFrame) -> np.ndarray:
    return runs.recorded.to_numpy(bool) if "recorded" in runs else np.zeros(len(runs), bool)


def _level_colours(factor: str, levels: list[Any]) -> dict[Any, str]:
    if factor == "setting":
        return {level: colour(str(level)) for level in levels}
    palette = [*CPU_COLOURS.values(), *GPU_COLOURS.values(), *OTHER_CPU, *OTHER_GPU]
    order = [palette[0], palette[4], *palette[1:4], *palette[5:]]
    return {level: order[place % len(order)] for place, level in enumerate(levels)}


def _broken(label: str, width: int = 18) -> str:
    """A long level on two lines, broken after a colon or comma."""
    if len(label) <= width:
        return label
    return re.sub(r"^([^:]*:|.{1,18}[,\s])", r"\1\n", label, count=1)


def _decided(seen: Verdict) -> str:
    """The title: how many levels came to which decision."""
    decisions = seen.decisions
    if not decisions:
        return f"Only {seen.reference}: nothing to compare with"
    if len(decisions) == 1:
        ((level, decision),) = decisions.items()
        return f"{level} against {seen.reference}: {decision}"
    counts = pd.Series(list(decisions.values())).value_counts()
    return f"Against {seen.reference}: " + ", ".join(f"{n} {what}" for what, n in counts.items())


def _estimation_key(figure: Figure, seen: Verdict) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dot: dict[str, Any] = {"ls": "", "marker": "o", "markeredgecolor": INK, "ms": 5}
    recorded = _recorded(seen.runs)
    handles: list[Any] = []
    for flag in sorted(set(recorded)):
        machines = sorted(set(seen.runs.machine[recorded == flag].astype(str))) if "machine" in seen.runs else []
        where = f" on {', '.join(machines)}" if machines else ""
        label = f"a {seen.block}, {'recorded' if flag else 'made here'}{where}"
        handles.append(Line2D([], [], markerfacecolor="white" if flag else FAINT, label=label, **dot))
    if (seen.runs.status == "diverged").any():
        handles.append(Line2D([], [], ls="", marker="x", color=INK, ms=5, label="diverged"))
    handles.append(Line2D([], [], color=INK, marker="D", ms=4, lw=1.8, label=f"mean, {1 - seen.alpha:.0%} interval"))
    if len(seen.table):
        handles.append(Patch(color=FAINT, alpha=0.3, lw=0, label=f"margin, ±{seen.table.margin.iloc[0]:.2g}"))
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=2)
