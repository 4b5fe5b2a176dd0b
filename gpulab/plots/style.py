"""The one visual language of all figures: colours, what is filled or hollow, axes and their keys.

A setting has the same colour everywhere, CPU settings in one family and GPU settings in another.
Runs made here are filled, recorded ones hollow, emulated ones dashed. Every seed is a point.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter, LogLocator, NullFormatter, NullLocator

from gpulab.plots.names import names
from gpulab.report import Picture
from gpulab.settings import Setting

# Okabe and Ito's palette, safe for colour-blind readers: blues and greens compute on CPUs.
COLOURS = {
    "cpu": "#0072B2",
    "cpu:threads=1": "#56B4E9",
    "cpu:isa=avx2": "#009E73",
    "cpu:precision=float64": "#332288",
    "cpu:precision=bfloat16": "#667788",
    "cpu:threads=1,precision=float64": "#8877DD",
    "cpu:threads=1,emulate=tf32": "#117733",
    "cpu:threads=1,emulate=bfloat16": "#999933",
    "cpu:threads=1,precision=bfloat16": "#44AA99",
    "cuda:tf32=off": "#D55E00",
    "cuda:tf32=on": "#E69F00",
    "cuda:cudnn=off": "#CC79A7",
    "cuda:deterministic=on": "#882255",
    "cuda:precision=float64": "#AA4499",
    "cuda:precision=bfloat16": "#DDCC77",
}
# Settings whose colours look alike, to some eyes, differ in shape; triangles that point up or left are emulated.
SHAPES = dict(zip(COLOURS, "osPhvD^<soDph^v", strict=True))
OTHER_CPU, OTHER_GPU = ("#44AA99", "#117733", "#88CCEE"), ("#AA4499", "#DDCC77", "#CC6677")
INK, FAINT = "#222222", "#999999"
ON_CPU, ON_GPU = COLOURS["cpu"], COLOURS["cuda:tf32=off"]  # of a device, whatever the setting
Look = dict[str, Any]  # how matplotlib is to draw a thing
COLOURED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
AXES: Look = {"axes.labelsize": 9, "axes.axisbelow": True, "lines.solid_capstyle": "round", "patch.edgecolor": "white"}
AXES |= {"patch.force_edgecolor": True, "grid.color": "0.8", **dict.fromkeys(COLOURED, INK)}
BESIDE: Look = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}  # right of the axes
LOSSES = {"final_loss": "final loss", "heldout_loss": "held-out loss", "loss": "loss"}  # which have a unit


def canvas(panels: int, height: float, share_rows: bool = False, rows: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """A figure as wide as a page, `height` in inches, with panels side by side, in one row or more."""
    with rc_context(AXES):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        axes = list(figure.subplots(rows, panels, squeeze=False, sharey=share_rows).flat)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(which="both", labelsize=8)
    return figure, axes


def finished(
    figure: Figure, title: str, alt: str, keys: Iterable[Artist] = (), columns: int = 2, size: float = 8
) -> Picture:
    """The figure with its title above, its keys below in so many columns, and its text alternative, title included."""
    figure.suptitle(title, fontsize=10)
    if keys := list(keys):
        figure.legend(handles=keys, fontsize=size, frameon=False, loc="outside lower center", ncols=columns)
    for text in figure.findobj(Text):  # a `$` in a name is shown as that
        text.set_parse_math(False)
    for axes in figure.axes:
        axes.title.set_fontsize(9)
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), LogFormatter):  # whose numbers alone are mathematics
                for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                    tick.label1.set_parse_math(True)
    return Picture(figure, alt if title in alt else f"{alt} {title}.")


# --- colours and marks -----------------------------------------------------------------------------------


def colour(setting: str) -> str:
    """Look up the colour that a setting has in every figure.

    Args:
        setting: The setting as text, such as `cpu:threads=1`.

    Returns:
        The colour as a hexadecimal text. Usual settings have one of their own. Every other has one of three for its
        device, so that two of them may look alike.

    Examples:
        >>> import gpulab as gl
        >>> gl.plots.colour("cpu"), gl.plots.colour("cuda:tf32=off")
        ('#0072B2', '#D55E00')
    """
    palette = OTHER_CPU if setting.startswith("cpu") else OTHER_GPU
    return COLOURS.get(setting, palette[zlib.crc32(setting.encode()) % len(palette)])


def shape(setting: str) -> str:
    """The marker that a setting has where colour alone does not tell."""
    fallback = "^" if Setting.parse(setting).emulated else "osDhp"[zlib.crc32(setting.encode()) % 5]
    return SHAPES.get(setting, fallback)


def level_colours(factor: str, levels: Sequence[Any]) -> dict[Any, str]:
    """A colour for each level of a factor: a setting's own, or one after the other."""
    if factor == "setting":
        return {level: colour(str(level)) for level in levels}
    palette = [*COLOURS.values(), *OTHER_CPU, *OTHER_GPU]
    palette.insert(1, palette.pop(4))  # the first two stand far apart
    return {level: palette[index % len(palette)] for index, level in enumerate(levels)}


def setting_order(frame: pd.DataFrame) -> list[str]:
    """The settings of a frame, in the order of the palette, the unknown ones last."""
    ranks = {setting: rank for rank, setting in enumerate(COLOURS)}
    return sorted(frame.setting.unique(), key=lambda setting: (ranks.get(setting, len(ranks)), setting))


def dashes(setting: str) -> str:
    """The line of a setting: dashed where it is emulated."""
    return "--" if Setting.parse(setting).emulated else "-"


def is_recorded(frame: pd.DataFrame) -> pd.Series:
    """Which rows were recorded elsewhere; none where the frame does not say."""
    return frame.get("recorded", pd.Series(False, frame.index)).astype(bool)


def points(axes: Axes, x: Any, y: Any, tint: str, hollow: bool = False, **look: Any) -> None:
    """Points of one colour: filled for what was made here, hollow for what was recorded."""
    face = "white" if hollow else tint
    axes.scatter(x, y, **{"s": 30, "color": face, "edgecolors": tint, "linewidths": 1.2, "zorder": 3, **look})


def spread(count: int, reach: float = 0.15) -> np.ndarray:
    """How far beside its row each of so many points stands; one alone stands in it."""
    return np.linspace(-reach, reach, count) * (count > 1)


def key(label: str, **look: Any) -> Line2D:
    """A line, or with `ls=""` and a `marker` a point, and what it means."""
    return Line2D([], [], label=label, **look)


def point_key(label: str, hollow: bool = False, **look: Any) -> Line2D:
    """A grey point, or a hollow one."""
    face = "white" if hollow else FAINT
    return key(label, **{"ls": "", "marker": "o", "markeredgecolor": INK, "markerfacecolor": face, **look})


def margin_band(axes: Axes, margin: float, unit: float = 1.0, unit_name: str = "") -> Patch:
    """Draw the band of a margin, on an axis that counts in so large a unit; its key, in a named unit as well."""
    axes.axvspan(-margin / unit, margin / unit, color=FAINT, alpha=0.22, lw=0, zorder=0)
    return margin_key(margin, f"±{margin / unit:.2g} {unit_name}, " if unit_name else "")


def margin_key(margin: float, before: str = "") -> Patch:
    """The band of a margin."""
    return Patch(color=FAINT, alpha=0.22, lw=0, label=f"margin, {before}±{margin:.2g}")


def setting_keys(frame: pd.DataFrame, shapes: bool = False, **look: Any) -> list[Line2D]:
    """Which colour, and with `shapes` which marker, is which setting."""
    return [
        key(words, **{"color": colour(s), "ls": dashes(s), "marker": shape(s) if shapes else None, **look})
        for s, words in names(setting_order(frame)).items()
    ]


def origin_keys(
    frame: pd.DataFrame, made_here: str = "made here, on ", elsewhere: str = "recorded on ", **look: Any
) -> list[Line2D]:
    """What is filled and what is hollow, with the machines where it was made."""
    recorded, keys = is_recorded(frame), []
    for hollow in sorted(recorded.unique()):
        machines = sorted(set(map(str, frame.machine[recorded == hollow].dropna()))) if "machine" in frame else []
        keys.append(point_key((elsewhere if hollow else made_here) + ", ".join(machines), hollow, **look))
    return keys


# --- axes ------------------------------------------------------------------------------------------------


def metric_label(metric: str, experiments: Iterable[str] = ()) -> str:
    """A metric's name for an axis, with its unit: PredNet's loss is that of a frame, any other that of an image."""
    units = {"frame" if name == "prednet" else "image" for name in experiments}
    per = f" per {units.pop()}" if len(units) == 1 else ""
    return f"{LOSSES[metric]} (mean squared error{per})" if metric in LOSSES else metric


LABEL_GAP = 0.07  # between names right of the axes, as a share of their height


def end_labels(axes: Axes, labels: Sequence[tuple[str, float, Look]]) -> None:
    """Name lines right of the axes, at the height where each ends: (name, its last value, its look), kept apart."""
    (low, high), scale = axes.get_ylim(), axes.yaxis.get_transform().transform
    bottom, top = scale(np.array([low, high]))
    ends = [((scale(np.array([value]))[0] - bottom) / (top - bottom), name, look) for name, value, look in labels]
    above = -np.inf
    for height, name, look in sorted(ends, key=lambda end: end[:2]):
        above = max(height, above + LABEL_GAP)
        at: Look = {"transform": axes.transAxes, "clip_on": False}
        axes.plot([1.01, 1.04], [above, above], **at, **look)
        axes.text(1.05, above, name, va="center", fontsize=8, **at)


def log_scale(
    axis: XAxis | YAxis, low: float, high: float, fine: float = 100, numbers: str = "{x:,g}", least: float = 4
) -> None:
    """Logarithmic where the values span a factor of `least` or more; ticks at 1, 2 and 5 where it is below `fine`."""
    if not low > 0 or high / low < least:
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if high / low < fine else (1.0,)))
    axis.set_major_formatter(numbers)
    axis.set_minor_locator(NullLocator())


def loss_scale(axes: Axes) -> None:
    """The vertical axis logarithmic where the losses that are drawn span a factor of two or more."""
    low, high = axes.dataLim.intervaly
    log_scale(axes.yaxis, low, high, fine=30, numbers="{x:g}", least=2)


def power_of_ten(exponent: int) -> str:
    """Ten to this power, as a label of an axis."""
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def decades(axis: XAxis | YAxis, ticks: int = 9) -> None:
    """Logarithmic, with at most so many labelled powers of ten."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(10, numticks=ticks))
    axis.set_minor_formatter(NullFormatter())


# --- shapes of many figures ------------------------------------------------------------------------------


def named_lines(axes: Axes, frame: pd.DataFrame, x: str, y: str) -> None:
    """A line with its points for each `name`, in the colour of its `setting`; hollow where it was `recorded`.

    A column `marker` has the shape of the points where it is not a disc.
    """
    for name, rows in frame.groupby("name", sort=False):
        first = rows.iloc[0]
        tint, marker = colour(first.setting), first.get("marker", "o")
        face = "white" if first.recorded else tint
        axes.plot(rows[x], rows[y], label=name, color=tint, lw=1.2, marker=marker, ms=5.5, mfc=face, mew=1.2, zorder=3)


def run_lines(
    axes: Axes, frame: pd.DataFrame, x: str, y: str, by: Sequence[str], tints: Mapping[Any, str], **look: Any
) -> None:
    """A line for each group `by` some columns, in the colour of what the first of them says."""
    for (level, *_), rows in frame.groupby([*by], sort=False):
        axes.plot(rows[x], rows[y], **{"color": tints[level], **look})


class Row(NamedTuple):
    """Values that stand in a row of a figure, a point each, and words to their right."""

    name: str
    values: Any
    tint: str
    hollow: bool = False
    words: str = ""


def rows_of_points(rows: Sequence[Row], label: str, reference: float, room: float = 0.4) -> tuple[Figure, Axes]:
    """A row for each name with every value as a point, around a line; `room` for a row is in inches.

    Words stand right of the axes, or in the row where its values are NaN.
    """
    figure, (axes,) = canvas(1, height=1.3 + room * len(rows))
    axes.axvline(reference, color=INK, lw=0.8, zorder=1)
    size = 8 if room > 0.3 else 7
    for position, row in enumerate(rows):
        if count := len(row.values):
            points(axes, row.values, position + spread(count), row.tint, row.hollow, s=18, alpha=0.9)
        inside = count and np.isnan(row.values).all()
        axes.annotate(f" {row.words}", (0 if inside else 1, position), fontsize=size, **BESIDE)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=size)
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel=label)
    return figure, axes


def stacked_shares(
    part_seconds: pd.DataFrame, total_seconds: pd.Series, tints: Mapping[str, str], label: str, headline: str, alt: str
) -> Picture:
    """A bar for each row of seconds, divided by the shares of its columns, and beside it the whole in milliseconds."""
    figure, (axes,) = canvas(1, height=1.1 + 0.3 * len(part_seconds))
    shares = part_seconds[[*tints]].div(part_seconds.sum(axis=1), axis=0)
    shares.plot.barh(stacked=True, color=tints, width=0.7, ax=axes, legend=False)
    bars: Any
    for bars, tint in zip(axes.containers, tints.values(), strict=True):
        words = [f"{bar.get_width():.0%}" if bar.get_width() > 0.06 else "" for bar in bars]
        ink = "white" if sum(to_rgb(tint)) < 1.5 else "black"
        axes.bar_label(bars, words, label_type="center", color=ink, fontsize=8)
    for row, seconds in enumerate(total_seconds):
        axes.annotate(f"{1e3 * seconds:.3g} ms", (1.01, row), va="center", fontsize=8, annotation_clip=False)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel=label, ylabel="")
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    return finished(figure, headline, alt, axes.get_legend_handles_labels()[0], 3)
