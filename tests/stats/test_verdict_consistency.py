"""Interval, p value, decision and words of a verdict agree for any table of runs; a table that
cannot be compared gives an error of one line.
"""

import math
import re
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

import gpulab as gl
from tests.stats._helpers import runs_of


def pair_of(n=10, seed=0, by=0.1):
    generator = np.random.default_rng(seed)
    base = generator.random(n)
    return {"cpu": base, "cuda": base + by * generator.standard_normal(n)}


def random_runs(generator):
    """Runs with ties, effects, noise, missing seeds and various scales; some metrics are binary."""
    n, levels = generator.integers(1, 25), generator.integers(1, 5)
    base = (
        generator.choice([0.0, 1.0], n)
        if generator.random() < 0.2
        else generator.standard_normal(n)
    )
    is_binary = set(base) <= {0.0, 1.0}
    losses = {"cpu": base if generator.random() < 0.9 else np.full(n, base[0])}
    for level in range(levels):
        size, noise = (
            generator.choice([0.0, 0.1, 0.5, 3.0]),
            generator.choice([0.0, 1e-6, 0.1, 1.0]),
        )
        if is_binary:
            losses[f"s{level}"] = np.where(generator.random(n) < size / 4, 1 - base, base)
        else:
            moved = size * (generator.random(n) < generator.choice([0.2, 1.0]))
            losses[f"s{level}"] = (base + moved + noise * generator.standard_normal(n)).round(
                generator.choice([1, 12])
            )
    frame = runs_of(losses)
    if generator.random() < 0.4:
        gone = (generator.random(len(frame)) < 0.3) & (
            frame.setting == f"s{generator.integers(levels)}"
        )
        frame.loc[gone, "final_loss"] = math.nan
    if not is_binary:
        frame.final_loss *= generator.choice([1.0, 1e-70, 1e70])
    if generator.random() < 0.3:
        frame["status"] = np.where(frame.final_loss.isna(), "diverged", "finished")
        frame.loc[generator.random(len(frame)) < 0.1, "status"] = "crashed"
    return frame.sample(frac=generator.choice([1.0, 0.9]), random_state=1)


@pytest.mark.parametrize("part", range(3))
def test_verdict_never_contradicts_itself(part):
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
                assert re.search("no runs|yes/no metric", str(error))  # noqa: PT017
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
                assert row.discordant_diverged_upper > 0.1
                assert "could diverge" in text or row.decision == "different"
            assert math.isnan(row.seeds_needed) == (row.seeds < 2)
            assert row.decision != "inconclusive" or not row.seeds_needed <= row.seeds
            assert row.p_different_holm >= row.p_different or math.isnan(row.p_different)
    assert len(decisions) >= 3, "the tables are of several kinds"


def test_verdict_of_a_reference_without_spread_has_no_margin_in_sd():
    runs = runs_of(
        {
            "cpu": [0.1] * 10,
            "cuda": np.linspace(0, 1, 10),
            "all alike": [0.6] * 10,
            "xpu": [0.1] * 10,
        }
    )
    verdict = gl.verdict(runs)
    assert verdict.table.margin.isna().all()
    assert verdict.decisions == {"cuda": "different", "all alike": "different", "xpu": "equivalent"}
    assert "Equivalence was not tested" in str(verdict)


@pytest.mark.parametrize("name", ["experiment", "profile", "frames", "protocol"])
def test_verdict_compares_several_protocols_by_protocol_or_not_at_all(name):
    frame = runs_of(pair_of())
    other = gl.verdict(frame.rename(columns={"setting": name}), factor=name)
    pd.testing.assert_frame_equal(
        other.table.rename(columns={name: "setting"}), gl.verdict(frame).table
    )
    with pytest.raises(
        gl.UsageError, match=r"mixes 20 protocols: .*; compare runs of one protocol at a time"
    ):
        gl.verdict(frame.assign(**{name: range(20)}))


def test_verdict_leaves_out_unfinished_runs_and_says_so():
    frame = runs_of(pair_of(), status=["finished"] * 17 + ["crashed", "FINISHED", "Running"])
    frame.loc[17, "final_loss"] = math.nan
    verdict = gl.verdict(frame)
    assert (verdict.table.seeds[0], verdict.table.unpaired[0]) == (8, 2)
    assert "Left out, because they did not finish: 2 (cuda 1 crashed, cuda 1 running)" in str(
        verdict
    )
    retried = pd.concat(
        [frame, frame[frame.status == "crashed"].assign(final_loss=0.5, status="finished")]
    )
    assert gl.verdict(retried).table.seeds[0] == 9, "a run that was started again counts"
    with pytest.raises(gl.UsageError, match=r"\['killed'\].* write 'finished'"):
        gl.verdict(frame.assign(status="killed"))
    with pytest.raises(gl.UsageError, match="no runs to compare: the table has no rows"):
        gl.verdict(frame[:0])


TYPES = [("category", "object"), ("object", "Float64"), ("string[pyarrow]", "double[pyarrow]")]


@pytest.mark.parametrize(("names", "numbers"), TYPES)
def test_verdict_does_not_depend_on_types_and_names_of_columns_or_the_index(names, numbers):
    frame = runs_of(pair_of(), machine=math.nan)
    frame["seed"] = "s" + frame.seed.astype(str)
    expected = gl.verdict(frame)
    typed = frame.astype({"setting": names, "seed": names, "final_loss": numbers})
    for other in (typed, typed.set_index(["setting", "seed"])):
        pd.testing.assert_frame_equal(gl.verdict(other).table, expected.table, check_dtype=False)
    assert "xpu" not in str(
        gl.verdict(frame.astype({"setting": pd.CategoricalDtype(["xpu", "cpu", "cuda"])}))
    )


def unchanged(runs):
    return runs


def with_huge_losses(runs):
    return runs.assign(final_loss=runs.final_loss * 1e306)


def with_an_infinite_loss_of_a_finished_run(runs):
    return runs.assign(status="finished").replace(runs.final_loss[12], math.inf)


def with_weights(runs):
    return runs.assign(weights="a")


def with_a_margin(runs):
    return runs.assign(margin=1)


def with_seeds_twice(runs):
    return runs.set_index("seed", drop=False)


def with_empty_settings(runs):
    return runs.assign(setting=runs.setting.where(runs.seed > 0))


def from_two_machines(runs):
    return pd.concat([runs.assign(machine=machine) for machine in "ab"])


class InvalidInput(NamedTuple):
    """What is wrong with a table or with options of a verdict, and a pattern of the error."""

    id: str
    message: str
    change: Callable = unchanged
    options: dict = {}


INVALID_INPUTS = [
    InvalidInput(
        "huge losses", r"have no final_loss that is finite and below 1e\+75", with_huge_losses
    ),
    InvalidInput(
        "infinite loss",
        r"1 finished .*: index \[12\]",
        with_an_infinite_loss_of_a_finished_run,
    ),
    InvalidInput(
        "unknown metric",
        "no column 'finalloss'; .* setting, seed, final_loss; .* pandas.melt",
        options={"metric": "finalloss"},
    ),
    InvalidInput(
        "one column twice",
        "expected three different columns, and none of status, rerun, weights",
        options={"block": "setting"},
    ),
    InvalidInput("weights as metric", "none of status, rerun", with_weights, {"metric": "weights"}),
    InvalidInput(
        "margin as factor",
        "'margin' is also a column of the verdict's own table",
        with_a_margin,
        {"factor": "margin"},
    ),
    InvalidInput("seeds twice", "more than one column is called seed", with_seeds_twice),
    InvalidInput(
        "unknown reference",
        "no runs under 'mps'; .*cpu.*cuda",
        options={"reference": "mps"},
    ),
    InvalidInput("empty settings", "'setting' is empty in 2 rows", with_empty_settings),
    InvalidInput("two machines", "more than once, .* machine", from_two_machines),
    *(
        InvalidInput(
            f"margin {margin!r}",
            f"margin {margin!r}: expected a number above 0",
            options={"margin": margin},
        )
        for margin in (0, True, "-1sd", "1")
    ),
    *(
        InvalidInput(f"alpha {alpha!r}", f"alpha {alpha!r}", options={"alpha": alpha})
        for alpha in (0, 0.5, "5%")
    ),
]


@pytest.mark.parametrize("case", INVALID_INPUTS, ids=lambda case: case.id)
def test_verdict_refuses_invalid_input_in_one_line(case):
    runs = case.change(runs_of(pair_of()))
    with pytest.raises(gl.UsageError, match=case.message) as error:
        gl.verdict(runs, **case.options)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250
