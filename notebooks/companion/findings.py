"""Findings: a sentence each that a person would say, with the statistics folded away below it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd
from markupsafe import Markup

from companion.learning import ALL, BEAT, FAMILY, LEARNED
from gpulab.report import Report
from gpulab.stats import Verdict
from gpulab.stats._decisions import DECISIONS
from gpulab.wording import COPIED, LOADERS, OVERWRITTEN, condition_words, names, setting_words

Part: TypeAlias = "Verdict | pd.DataFrame | str | list[str]"
SIZES = {
    "paper": "published size",
    "quick": "quick size",
    "smoke": "smallest size",
    "motion": "profile motion",
}
SAME = "the same bits"
METRIC_WORDS = {
    "final_loss": "loss",
    "heldout_loss": "held-out loss",
    "smallest": "steepest way down",
}
METRIC_WORDS |= {"index_fraction": "share of ways down", "time upright (steps)": "time upright"}
# of a `learning_table`
NUMBERS = [
    "metric",
    "speed",
    "seeds",
    "worse",
    "difference",
    "margin",
    "p_holm",
    "decision",
]


@dataclass(frozen=True, eq=False)
class CheckedSentences(Report):
    """Findings by heading, a sentence each; notebooks show the statistics behind a fold."""

    parts: Sequence[tuple[str, Part]]
    numbers: Sequence[str] = ()  # lines of statistics, beside those of verdicts and tables
    folded: Container[str] = ()  # headings that a page shows behind a fold of their own

    def sentences(self) -> list[tuple[str, list[str]]]:
        """Each heading, and the sentences below it."""
        return [(heading, in_words(result)) for heading, result in self.parts]

    def __str__(self) -> str:
        lines = []
        for heading, sentences in self.sentences():
            sentence_lines = (
                f" {sentences[0]}"
                if len(sentences) == 1
                else "".join(f"\n  {line}" for line in sentences)
            )
            lines.append(f"{heading}:{sentence_lines}")
        return "\n".join(lines)

    def words(self) -> Markup:
        """The sentences, and the statistics in an element that unfolds."""
        visible, hidden = Markup(), Markup()
        for heading, sentences in self.sentences():
            paragraph = Markup("<p><b>{}.</b> {}</p>").format(
                heading, Markup("<br>").join(sentences)
            )
            if heading in self.folded:
                hidden += paragraph
            else:
                visible += paragraph
        fold = Markup("<details><summary>{}</summary>{}</details>")
        visible += fold.format("How one knows", hidden) if hidden else hidden
        numbers = Markup('<pre style="white-space: pre-wrap">{}</pre>').format(
            "\n".join(self.statistics())
        )
        return visible + fold.format("The statistics", numbers) if self.statistics() else visible

    def statistics(self) -> list[str]:
        """What stands behind the fold, line by line."""
        lines = []
        for heading, result in self.parts:
            if isinstance(result, Verdict):
                lines += [f"{heading}:", *str(result).splitlines(), ""]
            elif isinstance(result, pd.DataFrame):
                for family, rows in result.groupby([*FAMILY], sort=False):
                    numbers = rows[NUMBERS].to_string(index=False, float_format="{:.3g}".format)
                    lines += [f"{heading}: {', '.join(family)}", *numbers.splitlines(), ""]
        return [*lines, *self.numbers]


def finding(
    parts: Mapping[str, Part] | Iterable[tuple[str, Part]],
    numbers: Sequence[str] = (),
    folded: Container[str] = (),
) -> CheckedSentences:
    """A sentence for each of several results, each with a heading; `numbers` are folded away.

    What stands under the headings `folded` is behind another one.

    A part is a verdict, a table of `learning_table`, or a sentence or several, said as they are; an
    empty list of them is left out.

    >>> import gpulab as gl
    >>> losses = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5]
    >>> runs = pd.DataFrame(
    ...     {"setting": ["cpu"] * 6 + ["cuda"] * 6, "seed": [*range(6)] * 2, "final_loss": losses}
    ... )
    >>> print(finding({"A card": gl.verdict(runs)}))
    A card: Under GPU the loss is 1.8 times as high as under CPU, and higher in 6 of 6 seeds.
    """
    pairs = parts.items() if isinstance(parts, Mapping) else parts
    not_empty = [
        (heading, result) for heading, result in pairs if not isinstance(result, list) or result
    ]
    return CheckedSentences(not_empty, numbers, folded)


def in_words(result: Part) -> list[str]:
    """A result in a sentence, or in one for each family of a table."""
    if isinstance(result, Verdict):
        levels = names_in_text([result.reference, *result.table[result.factor]], result.factor)
        return [" ".join(result.sentences(levels | METRIC_WORDS))]
    if isinstance(result, pd.DataFrame):
        return [
            _family_words(*family_group) for family_group in result.groupby([*FAMILY], sort=False)
        ]
    return [result] if isinstance(result, str) else result


def by_decision(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of a table for each decision, from the same bits to different."""
    same_bits = (table.same_bits == table.seeds) & (table.seeds > 0)
    decisions = table.decision.mask(same_bits, SAME)
    for decision in (SAME, *reversed(DECISIONS)):
        if (decisions == decision).any():
            yield decision, table[decisions == decision]


def names_in_text(levels: Iterable[Any], factor: str = "setting") -> dict[Any, str]:
    """The name of each level of a factor inside a sentence with commas: `GPU (TF32)`."""
    return {level: _bracketed(words) for level, words in names(levels, factor).items()}


def setting_in_text(setting: str) -> str:
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
        # Seeds that do not learn widen the margin of all, so what holds within the narrow one is
        # said first.
        wide = (
            f"over all {span(losses.seeds)} seeds, differences below"
            f" {_per_cent(losses.margin_relative)} count as none"
        )
        clauses = [
            f"among the seeds that learned, {'; '.join(_loss_clauses(learned, reference_name))}",
            wide,
        ]
    different = shares[shares.decision == "different"]
    if len(different):
        beat, reference_beat = different.beat - different.beat_reference, different.beat_reference
        beat_words = f"of {span(different.seeds)} seeds beat repeating the last frame"
        clauses.append(
            f"{listed(beat) if beat.any() else 'none'} {beat_words}, instead of"
            f" {listed(reference_beat)}"
        )
    elif len(shares) and not shares.beat.any():
        clauses.append("no network has learned motion")
    condition = ""
    if LOADERS.get(loader) == OVERWRITTEN:
        copies = condition_words(loader, setting) == COPIED
        condition = ", the published line, which copies on a GPU" if copies else f", {OVERWRITTEN}"
    subject = (
        f"{network_words(experiment)}, {SIZES.get(size, size)},"
        f" {setting_in_text(setting)}{condition}"
    )
    return f"{subject}: {'; '.join(clauses)}."


def _loss_clauses(rows: pd.DataFrame, reference_name: str) -> list[str]:
    """What is said of one loss at every speed, against the usual level."""
    clauses = []
    for decision, decided in by_decision(rows):
        speeds = (
            ""
            if len(rows) == 1 or decided.speed.isna().all()
            else f" at speed {listed(decided.speed.map('{:g}'.format))}"
        )
        seeds = f"{span(decided.seeds)} seeds"
        if decision == SAME:
            words = f"the same bits in every seed{speeds}"
        elif decision == "different":
            words = (
                f"the loss is {listed(f'{1 + relative:.3g}' for relative in decided.relative)}"
                f" times as high{speeds}"
            )
        elif decision == "inconclusive":
            words = f"{seeds} do not decide{speeds}"
        else:
            effect = (
                f"the loss differs by {_per_cent(decided.relative.abs())} on average from that with"
                f" {reference_name}"
            )
            shown = ", more than luck explains" if decision == "different but negligible" else ""
            none = f"differences below {_per_cent(decided.margin_relative)} count as none here"
            words = f"{effect}{speeds} ({seeds}){shown}; {none}"
        clauses.append(words)
    return clauses


def _per_cent(shares: pd.Series) -> str:
    return f"{100 * shares.max():.2g} %"


def span(numbers: Iterable[float], form: str = ".0f") -> str:
    """Numbers from the least to the largest, or the one that there is."""
    values = sorted(numbers)
    least, most = format(values[0], form), format(values[-1], form)
    return least if least == most else f"{least} to {most}"


def listed(words: Iterable[object]) -> str:
    """Words as in a sentence: a, b and c."""
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def network_words(network: str) -> str:
    """A network at the beginning of a sentence: `PredNet`, `Autoencoder`."""
    return "PredNet" if network == "prednet" else network[:1].upper() + network[1:]
