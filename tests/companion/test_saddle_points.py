import numpy as np
import pandas as pd
import pytest

import gpulab as gl

EXACT, TF32 = "cpu:precision=float64", "cpu:emulate=tf32"


@pytest.fixture
def escapes():
    """What `gpulab.escape_table` measures: pushed off the saddle, left alone, and trained on minibatches."""
    pushed = [{"setting": EXACT, "perturbation": size, "steps": size**-0.1} for size in (1e-3, 1e-6)]
    alone = [{"setting": EXACT, "held": True}, {"setting": TF32, "noise": 1e-4, "steps": 90, "emulated": True}]
    batched = [row | {"batch_size": 10, "noise": 0.1, "held": False, "steps": 50} for row in alone]
    rows = [row | {"seed": seed} for row in alone + batched for seed in range(2)] + pushed
    usual = {"perturbation": 0.0, "batch_size": 0, "recorded": False, "held": False, "emulated": False, "noise": 1e-16}
    table = pd.DataFrame([{**usual, "expected": 80.0, "steps": np.nan, "seed": 0, **row} for row in rows])
    return table.assign(left=table.steps.notna())


def curvature(shift=0.0):
    rows = [
        {"experiment": "autoencoder", "profile": "quick", "setting": setting, "seed": seed, "recorded": True}
        | {"loss": 1.0 / (step + 1), "index_fraction": 0.1 / (step + 1) + seed * 1e-4 + shift * (setting == "cuda")}
        | {"smallest": -1.0 - seed, "final": step == 2, "status": "finished", "frames": 10}
        for setting in ("cpu", "cuda")
        for seed in range(8)
        for step in range(3)
    ]
    return pd.DataFrame(rows)


def test_it_counts_what_left_and_what_was_held(escapes):
    text = gl.saddle_finding(escapes)
    assert "Pushed off the saddle (made here), 2 of 2 left" in text
    for setting, rows in escapes[(escapes.perturbation == 0) & (escapes.batch_size == 0)].groupby("setting"):
        line = next(line for line in text.splitlines() if line.startswith(f"{setting} (made here"))
        assert f"{rows.left.sum()} of 2 left, {rows.held.sum()} held" in line
        assert ("emulated" in line) == (setting == TF32)


def test_a_held_network_is_not_said_to_have_left(escapes):
    held = escapes.assign(left=False, held=True, steps=np.nan)
    text = gl.saddle_finding(held)
    assert "0 of 2 left, 2 held; never" in text
    assert f"holds the network where it is under {EXACT}, {TF32}" in text
    assert "leads away under" not in text


def test_minibatches_are_compared_with_the_rounding_of_the_same_arithmetic(escapes):
    above = escapes[escapes.setting == EXACT].groupby("batch_size").noise.median()
    orders = np.log10(
        above[10]
        / escapes[(escapes.setting == EXACT) & (escapes.perturbation == 0)].query("batch_size == 0").noise.median()
    )
    assert f"{orders:.1f} orders of magnitude above its rounding" in gl.saddle_finding(escapes)


def test_the_answer_follows_the_steps(escapes):
    batched = escapes.batch_size > 0
    same = escapes.assign(steps=escapes.steps.where(~batched, 1000 + 300 * escapes.seed))
    assert "the arithmetic hardly matters" in gl.saddle_finding(same)
    apart = same.assign(steps=same.steps.where(~(batched & (same.setting == TF32)), 3000))
    assert "the arithmetic matters here as much as the seed" in gl.saddle_finding(apart)


def test_curvature_has_its_correlation_and_verdicts():
    text = gl.saddle_finding(curvature=curvature())
    assert "autoencoder, quick size (recorded): rank correlation of loss and share of ways down +" in text
    assert "share of ways down, against cpu: cuda equivalent" in text
    assert "share of ways down, against cpu: cuda different" in gl.saddle_finding(curvature=curvature(shift=0.01))


def test_one_setting_is_not_compared_and_nothing_is_refused():
    assert "against" not in gl.saddle_finding(curvature=curvature().query("setting == 'cpu'"))
    with pytest.raises(gl.UsageError, match="expected escapes, curvature, or both"):
        gl.saddle_finding()
