"""What runs on the same seeds allow one to say of a factor: different, equivalent, or not settled.

The seed is the unit: a level of the factor (a setting, say) is compared with the reference on the seeds that both
have, by the mean of the paired differences. It is different where `stats.tests.mean_p` says that the mean is not zero
(for yes and no, McNemar's test), and equivalent where two one-sided tests keep it within a margin (Schuirmann 1987; for
yes and no, an exact test against a share). A margin in standard deviations between seeds is uncertain itself, so it is
taken at the sd's lower 97.5 % limit. The same weights to the last bit from every seed are no sample of anything, and
are not tested. Several levels: Holm's correction (1979), of the differences and of the equivalences, each for itself.

`benchmarks/verdict_calibration.md` has the measured error rates, and where they are missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

import gpulab.stats.power as planning
import gpulab.stats.tests as inference
from gpulab.errors import UsageError
from gpulab.report import Picture, Report
from gpulab.report import table as html_table
from gpulab.stats.decisions import COLUMNS, DECISIONS, compare_levels, is_identical, may_diverge_apart
from gpulab.stats.pairs import finished, is_yes_or_no, pair

SURE = 10  # seeds, from which on the number that would settle it is more than a guess


@dataclass(frozen=True, eq=False)
class Verdict(Report):
    """What `verdict` returns: each level of a factor, such as a setting, compared with a reference on the same seeds.

    `print(verdict)` says it in sentences, `verdict.plot()` draws it, a notebook shows both, and `verdict.save(file)`
    writes both to an HTML page.

    Attributes:
        metric: The name of the metric that was compared.
        factor: The name of the column whose levels were compared.
        block: The name of the column of what they were compared on, usually `seed`.
        reference: The level that the others were compared with.
        margin: The largest difference without importance, as it was asked for.
        alpha: The level of significance.
        table: A data frame with a row for each other level; its columns are below.
        pairs: A data frame with a row for each level and seed that both have. `difference` is the level's metric minus
            the reference's, and NaN where one of the two diverged.
        reruns: The same for the reference run again, as a control: what chance alone changes.
        runs: The rows of the frame that were compared.
        unfinished: The rows that were left out because they neither finished nor diverged.
        between_seeds: The standard deviation of the metric over seeds under the reference.
        damaged: How many runs could not be read where the frame comes from.

    The table has these columns, after the one of the level. Of each `p_…` but `p_rest` there is a twin, `p_…_holm`,
    after Holm's correction for several tests.

    - `decision`: `different`, `different but negligible`, `equivalent` or `inconclusive`; see `verdict`.
    - `seeds`: How many pairs finished under both levels.
    - `difference`: The level's metric minus the reference's, the mean over these seeds.
    - `low`, `high`: The ends of the confidence interval of the difference. It holds zero exactly where
      `p_different_holm` > alpha. They are NaN where so few seeds could show nothing: below six at alpha = 0.05.
    - `confidence`: The level of that interval. It is 1 − alpha, and with several tests 1 − alpha / k, where k is the
      number of tests that Holm's correction does not reject.
    - `p_different`: The p value of the test that the mean difference is zero; NaN for fewer than two pairs, and where
      all pairs have the same bits.
    - `p_equivalent`: The p value of the test that the mean difference is outside ± the margin; NaN likewise, and where
      the margin is.
    - `equivalent_low`, `equivalent_high`: The ends of the interval that belongs to the test of equivalence. It lies
      within ± the margin exactly where `p_equivalent_holm` <= alpha.
    - `equivalent_confidence`: The level of that interval, 1 − 2 alpha / k, where k is counted among the tests of
      equivalence.
    - `margin`: The margin in the metric's units; NaN where it was asked for in standard deviations and the seeds do not
      differ under the reference.
    - `margin_relative`: The margin as a multiple of the pairs' mean under the reference.
    - `smallest_shown`: The smallest difference that so many pairs show with a probability of 0.8, at alpha / k.
    - `sd_of_differences`, `largest_difference`: The standard deviation of the differences, and the largest absolute
      one.
    - `jumped`: How many seeds moved much further than the others: at least three times as far as any that did not, and
      half a standard deviation between seeds (see `gpulab.stats.tests.jumped`).
    - `jump`, `rest`: The mean difference of the seeds that jumped, and of the others; NaN where none jumped.
    - `p_rest`: Where these two have different signs, the p value of the test that the others' mean is zero.
    - `same_bits`: How many pairs ended with identical weights.
    - `moved`: How many seeds moved by more than the margin.
    - `moved_at_most`: The share of all seeds that could move by more, at the upper end of a one-sided 95 % interval.
    - `diverged`, `reference_diverged`, `one_diverged`: How many of the shared seeds diverged under the level, under the
      reference, and under one of the two only.
    - `diverged_apart_at_most`: The share of all seeds that could diverge under one only, likewise at 95 %.
    - `p_diverged`: The p value of the test that both diverge equally often.
    - `left_out`: How many runs have no partner of the same seed.
    - `seeds_needed`: Where the decision is inconclusive, about how many seeds in all would settle it.

    Examples:
        >>> import pandas as pd
        >>> import gpulab as gl
        >>> losses = [0.3, 0.1, 0.2, 0.5, 0.4, 0.6]
        >>> cpu = pd.DataFrame({"setting": "cpu", "seed": range(6), "final_loss": losses})
        >>> found = gl.verdict(pd.concat([cpu, cpu.assign(setting="cuda", final_loss=cpu.final_loss + 0.1)]))
        >>> found.table[["decision", "seeds", "difference"]].round(3).values.tolist()
        [['different', 6, 0.1]]
    """

    plots = "gpulab.plots.runs"

    metric: str
    factor: str
    block: str
    reference: Any
    margin: str | float
    alpha: float
    table: pd.DataFrame
    pairs: pd.DataFrame  # a row per level and seed; `difference` is NaN where one of the two diverged
    reruns: pd.DataFrame  # the same columns for the reference run again: a control
    runs: pd.DataFrame  # the rows of the frame that were compared
    unfinished: pd.DataFrame  # those left out because they neither finished nor diverged
    between_seeds: float  # the standard deviation over seeds under the reference
    damaged: int = 0  # runs that could not be read where the frame comes from

    @property
    def decisions(self) -> dict[Any, str]:
        """A dictionary with the decision of each level."""
        return dict(zip(self.table[self.factor], self.table.decision, strict=True))

    @property
    def decision(self) -> str:
        """The decision of the whole, which is the first in this order that some level has.

        The order is `different`, `different but negligible`, `inconclusive`, `equivalent`. Without any level it is
        `inconclusive`.
        """
        return min(self.decisions.values(), key=DECISIONS.index, default="inconclusive")

    @property
    def largest(self) -> float:
        """The largest change that another level made to a seed, in the metric's units.

        It is NaN where no pair finished, and 0 without another level.
        """
        return float(self.table.largest_difference.max()) if len(self.table) else 0.0

    @property
    def ratio(self) -> float:
        """The largest change as a multiple of the standard deviation between seeds; NaN when either is unknown."""
        return self.largest / self.between_seeds if self.between_seeds else math.nan

    def __str__(self) -> str:
        return _in_words(self)

    def words(self) -> Markup:
        """The sentences and the main columns of the table, as HTML."""
        if not len(self.table):
            return super().words()
        columns = [self.factor, "decision", "seeds", "difference", "low", "high", "p_different_holm"]
        columns += ["p_equivalent_holm", "margin", "largest_difference", "same_bits", "diverged"]
        return super().words() + html_table(self.table[columns], small=True)

    def picture(self) -> Picture | None:
        """The figure of every run and every difference; None where there is nothing to compare."""
        return self.plot() if len(self.table) else None


def verdict(
    frame: pd.DataFrame,
    metric: str = "final_loss",
    factor: str = "setting",
    block: str = "seed",
    margin: str | float | None = None,
    alpha: float = 0.05,
    reference: Any = None,
) -> Verdict:
    """Decide for each level of a factor, such as a setting, whether it changes a metric, by runs on the same seeds.

    Each level is compared with a reference, seed by seed. It gets one of four decisions:

    - `different`: The mean difference over seeds is not zero.
    - `equivalent`: The mean difference is shown to be within ± the margin.
    - `different but negligible`: Both.
    - `inconclusive`: Neither is shown. So it is with one shared seed or none.

    The metric is compared on the seeds that finished under both levels, and how often the levels diverge on all that
    both have. A difference in how often they diverge makes the decision `different`. Where seeds diverged under one of
    the two levels only, and by a one-sided 95 % limit more than a tenth of all seeds could, the level is not called
    `equivalent`. Levels that end with the same bits in every weight from every seed are `equivalent` without a test.

    Args:
        frame: A data frame with a row for each run, as from `gpulab.runs` or `gpulab.stats.tables.read_table`. Rows
            with `rerun` above 0 are a control; without that column all are first runs. The column `status` says how a
            run ended: one that is neither `finished` nor `diverged` is left out, and the verdict says so. Without that
            column, a run whose metric is no finite number counts as diverged.
        metric: A column of numbers, or of booleans. Where no column has this name, the one that ends in it is taken,
            such as `metrics.loss` for `loss`; so it is for the next two arguments.
        factor: The column whose levels are compared.
        block: The column of what they are compared on, usually the seed.
        margin: The largest difference without importance, in the metric's units; or in standard deviations between
            seeds under the reference, as a text such as `"0.25sd"`, the default. For booleans it is a share of the
            seeds, by default 0.1.
        alpha: The level of significance, between 0 and 0.5.
        reference: The level that the others are compared with; by default `cpu`, or where there is none the first in
            the frame.

    Returns:
        The `Verdict`, which prints as sentences; its `table` has all the numbers.

    Raises:
        UsageError: For what is no table of runs, a missing column, a margin or alpha out of range, an unknown
            reference, runs that learned different things or for different times, a finished run without a finite
            number, two first runs of one seed and level, and more than 1,000 levels.

    Examples:
        >>> import pandas as pd
        >>> import gpulab as gl
        >>> losses = [0.3, 0.1, 0.2, 0.5, 0.4, 0.6]
        >>> cpu = pd.DataFrame({"setting": "cpu", "seed": range(6), "final_loss": losses})
        >>> cuda = cpu.assign(setting="cuda", final_loss=cpu.final_loss + 0.1)
        >>> gl.verdict(pd.concat([cpu, cuda])).decision
        'different'

    References:
        The difference is tested by sign flips (Fisher 1935, *The design of experiments*), and where differences are
        skewed also by a t test that is corrected for it (Johnson 1978, *Modified t tests and confidence intervals for
        asymmetrical populations*, Journal of the American Statistical Association 73:536). Equivalence is tested by two
        one-sided tests (Schuirmann 1987, *A comparison of the two one-sided tests procedure and the power approach for
        assessing the equivalence of average bioavailability*, Journal of Pharmacokinetics and Biopharmaceutics 15:657).
        For booleans, and for how often runs diverge, the test is McNemar's (1947, *Note on the sampling error of the
        difference between correlated proportions or percentages*, Psychometrika 12:153), and equivalence is tested by
        an exact test that few seeds switch (Clopper, Pearson 1934, *The use of confidence or fiducial limits
        illustrated in the case of the binomial*, Biometrika 26:404). Several tests are corrected by Holm 1979, *A
        simple sequentially rejective multiple test procedure* (Scandinavian Journal of Statistics 6:65).
    """
    planning.check_alpha(alpha)
    if margin is not None:
        planning.parse_margin(margin)
    if factor in COLUMNS:
        raise UsageError(f"factor {factor!r} is also a column of the verdict's own table; rename it")
    reference, runs, pairs, reruns, unfinished = pair(frame, metric, factor, block, reference)
    margin = planning.usual_margin(margin, metric, is_yes_or_no(runs, metric))
    losses = finished(runs, metric, factor, reference)
    table = compare_levels(runs, pairs, factor, reference, losses, margin, alpha, is_yes_or_no(runs, metric))
    between_seeds, damaged = inference.sample_sd(losses), frame.attrs.get("damaged", 0)
    return Verdict(
        *(metric, factor, block, reference, margin, alpha, table, pairs, reruns, runs, unfinished),
        *(between_seeds, damaged),
    )


# --- words -------------------------------------------------------------------------------------------


def _in_words(verdict: Verdict) -> str:
    """A verdict in sentences: a line for each level, then what holds for all of them."""
    factor, block, reference = verdict.factor, verdict.block, verdict.reference
    lines = [_sentences(verdict, row) for row in verdict.table.itertuples(index=False)]
    if not lines:
        lines = [f"Only {reference} was run: there is nothing to compare it with."]
    if verdict.damaged:
        lines.insert(0, f"{_count(verdict.damaged, 'damaged run')} cannot be read, and may be missing from this.")
    if verdict.table.seeds.gt(1).any():
        lines.append(f"{'; '.join(_design(verdict))}.")
    lines.append(_spread(verdict))
    if len(verdict.table) and math.isnan(verdict.table.margin.iloc[0]):
        why = f"the margin {verdict.margin!r} needs a spread between {block}s under {reference}"
        lines.append(f"Equivalence was not asked: {why}; give one in the metric's units, such as margin=0.01.")
    if len(verdict.reruns):
        change = f"changed a {block} by up to {verdict.reruns.difference.abs().max():.2e}"
        same = verdict.reruns.groupby(block).same_bits.all()
        lines.append(
            f"{reference} run again {change}; {same.sum()} of {_count(len(same), block)} gave the same bits twice."
        )
    diverged = verdict.runs[verdict.runs.status == "diverged"].groupby(factor).size()
    where = ", ".join(f"{level} {count}" for level, count in diverged.items())
    lines.append(f"Diverged runs: {diverged.sum()}{f' ({where})' if where else ''}.")
    if len(verdict.unfinished):
        ends = verdict.unfinished.groupby([factor, "status"]).size()
        where = ", ".join(f"{level} {count} {status}" for (level, status), count in ends.items())
        why = f"if it was the {factor} that stopped them, what is left flatters it"
        lines.append(f"Left out, because they did not finish: {ends.sum()} ({where}); {why}.")
    return "\n".join(lines)


def _spread(verdict: Verdict) -> str:
    """How far seeds differ under the reference, and how large the largest change is beside that."""
    between = f"between {verdict.block}s under {verdict.reference} is"
    if math.isnan(verdict.between_seeds):
        return f"The spread {between} unknown: fewer than two finished."
    text = f"The standard deviation {between} {verdict.between_seeds:.2e}"
    if len(verdict.table) and not math.isnan(verdict.ratio):
        text += f"; the largest change that another {verdict.factor} made to a {verdict.block} is {verdict.largest:.2e}"
        text += f", {verdict.ratio:.2g} of it"
    return f"{text}."


def _sentences(verdict: Verdict, row: Any) -> str:
    """One level's decision, and what follows from its numbers; `row` is the level's of the table."""
    block, n, alpha = verdict.block, row.seeds, verdict.alpha
    decision = f"{row[0]} against {verdict.reference}, "
    decision += f"{n} of {_count(n + row.left_out, block)}" if row.left_out else _count(n, block)
    decision += f": {row.decision}"
    left_out = f" Left out: {_count(row.left_out, block)} that only one of the two has." if row.left_out else ""
    divergence = ""
    if row.diverged or row.reference_diverged:
        p = _p(row.p_diverged, row.p_diverged_holm, alpha)
        divergence = f"iverged: {row.diverged}, under {verdict.reference} {row.reference_diverged} ({p})"
    if n < 2:
        why = f"one {block} is no evidence" if n else f"they have no {block} in common"
        if divergence:
            why = f"too few {block}s finished under both; d{divergence}"
        return f"{decision}; {why}.{left_out}"
    if is_identical(row):
        return f"{decision}; the same kernels, the same bits in every weight, so there is nothing to test.{left_out}"
    within = f" within ±{row.margin:.2g}" if row.margin > 0 else ""
    by_metric = row.decision == "different" and row.p_different_holm <= alpha
    if row.decision in ("equivalent", "different but negligible"):
        decision += within
    elif row.decision == "different" and not by_metric:
        decision += " in how often they diverge"
    sentences = ["; ".join([decision, *_numbers(row, block, alpha)])]
    yes_or_no = is_yes_or_no(verdict.runs, verdict.metric)
    if by_metric and not yes_or_no:
        unseen = inference.clopper_pearson_upper(0, n)
        jump = -row.difference * (1 - unseen) / unseen
        sentences.append(
            f"This mean could be undone only if up to {unseen:.0%} of all {block}s, which so few could have missed, "
            f"moved by {jump:.2g} on average"
        )
    if row.decision == "inconclusive":
        sentences.append("; ".join(_unsettled(row, within, block, alpha)))
    if divergence:
        sentences.append(f"D{divergence}")
    if row.decision in ("equivalent", "inconclusive") and row.margin > 0:  # some may jump, and none that was seen
        moved = f"{row.moved:.0f} of {_count(n, block)} moved by more than the margin"
        sentences.append(f"{moved}; up to {row.moved_at_most:.0%} of {block}s could (95 % limit)")
    if not row.largest_difference and not yes_or_no:
        doubt = f"make sure that the {verdict.factor} reached what was trained"
        sentences.append(f"Not one {block} differs by a digit: {doubt}")
    return f"{'. '.join(sentences)}.{left_out}"


def _numbers(row: Any, block: str, alpha: float) -> Iterator[str]:
    """The difference; that some seeds jumped and the others moved the other way; and the test of equivalence."""
    interval = _interval(row.low, row.high, row.confidence, 0.95)
    yield f"difference {row.difference:.2g}{interval}, {_p(row.p_different, row.p_different_holm, alpha)}"
    if row.p_rest <= alpha:
        other_seeds = f"the other {row.seeds - row.jumped} moved the other way (mean {row.rest:+.2g}, "
        other_seeds += f"{_p(row.p_rest, row.p_rest, alpha)}): the difference mixes the two"
        yield f"{row.jumped} of {row.seeds} {block}s jumped (mean {row.jump:+.2g}), {other_seeds}"
    if row.decision != "different" and row.margin > 0:
        ends = _interval(row.equivalent_low, row.equivalent_high, row.equivalent_confidence, math.nan, row.margin)
        yield f"equivalence{ends}, {_p(row.p_equivalent, row.p_equivalent_holm, alpha)}"


def _unsettled(row: Any, within: str, block: str, alpha: float) -> Iterator[str]:
    """Why nothing is shown, and how many seeds would settle it."""
    yield f"Neither a difference nor equivalence{within} is shown"
    n, fewest = row.seeds, planning.fewest_pairs(1 - row.confidence)
    if n < fewest:
        corrected = "" if math.isclose(row.confidence, 1 - alpha) else " in so many comparisons"
        yield f"{n} {block}s are too few to show a difference{corrected}, {fewest} are enough"
    if may_diverge_apart(row):
        yield f"on up to {row.diverged_apart_at_most:.0%} of {block}s one of the two could diverge alone"
    if math.isfinite(row.seeds_needed):
        guess = "" if n >= SURE else "a rough guess, "
        yield f"about {row.seeds_needed:.0f} {block}s would settle it ({guess}power 0.8, if others are like these)"
    else:
        yield f"no number of {block}s up to {planning.MOST_SEEDS:,} would settle it"


def _design(verdict: Verdict) -> Iterator[str]:
    """What the comparison could show: its pairs, the smallest difference, and the margin."""
    table, runs, block = verdict.table[verdict.table.seeds > 1], verdict.runs, verdict.block
    made_from = ""
    if "seed" in runs and block != "seed":
        distinct = runs.seed[runs[block].isin(verdict.pairs[block])].nunique()
        made_from = f", made from {_count(distinct, 'distinct seed')}"
    yield f"Design: {_span(table.seeds, '.0f')} pairs of distinct {block}s{made_from}"
    shown = table.smallest_shown[np.isfinite(table.smallest_shown) & (table.smallest_shown > 0)]
    if len(shown):
        power = f"{100 * planning.POWER:.0f} % power at alpha {1 - table.confidence.iloc[0]:.2g}"
        yield f"a difference of {_span(shown, '.2g')} would have been shown with {power}"
    margin = table.margin.iloc[0]
    if margin > 0:
        share, in_sd = planning.parse_margin(verdict.margin)
        meaning = f", a share of the {block}s" if is_yes_or_no(runs, verdict.metric) else ""
        if in_sd:
            meaning += f" ({share:g} of the spread between {block}s, cautiously estimated)"
        if table.margin_relative.notna().all():
            share_of_mean = _span(100 * table.margin_relative, ".2g")
            meaning += f", {share_of_mean} % of the mean {verdict.metric} under {verdict.reference}"
        yield f"the margin is {margin:.2g}{meaning}"


def _span(values: pd.Series, digits: str) -> str:
    return " to ".join(dict.fromkeys(f"{value:{digits}}" for value in (values.min(), values.max())))


def _count(n: int, block: str) -> str:
    return f"{n} {block}" if n == 1 else f"{n} {block}s"


def _p(raw: float, corrected: float, alpha: float) -> str:
    return f"{'' if corrected == raw or math.isnan(raw) else 'corrected '}p = {p_text(corrected, alpha)}"


def _interval(
    low: float, high: float, confidence: float, usual_confidence: float = math.nan, limit: float = 0.0
) -> str:
    """The interval in brackets, with its level where that is not the usual one; nothing where there is none."""
    if math.isnan(low):
        return ""
    level = "" if math.isclose(confidence, usual_confidence) else f" ({100 * confidence:.3g} %)"
    return f" [{_digits(low, -limit)}, {_digits(high, limit)}]{level}"


def p_text(value: float, alpha: float = math.nan) -> str:
    """A p value in two digits; far below 0.001 in one; in more where it would seem to be on alpha's other side."""
    if math.isnan(value):
        return "unknown"
    return _digits(value, alpha) if value >= 0.001 or value == 0 else f"{value:.0e}"


def _digits(value: float, limit: float) -> str:
    """A number in two digits, or in as many as keep it on its side of a limit."""
    texts = (f"{value:.{digits}g}" for digits in range(2, 18))
    return next((text for text in texts if (float(text) > limit) == (value > limit)), str(value))
