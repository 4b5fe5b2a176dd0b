"""What escapes and curvature allow one to say of the claim that rounding helps networks past saddle points."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

import gpulab as gl
from companion.findings import SIZES, CheckedSentences, Part, finding, in_words, listed, setting_in_text
from gpulab.plots.names import network_words, optimizer_words
from gpulab.stats.verdicts import p_text

SHUFFLES = 9999
FEWEST = 5  # seeds: four have 24 orders, too few to show a correlation at 5 %
COMPARED = {"index_fraction": "share of ways down", "smallest": "steepest way down"}
MADE = {True: "recorded", False: "made here"}


def saddle_finding(escapes: pd.DataFrame | None = None, curvature: pd.DataFrame | None = None) -> CheckedSentences:
    """What is known about escapes (the `table` of `gpulab.saddles.escape_table`) and curvature (`curvature_along`), or
    one.

    >>> import gpulab
    >>> saddle_finding(curvature=gpulab.saddles.recorded_curvature()).parts[0][0]
    'Loss and share of ways down'
    """
    if escapes is None and curvature is None:
        raise gl.UsageError("saddle_finding: expected escapes, curvature, or both")
    parts: list[tuple[str, Part]] = []
    numbers: list[str] = []
    if escapes is not None:
        _say_escapes(escapes, parts, numbers)
    if curvature is not None:
        _say_curvature(curvature, parts, numbers)
    return finding(parts, numbers)


def _say_escapes(table: pd.DataFrame, parts: list[tuple[str, Part]], numbers: list[str]) -> None:
    whole, master = table.batch_size == 0, table.master_weights.astype(bool)
    unmoved = whole & (table.perturbation == 0)
    alone = table[unmoved & ~master]
    here = alone[~alone.recorded.astype(bool)]
    parts.append(("What leaves a saddle", _deciding(here if len(here) else alone)))
    known = alone[alone.step_ratio.notna()]
    if len(known):
        above = known.step_ratio > 1
        wrong = known.step_ratio[known.left != above]
        near = f" The exceptions are within a factor of {np.maximum(wrong, 1 / wrong).max():.1f} of it."
        said = (
            f"Where the optimiser's step is above half a last place of the weights, {_left(known[above])} left; "
            f"where it is below, {_left(known[~above])}.{near if len(wrong) else ''}"
        )
        parts.append(("When", said))
    laws = []
    for optimizer, times, spread in _law(table[unmoved]):
        laws.append(f"{optimizer_words(optimizer)} took {times:.1f} times the expected steps (median).")
        numbers.append(f"{optimizer_words(optimizer)}, where about r/(η‖v‖₁) steps are expected: {spread}.")
    parts.append(("How rough the law of an adaptive optimiser is", laws))
    for (_, optimizer), rows in alone.groupby(["recorded", "optimizer"], sort=False):
        stayed = [f"{setting} at {_rates(some)}" for setting, some in rows[~rows.left].groupby("setting", sort=False)]
        more = f"; stayed under {', '.join(stayed)}" if stayed else ""
        numbers.append(f"{optimizer} ({_origin(rows)}): {_left(rows)} left{_late(rows)}{more}.")
    kind = ["recorded", "setting", "optimizer", "learning_rate"]
    freed = table[master & whole].merge(alone.loc[~alone.left, kind].drop_duplicates())
    if len(freed):
        so = ": what is rounded away is the update" if freed.left.all() else ""
        parts.append(
            ("Why they stay", f"With the same gradients, but weights in float64, {_left(freed)} leave after all{so}.")
        )
    for (_, setting, optimizer, _), rows in freed.groupby(kind):
        numbers.append(
            f"With the gradients of {setting}, but weights in float64, {optimizer} leaves where it stayed "
            f"({_origin(rows)}; theory {rows.expected.median():,.0f}): {_left(rows)}."
        )
    for recorded, rows in table[whole & (table.perturbation > 0)].groupby("recorded"):
        numbers.append(f"Pushed off the saddle ({MADE[recorded]}): {_left(rows)} left{_late(rows)}.")
    for (_, optimizer, rate), rows in table[~whole].groupby(["recorded", "optimizer", "learning_rate"], sort=False):
        usual = alone[(alone.optimizer == optimizer) & (alone.learning_rate == rate)].groupby("setting").steps.median()
        for size, some in rows.groupby("batch_size"):
            late = (some.groupby("setting").steps.median() / usual).median()
            than = "" if late != late else f", {late:.1f} times as late as with all data at once (median)"
            who = f"{optimizer} at {_rates(some)} with batches of {size}"
            numbers.append(f"{who} ({_origin(some)}): {_left(some)} left{than}.")
        _say_batches(rows, parts, numbers)


def _deciding(alone: pd.DataFrame) -> list[str]:
    """Under which optimisers the arithmetic decides whether a network leaves."""
    free, held = [], []
    for (optimizer, rate), rows in alone.groupby(["optimizer", "learning_rate"], sort=False):
        counts = rows.groupby("setting", sort=False).left.agg(["sum", "size"])
        stayed = []
        for setting, left, of in counts.itertuples():
            if left < of:
                stayed.append(f"{left} of {of} leave under {setting_in_text(setting)}")
        name = f"{optimizer_words(optimizer)} at {rate:.3g}"
        if stayed:
            held.append(f"{name}: {listed(stayed)}.")
        else:
            free.append(name)
    said = ["It is the optimiser that decides what an arithmetic does at a saddle."] if free and held else []
    said += [f"{listed(free)} {'leaves' if len(free) == 1 else 'leave'} in every arithmetic."] if free else []
    return said + held


def _law(table: pd.DataFrame) -> Iterator[tuple[str, float, str]]:
    """How many times as many steps as its law expects an optimiser took that divides a gradient by its size.

    The optimiser, the median, and the spread in words.
    """
    adaptive = table[table.left & table.optimizer.isin(["adam", "rmsprop"]) & (table.expected > 1)]
    for optimizer, rows in adaptive.assign(times=adaptive.steps / adaptive.expected).groupby("optimizer"):
        low, middle, high = rows.times.quantile([0.25, 0.5, 0.75])
        rates = [f"{some.median():.1f} at {rate:g}" for rate, some in rows.groupby("learning_rate").times]
        by_rate = f"; by learning rate {listed(rates)}" if len(rates) > 1 else ""
        yield str(optimizer), middle, f"median of {len(rows)} escapes; quartiles {low:.1f} to {high:.1f}{by_rate}"


def _say_batches(table: pd.DataFrame, parts: list[tuple[str, Part]], numbers: list[str]) -> None:
    """What the same minibatches do in different arithmetic: the article's explanation."""
    stuck = [setting for setting, rows in table.groupby("setting", sort=False) if not rows.left.any()]
    steps = table.pivot_table(index=["batch_size", "seed"], columns="setting", values="steps").dropna()
    if min(steps.shape) < 2:
        return
    arithmetic = (steps.max(axis=1) / steps.min(axis=1) - 1).median()
    seeds = (steps.max() / steps.min() - 1).median()
    who = f"{table.optimizer.iloc[0]} at {_rates(table)}"
    numbers.append(
        f"With the same minibatches, the escape by {who} takes {arithmetic:.1%} longer in the slowest arithmetic "
        f"that leaves than in the fastest (median of {len(steps)} seeds); from seed to seed up to {seeds:.0%} longer."
    )
    if stuck:
        answer = f"The batches lead away, but not under {listed(map(setting_in_text, stuck))}."
    elif arithmetic < seeds / 2:
        answer = "It is the batches that lead away, and the arithmetic hardly matters."
    else:
        answer = "Even with minibatches the arithmetic matters here as much as the seed."
    parts.append((f"With minibatches, {optimizer_words(table.optimizer.iloc[0])} at {_rates(table)}", answer))


def _left(rows: pd.DataFrame) -> str:
    return f"{rows.left.sum()} of {len(rows)}"


def _rates(rows: pd.DataFrame) -> str:
    return ", ".join(f"{rate:.3g}" for rate in sorted(rows.learning_rate.unique()))


def _origin(rows: pd.DataFrame) -> str:
    """Where rows were made, and after how many steps those left that did."""
    steps = f", after {rows.steps.min():,.0f} to {rows.steps.max():,.0f} steps" if rows.left.any() else ""
    return f"{MADE[rows.recorded.iloc[0]]}{steps}"


def _late(rows: pd.DataFrame) -> str:
    left = rows[rows.left & (rows.expected > 1)]
    return f", after {(left.steps / left.expected).median():.2f} times the expected steps (median)" if len(left) else ""


def _say_curvature(frame: pd.DataFrame, parts: list[tuple[str, Part]], numbers: list[str]) -> None:
    correlations: list[str] = []
    for (network, size, recorded), rows in frame.groupby(["experiment", "profile", "recorded"], sort=False):
        where = f"{_of(network, size)} ({MADE[recorded]})"
        known = rows.dropna(subset=["loss", "index_fraction"])
        sentence, number = _correlation(known)
        correlations.append(f"{where}: {sentence}")
        numbers.append(f"{where}: {number}")
        of_step = {step: some.loss.rank().corr(some.index_fraction.rank()) for step, some in known.groupby("step")}
        by_step = ", ".join(f"{r:+.2f} at step {step}" for step, r in of_step.items())
        numbers.append(f"{where}, rank correlation of all trainings {by_step}.")
    parts.append(("Loss and share of ways down", correlations))
    for metric, name in COMPARED.items():
        said = []
        for (network, size), rows in frame.groupby(["experiment", "profile"], sort=False):
            ended = rows[rows.final].drop_duplicates(["setting", "seed"])
            if ended.setting.nunique() > 1:
                judged = gl.verdict(ended, metric=metric)
                said += [f"{_of(network, size)}: {sentence[0].lower()}{sentence[1:]}" for sentence in in_words(judged)]
                numbers += [f"{_of(network, size)}, {name}:", *str(judged).splitlines()]
        parts.append((f"{name.capitalize()}, at the end of training", said))


def _of(network: str, size: str) -> str:
    return f"{network_words(network)}, {SIZES[size]}"


def _correlation(rows: pd.DataFrame) -> tuple[str, str]:
    """Whether loss and share go together, in a sentence, and the numbers behind it.

    Their rank correlation over all snapshots and at a fixed step, with its p by exchanging seeds.

    Both fall in a training, so that snapshots of many steps correlate whatever the share has to do with the loss.
    """
    every = rows.loss.corr(rows.index_fraction, method="spearman", min_periods=3)
    trainings = rows.groupby(["setting", "seed"]).ngroups
    said = f"rank correlation {every:+.2f} over {len(rows)} snapshots of {trainings} trainings"
    together = f"a lower loss {'goes' if every > 0 else 'does not go'} with fewer ways down"
    if np.isnan(every):
        return f"{len(rows)} snapshots are too few to see whether a lower loss goes with fewer ways down.", f"{said}."
    # What settings made of one seed is averaged: they are no replications.
    table = rows.pivot_table(index="step", columns="seed", values=["loss", "index_fraction"]).dropna(axis=1)
    scores = []
    for name in ("loss", "index_fraction"):
        ranks = table[name].rank(axis=1)
        centred = ranks.sub(ranks.mean(axis=1), axis=0)
        scores.append(centred.div(np.sqrt((centred**2).sum(axis=1)), axis=0).fillna(0.0).to_numpy())
    products = scores[0].T @ scores[1] / len(table)
    seeds, r = len(products), products.trace()
    if seeds < FEWEST:
        return f"{together}. It may be training time alone: {seeds} seeds cannot tell.", f"{said}."
    places = np.arange(seeds)
    shuffled = np.random.default_rng(0).permuted(np.tile(places, (SHUFFLES, 1)), axis=1)
    by_luck = products[shuffled, places].sum(axis=1)
    p = (1 + (abs(by_luck) >= abs(r) - 1e-12).sum()) / (1 + SHUFFLES)
    shown = "shown, so it is not" if p <= 0.05 else "not shown, so it may be"
    number = f"{said}; at a fixed step, over {seeds} seeds, {r:+.2f} on average (p = {p_text(p)})."
    return f"{together}. At a fixed step that is {shown} training time alone.", number
