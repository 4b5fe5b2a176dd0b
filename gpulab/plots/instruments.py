"""How rounding grows along a step, as an audit found it."""

from __future__ import annotations

import numpy as np

from gpulab.audits.audits import Audit
from gpulab.plots import style
from gpulab.plots.style import FAINT, INK, Look
from gpulab.report import Picture, draw


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
