"""The page of a verdict: what was compared, the decision, the levels, a figure, and the text.

A notebook shows the same content as the file that `save` writes. Everything on the page is also in
the text of `print` or in the verdict's `table`.
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
from gpulab.stats._decisions import DECISIONS, Decisions, LevelDecision
from gpulab.stats._wording import describe_with_numbers, level_sentences, p_text
from gpulab.wording import level_text, metric_label

DECISION_STYLES: dict[str, str] = {  # the CSS class of each decision, which sets its colour
    "different": "note",
    "different but negligible": "ok",
    "inconclusive": "open",
    "equivalent": "ok",
}
PHONE_WIDTH = 3.9  # inches, the width of a figure on a phone
MAX_TITLE_LEVELS = 3  # the largest number of levels that the title names
SHARED_COLUMNS = ("machine", "torch", "gpulab")  # columns whose values are shown below the title
TABLE_NOTE = (
    "The difference is the level's metric minus the reference's, averaged over the seeds that both"
    " have. Its interval excludes zero if the decision is different; the interval of equivalence"
    " lies within the margin if the decision is equivalent. p values and intervals are corrected"
    " for the number of levels."
)
FIGURE_CAPTION = (
    "First every run, with a line joining the runs of each seed; then how far each seed is from the"
    " reference."
)


class VerdictPage(Decisions, Report):
    """Decisions that are shown as a page, in a notebook or an HTML file."""

    def words(self) -> Markup:
        """Render the verdict as HTML, without the figure."""
        return style() + self._render_answer() + self._render_details()

    def html(self) -> Markup:
        """Render the verdict as self-contained HTML, with the figure below the table."""
        return style() + self._render_body()

    def save(self, file: str | Path, title: str = "") -> None:
        """Write the verdict to a self-contained HTML file atomically.

        Args:
            file: The file to write. Its folder is created if necessary.
            title: The title of the page; by default it names what was compared.
        """
        heading = title or _title_text(self)
        page = report.render(
            "result_page.html",
            title=heading,
            heading=heading,
            about="\N{NO-BREAK SPACE}· ".join(_describe_source(self)),
            body=self._render_body(),
        )
        files.write(file, page.encode())

    def _ipython_display_(self) -> None:
        """Show the verdict in a notebook.

        If there is a figure, it is a separate output between the answer and the details.
        """
        from IPython.display import display

        heading = Markup("<h3>{}</h3>").format(_title_text(self))
        about = Markup('<p class="ga-faint">{}</p>').format(
            "\N{NO-BREAK SPACE}· ".join(_describe_source(self))
        )
        header = Markup('<div class="gpulab-result">{}{}</div>').format(heading, about)
        text_above = style() + header + self._render_answer()
        details = self._render_details()
        picture = self.picture()
        if picture is None:
            display({"text/plain": str(self), "text/html": text_above + details}, raw=True)
            return
        display({"text/plain": str(self), "text/html": text_above}, raw=True)
        picture.show()
        # Each output is a separate element of the notebook, so the style is repeated.
        display({"text/html": style() + details}, raw=True)

    def _render_body(self) -> Markup:
        """Render the answer, the figure and the details."""
        return self._render_answer() + self._render_figure() + self._render_details()

    def _render_answer(self) -> Markup:
        """Render the decision, a sentence for each level, and the table."""
        texts = level_sentences(self)
        if len(self.rows) > 1:
            texts = [_count_decisions(self), *texts]
        answer, *further_sentences = texts
        return report.render(
            "verdict_answer.html",
            rank=DECISION_STYLES[self.decision],
            decision=self.decision,
            answer=answer,
            sentences=further_sentences,
            heads=_header_rows(self),
            rows=[_level_cells(self, row) for row in self.rows],
            note=TABLE_NOTE,
        )

    def _render_figure(self) -> Markup:
        """Render the figure in a wide and a narrow version; nothing if there is no figure."""
        picture = self.picture()
        if picture is None:
            return Markup()
        element = responsive(picture, self._draw(width=PHONE_WIDTH))
        return Markup("<figure>{}<figcaption>{}</figcaption></figure>").format(
            element, FIGURE_CAPTION
        )

    def _render_details(self) -> Markup:
        """Render the text of `print`, and separately the notes on how the table was read."""
        lines = describe_with_numbers(self).splitlines()
        paragraphs = [line for line in lines if line not in self.notes]
        return report.render("verdict_details.html", paragraphs=paragraphs, remarks=self.notes)


def _title_text(verdict: Decisions) -> str:
    """Compose the title, which names the levels, the reference and the metric."""
    levels = [level_text(row.level, verdict.factor) for row in verdict.rows]
    reference = level_text(verdict.reference, verdict.factor)
    metric = metric_label(verdict.metric)
    if not levels:
        return f"Verdict on {metric}: {reference} alone"
    compared_levels = (
        ", ".join(levels)
        if len(levels) <= MAX_TITLE_LEVELS
        else f"{len(levels)} levels of {verdict.factor}"
    )
    return f"Verdict on {metric}: {compared_levels} against {reference}"


def _describe_source(verdict: Decisions) -> list[str]:
    """List the file, its content, the date, and the versions and machines of the runs if known.

    At most three machines, and three versions of each library, are named.
    """
    runs = verdict.runs
    n_seeds = runs[verdict.block].nunique()
    blocks_text = f"{n_seeds} {verdict.block}" if n_seeds == 1 else f"{n_seeds} {verdict.block}s"
    parts = [verdict.source] if verdict.source else []
    parts.append(f"{len(runs)} runs, {blocks_text}, by {verdict.factor}")
    parts += [time_text(), f"gpulab {__version__}"]
    shared_values = {
        name: sorted(set(map(str, runs[name].dropna()))) for name in SHARED_COLUMNS if name in runs
    }
    if shared_values.get("torch"):
        torch_versions = " and ".join(shared_values["torch"][:3])
        gpulab_versions = " and ".join(shared_values.get("gpulab", [])[:3])
        parts.append(f"runs: torch {torch_versions}, gpulab {gpulab_versions}")
    if shared_values.get("machine"):
        parts.append(" and ".join(shared_values["machine"][:3]))
    return parts


def _count_decisions(verdict: Decisions) -> str:
    """Write a sentence with the number of levels for each decision."""
    counts = Counter(row.decision for row in verdict.rows)
    counted_decisions = ", ".join(
        f"{counts[decision]} {decision}" for decision in DECISIONS if counts[decision]
    )
    reference = level_text(verdict.reference, verdict.factor)
    return (
        f"{len(verdict.rows)} levels of {verdict.factor} against {reference}: {counted_decisions}."
    )


def _header_rows(verdict: Decisions) -> list[list[Head]]:
    """Build the two header rows of the table.

    The confidence levels of the intervals are taken from the first level; they are the same for
    all.
    """
    interval = "interval"  # of the difference
    equivalence_interval = "interval"
    if verdict.rows:
        first_row = verdict.rows[0]
        equivalence_interval = f"{100 * first_row.equivalent_confidence:.3g} % interval"
        if first_row.confidence > 0:
            interval = f"{100 * first_row.confidence:.3g} % interval"
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
            *(Head(text, is_number=True) for text in ("mean", interval, "p")),
            *(Head(text, is_number=True) for text in ("margin", equivalence_interval, "p")),
        ],
    ]


def _level_cells(verdict: Decisions, row: LevelDecision) -> list[Cell]:
    """Build the table's cells for a level."""
    level = level_text(row.level, verdict.factor)
    total = row.seeds + row.unpaired
    diverged = "0"
    if row.diverged or row.reference_diverged:
        diverged = f"{row.diverged} ({row.reference_diverged})"  # in brackets, the reference
    return [
        Cell(breakable(level), "ga-name"),
        Cell(badge(DECISION_STYLES[row.decision], row.decision)),
        number_cell(f"{row.seeds} of {total}" if row.unpaired > 0 else str(row.seeds)),
        number_cell(_format_difference(row.difference), is_large="different" in row.decision),
        number_cell(_format_interval(row.low, row.high)),
        number_cell(_dash_if_unknown(p_text(row.p_different_holm))),
        number_cell("–" if math.isnan(row.margin) else f"±{row.margin:.2g}"),
        number_cell(_format_interval(row.equivalent_low, row.equivalent_high)),
        number_cell(_dash_if_unknown(p_text(row.p_equivalent_holm))),
        number_cell(diverged),
    ]


def _format_difference(value: float) -> str:
    """Format a difference with two digits and its sign; NaN as a dash.

    >>> [_format_difference(value) for value in (0.0123, -0.5, 0.0, math.nan)]
    ['+0.012', '−0.5', '0', '–']
    """
    if math.isnan(value):
        return "–"
    return f"{value:+.2g}".replace("-", "−", 1) if value else "0"


def _format_interval(low: float, high: float) -> str:
    """Format an interval; a dash if an end is NaN.

    >>> _format_interval(-0.5, 0.25), _format_interval(math.nan, math.nan)
    ('−0.5 to +0.25', '–')
    """
    if math.isnan(low) or math.isnan(high):
        return "–"
    return f"{_format_difference(low)} to {_format_difference(high)}"


def _dash_if_unknown(text: str) -> str:
    """Return a dash for `unknown`, and any other text unchanged."""
    return "–" if text == "unknown" else text
