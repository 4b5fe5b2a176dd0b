"""Floating point: the bits of numbers, sums in many orders, a growing difference, and factors compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter

from gpulab.errors import UsageError
from gpulab.plots.style import CPU_COLOURS, FAINT, GPU_COLOURS, INK, Picture, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor


SHOWN_FORMATS = ("float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
SIGN, EXPONENT, FRACTION = "#D55E00", "#009E73", "#0072B2"
PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
CHANGE_COLOURS = ("#0072B2", "#E69F00", "#222222", "#CC79A7", "#009E73")


# --- bits ------------------------------------------------------------------------------------------------


def bits(x: float, formats: Sequence[str] | None = None) -> Picture:
    """The bits of a number in float32, and after it was rounded to each format, as that format stores them.

    A box is a bit: sign, exponent, fraction; filled ones are 1. Fractions begin in one column, so that what
    a format drops is seen on the right.

    >>> bits(0.1, ["float32", "bfloat16"]).alt
    'Bits of 0.1: sign, exponent and fraction in float32, bfloat16.'
    """
    from gpulab.numerics.formats import FORMATS

    names = SHOWN_FORMATS if formats is None else tuple(formats)
    if unknown := [name for name in names if name not in FORMATS]:
        raise UsageError(f"format {unknown[0]!r}: expected one of {', '.join(FORMATS)}")
    figure = Figure(figsize=(7.2, 0.7 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(names):
        _bit_row(axes, row, name, x)
    for place, width, label, tint in ((0, 1, "±", SIGN), (1, 8, "exponent", EXPONENT), (9, 23, "fraction", FRACTION)):
        axes.text(place + width / 2, -0.15, label, ha="center", va="bottom", fontsize=8, color=tint)
    axes.set(xlim=(-7, 46), ylim=(len(names), -0.8))
    axes.set_axis_off()
    figure.suptitle(f"{x:.10g} in float32, and rounded to shorter formats", fontsize=10)
    return Picture(figure, f"Bits of {x:g}: sign, exponent and fraction in {', '.join(names)}.")


def _bit_row(axes: Axes, row: int, name: str, x: float) -> None:
    import torch

    from gpulab.numerics.formats import round_to
    from gpulab.numerics.sums import format_bits

    sign, exponent, fraction = format_bits(x, name)
    for place, bit in [(0, sign), *enumerate(exponent, 9 - len(exponent)), *enumerate(fraction, 9)]:
        tint = SIGN if place == 0 else EXPONENT if place < 9 else FRACTION
        face, ink = (tint, "white") if bit == "1" else ("white", tint)
        axes.add_patch(Rectangle((place + 0.08, row + 0.1), 0.84, 0.8, facecolor=face, edgecolor=tint, lw=0.8))
        axes.text(place + 0.5, row + 0.52, bit, ha="center", va="center", fontsize=6, color=ink)
    value = round_to(torch.tensor([x], dtype=torch.float32), name).item()
    axes.text(-0.4, row + 0.5, name, ha="right", va="center", fontsize=8)
    axes.text(32.5, row + 0.5, f"{value:.10g}", va="center", fontsize=8)
    apart = abs(value - x)
    note = "exact" if apart == 0 else f"off by {apart:.0e}" if np.isfinite(apart) else ""
    axes.text(46, row + 0.5, note, ha="right", va="center", fontsize=7, color=FAINT)


# --- sums ------------------------------------------------------------------------------------------------


def sums(shuffled: Tensor, table: pd.DataFrame) -> Picture:
    """How far sums of the same numbers are from the exact one: random orders, and those of `gpulab.summation`."""
    exact = np.float64(table.set_index("order").loc["exact", "sum"])
    step = np.spacing(np.float32(exact)).astype(float)
    away = np.round((shuffled.double().numpy() - exact) / step).astype(int)
    named = table[table.order != "exact"]
    places = np.round((named["sum"].to_numpy(float) - exact) / step).astype(int)
    figure, (axes,) = canvas(1, height=3.6)
    values, counts = np.unique(away, return_counts=True)
    axes.bar(values, counts, width=0.8, color=CPU_COLOURS["cpu:threads=1"])
    axes.axvline(0, color=INK, lw=1, ls="--")
    top = counts.max()
    for height, place in enumerate(sorted(set(places))):
        label = ", ".join(named.order[places == place])
        level = top * (1.12 + 0.11 * height)
        axes.plot([place, place], [0, level], color=GPU_COLOURS["cuda:tf32=off"], lw=0.8, zorder=0)
        left = place > values.mean()
        axes.annotate(
            f"  {label}  ", (place, level), ha="right" if left else "left", va="center", fontsize=7.5, bbox=PLAIN
        )
        axes.plot(place, level, marker="o", ms=4, color=GPU_COLOURS["cuda:tf32=off"], zorder=5)
    axes.set_xlabel("distance from the exact sum (units in the last place of float32)")
    axes.set_ylabel(f"how many of {len(away)} random orders")
    right = float((away == 0).mean())
    figure.suptitle(
        f"{len(values)} different sums of the same numbers; {right:.0%} of the orders give the exact one", fontsize=10
    )
    return Picture(figure, f"Histogram of the error of {len(away)} sums in random order, with named orders marked.")


# --- growth ----------------------------------------------------------------------------------------------


def growth(frame: pd.DataFrame) -> Picture:
    """The distance between two trainings as they go on, a line for each seed: `gpulab.growth`."""
    networks = list(dict.fromkeys(frame.network))[:2]
    changes = list(dict.fromkeys(frame.change))
    tints = dict(zip(changes, CHANGE_COLOURS, strict=False))
    figure, panels = canvas(len(networks), height=3.6, share_rows=True)
    for axes, network in zip(panels, networks, strict=True):
        for (change, _), line in frame[frame.network == network].groupby(["change", "seed"], sort=False):
            shown = line[line.distance > 0]
            axes.plot(shown.step, shown.distance, color=tints[change], lw=1.1, alpha=0.85)
        axes.axhline(2.0**-24, color=FAINT, lw=0.8, ls=":")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(network, fontsize=9)
        axes.set_xlabel("updates of the weights")
    panels[0].set_ylabel("distance of the weights, relative")
    panels[-1].annotate(
        " one\n rounding",
        (1, 2.0**-24),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=7,
        annotation_clip=False,
    )
    figure.suptitle(_grown(frame), fontsize=10)
    _line_key(figure, tints, frame.seed.nunique())
    return Picture(
        figure, f"Relative distance of the weights of two trainings against updates, for {', '.join(changes)}."
    )


def _grown(frame: pd.DataFrame) -> str:
    """How many times the first change has grown, from the beginning to the end, over seeds."""
    first = frame.change.iloc[0]
    parts = []
    for network, some in frame[frame.change == first].groupby("network", sort=False):
        ends = some.sort_values("step").groupby("seed").distance.agg(["first", "last"])
        times = (ends["last"] / ends["first"]).median()
        parts.append(f"{network} {times:,.0f}-fold" if times >= 2 else f"{network} not")
    return f"{first[0].upper()}{first[1:]}: the difference grew in {', in '.join(parts)}"


def _line_key(figure: Figure, tints: dict[str, str], seeds: int) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=tint, label=f"{change} (a line for each of {seeds} seeds)" if not n else change)
        for n, (change, tint) in enumerate(tints.items())
    ]
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=3)
