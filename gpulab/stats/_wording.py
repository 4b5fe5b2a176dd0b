"""A verdict in words: a sentence for each level, and a paragraph with all numbers."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator

import gpulab.stats._inference as inference
from gpulab.stats._decisions import (
    DECISIONS,
    MAX_SEEDS,
    Decisions,
    LevelDecision,
    is_identical,
    may_diverge_discordantly,
    min_significant_pairs,
    sd_confidence,
)
from gpulab.stats._margins import margin_size, parse_margin
from gpulab.wording import Level, TextByLevel, level_text

MIN_SEEDS_FOR_ESTIMATE = (
    10  # below it, the number of seeds that would settle the question is a rough guess
)
FRACTION_WORDS = {0.25: "a quarter of", 0.5: "half", 1.0: "once"}  # of the spread between seeds

EFFECT_TEMPLATE = "{at_level} the {metric} is {average} {at_reference}"
MAX_NAMED_SEEDS = 8  # seeds in one sentence
# templates by decision, or by the special case that takes precedence over it
SENTENCE_TEMPLATES = {
    "diverged": (
        "{at_level} {diverged} of {runs} runs diverged, "
        "{at_reference} {reference_diverged} of {reference_runs}."
    ),
    "too few pairs": (
        "Between {level} and {reference} nothing can be compared: {shared} finished {preposition}"
        " both; run the same {block}s {preposition} both, {fewest} or more."
    ),
    "same bits": (
        "{at_level} every {block} ends with the same bits as {at_reference}, so there is nothing to"
        " test."
    ),
    "not one digit": (
        "{at_level} not one {block} differs by a digit from that {at_reference}: "
        "make sure that the {factor} reached the training."
    ),
    "different": "{at_level} the {metric} is {change} {at_reference}, and {agreement}.",
    "different but negligible": (
        EFFECT_TEMPLATE + ", and {agreement}: that is no luck, but {negligible}."
    ),
    "equivalent": (
        EFFECT_TEMPLATE
        + "; {negligible}. {n_beyond_margin:.0f} of {seeds} {block}s moved further than that, but"
        " jumps in up to {unseen_percent:.0f} % of all {block}s cannot be ruled out (95 % limit)."
    ),
    "inconclusive": EFFECT_TEMPLATE + ", and {agreement}, which decides nothing{conditions}.",
}
NUMBER_TEMPLATES = (  # of a level; those that a level does not have are left out
    "Difference {difference:.2g}",
    "{difference_percent} % interval {low:.2g} to {high:.2g}",
    "p = {p_different}",
    "equivalence within ±{margin:.2g}",
    "{equivalence_percent} % interval {equivalent_low:.2g} to {equivalent_high:.2g}",
    "p = {p_equivalent}",
    "largest difference {largest_difference:.2g}",
)


def level_sentences(verdict: Decisions, words: TextByLevel) -> list[str]:
    """What each level came to: the effect first, then what it is compared with.

    `words` has what the levels and the metric are called; what is not in it keeps its name.
    """
    if not verdict.rows:
        return [
            f"Only {_level_name(verdict, verdict.reference, words)} was run, so there is nothing to"
            " compare."
        ]
    sentences = [_level_sentence(verdict, row, words) for row in verdict.rows]
    return [*sentences, *_outlier_sentences(verdict), *_looks_sentences(verdict)]


def describe_with_numbers(verdict: Decisions) -> str:
    """A line for each level with its decision, sentence and numbers, then the common facts."""
    reference_seeds = f"{verdict.block}s under {_level_name(verdict, verdict.reference)}"
    lines = [_level_paragraph(verdict, row) for row in verdict.rows] or level_sentences(verdict, {})
    lines.append(
        f"The standard deviation between {reference_seeds} is {verdict.between_seeds:.2g}."
    )
    lines += _outlier_sentences(verdict)
    if any(math.isnan(row.margin) for row in verdict.rows):
        lines.append(
            f"Equivalence was not asked: {reference_seeds} have no spread; give a margin in the"
            " metric's units."
        )
    return "\n".join([*lines, *_looks_sentences(verdict), *verdict.notes]).replace(
        " is nan.", " is unknown."
    )


def missing_seeds(verdict: Decisions, row: LevelDecision) -> str:
    """The seeds left out because the level or the reference lacks them; empty for none."""
    factor = verdict.factor
    block = verdict.block
    preposition = "under" if factor == "setting" else "with"
    blocks_by_level = verdict.runs.groupby(factor, sort=False)[block]
    seeds_by_level = {level: list(dict.fromkeys(blocks)) for level, blocks in blocks_by_level}
    level_seeds = seeds_by_level.get(row.level, [])
    reference_seeds = seeds_by_level.get(verdict.reference, [])
    missing_by_level = [
        (row.level, [seed for seed in reference_seeds if seed not in set(level_seeds)]),
        (verdict.reference, [seed for seed in level_seeds if seed not in set(reference_seeds)]),
    ]
    clauses = []
    for level, missing in missing_by_level:
        if missing:
            blocks_text = block if len(missing) == 1 else f"{block}s"
            clauses.append(
                f"{blocks_text} {_join_values(missing)} {preposition} {_level_name(verdict, level)}"
            )
    return f"Missing: {'; '.join(clauses)}." if clauses else ""


def _join_values(values: list[Level]) -> str:
    """Some seeds in order, such as `2, 5 and 7`.

    >>> _join_values([7, 2, 5]), _join_values(["b"]), _join_values(range(10))
    ('2, 5 and 7', 'b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    with contextlib.suppress(TypeError):
        values = sorted(values)  # type: ignore[type-var]
    texts = [str(value) for value in values]
    if len(texts) > MAX_NAMED_SEEDS:
        texts = [*texts[:MAX_NAMED_SEEDS], f"{len(texts) - MAX_NAMED_SEEDS} more"]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _level_name(verdict: Decisions, level: Level, words: TextByLevel | None = None) -> str:
    """The name of a level in sentences."""
    return (words or {}).get(level, level_text(level, verdict.factor))


def p_text(value: float) -> str:
    """A p value in two digits; far below 0.001 in one."""
    return (f"{value:.0e}" if 0 < value < 0.001 else f"{value:.2g}").replace("nan", "unknown")


def _level_sentence(verdict: Decisions, row: LevelDecision, words: TextByLevel) -> str:
    """The sentence on the result of a level."""
    case = _sentence_key(verdict, row)
    facts = _name_facts(verdict, row, words)
    if case == "diverged":
        facts |= _divergence_facts(verdict, row)
    if case in DECISIONS:
        facts |= _effect_facts(verdict, row)
    return SENTENCE_TEMPLATES[case].format(**facts)


def _sentence_key(verdict: Decisions, row: LevelDecision) -> str:
    """Which of `SENTENCE_TEMPLATES` is true of a level."""
    if row.decision == "different" and row.p_diverged_holm <= verdict.alpha:
        return "diverged"
    if row.seeds < 2:
        return "too few pairs"
    if is_identical(row):
        return "same bits"
    if not (row.largest_difference or row.p_equivalent > 0 or row.discordant_diverged):
        return "not one digit"
    return row.decision


def _name_facts(verdict: Decisions, row: LevelDecision, words: TextByLevel) -> dict[str, object]:
    """What is compared: the level, the reference, the metric and the blocks, as they are called."""
    block = verdict.block
    level = _level_name(verdict, row.level, words)
    reference = _level_name(verdict, verdict.reference, words)
    preposition = "under" if verdict.factor == "setting" else "with"
    return {
        "level": level,
        "reference": reference,
        "preposition": preposition,
        "at_level": f"{preposition.capitalize()} {level}",
        "at_reference": f"{preposition} {reference}",
        "metric": words.get(verdict.metric, verdict.metric.replace("_", " ")),
        "factor": verdict.factor,
        "block": block,
        "shared": f"only one {block}" if row.seeds else f"no {block}",
        "fewest": min_significant_pairs(verdict.alpha / len(verdict.rows) / verdict.looks),
    }


def _divergence_facts(verdict: Decisions, row: LevelDecision) -> dict[str, object]:
    """How many runs diverged, and of how many."""
    runs = verdict.runs[verdict.factor].value_counts()
    return {
        "diverged": row.diverged,
        "runs": runs[row.level],
        "reference_diverged": row.reference_diverged,
        "reference_runs": runs[verdict.reference],
    }


def _effect_facts(verdict: Decisions, row: LevelDecision) -> dict[str, object]:
    """How far a level differs, in how many seeds, against which margin, and what would decide."""
    block = verdict.block
    differences = verdict.pairs[verdict.pairs[verdict.factor] == row.level].difference
    direction = "higher" if row.difference > 0 else "lower"
    same_direction = (differences * row.difference > 0).sum()
    if row.difference:
        agreement = f"{direction} in {same_direction} of {row.seeds} {block}s"
    else:
        agreement = f"another in {(differences.fillna(0) != 0).sum()} of {row.seeds} {block}s"
    margin_text = _amount_text(verdict, row, row.margin)
    negligible = f"differences below {margin_text}{_margin_meaning(verdict)} count as none here"
    conditions = [negligible] if row.margin > 0 else []
    conditions += _open_conditions(verdict, row)
    return {
        "average": _average_text(verdict, row, direction),
        "change": _change_text(verdict, row),
        "agreement": agreement,
        "negligible": negligible,
        "n_beyond_margin": row.beyond_margin,
        "seeds": row.seeds,
        "unseen_percent": 100 * inference.clopper_pearson_upper(row.beyond_margin, row.seeds),
        "conditions": "".join(f"; {condition}" for condition in conditions),
    }


def _average_text(verdict: Decisions, row: LevelDecision, direction: str) -> str:
    """How far, and in which direction, a level is from the reference on average.

    The text ends before the reference's name.
    """
    if row.difference == 0:
        return "the same on average as"
    return f"{_amount_text(verdict, row, abs(row.difference))} {direction} on average than"


def _amount_text(verdict: Decisions, row: LevelDecision, value: float) -> str:
    """A difference in per cent of the reference's mean if all values are positive, or as it is."""
    if verdict.runs[verdict.metric].min() > 0 and row.margin_relative > 0:
        return f"{100 * value * row.margin_relative / row.margin:.2g} %"
    return f"{value:.2g}"


def _change_text(verdict: Decisions, row: LevelDecision) -> str:
    """How far a level differs from the reference, up to the reference's name."""
    ratio = 1 + row.difference * row.margin_relative / row.margin if row.margin else math.nan
    if 0.9 < ratio < 1.1 or not verdict.runs[verdict.metric].min() > 0 or math.isnan(ratio):
        direction = "higher" if row.difference > 0 else "lower"
        return f"{_amount_text(verdict, row, abs(row.difference))} {direction} than"
    return f"{ratio:.3g} times as high as"


def _margin_meaning(verdict: Decisions) -> str:
    """What a margin in standard deviations means, in brackets; empty for other margins."""
    number, unit = parse_margin(verdict.margin)
    if unit != "sd":
        return ""
    times = FRACTION_WORDS.get(number, f"{number:g} times")
    return f" ({times} the spread between {verdict.block}s, estimated cautiously)"


def _open_conditions(verdict: Decisions, row: LevelDecision) -> Iterator[str]:
    """The conditions that leave the question open, and what would settle it."""
    block = verdict.block
    min_pairs = min_significant_pairs(1 - row.confidence)
    if may_diverge_discordantly(row):
        yield (
            f"on up to {100 * row.discordant_diverged_upper:.0f} % of {block}s one of the two could"
            " diverge alone"
        )
    if row.seeds < min_pairs:
        yield f"{row.seeds} {block}s are too few to show a difference, {min_pairs} are enough"
    if row.margin > 0 and not may_diverge_discordantly(row):
        caveat = "" if row.seeds >= MIN_SEEDS_FOR_ESTIMATE else "a rough guess, "
        is_finite = math.isfinite(row.seeds_needed)
        number = f"about {row.seeds_needed:.0f}" if is_finite else f"more than {MAX_SEEDS:,}"
        yield f"{number} {block}s would settle it ({caveat}power 0.8, if others are like these)"


def _outlier_sentences(verdict: Decisions) -> Iterator[str]:
    """That a few seeds far from the others make most of the spread, and the margin without them."""
    losses = verdict.reference_losses()
    is_outlier = inference.plateau_outliers(losses)
    _, unit = parse_margin(verdict.margin)
    if is_outlier.any() and unit == "sd":
        outliers = (
            f"{is_outlier.sum()} of {len(losses)} {verdict.block}s that lie far from the others"
        )
        confidence = sd_confidence(verdict.looks)
        margin = margin_size(verdict.margin, losses, confidence=confidence)
        margin_without = margin_size(verdict.margin, losses[~is_outlier], confidence=confidence)
        margins = f"without them the margin would be {margin_without:.2g}, not {margin:.2g}"
        yield f"Most of this spread comes from {outliers}: {margins}."


def _looks_sentences(verdict: Decisions) -> Iterator[str]:
    """The number of looks for which the tests are corrected, if there are several."""
    if verdict.looks == 1 or not verdict.rows:
        return
    all_looks = f"{100 * verdict.alpha:.3g} %"
    one_look = f"{100 * (verdict.alpha / verdict.looks):.3g} %"
    levels = f"each is at a level of {one_look}, all together at {all_looks}"
    correction = f"{levels}; p values and intervals are corrected for it"
    yield f"This holds for up to {verdict.looks} looks as {verdict.block}s come in: {correction}."
    max_exact = inference.MAX_EXACT_DIFFERENCES
    if any(
        row.seeds > max_exact and row.confidence > 1 - inference.MIN_DRAWN_P for row in verdict.rows
    ):
        advice = "ask for fewer looks, or compare fewer levels at a time"
        yield (
            f"With so many, no difference can be shown with more than {max_exact} {verdict.block}s:"
            f" {advice}."
        )


def _level_paragraph(verdict: Decisions, row: LevelDecision) -> str:
    """One level: its decision, its sentence and its numbers."""
    level = _level_name(verdict, row.level)
    reference = _level_name(verdict, verdict.reference)
    sentences = [f"{level} against {reference}, {_seed_count_text(verdict, row)}: {row.decision}."]
    sentences.append(_level_sentence(verdict, row, {}))
    if row.seeds > 1 and not is_identical(row):
        sentences.append(f"{'; '.join(_number_clauses(row))}.")
    if row.diverged or row.reference_diverged:
        at_reference = (
            f"under {reference} {row.reference_diverged} (p = {p_text(row.p_diverged_holm)})"
        )
        sentences.append(f"Diverged, or without a number: {row.diverged}, {at_reference}.")
    missing = missing_seeds(verdict, row)
    if missing:
        sentences.append(missing)
    return " ".join(sentences)


def _seed_count_text(verdict: Decisions, row: LevelDecision) -> str:
    """How many seeds were compared, of how many that were run."""
    block = verdict.block
    n = row.seeds + row.unpaired
    text = f"{n} {block}" if n == 1 else f"{n} {block}s"
    if row.unpaired > 0:
        text = f"{row.seeds} of {text}"
    if "seed" in verdict.runs and block != "seed":
        distinct = verdict.runs.seed[verdict.runs[block].isin(verdict.pairs[block])].nunique()
        text += f" made from {distinct} distinct seeds"
    return text


def _number_clauses(row: LevelDecision) -> list[str]:
    """The numbers that a level has, a clause each."""
    values = vars(row) | {
        "p_different": p_text(row.p_different_holm),
        "p_equivalent": p_text(row.p_equivalent_holm),
        "difference_percent": f"{100 * row.confidence:.3g}",
        "equivalence_percent": f"{100 * row.equivalent_confidence:.3g}",
    }
    clauses = [clause.format(**values) for clause in NUMBER_TEMPLATES]
    return [clause for clause in clauses if not re.search("nan|inf|unknown", clause)]
