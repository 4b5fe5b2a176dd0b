"""Notebook 05, the anomaly: what shared memory does to a gradient, and to what is learned from it.

The loop that the paper's authors published (`main.py` of github.com/eijwat/prednet_in_chainer_py3) fills one NumPy
buffer per frame and wraps it for the device. Where wrapping does not copy, the gradient of every step is taken against
the window's last frame. Their experiment was run in its own code, one thing changed at a time: what is compared, on
which seeds and films, and by which tests, was laid down in `data/README.md` before the runs. For dose and response,
`benchmarks/record.py dose` trained in cells, a length of window and a speed of motion each, every seed once on copied
frames and once on shared memory. A cell is what is counted: its seeds see one film, and are shared by all cells.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator
from numpy.typing import ArrayLike

import gpulab as gl
from companion.findings import SIZES, CheckedSentences, Part, finding, listed, network_words, setting_in_text, span
from companion.first_windows import FirstWindow
from companion.learning import ALL, ALPHA, BEAT, blurred_losses, corrected, learning_table
from gpulab.models.base import Trainable
from gpulab.plots import style
from gpulab.plots.names import OWN_MEMORY, SHARED_MEMORY, setting_words
from gpulab.plots.style import INK, ON_CPU, ON_GPU, Look
from gpulab.report import Picture
from gpulab.stats.sentences import p_text
from gpulab.store import runs as stores
from gpulab.store.recorded import recorded_table

FAR = 1000  # roundings: a gradient so far off is wrong
PLAIN = "copied"
SPEED_COLOURS = ("#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#222222")
FULL = "160x120"  # the published size
KINDS = {"cpu": "CPU", "cuda": "GPU"}
# One array for all frames, handed over by one line, is copied on a GPU and shared on a CPU.
HANDED = {
    ("cpu", "reused"): f"CPU, {SHARED_MEMORY}",
    ("cpu", "copied"): f"CPU, {OWN_MEMORY}",
    ("cuda", "reused"): f"GPU, {OWN_MEMORY}",
    ("cuda", "copied"): f"GPU, {OWN_MEMORY}",
    ("cuda", "shared"): f"GPU, {SHARED_MEMORY}",
}
BEATS, LOSS = "share that beats repeating the last frame", "final loss"
# In the figure neighbours differ in one thing, so that a line between them says what that does.
ORDER = ("GPU, own memory", "GPU, shared memory", "CPU, own memory", "CPU, shared memory")
METRICS = {BEATS: ("beats_repeating", 0.1), LOSS: ("final_loss", 0.25)}  # and the margin: a share, or in sd
KIND = ["size", "setting", "machine"]  # of an experiment on dose and response
CELL = [*KIND, "window", "speed"]
MARKS = "osD^v"  # of the lengths of a window
FEWEST = 5  # cells, whose ranks an interval needs
COLUMNS = "family film size condition reference endpoint seeds decision difference low high ratio worse margin p p_holm"
COLUMNS += " p_equivalent uncorrected beat beat_reference beat_blurred machine machine_reference"
NO_TREND = "it may rise or fall"  # in a figure, and in a sentence
UNDECIDED = "whether it is higher or lower these cells do not tell"
CLAIM = [
    "PredNet learns better on a GPU than on a CPU, an autoencoder does not (Pietrowski et al. 2021, arXiv 2109.01451).",
    "Retracted: the difference came with the library, Chainer. The authors suspect a bug and do not say which.",
]
LINE = [
    "The published loop writes each new frame over the last one in one NumPy array, and hands it on with xp.asarray.",
    "On a GPU that copies the frame. On a CPU it does not: all frames share one memory.",
    "The gradient is computed after twenty frames. On a CPU it then finds the twentieth in the place of each, and is "
    "wrong. The losses, computed while each frame was there, are right.",
    "The cure is to copy each frame.",
]
MORE_OF_THE_LINE = (
    "Not touched: an autoencoder, which takes its gradient after each image; the authors' port, which loads whole "
    "clips; Chainer 1 and 2, whose squared error kept the difference of prediction and frame for the gradient. Since "
    "3.0 it keeps the two arrays."
)
MEASURE = (
    "By the final loss, and by whether it beats the laziest prediction, that the next frame is the last one. "
    "Seeds, films and tests were laid down before the runs."
)
UNKNOWN = [
    "Whether this line made the published difference, or all of it: it is enough to make one.",
    "The authors' film, their machines and the release behind their numbers were not at hand.",
]
MORE_UNKNOWN = (
    "Their network was run unchanged, in Chainer 7.8.1, by a loop with the operations of theirs. They name 7.8.0, "
    "which differs in what it knows of CuPy alone; in it their own script gives, on a CPU and with one NumPy, the same "
    "bits in its first updates. Their GPUs used cuDNN, which today's CuPy does not have for Chainer; whether that "
    "matters is not known."
)
HEADINGS = {
    "one line, on a GPU": "The published code on a GPU, one line changed so that frames share memory",
    "one line, on a CPU": "The same on a CPU",
    "four cells": "Is it the device? Device and memory crossed, at half the size",
}


# --- in our own port -------------------------------------------------------------------------------------


def first_window(
    settings: list[str], net: str | Trainable = "prednet", seed: int = 0, profile: str = "quick"
) -> pd.DataFrame:
    """The first window with the buffer reused against copied, a row for each setting.

    `net` is a model's name, whose weights are drawn from `seed`, or a network, trained or not. `same_losses` counts the
    forward losses with the same bits, of `losses`; `gradient_difference` is relative, and `rounding` the relative
    distance of the copied gradient to that in float64, for scale.

    >>> first_window(["cpu"], "autoencoder", profile="smoke").gradient_difference.tolist()
    [0.0]
    """
    copied, reused = (FirstWindow(net, loader, seed, profile) for loader in (PLAIN, "reused"))
    exact = copied.gradient("cpu:precision=float64")
    name = net if isinstance(net, str) else f"{type(net).__name__.lower()}, trained"
    rows = []
    for setting in settings:
        copied_window = copied.gradient(setting)
        rounding = copied_window.against(exact)["gradient_difference"]
        differences = reused.gradient(setting).against(copied_window)
        rows.append({"network": name, "setting": setting, **differences, "rounding": rounding})
    return pd.DataFrame(rows)


def anomaly_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`learning_table` of shared against copied memory, for every experiment, size and setting."""
    return learning_table(frame, "loader", PLAIN)


def window_finding(row: Any) -> str:
    """A row of `first_window` in a sentence."""
    network, comma, trained = row.network.partition(",")
    name = f"{network_words(network)}{comma}{trained}"
    off = f"is wrong by {row.gradient_difference:.1%}" if row.gradient_difference else "has the same bits, too"
    rounding = np.format_float_positional(100 * row.rounding, precision=1, fractional=False, trim="-")
    return (
        f"{name}, {setting_in_text(row.setting)}: {row.same_losses} of {row.losses} losses have the same bits, and the "
        f"gradient {off}; rounding moves it by {rounding} %."
    )


def anomaly_finding(window: pd.DataFrame, table: pd.DataFrame) -> CheckedSentences:
    """What `first_window` and `anomaly_table` allow one to say, and what they do not."""
    wrong_gradient = "Where wrapping shares memory, the published loop computes a wrong gradient and never says so."
    return finding(
        {
            "The first window": [window_finding(row) for row in window.itertuples()],
            "What is learned, with shared memory against own memory": table,
            "So": [wrong_gradient] if (window.gradient_difference > FAR * window.rounding).any() else [],
        }
    )


@style.themed
def shared_memory(frame: pd.DataFrame) -> Picture:
    """Each seed's loss with shared memory against its loss with own memory: above the diagonal, sharing was worse.

    The frame has runs with the loader `copied` and with `reused` or `imitated`.
    """
    groups = list(frame.groupby(["profile", "device"], sort=False))[:2]
    figure, panels = style.canvas(len(groups), height=3.7)
    looks = dict(zip(sorted(frame.speed.dropna().unique()), zip("os^Dv", SPEED_COLOURS, strict=True), strict=False))
    higher = []
    for axes, ((profile, device), runs) in zip(panels, groups, strict=True):
        losses = runs.pivot_table(index=["speed", "seed", "setting", "recorded"], columns="loader", values="final_loss")
        (shared,) = set(losses.columns) - {PLAIN}
        for (speed, recorded), pairs in losses.dropna().groupby(["speed", "recorded"]):
            marker, tint = looks[speed]
            look: Look = {"marker": marker, "s": 24, "linewidths": None, "zorder": 3 if recorded else 4}
            style.points(axes, pairs[PLAIN], pairs[shared], tint, recorded, **look)
            if len(pairs) > 1 or len(losses) == 1:
                higher.append((pairs[shared] > pairs[PLAIN]).mean())
        ends = runs.final_loss.min() * 0.8, runs.final_loss.max() * 1.25
        axes.plot(ends, ends, color=INK, lw=0.8, ls="--", zorder=1)
        style.log_scales(axes)
        axes.set(xlim=ends, ylim=ends, xlabel=f"final loss, {OWN_MEMORY}", ylabel=f"final loss, {SHARED_MEMORY}")
        axes.set_title(f"{KINDS[device]}, {SIZES[profile]}")
    keys = [style.key(f"speed {speed:g}", marker=mark, color=tint, ls="") for speed, (mark, tint) in looks.items()]
    several_groups = frame.groupby(["profile", "device", "speed"]).ngroups > 1
    grouping = ", by size and speed" if several_groups else ""
    headline = f"Sharing memory gave the higher loss for {span(higher, '.0%')} of the seeds{grouping}"
    alt = "Final loss with shared memory against final loss with own memory, one point a seed."
    return style.finished(figure, headline, alt, [*keys, *style.origin_keys(frame)])


# --- the published network -------------------------------------------------------------------------------


class RegisteredPair(NamedTuple):
    """What is held against what, as registered; the films, or the comparisons, of a family are tested together."""

    family: str
    condition: str
    reference: str
    full: bool  # at the published size, or at half of it


REGISTERED = (
    RegisteredPair("one line, on a GPU", "GPU, shared memory", "GPU, own memory", True),
    RegisteredPair("one line, on a CPU", "CPU, shared memory", "CPU, own memory", True),
    RegisteredPair("four cells", "CPU, own memory", "GPU, own memory", False),
    RegisteredPair("four cells", "CPU, shared memory", "GPU, shared memory", False),
    RegisteredPair("four cells", "CPU, shared memory", "CPU, own memory", False),
)


def published_runs() -> pd.DataFrame:
    """The recorded runs of the authors' network in Chainer, as `gpulab.runs`.

    More columns: `film`; `condition`, the device and how frames were handed over; `full`, whether at the published
    size.
    """
    runs = described(stores.recorded_runs("published"))
    return runs.sort_values(["full", "film"], ascending=False, kind="stable", ignore_index=True)  # the walk first


def described(frame: pd.DataFrame) -> pd.DataFrame:
    """Runs of `benchmarks/published.py`, with the columns that `published_runs` has."""
    tripped = (frame.device == "cuda") & ~frame.round_trip.astype(bool)
    condition = _condition(frame) + tripped.map({True: ", no round trip", False: ""})
    film = frame.data.map(lambda name: Path(name).stem)
    upright = frame["size"].str.split("x").str[::-1].str.join("x")  # the authors write the width first
    frame = frame.assign(film=film, condition=condition, full=frame["size"] == FULL, frame_size=upright, scene_seed=0)
    return frame.drop(columns=["protocol", "options"], errors="ignore")


def _condition(frame: pd.DataFrame) -> pd.Series:
    """The device of each run and the memory of its frames, in words."""
    return pd.Series([HANDED[key] for key in zip(frame.device, frame.loader, strict=True)], frame.index, dtype=object)


def published_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Every registered comparison that the `published_runs` allow, corrected by Holm within each family and endpoint.

    A row for each comparison, film and endpoint: `decision` after the correction, `difference` (condition minus
    reference) with its interval `low`, `high`; `ratio`, the median over seeds of the losses' ratio; `worse`, the seeds
    whose loss is higher; `beat` and `beat_reference`, the seeds that beat repeating the last frame; `beat_blurred`,
    those of the reference that beat it blurred.
    """
    rows = []
    for comparison in REGISTERED:
        for film, film_runs in frame[frame.full == comparison.full].groupby("film", sort=False):
            if {comparison.condition, comparison.reference} <= set(film_runs.condition):
                rows += [_film_endpoint(film_runs, comparison, endpoint) | {"film": film} for endpoint in METRICS]
    table = corrected(pd.DataFrame(rows), ["family", "endpoint"])
    return table.assign(p_equivalent=table.p_equivalent_holm)[COLUMNS.split()]


def _film_endpoint(frame: pd.DataFrame, comparison: RegisteredPair, endpoint: str) -> dict[str, Any]:
    """One endpoint of one comparison on one film, on the seeds that both have."""
    condition_runs = [frame[frame.condition == name] for name in (comparison.reference, comparison.condition)]
    paired_runs = pd.concat(condition_runs)
    paired_runs = paired_runs[
        paired_runs.seed.isin(condition_runs[0].seed) & paired_runs.seed.isin(condition_runs[1].seed)
    ]
    reference_runs, changed_runs = (
        paired_runs[paired_runs.condition == name] for name in (comparison.reference, comparison.condition)
    )
    metric, margin = METRICS[endpoint]
    if endpoint == LOSS:  # as registered: of the sample itself
        margin *= float(reference_runs.final_loss.std())
    judged_runs = paired_runs.drop(columns=["setting", "loader"])
    judged = gl.verdict(judged_runs, metric, "condition", margin=margin, reference=comparison.reference)
    (level,) = judged.table.rename(columns={"decision": "uncorrected"}).to_dict("records")
    losses = paired_runs.pivot_table(index="seed", columns="condition", values="final_loss").dropna()
    ratio = losses[comparison.condition] / losses[comparison.reference]
    real_films = recorded_table("blurred").set_index("film").loss
    blurred = blurred_losses(reference_runs).fillna(reference_runs.film.map(real_films))
    return {
        **level,
        **comparison._asdict(),
        "size": reference_runs["size"].iloc[0],
        "endpoint": endpoint,
        "ratio": ratio.median(),
        "worse": int((ratio > 1).sum()),
        "beat": int(changed_runs.beats_repeating.sum()),
        "beat_reference": int(reference_runs.beats_repeating.sum()),
        "beat_blurred": (reference_runs.final_loss < blurred).sum() if blurred.notna().all() else np.nan,
        "machine": ", ".join(sorted(set(changed_runs.machine))),
        "machine_reference": ", ".join(sorted(set(reference_runs.machine))),
    }


def round_trips(frame: pd.DataFrame) -> pd.DataFrame:
    """The `published_runs` on a GPU with the round trip to the CPU after each update, against the same without.

    A row for each film and condition: `seeds` run both ways, their `windows`, and those whose loss has the `same_bits`.
    """
    trips = frame[(frame.device == "cuda") & frame.full].astype({"round_trip": bool})
    trips = trips.assign(condition=_condition(trips))[["id", "film", "condition", "seed", "round_trip"]]
    losses = stores.history(frame[frame.id.isin(trips.id)])[["id", "window", "loss"]].merge(trips, on="id")
    with_trip, without_trip = (losses[losses.round_trip == tripped] for tripped in (True, False))
    paired_windows = with_trip.merge(without_trip, on=["film", "condition", "seed", "window"])
    paired_windows["same"] = paired_windows.loss_x == paired_windows.loss_y
    counts = {"seeds": ("seed", "nunique"), "windows": ("same", "size"), "same_bits": ("same", "sum")}
    return paired_windows.groupby(["film", "condition"], sort=False).agg(**counts).reset_index()


@style.themed
def published_figure(frame: pd.DataFrame) -> Picture:
    """Each seed's final loss in `published_runs` over the loss of repeating the last frame, seeds joined."""
    shown = frame[~frame.condition.str.endswith("no round trip")].assign(
        times=frame.final_loss / frame.repeat_loss, panel=frame.film + ", " + frame["size"].str.replace("x", "×")
    )
    ticks: dict[float, str] = {}
    figure, (axes,) = style.canvas(height=4.4)
    start = 0.0
    for name, panel_runs in shown.sort_values("full", ascending=False, kind="stable").groupby("panel", sort=False):
        times = panel_runs.pivot(index="condition", columns="seed", values="times")
        times = times.reindex([condition for condition in ORDER if condition in times.index])
        columns = start + np.arange(len(times))
        for _, seed_times in times.items():
            axes.plot(columns[seed_times.notna()], seed_times.dropna(), color=INK, lw=0.5, alpha=0.35, zorder=1)
        for column, (condition, condition_times) in zip(columns, times.iterrows(), strict=True):
            tint = ON_GPU if str(condition).startswith("GPU") else ON_CPU
            style.points(axes, np.full(len(condition_times), column), condition_times, tint, True, s=18)
            ticks[column] = str(condition).replace(",", "").replace(" ", "\n")
        axes.text(columns.mean(), 1.02, str(name), transform=axes.get_xaxis_transform(), ha="center", fontsize=9)
        start += len(times) + 0.6
    axes.axhline(1, color=INK, lw=0.8, ls="--", zorder=1)
    style.log_scale(axes.yaxis)
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 1.4, 2.0, 3.0, 5.0, 7.0)))
    axes.set_xticks([*ticks], [*ticks.values()])
    axes.set(xlim=(-0.6, start - 1), ylabel="final loss, in losses of repeating the last frame")
    losses = shown.pivot_table(index=["panel", "seed"], columns="condition", values="final_loss")
    worse, pairs = 0, 0
    for device in {name.partition(",")[0] for name in losses}:
        loss_pairs = losses[[f"{device}, {SHARED_MEMORY}", f"{device}, {OWN_MEMORY}"]].dropna()
        pairs, worse = pairs + len(loss_pairs), worse + int((loss_pairs.iloc[:, 0] > loss_pairs.iloc[:, 1]).sum())
    title = f"Where frames share memory, the published network ends worse in {worse} of {pairs} pairs"
    keys = [style.key("repeating the last frame", color=INK, ls="--", lw=0.8), *style.origin_keys(shown)]
    alt = "Final loss of each seed over the loss of repeating the last frame, by film and condition, seeds joined."
    return style.finished(figure, title, alt, keys, columns=3)


# --- dose and response -----------------------------------------------------------------------------------


def recorded_dose() -> pd.DataFrame:
    """The recorded runs of `benchmarks/record.py dose`, a row for a seed in a cell: its `bias`, and the `ratio` of the
    losses.
    """
    runs = stores.recorded_runs("dose")
    return runs.assign(ratio=runs.shared / runs.copied)


def dose_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a cell of `recorded_dose`: how many `seeds`, their mean `bias`, the geometric mean of their `ratio`."""
    cells = frame.assign(ratio=np.log(frame.ratio)).groupby(CELL)
    table = cells.agg(seeds=("seed", "nunique"), bias=("bias", "mean"), ratio=("ratio", "mean")).reset_index()
    return table.assign(ratio=np.exp(table.ratio))


def rank_correlation(x: ArrayLike, y: ArrayLike) -> tuple[float, float, float]:
    """Spearman's rank correlation of pairs, x and y of shape (n,), and its 95 % interval.

    By Fisher's z with the variance (1 + ρ²/2) / (n − 3) of Bonett, Wright 2000, *Sample size requirements for
    estimating Pearson, Kendall and Spearman correlations*. Where all ranks agree, the interval is that of ranks of
    which two neighbours are exchanged: the formula's own would have no width.
    """
    from scipy.stats import norm, spearmanr

    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(x) < FEWEST or min(np.ptp(x), np.ptp(y)) == 0:
        raise gl.UsageError(f"{len(x)} pairs: expected at least {FEWEST}, not all the same")
    rho = float(spearmanr(x, y).statistic)
    largest_rho = 1 - 12 / (len(x) * (len(x) ** 2 - 1))
    z = math.atanh(max(-largest_rho, min(rho, largest_rho)))
    reach = norm.ppf(1 - ALPHA / 2) * math.sqrt((1 + rho**2 / 2) / (len(x) - 3))
    return rho, math.tanh(z - reach), math.tanh(z + reach)


def dose_finding(frame: pd.DataFrame) -> CheckedSentences:
    """Whether the bias predicts the loss, in a sentence for each size and setting of `recorded_dose`."""
    sentences, numbers = [], []
    for (size, _, machine), runs in frame.groupby(KIND, sort=False):
        cells = dose_table(runs)
        rho, low, high = rank_correlation(cells.bias, cells.ratio)
        seed_correlations = [
            rank_correlation(seed_runs.bias, seed_runs.ratio)[0] for _, seed_runs in runs.groupby("seed")
        ]
        origin = f"{SIZES[size].capitalize()}, {machine}"
        trend = _trend(rho, low, high)
        if trend == NO_TREND:
            trend = UNDECIDED
        sentences.append(
            f"{origin}: with {SHARED_MEMORY} the loss is higher in {(cells.ratio > 1).sum()} of {len(cells)} cells; "
            f"where the gradient is further off, {trend}."
        )
        numbers.append(
            f"{origin}, {cells.seeds.max()} seeds in {len(cells)} cells: the loss is {cells.ratio.min():.2f} to "
            f"{cells.ratio.max():.2f} times as high, where the gradient is off by {cells.bias.min():.0%} to "
            f"{cells.bias.max():.0%}. The rank correlation of the cells is {rho:+.2f} (95 % interval {low:+.2f} to "
            f"{high:+.2f}), in single seeds {min(seed_correlations):+.2f} to {max(seed_correlations):+.2f}."
        )
    return finding({"Dose and response, in our own port": sentences}, numbers)


def _trend(_: float, low: float, high: float) -> str:
    """What the interval of a rank correlation with the bias says of the loss."""
    if low > 0:
        return "it is higher"
    return "it is lower" if high < 0 else NO_TREND


@style.themed
def dose_response(frame: pd.DataFrame) -> Picture:
    """The ratio of the final losses over the bias of the gradient: a faint point a seed, a large one a cell."""
    groups = [(experiment_key, runs, dose_table(runs)) for experiment_key, runs in frame.groupby(KIND, sort=False)]
    figure, panels = style.canvas(len(groups), height=3.9)
    tints = dict(zip(sorted(frame.speed.unique()), SPEED_COLOURS, strict=False))
    marks = dict(zip(sorted(frame.window.unique()), MARKS, strict=False))
    for axes, ((size, setting, _), runs, cells) in zip(panels, groups, strict=True):
        axes.axhline(1, color=INK, lw=0.8, ls="--", zorder=1)
        faint: Look = {"s": 12, "alpha": 0.5, "linewidths": 0}
        for table, look in ((runs, faint), (cells, {"s": 60, "hollow": style.is_recorded(runs).any()})):
            for (window, speed), points in table.groupby(["window", "speed"]):
                style.points(axes, points.bias, points.ratio, tints[speed], marker=marks[window], **look)
        style.log_scales(axes)
        axes.set(title=f"{SIZES[size]}, {setting_words(setting)}", xlabel="bias of the gradient (relative)")
    panels[0].set_ylabel(f"final loss, {SHARED_MEMORY} over {OWN_MEMORY}")
    worse = pd.concat([cells.ratio > 1 for *_, cells in groups])
    trends = dict.fromkeys(_trend(*rank_correlation(cells.bias, cells.ratio)) for *_, cells in groups)
    keys = [style.key(f"speed {speed:g}", color=tint, marker="o", ls="") for speed, tint in tints.items()]
    keys += [style.key(f"windows of {window}", color=INK, marker=mark, ls="") for window, mark in marks.items()]
    headline = (
        f"With {SHARED_MEMORY} the loss is higher in {worse.sum()} of {len(worse)} cells, which share seeds; "
        f"with the bias {listed(trends)}"
    )
    alt = "Final loss with shared over that with own memory, against the bias of the gradient, by window and speed."
    return style.finished(figure, headline, alt, [*keys, *style.origin_keys(frame)], columns=4)


# --- in words --------------------------------------------------------------------------------------------


def published_page(
    window: pd.DataFrame,
    table: pd.DataFrame,
    trips: pd.DataFrame,
    dose: pd.DataFrame,
    windows: pd.DataFrame,
    longer: pd.DataFrame,
    port: pd.DataFrame,
) -> CheckedSentences:
    """What was claimed, what was wrong, how one knows and what remains unknown, on one page.

    From `first_window`, `published_table`, `round_trips`, `recorded_dose`, `recorded_windows`, `learning_table` of
    `longer_runs` by loader, and `anomaly_table`.
    """
    first_windows = windows[(windows.window == 0) & ~windows.of.str.endswith("trip")].copy()
    handover_words = {f"{device} {loader}": f"{memory} ({loader})" for (device, loader), memory in HANDED.items()}
    condition, reference = (cells.str.partition(",")[0] for cells in (first_windows.of, first_windows.against))
    first_windows["ways"] = condition.map(handover_words) + " against " + reference.map(handover_words)
    shared = ["cpu reused", "cuda shared"]  # with memory that all frames share
    memory_differs = first_windows[first_windows.of.isin(shared) != first_windows.against.isin(shared)]
    memory_alike = first_windows.drop(memory_differs.index)
    by_dose = dose_finding(dose)
    sections: dict[str, Part] = {
        "In short": _short_version(table, longer, port),
        "Claimed": CLAIM,
        "What was wrong": LINE,
        "How it is measured": MEASURE,
        "In the first gradient": [
            f"A CPU and a GPU agree to {memory_alike.gradient_difference.max():.4%} where the memory is alike. Shared "
            f"and own memory differ by {memory_differs.gradient_difference.max():.1%}, on either device.",
            f"The losses of that window do not tell: {memory_differs.same_losses.sum()} of "
            f"{memory_differs.losses.sum()} have the same bits.",
        ],
    }
    numbers = [MORE_OF_THE_LINE, MORE_UNKNOWN]
    numbers += [f"First window of our own port, here: {window_finding(row)}" for row in window.itertuples()]
    differences = first_windows.gradient_difference.map(
        lambda difference: f" differs by {difference:.1g}" if difference else " has the same bits"
    )
    numbers += [f"First window of the published code: {'; '.join(first_windows.ways + differences)}."]
    for family, rows in table.groupby("family", sort=False):
        pairs = rows.groupby(["condition", "reference"], sort=False)
        sections[HEADINGS[family]] = [sentence for _, pair in pairs for sentence in _over_films(pair)]
        films = rows.groupby(["condition", "reference", "film"], sort=False)
        numbers += [f"{family}: {_film_words(pair.set_index('endpoint'))}" for _, pair in films]
    share, loss = (longer.set_index("metric").loc[metric] for metric in (BEAT, ALL))
    same_bit_windows, window_count = trips.same_bits.sum(), trips.windows.sum()
    bits = (
        "the same bits"
        if same_bit_windows == window_count
        else f"the same bits in {same_bit_windows:,} of {window_count:,} only"
    )
    sections["Our own port to PyTorch, which keeps the one array"] = port
    sections["Does longer training close the gap? Our own port, ten times as long"] = [
        f"After 50,000 frames the mean loss with {SHARED_MEMORY} is {1 + loss.relative:.2f} times as high, and higher "
        f"for {loss.worse} of {loss.seeds} seeds ({loss.decision}).",
        f"{share.beat - share.beat_reference} instead of {share.beat_reference} of {share.seeds} beat repeating the "
        "last frame.",
    ]
    sections |= dict(by_dose.parts)
    sections["Is it another step? On a GPU the loop takes the network to the CPU and back at each update"] = (
        f"With and without that, the losses of {window_count:,} windows have {bits} "
        f"({trips.seeds.sum()} pairs of runs)."
    )
    unknown = [*UNKNOWN]
    if any(UNDECIDED in sentence for _, sentences in by_dose.sentences() for sentence in sentences):
        unknown.append("Whether the loss rises where the gradient is further off: our cells do not tell.")
    all_sections = sections | {"Not known": unknown}
    folded = set(all_sections) - {"In short", "What was wrong", "Not known"}
    return finding(all_sections, [*numbers, *by_dose.numbers], folded)


def _short_version(table: pd.DataFrame, longer: pd.DataFrame, port: pd.DataFrame) -> list[str]:
    """Sentences: in how many of all registered pairs of runs the memory decides, and in how many the device."""
    losses = table[table.endpoint == LOSS]
    of_the_memory, of_the_device = main_finding(table)
    ended = f"with {SHARED_MEMORY} the loss ends higher in"
    sentences = [of_the_memory, f"Our port after 50,000 frames: {ended} {_pairs(longer[longer.metric == ALL])}."]
    # Where all bits are the same, the device copied: the memory does not differ.
    prednet_rows = port[(port.experiment == "prednet") & (port.metric == ALL) & (port.same_bits < port.seeds)]
    for profile, rows in prednet_rows.groupby("profile", sort=False):
        decided = [
            f"{decision} at speed {listed(f'{speed:g}' for speed in decision_rows.speed)}"
            for decision, decision_rows in rows.groupby("decision", sort=False)
        ]
        sentences.append(f"Our port, {SIZES[profile]}: {ended} {_pairs(rows)} ({', '.join(decided)}).")
    sentences.append(of_the_device)
    if not (losses["size"].eq(FULL) & losses.condition.str.startswith("CPU")).any():
        sentences.append(
            "At the published size the authors' code was trained on a GPU alone, which imitates a CPU's sharing."
        )
    return sentences


def main_finding(table: pd.DataFrame) -> tuple[str, str]:
    """What a `published_table` says of the memory, and what of the device, in a sentence each."""
    losses = table[table.endpoint == LOSS]
    same_device = losses.condition.str[:3] == losses.reference.str[:3]
    devices = losses[~same_device]
    decided = listed(f"{row.condition.partition(', ')[2]}: {row.decision}" for row in devices.itertuples())
    return (
        f"In the authors' code the loss ends higher with {SHARED_MEMORY} in {_pairs(losses[same_device])} pairs of "
        "runs that were laid down beforehand and differ in nothing else.",
        f"Where only the device differs, the CPU's loss ends higher in {_pairs(losses[~same_device])} ({decided}).",
    )


def _pairs(rows: pd.DataFrame) -> str:
    return f"{rows.worse.sum()} of {rows.seeds.sum()}"


def _over_films(rows: pd.DataFrame) -> list[str]:
    """One comparison, of all its films together."""
    loss, share = (rows[rows.endpoint == endpoint] for endpoint in (LOSS, BEATS))
    seeds = loss.seeds.sum()
    films = f" on {len(loss)} films" if len(loss) > 1 else ""
    high, low = (name.replace(", ", " with ") for name in (loss.condition.iloc[0], loss.reference.iloc[0]))
    sentences = [
        f"{high}: the loss is {span(loss.ratio, '.2f')} times that of a {low}, higher for {loss.worse.sum()} of "
        f"{seeds} seeds{films} ({listed(dict.fromkeys(loss.decision))}); {share.beat.sum()} instead of "
        f"{share.beat_reference.sum()} of {seeds} beat repeating the last frame."
    ]
    with_blurred = share[share.beat_blurred.notna() & (share.beat_reference > 0)]
    if len(with_blurred):
        by_film = ", ".join(
            f"{row.beat_blurred:.0f} of {row.beat_reference} ({row.film})" for row in with_blurred.itertuples()
        )
        sentences.append(f"Of those {share.beat_reference.sum()}, {by_film} beat a blurred copy of it, too.")
    return sentences


def _film_words(rows: pd.DataFrame) -> str:
    """One comparison on one film."""
    share, loss = rows.loc[BEATS], rows.loc[LOSS]
    p = rows.p_holm.where(rows.decision != "equivalent", rows.p_equivalent)
    decided = rows.decision + ", p = " + p.map(p_text)
    machines = dict.fromkeys((share.machine_reference, share.machine))
    has_blurred = share.beat_blurred == share.beat_blurred
    blurred = f", {share.beat_blurred:g} of {share.seeds} a blurred copy of it" if has_blurred else ""
    return (
        f"{share.film} at {share['size'].replace('x', '×')}, {share.seeds} seeds ({', '.join(machines)}): "
        f"{share.reference}, {share.beat_reference} of {share.seeds} beat repeating the last frame{blurred}; "
        f"{share.condition}, {share.beat} of {share.seeds} beat repeating ({decided[BEATS]}). The loss is "
        f"{loss.ratio:.2f} times as high (median), higher for {loss.worse} of {loss.seeds} seeds ({decided[LOSS]})."
    )
