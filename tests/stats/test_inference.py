"""Tests and intervals compared with other libraries, and the number of seeds that they need."""

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import DescrStatsW

import gpulab as gl
from gpulab.stats import _inference as inference
from tests.stats._helpers import BASE, runs_of, shifted


@pytest.mark.parametrize("n", [2, 5, 9])
def test_sign_flip_p_agrees_with_scipy(n):
    differences = np.random.default_rng(n).standard_t(3, n) + 0.5
    theirs = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    assert inference.sign_flip_p(differences) == pytest.approx(theirs.pvalue)
    many = np.random.default_rng(2).standard_normal(60) + 0.2  # too many for all flips
    assert inference.sign_flip_p(many) == pytest.approx(stats.ttest_1samp(many, 0).pvalue, abs=0.01)


@pytest.mark.parametrize("margin", [0.1, 0.5, 1.0])
def test_equivalence_p_is_two_one_sided_t_tests_without_skewness(margin):
    draws = np.random.default_rng(4).standard_normal(6)
    differences = np.concatenate([draws, -draws]) + 0.3
    theirs = DescrStatsW(differences).ttost_mean(-margin, margin)[0]
    assert inference.equivalence_p(differences, margin) == pytest.approx(theirs)
    assert inference.equivalence_p(-differences, margin) == pytest.approx(theirs)


@pytest.mark.parametrize("n", [6, 16, 20])
@pytest.mark.parametrize("alpha", [0.05, 0.2, 2 / 2**6])
def test_sign_flip_interval_holds_the_shifts_that_the_test_allows(n, alpha):
    differences = np.random.default_rng(n).lognormal(size=n)
    low, high = inference.sign_flip_interval(differences, alpha)
    step = 1e-6
    for inside, outside in ((low + step, low - step), (high - step, high + step)):
        assert (
            inference.sign_flip_p(differences - inside)
            > alpha
            >= inference.sign_flip_p(differences - outside)
        )


SKEWED = {
    "lognormal": lambda generator, shape: (
        generator.lognormal(sigma=0.5, size=shape) - math.exp(0.125)
    ),
    "a fifth jumps": lambda generator, shape: (
        (generator.random(shape) < 0.2) - 0.2 + 0.05 * generator.random(shape)
    ),
}


@pytest.mark.parametrize("name", SKEWED)
def test_mean_p_seldom_rejects_a_mean_of_zero_for_skewed_differences(name):
    differences = SKEWED[name](np.random.default_rng(16), (1000, 32))
    differences -= 0.025 if name == "a fifth jumps" else 0
    alarms = {
        test: np.mean([test(some) <= 0.05 for some in differences])
        for test in (inference.sign_flip_p, inference.mean_p)
    }
    assert alarms[inference.mean_p] < 0.07
    assert alarms[inference.mean_p] < alarms[inference.sign_flip_p]
    at_the_margin = 0.5 + np.array([*differences, *-differences])
    assert np.mean([inference.equivalence_p(some, 0.5) <= 0.05 for some in at_the_margin]) < 0.065


def test_skewed_t_interval_holds_the_shifts_that_its_t_allows():
    values = np.random.default_rng(17).lognormal(size=12)
    _, skewness, n = inference.moments(values)
    assert skewness == pytest.approx(stats.skew(values))
    limit = stats.t.isf(0.025, n - 1)
    ends, students = (
        inference.skewed_t_interval(values, 0.05),
        stats.ttest_1samp(values, 0).confidence_interval(0.95),
    )
    for end, sign in zip(ends, (1, -1), strict=True):
        assert inference.skewed_t(*inference.moments(values - end)) == pytest.approx(sign * limit)
    assert ends[0] == pytest.approx(students[0])
    assert ends[1] > students[1], "it extends further on the side of the longer tail"
    mirrored = inference.skewed_t_interval(-values, 0.05)
    assert mirrored == pytest.approx((-ends[1], -ends[0]))


def test_sd_lower_limit_is_seldom_above_the_sd():
    draws = np.random.default_rng(6).standard_normal((300, 10))
    limits = np.array([inference.sd_lower_limit(draw) for draw in draws])
    assert (limits > 1).mean() < 0.04
    assert np.median(limits) > 0.4, "the limit is not uselessly low"


def test_clopper_pearson_upper_agrees_with_scipy():
    assert inference.clopper_pearson_upper(0, 10) == pytest.approx(1 - 0.05 ** (1 / 10))
    theirs = stats.binomtest(3, 12, alternative="less").proportion_ci(0.95, "exact").high
    assert inference.clopper_pearson_upper(3, 12) == pytest.approx(theirs)


@pytest.mark.parametrize(
    "p", [[], [0.03], [0.04, 0.01, 0.01, 0.9, 0.5], [0.02, math.nan, 0.03], [math.nan] * 2]
)
def test_holm_agrees_with_statsmodels(p):
    corrected, tests = inference.holm(p), ~np.isnan(p)
    assert np.isnan(corrected[~tests]).all()
    if tests.any():
        assert (corrected[tests] == multipletests(np.array(p)[tests], method="holm")[1]).all()


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_seeds_needed_let_a_comparison_succeed_four_times_in_five(ratio):
    noise = np.random.default_rng(10).standard_normal((400, 10))
    differences = ratio * (noise[0] - noise[0].mean()) / noise[0].std(ddof=1)
    runs = runs_of({"cpu": BASE, "cuda": shifted(list(differences))})
    n = int(gl.verdict(runs, margin=1.0).table.seeds_needed[0])
    by_statsmodels = TTestPower().solve_power(
        1 / ratio, power=0.9, alpha=0.05, alternative="larger"
    )
    assert n == max(math.ceil(by_statsmodels) + 1, 6)
    drawn = ratio * np.random.default_rng(11).standard_normal((400, n))
    assert 0.73 < np.mean([inference.equivalence_p(some, 1.0) <= 0.05 for some in drawn]) < 0.93
    assert np.mean([inference.mean_p(1 + some) <= 0.05 for some in drawn]) > 0.73
