"""The programs of notebook 08, each as a reader starts it: on two processes or devices of a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpulab.store import recorded

PROGRAMS = Path(__file__).parents[2] / "notebooks" / "programs"


def start(name, *arguments):
    command = [sys.executable, str(PROGRAMS / f"{name}.py"), *map(str, arguments)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def run(tmp_path):
    """Run a program; return its output and its record."""

    def call(name, *arguments):
        done = start(name, *arguments, "--record", tmp_path / "record.json")
        assert done.returncode == 0, done.stderr
        return done.stdout, recorded.read_document(tmp_path / "record.json")

    return call


@pytest.mark.slow("starts two processes")
def test_data_parallel_two_processes(run):
    said, document = run("data_parallel", "--batch", 4, "--frames", 3, "--updates", 2)
    assert "All 2 processes end with the same weights" in said
    rows = [(row["scaling"], row["devices"], row["batch"]) for row in document["scaling"]]
    assert rows == [("strong", 1, 4), ("weak", 1, 4), ("strong", 2, 4), ("weak", 2, 8)]
    for row in document["scaling"]:
        assert row["frames_per_second"] == pytest.approx(row["batch"] * 3 / row["seconds"])
    ends = {row["precision"]: row["weights"] for row in document["ends"]}
    assert {row["update"] for row in (*document["scaling"], *document["ends"])} == {
        "kernel by kernel"
    }
    assert all(row["communication"] > 0 for row in document["scaling"] if row["devices"] > 1)
    assert ends["float64"] < 1e-12 < ends["float32"] < 1e-5


@pytest.mark.slow("starts two processes")
def test_hogwild_two_processes(run):
    _, document = run("hogwild", "--updates", 40, "--hidden", 8)
    rows = {(row["way"], row["seed"]): row for row in document["descents"]}
    assert rows.keys() == {(way, seed) for way in ("synchronous", "lock-free") for seed in (0, 1)}
    assert all(row["age"] == 0 for (way, _), row in rows.items() if way == "synchronous")
    for seed in (0, 1):
        losses = [rows[way, seed]["heldout_loss"] for way in ("synchronous", "lock-free")]
        assert losses[1] == pytest.approx(losses[0], rel=0.05)
    losses = [
        row["loss"] for row in document["curve"] if row["way"] == "lock-free" and row["seed"] == 0
    ]
    assert losses[-1] < losses[0]


@pytest.mark.slow("imports torch anew")
def test_model_parallel_memory_per_part(run):
    first, second = run("model_parallel", "--hidden", 16)[1]["parts"]
    assert [round(part["weights"] * 2**20) for part in (first, second)] == [
        4 * (784 * 16 + 16),
        4 * (16 * 784 + 784),
    ]
    assert first["whole"] == first["parts"]
    assert first["optimizer"] == 3 * first["weights"]
    assert first["activations"] > 0 < second["activations"]


@pytest.mark.slow("imports torch anew")
def test_serve_two_devices(run):
    said, document = run("serve", "--films", 3)
    assert "predict the same as one" in said
    one, two = document["serving"]
    assert (one["devices"], two["devices"]) == (1, 2)
    assert two["difference"] < 1e-5
    assert two["images_per_second"] > 0


@pytest.mark.slow("imports torch anew")
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("data_parallel", ["--batch", 7], "--processes 2 and --batch 7"),
        ("data_parallel", ["--graph"], "got --setting cpu:threads=1; use --setting cuda"),
        ("hogwild", ["--updates", 7], "--workers 2 and --updates 7"),
        ("model_parallel", ["--devices", "cpu"], "expected 2 arguments"),
    ],
)
def test_programs_used_wrongly_say_what_to_change(name, arguments, words):
    done = start(name, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
