import json

import pandas as pd
import pytest

import gpulab as gl
from gpulab.companion import floating_point as module
from gpulab.companion.floating_point import MEASURED, Factor, factors, level, record_factors, recorded_factors

SMALL = {"profile": "smoke", "frames": 40, "progress": False}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return gl.factor_table("prednet", seeds=2, store=tmp_path_factory.mktemp("factors"), **SMALL)


def here(report):
    return report.table[report.table.source == "made here"].set_index("factor")


def test_each_factor_changes_one_thing():
    for factor in factors():
        base, change = ({**side, **side.get("data_options", {})} for side in (factor.base, factor.change))
        apart = {name for name in base | change if base.get(name) != change.get(name)}
        apart.discard("data_options")
        assert len(apart) == 1, factor.name
        if apart == {"setting"} and factor.name != "the device itself":
            one, other = (gl.Setting.parse(side["setting"]) for side in (factor.base, factor.change))
            options = [name for name in vars(one) if getattr(one, name) != getattr(other, name)]
            assert len(options) == 1, factor.name


def test_every_factor_of_the_question_is_there(report):
    asked = {
        "CPU threads",
        "CPU instruction set",
        "cuDNN",
        "TF32",
        "determinism",
        "order of summation",
        "who draws the weights",
        "image decoder",
        "one bit of one weight",
        "the device itself",
    }
    assert set(report.table.factor) == {factor.name for factor in factors()} == asked


def test_a_step_is_measured_against_float64(report):
    table = here(report)
    assert (table.base_error.between(1e-9, 1e-5)).all()
    tf32 = table.loc["TF32"]
    assert tf32.emulated
    assert tf32.step_error > 100 * tf32.base_error
    assert 9 <= tf32.gradient_bit <= 13
    assert table.loc["determinism", "step_moved"] == 0
    assert pd.isna(table.loc["determinism", "loss_bit"])
    assert table.loc["image decoder", "step_moved"] > tf32.step_moved


def test_the_effect_is_the_verdict_s(report):
    table = here(report)
    seen = report.verdicts["made here", "cpu:threads=1"]
    for row in seen.table.to_dict("records"):
        (mine,) = table[table.change == row["change"]].to_dict("records")
        assert mine["decision"] == row["decision"]
        assert mine["effect"] == pytest.approx(row["difference"] / seen.between_seeds)
        assert mine["same_bits"] == row["same_bits"]
    assert table.loc["determinism", "same_bits"] == 2
    assert table.loc["one bit of one weight", "same_bits"] == 0
    assert set(seen.table.change) >= {"cpu", "cpu:threads=1, flip 0"}, "one correction over all that share a base"


def test_runs_are_kept_and_not_made_again(tmp_path):
    first = gl.factor_table("autoencoder", seeds=2, store=tmp_path, recorded=False, **SMALL)
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/run.json")}
    again = gl.factor_table("autoencoder", seeds=2, store=tmp_path, recorded=False, **SMALL)
    assert kept == {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/run.json")}
    pd.testing.assert_frame_equal(first.table, again.table)
    assert "image decoder" not in set(first.table.factor)


def test_what_nobody_measured_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "recorded_factors", list)
    monkeypatch.setattr(Factor, "runs_here", lambda factor: factor.name == "determinism" and factor.kind == "cpu")
    report = gl.factor_table("autoencoder", seeds=2, store=tmp_path, **SMALL)
    lost = report.table[report.table.source == "not recorded"]
    assert "the device itself" in set(lost.factor)
    assert lost.seeds.isna().all()
    assert "Not recorded: CPU instruction set, CPU threads" in str(report)
    assert report.plot().png()


def test_it_is_said_in_words_and_drawn(report):
    text = report.finding("made here")
    assert "the same bits on every seed: " in text
    assert "TF32 (emulated)" in text
    assert "smoke size, 2 seeds" in text
    assert len(report.plot().png()) < 150_000
    shown, _ = report._repr_mimebundle_()
    assert "made here, emulated" in shown["text/plain"]
    assert "<table" in shown["text/html"]


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "factors"
    record_factors(folder / "here.json", folder / "runs", "autoencoder", seeds=2, command="python record", **SMALL)
    return folder


def test_a_recording_is_read_as_recorded(recording, monkeypatch, tmp_path):
    monkeypatch.setattr("gpulab.records.DATA", recording.parent)
    (record,) = recorded_factors()
    assert record["command"] == "python record"
    assert record["passport"]["cpu"] == gl.passport()["cpu"]
    report = gl.factor_table("autoencoder", seeds=2, store=tmp_path, **SMALL)
    mine, theirs = (
        report.table[report.table.source == source].set_index("factor") for source in ("made here", "recorded")
    )
    columns = ["step_moved", "step_error", "effect", "same_bits", "decision"]
    pd.testing.assert_frame_equal(mine[columns], theirs[columns])
    for name in MEASURED:
        assert (gl.recorded_measurements(name).machine == gl.passport()["cpu"]["model"]).all()


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"format": 99})])
def test_a_damaged_recording_is_named(content, monkeypatch, tmp_path):
    (tmp_path / "factors").mkdir()
    (tmp_path / "factors" / "broken.json").write_text(content)
    monkeypatch.setattr("gpulab.records.DATA", tmp_path)
    with pytest.raises(gl.DataError, match=r"broken\.json"):
        recorded_factors()


def test_nonsense_is_refused(tmp_path):
    with pytest.raises(gl.UsageError, match="'rounding': expected one of conversions"):
        gl.recorded_measurements("rounding")
    with pytest.raises(gl.UsageError, match="kind 'tpu'"):
        record_factors(tmp_path / "x.json", tmp_path, kind="tpu")
    with pytest.raises(gl.UsageError, match="perceptron"):
        gl.factor_table("perceptron", store=tmp_path)


def test_a_level_is_named_by_what_is_not_as_usual():
    options = {"setting": "cuda", "data": "jpeg:walk", "data_options": {"decoder": "av"}, "draws": "device"}
    assert level(options) == "cuda, decoder av, draws device"
