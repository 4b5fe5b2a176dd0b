"""What escapes and curvature allow one to say of the claim that rounding helps networks past saddle points."""

from __future__ import annotations

import math

import pandas as pd

from gpulab.errors import UsageError
from gpulab.stats.verdicts import verdict

COMPARED = {"index_fraction": "share of ways down", "smallest": "steepest way down"}


def saddle_finding(escapes: pd.DataFrame | None = None, curvature: pd.DataFrame | None = None) -> str:
    """Sentences about escapes and curvature, or one of them.

    Args:
        escapes: The `table` of `gpulab.escape_table`.
        curvature: From `gpulab.curvature_along`.

    Raises:
        UsageError: Where both are missing.

    Examples:
        >>> import gpulab, torch
        >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
        >>> saddle = gpulab.linear_autoencoder_saddle(data, [1])
        >>> escapes = gpulab.escape_table(saddle, ["cpu:precision=float64"], perturbations=[1e-3], progress=False)
        >>> saddle_finding(escapes.table).splitlines()[0][:43]
        'Pushed off the saddle (made here), 1 of 1 l'
    """
    if escapes is None and curvature is None:
        raise UsageError("saddle_finding: expected escapes, curvature, or both")
    lines = [] if escapes is None else _escapes(escapes)
    return "\n".join(lines + ([] if curvature is None else _curvature(curvature)))


def _escapes(table: pd.DataFrame) -> list[str]:
    lines = []
    whole = table.batch_size == 0
    pushed, alone = table[whole & (table.perturbation > 0)], table[whole & (table.perturbation == 0)]
    for recorded, rows in pushed.groupby("recorded"):
        left = rows[rows.left & (rows.expected > 1)]
        ratio = (left.steps / left.expected).median()
        after = f", after {ratio:.3f} times the steps that theory expects" if len(left) else ""
        lines.append(f"Pushed off the saddle ({_where(recorded)}), {len(left)} of {len(rows)} left{after} (median).")
    for (recorded, setting), rows in alone.groupby(["recorded", "setting"], sort=False):
        left = rows[rows.left]
        times = f"after {left.steps.median():,.0f} steps" if len(left) else "never"
        lines.append(
            f"{setting} ({_where(recorded)}{', emulated' if rows.emulated.any() else ''}): its rounding moves as "
            f"{rows.noise.median():.1e} would; {len(left)} of {len(rows)} left, {int(rows.held.sum())} held; {times}, "
            f"theory {rows.expected.median():,.0f}."
        )
    for (recorded, setting, size), rows in table[~whole].groupby(["recorded", "setting", "batch_size"], sort=False):
        rounding = alone[(alone.setting == setting) & (alone.recorded == recorded) & (alone.noise > 0)]
        text = f"{setting} with batches of {size}: noise of {rows.noise.median():.1e}"
        if len(rounding):
            orders = math.log10(rows.noise.median() / rounding.noise.median())
            text += f", {orders:.1f} orders of magnitude above its rounding"
        lines.append(f"{text}; {int(rows.left.sum())} of {len(rows)} left, median {rows.steps.median():,.0f} steps.")
    if len(alone):
        free, held = (", ".join(alone.setting[which].unique()) for which in (alone.left, alone.held))
        claims = [f"rounding alone leads away under {free}"] if free else []
        claims += [f"holds the network where it is under {held}"] if held else []
        lines.append(f"So {' and '.join(claims)}." if claims else "So rounding alone led away under no setting.")
    return lines + _same_batches(table[~whole])


def _same_batches(table: pd.DataFrame) -> list[str]:
    """What the same minibatches do in different arithmetic: the article's explanation, put to the test."""
    steps = table.pivot_table(index=["recorded", "batch_size", "seed"], columns="setting", values="steps").dropna()
    if steps.shape[1] < 2 or len(steps) < 2:
        return []
    arithmetic = float((steps.max(axis=1) / steps.min(axis=1) - 1).median())
    seeds = float((steps.max() / steps.min() - 1).median())
    batches = "So with minibatches it is the batches that lead away, and the arithmetic hardly matters."
    both = "So even with minibatches the arithmetic matters here as much as the seed."
    return [
        f"With the same minibatches, the escape takes {arithmetic:.1%} longer in the slowest arithmetic than in the "
        f"fastest (median of {len(steps)} seeds); from seed to seed it takes up to {seeds:.0%} longer.",
        batches if arithmetic < seeds / 2 else both,
    ]


def _curvature(frame: pd.DataFrame) -> list[str]:
    lines = []
    for (network, size, recorded), rows in frame.groupby(["experiment", "profile", "recorded"], sort=False):
        where = f"{network}, {size} size ({_where(recorded)})"
        measured = rows.dropna(subset=["loss", "index_fraction"])
        r = measured.loss.corr(measured.index_fraction, method="spearman", min_periods=3)
        lines.append(f"{where}: rank correlation of loss and share of ways down {r:+.2f}, {len(measured)} snapshots.")
    for (network, size), rows in frame.groupby(["experiment", "profile"], sort=False):
        ended = rows[rows.final].drop_duplicates(["setting", "seed"])
        for metric, name in COMPARED.items() if ended.setting.nunique() > 1 else ():
            judged = verdict(ended, metric=metric)
            decisions = "; ".join(f"{setting} {decision}" for setting, decision in judged.decisions.items())
            where = f"{network}, {size} size, at the end of training"
            lines.append(f"{where}, {name}, against {judged.reference}: {decisions}.")
    return lines


def _where(recorded: bool) -> str:
    return "recorded" if recorded else "made here"
