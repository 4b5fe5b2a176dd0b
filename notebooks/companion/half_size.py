"""The authors' network at half size with copied frames: is a CPU like a GPU?"""

from __future__ import annotations

import numpy as np
import pandas as pd

import gpulab as gl
from gpulab.store import recorded
from gpulab.training._profiles import FINAL_LOSS_DIVISOR

HALF = "80x56"  # width and height, as the authors write them
LOOKS = 2  # the first sixteen seeds had been looked at
# The registered robust analysis.
TRIMMED = 0.2
CONFIDENCE = 0.975
RESAMPLES = 9_999


def half_size_losses(count: int | None = None) -> pd.DataFrame:
    """Return the final loss of each run of the authors' network at half size, frames copied.

    The walk at speed 2, frames of 80×56, the same seeds and frames on a CPU and on a GPU. Seeds 100
    to 115 have 250 windows. Seeds 116 to 131 were added under a registration, and their runs on the
    CPU ended with the time on the machine.

    Args:
        count: The number of windows of each run; by default as many as every new run has completed.

    Returns:
        The columns `device` (`cpu` or `cuda`), `seed`, `final_loss` (the mean of the last fifth of
        the windows), `windows`, and `added`, whether the seed was added.

    Raises:
        UsageError: If a run has fewer than `count` windows.

    Examples:
        >>> losses = half_size_losses()
        >>> losses.groupby("device").seed.nunique().to_dict()
        {'cpu': 32, 'cuda': 32}
    """
    runs = gl.recorded_runs("published")
    on_cpu = (runs.device == "cpu") & (runs.loader == "copied")
    on_gpu = (runs.device == "cuda") & (runs.loader == "reused") & runs.round_trip.eq(True)
    runs = runs[(runs["size"] == HALF) & (on_cpu | on_gpu)]
    history = gl.store.history(runs).sort_values("window").groupby("id").loss.apply(list)
    first = runs[["device", "seed"]].assign(losses=runs.id.map(history), added=False)
    new = recorded.recorded_table("published_half").rename(columns={"kind": "device"})
    found = pd.concat([first, new[["device", "seed", "losses"]].assign(added=True)])
    completed = found.losses.map(len)
    count = int(completed.min()) if count is None else count
    if completed.min() < count:
        raise gl.UsageError(
            f"count={count}: expected at most {completed.min()}, the number of windows that every"
            " run has completed"
        )
    last = max(1, count // FINAL_LOSS_DIVISOR)
    means = [float(np.mean(losses[count - last : count])) for losses in found.losses]
    found = found.assign(final_loss=means, windows=count).drop(columns="losses")
    return found.sort_values(["seed", "device"], ignore_index=True)


def compare_half_size(losses: pd.DataFrame) -> pd.DataFrame:
    """Compare the CPU with the GPU as registered.

    Args:
        losses: The result of `half_size_losses`.

    Returns:
        A row for all seeds, for the first sixteen and for the added ones: `pairs`, `higher` (seeds
        that end higher on the CPU), `margin` (a share of the mean loss on the GPU), and for two
        analyses of the differences between the devices, seed by seed: the mean, by
        `gpulab.verdict`, and the 20 % trimmed mean, which a few seeds cannot decide, with a
        bootstrap interval. Each has its `difference` and the limits `low` and `high` of the
        interval that decides about equivalence, all as shares of the mean loss on the GPU, and a
        `decision`. The correction for two looks applies to all seeds.

    References:
        Trimmed means: Wilcox 2017, *Introduction to robust estimation and hypothesis testing*; the
        bootstrap interval: Efron 1987, *Better bootstrap confidence intervals* (BCa).
    """
    subsets = {
        "all": losses,
        "the first sixteen": losses[~losses.added],
        "the added sixteen": losses[losses.added],
    }
    rows = []
    for seeds, subset in subsets.items():
        pairs = subset.pivot_table(index="seed", columns="device", values="final_loss").dropna()
        differences = (pairs.cpu - pairs.cuda).to_numpy()
        level = pairs.cuda.mean()
        verdict = gl.verdict(
            subset, factor="device", reference="cuda", looks=LOOKS if seeds == "all" else 1
        )
        found = verdict.table.iloc[0]
        shared = {
            "seeds": seeds,
            "pairs": len(pairs),
            "higher": int((differences > 0).sum()),
            "margin": found.margin / level,
        }
        mean = {
            "analysis": "mean",
            "difference": found.difference / level,
            "low": found.equivalent_low / level,
            "high": found.equivalent_high / level,
            "decision": found.decision,
        }
        robust = trimmed_mean_decision(differences / level, found.margin / level)
        rows += [shared | mean, shared | {"analysis": "trimmed mean"} | robust]
    columns = ["seeds", "pairs", "higher", "analysis", "difference", "low", "high", "margin"]
    return pd.DataFrame(rows)[[*columns, "decision"]]


def trimmed_mean_decision(differences: np.ndarray, margin: float) -> dict[str, object]:
    """Decide by the bootstrap interval of the trimmed mean of paired differences.

    Args:
        differences: The differences, at least five.
        margin: The largest negligible difference.

    Returns:
        `difference`, `low`, `high` and `decision`, as registered: `equivalent` if the interval lies
        within the margin, `different` if it does not contain zero, `different but negligible` if
        both are true, else `inconclusive`.

    Examples:
        >>> same = trimmed_mean_decision(np.linspace(-0.1, 0.1, 21), 1.0)
        >>> same["decision"]
        'equivalent'
    """
    from scipy import stats

    interval = stats.bootstrap(
        (differences,),
        lambda sample, axis: stats.trim_mean(sample, TRIMMED, axis=axis),
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    is_different = not interval.low <= 0 <= interval.high
    is_equivalent = -margin < interval.low and interval.high < margin
    decisions = {
        (True, True): "different but negligible",
        (True, False): "different",
        (False, True): "equivalent",
        (False, False): "inconclusive",
    }
    return {
        "difference": float(stats.trim_mean(differences, TRIMMED)),
        "low": float(interval.low),
        "high": float(interval.high),
        "decision": decisions[is_different, is_equivalent],
    }
