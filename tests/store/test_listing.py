"""Stores as tables: what is in them, and what is packed into one file."""

import math
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from small_runs import HISTORY

import gpulab as gl
from gpulab.passports import OTHERS
from gpulab.store import recorded
from gpulab.store import runs as stores


def test_rows_tell_machines_protocols_and_missing_losses(written, record, tmp_path):
    written(tmp_path, 0, setting="cuda:tf32=off", passport={**record["passport"], "gpus": [{"name": "Titan"}]})
    lost = {**record["summary"], "final_loss": None, "heldout_loss": None}
    written(tmp_path, 1, status="diverged", diverged_at=3, summary=lost)
    written(tmp_path, 2, configuration={**record["configuration"], "learning_rate": 2e-3})
    frame = gl.runs(tmp_path)
    diverged, third, gpu = frame.itertuples()
    assert (gpu.device, gpu.machine, gpu.gpu) == ("cuda", "Titan", "Titan")
    assert gpu.protocol == diverged.protocol != third.protocol
    assert math.isnan(diverged.final_loss)
    assert frame.final_loss.dtype == frame.heldout_loss.dtype == float
    assert frame.final_loss.count() == 2
    assert not frame.recorded.any()
    assert (third.status, third.device, third.frames) == ("finished", "cpu", 20)
    assert (third.final_loss, third.weights) == (record["summary"]["final_loss"], record["summary"]["weights"])
    assert third.machine == third.cpu == record["passport"]["cpu"]["model"]
    assert (third.torch, third.gpulab) == (torch.__version__, gl.__version__)


def test_a_store_may_be_told_by_the_environment_and_an_absent_one_is_empty(written, tmp_path, monkeypatch):
    written(tmp_path / "told", 1)
    written(tmp_path / "runs", 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPULAB_STORE", str(tmp_path / "told"))
    assert gl.runs().seed.tolist() == [1]
    monkeypatch.delenv("GPULAB_STORE")
    assert gl.runs().seed.tolist() == [2]
    assert gl.runs(tmp_path / "absent").empty
    assert list(gl.runs(tmp_path / "absent").columns) == stores.COLUMNS


@pytest.fixture
def packed(written, record, tmp_path):
    for seed in range(3):
        summary = {**record["summary"], "final_loss": None if seed == 1 else 0.1 * seed}
        written(tmp_path / "store", seed, summary=summary, flip=seed, resumed_at=seed or None)
    assert stores.pack(tmp_path / "store", tmp_path / "shared.parquet") == 3
    return tmp_path


def test_a_store_may_hold_packed_runs_and_lists_each_once(packed, written):
    store, file = packed / "store", packed / "store" / "all.parquet"
    shutil.rmtree(store / "run-2")
    (packed / "shared.parquet").rename(file)
    frame = gl.runs(store)
    assert frame.path.tolist() == [str(store / "run-0"), str(store / "run-1"), str(file)]
    assert len(stores.history(frame)) == 3 * len(HISTORY)
    written(store, 3)
    for _ in range(2):
        assert stores.pack(store, file) == 4
        assert gl.runs(file).seed.tolist() == [0, 1, 2, 3]


def test_what_is_no_file_of_whole_packed_runs_is_reported_and_skipped(packed, tmp_path):
    whole, store = (packed / "shared.parquet").read_bytes(), tmp_path / "files"
    recorded.write_table(store / "other.parquet", HISTORY, {"passport": {}})  # a recording, and none of runs
    with pytest.raises(gl.DataError, match="no runs to pack"):
        stores.pack(store, tmp_path / "b.parquet")
    for name, content in {"empty": b"", "garbage": b"PAR1" * 100, "cut": whole[: len(whole) // 2]}.items():
        (store / f"{name}.parquet").write_bytes(content)
    (store / "whole.parquet").write_bytes(whole)
    with pytest.warns(UserWarning, match=r"3 damaged.*cut\.parquet: cannot"):
        assert len(gl.runs(store)) == 3


def test_a_long_text_as_an_option_of_a_function_is_no_path():
    def train(seed, prompt=""):
        return float(seed + len(prompt))

    assert gl.train(train, model_options={"prompt": 300 * "x"}, progress=False).metrics["final_loss"] == 300


@pytest.fixture(scope="module")
def shipped():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of them is damaged
        return gl.recorded_runs()


def test_every_recorded_run_has_the_passport_of_its_machine_and_its_command(shipped):
    assert shipped.recorded.all()
    here = gl.passport()
    for file in set(shipped.path):
        for record, _ in recorded.read_packed(Path(file)):
            passport = record["passport"]
            assert passport.keys() == here.keys(), record["id"]
            assert passport["cpu"].keys() == here["cpu"].keys()
            assert passport["software"].keys() == here["software"].keys() - set(OTHERS)
            software = {key: passport["software"][key] for key in ("torch", "python", "os", "gpulab", "commit")}
            assert None not in software.values(), record["id"]
            assert re.fullmatch("[0-9a-f]{40}", software["commit"]), f"{record['id']}: a commit to be looked up"
            assert record["command"].startswith("gpulab "), record["id"]
            if record["setting"].startswith("cuda"):
                assert passport["gpus"][0]["driver"], record["id"]
                assert passport["software"]["cuda"]


def test_every_recorded_history_is_whole_and_agrees_with_its_summary(shipped):
    histories = dict(list(stores.history(shipped).groupby("id")))
    for row in shipped.itertuples():
        history = histories[row.id]
        assert history.window.tolist() == list(range(len(history)))
        if row.status == "finished":
            assert len(history) == row.frames // {"whitener": 200}.get(row.experiment, 20)
            assert history.loss[-(len(history) // 5) :].mean() == pytest.approx(row.final_loss, rel=1e-12), row.id


def test_recorded_runs_keep_their_jpeg_decoder():
    counts = stores.recorded_runs("factors").decoder.value_counts()
    assert counts.to_dict() == {"pillow": 18, "nvjpeg": 10, "av": 8}
