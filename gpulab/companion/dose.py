"""Dose and response: whether the bias that shared memory gives a gradient predicts how much worse training ends.

`benchmarks/record_dose.py` trains in cells, a length of window and a speed of motion each, every seed once on copied
frames and once on shared memory. A cell is what is counted: its seeds see one film, and are shared by all cells.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import ArrayLike

from gpulab.companion.anomaly import SPEED_COLOURS
from gpulab.companion.findings import SIZES, CheckedSentences
from gpulab.errors import UsageError
from gpulab.plots.style import INK, canvas, finished, is_recorded, key, origin_keys, points
from gpulab.records import recorded_folder
from gpulab.report import Picture
from gpulab.training import store

KIND = ["size", "setting", "machine"]  # of an experiment
CELL = [*KIND, "window", "speed"]
MARKS = "osD^v"  # of the lengths of a window
FEWEST = 5  # cells, whose ranks an interval needs


def recorded_dose() -> pd.DataFrame:
    """The recorded runs of `benchmarks/record_dose.py`, a row for a seed in a cell, as `dose_runs`."""
    files = sorted(recorded_folder("dose").glob("*.parquet"))
    return pd.concat([dose_runs(store.runs(file)) for file in files]).assign(recorded=True)


def dose_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Runs of the script, from `gpulab.runs`, with the `ratio` of the losses, shared over copied.

    Seeds that did not finish in every cell are left out, with a warning.

    Raises:
        UsageError: For other runs.
    """
    if missing := {"size", "window", "speed", "copied", "shared", "bias"} - set(frame.columns):
        raise UsageError(f"no column {min(missing)!r}: expected runs of benchmarks/record_dose.py")
    frame = frame.assign(ratio=frame.shared / frame.copied)
    kind = [frame[name] for name in KIND]
    cells = frame.groupby(CELL).ngroup().groupby(kind).transform("nunique")
    whole = (frame.status == "finished").groupby([*kind, frame.seed]).transform("sum") == cells
    if len(left := sorted(set(frame.seed[~whole]))):
        warnings.warn(f"seeds {left} left out: they did not finish in every cell", stacklevel=2)
    return frame[whole]


def dose_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a cell: `size`, `setting`, `machine`, `window` (frames), `speed`, `seeds`, their mean `bias` and
    `bias_first`, the geometric mean of their `ratio`, and in how many the loss is `worse`.

    Args:
        frame: From `recorded_dose` or `dose_runs`.
    """
    seen = frame.assign(log=np.log(frame.ratio), worse=frame.ratio > 1).groupby(CELL)
    parts = {"seeds": ("seed", "nunique"), "bias": ("bias", "mean"), "bias_first": ("bias_first", "mean")}
    table = seen.agg(**parts, ratio=("log", "mean"), worse=("worse", "sum")).reset_index()
    return table.assign(ratio=np.exp(table.ratio))


def rank_correlation(x: ArrayLike, y: ArrayLike, confidence: float = 0.95) -> tuple[float, float, float]:
    """Spearman's rank correlation of pairs, x and y of shape (n,), and its interval.

    Fisher's z with the variance (1 + ρ²/2) / (n − 3). Where all ranks agree, the interval is that of ranks of which
    two neighbours are exchanged: the formula's own would have no width.

    Raises:
        UsageError: For fewer than five pairs, or ranks that are all the same.

    Examples:
        >>> rho, low, high = rank_correlation([1, 2, 3, 4, 5, 6], [1, 3, 2, 4, 6, 5])
        >>> f"{rho:.3f}, {low:.2f} to {high:.2f}"
        '0.886, 0.07 to 0.99'

    References:
        Bonett, Wright 2000, *Sample size requirements for estimating Pearson, Kendall and Spearman correlations*.
    """
    from scipy.stats import norm, spearmanr

    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(x) < FEWEST or min(np.ptp(x), np.ptp(y)) == 0:
        raise UsageError(f"{len(x)} pairs: expected at least {FEWEST}, not all the same")
    rho = float(spearmanr(x, y).statistic)
    most = 1 - 12 / (len(x) * (len(x) ** 2 - 1))
    z = math.atanh(max(-most, min(rho, most)))
    reach = norm.ppf((1 + confidence) / 2) * math.sqrt((1 + rho**2 / 2) / (len(x) - 3))
    return rho, math.tanh(z - reach), math.tanh(z + reach)


def dose_finding(frame: pd.DataFrame) -> CheckedSentences:
    """Whether the bias predicts the loss, in a sentence for each size and setting.

    Args:
        frame: From `recorded_dose` or `dose_runs`.
    """
    said, numbers = [], []
    for (size, setting, machine), runs in frame.groupby(KIND, sort=False):
        cells = dose_table(runs)
        rho, low, high = rank_correlation(cells.bias, cells.ratio)
        alone = [rank_correlation(one.bias, one.ratio)[0] for _, one in runs.groupby("seed")]
        trend = "the loss is higher" if low > 0 else "the loss is lower" if high < 0 else "no trend is shown either way"
        said.append(
            f"{SIZES[size]}, {setting} ({machine}): with shared memory the loss is higher in "
            f"{(cells.ratio > 1).sum()} of {len(cells)} cells; where the gradient is further off, {trend}."
        )
        numbers.append(
            f"{SIZES[size]}, {setting} ({machine}), {cells.seeds.max()} seeds in {len(cells)} cells: the loss is "
            f"{cells.ratio.min():.2f} to {cells.ratio.max():.2f} times as high, where the gradient is off by "
            f"{cells.bias.min():.0%} to {cells.bias.max():.0%}. The rank correlation of the cells is {rho:+.2f} "
            f"(95 % interval {low:+.2f} to {high:+.2f}), in single seeds {min(alone):+.2f} to {max(alone):+.2f}."
        )
    return CheckedSentences([("Dose and response, in our own port", said)], numbers)


def dose_response(frame: pd.DataFrame) -> Picture:
    """The ratio of the final losses over the bias of the gradient: a faint point a seed, a large one a cell.

    Args:
        frame: From `recorded_dose` or `dose_runs`.
    """
    groups = [(kind, runs, dose_table(runs)) for kind, runs in frame.groupby(KIND, sort=False)][:2]
    figure, panels = canvas(len(groups), height=3.9)
    tints = dict(zip(sorted(frame.speed.unique()), SPEED_COLOURS, strict=False))
    marks = dict(zip(sorted(frame.window.unique()), MARKS, strict=False))
    for axes, ((size, setting, _), runs, cells) in zip(panels, groups, strict=True):
        axes.axhline(1, color=INK, lw=0.8, ls="--", zorder=1)
        hollow = bool(is_recorded(runs).any())
        for part, look in ((runs, {"s": 12, "alpha": 0.5, "linewidths": 0}), (cells, {"s": 60, "hollow": hollow})):
            for (window, speed), some in part.groupby(["window", "speed"]):
                points(axes, some.bias, some.ratio, tints[speed], marker=marks[window], **look)
        axes.set(xscale="log", yscale="log", xlabel="bias of the gradient (relative)")
        axes.set_title(f"{size} size, {setting}", fontsize=9)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel("final loss, shared over copied")
    worse = pd.concat([cells.ratio > 1 for *_, cells in groups])
    rho = " and ".join(f"{rank_correlation(c.bias, c.ratio)[0]:+.2f}" for *_, c in groups)
    keys = [key(f"speed {speed:g}", color=tint, marker="o", ls="") for speed, tint in tints.items()]
    keys += [key(f"windows of {window}", color=INK, marker=mark, ls="") for window, mark in marks.items()]
    headline = (
        f"Sharing memory ended worse in {worse.sum()} of {len(worse)} cells; rank correlation with the bias {rho}"
    )
    alt = "Ratio of the final losses, shared over copied, against the bias of the gradient, by window and speed."
    return finished(figure, headline, alt, [*keys, *origin_keys(frame)], columns=4)
