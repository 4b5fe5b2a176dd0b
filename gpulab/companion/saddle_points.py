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
    """Sentences about escapes and curvature, or one of them.

    Settings are compared where two or more of one machine or more looked at the same seeds.

    Args:
        escapes: the table of `gpulab.escape_table`.
        curvature: the table of `gpulab.curvature_along`.

    Raises:
        UsageError: for neither.

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
    """How networks left a saddle: pushed, by rounding alone, and by the noise of minibatches."""
    lines = []
    alone = table[(table.perturbation == 0) & (table.batch_size == 0)]
    for recorded, rows in table[(table.perturbation > 0) & (table.batch_size == 0)].groupby("recorded"):
        left = rows[rows.left & (rows.expected > 1)]
        ratio = f", after {(left.steps / left.expected).median():.3f} times the steps that theory expects"
        lines.append(
            f"Pushed off the saddle ({_where(recorded)}), {len(left)} of {len(rows)} left{ratio if len(left) else ''} "
            "(median)."
        )
    for (recorded, setting), rows in alone.groupby(["recorded", "setting"], sort=False):
        left = rows[rows.left]
        lines.append(
            f"{setting} ({_where(recorded)}{', emulated' if rows.emulated.any() else ''}): its rounding moves as "
            f"{rows.noise.median():.1e} would; {len(left)} of {len(rows)} left, {int(rows.held.sum())} held; "
            f"{f'after {left.steps.median():,.0f} steps' if len(left) else 'never'}, theory "
            f"{rows.expected.median():,.0f}."
        )
    batched = table[table.batch_size > 0]
    for (recorded, setting, size), rows in batched.groupby(["recorded", "setting", "batch_size"], sort=False):
        rounding = alone[(alone.setting == setting) & (alone.recorded == recorded) & (alone.noise > 0)].noise
        text = f"{setting} with batches of {size}: noise of {rows.noise.median():.1e}"
        if len(rounding):
            orders = math.log10(rows.noise.median() / rounding.median())
            text += f", {orders:.1f} orders of magnitude above its rounding"
        lines.append(f"{text}; {int(rows.left.sum())} of {len(rows)} left, median {rows.steps.median():,.0f} steps.")
    if len(alone):
        left, held = (", ".join(dict.fromkeys(alone.setting[which])) for which in (alone.left, alone.held))
        parts = [f"rounding alone leads away under {left}"] if left else []
        parts += [f"holds the network where it is under {held}"] if held else []
        lines.append(f"So {' and '.join(parts) or 'rounding alone led away under no setting'}.")
    return lines + _answer(batched)


def _answer(batched: pd.DataFrame) -> list[str]:
    """What the same minibatches do in different arithmetic: the article's explanation, put to the test."""
    keys = ["recorded", "batch_size", "seed"]
    steps = batched.pivot_table(index=keys, columns="setting", values="steps").dropna()
    if steps.shape[1] < 2 or len(steps) < 2:
        return []
    arithmetic = float((steps.max(axis=1) / steps.min(axis=1) - 1).median())
    seeds = float((steps.max() / steps.min() - 1).median())
    text = (
        f"With the same minibatches, the escape takes {arithmetic:.1%} longer in the slowest arithmetic than in the "
        f"fastest (median of {len(steps)} seeds); from seed to seed it takes up to {seeds:.0%} longer."
    )
    if arithmetic < seeds / 2:
        return [text, "So with minibatches it is the batches that lead away, and the arithmetic hardly matters."]
    return [text, "So even with minibatches the arithmetic matters here as much as the seed."]


def _curvature(frame: pd.DataFrame) -> list[str]:
    """How the curvature goes with the loss, and the verdicts on what trainings ended in."""
    from scipy import stats

    lines, verdicts = [], []
    for (network, size, recorded), rows in frame.groupby(["experiment", "profile", "recorded"], sort=False):
        known = rows.dropna(subset=["loss", "index_fraction"])
        r = float(stats.spearmanr(known.loss, known.index_fraction).statistic) if len(known) > 2 else math.nan
        lines.append(
            f"{network}, {size} size ({_where(recorded)}): rank correlation of loss and share of ways down {r:+.2f}, "
            f"{len(known)} snapshots."
        )
    for (network, size), rows in frame.groupby(["experiment", "profile"], sort=False):
        ended = rows[rows.final].drop_duplicates(["setting", "seed"])
        if ended.setting.nunique() < 2:
            continue
        for metric, name in COMPARED.items():
            compared = verdict(ended, metric=metric)
            decisions = "; ".join(f"{setting} {decision}" for setting, decision in compared.decisions.items())
            verdicts.append(
                f"{network}, {size} size, at the end of training, {name}, against {compared.reference}: {decisions}."
            )
    return lines + verdicts


def _where(recorded: bool) -> str:
    return "recorded" if recorded else "made here"
