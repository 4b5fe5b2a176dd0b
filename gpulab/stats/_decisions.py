"""The statistical decision on each level of a factor: different, equivalent, both or neither.

The seed is the unit of replication. Each level of the factor, such as a setting, is compared with
the reference by the mean of the differences on the seeds that both have.

- The level is different if `gpulab.stats._inference.mean_p` rejects a mean of zero (for booleans,
  McNemar's test).
- It is equivalent if two one-sided tests reject every mean beyond a margin (Schuirmann 1987; for
  booleans, an exact test of the share of discordant pairs).
- It is not tested if its weights equal the reference's to the last bit for every seed.

A margin in standard deviations between seeds is itself uncertain. It is therefore computed from the
lower 97.5 % confidence limit of the standard deviation.

If there are several levels, p values are corrected by Holm's method (1979), separately for tests of
difference and of equivalence. If the verdict is computed up to k times as more runs are made, each
test is at alpha / k, and the limit of the standard deviation at 1 − 0.025 / k (Bonferroni). The p
values of successive looks are dependent, because a later look includes all earlier runs.
Bonferroni's correction is valid for any dependence, and for looks at any times.

`benchmarks/results/verdict_calibration.md` has the measured error rates and says where they exceed
the level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

import gpulab.stats._inference as inference
from gpulab.stats._margins import margin_size, margin_sizes
from gpulab.stats._pairs import PairedRuns
from gpulab.wording import Level

Decision = Literal["different", "different but negligible", "inconclusive", "equivalent"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)

# The largest share of seeds that may diverge under only one of two levels that are equivalent.
MAX_DISCORDANT_SHARE = 0.1
POWER = 0.8  # the power of a comparison with `seeds_needed` seeds
# The number of additional seeds that the correction for skewness costs if differences are normal,
# measured by simulation.
EXTRA_SEEDS_FOR_SKEWNESS = 1
MAX_SEEDS = 100_000  # above this number `seeds_needed` is infinite
SEED_COUNTS = np.unique(  # the numbers of seeds that `_estimate_seeds_needed` tries
    np.round(np.concatenate([np.arange(2, 201), np.geomspace(200, MAX_SEEDS, 800)]))
).astype(int)
# The least standard deviation, in the metric's units, by which a margin is divided.
MIN_SD = 1e-150


@dataclass(frozen=True, kw_only=True)
class LevelDecision:
    """One level of a factor compared with the reference: a row of a verdict's table.

    All fields but the first are columns of the table, in this order; see `gpulab.stats.Verdict`.
    The default values are those of a level that has no seed in common with the reference.

    Attributes:
        level: The level, as it appears in the factor's column.
        decision: What was decided about the level.
        seeds: The number of pairs that finished under both levels.
        difference: The mean difference from the reference, in the metric's units.
        low: The lower end of the interval of the difference.
        high: Its upper end.
        confidence: Its confidence level.
        p_different: The p value of the test that there is no difference; NaN without a test.
        p_different_holm: The same after Holm's correction.
        p_equivalent: The p value of the test that the difference is beyond the margin; NaN without
            a test.
        p_equivalent_holm: The same after Holm's correction.
        equivalent_low: The lower end of the interval of the test of equivalence.
        equivalent_high: Its upper end.
        equivalent_confidence: Its confidence level.
        margin: The margin, in the metric's units; NaN where there is none.
        margin_relative: The margin over the absolute mean of the pairs under the reference.
        largest_difference: The largest absolute difference.
        same_bits: The number of pairs whose trained weights are identical.
        beyond_margin: The number of pairs whose absolute difference exceeds the margin; NaN without
            a margin.
        diverged: The number of pairs that diverged under this level.
        reference_diverged: The number of pairs that diverged under the reference.
        discordant_diverged: The number of pairs that diverged under only one of the two.
        discordant_diverged_upper: The upper 95 % limit of the share of such pairs.
        p_diverged: The p value of the test that runs diverge equally often under both.
        p_diverged_holm: The same after Holm's correction.
        unpaired: The number of runs without a partner of the same seed.
        seeds_needed: The approximate number of seeds for a conclusive comparison.
    """

    level: Level
    decision: Decision = "inconclusive"
    seeds: int = 0
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    confidence: float = math.nan
    p_different: float = math.nan
    p_different_holm: float = math.nan
    p_equivalent: float = math.nan
    p_equivalent_holm: float = math.nan
    equivalent_low: float = math.nan
    equivalent_high: float = math.nan
    equivalent_confidence: float = math.nan
    margin: float = math.nan
    margin_relative: float = math.nan
    largest_difference: float = math.nan
    same_bits: int = 0
    beyond_margin: float = math.nan
    diverged: int = 0
    reference_diverged: int = 0
    discordant_diverged: int = 0
    discordant_diverged_upper: float = 1.0
    p_diverged: float = 1.0
    p_diverged_holm: float = 1.0
    unpaired: int = 0
    seeds_needed: float = math.nan


# These columns follow the factor's column.
DECISION_COLUMNS = tuple(field.name for field in fields(LevelDecision) if field.name != "level")


@dataclass(frozen=True, eq=False)
class Decisions(PairedRuns):
    """Runs paired by seed, and the decision on each level; `Verdict` adds words and a figure.

    Attributes:
        margin: The largest negligible difference, as it was passed to `verdict`.
        alpha: The level of significance.
        rows: The decision on each level other than the reference, in the order of the runs.
        between_seeds: The standard deviation of the metric over seeds under the reference.
        looks: The number of looks while seeds are added, as it was passed to `verdict`.
    """

    margin: str | float
    alpha: float
    rows: tuple[LevelDecision, ...]
    between_seeds: float
    looks: int = 1

    @cached_property
    def table(self) -> pd.DataFrame:
        """A data frame of `rows`, with a column of levels before `DECISION_COLUMNS`."""
        cells = [tuple(vars(row).values()) for row in self.rows]
        return pd.DataFrame(cells, columns=[self.factor, *DECISION_COLUMNS])

    @property
    def decisions(self) -> dict[Level, str]:
        """A dictionary with the decision of each level."""
        return {row.level: row.decision for row in self.rows}

    @property
    def decision(self) -> str:
        """The first decision in the order below that any level has; `inconclusive` without levels.

        The order is `different`, `different but negligible`, `inconclusive`, `equivalent`.
        """
        return min((row.decision for row in self.rows), key=DECISIONS.index, default="inconclusive")


def compare_levels(
    paired: PairedRuns, margin: str | float, alpha: float, looks: int = 1
) -> tuple[LevelDecision, ...]:
    """Compare each level with the reference, and decide on it.

    `margin` is in the user's form, such as "0.25sd". `alpha` is the level of significance over all
    `looks` and levels.
    """
    levels = paired.by_level()
    losses = paired.reference_losses()
    is_binary = paired.is_binary()
    confidence = sd_confidence(looks)
    margin_in_units = margin_size(margin, losses, is_binary, confidence)
    # A margin in standard deviations depends on the number of seeds, by its confidence limit.
    margins_by_count = margin_sizes(margin, losses, SEED_COUNTS, is_binary, confidence)
    run_counts = paired.runs[paired.factor].value_counts()
    tests = [_test_level(pairs, margin_in_units, is_binary) for pairs in levels.values()]
    corrected_tests = _correct_tests(tests, alpha, looks)
    # The level of the strictest test in Holm's method. `_estimate_seeds_needed` plans for it.
    strictest_alpha = alpha / len(levels) / looks if levels else alpha
    rows = []
    for (level, pairs), test, corrected in zip(levels.items(), tests, corrected_tests, strict=True):
        row = _compare_level(level, pairs, test, corrected, margin_in_units, is_binary)
        decision = decide(row, alpha)
        sd = inference.sample_sd(_differences(pairs))
        n_seeds_needed = _estimate_seeds_needed(sd, margins_by_count, strictest_alpha, is_binary)
        if decision == "inconclusive":  # the present number of pairs was not enough
            n_seeds_needed = float(max(n_seeds_needed, len(pairs) + 1))
        # Each pair consists of one run of the level and one of the reference.
        unpaired = int(run_counts[level] + run_counts[paired.reference] - 2 * len(pairs))
        rows.append(replace(row, decision=decision, unpaired=unpaired, seeds_needed=n_seeds_needed))
    return tuple(rows)


def decide(row: LevelDecision, alpha: float) -> Decision:
    """Decide on a level from its corrected p values.

    Identical weights mean `equivalent`, whatever the p values. A significant difference in how
    often runs diverge means `different`, whatever the losses. A level whose runs may diverge
    discordantly is never equivalent.

    >>> row = LevelDecision(level="cuda", seeds=10, p_different=0.02)
    >>> for different, equivalent in ((0.05, 1.0), (0.05, 0.05), (0.06, 0.05), (0.06, 0.06)):
    ...     print(
    ...         decide(
    ...             replace(row, p_different_holm=different, p_equivalent_holm=equivalent),
    ...             alpha=0.05,
    ...         )
    ...     )
    different
    different but negligible
    equivalent
    inconclusive
    >>> decide(
    ...     replace(row, p_different_holm=0.06, p_equivalent_holm=0.05, p_diverged_holm=0.05),
    ...     alpha=0.05,
    ... )
    'different'
    """
    if is_identical(row):
        return "equivalent"
    if row.p_diverged_holm <= alpha:
        return "different"
    equivalent = row.p_equivalent_holm <= alpha and not may_diverge_discordantly(row)
    if row.p_different_holm <= alpha:
        return "different but negligible" if equivalent else "different"
    return "equivalent" if equivalent else "inconclusive"


def is_identical(row: LevelDecision) -> bool:
    """Return whether the trained weights equal the reference's bit for bit for every seed.

    The result is false for fewer than two seeds, and if a run diverged under only one of the two
    levels.

    >>> [
    ...     is_identical(LevelDecision(level="cuda", seeds=n, same_bits=same))
    ...     for n, same in ((1, 1), (2, 2), (2, 1))
    ... ]
    [False, True, False]
    """
    return (
        row.seeds > 1
        and row.discordant_diverged == 0
        and math.isnan(row.p_different)
        and row.same_bits >= row.seeds
    )


def may_diverge_discordantly(row: LevelDecision) -> bool:
    """Return whether the share of discordant divergence may exceed `MAX_DISCORDANT_SHARE`.

    The upper confidence limit of the share decides. Without any discordant pair the result is
    false: with few seeds this limit is always high.

    >>> row = LevelDecision(level="cuda", discordant_diverged=0, discordant_diverged_upper=0.9)
    >>> may_diverge_discordantly(row), may_diverge_discordantly(replace(row, discordant_diverged=1))
    (False, True)
    """
    return row.discordant_diverged > 0 and row.discordant_diverged_upper > MAX_DISCORDANT_SHARE


def min_significant_pairs(alpha: float) -> int:
    """Compute the least number of pairs that can be significant at `alpha`.

    The p value of n pairs is at least 2^(1 − n).

    >>> min_significant_pairs(0.05), min_significant_pairs(0.0625)
    (6, 5)
    """
    return math.ceil(1 - math.log2(alpha))


def sd_confidence(looks: int) -> float:
    """Compute the confidence level of the lower limit of a standard deviation.

    A margin in standard deviations is computed from this limit. The level is corrected for several
    looks.

    >>> sd_confidence(1), round(sd_confidence(4), 5)
    (0.975, 0.99375)
    """
    return 1 - (1 - inference.SD_CONFIDENCE) / looks


@dataclass(frozen=True)
class _LevelTests:
    """The uncorrected tests of one level, as fields of `LevelDecision`."""

    p_different: float
    p_equivalent: float
    p_diverged: float
    discordant_diverged: int


@dataclass(frozen=True)
class _CorrectedTests:
    """The tests of a level corrected for looks and levels, as fields of `LevelDecision`.

    Attributes:
        alpha: The level of the test of difference, after the correction. The interval of the
            difference has the confidence 1 − alpha.
        equivalent_alpha: The level of each of the two one-sided tests of equivalence, likewise.
    """

    p_different_holm: float
    p_equivalent_holm: float
    p_diverged_holm: float
    alpha: float
    equivalent_alpha: float


def _test_level(pairs: pd.DataFrame, margin: float, is_binary: bool) -> _LevelTests:
    """Test one level's pairs, without any correction for other levels or several looks.

    Difference and equivalence are tested if there are two or more differences, except if all
    weights are bitwise equal and all differences are zero. Otherwise their p values are NaN.
    """
    differences = _differences(pairs)
    p_different = p_equivalent = math.nan
    all_identical = pairs.same_bits.all() and not differences.any()
    if len(differences) > 1 and not all_identical:
        difference_test = inference.sign_flip_p if is_binary else inference.mean_p
        equivalence_test = inference.discordance_p if is_binary else inference.equivalence_p
        p_different = difference_test(differences)
        p_equivalent = equivalence_test(differences, margin)
    is_discordant = pairs.reference_diverged != pairs.other_diverged
    n_discordant = int(is_discordant.sum())
    n_other_diverged = int((is_discordant & pairs.other_diverged).sum())
    return _LevelTests(
        p_different=p_different,
        p_equivalent=p_equivalent,
        p_diverged=inference.sign_test_p(n_other_diverged, n_discordant),
        discordant_diverged=n_discordant,
    )


def _correct_tests(
    tests: Sequence[_LevelTests], alpha: float, looks: int = 1
) -> list[_CorrectedTests]:
    """Correct p values for several looks and levels, and compute the levels of the intervals.

    Holm's method is applied to the tests of difference and of divergence together, and to the tests
    of equivalence separately. A test of divergence with too few discordant pairs to be significant
    is left out of the correction.

    >>> five = _LevelTests(
    ...     p_different=0.5, p_equivalent=0.01, p_diverged=0.0625, discordant_diverged=5
    ... )
    >>> four = _LevelTests(
    ...     p_different=0.4, p_equivalent=0.2, p_diverged=0.125, discordant_diverged=4
    ... )
    >>> corrected = _correct_tests([five, four], alpha=0.0625)
    >>> # Four discordant pairs cannot be significant, so that p value is not corrected
    >>> [test.p_diverged_holm for test in corrected]
    [0.1875, 0.125]
    >>> round(corrected[0].alpha, 4), round(corrected[0].equivalent_alpha, 4)
    (0.0208, 0.0625)
    >>> looked_at = _correct_tests([five, four], alpha=0.0625, looks=3)
    >>> (
    ...     [round(test.p_equivalent_holm, 2) for test in looked_at],
    ...     [test.p_diverged_holm for test in looked_at],
    ... )
    ([0.06, 0.6], [0.1875, 0.375])
    """
    p_different = looks * np.array([test.p_different for test in tests])
    p_equivalent = looks * np.array([test.p_equivalent for test in tests])
    p_diverged = looks * np.array([test.p_diverged for test in tests])
    n_discordant = np.array([test.discordant_diverged for test in tests], float)
    # The p value of a sign test on k pairs is at least 2^(1 − k). A test that cannot reach alpha
    # cannot be a false alarm, so the other tests need no correction for it (Tarone 1990).
    testable = looks * 2.0 ** (1 - n_discordant) <= alpha
    # Both kinds of tests together, and NaN for those that are left out.
    difference_family = inference.holm([*p_different, *np.where(testable, p_diverged, math.nan)])
    p_different_holm, corrected_divergence = np.split(difference_family, 2)
    p_diverged_holm = np.where(testable, corrected_divergence, np.minimum(p_diverged, 1.0))
    p_equivalent_holm = inference.holm(p_equivalent)
    # Holm's method ends at alpha divided by the number of tests that it does not reject. The
    # intervals are at this level, so that they agree with the tests.
    difference_alpha = alpha / max(1, int(np.sum(difference_family > alpha))) / looks
    equivalent_alpha = alpha / max(1, int(np.sum(p_equivalent_holm > alpha))) / looks
    return [
        _CorrectedTests(
            p_different_holm=float(p_different_holm[level]),
            p_equivalent_holm=float(p_equivalent_holm[level]),
            p_diverged_holm=float(p_diverged_holm[level]),
            alpha=difference_alpha,
            equivalent_alpha=equivalent_alpha,
        )
        for level in range(len(tests))
    ]


def _compare_level(
    level: Level,
    pairs: pd.DataFrame,
    test: _LevelTests,
    corrected: _CorrectedTests,
    margin: float,
    is_binary: bool,
) -> LevelDecision:
    """Fill a row with the tests, intervals and counts of one level, but not the decision."""
    differences = _differences(pairs)
    n = len(differences)
    low, high = _difference_interval(differences, corrected.alpha, is_binary)
    equivalent_low, equivalent_high = _equivalence_interval(
        differences, corrected.equivalent_alpha, is_binary
    )
    reference_mean = float(pairs.reference[pairs.difference.notna()].mean())
    has_relative_margin = reference_mean != 0 and not is_binary
    return LevelDecision(
        level=level,
        seeds=n,
        difference=float(np.sort(differences).mean()) if n else math.nan,
        low=low,
        high=high,
        confidence=1 - corrected.alpha,
        p_different=test.p_different,
        p_different_holm=corrected.p_different_holm,
        p_equivalent=test.p_equivalent,
        p_equivalent_holm=corrected.p_equivalent_holm,
        equivalent_low=equivalent_low,
        equivalent_high=equivalent_high,
        equivalent_confidence=1 - 2 * corrected.equivalent_alpha,
        margin=margin,
        margin_relative=margin / abs(reference_mean) if has_relative_margin else math.nan,
        largest_difference=float(np.abs(differences).max()) if n else math.nan,
        same_bits=int(pairs.same_bits.sum()),
        beyond_margin=int((np.abs(differences) > margin).sum()) if margin > 0 else math.nan,
        diverged=int(pairs.other_diverged.sum()),
        reference_diverged=int(pairs.reference_diverged.sum()),
        discordant_diverged=test.discordant_diverged,
        discordant_diverged_upper=inference.clopper_pearson_upper(
            test.discordant_diverged, len(pairs)
        ),
        p_diverged=test.p_diverged,
        p_diverged_holm=corrected.p_diverged_holm,
    )


def _differences(pairs: pd.DataFrame) -> NDArray[np.float64]:
    """Return the differences of the pairs that finished under both levels, shape (seeds,)."""
    differences: NDArray[np.float64] = pairs.difference.dropna().to_numpy(float)
    return differences


def _difference_interval(
    differences: NDArray[np.float64], alpha: float, is_binary: bool
) -> tuple[float, float]:
    """Compute the confidence interval that belongs to the test of difference."""
    if is_binary:
        return inference.sign_flip_interval(differences, alpha)
    return inference.mean_interval(differences, alpha)


def _equivalence_interval(
    differences: NDArray[np.float64], alpha: float, is_binary: bool
) -> tuple[float, float]:
    """Compute the confidence interval that belongs to the test of equivalence.

    `alpha` is the level of each of the two one-sided tests, so the interval is at 1 − 2 alpha. For
    a binary metric it is symmetric about zero.
    """
    if not is_binary or len(differences) < 2:
        return inference.skewed_t_interval(differences, 2 * alpha)
    # The share of discordant pairs bounds the difference between the two rates.
    limit = inference.clopper_pearson_upper(
        int(np.count_nonzero(differences)), len(differences), alpha
    )
    return -limit, limit


def _estimate_seeds_needed(
    sd: float, margins: NDArray[np.float64], alpha: float, is_binary: bool
) -> float:
    """Estimate the number of seeds that make a comparison conclusive.

    The number is the largest of these:

    - the number with which equivalence is established with probability `POWER` if the true
      difference is zero (a true difference as large as the margin is detected about as often);
    - the least number with which any difference can be significant;
    - for a binary metric, the least number with which equivalence can be established.

    Args:
        sd: The standard deviation of the differences between paired runs.
        margins: The equivalence margin with each number of seeds in `SEED_COUNTS`, in the units of
            `sd`. It depends on the number of seeds if it is a multiple of a standard deviation.
        alpha: The level of significance of each test.
        is_binary: Whether the metric is binary. The margin is then a share of the seeds.

    Returns:
        The number of seeds. It is infinite if no number in `SEED_COUNTS` is large enough, and NaN
        if `sd` is NaN.

    >>> [
    ...     _estimate_seeds_needed(1.0, np.full(len(SEED_COUNTS), margin), 0.05, is_binary=False)
    ...     for margin in (0.5, 1e-9)
    ... ]
    [37.0, inf]
    >>> [
    ...     _estimate_seeds_needed(0.1, np.full(len(SEED_COUNTS), margin), 0.05, is_binary=True)
    ...     for margin in (0.2, 1e-9)
    ... ]
    [14.0, inf]
    """
    if math.isnan(sd):
        return math.nan
    minima = [_seeds_for_power(sd, margins, alpha), min_significant_pairs(alpha)]
    if is_binary:
        minima.append(_seeds_to_exclude_discordance(margins, alpha))
    return float(max(minima))


def _seeds_for_power(sd: float, margins: NDArray[np.float64], alpha: float) -> float:
    """Compute how many seeds establish equivalence with probability `POWER`.

    The true difference is zero, and the differences between paired runs are normal with standard
    deviation `sd`. The other arguments are those of `_estimate_seeds_needed`.
    """
    from statsmodels.stats.power import ttest_power  # it imports all of scipy.stats

    effect_sizes = margins / max(sd, MIN_SD)
    # The power depends on the noncentrality, which is the effect size times the root of the number
    # of seeds. Beyond a noncentrality of 30 the power is 1, and slow to compute.
    effect_sizes = np.minimum(effect_sizes, 30 / np.sqrt(SEED_COUNTS))
    power = ttest_power(effect_sizes, SEED_COUNTS, alpha, alternative="larger")
    # Both one-sided tests must succeed, so each may fail with half of the probability 1 − POWER.
    n_for_t_test = _smallest_seed_count(power >= (1 + POWER) / 2)
    return n_for_t_test + EXTRA_SEEDS_FOR_SKEWNESS


def _seeds_to_exclude_discordance(margins: NDArray[np.float64], alpha: float) -> float:
    """Compute how many seeds establish equivalence of a binary metric if no pair is discordant.

    With fewer seeds the test of equivalence cannot be significant, whatever the outcomes are. The
    arguments are those of `_estimate_seeds_needed`.
    """
    p_without_discordance = (1 - margins) ** SEED_COUNTS  # the p value of `discordance_p`
    return _smallest_seed_count(p_without_discordance <= alpha)


def _smallest_seed_count(is_enough: NDArray[np.bool_]) -> float:
    """Return the smallest number of `SEED_COUNTS` that is enough; infinity if none is.

    `is_enough` has an element for each element of `SEED_COUNTS`.
    """
    if not is_enough.any():
        return math.inf
    return float(SEED_COUNTS[is_enough.argmax()])  # `argmax` finds the first True
