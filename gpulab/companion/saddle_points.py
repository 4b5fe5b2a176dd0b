"""What escapes and curvature allow one to say of the claim that rounding helps networks past saddle points."""

from __future__ import annotations

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
        >>> saddle_finding(escapes.table).splitlines()[-1][:50]
        'Pushed off the saddle (made here): 1 of 1 left, af'
    """
    if escapes is None and curvature is None:
        raise UsageError("saddle_finding: expected escapes, curvature, or both")
    lines = [] if escapes is None else _escapes(escapes)
    return "\n".join(lines + ([] if curvature is None else _curvature(curvature)))


def _escapes(table: pd.DataFrame) -> list[str]:
    whole, master = table.batch_size == 0, table.master_weights.astype(bool)
    alone = table[whole & (table.perturbation == 0) & ~master]
    lines = [*_deciding(alone), *_criterion(alone)]
    for (recorded, optimizer), rows in alone.groupby(["recorded", "optimizer"], sort=False):
        stayed = [f"{setting} at {_rates(part)}" for setting, part in rows[~rows.left].groupby("setting", sort=False)]
        text = f"{optimizer} ({_where(recorded)}{_timed(rows)}): {rows.left.sum()} of {len(rows)} left{_late(rows)}"
        lines.append(f"{text}; stayed under {', '.join(stayed)}." if stayed else f"{text}.")
    stayed = alone[~alone.left].groupby(["recorded", "setting", "optimizer", "learning_rate"]).size().index
    for key, rows in table[master & whole].groupby(["recorded", "setting", "optimizer", "learning_rate"]):
        if key in stayed:
            where, expected = f"{_where(key[0])}{_timed(rows)}", rows.expected.median()
            so = " What is rounded away is the update." if rows.left.all() else ""
            lines.append(
                f"With the gradients of {key[1]}, but weights in float64, {key[2]} leaves where it stayed ({where}; "
                f"theory {expected:,.0f}): {rows.left.sum()} of {len(rows)}.{so}"
            )
    for recorded, rows in table[whole & (table.perturbation > 0)].groupby("recorded"):
        lines.append(f"Pushed off the saddle ({_where(recorded)}): {rows.left.sum()} of {len(rows)} left{_late(rows)}.")
    for (_, optimizer, rate), rows in table[~whole].groupby(["recorded", "optimizer", "learning_rate"], sort=False):
        lines += _minibatches(rows, alone[(alone.optimizer == optimizer) & (alone.learning_rate == rate)])
        lines += _same_batches(rows)
    return lines


def _deciding(alone: pd.DataFrame) -> list[str]:
    """Under which optimisers the arithmetic decides whether a network leaves; of what was made here, if anything."""
    shown = alone[~alone.recorded.astype(bool)] if not alone.recorded.all() else alone
    free, held = [], []
    for (optimizer, rate), rows in shown.groupby(["optimizer", "learning_rate"], sort=False):
        counts = rows.groupby("setting", sort=False).left.agg(["sum", "size"])
        stayed = [f"{s} ({n} of {of} left)" for s, n, of in counts.itertuples() if n < of]
        name = f"{optimizer} at {rate:.3g}"
        if stayed:
            held.append(f"{name} stays under {', '.join(stayed)}")
        else:
            free.append(f"{name} leaves in every arithmetic, after {_steps(rows)} steps")
    both = "It is the optimiser that decides what an arithmetic does at a saddle: " if free and held else ""
    return [f"{both}{'; '.join(free + held)}."] if free or held else []


def _criterion(alone: pd.DataFrame) -> list[str]:
    known = alone[alone.step_ratio.notna()]
    if known.empty:
        return []
    above = known.step_ratio > 1
    left = [f"{known.left[side].sum()} of {side.sum()}" for side in (above, ~above)]
    wrong = known.step_ratio[known.left != above]
    near = f" The exceptions are within a factor of {wrong.map(lambda r: max(r, 1 / r)).max():.1f} of it."
    return [
        f"Where the optimiser's step is above half a last place of the weights, {left[0]} left; where it is below, "
        f"{left[1]}.{near if len(wrong) else ''}"
    ]


def _minibatches(rows: pd.DataFrame, alone: pd.DataFrame) -> list[str]:
    """Minibatches under one optimiser, beside all data at once under the same and in the same arithmetic."""
    lines = []
    for size, part in rows.groupby("batch_size"):
        where = f"{_where(part.recorded.iloc[0])}{_timed(part)}"
        text = f"{part.optimizer.iloc[0]} at {_rates(part)} with batches of {size} ({where})"
        late = part.groupby("setting").steps.median() / alone.groupby("setting").steps.median()
        than = f", {late.median():.1f} times as late as with all data at once (median)" if late.notna().any() else ""
        lines.append(f"{text}: {part.left.sum()} of {len(part)} left{than}.")
    return lines


def _rates(rows: pd.DataFrame) -> str:
    return ", ".join(f"{rate:.3g}" for rate in sorted(rows.learning_rate.unique()))


def _steps(rows: pd.DataFrame) -> str:
    return f"{rows.steps.min():,.0f} to {rows.steps.max():,.0f}"


def _late(rows: pd.DataFrame) -> str:
    left = rows[rows.left & (rows.expected > 1)]
    return f", after {(left.steps / left.expected).median():.2f} times the expected steps (median)" if len(left) else ""


def _timed(rows: pd.DataFrame) -> str:
    return f", after {_steps(rows)} steps" if rows.left.any() else ""


def _same_batches(table: pd.DataFrame) -> list[str]:
    """What the same minibatches do in different arithmetic: the article's explanation, put to the test."""
    stuck = [setting for setting, rows in table.groupby("setting", sort=False) if not rows.left.any()]
    steps = table.pivot_table(index=["batch_size", "seed"], columns="setting", values="steps").dropna()
    if steps.shape[1] < 2 or len(steps) < 2:
        return []
    arithmetic = float((steps.max(axis=1) / steps.min(axis=1) - 1).median())
    seeds = float((steps.max() / steps.min() - 1).median())
    who = f"{table.optimizer.iloc[0]} at {_rates(table)}"
    lines = [
        f"With the same minibatches, the escape by {who} takes {arithmetic:.1%} longer in the slowest arithmetic "
        f"that leaves than in the fastest (median of {len(steps)} seeds); from seed to seed up to {seeds:.0%} longer."
    ]
    if stuck:
        return [*lines, f"So the batches lead away, but not under {', '.join(stuck)}."]
    batches = "So with minibatches it is the batches that lead away, and the arithmetic hardly matters."
    both = "So even with minibatches the arithmetic matters here as much as the seed."
    return [*lines, batches if arithmetic < seeds / 2 else both]


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
