"""What escapes and curvature allow one to say of the claim that rounding helps networks past saddle points."""

from __future__ import annotations

import pandas as pd

from gpulab.companion.findings import SIZES, Finding, Part, in_words, listed
from gpulab.errors import UsageError
from gpulab.stats.verdicts import verdict

COMPARED = {"index_fraction": "share of ways down", "smallest": "steepest way down"}


def saddle_finding(escapes: pd.DataFrame | None = None, curvature: pd.DataFrame | None = None) -> Finding:
    """What is known about escapes and curvature, or one of them.

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
        >>> saddle_finding(escapes.table).statistics()[-1][:50]
        'Pushed off the saddle (made here): 1 of 1 left, af'
    """
    if escapes is None and curvature is None:
        raise UsageError("saddle_finding: expected escapes, curvature, or both")
    none = Finding([])
    leaving = none if escapes is None else _escapes(escapes)
    ways_down = none if curvature is None else _curvature(curvature)
    return Finding([*leaving.parts, *ways_down.parts], [*leaving.numbers, *ways_down.numbers])


def _escapes(table: pd.DataFrame) -> Finding:
    whole, master = table.batch_size == 0, table.master_weights.astype(bool)
    alone = table[whole & (table.perturbation == 0) & ~master]
    parts, lines = [*_deciding(alone), *_criterion(alone)], []
    for (recorded, optimizer), rows in alone.groupby(["recorded", "optimizer"], sort=False):
        stayed = [f"{setting} at {_rates(part)}" for setting, part in rows[~rows.left].groupby("setting", sort=False)]
        text = f"{optimizer} ({_where(recorded)}{_timed(rows)}): {rows.left.sum()} of {len(rows)} left{_late(rows)}"
        lines.append(f"{text}; stayed under {', '.join(stayed)}." if stayed else f"{text}.")
    stayed = alone[~alone.left].groupby(["recorded", "setting", "optimizer", "learning_rate"]).size().index
    freed = [each for each in table[master & whole].groupby([*stayed.names]) if each[0] in stayed]
    if freed:
        left = pd.concat([rows.left for _, rows in freed])
        so = ": what is rounded away is the update" if left.all() else ""
        text = f"With the same gradients, but weights in float64, {left.sum()} of {len(left)} leave after all{so}."
        parts.append(("Why they stay", text))
    for (recorded, setting, optimizer, _), rows in freed:
        where = f"{_where(recorded)}{_timed(rows)}; theory {rows.expected.median():,.0f}"
        who = f"With the gradients of {setting}, but weights in float64, {optimizer} leaves where it stayed"
        lines.append(f"{who} ({where}): {rows.left.sum()} of {len(rows)}.")
    for recorded, rows in table[whole & (table.perturbation > 0)].groupby("recorded"):
        lines.append(f"Pushed off the saddle ({_where(recorded)}): {rows.left.sum()} of {len(rows)} left{_late(rows)}.")
    for (_, optimizer, rate), rows in table[~whole].groupby(["recorded", "optimizer", "learning_rate"], sort=False):
        lines += _minibatches(rows, alone[(alone.optimizer == optimizer) & (alone.learning_rate == rate)])
        compared, answer = _same_batches(rows)
        lines += compared
        parts += answer
    return Finding(parts, lines)


def _deciding(alone: pd.DataFrame) -> list[tuple[str, Part]]:
    """Under which optimisers the arithmetic decides whether a network leaves; of what was made here, if anything."""
    shown = alone[~alone.recorded.astype(bool)] if not alone.recorded.all() else alone
    free, held = [], []
    for (optimizer, rate), rows in shown.groupby(["optimizer", "learning_rate"], sort=False):
        counts = rows.groupby("setting", sort=False).left.agg(["sum", "size"])
        stayed = [f"{s} ({n} of {of} left)" for s, n, of in counts.itertuples() if n < of]
        name = f"{optimizer} at {rate:.3g}"
        if stayed:
            held.append(f"{name} stays under {listed(stayed)}.")
        else:
            free.append(name)
    said = ["It is the optimiser that decides what an arithmetic does at a saddle."] if free and held else []
    said += [f"{listed(free)} {'leaves' if len(free) == 1 else 'leave'} in every arithmetic."] if free else []
    return [("What leaves a saddle", said + held)] if free or held else []


def _criterion(alone: pd.DataFrame) -> list[tuple[str, Part]]:
    known = alone[alone.step_ratio.notna()]
    if known.empty:
        return []
    above = known.step_ratio > 1
    left = [f"{known.left[side].sum()} of {side.sum()}" for side in (above, ~above)]
    wrong = known.step_ratio[known.left != above]
    near = f" The exceptions are within a factor of {wrong.map(lambda r: max(r, 1 / r)).max():.1f} of it."
    text = (
        f"Where the optimiser's step is above half a last place of the weights, {left[0]} left; where it is below, "
        f"{left[1]}.{near if len(wrong) else ''}"
    )
    return [("When", text)]


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


def _same_batches(table: pd.DataFrame) -> tuple[list[str], list[tuple[str, Part]]]:
    """What the same minibatches do in different arithmetic, in numbers and in words: the article's explanation."""
    stuck = [setting for setting, rows in table.groupby("setting", sort=False) if not rows.left.any()]
    steps = table.pivot_table(index=["batch_size", "seed"], columns="setting", values="steps").dropna()
    if steps.shape[1] < 2 or len(steps) < 2:
        return [], []
    arithmetic = float((steps.max(axis=1) / steps.min(axis=1) - 1).median())
    seeds = float((steps.max() / steps.min() - 1).median())
    who = f"{table.optimizer.iloc[0]} at {_rates(table)}"
    compared = (
        f"With the same minibatches, the escape by {who} takes {arithmetic:.1%} longer in the slowest arithmetic "
        f"that leaves than in the fastest (median of {len(steps)} seeds); from seed to seed up to {seeds:.0%} longer."
    )
    if stuck:
        answer = f"The batches lead away, but not under {listed(stuck)}."
    elif arithmetic < seeds / 2:
        answer = "It is the batches that lead away, and the arithmetic hardly matters."
    else:
        answer = "Even with minibatches the arithmetic matters here as much as the seed."
    return [compared], [(f"With minibatches, {who}", answer)]


def _curvature(frame: pd.DataFrame) -> Finding:
    correlations, numbers = [], []
    for (network, size, recorded), rows in frame.groupby(["experiment", "profile", "recorded"], sort=False):
        measured = rows.dropna(subset=["loss", "index_fraction"])
        r = measured.loss.corr(measured.index_fraction, method="spearman", min_periods=3)
        where = f"{network}, {SIZES[size]} ({_where(recorded)})"
        correlations.append(f"{where}: rank correlation {r:+.2f}, {len(measured)} snapshots.")
    parts: list[tuple[str, Part]] = [("Loss and share of ways down", correlations)]
    for metric, name in COMPARED.items():
        said = []
        for (network, size), rows in frame.groupby(["experiment", "profile"], sort=False):
            ended = rows[rows.final].drop_duplicates(["setting", "seed"])
            if ended.setting.nunique() > 1:
                judged = verdict(ended, metric=metric)
                said += [f"{network}, {SIZES[size]}: {sentence}" for sentence in in_words(judged)]
                numbers += [f"{network}, {SIZES[size]}, {name}:", *str(judged).splitlines()]
        parts += [(f"{name.capitalize()}, at the end of training", said)] if said else []
    return Finding(parts, numbers)


def _where(recorded: bool) -> str:
    return "recorded" if recorded else "made here"
