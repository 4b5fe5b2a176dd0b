"""A verdict as a page: what was compared, the decision, a table of the levels, the figure, and everything in words.

A verdict shows the same in a notebook as in the file that `save` writes. Nothing is shown here that `print` and the
verdict's `table` do not say.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from markupsafe import Markup

from gpulab import __version__, files, report
from gpulab.pages import Cell, Head, badge, breakable, number_cell, style, time_text
from gpulab.picture import responsive
from gpulab.report import Report
from gpulab.stats.decisions import DECISIONS, Decisions, LevelDecision
from gpulab.stats.wording import p_text, sentences, with_numbers
from gpulab.wording import level_text, metric_label

RANKS: dict[str, str] = {  # the colours of decisions
    "different": "note",
    "different but negligible": "ok",
    "inconclusive": "open",
    "equivalent": "ok",
}
PHONE = 3.9  # inches, the width of a figure on a phone
MOST_IN_TITLE = 3  # levels
SHARED_COLUMNS = ("machine", "torch", "gpulab")  # of the runs, below the title
NOTE = (
    "The difference is the level's metric minus the reference's, averaged over the seeds that both have. Its interval "
    "leaves out zero where the decision is different; the interval of equivalence lies within the margin where the "
    "decision is equivalent. p values and intervals are corrected for the number of levels."
)
CAPTION = "First every run, the same seed joined by a line; then how far each seed is from the reference."


class VerdictPage(Decisions, Report):
    """A decision that a notebook and an HTML file show as a page."""

    def words(self) -> Markup:
        """The verdict without the figure, as a piece of HTML."""
        return style() + self._answer() + self._details()

    def html(self) -> Markup:
        """The verdict as a piece of HTML that needs no other file, with the figure below the table."""
        return style() + self._body()

    def save(self, file: str | Path, title: str = "") -> None:
        """Write the verdict to an HTML file of its own, whole or not at all.

        Args:
            file: Where to; its folder is made if need be.
            title: What it is called; by default what was compared.
        """
        heading = title or _title(self)
        page = report.render(
            "result_page.html",
            title=heading,
            heading=heading,
            about="\N{NO-BREAK SPACE}· ".join(_about(self)),
            body=self._body(),
        )
        files.write(file, page.encode())

    def _ipython_display_(self) -> None:
        from IPython.display import display

        picture = self.picture()
        heading = Markup("<h3>{}</h3>").format(_title(self))
        about = Markup('<p class="ga-faint">{}</p>').format("\N{NO-BREAK SPACE}· ".join(_about(self)))
        head = Markup('<div class="gpulab-result">{}{}</div>').format(heading, about)
        shown = style() + head + self._answer() + ("" if picture else self._details())
        display({"text/plain": str(self), "text/html": shown}, raw=True)
        if picture:
            picture.show()
            display({"text/html": style() + self._details()}, raw=True)

    def _body(self) -> Markup:
        return self._answer() + self._figure() + self._details()

    def _answer(self) -> Markup:
        """The decision, a sentence for each level, and the table."""
        said = sentences(self, {})
        first, *others = said if len(self.rows) == 1 else [_counted(self), *said] if self.rows else said
        return report.render(
            "verdict_answer.html",
            rank=RANKS[self.decision],
            decision=self.decision,
            answer=first,
            sentences=others,
            heads=_heads(self),
            rows=[_cells(self, row) for row in self.rows],
            note=NOTE,
        )

    def _figure(self) -> Markup:
        picture = self.picture()
        if picture is None:
            return Markup()
        element = responsive(picture, self._draw(width=PHONE))
        return Markup("<figure>{}<figcaption>{}</figcaption></figure>").format(element, CAPTION)

    def _details(self) -> Markup:
        """All that `print` says, and how the table was read."""
        lines = with_numbers(self).splitlines()
        paragraphs = [line for line in lines if line not in self.notes]
        return report.render("verdict_details.html", paragraphs=paragraphs, remarks=self.notes)


def _title(verdict: Decisions) -> str:
    """What was compared."""
    levels = [level_text(row.level, verdict.factor) for row in verdict.rows]
    reference = level_text(verdict.reference, verdict.factor)
    metric = metric_label(verdict.metric)
    if not levels:
        return f"Verdict on {metric}: {reference} alone"
    few = ", ".join(levels) if len(levels) <= MOST_IN_TITLE else f"{len(levels)} levels of {verdict.factor}"
    return f"Verdict on {metric}: {few} against {reference}"


def _about(verdict: Decisions) -> list[str]:
    """The file, what it has, the date, the versions, and the machines and versions of the runs where they are known."""
    runs, n_seeds = verdict.runs, verdict.runs[verdict.block].nunique()
    parts = [verdict.source] if verdict.source else []
    parts.append(f"{len(runs)} runs, {n_seeds} {verdict.block}{'s' * (n_seeds != 1)}, by {verdict.factor}")
    parts += [time_text(), f"gpulab {__version__}"]
    known = {name: sorted(set(map(str, runs[name].dropna()))) for name in SHARED_COLUMNS if name in runs}
    if known.get("torch"):
        parts.append(
            f"runs: torch {' and '.join(known['torch'][:3])}, gpulab {' and '.join(known.get('gpulab', [])[:3])}"
        )
    if known.get("machine"):
        parts.append(" and ".join(known["machine"][:3]))
    return parts


def _counted(verdict: Decisions) -> str:
    """How many levels came to which decision."""
    counts = Counter(row.decision for row in verdict.rows)
    said = ", ".join(f"{counts[decision]} {decision}" for decision in DECISIONS if counts[decision])
    reference = level_text(verdict.reference, verdict.factor)
    return f"{len(verdict.rows)} levels of {verdict.factor} against {reference}: {said}."


def _heads(verdict: Decisions) -> list[list[Head]]:
    """Two rows of heads."""
    level = verdict.rows[0] if verdict.rows else None
    confidence = f"{100 * level.confidence:.3g} % interval" if level and level.confidence > 0 else "interval"
    narrow = f"{100 * level.equivalent_confidence:.3g} % interval" if level else "interval"
    return [
        [
            Head(verdict.factor, rows=2),
            Head("decision", rows=2),
            Head(f"{verdict.block}s", is_number=True, rows=2),
            Head(f"difference in {metric_label(verdict.metric)}", is_number=True, columns=3),
            Head("equivalence", is_number=True, columns=3),
            Head("diverged", is_number=True, rows=2),
        ],
        [
            *(Head(text, is_number=True) for text in ("mean", confidence, "p")),
            *(Head(text, is_number=True) for text in ("margin", narrow, "p")),
        ],
    ]


def _cells(verdict: Decisions, row: LevelDecision) -> list[Cell]:
    """The row of a level."""
    level = level_text(row.level, verdict.factor)
    total = row.seeds + row.left_out
    return [
        Cell(breakable(level), "ga-name"),
        Cell(badge(RANKS[row.decision], row.decision)),
        number_cell(f"{row.seeds} of {total}" if row.left_out > 0 else str(row.seeds)),
        number_cell(_signed(row.difference), is_large="different" in row.decision),
        number_cell(_interval(row.low, row.high)),
        number_cell(_known(p_text(row.p_different_holm))),
        number_cell("–" if math.isnan(row.margin) else f"±{row.margin:.2g}"),
        number_cell(_interval(row.equivalent_low, row.equivalent_high)),
        number_cell(_known(p_text(row.p_equivalent_holm))),
        number_cell(f"{row.diverged} ({row.reference_diverged})" if row.diverged or row.reference_diverged else "0"),
    ]


def _signed(value: float) -> str:
    """A difference with its sign.

    >>> [_signed(value) for value in (0.0123, -0.5, 0.0, math.nan)]
    ['+0.012', '−0.5', '0', '–']
    """
    if math.isnan(value):
        return "–"
    return f"{value:+.2g}".replace("-", "−", 1) if value else "0"


def _interval(low: float, high: float) -> str:
    """An interval.

    >>> _interval(-0.5, 0.25), _interval(math.nan, math.nan)
    ('−0.5 to +0.25', '–')
    """
    return "–" if math.isnan(low) or math.isnan(high) else f"{_signed(low)} to {_signed(high)}"


def _known(text: str) -> str:
    return "–" if text == "unknown" else text
