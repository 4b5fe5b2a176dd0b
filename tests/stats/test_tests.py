import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

from gpulab.stats import tests as inference


@pytest.mark.parametrize("n", [2, 5, 9])
def test_sign_flips_agree_with_scipy(n):
    differences = np.random.default_rng(n).standard_t(3, n) + 0.5
    theirs = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    assert inference.sign_flip_p(differences) == pytest.approx(theirs.pvalue)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1.0, 2.0, 4.0], 2 / 8),
        ([1.0, 2.0, -4.0], 8 / 8),
        ([3.0, 2.0, -1.0], 4 / 8),  # |sum| is 4 or more for ±(3, 2, -1) and ±(3, 2, 1)
        ([0.0] * 5, 1),
        ([0.0, 1.0, 2.0, 4.0, 0.0], 2 / 8),  # a difference of nothing has no sign
        ([0.1, 0.2, -0.3], 1),  # sums to 5.6e-17, not to 0
        ([0.3, 0.1, 0.2], 2 / 8),
        ([1] * 15 + [-1] * 5 + [0] * 100, stats.binomtest(5, 20).pvalue),  # of one size: McNemar's test
        (np.arange(1.0, 61), 1e-4),  # (1 + 0) / (1 + 9999): what is drawn never gives zero
    ],
)
def test_sign_flips_are_counted_by_hand(differences, p):
    assert inference.sign_flip_p(differences) == pytest.approx(p, rel=1e-14, abs=0)


def test_many_sign_flips_are_drawn():
    differences = np.random.default_rng(2).standard_normal(60) + 0.2
    assert inference.sign_flip_p(differences) == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=0.01)


@pytest.mark.parametrize("n", [10, 40])
@pytest.mark.parametrize(
    "test",
    [
        inference.sign_flip_p,
        inference.bca_interval,
        inference.sd_lower_limit,
        lambda differences: inference.equivalence_p(differences, 0.5),
    ],
)
def test_the_order_of_differences_does_not_matter(test, n):
    differences = np.random.default_rng(3).standard_normal(n)
    assert test(differences) == test(differences[::-1])


@pytest.mark.parametrize("margin", [0.1, 0.5, 1.0])
def test_equivalence_is_two_one_sided_t_tests(margin):
    differences = np.random.default_rng(4).standard_normal(12) + 0.3
    theirs = DescrStatsW(differences).ttost_mean(-margin, margin)[0]
    assert inference.equivalence_p(differences, margin) == pytest.approx(theirs)
    assert inference.equivalence_p(-differences, margin) == pytest.approx(theirs)


def test_equivalence_without_any_spread():
    assert inference.equivalence_p([0.0] * 4, 0.1) == 0
    assert inference.equivalence_p([0.5] * 4, 0.6) == 0
    assert inference.equivalence_p([0.5] * 4, 0.4) == 1


@pytest.mark.parametrize("test", [inference.equivalence_p, inference.discordance_p])
def test_no_difference_is_no_test(test):
    assert math.isnan(test([], 0.1))


@pytest.mark.parametrize("n", [6, 30])
def test_the_interval_is_scipys(n):
    differences = np.random.default_rng(5).lognormal(size=n)
    theirs = stats.bootstrap((differences,), np.mean, method="BCa", n_resamples=9999, rng=0).confidence_interval
    width = theirs.high - theirs.low
    assert inference.bca_interval(differences) == pytest.approx(tuple(theirs), abs=0.04 * width)


def test_the_interval_of_one_value_is_unknown():
    assert np.isnan(inference.bca_interval([1.0])).all()


@pytest.mark.parametrize(
    ("draw", "sd"),
    [
        (lambda generator: generator.standard_normal(10), 1),
        (
            lambda generator: (generator.random(10) < 0.35) + 0.05 * generator.standard_normal(10),
            math.hypot(0.477, 0.05),
        ),
    ],
    ids=["normal", "two humps"],
)
def test_the_limit_of_the_sd_is_rarely_above_it(draw, sd):
    generator = np.random.default_rng(6)
    limits = np.array([inference.sd_lower_limit(draw(generator)) for _ in range(300)])
    assert (limits > sd).mean() < 0.04
    assert np.median(limits) > 0.4 * sd, "yet it is of use"


def test_the_limit_of_the_sd_nears_the_sd():
    assert 0.97 < inference.sd_lower_limit(np.random.default_rng(7).standard_normal(20_000)) < 1


def test_the_upper_limit_of_a_share_is_clopper_and_pearsons():
    assert inference.clopper_pearson_upper(0, 10) == pytest.approx(1 - 0.05 ** (1 / 10))
    theirs = stats.binomtest(3, 12, alternative="less").proportion_ci(0.95, "exact").high
    assert inference.clopper_pearson_upper(3, 12) == pytest.approx(theirs)
    assert inference.clopper_pearson_upper(4, 4) == 1
    assert inference.clopper_pearson_upper(0, 0) == 1


@pytest.mark.parametrize("p", [[], [0.03], [0.04, 0.01, 0.01, 0.9, 0.5], [0.02, math.nan, 0.03], [math.nan] * 2])
def test_holms_correction_is_statsmodels(p):
    corrected, tests = inference.holm(p), ~np.isnan(p)
    assert np.isnan(corrected[~tests]).all()
    if tests.any():
        assert (corrected[tests] == multipletests(np.array(p)[tests], method="holm")[1]).all()
