"""How many seeds a comparison needs, and the margin that it is made against."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy  # whose modules are imported where they are first used
from numpy.typing import ArrayLike

from gpulab.errors import UsageError
from gpulab.stats.pairs import finished, is_yes_or_no, pair
from gpulab.stats.tests import kurtosis, sample_sd, sd_limit_ratio

USUAL_MARGIN, USUAL_SHARE = "0.25sd", 0.1  # of numbers, and of yes and no
DIVERGED_APART = 0.1  # levels that may diverge on more of the seeds differently are not called equivalent
POWER = 0.8  # of `smallest_shown` and `seeds_to_settle`
FOR_SKEWNESS = 1  # what the correction for skewness costs, in seeds, where differences are normal (by simulation)
MOST_SEEDS = 100_000
SEEDS = np.unique(np.round(np.concatenate([np.arange(2, 201), np.geomspace(200, MOST_SEEDS, 800)]))).astype(int)


def check_alpha(alpha: float) -> None:
    """Raise `UsageError` for a level of significance that is none."""
    if not (isinstance(alpha, (int, float, np.number)) and 0 < alpha < 0.5):
        raise UsageError(f"alpha {alpha!r}: expected a number between 0 and 0.5, such as 0.05")


def parse_margin(margin: str | float) -> tuple[float, bool]:
    """The number in a margin such as 0.01 or "0.25sd", and whether it counts standard deviations."""
    in_sd = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*sd\s*", margin) if isinstance(margin, str) else None
    is_number = isinstance(margin, (int, float, np.number)) and not isinstance(margin, bool)
    number = float(in_sd[1]) if in_sd else float(margin) if is_number else math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"margin {margin!r}: expected a number above 0, or such as '0.25sd'")
    return number, in_sd is not None


def usual_margin(margin: str | float | None, metric: str, yes_or_no: bool) -> str | float:
    """The margin, checked, or the usual one; for yes and no it is a share of the seeds."""
    if margin is None:
        return USUAL_SHARE if yes_or_no else USUAL_MARGIN
    number, in_sd = parse_margin(margin)
    if yes_or_no and (in_sd or number >= 1):
        raise UsageError(
            f"margin {margin!r}: {metric!r} holds only yes and no (1 and 0), so its margin is a share of the seeds "
            f"between 0 and 1, such as {USUAL_SHARE}; a spread between seeds says nothing there"
        )
    return margin


def seeds_needed(
    frame: pd.DataFrame,
    metric: str = "final_loss",
    factor: str = "setting",
    block: str = "seed",
    margin: str | float | None = None,
    alpha: float = 0.05,
    reference: Any = None,
    power: float | Sequence[float] = (0.8, 0.9),
) -> pd.DataFrame:
    """Plan a comparison: estimate how many seeds it needs, from runs of a few seeds, for each level of a factor.

    The estimate is for one paired comparison with normal differences, by t tests. `to_detect` is never below the fewest
    seeds with which the sign-flip test of `verdict` can show anything. Skewed differences, some seeds that move far
    more than the others, and several levels compared at once (Holm's correction) need more seeds than this says.

    Args:
        frame, metric, factor, block, margin, alpha, reference: As for `verdict`.
        power: The probability with which the comparison is to succeed, between alpha and 1. One or several.

    Returns:
        A data frame with a row for each level and power. Its columns are the factor; `sd`, the standard deviation of
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
    powers = [float(value) for value in np.atleast_1d(power)]
    if not all(alpha < value < 1 for value in powers):
        raise UsageError(f"power {power!r}: expected numbers between alpha ({alpha}) and 1, such as 0.8")
    reference, runs, pairs, *_ = pair(frame, metric, factor, block, reference)
    margin = usual_margin(margin, metric, is_yes_or_no(runs, metric))
    margins = margins_by_seeds(margin, finished(runs, metric, factor, reference))
    if np.isnan(margins).all():
        raise UsageError(f"margin {margin!r} needs a standard deviation between seeds, of 2 seeds under {reference}")
    rows = []
    for level in dict.fromkeys(level for level in runs[factor] if level != reference):
        sd = sample_sd(pairs.difference[pairs[factor] == level].dropna().to_numpy(float))
        for value in powers:
            to_detect, to_exclude = seeds_of_t_tests(sd, margins, alpha, value)
            rows.append((level, sd, margin, value, to_detect, to_exclude, max(to_detect, to_exclude)))
    return pd.DataFrame(rows, columns=[factor, "sd", "margin", "power", "to_detect", "to_exclude", "seeds"])


def seeds_of_t_tests(sd: float, margins: np.ndarray, alpha: float, power: float) -> tuple[float, float]:
    """The seeds that detect and that exclude a difference, each the first of `SEEDS` that do; `margins` are theirs."""

    def fewest(enough: np.ndarray) -> float:
        return float(SEEDS[enough.argmax()]) if enough.any() else math.inf

    if math.isnan(sd):
        return math.nan, math.nan
    to_detect = fewest(smallest_shown(SEEDS, sd, alpha, power) < margins)
    if sd == 0:
        return to_detect, fewest(margins > 0)
    noncentrality = np.minimum(margins / sd * np.sqrt(SEEDS), 30)  # beyond, the power is 1 and the series slow
    reached = 2 * scipy.stats.nct.sf(scipy.stats.t.isf(alpha, SEEDS - 1), SEEDS - 1, noncentrality) - 1
    return to_detect, fewest(reached >= power) + FOR_SKEWNESS


def margins_by_seeds(margin: str | float, losses: np.ndarray) -> np.ndarray:
    """The margin, in the metric's units, that a verdict from as many seeds as each of `SEEDS` would use.

    NaN for one in standard deviations between seeds where `losses`, those under the reference, have none.
    """
    number, in_sd = parse_margin(margin)
    if not in_sd:
        return np.full(len(SEEDS), number)
    return number * (sample_sd(losses) or math.nan) * sd_limit_ratio(SEEDS, kurtosis(losses))


def fewest_pairs(alpha: float) -> int:
    """So many differences of one sign are the fewest that show anything at `alpha`: the sign flips' p is 2^(1 − n)."""
    return math.ceil(1 - math.log2(alpha))


def smallest_shown(n: ArrayLike, sd: ArrayLike, alpha: float, power: float = POWER, yes_or_no: bool = False) -> Any:
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


def seeds_to_settle(
    pairs: pd.DataFrame, losses: np.ndarray, margin: str | float, alpha: float, yes_or_no: bool
) -> float:
    """How many seeds in all settle a level with a power of 0.8, if further ones are like those of `pairs`.

    That is the predictive power (Spiegelhalter, Freedman, Blackburn 1986, *Monitoring clinical trials: conditional or
    predictive power?*, Controlled Clinical Trials 7:8): the seeds seen stay, and the mean of further ones is known only
    as well as these tell, so that an effect seen on few is not taken for the true one. statsmodels has the power for a
    known effect only.

    The verdict's own tests have no such formula. Sign flips and McNemar's test are replaced by t tests, as if
    differences were normal, and `FOR_SKEWNESS` is added; how many seeds switch, or diverge under one of the two alone,
    follows a beta-binomial distribution. `losses` is the metric under the reference, shape (seeds,).
    """
    differences = pairs.difference.dropna().to_numpy(float)
    if len(differences) < 2:
        return math.nan
    margins = margins_by_seeds(margin, losses)
    lost = pairs.other_diverged.to_numpy(float) - pairs.reference_diverged.to_numpy(float)
    apart = int(np.count_nonzero(lost))
    test_alpha = alpha / (2 if apart else 1)  # Holm's correction for the second test

    def settled(index: int) -> float:
        """The probability that `SEEDS[index]` seeds settle it."""
        seeds = int(SEEDS[index])
        n = round(seeds * len(differences) / len(pairs))  # as many finish as did
        different = _predict_difference(differences, n, test_alpha)
        if yes_or_no:
            switched = int(np.count_nonzero(differences))
            equivalent = _predict_few(switched, len(differences), n, min(margins[index], 1.0), alpha)
            both = different * equivalent
        else:
            room = margins[index] - float(scipy.stats.t.isf(alpha, n - 1)) * sample_sd(differences) / math.sqrt(n)
            equivalent = _predict_within(differences, n, room) if differences.any() else 1.0
            both = max(different + equivalent - 1, 0.0)  # one is of means far from zero, the other of those close to it
        if apart:
            allowed = _predict_few(apart, len(pairs), seeds, DIVERGED_APART, 0.05)
            equivalent, both = equivalent * allowed, both * allowed
        either = different + equivalent - both
        return either + (1 - either) * (_predict_difference(lost, seeds, test_alpha) if apart else 0.0)

    first_above_n = int(np.searchsorted(SEEDS, len(pairs), side="right"))
    index = bisect.bisect_left(range(len(SEEDS)), POWER, lo=first_above_n, key=settled)
    return float(SEEDS[index]) + (0 if yes_or_no else FOR_SKEWNESS) if index < len(SEEDS) else math.inf


def _predict_within(seen: np.ndarray, n: int, limit: float) -> float:
    """The probability that the mean of n normal values in all, of which some were seen, is within ± a limit."""
    spread = max(sample_sd(seen) * math.sqrt((n - len(seen)) / (len(seen) * n)), 1e-300)
    ends = np.array([-limit, limit]) - seen.mean()
    with np.errstate(over="ignore"):  # where all are the same
        low, high = scipy.stats.t.cdf(ends / spread, len(seen) - 1)
    return max(float(high - low), 0.0)


def _predict_difference(seen: np.ndarray, n: int, alpha: float) -> float:
    """The probability that a t test of n values in all, of which some were seen, shows that their mean is not zero."""
    if n < fewest_pairs(alpha) or not seen.any():
        return 0.0
    return 1 - _predict_within(seen, n, float(scipy.stats.t.isf(alpha / 2, n - 1)) * sample_sd(seen) / math.sqrt(n))


def _predict_few(count: int, seen: int, n: int, share: float, alpha: float) -> float:
    """The probability that the cases among n, of which `count` were among the `seen`, are shown to be below a share."""
    most = float(scipy.stats.binom.ppf(alpha, n, share)) - 1  # so many cases, and no more, show it
    if count in (0, seen):  # then so it goes on
        return float(count == 0 and most >= 0)
    return float(scipy.stats.betabinom.cdf(most - count, n - seen, count, seen - count))
