"""One run at rest, and one that is not yet: what is written is read back whole, or refused by name."""

import contextlib
import json
import os
import re
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from small_runs import HISTORY

import gpulab as gl
from gpulab.store import identities, run_files

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(3), "c": torch.ones(2, dtype=torch.bfloat16)}
DIGEST = identities.weights_digest(WEIGHTS)


def test_what_is_written_is_read_back(written, record, tmp_path):
    store = tmp_path / "new" / "store"
    folder = written(store, 5, weights=WEIGHTS)
    assert sorted(file.name for file in folder.iterdir()) == ["results.safetensors", "run.json"]
    assert folder == store / "run-5"
    back, history, weights = run_files.read_run(folder)
    assert back == {**record, "id": "run-5", "seed": 5}
    assert history.equals(HISTORY)
    assert identities.weights_digest(weights) == DIGEST
    assert list((store / run_files.WORK).iterdir()) == []


def test_a_run_that_cannot_be_written_whole_leaves_nothing(written, tmp_path):
    with pytest.raises(TypeError):
        written(tmp_path, 1, command=object())  # JSON has no objects
    assert [path.name for path in tmp_path.rglob("*")] == [run_files.WORK]
    assert gl.runs(tmp_path).empty


def test_weights_are_added_to_a_run_without_them_if_they_are_its_own(written, record, tmp_path):
    summary = {**record["summary"], "weights": DIGEST}
    folder = written(tmp_path, 1, summary=summary)
    with pytest.warns(UserWarning, match="run-1: trained again, it ended with other weights"):
        written(tmp_path, 1, weights={"a": torch.zeros(3)}, summary=summary)
    assert run_files.read_run(folder)[2] is None
    written(tmp_path, 1, HISTORY.assign(seconds=9.0), weights=WEIGHTS, summary=summary)
    _, history, weights = run_files.read_run(folder)
    assert identities.weights_digest(weights) == DIGEST
    assert history.equals(HISTORY), "the first to finish wins"


def test_many_threads_write_at_once_and_readers_see_whole_runs_only(written, tmp_path):
    writers, seeds = 8, 6
    tmp_path.joinpath(run_files.WORK).mkdir()
    finished = threading.Event()

    def work(writer):
        for seed in range(seeds):  # all write these
            history = HISTORY.assign(loss=[float(writer), float(seed)])
            written(tmp_path, seed, history, command=f"writer {writer}")
        written(tmp_path, 100 + writer)  # and this one alone

    def read():
        seen = 0
        while not finished.is_set():
            frame = gl.runs(tmp_path)
            assert len(frame) >= seen
            seen = len(frame)
            gl.store.history(frame)

    with warnings.catch_warnings(), ThreadPoolExecutor(writers + 1) as pool:
        warnings.simplefilter("error")
        reader = pool.submit(read)
        try:
            for done in [pool.submit(work, writer) for writer in range(writers)]:
                done.result()
        finally:
            finished.set()
        reader.result()
    frame = gl.runs(tmp_path)
    assert frame.seed.tolist() == [*range(seeds), *range(100, 100 + writers)]
    for row in frame[frame.seed < 100].itertuples():  # each is wholly of one writer
        back, history, _ = run_files.read_run(Path(row.path))
        assert back["command"] == f"writer {int(history.loss[0])}"
    assert list((tmp_path / run_files.WORK).iterdir()) == []


# --- prepared runs -------------------------------------------------------------------------------------------


def test_prepared_runs_are_copied_and_not_trained_again(tmp_path, monkeypatch):
    shelf, mine = tmp_path / "shelf", tmp_path / "mine"
    (prepared,) = gl.Experiment("autoencoder", ["cpu:threads=1"], 1, "smoke", shelf).run(progress=False).path
    for path in Path(prepared).iterdir():
        path.chmod(0o444)
    Path(prepared).chmod(0o555)
    monkeypatch.setenv("GPULAB_PREPARED", str(shelf))
    two = gl.Experiment("autoencoder", ["cpu:threads=1"], 2, "smoke", mine).run(progress=False)
    copied, trained = ((Path(path) / run_files.RECORD).read_bytes() for path in two.path)
    assert (Path(prepared) / run_files.RECORD).read_bytes() == copied != trained
    assert len(gl.runs(shelf)) == 1, "what was missing is in the store of who asked"
    assert not any((mine / run_files.WORK).iterdir())
    shutil.rmtree(mine)


@pytest.mark.parametrize("trouble", ["damaged", "unreadable", "unreachable"])
def test_a_prepared_run_that_is_of_no_use_is_trained_and_left_as_it_was(trouble, tmp_path, monkeypatch):
    shelf, mine = tmp_path / "shelf", tmp_path / "mine"
    (run,) = gl.Experiment("autoencoder", ["cpu:threads=1"], 1, "smoke", shelf).run(progress=False).path
    (Path(run) / run_files.RESULTS).write_bytes(b"no results")
    before = {path: path.read_bytes() for path in shelf.rglob("*") if path.is_file()}
    monkeypatch.setenv("GPULAB_PREPARED", str(shelf))
    if trouble == "unreadable":
        monkeypatch.setattr(shutil, "copyfile", lambda *_: (tmp_path / "absent").read_bytes())
    if trouble == "unreachable":
        monkeypatch.setenv("GPULAB_PREPARED", str(shelf / ("n" * 5000)))
    with pytest.warns(match="trained again") if trouble == "damaged" else contextlib.nullcontext():
        gl.train("autoencoder", profile="smoke", setting="cpu:threads=1", store=mine, progress=False)
    assert gl.runs(mine).status.tolist() == ["finished"]
    assert {path: path.read_bytes() for path in shelf.rglob("*") if path.is_file()} == before


# --- damage ------------------------------------------------------------------------------------------------


def without(field):
    def change(folder):
        record = json.loads((folder / "run.json").read_text())
        del record[field]
        (folder / "run.json").write_text(json.dumps(record))

    return change


def holding(name, content):
    return lambda folder: (folder / name).write_bytes(content)


RECORDS = {  # beside what a store's check is tested with
    "binary": holding("run.json", bytes(range(128, 256))),
    "a list": holding("run.json", b"[1, 2]"),
    "of a later format": holding("run.json", b'{"format": 99}'),
    **{f"without a {field}": without(field) for field in ("seed", "passport", "configuration", "seal")},
    "without results": lambda folder: (folder / "results.safetensors").unlink(),
}
RESULTS = {
    "garbage": holding("results.safetensors", b"PAR" * 1000),
    "truncated": lambda folder: os.truncate(folder / "results.safetensors", 300),
    "another run's": lambda folder: shutil.copy(folder.parent / "run-99" / "results.safetensors", folder),
    "a folder": lambda folder: ((folder / "results.safetensors").unlink(), (folder / "results.safetensors").mkdir()),
    "a checkpoint": lambda folder: run_files.write_checkpoint(
        folder / "results.safetensors", {"loss": torch.ones(3)}, {"run": folder.name}
    ),
}


def test_damaged_records_are_reported_and_skipped_and_damaged_histories_are_named(written, tmp_path):
    folders = [written(tmp_path, seed) for seed in range(len(RECORDS) + len(RESULTS))]
    written(tmp_path, 99)
    before = gl.runs(tmp_path)
    for damage, folder in zip([*RECORDS.values(), *RESULTS.values()], folders, strict=True):
        damage(folder)
    with pytest.warns(UserWarning, match=rf"{len(RECORDS) + 1} damaged run\(s\) skipped") as warned:
        frame = gl.runs(tmp_path)
    assert frame.attrs["damaged"] == len(RECORDS) + 1, "those whose results are no file, too"
    assert warned[0].filename == __file__
    for folder in folders:
        assert (f"{folder}/" in str(warned[0].message)) == (folder.name not in set(frame.id))
        with pytest.raises(gl.DataError, match=rf"{folder.name}.(run\.json|results\.safetensors)"):
            gl.store.history(before[before.id == folder.name])


# --- checkpoints -------------------------------------------------------------------------------------------

NOTES = {"step": 2, "state": {}, "ways": ["autograd"]}


def resumed(file):
    """What a checkpoint gives back, if anything."""
    given = []
    assert run_files.resume(file, lambda *parts: given.extend(parts)) == bool(given)
    return given or None


def test_a_checkpoint_is_read_back_unless_there_is_none_or_one_of_a_later_format(tmp_path, monkeypatch):
    file = run_files.checkpoint_file(tmp_path, "a-run")
    assert resumed(file) is None
    for count in (3, 4):
        run_files.write_checkpoint(file, {"a": torch.arange(count)}, NOTES)
    tensors, notes = resumed(file)
    assert tensors["a"].tolist() == [0, 1, 2, 3]
    assert notes["step"] == 2
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    monkeypatch.setattr(run_files, "FORMAT", 99)
    with pytest.warns(UserWarning, match="another version"):
        assert resumed(file) is None


def test_no_bit_of_a_checkpoint_is_unguarded_and_a_damaged_one_is_set_aside(tmp_path):
    file = run_files.checkpoint_file(tmp_path, "a-run")
    run_files.write_checkpoint(file, {"a": torch.arange(3)}, NOTES)
    whole = file.read_bytes()
    flipped = [bytearray(whole) for _ in range(8 * len(whole))]
    for bit, content in enumerate(flipped):
        content[bit // 8] ^= 1 << bit % 8
    for content in [b"", b"not tensors", bytes(100_000), whole[:-1], *flipped]:
        file.write_bytes(content)
        with pytest.warns(UserWarning, match="damaged checkpoint"):
            assert resumed(file) is None
        assert not file.exists()
        (moved,) = (tmp_path / run_files.DAMAGED).iterdir()
        assert moved.read_bytes() == content
        moved.unlink()


def test_nothing_is_ever_unpickled_from_a_file():
    # What joblib does in memory and through the pipes of its processes reads no file; its `load` does.
    in_memory = r" import cpu_count|\.externals\.loky import ProcessPoolExecutor"
    pattern = rf"pickle\.loads?\([^\n]*|torch\.load\b|joblib(?!{in_memory})|allow_pickle=True|read_pickle"
    found = [
        (file.name, hit)
        for file in Path(gl.__file__).parent.rglob("*.py")
        for hit in re.findall(pattern, file.read_text())
    ]
    # What a process sends its own worker, through the pipe between them.
    assert found == [("worker.py", 'pickle.loads(base64.b64decode(job["pickled"]))')]
