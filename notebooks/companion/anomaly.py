"""The anomaly: what one reused buffer does to a gradient, and to what is learned from it.

The loop that the paper's authors published (`main.py` of github.com/eijwat/prednet_in_chainer_py3) fills one NumPy
buffer per frame and wraps it for the device. Where wrapping does not copy, the gradient of every step is taken against
the window's last frame.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.ticker import NullFormatter

from companion.findings import CheckedSentences, Part
from companion.first_windows import FirstWindow
from companion.learning import learning_table
from gpulab.models.base import Trainable
from gpulab.plots.style import INK, Look, canvas, finished, origin_keys, points
from gpulab.report import Picture

FAR = 1000  # roundings: a gradient so far off is wrong
PLAIN = "copied"
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


def anomaly_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`learning_table` of shared against copied memory, for every experiment, size and setting."""
    return learning_table(frame, "loader", PLAIN)


def window_finding(row: Any) -> str:
    """A row of `first_window` in a sentence."""
    off = f"is off by {row.gradient_difference:.1%}" if row.gradient_difference else "agrees to the last bit"
    return (
        f"{row.network}, {row.setting}: {row.same_losses} of {row.losses} forward losses of the window have the same "
        f"bits, the gradient {off} (rounding: {100 * row.rounding:.0e} %)."
    )


def anomaly_finding(window: pd.DataFrame, table: pd.DataFrame) -> CheckedSentences:
    """What `first_window` and `anomaly_table` allow one to say, and what they do not."""
    parts: list[tuple[str, Part]] = [("The first window", [window_finding(row) for row in window.itertuples()])]
    parts.append(("What is learned, with shared memory against copied frames", table))
    if (window.gradient_difference > FAR * window.rounding).any():
        said = "Where wrapping shares memory, the published loop computes a wrong gradient and never says so."
        parts.append(("So", said))
    return CheckedSentences(parts)


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
            higher.append((pairs[shared] > pairs[PLAIN]).mean())
        ends = [runs.final_loss.min() * 0.8, runs.final_loss.max() * 1.25]
        axes.plot(ends, ends, color=INK, lw=0.8, ls="--", zorder=1)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{profile} size, {device}: {shared} against copied", fontsize=9)
        axes.set(xlabel="final loss, frames copied", ylabel=f"final loss, buffer {shared}")
    panels[-1].legend(fontsize=8, frameon=False, loc="lower right")
    least, most = (f"{share:.0%}" for share in (min(higher), max(higher)))
    seeds = f"{least} to {most}" if least != most else least
    headline = f"Sharing memory gave the higher loss for {seeds} of the seeds, by size and speed"
    alt = "Final loss with shared memory against final loss with copied frames, one point a seed."
    return finished(figure, headline, alt, origin_keys(frame), columns=1)
