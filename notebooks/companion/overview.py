"""Notebook 10: the recorded comparisons of the final loss in one figure."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd

from companion.findings import SIZES, listed, network_words
from companion.metrics import ALL
from gpulab.picture import Picture
from gpulab.plots import theme
from gpulab.plots._runs import name_same_bits
from gpulab.plots.theme import FAINT, INK
from gpulab.stats import Verdict
from gpulab.stats._decisions import DECISIONS
from gpulab.wording import setting_words

DECISION_COLOURS = dict(zip(DECISIONS, ("#CC3311", "#CC7711", FAINT, "#117733"), strict=True))
REACH = 100  # margins on either side of zero that the axis shows
ROW_HEIGHT = 0.2  # inches
SPREAD = 0.5  # share of a row over which the films of one comparison are spread


def comparison_table(answers: Mapping[str, Verdict | pd.DataFrame]) -> pd.DataFrame:
    """Collect the comparisons of the final loss, with their differences in margins.

    Args:
        answers: A verdict or a `learning_table` for each question. The key of a verdict is the
            question, a colon, and the name of the network in the figure. Levels of a verdict that
            give every seed the same bits share a row.

    Returns:
        A row for each comparison and film: `question`, `comparison`, `seeds`, `decision`, and the
        `difference` with its interval from `low` to `high`, all three divided by the margin.
        Comparisons in which all seeds end with the same bits have no row.

    >>> import gpulab as gl
    >>> runs = gl.recorded_runs().query(
    ...     "experiment == 'autoencoder' and profile == 'quick' and loader == 'window'"
    ... )
    >>> table = comparison_table({"Settings: autoencoder": gl.verdict(runs, reference="cpu")})
    >>> table.decision.tolist()
    ['equivalent', 'different but negligible']
    """
    tables = []
    for heading, result in answers.items():
        question, _, network = heading.partition(": ")
        if isinstance(result, Verdict):
            names = name_same_bits(result)
            rows = result.table[result.table[result.factor].isin(names)]
            rows = rows.assign(comparison=[f"{network}, {name}" for name in names.values()])
        else:
            rows = result[result.metric == ALL]
            rows = rows.assign(comparison=[_comparison(row) for row in rows.itertuples()])
        tables.append(rows[rows.same_bits < rows.seeds].assign(question=question))
    table = pd.concat(tables, ignore_index=True)
    in_margins = {name: table[name] / table.margin for name in ("difference", "low", "high")}
    return table[["question", "comparison", "seeds", "decision"]].assign(**in_margins)


def _comparison(row: Any) -> str:
    """Name the network, its size and the setting of a row of a learning table."""
    size = SIZES.get(row.profile, row.profile)
    return f"{network_words(row.experiment)}, {size}, {setting_words(row.setting)}"


def depending_decisions(table: pd.DataFrame) -> list[str]:
    """Say which decisions of a `learning_table` depend on the correction or on the margin.

    Returns:
        A sentence for each row whose decision would change without the correction for several
        questions, or with the margin as it was registered.

    >>> import pandas as pd
    >>> row = {"profile": "paper", "speed": 1, "metric": "final loss"}
    >>> row |= {"decision": "inconclusive", "uncorrected": "different", "registered": "different"}
    >>> print(*depending_decisions(pd.DataFrame([row, row | {"decision": "different"}])))
    Published size, speed 1, final loss: inconclusive; different without the correction.
    """
    sentences = []
    for row in table.itertuples():
        clauses = [f"{row.decision}"]
        if row.uncorrected != row.decision:
            clauses.append(f"{row.uncorrected} without the correction")
        if row.registered != row.uncorrected:
            clauses.append(f"{row.registered} with the registered margin and no correction")
        if len(clauses) > 1:
            size = SIZES.get(row.profile, row.profile).capitalize()
            sentences.append(f"{size}, speed {row.speed:g}, {row.metric}: {'; '.join(clauses)}.")
    return sentences


def comparisons_title(table: pd.DataFrame) -> str:
    """Say in how many comparisons the means differ, and to which questions these belong.

    >>> table = pd.DataFrame({"question": ["A card", "A card"], "decision": ["different"] * 2})
    >>> comparisons_title(table)
    'The mean loss differs in 2 of 2 comparisons: A card (2)'
    """
    different = table[table.decision == "different"]
    if different.empty:
        count = f"None of {len(table)} comparisons"
        return f"{count} shows a difference of the mean loss beyond the margin"
    counts = [
        f"{_within_a_sentence(str(question))} ({len(rows)})"
        for question, rows in different.groupby("question", sort=False)
    ]
    count = f"{len(different)} of {len(table)}"
    return f"The mean loss differs in {count} comparisons: {listed(counts)}"


def _within_a_sentence(question: str) -> str:
    """A question without its capital, unless it begins with a name such as `TF32`."""
    is_word = question.partition(" ")[0][1:].islower()
    return question[0].lower() + question[1:] if is_word else question


@theme.with_theme
def draw_comparisons(table: pd.DataFrame) -> Picture:
    """Draw each row of `comparison_table` as an interval below the question that it answers.

    Films of one comparison share a line. Beyond one margin the axis is logarithmic.
    """
    heights: dict[tuple[str, str], int] = {}
    labels, next_height = [], 0
    for question, rows in table.groupby("question", sort=False):
        labels.append((next_height, question, True))
        for comparison in rows.comparison.unique():
            next_height += 1
            heights[str(question), comparison] = next_height
            labels.append((next_height, comparison, False))
        next_height += 1
    figure, (axes,) = theme.canvas(height=1.3 + ROW_HEIGHT * next_height)
    axes.set_xscale("symlog", linthresh=1)
    axes.axvspan(-1, 1, color=FAINT, alpha=0.2, lw=0, label="within the margin")
    axes.axvline(0, color=INK, lw=0.8)
    films = table.groupby(["question", "comparison"])
    place = (films.cumcount() + 0.5) / films.decision.transform("size") - 0.5
    rows_of_films = [heights[key] for key in zip(table.question, table.comparison, strict=True)]
    height = np.array(rows_of_films) + SPREAD * place
    for decision in [name for name in DECISIONS if name in set(table.decision)]:
        decided = table.decision == decision
        rows, tint = table[decided], DECISION_COLOURS[decision]
        axes.hlines(height[decided], rows.low, rows.high, color=tint, lw=1.4)
        theme.draw_points(axes, rows.difference, height[decided], tint, is_hollow=True, s=18)
        axes.scatter([], [], facecolors="white", edgecolors=tint, label=decision)
    axes.set_yticks([at for at, _, _ in labels], [words for _, words, _ in labels])
    for tick, (_, _, is_question) in zip(axes.get_yticklabels(), labels, strict=True):
        tick.set_fontweight("bold" if is_question else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set(
        xlim=(-REACH, REACH),
        ylim=(next_height - 0.3, -0.7),
        xticks=[-100, -10, -1, 0, 1, 10, 100],
        xticklabels=["−100", "−10", "−1", "0", "1", "10", "100"],
        xlabel="mean difference of the final loss, in margins",
    )
    alt = "Each line is a comparison of the final loss with its interval, grouped by question."
    return theme.finish_figure(figure, fill(comparisons_title(table), 70), alt, columns=3)
