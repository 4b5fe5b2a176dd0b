"""What each level's pairs say in numbers, which is a row of a verdict's table, and the decision that follows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

import gpulab.stats.power as planning
import gpulab.stats.tests as inference
from gpulab.stats.pairs import Paired

DECISIONS = ("different", "different but negligible", "inconclusive", "equivalent")
COLUMNS = (  # of a verdict's table, after the factor's; `Verdict` says what they are
    *("decision", "seeds", "difference", "low", "high", "confidence"),
    *("p_different", "p_different_holm", "p_equivalent", "p_equivalent_holm"),
    *("equivalent_low", "equivalent_high", "equivalent_confidence", "margin", "margin_relative", "smallest_shown"),
    *("largest_difference", "same_bits", "moved", "diverged", "reference_diverged", "one_diverged"),
    *("diverged_apart_at_most", "p_diverged", "p_diverged_holm", "left_out", "seeds_needed"),
)


def compare_levels(
    paired: Paired, factor: str, losses: np.ndarray, margin: str | float, alpha: float, yes_or_no: bool
) -> pd.DataFrame:
    """A verdict's table; `losses` is the metric of the reference's runs that finished, shape (seeds,)."""
    size, count = planning.margin_size(margin, losses), paired.runs[factor].value_counts()
    pairs_of = paired.by_level(factor)
    rows = []
    for level, own in pairs_of.items():
        left_out = int(count[level] + count[paired.reference] - 2 * len(own))
        rows.append({factor: level, **_level_numbers(own, size, yes_or_no), "left_out": left_out})
    table = pd.DataFrame(rows, columns=[factor, *COLUMNS])
    different_alpha, equivalent_alpha = _correct(table, alpha)
    for row, own in enumerate(pairs_of.values()):
        differences = own.difference.dropna().to_numpy(float)
        ends = _intervals(differences, different_alpha, equivalent_alpha, yes_or_no)
        table.loc[row, ["low", "high", "equivalent_low", "equivalent_high"]] = ends
        shown = planning.smallest_shown(len(differences), inference.sample_sd(differences), different_alpha, yes_or_no)
        table.loc[row, "smallest_shown"] = float(shown)
        sd, margins = inference.sample_sd(differences), planning.margins_by_seeds(margin, losses)
        settled = max(planning.seeds_of_t_tests(sd, margins, alpha / len(pairs_of), yes_or_no=yes_or_no))
        table.loc[row, "seeds_needed"] = max(settled, len(own) + 1)
    table["decision"] = [decide(row, alpha) for row in table.itertuples()]
    table["seeds_needed"] = table.seeds_needed.where(table.decision == "inconclusive")
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
    """Write the corrected p values and the levels of the intervals; return alpha for each family of intervals."""
    # A sign test on k pairs cannot fall below 2^(1 − k): one that cannot reach alpha cannot be a false alarm,
    # and the others need no correction for it (Tarone 1990).
    testable = 2.0 ** (1 - table.one_diverged.to_numpy(float)) <= alpha
    corrected = inference.holm([*table.p_different, *np.where(testable, table.p_diverged, math.nan)])
    table["p_different_holm"] = corrected[: len(table)]
    table["p_diverged_holm"] = np.where(testable, corrected[len(table) :], table.p_diverged)
    table["p_equivalent_holm"] = inference.holm(list(table.p_equivalent))
    # Holm has stopped at this level: it rejects what is below, and nothing above.
    different_alpha, equivalent_alpha = (
        alpha / max(1, np.sum(p > alpha)) for p in (corrected, table.p_equivalent_holm)
    )
    table["confidence"], table["equivalent_confidence"] = 1 - different_alpha, 1 - 2 * equivalent_alpha
    return different_alpha, equivalent_alpha


def _intervals(differences: np.ndarray, alpha: float, equivalent_alpha: float, yes_or_no: bool) -> list[float]:
    """The intervals of the tests of difference and of equivalence, four ends."""
    if not yes_or_no or len(differences) < 2:
        equivalent = inference.skewed_t_interval(differences, 2 * equivalent_alpha)
        return [*inference.mean_interval(differences, alpha), *equivalent]
    # the share of discordant pairs bounds the difference of the rates
    limit = inference.clopper_pearson_upper(int(np.count_nonzero(differences)), len(differences), equivalent_alpha)
    return [*inference.sign_flip_interval(differences, alpha), -limit, limit]


def is_identical(row: Any) -> bool:
    """Whether a level, a row of a verdict's table, left the same weights to the last bit from every seed."""
    return row.seeds > 1 and row.one_diverged == 0 and math.isnan(row.p_different) and row.same_bits >= row.seeds


def decide(row: Any, alpha: float) -> str:
    """The decision on a level, a row of a verdict's table, from its corrected p values."""
    if is_identical(row):
        return "equivalent"
    if row.p_diverged_holm <= alpha:
        return "different"
    equivalent = row.p_equivalent_holm <= alpha and not may_diverge_apart(row)
    if row.p_different_holm <= alpha:
        return "different but negligible" if equivalent else "different"
    return "equivalent" if equivalent else "inconclusive"


def may_diverge_apart(row: Any) -> bool:
    """Whether more seeds than may be passed over could diverge under one of the two alone."""
    return row.one_diverged > 0 and row.diverged_apart_at_most > planning.DIVERGED_APART
