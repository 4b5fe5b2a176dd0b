"""What runs on the same seeds allow one to say of a factor: different, equivalent, or not settled.

The seed is the unit: a level of the factor (a setting, say) is compared with the reference on the seeds that both
have, by the mean of the paired differences. It is different where `stats.tests.mean_p` says that the mean is not zero
(for yes and no, McNemar's test), and equivalent where two one-sided tests keep it within a margin (Schuirmann 1987; for
yes and no, an exact test against a share). A margin in standard deviations between seeds is uncertain itself, so it is
taken at the sd's lower 97.5 % limit. The same weights to the last bit from every seed are no sample of anything, and
are not tested. Several levels: Holm's correction (1979), of the differences and of the equivalences, each for itself.

`benchmarks/results/verdict_calibration.md` has the measured error rates, and where they are missed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

import gpulab.stats.tests as inference
from gpulab.errors import UsageError
from gpulab.report import Report
from gpulab.stats.pairs import Paired, pair

if TYPE_CHECKING:
    from gpulab.plots.style import Picture


DECISIONS = ("different", "different but negligible", "inconclusive", "equivalent")
COLUMNS = (  # of a verdict's table, after the factor's; `Verdict` says what they are
    *("decision", "seeds", "difference", "low", "high", "confidence"),
    *("p_different", "p_different_holm", "p_equivalent", "p_equivalent_holm"),
    *("equivalent_low", "equivalent_high", "equivalent_confidence", "margin", "margin_relative"),
    *("largest_difference", "same_bits", "moved", "diverged", "reference_diverged", "one_diverged"),
    *("diverged_apart_at_most", "p_diverged", "p_diverged_holm", "left_out", "seeds_needed"),
)
USUAL_MARGIN, USUAL_SHARE = "0.25sd", 0.1  # of numbers, and of yes and no
DIVERGED_APART = 0.1  # levels that may diverge on more of the seeds differently are not called equivalent
POWER = 0.8  # of a comparison with as many seeds as are said to be needed
FOR_SKEWNESS = 1  # what the correction for skewness costs, in seeds, where differences are normal (by simulation)
MOST_SEEDS, TINY = 100_000, 1e-150
SEEDS = np.unique(np.round(np.concatenate([np.arange(2, 201), np.geomspace(200, MOST_SEEDS, 800)]))).astype(int)


# --- deciding ---------------------------------------------------------------------------------------------


def compare_levels(paired: Paired, margin: str | float, alpha: float) -> pd.DataFrame:
    """A verdict's table."""
    levels, runs = paired.by_level(), paired.runs[paired.factor].value_counts()
    losses, yes_or_no = paired.losses_of_reference(), paired.is_yes_or_no()
    size, sizes = (margin_size(margin, losses, yes_or_no, n) for n in (None, SEEDS))
    rows = [{paired.factor: level, **_level_numbers(pairs, size, yes_or_no)} for level, pairs in levels.items()]
    table = pd.DataFrame(rows, columns=[paired.factor, *COLUMNS])
    table["left_out"] = [runs[level] + runs[paired.reference] - 2 * len(pairs) for level, pairs in levels.items()]
    alphas = _correct(table, alpha)
    table["decision"] = [decide(row, alpha) for row in table.itertuples()]
    for row, pairs in enumerate(levels.values()):
        differences = pairs.difference.dropna().to_numpy(float)
        ends = _intervals(differences, *alphas, yes_or_no)
        table.loc[row, ["low", "high", "equivalent_low", "equivalent_high"]] = ends
        needed = _seeds_needed(inference.sample_sd(differences), sizes, alpha / len(levels), yes_or_no)
        undecided = table.decision[row] == "inconclusive"
        table.loc[row, "seeds_needed"] = max(needed, len(pairs) + 1) if undecided else needed
    return table


def _level_numbers(pairs: pd.DataFrame, margin: float, yes_or_no: bool) -> dict[str, Any]:
    """What one level's pairs say before any correction for the other levels, by names of `COLUMNS`."""
    differences = pairs.difference.dropna().to_numpy(float)
    n = len(differences)
    tested = n > 1 and not (pairs.same_bits.all() and not differences.any())
    different = inference.sign_flip_p if yes_or_no else inference.mean_p
    equivalent = inference.discordance_p if yes_or_no else inference.equivalence_p
    reference_mean = pairs.reference[pairs.difference.notna()].mean()
    one_diverged = pairs.reference_diverged != pairs.other_diverged
    apart = int(one_diverged.sum())
    return {
        "seeds": n,
        "difference": float(np.sort(differences).mean()) if n else math.nan,
        "p_different": different(differences) if tested else math.nan,
        "p_equivalent": equivalent(differences, margin) if tested else math.nan,
        "margin": margin,
        "margin_relative": margin / abs(reference_mean) if reference_mean and not yes_or_no else math.nan,
        "largest_difference": float(np.abs(differences).max()) if n else math.nan,
        "same_bits": int(pairs.same_bits.sum()),
        "moved": int((np.abs(differences) > margin).sum()) if margin > 0 else math.nan,
        "diverged": int(pairs.other_diverged.sum()),
        "reference_diverged": int(pairs.reference_diverged.sum()),
        "one_diverged": apart,
        "diverged_apart_at_most": inference.clopper_pearson_upper(apart, len(pairs)),
        "p_diverged": inference.sign_test_p(int((one_diverged & pairs.other_diverged).sum()), apart),
    }


def _correct(table: pd.DataFrame, alpha: float) -> tuple[float, float]:
    """Write the corrected p values and the levels of the intervals; return alpha for each family of intervals.

    >>> table = pd.DataFrame({"one_diverged": [5, 4], "p_different": [0.5, 0.4], "p_diverged": [0.0625, 0.125]})
    >>> levels = _correct(table := table.assign(p_equivalent=[0.01, 0.2]), 0.0625)
    >>> table.p_diverged_holm.tolist()  # of four runs that diverged nothing could be shown: it is not corrected
    [0.1875, 0.125]
    >>> [round(float(level), 4) for level in levels]
    [0.0208, 0.0625]
    """
    # A sign test on k pairs cannot fall below 2^(1 − k): one that cannot reach alpha cannot be a false alarm,
    # and the others need no correction for it (Tarone 1990).
    testable = 2.0 ** (1 - table.one_diverged.to_numpy(float)) <= alpha
    corrected = inference.holm([*table.p_different, *np.where(testable, table.p_diverged, math.nan)])
    table["p_different_holm"] = corrected[: len(table)]
    table["p_diverged_holm"] = np.where(testable, corrected[len(table) :], table.p_diverged)
    table["p_equivalent_holm"] = inference.holm(list(table.p_equivalent))
    # Holm has stopped at this level: it rejects what is below, and nothing above.
    alphas = [alpha / max(1, np.sum(p > alpha)) for p in (corrected, table.p_equivalent_holm)]
    table["confidence"], table["equivalent_confidence"] = 1 - alphas[0], 1 - 2 * alphas[1]
    return alphas[0], alphas[1]


def _intervals(differences: np.ndarray, alpha: float, equivalent_alpha: float, yes_or_no: bool) -> list[float]:
    """The intervals of the tests of difference and of equivalence, four ends."""
    if not yes_or_no or len(differences) < 2:
        equivalent = inference.skewed_t_interval(differences, 2 * equivalent_alpha)
        return [*inference.mean_interval(differences, alpha), *equivalent]
    # the share of discordant pairs bounds the difference of the rates
    limit = inference.clopper_pearson_upper(int(np.count_nonzero(differences)), len(differences), equivalent_alpha)
    return [*inference.sign_flip_interval(differences, alpha), -limit, limit]


def _seeds_needed(sd: float, margins: Any, alpha: float, yes_or_no: bool) -> float:
    """The first of `SEEDS` with which the test of equivalence succeeds with `POWER` where nothing differs.

    It is for normal differences of the standard deviation `sd`; `margins` are those of as many seeds. A difference as
    large as the margin is shown about as often, with `fewest_pairs` or more. Of yes and no as many are needed as
    exclude the margin where none switches. Infinite where no number is enough.

    >>> [_seeds_needed(1.0, np.full(len(SEEDS), margin), 0.05, yes_or_no=False) for margin in (0.5, 1e-9)]
    [37.0, inf]
    >>> [_seeds_needed(0.1, np.full(len(SEEDS), margin), 0.05, yes_or_no=True) for margin in (0.2, 1e-9)]
    [14.0, inf]
    """
    from statsmodels.stats.power import ttest_power  # which imports all of scipy.stats

    if math.isnan(sd):
        return math.nan
    effects = np.minimum(margins / max(sd, TINY), 30 / np.sqrt(SEEDS))  # beyond, the power is 1, its series slow
    power = ttest_power(effects, SEEDS, alpha, alternative="larger")
    enough = power >= (1 + POWER) / 2  # each of two one-sided tests fails half as often
    by_share = (1 - margins) ** SEEDS <= alpha if yes_or_no else enough
    if not (enough.any() and by_share.any()):
        return math.inf
    return float(max(SEEDS[enough.argmax()] + FOR_SKEWNESS, SEEDS[by_share.argmax()], fewest_pairs(alpha)))


def fewest_pairs(alpha: float) -> int:
    """So many differences of one sign are the fewest that show anything at `alpha`: the sign flips' p is 2^(1 − n).

    >>> fewest_pairs(0.05), fewest_pairs(0.0625)
    (6, 5)
    """
    return math.ceil(1 - math.log2(alpha))


def is_identical(row: Any) -> bool:
    """Whether a level, a row of a verdict's table, left the same weights to the last bit from every seed.

    >>> from types import SimpleNamespace
    >>> row = {"one_diverged": 0, "p_different": math.nan}
    >>> [is_identical(SimpleNamespace(**row, seeds=n, same_bits=same)) for n, same in ((1, 1), (2, 2), (2, 1))]
    [False, True, False]
    """
    return row.seeds > 1 and row.one_diverged == 0 and math.isnan(row.p_different) and row.same_bits >= row.seeds


def decide(row: Any, alpha: float) -> str:
    """The decision on a level, a row of a verdict's table, from its corrected p values.

    >>> from types import SimpleNamespace
    >>> row = {"seeds": 10, "one_diverged": 0, "p_different": 0.02, "same_bits": 0, "p_diverged_holm": 1.0}
    >>> for different, equivalent in ((0.05, 1.0), (0.05, 0.05), (0.06, 0.05), (0.06, 0.06)):
    ...     p = {"p_different_holm": different, "p_equivalent_holm": equivalent}
    ...     print(decide(SimpleNamespace(**row, **p), alpha=0.05))
    different
    different but negligible
    equivalent
    inconclusive
    >>> decide(SimpleNamespace(**row | {"p_diverged_holm": 0.05}), alpha=0.05)
    'different'
    """
    if is_identical(row):
        return "equivalent"
    if row.p_diverged_holm <= alpha:
        return "different"
    equivalent = row.p_equivalent_holm <= alpha and not may_diverge_apart(row)
    if row.p_different_holm <= alpha:
        return "different but negligible" if equivalent else "different"
    return "equivalent" if equivalent else "inconclusive"


def may_diverge_apart(row: Any) -> bool:
    """Whether more seeds than may be passed over could diverge under one of the two alone.

    >>> from types import SimpleNamespace
    >>> [may_diverge_apart(SimpleNamespace(one_diverged=n, diverged_apart_at_most=0.9)) for n in (0, 1)]
    [False, True]
    """
    return row.one_diverged > 0 and row.diverged_apart_at_most > DIVERGED_APART


# --- the margin ------------------------------------------------------------------------------------------


def parse_margin(margin: str | float) -> tuple[float, str]:
    """The number in a margin such as 0.01, "0.25sd" or "1%", and its unit: `sd`, `%` or nothing."""
    with_unit = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(sd|%)\s*", margin) if isinstance(margin, str) else None
    is_number = isinstance(margin, (int, float, np.number)) and not isinstance(margin, bool)
    number = float(with_unit[1]) if with_unit else float(margin) if is_number else math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"margin {margin!r}: expected a number above 0, or such as '0.25sd' or '1%'")
    return number, with_unit[2] if with_unit else ""


def margin_size(margin: str | float, losses: np.ndarray, yes_or_no: bool = False, n: Any = None) -> Any:
    """A margin in the metric's units; `losses` is the metric under the reference, shape (seeds,).

    One in standard deviations is of their lower 97.5 % limit as it were for n seeds, by default as many as there are;
    NaN where the losses do not differ. Of yes and no a margin is a share of the seeds.

    >>> margin_size("10%", np.array([0.0, 1.0]), yes_or_no=True), margin_size("10%", np.array([4.0, 6.0]))
    (0.1, np.float64(0.5))
    >>> losses = np.arange(12.0)
    >>> margin_size("0.5sd", losses, n=np.array([10, 12, 14])).round(4).tolist()  # wider with more seeds
    [1.0577, 1.1276, 1.1802]
    >>> margin_size("0.5sd", losses) == 0.5 * inference.sd_lower_limit(losses)
    np.True_
    >>> margin_size(1, np.array([0.0, 1.0]), yes_or_no=True)
    Traceback (most recent call last):
    gpulab.errors.UsageError: margin 1: of yes and no it is a share of the seeds below 1, such as 0.1
    """
    number, unit = parse_margin(margin)
    share = number / 100 if unit == "%" else number
    if yes_or_no and (unit == "sd" or share >= 1):
        raise UsageError(f"margin {margin!r}: of yes and no it is a share of the seeds below 1, such as {USUAL_SHARE}")
    if unit == "sd":
        return number * inference.sd_lower_limit(losses, n)
    if unit == "%" and not yes_or_no:
        return share * abs(losses.mean()) if losses.any() else math.nan
    return share


@dataclass(frozen=True, eq=False)
class Verdict(Paired, Report):
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
        notes: Sentences on what was left out, because it did not finish or could not be read, and on rows that were
            averaged.
        between_seeds: The standard deviation of the metric over seeds under the reference.

    The table has these columns, after the one of the level. Of each `p_…` there is a twin, `p_…_holm`, after Holm's
    correction for several tests.

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
    - `largest_difference`: The largest absolute difference.
    - `same_bits`: How many pairs ended with identical weights.
    - `moved`: How many seeds moved by more than the margin.
    - `diverged`, `reference_diverged`, `one_diverged`: How many of the shared seeds diverged under the level, under the
      reference, and under one of the two only.
    - `diverged_apart_at_most`: The share of all seeds that could diverge under one only, likewise at 95 %.
    - `p_diverged`: The p value of the test that both diverge equally often.
    - `left_out`: How many runs have no partner of the same seed.
    - `seeds_needed`: About how many seeds such a comparison needs: with so many, four times in five, no difference is
      shown to be none, and about as often one as large as the margin is shown. It is for normal differences, and
      alpha / the number of levels. Where the decision is inconclusive it is above the seeds that there are; infinite
      where 100,000 are not enough, and NaN for fewer than two pairs.

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

    margin: str | float
    alpha: float
    table: pd.DataFrame
    between_seeds: float  # the standard deviation over seeds under the reference

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

    def __str__(self) -> str:
        return with_numbers(self)

    def sentences(self, words: Mapping[Any, str] | None = None) -> list[str]:
        """Say what the levels came to, a sentence or two for those of one decision: the effect first.

        Args:
            words: What levels and the metric are called, such as `{"cuda": "the GPU", "final_loss": "loss"}`; what is
                not in it keeps its name.

        Returns:
            The sentences.
        """
        return sentences(self, words or {})

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
        frame: A data frame with a row for each run, as from `gpulab.runs` or `gpulab.stats.pairs.read_table`. Rows
            with `rerun` above 0 are a control; without that column all are first runs. The column `status` says how a
            run ended: one that is neither `finished` nor `diverged` is left out, and the verdict says so. Without that
            column, a run whose metric is no finite number counts as diverged.
        metric: A column of numbers, or of booleans.
        factor: The column whose levels are compared.
        block: The column of what they are compared on, usually the seed.
        margin: The largest difference without importance, in the metric's units; or as a text in standard deviations
            between seeds under the reference (`"0.25sd"`, the default), or of their mean (`"1%"`). For booleans it is a
            share of the seeds, by default 0.1.
        alpha: The level of significance, between 0 and 0.5.
        reference: The level that the others are compared with; by default `cpu`, or where there is none the first in
            the frame.

    Returns:
        The `Verdict`, which prints as sentences; its `table` has all the numbers.

    Raises:
        UsageError: For what is no table of runs, a missing column, a margin or alpha out of range, an unknown
            reference, runs that learned different things or for different times, a finished run without a finite
            number, and first runs of one seed and level that differ in more than numbers.

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
    if not (isinstance(alpha, (int, float, np.number)) and 0 < alpha < 0.5):
        raise UsageError(f"alpha {alpha!r}: expected a number between 0 and 0.5, such as 0.05")
    if factor in COLUMNS:
        raise UsageError(f"factor {factor!r} is also a column of the verdict's own table; rename it")
    paired = pair(frame, metric, factor, block, reference)
    if margin is None:
        margin = USUAL_SHARE if paired.is_yes_or_no() else USUAL_MARGIN
    table, between_seeds = compare_levels(paired, margin, alpha), inference.sample_sd(paired.losses_of_reference())
    return Verdict(**vars(paired), margin=margin, alpha=alpha, table=table, between_seeds=between_seeds)


# --- in sentences ----------------------------------------------------------------------------------------

SURE = 10  # seeds, from which on the number that would settle it is more than a guess
PARTS = {0.25: "a quarter of", 0.5: "half", 1.0: "once"}


def sentences(verdict: Verdict, words: Mapping[Any, str]) -> list[str]:
    """What each level came to: the effect first, then what it is compared with.

    `words` has what the levels and the metric are called; what is not in it keeps its name.
    """
    if not len(verdict.table):
        return [f"Only {words.get(verdict.reference, verdict.reference)} was run, so there is nothing to compare."]
    return [*(_sentence(verdict, row, words) for row in verdict.table.itertuples()), *_without_stuck(verdict)]


def _sentence(verdict: Verdict, row: Any, words: Mapping[Any, str]) -> str:
    """What a level, a row of the table, came to."""
    block, n, preposition = verdict.block, row.seeds, "under" if verdict.factor == "setting" else "with"
    level, reference = (words.get(name, name) for name in (row[1], verdict.reference))
    metric = words.get(verdict.metric, verdict.metric.replace("_", " "))
    here, there = f"{preposition.capitalize()} {level}", f"{preposition} {reference}"
    if row.decision == "different" and row.p_diverged_holm <= verdict.alpha:
        runs = verdict.runs[verdict.factor].value_counts()
        diverged = f"{here} {row.diverged} of {runs[row[1]]} runs diverged"
        return f"{diverged}, {there} {row.reference_diverged} of {runs[verdict.reference]}."
    if n < 2:
        shared = f"only one {block}" if n else f"no {block}"
        return f"Between {level} and {reference} nothing can be compared: {shared} finished {preposition} both."
    if is_identical(row):
        return f"{here} every {block} ends with the same bits as {there}, so there is nothing to test."
    if not (row.largest_difference or row.p_equivalent > 0 or row.one_diverged):
        doubt = f"make sure that the {verdict.factor} reached the training"
        return f"{here} not one {block} differs by a digit from that {there}: {doubt}."
    differences = verdict.pairs[verdict.pairs[verdict.factor] == row[1]].difference
    direction, along = "higher" if row.difference > 0 else "lower", (differences * row.difference > 0).sum()
    count = f"{direction} in {along} of {n} {block}s"
    if row.decision == "different":
        return f"{here} the {metric} is {_change(verdict, row)} {there}, and {count}."
    effect = f"{here} the {metric} differs by {_amount(verdict, row, abs(row.difference))} on average from that {there}"
    number, unit = parse_margin(verdict.margin)
    meaning = (
        f" ({PARTS.get(number, f'{number:g} times')} the spread between {block}s, estimated cautiously)"
        if unit == "sd"
        else ""
    )
    none = f"differences below {_amount(verdict, row, row.margin)}{meaning} count as none here"
    if row.decision == "different but negligible":
        return f"{effect}, and is {count}: that is no luck, but {none}."
    if row.decision == "equivalent":
        most = inference.clopper_pearson_upper(row.moved, n)
        further = f"{row.moved:.0f} of {n} {block}s moved further than that"
        unseen = f"jumps in up to {100 * most:.0f} % of all {block}s cannot be ruled out (95 % limit)"
        return f"{effect}; {none}. {further}, but {unseen}."
    undecided = f"{effect}, and is {count}, which decides nothing"
    return f"{'; '.join([undecided, *([none] if row.margin > 0 else []), *_needed(verdict, row)])}."


def _amount(verdict: Verdict, row: Any, value: float) -> str:
    """A difference in per cent of the reference's mean where all values are above zero, or as it is."""
    if verdict.runs[verdict.metric].min() > 0 and row.margin_relative > 0:
        return f"{100 * value * row.margin_relative / row.margin:.2g} %"
    return f"{value:.2g}"


def _change(verdict: Verdict, row: Any) -> str:
    """How far a level differs from the reference, up to the reference's name."""
    ratio = 1 + row.difference * row.margin_relative / row.margin
    if 0.9 < ratio < 1.1 or not verdict.runs[verdict.metric].min() > 0 or math.isnan(ratio):
        return f"{_amount(verdict, row, abs(row.difference))} {'higher' if row.difference > 0 else 'lower'} than"
    return f"{ratio:.3g} times as high as"


def _needed(verdict: Verdict, row: Any) -> Iterator[str]:
    """What would settle it."""
    block, fewest = verdict.block, fewest_pairs(1 - row.confidence)
    if apart := may_diverge_apart(row):
        yield f"on up to {100 * row.diverged_apart_at_most:.0f} % of {block}s one of the two could diverge alone"
    if row.seeds < fewest:
        yield f"{row.seeds} {block}s are too few to show a difference, {fewest} are enough"
    if row.margin > 0 and not apart:
        finite, guess = math.isfinite(row.seeds_needed), "" if row.seeds >= SURE else "a rough guess, "
        number = f"about {row.seeds_needed:.0f}" if finite else f"more than {MOST_SEEDS:,}"
        yield f"{number} {block}s would settle it ({guess}power 0.8, if others are like these)"


def _without_stuck(verdict: Verdict) -> Iterator[str]:
    """That a few seeds far from the others make most of the spread, and the margin without them."""
    losses = verdict.losses_of_reference()
    few = inference.stuck(losses)
    if few.any() and parse_margin(verdict.margin)[1] == "sd":
        who = f"{few.sum()} of {len(losses)} {verdict.block}s that lie far from the others"
        alone, margin = margin_size(verdict.margin, losses[~few]), verdict.table.margin.iloc[0]
        yield f"Most of this spread comes from {who}: without them the margin would be {alone:.2g}, not {margin:.2g}."


# --- with all numbers ------------------------------------------------------------------------------------

NUMBERS = (  # of a level; those that a level does not have are left out
    "Difference {difference:.2g}",
    "{usual} % interval {low:.2g} to {high:.2g}",
    "p = {p_different}",
    "equivalence within ±{margin:.2g}",
    "{narrow} % interval {equivalent_low:.2g} to {equivalent_high:.2g}",
    "p = {p_equivalent}",
    "largest difference {largest_difference:.2g}",
)


def with_numbers(verdict: Verdict) -> str:
    """A line for each level, its decision, sentence and numbers, and then what holds for all of them."""
    seeds_of = f"{verdict.block}s under {verdict.reference}"
    lines = [_level(verdict, row) for row in verdict.table.itertuples()] or sentences(verdict, {})
    lines += [f"The standard deviation between {seeds_of} is {verdict.between_seeds:.2g}.", *_without_stuck(verdict)]
    if verdict.table.margin.isna().any():
        lines.append(f"Equivalence was not asked: {seeds_of} have no spread; give a margin in the metric's units.")
    return "\n".join([*lines, *verdict.notes]).replace(" is nan.", " is unknown.")


def _level(verdict: Verdict, row: Any) -> str:
    """One level: its decision, its sentence and its numbers."""
    block, all_seeds = verdict.block, row.seeds + row.left_out
    seeds = f"{row.seeds} of " * (row.left_out > 0) + f"{all_seeds} {block}{'s' * (all_seeds != 1)}"
    if "seed" in verdict.runs and block != "seed":
        distinct = verdict.runs.seed[verdict.runs[block].isin(verdict.pairs[block])].nunique()
        seeds += f" made from {distinct} distinct seeds"
    said = [f"{row[1]} against {verdict.reference}, {seeds}: {row.decision}.", _sentence(verdict, row, {})]
    p = {"p_different": p_text(row.p_different_holm), "p_equivalent": p_text(row.p_equivalent_holm)}
    levels = {"usual": f"{100 * row.confidence:.3g}", "narrow": f"{100 * row.equivalent_confidence:.3g}"}
    numbers = [clause.format(**row._asdict() | p | levels) for clause in NUMBERS]
    if row.seeds > 1 and not is_identical(row):
        said.append(f"{'; '.join(clause for clause in numbers if not re.search('nan|inf|unknown', clause))}.")
    if row.diverged or row.reference_diverged:
        there = f"under {verdict.reference} {row.reference_diverged} (p = {p_text(row.p_diverged_holm)})"
        said.append(f"Diverged, or without a number: {row.diverged}, {there}.")
    return " ".join(said)


def p_text(value: float) -> str:
    """A p value in two digits; far below 0.001 in one."""
    return (f"{value:.0e}" if 0 < value < 0.001 else f"{value:.2g}").replace("nan", "unknown")
