"""Stored runs are read back completely, or rejected with an error that names the file; stores are
listed as tables.
"""

import functools
import math
import os
import re
import shutil
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpulab as gl
from gpulab.store import _run_identity as identities
from gpulab.store import _run_store as stores
from gpulab.store import _tables as tables
from gpulab.store import recorded
from gpulab.store._run_identity import weights_digest
from gpulab.store._tensors import read_tensors, write_tensors

HISTORY = pd.DataFrame(
    {"window": [0, 1], "step": [1, 2], "loss": [0.5, 0.25], "seconds": [0.1, 0.2]}
)
TENSORS = st.builds(
    lambda dtype, shape: (10 * torch.randn(*shape, 2)).to(dtype).transpose(0, -1),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
    st.lists(st.integers(0, 3), max_size=2),
) | st.just(torch.tensor(3))
LOSSES = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def record():
    """The record of a real run, from which other records are made."""
    return gl.train("autoencoder", profile="smoke", frames=20, progress=False).record


@pytest.fixture(scope="module")
def written(record):
    """Write a run with a changed record into a store, and return its folder."""

    def write(store, seed, history=HISTORY, weights=None, **changes):
        return stores.write_run(
            store, {**record, "id": f"run-{seed}", "seed": seed, **changes}, history, weights
        )

    return write


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**31), st.text(), LOSSES, st.dictionaries(st.text(), TENSORS, max_size=3))
def test_run_store_reads_back_what_was_written_packed_or_not_and_keeps_it_once(
    written, record, seed, command, losses, weights
):
    changes = {
        "command": command,
        "summary": {**record["summary"], "weights": weights_digest(weights)},
    }
    history = pd.DataFrame({"loss": losses}).assign(
        window=range(len(losses)), step=range(len(losses)), seconds=0.3
    )
    history = history[HISTORY.columns]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "new" / "store"
        run = written(store, seed, history, **changes)
        for _ in range(2):  # the first run is kept, and weights are added to it
            assert written(store, seed, history.assign(seconds=9.0), weights, **changes) == run
        assert sorted(file.name for file in run.iterdir()) == ["results.safetensors", "run.json"]
        assert list((store / stores.WORK_FOLDER).iterdir()) == []
        back, read, kept = stores.read_run(run)
        assert back == {**record, "id": f"run-{seed}", "seed": seed, **changes, "command": command}
        assert read.equals(history)
        assert (kept or {}).keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(kept[name], tensor, rtol=0, atol=0)
        assert tables.pack(store, store / "all.parquet") == 1
        frame = gl.runs(store / "all.parquet")
        assert frame.drop(columns="path").equals(gl.runs(store).drop(columns="path"))
        assert [record for record, _ in tables.read_histories(frame)] == [back]
        rows = tables.history(frame)
        assert rows.loss.tolist() == losses
        assert (rows.seconds - 0.3).abs().max() <= 1 / 2048, "rounded to 1/1024"


def test_run_store_does_not_add_weights_that_are_not_those_of_the_run(written, tmp_path):
    folder = written(tmp_path, 1)
    with pytest.warns(UserWarning, match="run-1: trained again, .* different weights"):
        written(tmp_path, 1, weights={"a": torch.zeros(3)})
    assert stores.read_run(folder).weights is None


def test_run_store_with_many_writing_threads_shows_whole_runs_only(written, tmp_path):
    def work(writer):
        for seed in range(6):
            written(
                tmp_path,
                seed,
                HISTORY.assign(loss=[float(writer), seed]),
                command=f"writer {writer}",
            )
            gl.store.history(gl.runs(tmp_path))

    with warnings.catch_warnings(), ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("error")
        list(pool.map(work, range(8)))
    frame = gl.runs(tmp_path)
    assert frame.seed.tolist() == [*range(6)]
    for path in frame.path:  # each run comes from a single writer
        back, history, _ = stores.read_run(Path(path))
        assert back["command"] == f"writer {int(history.loss[0])}"
    assert list((tmp_path / stores.WORK_FOLDER).iterdir()) == []


def flipped(share, bit, file):
    """Flip one bit of a file, at a share of its length."""
    content = bytearray(file.read_bytes())
    content[int(share * len(content))] ^= 1 << bit
    file.write_bytes(content)


def replaced_by(content, file):
    file.write_bytes(content)


def cut(share, file):
    os.truncate(file, int(share * file.stat().st_size))


def made_a_folder(file):
    file.unlink()
    file.mkdir()


def that_of_another_run(file):
    shutil.copy(file.parents[1] / "run-2" / file.name, file)


SHARES = st.floats(0, 1, exclude_max=True)
DAMAGES = st.one_of(
    st.builds(functools.partial, st.just(flipped), SHARES, st.integers(0, 7)),
    st.builds(functools.partial, st.just(cut), SHARES),
    st.builds(
        functools.partial,
        st.just(replaced_by),
        st.binary() | st.sampled_from([b"[1, 2]", b'{"format": 99}']),
    ),
    st.sampled_from([Path.unlink, made_a_folder, that_of_another_run]),
)


@pytest.fixture(scope="module")
def two_runs(written, tmp_path_factory):
    store = tmp_path_factory.mktemp("two") / "runs"
    for seed in (1, 2):
        written(store, seed, weights={"a": torch.arange(6.0)})
    return store, gl.runs(store)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([stores.RECORD_FILE, stores.RESULTS_FILE]), DAMAGES)
def test_run_store_names_damage_and_never_returns_another_result(two_runs, name, damage):
    whole, before = two_runs
    with tempfile.TemporaryDirectory() as folder:
        store = Path(shutil.copytree(whole, folder, dirs_exist_ok=True))
        run, frame = (
            store / "run-1",
            before.assign(path=[str(store / f"run-{seed}") for seed in (1, 2)]),
        )
        damage(run / name)
        with pytest.raises(gl.DataError, match=rf"run-1.{re.escape(name)}"):
            gl.store.history(frame)
        with warnings.catch_warnings(record=True) as warned:
            listed = gl.runs(store)
        assert listed.attrs.get("damaged", 0) == len(warned) == 2 - len(listed)
        assert all(f"{run}" in str(each.message) and each.filename == __file__ for each in warned)
        assert name == stores.RESULTS_FILE or listed.id.tolist() == ["run-2"]
        with pytest.warns(UserWarning, match="the run is trained again"):
            assert stores.find_run(store, identities.Identity("run-1", {})) is None
        assert [path.name[:6] for path in (store / stores.DAMAGED_FOLDER).iterdir()] == ["run-1-"]
        assert gl.runs(store).id.tolist() == ["run-2"]


@pytest.mark.usefixtures("file_modes")
def test_run_store_does_not_move_a_run_that_may_not_be_read(two_runs, tmp_path):
    """It is not damaged, so training it again would only repeat the work."""
    store = Path(shutil.copytree(two_runs[0], tmp_path / "runs"))
    record = store / "run-1" / stores.RECORD_FILE
    record.chmod(0)
    with pytest.raises(gl.GpulabError, match=f"{re.escape(str(record))}.*permission denied"):
        stores.find_run(store, identities.Identity("run-1", {}))
    assert not (store / stores.DAMAGED_FOLDER).exists()
    record.chmod(0o600)
    assert stores.find_run(store, identities.Identity("run-1", {})) is not None


MISSING = [  # the keys that lead to the value that is removed from a record
    ("seed",),
    ("summary", "final_loss"),
    ("passport", "cpu"),
    ("passport", "gpus"),
    ("passport", "software", "torch"),
    ("configuration", "data"),
    ("configuration", "frames"),
]


@pytest.mark.parametrize("place", MISSING, ids=".".join)
def test_run_store_neither_lists_nor_finds_an_incomplete_record(written, tmp_path, place):
    folder = written(tmp_path, 1)
    document = recorded.read_document(folder / stores.RECORD_FILE)
    *parents, key = place
    del functools.reduce(dict.__getitem__, parents, document)[key]
    recorded.write_document(folder / stores.RECORD_FILE, document)
    where = rf"run-1.{re.escape(stores.RECORD_FILE)}: a damaged record"
    with pytest.warns(UserWarning, match=f"1 damaged run.*{where}"):
        assert gl.runs(tmp_path).empty
    with pytest.warns(UserWarning, match=f"{where}.*the run is trained again"):
        assert stores.find_run(tmp_path, identities.Identity("run-1", {})) is None


def test_read_tensors_gives_back_what_was_written_unless_the_format_differs(tmp_path, monkeypatch):
    file = tmp_path / "some.safetensors"
    for count in (3, 4):
        write_tensors(file, {"a": torch.arange(count)}, {"step": 2})
    tensors, notes = read_tensors(file)
    assert tensors["a"].tolist() == [0, 1, 2, 3]
    assert notes == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    monkeypatch.setattr(recorded, "FORMAT_VERSION", 99)
    with pytest.raises(gl.DataError, match=r"format '3'; .* reads 99"):
        read_tensors(file)


def test_gpulab_unpickles_no_file():
    # These uses of joblib, in memory and through the pipes of its processes, read no files;
    # `joblib.load` does.
    in_memory = (
        r" import cpu_count|\.externals\.loky[\w.]* import \w+|\.hashing import NumpyHasher|'s hash"
    )
    pattern = (
        rf"pickle\.loads?\([^\n]*|torch\.load\b|joblib(?!{in_memory})|allow_pickle=True|read_pickle"
    )
    found = [
        (file.name, hit)
        for file in Path(gl.__file__).parent.rglob("*.py")
        for hit in re.findall(pattern, file.read_text())
    ]
    # A process sends this to its own worker, through the pipe between them.
    assert found == [("_workers.py", 'pickle.loads(job), progress=False).record["id"]')]


# --- stores as tables -----------------------------------------------------------------------------


def test_runs_table_tells_machines_protocols_and_missing_losses(written, record, tmp_path):
    written(
        tmp_path,
        0,
        setting="cuda:tf32=off",
        passport={**record["passport"], "gpus": [{"name": "Titan"}]},
    )
    lost = {**record["summary"], "final_loss": None, "heldout_loss": None}
    written(tmp_path, 1, status="diverged", diverged_at=3, summary=lost)
    written(tmp_path, 2, configuration={**record["configuration"], "learning_rate": 2e-3})
    frame = gl.runs(tmp_path)
    diverged, third, gpu = frame.itertuples()
    assert (gpu.device, gpu.machine, gpu.gpu) == ("cuda", "Titan", "Titan")
    assert gpu.protocol == diverged.protocol != third.protocol
    assert math.isnan(diverged.final_loss)
    assert (frame.final_loss.count(), frame.recorded.any()) == (2, False)
    assert (third.status, third.device, third.frames) == ("finished", "cpu", 20)
    assert (third.final_loss, third.weights) == (
        record["summary"]["final_loss"],
        record["summary"]["weights"],
    )
    assert third.machine == third.cpu == record["passport"]["cpu"]["model"]
    assert (third.torch, third.gpulab) == (torch.__version__, gl.__version__)


def test_runs_reads_the_store_of_the_environment_and_an_absent_one_is_empty(
    written, tmp_path, monkeypatch
):
    written(tmp_path / "told", 1)
    written(tmp_path / "runs", 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPULAB_STORE", str(tmp_path / "told"))
    assert gl.runs().seed.tolist() == [1]
    monkeypatch.delenv("GPULAB_STORE")
    assert gl.runs().seed.tolist() == [2]
    assert gl.runs(tmp_path / "absent").empty
    assert list(gl.runs(tmp_path / "absent").columns) == tables.RUN_COLUMNS


@pytest.fixture
def packed(written, record, tmp_path):
    for seed in range(3):
        summary = {**record["summary"], "final_loss": None if seed == 1 else 0.1 * seed}
        written(tmp_path / "store", seed, summary=summary, flip=seed, resumed_at=seed or None)
    assert tables.pack(tmp_path / "store", tmp_path / "shared.parquet") == 3
    return tmp_path


def test_runs_lists_packed_runs_of_a_store_once(packed, written):
    store, file = packed / "store", packed / "store" / "all.parquet"
    shutil.rmtree(store / "run-2")
    (packed / "shared.parquet").rename(file)
    frame = gl.runs(store)
    assert frame.path.tolist() == [str(store / "run-0"), str(store / "run-1"), str(file)]
    assert len(tables.history(frame)) == 3 * len(HISTORY)
    written(store, 3)
    for _ in range(2):
        assert tables.pack(store, file) == 4
        assert gl.runs(file).seed.tolist() == [0, 1, 2, 3]


def test_packed_file_that_is_not_whole_is_reported_and_skipped(packed, tmp_path):
    whole, store = (packed / "shared.parquet").read_bytes(), tmp_path / "files"
    # a recording that does not contain runs
    recorded.write_table(store / "other.parquet", HISTORY, {"passport": {}})
    with pytest.raises(gl.DataError, match="there are no runs in"):
        tables.pack(store, tmp_path / "b.parquet")
    for name, content in {
        "empty": b"",
        "garbage": b"PAR1" * 100,
        "cut": whole[: len(whole) // 2],
    }.items():
        (store / f"{name}.parquet").write_bytes(content)
    (store / "whole.parquet").write_bytes(whole)
    with pytest.warns(UserWarning, match=r"3 damaged.*cut\.parquet: cannot"):
        assert len(gl.runs(store)) == 3


def test_train_does_not_take_a_long_text_option_for_a_path():
    def train(seed, prompt=""):
        return float(seed + len(prompt))

    assert (
        gl.train(train, model_options={"prompt": 300 * "x"}, progress=False).metrics["final_loss"]
        == 300
    )
