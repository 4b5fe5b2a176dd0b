"""What a verdict says in sentences: the one place that puts it into words, for pages and for the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import gpulab.stats.decisions as decisions
import gpulab.stats.tests as inference
from gpulab.stats.pairs import finished

Verdict = Any  # of `gpulab.stats.verdicts`, which imports this
SURE = 10  # seeds, from which on the number that would settle it is more than a guess
PARTS = {0.25: "a quarter of", 0.5: "half", 1.0: "once"}


def sentences(verdict: Verdict, words: Mapping[Any, str]) -> list[str]:
    """What each level came to: the effect first, then what it is compared with.

    `words` has what the levels and the metric are called; what is not in it keeps its name.
    """
    if not len(verdict.table):
        return [f"Only {words.get(verdict.reference, verdict.reference)} was run, so there is nothing to compare."]
    said = [_sentence(verdict, row, words) for row in verdict.table.itertuples()]
    return [*said, *_without_stuck(verdict)]


def _sentence(verdict: Verdict, row: Any, words: Mapping[Any, str]) -> str:
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
    if decisions.is_identical(row):
        return f"{here} every {block} ends with the same bits as {there}, so there is nothing to test."
    if not (row.largest_difference or row.p_equivalent > 0 or row.one_diverged):
        doubt = f"make sure that the {verdict.factor} reached the training"
        return f"{here} not one {block} differs by a digit from that {there}: {doubt}."
    pairs = verdict.pairs[verdict.pairs[verdict.factor] == row[1]]
    differences = pairs.difference.dropna().to_numpy(float)
    direction, along = "higher" if row.difference > 0 else "lower", (differences * row.difference > 0).sum()
    count = f"{direction} in {along} of {n} {block}s"
    if row.decision == "different":
        return f"{here} the {metric} is {_change(verdict, row)} {there}, and {count}."
    effect = f"{here} the {metric} differs by {_amount(verdict, row, abs(row.difference))} on average from that {there}"
    number, unit = decisions.parse_margin(verdict.margin)
    meaning = f" ({PARTS.get(number, f'{number:g} times')} the spread between {block}s)" if unit == "sd" else ""
    none = f"differences below {_amount(verdict, row, row.margin)}{meaning} count as none here"
    if row.decision == "different but negligible":
        return f"{effect}, and is {count}: that is no luck, but {none}."
    if row.decision == "equivalent":
        most = inference.clopper_pearson_upper(row.moved, n)
        unseen = f"{row.moved:.0f} of {n} {block}s moved further, and jumps of up to {most:.0%} of all {block}s could"
        return f"{effect}; {none}. {unseen} have gone unseen (95 % limit)."
    undecided = f"{effect}, and is {count}, which decides nothing"
    return f"{'; '.join([undecided, *([none] if row.margin > 0 else []), *_needed(verdict, row)])}."


def _amount(verdict: Verdict, row: Any, value: float) -> str:
    """A difference in per cent of the reference's mean where all values are above zero, or as it is."""
    if verdict.runs[verdict.metric].min() > 0 and row.margin_relative > 0:
        return f"{100 * value * row.margin_relative / row.margin:.2g} %"
    return f"{value:.2g}"


def _change(verdict: Verdict, row: Any) -> str:
    """How far a level differs from the reference, up to the reference's name."""
    ratio = 1 + row.difference * row.margin_relative / row.margin
    if 0.9 < ratio < 1.1 or not verdict.runs[verdict.metric].min() > 0 or math.isnan(ratio):
        return f"{_amount(verdict, row, abs(row.difference))} {'higher' if row.difference > 0 else 'lower'} than"
    return f"{ratio:.3g} times as high as"


def _needed(verdict: Verdict, row: Any) -> Iterator[str]:
    """What would settle it."""
    block, fewest = verdict.block, decisions.fewest_pairs(1 - row.confidence)
    if decisions.may_diverge_apart(row):
        yield f"on up to {row.diverged_apart_at_most:.0%} of {block}s one of the two could diverge alone"
    if row.seeds < fewest:
        yield f"{row.seeds} {block}s are too few to show a difference, {fewest} are enough"
    if math.isfinite(row.seeds_needed) and not decisions.may_diverge_apart(row):
        guess = "" if row.seeds >= SURE else "a rough guess, "
        yield f"about {row.seeds_needed:.0f} {block}s would settle it ({guess}power 0.8, if others are like these)"
    elif row.seeds_needed == math.inf and row.margin > 0:
        yield f"no number of {block}s up to {decisions.MOST_SEEDS:,} would settle it"


def _without_stuck(verdict: Verdict) -> Iterator[str]:
    """That a few seeds far from the others make most of the spread, and the margin without them."""
    losses = finished(verdict.runs, verdict.metric, verdict.factor, verdict.reference)
    few = inference.stuck(losses)
    if few.any() and decisions.parse_margin(verdict.margin)[1] == "sd":
        margin = decisions.margin_size(verdict.margin, losses[~few])
        yield (
            f"Most of this spread comes from {few.sum()} of {len(losses)} {verdict.block}s that lie far from the "
            f"others: without them the margin would be {margin:.2g} instead of {verdict.table.margin.iloc[0]:.2g}."
        )


# --- with all numbers ------------------------------------------------------------------------------------

NUMBERS = (  # of a level; those that a level does not have are left out
    "Difference {difference:.2g}",
    "{usual} % interval {low:.2g} to {high:.2g}",
    "p = {p_different}",
    "equivalence within ±{margin:.2g}",
    "{narrow} % interval {equivalent_low:.2g} to {equivalent_high:.2g}",
    "p = {p_equivalent}",
    "largest difference {largest_difference:.2g}",
)


def with_numbers(verdict: Verdict) -> str:
    """A line for each level, its decision, sentence and numbers, and then what holds for all of them."""
    block, reference, table = verdict.block, verdict.reference, verdict.table
    lines = [_level(verdict, row) for row in table.itertuples()] or sentences(verdict, {})
    spread = f"is {verdict.between_seeds:.2g}" if verdict.between_seeds >= 0 else "is unknown: fewer than two finished"
    lines += [f"The standard deviation between {block}s under {reference} {spread}.", *_without_stuck(verdict)]
    if len(table) and math.isnan(table.margin.iloc[0]):
        why = f"the margin {verdict.margin!r} needs a spread between {block}s under {reference}"
        lines.append(f"Equivalence was not asked: {why}; give one in the metric's units, such as margin=0.01.")
    if len(verdict.reruns):
        same = verdict.reruns.groupby(block).same_bits.all()
        change = f"changed a {block} by up to {verdict.reruns.difference.abs().max():.2e}"
        lines.append(f"{reference} run again {change}; {same.sum()} of {len(same)} {block}s gave the same bits twice.")
    return "\n".join([*lines, *verdict.notes])


def _level(verdict: Verdict, row: Any) -> str:
    """One level: its decision, its sentence and its numbers."""
    block, alpha = verdict.block, verdict.alpha
    all_seeds = row.seeds + row.left_out
    seeds = f"{row.seeds} of " * (row.left_out > 0) + f"{all_seeds} {block}{'s' * (all_seeds != 1)}"
    if "seed" in verdict.runs and block != "seed":
        distinct = verdict.runs.seed[verdict.runs[block].isin(verdict.pairs[block])].nunique()
        seeds += f" made from {distinct} distinct seeds"
    said = [f"{row[1]} against {verdict.reference}, {seeds}: {row.decision}.", _sentence(verdict, row, {})]
    p = {"p_different": p_text(row.p_different_holm, alpha), "p_equivalent": p_text(row.p_equivalent_holm, alpha)}
    levels = {"usual": f"{100 * row.confidence:.3g}", "narrow": f"{100 * row.equivalent_confidence:.3g}"}
    numbers = [clause.format(**row._asdict() | p | levels) for clause in NUMBERS]
    if row.seeds > 1 and not decisions.is_identical(row):
        said.append(f"{'; '.join(clause for clause in numbers if not re.search('nan|inf|unknown', clause))}.")
    if row.diverged or row.reference_diverged:
        p_diverged = p_text(row.p_diverged_holm, alpha)
        there = f"under {verdict.reference} {row.reference_diverged} (p = {p_diverged})"
        said.append(f"Diverged, or without a number: {row.diverged}, {there}.")
    if row.left_out:
        said.append(f"Left out: {row.left_out} {block}{'s' * (row.left_out > 1)} that only one of the two has.")
    return " ".join(said)


def p_text(value: float, alpha: float = math.nan) -> str:
    """A p value in two digits; far below 0.001 in one; in more where it would seem to be on alpha's other side."""
    if math.isnan(value):
        return "unknown"
    return _digits(value, alpha) if value >= 0.001 or value == 0 else f"{value:.0e}"


def _digits(value: float, limit: float) -> str:
    """A number in two digits, or in as many as keep it on its side of a limit."""
    texts = (f"{value:.{digits}g}" for digits in range(2, 18))
    return next((text for text in texts if (float(text) > limit) == (value > limit)), str(value))
