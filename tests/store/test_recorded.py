"""All files in `data/` are read and checked, including those that a pull request adds."""

import math
import re
from collections import Counter

import pytest

import gpulab as gl
from gpulab.store import _run_store as stores
from gpulab.store import _tables as tables
from gpulab.store import recorded

ROOMS = map(recorded.recorded_folder, ("atlas", "runs", "studies"))
PACKED = sorted(file for room in ROOMS for file in room.glob("*.parquet"))


@pytest.mark.parametrize("file", PACKED, ids=lambda file: file.name)
def test_recorded_runs_are_whole_and_do_not_contradict_themselves(file):
    runs = [(entry.record, entry.read_history()) for entry in stores.read_entry(str(file))]
    assert runs
    assert max(Counter(record["id"] for record, _ in runs).values()) == 1
    for record, history in runs:
        losses, summary, name = history["loss"].to_pylist(), record["summary"], record["id"]
        passport, configuration = record["passport"], record["configuration"]
        assert history["window"].to_pylist() == [*range(len(losses))], name
        assert passport.keys() == gl.passport().keys(), name
        assert passport["cpu"].keys() == gl.passport()["cpu"].keys(), name
        assert all(
            passport["software"][key] for key in ("torch", "python", "os", "gpulab", "commit")
        ), name
        assert file.parent.name != "runs" or re.fullmatch(
            "[0-9a-f]{40}", passport["software"]["commit"]
        ), name
        assert not record["setting"].startswith("cuda") or passport["gpus"][0]["driver"], name
        assert record["command"].startswith("gpulab "), name
        assert "/home/" not in str(record), name
        if record["status"] == "diverged":
            assert summary["final_loss"] is None, name
        elif "source" not in configuration:
            assert len(losses) == configuration["frames"] // configuration["window"], name
            last = losses[-max(1, len(losses) // 5) :]
            assert summary["final_loss"] == pytest.approx(math.fsum(last) / len(last), rel=1e-12), (
                name
            )


MEASURED = sorted(recorded.recorded_folder("measured").glob("*.json"))


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.name)
def test_measured_tables_name_their_command_and_torch(file):
    document = recorded.read_document(file)
    assert document["command"]
    # This file is computed from the others, so it belongs to no particular machine.
    if file.name != "products-found.json":
        assert document["passport"]["software"]["torch"]


def test_recorded_runs_keep_their_jpeg_decoder():
    runs = tables.recorded_runs("factors")
    assert runs.recorded.all()
    counts = runs.decoder.value_counts()
    assert counts.to_dict() == {"pillow": 18, "nvjpeg": 10, "av": 8}
