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


def curvature(shift=0.0):
    rows = [
        {"setting": setting, "seed": seed, "step": step, "loss": 1.0 / (step + 1), "smallest": -1.0 - seed}
        | {"index_fraction": 0.1 / (step + 1) + seed * 1e-4 + shift * (setting == "cuda"), "final": step == 2}
        for setting in ("cpu", "cuda")
        for seed in range(8)
        for step in range(3)
    ]
    usual = {"experiment": "autoencoder", "profile": "quick", "recorded": True, "status": "finished", "frames": 10}
    return pd.DataFrame(rows).assign(**usual)


def by(optimizer, escapes, **columns):
    """Two trainings that nothing pushed, under each setting."""
    return escapes.assign(optimizer=optimizer, **columns).query("perturbation == 0 and batch_size == 0")


def test_it_counts_what_left_and_what_was_held(escapes):
    lines = companion.saddle_finding(escapes).statistics()
    assert any(line.startswith("Pushed off the saddle (made here): 2 of 2 left, after ") for line in lines)
    line = next(line for line in lines if line.startswith("sgd (made here, after 90 to 90 steps): 2 of 4 left, "))
    assert line.endswith(f"after {90 / 80:.2f} times the expected steps (median); stayed under {EXACT} at 30.")
    held = companion.saddle_finding(escapes.assign(left=False, held=True, steps=np.nan))
    assert f"sgd (made here): 0 of 4 left; stayed under {EXACT} at 30, {TF32} at 30." in held.statistics()
    assert "in every arithmetic" not in str(held)


def test_the_optimiser_decides_only_where_it_does(escapes):
    adam = by("adam", escapes, learning_rate=1e-3, left=True, steps=50.0)
    (_, said), *_ = companion.saddle_finding(pd.concat([escapes, adam])).sentences()
    assert said[0].startswith("It is the optimiser that decides")
    assert said[1:] == ["adam at 0.001 leaves in every arithmetic.", f"sgd at 30 stays under {EXACT} (0 of 2 left)."]
    alike = by("adam", escapes, learning_rate=1e-3)
    assert "It is the optimiser that decides" not in str(companion.saddle_finding(pd.concat([escapes, alike])))
    assert "It is the optimiser that decides" not in str(companion.saddle_finding(adam))


def test_the_criterion_is_counted_on_both_sides(escapes):
    known = by("adam", escapes).assign(step_ratio=[0.5, 2.0, 3.0, 0.1])
    text = str(companion.saddle_finding(known))
    above = known.step_ratio > 1
    assert f"above half a last place of the weights, {known.left[above].sum()} of 2 left" in text
    assert f"below, {known.left[~above].sum()} of 2." in text
    assert "within a factor of 10.0 of it" in text, "that with a tenth of a place, which left"
    assert "exceptions" not in str(companion.saddle_finding(known.assign(step_ratio=known.left + 0.5)))
    assert "last place" not in str(companion.saddle_finding(escapes))


def test_weights_in_float64_are_told_apart(escapes):
    control = by("sgd", escapes, master_weights=True, left=True, steps=300.0)
    finding = companion.saddle_finding(pd.concat([escapes, control]))
    assert "weights in float64, 2 of 2 leave after all: what is rounded away is the update." in str(finding)
    text = "\n".join(finding.statistics())
    assert (
        f"With the gradients of {EXACT}, but weights in float64, sgd leaves where it stayed "
        "(made here, after 300 to 300 steps; theory 80): 2 of 2."
    ) in text
    assert f"With the gradients of {TF32}" not in text, "it left there anyway"


def test_minibatches_are_compared_with_all_data_in_the_same_arithmetic(escapes):
    line = "sgd at 30 with batches of 10 (made here, after 50 to 50 steps): 4 of 4 left, "
    both = escapes[(escapes.setting == TF32) & (escapes.perturbation == 0)].groupby("batch_size").steps.median()
    assert f"{line}{both[10] / both[0]:.1f} times as late" in "".join(companion.saddle_finding(escapes).statistics())
    other = escapes.assign(learning_rate=escapes.learning_rate.where(escapes.batch_size > 0, 1.0))
    assert f"{line[:-2]}." in companion.saddle_finding(other).statistics()


def test_the_answer_follows_the_steps(escapes):
    batched = escapes.batch_size > 0
    same = escapes.assign(steps=escapes.steps.where(~batched, 1000 + 300 * escapes.seed))
    assert "the arithmetic hardly matters" in str(companion.saddle_finding(same))
    apart = same.assign(steps=same.steps.where(~(batched & (same.setting == TF32)), 3000))
    assert "the arithmetic matters here as much as the seed" in str(companion.saddle_finding(apart))
    third = same[batched & (same.setting == TF32)].assign(setting="cpu", left=False, steps=np.nan)
    assert "not under cpu." in str(companion.saddle_finding(pd.concat([same, third])))


def test_curvature_has_its_verdicts_and_training_time_is_told_from_what_holds_at_a_step():
    first, shares, _ = companion.saddle_finding(curvature=curvature()).sentences()
    assert first[0] == "Loss and share of ways down"
    assert shares[0] == "Share of ways down, at the end of training"
    within = "no difference that matters (less than 0.097 % of the mean), with 8 seeds"
    assert shares[1] == [f"autoencoder, quick size: cuda against cpu: {within}."]
    _, moved, _ = companion.saddle_finding(curvature=curvature(shift=0.01)).sentences()
    assert "higher in 8 of 8 seeds" in moved[1][0]

    def said(frame):
        return companion.saddle_finding(curvature=frame).sentences()[0][1][0]

    time_alone = curvature()  # at a step all losses are the same
    assert said(time_alone).startswith("autoencoder, quick size (recorded): rank correlation +")
    assert said(time_alone).endswith(
        "At a fixed step, over 8 seeds, +0.00 on average (p = 1): not shown, so training time may be all of it."
    )
    at_a_step = time_alone.assign(loss=time_alone.loss + 1e-3 * time_alone.seed)
    assert "over 8 seeds, +1.00 on average (p = " in said(at_a_step)
    assert said(at_a_step).endswith("shown, so it is not training time alone.")
    assert "At a fixed step 4 seeds say nothing" in said(at_a_step.query("seed < 4"))
    assert "against" not in str(companion.saddle_finding(curvature=time_alone.query("setting == 'cpu'")))


def test_recorded_correlations_of_a_step_are_those_of_scipy():
    frame = gl.saddles.recorded_curvature()
    steps = frame[(frame.experiment == "autoencoder")].groupby("step")
    by_hand = [f"{spearmanr(some.loss, some.index_fraction).statistic:+.2f} at step {step}" for step, some in steps]
    text = "\n".join(companion.saddle_finding(curvature=frame).statistics())
    assert f"rank correlation of all trainings {', '.join(by_hand)}." in text


def test_how_rough_the_law_is_comes_from_the_escapes(escapes):
    left = [{"left": True, "learning_rate": rate, "steps": times * 80.0} for rate, times in ((1e-5, 1), (1e-2, 15))]
    adam = pd.concat([by("adam", escapes, **columns) for columns in left])
    text = str(companion.saddle_finding(pd.concat([escapes, adam])))
    assert "adam took 8.0 times the steps that are expected" in text
    assert "(median of 8 escapes; quartiles 1.0 to 15.0; by learning rate 1.0 at 1e-05 and 15.0 at 0.01)" in text
    assert "times the steps that are expected" not in str(companion.saddle_finding(escapes)), (
        "gradient descent has a law"
    )


def test_nothing_is_refused():
    with pytest.raises(gl.UsageError, match="expected escapes, curvature, or both"):
        companion.saddle_finding()
