"""All that lies in `data/`: what comes in by a pull request is read and checked here, like everything else."""

import math
from collections import Counter

import pytest

from gpulab.store import recorded
from gpulab.store import runs as stores

PACKED = sorted(
    file for name in ("atlas", "runs", "studies") for file in recorded.recorded_folder(name).glob("*.parquet")
)


@pytest.mark.parametrize("file", PACKED, ids=lambda file: file.name)
def test_recorded_runs_are_whole_and_do_not_contradict_themselves(file):
    runs = [(record, load()) for record, _, load in stores.read_entry(str(file))]
    assert runs
    assert max(Counter(record["id"] for record, _ in runs).values()) == 1
    for record, history in runs:
        losses, summary, name = history["loss"].to_pylist(), record["summary"], record["id"]
        assert history["window"].to_pylist() == [*range(len(losses))], name
        assert record["passport"]["software"]["torch"], name
        assert "/home/" not in str(record), name
        if record["status"] == "diverged":
            assert summary["final_loss"] is None, name
        elif "source" not in record["configuration"]:
            last = losses[-max(1, len(losses) // 5) :]
            assert summary["final_loss"] == pytest.approx(math.fsum(last) / len(last), rel=1e-6), name


MEASURED = sorted(recorded.recorded_folder("measured").glob("*.json"))


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.name)
def test_measured_tables_name_their_command_and_torch(file):
    document = recorded.read_json(file)
    assert document["command"]
    if file.name != "products-found.json":  # computed from what the others hold, on no machine in particular
        assert document["passport"]["software"]["torch"]
