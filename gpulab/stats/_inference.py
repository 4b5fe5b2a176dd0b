"""Tests and intervals on paired differences.

If SciPy has a function that is not used here, a comment says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import overload

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

# Up to this number of nonzero differences, all 2^n combinations of signs are tried.
MAX_EXACT_DIFFERENCES = 16
N_DRAWN_FLIPS = 9999  # the number of random combinations of signs for more differences
MIN_DRAWN_P = 1 / (1 + N_DRAWN_FLIPS)  # the smallest p value that random combinations can give
# The confidence of the lower limit of a standard deviation. A confidence of 0.95 is too low for
# distributions with a rare second mode.
SD_CONFIDENCE = 0.975
# The minimum width of the gap before outlying losses, in standard deviations of the other losses.
MIN_GAP = 3
# Numbers whose relative difference is at most this count as equal: the difference may be rounding.
ROUNDING_TOLERANCE = 1e-12

Floats = NDArray[np.float64]


def mean_p(differences: ArrayLike) -> float:
    """Compute the two-sided p value of the hypothesis that differences, shape (n,), have mean zero.

    The p value is that of `sign_flip_p`, which is exact for symmetric differences. (Studentising
    the sign-flip test would change nothing, since all flips have the same sum of squares.) Like
    Student's t, it is too small if the longer tail of the sample points towards zero. In that case
    the result is the larger of this p value and that of `skewed_t`.

    No test of a mean keeps its level for every distribution (Bahadur and Savage 1956). An example
    is a distribution in which rare, large values balance a shift of all the others: a sample
    without such a value suggests a mean other than zero.

    Examples:
        >>> mean_p([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        0.03125
        >>> values = [-4.0, 2.0, 2.5, 3.0, 2.0, 3.0, 2.5, 3.0, 2.0, 2.5]
        >>> round(mean_p(values), 3), round(sign_flip_p(values), 3)
        (0.104, 0.027)
        >>> # 2 of 128: an outlier does not hide that all are positive
        >>> mean_p([2.9, 2.8, 2.9, 2.7, 2.8, 2.8, 1.6])
        0.015625
    """
    flip_p = sign_flip_p(differences)
    values = np.sort(np.asarray(differences, float))
    if not sample_sd(values) > 0:
        return flip_p
    mean, skewness, n = moments(values)
    if mean * skewness >= 0:  # the longer tail points away from zero
        return flip_p
    t = skewed_t(mean, skewness, n)
    t_p = float(2 * scipy.stats.t.sf(abs(t), n - 1))
    return max(flip_p, t_p)


def mean_interval(differences: ArrayLike, alpha: float = 0.05) -> tuple[float, float]:
    """Compute the 1 − alpha confidence interval of the mean that belongs to `mean_p`.

    The interval contains the shifts that `mean_p` does not reject. It is (NaN, NaN) if there are
    too few differences to bound the mean.

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
    # Only the end on the side of the longer tail is widened, as in `mean_p`.
    if skewness < 0:
        low = min(low, t_low)
    if skewness > 0:
        high = max(high, t_high)
    return low, high


def plateau_outliers(losses: ArrayLike) -> NDArray[np.bool_]:
    """Find the losses, shape (n,), that lie beyond a wide gap, such as those of stuck runs.

    The losses are split at their largest gap, and the smaller part is reported as outliers. Three
    conditions must hold: the gap is at least `MIN_GAP` standard deviations of the other losses
    wide; the standard deviation of the others is less than half of that of all losses; and the
    outliers are fewer than half. With fewer than ten losses there are no outliers.

    In simulations with normal losses, 4 % of samples of ten losses had an outlier, and no sample
    of twenty.

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
    gaps = np.diff(ordered)
    n_below = int(gaps.argmax()) + 1  # the number of losses below the largest gap
    first_above = ordered[n_below]
    is_outlier = values >= first_above if n_below > len(values) / 2 else values < first_above
    rest_sd = sample_sd(values[~is_outlier])
    is_separated = gaps.max() >= MIN_GAP * rest_sd and rest_sd < sample_sd(values) / 2
    return is_outlier & (is_separated and is_outlier.sum() < len(values) / 2)


def moments(values: ArrayLike) -> tuple[float, float, int]:
    """Compute the mean divided by the standard deviation, the skewness and the size of a sample.

    The sample has shape (n,), and its values must not all be equal. The skewness is computed with
    the sample standard deviation, whose divisor is n − 1, and scaled by (n / (n − 1))^1.5.
    """
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
    """Compute Student's t of a mean, reduced where the skewness of the sample inflates it.

    Skewness inflates t if the longer tail of the sample points towards zero. In that case the
    first term of the Edgeworth expansion of t, skewness · (2z² + 1) / (6√n), is subtracted
    (Johnson 1978; Hall 1992, The Bootstrap and Edgeworth Expansion, ch. 2). Otherwise the result
    is Student's t.

    The mean is in units of the standard deviation, as `moments` returns it. Mean and skewness may
    be arrays with one element for each sample of size n.
    """
    student = np.sqrt(n) * mean
    correction = _skew_correction(mean, skewness, n) / 3
    # The corrected z solves |t| = z + correction · (2z² + 1) / 2. It is the positive root of this
    # quadratic equation, written so that it is defined for correction = 0, too.
    excess = np.maximum(np.abs(student) - correction / 2, 0)
    return np.sign(student) * 2 * excess / (1 + np.sqrt(1 + 4 * correction * excess))


def _skew_correction(sign: float | Floats, skewness: float | Floats, n: int) -> float | Floats:
    """Compute |skewness| / √n if the longer tail points towards zero, and 0 otherwise.

    `sign` may be the mean, or any number with the same sign.
    """
    return np.maximum(-np.sign(sign) * skewness, 0) / np.sqrt(n)


def skewed_t_interval(
    differences: ArrayLike, alpha: float, corrected: bool = True
) -> tuple[float, float]:
    """Compute the 1 − alpha confidence interval of the mean that belongs to `skewed_t`.

    It contains Student's interval, and extends further on the side of the longer tail of the
    sample. With `corrected=False` it is Student's interval. The interval at 1 − 2 alpha lies within
    ±margin if and only if `equivalence_p` is at most alpha. The differences have shape (n,).
    """
    values = np.sort(np.asarray(differences, float))
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    sd = sample_sd(values)
    skewness = 0.0
    if corrected and sd > 0:
        _, skewness, _ = moments(values)
    z = float(scipy.stats.t.isf(alpha / 2, n - 1))
    standard_error = sd / math.sqrt(n)
    # The correction of `skewed_t`, for a mean above the lower end and one below the upper end.
    lower_z = z + _skew_correction(1, skewness, n) * (2 * z**2 + 1) / 6
    upper_z = z + _skew_correction(-1, skewness, n) * (2 * z**2 + 1) / 6
    low = float(values.mean() - standard_error * lower_z)
    high = float(values.mean() + standard_error * upper_z)
    return low, high


def sign_flip_p(differences: ArrayLike) -> float:
    """Compute the two-sided p value of the sign-flip test of paired differences, shape (n,).

    The test (Fisher 1935) assumes that differences are symmetric about zero if there is no effect.
    Zero differences are ignored. With up to `MAX_EXACT_DIFFERENCES` others, all 2^n combinations
    of signs are tried. With more, `N_DRAWN_FLIPS` combinations are drawn, and p is
    (1 + number of sums at least as extreme) / (1 + number drawn) (Phipson and Smyth 2010). If all
    differences have the same magnitude, the test is a sign test and exact for any n.

    Examples:
        >>> sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # 2 of 64
        0.03125
        >>> # 0.1 + 0.2 counts as 0.3
        >>> [sign_flip_p([0.1 * unit, 0.2 * unit, 0.3 * unit, -0.3 * unit]) for unit in (1.0, 1e15)]
        [0.75, 0.75]
        >>> sign_flip_p([3.0, 2.0, -1.0])  # |sum| is 4 or more for ±(3, 2, −1) and ±(3, 2, 1)
        0.5
        >>> # Zero differences are ignored
        >>> (
        ...     sign_flip_p([0.0, 1.0, 2.0, 4.0, 0.0]),
        ...     sign_flip_p([1.0, 2.0, -4.0]),
        ... )
        (0.25, 1.0)
        >>> sign_flip_p([0.0] * 5), sign_flip_p([0.1, 0.2, -0.3])  # the sum is 5.6e-17, not 0
        (1.0, 1.0)
        >>> round(sign_flip_p([1] * 15 + [-1] * 5 + [0] * 100), 4)  # McNemar's test
        0.0414
        >>> sign_flip_p(np.arange(1.0, 61))  # (1 + 0) / (1 + 9999): never zero
        0.0001
    """
    values = np.sort(np.asarray(differences, float))
    values = values[values != 0]
    n = len(values)
    if n == 0 or np.ptp(np.abs(values)) <= ROUNDING_TOLERANCE * np.abs(values).max():
        return sign_test_p(int((values > 0).sum()), n)
    total = values.sum()
    # Sums that are equal except for rounding count as equal.
    observed = abs(total) - ROUNDING_TOLERANCE * np.abs(values).sum()
    # scipy's permutation_test takes 50 to 200 times as long.
    n_extreme = 0
    for kept in sign_flips(n):
        # With k the sum of the kept differences, the flipped ones add −(total − k).
        flipped_sums = 2 * (kept @ values) - total
        n_extreme += int((np.abs(flipped_sums) >= observed).sum())
    if n <= MAX_EXACT_DIFFERENCES:
        return n_extreme / 2 ** (n - 1)  # a combination and its complement are equally extreme
    return (1 + n_extreme) / (1 + N_DRAWN_FLIPS)


def sign_flips(n: int) -> Iterator[NDArray[np.integer]]:
    """Yield arrays of sign combinations for n differences: 1 keeps a sign, 0 flips it.

    Each array has shape (flips, n). For up to `MAX_EXACT_DIFFERENCES` differences, one array holds
    all combinations in which the last difference has 0; the others are their complements. For more
    differences, `N_DRAWN_FLIPS` random combinations are yielded in batches, with a fixed seed.
    """
    if n <= MAX_EXACT_DIFFERENCES:
        # Row i holds the binary digits of i, the lowest first.
        yield (np.arange(2 ** (n - 1))[:, None] >> np.arange(n)) & 1
        return
    generator = np.random.default_rng(0)
    flips_per_batch = max(1, 250_000 // n)  # 2 MB of float64, which stay in a processor's cache
    for start in range(0, N_DRAWN_FLIPS, flips_per_batch):
        flips = min(flips_per_batch, N_DRAWN_FLIPS - start)
        bytes_per_flip = -(-n // 8)  # n bits, rounded up to whole bytes
        random_bytes = generator.integers(0, 256, (flips, bytes_per_flip), np.uint8)
        yield np.unpackbits(random_bytes, axis=1)[:, :n]


def sign_test_p(positive: int, n: int) -> float:
    """Compute the two-sided p value of the sign test (McNemar) for n nonzero differences.

    `positive` is the number of positive differences. Without differences the p value is 1.
    """
    return float(scipy.stats.binomtest(positive, n).pvalue) if n else 1.0


def equivalence_p(differences: ArrayLike, margin: float) -> float:
    """Compute the p value of two one-sided tests that the mean difference lies within ±margin.

    The differences have shape (n,). Both tests (Schuirmann 1987) use `skewed_t`. If all
    differences are equal, p is 0 or 1. If all are zero, p is 0 even for a margin of NaN.

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
    if not sd > 0:  # all are equal, or there are fewer than two
        is_equivalent = not values.any() or abs(values.mean()) < margin
        return 0.0 if is_equivalent else 1.0
    # scipy's ttest_1samp warns if differences are equal except for rounding; statsmodels is slow to
    # import.
    mean, skewness, n = moments(values)
    # How far the mean lies above −margin and below +margin. The larger of the two p values counts.
    t_lower = skewed_t(margin / sd + mean, skewness, n)
    t_upper = skewed_t(margin / sd - mean, -skewness, n)
    return float(scipy.stats.t.sf(min(t_lower, t_upper), n - 1))


def discordance_p(differences: ArrayLike, margin: float) -> float:
    """Compute the p value of a test that less than a share `margin` of pairs is discordant.

    A pair of binary outcomes is discordant if its difference is not zero. `differences` has shape
    (n,). The share of discordant pairs bounds the difference between the two rates, so this is an
    exact test of equivalence (Clopper and Pearson 1934). A t test is not suitable: ten seeds
    without a discordant pair would be equivalent for any margin. Without differences the result
    is NaN.

    Examples:
        >>> round(discordance_p([0.0] * 29, margin=0.1), 3)
        0.047
    """
    n = np.size(differences)
    if n == 0:
        return math.nan
    return float(scipy.stats.binom.cdf(np.count_nonzero(differences), n, min(margin, 1.0)))


def sign_flip_interval(differences: ArrayLike, alpha: float = 0.05) -> tuple[float, float]:
    """Compute the 1 − alpha confidence interval of the mean that belongs to `sign_flip_p`.

    The ends of the interval are two of the means of the subsets of the sample (Hartigan 1969). The
    interval contains zero if `sign_flip_p` exceeds alpha. For symmetric distributions it covers
    the true mean with probability 1 − alpha. It is (NaN, NaN) if there are too few differences to
    bound the mean.

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
        with np.errstate(invalid="ignore"):  # the mean of an empty subset is NaN
            # The means of each subset and of its complement.
            means += [sums / sizes, (total - sums) / (n - sizes)]
    all_means = np.concatenate(means)
    subset_means = np.sort(all_means[~np.isnan(all_means)])
    is_exact = n <= MAX_EXACT_DIFFERENCES
    n_flips = 2.0 ** (n - 1) if is_exact else 1 + N_DRAWN_FLIPS
    # An empty subset, whose mean is NaN, stands for the unflipped sample. The p value counts that
    # sample, too: once among all combinations, and once in addition to the drawn ones.
    n_unflipped = len(all_means) - len(subset_means)
    if not is_exact:
        n_unflipped += 1
    # The number of means to leave out at either end: the share alpha of all flips, less the
    # unflipped sample.
    rank = int(alpha * n_flips) - n_unflipped
    if rank < 0:
        return math.nan, math.nan
    low = float(subset_means[rank])
    high = float(subset_means[-1 - rank])
    # Random flips and rounding can make the interval and the p value disagree about zero. The p
    # value takes precedence.
    if sign_flip_p(values) > alpha:
        return min(low, 0.0), max(high, 0.0)
    if total > 0:
        return max(low, float(subset_means[subset_means > 0][0])), high
    return low, min(high, float(subset_means[subset_means < 0][-1]))


def sd_lower_limit(values: ArrayLike) -> float:
    """Compute the lower 97.5 % confidence limit of the standard deviation of a sample.

    The limit is s · exp(−t · √((κ − 1) / (n − 1)) / 2), where t is a quantile of Student's t and κ
    the kurtosis of the sample, but at least 3. It comes from the delta method for ln s (as in
    Bonett 2006). Unlike the usual limit from the χ² distribution, it was found to be valid for
    heavy tails and two modes, too (at most 6 % errors). The result is NaN if all values are equal.

    >>> [
    ...     round(sd_lower_limit(sample), 4)
    ...     for sample in ([1, 2, 3], [1, 2, 3, 4], [1, 1, 1, 1, 1, 9])
    ... ]
    [0.1163, 0.3521, 0.6426]
    """
    return float(sd_lower_limits(values, np.size(values)))


def sd_lower_limits(values: ArrayLike, n: ArrayLike, confidence: float = SD_CONFIDENCE) -> Floats:
    """Compute `sd_lower_limit` as if the sample had n values; n may be an array.

    The standard deviation and the kurtosis are those of `values`.

    >>> sd_lower_limits([1, 2, 3, 4], n=[4, 40]).round(4).tolist()
    [0.3521, 1.0267]
    """
    values = np.sort(np.asarray(values, float))
    degrees_of_freedom = np.asarray(n) - 1
    sd = sample_sd(values)
    if not sd > 0:
        return np.full(degrees_of_freedom.shape, math.nan)
    kurtosis = 3.0
    if len(values) > 3:
        # SciPy returns the excess over the kurtosis of a normal distribution, which is 3.
        kurtosis = max(3.0, 3 + float(scipy.stats.kurtosis(values, bias=False)))
    quantile = scipy.stats.t.ppf(confidence, degrees_of_freedom)
    return sd * np.exp(-quantile * np.sqrt((kurtosis - 1) / degrees_of_freedom) / 2)


def sample_sd(values: ArrayLike) -> float:
    """Compute the standard deviation of a sample, shape (n,); NaN for fewer than two values.

    >>> sample_sd([0.1] * 10), round(sample_sd([1.0, 3.0]), 4)
    (0.0, 1.4142)
    """
    values = np.asarray(values, float)
    if len(values) < 2:
        return math.nan
    # For equal values NumPy's result may differ from zero by rounding.
    return float(values.std(ddof=1)) if np.ptp(values) else 0.0


def clopper_pearson_upper(count: float, n: int, alpha: float = 0.05) -> float:
    """Compute the one-sided upper 1 − alpha confidence limit of a share, given `count` of n.

    The limit is that of Clopper and Pearson (1934).

    >>> clopper_pearson_upper(4, 4), clopper_pearson_upper(0, 0)
    (1.0, 1.0)
    """
    # scipy's binomtest(count, n).proportion_ci finds the same number, but takes ten times as long.
    return float(scipy.stats.beta.ppf(1 - alpha, count + 1, n - count)) if count < n else 1.0


def holm(p: ArrayLike) -> Floats:
    """Correct p values by Holm's method (1979).

    NaN means that nothing was tested: it stays NaN, and does not count towards the number of tests.
    """
    # statsmodels' multipletests gives the same numbers, but spends 0.1 s on garbage collection
    # first.
    corrected = np.array(p, float)
    tests = np.count_nonzero(~np.isnan(corrected))
    order = np.argsort(corrected)[:tests]  # NaN comes last
    # The smallest of m values is multiplied by m, the next by m − 1, and so on. No corrected value
    # is smaller than that of a smaller p value.
    multiplied = corrected[order] * np.arange(tests, 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(multiplied), 1.0)
    return corrected
