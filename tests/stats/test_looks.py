"""Verdicts whose error rates hold if they are computed several times while seeds are added."""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import gpulab as gl
from gpulab.cli import app
from gpulab.stats import _inference as inference
from tests.stats._helpers import BASE, runs_of, shifted

RUNS = runs_of({"cpu": BASE, "cuda": shifted(0.1)})
LOOKS = 4


def normal_runs(n, shift, seed=0, levels=1):
    generator = np.random.default_rng(seed)
    losses = generator.normal(size=n)
    others = {f"cuda:{k}": losses + shift + 0.3 * generator.normal(size=n) for k in range(levels)}
    return runs_of({"cpu": losses, **others})


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("shift", [0.0, 0.2, 0.5])
def test_looks_divide_the_level_among_the_verdicts(levels, shift):
    runs = normal_runs(12, shift, levels=levels)
    once = gl.verdict(runs, margin=0.4, alpha=0.05 / LOOKS).table
    looked_at = gl.verdict(runs, margin=0.4, looks=LOOKS).table
    for column in ("p_different_holm", "p_equivalent_holm", "p_diverged_holm"):
        assert looked_at[column].tolist() == pytest.approx(
            np.minimum(LOOKS * once[column], 1).tolist()
        )
    same = [
        "decision",
        "low",
        "high",
        "confidence",
        "equivalent_low",
        "equivalent_high",
        "equivalent_confidence",
    ]
    same += ["difference", "p_different", "p_equivalent", "seeds_needed", "beyond_margin"]
    pd.testing.assert_frame_equal(looked_at[same], once[same])


def test_looks_of_one_change_nothing():
    usual, one = gl.verdict(RUNS), gl.verdict(RUNS, looks=1)
    pd.testing.assert_frame_equal(usual.table, one.table)
    assert str(usual) == str(one)
    assert "looks" not in str(one)


def test_looks_change_a_margin_in_standard_deviations_and_none_in_units():
    margin = gl.verdict(RUNS, looks=LOOKS).table.margin[0]
    confidence = 1 - (1 - inference.SD_CONFIDENCE) / LOOKS
    losses = np.array(BASE)
    assert margin == pytest.approx(
        0.25 * float(inference.sd_lower_limits(losses, len(losses), confidence))
    )
    assert margin < gl.verdict(RUNS).table.margin[0]
    assert gl.verdict(RUNS, margin=0.3, looks=LOOKS).table.margin[0] == 0.3


def test_looks_are_named_in_the_verdict():
    verdict = gl.verdict(RUNS, looks=LOOKS)
    for named in ("4 looks", " 1.25 %", " 5 %"):
        assert named in str(verdict)
        assert named in verdict.sentences()[-1]
    assert verdict.looks == LOOKS
    assert "98.8 % interval" in str(verdict)


def test_looks_raise_the_number_of_seeds_that_are_enough():
    runs = normal_runs(7, 5.0)
    assert gl.verdict(runs).decision == "different"
    verdict = gl.verdict(runs, looks=LOOKS)
    assert verdict.decision == "inconclusive"
    assert "At least 8 seeds" in str(verdict)
    assert gl.verdict(normal_runs(8, 5.0), looks=LOOKS).decision == "different"


def test_looks_too_many_to_show_anything_are_named():
    runs = normal_runs(20, 5.0)
    assert gl.verdict(runs, looks=100).decision == "different"
    verdict = gl.verdict(runs, looks=1000)
    assert verdict.decision == "inconclusive"
    assert "more than 16 seeds" in str(verdict)
    assert "fewer looks" in str(verdict)


def test_looks_correct_diverged_runs_and_binary_metrics_too():
    diverged = runs_of({"cpu": [0.5] * 9, "cuda": [0.5] * 2 + [np.nan] * 7}).assign(
        status=lambda runs: runs.final_loss.map(
            lambda loss: "diverged" if np.isnan(loss) else "finished"
        )
    )
    once, looked_at = gl.verdict(diverged).table, gl.verdict(diverged, looks=LOOKS).table
    assert (once.decision[0], looked_at.decision[0]) == ("different", "inconclusive")
    assert looked_at.p_diverged_holm[0] == pytest.approx(LOOKS * once.p_diverged[0])
    learned = runs_of({"cpu": [True] * 30, "cuda": [True] * 30}).rename(
        columns={"final_loss": "learned"}
    )
    assert gl.verdict(learned, metric="learned", looks=1).decision == "equivalent"
    assert gl.verdict(learned, metric="learned", looks=LOOKS).decision == "inconclusive"


@pytest.mark.parametrize("looks", [0, -1, 2.5, 4.0, "4", True, None, float("nan"), [4], 10**400])
def test_looks_refuse_anything_but_a_whole_number(looks):
    with pytest.raises(
        gl.UsageError, match=r"looks=.*: expected a whole number from 1 to 1,000,000"
    ):
        gl.verdict(RUNS, looks=looks)


def test_looks_accept_integers_of_numpy():
    assert gl.verdict(RUNS, looks=np.int64(LOOKS)).looks == LOOKS


def test_looks_are_an_option_of_the_verdict_command(tmp_path):
    file = tmp_path / "runs.csv"
    RUNS.to_csv(file)
    done = CliRunner().invoke(app, ["verdict", str(file), "--looks", "4"])
    assert "4 looks" in done.stdout
    assert CliRunner().invoke(app, ["verdict", str(file), "--looks", "0"]).exit_code == 2


@pytest.mark.slow("makes 1,200 verdicts")
@pytest.mark.parametrize(("shift", "wrong"), [(0.0, "different"), (0.3, "equivalent")])
def test_looks_at_four_times_together_are_seldom_wrong(shift, wrong):
    """With differences as large as the margin, or none, at most 5 % of 150 verdicts are wrong."""
    counts = {1: 0, LOOKS: 0}
    for seed in range(150):
        generator = np.random.default_rng(seed)
        differences = shift + 0.3 * generator.normal(size=12)
        runs = runs_of({"cpu": np.linspace(1, 2, 12), "cuda": np.linspace(1, 2, 12) + differences})
        for looks in counts:
            decisions = [
                gl.verdict(runs[runs.seed < n], margin=0.3, looks=looks).decision
                for n in (8, 9, 10, 12)
            ]
            counts[looks] += any(
                decision.startswith(wrong) or "negligible" in decision for decision in decisions
            )
    assert counts[LOOKS] <= 0.05 * 150 < counts[1]
