"""Whatever the table of runs: interval, p value, decision and words of a verdict say the same, or one clear line."""

import functools
import math
import re
import warnings

import numpy as np
import pandas as pd
import pytest
from stats_runs import runs_of

import gpulab as gl
from gpulab.stats.verdicts import p_text


def pair_of(n=10, seed=0, by=0.1):
    generator = np.random.default_rng(seed)
    base = generator.random(n)
    return {"cpu": base, "cuda": base + by * generator.standard_normal(n)}


def random_runs(generator):
    """Runs with ties, effects, noise, lost seeds and scales of every kind; some losses are yes or no."""
    n, levels = generator.integers(1, 25), generator.integers(1, 5)
    base = generator.choice([0.0, 1.0], n) if generator.random() < 0.2 else generator.standard_normal(n)
    yes_or_no = set(base) <= {0.0, 1.0}
    losses = {"cpu": base if generator.random() < 0.9 else np.full(n, base[0])}
    for level in range(levels):
        size, noise = generator.choice([0.0, 0.1, 0.5, 3.0]), generator.choice([0.0, 1e-6, 0.1, 1.0])
        if yes_or_no:
            losses[f"s{level}"] = np.where(generator.random(n) < size / 4, 1 - base, base)
        else:
            moved = size * (generator.random(n) < generator.choice([0.2, 1.0]))
            losses[f"s{level}"] = (base + moved + noise * generator.standard_normal(n)).round(generator.choice([1, 12]))
    frame = runs_of(losses)
    if generator.random() < 0.4:
        gone = (generator.random(len(frame)) < 0.3) & (frame.setting == f"s{generator.integers(levels)}")
        frame.loc[gone, "final_loss"] = math.nan
    if not yes_or_no:
        frame.final_loss *= generator.choice([1.0, 1e-70, 1e70])
    if generator.random() < 0.3:
        frame["status"] = np.where(frame.final_loss.isna(), "diverged", "finished")
        frame.loc[generator.random(len(frame)) < 0.1, "status"] = "crashed"
    return frame.sample(frac=generator.choice([1.0, 0.9]), random_state=1)


@pytest.mark.parametrize("part", range(3))
def test_no_verdict_contradicts_itself(part):
    generator, decisions = np.random.default_rng(part), set()
    for _ in range(30):
        frame = random_runs(generator)
        alpha = generator.choice([0.05, 0.01, 0.1])
        scale = frame.final_loss.abs().max()
        margin = generator.choice(["0.25sd", "2sd", 0.3 * scale, 1e-3 * scale])
        margin = margin if margin.endswith("sd") else float(margin) or 1.0
        with warnings.catch_warnings(action="error"):
            try:
                verdict = gl.verdict(frame, margin=margin, alpha=alpha)
            except gl.UsageError as error:
                assert re.search("no runs|holds only yes and no", str(error))  # noqa: PT017
                continue
            text = str(verdict)
        assert "nan" not in text
        for row in verdict.table.itertuples():
            decisions.add(row.decision)
            excludes_zero = row.low > 0 or row.high < 0
            assert excludes_zero == (row.p_different_holm <= alpha)
            assert not row.low > row.difference
            assert not row.high < row.difference
            within = -row.margin <= row.equivalent_low and row.equivalent_high <= row.margin
            unmoved = row.seeds > 1 and row.largest_difference == 0 and row.p_equivalent == 0
            assert (within or unmoved) == (row.p_equivalent_holm <= alpha)
            lost_apart = row.p_diverged_holm <= alpha
            assert ("different" in row.decision) == (excludes_zero or lost_apart)
            if row.decision in ("equivalent", "different but negligible"):
                assert within or unmoved
            elif within and not lost_apart:
                assert row.diverged_apart_at_most > 0.1
                assert "could diverge alone" in text or row.decision == "different"
            assert (row.decision == "inconclusive" and row.seeds > 1) == (not math.isnan(row.seeds_needed))
            assert not row.seeds_needed <= row.seeds
            assert row.p_different_holm >= row.p_different or math.isnan(row.p_different)
    assert len(decisions) >= 3, "the tables are of several kinds"


def test_a_corrected_p_is_called_so_and_an_interval_of_another_level_shows_it():
    one = gl.verdict(runs_of(pair_of()))
    assert " p = " in str(one)
    assert "corrected" not in str(one)
    three = gl.verdict(runs_of(pair_of() | {f"s{k}": pair_of(seed=0, by=0.1 + k)["cuda"] for k in range(2)}))
    assert three.table.confidence.tolist() == pytest.approx([1 - 0.05 / 3] * 3)
    assert re.search(r"\] \(98\.3 %\), corrected p = .*; equivalence \[.*\] \(96\.7 %\), corrected p = ", str(three))


def test_numbers_are_written_on_their_own_side_of_the_limit():
    assert p_text(0.0501, 0.05) == "0.0501"
    assert p_text(0.0499, 0.05) == p_text(0.05, 0.05) == "0.05"
    assert p_text(0.049, 0.05) == "0.049"


def lost_seeds(generator, n, share, noise):
    base = 0.1 * generator.random(n)
    return {"cpu": base, "cuda": base + noise * generator.standard_normal(n) + (generator.random(n) < share)}


def settled_share(draw, n, repeats=24, margin=0.3):
    """Of experiments that are inconclusive at n seeds, how many are settled at the number that the verdict names."""
    settled = []
    for repeat in range(repeats):
        generator = np.random.default_rng(repeat)
        first = draw(generator, n)
        (needed,) = gl.verdict(runs_of(first), margin=margin).table.seeds_needed
        if needed < 2000:
            more = draw(generator, int(needed) - n)
            both = {name: np.concatenate([first[name], more[name]]) for name in first}
            settled.append(gl.verdict(runs_of(both), margin=margin).decision != "inconclusive")
    return np.mean(settled), len(settled)


@pytest.mark.parametrize(("share", "noise"), [(0.25, 1e-3), (0.0, 0.6)], ids=["a quarter lost", "noise"])
def test_the_seeds_that_would_settle_it_do(share, noise):
    settled, tried = settled_share(functools.partial(lost_seeds, share=share, noise=noise), 12)
    assert tried >= 12
    assert 0.65 < settled < 0.97, "about the power of 0.8"


def test_a_reference_without_spread_has_no_margin_in_sd():
    verdict = gl.verdict(runs_of({"cpu": [0.1] * 10, "cuda": np.linspace(0, 1, 10), "xpu": [0.1] * 10}))
    assert verdict.between_seeds == 0
    assert verdict.table.margin.isna().all()
    assert verdict.decisions == {"cuda": "different", "xpu": "equivalent"}
    assert "±" not in str(verdict)
    assert "the margin '0.25sd' needs a spread between seeds under cpu; give one in the metric's units" in str(verdict)


@pytest.mark.parametrize("name", ["experiment", "profile", "frames", "protocol"])
def test_a_column_that_tells_protocols_apart_elsewhere_may_be_compared(name):
    frame = runs_of(pair_of())
    expected = gl.verdict(frame).table
    for role, old in (("factor", "setting"), ("block", "seed"), ("metric", "final_loss")):
        other = gl.verdict(frame.rename(columns={old: name}), **{role: name})
        pd.testing.assert_frame_equal(other.table.rename(columns={name: old}), expected)
    with pytest.raises(gl.UsageError, match=r"mixes .* and 17 more; compare runs of one protocol at a time, or drop"):
        gl.verdict(frame.assign(**{name: range(20)}))


def test_runs_that_did_not_finish_are_left_out_and_said():
    frame = runs_of(pair_of(), status=["finished"] * 17 + ["crashed", "FINISHED", "Running"])
    frame.loc[17, "final_loss"] = math.nan
    verdict = gl.verdict(frame)
    assert (verdict.table.seeds[0], verdict.table.left_out[0], len(verdict.unfinished)) == (8, 2, 2)
    said = "Left out, because they did not finish: 2 (cuda 1 crashed, cuda 1 running); if it was the setting that"
    assert said in str(verdict)
    retried = pd.concat([frame, frame[frame.status == "crashed"].assign(final_loss=0.5, status="finished")])
    assert gl.verdict(retried).table.seeds[0] == 9, "a run that was started again counts"
    with pytest.raises(gl.UsageError, match="no runs to compare; none of 20 is finished or diverged, but killed"):
        gl.verdict(frame.assign(status="killed"))


TYPES = [("category", "object"), ("object", "Float64"), ("string[pyarrow]", "double[pyarrow]")]


@pytest.mark.parametrize(("names", "numbers"), TYPES)
def test_the_types_and_names_of_columns_and_the_index_do_not_matter(names, numbers):
    frame = runs_of(pair_of(), machine=math.nan)
    frame["seed"] = "s" + frame.seed.astype(str)
    expected = gl.verdict(frame)
    typed = frame.astype({"setting": names, "seed": names, "final_loss": numbers})
    for other in (typed, typed.set_index(["setting", "seed"]), typed.set_index("seed", drop=False)):
        verdict = gl.verdict(other)
        pd.testing.assert_frame_equal(verdict.table, expected.table, check_dtype=False)
        assert str(verdict) == str(expected)
    assert "xpu" not in str(gl.verdict(frame.astype({"setting": pd.CategoricalDtype(["xpu", "cpu", "cuda"])})))
    strange = {"setting": "the setting", "seed": "my seed!", "final_loss": "loss (nats)"}
    renamed = gl.verdict(typed.rename(columns=strange), "loss (nats)", "the setting", "my seed!")
    assert renamed.decision == expected.decision
    assert renamed.plot().png()


def test_so_many_levels_that_no_test_can_show_a_difference_are_told_so():
    verdict = gl.verdict(runs_of({f"s{k}": pair_of(seed=k)["cpu"] for k in range(40)}))
    assert "10 seeds cannot show a difference at alpha 0.05 with so many tests, 11 can" in str(verdict)
    assert verdict.table.low.isna().all()


@pytest.mark.parametrize(
    ("spoil", "options", "words"),
    [
        (
            lambda f: f.assign(seed=[*range(10), *map(str, range(10))]),
            {},
            "'seed' .* such as '0' and 0; .*astype",
        ),
        (lambda f: f.assign(final_loss=f.final_loss * 1e306), {}, r"reaches 1e\+306, whose powers .*; rescale it"),
        (lambda f: f[:0], {}, "no runs to compare"),
        (lambda f: [f], {}, "expected a pandas data frame, a row per run; got a list"),
        (lambda f: pd.concat([f, f.seed], axis=1), {}, "more than one column is called seed"),
        (lambda f: f, {"block": "setting"}, "'setting' stands for two of metric, factor and block"),
        (lambda f: f, {"metric": "finalloss"}, "no column 'finalloss'; there are setting, seed, final_loss"),
        (lambda f: f.assign(machine="a"), {"metric": "machine"}, "'machine' is of type"),
        (lambda f: f.assign(weights="a"), {"metric": "weights"}, "'weights' has a meaning of its own"),
        (lambda f: f, {"reference": "mps"}, "'mps'.*cpu.*cuda"),
        *(
            (lambda f: f, {"margin": margin}, r"expected a number above 0, or such as '0\.25sd'")
            for margin in [0, math.nan, math.inf, True, "-1sd", "0.25"]
        ),
        *((lambda f: f, {"alpha": alpha}, "alpha") for alpha in [0, 0.5, math.nan, "5%"]),
        (lambda f: f.rename(columns={"setting": "margin"}), {"factor": "margin"}, "'margin' is also a column of the"),
        (lambda f: f.rename(columns={"seed": "other"}), {"block": "other"}, "'other' has a meaning of its own"),
        (lambda f: f.assign(rerun=math.nan), {}, "'rerun' has no number in 20 rows"),
        (lambda f: f.assign(final_loss=f.final_loss.astype(str)), {}, "of type str; expected numbers"),
        (lambda f: f.assign(setting=f.setting.where(f.seed > 0)), {}, "'setting' is empty in 2 rows"),
        (lambda f: f.assign(status="finished").replace(f.final_loss[12], math.inf), {}, r"1 finished .*: index \[12\]"),
        (lambda f: f.assign(status="finished", final_loss=math.nan), {}, "nor has any other; if yours is called"),
        (lambda f: pd.concat([f.assign(machine=m) for m in "ab"]), {}, "'cpu' seed 0 was run more than once, on a, b"),
        (lambda f: pd.concat([f, f[-1:]]), {}, "setting 'cuda' seed 9 was run more than once; keep one"),
    ],
)
def test_nonsense_is_one_clear_line(spoil, options, words):
    with pytest.raises(gl.UsageError, match=words) as error:
        gl.verdict(spoil(runs_of(pair_of())), **options)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250
