"""Dose and response: what is trained, and what is said of it."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest

import gpulab as gl
from gpulab.companion import dose_finding, dose_response, dose_runs, dose_table, rank_correlation, recorded_dose
from gpulab.companion.benchmarks import FOLDERS, benchmark

CPU = "cpu:threads=1"
TRAINING = f"{FOLDERS[0]}/dose_training.py:bias_and_loss"


ORDER = np.arange(12)


def runs(ratios):
    """Runs of three seeds in twelve cells, the more biased the later; ratios of shape (12,) or (12, 3)."""
    rows = []
    ratios = np.broadcast_to(np.reshape(ratios, (12, -1)), (12, 3))
    for place, (window, speed) in enumerate(itertools.product((2, 5, 10, 20), (1.0, 2.0, 4.0))):
        for seed, ratio in enumerate(ratios[place]):
            bias = {"bias": 0.05 * (1 + place) + 0.001 * seed, "bias_first": 0.0}
            rows.append(
                {"window": window, "speed": speed, "seed": seed, "copied": 0.02, "shared": 0.02 * ratio, **bias}
            )
    common = {"size": "smoke", "setting": CPU, "status": "finished", "machine": "m", "recorded": False}
    return pd.DataFrame(rows).assign(**common)


def test_a_cell_is_trained_as_gpulab_trains_and_its_bias_is_that_of_the_first_window():
    found = gl.train(TRAINING, setting=CPU, seed=3, model_options={"size": "smoke"}, progress=False).metrics
    for loader, name in (("copied", "copied"), ("reused", "shared")):
        run = gl.train("prednet", setting=CPU, seed=3, profile="smoke", loader=loader, progress=False)
        assert run.record["summary"]["final_loss"] == found[name]
    (window,) = gl.companion.first_window([CPU], "prednet", seed=3, profile="smoke").itertuples()
    assert found["bias_first"] == pytest.approx(window.gradient_difference, rel=1e-4)
    assert found["bias"] > 0


def test_a_window_of_two_frames_has_one_frame_to_come_and_nothing_to_overwrite_at_first():
    with gl.setting(CPU):
        found = benchmark("dose_training").bias_and_loss(0, gl.Setting.parse(CPU), window=2, size="smoke")
    assert found["bias_first"] == 0
    assert found["bias"] > 0, "later windows begin with the last frame of the one before"
    assert found["shared"] != found["copied"]


def test_the_interval_of_a_rank_correlation_keeps_its_level_at_twelve_pairs():
    generator = np.random.default_rng(0)
    for correlation in (0.0, 0.6, 0.9):
        rho = 6 / math.pi * math.asin(correlation / 2)  # Spearman's of normal pairs
        x = generator.standard_normal((600, 12))
        y = correlation * x + math.sqrt(1 - correlation**2) * generator.standard_normal((600, 12))
        covered = [low <= rho <= high for _, low, high in map(rank_correlation, x, y)]
        assert 0.92 < np.mean(covered) < 0.99


def test_ranks_that_all_agree_are_not_taken_for_certainty():
    rho, low, high = rank_correlation(range(12), range(12))
    assert rho == pytest.approx(1)
    assert 0.9 < low < high < 1
    assert rank_correlation(range(12), range(12, 0, -1))[1:] == pytest.approx((-high, -low))


@pytest.mark.parametrize(("x", "y"), [([1, 2, 3, 4], [1, 2, 3, 4]), ([1] * 6, [1, 2, 3, 4, 5, 6])])
def test_too_few_pairs_or_none_that_differ_are_refused(x, y):
    with pytest.raises(gl.UsageError, match=f"{len(x)} pairs"):
        rank_correlation(x, y)


def test_the_ratio_of_a_cell_is_the_geometric_mean_of_its_seeds():
    table = dose_table(dose_runs(runs([[0.5, 1.0, 4.0]] * 12)))
    assert len(table) == 12
    assert table.ratio.to_numpy() == pytest.approx(2 ** (1 / 3))
    assert (table.worse == 1).all()
    assert table.bias[0] == pytest.approx(0.051)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        (1 + ORDER / 10, "the loss is higher."),
        (3 - ORDER / 10, "the loss is lower."),
        (1 + ORDER * 5 % 12 / 10, "no trend is shown"),
    ],
)
def test_the_finding_follows_from_the_cells(ratios, said):
    finding = dose_finding(dose_runs(runs(ratios)))
    assert said in str(finding)
    assert "3 seeds in 12 cells" in finding.statistics()[0]


def test_a_seed_that_did_not_finish_everywhere_is_left_out_by_name():
    frame = runs(1.0 + ORDER)
    frame.loc[7, "status"] = "diverged"  # seed 1
    with pytest.warns(UserWarning, match=r"seeds \[1\] left out"):
        assert set(dose_runs(frame).seed) == {0, 2}


def test_other_runs_are_refused():
    with pytest.raises(gl.UsageError, match=r"no column 'bias': expected runs of benchmarks/record_dose\.py"):
        dose_runs(pd.DataFrame({"seed": [1]}))


def test_the_figure_counts_the_cells_that_ended_worse():
    picture = dose_response(dose_runs(runs(0.95 + ORDER / 10)))
    assert picture.figure._suptitle.get_text() == (
        "Sharing memory ended worse in 11 of 12 cells; rank correlation with the bias +1.00"
    )


def test_the_recorded_cells_are_whole():
    table = dose_table(recorded_dose())
    for _, cells in table.groupby(["size", "setting"]):
        assert len(cells) == 12
        assert cells.seeds.nunique() == 1
        assert (cells.bias > 0).all()
