"""A verdict in words: a sentence for each level, and a paragraph with all numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import gpulab.stats.tests as inference
from gpulab.stats.decisions import MOST_SEEDS, Decisions, fewest_pairs, is_identical, may_diverge_apart
from gpulab.stats.margins import margin_size, parse_margin

SURE = 10  # seeds, from which on the number that would settle it is more than a guess
PARTS = {0.25: "a quarter of", 0.5: "half", 1.0: "once"}


def sentences(verdict: Decisions, words: Mapping[Any, str]) -> list[str]:
    """What each level came to: the effect first, then what it is compared with.

    `words` has what the levels and the metric are called; what is not in it keeps its name.
    """
    if not len(verdict.table):
        return [f"Only {words.get(verdict.reference, verdict.reference)} was run, so there is nothing to compare."]
    return [*(_sentence(verdict, row, words) for row in verdict.table.itertuples()), *_without_stuck(verdict)]


def _sentence(verdict: Decisions, row: Any, words: Mapping[Any, str]) -> str:
    """What a level, a row of the table, came to."""
    block, n, preposition = verdict.block, row.seeds, "under" if verdict.factor == "setting" else "with"
    level, reference = (words.get(name, name) for name in (row[1], verdict.reference))
    metric = words.get(verdict.metric, verdict.metric.replace("_", " "))
    here, there = f"{preposition.capitalize()} {level}", f"{preposition} {reference}"
    if row.decision == "different" and row.p_diverged_holm <= verdict.alpha:
        runs = verdict.runs[verdict.factor].value_counts()
        diverged = f"{here} {row.diverged} of {runs[row[1]]} runs diverged"
        return f"{diverged}, {there} {row.reference_diverged} of {runs[verdict.reference]}."
    if n < 2:
        shared = f"only one {block}" if n else f"no {block}"
        return f"Between {level} and {reference} nothing can be compared: {shared} finished {preposition} both."
    if is_identical(row):
        return f"{here} every {block} ends with the same bits as {there}, so there is nothing to test."
    if not (row.largest_difference or row.p_equivalent > 0 or row.one_diverged):
        doubt = f"make sure that the {verdict.factor} reached the training"
        return f"{here} not one {block} differs by a digit from that {there}: {doubt}."
    differences = verdict.pairs[verdict.pairs[verdict.factor] == row[1]].difference
    direction, along = "higher" if row.difference > 0 else "lower", (differences * row.difference > 0).sum()
    count = f"{direction} in {along} of {n} {block}s"
    if row.decision == "different":
        return f"{here} the {metric} is {_change(verdict, row)} {there}, and {count}."
    effect = f"{here} the {metric} differs by {_amount(verdict, row, abs(row.difference))} on average from that {there}"
    number, unit = parse_margin(verdict.margin)
    meaning = (
        f" ({PARTS.get(number, f'{number:g} times')} the spread between {block}s, estimated cautiously)"
        if unit == "sd"
        else ""
    )
    none = f"differences below {_amount(verdict, row, row.margin)}{meaning} count as none here"
    if row.decision == "different but negligible":
        return f"{effect}, and is {count}: that is no luck, but {none}."
    if row.decision == "equivalent":
        most = inference.clopper_pearson_upper(row.moved, n)
        further = f"{row.moved:.0f} of {n} {block}s moved further than that"
        unseen = f"jumps in up to {100 * most:.0f} % of all {block}s cannot be ruled out (95 % limit)"
        return f"{effect}; {none}. {further}, but {unseen}."
    undecided = f"{effect}, and is {count}, which decides nothing"
    return f"{'; '.join([undecided, *([none] if row.margin > 0 else []), *_needed(verdict, row)])}."


def _amount(verdict: Decisions, row: Any, value: float) -> str:
    """A difference in per cent of the reference's mean where all values are above zero, or as it is."""
    if verdict.runs[verdict.metric].min() > 0 and row.margin_relative > 0:
        return f"{100 * value * row.margin_relative / row.margin:.2g} %"
    return f"{value:.2g}"


def _change(verdict: Decisions, row: Any) -> str:
    """How far a level differs from the reference, up to the reference's name."""
    ratio = 1 + row.difference * row.margin_relative / row.margin
    if 0.9 < ratio < 1.1 or not verdict.runs[verdict.metric].min() > 0 or math.isnan(ratio):
        return f"{_amount(verdict, row, abs(row.difference))} {'higher' if row.difference > 0 else 'lower'} than"
    return f"{ratio:.3g} times as high as"


def _needed(verdict: Decisions, row: Any) -> Iterator[str]:
    """What would settle it."""
    block, fewest = verdict.block, fewest_pairs(1 - row.confidence)
    if apart := may_diverge_apart(row):
        yield f"on up to {100 * row.diverged_apart_at_most:.0f} % of {block}s one of the two could diverge alone"
    if row.seeds < fewest:
        yield f"{row.seeds} {block}s are too few to show a difference, {fewest} are enough"
    if row.margin > 0 and not apart:
        finite, guess = math.isfinite(row.seeds_needed), "" if row.seeds >= SURE else "a rough guess, "
        number = f"about {row.seeds_needed:.0f}" if finite else f"more than {MOST_SEEDS:,}"
        yield f"{number} {block}s would settle it ({guess}power 0.8, if others are like these)"


def _without_stuck(verdict: Decisions) -> Iterator[str]:
    """That a few seeds far from the others make most of the spread, and the margin without them."""
    losses = verdict.losses_of_reference()
    few = inference.stuck(losses)
    if few.any() and parse_margin(verdict.margin)[1] == "sd":
        who = f"{few.sum()} of {len(losses)} {verdict.block}s that lie far from the others"
        alone, margin = margin_size(verdict.margin, losses[~few]), verdict.table.margin.iloc[0]
        yield f"Most of this spread comes from {who}: without them the margin would be {alone:.2g}, not {margin:.2g}."


NUMBERS = (  # of a level; those that a level does not have are left out
    "Difference {difference:.2g}",
    "{usual} % interval {low:.2g} to {high:.2g}",
    "p = {p_different}",
    "equivalence within ±{margin:.2g}",
    "{narrow} % interval {equivalent_low:.2g} to {equivalent_high:.2g}",
    "p = {p_equivalent}",
    "largest difference {largest_difference:.2g}",
)


def with_numbers(verdict: Decisions) -> str:
    """A line for each level, its decision, sentence and numbers, and then what holds for all of them."""
    seeds_of = f"{verdict.block}s under {verdict.reference}"
    lines = [_level(verdict, row) for row in verdict.table.itertuples()] or sentences(verdict, {})
    lines += [f"The standard deviation between {seeds_of} is {verdict.between_seeds:.2g}.", *_without_stuck(verdict)]
    if verdict.table.margin.isna().any():
        lines.append(f"Equivalence was not asked: {seeds_of} have no spread; give a margin in the metric's units.")
    return "\n".join([*lines, *verdict.notes]).replace(" is nan.", " is unknown.")


def _level(verdict: Decisions, row: Any) -> str:
    """One level: its decision, its sentence and its numbers."""
    block, all_seeds = verdict.block, row.seeds + row.left_out
    seeds = f"{row.seeds} of " * (row.left_out > 0) + f"{all_seeds} {block}{'s' * (all_seeds != 1)}"
    if "seed" in verdict.runs and block != "seed":
        distinct = verdict.runs.seed[verdict.runs[block].isin(verdict.pairs[block])].nunique()
        seeds += f" made from {distinct} distinct seeds"
    said = [f"{row[1]} against {verdict.reference}, {seeds}: {row.decision}.", _sentence(verdict, row, {})]
    p = {"p_different": p_text(row.p_different_holm), "p_equivalent": p_text(row.p_equivalent_holm)}
    levels = {"usual": f"{100 * row.confidence:.3g}", "narrow": f"{100 * row.equivalent_confidence:.3g}"}
    numbers = [clause.format(**row._asdict() | p | levels) for clause in NUMBERS]
    if row.seeds > 1 and not is_identical(row):
        said.append(f"{'; '.join(clause for clause in numbers if not re.search('nan|inf|unknown', clause))}.")
    if row.diverged or row.reference_diverged:
        there = f"under {verdict.reference} {row.reference_diverged} (p = {p_text(row.p_diverged_holm)})"
        said.append(f"Diverged, or without a number: {row.diverged}, {there}.")
    return " ".join(said)


def p_text(value: float) -> str:
    """A p value in two digits; far below 0.001 in one."""
    return (f"{value:.0e}" if 0 < value < 0.001 else f"{value:.2g}").replace("nan", "unknown")
