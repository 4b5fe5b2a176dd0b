"""The figures of notebook 02: what decoders make of one file, and each factor changed alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gpulab.companion.floating_point import FactorTable
from gpulab.data.jpeg import available_decoders, decode_jpeg, encode_jpeg
from gpulab.plots.style import CPU_COLOURS, FAINT, GPU_COLOURS, INK, canvas
from gpulab.report import Picture, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def decoded(
    frame: Any, decoders: tuple[str, ...] | None = None, quality: int = 75, subsampling: str = "4:2:0"
) -> Picture:
    """One frame (3, H, W) as each decoder makes it of the same JPEG file, and how far it is from the first."""
    names = available_decoders() if decoders is None else decoders
    file = encode_jpeg(frame, quality, subsampling)
    pictures = {name: decode_jpeg(file, name) for name in names}
    apart = {name: np.abs(p.astype(int) - pictures[names[0]]) for name, p in pictures.items()}
    largest = max(1, *(int(a.max()) for a in apart.values()))
    height, width = frame.shape[1:]
    cell = 7.2 / len(names)
    figure = Figure(figsize=(7.2, 2 * cell * height / width + 0.8), layout="constrained")
    grid = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        grid[0, column].imshow(pictures[name].transpose(1, 2, 0), interpolation="nearest")
        grid[0, column].set_title(name, fontsize=8)
        grid[1, column].imshow(apart[name].max(0), cmap="magma", vmin=0, vmax=largest, interpolation="nearest")
        share = (apart[name] > 0).mean()
        grid[1, column].set_title(f"{share:.0%} of the values differ, by up to {apart[name].max()}", fontsize=8)
    for axes in grid.flat:
        axes.set_axis_off()
    figure.suptitle(
        f"One JPEG file, {len(names)} decoders; below, the difference from {names[0]}'s pixels", fontsize=10
    )
    return Picture(figure, f"A frame decoded by {', '.join(names)}, and the differences between them.")


@draw.register
def factor_effects(report: FactorTable) -> Picture:
    """Each factor changed alone: what it does to one step, and to each seed's final loss.

    Left, how far the gradient of the first step moves; a tick marks what rounding alone does to it. Right,
    how far the final loss of each seed moves, in standard deviations between seeds: filled for runs made
    here, hollow for recorded ones, a triangle where the change is emulated. A seed that keeps its bits
    stands at the left edge.
    """
    table = report.table.reset_index(drop=True)
    figure, (left, right) = canvas(2, height=1.7 + 0.31 * len(table), share_rows=True)
    for place, row in enumerate(table.to_dict("records")):
        _draw_step(left, place, row)
        _draw_effects(right, place, row, report)
    left.set_xscale("log")
    left.set_xlim(1e-11, 30)
    left.set_xlabel("change of one step's gradient (relative)", fontsize=8)
    right.set_xscale("log")
    right.set_xlim(EDGE / 3, 100)
    right.axvline(0.25, color=FAINT, lw=0.9, ls=":")
    right.axvline(1, color=INK, lw=0.9, ls="--")
    right.annotate("margin ", (0.25, -0.75), ha="right", va="center", fontsize=7, annotation_clip=False)
    right.annotate(" sd between seeds", (1, -0.75), ha="left", va="center", fontsize=7, annotation_clip=False)
    right.set_xlabel("change of a seed's final loss (sd)", fontsize=8)
    for axes, edge in ((left, 3e-11), (right, EDGE)):
        axes.xaxis.set_major_locator(LogLocator(10, numticks=7))
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _, edge=edge: "" if value <= edge else f"$10^{{{round(np.log10(value))}}}$")
        )
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.annotate("same bits", (edge, -0.75), ha="left", va="center", fontsize=7, annotation_clip=False)
        axes.tick_params(axis="x", labelsize=8)
    names = [f"{r['factor']}\n{_told(r)}" for r in table.to_dict("records")]
    left.set_yticks(range(len(table)), names, fontsize=6.5)
    left.set_ylim(len(table) - 0.4, -0.6)
    right.tick_params(axis="y", left=False)
    figure.suptitle(_counted(table), fontsize=10)
    _factor_key(figure, table)
    return Picture(
        figure,
        f"For each of {table.factor.nunique()} factors, how far one step and the final losses move. {_counted(table)}.",
    )


def _told(row: dict[str, Any]) -> str:
    """What is changed, without what stays: of `cpu:threads=1,isa=avx2` against `cpu:threads=1`, `isa=avx2`."""
    base, change = (re.split(r"[:,] ?", str(row[side])) for side in ("base", "change"))
    if base[0] != change[0]:
        return str(row["change"])
    return ", ".join(part for part in change[1:] if part not in base) or f"without {', '.join(base[1:])}"


EDGE = 1e-8  # sd between seeds, where a seed that keeps its bits is drawn


def _tint(row: dict[str, Any]) -> str:
    return GPU_COLOURS["cuda:tf32=off"] if str(row["base"]).startswith("cuda") else CPU_COLOURS["cpu"]


def _draw_step(axes: Axes, place: int, row: dict[str, Any]) -> None:
    moved = row["step_moved"]
    if pd.isna(moved):
        return
    axes.scatter(row["base_error"], place, marker="|", s=60, color=FAINT, zorder=2)
    tint = _tint(row)
    face = "white" if row["source"] == "recorded" else tint
    marker = "^" if row["emulated"] else "o"
    axes.scatter(max(moved, 3e-11), place, marker=marker, s=26, color=face, edgecolors=tint, linewidths=1.2, zorder=3)


def _draw_effects(axes: Axes, place: int, row: dict[str, Any], report: FactorTable) -> None:
    seen = report.verdicts.get((row["source"], row["base"]))
    axes.annotate(
        f" {row['decision']}",
        (1.0, place),
        xycoords=("axes fraction", "data"),
        fontsize=7,
        va="center",
        annotation_clip=False,
    )
    if seen is None or not row["seeds"]:
        return
    pairs = seen.pairs[seen.pairs.change == row["change"]].difference.dropna()
    sizes = np.maximum(np.abs(pairs.to_numpy(float)) / (seen.between_seeds or np.nan), EDGE)
    heights = place + np.linspace(-0.22, 0.22, len(sizes)) if len(sizes) > 1 else [place]
    tint = _tint(row)
    face = "white" if row["source"] == "recorded" else tint
    marker = "^" if row["emulated"] else "o"
    axes.scatter(sizes, heights, marker=marker, s=14, color=face, edgecolors=tint, linewidths=0.9, zorder=3)


def _counted(table: pd.DataFrame) -> str:
    """The title: how many came to which decision."""
    known = table[table.seeds.fillna(0) > 0]
    counts = known.decision.value_counts()
    words = ", ".join(f"{count} {decision}" for decision, count in counts.items())
    return f"Each factor alone, effect on the final loss: {words}"


def _factor_key(figure: Figure, table: pd.DataFrame) -> None:
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"ls": "", "ms": 5, "markeredgecolor": INK}
    handles = [
        Line2D([], [], marker="|", color=FAINT, ls="", ms=8, label="rounding alone: distance of the base from float64"),
        Line2D([], [], marker="o", markerfacecolor=FAINT, label="made here", **dot),
    ]
    if (table.source == "recorded").any():
        machines = ", ".join(sorted(set(table.machine[table.source == "recorded"])))
        handles.append(Line2D([], [], marker="o", markerfacecolor="white", label=f"recorded on {machines}", **dot))
    if table.emulated.fillna(False).any():
        handles.append(Line2D([], [], marker="^", markerfacecolor=FAINT, label="emulated", **dot))
    for kind in sorted({str(base).partition(":")[0] for base in table.base}):
        label = "changed on a CPU" if kind == "cpu" else "changed on a GPU"
        handles.append(Line2D([], [], marker="s", ls="", ms=5, color=_tint({"base": kind}), label=label))
    figure.legend(handles=handles, fontsize=7.5, frameon=False, loc="outside lower center", ncols=2)
