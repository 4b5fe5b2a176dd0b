"""Tests and intervals by hand and against other libraries, and how many seeds they need."""

import math

import numpy as np
import pytest
from scipy import stats
from stats_runs import BASE, TINY, WIDE, runs_of, shifted
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import DescrStatsW

import gpulab as gl
from gpulab.stats import tests as inference
from gpulab.stats.power import SEEDS, margins_by_seeds, seeds_of_t_tests, smallest_shown


@pytest.mark.parametrize("n", [2, 5, 9])
def test_sign_flips_agree_with_scipy(n):
    differences = np.random.default_rng(n).standard_t(3, n) + 0.5
    theirs = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    assert inference.sign_flip_p(differences) == pytest.approx(theirs.pvalue)
    many = np.random.default_rng(2).standard_normal(60) + 0.2  # of which some flips are drawn
    assert inference.sign_flip_p(many) == pytest.approx(stats.ttest_1samp(many, 0).pvalue, abs=0.01)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1.0, 2.0, 4.0], 2 / 8),
        ([1.0, 2.0, -4.0], 8 / 8),
        ([3.0, 2.0, -1.0], 4 / 8),  # |sum| is 4 or more for ±(3, 2, -1) and ±(3, 2, 1)
        ([0.0] * 5, 1),
        ([0.0, 1.0, 2.0, 4.0, 0.0], 2 / 8),  # a difference of nothing has no sign
        ([0.1, 0.2, -0.3], 1),  # sums to 5.6e-17, not to 0
        ([1] * 15 + [-1] * 5 + [0] * 100, stats.binomtest(5, 20).pvalue),  # of one size: McNemar's test
        (np.arange(1.0, 61), 1e-4),  # (1 + 0) / (1 + 9999): what is drawn never gives zero
    ],
)
def test_sign_flips_are_counted_by_hand(differences, p):
    assert inference.sign_flip_p(differences) == pytest.approx(p, rel=1e-14, abs=0)
    assert inference.mean_p([2.9, 2.8, 2.9, 2.7, 2.8, 2.8, 1.6]) == 2 / 2**7, "an outlier does not hide what all say"


@pytest.mark.parametrize("margin", [0.1, 0.5, 1.0])
def test_equivalence_is_two_one_sided_t_tests_where_nothing_is_skewed(margin):
    draws = np.random.default_rng(4).standard_normal(6)
    differences = np.concatenate([draws, -draws]) + 0.3
    theirs = DescrStatsW(differences).ttost_mean(-margin, margin)[0]
    assert inference.equivalence_p(differences, margin) == pytest.approx(theirs)
    assert inference.equivalence_p(-differences, margin) == pytest.approx(theirs)


def test_few_values_and_those_without_spread_or_difference():
    assert inference.equivalence_p([0.0] * 4, 0.1) == 0
    assert inference.equivalence_p([0.5] * 4, 0.6) == 0
    assert inference.equivalence_p([0.5] * 4, 0.4) == 1
    assert math.isnan(inference.equivalence_p([], 0.1))
    assert all(np.isnan(inference.sign_flip_interval([1.0] * n)).all() for n in (0, 1, 5))
    assert inference.sample_sd(np.full(10, 0.1)) == 0


@pytest.mark.parametrize("n", [6, 10, 16])
@pytest.mark.parametrize("alpha", [0.05, 0.2, 2 / 2**6])
def test_the_interval_holds_the_shifts_that_the_test_allows(n, alpha):
    differences = np.random.default_rng(n).lognormal(size=n)
    low, high = inference.sign_flip_interval(differences, alpha)
    step = 1e-6
    for inside, outside in ((low + step, low - step), (high - step, high + step)):
        assert inference.sign_flip_p(differences - inside) > alpha >= inference.sign_flip_p(differences - outside)


SKEWED = {
    "lognormal": lambda generator, shape: generator.lognormal(sigma=0.5, size=shape) - math.exp(0.125),
    "a fifth jumps": lambda generator, shape: (generator.random(shape) < 0.2) - 0.2 + 0.05 * generator.random(shape),
}


@pytest.mark.parametrize("name", SKEWED)
def test_the_mean_of_skewed_differences_is_rarely_called_other_than_zero(name):
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


def test_without_skewness_the_corrected_t_is_students():
    values = np.array([1.0, 2.0, 4.0, 6.0, 7.0])
    students = stats.ttest_1samp(values, 0)
    assert inference.skewed_t_interval(values, 0.1) == pytest.approx(tuple(students.confidence_interval(0.9)))


def test_the_corrected_interval_holds_the_shifts_that_its_t_allows():
    values = np.random.default_rng(17).lognormal(size=12)
    _, skewness, n = inference.moments(values)
    assert skewness == pytest.approx(stats.skew(values))
    limit = stats.t.isf(0.025, n - 1)
    ends, students = inference.skewed_t_interval(values, 0.05), stats.ttest_1samp(values, 0).confidence_interval(0.95)
    for end, sign in zip(ends, (1, -1), strict=True):
        assert inference.skewed_t(*inference.moments(values - end)) == pytest.approx(sign * limit)
    assert ends[0] == pytest.approx(students[0])
    assert ends[1] > students[1], "further on the side of the tail"
    mirrored = inference.skewed_t_interval(-values, 0.05)
    assert mirrored == pytest.approx((-ends[1], -ends[0]))


@pytest.mark.parametrize(
    ("differences", "which"),
    [
        ([0.01, -0.02, 0.03, 0.01, -1.0], [4]),
        ([0.01, -0.02, 0.03, 0.01, -1.0, 2.0], [4, 5]),
        ([0.01, -0.02, 0.03, 1.0, -1.0, 1.0], []),
        ([0.1, 0.2, 0.3, 0.4, -1.0], []),
        ([0.0, 0.0, 0.0, 1e-9], [3]),
        ([0.0, 0.0, 0.0], []),
        ([5.0], []),
        ([], []),
    ],
)
def test_jumps_are_few_and_far_from_the_others(differences, which):
    assert np.flatnonzero(inference.jumped(differences)).tolist() == which
    assert not inference.jumped(differences, least=6.0).any()
    assert (inference.jumped(-np.array(differences)) == inference.jumped(differences)).all(), "signs play no part"


def test_the_limit_of_the_sd_is_rarely_above_it():
    draws = np.random.default_rng(6).standard_normal((300, 10))
    limits = np.array([inference.sd_lower_limit(draw) for draw in draws])
    assert (limits > 1).mean() < 0.04
    assert np.median(limits) > 0.4, "yet it is of use"


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


def needed(sd, margin, alpha=0.05, power=0.8):
    return seeds_of_t_tests(sd, margins_by_seeds(margin, np.zeros(2)), alpha, power)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_the_seeds_needed_reach_the_power_in_simulation(ratio):
    generator = np.random.default_rng(10)

    def rate(test, n, shift):
        return np.mean([test(shift + ratio * generator.standard_normal(n)) <= 0.05 for _ in range(400)])

    n, m = map(int, needed(ratio, 1.0))
    assert 0.73 < rate(inference.mean_p, n, 1.0) < 0.98
    assert 0.73 < rate(lambda differences: inference.equivalence_p(differences, 1.0), m, 0.0) < 0.93


@pytest.mark.parametrize(("n", "alpha"), [(6, 0.05), (12, 0.05 / 2)])
def test_the_smallest_difference_that_is_shown_is_shown_four_times_in_five(n, alpha):
    generator = np.random.default_rng(19)
    smallest = float(smallest_shown(n, 2.0, alpha))
    rate = np.mean([inference.mean_p(smallest + 2 * generator.standard_normal(n)) <= alpha for _ in range(1000)])
    assert 0.76 < rate < 0.86
    assert needed(2.0, 1.0001 * smallest, alpha)[0] == n
    assert smallest_shown(6, 2.0, 0.05 / 2) == math.inf, "two of 64 flips are more than alpha"


def test_the_seeds_of_a_t_test_and_one_and_a_margin_in_sd_as_a_verdict_has_it():
    assert needed(2.0, 1.0, power=0.9)[0] == math.ceil(TTestPower().solve_power(0.5, power=0.9, alpha=0.05)) + 1
    losses = np.random.default_rng(21).standard_normal(12)
    margins = margins_by_seeds("0.5sd", losses)
    assert margins[SEEDS == 12] == pytest.approx(0.5 * inference.sd_lower_limit(losses))
    assert (np.diff(margins) > 0).all()


def test_the_seeds_needed_from_a_frame():
    runs = runs_of({"cpu": BASE, "a": shifted(TINY), "b": shifted(WIDE)})
    table = gl.stats.seeds_needed(runs)
    assert table.setting.tolist() == ["a", "b"]
    assert table.to_detect[0] == 6, "fewer than six cannot show anything"
    assert (table.seeds == table[["to_detect", "to_exclude"]].max(axis=1)).all()
    assert table.seeds[1] < gl.stats.seeds_needed(runs, power=0.9).seeds[1]
    assert gl.stats.seeds_needed(runs, margin=0.1).to_detect[1] == needed(table.sd[1], 0.1)[0]
    assert gl.stats.seeds_needed(runs[runs.setting == "cpu"]).empty
    with pytest.raises(gl.UsageError, match=r"'0.25sd' needs a standard deviation between seeds"):
        gl.stats.seeds_needed(runs[runs.seed == 0])
