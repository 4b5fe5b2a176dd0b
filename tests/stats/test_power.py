import math

import numpy as np
import pytest
from stats_runs import BASE, TINY, WIDE, runs_of, shifted
from statsmodels.stats.power import TTestPower

import gpulab as gl
from gpulab.stats import tests as inference
from gpulab.stats.power import SEEDS, margins_by_seeds, seeds_of_t_tests, smallest_shown


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


@pytest.mark.parametrize("n", [6, 7, 12, 27])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 2])
def test_the_smallest_difference_that_is_shown_is_shown_four_times_in_five(n, alpha):
    generator = np.random.default_rng(19)
    smallest = float(smallest_shown(n, 2.0, alpha))
    if n == 6 and alpha < 0.05:
        assert smallest == math.inf, "two of 64 flips are more than alpha"
        return
    rate = np.mean([inference.mean_p(smallest + 2 * generator.standard_normal(n)) <= alpha for _ in range(1000)])
    assert 0.76 < rate < 0.86
    assert needed(2.0, 1.0001 * smallest, alpha)[0] == n


def test_the_smallest_share_that_is_shown_is_shown_four_times_in_five():
    share = float(smallest_shown(27, math.nan, 0.05, yes_or_no=True))
    switched = np.random.default_rng(20).random((1000, 27)) < share
    assert 0.76 < np.mean([inference.sign_flip_p(some) <= 0.05 for some in switched]) < 0.84


def test_the_seeds_of_a_t_test_and_one_and_a_margin_in_sd_as_a_verdict_has_it():
    assert needed(2.0, 1.0, power=0.9)[0] == math.ceil(TTestPower().solve_power(0.5, power=0.9, alpha=0.05)) + 1
    losses = np.random.default_rng(21).standard_normal(12)
    margins = margins_by_seeds("0.5sd", losses)
    assert margins[SEEDS == 12] == pytest.approx(0.5 * inference.sd_lower_limit(losses))
    assert (np.diff(margins) > 0).all()


def test_the_seeds_needed_from_a_frame():
    runs = runs_of({"cpu": BASE, "a": shifted(TINY), "b": shifted(WIDE)})
    table = gl.stats.seeds_needed(runs)
    assert table.setting.tolist() == ["a", "a", "b", "b"]
    assert table.power.tolist() == [0.8, 0.9, 0.8, 0.9]
    assert table.to_detect.tolist()[:2] == [6, 6], "fewer than six cannot show anything"
    assert (table.seeds == table[["to_detect", "to_exclude"]].max(axis=1)).all()
    assert table.seeds[2] < table.seeds[3]
    assert gl.stats.seeds_needed(runs, margin="0.5sd").seeds[2] < table.seeds[2]
    assert gl.stats.seeds_needed(runs, margin=0.1).to_detect[2] == needed(table.sd[2], 0.1)[0]
    assert gl.stats.seeds_needed(runs[runs.setting == "cpu"]).empty
    with pytest.raises(gl.UsageError, match=r"power 1.0: expected numbers between alpha \(0.05\) and 1"):
        gl.stats.seeds_needed(runs, power=1.0)
    with pytest.raises(gl.UsageError, match=r"'0.25sd' needs a standard deviation between seeds"):
        gl.stats.seeds_needed(runs[runs.seed == 0])
