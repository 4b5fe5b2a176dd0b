"""The one visual language of all figures: colours, what is filled or hollow, axes and their keys.

A setting has the same colour everywhere, CPU settings in one family and GPU settings in another.
Runs made here are filled, recorded ones hollow. Every seed is a point.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gpulab.report import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, safe for colour-blind readers: blues and greens compute on CPUs.
CPU_COLOURS = {
    "cpu": "#0072B2",
    "cpu:threads=1": "#56B4E9",
    "cpu:isa=avx2": "#009E73",
    "cpu:precision=float64": "#332288",
    "cpu:threads=1,precision=float64": "#8877DD",
    "cpu:threads=1,emulate=tf32": "#117733",
    "cpu:threads=1,emulate=bfloat16": "#999933",
}
GPU_COLOURS = {
    "cuda:tf32=off": "#D55E00",
    "cuda:tf32=on": "#E69F00",
    "cuda:cudnn=off": "#CC79A7",
    "cuda:deterministic=on": "#882255",
    "cuda:precision=float64": "#AA4499",
    "cuda:precision=bfloat16": "#DDCC77",
}
OTHER_CPU, OTHER_GPU = ("#44AA99", "#117733", "#88CCEE"), ("#AA4499", "#DDCC77", "#CC6677")
INK, FAINT = "#222222", "#999999"


def save(picture: Picture, file: str | Path) -> None:
    """Write a picture to a PNG file."""
    picture.save(file)


def colour(setting: str) -> str:
    """The colour that a setting has in every figure."""
    known = CPU_COLOURS | GPU_COLOURS
    if setting in known:
        return known[setting]
    others = OTHER_CPU if setting.startswith("cpu") else OTHER_GPU
    return others[zlib.crc32(setting.encode()) % len(others)]


def canvas(panels: int, height: float, share_rows: bool = False) -> tuple[Figure, Sequence[Axes]]:
    """A figure as wide as a page, `height` in inches, with one or two panels side by side."""
    with sns.axes_style("ticks"):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False, sharey=share_rows)[0]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def points(axes: Axes, x: Any, y: Any, setting: str, recorded: bool) -> None:
    """Points of one setting: filled for runs made here, hollow for recorded ones."""
    tint = colour(setting)
    face = "white" if recorded else tint
    axes.scatter(x, y, s=30, color=face, edgecolors=tint, linewidths=1.2, zorder=3, alpha=0.9)


def key(figure: Figure, frame: pd.DataFrame, line: bool = False) -> None:
    """A legend below the panels: what is hollow, or which colour is which setting."""
    from matplotlib.lines import Line2D

    if line:
        handles = [Line2D([], [], color=colour(setting), label=setting) for setting in setting_order(frame)]
    else:
        handles = []
        for recorded in sorted(frame.recorded.unique()):
            machines = ", ".join(sorted(frame[frame.recorded == recorded].machine.unique()))
            label = f"recorded on {machines}" if recorded else f"made here, on {machines}"
            face = "white" if recorded else FAINT
            handles.append(Line2D([], [], ls="", marker="o", markeredgecolor=INK, markerfacecolor=face, label=label))
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside lower center", ncols=4 if line else 1)


def setting_order(frame: pd.DataFrame) -> list[str]:
    """The settings of a frame, in the order of the palette, the unknown ones last."""
    known = [*CPU_COLOURS, *GPU_COLOURS]
    return sorted(frame.setting.unique(), key=lambda s: (known.index(s) if s in known else len(known), s))


def metric_label(metric: str) -> str:
    """A metric's name for an axis, with its unit."""
    names = {
        "final_loss": "final loss (mean squared error per frame)",
        "heldout_loss": "held-out loss (mean squared error per frame)",
        "loss": "loss (mean squared error per frame)",
    }
    return names.get(metric, metric)


def loss_scale(axes: Axes) -> None:
    """Logarithmic where the losses span a factor of two or more, with plain numbers at the ticks."""
    low, high = axes.dataLim.intervaly
    if not low > 0 or high / low < 2:
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if high / low < 30:
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if _leads(value) else ""))
    axes.tick_params(axis="y", which="minor", labelsize=8)


def _leads(value: float) -> bool:
    return f"{value:.0e}"[0] in "25"
