"""The statistical decision on each level of a factor: different, equivalent, both or neither.

The seed is the unit of replication. Each level of the factor, such as a setting, is compared with the reference on the
seeds that both have, by the mean of the paired differences. It is different where `gpulab.stats.tests.mean_p` rejects a
mean of zero (for booleans, McNemar's test), and equivalent where two one-sided tests reject every mean beyond a margin
(Schuirmann 1987; for booleans, an exact test of the share of discordant pairs). A margin in standard deviations between
seeds is itself uncertain, so it is taken at the lower 97.5 % confidence limit of the standard deviation. Levels whose
weights equal the reference's to the last bit for every seed are not tested. Several levels are corrected by Holm's
method (1979), differences and equivalences separately.

`benchmarks/verdict_calibration.md` has the measured error rates, and where they exceed the level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

import gpulab.stats.tests as inference
from gpulab.stats.margins import margin_size
from gpulab.stats.pairs import Paired

DECISIONS = ("different", "different but negligible", "inconclusive", "equivalent")
COLUMNS = (  # of a verdict's table, after the factor's; `Verdict` says what they are
    *("decision", "seeds", "difference", "low", "high", "confidence"),
    *("p_different", "p_different_holm", "p_equivalent", "p_equivalent_holm"),
    *("equivalent_low", "equivalent_high", "equivalent_confidence", "margin", "margin_relative"),
    *("largest_difference", "same_bits", "moved", "diverged", "reference_diverged", "one_diverged"),
    *("diverged_apart_at_most", "p_diverged", "p_diverged_holm", "left_out", "seeds_needed"),
)
DIVERGED_APART = 0.1  # levels that may diverge on more of the seeds differently are not called equivalent
POWER = 0.8  # of a comparison with as many seeds as are said to be needed
FOR_SKEWNESS = 1  # what the correction for skewness costs, in seeds, where differences are normal (by simulation)
MOST_SEEDS, TINY = 100_000, 1e-150
SEEDS = np.unique(np.round(np.concatenate([np.arange(2, 201), np.geomspace(200, MOST_SEEDS, 800)]))).astype(int)


@dataclass(frozen=True, eq=False)
class Decisions(Paired):
    """Runs paired by seed, and the decision on each level. `gpulab.stats.Verdict` adds words and a figure.

    Attributes:
        margin: The largest difference without importance, as it was asked for.
        alpha: The level of significance.
        table: A data frame with a row for each level, and the columns `COLUMNS`.
        between_seeds: The standard deviation of the metric over seeds under the reference.
    """

    margin: str | float
    alpha: float
    table: pd.DataFrame
    between_seeds: float

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
