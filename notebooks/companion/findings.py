"""Findings: a sentence each that a person would say, with the statistics folded away below it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from markupsafe import Markup

from companion.learning import ALL, BEAT, FAMILY, LEARNED, METRICS, STUCK
from gpulab.plots.names import LOADERS, SHARED_MEMORY, memory_words, names, network_words, setting_words
from gpulab.report import Report, paragraphs
from gpulab.stats.decisions import DECISIONS
from gpulab.stats.verdicts import Verdict

Part: TypeAlias = "Verdict | pd.DataFrame | str | list[str]"
SIZES = {"paper": "published size", "quick": "quick size", "smoke": "smallest size", "motion": "profile motion"}
SAME = "the same bits"
FEWEST = 6  # seeds that can show a difference at 5 %
METRIC_WORDS = {"final_loss": "loss", "heldout_loss": "held-out loss", "smallest": "steepest way down"}
METRIC_WORDS |= {"index_fraction": "share of ways down", "time upright (steps)": "time upright"}


@dataclass(frozen=True, eq=False)
class CheckedSentences(Report):
    """What was found, by heading: a sentence each. `print` says them; a notebook has the statistics behind a fold."""

    parts: Sequence[tuple[str, Part]]
    numbers: Sequence[str] = ()  # lines of statistics, beside those of verdicts and tables
    folded: Container[str] = ()  # headings that a page shows behind a fold of their own

    def sentences(self) -> list[tuple[str, list[str]]]:
        """Each heading, and the sentences below it."""
        return [(heading, in_words(part)) for heading, part in self.parts]

    def __str__(self) -> str:
        lines = []
        for heading, sentences in self.sentences():
            below = f" {sentences[0]}" if len(sentences) == 1 else "".join(f"\n  {line}" for line in sentences)
            lines.append(f"{heading}:{below}")
        return "\n".join(lines)

    def words(self) -> Markup:
        """The sentences, and the statistics in an element that unfolds."""
        said, behind = Markup(), Markup()
        for heading, sentences in self.sentences():
            paragraph = Markup("<p><b>{}.</b> {}</p>").format(heading, Markup("<br>").join(sentences))
            if heading in self.folded:
                behind += paragraph
            else:
                said += paragraph
        fold = Markup("<details><summary>{}</summary>{}</details>")
        said += fold.format("How one knows", behind) if behind else behind
        numbers = self.statistics()
        return said + fold.format("The statistics", paragraphs(numbers)) if numbers else said

    def statistics(self) -> list[str]:
        """What stands behind the fold, line by line."""
        lines = []
        for heading, part in self.parts:
            if isinstance(part, Verdict):
                lines += [f"{heading}:", *str(part).splitlines()]
            elif isinstance(part, pd.DataFrame):
                lines += [f"{heading}:", *_tested(part)]
        return [*lines, *self.numbers]


def finding(
    parts: Mapping[str, Part] | Iterable[tuple[str, Part]], numbers: Sequence[str] = (), folded: Container[str] = ()
) -> CheckedSentences:
    """A sentence for each of several results, under a heading of its own; `numbers` are lines behind the fold.

    What stands under the headings `folded` is behind another one.

    A part is a verdict, a table of `learning_table`, or a sentence or several, said as they are; an empty list of them
    is left out.

    >>> import gpulab as gl
    >>> losses = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5]
    >>> runs = pd.DataFrame({"setting": ["cpu"] * 6 + ["cuda"] * 6, "seed": [*range(6)] * 2, "final_loss": losses})
    >>> print(finding({"A card": gl.verdict(runs)}))
    A card: Under GPU the loss is 1.8 times as high as under CPU, and higher in 6 of 6 seeds.
    """
    pairs = parts.items() if isinstance(parts, Mapping) else parts
    told = [(heading, part) for heading, part in pairs if not isinstance(part, list) or part]
    return CheckedSentences(told, numbers, folded)


def in_words(part: Part) -> list[str]:
    """A result in a sentence, or in one for each family of a table."""
    if isinstance(part, Verdict):
        return [_verdict(part)]
    if isinstance(part, pd.DataFrame):
        return [_family(*each) for each in part.groupby([*FAMILY], sort=False)]
    return [part] if isinstance(part, str) else part


def by_decision(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of a table for each decision, from the same bits to different."""
    same = (table.same_bits == table.seeds) & (table.seeds > 0)
    said = table.decision.mask(same, SAME)
    for decision in (SAME, *reversed(DECISIONS)):
        if (said == decision).any():
            yield decision, table[said == decision]


def names_in_text(levels: Iterable[Any], factor: str = "setting") -> dict[Any, str]:
    """What each level of a factor is called within a sentence, which has commas of its own: `GPU (TF32)`."""
    return {level: _bracketed(words) for level, words in names(levels, factor).items()}


def setting_in_text(setting: Any) -> str:
    """A setting within a sentence: `CPU (one thread)`."""
    return _bracketed(setting_words(setting))


def _bracketed(words: str) -> str:
    first, comma, rest = words.partition(", ")
    return f"{first} ({rest})" if comma else words


def _verdict(judged: Verdict) -> str:
    called = names_in_text([judged.reference, *judged.table[judged.factor]], judged.factor)
    if not len(judged.table):
        return f"Only {called[judged.reference]} was run, so there is nothing to compare."
    sentences: list[str] = []
    for decision, rows in by_decision(judged.table):
        if decision == "different" or (decision == "inconclusive" and len(rows) == 1):
            sentences += [_one_level(row, judged, called) for _, row in rows.iterrows()]
        else:
            sentences.append(_alike(decision, rows, judged, called))
    return " ".join(sentences)


def _alike(decision: str, rows: pd.DataFrame, judged: Verdict, called: Mapping[Any, str]) -> str:
    """Levels that came to one decision, in a sentence."""
    block, usual = judged.block, called[judged.reference]
    levels = listed(called[level] for level in rows[judged.factor])
    under = _preposition(judged)
    count = f"{span(rows.seeds)} {block}{'s' if rows.seeds.max() > 1 else ''}"
    if decision == SAME:
        return f"{under.title()} {levels} every {block} ends with the same bits as {under} {usual}."
    if rows.seeds.max() == 1:
        return f"One {block} cannot compare {levels} with {usual}."
    if decision == "inconclusive":
        return f"Whether {levels} differ from {usual}, {count} do not decide{_would(rows)}."
    margin = _per_cent(rows.margin_relative) if rows.margin_relative.notna().all() else "the margin"
    mean = f"{under.title()} {levels} the mean {_metric(judged)}"
    if decision == "equivalent":
        return f"{mean} is within {margin} of that {under} {usual} ({count}): no difference that matters."
    return f"{mean} differs from that {under} {usual} by less than {margin} ({count}): too little to matter."


def _one_level(row: pd.Series, judged: Verdict, called: Mapping[Any, str]) -> str:
    """A level that is different, or that alone is undecided, in a sentence."""
    level, usual, block = called[row[judged.factor]], called[judged.reference], judged.block
    under = _preposition(judged)
    if row.seeds == 1:
        return f"One {block} cannot compare {level} with {usual}."
    if row.diverged != row.reference_diverged:
        of = judged.runs.groupby(judged.factor).size()
        here, there = (
            f"{row.diverged} of {of[row[judged.factor]]}",
            f"{row.reference_diverged} of {of[judged.reference]}",
        )
        return f"{under.title()} {level} {here} runs diverged, {under} {usual} {there}."
    moved = judged.pairs[judged.pairs[judged.factor] == row[judged.factor]].difference
    higher = f"higher in {(moved > 0).sum()} of {row.seeds} {block}s"
    if row.decision == "inconclusive":
        return (
            f"{under.title()} {level} the {_metric(judged)} is {higher} than {under} {usual}, which does not "
            f"decide{_would(judged.table[judged.table[judged.factor] == row[judged.factor]])}."
        )
    mean = judged.runs[judged.runs[judged.factor] == judged.reference][judged.metric].mean()
    size = f"off by {row.difference:+.2g} from that"
    if mean > 0 and row.difference > 0:
        size = f"{1 + row.difference / mean:.3g} times as high as"
    elif mean > 0:
        size = f"{1 + row.difference / mean:.3g} times that"
    lower = f"lower in {(moved < 0).sum()} of {row.seeds} {block}s"
    counted = higher if row.difference > 0 else lower
    return f"{under.title()} {level} the {_metric(judged)} is {size} {under} {usual}, and {counted}."


def _preposition(judged: Verdict) -> str:
    return "under" if judged.factor == "setting" else "with"


def _metric(judged: Verdict) -> str:
    return METRIC_WORDS.get(judged.metric, judged.metric.replace("_", " "))


def _would(rows: pd.DataFrame) -> str:
    """How many seeds would decide, as far as that is known."""
    most = rows.seeds_needed.max()
    if not np.isfinite(most):
        return ""
    enough = " be enough to show that nothing matters" if most < FEWEST else ""
    return f"; about {most:.0f} would{enough}"


def _family(key: tuple[str, str, str, str], rows: pd.DataFrame) -> str:
    """A network under one setting or loader, against its reference, at every speed."""
    experiment, size, setting, loader = key
    losses, learned, shares = (rows[rows.metric == metric] for metric in (ALL, LEARNED, BEAT))
    reference = rows.reference.iloc[0]
    usual = LOADERS.get(reference) or setting_in_text(reference)
    parts = _losses(losses, usual)
    narrower = len(learned) and learned.margin.sum() < losses.margin.sum()
    none_matters = set(losses.decision) <= {"equivalent", "different but negligible"}
    if narrower and none_matters and (losses.same_bits < losses.seeds).any():
        # Seeds that do not learn widen the margin of all, so what holds within the narrow one is said first.
        wide = f"over all {span(losses.seeds)} the mean is within {_per_cent(losses.margin_relative)}"
        parts = [f"among seeds that learned, {'; '.join(_losses(learned, usual))}", wide]
    different = shares[shares.decision == "different"]
    if len(different):
        beat, instead = different.beat - different.beat_reference, different.beat_reference
        of = f"of {span(different.seeds)} seeds beat repeating the last frame"
        parts.append(f"{listed(beat) if beat.any() else 'none'} {of}, instead of {listed(instead)}")
    elif len(shares) and not shares.beat.any():
        parts.append("no network has learned motion")
    where = f"{network_words(experiment)}, {SIZES.get(size, size)}, {setting_in_text(setting)}"
    memory = ""
    if loader in LOADERS and LOADERS[loader] == SHARED_MEMORY:
        memory = f", {memory_words(loader, setting)}"
        if memory_words(loader, setting) != SHARED_MEMORY:
            memory = ", the published line, which copies on a GPU (own memory)"
    return f"{where}{memory}: {'; '.join(parts)}."


def _losses(rows: pd.DataFrame, usual: str) -> list[str]:
    """What is said of one loss at every speed, against the usual level."""
    parts = []
    for decision in sorted(set(rows.decision), key=[*reversed(DECISIONS)].index):
        alike = rows[rows.decision == decision]
        within, seeds = _per_cent(alike.margin_relative), span(alike.seeds)
        if decision == "different":
            words = f"the loss is {listed(f'{1 + part:.3g}' for part in alike.relative)} times as high"
        elif (alike.same_bits == alike.seeds).all():
            words = "the same bits in every seed"
        elif decision == "inconclusive":
            words = f"{seeds} seeds do not decide"
        elif decision == "equivalent":
            words = f"the mean loss is within {within} of that with {usual} ({seeds} seeds)"
        else:
            words = f"the mean loss is not that with {usual}, but within {within} of it ({seeds} seeds)"
        parts.append(words + (_speeds(alike) if len(rows) > 1 else ""))
    return parts


def _tested(table: pd.DataFrame) -> list[str]:
    """What was decided of each metric, with the numbers: a line each, below one for each family."""
    lines = []
    for (experiment, size, setting, loader), family in table.groupby([*FAMILY], sort=False):
        lines.append(f"{experiment}, {size} size, {setting}, frames {loader}:")
        for metric in METRICS:
            if len(rows := family[family.metric == metric]):
                lines.append(f"  {metric}: {'; '.join(_decisions(metric, rows))}.")
    return lines


def _decisions(metric: str, rows: pd.DataFrame) -> list[str]:
    """The decisions on a metric: `different at speed 1 and 2 (1.8 and 1.5 times, higher in 9 of 9 seeds)`."""
    parts = []
    for decision, some in rows.groupby("decision", sort=False):
        if metric in (BEAT, STUCK):
            sizes, unit = [f"{100 * difference:+.0f}" for difference in some.difference], "points"
        else:
            sizes, unit = [f"{1 + relative:.3g}" for relative in some.relative], "times"
        if some.seeds.nunique() == 1:
            higher = f"{_once(some.worse)} of {some.seeds.iloc[0]}"
        else:
            higher = _once(f"{row.worse} of {row.seeds}" for row in some.itertuples())
        parts.append(f"{decision}{_speeds(some)} ({_once(sizes)} {unit}, higher in {higher} seeds)")
    if metric == BEAT and not rows.beat.any():
        parts.append("neither network has learned motion here")
    return parts


def _speeds(rows: pd.DataFrame) -> str:
    return "" if rows.speed.isna().all() else f" at speed {listed(map('{:g}'.format, rows.speed))}"


def _per_cent(parts: pd.Series) -> str:
    return f"{100 * parts.max():.2g} %"


def _once(words: Iterable[Any]) -> str:
    """As `listed`; where all are the same, one."""
    each = [*map(str, words)]
    return listed(each if len(set(each)) > 1 else each[:1])


def span(numbers: Iterable[float], form: str = ".0f") -> str:
    """Numbers from the least to the largest, or the one that there is."""
    values = sorted(numbers)
    least, most = format(values[0], form), format(values[-1], form)
    return least if least == most else f"{least} to {most}"


def listed(words: Iterable[Any]) -> str:
    """Words as in a sentence: a, b and c."""
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last
