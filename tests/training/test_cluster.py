import functools
import sys
import types
from importlib.util import find_spec

import psutil
import pytest
from typer.testing import CliRunner

import gpulab as gl
from gpulab.cli import app
from gpulab.training import cluster as clusters

# Ray itself is not imported here: it reads the environment when it is, which `clusters.ray` sets before.
starts_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
PATIENCE = 600  # seconds; a busy machine takes its time to start Ray


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
@pytest.mark.slow("starts Ray")
def test_an_experiment_on_ray_has_the_runs_of_this_machine(tmp_path):
    exp = gl.Experiment("autoencoder", ["cpu:threads=1"], 2, "smoke", tmp_path, options={"frames": 20})
    frame = exp.run(progress=False, engine="ray")
    for seed in (0, 1):
        alone = gl.train("autoencoder", None, "cpu:threads=1", seed, "smoke", frames=20, progress=False)
        assert (frame.id[seed], frame.weights[seed]) == (alone.record["id"], alone.record["summary"]["weights"])


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
        ({"engine": "local", "gpus": 0.5}, "for engine='ray'"),
        ({"options": {"devices": 2}}, "devices=2 with engine='ray'"),
        ({"share": (2, 2)}, r"share \(2, 2\)"),
    ],
)
def test_what_makes_no_sense_on_a_cluster_is_refused(more, named, tmp_path):
    given = {"engine": "ray", **more}
    exp = gl.Experiment("prednet", ["cpu"], 1, "smoke", tmp_path, options=given.pop("options", {}))
    with pytest.raises(gl.UsageError, match=named):
        exp.run(progress=False, **given)


@pytest.mark.parametrize(
    ("setting", "shares", "asked"),
    [
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


def test_the_tasks_of_a_job_array_do_each_run_once(tmp_path):
    assert '--share "$SLURM_ARRAY_TASK_ID/2"' in clusters.slurm_script(["gpulab"], 2, ["cpu"])
    exp = gl.Experiment("autoencoder", ["cpu:threads=1"], 3, "smoke", tmp_path, options={"frames": 20})
    for task, done in enumerate(([0, 2], [0, 1, 2])):
        exp.run(progress=False, share=(task, 2))
        assert sorted(gl.runs(tmp_path).seed) == done


def test_a_job_array_asks_for_what_all_devices_and_workers_of_a_task_need():
    assert "--gpus" not in clusters.slurm_script(["gpulab"], 2, ["cpu"])
    assert "--gpus-per-task=1\n" in clusters.slurm_script(["gpulab"], 2, ["cpu", "cuda"])
    script = clusters.slurm_script(["gpulab"], 2, ["cuda"], devices=4)
    assert "--gpus-per-task=4\n" in script
    assert "--cpus-per-task=4\n" in script
    assert "--cpus-per-task=6\n" in clusters.slurm_script(["gpulab"], 2, ["cpu:threads=2"], workers=3)
    with pytest.raises(gl.UsageError, match=r"gpus=0\.5.*--workers"):
        clusters.slurm_script(["gpulab"], 2, ["cuda"], gpus=0.5)


def test_a_job_array_has_no_more_tasks_than_runs_and_no_share_of_its_own():
    asked = ["experiment", "autoencoder", "--profile", "smoke", "--setting", "cpu", "--engine", "slurm", "--seeds", "3"]
    assert "--array=0-2\n" in CliRunner().invoke(app, [*asked, "--tasks", "100"]).stdout
    assert "--share" in str(CliRunner().invoke(app, [*asked, "--share", "0/2"]).exception)
