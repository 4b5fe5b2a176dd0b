"""Tests and intervals on paired differences: what a verdict is made of. A comment says why one is not scipy's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

EXACT = 16  # up to so many differences other than zero, all 2^n signs are tried
FLIPS = 9999  # beyond, so many are drawn
RESAMPLES = 9999  # of the bootstrap
SD_CONFIDENCE = 0.975  # at 0.95 a rare second hump misleads


def sign_flip_p(differences: ArrayLike) -> float:
    """Two-sided p of the mean of paired differences, shape (n,), when each sign could be the other (Fisher 1935).

    All 2^n signs are tried for up to 16 differences other than zero, else 9,999 are drawn and p = (1 + as extreme)
    / (1 + drawn) (Phipson and Smyth 2010). Differences of one size make it a sign test, exact at any n.

    Examples:
        >>> sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # 2 of 64
        0.03125
    """
    values = np.sort(np.asarray(differences, float))
    values = values[values != 0]
    n = len(values)
    if n == 0 or np.ptp(np.abs(values)) <= 1e-12 * np.abs(values).max():
        return sign_test_p(int((values > 0).sum()), n)
    total = values.sum()
    # Sums that are equal but for rounding count as equal; scipy's permutation_test takes 50 to 200 times as long.
    observed = abs(total) - 1e-12 * np.abs(values).sum()
    extreme = sum(int((np.abs(2 * (positive @ values) - total) >= observed).sum()) for positive in sign_flips(n))
    return extreme / 2 ** (n - 1) if n <= EXACT else (1 + extreme) / (1 + FLIPS)


def sign_flips(n: int) -> Iterator[np.ndarray]:
    """Which of n differences are taken as positive, in parts of shape (flips, n), 0 or 1."""
    if n <= EXACT:  # the last sign is fixed: the other half mirrors this one
        yield np.arange(2 ** (n - 1))[:, None] >> np.arange(n) & 1
        return
    generator = np.random.default_rng(0)
    for flips in parts(FLIPS, n):
        yield np.unpackbits(generator.integers(0, 256, (flips, -(-n // 8)), np.uint8), axis=1)[:, :n]


def parts(rows: int, columns: int) -> list[int]:
    """Rows in parts of about 2 MB of float64, which stay in a processor's cache."""
    part = max(1, 250_000 // columns)
    return [min(part, rows - start) for start in range(0, rows, part)]


def sign_test_p(positive: int, n: int) -> float:
    """Two-sided p of the sign test, McNemar's: `positive` of n differences other than zero are above it."""
    from scipy.stats import binomtest

    return float(binomtest(positive, n).pvalue) if n else 1.0


def equivalence_p(differences: ArrayLike, margin: float) -> float:
    """The p of two one-sided t tests that the mean of differences, shape (n,), is within ±margin (Schuirmann 1987).

    It is 0 or 1 where the differences are all the same, 0 where all are zero.

    Examples:
        >>> round(equivalence_p([-0.1, 0.0, 0.1, 0.05, -0.05], margin=0.2), 4)
        0.0024
    """
    from scipy.stats import t

    values = np.sort(np.asarray(differences, float))
    n = len(values)
    if not values.any():
        return 0.0 if n else math.nan
    # scipy's ttest_1samp warns of differences that are the same but for rounding; statsmodels is slow to import.
    room = margin - abs(values.mean())
    error = sample_sd(values) / math.sqrt(n)
    return float(room <= 0) if error == 0 else float(t.sf(room / error, n - 1))


def discordance_p(differences: ArrayLike, margin: float) -> float:
    """The p that fewer than a share `margin` of all pairs are discordant, for differences of yes and no, shape (n,).

    That share bounds the difference of the two rates, so this is a test of equivalence, exact (Clopper and Pearson
    1934). A t test would call ten seeds of which none switched equivalent, whatever the margin.

    Examples:
        >>> round(discordance_p([0.0] * 29, margin=0.1), 3)
        0.047
    """
    from scipy.stats import binomtest

    discordant, n = np.count_nonzero(differences), np.size(differences)
    return float(binomtest(discordant, n, min(margin, 1.0), alternative="less").pvalue) if n else math.nan


def bca_interval(differences: ArrayLike, alpha: float = 0.05) -> tuple[float, float]:
    """The BCa bootstrap interval of the mean of differences, shape (n,), at 1 − alpha (Efron 1987).

    A single point where all are the same; NaN for fewer than two.

    Examples:
        >>> bca_interval([1.0, 1.0, 1.0])
        (1.0, 1.0)
    """
    from scipy.stats import norm

    values = np.sort(np.asarray(differences, float))
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    if np.ptp(values) <= 1e-12 * np.abs(values).max():  # the same but for rounding
        return float(values[0]), float(values[-1])
    # scipy's bootstrap draws other resamples, so that the digits of recorded intervals would change.
    mean = values.mean()
    generator = np.random.default_rng(0)
    draws = (generator.integers(0, n, (resamples, n), np.int32) for resamples in parts(RESAMPLES, n))
    means = np.concatenate([values[places].mean(axis=1) for places in draws])
    below = (means < mean).mean() / 2 + (means <= mean).mean() / 2
    if not 0 < below < 1:
        return math.nan, math.nan
    bias = norm.ppf(below)
    jackknife = (values.sum() - values) / (n - 1)
    away = jackknife.mean() - jackknife
    acceleration = (away**3).sum() / (6 * (away**2).sum() ** 1.5)
    tails = bias + norm.ppf([alpha / 2, 1 - alpha / 2])
    low, high = np.quantile(means, norm.cdf(bias + tails / (1 - acceleration * tails)))
    return float(low), float(high)


def sd_lower_limit(values: ArrayLike) -> float:
    """The lower 97.5 % limit of the standard deviation behind a sample, shape (n,); NaN for fewer than two.

    s · exp(−t · √((κ − 1) / (n − 1)) / 2), with t the quantile of Student's t and κ the sample's kurtosis, 3 or
    more: the delta method on ln s (as in Bonett 2006). Unlike the textbook's (χ²), it was found to hold for heavy
    tails and two humps as well (with at most 6 % errors).

    Examples:
        >>> 0.5 < sd_lower_limit([-1.0, 1.0] * 50) < 1.0
        True
    """
    values = np.sort(np.asarray(values, float))
    sd = sample_sd(values)
    return float(sd * sd_limit_ratio(len(values), kurtosis(values))) if sd > 0 else sd


def sd_limit_ratio(n: ArrayLike, kurtosis: ArrayLike) -> Any:
    """`sd_lower_limit` from n values, as a multiple of the sample's standard deviation."""
    from scipy.stats import t

    freedom = np.asarray(n) - 1
    return np.exp(-t.ppf(SD_CONFIDENCE, freedom) * np.sqrt((np.asarray(kurtosis) - 1) / freedom) / 2)


def kurtosis(values: np.ndarray) -> float:
    """The kurtosis of a sample, shape (n,), and 3, a normal sample's, where it is smaller."""
    from scipy import stats

    return max(3.0, 3 + float(stats.kurtosis(values, bias=False))) if len(values) > 3 and np.ptp(values) else 3.0


def sample_sd(values: np.ndarray) -> float:
    """The standard deviation of a sample, shape (n,); NaN for fewer than two."""
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def clopper_pearson_upper(count: int, n: int) -> float:
    """The upper 95 % limit of the share behind `count` cases among n (Clopper and Pearson 1934, one-sided).

    Examples:
        >>> round(clopper_pearson_upper(0, 10), 3)  # 1 − 0.05 ** (1 / 10)
        0.259
    """
    from scipy.stats import beta

    # scipy's binomtest(count, n).proportion_ci searches for the same number, in ten times the time.
    return float(beta.ppf(0.95, count + 1, n - count)) if count < n else 1.0


def holm(p: Sequence[float]) -> np.ndarray:
    """Holm's corrected p (1979); NaN (no test) stays NaN and counts for nothing."""
    # statsmodels' multipletests gives the same numbers, but collects garbage for 0.1 s before it does.
    corrected = np.array(p, float)
    tests = np.count_nonzero(~np.isnan(corrected))
    order = np.argsort(corrected)[:tests]  # NaN comes last
    corrected[order] = np.minimum(np.maximum.accumulate(corrected[order] * np.arange(tests, 0, -1)), 1.0)
    return corrected
