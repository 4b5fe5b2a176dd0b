"""What escapes and curvature allow one to say of the claim that rounding helps networks past saddle points."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

import gpulab as gl
from companion.findings import SIZES, CheckedSentences, Part, finding, in_words, listed, network_words, setting_in_text
from gpulab.plots.names import optimizer_words
from gpulab.stats.sentences import p_text

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
    sections: list[tuple[str, Part]] = []
    numbers: list[str] = []
    if escapes is not None:
        _say_escapes(escapes, sections, numbers)
    if curvature is not None:
        _say_curvature(curvature, sections, numbers)
    return finding(sections, numbers)


def _say_escapes(table: pd.DataFrame, sections: list[tuple[str, Part]], numbers: list[str]) -> None:
    full_batch, master_weights = table.batch_size == 0, table.master_weights.astype(bool)
    unpushed = full_batch & (table.perturbation == 0)
    escapes = table[unpushed & ~master_weights]
    made_here = escapes[~escapes.recorded.astype(bool)]
    sections.append(("What leaves a saddle", _deciding_optimizers(made_here if len(made_here) else escapes)))
    with_step_ratio = escapes[escapes.step_ratio.notna()]
    if len(with_step_ratio):
        above_one = with_step_ratio.step_ratio > 1
        exceptions = with_step_ratio.step_ratio[with_step_ratio.left != above_one]
        exception_words = (
            f" The exceptions are within a factor of {np.maximum(exceptions, 1 / exceptions).max():.1f} of it."
        )
        sentence = (
            "Where the optimiser's step is above half a last place of the weights, "
            f"{_left_count(with_step_ratio[above_one])} left; where it is below, "
            f"{_left_count(with_step_ratio[~above_one])}.{exception_words if len(exceptions) else ''}"
        )
        sections.append(("When", sentence))
    laws = []
    for optimizer, times, spread in _steps_over_law(table[unpushed]):
        laws.append(f"{optimizer_words(optimizer)} took {times:.1f} times the expected steps (median).")
        numbers.append(f"{optimizer_words(optimizer)}, where about r/(η‖v‖₁) steps are expected: {spread}.")
    sections.append(("How rough the law of an adaptive optimiser is", laws))
    for (_, optimizer), rows in escapes.groupby(["recorded", "optimizer"], sort=False):
        stayed = [
            f"{setting} at {_rates(setting_rows)}"
            for setting, setting_rows in rows[~rows.left].groupby("setting", sort=False)
        ]
        stayed_words = f"; stayed under {', '.join(stayed)}" if stayed else ""
        numbers.append(f"{optimizer} ({_origin(rows)}): {_left_count(rows)} left{_delay_words(rows)}{stayed_words}.")
    start_columns = ["recorded", "setting", "optimizer", "learning_rate"]
    freed_escapes = table[master_weights & full_batch].merge(
        escapes.loc[~escapes.left, start_columns].drop_duplicates()
    )
    if len(freed_escapes):
        conclusion = ": what is rounded away is the update" if freed_escapes.left.all() else ""
        sections.append(
            (
                "Why they stay",
                f"With the same gradients, but weights in float64, {_left_count(freed_escapes)} leave after "
                f"all{conclusion}.",
            )
        )
    for (_, setting, optimizer, _), rows in freed_escapes.groupby(start_columns):
        numbers.append(
            f"With the gradients of {setting}, but weights in float64, {optimizer} leaves where it stayed "
            f"({_origin(rows)}; theory {rows.expected.median():,.0f}): {_left_count(rows)}."
        )
    for recorded, rows in table[full_batch & (table.perturbation > 0)].groupby("recorded"):
        numbers.append(f"Pushed off the saddle ({MADE[recorded]}): {_left_count(rows)} left{_delay_words(rows)}.")
    for (_, optimizer, rate), rows in table[~full_batch].groupby(
        ["recorded", "optimizer", "learning_rate"], sort=False
    ):
        full_batch_steps = (
            escapes[(escapes.optimizer == optimizer) & (escapes.learning_rate == rate)]
            .groupby("setting")
            .steps.median()
        )
        for size, batch_rows in rows.groupby("batch_size"):
            delay = (batch_rows.groupby("setting").steps.median() / full_batch_steps).median()
            delay_words = "" if delay != delay else f", {delay:.1f} times as late as with all data at once (median)"
            subject = f"{optimizer} at {_rates(batch_rows)} with batches of {size}"
            numbers.append(f"{subject} ({_origin(batch_rows)}): {_left_count(batch_rows)} left{delay_words}.")
        _say_batches(rows, sections, numbers)


def _deciding_optimizers(escapes: pd.DataFrame) -> list[str]:
    """Under which optimisers the arithmetic decides whether a network leaves."""
    leaving, staying = [], []
    for (optimizer, rate), rows in escapes.groupby(["optimizer", "learning_rate"], sort=False):
        counts = rows.groupby("setting", sort=False).left.agg(["sum", "size"])
        stayed = []
        for setting, left_count, run_count in counts.itertuples():
            if left_count < run_count:
                stayed.append(f"{left_count} of {run_count} leave under {setting_in_text(setting)}")
        name = f"{optimizer_words(optimizer)} at {rate:.3g}"
        if stayed:
            staying.append(f"{name}: {listed(stayed)}.")
        else:
            leaving.append(name)
    sentences = ["It is the optimiser that decides what an arithmetic does at a saddle."] if leaving and staying else []
    sentences += (
        [f"{listed(leaving)} {'leaves' if len(leaving) == 1 else 'leave'} in every arithmetic."] if leaving else []
    )
    return sentences + staying


def _steps_over_law(table: pd.DataFrame) -> Iterator[tuple[str, float, str]]:
    """How many times as many steps as its law expects an optimiser took that divides a gradient by its size.

    The optimiser, the median, and the spread in words.
    """
    adaptive = table[table.left & table.optimizer.isin(["adam", "rmsprop"]) & (table.expected > 1)]
    for optimizer, rows in adaptive.assign(times=adaptive.steps / adaptive.expected).groupby("optimizer"):
        low, middle, high = rows.times.quantile([0.25, 0.5, 0.75])
        rates = [f"{rate_times.median():.1f} at {rate:g}" for rate, rate_times in rows.groupby("learning_rate").times]
        by_rate = f"; by learning rate {listed(rates)}" if len(rates) > 1 else ""
        yield str(optimizer), middle, f"median of {len(rows)} escapes; quartiles {low:.1f} to {high:.1f}{by_rate}"


def _say_batches(table: pd.DataFrame, sections: list[tuple[str, Part]], numbers: list[str]) -> None:
    """What the same minibatches do in different arithmetic: the article's explanation."""
    stuck = [setting for setting, rows in table.groupby("setting", sort=False) if not rows.left.any()]
    steps = table.pivot_table(index=["batch_size", "seed"], columns="setting", values="steps").dropna()
    if min(steps.shape) < 2:
        return
    arithmetic = (steps.max(axis=1) / steps.min(axis=1) - 1).median()
    seeds = (steps.max() / steps.min() - 1).median()
    subject = f"{table.optimizer.iloc[0]} at {_rates(table)}"
    numbers.append(
        f"With the same minibatches, the escape by {subject} takes {arithmetic:.1%} longer in the slowest arithmetic "
        f"that leaves than in the fastest (median of {len(steps)} seeds); from seed to seed up to {seeds:.0%} longer."
    )
    if stuck:
        answer = f"The batches lead away, but not under {listed(map(setting_in_text, stuck))}."
    elif arithmetic < seeds / 2:
        answer = "It is the batches that lead away, and the arithmetic hardly matters."
    else:
        answer = "Even with minibatches the arithmetic matters here as much as the seed."
    sections.append((f"With minibatches, {optimizer_words(table.optimizer.iloc[0])} at {_rates(table)}", answer))


def _left_count(rows: pd.DataFrame) -> str:
    return f"{rows.left.sum()} of {len(rows)}"


def _rates(rows: pd.DataFrame) -> str:
    return ", ".join(f"{rate:.3g}" for rate in sorted(rows.learning_rate.unique()))


def _origin(rows: pd.DataFrame) -> str:
    """Where rows were made, and after how many steps those left that did."""
    steps = f", after {rows.steps.min():,.0f} to {rows.steps.max():,.0f} steps" if rows.left.any() else ""
    return f"{MADE[rows.recorded.iloc[0]]}{steps}"


def _delay_words(rows: pd.DataFrame) -> str:
    escaped = rows[rows.left & (rows.expected > 1)]
    return (
        f", after {(escaped.steps / escaped.expected).median():.2f} times the expected steps (median)"
        if len(escaped)
        else ""
    )


def _say_curvature(frame: pd.DataFrame, sections: list[tuple[str, Part]], numbers: list[str]) -> None:
    correlations: list[str] = []
    for (network, size, recorded), rows in frame.groupby(["experiment", "profile", "recorded"], sort=False):
        origin = f"{_network_and_size(network, size)} ({MADE[recorded]})"
        complete_rows = rows.dropna(subset=["loss", "index_fraction"])
        sentence, number = _correlation(complete_rows)
        correlations.append(f"{origin}: {sentence}")
        numbers.append(f"{origin}: {number}")
        of_step = {
            step: step_rows.loss.rank().corr(step_rows.index_fraction.rank())
            for step, step_rows in complete_rows.groupby("step")
        }
        by_step = ", ".join(f"{r:+.2f} at step {step}" for step, r in of_step.items())
        numbers.append(f"{origin}, rank correlation of all trainings {by_step}.")
    sections.append(("Loss and share of ways down", correlations))
    for metric, name in COMPARED.items():
        sentences = []
        for (network, size), rows in frame.groupby(["experiment", "profile"], sort=False):
            end_rows = rows[rows.final].drop_duplicates(["setting", "seed"])
            if end_rows.setting.nunique() > 1:
                judged = gl.verdict(end_rows, metric=metric)
                sentences += [
                    f"{_network_and_size(network, size)}: {sentence[0].lower()}{sentence[1:]}"
                    for sentence in in_words(judged)
                ]
                numbers += [f"{_network_and_size(network, size)}, {name}:", *str(judged).splitlines()]
        sections.append((f"{name.capitalize()}, at the end of training", sentences))


def _network_and_size(network: str, size: str) -> str:
    return f"{network_words(network)}, {SIZES[size]}"


def _correlation(rows: pd.DataFrame) -> tuple[str, str]:
    """Whether loss and share go together, in a sentence, and the numbers behind it.

    Their rank correlation over all snapshots and at a fixed step, with its p by exchanging seeds.

    Both fall in a training, so that snapshots of many steps correlate whatever the share has to do with the loss.
    """
    overall = rows.loss.corr(rows.index_fraction, method="spearman", min_periods=3)
    trainings = rows.groupby(["setting", "seed"]).ngroups
    summary = f"rank correlation {overall:+.2f} over {len(rows)} snapshots of {trainings} trainings"
    trend = f"a lower loss {'goes' if overall > 0 else 'does not go'} with fewer ways down"
    if np.isnan(overall):
        return (
            f"{len(rows)} snapshots are too few to see whether a lower loss goes with fewer ways down.",
            f"{summary}.",
        )
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
        return f"{trend}. It may be training time alone: {seeds} seeds cannot tell.", f"{summary}."
    seed_numbers = np.arange(seeds)
    shuffled = np.random.default_rng(0).permuted(np.tile(seed_numbers, (SHUFFLES, 1)), axis=1)
    by_luck = products[shuffled, seed_numbers].sum(axis=1)
    p = (1 + (abs(by_luck) >= abs(r) - 1e-12).sum()) / (1 + SHUFFLES)
    shown = "shown, so it is not" if p <= 0.05 else "not shown, so it may be"
    number = f"{summary}; at a fixed step, over {seeds} seeds, {r:+.2f} on average (p = {p_text(p)})."
    return f"{trend}. At a fixed step that is {shown} training time alone.", number
