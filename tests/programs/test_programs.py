"""The programs of notebook 08, each as a reader starts it: on two processes or devices of a CPU."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pandas as pd
import pytest

import gpulab as gl
from gpulab.store import recorded
from programs import data_parallel, hogwild, many_runs, serve

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
    options = ["--batch", 4, "--frames", 3, "--rounds", 3, "--updates", 2]
    said, document = run("data_parallel", *options)
    assert "All 2 processes end with the same weights" in said
    rows = [(row["scaling"], row["devices"], row["batch"]) for row in document["scaling"]]
    assert rows == [("strong", 1, 4), ("strong", 2, 4), ("weak", 1, 4), ("weak", 2, 8)]
    for row in document["scaling"]:
        assert row["rounds"] == 3
        assert row["spread"] >= 0
        if row["seconds"] is not None:  # the machine that runs the test may be busy
            assert row["frames_per_second"] == pytest.approx(row["batch"] * 3 / row["seconds"])
    assert document["trust"][0]["sentence"] in said
    ends = {row["precision"]: row["weights"] for row in document["ends"]}
    assert {row["update"] for row in (*document["scaling"], *document["ends"])} == {
        "kernel by kernel"
    }
    assert ends["float64"] < 1e-12 < ends["float32"] < 1e-5


QUIET = {  # seconds of an update in four rounds
    "one device": [2.0, 2.0, 2.02, 2.0],
    "strong": [1.2, 1.2, 1.22, 1.2],
    "strong, own share": [1.0, 1.0, 1.1, 1.0],
    "weak": [2.2, 2.2, 2.2, 2.2],
    "weak, own share": [2.1, 2.1, 2.1, 2.1],
    "communication": [0.05, 0.05, 0.05, 0.05],
}
ARGUMENTS = Namespace(batch=8, processes=2, frames=3, rounds=4)


def scaling_of_two(share=1.0, **times):
    """The rows of two devices, by scaling, for times that are quiet or as given."""
    table = data_parallel.scaling_table(ARGUMENTS, "update", QUIET | times, share)
    return table[table.devices == 2].set_index("scaling")


def test_scaling_table_states_speedup_and_overhead_of_quiet_rounds():
    rows = scaling_of_two()
    assert rows.speedup.to_dict() == pytest.approx({"strong": 2 / 1.2, "weak": 2 * 2 / 2.2})
    # the differences of the rounds are 0.2, 0.2, 0.12 and 0.2
    assert rows.overhead.to_dict() == pytest.approx({"strong": 0.2, "weak": 0.1})
    assert rows.communication.tolist() == [0.05, 0.05]


def test_scaling_table_withholds_times_whose_rounds_disagree():
    rows = scaling_of_two(strong=[1.2, 1.2, 1.9, 2.5])
    missing = rows[["seconds", "speedup", "frames_per_second", "overhead"]].isna()
    assert missing.loc["strong"].all()
    assert not missing.loc["weak"].any()
    assert rows.loc["strong", "compute"] == 1.0
    assert rows.loc["strong", "spread"] > 0.2


def test_scaling_table_withholds_everything_if_other_programs_use_the_cores():
    times = ["seconds", "compute", "communication", "overhead", "speedup"]
    assert scaling_of_two(share=0.8)[times].isna().all(axis=None)


def test_scaling_table_never_states_a_negative_overhead():
    rows = scaling_of_two(weak=[2.0, 2.2, 2.1, 2.05])
    assert rows.speedup.notna().all()
    assert pd.isna(rows.loc["weak", "overhead"])


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


@pytest.mark.parametrize(("seconds", "share"), [([1.0, 1.5, 2.0], 1.0), ([1.0, 1.0, 1.0], 0.5)])
def test_speed_table_of_workers_withholds_what_cannot_be_trusted(seconds, share):
    free = [{"way": "lock-free", "updates_per_second": 100 / second} for second in seconds]
    descents = pd.DataFrame([*free, *({"way": "synchronous", "updates_per_second": 50.0},) * 3])
    table, trust = hogwild.speed_table(descents, 100, share)
    speeds = table.set_index("way").updates_per_second
    assert pd.isna(speeds["lock-free"])
    assert pd.isna(speeds["synchronous"]) == (share < 0.85)
    assert "withheld" in trust or "too busy" in trust


def test_speed_table_of_workers_is_the_median_over_seeds():
    speeds = [("lock-free", 100.0), ("lock-free", 104.0), ("lock-free", 102.0)]
    descents = pd.DataFrame(
        [*speeds, *[("synchronous", 50.0)] * 3], columns=["way", "updates_per_second"]
    )
    table, _ = hogwild.speed_table(descents, 100, 1.0)
    assert table.set_index("way").updates_per_second.to_dict() == pytest.approx(
        {"synchronous": 50.0, "lock-free": 102.0}
    )


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
    said, document = run("serve", "--films", 3, "--rounds", 3)
    assert "predict the same as one" in said
    assert document["trust"][0]["sentence"] in said
    one, two = document["serving"]
    assert (one["devices"], two["devices"]) == (1, 2)
    assert two["difference"] < 1e-5
    assert one["rounds"] == two["rounds"] == 3
    for row in (one, two):
        if row["seconds"] is not None:  # the machine that runs the test may be busy
            assert row["images_per_second"] == pytest.approx(30 / row["seconds"])


@pytest.mark.parametrize(("spread", "share", "is_kept"), [(0.1, 1, 1), (0.3, 1, 0), (0.1, 0.5, 0)])
def test_serve_withholds_what_cannot_be_trusted(monkeypatch, spread, share, is_kept):
    times = pd.DataFrame({"seconds": [2.0, 1.0], "spread": spread, "rounds": 7}, index=[1, 2])
    monkeypatch.setattr(serve, "time_rounds", lambda *_: times)
    monkeypatch.setattr(serve, "share_of_cores", lambda: share)
    table, _ = serve.measure(["a", "b"], Namespace(shape=(10, 4)), "cpu", 7)
    assert table.devices.tolist() == [1, 2]
    if is_kept:
        assert table.images_per_second.tolist() == [20.0, 40.0]
    else:
        assert table.images_per_second.isna().all()


@pytest.mark.slow("starts worker processes")
def test_many_runs_tasks_share_a_store(run, tmp_path):
    for seeds, found in (([0, 2], []), ([0, 1, 2], [0, 2])):
        _, document = run("many_runs", "--store", tmp_path / "runs", "--seeds", *seeds)
        rows = {row["seed"]: row["run"] for row in document["runs"]}
        assert rows == {s: "found in the store" if s in found else "trained" for s in seeds}


@pytest.mark.slow("starts Ray")
def test_run_on_ray_trains_what_is_missing_and_starts_a_lost_run_again(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed")
    options = {"frames": 20}
    experiment = gl.Experiment(
        "autoencoder", ["cpu:threads=1"], 3, "smoke", tmp_path / "runs", options=options
    )
    alone = [gl.train(**job | {"store": None}, progress=False).record for job in experiment.jobs()]
    gl.train(**experiment.jobs()[1], progress=False)
    there = gl.runs(experiment.folder)
    train, starts = gl.train, tmp_path / "starts"

    def lose_the_first_process(**job):
        with starts.open("a") as file:
            file.write(f"{job['seed']} ")
        if job["seed"] == 2 and starts.read_text().split().count("2") == 1:
            os._exit(1)
        return train(**job)

    monkeypatch.setattr(gl, "train", lose_the_first_process)
    frame = many_runs.run_on_ray(experiment)
    assert sorted(starts.read_text().split()) == ["0", "2", "2"], "seed 1 is in the store"
    assert frame.id.tolist() == [record["id"] for record in alone]
    assert frame.weights.tolist() == [record["summary"]["weights"] for record in alone]
    assert there.equals(frame[frame.seed == 1].reset_index(drop=True)), (
        "the run that existed before is unchanged"
    )


@pytest.mark.slow("imports torch anew")
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("data_parallel", ["--batch", 7], "--processes 2 and --batch 7"),
        ("data_parallel", ["--graph"], "got --setting cpu:threads=1; use --setting cuda"),
        ("hogwild", ["--updates", 7], "--workers 2 and --updates 7"),
        ("data_parallel", ["--rounds", 1], "got --rounds 1"),
        ("hogwild", ["--seeds", 1], "expected --seeds >= 2, got --seeds 1"),
        ("model_parallel", ["--devices", "cpu"], "expected 2 arguments"),
        ("serve", ["--devices", "cpu"], "expected two or more --devices"),
    ],
)
def test_programs_used_wrongly_say_what_to_change(name, arguments, words):
    done = start(name, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
