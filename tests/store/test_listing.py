"""Stores as tables: what is in them, what is shipped, and what is packed into one file."""

import math
import os
import re
import shutil
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_runs import HISTORY

import gpulab as gl
from gpulab import files
from gpulab.errors import printable
from gpulab.passports import OTHERS
from gpulab.store import identities, listing, records


def test_the_id_depends_on_what_is_run_and_on_nothing_else(record):
    identity = {"experiment": "prednet", "profile": "quick", "setting": "cuda:tf32=off", "seed": 3, "extra": {"a": 1}}
    name = identities.run_id(identity)
    assert re.fullmatch(r"prednet-quick-cuda_tf32_off-seed3-[0-9a-f]{10}", name)
    assert identities.run_id(dict(reversed(identity.items()))) == name
    assert len({identities.run_id({**identity, key: 7}) for key in identity} | {name}) == 6
    assert re.fullmatch(r"[a-z0-9._-]+", record["id"]), "a folder of this name can be made anywhere"


# --- frames ----------------------------------------------------------------------------------------------


def test_a_frame_has_a_row_a_run_with_the_columns_documented(written, record, tmp_path):
    for seed in (10, 9, 1):
        written(tmp_path, seed)
    frame = gl.runs(tmp_path)
    assert frame.seed.tolist() == [1, 9, 10]
    documented = re.findall(r"`(\w+)`", gl.runs.__doc__.partition("Columns:")[2].partition("A damaged")[0])
    assert sorted(frame.columns) == sorted(documented)
    row = frame.iloc[0]
    assert (row.experiment, row.profile, row.setting, row.device) == ("autoencoder", "smoke", "cpu", "cpu")
    assert (row.status, row.rerun, row.recorded, row.frames) == ("finished", 0, False, 20)
    assert row.final_loss == record["summary"]["final_loss"]
    assert row.weights == record["summary"]["weights"]
    assert row.machine == row.cpu == record["passport"]["cpu"]["model"]
    assert (row.torch, row.gpulab) == (torch.__version__, gl.__version__)
    assert row.path == str(tmp_path / "run-1")


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


def test_histories_are_put_below_each_other_with_the_columns_of_their_runs(written, tmp_path):
    for seed in (1, 2):
        written(tmp_path, seed)
    histories = listing.history(gl.runs(tmp_path))
    assert histories.loss.tolist() == [0.5, 0.25, 0.5, 0.25]
    assert histories.seed.tolist() == [1, 1, 2, 2]
    assert set(histories.setting) == {"cpu"}
    assert histories.id.tolist() == ["run-1", "run-1", "run-2", "run-2"]
    assert listing.history(gl.runs(tmp_path / "absent")).empty


# --- what is shipped -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of them is damaged
        return gl.recorded_runs()


OF_TEN_SEEDS = {
    "paper": ("cuda:tf32=off", "cuda:tf32=on", "cuda:cudnn=off", "cuda:deterministic=on"),
    "quick": ("cpu", "cpu:threads=1"),
}


@pytest.mark.parametrize("model", ["autoencoder", "prednet"])
@pytest.mark.parametrize("profile", OF_TEN_SEEDS)
def test_there_are_recorded_runs_of_ten_seeds(shipped, model, profile):
    of_the_notebooks = (shipped.loader == "window") & (shipped["rerun"] == 0)
    these = shipped[(shipped.experiment == model) & (shipped.profile == profile) & of_the_notebooks]
    these = these[these.setting.isin(OF_TEN_SEEDS[profile])]
    assert (these.groupby("setting").seed.nunique().reindex(OF_TEN_SEEDS[profile], fill_value=0) >= 10).all()
    assert these.protocol.nunique() == 1


def test_every_recorded_run_has_the_passport_of_its_machine_and_its_command(shipped):
    assert shipped.recorded.all()
    here = gl.passport()
    for file in set(shipped.path):
        for record in records.packed_runs(Path(file)):
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
    histories = dict(list(listing.history(shipped).groupby("id")))
    for row in shipped.itertuples():
        history = histories[row.id]
        assert history.window.tolist() == list(range(len(history)))
        if row.status == "finished":
            assert len(history) == row.frames // {"whitener": 200}.get(row.experiment, 20)
            assert history.loss[-(len(history) // 5) :].mean() == pytest.approx(row.final_loss, rel=1e-12), row.id


def test_the_runs_of_a_study_are_apart_from_the_others(shipped):
    studies = ["dose", "factors", "films", "longer", "published", "reused", "stuck", "title", "truncation"]
    for study in studies:
        frame = gl.recorded_runs(study)
        assert len(frame)
        assert frame.recorded.all()
        assert not set(frame.id) & set(shipped.id)
    with pytest.raises(gl.UsageError, match=f"study 'titles': expected one of {', '.join(studies)}"):
        gl.recorded_runs("titles")


def test_what_was_measured_says_where_and_by_which_command():
    files = sorted(records.recorded_folder("measured").glob("*.json"))
    kinds = {file.stem.partition("-")[0] for file in files}
    assert {"audits", "factors", "products", "rooflines", "speed"} <= kinds
    for kind in kinds:
        for document in records.read_measured(kind):
            assert "benchmarks/" in document["command"]
            if "found" not in document:  # of whose search no passport was kept
                devices = ("cpu", "")
                assert document["machine"] in {records.machine(document["passport"], device) for device in devices}


def test_what_is_recorded_is_small():
    sizes = {
        name: sum(f.stat().st_size for f in (records.DATA / name).rglob("*") if f.is_file()) for name in (".", "runs")
    }
    assert sizes["runs"] < 3_000_000
    assert sizes["."] < 10_000_000


# --- packed ------------------------------------------------------------------------------------------------


@pytest.fixture
def packed(written, record, tmp_path):
    for seed in range(3):
        summary = {**record["summary"], "final_loss": None if seed == 1 else 0.1 * seed}
        written(tmp_path / "store", seed, summary=summary, flip=seed, resumed_at=seed or None)
    assert listing.pack(tmp_path / "store", tmp_path / "shared.parquet") == 3
    return tmp_path


def test_packed_runs_are_the_runs_that_were_packed_and_share_what_they_have_in_common(packed):
    store, file = gl.runs(packed / "store"), gl.runs(packed / "shared.parquet")
    assert file.drop(columns="path").equals(store.drop(columns="path"))
    for one, other in zip(store.itertuples(), file.itertuples(), strict=True):
        assert listing.record_of(other) == listing.record_of(one)
    _, shared = records.read_rows(packed / "shared.parquet", [])
    assert {name: len(shared[name]) for name in records.SHARED} == dict.fromkeys(records.SHARED, 1), "kept once"


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
    (store / "loop.parquet").symlink_to("loop.parquet")
    (store / "loop").symlink_to("loop")
    os.mkfifo(store / "pipe.parquet")
    with pytest.warns(UserWarning, match=r"6 damaged.*cut\.parquet: cannot.*other\.parquet: not a file of packed runs"):
        assert len(gl.runs(store)) == 3


def test_a_column_is_as_large_as_all_its_row_groups_together(tmp_path):
    file = tmp_path / "many.parquet"
    pq.write_table(pa.table({"loss": range(1000)}), file, row_group_size=200, use_dictionary=False)
    metadata = pq.read_metadata(file)
    records.check_size(file, metadata, 2000)
    with pytest.raises(gl.DataError, match="too large: more than 900 numbers in a column"):
        records.check_size(file, metadata, 900)


@pytest.mark.parametrize("path", ["a\0b", 300 * "x"], ids=["NUL", "long"])
def test_a_path_that_can_be_none_is_one_clear_line(path):
    for use in (
        gl.runs,
        gl.store.check,
        lambda path: gl.train("autoencoder", profile="smoke", frames=20, store=path, progress=False),
        lambda path: gl.train("autoencoder", profile="smoke", frames=20, registered=path),
        lambda path: gl.train(f"{path}.py:train"),
        lambda path: files.write(path, b""),
    ):
        with pytest.raises(gl.GpulabError, match=r"(?i)name (is )?too long|embedded null") as error:
            use(path)
        assert printable(path)[:100] in str(error.value)


def test_a_long_text_as_an_option_of_a_function_is_no_path():
    def train(seed, prompt=""):
        return float(seed + len(prompt))

    assert gl.train(train, model_options={"prompt": 300 * "x"}, progress=False).metrics["final_loss"] == 300
