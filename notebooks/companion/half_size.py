"""The authors' network at half size with copied frames: is a CPU like a GPU?"""

from __future__ import annotations

import numpy as np
import pandas as pd

import gpulab as gl
from companion.paired_analyses import compare_pairs
from gpulab.store import recorded
from gpulab.training._profiles import FINAL_LOSS_DIVISOR

HALF = "80x56"  # width and height, as the authors write them
LOOKS = 2  # the first sixteen seeds had been looked at


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
    """
    subsets = {
        "all": losses,
        "the first sixteen": losses[~losses.added],
        "the added sixteen": losses[losses.added],
    }
    tables = []
    for seeds, subset in subsets.items():
        looks = LOOKS if seeds == "all" else 1
        table = compare_pairs(subset, "device", reference="cuda", looks=looks)
        pairs = subset.pivot_table(index="seed", columns="device", values="final_loss").dropna()
        tables.append(table.assign(seeds=seeds, higher=int((pairs.cpu > pairs.cuda).sum())))
    columns = ["seeds", "pairs", "higher", "analysis", "difference", "low", "high", "margin"]
    return pd.concat(tables, ignore_index=True)[[*columns, "decision"]]
