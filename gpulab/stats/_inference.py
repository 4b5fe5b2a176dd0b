"""Tests and intervals on paired differences.

Where scipy has a function and it is not used, a comment says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import overload

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

MAX_EXACT_DIFFERENCES = (
    16  # the most differences other than zero for which all 2^n combinations of signs are tried
)
N_DRAWN_FLIPS = 9999  # combinations of signs that are drawn for more differences
MIN_DRAWN_P = 1 / (1 + N_DRAWN_FLIPS)  # the smallest p that these can give
SD_CONFIDENCE = (
    0.975  # of the lower limit of a standard deviation; at 0.95 a rare second hump misleads
)
MIN_GAP = 3  # the least width of a gap between losses, in standard deviations of the others

Floats = NDArray[np.float64]


def mean_p(differences: ArrayLike) -> float:
    """Two-sided p of a zero mean of differences (n,): the larger of two p values if skewed.

    `sign_flip_p` is exact where differences are symmetric, and studentising it changes nothing: all
    flips have the same sum of squares. It errs, as Student's t does, where the sample's tail is on
    the side of zero; there `skewed_t` must agree. No test of a mean holds its level for every
    distribution (Bahadur and Savage 1956): rare jumps that make up for a shift of all others
    mislead whenever the sample has none.

    Examples:
        >>> mean_p([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        0.03125
        >>> values = [-4.0, 2.0, 2.5, 3.0, 2.0, 3.0, 2.5, 3.0, 2.0, 2.5]
        >>> round(mean_p(values), 3), round(sign_flip_p(values), 3)
        (0.104, 0.027)
        >>> # 2 of 128: an outlier does not hide what all say
        >>> mean_p([2.9, 2.8, 2.9, 2.7, 2.8, 2.8, 1.6])
        0.015625
    """
    flip_p = sign_flip_p(differences)
    values = np.sort(np.asarray(differences, float))
    if not sample_sd(values) > 0:
        return flip_p
    mean, skewness, n = moments(values)
    if mean * skewness >= 0:
        return flip_p
    return max(flip_p, float(2 * scipy.stats.t.sf(abs(skewed_t(mean, skewness, n)), n - 1)))


def mean_interval(differences: ArrayLike, alpha: float = 0.05) -> tuple[float, float]:
    """The interval of the mean at 1 − alpha, all shifts that `mean_p` allows; NaN if unbounded.

    Examples:
        >>> low, high = mean_interval([-4.0, 2.0, 2.5, 3.0, 2.0, 3.0, 2.5, 3.0, 2.0, 2.5])
        >>> round(low, 2), round(high, 2)  # by sign flips alone 0.33 and 2.75
        (-0.62, 2.75)
    """
    low, high = sign_flip_interval(differences, alpha)
    values = np.sort(np.asarray(differences, float))
    if math.isnan(low) or not sample_sd(values) > 0:
        return low, high
    _, skewness, _ = moments(values)
    t_low, t_high = skewed_t_interval(values, alpha)
    if skewness < 0:
        low = min(low, t_low)
    if skewness > 0:
        high = max(high, t_high)
    return low, high


def plateau_outliers(losses: ArrayLike) -> NDArray[np.bool_]:
    """Which losses (n,) lie beyond a gap and make up most of the spread, such as plateaus.

    Fewer than half can be, of ten losses or more. The gap is at least three standard deviations of
    the others, and these have less than half the standard deviation of all. Of ten normal losses
    one is in 4 % of samples, of twenty in none (by simulation).

    Examples:
        >>> plateau_outliers(
        ...     [0.05, 0.14, 0.04, 0.06, 0.05, 0.04, 0.05, 0.05, 0.06, 0.04]
        ... ).nonzero()[0].tolist()
        [1]
        >>> plateau_outliers([0.04, 0.05, 0.06] * 2 + [0.14] * 4).nonzero()[0].tolist()
        [6, 7, 8, 9]
        >>> bool(plateau_outliers([0.04] * 5 + [0.14] * 5).any())  # neither half is an outlier
        False
    """
    values = np.asarray(losses, float)
    ordered = np.sort(values)
    if len(values) < 10:
        return np.zeros(len(values), bool)
    edge = int(np.diff(ordered).argmax()) + 1
    is_outlier = values >= ordered[edge] if edge > len(values) / 2 else values < ordered[edge]
    rest_sd = sample_sd(values[~is_outlier])
    is_separated = np.diff(ordered).max() >= MIN_GAP * rest_sd and rest_sd < sample_sd(values) / 2
    return is_outlier & (is_separated and is_outlier.sum() < len(values) / 2)


def moments(values: ArrayLike) -> tuple[float, float, int]:
    """Mean over standard deviation, skewness and size of a sample (n,) with a spread."""
    values = np.asarray(values, float)
    n = len(values)
    sd = sample_sd(values)
    skewness = (((values - values.mean()) / sd) ** 3).mean() * (n / (n - 1)) ** 1.5
    return float(values.mean() / sd), float(skewness), n


@overload
def skewed_t(mean: float, skewness: float, n: int) -> float: ...
@overload
def skewed_t(mean: Floats, skewness: Floats, n: int) -> Floats: ...
def skewed_t(mean: float | Floats, skewness: float | Floats, n: int) -> float | Floats:
    """Student's t of a mean, in standard deviations, reduced where skewness inflates it.

    That is where the sample's tail is on the side of zero. There the first term of the Edgeworth
    expansion of t, which is skewness · (2z² + 1) / (6√n), is taken away (Johnson 1978; Hall 1992,
    The Bootstrap and Edgeworth Expansion, ch. 2); elsewhere it is Student's t. Mean and skewness
    may be those of several samples of n, an array each.
    """
    student = np.sqrt(n) * mean
    correction = _skew_correction(mean, skewness, n) / 3
    excess = np.maximum(np.abs(student) - correction / 2, 0)
    return np.sign(student) * 2 * excess / (1 + np.sqrt(1 + 4 * correction * excess))


def _skew_correction(sign: float | Floats, skewness: float | Floats, n: int) -> float | Floats:
    """The skewness over √n if the tail points towards zero, else 0; `sign` is the mean's sign."""
    return np.maximum(-np.sign(sign) * skewness, 0) / np.sqrt(n)


def skewed_t_interval(
    differences: ArrayLike, alpha: float, corrected: bool = True
) -> tuple[float, float]:
    """The interval of the mean of differences (n,) at 1 − alpha: shifts that `skewed_t` allows.

    It holds Student's, which is the one not `corrected`, and reaches further on the side of the
    sample's tail. At 1 − 2 alpha it lies within a margin exactly where `equivalence_p` is at most
    alpha.
    """
    values = np.sort(np.asarray(differences, float))
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    sd = sample_sd(values)
    skewness = moments(values)[1] if corrected and sd > 0 else 0.0
    z = float(scipy.stats.t.isf(alpha / 2, n - 1))
    standard_error = sd / math.sqrt(n)
    lower_z = z + _skew_correction(1, skewness, n) * (2 * z**2 + 1) / 6
    upper_z = z + _skew_correction(-1, skewness, n) * (2 * z**2 + 1) / 6
    return float(values.mean() - standard_error * lower_z), float(
        values.mean() + standard_error * upper_z
    )


def sign_flip_p(differences: ArrayLike) -> float:
    """Two-sided sign-flip p of the mean of paired differences, shape (n,) (Fisher 1935).

    This supposes that without an effect differences are symmetric about zero. All 2^n signs are
    tried for up to 16 differences other than zero, else 9,999 are drawn and p = (1 + as extreme) /
    (1 + drawn) (Phipson and Smyth 2010). Differences of one size make it a sign test, exact at any
    n.

    Examples:
        >>> sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # 2 of 64
        0.03125
        >>> # 0.1 + 0.2 is 0.3
        >>> [sign_flip_p([0.1 * unit, 0.2 * unit, 0.3 * unit, -0.3 * unit]) for unit in (1.0, 1e15)]
        [0.75, 0.75]
        >>> sign_flip_p([3.0, 2.0, -1.0])  # |sum| is 4 or more for ±(3, 2, −1) and ±(3, 2, 1)
        0.5
        >>> # A difference of nothing has no sign
        >>> (
        ...     sign_flip_p([0.0, 1.0, 2.0, 4.0, 0.0]),
        ...     sign_flip_p([1.0, 2.0, -4.0]),
        ... )
        (0.25, 1.0)
        >>> sign_flip_p([0.0] * 5), sign_flip_p([0.1, 0.2, -0.3])  # the sum is 5.6e-17, not 0
        (1.0, 1.0)
        >>> round(sign_flip_p([1] * 15 + [-1] * 5 + [0] * 100), 4)  # of one size: McNemar's test
        0.0414
        >>> sign_flip_p(np.arange(1.0, 61))  # (1 + 0) / (1 + 9999): what is drawn never gives zero
        0.0001
    """
    values = np.sort(np.asarray(differences, float))
    values = values[values != 0]
    n = len(values)
    if n == 0 or np.ptp(np.abs(values)) <= 1e-12 * np.abs(values).max():
        return sign_test_p(int((values > 0).sum()), n)
    total = values.sum()
    # Sums that are equal but for rounding count as equal; scipy's permutation_test takes 50 to 200
    # times as long.
    observed = abs(total) - 1e-12 * np.abs(values).sum()
    extreme = sum(
        int((np.abs(2 * (positive @ values) - total) >= observed).sum())
        for positive in sign_flips(n)
    )
    return (
        extreme / 2 ** (n - 1)
        if n <= MAX_EXACT_DIFFERENCES
        else (1 + extreme) / (1 + N_DRAWN_FLIPS)
    )


def sign_flips(n: int) -> Iterator[NDArray[np.integer]]:
    """Which of n differences are taken as positive, in parts of shape (flips, n), 0 or 1."""
    if n <= MAX_EXACT_DIFFERENCES:  # the last sign is fixed: the other half mirrors this one
        yield np.arange(2 ** (n - 1))[:, None] >> np.arange(n) & 1
        return
    generator = np.random.default_rng(0)
    flips_per_batch = max(1, 250_000 // n)  # 2 MB of float64, which stay in a processor's cache
    for start in range(0, N_DRAWN_FLIPS, flips_per_batch):
        flips = min(flips_per_batch, N_DRAWN_FLIPS - start)
        yield np.unpackbits(generator.integers(0, 256, (flips, -(-n // 8)), np.uint8), axis=1)[
            :, :n
        ]


def sign_test_p(positive: int, n: int) -> float:
    """Two-sided p of the sign test (McNemar): `positive` of n nonzero differences are positive."""
    return float(scipy.stats.binomtest(positive, n).pvalue) if n else 1.0


def equivalence_p(differences: ArrayLike, margin: float) -> float:
    """The p of two one-sided tests that the mean of differences is within ±margin.

    The differences have shape (n,), and each test is by `skewed_t` (Schuirmann 1987).
    It is 0 or 1 where the differences are all the same, and 0 where all are zero, whatever the
    margin.

    Examples:
        >>> round(equivalence_p([-0.1, 0.0, 0.1, 0.05, -0.05], margin=0.2), 4)
        0.0024
        >>> (
        ...     [equivalence_p([0.5] * 4, margin) for margin in (0.6, 0.4, math.nan)],
        ...     equivalence_p([0.0] * 4, math.nan),
        ... )
        ([0.0, 1.0, 1.0], 0.0)
    """
    values = np.sort(np.asarray(differences, float))
    sd = sample_sd(values)
    if not sd > 0:
        return float(values.any() and not abs(values.mean()) < margin)
    # scipy's ttest_1samp warns of differences that are the same but for rounding; statsmodels is
    # slow to import.
    mean, skewness, n = moments(values)
    t_lower = skewed_t(margin / sd + mean, skewness, n)
    t_upper = skewed_t(margin / sd - mean, -skewness, n)
    return float(scipy.stats.t.sf(min(t_lower, t_upper), n - 1))


def discordance_p(differences: ArrayLike, margin: float) -> float:
    """The p that fewer than a share `margin` of pairs are discordant, for binary differences (n,).

    That share bounds the difference of the two rates, so this is a test of equivalence, exact
    (Clopper and Pearson 1934). A t test would call ten seeds of which none switched equivalent,
    whatever the margin.

    Examples:
        >>> round(discordance_p([0.0] * 29, margin=0.1), 3)
        0.047
    """
    n = np.size(differences)
    return (
        float(scipy.stats.binom.cdf(np.count_nonzero(differences), n, min(margin, 1.0)))
        if n
        else math.nan
    )


def sign_flip_interval(differences: ArrayLike, alpha: float = 0.05) -> tuple[float, float]:
    """The interval of the mean of differences at 1 − alpha: shifts that `sign_flip_p` allows.

    Its ends are two of the means of subsets of the sample (Hartigan 1969), so it holds zero where p
    > alpha, and the truth at 1 − alpha for every symmetric distribution. NaN where so few
    differences bound nothing.

    Examples:
        >>> # At 5 % the first and the last of 63 means
        >>> sign_flip_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        (1.0, 6.0)
        >>> sign_flip_interval([1.0] * 5), sign_flip_interval([])
        ((nan, nan), (nan, nan))
    """
    values = np.sort(np.asarray(differences, float))
    n = len(values)
    total = values.sum()
    if n < 2:
        return math.nan, math.nan
    means = []
    for positive in sign_flips(n):
        sums = positive @ values
        sizes = positive.sum(axis=1)
        with np.errstate(invalid="ignore"):  # a subset of none has no mean
            means += [sums / sizes, (total - sums) / (n - sizes)]
    all_means = np.concatenate(means)
    subset_means = np.sort(all_means[~np.isnan(all_means)])
    is_exact = n <= MAX_EXACT_DIFFERENCES
    n_flips = 2.0 ** (n - 1) if is_exact else 1 + N_DRAWN_FLIPS
    # A subset of none (NaN) is the unflipped sample, which counts; drawn flips do not include it.
    n_unflipped = len(all_means) - len(subset_means)
    if not is_exact:
        n_unflipped += 1
    rank = int(alpha * n_flips) - n_unflipped
    if rank < 0:
        return math.nan, math.nan
    low = float(subset_means[rank])
    high = float(subset_means[-1 - rank])
    if sign_flip_p(values) > alpha:  # only what was drawn, and rounding, can make the two disagree
        return min(low, 0.0), max(high, 0.0)
    if total > 0:
        return max(low, float(subset_means[subset_means > 0][0])), high
    return low, min(high, float(subset_means[subset_means < 0][-1]))


def sd_lower_limit(values: ArrayLike) -> float:
    """The lower 97.5 % limit of a sample's standard deviation, shape (values,); NaN if constant.

    s · exp(−t · √((κ − 1) / (n − 1)) / 2), with t the quantile of Student's t and κ the sample's
    kurtosis, 3 or more: the delta method on ln s (as in Bonett 2006). Unlike the textbook's (χ²),
    it was found to hold for heavy tails and two humps as well (with at most 6 % errors).

    >>> [
    ...     round(sd_lower_limit(sample), 4)
    ...     for sample in ([1, 2, 3], [1, 2, 3, 4], [1, 1, 1, 1, 1, 9])
    ... ]
    [0.1163, 0.3521, 0.6426]
    """
    return float(sd_lower_limits(values, np.size(values)))


def sd_lower_limits(values: ArrayLike, n: ArrayLike, confidence: float = SD_CONFIDENCE) -> Floats:
    """The limits for samples of n values with this sample's standard deviation and kurtosis.

    >>> sd_lower_limits([1, 2, 3, 4], n=[4, 40]).round(4).tolist()
    [0.3521, 1.0267]
    """
    values = np.sort(np.asarray(values, float))
    degrees_of_freedom = np.asarray(n) - 1
    sd = sample_sd(values)
    if not sd > 0:
        return np.full(degrees_of_freedom.shape, math.nan)
    kurtosis = (
        max(3.0, 3 + float(scipy.stats.kurtosis(values, bias=False))) if len(values) > 3 else 3.0
    )
    quantile = scipy.stats.t.ppf(confidence, degrees_of_freedom)
    return sd * np.exp(-quantile * np.sqrt((kurtosis - 1) / degrees_of_freedom) / 2)


def sample_sd(values: ArrayLike) -> float:
    """The standard deviation of a sample, shape (n,); NaN for fewer than two.

    >>> sample_sd([0.1] * 10), round(sample_sd([1.0, 3.0]), 4)
    (0.0, 1.4142)
    """
    values = np.asarray(values, float)
    if len(values) < 2:
        return math.nan
    # NumPy's result for equal values is not always zero.
    return float(values.std(ddof=1)) if np.ptp(values) else 0.0


def clopper_pearson_upper(count: float, n: int, alpha: float = 0.05) -> float:
    """The one-sided upper limit at 1 − alpha of a share, given `count` of n (Clopper-Pearson 1934).

    >>> clopper_pearson_upper(4, 4), clopper_pearson_upper(0, 0)
    (1.0, 1.0)
    """
    # scipy's binomtest(count, n).proportion_ci searches for the same number, in ten times the time.
    return float(scipy.stats.beta.ppf(1 - alpha, count + 1, n - count)) if count < n else 1.0


def holm(p: ArrayLike) -> Floats:
    """Holm's corrected p (1979); NaN (no test) stays NaN and counts for nothing."""
    # statsmodels' multipletests gives the same numbers, but collects garbage for 0.1 s before it
    # does.
    corrected = np.array(p, float)
    tests = np.count_nonzero(~np.isnan(corrected))
    order = np.argsort(corrected)[:tests]  # NaN comes last
    corrected[order] = np.minimum(
        np.maximum.accumulate(corrected[order] * np.arange(tests, 0, -1)), 1.0
    )
    return corrected
