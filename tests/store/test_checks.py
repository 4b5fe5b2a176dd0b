"""A store with every kind of damage: listed, mended, and trained again to the same bits."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
from small_runs import flipped

import gpulab as gl
from gpulab import files
from gpulab.store import checks, listing, run_files

RUN = {"net": "autoencoder", "setting": "cpu:threads=1", "profile": "smoke", "frames": 20, "progress": False}


def changed(folder, **changes):
    """The record with other values, sealed again, as a stranger could."""
    file = folder / "run.json"
    record = {**json.loads(file.read_text()), **changes, "seal": files.UNSEALED}
    file.write_bytes(files.seal(json.dumps(record).encode()))


DAMAGE = {  # beside what is done to single bytes and files of a run
    "a flipped bit in the results": lambda run: flipped(0.9, 2, run / "results.safetensors"),
    "an empty folder": lambda run: [file.unlink() for file in run.iterdir()],
    "a string as loss": lambda run: changed(run, summary={"final_loss": "x", "heldout_loss": 1.0, "seconds": 1.0}),
    "a seed of 400 digits": lambda run: changed(run, seed=10**400),
    "two thousand brackets": lambda run: (run / "run.json").write_text("[" * 2000),
    "another run's record": lambda run: changed(run, id="another"),
    "no passport": lambda run: changed(run, passport=None),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store of one run a damage, and one more."""
    store = tmp_path_factory.mktemp("whole") / "runs"
    for seed in range(len(DAMAGE) + 1):
        gl.train(**RUN, seed=seed, store=store, keep_weights=False)
    return store


@pytest.fixture
def store(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "runs"))


def by_seed(store):
    return {row.seed: Path(row.path) for row in gl.runs(store).itertuples()}


def without_times(frame):
    return frame[["id", "seed", "final_loss", "heldout_loss", "weights", "status"]]


def test_a_store_with_every_damage_is_listed_mended_and_done_again(store, whole):
    runs = by_seed(store)
    for seed, damage in enumerate(DAMAGE.values()):
        damage(runs[seed])
    with pytest.warns(UserWarning, match=f"{len(DAMAGE) - 1} damaged run"):
        frame = gl.runs(store)
    assert frame.seed.tolist() == [0, len(DAMAGE)], "those are listed of which the record is whole"

    for mend in (False, True):
        found = checks.check(store, mend=mend, progress=False)
        assert sorted(found.path) == sorted(str(runs[seed]) for seed in range(len(DAMAGE)))
        assert set(found.remedy) == {checks.SET_ASIDE}
        assert found.attrs["runs"] == 1
    assert len(list((store / run_files.DAMAGED).iterdir())) == len(DAMAGE), "nothing is deleted"
    experiment = gl.Experiment("autoencoder", [RUN["setting"]], len(DAMAGE) + 1, "smoke", store, options={"frames": 20})
    again = experiment.run(progress=False)
    pd.testing.assert_frame_equal(without_times(again), without_times(gl.runs(whole)))
    assert checks.check(store, progress=False).empty


def test_what_killed_processes_left_is_removed_and_what_can_be_resumed_is_not(store):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    work = store / run_files.WORK
    work.mkdir(exist_ok=True)
    (work / f".{gone.pid}-{files.HERE}-0123abcd.part").mkdir()
    (work / f".{gone.pid}-{files.HERE}-0123abcd.part" / "run.json").write_bytes(bytes(2_000_000))
    (work / f".{os.getpid()}-{files.HERE}-0123abcd.part").mkdir()
    done = by_seed(store)[0].name
    for name in (done, "another-seed0-0123456789"):
        notes = {"step": 1, "state": {}, "ways": ["autograd"]}
        run_files.write_checkpoint(run_files.checkpoint_file(store, name), {"a": torch.ones(3)}, notes)
    found = checks.check(store, progress=False).set_index("path")
    assert sorted(Path(path).name for path in found.index) == sorted(
        [f".{gone.pid}-{files.HERE}-0123abcd.part", f"{done}.safetensors"]
    )
    assert set(found.remedy) == {checks.REMOVED}
    assert found.megabytes.sum() == pytest.approx(2, abs=0.1)
    assert sorted(path.name for path in work.iterdir()) == [
        f".{os.getpid()}-{files.HERE}-0123abcd.part",
        "another-seed0-0123456789.safetensors",
    ]


def test_packed_runs_are_set_aside_and_what_is_no_run_is_left(store):
    listing.pack(store, store / "packed.parquet")
    flipped(0.2, 2, store / "packed.parquet")
    (store / "notes").mkdir()
    (store / "notes" / "mine.txt").write_text("of the user's")
    found = checks.check(store, progress=False)
    assert found[["path", "remedy"]].values.tolist() == [
        [str(store / "notes"), checks.LEFT],
        [str(store / "packed.parquet"), checks.SET_ASIDE],
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(gl.runs(store)) == len(DAMAGE) + 1
