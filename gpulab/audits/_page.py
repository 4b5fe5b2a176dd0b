"""The page of an audit: a summary, the figure, findings as cards, and a table.

A notebook shows the same content as the file that `save` writes. Everything on the page is also in
the text that `print` shows, in the fields of a `Finding` or in the audit's `table`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from markupsafe import Markup

from gpulab import files, report
from gpulab.audits._findings import FAULTS, Answer, Finding, group_by_line, module_phrase
from gpulab.pages import (
    Cell,
    Head,
    Rows,
    badge,
    breakable,
    machine_text,
    number_cell,
    style,
    time_text,
    versions_text,
)
from gpulab.picture import responsive
from gpulab.wording import setting_words

MAX_CARDS = 12  # cards that are shown; the others are in a collapsed section below
MAX_ROWS = 20  # rows of the table that are shown; the others are in a collapsed section below
CAPTION = (
    "A dot in the colour of a setting is the error of an operation, relative to float64 on the same"
    " inputs. Grey dots are the largest errors that rounding explains."
)
PHONE_WIDTH = 3.9  # inches, the width of a figure on a phone
BADGE_TEXTS = {"fault": "Fault", "note": "Explained", "ok": "No fault"}
UNITS_HEADING = Markup("in units of<br>what rounding<br>explains")
# The line of a finding, such as `net.py:12: x = y`: the file with the number, and the code.
LINE_PATTERN = re.compile(r"(.+?:\d+): (.*)", re.DOTALL)


class AnswerPage(Answer):
    """The result of an audit, which a notebook and an HTML file show as a page.

    Attributes:
        step_name: The name of the step on the page; empty if it is unknown.
        table: A data frame with a row for each operation or result.
    """

    step_name: str = ""
    table: pd.DataFrame

    def words(self) -> Markup:
        """Render the result as HTML, without the figure."""
        return style() + self._answer() + self._findings()

    def html(self) -> Markup:
        """Render the result as self-contained HTML, with the figure above the findings."""
        return style() + self._body()

    def save(self, file: str | Path, title: str = "") -> None:
        """Write the result to a self-contained HTML file atomically.

        Args:
            file: The file to write. Its folder is created if necessary.
            title: The title of the page; by default it names the two settings.
        """
        settings = Markup(" against ").join(
            Markup("<code>{}</code>").format(breakable(x)) for x in self.titles
        )
        page = report.render(
            "result_page.html",
            title=title or f"Audit: {self.titles[0]} against {self.titles[1]}",
            heading=title or Markup("Audit: {}").format(settings),
            about="\N{NO-BREAK SPACE}· ".join(_describe_setup(self)),
            body=self._body(),
        )
        files.write(file, page.encode())

    def _ipython_display_(self) -> None:
        """Show the result in a notebook; the figure is a separate output between two texts."""
        from IPython.display import display

        picture = self.picture()
        first_part = style() + self._answer() + ("" if picture else self._findings())
        display({"text/plain": str(self), "text/html": first_part}, raw=True)
        if picture:
            picture.show()
            display({"text/html": style() + self._findings()}, raw=True)

    def _body(self) -> Markup:
        """Render the answer, the figure and the findings."""
        return self._answer() + self._figure() + self._findings()

    def _answer(self) -> Markup:
        """Render the badge, the headline, and the first finding in short.

        A finding of the kind `rounding` is left out, because it needs no action.
        """
        answer, explanation = split_headline(self.headline, self.titles)
        notable = [finding for finding in self.findings if finding.kind != "rounding"]
        rank = "note" if notable else "ok"
        if self.faulty:
            rank = "fault"
        first_card = _make_card([notable[0]], self.titles) if notable else None
        return report.render(
            "audit_answer.html",
            rank=rank,
            badge=BADGE_TEXTS[rank],
            answer=answer,
            explanation=explanation,
            first_card=first_card,
        )

    def _figure(self) -> Markup:
        """Render the figure in a wide and a narrow version; nothing if there is no figure."""
        picture = self.picture()
        if picture is None:
            return Markup()
        return Markup("<figure>{}<figcaption>{}</figcaption></figure>").format(
            responsive(picture, self._draw(width=PHONE_WIDTH)), CAPTION
        )

    def _findings(self) -> Markup:
        """Render the findings as cards, and the table."""
        rows = self._rows()
        return report.render(
            "audit_findings.html",
            cards=[_make_card(group, self.titles) for group in group_by_line(self.findings)],
            max_cards=MAX_CARDS,
            max_rows=MAX_ROWS,
            **vars(rows),
        )

    def _rows(self) -> Rows:
        """Build the table, with the most important rows first."""
        raise NotImplementedError


def split_headline(headline: str, titles: Sequence[str]) -> tuple[str, str]:
    """Split a headline into its first sentence, without the two settings, and the other sentences.

    >>> split_headline(
    ...     "cpu against cuda: 1 × mismatch. 9 operations were matched.", ("cpu", "cuda")
    ... )
    ('1 × mismatch.', '9 operations were matched.')
    >>> split_headline("a against b: all is well: rounding alone", ("a", "b"))
    ('All is well: rounding alone.', '')
    """
    text = headline.removeprefix(f"{titles[0]} against {titles[1]}: ")
    answer, _, explanation = text.partition(". ")
    return _to_sentence(answer), explanation


# --- below the title ------------------------------------------------------------------------------


def _describe_setup(answer: AnswerPage) -> list[str]:
    """List the step, the settings in words, the date, the versions and the machines.

    Versions and machines that are the same for both settings are named once.
    """
    words = [setting_words(title) for title in answer.titles]
    parts = [answer.step_name] if answer.step_name else []
    # The settings in words are left out if they repeat the titles or do not differ.
    if words[0] != words[1] and words != list(answer.titles):
        parts.append(" against ".join(words))
    parts.append(time_text())
    # A passport may list GPUs although the step ran on a CPU.
    kinds = ["cpu" if title.startswith("cpu") else "" for title in answer.titles]
    machines = [
        machine_text(passport, kind) for passport, kind in zip(answer.passports, kinds, strict=True)
    ]
    versions = list(map(versions_text, answer.passports))
    if versions[0] == versions[1]:
        parts.append(versions[0])
        versions = ["", ""]
    if answer.passports[0] == answer.passports[1]:
        return [*parts, " and ".join(dict.fromkeys(machines))]
    sides = zip(answer.titles, machines, versions, strict=True)
    return [*parts, *(f"{title}: {', '.join(filter(None, facts))}" for title, *facts in sides)]


# --- findings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """The content of a card: a finding, and the other findings of the same line.

    Attributes:
        rank: `fault`, `note` or `ok`.
        kind: The kind of the finding.
        operation: The name of the operation.
        phase: The phase of the operation.
        module: The path of the module that called the operation.
        location: The file and the number of the user's line.
        code: The text of the user's line.
        percent: The share of the difference that the finding explains, as a text.
        width: The share as a number from 0 to 100, if it is known.
        effect: The share as a clause.
        detail: What was observed, as a sentence.
        advice: What to do, as a sentence.
        facts: Less important details, by name.
        others_count: The number of other findings for the line, in words.
        others: Descriptions of these other findings.
    """

    rank: str
    kind: str
    operation: str
    phase: str
    module: str
    location: str
    code: str
    percent: str
    width: int | None
    effect: str
    detail: Markup
    advice: Markup | str
    facts: list[tuple[str, str]]
    others_count: str
    others: list[str]


def _make_card(findings: Sequence[Finding], titles: Sequence[str]) -> Card:
    """Make a card for the first of some findings of the same kind and line."""
    finding, *further_findings = findings
    location, code = _split_line(finding.line)
    percent, width, effect = _describe_share(finding)
    advice = finding.advice
    if finding.line:
        # The card shows the code of the line elsewhere, so the advice only names the location.
        advice = advice.replace(finding.line, location)
    names = [name for name in (*titles, location, finding.operation) if name]
    advice_html: Markup | str = ""
    if finding.kind != "rounding":
        advice_html = _mark_names(_to_sentence(advice, names), names)
    return Card(
        rank=_rank(finding),
        kind=finding.kind,
        operation=finding.operation,
        phase=finding.phase,
        module=finding.module,
        location=location,
        code=code,
        percent=percent,
        width=width,
        effect=effect,
        detail=_mark_names(_to_sentence(finding.detail, names), names),
        advice=advice_html,
        facts=_list_facts(finding),
        others_count=_count_others(finding, len(further_findings)),
        others=_describe_further_findings(finding, further_findings),
    )


def _rank(finding: Finding) -> str:
    """Return the rank of a finding, which determines the colour of its card."""
    if finding.kind in FAULTS:
        return "fault"
    return "ok" if finding.kind == "rounding" else "note"


def _count_others(finding: Finding, count: int) -> str:
    """Describe the number of other findings that share a card with a finding."""
    noun = "operation" if count == 1 else "operations"
    if finding.line:
        return f"{count} more {noun} in this line"
    if finding.module:
        return f"{count} more {noun} in this module"
    return f"{count} more {noun} like it"


def _describe_share(finding: Finding) -> tuple[str, int | None, str]:
    """Describe the share of the difference in the results that a finding explains.

    Returns:
        The share as a text, as a percentage (None if it is unknown), and as a clause. For a finding
        of the kind `rounding`, the first text is its error in units of rounding.
    """
    if not finding.has_bound:
        return (
            "could explain all",
            None,
            "its effect has no bound: it could explain all of the difference in the results",
        )
    if finding.kind == "rounding":
        if math.isnan(finding.ratio):
            return "", None, ""
        return f"{_format_units(finding.ratio)} of what rounding explains", None, ""
    if math.isnan(finding.share):
        return "", None, ""
    percent = f"{finding.share:.0%}" if finding.share >= 0.01 else "less than 1%"
    width = round(100 * min(1.0, finding.share))
    effect = f"explains {percent} of the difference in the results"
    return f"{percent} of the difference", width, effect


def _list_facts(finding: Finding) -> list[tuple[str, str]]:
    """List details of a finding that few readers need, as pairs of a name and a value."""
    facts = {"setting": finding.setting, "phase": finding.phase, "module": finding.module}
    if not math.isnan(finding.ratio):
        facts["own error"] = f"{_format_units(finding.ratio)} times what rounding explains"
    if not math.isnan(finding.size):
        facts["size"] = f"{_format_relative(finding.size)}, relative to its result"
    return [(name, value) for name, value in facts.items() if value]


def _describe_further_findings(
    representative: Finding, further_findings: Sequence[Finding]
) -> list[str]:
    """Describe the other findings of a line, with their details if these differ.

    Equal descriptions are listed once, with their number.
    """
    counts = Counter(
        f"{finding.operation} ({finding.phase}){module_phrase(finding.module)}"
        + (f": {finding.detail}" if finding.detail != representative.detail else "")
        for finding in further_findings
    )
    return [text if count == 1 else f"{count} × {text}" for text, count in counts.items()]


def _split_line(line: str) -> tuple[str, str]:
    """Split the line of a finding into the file with its line number, and the code.

    >>> _split_line("net.py:12: x = y"), _split_line("somewhere")
    (('net.py:12', 'x = y'), ('somewhere', ''))
    """
    match = LINE_PATTERN.fullmatch(line)
    return (match[1], match[2]) if match else (line, "")


def _to_sentence(text: str, names: Sequence[str] = ()) -> str:
    """Turn a text into a sentence, with a capital letter and a full stop.

    The first letter is kept if the text begins with one of `names` or with other code.

    >>> texts = ("computed in bfloat16", "mm gave other bits", "x.weight is NaN")
    >>> tuple(_to_sentence(text, ["mm"]) for text in texts)
    ('Computed in bfloat16.', 'mm gave other bits.', 'x.weight is NaN.')
    """
    word = re.match(r"[a-z]+(?=[,;:]? |$)", text)
    if word and word[0] not in names:
        text = text[0].upper() + text[1:]
    if text and text[-1] not in ".!?":
        text += "."
    return text


def _mark_names(text: str, names: Sequence[str]) -> Markup:
    """Set names in a text, such as the names of settings, in a code font.

    >>> (
    ...     str(_mark_names("under cpu:threads=1: mm", ["cpu", "cpu:threads=1"])),
    ...     str(_mark_names("cpu:isa=avx2", ["cpu"])),
    ... )
    ('under <code>cpu:threads=1</code>: mm', 'cpu:isa=avx2')
    """
    # The longest alternative comes first, because `cpu` also matches the start of `cpu:threads=1`.
    longest_first = sorted(names, key=len, reverse=True)
    alternatives = "|".join(map(re.escape, longest_first))
    # The text between two names alternates with a name, so names have odd positions.
    parts = re.split(rf"(?<![\w.:])({alternatives})(?!:?\w)", text)
    code = Markup("<code>{}</code>")
    return Markup().join(
        code.format(breakable(text_part)) if n % 2 else text_part
        for n, text_part in enumerate(parts)
    )


# --- the table ------------------------------------------------------------------------------------


def operation_rows(table: pd.DataFrame, findings: Sequence[Finding], titles: Sequence[str]) -> Rows:
    """Build the table of an `Audit`: findings first, then by the error in units of rounding.

    Args:
        table: The audit's table.
        findings: The findings, the most important first.
        titles: The names of the two settings.
    """
    names = ["operation", "phase", "module", "line"]
    # The rank of each finding, by the names that it has in common with a row of the table.
    order: dict[tuple[str, ...], int] = {}
    for index, finding in enumerate(findings):
        if finding.kind != "rounding":
            order.setdefault(tuple(getattr(finding, name) for name in names), index)
    n_findings = len(findings)
    # Findings come first, then rows without a card, then rows that rounding explains.
    ranks = [
        n_findings + 1 if kind == "rounding" else order.get(tuple(key), n_findings)
        for kind, *key in table[["kind", *names]].itertuples(index=False)
    ]
    table = _sort_by_importance(table, ranks, table[["ratio_a", "ratio_b"]].max(axis=1))
    location_columns = [name for name in ("module", "line") if table[name].any()]
    rows = []
    for row in table.itertuples(index=False):
        name = Markup("<code>{}</code> {}").format(breakable(row.operation), f"({row.phase})")
        locations = {"module": breakable(row.module), "line": breakable(_split_line(row.line)[0])}
        cells = [Cell(name, "ga-name"), _kind_cell(row.kind)]
        for error, ratio in ((row.error_a, row.ratio_a), (row.error_b, row.ratio_b)):
            cells += [
                number_cell(_format_relative(error)),
                number_cell(_format_units(ratio), is_large=ratio > 1),
            ]
        cells.append(
            number_cell("same bits" if row.same_bits else _format_relative(row.difference))
        )
        rows.append([*cells, *(Cell(locations[key], "ga-name") for key in location_columns)])
    error_heading = Markup("own error under<br><code>{}</code>")
    heads = [
        [
            Head("operation", rows=2),
            Head("finding", rows=2),
            *(
                Head(error_heading.format(breakable(title)), is_number=True, columns=2)
                for title in titles
            ),
            Head("difference", is_number=True, rows=2),
            *(Head(key, rows=2) for key in location_columns),
        ],
        [Head("relative", is_number=True), Head(UNITS_HEADING, is_number=True)] * 2,
    ]
    note = (
        "Findings come first, then the operations whose errors are closest to what rounding"
        " explains. The own error is the distance from float64 on the same inputs; the difference"
        " is between the two settings. Both are relative to the size of the result. A result of the"
        " step (loss, gradient or update) has no own error."
    )
    return Rows("Operations", note, heads, rows)


def result_rows(table: pd.DataFrame) -> Rows:
    """Build the table of a `CompiledAudit`: wrong results first, then by the error in units.

    The unit of a result is its tolerance, the largest difference that rounding explains. Results
    that are not finite come second.
    """
    units = table.difference / table.tolerance
    ranks = np.where(table.wrong, 0, np.where(table.finite, 2, 1)).tolist()
    table = _sort_by_importance(table.assign(units=units), ranks, units)
    rows = []
    for row in table.itertuples(index=False):
        kind = _result_kind(row.wrong, row.finite)
        numbers = [
            _format_relative(row.difference),
            _format_units(row.units),
            _format_relative(row.error),
            _format_relative(row.plain_error),
        ]
        name = Cell(Markup("<code>{}</code>").format(row.result), "ga-name")
        rows.append([name, _kind_cell(kind), *map(number_cell, numbers)])
    heads = [
        [
            Head("result", rows=2),
            Head("finding", rows=2),
            Head("difference made by the compiler", is_number=True, columns=2),
            Head("error against float64", is_number=True, columns=2),
        ],
        [
            Head(text, is_number=True)
            for text in ("relative", UNITS_HEADING, "compiled", "not compiled")
        ],
    ]
    note = (
        "Wrong results come first, then those whose differences are closest to what rounding"
        " explains."
        " Differences and errors are relative to the size of the result."
    )
    return Rows("Results", note, heads, rows)


def _result_kind(is_wrong: bool, is_finite: bool) -> str:
    """Return the kind of finding for a result: `wrong`, `not finite` or `rounding`."""
    if is_wrong:
        return "wrong"
    return "rounding" if is_finite else "not finite"


def _sort_by_importance(
    table: pd.DataFrame, ranks: Sequence[int], units: pd.Series
) -> pd.DataFrame:
    """Sort a table by the rank of each row's finding, then by its error in units of rounding."""
    keys = pd.DataFrame({"rank": ranks, "units": -units.to_numpy(dtype=float)}, index=table.index)
    return table.loc[keys.sort_values(["rank", "units"], kind="stable", na_position="last").index]


def _kind_cell(kind: str) -> Cell:
    """Make the cell with the kind of a finding; it is empty for rounding, which most rows have."""
    if kind == "rounding":
        return Cell("")
    rank = "fault" if kind in (*FAULTS, "wrong") else "note"
    return Cell(badge(rank, kind))


def _format_relative(value: float) -> str:
    """Format a relative error.

    >>> [_format_relative(value) for value in (0.0, 1.26e-7, 0.0312, 1.5, math.nan, math.inf)]
    ['0', '1.3e-07', '3.1e-02', '1.5e+00', '–', '∞']
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:.1e}" if value else "0"


def _format_units(value: float) -> str:
    """Format an error in units of what rounding explains.

    >>> [
    ...     _format_units(value)
    ...     for value in (0.0, 0.001, 0.052, 1.5, 64.4, 12345.6, 3e7, math.nan, math.inf)
    ... ]
    ['0', '<0.01', '0.05', '1.50', '64', '12,346', '3e+07', '–', '∞']
    """
    if not math.isfinite(value) or not value:
        return _format_relative(value)
    if value < 0.01:
        return "<0.01"
    if value < 10:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.0e}"
