"""What a verdict decides, counts and says, by hand."""

import math
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from scipy import stats

import gpulab as gl
from gpulab.stats import Verdict
from gpulab.stats._decisions import DECISION_COLUMNS, LevelDecision
from tests.stats._helpers import BASE, TINY, WIDE, runs_of, shifted


def levels(**losses):
    """Runs from a list of losses per setting, seeds counted from 0."""
    weights = {"weights": lambda runs: runs.setting + runs.seed.astype(str)}
    return runs_of(losses).assign(
        **weights, status=lambda runs: np.where(runs.final_loss.isna(), "diverged", "finished")
    )


def row(verdict, level="cuda"):
    (numbers,) = verdict.table[verdict.table[verdict.factor] == level].to_dict("records")
    return numbers


THREE = levels(
    **{"cpu": [0.10, 0.20, 0.60], "cpu:threads=1": [0.10, 0.21, 0.57], "cuda": [0.30, 0.18]}
)
THREE.loc[[0, 3], "weights"] = "the same"  # of seed 0, under cpu and under one thread


def test_verdict_compares_settings_seed_by_seed():
    before = THREE.copy()
    verdict = gl.verdict(THREE)
    assert THREE.equals(before), "the frame is left as it was"
    one, two = row(verdict, "cpu:threads=1"), row(verdict)
    assert (one["seeds"], one["same_bits"], one["diverged"], one["unpaired"]) == (3, 1, 0, 0)
    assert one["difference"] == pytest.approx((0 + 0.01 - 0.03) / 3)
    # cuda has no run from seed 2: that seed is left out, not made up, and said
    assert (two["seeds"], two["unpaired"]) == (2, 1)
    assert two["difference"] == pytest.approx((0.2 - 0.02) / 2)
    assert "cuda against cpu, 2 of 3 seeds: " in str(verdict), "in the first words"
    assert "Missing: seed 2 under cuda." in str(verdict)
    assert sorted(verdict.pairs.difference) == pytest.approx([-0.03, -0.02, 0, 0.01, 0.2])
    assert verdict.between_seeds == pytest.approx(math.sqrt((0.2**2 + 0.1**2 + 0.3**2) / 2))


LOST, BITS = [math.nan], [0.0, 1.0]
MANY = list(np.linspace(0.1, 0.9, 100))
MOVED = shifted(shifted(0.1, TINY))
TOLD = "Under cuda, 7 of 10 runs diverged; under cpu, 0 of 10. Difference 0"
DOUBT = "Check that the setting reached the training"
CASES = [  # losses under cpu and under cuda, margin, decision, words, numbers
    (BASE, shifted(TINY), "0.25sd", "equivalent", "cuda against cpu, 10 seeds: equivalent", {}),
    (BASE, shifted(TINY), 1e-9, "inconclusive", "More than 100,000 seeds", {}),
    (BASE, MOVED, 0.05, "different", "equivalence within ±0.05; 90 % interval 0.1 to 0.1", {}),
    (BASE, MOVED, 0.2, "different but negligible", "", {}),
    (BASE, shifted(WIDE), "0.25sd", "inconclusive", "(estimate for a power of 0.8", {}),
    (
        BASE,
        BASE,
        1e-12,
        "equivalent",
        DOUBT,
        {"low": 0, "high": 0, "p_different": 1, "p_equivalent": 0},
    ),
    (
        BASE[:5],
        WIDE[:5],
        "0.25sd",
        "inconclusive",
        "At least 6 seeds",
        {},
    ),
    (BASE[:5], WIDE[:5], "0.25sd", "inconclusive", "(rough estimate for a power of 0.8", {}),
    (BASE[:6], shifted(9.0)[:6], "0.25sd", "different", "", {}),
    (
        BASE[:1],
        [0.4],
        "0.25sd",
        "inconclusive",
        "only one seed finished under both",
        {},
    ),
    # Yes and no, whose margin is a share of the seeds: 0.9 ** 29 < 0.05 < 0.9 ** 28.
    (BITS * 5, BITS * 5, 0.1, "inconclusive", "", {"p_equivalent": 0.9**10, "seeds_needed": 29}),
    (
        BITS * 30,
        [1, 1, *BITS * 29],
        "10%",
        "equivalent",
        "",
        {"p_equivalent": stats.binom.cdf(1, 60, 0.1)},
    ),
    # A seed that diverged is no pair, but it is counted.
    (
        [0.1, *LOST],
        [0.2, *LOST],
        "0.25sd",
        "inconclusive",
        "Diverged or without a number: 1 under cuda, 1 under cpu",
        {},
    ),
    (
        [0.1, *LOST * 2],
        [*LOST, 0.4, *LOST],
        1,
        "inconclusive",
        "",
        {"seeds": 0, "diverged": 2, "p_diverged": 1},
    ),
    (BASE, [*BASE[:3], *LOST * 7], "0.25sd", "different", TOLD, {"p_diverged_holm": 4 / 2**7}),
    # Where four diverge, no alarm could come of it, and the other test pays nothing for it.
    (BASE, [*shifted(0.3)[:6], *LOST * 4], 1, "different", "", {"p_different_holm": 2 / 2**6}),
    (
        BASE * 2,
        [*shifted(0.3), *BASE[:4], *LOST * 6],
        1,
        "different",
        "",
        {"p_different_holm": 4 / 2**10},
    ),
    (
        BASE,
        [*BASE[:9], *LOST],
        1,
        "inconclusive",
        "could diverge under only one of the two levels",
        {"p_equivalent_holm": 0},
    ),
    (MANY, [*MANY[:99], *LOST], 1, "equivalent", "", {}),  # at most 5 % could
    ([*BASE, *LOST], [*BASE, *LOST], 1, "equivalent", "", {}),  # which tells no difference
    (BASE, LOST * 10, 1, "different", "", {"seeds": 0}),
    (
        BASE,
        shifted(WIDE)[:9] + LOST,
        0.1,
        "inconclusive",
        "Diverged or without a number: 1 under cuda, 0 under cpu",
        {"seeds": 9},
    ),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_verdict_decision_numbers_and_words_of_each_case(number):
    cpu, cuda, margin, decision, words, numbers = CASES[number]
    verdict = gl.verdict(levels(cpu=cpu, cuda=cuda), margin=margin)
    assert verdict.decision == decision
    assert {field: row(verdict)[field] for field in numbers} == pytest.approx(numbers)
    assert words in str(verdict)
    assert DOUBT not in str(verdict) or set(verdict.pairs.difference.dropna()) == {0}


def test_verdict_holm_correction_is_as_by_hand():
    slight = [0.02, 0.03, -0.01, 0.04, 0.05, 0.01, 0.02, -0.02, 0.03, 0.015]
    runs = levels(cpu=BASE, a=shifted(shifted(0.1, TINY)), b=shifted(slight), c=shifted(TINY))
    verdict = gl.verdict(runs, margin=0.05)
    raw = verdict.table.p_different.tolist()
    by_hand = np.maximum.accumulate([3 * raw[0], 2 * raw[1], raw[2]])
    assert verdict.table.p_different_holm.tolist() == pytest.approx(by_hand)
    a, b, c = verdict.table.p_equivalent
    assert verdict.table.p_equivalent_holm.tolist() == pytest.approx([max(2 * b, a), 2 * b, 3 * c])
    assert verdict.decision == "different", "one level that differs decides the whole"
    assert gl.verdict(levels(cpu=BASE, a=BASE, b=BASE[:1])).decision == "inconclusive", (
        "equivalent when each is"
    )


def test_verdict_does_not_depend_on_the_order_or_precision_of_runs():
    losses, noise = np.random.default_rng(8).standard_normal((2, 40))
    runs = levels(cpu=losses, a=losses + noise / 3)
    shuffled = gl.verdict(runs.sample(frac=1, random_state=1))
    assert row(gl.verdict(runs), "a") == pytest.approx(row(shuffled, "a"), nan_ok=True)
    single = gl.verdict(runs.astype({"final_loss": "float32"}))  # is compared in double
    exact = np.float32(runs.final_loss[40:80]).astype(float) - np.float32(losses).astype(float)
    assert row(single, "a")["difference"] == pytest.approx(exact.mean(), rel=1e-12)


def test_verdict_compares_any_factor_reference_and_block():
    assert gl.verdict(levels(cuda=BASE, cpu=BASE)).reference == "cpu"
    assert gl.verdict(levels(cuda=BASE, xpu=BASE), reference="xpu").reference == "xpu"
    runs = levels(a=BASE, b=shifted(0.2)).assign(film=lambda runs: "film " + runs.seed.astype(str))
    numbered = runs.assign(batch=runs.setting.map({"a": 16, "b": 32}), seed=runs.seed % 2)
    verdict = gl.verdict(numbered, factor="batch", block="film", reference="16")
    assert str(verdict).startswith(
        "32 against 16, 10 films made from 2 distinct seeds: different. With 32 "
    )


@pytest.mark.parametrize("kind", ["bool", "boolean", "float32"])
def test_verdict_of_a_binary_metric_is_mcnemars_test(kind):
    runs = levels(cpu=BITS * 10, cuda=BITS * 10)
    runs["learned"] = pd.Series([True] * 12 + [False] * 8 + [True] * 4 + [False] * 16).astype(kind)
    verdict = gl.verdict(runs, metric="learned")
    assert (verdict.margin, verdict.decision) == (0.1, "different")
    assert row(verdict)["p_different"] == pytest.approx(stats.binomtest(0, 8).pvalue), (
        "8 learn no longer, none now"
    )
    assert row(verdict)["difference"] == pytest.approx(-0.4)
    with pytest.raises(gl.UsageError, match=r"margin '0.25sd': .* share of the seeds below 1"):
        gl.verdict(runs, metric="learned", margin="0.25sd")


def test_verdict_does_not_test_runs_with_the_same_weights():
    runs = levels(cpu=BASE, cuda=BASE, tf32=shifted(0.1)).assign(
        learned=lambda runs: runs.final_loss > 0.3
    )
    runs.loc[runs.setting == "cuda", "weights"] = [f"cpu{seed}" for seed in range(10)]
    verdict = gl.verdict(runs)
    assert verdict.decisions == {"cuda": "equivalent", "tf32": "different"}
    assert math.isnan(row(verdict)["p_different"])
    assert row(verdict, "tf32")["p_different_holm"] == row(verdict, "tf32")["p_different"], (
        "one test, not two"
    )
    assert gl.verdict(runs[runs.setting != "tf32"], "learned").decision == "equivalent", (
        "though ten seeds are few"
    )
    runs.loc[runs.index == 12, ["final_loss", "status"]] = math.nan, "diverged"
    assert gl.verdict(runs[runs.setting != "tf32"]).decision == "inconclusive", (
        "one diverged from the same weights"
    )


def test_verdict_sentences_give_the_effect_before_the_comparison():
    words = {"cuda": "the GPU", "final_loss": "loss"}

    def said(by, **options):
        return gl.verdict(levels(cpu=BASE, cuda=shifted(by)), **options).sentences(words)

    (negligible,) = said(0.0002)
    assert negligible.startswith("Under the GPU the loss is 0.054 % higher on average than under")
    assert "10 of 10 seeds" in negligible
    assert "margin of 7.2 %" in negligible
    (equivalent,) = said(TINY, margin="1%")
    assert equivalent.startswith("Under the GPU the loss is 5.4e-05 % higher on average than under")
    assert re.findall(r"margin of 1 %|0 of 10|26 % of all seeds", equivalent) == [
        "margin of 1 %",
        "0 of 10",
        "26 % of all seeds",
    ]
    assert said(0.3) == [
        "Under the GPU the loss is 1.81 times as high as under cpu, and higher in 10 of 10 seeds."
    ]
    (below_zero,) = said(WIDE)
    assert below_zero.startswith(
        "Under the GPU the loss is 0.01 higher on average than under cpu, and higher in"
    )
    (unmoved,) = said([0.1, -0.1, 0.2, -0.2, 0.3, -0.3, 0.0, 0.0, 0.1, -0.1])
    assert "the same on average as under cpu" in unmoved or "e-1" in unmoved, (
        "the mean is zero but for rounding"
    )


def test_verdict_averages_rows_of_one_seed_and_says_so():
    runs = runs_of({"cpu": BASE, "cuda": shifted(0.1)})
    episodes = pd.concat(
        [runs.assign(episode=n, final_loss=runs.final_loss + n) for n in (-1, 0, 1)]
    )
    verdict = gl.verdict(episodes)
    assert row(verdict) == pytest.approx(row(gl.verdict(runs)), nan_ok=True)
    counts = (
        "60 rows were first averaged to 20, one for each setting and seed; rows of the same seed"
        " differ in episode."
    )
    assert counts in str(verdict)
    assert "If 'episode' counts" in str(verdict)
    one = (episodes.episode == 1) & (episodes.seed == 3) & (episodes.setting == "cuda")
    lost = gl.verdict(episodes.assign(final_loss=episodes.final_loss.mask(one, math.inf)))
    assert row(lost)["diverged"] == 1
    empty = gl.verdict(episodes.assign(final_loss=episodes.final_loss.mask(one)))
    assert row(empty)["diverged"] == 0, "an empty cell is no loss that diverged"
    assert "did not finish: 1 (cuda 1 missing)" in str(empty)
    numbered = gl.verdict(episodes.assign(rerun=episodes.episode + 1))
    assert "Not compared: 20 rows with `rerun` above 0 that are not under cpu." in str(numbered)


def test_verdict_does_not_name_the_factor_as_what_differs_between_runs_of_a_seed():
    runs = runs_of({"A100": BASE, "H100": BASE}).rename(columns={"setting": "machine"})
    twice = pd.concat([runs.assign(day="Monday"), runs.assign(day="Sunday")])
    with pytest.raises(
        gl.UsageError, match="seed 0 was run more than once, with different day; keep"
    ):
        gl.verdict(twice, factor="machine")


def test_verdict_names_outlying_seeds_that_widen_the_margin():
    """A harm of 20 % to all other seeds passes as negligible within the margin that they make."""
    base = np.append(np.linspace(0.04, 0.06, 18), [0.5, 0.52])
    harmed = np.append(1.2 * base[:18], base[18:])
    verdict, alone = (
        gl.verdict(levels(cpu=base, cuda=harmed)),
        gl.verdict(levels(cpu=base[:18], cuda=harmed[:18])),
    )
    assert (verdict.decision, alone.decision) == ("different but negligible", "different")
    margins = f"would be {row(alone)['margin']:.2g}, not {row(verdict)['margin']:.2g}."
    assert str(verdict).count(margins) == 1
    assert "2 of 20 seeds" in str(verdict)
    assert "far from the others" not in str(alone)
    assert "far from the others" in str(gl.verdict(levels(cpu=base))), (
        "also where there is nothing to compare"
    )


def test_verdict_uses_reruns_of_the_reference_as_a_control_only():
    first, again = (
        levels(cuda=[0.10, 0.20], cpu=[0.10, 0.25]),
        levels(cuda=[0.10, 0.23], cpu=[0.90]).assign(rerun=1),
    )
    again.loc[1, "weights"] = "others"
    verdict = gl.verdict(pd.concat([first, again]), reference="cuda")
    assert verdict.table.setting.tolist() == ["cpu"]
    assert verdict.reruns.difference.tolist() == pytest.approx([0, 0.03])
    assert verdict.reruns.same_bits.tolist() == [True, False]
    assert row(verdict, "cpu")["largest_difference"] == pytest.approx(0.05)


def test_verdict_without_a_comparison_says_so_and_has_a_figure():
    verdict = gl.verdict(
        levels(cpu=BASE[:2], cuda=BASE[:3]).query("(setting == 'cuda') == (seed == 2)")
    )
    assert (row(verdict)["seeds"], row(verdict)["unpaired"]) == (0, 3)
    assert "no seed finished under both" in str(verdict)
    alone = gl.verdict(THREE[THREE.setting == "cpu"])
    assert (len(alone.table), alone.decision) == (0, "inconclusive")
    assert "nothing to compare" in alone.html()
    for drawn in (gl.verdict(THREE[THREE.seed == 0]), gl.verdict(levels(cpu=BASE, cuda=LOST * 10))):
        assert drawn.plot().png()
    runs = levels(cpu=BASE, cuda=[*BASE[:9], *LOST]).fillna({"final_loss": 1e9})
    assert row(gl.verdict(runs))["largest_difference"] == 0, (
        "a run that diverged has no metric, whatever is written"
    )


def test_verdict_figure_shows_every_seed_and_every_difference():
    verdict = gl.verdict(levels(cpu=BASE, cuda=[*shifted(TINY)[:9], math.nan]))
    picture = verdict.plot()
    drawn = [
        [one for one in axes.collections if isinstance(one, PathCollection)]
        for axes in picture.figure.axes
    ]
    assert [sum(len(one.get_offsets()) for one in of_axes) for of_axes in drawn] == [20, 9], (
        "the diverged run, too"
    )
    keys = [text.get_text() for legend in picture.figure.legends for text in legend.get_texts()]
    assert "mean, 95% interval" in keys
    (margin,) = (words for words in keys if words.startswith("margin"))
    assert margin.endswith(f" sd, ±{verdict.table.margin.iloc[0]:.2g}")
    assert picture.html() in verdict.html()


PRINTED = {  # losses under cpu and under cuda
    "two seeds": ([0.1, 0.3], [0.2, 0.3]),
    "one seed": ([0.1], [0.2]),
    "equivalent": (BASE, shifted(TINY)),
    "different but negligible": (BASE, shifted(0.0002)),
    "different": (BASE, shifted(0.3)),
    "a loss of zero": ([0.0, *BASE[1:]], [0.0, *shifted(WIDE)[1:]]),
}


@pytest.mark.parametrize(("cpu", "cuda"), PRINTED.values(), ids=PRINTED)
def test_verdict_text_of_each_printed_case(cpu, cuda, request, as_recorded):
    verdict = gl.verdict(levels(cpu=cpu, cuda=cuda))
    as_recorded(request.node.callspec.id, str(verdict).splitlines(), "scipy")


def test_verdict_table_has_a_row_for_each_decision():
    verdict = gl.verdict(levels(cpu=BASE, a=shifted(TINY), b=[*BASE[:9], *LOST], c=BASE[:1]))
    by_name = pd.DataFrame(
        [
            {"setting": row.level} | {name: getattr(row, name) for name in DECISION_COLUMNS}
            for row in verdict.rows
        ]
    )
    pd.testing.assert_frame_equal(verdict.table, by_name)
    kinds = LevelDecision.__annotations__
    assert all(
        verdict.table[name].dtype == kinds[name]
        for name in DECISION_COLUMNS
        if kinds[name] == "int"
    )
    assert [type(row.difference) for row in verdict.rows] == [float] * 3


def test_verdict_table_columns_are_documented():
    for name in DECISION_COLUMNS:
        assert f"        {name}: " in LevelDecision.__doc__
        assert name.endswith("_holm") or f"`{name}`" in Verdict.__doc__


@pytest.mark.parametrize("alpha", [0, 0.5])
def test_verdict_alpha_lies_between_zero_and_one_half(alpha):
    with pytest.raises(gl.UsageError, match="alpha"):
        gl.verdict(levels(cpu=BASE, cuda=BASE), alpha=alpha)
