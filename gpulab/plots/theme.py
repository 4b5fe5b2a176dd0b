"""The theme of all figures, on seaborn and matplotlib: colours, markers, axes and legends.

A setting has the same colour in every figure; CPU settings are blue and green, GPU settings orange
and purple. Runs made on this machine are filled, recorded runs are hollow, emulated runs are
dashed. Every seed is a point.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from contextlib import ContextDecorator
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import ArrayLike

from gpulab.picture import Picture
from gpulab.wording import Level, label_levels

# Okabe and Ito's palette, safe for colour-blind readers. CPUs are blue and green.
COLOURS = {
    "cpu": "#0072B2",
    "cpu:threads=1": "#56B4E9",
    "cpu:isa=avx2": "#009E73",
    "cpu:precision=float64": "#332288",
    "cpu:threads=1,precision=float64": "#8877DD",
    "cpu:threads=1,emulate=tf32": "#117733",
    "cpu:threads=1,emulate=bfloat16": "#999933",
    "cpu:threads=1,precision=bfloat16": "#44AA99",
    "cuda:tf32=off": "#D55E00",
    "cuda:tf32=on": "#E69F00",
    "cuda:cudnn=off": "#CC79A7",
    "cuda:deterministic=on": "#882255",
    "cuda:precision=float64": "#AA4499",
}
OTHER_CPU = ("#44AA99", "#117733", "#88CCEE")
OTHER_GPU = ("#AA4499", "#DDCC77", "#CC6677")
PAGE = 7.2  # inches, the width of a figure
INK = "#262626"
FAINT = "#999999"
ON_CPU = COLOURS["cpu"]  # the colours of a device under any setting
ON_GPU = COLOURS["cuda:tf32=off"]
Style = dict[str, Any]  # keywords of matplotlib, whose values have many types
RIGHT_OF_AXES: Style = {
    "xycoords": ("axes fraction", "data"),
    "va": "center",
    "annotation_clip": False,
}
THEME: Style = {
    **sns.axes_style("ticks"),
    **sns.plotting_context("paper", font_scale=0.9),
    "figure.titlesize": 10,
}
THEME |= dict.fromkeys(
    ("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False
)
# Decorates each function that draws. `rc_context` makes a new context for each call, so such
# functions may be nested.
with_theme: ContextDecorator = rc_context(THEME)


def canvas(
    panels: int = 1, height: float = 3.6, rows: int = 1, width: float = PAGE, **shared: Any
) -> tuple[Figure, Sequence[Axes]]:
    """Make a figure of page width, or `width` inches, with `panels` panels in each row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, panels, squeeze=False, **shared).flat)


def finish_figure(
    figure: Figure, title: str, alt: str, keys: Iterable[Artist] = (), columns: int = 2
) -> Picture:
    """Add a title and a legend to a figure, and return it with its text alternative.

    The legend below the panels contains every labelled artist of the panels, and those in `keys`.
    It replaces the legends of the panels. The title is appended to the text alternative.
    """
    figure.suptitle(title)
    labelled: dict[str, Artist] = {}
    for axes in figure.axes:
        artists, labels = axes.get_legend_handles_labels()
        labelled |= dict(zip(labels, artists, strict=True))
        legend = axes.get_legend()
        if legend:
            handles = zip(legend.texts, legend.legend_handles, strict=True)
            labelled |= {text.get_text(): handle for text, handle in handles if handle is not None}
            legend.remove()
    labelled |= {str(artist.get_label()): artist for artist in keys}
    if labelled:
        figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=columns)
    return Picture(figure, alt if title in alt else f"{alt} {title}.")


# --- colours and marks ----------------------------------------------------------------------------


def colour(setting: str) -> str:
    """Return the colour that a setting has in every figure.

    Common settings have their own colours. Every other setting has one of three colours for its
    kind of device, chosen by a checksum of its text.

    >>> colour("cpu"), colour("cuda:tf32=off")
    ('#0072B2', '#D55E00')
    """
    palette = OTHER_CPU if setting.startswith("cpu") else OTHER_GPU
    return COLOURS.get(setting, palette[zlib.crc32(setting.encode()) % len(palette)])


def level_colours(factor: str, levels: Sequence[Level]) -> dict[Level, str]:
    """Return a colour for each level of a factor.

    A setting has its own colour. Levels of other factors have colours that do not stand for a
    device, because blue is a CPU and orange a GPU in all figures.
    """
    if factor == "setting":
        return {level: colour(str(level)) for level in levels}
    # The first two colours of the palette, green and orange, resemble those of devices.
    other_colours = sns.color_palette("Dark2").as_hex()[2:]
    return dict(zip(levels, itertools.cycle(other_colours), strict=False))


def name_levels(
    frame: pd.DataFrame, factor: str = "setting"
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return the frame with a column `name`, the level in words, and the colour of each name.

    seaborn uses them as `hue` and `palette`. Settings are in the order of `COLOURS`, with other
    settings last. Levels of other factors are in the order of the frame.
    """
    levels = list(frame[factor].unique())
    if factor == "setting":
        levels.sort(key=[*COLOURS, *sorted(levels)].index)
    level_names = label_levels(levels, factor)
    tints = level_colours(factor, levels)
    tints_by_name = {level_names[level]: tints[level] for level in levels}
    return frame.assign(name=frame[factor].map(level_names)), tints_by_name


def is_recorded(frame: pd.DataFrame) -> pd.Series:
    """Return which rows were recorded elsewhere: none, if there is no column `recorded`.

    >>> [
    ...     is_recorded(pd.DataFrame(table)).tolist()
    ...     for table in ({"recorded": [True, False]}, {"seed": [0]})
    ... ]
    [[True, False], [False]]
    """
    return frame.get("recorded", pd.Series(False, frame.index)).astype(bool)


def draw_points(
    axes: Axes,
    x: ArrayLike,
    y: ArrayLike,
    tint: ArrayLike,
    is_hollow: ArrayLike = False,
    **style: Any,
) -> None:
    """Draw points in one colour or in a colour each; hollow if `is_hollow`, otherwise filled."""
    faces = np.atleast_1d(np.where(is_hollow, "white", tint))
    edges = np.atleast_1d(tint)
    axes.scatter(
        x,
        y,
        **{
            "s": 26,
            "facecolors": faces,
            "edgecolors": edges,
            "linewidths": 1.1,
            "zorder": 3,
            **style,
        },
    )


def legend_key(label: str, **style: Any) -> Line2D:
    """Make a legend entry: a line, or a point if `ls=""` and `marker` are given."""
    return Line2D([], [], label=label, **style)


def origin_keys(frame: pd.DataFrame) -> list[Line2D]:
    """Make legend entries for filled and hollow markers, with the machines of the runs."""
    recorded = is_recorded(frame)
    keys = []
    for is_hollow in sorted(recorded.unique()):
        label = "recorded" if is_hollow else "made here"
        if "machine" in frame:
            machines = frame.machine[recorded == is_hollow].dropna().astype(str)
            label += f" on {', '.join(sorted(machines.unique()))}"
        keys.append(
            legend_key(label, ls="", marker="o", ms=5, mec=INK, mfc="white" if is_hollow else FAINT)
        )
    return keys


# --- axes -----------------------------------------------------------------------------------------


def power_of_ten(value: float, _: float | None = None) -> str:
    """Return a power of ten as the label of an axis.

    >>> power_of_ten(0), power_of_ten(1e-3), power_of_ten(-100.0)
    ('0', '10⁻³', '−10²')
    """
    if value == 0:
        return "0"
    exponent = str(round(np.log10(abs(value)))).translate(
        str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    )
    sign = "−" if value < 0 else ""
    return f"{sign}10{exponent}"


def log_scale(axis: XAxis | YAxis, least: float = 2.0) -> None:
    """Use a log scale if the data span a factor of `least`; put ticks at 1, 2 and 5 if they fit."""
    low, high = getattr(axis.axes.dataLim, f"interval{axis.axis_name}")  # `intervalx` for x
    if not low > 0 or high / low < least:  # negated, because NaN is not above zero either
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    tick_digits = (1.0, 2.0, 5.0) if high / low < 100 else (1.0,)
    axis.set_major_locator(LogLocator(10, subs=tick_digits, numticks=9))
    axis.set_major_formatter("{x:,g}" if low > 1e-4 and high < 1e6 else power_of_ten)
    axis.set_minor_locator(NullLocator())


def log_scales(axes: Axes) -> None:
    """Use a log scale on each axis whose data span a large enough range; see `log_scale`."""
    for axis in (axes.xaxis, axes.yaxis):
        log_scale(axis)
