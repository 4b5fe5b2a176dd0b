"""Figures of the explorers alone: two trainings side by side, seeds that come in, a ball that leaves a saddle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpulab.plots.decisions import GREEN, RED, decided
from gpulab.plots.style import (
    FAINT,
    INK,
    ON_GPU,
    Look,
    canvas,
    colour,
    finished,
    key,
    loss_scale,
    margin_key,
    metric_label,
    power_of_ten,
)
from gpulab.report import Picture
from gpulab.saddles.landscapes import Surface
from gpulab.stats.decisions import DECISIONS
from gpulab.stats.verdicts import Verdict

DECIDED = dict(zip(DECISIONS, (RED, "#CC7711", FAINT, GREEN), strict=True))


def side_by_side(settings: Sequence[str], losses: Sequence[Sequence[tuple[int, float]]], total: int) -> Picture:
    """Two trainings that go on at the same time: their (frames seen, loss) so far of `total`, and how far apart."""
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


def seed_by_seed(verdicts: Mapping[int, Verdict]) -> Picture:
    """The difference and its interval as seeds come in, by how many are in, coloured by what was decided."""
    counts = sorted(verdicts)
    rows = pd.concat([verdicts[count].table for count in counts]).assign(count=counts)
    figure, (axes,) = canvas(1, height=3.6)
    axes.fill_between(counts, -rows.margin, rows.margin, color=FAINT, alpha=0.18, lw=0, step="mid", zorder=0)
    axes.axhline(0, color=INK, lw=0.8, zorder=1)
    for decision, some in rows.groupby("decision"):
        axes.vlines(some["count"], some.low, some.high, color=DECIDED[decision], lw=2.2, zorder=2)
        axes.plot(some["count"], some.difference, ls="", marker="o", ms=5, color=DECIDED[decision], zorder=3)
    reach = 1.2 * np.nanmax(rows[["low", "high", "difference"]].abs())  # of the margin what there is room for
    axes.set(xlim=(0.5, max(counts[-1], 10) + 0.5), ylim=(-reach, reach) if reach > 0 else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    latest = verdicts[counts[-1]]
    metric = metric_label(latest.metric, latest.runs.get("experiment", ())).replace(" (", "\n(")
    axes.set_xlabel(f"{latest.block}s that are in")
    axes.set_ylabel(f"difference in {metric}", fontsize=8)
    headline = f"After {len(latest.pairs)} {latest.block}s: {decided(latest)}"
    alt = f"The mean difference and its interval against the number of {latest.block}s. {headline}."
    keys = [key(each, color=DECIDED[each], marker="o", lw=2.2) for each in DECIDED if each in set(rows.decision)]
    return finished(figure, headline, alt, [*keys, margin_key(float(rows.margin.iloc[-1]))], columns=3)


def saddle_path(surface: Surface, path: pd.DataFrame, step: int, turn: float, tilt: float, how: str) -> Picture:
    """The way of a ball up to a step on the loss around a saddle, seen from `turn` and `tilt` degrees."""
    gone = path[: step + 1]
    ball, top = gone.iloc[-1], 1.8 * surface.loss
    low = surface.losses[:, len(surface.along) // 2] <= 1.3 * surface.loss  # what rises further would hide the rest
    figure = Figure(figsize=(7.2, 4.8))
    axes: Any = figure.add_axes((0.02, 0.02, 0.94, 0.9), projection="3d", computed_zorder=False)
    height = np.minimum(surface.losses[low], top)
    x, y = np.meshgrid(surface.along, surface.across[low])
    axes.plot_surface(x, y, height, cmap="cividis", rcount=40, ccount=40, lw=0, alpha=0.9, zorder=1)
    axes.plot(gone.along, gone.across, gone.loss, color="white", lw=3, zorder=2)
    axes.plot(gone.along, gone.across, gone.loss, color=ON_GPU, lw=1.6, zorder=3)
    axes.plot([0], [0], [surface.loss], marker="+", ms=9, color=INK, zorder=4)
    axes.plot([ball.along], [ball.across], [ball.loss], marker="o", ms=10, color=ON_GPU, markeredgecolor=INK, zorder=5)
    axes.view_init(elev=tilt, azim=turn)
    axes.set_box_aspect((2.2, 1.4, 1.0), zoom=0.95)
    axes.set(zlim=(0, top), xlim=surface.along[[0, -1]], ylim=(y.min(), y.max()))
    axes.set_xlabel("along the least curvature", fontsize=8)
    axes.set_ylabel("along the greatest", fontsize=8)
    axes.set_zlabel("loss", fontsize=8)
    axes.tick_params(labelsize=7)
    away = f"{math.hypot(ball.along, ball.across):.2g} from the saddle, at a loss of {ball.loss:.2g}"
    headline = f"{how}: after {len(gone) - 1} steps the ball is {away}"
    return finished(figure, headline, f"The loss around a saddle, and the way of a ball on it. {headline}.")
