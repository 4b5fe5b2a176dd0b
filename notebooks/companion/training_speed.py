"""How fast the project's own networks train, as usually written and as gpulab runs them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from gpulab.data._feed import Loader
from gpulab.engines import fastest
from gpulab.picture import Picture
from gpulab.plots import theme
from gpulab.settings import Setting
from gpulab.store import recorded
from gpulab.training._networks import NetworkRun
from gpulab.training.loop import AutogradEngine
from gpulab.wording import setting_words

WINDOWS = {"autoencoder": (20, 1, 28, 28), "prednet": (21, 3, 48, 64)}  # images, or frames

WAYS = {  # the implementations in the records, in words
    "usual loop": "the usual loop",
    "usual loop, a look at every loss": "the usual loop, .item() at each step",
    "usual loop, CUDA graph": "the usual loop, in one CUDA graph",
    "leido": "the usual PyTorch port",
    "leido, compiled": "the usual PyTorch port, torch.compile",
    "authors' port": "the authors' port",
    "authors' port, no hooks": "the authors' port, without its hooks",
    "JAX": "JAX, jit",
    "gpulab, plain": "gpulab, plain PyTorch",
    "gpulab": "gpulab, with its engine",
}
USUAL = {"autoencoder": "the usual loop", "prednet": "the usual PyTorch port"}
ENGINE = "gpulab, with its engine"
PLAIN = "gpulab, plain PyTorch"
NAMES = {
    ("autoencoder", "quick"): "autoencoder, one image at a time (images/s)",
    ("prednet", "quick"): "PredNet, small (frames/s)",
    ("prednet", "paper"): "PredNet, published size (frames/s)",
    ("prednet", "kitti"): "PredNet, KITTI's size, batches of 16 (frames/s)",
}


def network_window(network: str, setting: Setting | str, fast: bool) -> Callable[[], Any]:
    """Make a function that trains one window of a network as `gpulab.train` does.

    Args:
        network: `autoencoder` (20 images, an update for each) or `prednet` (20 frames, one update,
            the size of the profile `quick`).
        setting: Where it trains; it must be applied already.
        fast: Whether to use gpulab's engine; otherwise plain PyTorch with autograd trains.

    Returns:
        A function without arguments. Each call continues the training on the same random window
        and waits for the losses.
    """
    parsed = Setting.parse(setting)
    spec = NetworkRun.plan(network, setting=parsed, profile="quick", fast=fast)
    plain = AutogradEngine(spec.init_training(), Loader("window", parsed))
    engine = fastest(plain) if fast else plain
    pixels = np.random.default_rng(0).integers(256, size=WINDOWS[network], dtype=np.uint8)
    state: list[Any] = [None]

    def train_window() -> None:
        losses, state[0] = engine.train_window(pixels, state[0])
        losses.tolist()

    return train_window


def recorded_training() -> pd.DataFrame:
    """Read how fast the two networks trained on other machines.

    A machine was often measured twice: without and, later, with the strongest other
    implementations. Where both records have the same network, size and setting, only the later one
    is returned, so that all rows of a network, size, setting and machine come from one record.

    Returns:
        A data frame with a row for each network, size, setting and way of training: `network`,
        `size`, `setting`, `machine`, `way` in words, `per_second` (images or frames, the median),
        `lower` and `upper`, its quartiles, and `recorded`.

    Examples:
        >>> frame = recorded_training()
        >>> sorted(frame.network.unique())
        ['autoencoder', 'prednet']
    """
    case = ["network", "size", "setting", "machine"]
    first = pd.concat([_read_rates("autoencoder"), _read_rates("prednet")])
    peers = recorded_peers().dropna(subset="per_second")
    is_repeated = pd.MultiIndex.from_frame(first[case]).isin(pd.MultiIndex.from_frame(peers[case]))
    frame = pd.concat([first[~is_repeated], peers], ignore_index=True)
    return frame.drop(columns=["record", "failure", "joules"])


def recorded_peers() -> pd.DataFrame:
    """Read how fast the two networks trained in comparisons with the strongest implementations.

    Returns:
        A data frame with the columns of `recorded_training`, with `record`, the number of the
        record that a row comes from, with `joules`, the energy that the GPU used for an image or a
        frame, and with `failure`, the error of an implementation that did not run; its `per_second`
        is missing.

    Examples:
        >>> frame = recorded_peers()
        >>> (frame.per_second.notna() == (frame.failure == "")).all()
        np.True_
    """
    frame = _read_rates("peers")
    cases = list(zip(frame.network, frame["size"], strict=True))
    return frame.iloc[sorted(range(len(frame)), key=lambda row: [*NAMES].index(cases[row]))]


def _read_rates(kind: str) -> pd.DataFrame:
    """The rates in all records of a kind, and what failed, with the columns of `recorded_peers`."""
    rows = []
    for number, document in enumerate(recorded.read_measured(kind)):
        common = {"machine": document["machine"], "recorded": True, "record": number}
        for row in document["rows"]:
            lower, upper = row["quartiles"]
            network = row.get("network", kind)
            rows.append(
                {
                    "network": network,
                    "size": row.get("size", "quick"),
                    "setting": row["setting"],
                    "way": WAYS.get(row["entrant"], row["entrant"]),
                    "per_second": row["per_second"],
                    "lower": lower,
                    "upper": upper,
                    "joules": row.get("joules"),  # earlier records have none
                    "failure": "",
                    **common,
                }
            )
        for case, failure in document.get("failed", {}).items():
            size, setting, entrant = case.split(" ", 2)
            rows.append(
                {
                    "network": network,  # a record has one network
                    "size": size,
                    "setting": setting,
                    "way": WAYS.get(entrant, entrant),
                    "failure": failure,
                    **common,
                }
            )
    return pd.DataFrame(rows)


def describe_peers(frame: pd.DataFrame) -> list[str]:
    """Say which implementation trains fastest, and compare gpulab's engine with the strongest one.

    Args:
        frame: With the columns of `recorded_peers`.

    Returns:
        A line for each record, network, size and setting in which gpulab's engine was measured
        beside other implementations, all of whose numbers come from that record. Then a line for
        each implementation that failed.
    """
    case = ["record", "network", "size", "setting", "machine"]
    found = []
    for (_, network, size, setting, machine), rows in frame.groupby(case, sort=False):
        measured = rows.dropna(subset="per_second").set_index("way")
        others = measured.drop([ENGINE, PLAIN], errors="ignore").per_second
        if ENGINE not in measured.index or others.empty:
            continue
        name, unit = _name_and_unit(network, size)
        compared = [*dict.fromkeys([others.idxmax(), USUAL[network]])]
        ratios = [
            f"{measured.per_second[ENGINE] / others[way]:.3g} times as fast as {way}"
            for way in compared
            if way in others
        ]
        found.append(
            f"{name} ({machine}, {setting_words(setting)}): {_describe_fastest(measured, unit)}"
            f" gpulab's engine is {' and '.join(ratios)}."
        )
    failed = frame[frame.failure != ""]
    for (network, size, way, failure), rows in failed.groupby(
        ["network", "size", "way", "failure"], sort=False
    ):
        settings = "; ".join(map(setting_words, rows.setting.unique()))
        name, _ = _name_and_unit(network, size)
        found.append(f"{name} ({settings}): {way} failed with {failure}.")
    return found


def _name_and_unit(network: str, size: str) -> tuple[str, str]:
    """A network of some size in words, and the unit of its rate."""
    name, _, unit = NAMES[network, size].removesuffix(")").rpartition(" (")
    return name, unit


def _describe_fastest(measured: pd.DataFrame, unit: str) -> str:
    """Name the fastest implementation, or several whose middle halves of the rounds overlap."""
    ordered = measured.sort_values("per_second", ascending=False)
    leaders = ordered[ordered.upper >= ordered.lower.iloc[0]]
    rates = [f"{way} ({rate:,.0f} {unit})" for way, rate in leaders.per_second.items()]
    if len(rates) == 1:
        return f"the fastest is {rates[0]}."
    return f"the rounds of the fastest overlap: {' and '.join(rates)}."


def describe_training(frame: pd.DataFrame) -> list[str]:
    """Compare GPU and CPU for each network that was trained on both at the same size.

    Args:
        frame: With the columns of `recorded_training`. Rows without `per_second` were withheld.

    Returns:
        A sentence for each such network and size: how a GPU compares with the fastest CPU, with the
        usual code on both, and with gpulab's engine on both.
    """
    sentences = []
    frame = frame.dropna(subset="per_second").assign(on_gpu=~frame.setting.str.startswith("cpu"))
    for (network, size), rows in frame.groupby(["network", "size"], sort=False):
        best = rows.groupby(["way", "on_gpu"]).per_second.max().unstack()
        if not {True, False} <= set(best.columns):
            continue
        ratio = (best[True] / best[False]).dropna()
        parts = [
            f"{compare_rates(ratio[way])} {words}"
            for way, words in (
                (USUAL[network], "with the usual code"),
                (ENGINE, "with gpulab's engine"),
            )
            if way in ratio
        ]
        if parts:
            name, _ = _name_and_unit(network, size)
            sentences.append(
                f"{name}: compared with the fastest CPU, a GPU is {', and '.join(parts)}."
            )
    return sentences


def compare_rates(ratio: float) -> str:
    """A ratio of rates in words.

    Examples:
        >>> compare_rates(18.9), compare_rates(0.52), compare_rates(1.04)
        ('19 times as fast', '0.52 times as fast (slower)', 'about as fast (1.04 times)')
    """
    if 0.9 < ratio < 1.1:
        return f"about as fast ({ratio:.2f} times)"
    slower = " (slower)" if ratio < 1 else ""
    return f"{ratio:.2g} times as fast{slower}"


@theme.with_theme
def draw_training(frame: pd.DataFrame) -> Picture:
    """Draw the rates of each network by the way of training; hollow points were recorded.

    A colour stands for a setting, and a marker for a machine.

    Args:
        frame: As for `describe_training`.
    """
    frame = frame.dropna(subset="per_second")
    groups = [(key, frame[(frame.network == key[0]) & (frame["size"] == key[1])]) for key in NAMES]
    groups = [(key, rows) for key, rows in groups if len(rows)]
    heights = [rows.way.nunique() for _, rows in groups]
    machines = frame.machine[frame.recorded.astype(bool)].unique()
    markers = dict(zip(machines, itertools.cycle("osD^v"), strict=False))
    figure, panels = theme.canvas(
        1,
        0.8 + 0.3 * sum(heights) + 0.55 * len(groups),
        len(groups),
        gridspec_kw={"height_ratios": heights},
    )
    for axes, (key, rows) in zip(panels, groups, strict=True):
        ways = list(dict.fromkeys([way for way in WAYS.values() if way in set(rows.way)]))
        ways += [way for way in rows.way.unique() if way not in ways]
        for (setting, machine, elsewhere), points in rows.groupby(
            ["setting", "machine", "recorded"], sort=False
        ):
            tint = theme.colour(setting)
            places = [ways.index(way) for way in points.way]
            label = f"{machine.replace('(R)', '')}, {setting_words(setting)}"
            label += " (recorded)" if elsewhere else ""
            marker = markers[machine] if elsewhere else "o"
            axes.hlines(places, points.lower, points.upper, color=tint, lw=1.5)
            theme.draw_points(
                axes, points.per_second, places, tint, elsewhere, label=label, marker=marker
            )
        axes.set_yticks(range(len(ways)), ways)
        axes.set(ylim=(len(ways) - 0.5, -0.5), title=NAMES[key])
        theme.log_scale(axes.xaxis)
    title = "Training speed in images or frames per second (line: middle half of the rounds)"
    words = " ".join(describe_training(frame))
    return theme.finish_figure(figure, title, f"{title}. {words}")


def describe_crossing(seconds: pd.DataFrame, name: str) -> str:
    """State the size from which a GPU is faster than a CPU, according to the numbers.

    Args:
        seconds: Indexed by size, with the columns `CPU` and `GPU`: how long the same work takes.
        name: What the size measures, such as `width`.

    Returns:
        A sentence, which also says if the lines cross more than once or not at all.

    Examples:
        >>> seconds = pd.DataFrame({"CPU": [1.0, 2.0], "GPU": [2.0, 1.0]}, index=[16, 1024])
        >>> describe_crossing(seconds, "width")
        'The CPU is faster up to width 16, the GPU from 1,024 on'
    """
    seconds = seconds.dropna().sort_index()
    if seconds.empty:
        return f"No {name} was timed on both a CPU and a GPU"
    is_gpu_faster = seconds["GPU"] < seconds["CPU"]
    count = int(is_gpu_faster.sum())
    if count == 0:
        return f"The CPU is faster at every {name} that was timed"
    if count == len(seconds):
        return f"The GPU is faster at every {name} that was timed"
    changes = int(is_gpu_faster.astype(int).diff().abs().sum())
    if changes == 1 and bool(is_gpu_faster.iloc[-1]):
        last = seconds.index[~is_gpu_faster][-1]
        first = seconds.index[is_gpu_faster][0]
        return f"The CPU is faster up to {name} {last:,}, the GPU from {first:,} on"
    return f"The GPU is faster at {count} of {len(seconds)} sizes: the lines cross {changes} times"
