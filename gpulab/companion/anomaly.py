"""The anomaly: what one reused buffer does to a gradient, and to what is learned from it.

The loop that the paper's authors published fills one NumPy buffer per frame and wraps it for the device.
Where wrapping does not copy, the gradient of every step is taken against the window's last frame.

Source of the loop: `main.py` of github.com/eijwat/prednet_in_chainer_py3.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FuncFormatter, NullFormatter
from tqdm.auto import tqdm

from gpulab.data.datasets import Sequence, load
from gpulab.errors import UsageError
from gpulab.models.base import Trainable
from gpulab.plots.style import INK, canvas, key
from gpulab.report import Picture
from gpulab.stats.verdicts import Verdict, verdict
from gpulab.training.protocol import protocol
from gpulab.training.step import FirstWindow

if TYPE_CHECKING:
    import pandas as pd

FAR = 1000  # roundings: a gradient so far off is wrong
PLAIN = "copied"
SHARING = ("reused", "imitated")
# What the runs are judged by, laid down in data/README.md before they were made.
METRICS = ("final loss of all seeds", "share of seeds that did not learn", "final loss of the seeds that learned")
COLUMNS = ["experiment", "profile", "setting", "speed", "loader", "metric", "seeds", "decision", "difference", "low"]
COLUMNS += ["high", "relative", "margin", "p", "same_bits", "worse"]


def first_window(
    settings: list[str], net: str | Trainable = "prednet", seed: int = 0, profile: str = "quick"
) -> pd.DataFrame:
    """The first window of a training with the buffer reused against copied.

    Args:
        settings: the settings to look under.
        net: "prednet", "autoencoder" or a network.
        seed: draws the network's weights.
        profile: how large.

    Returns:
        A row per setting: `same_losses` counts the forward losses with the same bits, of `losses`;
        `gradient_difference` is relative, and `rounding` the relative distance of the copied gradient to that in
        float64, for scale.

    Examples:
        >>> first_window(["cpu"], "autoencoder", profile="smoke").gradient_difference.tolist()
        [0.0]
    """
    import pandas as pd

    network = net if isinstance(net, str) else f"{type(net).__name__.lower()}, trained"
    exact = FirstWindow(net, PLAIN, seed, profile).gradient("cpu:precision=float64")
    rows = []
    for setting in settings:
        copied, reused = (FirstWindow(net, loader, seed, profile).gradient(setting) for loader in (PLAIN, "reused"))
        rounding = copied.against(exact)["gradient_difference"]
        rows.append({"network": network, "setting": setting, **reused.against(copied), "rounding": rounding})
    return pd.DataFrame(rows)


def anomaly_verdicts(frame: pd.DataFrame, plateau: float, margin: str | float = "0.25sd") -> dict[str, Verdict]:
    """The three verdicts on shared against copied memory, of runs of one size, speed and device.

    A run that diverged did not learn; the third verdict takes the seeds that learned both ways.

    Args:
        frame: runs with the loader `copied` and one of `reused` and `imitated` (see `gpulab.runs`).
        plateau: a run whose final loss is not below it did not learn; `Sequence.missing_colour_loss` gives the least
            loss of a prediction that is black in one colour.
        margin: as for `gpulab.verdict`.

    Returns:
        A verdict for each of `METRICS`; not the third where no seed learned both ways.

    Raises:
        UsageError: for other loaders.
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
    return verdicts | ({METRICS[2]: verdict(learned, **options)} if len(learned) else {})


def anomaly_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`anomaly_verdicts` for every experiment, size, setting and speed in a frame of runs.

    Returns:
        A row per verdict: `metric`, `seeds`, `decision`, `difference` (shared minus copied) with its interval `low`,
        `high`, `relative` (to the mean with copied frames), `margin`, `p`, `same_bits` (seeds whose trained weights
        are identical) and `worse` (seeds whose loss is higher).
    """
    import pandas as pd

    groups = list(frame.groupby(["experiment", "profile", "setting", "data", "speed"], dropna=False))
    rows = []
    for (experiment, profile, setting, data, speed), runs in tqdm(groups, unit="verdict", leave=False):
        run = {"experiment": experiment, "profile": profile, "setting": setting, "speed": speed}
        plateau = _plateau(experiment, profile, data, speed, int(runs.frames.iloc[0]))
        for metric, judged in anomaly_verdicts(runs, plateau).items():
            (level,) = judged.table.rename(columns={"p_different": "p"}).to_dict("records")
            copied, difference = judged.pairs.reference, judged.pairs.difference
            relative = level["difference"] / copied.mean() if copied.any() else 0.0
            rows.append({**run, **level, "metric": metric, "relative": relative, "worse": int((difference > 0).sum())})
    return pd.DataFrame(rows, columns=COLUMNS)


def anomaly_finding(window: pd.DataFrame, table: pd.DataFrame) -> str:
    """What `first_window` and `anomaly_table` allow one to say, and what they do not, in sentences."""
    lines = []
    for row in window.itertuples():
        exact = row.gradient_difference == 0
        agrees = "agrees to the last bit" if exact else f"is off by {row.gradient_difference:.1e}"
        lines.append(
            f"{row.network} under {row.setting}, one window, reused against copied: {row.same_losses} of {row.losses} "
            f"forward losses have the same bits; the gradient {agrees} (rounding: {row.rounding:.0e})."
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
    for decision, alike in rows.groupby("decision", sort=False):
        change = alike.difference if METRICS[1] in set(alike.metric) else alike.relative
        speeds = "" if alike.speed.isna().all() else f" at speed {', '.join(f'{speed:g}' for speed in alike.speed)}"
        amount = f"{change.min():+.0%}" + (f" to {change.max():+.0%}" if len(alike) > 1 else "")
        parts.append(f"{decision}{speeds} ({amount}, higher in {alike.worse.sum()} of {alike.seeds.sum()} pairs)")
    return "; ".join(parts)


@functools.cache
def _plateau(experiment: str, profile: str, data: str, speed: float, frames: int) -> float:
    """The least loss of a network with a dead colour; none for images, where nothing of the kind is known."""
    if experiment != "prednet":
        return math.inf
    loaded = load(data, frames, protocol(experiment, profile).size, speed=1.0 if math.isnan(speed) else speed)
    return loaded.missing_colour_loss() if isinstance(loaded, Sequence) else math.inf


# --- figure ----------------------------------------------------------------------------------------------

SPEED_COLOURS = ("#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#222222")


def shared_memory(frame: pd.DataFrame) -> Picture:
    """Each seed's loss with shared memory against its loss with copied frames, by size and speed of motion.

    `frame` holds runs with the loader `copied` and with `reused` or `imitated`. Above the diagonal,
    sharing was worse.
    """
    groups = list(frame.groupby(["profile", "device"], sort=False))[:2]
    figure, panels = canvas(len(groups), height=3.7)
    markers = dict(zip(sorted(frame.speed.dropna().unique()), "os^Dv", strict=False))
    above = total = 0
    for axes, ((profile, device), runs) in zip(panels, groups, strict=True):
        wide = runs.pivot_table(index=["speed", "seed", "setting", "recorded"], columns="loader", values="final_loss")
        other = next(name for name in wide.columns if name != "copied")
        for (speed, recorded), pairs in wide.dropna().groupby(["speed", "recorded"]):
            tint = SPEED_COLOURS[list(markers).index(speed) % len(SPEED_COLOURS)]
            axes.scatter(
                pairs["copied"],
                pairs[other],
                marker=markers[speed],
                s=24,
                color="white" if recorded else tint,
                edgecolors=tint,
                label=f"speed {speed:g}",
                zorder=3,
            )
            above += int((pairs[other] > pairs["copied"]).sum())
            total += len(pairs)
        ends = [runs.final_loss.min() * 0.8, runs.final_loss.max() * 1.25]
        axes.plot(ends, ends, color=INK, lw=0.8, ls="--", zorder=1)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{profile} size, {device}: {other} against copied", fontsize=9)
        axes.set_xlabel("final loss, frames copied")
        axes.set_ylabel(f"final loss, buffer {other}")
    panels[-1].legend(fontsize=8, frameon=False, loc="lower right")
    figure.suptitle(f"Sharing memory gave the higher loss in {above} of {total} pairs of the same seed", fontsize=10)
    key(figure, frame)
    return Picture(figure, "Final loss with shared memory against final loss with copied frames, one point a seed.")
