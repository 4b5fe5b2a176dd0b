"""The anomaly: what one reused buffer does to a gradient, and to what is learned from it.

The loop that the paper's authors published (`main.py` of github.com/eijwat/prednet_in_chainer_py3) fills one NumPy
buffer per frame and wraps it for the device. Where wrapping does not copy, the gradient of every step is taken against
the window's last frame.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pandas as pd
from matplotlib.ticker import NullFormatter
from tqdm.auto import tqdm

from gpulab.data.datasets import Sequence, load
from gpulab.errors import UsageError
from gpulab.models.base import Trainable
from gpulab.plots.style import INK, Look, canvas, finished, origin_keys, points
from gpulab.report import Picture
from gpulab.stats.verdicts import Verdict, verdict
from gpulab.training.protocol import protocol
from gpulab.training.step import FirstWindow

FAR = 1000  # roundings: a gradient so far off is wrong
PLAIN = "copied"
SHARING = ("reused", "imitated")
# What the runs are judged by, laid down in data/README.md before they were made.
METRICS = ("final loss of all seeds", "share of seeds that did not learn", "final loss of the seeds that learned")
COLUMNS = "experiment profile setting speed loader metric seeds decision difference low high relative margin p"
COLUMNS += " same_bits worse"
SPEED_COLOURS = ("#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#222222")


def first_window(
    settings: list[str], net: str | Trainable = "prednet", seed: int = 0, profile: str = "quick"
) -> pd.DataFrame:
    """The first window with the buffer reused against copied.

    Args:
        settings: Under which to compute, a row for each.
        net: A model's name, or a network, trained or not.
        seed: Of the weights, where a name is given.
        profile: How large.

    Returns:
        `same_losses` counts the forward losses with the same bits, of `losses`; `gradient_difference` is
        relative, and `rounding` the relative distance of the copied gradient to that in float64, for scale.

    Examples:
        >>> first_window(["cpu"], "autoencoder", profile="smoke").gradient_difference.tolist()
        [0.0]
    """
    copied, reused = (FirstWindow(net, loader, seed, profile) for loader in (PLAIN, "reused"))
    exact = copied.gradient("cpu:precision=float64")
    name = net if isinstance(net, str) else f"{type(net).__name__.lower()}, trained"
    rows = []
    for setting in settings:
        right = copied.gradient(setting)
        rounding = right.against(exact)["gradient_difference"]
        differences = reused.gradient(setting).against(right)
        rows.append({"network": name, "setting": setting, **differences, "rounding": rounding})
    return pd.DataFrame(rows)


def anomaly_verdicts(frame: pd.DataFrame, plateau: float, margin: str | float = "0.25sd") -> dict[str, Verdict]:
    """The three verdicts on shared against copied memory; the third takes the seeds that learned both ways.

    Args:
        frame: Runs of one size, speed and device, with the loader `copied` and one of `reused` and `imitated`.
        plateau: A run whose final loss is not below it, or that diverged, did not learn.
        margin: As of `gpulab.verdict`.

    Returns:
        A verdict for each of `METRICS`, without the third where no seed learned both ways.

    Raises:
        UsageError: For other loaders.
    """
    loaders = set(frame.loader)
    if PLAIN not in loaders or len(loaders & set(SHARING)) != 1 or len(loaders) != 2:
        raise UsageError(f"loaders {sorted(loaders)}: expected {PLAIN!r} and one of {', '.join(SHARING)}")
    stuck = ~(frame.final_loss < plateau)
    learned = frame[~stuck.groupby(frame.seed).transform("any")]
    options: dict[str, Any] = {"factor": "loader", "reference": PLAIN, "margin": margin}
    verdicts = {
        METRICS[0]: verdict(frame, **options),
        METRICS[1]: verdict(frame.assign(stuck=stuck, status="finished"), metric="stuck", **options),
    }
    if len(learned):
        verdicts[METRICS[2]] = verdict(learned, **options)
    return verdicts


def anomaly_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`anomaly_verdicts` for every experiment, size, setting and speed in a frame of runs.

    Returns:
        A row each: `metric`, `seeds`, `decision`, `difference` (shared minus copied) with its interval `low`,
        `high`, `relative` (to the mean with copied frames), `margin`, `p`, `worse` (seeds whose loss is higher)
        and `same_bits` (seeds whose trained weights are identical).
    """
    rows = []
    groups = list(frame.groupby(["experiment", "profile", "setting", "data", "speed"], dropna=False))
    for (experiment, profile, setting, data, speed), runs in tqdm(groups, unit="verdict", leave=False):
        common = {"experiment": experiment, "profile": profile, "setting": setting, "speed": speed}
        plateau = _plateau(experiment, profile, data, speed, int(runs.frames.iloc[0]))
        for metric, judged in anomaly_verdicts(runs, plateau).items():
            (level,) = judged.table.rename(columns={"p_different": "p"}).to_dict("records")
            copied, worse = judged.pairs.reference, int((judged.pairs.difference > 0).sum())
            relative = level["difference"] / copied.mean() if copied.any() else 0.0
            rows.append({**common, **level, "metric": metric, "relative": relative, "worse": worse})
    return pd.DataFrame(rows, columns=COLUMNS.split())


@functools.cache
def _plateau(experiment: str, profile: str, data: str, speed: float, frames: int) -> float:
    """The least loss of a network with a dead colour; none for images, where nothing of the kind is known."""
    if experiment != "prednet":
        return math.inf
    loaded = load(data, frames, protocol(experiment, profile).size, speed=1.0 if math.isnan(speed) else speed)
    return loaded.missing_colour_loss() if isinstance(loaded, Sequence) else math.inf


def anomaly_finding(window: pd.DataFrame, table: pd.DataFrame) -> str:
    """What `first_window` and `anomaly_table` allow one to say, and what they do not, in sentences."""
    lines = []
    for row in window.itertuples():
        off = f"is off by {row.gradient_difference:.1e}" if row.gradient_difference else "agrees to the last bit"
        lines.append(
            f"{row.network} under {row.setting}, one window, reused against copied: {row.same_losses} of {row.losses} "
            f"forward losses have the same bits; the gradient {off} (rounding: {row.rounding:.0e})."
        )
    keys = ["experiment", "profile", "setting", "loader"]
    for (experiment, size, setting, loader), rows in table.groupby(keys, sort=False):
        where = f"{experiment}, {size} size, {setting}, {loader} against {PLAIN}"
        whole = rows[rows.metric == METRICS[0]]
        if (whole.same_bits == whole.seeds).all():
            lines.append(f"{where}: the same bits in {whole.same_bits.sum()} of {whole.seeds.sum()} pairs of runs.")
            continue
        lines += [f"{where}, {metric}: {_decisions(rows[rows.metric == metric])}." for metric in METRICS]
    if (window.gradient_difference > FAR * window.rounding).any():
        lines.append("So where wrapping shares memory, the published loop computes a wrong gradient and never says so.")
    lines.append(
        "How much of the published gap this explains is not known: the film and the exact version of the code that "
        "were used are not at hand."
    )
    return "\n".join(lines)


def _decisions(rows: pd.DataFrame) -> str:
    """The verdicts at each speed in one sentence: `different at speeds 1, 2 (+51% to +80%)`."""
    parts = []
    for decision, some in rows.groupby("decision", sort=False):
        size = some.difference if METRICS[1] in set(some.metric) else some.relative
        speeds = "" if some.speed.isna().all() else f" at speed {', '.join(f'{speed:g}' for speed in some.speed)}"
        amount = f"{size.min():+.0%}" if len(some) == 1 else f"{size.min():+.0%} to {size.max():+.0%}"
        parts.append(f"{decision}{speeds} ({amount}, higher in {some.worse.sum()} of {some.seeds.sum()} pairs)")
    return "; ".join(parts)


def shared_memory(frame: pd.DataFrame) -> Picture:
    """Each seed's loss with shared memory against its loss with copied frames, by size and speed of motion.

    Above the diagonal, sharing was worse.

    Args:
        frame: Runs with the loader `copied` and with `reused` or `imitated`.
    """
    groups = list(frame.groupby(["profile", "device"], sort=False))[:2]
    figure, panels = canvas(len(groups), height=3.7)
    looks = dict(zip(sorted(frame.speed.dropna().unique()), zip("os^Dv", SPEED_COLOURS, strict=True), strict=False))
    higher = []
    for axes, ((profile, device), runs) in zip(panels, groups, strict=True):
        losses = runs.pivot_table(index=["speed", "seed", "setting", "recorded"], columns="loader", values="final_loss")
        (shared,) = set(losses.columns) - {PLAIN}
        for (speed, recorded), pairs in losses.dropna().groupby(["speed", "recorded"]):
            marker, tint = looks[speed]
            look: Look = {"marker": marker, "s": 24, "linewidths": None, "label": f"speed {speed:g}"}
            points(axes, pairs[PLAIN], pairs[shared], tint, recorded, **look)
            higher += list(pairs[shared] > pairs[PLAIN])
        ends = [runs.final_loss.min() * 0.8, runs.final_loss.max() * 1.25]
        axes.plot(ends, ends, color=INK, lw=0.8, ls="--", zorder=1)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{profile} size, {device}: {shared} against copied", fontsize=9)
        axes.set(xlabel="final loss, frames copied", ylabel=f"final loss, buffer {shared}")
    panels[-1].legend(fontsize=8, frameon=False, loc="lower right")
    headline = f"Sharing memory gave the higher loss in {sum(higher)} of {len(higher)} pairs of the same seed"
    alt = "Final loss with shared memory against final loss with copied frames, one point a seed."
    return finished(figure, headline, alt, origin_keys(frame), columns=1)
