"""Stores as tables: what is in them, and what is packed into one file."""

import math
import shutil

import pytest
import torch
from small_runs import HISTORY

import gpulab as gl
from gpulab.store import listing, records


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
    assert list(gl.runs(tmp_path / "absent").columns) == listing.COLUMNS


@pytest.fixture
def packed(written, record, tmp_path):
    for seed in range(3):
        summary = {**record["summary"], "final_loss": None if seed == 1 else 0.1 * seed}
        written(tmp_path / "store", seed, summary=summary, flip=seed, resumed_at=seed or None)
    assert listing.pack(tmp_path / "store", tmp_path / "shared.parquet") == 3
    return tmp_path


def test_a_store_may_hold_packed_runs_and_lists_each_once(packed, written):
    store, file = packed / "store", packed / "store" / "all.parquet"
    shutil.rmtree(store / "run-2")
    (packed / "shared.parquet").rename(file)
    frame = gl.runs(store)
    assert frame.path.tolist() == [str(store / "run-0"), str(store / "run-1"), str(file)]
    assert len(listing.history(frame)) == 3 * len(HISTORY)
    written(store, 3)
    for _ in range(2):
        assert listing.pack(store, file) == 4
        assert gl.runs(file).seed.tolist() == [0, 1, 2, 3]


def test_what_is_no_file_of_whole_packed_runs_is_reported_and_skipped(packed, tmp_path):
    whole, store = (packed / "shared.parquet").read_bytes(), tmp_path / "files"
    records.write_table(store / "other.parquet", HISTORY, {"passport": {}})
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(gl.DataError, match="no runs to pack"):
        listing.pack(store, tmp_path / "b.parquet")
    for name, content in {"empty": b"", "garbage": b"PAR1" * 100, "cut": whole[: len(whole) // 2]}.items():
        (store / f"{name}.parquet").write_bytes(content)
    (store / "whole.parquet").write_bytes(whole)
    with pytest.warns(UserWarning, match=r"4 damaged.*cut\.parquet: cannot.*other\.parquet: not a file of packed runs"):
        assert len(gl.runs(store)) == 3


def test_a_long_text_as_an_option_of_a_function_is_no_path():
    def train(seed, prompt=""):
        return float(seed + len(prompt))

    assert gl.train(train, model_options={"prompt": 300 * "x"}, progress=False).metrics["final_loss"] == 300
