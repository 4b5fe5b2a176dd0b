"""How many seeds a comparison needs, and the margin that it is made against."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pandas as pd
import scipy  # whose modules are imported where they are first used
from numpy.typing import ArrayLike

from gpulab.errors import UsageError
from gpulab.stats.pairs import finished, is_yes_or_no, pair
from gpulab.stats.tests import kurtosis, sample_sd, sd_limit_ratio, sd_lower_limit

USUAL_MARGIN, USUAL_SHARE = "0.25sd", 0.1  # of numbers, and of yes and no
DIVERGED_APART = 0.1  # levels that may diverge on more of the seeds differently are not called equivalent
POWER = 0.8  # of the smallest difference that is shown, and of the seeds that would settle a comparison
FOR_SKEWNESS = 1  # what the correction for skewness costs, in seeds, where differences are normal (by simulation)
MOST_SEEDS = 100_000
SEEDS = np.unique(np.round(np.concatenate([np.arange(2, 201), np.geomspace(200, MOST_SEEDS, 800)]))).astype(int)


def check_alpha(alpha: float) -> None:
    """Raise `UsageError` for a level of significance that is none."""
    if not (isinstance(alpha, (int, float, np.number)) and 0 < alpha < 0.5):
        raise UsageError(f"alpha {alpha!r}: expected a number between 0 and 0.5, such as 0.05")


def parse_margin(margin: str | float) -> tuple[float, str]:
    """The number in a margin such as 0.01, "0.25sd" or "1%", and its unit: `sd`, `%` or nothing."""
    with_unit = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(sd|%)\s*", margin) if isinstance(margin, str) else None
    is_number = isinstance(margin, (int, float, np.number)) and not isinstance(margin, bool)
    number = float(with_unit[1]) if with_unit else float(margin) if is_number else math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"margin {margin!r}: expected a number above 0, or such as '0.25sd' or '1%'")
    return number, with_unit[2] if with_unit else ""


def usual_margin(margin: str | float | None, metric: str, yes_or_no: bool) -> str | float:
    """The margin, checked, or the usual one; for yes and no it is a share of the seeds."""
    if margin is None:
        return USUAL_SHARE if yes_or_no else USUAL_MARGIN
    number, unit = parse_margin(margin)
    share = number / 100 if unit == "%" else number
    if yes_or_no and (unit == "sd" or share >= 1):
        raise UsageError(
            f"margin {margin!r}: {metric!r} holds only yes and no (1 and 0), so its margin is a share of the seeds "
            f"between 0 and 1, such as {USUAL_SHARE}; a spread between seeds says nothing there"
        )
    return share if yes_or_no else margin


def margin_size(margin: str | float, losses: np.ndarray) -> float:
    """A margin in the metric's units; `losses` is the metric under the reference, shape (seeds,).

    NaN for one in standard deviations where the losses have none; those are taken at their lower 97.5 % limit.
    """
    number, unit = parse_margin(margin)
    if unit == "sd":
        return number * (sd_lower_limit(losses) or math.nan)
    if unit == "%":
        return number / 100 * abs(losses.mean()) if losses.any() else math.nan
    return number


def seeds_needed(
    frame: pd.DataFrame,
    metric: str = "final_loss",
    factor: str = "setting",
    block: str = "seed",
    margin: str | float | None = None,
    alpha: float = 0.05,
    reference: Any = None,
    power: float = POWER,
) -> pd.DataFrame:
    """Plan a comparison: estimate how many seeds it needs, from runs of a few seeds, for each level of a factor.

    The estimate is for one paired comparison with normal differences, by t tests. `to_detect` is never below the fewest
    seeds with which the sign-flip test of `verdict` can show anything. Skewed differences, some seeds that move far
    more than the others, and several levels compared at once (Holm's correction) need more seeds than this says.

    Args:
        frame, metric, factor, block, margin, alpha, reference: As for `verdict`.
        power: The probability with which the comparison is to succeed, between alpha and 1.

    Returns:
        A data frame with a row for each level. Its columns are the factor; `sd`, the standard deviation of
        the paired differences; `margin` as it was asked for; `power`; `to_detect`, how many seeds show a difference as
        large as the margin; `to_exclude`, how many show equivalence where there is no difference; and `seeds`, the
        larger of the two. A number is infinite where 100,000 seeds are not enough, and NaN for a level with fewer than
        two pairs.

    Raises:
        UsageError: For a power out of range, for a margin in standard deviations where fewer than two seeds finished
            under the reference or all gave the same, and for what `verdict` refuses.

    Examples:
        >>> import pandas as pd
        >>> import gpulab as gl
        >>> losses = [0.3, 0.1, 0.2, 0.5, 0.4, 0.6]
        >>> cpu = pd.DataFrame({"setting": "cpu", "seed": range(6), "final_loss": losses})
        >>> cuda = cpu.assign(setting="cuda", final_loss=losses[::-1])
        >>> needed = gl.stats.seeds_needed(pd.concat([cpu, cuda]), margin=0.3, power=0.8)
        >>> needed[["to_detect", "to_exclude"]].iloc[0].tolist()
        [13.0, 13.0]

    References:
        Schuirmann 1987, *A comparison of the two one-sided tests procedure and the power approach for assessing the
        equivalence of average bioavailability* (Journal of Pharmacokinetics and Biopharmaceutics 15:657), for the test
        of equivalence.
    """
    check_alpha(alpha)
    if not (isinstance(power, (int, float, np.number)) and alpha < power < 1):
        raise UsageError(f"power {power!r}: expected a number between alpha ({alpha}) and 1, such as 0.8")
    paired = pair(frame, metric, factor, block, reference)
    yes_or_no = is_yes_or_no(paired.runs, metric)
    margin = usual_margin(margin, metric, yes_or_no)
    margins = margins_by_seeds(margin, finished(paired.runs, metric, factor, paired.reference))
    if np.isnan(margins).all():
        raise UsageError(
            f"margin {margin!r} needs a standard deviation between seeds, of 2 seeds under {paired.reference}"
        )
    rows = []
    for level, pairs in paired.by_level(factor).items():
        sd = sample_sd(pairs.difference.dropna().to_numpy(float))
        to_detect, to_exclude = seeds_of_t_tests(sd, margins, alpha, power, yes_or_no)
        rows.append((level, sd, margin, power, to_detect, to_exclude, max(to_detect, to_exclude)))
    return pd.DataFrame(rows, columns=[factor, "sd", "margin", "power", "to_detect", "to_exclude", "seeds"])


def seeds_of_t_tests(
    sd: float, margins: np.ndarray, alpha: float, power: float = POWER, yes_or_no: bool = False
) -> tuple[float, float]:
    """The seeds that detect a difference as large as the margin, and that exclude it, the first of `SEEDS` that do.

    `margins` are those of `SEEDS`. Of yes and no as many are needed at least as exclude it where none switches.
    """

    def fewest(enough: np.ndarray) -> float:
        return float(SEEDS[enough.argmax()]) if enough.any() else math.inf

    if math.isnan(sd):
        return math.nan, math.nan
    to_detect = fewest(smallest_shown(SEEDS, sd, alpha, power=power) < margins)
    least = fewest((1 - margins) ** SEEDS <= alpha) if yes_or_no else 2.0
    if sd == 0:
        return to_detect, max(fewest(margins > 0), least)
    noncentrality = np.minimum(margins / sd * np.sqrt(SEEDS), 30)  # beyond, the power is 1 and the series slow
    reached = 2 * scipy.stats.nct.sf(scipy.stats.t.isf(alpha, SEEDS - 1), SEEDS - 1, noncentrality) - 1
    return to_detect, max(fewest(reached >= power) + FOR_SKEWNESS, least)


def margins_by_seeds(margin: str | float, losses: np.ndarray) -> np.ndarray:
    """The `margin_size` that a verdict from as many seeds as each of `SEEDS` would use."""
    number, unit = parse_margin(margin)
    if unit != "sd":
        return np.full(len(SEEDS), margin_size(margin, losses))
    return number * (sample_sd(losses) or math.nan) * sd_limit_ratio(SEEDS, kurtosis(losses))


def fewest_pairs(alpha: float) -> int:
    """So many differences of one sign are the fewest that show anything at `alpha`: the sign flips' p is 2^(1 − n)."""
    return math.ceil(1 - math.log2(alpha))


def smallest_shown(n: ArrayLike, sd: ArrayLike, alpha: float, yes_or_no: bool = False, power: float = POWER) -> Any:
    """The smallest difference that n pairs show with a power, at `alpha`; infinite where they can show none.

    By the t test, for normal differences of the standard deviation `sd`; of yes and no, which have none, the share that
    must switch, all the same way.
    """
    n, sd, fewest = np.asarray(n, float), np.asarray(sd, float), fewest_pairs(alpha)
    if yes_or_no:
        shown = scipy.stats.beta.ppf(power, fewest, n - fewest + 1)
    else:
        used = np.maximum(n - FOR_SKEWNESS, 2)
        shown = scipy.special.nctdtrinc(used - 1, 1 - power, scipy.stats.t.isf(alpha / 2, used - 1)) / np.sqrt(used)
        # The fewest must all move the same way.
        shown = sd * np.where(n == fewest, np.maximum(shown, scipy.special.ndtri(power ** (1 / fewest))), shown)
    return np.where(n >= fewest, shown, math.inf)
