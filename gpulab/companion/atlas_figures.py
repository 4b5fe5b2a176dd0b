"""The figure of the atlas: a forest plot, machine by machine and pooled."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gpulab.companion.atlases import EFFECT, AtlasVerdict, comparison, percent
from gpulab.errors import UsageError
from gpulab.plots.style import BESIDE, FAINT, INK, canvas, colour, finished, key
from gpulab.report import Picture, draw


@draw.register
def atlas_figure(verdict: AtlasVerdict) -> Picture:
    """A row for each machine and setting with its effect and interval, and below them the pooled diamond.

    A diamond is as wide as the interval of the mean over machines; the line through it is where another machine is
    expected. Hollow: not pooled. The scale is that of what is pooled; a longer interval leaves the figure.

    Args:
        verdict: From `gpulab.companion.atlas_verdict`.

    Raises:
        UsageError: Where there is nothing to draw.
    """
    if verdict.machines.empty:
        raise UsageError("no machine has the same seeds under two settings: there is nothing to draw")
    pooled = {tuple(row[name] for name in EFFECT): row for row in verdict.pooled.to_dict("records")}
    groups = [*verdict.machines.groupby(EFFECT)]
    lines = sum(len(rows) + 1.4 + (group in pooled) for group, rows in groups)
    figure, (axes,) = canvas(1, height=1.4 + 0.21 * lines)
    axes.axvline(0, color=INK, lw=0.8, zorder=1)
    at, places, names = 0.0, [], []
    for group, rows in groups:
        axes.annotate(comparison(group), (0, at), xycoords=("axes fraction", "data"), fontsize=7.5, va="center",
                      fontweight="bold", bbox={"fc": "white", "ec": "none", "pad": 0.5}, zorder=6)  # fmt: skip
        tint = colour(group[-1])
        for row in rows.itertuples():
            at += 1
            axes.plot(in_percent([row.low, row.high]), [at, at], color=tint, lw=1.4, zorder=2)
            face = tint if row.pooled else "white"
            axes.plot(in_percent([row.effect]), [at], marker="o", ms=4.5, mfc=face, mec=tint, color=tint, zorder=3)
            same = "same bits" if row.error == 0 and row.effect == 0 else percent(row.effect, row.low, row.high)
            axes.annotate(f"  {row.seeds} seeds, {same}", (1, at), fontsize=7, **BESIDE)
            places.append(at)
            names.append(row.machine)
        if group in pooled:
            at += 1
            _diamond(axes, at, pooled[group])
            places.append(at)
            names.append(f"{pooled[group]['studies']} machines")
        at += 1.4
    axes.set_ylim(at - 0.7, -0.7)
    axes.set_yticks(places, names, fontsize=7)
    axes.tick_params(axis="y", left=False)
    axes.spines["left"].set_visible(False)
    sure = verdict.machines[["low", "high"]][verdict.machines.pooled].to_numpy(float)
    ends = [*sure.flat, *verdict.machines.effect, *verdict.pooled[["low", "high"]].to_numpy(float).flat]
    reach = 1.08 * max(1e-4, np.nanmax(np.abs(in_percent(ends))))  # of few seeds an interval may be any length
    axes.set_xlim(-reach, reach)
    axes.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+.3g} %" if value else "0")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("change of the final loss against the reference, same seeds", fontsize=8)
    count = verdict.machines.machine.nunique()
    shown = int((verdict.pooled.p_holm <= verdict.alpha).sum())
    headline = f"{len(groups)} comparisons on {count} machine{'s' * (count > 1)}: "
    headline += (
        f"{len(pooled)} pooled, {shown or 'none'} shown to change the loss"
        if pooled
        else "each on one only, nothing to pool"
    )
    keys = [key(f"a machine, {100 * (1 - verdict.alpha):.3g} % interval", color=FAINT, marker="o", ms=4.5, lw=1.4)]
    if not verdict.machines.pooled.all():
        keys.append(
            key("not pooled: too few seeds, or the same bits", ls="", marker="o", mfc="white", mec=FAINT, ms=4.5)
        )
    if pooled:
        keys.append(key("over machines, interval of the mean", ls="", marker="D", color=INK, ms=6))
        keys.append(key("where another machine is expected", color=INK, lw=0.9))
    alt = "A forest plot: how far each setting moves the final loss on each machine, and over machines. "
    return finished(figure, headline, alt + headline + ".", keys)


def in_percent(effects: Any) -> np.ndarray:
    """Differences of logarithms as changes in per cent."""
    return 100 * np.expm1(np.asarray(effects, float))


def _diamond(axes: Axes, at: float, row: dict[str, float]) -> None:
    low, middle, high = in_percent([row["low"], row["effect"], row["high"]])
    axes.plot(in_percent([row["predicted_low"], row["predicted_high"]]), [at, at], color=INK, lw=0.9, zorder=2)
    axes.fill([low, middle, high, middle], [at, at - 0.32, at, at + 0.32], color=INK, lw=0.5, zorder=3)
    said = f"  {percent(row['effect'], row['low'], row['high'])}, I² {row['i2']:.0%}"
    axes.annotate(said, (1, at), fontsize=7, fontweight="bold", **BESIDE)
