"""The programs of notebook 08, each as a reader starts it: on two processes or devices of a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpulab.store import recorded

PROGRAMS = Path(__file__).parents[2] / "notebooks" / "programs"
PATHS = os.pathsep.join([str(PROGRAMS.parents[1]), os.environ.get("PYTHONPATH", "")])


def start(name, *arguments):
    command = [sys.executable, str(PROGRAMS / f"{name}.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": PATHS, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def run(name, *arguments):
    done = start(name, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow("starts two processes")
def test_data_parallel_two_processes(tmp_path):
    file = tmp_path / "record.json"
    said = run("data_parallel", "--batch", 4, "--frames", 3, "--updates", 2, "--record", file)
    assert "All 2 processes end with the same weights" in said
    document = recorded.read_json(file)
    rows = [(row["scaling"], row["devices"], row["batch"]) for row in document["scaling"]]
    assert rows == [("strong", 1, 4), ("weak", 1, 4), ("strong", 2, 4), ("weak", 2, 8)]
    assert all(
        row["frames_per_second"] == pytest.approx(row["batch"] * 3 / row["seconds"]) for row in document["scaling"]
    )
    ends = {row["precision"]: row["weights"] for row in document["ends"]}
    assert {row["update"] for row in (*document["scaling"], *document["ends"])} == {"kernel by kernel"}
    assert all(row["communication"] > 0 for row in document["scaling"] if row["devices"] > 1)
    assert ends["float64"] < 1e-12 < ends["float32"] < 1e-5
    assert document["passport"]["software"]["torch"]
    assert "data_parallel.py" in document["command"]


@pytest.mark.slow("starts two processes")
def test_hogwild_two_processes(tmp_path):
    file = tmp_path / "record.json"
    run("hogwild", "--updates", 40, "--hidden", 8, "--record", file)
    document = recorded.read_json(file)
    rows = {(row["way"], row["seed"]): row for row in document["descents"]}
    assert rows.keys() == {(way, seed) for way in ("synchronous", "lock-free") for seed in (0, 1)}
    assert all(row["age"] == 0 for (way, _), row in rows.items() if way == "synchronous")
    for seed in (0, 1):
        assert rows["lock-free", seed]["heldout_loss"] == pytest.approx(
            rows["synchronous", seed]["heldout_loss"], rel=0.05
        )
    losses = [row["loss"] for row in document["curve"] if row["way"] == "lock-free" and row["seed"] == 0]
    assert losses[-1] < losses[0]


@pytest.mark.slow("imports torch anew")
def test_model_parallel_memory_per_part(tmp_path):
    file = tmp_path / "record.json"
    run("model_parallel", "--hidden", 16, "--record", file)
    first, second = recorded.read_json(file)["parts"]
    assert [round(part["weights"] * 2**20) for part in (first, second)] == [4 * (784 * 16 + 16), 4 * (16 * 784 + 784)]
    assert first["whole"] == first["parts"]
    assert first["optimizer"] == 3 * first["weights"]
    assert first["activations"] > 0 < second["activations"]


@pytest.mark.slow("imports torch anew")
def test_serve_two_devices(tmp_path):
    file = tmp_path / "record.json"
    said = run("serve", "--films", 3, "--record", file)
    assert "Several devices predict what one does" in said
    one, two = recorded.read_json(file)["serving"]
    assert (one["devices"], two["devices"]) == (1, 2)
    assert two["difference"] < 1e-5
    assert two["images_per_second"] > 0


@pytest.mark.slow("imports torch anew")
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("data_parallel", ["--batch", 7], "2 processes cannot have equal shares of a batch of 7"),
        ("data_parallel", ["--graph"], "--graph is for GPUs, and the setting is cpu:threads=1"),
        ("hogwild", ["--updates", 7], "2 workers cannot make equally many of 7 updates"),
        ("serve", ["--size", "small"], "invalid choice: 'small'"),
        ("model_parallel", ["--devices", "cpu"], "expected 2 arguments"),
    ],
)
def test_wrong_use_of_a_program_says_what_to_change(name, arguments, words):
    done = start(name, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
