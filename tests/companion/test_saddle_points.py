import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

import companion
import gpulab as gl

EXACT, TF32 = "cpu:precision=float64", "cpu:emulate=tf32"


@pytest.fixture
def escapes():
    """What `gpulab.saddles.escape_table` measures: pushed off the saddle, left alone, and trained on minibatches."""
    pushed = [{"setting": EXACT, "perturbation": size, "steps": size**-0.1} for size in (1e-3, 1e-6)]
    alone = [{"setting": EXACT, "held": True}, {"setting": TF32, "noise": 1e-4, "steps": 90, "emulated": True}]
    batched = [row | {"batch_size": 10, "noise": 0.1, "held": False, "steps": 50} for row in alone]
    rows = [row | {"seed": seed} for row in alone + batched for seed in range(2)] + pushed
    usual = {"optimizer": "sgd", "learning_rate": 30.0, "master_weights": False, "step_ratio": np.nan}
    usual |= {"perturbation": 0.0, "batch_size": 0, "recorded": False, "held": False, "emulated": False, "noise": 1e-16}
    table = pd.DataFrame([{**usual, "expected": 80.0, "steps": np.nan, "seed": 0, **row} for row in rows])
    return table.assign(left=table.steps.notna())


def curvature():
    rows = [
        {"setting": setting, "seed": seed, "step": step, "loss": 1.0 / (step + 1), "smallest": -1.0 - seed}
        | {"index_fraction": 0.1 / (step + 1) + seed * 1e-4, "final": step == 2}
        for setting in ("cpu", "cuda")
        for seed in range(8)
        for step in range(3)
    ]
    usual = {"experiment": "autoencoder", "profile": "quick", "recorded": True, "status": "finished", "frames": 10}
    return pd.DataFrame(rows).assign(**usual)


def by(optimizer, escapes, **columns):
    """Two trainings that nothing pushed, under each setting."""
    return escapes.assign(optimizer=optimizer, **columns).query("perturbation == 0 and batch_size == 0")


def test_the_optimiser_decides_only_where_it_does(escapes):
    adam = by("adam", escapes, learning_rate=1e-3, left=True, steps=50.0)
    (_, said), *_ = companion.saddle_finding(pd.concat([escapes, adam])).sentences()
    assert said[0].startswith("It is the optimiser that decides")
    stays = "SGD at 30: 0 of 2 leave under CPU (float64)."
    assert said[1:] == ["Adam at 0.001 leaves in every arithmetic.", stays]
    alike = by("adam", escapes, learning_rate=1e-3)
    assert "It is the optimiser that decides" not in str(companion.saddle_finding(pd.concat([escapes, alike])))
    assert "It is the optimiser that decides" not in str(companion.saddle_finding(adam))


def test_training_time_is_told_from_what_holds_at_a_step():
    def said(frame):
        finding = companion.saddle_finding(curvature=frame)
        return finding.sentences()[0][1][0], next(line for line in finding.statistics() if "at a fixed step" in line)

    time_alone = curvature()  # at a step all losses are the same
    sentence, numbers = said(time_alone)
    assert sentence.startswith("Autoencoder, quick size (recorded): a lower loss goes with fewer ways down.")
    assert sentence.endswith("At a fixed step that is not shown, so it may be training time alone.")
    assert numbers.startswith("Autoencoder, quick size (recorded): rank correlation +")
    assert numbers.endswith("at a fixed step, over 8 seeds, +0.00 on average (p = 1).")
    sentence, numbers = said(time_alone.assign(loss=time_alone.loss + 1e-3 * time_alone.seed))
    assert "over 8 seeds, +1.00 on average (p = " in numbers
    assert sentence.endswith("At a fixed step that is shown, so it is not training time alone.")
    sentence, _ = said(time_alone.assign(loss=-time_alone.loss))
    assert "a lower loss does not go with fewer ways down" in sentence


def test_recorded_correlations_of_a_step_are_those_of_scipy():
    frame = gl.saddles.recorded_curvature()
    steps = frame[(frame.experiment == "autoencoder")].groupby("step")
    by_hand = [f"{spearmanr(some.loss, some.index_fraction).statistic:+.2f} at step {step}" for step, some in steps]
    text = "\n".join(companion.saddle_finding(curvature=frame).statistics())
    assert f"rank correlation of all trainings {', '.join(by_hand)}." in text
