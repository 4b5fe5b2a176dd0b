"""Tests and intervals on paired differences: what a verdict is made of, from arrays alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

EXACT = 16  # up to so many differences other than zero, all 2^n signs are tried
FLIPS = 9999  # beyond, so many are drawn
RESAMPLES = 9999  # of the bootstrap
SD_CONFIDENCE = 0.975  # of the limit at which a margin in sd is taken; at 0.95 a rare second hump misleads


def sign_flip_p(differences: ArrayLike) -> float:
    """Two-sided p of the mean of paired differences, shape (n,), when each sign could be the other.

    All 2^n signs are tried for up to 16 differences other than zero, else 9,999 are drawn with a fixed
    seed and p = (1 + as extreme) / (1 + drawn) (Phipson and Smyth 2010). Differences of one size make
    it a sign test, exact at any n: McNemar's where the metric is 0 or 1.

    >>> sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # 2 of 64
    0.03125
    """
    from scipy.stats import binomtest

    sizes = np.sort(np.asarray(differences, float))
    sizes = sizes[sizes != 0]
    n = len(sizes)
    if n == 0:
        return 1.0
    if np.ptp(np.abs(sizes)) <= 1e-12 * np.abs(sizes).max():
        return float(binomtest(int((sizes > 0).sum()), n).pvalue)
    # Sums that are equal in the reals may differ in their last bits.
    observed = abs(sizes.sum()) - 1e-12 * np.abs(sizes).sum()
    if n <= EXACT:
        codes = np.arange(2 ** (n - 1))  # the first sign is fixed: the other half mirrors this one
        signs = 1.0 - 2.0 * (codes[:, None] >> np.arange(n) & 1)
        return float(np.mean(np.abs(signs @ sizes) >= observed))
    generator = np.random.default_rng(0)
    extreme = 0
    for count in _chunks(FLIPS, n):
        # As ±1 in one byte, then twice the sum over the pluses less the sum of all.
        pluses = np.unpackbits(generator.integers(0, 256, (count, -(-n // 8)), np.uint8), axis=1)[:, :n]
        extreme += int((np.abs(2 * (pluses @ sizes) - sizes.sum()) >= observed).sum())
    return (1 + extreme) / (1 + FLIPS)


def equivalence_p(differences: ArrayLike, margin: float) -> float:
    """The p-value of two one-sided t tests that the mean of differences, shape (n,), is within ±margin.

    The larger of the two (Schuirmann 1987). It is 0 where every difference is exactly zero; differences
    that are all the same have no spread, and p is then 0 or 1.

    >>> round(equivalence_p([-0.1, 0.0, 0.1, 0.05, -0.05], margin=0.2), 4)
    0.0024
    """
    from scipy.special import stdtr

    values = np.sort(np.asarray(differences, float))
    if len(values) == 0:
        return math.nan
    if not values.any():
        return 0.0
    room = margin - abs(values.mean())
    error = deviation(values) / math.sqrt(len(values))
    if not error > 0:
        return math.nan if math.isnan(error) else float(room <= 0)
    return float(stdtr(len(values) - 1, -room / error))


def switches_p(differences: ArrayLike, margin: float) -> float:
    """The p-value that fewer than a share `margin` of all seeds switch, for a metric of yes and no, (n,).

    The share of seeds that switch bounds the difference of the two rates, so this is a test of
    equivalence: exact and binomial (Clopper and Pearson 1934). A t test would call ten seeds of which
    none switched equivalent, whatever the margin.

    >>> round(switches_p([0.0] * 29, margin=0.1), 3)
    0.047
    """
    from scipy.stats import binom

    values = np.asarray(differences, float)
    return float(binom.cdf(np.count_nonzero(values), len(values), min(margin, 1.0))) if len(values) else math.nan


def bca_interval(differences: ArrayLike, alpha: float = 0.05) -> tuple[float, float]:
    """The BCa bootstrap interval of the mean of differences, shape (n,), at 1 − alpha (Efron 1987).

    A single point where all are the same; NaN for fewer than two.

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
    mean = values.mean()
    generator = np.random.default_rng(0)
    means = np.concatenate(
        [values[generator.integers(0, n, (count, n), np.int32)].mean(axis=1) for count in _chunks(RESAMPLES, n)]
    )
    below = (means < mean).mean() / 2 + (means <= mean).mean() / 2
    if not 0 < below < 1:
        return math.nan, math.nan
    bias = norm.ppf(below)
    left_out = (values.sum() - values) / (n - 1)
    away = left_out.mean() - left_out
    skew = (away**3).sum() / (6 * (away**2).sum() ** 1.5)
    tail = norm.ppf([alpha / 2, 1 - alpha / 2])
    share = norm.cdf(bias + (bias + tail) / (1 - skew * (bias + tail)))
    low, high = np.quantile(means, share)
    return float(low), float(high)


def sd_at_least(values: ArrayLike, confidence: float = SD_CONFIDENCE) -> float:
    """A lower confidence limit of the standard deviation behind a sample, shape (n,).

    s · exp(−t · √((κ − 1) / (n − 1)) / 2), with t the quantile of Student's t and κ the sample's
    kurtosis, or 3 where that is smaller: the delta method on ln s, never more certain than for normal
    values. The textbook's limit (χ²) holds for normal values only; this one was found to hold for
    heavy tails and two humps as well (at 97.5 %, with at most 6 % errors). NaN for fewer than two values.

    >>> 0.5 < sd_at_least([-1.0, 1.0] * 50) < 1.0
    True
    """
    values = np.sort(np.asarray(values, float))
    n = len(values)
    spread = deviation(values)
    if not spread > 0:
        return spread
    return float(spread * shrink(n, heaviness(values), confidence))


def shrink(n: ArrayLike, kurtosis: float, confidence: float = SD_CONFIDENCE) -> Any:
    """What `sd_at_least` multiplies the standard deviation of n values with."""
    from scipy.special import stdtrit

    n = np.asarray(n)
    return np.exp(-stdtrit(n - 1, confidence) * np.sqrt((kurtosis - 1) / (n - 1)) / 2)


def heaviness(values: np.ndarray) -> float:
    """The kurtosis of a sample, shape (n,), and 3, a normal sample's, where it is smaller."""
    from scipy.stats import kurtosis

    return max(3.0, 3 + float(kurtosis(values, bias=False))) if len(values) > 3 and np.ptp(values) else 3.0


def deviation(values: np.ndarray) -> float:
    """The standard deviation of a sample, shape (n,); NaN for fewer than two."""
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def _chunks(rows: int, columns: int) -> list[int]:
    """Rows in parts of about 2 MB of float64, which stay in a processor's cache."""
    part = max(1, 250_000 // columns)
    return [min(part, rows - start) for start in range(0, rows, part)]


def holm(p: Sequence[float]) -> np.ndarray:
    """Holm's corrected p; NaN (no test) stays NaN and counts for nothing."""
    from statsmodels.stats.multitest import multipletests

    corrected = np.array(p, float)
    tests = ~np.isnan(corrected)
    if tests.sum() > 1:  # one needs no correction, and statsmodels collects garbage for 0.2 s before it corrects
        corrected[tests] = multipletests(corrected[tests], method="holm")[1]
    return corrected


def share_at_most(seen: int, of: int, confidence: float = 0.95) -> float:
    """The largest share that is compatible with `seen` cases among `of` (Clopper and Pearson, one-sided).

    >>> round(share_at_most(0, 10), 3)  # 1 − 0.05 ** (1 / 10)
    0.259
    """
    from scipy.special import betaincinv

    if of == 0 or seen == of:
        return 1.0
    return float(betaincinv(seen + 1, of - seen, confidence))


def sign_test_p(more: int, pairs: int) -> float:
    """Two-sided p of the sign test, McNemar's: `more` of `pairs` went one way."""
    from scipy.stats import binomtest

    return float(binomtest(more, pairs).pvalue) if pairs else 1.0
