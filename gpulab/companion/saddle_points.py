"""What escapes and curvature allow one to say of the claim that rounding helps networks past saddle points."""

from __future__ import annotations

import numpy as np
import pandas as pd

from gpulab.companion.findings import SIZES, CheckedSentences, Part, in_words, listed
from gpulab.errors import UsageError
from gpulab.stats.verdicts import p_text, verdict

SHUFFLES = 9999
FEWEST = 5  # seeds: four have 24 orders, too few to show a correlation at 5 %
COMPARED = {"index_fraction": "share of ways down", "smallest": "steepest way down"}


def saddle_finding(escapes: pd.DataFrame | None = None, curvature: pd.DataFrame | None = None) -> CheckedSentences:
    """What is known about escapes and curvature, or one of them.

    Args:
        escapes: The `table` of `gpulab.saddles.escape_table`.
        curvature: From `gpulab.saddles.curvature_along`.

    Raises:
        UsageError: Where both are missing.

    Examples:
        >>> import gpulab, torch
        >>> data = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([2.0, 1.5, 1.0, 0.5])
        >>> saddle = gpulab.saddles.linear_autoencoder_saddle(data, [1])
        >>> float64 = ["cpu:precision=float64"]
        >>> escapes = gpulab.saddles.escape_table(saddle, float64, perturbations=[1e-3], progress=False)
        >>> saddle_finding(escapes.table).statistics()[-1][:50]
        'Pushed off the saddle (made here): 1 of 1 left, af'
    """
    if escapes is None and curvature is None:
        raise UsageError("saddle_finding: expected escapes, curvature, or both")
    none = CheckedSentences([])
    leaving = none if escapes is None else _escapes(escapes)
    ways_down = none if curvature is None else _curvature(curvature)
    return CheckedSentences([*leaving.parts, *ways_down.parts], [*leaving.numbers, *ways_down.numbers])


def _escapes(table: pd.DataFrame) -> CheckedSentences:
    whole, master = table.batch_size == 0, table.master_weights.astype(bool)
    alone = table[whole & (table.perturbation == 0) & ~master]
    parts, lines = [*_deciding(alone), *_criterion(alone), *_law(table[whole & (table.perturbation == 0)])], []
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
    return CheckedSentences(parts, lines)


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


def _law(table: pd.DataFrame) -> list[tuple[str, Part]]:
    """How many times as many steps as its law expects an optimiser took that divides a gradient by its size."""
    adaptive = table[table.left & table.optimizer.isin(["adam", "rmsprop"]) & (table.expected > 1)]
    said = []
    for optimizer, rows in adaptive.assign(times=adaptive.steps / adaptive.expected).groupby("optimizer"):
        low, middle, high = rows.times.quantile([0.25, 0.5, 0.75])
        rates = [f"{some.median():.1f} at {rate:g}" for rate, some in rows.groupby("learning_rate").times]
        by_rate = f"; by learning rate {listed(rates)}" if len(rates) > 1 else ""
        said.append(
            f"{optimizer} took {middle:.1f} times the steps that are expected, about r/(η‖v‖₁) (median of {len(rows)} "
            f"escapes; quartiles {low:.1f} to {high:.1f}{by_rate})."
        )
    return [("How rough the law of an adaptive optimiser is", said)] if said else []


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


def _curvature(frame: pd.DataFrame) -> CheckedSentences:
    correlations, numbers = [], []
    for (network, size, recorded), rows in frame.groupby(["experiment", "profile", "recorded"], sort=False):
        where = f"{network}, {SIZES[size]} ({_where(recorded)})"
        sentence, by_step = _correlation(rows.dropna(subset=["loss", "index_fraction"]))
        correlations.append(f"{where}: {sentence}")
        numbers.append(f"{where}, rank correlation of all trainings {by_step}.")
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
    return CheckedSentences(parts, numbers)


def _correlation(rows: pd.DataFrame) -> tuple[str, str]:
    """The rank correlation of loss and share, over all snapshots and at a fixed step; and step by step.

    Both fall in a training, so that snapshots of many steps correlate whatever the share has to do with the loss.
    """
    every = rows.loss.corr(rows.index_fraction, method="spearman", min_periods=3)
    trainings = rows.groupby(["setting", "seed"]).ngroups
    said = f"rank correlation {every:+.2f} over {len(rows)} snapshots of {trainings} trainings."
    of_step = {step: some.loss.rank().corr(some.index_fraction.rank()) for step, some in rows.groupby("step")}
    by_step = ", ".join(f"{r:+.2f} at step {step}" for step, r in of_step.items())
    seeds, r, p = _at_a_step(rows)
    if seeds < FEWEST:
        return f"{said} At a fixed step {seeds} seeds say nothing: it may be training time alone.", by_step
    found = "shown, so it is not training time alone" if p <= 0.05 else "not shown, so training time may be all of it"
    return f"{said} At a fixed step, over {seeds} seeds, {r:+.2f} on average (p = {p_text(p)}): {found}.", by_step


def _at_a_step(rows: pd.DataFrame) -> tuple[int, float, float]:
    """How many seeds, their rank correlation at a step (the mean over steps), and its p by exchanging seeds.

    What settings made of one seed is averaged: they are no replications.
    """
    table = rows.pivot_table(index="step", columns="seed", values=["loss", "index_fraction"]).dropna(axis=1)
    scores = []
    for name in ("loss", "index_fraction"):
        ranks = table[name].rank(axis=1)
        centred = ranks.sub(ranks.mean(axis=1), axis=0)
        scores.append(centred.div(np.sqrt((centred**2).sum(axis=1)), axis=0).fillna(0.0).to_numpy())
    products = scores[0].T @ scores[1] / len(table)
    places = np.arange(len(products))
    shuffled = np.random.default_rng(0).permuted(np.tile(places, (SHUFFLES, 1)), axis=1)
    r, by_luck = products.trace(), products[shuffled, places].sum(axis=1)
    return len(products), r, (1 + (abs(by_luck) >= abs(r) - 1e-12).sum()) / (1 + SHUFFLES)


def _where(recorded: bool) -> str:
    return "recorded" if recorded else "made here"
