"""Notebook 06: whether rounding helps, yes or no, and the correlation that its cell computes."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

import companion
import gpulab as gl

ROOT = Path(__file__).parents[2]
EXACT, PLAIN, TF32 = "cpu:precision=float64", "cpu", "cpu:emulate=tf32"
RELATED = pd.DataFrame({"over the training": [0.9, -0.1], "p": [0.01, 0.4]})


def escapes(optimizer, batch_size=0, **steps):
    """Trainings from a saddle by seeds 0 and 1: the steps that each took by its arithmetic, NaN
    if it never left.
    """
    settings = {"exact": EXACT, "plain": PLAIN, "tf32": TF32}
    rows = [
        (settings[name], seed, step)
        for name, both in steps.items()
        for seed, step in enumerate(both)
    ]
    frame = pd.DataFrame(rows, columns=["setting", "seed", "steps"]).assign(
        optimizer=optimizer, batch_size=batch_size
    )
    frame = frame.assign(
        learning_rate=0.1, perturbation=0.0, master_weights=False, escaped=frame.steps.notna()
    )
    return frame.assign(step_ratio=frame.escaped.map({True: 3.0, False: 0.3}))


def said(adam, share=0.02):
    """What is found of these escapes by Adam, and of trainings that end with this share of ways
    down under TF32.
    """
    held = escapes("sgd", exact=(700, 710), plain=(np.nan, np.nan), tf32=(200, 210))
    held = pd.concat([held, held.assign(optimizer="momentum")])
    freed = escapes("sgd", plain=(300, 310)).assign(master_weights=True)
    batches = escapes("sgd", batch_size=20, exact=(1000, 1100), tf32=(1000, 1122))
    ends = pd.DataFrame({"setting": ["cpu"] * 8 + [TF32] * 8, "seed": [*range(8)] * 2})
    ends["index_fraction"] = [0.02 + 1e-4 * seed for seed in range(8)] + [
        share + 1e-4 * seed for seed in range(8)
    ]
    verdicts = {"a network": gl.verdict(ends, metric="index_fraction")}
    found = companion.saddle_finding(
        pd.concat([adam, held, freed, batches], ignore_index=True), RELATED, verdicts
    )
    return dict(found.sentences())


NO = escapes("adam", exact=(50, 50), tf32=(49, 51), plain=(50, 52))
SOONER = escapes("adam", exact=(50, 50), tf32=(10, 11), plain=(20, 22))


@pytest.mark.parametrize(("adam", "answer", "sooner"), [(NO, "not shown", 1), (SOONER, "yes", 4)])
def test_saddle_finding_answers_by_optimiser(adam, answer, sooner):
    descent, momentum, paper, _ = said(adam)["Does rounding help"]
    held = "yes, unless rounding holds the network there"
    assert (
        descent.startswith(f"With SGD: {held}. Of 2 pairs"),
        momentum.startswith(f"With SGD with momentum: {held}"),
    ) == (True, True)
    assert paper.startswith(f"With Adam, the optimiser of the paper: {answer}. Of 4 pairs")
    assert f"sooner than float64 in {sooner} and later in" in paper


@pytest.mark.parametrize(
    ("adam", "ending"),
    [
        (NO, "In 2 of these 4 it left later, and in 1 after as many steps."),
        (SOONER, "in 4 of 4 pairs of trainings."),
    ],
)
def test_saddle_finding_says_in_short_where_coarser_arithmetic_left_later(adam, ending):
    assert said(adam)["In short"][0].endswith(ending)


@pytest.mark.parametrize(
    ("at_one_step", "p", "title"),
    [
        ([0.2, -0.1], [0.4, 0.9], "no link of loss and descent directions is shown"),
        ([0.9, -0.1], [0.01, 0.9], "a higher loss goes with more descent directions in A"),
        (
            [0.9, -0.9],
            [0.01, 0.02],
            "a higher loss goes with more descent directions in A and fewer descent directions in"
            " B",
        ),
    ],
)
def test_curvature_title_follows_the_correlations(at_one_step, p, title):
    related = pd.DataFrame({"at one step": at_one_step, "p": p}, ["A", "B"])
    assert companion.curvature_title(related) == f"At the same step, {title}"


def test_saddle_finding_counts_trainings_that_end_with_fewer_descent_directions():
    for share, fewer in ((0.02, 0), (0.01, 1)):
        assert said(NO, share)["Does rounding help"][2].endswith(
            f". {fewer} of 1 comparisons of trainings ended with fewer descent directions."
        )


def test_correlation_cell_of_notebook_06_agrees_with_scipy():
    cells = json.loads((ROOT / "notebooks" / "06_saddle_points.ipynb").read_text(encoding="utf-8"))[
        "cells"
    ]
    source = "".join(next(cell["source"] for cell in cells if cell["id"] == "06-correlation"))
    names = {"np": np, "pd": pd}
    exec(compile(source.partition("\n\n\nrelated")[0], "notebook 06", "exec"), names)
    frame = gl.saddles.recorded_curvature().query("experiment == 'autoencoder'")
    seeds = frame.pivot_table(
        index="seed", columns="step", values=["loss", "index_fraction"]
    ).dropna()
    by_step = [
        spearmanr(seeds["loss"][step], seeds["index_fraction"][step]).statistic
        for step in seeds["loss"]
    ]
    related = names["correlations"](frame)
    assert related["at one step"] == pytest.approx(np.mean(by_step))
    assert related.p > 0.05
