"""One training step, operation by operation."""

from __future__ import annotations

import numpy as np

from gpulab.diagnostics.audits import Audit
from gpulab.plots.style import FAINT, INK, Picture, canvas, colour
from gpulab.report import draw


@draw.register
def audit(report: Audit) -> Picture:
    """The error of each operation's result, all that came before it included, along a training step.

    Lines are the two settings against float64; the dots, what each operation's own rounding may
    explain; a cross marks a finding.
    """
    table = report.table.reset_index(names="place")
    figure, (axes,) = canvas(1, height=3.8)
    for side, trace in (("a", report.a), ("b", report.b)):
        own = table[f"bound_{side}"].replace(0, np.nan)
        axes.scatter(table.place, own, s=4, color=FAINT, zorder=1, label="rounding explains" if side == "a" else None)
        so_far = table[f"so_far_{side}"].replace(0, np.nan)
        style = {"lw": 1.4, "alpha": 0.9} if side == "a" else {"lw": 1.0, "alpha": 0.9, "ls": "--"}
        axes.plot(table.place, so_far, color=_side_colour(report, side), label=f"{trace.title}, so far", **style)
    marked = table.kind != "rounding"
    heights = table[["so_far_a", "so_far_b"]].max(axis=1).bfill().ffill()  # what ran on one side has no height
    axes.scatter(
        table.place[marked],
        heights[marked],
        marker="x",
        s=26,
        color=INK,
        zorder=4,
        label="finding" if marked.any() else None,
    )
    backward = table.index[table.phase == "backward"]
    if len(backward):
        axes.axvline(backward[0] - 0.5, color=FAINT, lw=0.8)
        axes.annotate(" backward", (backward[0], 0.98), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axes.set_yscale("log")
    drawn = table[["so_far_a", "so_far_b"]].replace(0, np.nan)
    if drawn.notna().any(axis=None):  # a bound far outside says nothing here
        axes.set_ylim(max(1e-17, drawn.min(axis=None) / 30), max(1e-4, drawn.max(axis=None) * 30))
    axes.set_xlabel("operation, in the order of the step")
    axes.set_ylabel("error against float64, relative")
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=4)
    end = table[["so_far_a", "so_far_b"]].max(axis=1).max()
    figure.suptitle(f"Worst finding: {report.kind}; the largest error against float64 is {end:.1e}", fontsize=10)
    settings = f"{report.a.title} and {report.b.title}"
    return Picture(figure, f"Relative error against float64 along the operations of a step, under {settings}.")


def _side_colour(report: Audit, side: str) -> str:
    trace, other = (report.a, report.b) if side == "a" else (report.b, report.a)
    same = colour(trace.setting) == colour(other.setting)
    return INK if same and side == "b" else colour(trace.setting)
