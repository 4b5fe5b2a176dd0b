"""Figures and sentences about the microbenchmarks of notebook 01, measured or recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd

from companion.findings import SUMMARY, CheckedSentences, finding
from companion.microbenchmarks import STRIDES
from companion.timing import add_spread
from gpulab.picture import Picture
from gpulab.plots import theme
from gpulab.store import recorded
from gpulab.wording import setting_words

DEVICES = {"cpu": "CPU", "cuda": "GPU", "mps": "GPU", "xpu": "GPU"}
FLAT = 1.2  # ratios below it are reported as no difference


def recorded_inside() -> pd.DataFrame:
    """Read the microbenchmarks that were recorded on other machines.

    Returns:
        A data frame with the columns of `companion.measure_inside`, and `machine`, `spread` and
        `recorded`.

    Examples:
        >>> "machine" in recorded_inside()
        True
    """
    columns = ["machine", "benchmark", "case", "x", "amount", "seconds", "lower", "upper"]
    frames = [
        pd.DataFrame(document["rows"]).assign(machine=document["machine"])
        for document in recorded.read_measured("inside")
    ]
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)
    return add_spread(frame).assign(recorded=True)


def recorded_hardware() -> dict[str, dict[str, dict[str, float]]]:
    """Read the descriptions of the machines in `recorded_inside`, by the names of their chips."""
    return {
        document["machine"]: document["hardware"] for document in recorded.read_measured("inside")
    }


def label_places(frame: pd.DataFrame) -> pd.DataFrame:
    """Add the columns `device` (`CPU` or `GPU`) and `where`, the machine in words."""
    kinds = frame.setting.str.split(":").str[0].map(DEVICES)
    elsewhere = frame.recorded.map({True: " (recorded)", False: ""})
    words = frame.setting.map(setting_words)
    return frame.assign(device=kinds, where=frame.machine + ", " + words + elsewhere)


# --- sentences ------------------------------------------------------------------------------------


def describe_memory(rows: pd.DataFrame) -> str:
    """Compare the speed of the fastest cache with that of the memory."""
    rates = (rows.amount / rows.seconds / 1e9).set_axis(rows.x)
    fast, slow = rates.max(), rates[rates.index.max()]
    if fast < FLAT * slow:
        return f"reads {slow:,.0f} GB/s whatever the size of the data"
    return (
        f"reads {fast / slow:.1f} times as fast from a cache as from memory"
        f" ({fast:,.0f} and {slow:,.0f} GB/s)"
    )


def describe_access(rows: pd.DataFrame) -> str:
    """Compare the time of reading numbers in random order with that of reading neighbours."""
    times = rows.set_index("x").seconds
    ratio = times[0] / times[1]
    if ratio < FLAT:
        return "reads in random order as fast as in order"
    return f"takes {ratio:.1f} times as long to read numbers in random order as in order"


def describe_launch(rows: pd.DataFrame) -> str:
    """Say how long an operation on one number takes, and from which size on it takes longer."""
    times = rows[rows.case == "one by one"].sort_values("x").set_index("x").seconds
    single = times.iloc[0]
    is_slow = times > 1.5 * single
    end = int(times.index[is_slow].min()) if is_slow.any() else None
    words = f"needs {1e6 * single:.1f} µs to add 1 to a single number"
    graphs = rows[rows.case == "in a CUDA graph"].sort_values("x")
    if len(graphs):
        each = graphs.seconds.iloc[0] / graphs.amount.iloc[0]
        words += f" ({1e6 * each:.1f} µs in a CUDA graph)"
    if end is None:
        return words
    return f"{words}; the smallest size that takes over 1.5 times as long is {end:,} numbers"


def describe_blocks(rows: pd.DataFrame) -> str:
    """Say what one more task than there are cores or SMs costs."""
    times = rows.sort_values("x").set_index("x").seconds
    unit = find_units(rows)
    ratio = times[unit + 1] / times[unit]
    what = "blocks" if rows.device.iloc[0] == "GPU" else "tasks"
    single = times[unit] / times.iloc[0]
    return (
        f"takes {single:.2f} times as long for {unit} {what} as for one, and {ratio:.2f} times as"
        f" long for {unit + 1} as for {unit}"
    )


def find_units(rows: pd.DataFrame) -> int:
    """Return the number of cores or SMs for which `blocks_to_try` chose the counts."""
    return (int(rows.x.max()) - 1) // 4


def describe_branch(rows: pd.DataFrame) -> str:
    """Say what a branch costs if half of the numbers, or half of a warp's threads, take it."""
    mixed = rows[rows.case.isin(["shuffled", "threads of each warp"])].set_index("x").seconds
    sorted_case = rows[rows.case.isin(["in order", "whole warps"])].set_index("x").seconds
    ratio = mixed[0.5] / sorted_case[0.5]
    if rows.device.iloc[0] == "GPU":
        slow_case = "when half of the threads of each warp take it"
        fast_case = "when half of the warps do"
    else:
        slow_case, fast_case = "when it cannot be predicted", "when it can"
    if ratio < FLAT:
        return f"needs no more time for a branch {slow_case} than {fast_case}"
    return f"takes {ratio:.1f} times as long for a branch {slow_case} as {fast_case}"


def describe_threads(rows: pd.DataFrame) -> str:
    """Say how many threads are needed to reach nine tenths of the highest rate."""
    rates = (rows.amount / rows.seconds).set_axis(rows.x).groupby(level=0).max().sort_index()
    enough = int(rates.index[rates >= 0.9 * rates.max()].min())
    one_warp = rates.max() / rates.iloc[0]
    return (
        f"needs {enough:,} threads for nine tenths of full speed; full speed is {one_warp:,.0f}"
        f" times that of {int(rates.index[0])} threads"
    )


DESCRIPTIONS: dict[str, Callable[[pd.DataFrame], str]] = {
    "memory": describe_memory,
    "access": describe_access,
    "launch": describe_launch,
    "blocks": describe_blocks,
    "branch": describe_branch,
    "threads": describe_threads,
}


def describe_inside(frame: pd.DataFrame, benchmark: str) -> list[str]:
    """Describe what a microbenchmark shows, in a sentence for each device.

    Args:
        frame: Rows of `companion.measure_inside` and `recorded_inside`, with `machine` and
            `recorded`. Rows without `seconds` were withheld.
        benchmark: One of `DESCRIPTIONS`.

    Returns:
        The sentences. If times that a sentence needs were withheld, it says that the device was too
        busy.
    """
    rows = label_places(frame[frame.benchmark == benchmark])
    return [
        f"{_capitalise(where)}: {_describe_device(device, benchmark)}."
        for where, device in rows.groupby("where", sort=False)
    ]


def _describe_device(rows: pd.DataFrame, benchmark: str) -> str:
    """Describe what a microbenchmark shows about one device."""
    try:
        return DESCRIPTIONS[benchmark](rows.dropna(subset="seconds"))
    except (KeyError, IndexError, ValueError):  # a time that the sentence needs is missing
        return "too busy to measure this"


def _capitalise(text: str) -> str:
    return text[0].upper() + text[1:]


def inside_finding(frame: pd.DataFrame, limits: pd.DataFrame) -> CheckedSentences:
    """State what the microbenchmarks showed, and what limits each layer.

    What was measured here is shown; what was recorded on other machines is folded.

    Args:
        frame: As for `describe_inside`, with all microbenchmarks.
        limits: The result of `gpulab.device.bounds`: `operation`, `setting`, `intensity` and
            `bound` of each layer.
    """
    here: list[str] = []
    elsewhere: dict[str, list[str]] = {}
    for (is_recorded, where), rows in label_places(frame).groupby(
        ["recorded", "where"], sort=False
    ):
        names = [name for name in DESCRIPTIONS if name in set(rows.benchmark)]
        sentences = [
            f"{_capitalise(_describe_device(rows[rows.benchmark == name], name))}."
            for name in names
        ]
        if is_recorded:
            elsewhere[_capitalise(where)] = sentences
        else:
            here += [f"{_capitalise(where)}:", *sentences]
    for (setting, bound), layers in limits.groupby(["setting", "bound"], sort=False):
        listed = "; ".join(
            f"{layer.operation} ({layer.intensity:.3g} flop per byte)"
            for layer in layers.itertuples()
        )
        here.append(f"Limited by {bound} on the {setting_words(setting)}: {listed}.")
    return finding({SUMMARY: here, **elsewhere})


# --- figures --------------------------------------------------------------------------------------


class Look(NamedTuple):
    """How a microbenchmark is drawn."""

    title: str
    x: str
    y: str
    x_scale: str
    y_scale: str


LOOKS = {
    "memory": Look(
        "Memory bandwidth against the size of the data",
        "size of the data that is read repeatedly (bytes)",
        "bandwidth (GB/s)",
        "log2",
        "log",
    ),
    "access": Look(
        "Time to read one number, against the distance to the next one",
        "distance (numbers of four bytes)",
        "time per number (ns)",
        "log2",
        "log",
    ),
    "launch": Look(
        "Time of one addition, against its size",
        "numbers in the tensor",
        "time (µs)",
        "log2",
        "log",
    ),
    "blocks": Look(
        "Time of equal tasks or blocks, against their number",
        "tasks per core, or blocks per SM",
        "time (one task or block = 1)",
        "linear",
        "linear",
    ),
    "branch": Look(
        "Time of a branch, against the share that takes it",
        "share of numbers (CPU) or threads (GPU) that take the branch",
        "time (the slower side alone = 1)",
        "linear",
        "linear",
    ),
    "threads": Look(
        "Speed of arithmetic against the number of threads",
        "threads",
        "rate (Gflop/s)",
        "log2",
        "log",
    ),
}
DASHED = ("in a CUDA graph", "in order", "whole warps")  # cases drawn with a dashed line


@theme.with_theme
def draw_inside(frame: pd.DataFrame, benchmark: str) -> Picture:
    """Draw a microbenchmark of several devices; hollow points were recorded elsewhere.

    Args:
        frame: As for `describe_inside`. Withheld times are not drawn.
        benchmark: One of `LOOKS`.
    """
    look = LOOKS[benchmark]
    rows = label_places(frame[frame.benchmark == benchmark]).dropna(subset="seconds")
    figure, (axes,) = theme.canvas(height=3.4)
    for (where, case), device in rows.groupby(["where", "case"], sort=False):
        x, y = place_points(device, rows, benchmark)
        tint = theme.colour(device.setting.iloc[0])
        face = "white" if device.recorded.iloc[0] else tint
        marker = "s" if case == "random order" else "o"
        line = "--" if case in DASHED else "-"
        several = rows.case.nunique() > 1 and case != "strided"
        label = f"{where}: {case}" if several else where
        if case == "random order":
            label = "_"  # the label of the x axis names it
        axes.plot(x, y, line, marker=marker, ms=4.5, color=tint, mfc=face, label=label)
    if look.x_scale == "log2":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: name_size(value, benchmark == "memory"))
    if look.y_scale == "log":
        theme.log_scale(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    if benchmark == "access":
        axes.set_xticks([*STRIDES, 128], [*map(str, STRIDES), "random\norder"])
    axes.set(xlabel=look.x, ylabel=look.y)
    words = " ".join(describe_inside(frame, benchmark))
    return theme.finish_figure(figure, look.title, f"{look.title}. {words}", columns=1)


def place_points(
    device: pd.DataFrame, rows: pd.DataFrame, benchmark: str
) -> tuple[pd.Series, pd.Series]:
    """Return the coordinates of the points of one line in a microbenchmark's figure."""
    device = device.sort_values(["x", "seconds"]).drop_duplicates("x")  # the faster of two
    same_device = rows[rows["where"] == device["where"].iloc[0]]
    if benchmark in ("memory", "threads"):
        return device.x, device.amount / device.seconds / 1e9
    if benchmark == "access":
        return device.x.replace(0, 128), 1e9 * device.seconds / device.amount
    if benchmark == "launch":
        return device.x, 1e6 * device.seconds / device.amount
    if benchmark == "blocks":
        return device.x / find_units(same_device), device.seconds / device.seconds.iloc[0]
    ends = same_device[same_device.x.isin([0.0, 1.0])]
    slower_end = ends.groupby("x").seconds.min().max()
    return device.x, device.seconds / slower_end


def name_size(value: float, is_bytes: bool) -> str:
    """Format a power of two for the label of an axis.

    >>> name_size(2**20, True), name_size(2**20, False), name_size(16, False)
    ('1 MiB', '1 M', '16')
    """
    for factor, unit in ((2**30, "G"), (2**20, "M"), (2**10, "k")):
        if value >= factor:
            unit = f"{unit.upper()}iB" if is_bytes else unit
            return f"{value / factor:.0f} {unit}"
    return f"{value:.0f}" if value >= 1 else ""
