"""How many seeds a comparison needs, and the margin that it is made against."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.errors import UsageError
from gpulab.stats.pairs import finished, pair
from gpulab.stats.tests import kurtosis, sample_sd, sd_limit_ratio

if TYPE_CHECKING:
    import pandas as pd

MOST_SEEDS = 100_000
SEEDS = np.unique(np.round(np.concatenate([np.arange(2, 201), np.geomspace(200, MOST_SEEDS, 800)]))).astype(int)


def check_alpha(alpha: float) -> None:
    """Raise `UsageError` for a level of significance that is none."""
    if not (isinstance(alpha, (int, float)) and 0 < alpha < 1):
        raise UsageError(f"alpha {alpha!r}: expected a number between 0 and 1, such as 0.05")


def parse_margin(margin: str | float) -> tuple[float, bool]:
    """The number in a margin such as 0.01 or "0.25sd", and whether it counts standard deviations."""
    in_sd = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*sd\s*", margin) if isinstance(margin, str) else None
    is_number = isinstance(margin, (int, float, np.number)) and not isinstance(margin, bool)
    number = float(in_sd[1]) if in_sd else float(margin) if is_number else math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"margin {margin!r}: expected a number above 0, or such as '0.25sd'")
    return number, in_sd is not None


def seeds_needed(
    frame: pd.DataFrame | None = None,
    metric: str = "final_loss",
    factor: str = "setting",
    block: str = "seed",
    margin: str | float = "0.25sd",
    alpha: float = 0.05,
    reference: Any = None,
    power: float | Sequence[float] = (0.8, 0.9),
    sd: float | None = None,
    between_seeds: float | None = None,
) -> pd.DataFrame:
    """How many seeds a paired comparison needs, for each level of `frame` or for a given `sd`.

    For one comparison with normal differences, by t tests, and no fewer than the sign-flip test needs; two humps and
    Holm's correction need more.

    Args:
        frame: runs, from which the two standard deviations are measured; None where they are given.
        metric, factor, block, margin, alpha, reference: as for `verdict`.
        power: one or several, each between alpha and 1.
        sd: the standard deviation of the paired differences, in the metric's units.
        between_seeds: the standard deviation between seeds, which a margin in sd needs.

    Returns:
        A row per level and power: `to_detect` a difference as large as the margin, `to_exclude` one where there is
        none, and `seeds`, the larger; infinite where 100,000 are not enough.

    Raises:
        UsageError: for values out of range, for a frame and an sd, for neither, and for what `verdict` refuses.

    Examples:
        >>> seeds_needed(sd=1.0, margin=1.0, power=0.8)[["to_detect", "to_exclude"]].iloc[0].tolist()
        [10.0, 11.0]
    """
    import pandas as pd

    check_alpha(alpha)
    powers = [float(value) for value in np.atleast_1d(power)]
    if not all(alpha < value < 1 for value in powers):
        raise UsageError(f"power {power!r}: expected numbers between alpha ({alpha}) and 1, such as 0.8")
    tails = 3.0
    if frame is not None:
        if sd is not None or between_seeds is not None:
            raise UsageError("give a frame, or sd and between_seeds; not both")
        reference, runs, pairs, _ = pair(frame, metric, factor, block, reference)
        losses = finished(runs, metric, factor, reference)
        between_seeds, tails = sample_sd(losses), kurtosis(losses)
        others = dict.fromkeys(level for level in runs[factor] if level != reference)
        differences = {level: pairs.difference[pairs[factor] == level].dropna().to_numpy(float) for level in others}
        levels = [{factor: level, "sd": sample_sd(values)} for level, values in differences.items()]
    elif sd is None or not 0 <= sd < math.inf:
        raise UsageError(f"sd {sd!r}: give the standard deviation of paired differences, or a frame of runs")
    else:
        levels = [{"sd": float(sd)}]
    margins = _margins(margin, between_seeds, tails)
    rows = [{**level, "margin": margin, "power": value} for level, value in itertools.product(levels, powers)]
    for row in rows:
        row["to_detect"] = _seeds_to_detect(row["sd"], margins, alpha, row["power"])
        row["to_exclude"] = _seeds_to_exclude(row["sd"], margins, alpha, row["power"])
        row["seeds"] = max(row["to_detect"], row["to_exclude"])
    return pd.DataFrame(rows)


def seeds_to_settle(table: pd.DataFrame, losses: np.ndarray, margin: str | float, alpha: float) -> list[float]:
    """The seeds that settle each inconclusive level of a verdict's table with a power of 0.8; NaN for the others.

    `losses` is the metric under the reference, shape (seeds,).
    """
    from scipy.stats import binom

    if len(losses) < 2 or "inconclusive" not in set(table.decision):
        return [math.nan] * len(table)
    margins = _margins(margin, sample_sd(losses), kurtosis(losses))
    yes_or_no = np.isin(losses, (0.0, 1.0)).all()
    alpha = alpha / len(table)

    def to_settle(row: Any) -> float:
        if yes_or_no:  # that as large a share of discordant pairs as was seen is under the margin
            count = np.floor((row.moved / row.seeds if row.seeds else 0.0) * SEEDS)
            exclude = _fewest(binom.cdf(count, SEEDS, np.minimum(margins, 1.0)) <= alpha)
        else:
            exclude = _seeds_to_exclude(row.sd_of_differences, margins, alpha, 0.8)
        return max(_seeds_to_detect(row.sd_of_differences, margins, alpha, 0.8), exclude)

    return [to_settle(row) if row.decision == "inconclusive" else math.nan for row in table.itertuples()]


def _margins(margin: str | float, between_seeds: float | None, kurtosis: float) -> np.ndarray:
    """The margin, in the metric's units, that a verdict from as many seeds as each of `SEEDS` would use."""
    number, in_sd = parse_margin(margin)
    if not in_sd:
        return np.full(len(SEEDS), number)
    if between_seeds is None or not between_seeds >= 0:
        raise UsageError(f"margin {margin!r} needs the standard deviation between seeds: between_seeds=…, or 2 seeds")
    return number * between_seeds * sd_limit_ratio(SEEDS, kurtosis)


def _seeds_to_detect(sd: float, margins: np.ndarray, alpha: float, power: float) -> float:
    from scipy.special import ndtr
    from statsmodels.stats.power import TTestPower

    possible = alpha >= 2.0 ** (1 - SEEDS)
    if not sd > 0:
        return math.nan if math.isnan(sd) else _fewest(possible & (margins > 0))
    effect = margins / sd
    reached = TTestPower().power(effect, SEEDS, alpha, df=SEEDS - 1, alternative="two-sided")
    # With the fewest seeds the sign-flip test asks that every one moves the same way.
    reached = np.where(alpha < 2.0 ** (2 - SEEDS), np.minimum(reached, ndtr(effect) ** SEEDS), reached)
    return _fewest(possible & (reached >= power))


def _seeds_to_exclude(sd: float, margins: np.ndarray, alpha: float, power: float) -> float:
    from scipy.stats import nct, t

    if not sd > 0:
        return math.nan if math.isnan(sd) else _fewest(margins > 0)
    noncentrality = np.minimum(margins / sd * np.sqrt(SEEDS), 30)  # beyond, the power is 1 and the series slow
    return _fewest(2 * nct.sf(t.isf(alpha, SEEDS - 1), SEEDS - 1, noncentrality) - 1 >= power)


def _fewest(enough: np.ndarray) -> float:
    return float(SEEDS[enough.argmax()]) if enough.any() else math.inf
