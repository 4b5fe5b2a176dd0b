"""Notebook 02: how one bit grows, what GPUs draw, and each factor changed alone."""

import pandas as pd
import pytest
import torch

import companion
import gpulab as gl
from companion import floating_point as module
from companion.benchmarks import benchmark
from companion.floating_point import MEASURED, OTHER_SEED, Factor, factors
from gpulab.numerics.cuda_random import cuda_threads
from gpulab.store import listing as stores

record_factors = benchmark("record").record_factors
SMALL = {"profile": "smoke", "frames": 20, "progress": False}
GROWTH = {"profile": "smoke", "frames": 40, "progress": False}
NETS = {
    "prednet": gl.models.PredNet(channels=(3, 8, 16), size=(24, 32)),
    "autoencoder": gl.models.Autoencoder(hidden=(64, 16)),
}


# --- one bit ---------------------------------------------------------------------------------------------


def test_a_flipped_bit_begins_as_one_bit_and_nothing_changed_stays_nothing():
    table = companion.growth("prednet", seeds=2, **GROWTH)
    first = table[(table.change == "one bit of one weight") & (table.step == 0)]
    weights = sum(p.numel() for p in NETS["prednet"].parameters())
    assert first.changed.tolist() == pytest.approx([1 / weights] * 2)
    assert (table[table.change == "float64"].query("step == 0").distance == 0).all()
    assert (table[table.change == OTHER_SEED].distance > 1).all()
    table = companion.growth("autoencoder", seeds=1, changes={"nothing": {}}, **GROWTH)
    assert table.change.unique().tolist() == ["nothing"]
    assert (table[["distance", "changed", "ulps"]] == 0).all(axis=None)
    assert table.step.tolist() == [0, 20, 40]


# --- draws -----------------------------------------------------------------------------------------------


def test_two_cards_draw_the_layers_alike_that_are_small_enough():
    one, other = module.drawn_autoencoder("T4", 3), module.drawn_autoencoder("H100", 3)
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs) == (mine.numel() <= cuda_threads("T4")), name
    first = one.layers[0].weight
    assert first.var().item() == pytest.approx(1 / 784, rel=0.02)
    assert not torch.equal(first, module.drawn_autoencoder("T4", 4).layers[0].weight)


@pytest.mark.parametrize(("cards", "same_bits"), [(("T4", "H100"), 0), (("H100", "H200"), 2)])  # as many threads
def test_their_trainings_are_pairs_for_a_verdict(cards, same_bits, tmp_path):
    runs = companion.runs_drawn_by(tmp_path, cards, seeds=2, frames=40, progress=False)
    (row,) = gl.verdict(runs, factor="card", reference=cards[0]).table.itertuples()
    assert (row.card, row.seeds, row.same_bits) == (cards[1], 2, same_bits)


# --- factors ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STEP_SEEDS", 1)
        return companion.factor_table("prednet", seeds=2, store=tmp_path_factory.mktemp("factors"), **SMALL)


@pytest.fixture(scope="module")
def here(report):
    """What was changed on a CPU; where there is a GPU, some factors are changed there as well."""
    table = report.table
    return table[(table.source == "made here") & table.base.str.startswith("cpu")].set_index("factor")


def test_each_factor_changes_one_thing():
    for factor in factors():
        base, change = ({**side, **side.get("data_options", {})} for side in (factor.base, factor.change))
        apart = {name for name in base | change if base.get(name) != change.get(name)} - {"data_options"}
        assert len(apart) == 1, factor.name
        if apart == {"setting"} and factor.name != "the device itself":
            one, other = (vars(gl.Setting.parse(side["setting"])) for side in (factor.base, factor.change))
            assert sum(one[name] != other[name] for name in one) == 1, factor.name


def test_a_step_is_measured_against_float64(here):
    assert (here.base_error.between(1e-9, 1e-5)).all()
    tf32 = here.loc["TF32"]
    assert tf32.emulated
    assert tf32.step_error > 100 * tf32.base_error
    assert 9 <= tf32.gradient_bit <= 13
    assert here.loc["determinism", "step_moved"] == 0
    assert pd.isna(here.loc["determinism", "loss_bit"])


def test_the_effect_is_the_verdict_s(report, here):
    verdict = report.verdicts["made here", "cpu:threads=1"]
    for row in verdict.table.to_dict("records"):
        (mine,) = here[here.change == row["change"]].to_dict("records")
        assert mine["decision"] == row["decision"]
        assert mine["effect"] == pytest.approx(row["difference"] / verdict.between_seeds)
        assert mine["same_bits"] == row["same_bits"]
    assert here.loc["determinism", "same_bits"] == 2
    assert here.loc["one bit of one weight", "same_bits"] == 0
    assert set(verdict.table.change) >= {"cpu", "cpu:threads=1, flip 0"}, "one correction over all that share a base"


def test_what_is_kept_is_not_made_again_and_a_recording_is_read_as_recorded(monkeypatch, tmp_path):
    some = ("determinism", "TF32", "one bit of one weight")
    monkeypatch.setattr(Factor, "runs_here", lambda factor: factor.name in some and factor.kind == "cpu")
    store = tmp_path / "runs"
    record_factors(tmp_path / "measured" / "factors-here.json", store, "autoencoder", seeds=2, **SMALL)
    (tmp_path / "studies").mkdir()
    stores.pack(store, tmp_path / "studies" / "factors-here.parquet")
    monkeypatch.setattr("gpulab.store.records.DATA", tmp_path)
    before = {file: file.stat().st_mtime_ns for file in store.glob("*/run.json")}
    report = companion.factor_table("autoencoder", seeds=2, store=store, **SMALL)
    assert before == {file: file.stat().st_mtime_ns for file in store.glob("*/run.json")} != {}
    mine, theirs = (
        report.table[report.table.source == source].set_index("factor") for source in ("made here", "recorded")
    )
    columns = ["step_moved", "step_error", "effect", "same_bits", "decision"]
    pd.testing.assert_frame_equal(mine[columns], theirs[columns])
    for name in MEASURED:
        assert (companion.recorded_measurements(name).machine == gl.passport()["cpu"]["model"]).all()
