"""Numbers as their bits, sums in several orders, and how rounding grows along a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.patches import Rectangle
from torch import Tensor

from gpulab.diagnostics.audits import Audit
from gpulab.errors import UsageError
from gpulab.numerics.formats import FORMATS, round_to
from gpulab.numerics.sums import format_bits
from gpulab.plots import style
from gpulab.plots.style import FAINT, INK, ON_GPU, Look
from gpulab.report import Picture, draw

SHOWN_FORMATS = ("float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
SIGN, EXPONENT, FRACTION = "#B84D00", "#007A59", "#0072B2"  # dark enough for white letters


def bits(x: float, formats: Sequence[str] | None = None) -> Picture:
    """Draw the bits of a number in float32, and after it was rounded to other formats, as each format stores them.

    A box is a bit; filled ones are 1. The fractions begin in one column, so that what a format drops is missing on the
    right.

    Args:
        x: The number.
        formats: Names of `gpulab.numerics.FORMATS`, a row each; by default `float32`, `tf32`, `bfloat16`, `float16`,
            `float8_e4m3fn` and `float8_e5m2`.

    Returns:
        A `gpulab.plots.Picture`.

    Raises:
        UsageError: For an unknown format.

    Examples:
        >>> import gpulab as gl
        >>> gl.plots.bits(0.1, ["float32", "bfloat16"]).alt
        'Bits of 0.1: sign, exponent and fraction in float32, bfloat16. 0.1 in float32, and rounded to shorter formats.'
    """
    names = SHOWN_FORMATS if formats is None else tuple(formats)
    if unknown := [name for name in names if name not in FORMATS]:
        raise UsageError(f"format {unknown[0]!r}: expected one of {', '.join(FORMATS)}")
    figure, (axes,) = style.canvas(1, height=0.7 + 0.4 * len(names))
    axes.set_axis_off()
    for row, name in enumerate(names):
        sign, exponent, fraction = format_bits(x, name)
        for column, bit in [(0, sign), *enumerate(exponent, 9 - len(exponent)), *enumerate(fraction, 9)]:
            tint = SIGN if column == 0 else EXPONENT if column < 9 else FRACTION
            face, ink = (tint, "white") if bit == "1" else ("white", tint)
            axes.add_patch(Rectangle((column + 0.08, row + 0.1), 0.84, 0.8, facecolor=face, edgecolor=tint, lw=0.8))
            axes.text(column + 0.5, row + 0.52, bit, ha="center", va="center", fontsize=6, color=ink)
        value = round_to(torch.tensor([x], dtype=torch.float32), name).item()
        off = abs(value - x)
        axes.text(-0.4, row + 0.5, name, ha="right", va="center", fontsize=8)
        axes.text(32.5, row + 0.5, f"{value:.10g}", va="center", fontsize=8)
        note = "exact" if off == 0 else f"off by {off:.0e}" if np.isfinite(off) else ""
        axes.text(46, row + 0.5, note, ha="right", va="center", fontsize=7, color=FAINT)
    for middle, label, tint in ((0.5, "±", SIGN), (5, "exponent", EXPONENT), (20.5, "fraction", FRACTION)):
        axes.text(middle, -0.15, label, ha="center", va="bottom", fontsize=8, color=tint)
    axes.set(xlim=(-7, 46), ylim=(len(names), -0.8))
    alt = f"Bits of {x:g}: sign, exponent and fraction in {', '.join(names)}."
    return style.finished(figure, f"{x:.10g} in float32, and rounded to shorter formats", alt)


def sums(shuffled: Tensor, table: pd.DataFrame) -> Picture:
    """Draw how far sums of the same numbers, in random and in named orders, are from the exact one.

    Args:
        shuffled: The sums in random orders, (count,), from `gpulab.numerics.shuffled_sums`.
        table: The sums in named orders, from `gpulab.numerics.summation` of the same numbers: `order` and `sum`.

    Returns:
        A `gpulab.plots.Picture`: a histogram of the random orders, with the named ones marked.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> x = torch.rand(100, generator=torch.Generator().manual_seed(0))
        >>> picture = gl.plots.sums(gl.numerics.shuffled_sums(x, 50), gl.numerics.summation(x))
        >>> print(picture.alt.partition(". ")[0])
        Histogram of the error of 50 sums in random order, with named orders marked
    """
    exact = np.float64(table.set_index("order").loc["exact", "sum"])
    ulp = np.spacing(np.float32(exact)).astype(float)
    away = np.round((shuffled.double().numpy() - exact) / ulp).astype(int)
    named = table[table.order != "exact"]
    offsets = np.round((named["sum"].to_numpy(float) - exact) / ulp).astype(int)
    values, counts = np.unique(away, return_counts=True)
    figure, (axes,) = style.canvas(1, height=3.6)
    axes.bar(values, counts, width=0.8, color=style.colour("cpu:threads=1"))
    axes.axvline(0, color=INK, lw=1, ls="--")
    label: Look = {"va": "center", "fontsize": 7.5, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0}}
    for height, offset in enumerate(np.unique(offsets)):
        level = counts.max() * (1.12 + 0.11 * height)
        axes.plot([offset, offset], [0, level], color=ON_GPU, lw=0.8, zorder=0)
        side = "right" if offset > values.mean() else "left"
        axes.annotate(f"  {', '.join(named.order[offsets == offset])}  ", (offset, level), ha=side, **label)
        axes.plot(offset, level, marker="o", ms=4, color=ON_GPU, zorder=5)
    distance = "distance from the exact sum (units in the last place of float32)"
    axes.set(xlabel=distance, ylabel=f"how many of {len(away)} random orders")
    right = (away == 0).mean()
    headline = f"{len(values)} different sums of the same numbers; {right:.0%} of the orders give the exact one"
    alt = f"Histogram of the error of {len(away)} sums in random order, with named orders marked."
    return style.finished(figure, headline, alt)


@draw.register
def audit(report: Audit) -> Picture:
    """The error of each operation's result, all that came before it included, along a training step.

    Dots are what each operation's own rounding may explain; a cross marks a finding.
    """
    table = report.table.reset_index(drop=True)
    errors = table[["so_far_a", "so_far_b"]]
    drawn = errors.replace(0, np.nan)
    first, second = style.colour(report.a.setting), style.colour(report.b.setting)
    dashed: Look = {"color": INK if second == first else second, "lw": 1.0, "ls": "--"}
    figure, (axes,) = style.canvas(1, height=3.8)
    for side, trace, line in (("a", report.a, {"color": first, "lw": 1.4}), ("b", report.b, dashed)):
        bound, explained = table[f"bound_{side}"].replace(0, np.nan), "rounding explains" if side == "a" else None
        axes.scatter(table.index, bound, s=4, color=FAINT, zorder=1, label=explained)
        axes.plot(table.index, drawn[f"so_far_{side}"], alpha=0.9, label=f"{trace.title}, so far", **line)
    heights = errors.max(axis=1).bfill().ffill()[table.kind != "rounding"]  # what ran on one side has no height
    cross: Look = {"marker": "x", "s": 26, "color": INK, "zorder": 4}
    axes.scatter(heights.index, heights, label="finding" if len(heights) else None, **cross)
    backward = table.index[table.phase == "backward"]
    if len(backward):
        axes.axvline(backward[0] - 0.5, color=FAINT, lw=0.8)
        axes.annotate(" backward", (backward[0], 0.98), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axes.set_yscale("log")
    if drawn.notna().any(axis=None):  # a bound far outside says nothing here
        axes.set_ylim(max(1e-17, drawn.min(axis=None) / 30), max(1e-4, drawn.max(axis=None) * 30))
    axes.set(xlabel="operation, in the order of the step", ylabel="error against float64, relative")
    headline = f"First finding: {report.kind}; the largest error against float64 is {errors.max(axis=None):.1e}"
    alt = f"Relative error against float64 along a step's operations, under {report.a.title} and {report.b.title}."
    return style.finished(figure, headline, alt, axes.get_legend_handles_labels()[0], columns=4)
