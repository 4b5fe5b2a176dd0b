"""Saddles: the loss around one, and how long settings stay there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gpulab.plots.style import CPU_COLOURS, FAINT, GPU_COLOURS, INK, Picture, canvas, colour, setting_order
from gpulab.report import draw
from gpulab.saddles.escapes import EscapeTable
from gpulab.saddles.landscapes import Surface
from gpulab.settings import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gpulab.saddles import Landscape

DOWN, UP = GPU_COLOURS["cuda:tf32=off"], CPU_COLOURS["cpu"]
FLOOR = 1e-17  # displacements that a logarithmic axis can do without


@draw.register
def saddle_surface(surface: Surface) -> Picture:
    """The loss around a saddle, over the directions of the least and of the greatest curvature.

    `surface` is from `gpulab.saddles.surface`. On the right, the loss along each of the two, and, dashed, what the
    curvature at the saddle alone would make of it.
    """
    along, across, losses, loss = surface.along, surface.across, surface.losses, surface.loss
    middle = len(along) // 2
    figure, (left, right) = canvas(2, height=3.7)
    levels = np.quantile(losses, np.linspace(0.02, 0.98, 13))
    filled = left.contourf(along, across, losses, levels=np.unique(levels), cmap="cividis", extend="both")
    left.contour(along, across, losses, levels=[loss], colors="white", linewidths=1.2)
    left.plot(0, 0, marker="o", ms=7, color="white", markeredgecolor=INK)
    left.axhline(0, color=DOWN, lw=1.4)
    left.axvline(0, color=UP, lw=1.4)
    left.set_xlabel("along the least curvature (distance of the weights)", fontsize=8)
    left.set_ylabel("along the greatest curvature", fontsize=8)
    bar = figure.colorbar(filled, ax=left, format=FuncFormatter(lambda value, _: f"{value:.3g}"), shrink=0.85)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("loss", fontsize=8)
    slices = ((along, losses[middle], DOWN, "least"), (across, losses[:, middle], UP, "greatest"))
    for (places, values, tint, name), curvature in zip(slices, surface.curvatures, strict=True):
        right.plot(places, values, color=tint, lw=1.6, label=f"along the {name}: {curvature:.2g}")
        right.plot(places, loss + curvature * places**2 / 2, color=tint, lw=0.9, ls="--")
    right.plot(0, loss, marker="o", ms=7, color="white", markeredgecolor=INK, zorder=5)
    low, high = losses.min(), losses[[middle]].max()
    high = max(high, losses[:, middle].max())
    right.set_ylim(low - 0.08 * (high - low), high + 0.25 * (high - low))
    right.set_xlabel("distance of the weights from the saddle", fontsize=8)
    right.set_ylabel("loss", fontsize=8)
    right.legend(
        fontsize=7.5, frameon=False, loc="upper center", title="curvature (dashed: it alone)", title_fontsize=7.5
    )
    figure.suptitle(str(surface), fontsize=10)
    return Picture(figure, f"{surface}. Left, contours of the loss; right, the loss along two directions.")


def escape_law(table: pd.DataFrame) -> Picture:
    """How long each escape took against the displacement it began with: `gpulab.escape_table`'s table.

    Steps are counted in units of 1/ln(1 + ηλ), nearly 1/(ηλ), so that every learning rate and every saddle has the
    same line, ln(r/δ). Filled for what was made here, hollow for recorded, a triangle where the arithmetic is
    emulated, a square for minibatches. A cross never left, and stands where theory expects it to have done so.
    """
    figure, (axes,) = canvas(1, height=4.2)
    shown = table.assign(
        x=(table.start / table.radius).clip(lower=1e-17),
        time=table.steps.where(table.left, table.expected) * table.expected_rate,
    )
    low, high = min(1e-8, shown.x.min() / 5), 3.0
    line = np.geomspace(low, 1, 50)
    axes.plot(line, np.log(1 / line), color=INK, lw=1, zorder=1)
    for row in shown[shown.left].to_dict("records"):
        _draw(axes, row)
    for row in shown[~shown.left].to_dict("records"):
        size = 5 if row["perturbation"] else 8
        axes.plot(row["x"], row["time"], marker="x", ms=size, mew=size / 4.5, color=colour(row["setting"]), zorder=4)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(-1, np.log(1 / low) * 1.05)
    axes.xaxis.set_major_locator(LogLocator(10, numticks=9))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("displacement at the start, relative to the radius (δ/r)")
    axes.set_ylabel("steps until it left × ln(1 + ηλ)")
    figure.suptitle(_law_title(table), fontsize=10)
    _law_key(figure, table)
    return Picture(
        figure, f"Escape times against the initial displacement, with the line ln(r/δ). {_law_title(table)}."
    )


@draw.register
def _(escapes: EscapeTable) -> Picture:
    return escape_law(escapes.table)


def _draw(axes: Axes, row: dict[str, Any]) -> None:
    tint = colour(row["setting"])
    marker = "s" if row["batch_size"] else "^" if row["emulated"] else "o"
    face = "none" if row["recorded"] else tint
    size = (16 if row["perturbation"] else 46) + 40 * row["recorded"]  # a ring around what was made here
    axes.scatter(row["x"], row["time"], marker=marker, s=size, color=face, edgecolors=tint, linewidths=1.1, zorder=3)


def _law_title(table: pd.DataFrame) -> str:
    left = table[table.left & (table.expected > 1)]
    ratio = (left.steps / left.expected).median()
    held = int((~table.left).sum())
    parts = [f"{len(left)} escapes took {ratio:.2f} times what theory expects (median)"] if len(left) else []
    parts += [f"{held} never left"] if held else []
    return "; ".join(parts)


def _law_key(figure: Figure, table: pd.DataFrame) -> None:
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"ls": "", "ms": 5.5, "markeredgecolor": INK, "markerfacecolor": FAINT}
    handles = [Line2D([], [], ls="", marker="o", ms=6, color=colour(s), label=s) for s in setting_order(table)]
    handles.append(Line2D([], [], color=INK, lw=1, label="theory: ln(r/δ)"))
    plain = ~table.emulated.astype(bool) & (table.batch_size == 0)
    if (plain & (table.perturbation > 0)).any():
        handles.append(Line2D([], [], marker="o", label="pushed off (small)", **{**dot, "ms": 4}))
    if table.emulated.any():
        handles.append(Line2D([], [], marker="^", label="emulated", **dot))
    if (table.batch_size > 0).any():
        handles.append(Line2D([], [], marker="s", label="minibatches", **dot))
    if table.recorded.any():
        machines = ", ".join(sorted(set(table.machine[table.recorded])))
        handles.append(
            Line2D([], [], marker="o", label=f"recorded on {machines}", **{**dot, "markerfacecolor": "white"})
        )
    if (~table.left).any():
        handles.append(
            Line2D([], [], ls="", marker="x", ms=7, mew=1.6, color=INK, label="never left, at its expected time")
        )
    figure.legend(handles=handles, fontsize=7.5, frameon=False, loc="outside lower center", ncols=3)


def escape_paths(paths: pd.DataFrame, radius: float | None = None) -> Picture:
    """The way out of the saddle as training goes on, a line for each escape: `gpulab.escape_table`'s paths.

    Drawn is the displacement along the directions that lead down, whose logarithm grows by ln(1 + ηλ) a step.

    Dashed where the arithmetic is emulated, dotted for minibatches beside others. `radius` is drawn where it is given.
    Of minibatches the running median is drawn, and of each setting a thinner line than of the one before.
    """
    figure, (axes,) = canvas(1, height=3.9)
    settings = list(paths.setting.unique())
    for (setting, batch, _, _), line in paths.groupby(["setting", "batch_size", "perturbation", "seed"], sort=False):
        shown = line[line.unstable > FLOOR]
        wide, style = 1.2, "--" if Setting.parse(setting).emulated else "-"
        if batch:
            shown = shown.assign(
                unstable=shown.unstable.rolling(len(shown) // 40 + 1, center=True, min_periods=1).median()
            )
            wide, style = 4.5 / (1 + settings.index(setting)), ":" if (paths.batch_size == 0).any() else "-"
        axes.plot(shown.step, shown.unstable, color=colour(setting), lw=wide, ls=style, alpha=0.9)
    if radius:
        axes.axhline(radius, color=FAINT, lw=0.9)
        axes.annotate(
            " left", (1, radius), xycoords=("axes fraction", "data"), va="center", fontsize=8, annotation_clip=False
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, numticks=9))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("steps of gradient descent")
    axes.set_ylabel("displacement along the ways down", fontsize=9)
    far = paths.groupby(["setting", "batch_size", "perturbation", "seed"]).unstable.agg(["first", "last"])
    gone = int((far["last"] > (radius or 10 * far["first"].clip(lower=FLOOR))).sum())
    seen = f"{gone} of {len(far)} trainings leave the saddle"
    figure.suptitle(seen, fontsize=10)
    _path_key(figure, paths)
    return Picture(figure, f"Displacement against steps, logarithmic: {seen}.")


def _path_key(figure: Figure, paths: pd.DataFrame) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for setting in setting_order(paths):
        emulated = Setting.parse(setting).emulated
        style = "--" if emulated and (paths.batch_size == 0).any() else "-"
        label = f"{setting} (emulated)" if emulated else setting
        handles.append(Line2D([], [], color=colour(setting), ls=style, label=label))
    if (paths.batch_size > 0).any():
        style = ":" if (paths.batch_size == 0).any() else "-"
        handles.append(Line2D([], [], color=INK, ls=style, label="minibatches, running median"))
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=2)


def landscape_slice(landscape: Landscape, angle: float = 0.0, extent: float | None = None) -> Picture:
    """The loss along a line through a network's weights, beside what curvature alone would make of it.

    `landscape` is from `gpulab.landscape`; `angle` in degrees turns the line from the steepest way down (0) to the
    steepest way up (90).
    """
    line = landscape.slice(angle, extent)
    curvature = landscape.curvature(angle)
    figure, (axes,) = canvas(1, height=3.6)
    axes.plot(line.distance, line.loss, color=DOWN if curvature < 0 else UP, lw=1.8, label="loss")
    axes.plot(line.distance, line.quadratic, color=INK, lw=0.9, ls="--", label="slope and curvature alone")
    axes.plot(0, landscape.loss, marker="o", ms=7, color="white", markeredgecolor=INK, label="the network", zorder=5)
    low, high = min(line.loss.min(), landscape.loss), line.loss.max()
    axes.set_ylim(low - 0.25 * (high - low), high + 0.1 * (high - low))
    axes.set_xlabel("distance of the weights from the network's")
    axes.set_ylabel("loss")
    axes.legend(fontsize=8, frameon=False)
    best = line.loc[line.loss.idxmin()]
    gain = 1 - best.loss / landscape.loss
    seen = f"At {angle:g}° the curvature is {curvature:.2g}; the lowest loss on the line is {gain:.1%} lower"
    figure.suptitle(seen, fontsize=10)
    return Picture(figure, f"The loss along a line through the weights. {seen}.")
