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
from gpulab.stats.tests import kurtosis, sample_sd, sd_limit_ratio, skewed_t

USUAL_MARGIN, USUAL_SHARE = "0.25sd", 0.1  # of numbers, and of yes and no
DIVERGED_APART = 0.1  # levels that may diverge on more of the seeds differently are not called equivalent
POWER, SIMULATIONS, FLIPPED = 0.8, 400, 200  # of `seeds_to_settle`: beyond 200 seeds a sum of flips is taken as normal
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

    The experiment is simulated to go on, and the verdict's tests are made of it. Further seeds are drawn by a Bayesian
    bootstrap of the pairs (Rubin 1981), so that an effect seen on few is not taken for the true one. `losses` is the
    metric under the reference, shape (seeds,).
    """
    n, observed = len(pairs), pairs.difference.to_numpy(float)
    if np.count_nonzero(~np.isnan(observed)) < 2:
        return math.nan
    margins = margins_by_seeds(margin, losses)
    shares = np.random.default_rng(0).dirichlet(np.ones(n), SIMULATIONS)
    # The bootstrap draws values whose variance is (n − 1) / (n + 1) of the sample's; those of yes and no stay.
    middle, stretch = np.nanmean(observed), 1.0 if yes_or_no else math.sqrt((n + 1) / (n - 1))
    differences = np.nan_to_num([*observed, *(middle + stretch * (observed - middle))])
    differences /= (scale := np.abs(differences).max() or 1.0)
    finished = np.tile(~np.isnan(observed), 2)
    lost = np.tile(pairs.other_diverged.to_numpy(int) - pairs.reference_diverged.to_numpy(int), 2)
    test_alpha = alpha / (2 if lost.any() else 1)  # Holm's correction for the second test

    def settled(index: int) -> float:
        """The share that is settled at `SEEDS[index]` seeds."""
        generator, seeds = np.random.default_rng(index), SEEDS[index]
        counts = np.hstack([np.ones_like(shares, int), generator.multinomial(seeds - n, shares)])
        worse, better = counts @ (lost > 0), counts @ (lost < 0)
        apart = worse + better
        may_diverge_apart = (apart > 0) & ~(scipy.stats.beta.ppf(0.95, apart + 1, seeds - apart) <= DIVERGED_APART)
        margin = margins[index] / scale
        p_different, p_equivalent = _p_values(counts, differences, counts @ finished, margin, generator, yes_or_no)
        different = (apart > 0) & (2 * scipy.stats.binom.cdf(np.minimum(worse, better), apart, 0.5) <= test_alpha)
        different |= p_different <= test_alpha
        return float((different | ((p_equivalent <= alpha) & ~may_diverge_apart)).mean())

    first_above_n = int(np.searchsorted(SEEDS, n, side="right"))
    index = bisect.bisect_left(range(len(SEEDS)), POWER, lo=first_above_n, key=settled)
    return float(SEEDS[index]) if index < len(SEEDS) else math.inf


def _p_values(
    counts: np.ndarray,
    differences: np.ndarray,
    n: np.ndarray,
    margin: float,
    generator: np.random.Generator,
    yes_or_no: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """`mean_p`, roughly, and `equivalence_p` (or `discordance_p`) of many samples at once.

    A sample holds each difference as often as its row of `counts` says, and `n` of these are known.
    """
    seeds, total = counts[0].sum(), np.abs(counts @ differences)
    if seeds <= FLIPPED:
        samples = np.repeat(np.tile(differences.astype(np.float32), len(counts)), counts.ravel()).reshape(-1, seeds)
        signs = 2 * generator.integers(0, 2, (seeds, 999), np.int8) - np.float32(1)
        p = (1 + (np.abs(samples @ signs) >= total[:, None] - 1e-4).sum(axis=1)) / 1000
    else:
        p = 2 * scipy.stats.norm.sf(total / np.maximum(np.sqrt(counts @ differences**2), 1e-300))
    moved = counts @ (differences != 0)
    p = np.maximum(p, 2.0 ** (1 - moved))
    if yes_or_no:
        return p, scipy.stats.binom.cdf(moved, n, min(margin, 1.0))
    with np.errstate(all="ignore"):
        mean, square, cube = (counts @ differences**power / n for power in (1, 2, 3))
        variance = np.maximum(square - mean**2, 0.0)
        skewness = (cube - 3 * mean * square + 2 * mean**3) / variance**1.5
        sd = np.sqrt(variance * n / (n - 1))
        corrected = np.fmax(p, 2 * scipy.stats.t.sf(np.abs(skewed_t(mean / sd, skewness, n)), n - 1))
        rooms = [skewed_t((margin + sign * mean) / sd, sign * skewness, n) for sign in (1, -1)]
        p_equivalent = scipy.stats.t.sf(np.minimum(*rooms), n - 1)
    return np.where(mean * skewness < 0, corrected, p), np.where(moved == 0, 0.0, p_equivalent)
