import json
import os
import subprocess
import sys
import time

import psutil
import pytest

import gpulab as gl
from gpulab.training import cluster as clusters
from gpulab.training import folders

pytest.importorskip("ray")
PATIENCE = 600  # seconds; a busy machine takes its time to start Ray
SMALL = {"model_options": {"channels": [3, 4], "size": [8, 12]}, "data_options": {"size": [8, 12]}}
DRIVER = """
import json, sys
import gpulab as gl

model, store, seeds, engine, address, options = json.loads(sys.argv[1])
exp = gl.Experiment(model, ["cpu:threads=1"], seeds, "smoke", store, options=options)
print(exp.run(progress=False, engine=engine, address=address).to_json())
"""
COUNTED = """
import pathlib, time
def train(seed):
    with open(pathlib.Path(__file__).with_name("log"), "a") as file:
        file.write(f"{seed}\\n")
    time.sleep(1)
    return seed
"""


def drive(*arguments):
    """An experiment in a process of its own."""
    command = [sys.executable, "-c", DRIVER, json.dumps(arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ends_well(process):
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])  # Ray says before it that a node died


@pytest.fixture(scope="module")
def nodes():
    """A cluster of two nodes of one CPU each."""
    clusters.ray("local")
    from ray.cluster_utils import Cluster

    one = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=one)
    cluster.second = cluster.add_node(**one)
    yield cluster
    cluster.shutdown()


def test_a_cluster_gives_the_runs_that_this_machine_gives_and_does_none_twice(nodes, tmp_path):
    options = {**SMALL, "frames": 60}
    here = gl.Experiment("prednet", ["cpu:threads=1"], 2, "smoke", tmp_path / "here", options=options)
    one = here.run(progress=False)
    two = ends_well(drive("prednet", str(tmp_path / "there"), 2, "ray", nodes.address, options))
    there = gl.runs(tmp_path / "there")
    same = ["id", "seed", "status", "final_loss", "heldout_loss", "weights", "protocol"]
    assert one[same].equals(there[same])
    assert list(two["id"].values()) == one.id.tolist()
    stamps = [os.stat(path).st_mtime_ns for path in there.path]
    ends_well(drive("prednet", str(tmp_path / "there"), 2, "ray", nodes.address, options))
    assert [os.stat(path).st_mtime_ns for path in there.path] == stamps


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_two_experiments_at_once_do_no_run_twice(engine, nodes, tmp_path):
    (tmp_path / "counted.py").write_text(COUNTED)
    address = nodes.address if engine == "ray" else None
    arguments = f"{tmp_path}/counted.py:train", str(tmp_path / "runs"), 4, engine, address, {}
    drivers = [drive(*arguments) for _ in range(2)]
    frames = [ends_well(driver) for driver in drivers]
    assert sorted((tmp_path / "log").read_text().split()) == list("0123")
    assert [sorted(frame["seed"].values()) for frame in frames] == [[0, 1, 2, 3]] * 2, "both have them all"


@pytest.mark.usefixtures("nodes")
def test_ray_listens_on_this_machine_alone_and_has_no_dashboard():
    mine = {process.pid: process.name() for process in psutil.Process().children(recursive=True)}
    heard = [c.laddr for c in psutil.net_connections("inet") if c.pid in mine and c.status == psutil.CONN_LISTEN]
    assert "raylet" in mine.values()
    assert heard
    assert {address.ip.removeprefix("::ffff:") for address in heard} == {"127.0.0.1"}
    assert 8265 not in {address.port for address in heard}


def test_a_node_that_dies_loses_no_finished_run_and_its_others_are_run_again(nodes, tmp_path):
    """Last, for the cluster has one node less."""
    store, options = tmp_path / "runs", {**SMALL, "frames": 4000, "checkpoint_seconds": 0}
    driver = drive("prednet", str(store), 5, "ray", nodes.address, options)
    end = time.monotonic() + PATIENCE

    def wait(what):
        while not what():
            assert driver.poll() is None, driver.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.05)

    wait(lambda: len(list(store.glob("prednet-*"))) >= 2)
    before = {path: (path / folders.RECORD).read_bytes() for path in store.glob("prednet-*")}
    wait(lambda: len(list(store.glob(".claims/*"))) == 2 and len(list(store.glob(f"{folders.WORK}/prednet*"))) == 2)
    nodes.remove_node(nodes.second, allow_graceful=False)
    ends_well(driver)
    runs = gl.runs(store)
    assert sorted(runs.seed) == [0, 1, 2, 3, 4]
    assert {path: (path / folders.RECORD).read_bytes() for path in before} == before
    resumed = [folders.read_record(path).get("resumed_at") for path in runs.path]
    assert any(resumed), "another node went on from the dead one's checkpoint"
    assert not list(store.glob(".claims/*"))
    alone = gl.train("prednet", seed=4, setting="cpu:threads=1", profile="smoke", frames=4000, progress=False, **SMALL)
    assert alone.record["summary"]["weights"] == runs.weights[runs.seed == 4].item()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"cpus": 64}, "asks for 64 CPU and 0 GPU on one node; of 1 nodes none has as much"),
        ({"gpus": 2}, "gpus=2"),
        ({"cpus": 0}, "cpus=0"),
        ({"engine": "dask"}, "engine 'dask'"),
        ({"engine": "local", "gpus": 0.5}, "for engine='ray'"),
        ({"address": "ray://10.0.0.1:10001"}, "on a node of the cluster"),
        ({"share": (2, 2)}, r"share \(2, 2\)"),
    ],
)
def test_what_makes_no_sense_on_a_cluster_is_refused(more, named, tmp_path):
    exp = gl.Experiment("prednet", ["cpu"], 1, "smoke", tmp_path)
    with pytest.raises(gl.UsageError, match=named):
        exp.run(progress=False, **{"engine": "ray", **more})


def test_a_run_on_a_cluster_has_one_device(tmp_path):
    exp = gl.Experiment("autoencoder", ["cpu"], 1, "smoke", tmp_path, variants=[{"devices": 1}, {"devices": 2}])
    with pytest.raises(gl.UsageError, match="devices=2 with engine='ray'"):
        exp.run(progress=False, engine="ray")


def test_without_ray_one_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(gl.GpulabError, match=r"^engine='ray' needs Ray, .*: pip install 'gpulab\[cluster\]'$"):
        gl.Experiment("prednet", ["cpu"], 1, "smoke", tmp_path).run(progress=False, engine="ray")


@pytest.mark.parametrize(
    ("setting", "shares", "asked"),
    [
        ("cpu", (None, None), (1, 0)),
        ("cpu:threads=4", (None, None), (4, 0)),
        ("cpu:threads=4", (2, 0.5), (2, 0)),
        ("cuda:tf32=off", (None, None), (1, 1)),
        ("cuda", (0.5, 0.25), (0.5, 0.25)),
    ],
)
def test_what_a_run_asks_for(setting, shares, asked):
    engine = clusters.RayCluster.__new__(clusters.RayCluster)
    engine.cpus, engine.gpus = shares
    assert engine.asked(setting) == {"num_cpus": asked[0], "num_gpus": asked[1]}
    with pytest.raises(gl.UsageError, match="write cuda"):
        engine.asked("cuda:1")


def test_a_job_array_does_each_run_once_and_then_the_experiment_is_done(tmp_path, monkeypatch):
    """Slurm itself is not here: `srun` is a stand-in, the tasks run side by side, and one is submitted twice."""
    (tmp_path / "counted.py").write_text(COUNTED)
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "gpulab").write_text(f'#!/bin/sh\nexec {sys.executable} -m gpulab "$@"\n')
    for name in ("srun", "gpulab"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    experiment = ["gpulab", "experiment", "counted.py:train", "--setting", "cpu:threads=1", "--seeds", "5"]
    printed = subprocess.run([*experiment, "--engine", "slurm", "--tasks", "2"], capture_output=True, text=True)
    assert "#SBATCH --array=0-1\n" in printed.stdout
    (tmp_path / "job.sh").write_text(printed.stdout)
    environments = [{**os.environ, "SLURM_ARRAY_TASK_ID": number} for number in "011"]
    tasks = [subprocess.Popen(["bash", "job.sh"], env=each, stdout=subprocess.PIPE) for each in environments]
    assert [task.wait(timeout=PATIENCE) for task in tasks] == [0, 0, 0]
    assert sorted((tmp_path / "log").read_text().split()) == list("01234")
    assert sorted(gl.runs("runs").seed) == [0, 1, 2, 3, 4]
    for task in tasks:
        task.stdout.close()


def test_a_job_array_asks_for_whole_gpus():
    with pytest.raises(gl.UsageError, match=r"gpus=0\.5.*--workers"):
        clusters.slurm_script(["gpulab"], 2, ["cuda"], None, 0.5)
    assert "--gpus-per-task=1" in clusters.slurm_script(["gpulab"], 2, ["cpu", "cuda"], None, None)
    assert "--gpus" not in clusters.slurm_script(["gpulab"], 2, ["cpu"], None, None)
    with pytest.raises(gl.UsageError, match=r"no setting of cpu is of a GPU"):
        clusters.slurm_script(["gpulab"], 2, ["cpu"], None, 1)


def test_a_job_array_asks_for_what_all_devices_and_workers_of_a_task_need():
    script = clusters.slurm_script(["gpulab"], 2, ["cuda"], devices=4)
    assert "--gpus-per-task=4\n" in script
    assert "--cpus-per-task=4\n" in script
    assert "--cpus-per-task=6\n" in clusters.slurm_script(["gpulab"], 2, ["cpu:threads=2"], workers=3)


def test_a_job_array_has_no_more_tasks_than_runs_and_no_share_of_its_own():
    asked = [sys.executable, "-m", "gpulab", "experiment", "autoencoder", "--profile", "smoke"]
    asked += ["--setting", "cpu", "--engine", "slurm"]
    printed = subprocess.run([*asked, "--seeds", "3", "--tasks", "100"], capture_output=True, text=True, check=True)
    assert "--array=0-2\n" in printed.stdout
    for more, named in ((["--share", "0/2"], "--share"), (["--frames", "0"], "frames=0")):
        refused = subprocess.run([*asked, "--seeds", "3", *more], capture_output=True, text=True)
        assert refused.returncode == 2
        assert named in refused.stderr
        assert not refused.stdout
