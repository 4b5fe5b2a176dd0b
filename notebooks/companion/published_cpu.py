"""The authors' network at the published size on a CPU, compared with recorded runs on a GPU."""

from __future__ import annotations

import pandas as pd

import gpulab as gl
from gpulab.store import recorded
from gpulab.training._profiles import FINAL_LOSS_DIVISOR

# The conditions of the registered comparison, by device and loader.
CONDITIONS = {
    ("cpu", "reused"): "CPU, as published",
    ("cpu", "copied"): "CPU, frames copied",
    ("gpu", "reused"): "GPU, as published",
    ("gpu", "shared"): "GPU, overwriting imitated",
}
COLUMNS = ["seed", "loader", "window", "loss"]
# The registered comparisons: a condition and its reference; the primary comparison comes first.
COMPARISONS = [
    ("CPU, as published", "GPU, as published"),
    ("CPU, as published", "GPU, overwriting imitated"),
    ("CPU, frames copied", "GPU, as published"),
    ("CPU, as published", "CPU, frames copied"),
]


def published_windows() -> pd.DataFrame:
    """Return the loss of each window of the authors' network, on a CPU and on a GPU.

    The walk at speed 2, frames of 160×120, the same seeds and frames on both devices. On a CPU,
    frames that are wrapped as published are overwritten; on a GPU they are copied.

    Returns:
        The columns `condition`, `seed`, `window` and `loss`. Runs on the CPU ended with the time on
        the machine, at 49 windows or more; those on the GPU have 250.
    """
    on_cpu = recorded.recorded_table("published_cpu")[COLUMNS].assign(kind="cpu")
    runs = gl.recorded_runs("published")
    at_size = (runs.data == "walk") & (runs["size"] == "160x120") & runs.round_trip.eq(True)
    runs = runs[at_size & (runs.device == "cuda")]
    history = gl.store.history(runs)[["id", "window", "loss"]]
    on_gpu = history.merge(runs[["id", "seed", "loader"]], on="id")[COLUMNS].assign(kind="gpu")
    windows = pd.concat([on_cpu, on_gpu], ignore_index=True)
    pairs = zip(windows.kind, windows.loader, strict=True)
    windows["condition"] = [CONDITIONS[pair] for pair in pairs]
    return windows[["condition", "seed", "window", "loss"]]


def count_common_windows(windows: pd.DataFrame) -> int:
    """Return the number of windows that every run on the CPU has completed."""
    on_cpu = windows[windows.condition.str.startswith("CPU")]
    return 1 + int(on_cpu.groupby(["condition", "seed"]).window.max().min())


def published_losses(windows: pd.DataFrame, count: int | None = None) -> pd.DataFrame:
    """Return the mean loss over the last fifth of the first `count` windows of each run.

    Args:
        windows: The result of `published_windows`.
        count: A number of windows; by default those that every run on the CPU has completed.

    Returns:
        The columns `condition`, `seed` and `final_loss`.

    Examples:
        >>> losses = published_losses(published_windows())
        >>> losses.condition.nunique()
        4
    """
    count = count_common_windows(windows) if count is None else count
    first = count - max(1, count // FINAL_LOSS_DIVISOR)
    counted = windows[(windows.window >= first) & (windows.window < count)]
    losses = counted.groupby(["condition", "seed"]).loss.mean()
    return losses.rename("final_loss").reset_index()


def compare_published(losses: pd.DataFrame) -> pd.DataFrame:
    """Compare the conditions as registered.

    Args:
        losses: The result of `published_losses`.

    Returns:
        A row for each comparison: `condition`, `reference`, `pairs`, `higher` (seeds that end
        higher), `median_ratio`, `largest_distance` (the largest relative difference of a pair),
        the `p` of the exact sign test, and `p_holm`, corrected over the four comparisons; and the
        `decision` of `gpulab.verdict` about the mean.
    """
    from scipy.stats import binomtest
    from statsmodels.stats.multitest import multipletests

    table = losses.pivot_table(index="seed", columns="condition", values="final_loss")
    rows = []
    for condition, reference in COMPARISONS:
        ratios = (table[condition] / table[reference]).dropna()
        higher = int((ratios > 1).sum())
        pair = losses[losses.condition.isin([condition, reference])]
        verdict = gl.verdict(pair, factor="condition", reference=reference)
        rows.append(
            {
                "condition": condition,
                "reference": reference,
                "pairs": len(ratios),
                "higher": higher,
                "median_ratio": ratios.median(),
                "largest_distance": (ratios - 1).abs().max(),
                "p": binomtest(higher, len(ratios)).pvalue,
                "decision": verdict.table.decision.iloc[0],
            }
        )
    compared = pd.DataFrame(rows)
    compared["p_holm"] = multipletests(compared.p, method="holm")[1]
    return compared


def ratios_by_windows(windows: pd.DataFrame, counts: list[int]) -> pd.DataFrame:
    """Return how the effect of overwriting on the GPU changes with the number of windows.

    Args:
        windows: The result of `published_windows`.
        counts: Numbers of windows.

    Returns:
        A row for each number: `windows`, `median_ratio` of overwritten to copied frames, `higher`
        and `pairs`.
    """
    rows = []
    for count in counts:
        losses = published_losses(windows, count)
        table = losses.pivot_table(index="seed", columns="condition", values="final_loss")
        ratios = (table["GPU, overwriting imitated"] / table["GPU, as published"]).dropna()
        rows.append(
            {
                "windows": count,
                "median_ratio": ratios.median(),
                "higher": int((ratios > 1).sum()),
                "pairs": len(ratios),
            }
        )
    return pd.DataFrame(rows)
