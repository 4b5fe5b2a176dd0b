"""Experiments on Ray: a cluster of this machine, and nodes that die."""

import functools
import sys
import types
from importlib.util import find_spec

import psutil
import pytest

import gpulab as gl
from gpulab.training import workers

# Ray itself is not imported here: it reads the environment when it is, which `RayCluster` sets before.
starts_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def experiment(store, seeds=2):
    return gl.Experiment("autoencoder", ["cpu:threads=1"], seeds, "smoke", store, options={"frames": 20})


def trained_alone(seed):
    return gl.train("autoencoder", None, "cpu:threads=1", seed, "smoke", frames=20, progress=False).record


@starts_ray
@pytest.mark.slow("starts Ray")
def test_local_ray_cluster_listens_on_loopback_alone_without_dashboard():
    with workers.RayCluster():
        mine = {process.pid: process.name() for process in psutil.Process().children(recursive=True)}
        heard = [c.laddr for c in psutil.net_connections("inet") if c.pid in mine and c.status == psutil.CONN_LISTEN]
        assert "raylet" in mine.values()
        assert heard
        assert {address.ip.removeprefix("::ffff:") for address in heard} == {"127.0.0.1"}
        assert 8265 not in {address.port for address in heard}


@starts_ray
@pytest.mark.slow("starts Ray")
def test_experiment_on_ray_keeps_the_runs_of_this_machine(tmp_path):
    frame = experiment(tmp_path).run(progress=False, engine="ray")
    for seed in (0, 1):
        alone = trained_alone(seed)
        assert (frame.id[seed], frame.weights[seed]) == (alone["id"], alone["summary"]["weights"])


class OneNode:
    """Stands in for Ray: it calls what it is given, on a node that dies under so many trainings."""

    def __init__(self, deaths=0):
        names = ("RayError", "RayTaskError")
        self.exceptions = types.SimpleNamespace(**{name: type(name, (Exception,), {}) for name in names})
        self.deaths, self.options = deaths, []

    def init(self, address, **_):
        self.address = address

    def nodes(self):
        return [{"Alive": True, "NodeID": "here", "Resources": {"CPU": 1.0}}]

    def remote(self, function=None, **options):
        if function is None:
            return functools.partial(self.remote, **options)
        self.options.append(options)
        return types.SimpleNamespace(remote=lambda *given: functools.partial(function, *given))

    def wait(self, tasks, **_):
        return tasks[:1], tasks[1:]

    def get(self, task):
        if isinstance(task, list):
            return [each() for each in task]
        self.deaths -= 1
        if self.deaths >= 0:
            raise self.exceptions.RayError("the node died\nand more")
        return task()

    def shutdown(self):
        self.address = None


@pytest.fixture
def ray_stand_in(monkeypatch):
    strategies = types.SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    ray = OneNode()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def test_ray_task_is_retried_with_resources_and_environment_of_its_setting(ray_stand_in, tmp_path):
    frame = experiment(tmp_path, seeds=1).run(progress=False, engine="ray")
    task = ray_stand_in.options[-1]
    assert (task["max_retries"], task["num_cpus"], task["num_gpus"]) == (workers.MAX_RETRIES, 1, 0)
    assert task["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"
    assert ray_stand_in.address is None
    assert frame.weights[0] == trained_alone(0)["summary"]["weights"]


def test_ray_node_that_dies_costs_only_its_runs(ray_stand_in, tmp_path):
    ray_stand_in.deaths = 1
    with pytest.raises(gl.GpulabError, match=r"1 of 2 runs failed.*nodes died under it 5 times: the node died$"):
        experiment(tmp_path).run(progress=False, engine="ray")
    assert len(gl.runs(tmp_path)) == 1
    assert len(experiment(tmp_path).run(progress=False, engine="ray")) == 2


@pytest.mark.usefixtures("ray_stand_in")
def test_ray_run_larger_than_every_node_is_refused(tmp_path):
    with pytest.raises(gl.UsageError, match=r"asks for \{'CPU': 1, 'GPU': 1\} on one node; none of 1 has as much"):
        gl.Experiment("autoencoder", ["cuda"], 1, "smoke", tmp_path).run(progress=False, engine="ray")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"engine": "local", "address": "auto"}, "address='auto': .* an address is for ray"),
        ({"engine": "ray", "address": "ray://head:10001"}, "run this on a node of the cluster"),
        ({"engine": "slurm"}, "expected local or ray"),
    ],
)
def test_cluster_arguments_without_sense_are_refused(more, named, tmp_path):
    with pytest.raises(gl.UsageError, match=named):
        experiment(tmp_path).run(progress=False, **more)


@pytest.mark.usefixtures("ray_stand_in")
def test_ray_chooses_the_gpu_of_a_run():
    cluster = workers.RayCluster()
    assert [cluster.task_options("cuda:tf32=off")[name] for name in ("num_cpus", "num_gpus")] == [1, 1]
    with pytest.raises(gl.UsageError, match="a cluster chooses the GPU of a run: write cuda"):
        cluster.task_options("cuda:1")
