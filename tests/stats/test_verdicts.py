import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from scipy import stats
from stats_runs import BASE, TINY, WIDE, runs_of, shifted

import gpulab as gl
from gpulab.stats import tests as inference
from gpulab.stats.power import smallest_shown


def frame(*rows, **columns):
    """Runs from (setting, seed, loss, weights), and columns that all have in common."""
    runs = pd.DataFrame(rows, columns=["setting", "seed", "final_loss", "weights"])
    common = {"experiment": "prednet", "profile": "quick", "frames": 1000, "protocol": "1a2b", "rerun": 0}
    common |= {"machine": "a machine", "heldout_loss": 1.0, "recorded": False, **columns}
    return runs.assign(**common, status=np.where(runs.final_loss.isna(), "diverged", "finished"))


def levels(**losses):
    """Runs from a list of losses per setting, seeds counted from 0."""
    rows = runs_of(losses).assign(weights=lambda runs: runs.setting + runs.seed.astype(str))
    return frame(*rows.itertuples(index=False))


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


def row(verdict, level="cuda"):
    (numbers,) = verdict.table[verdict.table[verdict.factor] == level].to_dict("records")
    return numbers


def test_settings_are_compared_seed_by_seed():
    before = THREE.copy()
    verdict = gl.verdict(THREE)
    assert THREE.equals(before), "the frame is left as it was"
    assert verdict.reference == "cpu"
    assert verdict.table.setting.tolist() == ["cpu:threads=1", "cuda"]
    one = row(verdict, "cpu:threads=1")
    assert (one["seeds"], one["same_bits"], one["diverged"], one["left_out"]) == (3, 1, 0, 0)
    assert one["difference"] == pytest.approx((0 + 0.01 - 0.03) / 3)
    assert one["largest_difference"] == pytest.approx(0.03)
    # cuda has no run from seed 2: that seed is left out, not made up, and said
    two = row(verdict)
    assert (two["seeds"], two["left_out"]) == (2, 1)
    assert two["difference"] == pytest.approx((0.2 - 0.02) / 2)
    assert two["largest_difference"] == pytest.approx(0.2)
    assert "cuda against cpu, 2 of 3 seeds: " in str(verdict), "in the first words"
    assert "Left out: 1 seed that only one of the two has" in str(verdict)
    assert sorted(verdict.pairs.difference) == pytest.approx([-0.03, -0.02, 0, 0.01, 0.2])
    assert verdict.between_seeds == pytest.approx(math.sqrt((0.2**2 + 0.1**2 + 0.3**2) / 2))
    assert verdict.largest == pytest.approx(0.2)
    assert verdict.ratio == pytest.approx(0.2 / math.sqrt(0.07))


LOST = [math.nan]
MANY = list(np.linspace(0.1, 0.9, 100))
BITS = [0.0, 1.0]
DOUBT = "not one seed differs by a digit from that under cpu: make sure that the setting reached the training"


def case(cpu, cuda, decision, words="", margin="0.25sd", **numbers):
    return cpu, cuda, decision, words, margin, numbers


MOVED = shifted(shifted(0.1, TINY))
CASES = [
    case(BASE, shifted(TINY), "equivalent", "cuda against cpu, 10 seeds: equivalent"),
    case(BASE, shifted(TINY), "inconclusive", margin=1e-9),
    case(BASE, MOVED, "different", margin=0.05),
    case(BASE, MOVED, "different but negligible", margin=0.2),
    case(BASE, shifted(WIDE), "inconclusive", "seeds would settle it"),
    case(BASE, BASE, "equivalent", DOUBT, 1e-12, difference=0, low=0, high=0, p_different=1, p_equivalent=0),
    case(BASE[:5], shifted(WIDE)[:5], "inconclusive", "5 seeds are too few to show a difference, 6 are enough"),
    case(BASE[:5], shifted(WIDE)[:5], "inconclusive", " (a rough guess, power 0.8"),
    case(BASE[:6], shifted(9.0)[:6], "different"),
    case(BASE[:1], [0.4], "inconclusive", "nothing can be compared: only one seed finished under both"),
    case(BASE[:1], [0.4], "inconclusive", "between seeds under cpu is unknown: fewer than two finished"),
    # Yes and no, whose margin is a share of the seeds: 0.9 ** 29 < 0.05 < 0.9 ** 28.
    case(BITS * 5, BITS * 5, "inconclusive", margin=0.1, p_equivalent=0.9**10, seeds_needed=29),
    case(BITS * 30, [1, 1, *BITS * 29], "equivalent", margin=0.1, p_equivalent=stats.binom.cdf(1, 60, 0.1)),
    # A seed that diverged is no pair, but it is counted.
    case(
        [0.1, *LOST],
        [0.2, *LOST],
        "inconclusive",
        "only one seed finished under both. Diverged, or without a number: 1, under cpu 1",
    ),
    case([0.1, *LOST * 2], [*LOST, 0.4, *LOST], "inconclusive", seeds=0, diverged=2, one_diverged=2, p_diverged=1),
    case(
        BASE,
        [*BASE[:3], *LOST * 7],
        "different",
        "Under cuda 7 of 10 runs diverged, under cpu 0 of 10. Difference 0",
        p_diverged_holm=4 / 2**7,
    ),
    # Where four diverge, no alarm could come of it, and the other test pays nothing for it.
    case(BASE, [*shifted(0.3)[:6], *LOST * 4], "different", p_different=2 / 2**6, p_different_holm=2 / 2**6),
    case(BASE * 2, [*shifted(0.3), *BASE[:4], *LOST * 6], "different", p_diverged=2 / 2**6, p_different_holm=4 / 2**10),
    case(BASE, [*BASE[:9], *LOST], "inconclusive", "could diverge alone", p_equivalent_holm=0),
    case(MANY, [*MANY[:99], *LOST], "equivalent"),  # at most 5 % could
    case([*BASE, *LOST], [*BASE, *LOST], "equivalent"),  # which tells no difference
    case(BASE, LOST * 10, "different", seeds=0),
    case(LOST * 3, BASE[:3], "inconclusive", "Diverged, or without a number: 0, under cpu 3", reference_diverged=3),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_decision_its_numbers_and_what_is_said(number):
    cpu, cuda, decision, words, margin, numbers = CASES[number]
    verdict = gl.verdict(levels(cpu=cpu, cuda=cuda), margin=margin)
    assert verdict.decision == decision
    assert {field: row(verdict)[field] for field in numbers} == pytest.approx(numbers)
    assert words in str(verdict)
    assert DOUBT not in str(verdict) or set(verdict.pairs.difference.dropna()) == {0}


def test_holms_correction_by_hand():
    slight = [0.02, 0.03, -0.01, 0.04, 0.05, 0.01, 0.02, -0.02, 0.03, 0.015]
    runs = levels(cpu=BASE, a=shifted(shifted(0.1, TINY)), b=shifted(slight), c=shifted(TINY))
    verdict = gl.verdict(runs, margin=0.05)
    raw = verdict.table.p_different.tolist()
    assert raw[0] < raw[1] < raw[2]
    by_hand = np.maximum.accumulate([3 * raw[0], 2 * raw[1], raw[2]])
    assert verdict.table.p_different_holm.tolist() == pytest.approx(by_hand)
    a, b, c = verdict.table.p_equivalent
    assert c < b < a
    assert verdict.table.p_equivalent_holm.tolist() == pytest.approx([max(2 * b, a), 2 * b, 3 * c])
    assert verdict.decision == "different", "one level that differs decides the whole"
    assert gl.verdict(levels(cpu=BASE, a=BASE, b=BASE[:1])).decision == "inconclusive", "equivalent when each is"


def test_the_order_of_the_runs_does_not_matter_nor_the_precision_of_numbers():
    generator = np.random.default_rng(8)
    losses = generator.standard_normal(40)
    runs = levels(cpu=losses, a=losses + generator.standard_normal(40) / 3)
    shuffled = gl.verdict(runs.sample(frac=1, random_state=1))
    assert row(gl.verdict(runs), "a") == pytest.approx(row(shuffled, "a"), nan_ok=True)
    single = gl.verdict(runs.astype({"final_loss": "float32"}))  # is compared in double
    exact = np.float32(runs.final_loss[40:80]).astype(float) - np.float32(losses).astype(float)
    assert row(single, "a")["difference"] == pytest.approx(exact.mean(), rel=1e-12)


def test_any_factor_reference_and_block_can_be_compared():
    assert gl.verdict(levels(cuda=BASE, cpu=BASE)).reference == "cpu"
    assert gl.verdict(levels(cuda=BASE, xpu=BASE), reference="xpu").reference == "xpu"
    runs = levels(copied=BASE, reused=shifted(0.2)).rename(columns={"setting": "loader", "seed": "film"})
    runs["film"] = "film " + runs.film.astype(str)
    numbered = runs.assign(loader=runs.loader.map({"copied": 16, "reused": 32}))
    assert gl.verdict(numbered, factor="loader", block="film").decisions == {32: "different"}


@pytest.mark.parametrize("kind", ["bool", "boolean", "float32"])
def test_a_metric_of_yes_and_no_is_mcnemars_test(kind):
    learned = [True] * 12 + [False] * 8
    other = [True] * 4 + [False] * 16  # 8 seeds no longer learn, none learns that did not
    runs = levels(cpu=map(float, learned), cuda=map(float, other))
    runs["learned"] = pd.Series(learned + other).astype(kind)
    verdict = gl.verdict(runs, metric="learned")
    assert row(verdict)["p_different"] == pytest.approx(stats.binomtest(0, 8).pvalue)
    assert row(verdict)["difference"] == pytest.approx(-0.4)
    assert verdict.decision == "different"


def test_yes_and_no_have_a_share_of_the_seeds_for_margin():
    runs = levels(cpu=BITS * 15, cuda=BITS * 15)
    usual = gl.verdict(runs)
    assert (usual.margin, usual.decision) == (0.1, "equivalent")
    shown = stats.beta.ppf(0.8, 6, 25)
    assert f"a difference of {shown:.2g} would have been shown (power 0.8)" in str(usual)
    with pytest.raises(gl.UsageError, match="'final_loss' holds only yes and no"):
        gl.verdict(runs, margin="0.25sd")


def test_the_same_weights_are_not_tested():
    runs = levels(cpu=BASE, cuda=BASE, tf32=shifted(0.1)).assign(learned=lambda runs: runs.final_loss > 0.3)
    runs.loc[runs.setting == "cuda", "weights"] = [f"cpu{seed}" for seed in range(10)]
    verdict = gl.verdict(runs)
    assert verdict.decisions == {"cuda": "equivalent", "tf32": "different"}
    assert math.isnan(row(verdict)["p_different"])
    assert row(verdict, "tf32")["p_different_holm"] == row(verdict, "tf32")["p_different"], "one test, not two"
    assert gl.verdict(runs[runs.setting != "tf32"], "learned").decision == "equivalent", "though ten seeds are few"
    runs.loc[runs.setting == "cuda", "weights"] = [f"cpu{seed}" for seed in range(9)] + ["other"]
    assert row(gl.verdict(runs))["p_different"] == 1


def test_what_so_many_seeds_could_have_shown_is_said_of_each_level():
    verdict = gl.verdict(levels(cpu=BASE, a=shifted(WIDE), b=shifted(WIDE)[:9], c=BASE[:1]))
    a, b, c = (row(verdict, level) for level in "abc")
    assert a["margin_relative"] == pytest.approx(a["margin"] / np.mean(BASE))
    assert b["margin_relative"] == pytest.approx(a["margin"] / np.mean(BASE[:9]))
    assert a["smallest_shown"] == pytest.approx(smallest_shown(10, np.std(WIDE, ddof=1), 0.05 / 2))
    assert c["smallest_shown"] == math.inf
    line = str(verdict).splitlines()[0]
    assert f"a difference of {a['smallest_shown']:.2g} would have been shown (power 0.8)" in line


def test_how_many_seeds_pairs_are_made_from_is_in_the_first_words():
    runs = levels(cpu=BASE, cuda=shifted(TINY)).assign(scene=lambda runs: runs.seed)
    text = str(gl.verdict(runs.assign(seed=runs.scene % 2), block="scene"))
    assert text.startswith("cuda against cpu, 10 scenes made from 2 distinct seeds: equivalent. ")


def test_the_effect_is_said_first_and_then_what_it_is_compared_with():
    words = {"cuda": "the GPU", "final_loss": "loss"}
    same, other = (gl.verdict(levels(cpu=BASE, cuda=shifted(by))) for by in (0.0002, 0.3))
    unlike = gl.verdict(levels(cpu=BASE, cuda=shifted(WIDE)))
    assert same.sentences(words) == [
        "Under the GPU the loss differs by 0.054 % on average from that under cpu, and is higher in 10 of 10 seeds: "
        "that is no luck, but differences below 7.2 % (a quarter of the spread between seeds) count as none here."
    ]
    near = gl.verdict(levels(cpu=BASE, cuda=shifted(TINY)))
    (said,) = near.sentences(words)
    assert (
        "count as none here. 0 of 10 seeds moved further, and jumps of up to 26% of all seeds could have gone" in said
    )
    assert other.sentences(words) == [
        "Under the GPU the loss is 1.81 times as high as under cpu, and higher in 10 of 10 seeds."
    ]
    assert f"about {row(unlike)['seeds_needed']:.0f} seeds would settle it" in unlike.sentences(words)[0]


def test_a_margin_in_per_cent_of_the_mean():
    verdict = gl.verdict(levels(cpu=BASE, cuda=shifted(TINY)), margin="1%")
    assert row(verdict)["margin"] == pytest.approx(0.01 * np.mean(BASE))
    assert verdict.decision == "equivalent"
    assert "differences below 1 % count as none here" in str(verdict)
    assert gl.verdict(levels(cpu=BITS * 30, cuda=BITS * 30), margin="10%").margin == 0.1, "a share of the seeds"


def test_rows_of_one_seed_such_as_episodes_are_averaged_and_it_is_said():
    runs = runs_of({"cpu": BASE, "cuda": shifted(0.1)})
    episodes = pd.concat([runs.assign(episode=n, final_loss=runs.final_loss + n) for n in (-1, 0, 1)])
    verdict, alone = gl.verdict(episodes), gl.verdict(runs)
    assert row(verdict) == pytest.approx(row(alone), nan_ok=True)
    assert "60 rows were averaged to 20 first, one for each setting and seed; those of one seed differ in" in str(
        verdict
    )
    episodes.loc[(episodes.episode == 1) & (episodes.seed == 3) & (episodes.setting == "cuda"), "final_loss"] = math.nan
    assert row(gl.verdict(episodes))["diverged"] == 1
    numbered = gl.verdict(episodes.assign(rerun=episodes.episode + 1))
    assert "Not compared: 20 rows with `rerun` above 0 that are not under cpu." in str(numbered)


def test_the_factor_is_not_named_as_what_differs_between_runs_of_one_seed():
    runs = runs_of({"A100": BASE, "H100": BASE}).rename(columns={"setting": "machine"})
    twice = pd.concat([runs.assign(day="Monday"), runs.assign(day="Sunday")])
    with pytest.raises(gl.UsageError, match="seed 0 was run more than once, with another day; keep the rows of one"):
        gl.verdict(twice, factor="machine")


def test_an_empty_number_is_missing_and_has_not_diverged():
    runs = runs_of({"cpu": BASE, "cuda": shifted(0.1)}).astype({"final_loss": "Float64"})
    runs.loc[12, "final_loss"] = pd.NA
    verdict = gl.verdict(runs)
    assert row(verdict)["diverged"] == 0
    assert "Left out, because they did not finish: 1 (cuda 1 missing)" in str(verdict)


def test_seeds_far_from_the_others_that_make_the_margin_wide_are_said():
    """A harm of 20 % to all other seeds passes as negligible within the margin that they make."""
    base = np.append(np.linspace(0.04, 0.06, 18), [0.5, 0.52])
    harmed = np.append(1.2 * base[:18], base[18:])
    verdict = gl.verdict(levels(cpu=base, cuda=harmed))
    assert verdict.decision == "different but negligible"
    text = str(verdict)
    assert "Most of this spread comes from 2 of 20 seeds that lie far from the others: without them the margin" in text
    assert text.count("far from the others") == 1
    alone = gl.verdict(levels(cpu=base[:18], cuda=harmed[:18]))
    assert alone.decision == "different"
    assert f"would be {row(alone)['margin']:.2g} instead of {row(verdict)['margin']:.2g}" in text
    assert "far from the others" not in str(alone)


def test_jumps_against_all_others_are_said_in_the_first_line():
    noise = np.random.default_rng(21).normal(0.004, 0.001, 27)
    plateau = np.where(np.arange(27) < 6, 0.14, 0.04) + np.linspace(0, 0.015, 27)
    freed = plateau + noise - np.where(np.isin(np.arange(27), (2, 5)), 0.1 + noise, 0)
    verdict = gl.verdict(levels(cpu=plateau, cuda=freed))
    rest = np.delete(freed - plateau, (2, 5))
    jumps = f"2 of 27 seeds jumped (mean -0.1), the other 25 moved the other way (mean {rest.mean():+.2g}, p = "
    assert f"{jumps}{inference.mean_p(rest):.0e}): the difference mixes the two." in str(verdict).splitlines()[0]
    # with the others, among them, too few or too little of a jump
    worse = plateau + noise + np.where(np.isin(np.arange(27), (2, 5)), 0.1, 0)
    among = plateau + noise - np.where(np.isin(np.arange(27), (2, 5)), 0.01, 0)
    for other in (worse, among, plateau + noise, plateau):
        verdict = gl.verdict(levels(cpu=plateau, cuda=other))
        assert "mixes" not in str(verdict)


RERUNS = pd.concat(
    [
        frame(("cuda", 0, 0.10, "a"), ("cuda", 1, 0.20, "b"), ("cpu", 0, 0.10, "x"), ("cpu", 1, 0.25, "y")),
        frame(("cuda", 0, 0.10, "a"), ("cuda", 1, 0.23, "c"), ("cpu", 0, 0.90, "z"), rerun=1),
        frame(("cuda", 1, 0.80, "d"), rerun=2),
    ]
)


def test_the_reruns_of_the_reference_are_a_control_and_not_compared():
    verdict = gl.verdict(RERUNS, reference="cuda")
    assert verdict.table.setting.tolist() == ["cpu"]
    assert verdict.reruns.difference.tolist() == pytest.approx([0, 0.03, 0.6])
    assert verdict.reruns.same_bits.tolist() == [True, False, False]
    assert verdict.largest == pytest.approx(0.05), "neither the reruns of the reference nor those of others count"


def test_what_has_no_pairs_has_a_figure_and_a_diverged_run_no_metric_even_where_there_is_a_number():
    verdict = gl.verdict(frame(("cpu", 0, 0.1, "a"), ("cpu", 1, 0.3, "b"), ("cuda", 2, 0.2, "c")))
    assert (row(verdict)["seeds"], row(verdict)["left_out"]) == (0, 3)
    assert "no seed finished under both" in str(verdict)
    alone = gl.verdict(THREE[THREE.setting == "cpu"])
    assert (len(alone.table), alone.largest, alone.decision) == (0, 0, "inconclusive")
    assert "nothing to compare" in alone.html()
    single = gl.verdict(THREE[THREE.seed == 0])
    assert math.isnan(single.ratio)
    for drawn in (single, gl.verdict(levels(cpu=BASE, cuda=LOST * 10))):
        assert drawn.plot().png()
    runs = levels(cpu=BASE, cuda=[*BASE[:9], *LOST]).fillna({"final_loss": 1e9})
    assert row(gl.verdict(runs))["largest_difference"] == 0


def test_the_figure_shows_every_seed_and_every_difference():
    verdict = gl.verdict(levels(cpu=BASE, cuda=[*shifted(TINY)[:9], math.nan]))
    picture = verdict.plot()
    left, right = picture.figure.axes
    marks = [
        sum(len(drawn.get_offsets()) for drawn in axes.collections if isinstance(drawn, PathCollection))
        for axes in (left, right)
    ]
    assert marks == [20, 9], "the diverged run is drawn, too"
    assert "GPU, against CPU: " in picture.alt
    keys = [text.get_text() for legend in picture.figure.legends for text in legend.get_texts()]
    assert "mean, 95% interval" in keys
    (margin,) = (words for words in keys if words.startswith("margin"))
    assert margin.endswith(f" sd, ±{verdict.table.margin.iloc[0]:.2g}")
    assert "<table" in verdict.html()
    assert verdict.html() == verdict.words() + picture.html()
