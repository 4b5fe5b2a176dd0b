import itertools
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import gpulab as gl
from gpulab.stats import tests as inference


def frame(*rows, **columns):
    """Runs from (setting, seed, loss, weights), and columns that all have in common."""
    common = {"experiment": "prednet", "profile": "quick", "frames": 1000, "protocol": "1a2b", "rerun": 0}
    common |= {"machine": "a machine", "heldout_loss": 1.0, "recorded": False, **columns}
    return pd.DataFrame(
        [
            {
                **common,
                "setting": setting,
                "seed": seed,
                "final_loss": loss,
                "weights": weights,
                "status": "diverged" if math.isnan(loss) else "finished",
            }
            for setting, seed, loss, weights in rows
        ]
    )


def levels(**losses):
    """Runs from a list of losses per setting, seeds counted from 0."""
    return frame(
        *((name, seed, loss, f"{name}{seed}") for name, some in losses.items() for seed, loss in enumerate(some))
    )


THREE = frame(
    ("cpu", 0, 0.10, "a"),
    ("cpu", 1, 0.20, "b"),
    ("cpu", 2, 0.60, "c"),
    ("cpu:threads=1", 0, 0.10, "a"),
    ("cpu:threads=1", 1, 0.21, "d"),
    ("cpu:threads=1", 2, 0.57, "e"),
    ("cuda", 0, 0.30, "f"),
    ("cuda", 1, 0.18, "g"),
)
BASE = [0.31, 0.12, 0.22, 0.54, 0.43, 0.65, 0.17, 0.28, 0.39, 0.58]
TINY = [1e-6, -2e-6, 3e-6, -1e-6, 2e-6, -3e-6, 1.5e-6, 0.0, -0.5e-6, 1e-6]


def row(seen, level):
    (found,) = seen.table[seen.table[seen.factor] == level].to_dict("records")
    return found


def shifted(by, base=BASE):
    return [loss + some for loss, some in zip(base, np.broadcast_to(by, len(base)), strict=True)]


# --- the tests against closed forms ------------------------------------------------------------------


def test_sign_flips_agree_with_scipy():
    generator = np.random.default_rng(1)
    for n in (2, 5, 9):
        moved = generator.standard_t(3, n) + 0.5
        theirs = stats.permutation_test(
            (moved, np.zeros(n)),
            lambda x, y, axis: np.mean(x - y, axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=np.inf,
        )
        assert inference.sign_flip_p(moved) == pytest.approx(theirs.pvalue)


def test_sign_flips_are_counted_by_hand():
    assert inference.sign_flip_p([1.0, 2.0, 4.0]) == 2 / 8
    assert inference.sign_flip_p([1.0, 2.0, -4.0]) == pytest.approx(8 / 8)
    assert inference.sign_flip_p([3.0, 2.0, -1.0]) == 4 / 8, "|sum| is 4 or more for ±(3, 2, -1) and ±(3, 2, 1)"
    assert inference.sign_flip_p([0.0] * 5) == 1
    assert inference.sign_flip_p([0.0, 1.0, 2.0, 4.0, 0.0]) == 2 / 8, "a difference of nothing has no sign"


def test_sums_equal_but_for_rounding_count_as_equal():
    moved = [0.1, 0.2, -0.3]  # sums to 5.6e-17, not to 0
    assert inference.sign_flip_p(moved) == 1
    assert inference.sign_flip_p([0.3, 0.1, 0.2]) == 2 / 8


def test_equal_differences_are_mcnemars_test():
    moved = [1] * 15 + [-1] * 5 + [0] * 100
    assert inference.sign_flip_p(moved) == pytest.approx(stats.binomtest(5, 20).pvalue)


def test_many_differences_are_drawn_and_never_give_zero():
    generator = np.random.default_rng(2)
    moved = generator.standard_normal(60) + 0.2
    assert inference.sign_flip_p(moved) == pytest.approx(stats.ttest_1samp(moved, 0).pvalue, abs=0.01)
    assert inference.sign_flip_p(np.arange(1.0, 61)) == 1e-4, "(1 + 0) / (1 + 9999)"


@pytest.mark.parametrize("n", [10, 40])
def test_the_order_of_differences_does_not_matter(n):
    moved = np.random.default_rng(3).standard_normal(n)
    for test in (
        inference.sign_flip_p,
        inference.bca_interval,
        inference.sd_lower_limit,
        lambda d: inference.equivalence_p(d, 0.5),
    ):
        assert test(moved) == test(moved[::-1])


def test_equivalence_is_two_one_sided_t_tests():
    from statsmodels.stats.weightstats import DescrStatsW

    moved = np.random.default_rng(4).standard_normal(12) + 0.3
    for margin in (0.1, 0.5, 1.0):
        theirs = DescrStatsW(moved).ttost_mean(-margin, margin)[0]
        assert inference.equivalence_p(moved, margin) == pytest.approx(theirs)
        assert inference.equivalence_p(-moved, margin) == pytest.approx(theirs)


def test_equivalence_without_any_spread():
    assert inference.equivalence_p([0.0] * 4, 0.1) == 0
    assert inference.equivalence_p([0.5] * 4, 0.6) == 0
    assert inference.equivalence_p([0.5] * 4, 0.4) == 1


@pytest.mark.parametrize("n", [6, 30])
def test_the_interval_is_scipys(n):
    moved = np.random.default_rng(5).lognormal(size=n)
    theirs = stats.bootstrap((moved,), np.mean, method="BCa", n_resamples=9999, rng=0).confidence_interval
    width = theirs.high - theirs.low
    assert inference.bca_interval(moved) == pytest.approx(tuple(theirs), abs=0.04 * width)


def test_the_interval_of_one_value_is_unknown():
    assert np.isnan(inference.bca_interval([1.0])).all()


def test_the_limit_of_the_sd_is_rarely_above_it():
    generator = np.random.default_rng(6)
    for draw, sd in (
        (lambda: generator.standard_normal(10), 1),
        (lambda: (generator.random(10) < 0.35) + 0.05 * generator.standard_normal(10), math.hypot(0.477, 0.05)),
    ):
        limits = np.array([inference.sd_lower_limit(draw()) for _ in range(300)])
        assert (limits > sd).mean() < 0.04
        assert np.median(limits) > 0.4 * sd, "yet it is of use"


def test_the_limit_of_the_sd_nears_the_sd():
    losses = np.random.default_rng(7).standard_normal(20_000)
    assert 0.97 < inference.sd_lower_limit(losses) < 1


def test_shares_that_went_unseen():
    assert inference.clopper_pearson_upper(0, 10) == pytest.approx(1 - 0.05 ** (1 / 10))
    theirs = stats.binomtest(3, 12, alternative="less").proportion_ci(0.95, "exact").high
    assert inference.clopper_pearson_upper(3, 12) == pytest.approx(theirs)
    assert inference.clopper_pearson_upper(4, 4) == 1
    assert inference.clopper_pearson_upper(0, 0) == 1


# --- verdicts ----------------------------------------------------------------------------------------


def test_settings_are_compared_seed_by_seed():
    seen = gl.verdict(THREE)
    assert seen.reference == "cpu"
    assert seen.table.setting.tolist() == ["cpu:threads=1", "cuda"]
    one = row(seen, "cpu:threads=1")
    assert (one["seeds"], one["same_bits"], one["diverged"], one["left_out"]) == (3, 1, 0, 0)
    assert one["difference"] == pytest.approx((0 + 0.01 - 0.03) / 3)
    assert one["largest_difference"] == pytest.approx(0.03)
    # cuda has no run from seed 2: that seed is left out, not made up, and said
    two = row(seen, "cuda")
    assert (two["seeds"], two["left_out"]) == (2, 1)
    assert two["difference"] == pytest.approx((0.2 - 0.02) / 2)
    assert two["largest_difference"] == pytest.approx(0.2)
    assert "Left out: 1 seed that only one of the two has" in str(seen)
    moved = seen.pairs.set_index(["setting", "seed"]).difference
    assert moved.loc["cpu:threads=1"].tolist() == pytest.approx([0, 0.01, -0.03])
    assert moved.loc["cuda"].tolist() == pytest.approx([0.2, -0.02])
    assert seen.between_seeds == pytest.approx(math.sqrt((0.2**2 + 0.1**2 + 0.3**2) / 2))
    assert seen.largest == pytest.approx(0.2)
    assert seen.ratio == pytest.approx(0.2 / math.sqrt(0.07))


@pytest.mark.parametrize(
    ("moved", "margin", "decision"),
    [
        (TINY, "0.25sd", "equivalent"),
        (TINY, 1e-9, "inconclusive"),
        ([0.1 + some for some in TINY], 0.05, "different"),
        ([0.1 + some for some in TINY], 0.2, "different but negligible"),
        ([0.3, -0.3, 0.2, -0.1, 0.4, -0.5, 0.1, 0.2, -0.2, 0.0], "0.25sd", "inconclusive"),
        ([0.0] * 10, "0.25sd", "equivalent"),
        ([0.0] * 10, 1e-12, "equivalent"),
    ],
)
def test_decisions(moved, margin, decision):
    seen = gl.verdict(levels(cpu=BASE, cuda=shifted(moved)), margin=margin)
    assert seen.decision == decision
    assert seen.decisions == {"cuda": decision}
    assert f"cuda against cpu, 10 seeds: {decision}" in str(seen)


def test_nothing_moved_is_equivalent_with_p_one():
    seen = row(gl.verdict(levels(cpu=BASE, cuda=BASE)), "cuda")
    assert (seen["difference"], seen["low"], seen["high"], seen["p_different"], seen["p_equivalent"]) == (0, 0, 0, 1, 0)


def test_the_sign_is_that_of_the_level_minus_the_reference():
    up = gl.verdict(levels(cpu=BASE, cuda=shifted(0.1)))
    assert row(up, "cuda")["difference"] == pytest.approx(0.1)
    down = gl.verdict(levels(cpu=BASE, cuda=shifted(0.1)), reference="cuda")
    assert row(down, "cpu")["difference"] == pytest.approx(-0.1)


def test_holms_correction_by_hand():
    slight = [0.02, 0.03, -0.01, 0.04, 0.05, 0.01, 0.02, -0.02, 0.03, 0.015]
    seen = gl.verdict(
        levels(cpu=BASE, a=shifted(0.1 + np.array(TINY)), b=shifted(slight), c=shifted(TINY)), margin=0.05
    )
    raw = seen.table.p_different.tolist()
    assert raw[0] < raw[1] < raw[2]
    assert raw[0] == 2 / 2**10
    by_hand = np.maximum.accumulate([3 * raw[0], 2 * raw[1], raw[2]])
    assert seen.table.p_different_holm.tolist() == pytest.approx(by_hand)
    a, b, c = seen.table.p_equivalent
    assert c < b < a
    assert seen.table.p_equivalent_holm.tolist() == pytest.approx([max(2 * b, a), 2 * b, 3 * c])
    assert seen.decision == "different", "one level that differs decides the whole"


def test_the_whole_is_equivalent_only_when_each_is():
    both = gl.verdict(levels(cpu=BASE, a=BASE, b=shifted(TINY)))
    assert both.decision == "equivalent"
    open_one = gl.verdict(levels(cpu=BASE, a=BASE, b=BASE[:1]))
    assert open_one.decisions == {"a": "equivalent", "b": "inconclusive"}
    assert open_one.decision == "inconclusive"


def test_a_margin_in_sd_is_taken_at_the_limit_of_the_sd():
    seen = gl.verdict(levels(cpu=BASE, cuda=shifted(TINY)), margin=" .5 sd")
    assert row(seen, "cuda")["margin"] == pytest.approx(0.5 * inference.sd_lower_limit(BASE))
    assert seen.between_seeds == pytest.approx(np.std(BASE, ddof=1))
    assert seen.between_seeds_at_least == inference.sd_lower_limit(BASE)
    assert row(gl.verdict(levels(cpu=BASE, cuda=BASE), margin=0.07), "cuda")["margin"] == 0.07


def test_five_seeds_cannot_show_a_difference_and_six_can():
    five = gl.verdict(levels(cpu=BASE[:5], cuda=shifted(9.0, BASE[:5])))
    assert five.decision == "inconclusive"
    assert "5 seeds cannot show a difference at alpha 0.05, 6 can" in str(five)
    assert gl.verdict(levels(cpu=BASE[:6], cuda=shifted(9.0, BASE[:6]))).decision == "different"


def test_the_order_of_the_runs_does_not_matter():
    losses = list(np.random.default_rng(8).standard_normal(40))
    runs = levels(cpu=losses, a=shifted(np.random.default_rng(9).standard_normal(40) / 3, losses), b=losses)
    first, second = gl.verdict(runs), gl.verdict(runs.sample(frac=1, random_state=1))
    for level in ("a", "b"):
        assert row(first, level) == pytest.approx(row(second, level), nan_ok=True)


def test_the_reference_is_cpu_or_the_first():
    assert gl.verdict(levels(cuda=BASE, cpu=BASE)).reference == "cpu"
    assert gl.verdict(levels(cuda=BASE, xpu=BASE)).reference == "cuda"
    assert gl.verdict(levels(cuda=BASE, xpu=BASE), reference="xpu").reference == "xpu"


def test_any_factor_and_block_can_be_compared():
    runs = levels(copied=BASE, reused=shifted(0.2)).rename(columns={"setting": "loader", "seed": "film"})
    runs["film"] = "film " + runs.film.astype(str)
    seen = gl.verdict(runs, factor="loader", block="film")
    assert seen.decisions == {"reused": "different"}
    assert "reused against copied, 10 films: different" in str(seen)
    numbers = gl.verdict(
        runs.assign(loader=runs.loader.map({"copied": 16, "reused": 32})), factor="loader", block="film"
    )
    assert numbers.decisions == {32: "different"}


def test_the_factor_may_be_what_tells_protocols_apart():
    runs = levels(a=BASE, b=BASE).assign(frames=[10] * 10 + [20] * 10)
    assert gl.verdict(runs.assign(setting="cpu"), factor="frames").decisions == {20: "equivalent"}


def test_few_columns_are_enough():
    runs = levels(cpu=BASE, cuda=shifted(0.1))[["setting", "seed", "final_loss"]]
    assert gl.verdict(runs).decision == "different"
    assert row(gl.verdict(runs), "cuda")["same_bits"] == 0


@pytest.mark.parametrize("kind", ["bool", "boolean", "object", "int64", "float32"])
def test_a_metric_of_yes_and_no_is_mcnemars_test(kind):
    learned = [True] * 12 + [False] * 8
    other = [True] * 4 + [False] * 16  # 8 seeds no longer learn, none learns that did not
    runs = levels(cpu=map(float, learned), cuda=map(float, other))
    runs["learned"] = pd.Series(learned + other).astype(kind)
    seen = gl.verdict(runs, metric="learned")
    assert row(seen, "cuda")["p_different"] == pytest.approx(stats.binomtest(0, 8).pvalue)
    assert row(seen, "cuda")["difference"] == pytest.approx(-0.4)
    assert seen.decision == "different"


def test_few_seeds_of_which_none_switched_are_no_proof_of_equal_rates():
    few = levels(cpu=[0.0, 1.0] * 5, cuda=[0.0, 1.0] * 5)
    seen = gl.verdict(few, margin=0.1)
    assert seen.decision == "inconclusive"
    assert row(seen, "cuda")["p_equivalent"] == pytest.approx(0.9**10)
    assert row(seen, "cuda")["seeds_needed"] == 29  # 0.9 ** 29 < 0.05 < 0.9 ** 28
    many = levels(cpu=[0.0, 1.0] * 15, cuda=[0.0, 1.0] * 15)
    assert gl.verdict(many, margin=0.1).decision == "equivalent"
    switched = levels(cpu=[0.0, 1.0] * 30, cuda=[1.0, 1.0] + [0.0, 1.0] * 29)
    assert row(gl.verdict(switched, margin=0.1), "cuda")["p_equivalent"] == pytest.approx(stats.binom.cdf(1, 60, 0.1))


def test_numbers_in_single_precision_are_compared_in_double():
    runs = levels(cpu=BASE, cuda=shifted(1e-7))
    single = gl.verdict(runs.astype({"final_loss": "float32"}))
    exact = np.float32(shifted(1e-7)).astype(float) - np.float32(BASE).astype(float)
    assert row(single, "cuda")["difference"] == pytest.approx(exact.mean(), rel=1e-12)


def test_the_words_follow_from_the_numbers():
    text = str(gl.verdict(levels(cpu=BASE, cuda=shifted(TINY))))
    seen = row(gl.verdict(levels(cpu=BASE, cuda=shifted(TINY))), "cuda")
    assert f"equivalent within ±{seen['margin']:.2g} (0.25 sd between seeds" in text
    assert f"difference {seen['difference']:.2g} [{seen['low']:.2g}, {seen['high']:.2g}]" in text
    assert f"p = {seen['p_different']:.2g}" in text
    assert "0 of 10 seeds moved by more than the margin; up to 26% of seeds could" in text
    assert "Diverged runs: 0." in text
    wide = gl.verdict(levels(cpu=BASE, cuda=shifted([0.3, -0.3, 0.2, -0.1, 0.4, -0.5, 0.1, 0.2, -0.2, 0.0])))
    needed = row(wide, "cuda")["seeds_needed"]
    assert needed > 10
    assert f"about {needed:.0f} seeds would settle it" in str(wide)


def test_a_notebook_is_shown_words_table_and_figure():
    bundle, _ = gl.verdict(levels(cpu=BASE, cuda=shifted(TINY)))._repr_mimebundle_()
    assert "equivalent within" in bundle["text/plain"]
    for piece in ("equivalent within", "<table", "p_different_holm", "data:image/png;base64,", "alt="):
        assert piece in bundle["text/html"]
    alone, _ = gl.verdict(levels(cpu=BASE))._repr_mimebundle_()
    assert "nothing to compare" in alone["text/html"]


# --- reruns and diverged runs ------------------------------------------------------------------------

RERUNS = pd.concat(
    [
        frame(("cuda", 0, 0.10, "a"), ("cuda", 1, 0.20, "b"), ("cpu", 0, 0.10, "x"), ("cpu", 1, 0.25, "y")),
        frame(("cuda", 0, 0.10, "a"), ("cuda", 1, 0.23, "c"), ("cpu", 0, 0.90, "z"), rerun=1),
    ]
)


def test_the_reruns_of_the_reference_are_a_control_and_not_compared():
    seen = gl.verdict(RERUNS, reference="cuda")
    assert seen.table.setting.tolist() == ["cpu"]
    assert seen.reruns.difference.tolist() == pytest.approx([0, 0.03])
    assert seen.reruns.same_bits.tolist() == [True, False]
    assert seen.largest == pytest.approx(0.05), "neither the reruns of the reference nor those of others count"
    assert "cuda run again changed a seed by up to 3.00e-02; 1 of 2 seeds gave the same bits twice" in str(seen)
    assert gl.verdict(RERUNS).reruns.difference.tolist() == pytest.approx([0.8])
    third = frame(("cuda", 0, 0.70, "d"), ("cuda", 1, 0.20, "b"), rerun=2)
    again = gl.verdict(pd.concat([RERUNS, third]), reference="cuda")
    assert "up to 6.00e-01; 0 of 2 seeds" in str(again), "every rerun counts"


def test_a_seed_that_diverged_is_no_pair_but_is_counted():
    runs = levels(cpu=[0.1, 0.3, math.nan, math.nan], cuda=[0.2, math.nan, 0.4, math.nan])
    one = row(gl.verdict(runs), "cuda")
    assert (one["seeds"], one["diverged"], one["reference_diverged"], one["one_diverged"]) == (1, 2, 2, 2)
    assert one["p_diverged"] == 1
    assert gl.verdict(runs).between_seeds == pytest.approx(0.2 / math.sqrt(2))
    assert "Diverged runs: 4 (cpu 2, cuda 2)" in str(gl.verdict(runs))


def test_diverging_more_often_is_different_whatever_the_metric_says():
    seen = gl.verdict(levels(cpu=BASE, cuda=[*BASE[:3], *[math.nan] * 7]))
    assert row(seen, "cuda")["p_diverged"] == pytest.approx(2 / 2**7)
    assert row(seen, "cuda")["p_different"] == 1
    assert seen.decision == "different"
    assert "Diverged: 7, under cpu 0 (p = 0.016)" in str(seen)


def test_what_may_diverge_more_often_is_not_equivalent():
    seen = gl.verdict(levels(cpu=BASE, cuda=[*BASE[:9], math.nan]))
    assert row(seen, "cuda")["p_equivalent_holm"] == 0
    assert seen.decision == "inconclusive"
    assert "could diverge alone" in str(seen)
    many = list(np.linspace(0.1, 0.9, 100))
    assert gl.verdict(levels(cpu=many, cuda=[*many[:99], math.nan])).decision == "equivalent", "at most 5 % could"
    same = gl.verdict(levels(cpu=[*BASE, math.nan], cuda=[*BASE, math.nan]))
    assert same.decision == "equivalent", "a seed that diverges under both tells no difference"


def test_a_rare_divergence_costs_the_other_test_nothing():
    seen = gl.verdict(levels(cpu=BASE, cuda=[*shifted(0.3)[:6], *[math.nan] * 4]))
    one = row(seen, "cuda")
    assert one["p_different_holm"] == one["p_different"] == 2 / 2**6
    two = row(gl.verdict(levels(cpu=BASE + BASE, cuda=[*shifted(0.3), *BASE[:4], *[math.nan] * 6])), "cuda")
    assert two["p_diverged"] == 2 / 2**6
    assert two["p_different_holm"] == 2 * two["p_different"], "two tests that could give an alarm"


def test_every_run_of_a_level_may_diverge():
    seen = gl.verdict(levels(cpu=BASE, cuda=[math.nan] * 10))
    assert seen.decision == "different"
    assert row(seen, "cuda")["seeds"] == 0
    assert gl.verdict(levels(cpu=[math.nan] * 3, cuda=BASE[:3])).decision == "inconclusive"
    assert gl.plots.estimation(seen).png()


def test_a_diverged_run_has_no_metric_even_where_there_is_a_number():
    runs = levels(cpu=BASE, cuda=[*BASE[:9], math.nan])
    runs["final_loss"] = runs.final_loss.fillna(1e9)
    assert row(gl.verdict(runs), "cuda")["largest_difference"] == 0


# --- too little, or wrong ----------------------------------------------------------------------------


def test_one_seed_is_no_evidence():
    seen = gl.verdict(THREE[THREE.seed == 0])
    assert seen.decision == "inconclusive"
    assert "one seed is no evidence" in str(seen)
    assert seen.largest == pytest.approx(0.2)
    assert math.isnan(seen.between_seeds)
    assert math.isnan(seen.ratio)
    assert gl.plots.estimation(seen).png()


def test_settings_without_a_seed_in_common_are_not_compared():
    seen = gl.verdict(frame(("cpu", 0, 0.1, "a"), ("cpu", 1, 0.3, "b"), ("cuda", 2, 0.2, "c")))
    assert (row(seen, "cuda")["seeds"], row(seen, "cuda")["left_out"]) == (0, 3)
    assert "no seed in common" in str(seen)


def test_one_setting_alone_is_compared_with_nothing():
    seen = gl.verdict(THREE[THREE.setting == "cpu"])
    assert seen.table.empty
    assert (seen.largest, seen.decision) == (0, "inconclusive")
    assert "nothing to compare" in str(seen)


@pytest.mark.parametrize("column", ["experiment", "profile", "frames", "protocol"])
def test_runs_of_different_protocols_are_not_compared(column):
    mixed = pd.concat([THREE, THREE.assign(**{column: "another"})])
    with pytest.raises(gl.UsageError, match=r"mixes.*another"):
        gl.verdict(mixed)


def test_two_runs_of_one_seed_and_setting_are_not_compared():
    with pytest.raises(gl.UsageError, match=r"'cpu' seed 0 was run more than once, on a machine, another"):
        gl.verdict(pd.concat([THREE, THREE.assign(machine="another")]))
    with pytest.raises(gl.UsageError, match=r"setting 'cuda' seed 1 was run more than once; keep one"):
        gl.verdict(pd.concat([THREE, THREE[-1:]]))


def test_a_reference_that_was_not_run_is_refused_with_those_that_were():
    with pytest.raises(gl.UsageError, match=r"'mps'.*cpu:threads=1.*cuda"):
        gl.verdict(THREE, reference="mps")
    with pytest.raises(gl.UsageError, match="no runs"):
        gl.verdict(THREE[:0])


@pytest.mark.parametrize("margin", [0, -0.1, math.nan, math.inf, True, None, "sd", "-1sd", "0sd", "0.25", "1e", [0.1]])
def test_a_malformed_margin_is_refused(margin):
    with pytest.raises(gl.UsageError, match=r"expected a number above 0, or such as '0\.25sd'"):
        gl.verdict(THREE, margin=margin)


@pytest.mark.parametrize("alpha", [0, 1, -0.1, 2, math.nan, "5%"])
def test_a_malformed_alpha_is_refused(alpha):
    with pytest.raises(gl.UsageError, match="alpha"):
        gl.verdict(THREE, alpha=alpha)


@pytest.mark.parametrize("option", ["metric", "factor", "block"])
def test_a_missing_column_is_refused(option):
    with pytest.raises(gl.UsageError, match=r"no column 'beauty'; there are experiment"):
        gl.verdict(THREE, **{option: "beauty"})


def test_a_metric_of_words_is_refused():
    with pytest.raises(gl.UsageError, match=r"'weights' is of type"):
        gl.verdict(THREE, metric="weights")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_finished_run_without_a_number_is_not_passed_over(value):
    runs = levels(cpu=BASE, cuda=BASE)
    runs.loc[12, "final_loss"] = value
    with pytest.raises(gl.UsageError, match=r"1 finished run\(s\) have no finite final_loss: index \[12\]"):
        gl.verdict(runs)


def test_the_frame_is_left_as_it_was():
    before = THREE.copy()
    gl.verdict(THREE)
    assert THREE.equals(before)


def test_recorded_runs_can_be_compared():
    runs = gl.recorded_runs()
    runs = runs[(runs.experiment == "autoencoder") & (runs.profile == "paper") & (runs.loader == "window")]
    seen = gl.verdict(runs, reference="cuda:tf32=off")
    assert set(seen.table.setting) >= {"cuda:tf32=on", "cuda:cudnn=off", "cuda:deterministic=on"}
    assert (seen.table.seeds >= 10).all()
    assert 0 < seen.between_seeds < 1
    assert "recorded on" in "".join(text.get_text() for text in seen.plot().figure.legends[0].get_texts())


# --- the figure --------------------------------------------------------------------------------------


def test_the_figure_shows_every_seed_and_every_difference():
    runs = levels(cpu=BASE, cuda=[*shifted(TINY)[:9], math.nan])
    picture = gl.verdict(runs).plot()
    left, right = picture.figure.axes
    count = lambda axes: sum(len(marks.get_offsets()) for marks in axes.collections)  # noqa: E731
    assert count(left) == 20, "the diverged run is drawn, too"
    assert count(right) == 9
    assert picture.figure._suptitle.get_text() == "cuda against cpu: inconclusive"
    assert "cuda against cpu" in picture.alt
    assert right.get_xscale() == "symlog", "differences of a millionth are to be seen beside the margin"
    assert picture.figure.get_size_inches()[0] == 7.2


# --- how many seeds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_the_seeds_needed_reach_the_power_in_simulation(ratio):
    told = gl.seeds_needed(sd=ratio, margin=1.0, power=0.8).iloc[0]
    generator = np.random.default_rng(10)

    def rate(test, n, shift):
        return np.mean([test(shift + ratio * generator.standard_normal(n)) <= 0.05 for _ in range(400)])

    n, m = int(told.to_detect), int(told.to_exclude)
    assert 0.73 < rate(inference.sign_flip_p, n, 1.0) < 0.95
    assert 0.73 < rate(lambda moved: inference.equivalence_p(moved, 1.0), m, 0.0) < 0.93
    assert told.seeds == max(n, m)


def test_the_seeds_needed_are_those_of_the_t_test():
    from statsmodels.stats.power import TTestPower

    (n,) = gl.seeds_needed(sd=2.0, margin=1.0, power=0.9).to_detect
    assert n == math.ceil(TTestPower().solve_power(0.5, power=0.9, alpha=0.05))


def test_the_seeds_needed_from_a_frame():
    runs = levels(cpu=BASE, a=shifted(TINY), b=shifted([0.3, -0.3, 0.2, -0.1, 0.4, -0.5, 0.1, 0.2, -0.2, 0.0]))
    told = gl.seeds_needed(runs)
    assert told.setting.tolist() == ["a", "a", "b", "b"]
    assert told.power.tolist() == [0.8, 0.9, 0.8, 0.9]
    assert told.to_detect.tolist()[:2] == [6, 6], "fewer than six cannot show anything"
    assert told.seeds[2] < told.seeds[3]
    wider = gl.seeds_needed(runs, margin="0.5sd")
    assert wider.seeds[2] < told.seeds[2]


def test_seeds_needed_refuses_what_it_cannot_use():
    for options in ({}, {"sd": -1.0, "margin": 1.0}, {"sd": 1.0}, {"sd": 1.0, "margin": 1.0, "power": 1.0}):
        with pytest.raises(gl.UsageError):
            gl.seeds_needed(**options)
    with pytest.raises(gl.UsageError, match="not both"):
        gl.seeds_needed(THREE, sd=1.0)


# --- components of variance --------------------------------------------------------------------------

TRUTH = {"seed": 4.0, "setting": 1.0, "seed × setting": 0.5, "rerun": 0.25}


def simulated(generator, seeds=6, settings=5, reruns=2):
    draw = {source: math.sqrt(variance) for source, variance in TRUTH.items()}
    a, b = draw["seed"] * generator.standard_normal(seeds), draw["setting"] * generator.standard_normal(settings)
    ab = draw["seed × setting"] * generator.standard_normal((seeds, settings))
    rows = [
        (f"s{j}", i, r, a[i] + b[j] + ab[i, j] + draw["rerun"] * generator.standard_normal())
        for i, j, r in itertools.product(range(seeds), range(settings), range(reruns))
    ]
    return pd.DataFrame(rows, columns=["setting", "seed", "rerun", "final_loss"])


def test_the_components_of_variance_are_those_that_were_put_in():
    generator = np.random.default_rng(11)
    found = pd.DataFrame(
        [gl.variance_components(simulated(generator)).table.set_index("source").variance for _ in range(150)]
    ).mean()
    for source, variance in TRUTH.items():
        assert found[source] == pytest.approx(variance, rel=0.2), source


def test_the_components_agree_with_analysis_of_variance():
    from statsmodels.formula.api import ols
    from statsmodels.stats.anova import anova_lm

    runs = simulated(np.random.default_rng(12))
    parts = gl.variance_components(runs)
    table = anova_lm(ols("final_loss ~ C(seed) * C(setting)", runs).fit())
    square = table.sum_sq / table.df
    assert parts["rerun"] == pytest.approx(square["Residual"])
    assert parts["seed × setting"] == pytest.approx((square["C(seed):C(setting)"] - square["Residual"]) / 2)
    assert parts["seed"] == pytest.approx((square["C(seed)"] - square["C(seed):C(setting)"]) / (2 * 5))
    assert parts["setting"] == pytest.approx((square["C(setting)"] - square["C(seed):C(setting)"]) / (2 * 6))
    assert parts.table.share.sum() == pytest.approx(1)


def test_reruns_of_some_cells_are_enough():
    generator = np.random.default_rng(13)
    found = []
    for _ in range(150):
        runs = simulated(generator)
        found.append(gl.variance_components(runs[(runs.rerun == 0) | (runs.setting == "s0")])["rerun"])
    assert np.mean(found) == pytest.approx(TRUTH["rerun"], rel=0.2)


def test_without_reruns_two_sources_cannot_be_told_apart():
    runs = simulated(np.random.default_rng(14), reruns=1)
    parts = gl.variance_components(runs)
    assert parts.table.source.tolist() == ["seed", "setting", "seed × setting, rerun"]
    assert "cannot be told apart" in str(parts)
    with pytest.raises(gl.UsageError, match="'rerun'"):
        parts["rerun"]


def test_seeds_that_did_not_finish_everywhere_are_left_out_of_the_components_and_said():
    runs = simulated(np.random.default_rng(15))
    runs.loc[(runs.seed == 2) & (runs.setting == "s1"), "final_loss"] = math.nan
    parts = gl.variance_components(runs)
    assert "1 seed(s) did not finish under every setting" in str(parts)
    assert parts["seed"] == gl.variance_components(runs[runs.seed != 2])["seed"]
    with pytest.raises(gl.UsageError, match=r"1 seed\(s\) finished under all of 5"):
        gl.variance_components(runs[runs.seed == 0])
