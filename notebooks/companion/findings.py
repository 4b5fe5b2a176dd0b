"""Findings: an answer to each question, with the sentences and the statistics folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pandas as pd
from markupsafe import Markup

from companion.metrics import ALL, BEAT, FAMILY, LEARNED
from gpulab.report import Report
from gpulab.stats import Verdict
from gpulab.stats._decisions import DECISIONS
from gpulab.wording import (
    COPIED,
    LOADERS,
    OVERWRITTEN,
    condition_words,
    label_levels,
    setting_words,
)

Part: TypeAlias = "Verdict | pd.DataFrame | str | list[str]"
SIZES = {
    "paper": "published size",
    "quick": "quick size",
    "smoke": "smallest size",
    "motion": "profile motion",
}
SAME = "the same bits"
SUMMARY = "In short"  # under this heading is the text that a notebook shows in place of the rest
# Statistics name settings as `gpulab` reads them, sentences and tables name them in words.
TYPED_SETTING = re.compile(r"\b(cpu|cuda|mps|xpu)\b")
TYPED_WORDS = "Settings are written as one types them in code, such as cuda:tf32=on."
METRIC_WORDS = {
    "final_loss": "loss",
    "heldout_loss": "held-out loss",
    "smallest": "least eigenvalue",
}
METRIC_WORDS |= {
    "index_fraction": "share of descent directions",
    "time upright (steps)": "time upright",
}
# Columns of a `learning_table` that are printed as statistics.
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
    """Findings under headings.

    `print` shows them as sentences. A notebook shows the text under the heading "In short", and a
    table with the question, the number of seeds and the answer of each verdict. All other sentences
    and the statistics are folded. Without that heading, a notebook shows all parts that are text.
    """

    parts: Sequence[tuple[str, Part]]
    numbers: Sequence[str] = ()  # lines of statistics, in addition to those of verdicts and tables
    # the notebooks that have the sentences and statistics of a heading, which are not repeated
    details: Mapping[str, str] = field(default_factory=dict)

    def sentences(self) -> list[tuple[str, list[str]]]:
        """Return each heading with its sentences."""
        return [
            (heading, self._short_sentence(heading, result) or in_words(result))
            for heading, result in self.parts
        ]

    def _short_sentence(self, heading: str, result: Part) -> list[str]:
        """Return the decisions of a heading whose details are in another notebook, or nothing."""
        if heading not in self.details or isinstance(result, (str, list)):
            return []
        seeds, losses, _ = short_answer([result])
        return [f"{losses} ({seeds} seeds; {self.details[heading]})."]

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
        """Return the answers as HTML, with the sentences and statistics folded."""
        visible, hidden = self._paragraphs()
        page = visible + self._answer_table()
        fold = Markup("<details><summary>{}</summary>{}</details>")
        if hidden:
            page += fold.format("In sentences", hidden)
        if self.statistics():
            lines = "\n".join(self.statistics())
            numbers = Markup('<pre style="white-space: pre-wrap">{}</pre>').format(lines)
            if TYPED_SETTING.search(lines):
                numbers = Markup("<p>{}</p>").format(TYPED_WORDS) + numbers
            page += fold.format("The statistics", numbers)
        return page

    def _paragraphs(self) -> tuple[Markup, Markup]:
        """Return the visible and the folded paragraphs, one for each heading."""
        visible, hidden = Markup(), Markup()
        has_summary = any(heading == SUMMARY for heading, _ in self.parts)
        for (heading, result), (_, sentences) in zip(self.parts, self.sentences(), strict=True):
            paragraph = Markup("<p><b>{}.</b> {}</p>").format(
                heading, Markup("<br>").join(sentences)
            )
            is_text = isinstance(result, (str, list))
            if heading == SUMMARY or (is_text and not has_summary):
                visible += paragraph
            elif heading not in self.details:
                hidden += paragraph
        return visible, hidden

    def _answer_table(self) -> Markup:
        """The answers as a table, or nothing if no heading has a verdict."""
        answers = self.answers()
        if not answers:
            return Markup()
        has_shares = any(share for *_, share in answers)
        head = ["final loss", "beat last frame"] if has_shares else ["answer"]
        head = ["question", "seeds", *head, *(["details"] if self.details else [])]
        rows = [Markup("<tr>{}</tr>").format(_cells("th", head))]
        for question, seeds, loss, share in answers:
            cells = [seeds, loss, *([share] if has_shares else [])]
            if self.details:
                cells.append(self._details_of(question))
            row = _cells("th", [question]) + _cells("td", cells)
            rows.append(Markup("<tr>{}</tr>").format(row))
        return Markup('<table class="ga-answers">{}</table>').format(Markup("").join(rows))

    def _details_of(self, question: str) -> str:
        """Name the notebooks that have the details of a question, or the folds of this one."""
        headings = [
            heading
            for heading, result in self.parts
            if heading.partition(": ")[0] == question and not isinstance(result, (str, list))
        ]
        places = dict.fromkeys(self.details.get(heading, "below") for heading in headings)
        return ", ".join(places)

    def answers(self) -> list[tuple[str, str, str, str]]:
        """Each question, the number of seeds, the answer, and that on beating the last frame.

        A heading with a colon is a question and a network; the networks of a question are counted
        together.
        """
        questions: dict[str, list[Verdict | pd.DataFrame]] = {}
        for heading, result in self.parts:
            if not isinstance(result, (str, list)):
                questions.setdefault(heading.partition(": ")[0], []).append(result)
        return [(question, *short_answer(results)) for question, results in questions.items()]

    def statistics(self) -> list[str]:
        """Return the lines of the folded statistics."""
        lines = []
        for heading, result in self.parts:
            if heading in self.details:
                continue
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
    details: Mapping[str, str] | None = None,
) -> CheckedSentences:
    """Collect results under headings, and describe each in a sentence; `numbers` are folded.

    `details` gives, for a heading, the notebook in which the sentences and the statistics are; here
    only the decisions are shown. A part is a verdict, a table from `learning_table`, or one or
    more sentences, which are shown unchanged. An empty list of sentences is left out.

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
    return CheckedSentences(not_empty, numbers, details or {})


def in_words(result: Part) -> list[str]:
    """Describe a verdict in a sentence, or a table in one sentence for each family."""
    if isinstance(result, Verdict):
        levels = names_in_text([result.reference, *result.table[result.factor]], result.factor)
        return [" ".join(result.sentences(levels | METRIC_WORDS))]
    if isinstance(result, pd.DataFrame):
        return [
            _family_words(*family_group) for family_group in result.groupby([*FAMILY], sort=False)
        ]
    return [result] if isinstance(result, str) else result


def in_short(parts: Mapping[str, Part]) -> str:
    """Count the decisions on the final loss over verdicts and tables.

    >>> import gpulab as gl
    >>> runs = gl.recorded_runs().query(
    ...     "experiment == 'autoencoder' and profile == 'quick' and loader == 'window'"
    ... )
    >>> in_short({"An autoencoder": gl.verdict(runs, reference="cpu")})
    'Of 5 comparisons of the final loss, 1 is equivalent and 4 different but negligible.'
    """
    losses = []
    for result in parts.values():
        if isinstance(result, Verdict):
            losses.append(result.table)
        elif isinstance(result, pd.DataFrame):
            losses.append(result[result.metric == ALL])
    counts = dict.fromkeys((SAME, *reversed(DECISIONS)), 0)
    for rows in losses:
        for decision, decided in by_decision(rows):
            counts[decision] += len(decided)
    clauses: list[str] = []
    for decision, count in counts.items():
        if count:
            verb = "" if clauses else "is " if count == 1 else "are "
            clauses.append(f"{count} {verb}{'bit-identical' if decision == SAME else decision}")
    return f"Of {sum(counts.values())} comparisons of the final loss, {listed(clauses)}."


def _cells(tag: str, texts: Iterable[str]) -> Markup:
    """The cells of a table row; `tag` is `th` or `td`."""
    cells = [Markup("<{0}>{1}</{0}>").format(Markup(tag), text) for text in texts]
    return Markup("").join(cells)


def short_answer(results: Sequence[Verdict | pd.DataFrame]) -> tuple[str, str, str]:
    """Count the seeds and the decisions of the answers to one question.

    Returns:
        The number of seeds; how many comparisons came to which decision; and the same for the share
        of seeds that beat repeating the last frame, empty if that was not compared. Where no seed
        has a loss, because its runs diverged, the diverged seeds are counted.

    >>> import gpulab as gl
    >>> runs = gl.recorded_runs().query(
    ...     "experiment == 'autoencoder' and profile == 'quick' and loader == 'window'"
    ... )
    >>> short_answer([gl.verdict(runs, reference="cpu")])
    ('10', '1 equivalent, 4 different but negligible', '')
    """
    seeds, losses, shares = [], [], []
    for result in results:
        if isinstance(result, Verdict):
            table = _with_diverged(result)
            seeds.append(table.seeds.mask(table.lost != "", table.diverged))
            names = names_in_text(table[result.factor], result.factor)
            losses.append(table.assign(name=table[result.factor].map(names)))
        else:
            seeds.append(result.seeds)
            rows = result[result.metric == ALL]
            losses.append(rows.assign(name=rows.apply(_comparison_words, axis="columns")))
            shares.append(result[result.metric == BEAT])
    counted_losses, counted_shares = (
        _count_decisions(pd.concat(rows, ignore_index=True)) if rows else ""
        for rows in (losses, shares)
    )
    return span(pd.concat(seeds)).replace(" to ", "–"), counted_losses, counted_shares


def _with_diverged(verdict: Verdict) -> pd.DataFrame:
    """The table of a verdict with a column `lost`: how many runs diverged, if no seed has a loss.

    It is empty for levels that have a seed with a loss.
    """
    table = verdict.table
    totals = verdict.runs.groupby(verdict.factor)[verdict.block].nunique()
    lost = [
        f"{row.diverged} of {totals[getattr(row, verdict.factor)]} diverged"
        f" ({row.reference_diverged} of {totals[verdict.reference]} of the reference)"
        if row.seeds == 0 and row.diverged
        else ""
        for row in table.itertuples()
    ]
    return table.assign(lost=pd.Series(lost, table.index, dtype=object))


def _count_decisions(rows: pd.DataFrame) -> str:
    """How many rows have each decision; those that are different are named, if rows have names.

    Rows without a loss are described by their column `lost`, if there is one.
    """
    lost = rows.lost.fillna("") if "lost" in rows else pd.Series("", rows.index)
    counts = []
    for decision, decided in by_decision(rows):
        for diverged, group in decided.groupby(lost[decided.index]):
            words = "bit-identical" if decision == SAME else decision
            if len(rows) > 1:
                words = f"{len(group)} {words}"
            if diverged:
                words += f": {diverged}"
            elif decision == "different" and len(rows) > 1 and "name" in rows:
                words += f" ({'; '.join(dict.fromkeys(group.name))})"
            counts.append(words)
    return ", ".join(counts)


def _comparison_words(row: pd.Series) -> str:
    """Which network of a learning table was compared, and at which size."""
    return f"{network_words(row.experiment)}, {SIZES.get(row.profile, row.profile)}"


def by_decision(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the rows of a table with each decision, from the same bits to different."""
    same_bits = (table.same_bits == table.seeds) & (table.seeds > 0)
    decisions = table.decision.mask(same_bits, SAME)
    for decision in (SAME, *reversed(DECISIONS)):
        if (decisions == decision).any():
            yield decision, table[decisions == decision]


def names_in_text(levels: Iterable[Any], factor: str = "setting") -> dict[Any, str]:
    """Return a name without commas for each level of a factor: `GPU (TF32)`."""
    return {level: _bracketed(words) for level, words in label_levels(levels, factor).items()}


def setting_in_text(setting: str) -> str:
    """Return the name of a setting without commas: `CPU (one thread)`."""
    return _bracketed(setting_words(setting))


def _bracketed(words: str) -> str:
    first, comma, rest = words.partition(", ")
    return f"{first} ({rest})" if comma else words


def _family_words(key: tuple[str, str, str, str], rows: pd.DataFrame) -> str:
    """Compare a network under one setting or loader with its reference, at every speed."""
    experiment, size, setting, loader = key
    losses, learned, shares = (rows[rows.metric == metric] for metric in (ALL, LEARNED, BEAT))
    reference = rows.reference.iloc[0]
    reference_name = LOADERS.get(reference) or setting_in_text(reference)
    clauses = _loss_clauses(losses, reference_name)
    narrower = len(learned) and learned.margin.sum() < losses.margin.sum()
    none_matters = set(losses.decision) <= {"equivalent", "different but negligible"}
    if narrower and none_matters and (losses.same_bits < losses.seeds).any():
        # Seeds that do not learn widen the margin over all seeds, so the result for the narrower
        # margin comes first.
        wide = (
            f"over all {span(losses.seeds)} seeds, the mean differs by less than the margin of"
            f" {_per_cent(losses.margin_relative)}"
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
            f"{listed(beat) if beat.any() else 'none'} {beat_words}, compared with"
            f" {listed(reference_beat)} for the reference"
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
    """Describe one loss at every speed, compared with that of the reference."""
    clauses = []
    for decision, decided in by_decision(rows):
        speeds = (
            ""
            if len(rows) == 1 or decided.speed.isna().all()
            else f" at {speeds_in_text(decided.speed)}"
        )
        seeds = f"{span(decided.seeds)} seeds"
        if decision == SAME:
            words = f"the same bits for every seed{speeds}"
        elif decision == "different":
            words = (
                f"the loss is {listed(f'{1 + relative:.3g}' for relative in decided.relative)}"
                f" times as high{speeds}"
            )
        elif decision == "inconclusive":
            words = f"{seeds} are not enough to decide{speeds}"
        else:
            effect = (
                f"the loss differs by {_per_cent(decided.relative.abs())} on average from that with"
                f" {reference_name}"
            )
            significant = "significantly, but " if decision == "different but negligible" else ""
            margin = f"{significant}by less than the margin of {_per_cent(decided.margin_relative)}"
            words = f"{effect}{speeds} ({seeds}), {margin}"
        clauses.append(words)
    return clauses


def _per_cent(shares: pd.Series) -> str:
    return f"{100 * shares.max():.2g} %"


def span(numbers: Iterable[float], form: str = ".0f") -> str:
    """Format the range of numbers, or the number if all are equal."""
    values = sorted(numbers)
    least, most = format(values[0], form), format(values[-1], form)
    return least if least == most else f"{least} to {most}"


def listed(words: Iterable[object]) -> str:
    """Join words as in a sentence: a, b and c."""
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def speeds_in_text(speeds: Iterable[float]) -> str:
    """Name the speeds of a film: `speed 2`, or `speeds 1, 2 and 4`."""
    names = [f"{speed:g}" for speed in speeds]
    return f"speed{'s' if len(names) > 1 else ''} {listed(names)}"


def network_words(network: str) -> str:
    """Return the capitalised name of a network: `PredNet`, `Autoencoder`."""
    return "PredNet" if network == "prednet" else network[:1].upper() + network[1:]
