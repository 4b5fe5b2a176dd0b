"""A verdict in words: a sentence for each level, and a paragraph with all numbers."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

import gpulab.stats.tests as inference
from gpulab.stats.decisions import (
    DECISIONS,
    MOST_SEEDS,
    Decisions,
    LevelDecision,
    fewest_pairs,
    is_identical,
    may_diverge_apart,
    sd_confidence,
)
from gpulab.stats.margins import margin_size, parse_margin
from gpulab.wording import Level, TextByLevel, level_text

SURE = 10  # seeds, from which on the number that would settle it is more than a guess
PARTS = {0.25: "a quarter of", 0.5: "half", 1.0: "once"}  # of the spread between seeds, by their number

EFFECT = "{here} the {metric} is {average} {there}"
MOST_NAMED = 8  # seeds in one sentence
SENTENCES = {  # templates by decision, or by the special case that takes precedence over it
    "diverged": "{here} {diverged} of {runs} runs diverged, {there} {reference_diverged} of {reference_runs}.",
    "too few pairs": "Between {level} and {reference} nothing can be compared: {shared} finished {preposition} both; "
    "run the same {block}s {preposition} both, {fewest} or more.",
    "same bits": "{here} every {block} ends with the same bits as {there}, so there is nothing to test.",
    "not one digit": "{here} not one {block} differs by a digit from that {there}: "
    "make sure that the {factor} reached the training.",
    "different": "{here} the {metric} is {change} {there}, and {count}.",
    "different but negligible": EFFECT + ", and {count}: that is no luck, but {none}.",
    "equivalent": EFFECT + "; {none}. {moved:.0f} of {seeds} {block}s moved further than that, "
    "but jumps in up to {unseen:.0f} % of all {block}s cannot be ruled out (95 % limit).",
    "inconclusive": EFFECT + ", and {count}, which decides nothing{conditions}.",
}
NUMBERS = (  # of a level; those that a level does not have are left out
    "Difference {difference:.2g}",
    "{usual} % interval {low:.2g} to {high:.2g}",
    "p = {p_different}",
    "equivalence within ±{margin:.2g}",
    "{narrow} % interval {equivalent_low:.2g} to {equivalent_high:.2g}",
    "p = {p_equivalent}",
    "largest difference {largest_difference:.2g}",
)


def sentences(verdict: Decisions, words: TextByLevel) -> list[str]:
    """What each level came to: the effect first, then what it is compared with.

    `words` has what the levels and the metric are called; what is not in it keeps its name.
    """
    if not verdict.rows:
        return [f"Only {_name(verdict, verdict.reference, words)} was run, so there is nothing to compare."]
    return [*(_sentence(verdict, row, words) for row in verdict.rows), *_without_stuck(verdict), *_looks(verdict)]


def with_numbers(verdict: Decisions) -> str:
    """A line for each level, its decision, sentence and numbers, and then what holds for all of them."""
    seeds_of = f"{verdict.block}s under {_name(verdict, verdict.reference)}"
    lines = [_paragraph(verdict, row) for row in verdict.rows] or sentences(verdict, {})
    lines += [f"The standard deviation between {seeds_of} is {verdict.between_seeds:.2g}.", *_without_stuck(verdict)]
    if any(math.isnan(row.margin) for row in verdict.rows):
        lines.append(f"Equivalence was not asked: {seeds_of} have no spread; give a margin in the metric's units.")
    return "\n".join([*lines, *_looks(verdict), *verdict.notes]).replace(" is nan.", " is unknown.")


def missing_seeds(verdict: Decisions, row: LevelDecision) -> str:
    """Which seeds were left out of the comparison of a level, because one of the two lacks them; empty for none."""
    factor, block = verdict.factor, verdict.block
    preposition = "under" if factor == "setting" else "with"
    of_level = {level: list(dict.fromkeys(runs)) for level, runs in verdict.runs.groupby(factor, sort=False)[block]}
    here, there = of_level.get(row.level, []), of_level.get(verdict.reference, [])
    clauses = []
    for level, own, others in ((row.level, here, there), (verdict.reference, there, here)):
        if missing := [seed for seed in others if seed not in set(own)]:
            named = _listed(missing)
            clauses.append(f"{block}{'s' * (len(missing) > 1)} {named} {preposition} {_name(verdict, level)}")
    return f"Missing: {'; '.join(clauses)}." if clauses else ""


def _listed(values: list[Level]) -> str:
    """Some seeds in order, such as `2, 5 and 7`.

    >>> _listed([7, 2, 5]), _listed(["b"]), _listed(range(10))
    ('2, 5 and 7', 'b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    with contextlib.suppress(TypeError):
        values = sorted(values)  # type: ignore[type-var]
    texts = [str(value) for value in values]
    if len(texts) > MOST_NAMED:
        texts = [*texts[:MOST_NAMED], f"{len(texts) - MOST_NAMED} more"]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _name(verdict: Decisions, level: Level, words: TextByLevel | None = None) -> str:
    """What a level is called."""
    return (words or {}).get(level, level_text(level, verdict.factor))


def p_text(value: float) -> str:
    """A p value in two digits; far below 0.001 in one."""
    return (f"{value:.0e}" if 0 < value < 0.001 else f"{value:.2g}").replace("nan", "unknown")


def _sentence(verdict: Decisions, row: LevelDecision, words: TextByLevel) -> str:
    """What a level came to."""
    case = _case(verdict, row)
    facts = _names(verdict, row, words)
    if case == "diverged":
        facts |= _diverged(verdict, row)
    if case in DECISIONS:
        facts |= _effect(verdict, row)
    return SENTENCES[case].format(**facts)


def _case(verdict: Decisions, row: LevelDecision) -> str:
    """Which of `SENTENCES` is true of a level."""
    if row.decision == "different" and row.p_diverged_holm <= verdict.alpha:
        return "diverged"
    if row.seeds < 2:
        return "too few pairs"
    if is_identical(row):
        return "same bits"
    if not (row.largest_difference or row.p_equivalent > 0 or row.one_diverged):
        return "not one digit"
    return row.decision


def _names(verdict: Decisions, row: LevelDecision, words: TextByLevel) -> dict[str, object]:
    """What is compared: the level, the reference, the metric and the blocks, as they are called."""
    block = verdict.block
    level = _name(verdict, row.level, words)
    reference = _name(verdict, verdict.reference, words)
    preposition = "under" if verdict.factor == "setting" else "with"
    return {
        "level": level,
        "reference": reference,
        "preposition": preposition,
        "here": f"{preposition.capitalize()} {level}",
        "there": f"{preposition} {reference}",
        "metric": words.get(verdict.metric, verdict.metric.replace("_", " ")),
        "factor": verdict.factor,
        "block": block,
        "shared": f"only one {block}" if row.seeds else f"no {block}",
        "fewest": fewest_pairs(verdict.alpha / len(verdict.rows) / verdict.looks),
    }


def _diverged(verdict: Decisions, row: LevelDecision) -> dict[str, object]:
    """How many runs diverged, and of how many."""
    runs = verdict.runs[verdict.factor].value_counts()
    return {
        "diverged": row.diverged,
        "runs": runs[row.level],
        "reference_diverged": row.reference_diverged,
        "reference_runs": runs[verdict.reference],
    }


def _effect(verdict: Decisions, row: LevelDecision) -> dict[str, object]:
    """How far a level differs, in how many seeds, what that is compared with, and what would settle it."""
    block = verdict.block
    differences = verdict.pairs[verdict.pairs[verdict.factor] == row.level].difference
    direction = "higher" if row.difference > 0 else "lower"
    same_direction = (differences * row.difference > 0).sum()
    none = f"differences below {_amount(verdict, row, row.margin)}{_meaning(verdict)} count as none here"
    conditions = [*([none] if row.margin > 0 else []), *_needed(verdict, row)]
    return {
        "average": _average(verdict, row, direction),
        "change": _change(verdict, row),
        "count": f"{direction} in {same_direction} of {row.seeds} {block}s"
        if row.difference
        else f"another in {(differences.fillna(0) != 0).sum()} of {row.seeds} {block}s",
        "none": none,
        "moved": row.moved,
        "seeds": row.seeds,
        "unseen": 100 * inference.clopper_pearson_upper(row.moved, row.seeds),
        "conditions": "".join(f"; {condition}" for condition in conditions),
    }


def _average(verdict: Decisions, row: LevelDecision, direction: str) -> str:
    """How far a level is from the reference on average, and in which direction, up to the reference's name."""
    if row.difference == 0:
        return "the same on average as"
    return f"{_amount(verdict, row, abs(row.difference))} {direction} on average than"


def _amount(verdict: Decisions, row: LevelDecision, value: float) -> str:
    """A difference in per cent of the reference's mean where all values are above zero, or as it is."""
    if verdict.runs[verdict.metric].min() > 0 and row.margin_relative > 0:
        return f"{100 * value * row.margin_relative / row.margin:.2g} %"
    return f"{value:.2g}"


def _change(verdict: Decisions, row: LevelDecision) -> str:
    """How far a level differs from the reference, up to the reference's name."""
    ratio = 1 + row.difference * row.margin_relative / row.margin if row.margin else math.nan
    if 0.9 < ratio < 1.1 or not verdict.runs[verdict.metric].min() > 0 or math.isnan(ratio):
        return f"{_amount(verdict, row, abs(row.difference))} {'higher' if row.difference > 0 else 'lower'} than"
    return f"{ratio:.3g} times as high as"


def _meaning(verdict: Decisions) -> str:
    """What a margin in standard deviations is, in brackets; nothing of another."""
    number, unit = parse_margin(verdict.margin)
    if unit != "sd":
        return ""
    times = PARTS.get(number, f"{number:g} times")
    return f" ({times} the spread between {verdict.block}s, estimated cautiously)"


def _needed(verdict: Decisions, row: LevelDecision) -> Iterator[str]:
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
        confidence = sd_confidence(verdict.looks)
        alone, margin = (margin_size(verdict.margin, some, confidence=confidence) for some in (losses[~few], losses))
        yield f"Most of this spread comes from {who}: without them the margin would be {alone:.2g}, not {margin:.2g}."


def _looks(verdict: Decisions) -> Iterator[str]:
    """How often the question may be asked, where more than once."""
    if verdict.looks == 1 or not verdict.rows:
        return
    level, each = (f"{100 * alpha:.3g} %" for alpha in (verdict.alpha, verdict.alpha / verdict.looks))
    corrected = f"each is at a level of {each}, all together at {level}; p values and intervals are corrected for it"
    yield f"This holds for up to {verdict.looks} looks as {verdict.block}s come in: {corrected}."
    if any(row.seeds > inference.EXACT and row.confidence > 1 - inference.SMALLEST_DRAWN for row in verdict.rows):
        fewer = "ask for fewer looks, or compare fewer levels at a time"
        yield f"With so many, no difference can be shown with more than {inference.EXACT} {verdict.block}s: {fewer}."


def _paragraph(verdict: Decisions, row: LevelDecision) -> str:
    """One level: its decision, its sentence and its numbers."""
    level, reference = _name(verdict, row.level), _name(verdict, verdict.reference)
    said = [f"{level} against {reference}, {_seeds(verdict, row)}: {row.decision}."]
    said.append(_sentence(verdict, row, {}))
    if row.seeds > 1 and not is_identical(row):
        said.append(f"{'; '.join(_numbers(row))}.")
    if row.diverged or row.reference_diverged:
        there = f"under {reference} {row.reference_diverged} (p = {p_text(row.p_diverged_holm)})"
        said.append(f"Diverged, or without a number: {row.diverged}, {there}.")
    if missing := missing_seeds(verdict, row):
        said.append(missing)
    return " ".join(said)


def _seeds(verdict: Decisions, row: LevelDecision) -> str:
    """How many seeds were compared, of how many that were run."""
    block = verdict.block
    n = row.seeds + row.left_out
    text = f"{n} {block}" if n == 1 else f"{n} {block}s"
    if row.left_out > 0:
        text = f"{row.seeds} of {text}"
    if "seed" in verdict.runs and block != "seed":
        distinct = verdict.runs.seed[verdict.runs[block].isin(verdict.pairs[block])].nunique()
        text += f" made from {distinct} distinct seeds"
    return text


def _numbers(row: LevelDecision) -> list[str]:
    """The numbers that a level has, a clause each."""
    values = vars(row) | {
        "p_different": p_text(row.p_different_holm),
        "p_equivalent": p_text(row.p_equivalent_holm),
        "usual": f"{100 * row.confidence:.3g}",
        "narrow": f"{100 * row.equivalent_confidence:.3g}",
    }
    clauses = [clause.format(**values) for clause in NUMBERS]
    return [clause for clause in clauses if not re.search("nan|inf|unknown", clause)]
