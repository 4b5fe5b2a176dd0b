"""Findings: a sentence each that a person would say, with the statistics folded away below it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd
from markupsafe import Markup

from companion.learning import ALL, BEAT, FAMILY, LEARNED, METRICS, STUCK
from gpulab.plots.names import LOADERS, SHARED_MEMORY, memory_words, names, setting_words
from gpulab.report import Report, paragraphs
from gpulab.stats.decisions import DECISIONS
from gpulab.stats.verdicts import Verdict

Part: TypeAlias = "Verdict | pd.DataFrame | str | list[str]"
SIZES = {"paper": "published size", "quick": "quick size", "smoke": "smallest size", "motion": "profile motion"}
SAME = "the same bits"
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
        return [(heading, in_words(result)) for heading, result in self.parts]

    def __str__(self) -> str:
        lines = []
        for heading, sentences in self.sentences():
            sentence_lines = f" {sentences[0]}" if len(sentences) == 1 else "".join(f"\n  {line}" for line in sentences)
            lines.append(f"{heading}:{sentence_lines}")
        return "\n".join(lines)

    def words(self) -> Markup:
        """The sentences, and the statistics in an element that unfolds."""
        visible, hidden = Markup(), Markup()
        for heading, sentences in self.sentences():
            paragraph = Markup("<p><b>{}.</b> {}</p>").format(heading, Markup("<br>").join(sentences))
            if heading in self.folded:
                hidden += paragraph
            else:
                visible += paragraph
        fold = Markup("<details><summary>{}</summary>{}</details>")
        visible += fold.format("How one knows", hidden) if hidden else hidden
        numbers = self.statistics()
        return visible + fold.format("The statistics", paragraphs(numbers)) if numbers else visible

    def statistics(self) -> list[str]:
        """What stands behind the fold, line by line."""
        lines = []
        for heading, result in self.parts:
            if isinstance(result, Verdict):
                lines += [f"{heading}:", *str(result).splitlines()]
            elif isinstance(result, pd.DataFrame):
                lines += [f"{heading}:", *_decision_lines(result)]
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
    not_empty = [(heading, result) for heading, result in pairs if not isinstance(result, list) or result]
    return CheckedSentences(not_empty, numbers, folded)


def in_words(result: Part) -> list[str]:
    """A result in a sentence, or in one for each family of a table."""
    if isinstance(result, Verdict):
        levels = names_in_text([result.reference, *result.table[result.factor]], result.factor)
        return [" ".join(result.sentences(levels | METRIC_WORDS))]
    if isinstance(result, pd.DataFrame):
        return [_family_words(*family_group) for family_group in result.groupby([*FAMILY], sort=False)]
    return [result] if isinstance(result, str) else result


def by_decision(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of a table for each decision, from the same bits to different."""
    same_bits = (table.same_bits == table.seeds) & (table.seeds > 0)
    decisions = table.decision.mask(same_bits, SAME)
    for decision in (SAME, *reversed(DECISIONS)):
        if (decisions == decision).any():
            yield decision, table[decisions == decision]


def names_in_text(levels: Iterable[Any], factor: str = "setting") -> dict[Any, str]:
    """What each level of a factor is called within a sentence, which has commas of its own: `GPU (TF32)`."""
    return {level: _bracketed(words) for level, words in names(levels, factor).items()}


def setting_in_text(setting: Any) -> str:
    """A setting within a sentence: `CPU (one thread)`."""
    return _bracketed(setting_words(setting))


def _bracketed(words: str) -> str:
    first, comma, rest = words.partition(", ")
    return f"{first} ({rest})" if comma else words


def _family_words(key: tuple[str, str, str, str], rows: pd.DataFrame) -> str:
    """A network under one setting or loader, against its reference, at every speed."""
    experiment, size, setting, loader = key
    losses, learned, shares = (rows[rows.metric == metric] for metric in (ALL, LEARNED, BEAT))
    reference = rows.reference.iloc[0]
    reference_name = LOADERS.get(reference) or setting_in_text(reference)
    clauses = _loss_clauses(losses, reference_name)
    narrower = len(learned) and learned.margin.sum() < losses.margin.sum()
    none_matters = set(losses.decision) <= {"equivalent", "different but negligible"}
    if narrower and none_matters and (losses.same_bits < losses.seeds).any():
        # Seeds that do not learn widen the margin of all, so what holds within the narrow one is said first.
        wide = f"over all {span(losses.seeds)} differences below {_per_cent(losses.margin_relative)} count as none"
        clauses = [f"among seeds that learned, {'; '.join(_loss_clauses(learned, reference_name))}", wide]
    different = shares[shares.decision == "different"]
    if len(different):
        beat, reference_beat = different.beat - different.beat_reference, different.beat_reference
        beat_words = f"of {span(different.seeds)} seeds beat repeating the last frame"
        clauses.append(f"{listed(beat) if beat.any() else 'none'} {beat_words}, instead of {listed(reference_beat)}")
    elif len(shares) and not shares.beat.any():
        clauses.append("no network has learned motion")
    subject = f"{network_words(experiment)}, {SIZES.get(size, size)}, {setting_in_text(setting)}"
    memory = ""
    if loader in LOADERS and LOADERS[loader] == SHARED_MEMORY:
        memory = f", {memory_words(loader, setting)}"
        if memory_words(loader, setting) != SHARED_MEMORY:
            memory = ", the published line, which copies on a GPU (own memory)"
    return f"{subject}{memory}: {'; '.join(clauses)}."


def _loss_clauses(rows: pd.DataFrame, reference_name: str) -> list[str]:
    """What is said of one loss at every speed, against the usual level."""
    clauses = []
    for decision in sorted(set(rows.decision), key=[*reversed(DECISIONS)].index):
        decision_rows = rows[rows.decision == decision]
        within, seeds = _per_cent(decision_rows.margin_relative), span(decision_rows.seeds)
        if decision == "different":
            words = f"the loss is {listed(f'{1 + relative:.3g}' for relative in decision_rows.relative)} times as high"
        elif (decision_rows.same_bits == decision_rows.seeds).all():
            words = "the same bits in every seed"
        elif decision == "inconclusive":
            words = f"{seeds} seeds do not decide"
        else:
            effect = _per_cent(decision_rows.relative.abs())
            shown = ", more than luck explains" if decision == "different but negligible" else ""
            words = f"the loss differs by {effect} on average from that with {reference_name} ({seeds} seeds){shown}; "
            words += f"differences below {within} count as none here"
        clauses.append(words + (_speed_words(decision_rows) if len(rows) > 1 else ""))
    return clauses


def _decision_lines(table: pd.DataFrame) -> list[str]:
    """What was decided of each metric, with the numbers: a line each, below one for each family."""
    lines = []
    for (experiment, size, setting, loader), family in table.groupby([*FAMILY], sort=False):
        lines.append(f"{experiment}, {size} size, {setting}, frames {loader}:")
        for metric in METRICS:
            if len(rows := family[family.metric == metric]):
                lines.append(f"  {metric}: {'; '.join(_decision_clauses(metric, rows))}.")
    return lines


def _decision_clauses(metric: str, rows: pd.DataFrame) -> list[str]:
    """The decisions on a metric: `different at speed 1 and 2 (1.8 and 1.5 times, higher in 9 of 9 seeds)`."""
    clauses = []
    for decision, decision_rows in rows.groupby("decision", sort=False):
        if metric in (BEAT, STUCK):
            sizes, unit = [f"{100 * difference:+.0f}" for difference in decision_rows.difference], "points"
        else:
            sizes, unit = [f"{1 + relative:.3g}" for relative in decision_rows.relative], "times"
        if decision_rows.seeds.nunique() == 1:
            higher = f"{_listed_once(decision_rows.worse)} of {decision_rows.seeds.iloc[0]}"
        else:
            higher = _listed_once(f"{row.worse} of {row.seeds}" for row in decision_rows.itertuples())
        clauses.append(
            f"{decision}{_speed_words(decision_rows)} ({_listed_once(sizes)} {unit}, higher in {higher} seeds)"
        )
    if metric == BEAT and not rows.beat.any():
        clauses.append("neither network has learned motion here")
    return clauses


def _speed_words(rows: pd.DataFrame) -> str:
    return "" if rows.speed.isna().all() else f" at speed {listed(map('{:g}'.format, rows.speed))}"


def _per_cent(shares: pd.Series) -> str:
    return f"{100 * shares.max():.2g} %"


def _listed_once(words: Iterable[Any]) -> str:
    """As `listed`; where all are the same, one."""
    texts = [*map(str, words)]
    return listed(texts if len(set(texts)) > 1 else texts[:1])


def span(numbers: Iterable[float], form: str = ".0f") -> str:
    """Numbers from the least to the largest, or the one that there is."""
    values = sorted(numbers)
    least, most = format(values[0], form), format(values[-1], form)
    return least if least == most else f"{least} to {most}"


def listed(words: Iterable[Any]) -> str:
    """Words as in a sentence: a, b and c."""
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def network_words(network: str) -> str:
    """A network at the beginning of a sentence: `PredNet`, `Autoencoder`."""
    return "PredNet" if network == "prednet" else network[:1].upper() + network[1:]
