import functools
import json
import os
import subprocess
import sys
import time
import types
from importlib.util import find_spec

import psutil
import pytest
from typer.testing import CliRunner

import gpulab as gl
from gpulab.cli import app
from gpulab.store import run_files
from gpulab.training import cluster as clusters

# Ray itself is not imported here: it reads the environment when it is, which `clusters.ray` sets before.
starts_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
PATIENCE = 600  # seconds; a busy machine takes its time to start Ray
SMALL = {"model_options": {"channels": [3, 4], "size": [8, 12]}, "data_options": {"size": [8, 12]}, "frames": 2000}
DRIVER = """
import json, sys
import gpulab as gl

options, store, address = json.loads(sys.argv[1]), *sys.argv[2:]
exp = gl.Experiment("prednet", ["cpu:threads=1"], 4, "smoke", store, options=options)
exp.run(progress=False, engine="ray", address=address)
"""
COUNTED = """
import pathlib, time
def train(seed):
    with open(pathlib.Path(__file__).with_name("log"), "a") as file:
        file.write(f"{seed}\\n")
    time.sleep(0.5)
    return seed
"""


@starts_ray
@pytest.mark.slow("starts Ray")
def test_a_cluster_of_this_machine_listens_on_it_alone_and_has_no_dashboard():
    with clusters.RayCluster():
        mine = {process.pid: process.name() for process in psutil.Process().children(recursive=True)}
        heard = [c.laddr for c in psutil.net_connections("inet") if c.pid in mine and c.status == psutil.CONN_LISTEN]
        assert "raylet" in mine.values()
        assert heard
        assert {address.ip.removeprefix("::ffff:") for address in heard} == {"127.0.0.1"}
        assert 8265 not in {address.port for address in heard}


@starts_ray
@pytest.mark.slow("starts two nodes of Ray's")
def test_a_node_that_dies_loses_no_finished_run_and_its_others_are_run_again(tmp_path):
    """On two nodes of one CPU each, with the runs that this machine gives, and none done twice."""
    clusters.ray("local")
    from ray.cluster_utils import Cluster

    one = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=one)
    second = cluster.add_node(**one)
    store, ended = tmp_path / "runs", time.monotonic() + PATIENCE
    options = json.dumps({**SMALL, "checkpoint_seconds": 0})
    command = [sys.executable, "-c", DRIVER, options, str(store), cluster.address]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        before, claimed, saved = {}, [], []
        while not (before and len(claimed) == len(saved) == 2):
            assert driver.poll() is None, driver.stderr.read()
            assert time.monotonic() < ended
            time.sleep(0.02)
            before = {path: path.stat().st_mtime_ns for path in store.glob("prednet-*")}
            claimed, saved = [*store.glob(".claims/*")], [*store.glob(f"{run_files.WORK}/prednet*")]
        cluster.remove_node(second, allow_graceful=False)
        errors = driver.communicate(timeout=PATIENCE)[1]
        assert driver.returncode == 0, errors
    finally:
        driver.kill()
        cluster.shutdown()
    runs = gl.runs(store).sort_values("seed", ignore_index=True)
    assert runs.seed.tolist() == [0, 1, 2, 3]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    resumed = [run_files.read_record(path).get("resumed_at") for path in runs.path]
    assert any(resumed), "another node went on from the dead one's checkpoint"
    assert not list(store.glob(".claims/*"))
    for seed in (0, 3):
        alone = gl.train("prednet", seed=seed, setting="cpu:threads=1", profile="smoke", progress=False, **SMALL)
        (there,) = runs[runs.seed == seed].itertuples()
        assert (there.id, there.weights) == (alone.record["id"], alone.record["summary"]["weights"])


class OneNode:
    """Stands in for Ray: it calls what it is given, on a node that dies under so many trainings."""

    def __init__(self, deaths):
        names = ("RayError", "RayTaskError", "TaskCancelledError")
        self.exceptions = types.SimpleNamespace(**{name: type(name, (Exception,), {}) for name in names})
        self.deaths = deaths

    def init(self, address, **_):
        self.address = address

    def nodes(self):
        return [{"Alive": True, "NodeID": "here", "Resources": {"CPU": 1.0}}]

    def remote(self, **options):
        def task(function):
            called = functools.partial(self.streamed, function) if "num_returns" in options else function
            made = types.SimpleNamespace(options=lambda **_: made, remote=called)
            return made

        return task

    def streamed(self, function, *arguments):
        if self.deaths:
            self.deaths -= 1
            raise self.exceptions.RayError("the node died\nand more")
        yield from function(*arguments)

    def get(self, answers):
        return answers

    def shutdown(self):
        self.address = None


def test_an_experiment_on_a_stand_in_for_ray(monkeypatch, tmp_path):
    strategies = types.SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setattr(clusters, "_passport_here", lambda: gl.passport().to_json())
    exp = gl.Experiment("autoencoder", ["cpu:threads=1"], 1, "smoke", tmp_path, options={"frames": 20})
    monkeypatch.setitem(sys.modules, "ray", OneNode(clusters.DEATHS))
    with pytest.raises(gl.GpulabError, match=r"5 nodes died under it: the node died$"):
        exp.run(progress=False, engine="ray")
    monkeypatch.setitem(sys.modules, "ray", OneNode(1))
    frame = exp.run(progress=False, engine="ray")
    assert (sys.modules["ray"].deaths, sys.modules["ray"].address) == (0, None)
    with pytest.raises(gl.UsageError, match="asks for 4096 CPU and 0 GPU on one node; of 1 nodes none has as much"):
        exp.run(progress=False, engine="ray", cpus=4096)
    alone = gl.train("autoencoder", setting="cpu:threads=1", profile="smoke", frames=20, progress=False)
    assert frame.weights[0] == alone.record["summary"]["weights"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"gpus": 2}, "gpus=2"),
        ({"cpus": 0}, "cpus=0"),
        ({"engine": "dask"}, "engine 'dask'"),
        ({"engine": "local", "gpus": 0.5}, "for engine='ray'"),
        ({"address": "ray://10.0.0.1:10001"}, "on a node of the cluster"),
        ({"options": {"devices": 2}}, "devices=2 with engine='ray'"),
        ({"share": (2, 2)}, r"share \(2, 2\)"),
    ],
)
def test_what_makes_no_sense_on_a_cluster_is_refused(more, named, tmp_path):
    given = {"engine": "ray", **more}
    exp = gl.Experiment("prednet", ["cpu"], 1, "smoke", tmp_path, options=given.pop("options", {}))
    with pytest.raises(gl.UsageError, match=named):
        exp.run(progress=False, **given)


def test_without_ray_one_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(gl.GpulabError, match=r"^ray is not installed: pip install 'gpulab\[cluster\]'$"):
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


@pytest.mark.slow("runs the tasks of a job array side by side")
def test_a_job_array_does_each_run_once_and_then_the_experiment_is_done(tmp_path, monkeypatch):
    """Slurm itself is not here: `srun` is a stand-in, and one task is submitted twice."""
    (tmp_path / "counted.py").write_text(COUNTED)
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "gpulab").write_text(f'#!/bin/sh\nexec {sys.executable} -m gpulab "$@"\n')
    for name in ("srun", "gpulab"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    command = ["experiment", "counted.py:train", "--setting", "cpu:threads=1", "--seeds", "3", "--engine", "slurm"]
    monkeypatch.setattr(sys, "argv", ["gpulab", *command])
    (tmp_path / "job.sh").write_text(CliRunner().invoke(app, [*command, "--tasks", "2"]).stdout)
    environments = [{**os.environ, "SLURM_ARRAY_TASK_ID": number} for number in "011"]
    tasks = [subprocess.Popen(["bash", "job.sh"], env=each, stdout=subprocess.DEVNULL) for each in environments]
    assert [task.wait(timeout=PATIENCE) for task in tasks] == [0, 0, 0]
    assert sorted((tmp_path / "log").read_text().split()) == list("012")
    assert sorted(gl.runs("runs").seed) == [0, 1, 2]


def test_a_job_array_asks_for_what_all_devices_and_workers_of_a_task_need():
    assert "--gpus" not in clusters.slurm_script(["gpulab"], 2, ["cpu"])
    assert "--gpus-per-task=1\n" in clusters.slurm_script(["gpulab"], 2, ["cpu", "cuda"])
    script = clusters.slurm_script(["gpulab"], 2, ["cuda"], devices=4)
    assert "--gpus-per-task=4\n" in script
    assert "--cpus-per-task=4\n" in script
    assert "--cpus-per-task=6\n" in clusters.slurm_script(["gpulab"], 2, ["cpu:threads=2"], workers=3)
    with pytest.raises(gl.UsageError, match=r"gpus=0\.5.*--workers"):
        clusters.slurm_script(["gpulab"], 2, ["cuda"], gpus=0.5)
    with pytest.raises(gl.UsageError, match=r"no setting of cpu is of a GPU"):
        clusters.slurm_script(["gpulab"], 2, ["cpu"], gpus=1)


def test_a_job_array_has_no_more_tasks_than_runs_and_no_share_of_its_own():
    asked = ["experiment", "autoencoder", "--profile", "smoke", "--setting", "cpu", "--engine", "slurm", "--seeds", "3"]
    assert "--array=0-2\n" in CliRunner().invoke(app, [*asked, "--tasks", "100"]).stdout
    for more, named in ((["--share", "0/2"], "--share"), (["--frames", "0"], "frames=0")):
        refused = CliRunner().invoke(app, [*asked, *more])
        assert isinstance(refused.exception, gl.UsageError)
        assert named in str(refused.exception)
        assert not refused.stdout
