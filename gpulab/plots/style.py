"""The one theme of all figures: colours, what is filled or hollow, axes and their keys. seaborn and matplotlib draw.

A setting has the same colour everywhere, CPU settings in one family and GPU settings in another.
Runs made here are filled, recorded ones hollow, emulated ones dashed. Every seed is a point. A setting, or another
level of a factor, is called by words in place of options, in figures and in sentences. At the end, `Picture`: a figure
with a text that says what it shows, and how a notebook, a page and a file have it.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import seaborn as sns
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from gpulab import files
from gpulab.errors import UsageError
from gpulab.settings import Setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN_MEMORY, SHARED_MEMORY = "own memory", "shared memory"
COPIED, OVERWRITTEN = "copied frames", "overwritten frames"  # the two conditions of the anomaly
LOADERS = {"copied": COPIED, "window": COPIED, "reused": OVERWRITTEN, "imitated": OVERWRITTEN}
DEVICES = {"cpu": "CPU", "cuda": "GPU", "mps": "Apple GPU", "xpu": "Intel GPU"}
ISA = {"sse4": "SSE4", "avx2": "AVX2", "avx512": "AVX-512"}
EMULATED = {"tf32": "TF32", "ampere": "an Ampere card", "hopper": "a Hopper card"}
SWITCHES = {
    "tf32": {True: "TF32", False: "no TF32"},
    "cudnn": {True: "cuDNN", False: "no cuDNN"},
    "denormals": {True: "tiniest numbers kept", False: "tiniest numbers as zero"},
    "deterministic": {True: "deterministic", False: "any order of sums"},
}
OPTIMIZERS = {"sgd": "SGD", "momentum": "SGD with momentum", "rmsprop": "RMSprop", "adam": "Adam"}
AGAIN = " again"  # at the end of a setting that was run a second time


def setting_words(setting: str | Setting) -> str:
    """A setting in words.

    >>> setting_words("cpu:threads=1"), setting_words("cuda:tf32=on"), setting_words("cuda:tf32=off again")
    ('CPU, one thread', 'GPU, TF32', 'GPU, no TF32, again')
    >>> setting_words("cpu:threads=3,denormals=off"), setting_words("cpu:isa=avx512,precision=float64")
    ('CPU, 3 threads, tiniest numbers as zero', 'CPU, AVX-512, float64')
    >>> setting_words("cuda:1:tf32=off,cudnn=off,deterministic=on"), setting_words("mine")
    ('GPU 1, no TF32, no cuDNN, deterministic', 'mine')
    >>> setting_words("cpu:emulate=tf32,order=pairwise")
    'CPU, emulating TF32, sums pairwise'
    """
    text = str(setting)
    if text.endswith(AGAIN):
        return f"{setting_words(text.removesuffix(AGAIN))},{AGAIN}"
    try:
        parsed = Setting.parse(text)
    except UsageError:  # the frame is of somebody else, whose levels are not settings of ours
        return text
    device, _, number = parsed.device.partition(":")
    words = [f"{DEVICES[device]} {number}".rstrip()]
    if parsed.threads:
        words.append("one thread" if parsed.threads == 1 else f"{parsed.threads} threads")
    if parsed.isa:
        words.append(ISA.get(parsed.isa, parsed.isa))
    words += [said[value] for name, said in SWITCHES.items() if (value := getattr(parsed, name)) is not None]
    if parsed.precision:
        words.append(parsed.precision)
    if parsed.emulate:
        words.append(f"emulating {EMULATED.get(parsed.emulate, parsed.emulate)}")
    if parsed.order:
        words.append(f"sums {parsed.order}")
    return ", ".join(words)


def condition_words(loader: str, setting: str) -> str:
    """Whether frames are copied or overwritten, by the loader and where it trains: `reused`, the published line,
    copies on a GPU.

    >>> condition_words("reused", "cpu"), condition_words("reused", "cuda:tf32=off")
    ('overwritten frames', 'copied frames')
    """
    copies = loader == "reused" and not setting.startswith("cpu")
    return COPIED if copies else LOADERS[loader]


def optimizer_words(optimizer: str) -> str:
    """An optimiser as people write it.

    >>> optimizer_words("adam(eps=0.0001)")
    'Adam (eps=0.0001)'
    """
    name, bracket, options = optimizer.partition("(")
    return f"{OPTIMIZERS.get(name, name)} {bracket}{options}".rstrip()


def names(levels: Iterable[Any], factor: str = "setting") -> dict[Any, str]:
    """What each level of a factor is called; levels that would be called alike keep their exact names.

    >>> names(["copied", "reused"], "loader")
    {'copied': 'copied frames', 'reused': 'overwritten frames'}
    >>> names(["copied", "window"], "loader"), names(["cpu:threads=1", "cpu: threads=1"])
    ({'copied': 'copied', 'window': 'window'}, {'cpu:threads=1': 'cpu:threads=1', 'cpu: threads=1': 'cpu: threads=1'})
    >>> names(["cpu", 3], "width")
    {'cpu': 'cpu', 3: '3'}
    """
    words = {"setting": setting_words, "loader": lambda loader: LOADERS.get(loader, str(loader))}.get(factor, str)
    called = {level: words(level) for level in levels}
    times = Counter(called.values())
    return {level: words if times[words] == 1 else str(level) for level, words in called.items()}


# Okabe and Ito's palette, safe for colour-blind readers: blues and greens compute on CPUs.
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
OTHER_CPU, OTHER_GPU = ("#44AA99", "#117733", "#88CCEE"), ("#AA4499", "#DDCC77", "#CC6677")
INK, FAINT = "#262626", "#999999"
ON_CPU, ON_GPU = COLOURS["cpu"], COLOURS["cuda:tf32=off"]  # of a device, whatever the setting
Look = dict[str, Any]  # how matplotlib is to draw a thing
BESIDE: Look = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}  # right of the axes
THEME: Look = {**sns.axes_style("ticks"), **sns.plotting_context("paper", font_scale=0.9), "figure.titlesize": 10}
THEME |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False)
themed = rc_context(THEME)  # decorates whatever draws: all that it draws looks alike, and nothing else changes
METRICS = {"index_fraction": "share of directions that lead down", "heldout_loss": "held-out loss"}
UNITS = {"prednet": "frame", "autoencoder": "image", "whitener": "image"}  # what a network's loss is the error of


def canvas(panels: int = 1, height: float = 3.6, rows: int = 1, **shared: Any) -> tuple[Figure, Sequence[Axes]]:
    """A figure as wide as a page, `height` in inches, with panels side by side, in one row or more."""
    figure = Figure(figsize=(7.2, height), layout="constrained")
    return figure, list(figure.subplots(rows, panels, squeeze=False, **shared).flat)


def finished(figure: Figure, title: str, alt: str, keys: Iterable[Artist] = (), columns: int = 2) -> Picture:
    """The figure with its title above and its text alternative, title included.

    Below it stand the keys: of all that has a label in a panel, and of what is given.
    """
    figure.suptitle(title)
    labelled: dict[str, Any] = {}
    for axes in figure.axes:
        labelled |= {label: artist for artist, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        if legend := axes.get_legend():
            labelled |= {text.get_text(): line for text, line in zip(legend.texts, legend.legend_handles, strict=True)}
            legend.remove()
    labelled |= {str(artist.get_label()): artist for artist in keys}
    if labelled:
        figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=columns)
    return Picture(figure, alt if title in alt else f"{alt} {title}.")


# --- colours and marks -----------------------------------------------------------------------------------


def colour(setting: str) -> str:
    """The colour that a setting has in every figure.

    Usual settings have one of their own; every other has one of three for its device.

    >>> colour("cpu"), colour("cuda:tf32=off")
    ('#0072B2', '#D55E00')
    """
    palette = OTHER_CPU if setting.startswith("cpu") else OTHER_GPU
    return COLOURS.get(setting, palette[zlib.crc32(setting.encode()) % len(palette)])


def level_colours(factor: str, levels: Sequence[Any]) -> dict[Any, str]:
    """A colour for each level of a factor: a setting's own, or one after the other, of which none stands for a device.

    Blue is a CPU and orange a GPU in all figures.
    """
    if factor == "setting":
        return {level: colour(str(level)) for level in levels}
    purple_and_on = sns.color_palette("Dark2").as_hex()[2:]
    return dict(zip(levels, itertools.cycle(purple_and_on), strict=False))


def named(frame: pd.DataFrame, factor: str = "setting") -> tuple[pd.DataFrame, dict[str, str]]:
    """The frame with a column `name`, what each level is called, and the colour of each name, for seaborn's `hue`.

    Settings come in the order of the palette, the unknown ones last; other levels as they stand in the frame.
    """
    levels = list(frame[factor].unique())
    if factor == "setting":
        levels.sort(key=[*COLOURS, *sorted(levels)].index)
    called, tints = names(levels, factor), level_colours(factor, levels)
    return frame.assign(name=frame[factor].map(called)), {called[level]: tints[level] for level in levels}


def is_recorded(frame: pd.DataFrame) -> pd.Series:
    """Which rows were recorded elsewhere; none where the frame does not say.

    >>> [is_recorded(pd.DataFrame(table)).tolist() for table in ({"recorded": [True, False]}, {"seed": [0]})]
    [[True, False], [False]]
    """
    return frame.get("recorded", pd.Series(False, frame.index)).astype(bool)


def points(axes: Axes, x: Any, y: Any, tint: Any, hollow: Any = False, **look: Any) -> None:
    """Points of one colour, or each of its own: filled for what was made here, hollow for what was recorded."""
    faces, edges = np.atleast_1d(np.where(hollow, "white", tint)), np.atleast_1d(tint)
    axes.scatter(x, y, **{"s": 26, "facecolors": faces, "edgecolors": edges, "linewidths": 1.1, "zorder": 3, **look})


def key(label: str, **look: Any) -> Line2D:
    """A line, or with `ls=""` and a `marker` a point, and what it means."""
    return Line2D([], [], label=label, **look)


def origin_keys(frame: pd.DataFrame) -> list[Line2D]:
    """What is filled and what is hollow, with the machines where it was made."""
    recorded, keys = is_recorded(frame), []
    for hollow in sorted(recorded.unique()):
        label = "recorded" if hollow else "made here"
        if "machine" in frame:
            label += f" on {', '.join(sorted(set(map(str, frame.machine[recorded == hollow].dropna()))))}"
        keys.append(key(label, ls="", marker="o", ms=5, mec=INK, mfc="white" if hollow else FAINT))
    return keys


# --- axes ------------------------------------------------------------------------------------------------


def metric_label(metric: str, experiments: Iterable[str] = ()) -> str:
    """A metric in words for an axis; the loss of networks of gpulab's with its unit.

    >>> metric_label("final_loss", ["prednet"]), metric_label("heldout_loss", ["autoencoder", "autoencoder"])
    ('final loss (mean squared error per frame)', 'held-out loss (mean squared error per image)')
    >>> metric_label("final_loss"), metric_label("final_loss", ["prednet", "mine"]), metric_label("index_fraction")
    ('final loss', 'final loss', 'share of directions that lead down')
    """
    words, units = METRICS.get(metric, metric.replace("_", " ")), {UNITS.get(name) for name in experiments}
    if not metric.endswith("loss") or None in units or len(units) != 1:
        return words
    return f"{words} (mean squared error per {units.pop()})"


def power_of_ten(value: float, _: Any = None) -> str:
    """A power of ten, as a label of an axis.

    >>> power_of_ten(0), power_of_ten(1e-3), power_of_ten(-100.0)
    ('0', '10⁻³', '−10²')
    """
    if value == 0:
        return "0"
    exponent = str(round(np.log10(abs(value)))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{'−' if value < 0 else ''}10{exponent}"


def log_scale(axis: XAxis | YAxis, least: float = 2.0) -> None:
    """Logarithmic where what is drawn spans a factor of `least` or more; ticks at 1, 2 and 5 where they have room."""
    low, high = getattr(axis.axes.dataLim, f"interval{axis.axis_name}")
    if not low > 0 or high / low < least:
        return
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,), numticks=9))
    axis.set_major_formatter("{x:,g}" if low > 1e-4 and high < 1e6 else power_of_ten)
    axis.set_minor_locator(NullLocator())


def log_scales(axes: Axes) -> None:
    """Both axes logarithmic, where that helps."""
    for axis in (axes.xaxis, axes.yaxis):
        log_scale(axis)


# --- pictures --------------------------------------------------------------------------------------------

DPI = 200  # twice what a page shows, for modern screens
PAGE_DPI = 100
IN_WORDS = "In words"  # above what a figure shows, as text
# A white card with a margin, which stands on a dark page too.
STYLE = "max-width: 100%; height: auto; background: white; border-radius: 6px"


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure together with a text that says what it shows, for readers who cannot see it.

    Every function of `gpulab.plots` returns one. As the last line of a notebook's cell it shows the figure, and its
    text in a fold below.

    Attributes:
        figure: The `matplotlib.figure.Figure`.
        alt: The text.

    Examples:
        >>> import gpulab as gl
        >>> picture = gl.plots.roofline(gl.device.recorded_rooflines())
        >>> print(picture.alt.partition(":")[0])
        Roofline
    """

    figure: Figure
    alt: str

    def png(self, dpi: int = DPI) -> bytes:
        """Draw the figure as PNG, in 256 colours of its own, which keeps notebooks small.

        Args:
            dpi: Dots per inch; by default twice as many as a page shows.

        Returns:
            The content of a PNG file.
        """
        from PIL import Image

        drawn, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(drawn, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.15, facecolor="white")
        picture = Image.open(drawn, formats=["PNG"]).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
        return small.getvalue()

    def html(self) -> str:
        """Write the figure as an HTML element, with its text, that needs no other file.

        Returns:
            An `<img>` element.
        """
        return image(self.png(), self.alt, DPI)

    def save(self, file: str | Path) -> None:
        """Write the figure to a PNG file, whole or not at all.

        Args:
            file: Where to; its folder is made if need be.
        """
        files.write(file, self.png())

    def show(self, **instead: Any) -> None:
        """Show the figure in a notebook, and below it a fold with its text.

        An `image/png` is what every viewer shows. The text is also in the output's plain text and in its metadata,
        where VS Code and nbconvert find the alternative text; JupyterLab shows a PNG without any.

        Args:
            **instead: What a page may show in place of the PNG where it can, by its type.
        """
        from IPython.display import display

        png = self.png()
        about = {"width": _page_width(png, DPI), "alt": self.alt}
        still = {"image/png": base64.b64encode(png).decode(), "text/plain": self.alt}
        display(still | instead, metadata={"image/png": about}, raw=True)
        heading = f"{IN_WORDS}, before anything is moved" if instead else IN_WORDS
        fold = Markup("<details><summary>{}</summary><p>{}</p></details>").format(heading, self.alt)
        display({"text/html": fold, "text/plain": f"{heading}: {self.alt}"}, raw=True)
        if "matplotlib.pyplot" in sys.modules:  # whose figures, such as seaborn's, a notebook shows by itself
            sys.modules["matplotlib.pyplot"].close(self.figure)

    def _ipython_display_(self) -> None:
        self.show()


def _page_width(png: bytes, dpi: int) -> int:
    """How wide a PNG of so many dots an inch is on a page."""
    return int.from_bytes(png[16:20], "big") * PAGE_DPI // dpi  # a PNG begins with its size


def image(png: bytes, alt: str, dpi: int) -> Markup:
    """An element that shows a PNG, and needs no other file."""
    element = Markup('<img alt="{}" src="data:image/png;base64,{}" width="{}" style="{}">')
    return element.format(alt, base64.b64encode(png).decode(), _page_width(png, dpi), STYLE)


@functools.singledispatch
def draw(result: Any) -> Picture:
    """The picture of a result. Raises `TypeError` for a kind that no plot is registered for."""
    raise TypeError(f"nothing draws a {type(result).__name__}")
