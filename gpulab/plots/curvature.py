"""The curvature of a loss along trainings: how many directions lead down, how steeply, and whole spectra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from gpulab.errors import UsageError
from gpulab.plots.style import FAINT, INK, Picture, canvas, colour, points, setting_order
from gpulab.saddles.curvature import row_spectra
from gpulab.saddles.spectrum import ZERO
from gpulab.settings import Setting
from gpulab.stats.verdicts import check_one_protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KERNEL = 0.05  # width of a node in a ridgeline, in decades
ROOM = 0.75  # how far apart ridgelines stand, in heights of the tallest


def index_against_loss(frame: pd.DataFrame) -> Picture:
    """The share of directions that lead down against the loss, at each snapshot of each training.

    `frame` is from `gpulab.curvature_along` or `gpulab.recorded_curvature`, one network or two. Thin lines join the
    snapshots of a seed; its beginning is a small cross. The vertical lines are standard errors.
    """
    known = _with_numbers(frame)
    networks = list(known.experiment.unique())[:2]
    figure, panels = canvas(len(networks), height=3.7)
    for axes, network in zip(panels, networks, strict=True):
        some = known[known.experiment == network]
        floor = 0.5 * some.index_fraction[some.index_fraction > 0].min()  # where those without a way down stand
        for (setting, _, recorded), run in some.groupby(["setting", "seed", "recorded"]):
            run = run.sort_values("step")
            height = run.index_fraction.clip(lower=floor)
            axes.plot(run.loss, height, color=colour(setting), ls=_dashes(setting), lw=0.6, alpha=0.6, zorder=1)
            low = (run.index_fraction - run.index_error).clip(lower=floor)
            axes.vlines(run.loss, low, height + run.index_error, color=colour(setting), lw=0.8, alpha=0.6, zorder=1)
            points(axes, run.loss, height, setting, recorded)
            axes.scatter(run.loss.iloc[:1], height.iloc[:1], marker="x", s=22, color=INK, lw=0.8, zorder=4)
        _scale(axes, "x", some.loss)
        axes.set_yscale("log")
        _shares(axes)
        axes.set_xlabel(f"{network}: loss (mean squared error)", fontsize=9)
    panels[0].set_ylabel("directions that lead down (share of all)", fontsize=9)
    both = [_correlation(known[known.experiment == network]) for network in networks]
    seen = "; ".join(f"{network}: rank correlation {r:+.2f}" for network, r in zip(networks, both, strict=True))
    figure.suptitle(f"Index against loss. {seen}", fontsize=10)
    _keys(figure, known, [("x", "before training")])
    return Picture(figure, f"The share of negative curvature directions against the loss along trainings. {seen}.")


def curvature_over_time(frame: pd.DataFrame) -> Picture:
    """The steepest ways up and down along trainings of one network: the largest and the most negative eigenvalue.

    A line per seed and setting; a cross where it diverged.
    """
    known = _one_network(frame)
    figure, (left, right) = canvas(2, height=3.5)
    sides = ((left, known.largest, "largest eigenvalue"), (right, -known.smallest, "most negative eigenvalue (−λ)"))
    for axes, values, label in sides:
        for (setting, _, recorded), run in known.assign(shown=values).groupby(["setting", "seed", "recorded"]):
            run = run.sort_values("step")
            shown = run.shown.where(run.shown > 0)
            axes.plot(run.step + 1, shown, color=colour(setting), ls=_dashes(setting), lw=0.8, alpha=0.8, zorder=2)
            points(axes, run.step + 1, shown, setting, recorded)
            if (run.status == "diverged").any():
                axes.scatter(run.step.iloc[-1] + 1, shown.iloc[-1], marker="X", s=60, color=INK, zorder=4)
        _scale(axes, "x", known.step + 1)
        _scale(axes, "y", values[values > 0])
        axes.set_xlabel("updates + 1", fontsize=9)
        axes.set_ylabel(label, fontsize=8.5)
    first, last = known[known.step == known.step.min()], known[known.final]
    ratio = (-last.smallest / last.largest).median() / (-first.smallest / first.largest).median()
    seen = (
        f"{known.experiment.iloc[0]}: the steepest way down, relative to the steepest way up, "
        f"ends at {ratio:.2g} times where it began"
    )
    figure.suptitle(seen, fontsize=10)
    diverged = [("X", "diverged")] if (known.status == "diverged").any() else []
    _keys(figure, known, diverged)
    return Picture(figure, f"Largest and most negative eigenvalue of the Hessian over updates. {seen}.")


def spectra(frame: pd.DataFrame) -> Picture:
    """The Hessian's spectrum at each snapshot of trainings of one network, one ridge above the other.

    The axis is linear around zero and logarithmic beyond; in the grey band signs cannot be told. Heights are the
    logarithm of how many there are, from one in the whole spectrum up; the bar is a hundred times. Thick lines are
    means over seeds, thin ones seeds.
    """
    known = _one_network(frame)
    grey = ZERO * float(np.median(np.maximum(known.largest, -known.smallest)))
    band = grey / 3  # where the axis turns from linear to logarithmic
    moments = sorted(known.step.unique())
    figure, (axes,) = canvas(1, height=1.5 + 0.62 * len(moments))
    grid = np.linspace(-_spread(-known.smallest.min(), band) - 0.3, _spread(known.largest.max(), band) + 0.3, 600)
    ridges = {(row.setting, row.seed, row.step): _ridge(density, grid, band) for row, density in row_spectra(known)}
    tallest = max(ridge.max() for ridge in ridges.values())
    for place, step in enumerate(moments):
        base = -place * ROOM
        axes.axhline(base, color=FAINT, lw=0.5, zorder=-place)
        for number, setting in enumerate(setting_order(known)):
            seeds = [ridge for (s, _, t), ridge in ridges.items() if s == setting and t == step]
            if not seeds:
                continue
            tint, mean = colour(setting), np.mean(seeds, 0) / tallest
            for ridge in seeds:
                axes.plot(grid, base + ridge / tallest, color=tint, lw=0.4, alpha=0.5, zorder=place)
            if number == 0:
                axes.fill_between(grid, base, base + mean, color=tint, alpha=0.15, lw=0, zorder=place)
            axes.plot(grid, base + mean, color=tint, ls=_dashes(setting), lw=1.3, zorder=place)
    axes.plot([grid[-1]] * 2, [0.3, 0.3 + 2 / tallest], color=INK, lw=1.2)
    axes.annotate(" × 100", (grid[-1], 0.3 + 1 / tallest), fontsize=7.5, va="center", annotation_clip=False)
    axes.axvspan(-_spread(grey, band), _spread(grey, band), color=FAINT, alpha=0.15, lw=0, zorder=-99)
    axes.set_yticks([-place * ROOM for place in range(len(moments))], [f"{step:,}" for step in moments], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylabel("updates", fontsize=9)
    _eigenvalue_ticks(axes, known, band)
    axes.set_xlabel("eigenvalue (grey: too close to zero to tell its sign)", fontsize=9)
    seeds, zero = known.seed.nunique(), known[known.final].zero_fraction.mean()
    seen = (
        f"{known.experiment.iloc[0]}, {seeds} seed{'s' if seeds > 1 else ''}: "
        f"at the end {100 * (1 - zero):.2g} % of the eigenvalues stand out from zero"
    )
    figure.suptitle(seen, fontsize=10)
    _keys(figure, known, [], dots=False)
    return Picture(figure, f"Spectra of the Hessian along trainings, as ridgelines over the updates. {seen}.")


# --- parts -----------------------------------------------------------------------------------------------


def _with_numbers(frame: pd.DataFrame) -> pd.DataFrame:
    known = frame[frame["size"] > 0]
    if not len(known):
        raise UsageError("there is no row with numbers to draw")
    return known


def _one_network(frame: pd.DataFrame) -> pd.DataFrame:
    known = _with_numbers(frame)
    check_one_protocol(known)
    return known


def _correlation(frame: pd.DataFrame) -> float:
    from scipy import stats

    return float(stats.spearmanr(frame.loss, frame.index_fraction).statistic)


def _spread(value: float, band: float) -> float:
    """Linear within the band, logarithmic beyond: where an eigenvalue stands on the axis."""
    return float(np.sign(value) * np.log10(1 + abs(value) / band))


def _ridge(density: Any, grid: np.ndarray, band: float) -> np.ndarray:
    """The logarithm of how many eigenvalues there are per decade, from one up."""
    places = np.sign(density.nodes) * np.log10(1 + np.abs(density.nodes) / band)
    each = np.exp(-0.5 * ((grid[:, None] - places.ravel()) / KERNEL) ** 2) / (KERNEL * np.sqrt(2 * np.pi))
    count = density.size * (each * density.weights.ravel()).sum(1) / len(density.nodes)
    return np.log10(1 + count)


def _eigenvalue_ticks(axes: Axes, frame: pd.DataFrame, band: float) -> None:
    low, high = frame.smallest.min(), frame.largest.max()
    decades = 10.0 ** np.arange(np.ceil(np.log10(band)), np.floor(np.log10(max(high, -low))) + 1)
    values = [*(-d for d in reversed(decades) if d <= -low), 0.0, *(d for d in decades if d <= high)]
    axes.set_xticks([_spread(v, band) for v in values], [f"{v:g}".replace("-", "−") for v in values], fontsize=8)


def _scale(axes: Axes, side: str, values: pd.Series) -> None:
    """Logarithmic where the values span a factor of four or more, with plain numbers at few ticks."""
    ratio = values.max() / values.min() if len(values) else 1.0
    if ratio < 4:
        return
    axis = axes.xaxis if side == "x" else axes.yaxis
    (axes.set_xscale if side == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if ratio < 100 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())


def _dashes(setting: str) -> str:
    return "--" if Setting.parse(setting).emulated else "-"


def _shares(axes: Axes) -> None:
    axes.yaxis.set_major_locator(LogLocator(10, numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _keys(figure: Figure, frame: pd.DataFrame, marks: list[tuple[str, str]], dots: bool = True) -> None:
    """Which colour is which setting, what is hollow, and what other marks mean."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour(setting), ls=_dashes(setting), label=setting) for setting in setting_order(frame)
    ]
    for recorded in sorted(frame.recorded.unique()):
        machines = ", ".join(sorted(frame[frame.recorded == recorded].machine.unique()))
        label = f"recorded on {machines}" if recorded else f"made here, on {machines}"
        face = "white" if recorded else FAINT
        marker = "o" if dots else ""
        handles.append(Line2D([], [], ls="", marker=marker, markeredgecolor=INK, markerfacecolor=face, label=label))
    handles += [Line2D([], [], ls="", marker=marker, color=INK, label=label) for marker, label in marks]
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=2)
