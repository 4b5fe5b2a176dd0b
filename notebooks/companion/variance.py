"""Where the variance of a metric comes from: the seed, the setting, both together, or a rerun."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gpulab.errors import UsageError
from gpulab.report import Report
from gpulab.stats.pairs import check_runs


@dataclass(frozen=True, eq=False)
class VarianceComponents(Report):
    """How much of a metric's variance comes from which source; `print` says it in lines.

    `variance_components` returns it.

    Attributes:
        metric: The name of the metric.
        table: A data frame with a row for each source: `source`, `variance`, `sd` (its square root) and `share` (of the
            sum of all variances).
        notes: Sentences on what could not be separated, and what was left out.

    Examples:
        >>> import pandas as pd
        >>> import companion
        >>> table = pd.DataFrame({"source": ["seed"], "variance": [4.0], "sd": [2.0], "share": [1.0]})
        >>> print(companion.VarianceComponents("loss", table, ()))
        Variance of loss:
          seed                     sd  2.00e+00   100.000% of the variance
    """

    metric: str
    table: pd.DataFrame  # a row per source: `source`, `variance`, `sd`, `share`
    notes: tuple[str, ...]  # what could not be separated or was left out

    def __str__(self) -> str:
        rows = self.table.itertuples()
        lines = [f"  {row.source:<24} sd {row.sd:9.2e}   {row.share:8.3%} of the variance" for row in rows]
        return "\n".join([f"Variance of {self.metric}:", *lines, *self.notes])


def variance_components(
    frame: pd.DataFrame, metric: str = "final_loss", factor: str = "setting", block: str = "seed"
) -> VarianceComponents:
    """Split the variance of a metric into the parts of seed, setting, their interaction and reruns.

    This is an analysis of variance with random effects, in closed form. It uses the seeds that finished under every
    setting. Each cell, a seed under a setting, counts with the mean of its runs. Only some cells need to have been run
    again; where none was, the interaction of seed and setting and the effect of a rerun are one component. An estimate
    below zero is shown as zero.

    Args:
        frame: A data frame with a row for each run, as from `gpulab.runs`.
        metric: The column to analyse, of numbers or booleans.
        factor: The column of the first source, usually the setting.
        block: The column of the second source, usually the seed.

    Returns:
        The `VarianceComponents`, whose `table` has a row for each source.

    Raises:
        UsageError: For fewer than two levels, for fewer than two seeds that finished under all of them, and for what
            `verdict` refuses.

    Examples:
        >>> import pandas as pd
        >>> import companion
        >>> rows = [(seed, setting, 10.0 * seed) for seed in range(3) for setting in ("cpu", "cuda")]
        >>> frame = pd.DataFrame(rows, columns=["seed", "setting", "final_loss"])
        >>> companion.variance_components(frame).table.set_index("source").variance["seed"].item()
        100.0

    References:
        Searle, Casella, McCulloch 1992, *Variance components*, ch. 4.
    """
    runs = check_runs(frame, metric, factor, block)
    cells = runs[runs.status == "finished"].groupby([factor, block], observed=True)[metric].agg(["mean", "var", "size"])
    means = cells["mean"].unstack(factor)
    complete = means.dropna()
    n, k = complete.shape
    if n < 2 or k < 2:
        raise UsageError(f"{n} {block}(s) finished under all of {k} {factor}(s); at least 2 of each are needed")
    values = complete.to_numpy(float)
    rows, columns = values.mean(axis=1), values.mean(axis=0)
    residual = ((values - rows[:, None] - columns + values.mean()) ** 2).sum() / ((n - 1) * (k - 1))
    variances = {block: rows.var(ddof=1) - residual / k, factor: columns.var(ddof=1) - residual / n}
    notes = []
    if incomplete := len(means) - n:
        notes.append(f"{incomplete} {block}(s) did not finish under every {factor} and were left out.")
    cells = cells[cells.index.get_level_values(block).isin(complete.index)]
    repeated = cells[cells["size"] > 1]
    if len(repeated):
        freedom = repeated["size"] - 1
        rerun = np.average(repeated["var"], weights=freedom)
        variances |= {f"{block} × {factor}": residual - rerun * (1 / cells["size"]).mean(), "rerun": rerun}
        notes.append(f"Reruns: {int(freedom.sum())} in {len(repeated)} of {n * k} cells.")
    else:
        variances[f"{block} × {factor}, rerun"] = residual
        notes.append(f"Nothing was run twice, so {block} × {factor} and rerun cannot be told apart.")
    table = pd.DataFrame({"source": list(variances), "variance": np.maximum(0.0, [*variances.values()])})
    table["sd"] = np.sqrt(table.variance)
    table["share"] = table.variance / (table.variance.sum() or math.nan)
    return VarianceComponents(metric, table, tuple(notes))
