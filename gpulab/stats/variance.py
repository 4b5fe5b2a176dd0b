"""Where the variance of a metric comes from: the seed, the setting, both together, or a rerun."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from gpulab.errors import UsageError
from gpulab.report import Report, paragraphs
from gpulab.report import table as html_table
from gpulab.stats.pairs import check_runs


@dataclass(frozen=True, eq=False)
class VarianceComponents(Report):
    """The variance of a metric split by source; `components[source]` is one, `print` shows all."""

    metric: str
    table: pd.DataFrame  # a row per source: `source`, `variance`, `sd`, `share`
    notes: tuple[str, ...]  # what could not be separated or was left out

    def __getitem__(self, source: str) -> float:
        """The variance from one source; `UsageError` for one that was not estimated."""
        variances = self.table.set_index("source").variance
        if source not in variances:
            raise UsageError(f"no component {source!r}; there are {', '.join(variances.index)}")
        return float(variances[source])

    def __str__(self) -> str:
        rows = self.table.itertuples()
        lines = [f"  {row.source:<24} sd {row.sd:9.2e}   {row.share:8.3%} of the variance" for row in rows]
        return "\n".join([f"Variance of {self.metric}:", *lines, *self.notes])

    def html(self) -> str:
        """The table and the notes."""
        return html_table(self.table) + paragraphs(self.notes)


def variance_components(
    frame: pd.DataFrame, metric: str = "final_loss", factor: str = "setting", block: str = "seed"
) -> VarianceComponents:
    """Split the variance of a metric into seed, setting, their interaction and rerun.

    Random-effects analysis of variance in closed form, of the unweighted means of cells, on the seeds that finished
    under every setting. Reruns may be of some cells only; without any, interaction and rerun are one component.
    Estimates below zero are shown as zero.

    Args:
        frame: a row per run, as from `gpulab.runs`.
        metric: a column of numbers or of booleans.
        factor, block: the columns of the two sources.

    Raises:
        UsageError: for fewer than two levels or fewer than two complete seeds, and for what `verdict` refuses.

    Examples:
        >>> import pandas as pd
        >>> rows = [(seed, setting, 10.0 * seed) for seed in range(3) for setting in ("cpu", "cuda")]
        >>> frame = pd.DataFrame(rows, columns=["seed", "setting", "final_loss"])
        >>> variance_components(frame)["seed"]
        100.0

    References:
        Searle, Casella and McCulloch 1992, Variance Components, ch. 4.
    """
    runs = check_runs(frame, metric, factor, block)
    runs = runs[runs.status == "finished"]
    cells = runs.groupby([factor, block], observed=True)[metric].agg(["mean", "var", "size"])
    means = cells["mean"].unstack(factor)
    complete = means.dropna()
    n, k = complete.shape
    if n < 2 or k < 2:
        raise UsageError(f"{n} {block}(s) finished under all of {k} {factor}(s); at least 2 of each are needed")
    values = complete.to_numpy(float)
    grand, rows, columns = values.mean(), values.mean(axis=1), values.mean(axis=0)
    square_block = k * ((rows - grand) ** 2).sum() / (n - 1)
    square_factor = n * ((columns - grand) ** 2).sum() / (k - 1)
    residual = ((values - rows[:, None] - columns + grand) ** 2).sum() / ((n - 1) * (k - 1))
    variances = {block: (square_block - residual) / k, factor: (square_factor - residual) / n}
    notes = []
    if incomplete := len(means) - n:
        notes.append(f"{incomplete} {block}(s) did not finish under every {factor} and were left out.")
    cells = cells[cells.index.get_level_values(block).isin(complete.index)]
    repeated = cells[cells["size"] > 1]
    if len(repeated):
        freedom = repeated["size"] - 1
        rerun = float((repeated["var"] * freedom).sum() / freedom.sum())
        variances[f"{block} × {factor}"] = residual - rerun * float((1 / cells["size"]).mean())
        variances["rerun"] = rerun
        notes.append(f"Reruns: {int(freedom.sum())} in {len(repeated)} of {n * k} cells.")
    else:
        variances[f"{block} × {factor}, rerun"] = residual
        notes.append(f"Nothing was run twice, so {block} × {factor} and rerun cannot be told apart.")
    table = pd.DataFrame({"source": list(variances), "variance": np.maximum(0.0, [*variances.values()])})
    total = sum(table.variance)
    table["sd"] = np.sqrt(table.variance)
    table["share"] = table.variance / total if total else math.nan
    return VarianceComponents(metric, table, tuple(notes))
