"""Notebook 06: whether rounding helps, and the correlation that one of its cells computes."""

import json
import re
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
    """Runs from a saddle with seeds 0 and 1: the number of steps that each took under each
    arithmetic, NaN if it never left.
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
    """The sentences of the finding for these escapes with Adam, and for runs that end with
    this share of descent directions under TF32.
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
    for sentence, name in ((descent, "SGD"), (momentum, "SGD with momentum")):
        assert re.match(rf"With {name}: yes\b.* unless rounding", sentence)
        assert "2 pairs" in sentence
    assert re.match(rf"With Adam\b[^:]*: {answer}\b", paper)
    assert "unless" not in paper.partition(".")[0]
    assert "4 pairs" in paper
    assert re.search(rf"sooner\b.* in {sooner} pairs and later", paper)


@pytest.mark.parametrize(
    ("adam", "counts", "later"),
    [
        (NO, ["1", "4", "2", "4", "1"], True),  # sooner in 1 of 4, later in 2 of 4, equal in 1
        (SOONER, ["4", "4"], False),
    ],
)
def test_saddle_finding_says_in_short_where_coarser_arithmetic_left_later(adam, counts, later):
    summary = said(adam)["In short"][0]
    assert re.findall(r"\d+", summary)[-len(counts) :] == counts
    assert ("later" in summary) == later


@pytest.mark.parametrize(
    ("at_one_step", "p", "links"),
    [
        ([0.2, -0.1], [0.4, 0.9], []),
        ([0.9, -0.1], [0.01, 0.9], [("more", "A")]),
        ([0.9, -0.9], [0.01, 0.02], [("more", "A"), ("fewer", "B")]),
    ],
)
def test_curvature_title_follows_the_correlations(at_one_step, p, links):
    related = pd.DataFrame({"at one step": at_one_step, "p": p}, ["A", "B"])
    title = companion.curvature_title(related)
    assert re.findall(r"(more|fewer) descent directions in (\w)", title) == links
    assert ("no " in title) == (not links)


def test_saddle_finding_counts_trainings_that_end_with_fewer_descent_directions():
    for share, fewer in ((0.02, 0), (0.01, 1)):
        assert f" {fewer} of 1 comparisons" in said(NO, share)["Does rounding help"][2]


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


def paths(**ends):
    """Paths of two steps that end at these distances; `master` has weights in float64."""
    rows = [
        {"setting": name, "seed": seed, "step": step, "unstable": step * end}
        for name, both in ends.items()
        for seed, end in enumerate(both)
        for step in (0, 1)
    ]
    return pd.DataFrame(rows).assign(
        optimizer="sgd", batch_size=0, master_weights=lambda table: table.setting == "master"
    )


@pytest.mark.parametrize(("master", "count"), [((0.2, 0.3), 3), ((0.2, 1e-9), 2)])
def test_leaves_saddle_goes_by_the_end_of_each_network(master, count):
    frame = paths(plain=(1e-9, 0.2), master=master)
    leaves = companion.leaves_saddle(frame)
    assert leaves[frame.setting == "plain"].tolist() == [False, False, True, True]
    last = leaves[frame.step == 1]
    assert companion.leaving_title(last) == f"{count} of 4 networks leave the saddle"


@pytest.mark.parametrize(
    ("escaped", "right"), [([True, False], 2), ([False, False], 1), ([False, True], 0)]
)
def test_step_length_title_counts_networks_that_do_as_predicted(escaped, right):
    tried = pd.DataFrame({"step_ratio": [2.0, 0.5], "escaped": escaped})
    assert companion.step_length_title(tried).startswith(f"{right} of 2 networks")
