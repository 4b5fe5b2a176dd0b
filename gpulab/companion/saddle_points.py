"""What escapes and curvature allow one to say of the claim that rounding helps networks past saddle points."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpulab.errors import UsageError
from gpulab.stats.verdicts import verdict

if TYPE_CHECKING:
    import pandas as pd

COMPARED = {"index_fraction": "share of ways down", "smallest": "steepest way down"}


def saddle_finding(escapes: pd.DataFrame | None = None, curvature: pd.DataFrame | None = None) -> str:
    """Sentences about escapes (`gpulab.escape_table`'s table) and curvature (`gpulab.curvature_along`), or one of them.

    Settings are compared where two or more of one machine or more looked at the same seeds.

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
    pushed = table[(table.perturbation > 0) & (table.batch_size == 0)]
    alone = table[(table.perturbation == 0) & (table.batch_size == 0)]
    lines = [_law(rows, bool(recorded)) for recorded, rows in pushed.groupby("recorded")]
    for (recorded, setting), rows in alone.groupby(["recorded", "setting"], sort=False):
        lines.append(_by_rounding(rows, setting, bool(recorded)))
    lines += _minibatches(table, alone)
    if len(alone):
        lines.append(_claim(alone))
    return lines + _answer(table)


def _law(rows: pd.DataFrame, recorded: bool) -> str:
    left = rows[rows.left & (rows.expected > 1)]
    ratio = f", after {(left.steps / left.expected).median():.3f} times the steps that theory expects" * bool(len(left))
    return f"Pushed off the saddle ({_where(recorded)}), {len(left)} of {len(rows)} left{ratio} (median)."


def _by_rounding(rows: pd.DataFrame, setting: str, recorded: bool) -> str:
    kind = ", emulated" if rows.emulated.any() else ""
    left = rows[rows.left]
    times = f"after {left.steps.median():,.0f} steps" if len(left) else "never"
    return (
        f"{setting} ({_where(recorded)}{kind}): its rounding moves as {rows.noise.median():.1e} would; "
        f"{len(left)} of {len(rows)} left, {int(rows.held.sum())} held; {times}, theory {rows.expected.median():,.0f}."
    )


def _minibatches(table: pd.DataFrame, alone: pd.DataFrame) -> list[str]:
    """How far the noise of batches is above that of rounding, in the same arithmetic."""
    lines = []
    batched = table[table.batch_size > 0]
    for (recorded, setting, size), rows in batched.groupby(["recorded", "setting", "batch_size"], sort=False):
        own = alone[(alone.setting == setting) & (alone.recorded == recorded) & (alone.noise > 0)]
        above = math.log10(rows.noise.median() / own.noise.median()) if len(own) else math.nan
        text = f"{setting} with batches of {size}: noise of {rows.noise.median():.1e}"
        text += f", {above:.1f} orders of magnitude above its rounding" if len(own) else ""
        lines.append(f"{text}; {int(rows.left.sum())} of {len(rows)} left, median {rows.steps.median():,.0f} steps.")
    return lines


def _claim(alone: pd.DataFrame) -> str:
    held = list(dict.fromkeys(alone.setting[alone.held]))
    free = list(dict.fromkeys(alone.setting[alone.left]))
    parts = [f"rounding alone leads away under {', '.join(free)}"] if free else []
    parts += [f"holds the network where it is under {', '.join(held)}"] if held else []
    return f"So {' and '.join(parts)}." if parts else "So rounding alone led away under no setting."


def _answer(table: pd.DataFrame) -> list[str]:
    """What the same minibatches do in different arithmetic: the article's explanation, put to the test."""
    import numpy as np

    batched = table[table.batch_size > 0]
    steps = batched.pivot_table(index=["recorded", "batch_size", "seed"], columns="setting", values="steps")
    steps = steps.dropna()
    if steps.shape[1] < 2 or len(steps) < 2:
        return []
    arithmetic = float((steps.max(axis=1) / steps.min(axis=1) - 1).median())
    seeds = float(np.median(steps.max() / steps.min() - 1))
    text = (
        f"With the same minibatches, the escape takes {arithmetic:.1%} longer in the slowest arithmetic than in the "
        f"fastest (median of {len(steps)} seeds); from seed to seed it takes up to {seeds:.0%} longer."
    )
    if arithmetic < seeds / 2:
        return [text, "So with minibatches it is the batches that lead away, and the arithmetic hardly matters."]
    return [text, "So even with minibatches the arithmetic matters here as much as the seed."]


def _curvature(frame: pd.DataFrame) -> list[str]:
    from scipy import stats

    lines = []
    for (network, size, recorded), rows in frame.groupby(["experiment", "profile", "recorded"], sort=False):
        known = rows.dropna(subset=["loss", "index_fraction"])
        where = f"{network}, {size} size ({_where(bool(recorded))})"
        r = float(stats.spearmanr(known.loss, known.index_fraction).statistic) if len(known) > 2 else math.nan
        lines.append(f"{where}: rank correlation of loss and share of ways down {r:+.2f}, {len(known)} snapshots.")
    return lines + [
        line for _, rows in frame.groupby(["experiment", "profile"], sort=False) for line in _compared(rows)
    ]


def _compared(rows: pd.DataFrame) -> list[str]:
    """The verdicts on what the trainings of a network ended in, every setting against the first."""
    ended = rows[rows.final].drop_duplicates(["setting", "seed"])
    if ended.setting.nunique() < 2:
        return []
    where = f"{ended.experiment.iloc[0]}, {ended.profile.iloc[0]} size, at the end of training"
    lines = []
    for metric, name in COMPARED.items():
        seen = verdict(ended, metric=metric)
        decisions = "; ".join(f"{row.setting} {row.decision}" for row in seen.table.reset_index().itertuples())
        lines.append(f"{where}, {name}, against {seen.reference}: {decisions}.")
    return lines


def _where(recorded: bool) -> str:
    return "recorded" if recorded else "made here"
