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

# With fewer seeds than this, the estimate of the number of seeds needed is called a rough estimate.
MIN_SEEDS_FOR_ESTIMATE = 10
# Words for a margin in standard deviations.
FRACTION_WORDS = {0.25: "a quarter of", 0.5: "half", 1.0: "equal to"}

EFFECT_TEMPLATE = "{at_level} the {metric} is {average} {at_reference}"
MAX_NAMED_SEEDS = 8  # the largest number of seeds that a sentence names
# The templates of sentences, by decision or by a special case that takes precedence over it.
SENTENCE_TEMPLATES = {
    "diverged": (
        "{at_level}, {diverged} of {runs} runs diverged; "
        "{at_reference}, {reference_diverged} of {reference_runs}."
    ),
    "too few pairs": (
        "{level} and {reference} cannot be compared: {shared} finished {preposition} both. Run at"
        " least {fewest} {block}s {preposition} both."
    ),
    "same bits": (
        "{at_level} every {block} ends with the same bits as {at_reference}, so there is nothing to"
        " test."
    ),
    "not one digit": (
        "{at_level} every {block} has exactly the same {metric} as {at_reference}. Check that the"
        " {factor} reached the training."
    ),
    "different": "{at_level} the {metric} is {change} {at_reference}, and {agreement}.",
    "different but negligible": (
        EFFECT_TEMPLATE + ", and {agreement}. The difference is statistically significant, but"
        " smaller than {margin}."
    ),
    "equivalent": (
        EFFECT_TEMPLATE
        + ". This is less than {margin}. Individual {block}s: the difference exceeds the"
        " margin in {n_beyond_margin:.0f} of {seeds}, and could in up to {unseen_percent:.0f} % of"
        " all {block}s (95 % confidence limit)."
    ),
    "inconclusive": EFFECT_TEMPLATE + ", and {agreement}. {not_shown}{conditions}",
}
NUMBER_TEMPLATES = (  # clauses about a level; clauses with an unknown number are left out
    "Difference {difference:.2g}",
    "{difference_percent} % interval {low:.2g} to {high:.2g}",
    "p = {p_different}",
    "equivalence within ±{margin:.2g}",
    "{equivalence_percent} % interval {equivalent_low:.2g} to {equivalent_high:.2g}",
    "p = {p_equivalent}",
    "largest difference {largest_difference:.2g}",
)


def level_sentences(verdict: Decisions, words: TextByLevel | None = None) -> list[str]:
    """Describe the result of each level in a sentence, followed by remarks on all levels.

    `words` has names for the levels and for the metric. Levels and metrics that are not in it keep
    their own names, as do all of them by default.
    """
    words = words or {}
    if not verdict.rows:
        return [
            f"Only {_level_name(verdict, verdict.reference, words)} was run, so there is nothing to"
            " compare."
        ]
    sentences = [_level_sentence(verdict, row, words) for row in verdict.rows]
    return [*sentences, *_outlier_sentences(verdict), *_looks_sentences(verdict)]


def describe_with_numbers(verdict: Decisions) -> str:
    """Describe each level in a line with its decision and numbers, followed by common facts."""
    reference_seeds = f"{verdict.block}s under {_level_name(verdict, verdict.reference)}"
    lines = [_level_paragraph(verdict, row) for row in verdict.rows] or level_sentences(verdict)
    lines.append(
        f"The standard deviation between {reference_seeds} is {verdict.between_seeds:.2g}."
    )
    lines += _outlier_sentences(verdict)
    if any(math.isnan(row.margin) for row in verdict.rows):
        lines.append(
            f"Equivalence was not tested: the spread between {reference_seeds} is zero or unknown."
            " Give a margin in units of the metric."
        )
    return "\n".join([*lines, *_looks_sentences(verdict), *verdict.notes]).replace(
        " is nan.", " is unknown."
    )


def missing_seeds(verdict: Decisions, row: LevelDecision) -> str:
    """Name the seeds that only the level or only the reference has; return "" if there are none."""
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
    """List seeds in order, such as `2, 5 and 7`, but at most the first `MAX_NAMED_SEEDS`.

    >>> _join_values([7, 2, 5]), _join_values(["b"]), _join_values(range(10))
    ('2, 5 and 7', 'b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    with contextlib.suppress(TypeError):  # values of different types cannot be sorted
        values = sorted(values)  # type: ignore[type-var]
    texts = [str(value) for value in values]
    if len(texts) > MAX_NAMED_SEEDS:
        texts = [*texts[:MAX_NAMED_SEEDS], f"{len(texts) - MAX_NAMED_SEEDS} more"]
    *first_texts, last_text = texts
    return f"{', '.join(first_texts)} and {last_text}" if first_texts else last_text


def _level_name(verdict: Decisions, level: Level, words: TextByLevel | None = None) -> str:
    """Return the name of a level for sentences: that in `words`, or else its own."""
    return (words or {}).get(level, level_text(level, verdict.factor))


def p_text(value: float) -> str:
    """Format a p value with two digits, or with one digit below 0.001; NaN as `unknown`."""
    return (f"{value:.0e}" if 0 < value < 0.001 else f"{value:.2g}").replace("nan", "unknown")


def _level_sentence(
    verdict: Decisions, row: LevelDecision, words: TextByLevel | None = None
) -> str:
    """Write the sentence on the result of a level; `words` as for `level_sentences`."""
    case = _sentence_key(verdict, row)
    facts = _name_facts(verdict, row, words or {})
    if case == "diverged":
        facts |= _divergence_facts(verdict, row)
    if case in DECISIONS:
        facts |= _effect_facts(verdict, row)
    return SENTENCE_TEMPLATES[case].format(**facts)


def _sentence_key(verdict: Decisions, row: LevelDecision) -> str:
    """Choose the key of `SENTENCE_TEMPLATES` for a level: a special case, or its decision."""
    if row.decision == "different" and row.p_diverged_holm <= verdict.alpha:
        return "diverged"
    if row.seeds < 2:
        return "too few pairs"
    if is_identical(row):
        return "same bits"
    # All differences are zero, but the weights are not known to be the same.
    no_difference = row.largest_difference == 0 and row.discordant_diverged == 0
    if no_difference and not row.p_equivalent > 0:
        return "not one digit"
    return row.decision


def _name_facts(verdict: Decisions, row: LevelDecision, words: TextByLevel) -> dict[str, object]:
    """Collect the names of the level, the reference, the metric and the blocks for a template."""
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
    """Count the runs, and those that diverged, of the level and of the reference."""
    runs = verdict.runs[verdict.factor].value_counts()
    return {
        "diverged": row.diverged,
        "runs": runs[row.level],
        "reference_diverged": row.reference_diverged,
        "reference_runs": runs[verdict.reference],
    }


def _effect_facts(verdict: Decisions, row: LevelDecision) -> dict[str, object]:
    """Describe the effect for a template: its size, agreement between seeds, margin, conditions."""
    block = verdict.block
    differences = verdict.pairs[verdict.pairs[verdict.factor] == row.level].difference
    direction = "higher" if row.difference > 0 else "lower"
    same_direction = (differences * row.difference > 0).sum()
    if row.difference:
        agreement = f"{direction} in {same_direction} of {row.seeds} {block}s"
    else:
        n_different = (differences.fillna(0) != 0).sum()
        agreement = f"different in {n_different} of {row.seeds} {block}s"
    margin_text = _amount_text(verdict, row, row.margin)
    margin = f"the margin of {margin_text}{_margin_meaning(verdict)}"
    if row.margin > 0:
        not_shown = f"This shows neither a difference nor equivalence within {margin}."
    else:
        not_shown = "This does not show a difference."
    return {
        "average": _average_text(verdict, row, direction),
        "change": _change_text(verdict, row),
        "agreement": agreement,
        "margin": margin,
        "not_shown": not_shown,
        "n_beyond_margin": row.beyond_margin,
        "seeds": row.seeds,
        "unseen_percent": 100 * inference.clopper_pearson_upper(row.beyond_margin, row.seeds),
        "conditions": "".join(f" {reason}" for reason in _reasons_undecided(verdict, row)),
    }


def _average_text(verdict: Decisions, row: LevelDecision, direction: str) -> str:
    """Describe the mean difference, such as `2 % higher on average than`.

    The name of the reference is meant to follow.
    """
    if row.difference == 0:
        return "the same on average as"
    return f"{_amount_text(verdict, row, abs(row.difference))} {direction} on average than"


def _amount_text(verdict: Decisions, row: LevelDecision, value: float) -> str:
    """Format a difference: in per cent of the reference's mean, or in the metric's units.

    Per cent are used if the metric of all runs is positive and there is a relative margin.
    """
    if verdict.runs[verdict.metric].min() > 0 and row.margin_relative > 0:
        # The relative margin divided by the margin is 1 over the mean of the reference.
        return f"{100 * value * row.margin_relative / row.margin:.2g} %"
    return f"{value:.2g}"


def _change_text(verdict: Decisions, row: LevelDecision) -> str:
    """Describe a difference, such as `2 % higher than` or `1.5 times as high as`.

    The ratio is used if it is known, the metric of all runs is positive, and the change is 10 % or
    more.
    """
    # The relative margin divided by the margin is 1 over the mean of the reference.
    ratio = 1 + row.difference * row.margin_relative / row.margin if row.margin else math.nan
    is_large_change = ratio <= 0.9 or ratio >= 1.1  # false for NaN
    if is_large_change and verdict.runs[verdict.metric].min() > 0:
        return f"{ratio:.3g} times as high as"
    direction = "higher" if row.difference > 0 else "lower"
    return f"{_amount_text(verdict, row, abs(row.difference))} {direction} than"


def _margin_meaning(verdict: Decisions) -> str:
    """Explain a margin in standard deviations, in brackets; return "" for other margins."""
    number, unit = parse_margin(verdict.margin)
    if unit != "sd":
        return ""
    times = FRACTION_WORDS.get(number, f"{number:g} times")
    return (
        f" ({times} the standard deviation between {verdict.block}s, at its lower confidence limit)"
    )


def _reasons_undecided(verdict: Decisions, row: LevelDecision) -> Iterator[str]:
    """Yield sentences on why a level is undecided, and on how many seeds would decide it."""
    block = verdict.block
    min_pairs = min_significant_pairs(1 - row.confidence)
    if may_diverge_discordantly(row):
        yield (
            f"Up to {100 * row.discordant_diverged_upper:.0f} % of {block}s could diverge under"
            " only one of the two levels."
        )
    if row.seeds < min_pairs:
        yield f"At least {min_pairs} {block}s are needed to show a difference."
    if row.margin > 0 and not may_diverge_discordantly(row):
        estimate = "estimate" if row.seeds >= MIN_SEEDS_FOR_ESTIMATE else "rough estimate"
        is_finite = math.isfinite(row.seeds_needed)
        number = f"About {row.seeds_needed:.0f}" if is_finite else f"More than {MAX_SEEDS:,}"
        yield (
            f"{number} {block}s would be needed to decide ({estimate} for a power of 0.8, if other"
            f" {block}s are like these)."
        )


def _outlier_sentences(verdict: Decisions) -> Iterator[str]:
    """Yield a sentence if outliers account for most of the spread that the margin depends on."""
    losses = verdict.reference_losses()
    is_outlier = inference.plateau_outliers(losses)
    _, unit = parse_margin(verdict.margin)
    if unit != "sd" or not is_outlier.any():
        return
    confidence = sd_confidence(verdict.looks)
    margin = margin_size(verdict.margin, losses, confidence=confidence)
    margin_without = margin_size(verdict.margin, losses[~is_outlier], confidence=confidence)
    block = verdict.block
    yield (
        f"Most of the spread between {block}s comes from {is_outlier.sum()} of"
        f" {len(losses)} {block}s that lie far from the others: without them the margin would be"
        f" {margin_without:.2g}, not {margin:.2g}."
    )


def _looks_sentences(verdict: Decisions) -> Iterator[str]:
    """Yield sentences on the correction for several looks, if there are several."""
    if verdict.looks == 1 or not verdict.rows:
        return
    all_looks = f"{100 * verdict.alpha:.3g} %"
    one_look = f"{100 * (verdict.alpha / verdict.looks):.3g} %"
    yield (
        f"The verdict allows up to {verdict.looks} looks while {verdict.block}s come in. Each look"
        f" is tested at a level of {one_look}, so that all looks together have a level of"
        f" {all_looks}. The p values and intervals are corrected for this."
    )
    max_exact = inference.MAX_EXACT_DIFFERENCES
    if any(
        row.seeds > max_exact and row.confidence > 1 - inference.MIN_DRAWN_P for row in verdict.rows
    ):
        yield (
            "With this many looks and levels, no difference can be shown with more than"
            f" {max_exact} {verdict.block}s. Use fewer looks, or compare fewer levels at a time."
        )


def _level_paragraph(verdict: Decisions, row: LevelDecision) -> str:
    """Write the paragraph on a level: its decision, the sentence on its result, and its numbers.

    The paragraph ends with the runs that diverged and the seeds that are missing, if there are any.
    """
    level = _level_name(verdict, row.level)
    reference = _level_name(verdict, verdict.reference)
    sentences = [f"{level} against {reference}, {_seed_count_text(verdict, row)}: {row.decision}."]
    sentences.append(_level_sentence(verdict, row))
    if row.seeds > 1 and not is_identical(row):
        sentences.append(f"{'; '.join(_number_clauses(row))}.")
    if row.diverged or row.reference_diverged:
        at_reference = (
            f"{row.reference_diverged} under {reference} (p = {p_text(row.p_diverged_holm)})"
        )
        sentences.append(
            f"Diverged or without a number: {row.diverged} under {level}, {at_reference}."
        )
    missing = missing_seeds(verdict, row)
    if missing:
        sentences.append(missing)
    return " ".join(sentences)


def _seed_count_text(verdict: Decisions, row: LevelDecision) -> str:
    """Describe how many seeds were compared, and how many were run, such as `8 of 10 seeds`."""
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
    """Format the numbers of a level as clauses; clauses with an unknown number are left out."""
    values = vars(row) | {
        "p_different": p_text(row.p_different_holm),
        "p_equivalent": p_text(row.p_equivalent_holm),
        "difference_percent": f"{100 * row.confidence:.3g}",
        "equivalence_percent": f"{100 * row.equivalent_confidence:.3g}",
    }
    clauses = [clause.format(**values) for clause in NUMBER_TEMPLATES]
    return [clause for clause in clauses if not re.search("nan|inf|unknown", clause)]
