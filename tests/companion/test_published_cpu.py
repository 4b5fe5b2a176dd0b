"""The authors' network at the published size on a CPU, compared with the runs on a GPU."""

from pathlib import Path

import numpy as np
import pytest

import companion
from companion import published_cpu

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def windows():
    return companion.published_windows()


@pytest.fixture(scope="module")
def losses(windows):
    return companion.published_losses(windows)


def test_published_windows_are_those_that_every_run_on_a_cpu_completed(windows):
    count = published_cpu.count_common_windows(windows)
    on_cpu = windows[windows.condition.str.startswith("CPU") & (windows.window < count)]
    assert (on_cpu.groupby(["condition", "seed"]).size() == count).all()
    assert on_cpu.groupby("condition").seed.nunique().to_dict() == {
        "CPU, as published": 8,
        "CPU, frames copied": 4,
    }


def test_published_losses_are_means_of_the_last_fifth(windows, losses):
    one = windows[(windows.condition == "CPU, as published") & (windows.seed == 103)]
    by_hand = one.set_index("window").loss.loc[40:48].mean()
    row = losses[(losses.condition == "CPU, as published") & (losses.seed == 103)]
    assert row.final_loss.item() == pytest.approx(by_hand)


def test_first_windows_of_a_cpu_and_a_gpu_differ_by_rounding(windows):
    first = windows[windows.window == 0].pivot_table(
        index="seed", columns="condition", values="loss"
    )
    first = first.dropna(subset=["CPU, as published"])
    ratios = first["CPU, as published"] / first["GPU, overwriting imitated"]
    assert np.abs(ratios - 1).max() < 1e-6


def test_compare_published_counts_higher_seeds_and_corrects_four_comparisons(losses):
    table = companion.compare_published(losses).set_index(["condition", "reference"])
    primary = table.loc[("CPU, as published", "GPU, as published")]
    assert (primary.higher, primary.pairs) == (8, 8)
    assert primary.p == pytest.approx(2 / 2**8)
    assert primary.p_holm == pytest.approx(4 * primary.p)
    assert table.loc[("CPU, frames copied", "GPU, as published")].decision == "equivalent"


def test_compare_published_finds_no_difference_where_there_is_none(losses):
    copied = losses.copy()
    wide = copied.pivot_table(index="seed", columns="condition", values="final_loss")
    is_primary = copied.condition == "CPU, as published"
    copied.loc[is_primary, "final_loss"] = copied.seed[is_primary].map(wide["GPU, as published"])
    primary = companion.compare_published(copied).iloc[0]
    assert primary.higher == 0
    assert primary.median_ratio == 1
    assert primary.decision == "equivalent"


def test_ratios_by_windows_end_with_the_runs_as_recorded(windows):
    table = companion.ratios_by_windows(windows, [49, 250])
    assert table.pairs.tolist() == [32, 32]
    assert table.higher.iloc[1] == 32
    assert table.median_ratio.is_monotonic_increasing


def test_pages_say_what_the_comparison_found(losses):
    table = companion.compare_published(losses).set_index(["condition", "reference"])
    primary = table.loc[("CPU, as published", "GPU, as published")]
    imitation = table.loc[("CPU, as published", "GPU, overwriting imitated")]
    assert imitation.largest_distance < 0.03
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    counted = f"{primary.higher} of {primary.pairs} seeds"
    (sentence,) = (sentence for sentence in readme.split(". ") if counted in sentence)
    assert "within 3 %" in sentence
    assert "higher than on a GPU" in sentence
    replication = (ROOT / "docs/paper/rescience.md").read_text(encoding="utf-8")
    assert f"median {primary.median_ratio - 1:.0%}".replace("%", " %") in replication
    assert f"p = {primary.p:.3f}" in replication
