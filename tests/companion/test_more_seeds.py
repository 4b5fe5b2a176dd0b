"""Changes that few seeds left undecided, with the seeds that were added."""

from pathlib import Path

import pytest

import companion
import gpulab as gl
from companion.more_seeds import COMPARISONS, UNDECIDED

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs():
    return companion.determinism_runs()


@pytest.fixture(scope="module")
def compared(runs):
    return (
        companion.compare_determinism(runs).set_index(["change", "seeds", "analysis"]).sort_index()
    )


def test_determinism_runs_are_complete_pairs(runs):
    counts = runs.groupby(["comparison", "change"]).seed.agg(["size", "nunique"])
    assert (counts == runs.seed.nunique()).all(axis=None)
    assert runs[~runs.added].seed.max() < runs[runs.added].seed.min()
    assert runs[runs.added].registered.str.startswith("more-seeds-at-published-size").all()
    for comparison, (reference, changed) in COMPARISONS.items():
        of_one = runs[runs.comparison == comparison]
        assert set(of_one[of_one.change == "nothing"].setting) == {reference}
        assert set(of_one[of_one.change == comparison].setting) == {changed}


def test_determinism_runs_leave_out_seeds_that_were_not_finished(runs):
    begun = set(gl.recorded_runs("determinism").seed)
    left_out = begun - set(runs.seed)
    assert left_out
    assert min(left_out) > runs.seed.max(), "seeds were run in ascending order"


def test_compare_determinism_decides_as_registered(runs, compared):
    for comparison in COMPARISONS:
        of_one = runs[runs.comparison == comparison]
        verdict = gl.verdict(of_one, factor="change", reference="nothing", looks=2, alpha=0.025)
        row = compared.loc[(comparison, "all", "mean")]
        assert row.decision == verdict.decision
        assert row.pairs == of_one.seed.nunique()
    inside = compared[compared.decision == "equivalent"]
    assert (inside.low > -inside.margin).all()
    assert (inside.high < inside.margin).all()


def test_compare_determinism_counts_seeds_that_move(runs, compared):
    losses = runs[runs.comparison == "TF32"].pivot(
        index="seed", columns="change", values="final_loss"
    )
    moved = (losses["TF32"] - losses["nothing"]).abs() > 0.00025
    assert (compared.loc[("TF32", "all")].beyond_first == moved.sum()).all()
    assert (compared.beyond_margin <= compared.beyond_first).all()


def test_compare_determinism_finds_a_planted_difference(runs):
    worse = runs.copy()
    worse.loc[worse.change == "TF32", "final_loss"] += 0.005
    found = companion.compare_determinism(worse).set_index(["change", "seeds", "analysis"])
    assert found.loc["TF32"].decision.tolist() == ["different"] * 4


@pytest.fixture(scope="module")
def undecided():
    return companion.compare_undecided()


def test_compare_undecided_has_every_planned_change(undecided):
    found = undecided.groupby(["network", "machine"]).change.unique().map(sorted)
    assert found.to_dict() == {case: sorted(changes) for case, changes in UNDECIDED.items()}


def test_compare_undecided_uses_the_added_seeds_and_the_first_ones(undecided):
    pairs = undecided.groupby("network").pairs.unique().map(list).to_dict()
    assert pairs == {"autoencoder": [96], "prednet": [48]}
    inside = (undecided.low > -undecided.margin) & (undecided.high < undecided.margin)
    assert (inside == undecided.decision.str.contains("equivalent|negligible")).all()


def test_compare_undecided_agrees_with_a_verdict_on_the_same_runs(undecided):
    runs = companion.name_changes(gl.recorded_runs("changes"))
    runs = runs[(runs.experiment == "prednet") & (runs.profile == "motion")]
    runs = runs[runs.machine.str.contains("NVIDIA")]
    verdict = companion.changes.compare_changes(runs, looks=2)
    of_verdict = verdict.table.set_index("change").loc["mixed precision"]
    row = undecided[(undecided.network == "prednet") & undecided.machine.str.contains("NVIDIA")]
    mean = row[row.analysis == "mean"].iloc[0]
    assert mean.decision == of_verdict.decision
    assert mean.difference == pytest.approx(of_verdict.difference / verdict.between_seeds)
    assert mean.margin == pytest.approx(of_verdict.margin / verdict.between_seeds)


def test_data_card_states_what_the_added_seeds_show(undecided):
    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8").replace("−", "-")
    means = undecided[undecided.analysis == "mean"]
    assert len(means) == 5
    assert (means.decision == "equivalent").sum() == 4
    assert "Five comparisons were undecided before. Four are now equivalent" in text
    (left,) = means[means.decision == "inconclusive"].itertuples()
    assert (left.network, left.change) == ("autoencoder", "mixed precision")
    assert (
        f"{left.difference:.2f} standard deviations higher, with an interval of {left.low:.3f} to"
        f" {left.high:.2f} and a margin of {left.margin:.2f}"
    ) in text
