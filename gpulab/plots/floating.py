"""Floating point: the bits of numbers, sums in many orders, a growing difference, and factors compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gpulab.errors import UsageError
from gpulab.plots.style import CPU_COLOURS, FAINT, GPU_COLOURS, INK, Picture, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from gpulab.factors import FactorTable

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
    from gpulab.numerics import FORMATS

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

    from gpulab.numerics import round_to
    from gpulab.roundings import format_bits

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


# --- decoders --------------------------------------------------------------------------------------------


def decoded(
    frame: Any, decoders: tuple[str, ...] | None = None, quality: int = 75, subsampling: str = "4:2:0"
) -> Picture:
    """One frame (3, H, W) as each decoder makes it of the same JPEG file, and how far it is from the first."""
    from gpulab.decoders import available_decoders, decode_jpeg, encode_jpeg

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


# --- factors ---------------------------------------------------------------------------------------------


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
