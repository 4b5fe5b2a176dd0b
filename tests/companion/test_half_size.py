"""The authors' network at half size with copied frames, on a CPU and on a GPU."""

from pathlib import Path

import numpy as np
import pytest

import companion
import gpulab as gl
from companion.paired_analyses import trimmed_mean_decision

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def losses():
    return companion.half_size_losses()


@pytest.fixture(scope="module")
def compared(losses):
    return companion.compare_half_size(losses).set_index(["seeds", "analysis"])


def test_half_size_losses_are_means_of_the_last_fifth_of_the_common_windows(losses):
    assert losses.groupby(["device", "added"]).seed.nunique().to_list() == 4 * [16]
    record = gl.store.recorded.recorded_table("published_half")
    shortest = record.losses.map(len).min()
    assert losses.windows.unique().tolist() == [shortest]
    one = record[(record.kind == "cpu") & (record.seed == 119)].losses.item()
    row = losses[(losses.device == "cpu") & (losses.seed == 119)]
    by_hand = np.mean(one[shortest - shortest // 5 : shortest])
    assert row.final_loss.item() == pytest.approx(by_hand)


def test_half_size_losses_refuse_more_windows_than_there_are():
    with pytest.raises(gl.UsageError, match="expected at most"):
        companion.half_size_losses(250)


def test_first_windows_at_half_size_differ_by_rounding():
    first = companion.half_size_losses(1).pivot(index="seed", columns="device", values="final_loss")
    assert (first.cpu / first.cuda - 1).abs().max() < 1e-6


def test_compare_half_size_decides_on_all_seeds_as_registered(losses, compared):
    verdict = gl.verdict(losses, factor="device", reference="cuda", looks=2)
    assert compared.loc[("all", "mean")].decision == verdict.decision
    assert (compared.pairs.to_numpy() == [32, 32, 16, 16, 16, 16]).all()
    inside = compared[compared.decision == "equivalent"]
    assert (inside.low > -inside.margin).all()
    assert (inside.high < inside.margin).all()


def test_compare_half_size_finds_a_planted_difference(losses):
    worse = losses.copy()
    worse.loc[worse.device == "cpu", "final_loss"] *= 1.2
    found = companion.compare_half_size(worse).set_index(["seeds", "analysis"])
    assert found.loc["all"].decision.tolist() == ["different", "different"]


@pytest.mark.parametrize(
    ("shift", "margin", "decision"),
    [
        (0.0, 1.0, "equivalent"),
        (0.5, 1.0, "different but negligible"),
        (0.5, 0.1, "different"),
        (0.0, 0.001, "inconclusive"),
    ],
)
def test_trimmed_mean_decision_has_four_outcomes(shift, margin, decision):
    differences = shift + np.linspace(-0.1, 0.1, 21)
    assert trimmed_mean_decision(differences, margin)["decision"] == decision


def test_trimmed_mean_decision_is_not_moved_by_one_seed():
    differences = np.linspace(-0.1, 0.1, 31)
    moved = np.append(differences, 100.0)
    assert trimmed_mean_decision(moved, 0.5)["decision"] == "equivalent"


def test_pages_say_what_the_comparison_at_half_size_found(compared):
    assert compared.loc["all"].decision.tolist() == ["equivalent", "equivalent"]
    replication = (ROOT / "docs/paper/rescience.md").read_text(encoding="utf-8")
    (paragraph,) = (line for line in replication.splitlines() if line.startswith("*The device.*"))
    assert "equivalent" in paragraph
    assert f"{compared.loc[('all', 'mean')].pairs} seeds" in paragraph
