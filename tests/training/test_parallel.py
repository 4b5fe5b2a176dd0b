"""Real processes on 127.0.0.1: a training on several devices ends where one on a single device does."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpulab as gl
from gpulab.models.base import Trainable, draw_linear_
from gpulab.store import run_files
from gpulab.training import data_parallel, parallel
from gpulab.training.keeping import Keeping
from gpulab.training.plan import plan_run
from gpulab.training.run import carry_out, under

IMAGES = {"net": "autoencoder", "model_options": {"hidden": [16], "batch_size": 7}, "frames": 100}
FILMS = {
    "net": "prednet",
    "model_options": {"channels": [3, 4], "size": (8, 12), "batch_size": 5},
    "data_options": {"size": (8, 12)},
    "window": 30,
    "frames": 120,
}
USUAL = {"setting": "cpu:threads=1", "profile": "smoke", "progress": False}
DOUBLE = "cpu:threads=1,precision=float64"


def trained(what, **options):
    return gl.train(**{**USUAL, **what, **options})


def distance(run, other):
    """The largest difference of a weight, and of a loss."""
    pairs = zip(run.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    losses = [*(run.history.loss - other.history.loss).abs(), abs(run.heldout_loss - other.heldout_loss)]
    return max(max((one - two).abs().max().item() for one, two in pairs), *losses)


starts_processes = pytest.mark.slow("starts processes that train together")


@pytest.fixture
def in_a_group_of_one(monkeypatch, tmp_path):
    """This process takes its share of each batch, which is all of it, as one of several that meet through gloo."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    yield parallel.Group(0, 1)
    dist.destroy_process_group()


def to_the_end(turns):
    """What a generator returns."""
    result = []

    def delegate():
        result.append((yield from turns))

    list(delegate())
    return result[0]


@pytest.mark.parametrize("what", [IMAGES, FILMS], ids=["images", "films"])
def test_a_group_of_one_computes_what_one_alone_does(what, in_a_group_of_one, tmp_path):
    plan = plan_run(
        what["net"], setting=DOUBLE, profile="smoke", **{name: what[name] for name in what if name != "net"}
    )
    keeping, make_engine = data_parallel.in_group(plan, Keeping(store=tmp_path), in_a_group_of_one)
    with under(plan.setting, 1):
        run = to_the_end(carry_out(plan, {}, keeping, make_engine))
    assert 0 <= distance(trained(what, setting=DOUBLE), run) < 1e-10
    assert keeping.existing_run(plan.identity(gl.passport())).folder == run.path


@starts_processes
@pytest.mark.parametrize("what", [IMAGES, FILMS], ids=["images", "films"])
@pytest.mark.parametrize(("setting", "bound"), [("cpu:threads=1", 1e-5), (DOUBLE, 1e-10)])
def test_two_devices_end_where_one_does(what, setting, bound):
    """Batches of 7, 7 and 6 images, of 5 films: the shares of two are not equal."""
    alone = trained(what, setting=setting)
    shared = trained(what, setting=setting, devices=2)
    assert 0 <= distance(alone, shared) < bound
    assert shared.history.step.tolist() == alone.history.step.tolist()
    assert shared.history.loss.iloc[-1] != shared.history.loss.iloc[0]


@starts_processes
def test_more_devices_than_examples_in_the_last_batch():
    """The window's last batch has 2 images, of which one of three devices has none."""
    what = IMAGES | {"model_options": {"hidden": [16], "batch_size": 9}}
    assert distance(trained(what, setting=DOUBLE), trained(what, setting=DOUBLE, devices=3)) < 1e-10


class Mine(Trainable):
    """Somebody's own, which is sent to the processes; one of its parameters is never used."""

    def __init__(self, layer=None):
        super().__init__()
        self.size, self.layer = (28, 28), layer or nn.Identity()
        self.inner, self.spare = nn.Linear(784, 784), nn.Linear(2, 2)
        self.start = self.spare.weight.detach().clone()

    def batches(self, window):
        return window.split(6)

    def forward(self, images):
        return self.layer(self.inner(images.flatten(1))).view_as(images)

    def training_loss(self, batch, state):  # noqa: ARG002
        each = (self(batch) - batch).square().mean((1, 2, 3))
        return each.mean(), each.detach(), None

    def draw_weights(self, generator):
        draw_linear_(self, generator)


@starts_processes
def test_a_network_of_ones_own(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
    net = Mine()
    what = {"net": net, "data": "digits", "setting": DOUBLE, "frames": 60}
    alone, shared = trained(what), trained(what, devices=2)
    assert distance(alone, shared) < 1e-10
    assert torch.equal(shared.model.spare.weight, alone.model.spare.weight), "what has no gradient is left alone"


class Carrying(gl.models.PredNet):
    """It cuts every frame into two, and carries their states on."""

    def batches(self, window):
        yield torch.stack([window, window.flip(0)], 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"net": "whitener"}, "2 devices cannot share a batch: the batch of Whitener cannot be split.*another seed"),
        (
            {"net": Mine(nn.BatchNorm1d(784)), "data": "digits"},
            r"BatchNorm1d \(layer\) computes with mean and var",
        ),
        ({"net": Mine(nn.Dropout()), "data": "digits"}, r"Dropout \(layer\) draws other numbers"),
        (IMAGES | {"loader": "reused"}, "'reused' hands over one frame after another"),
        (
            {"net": Carrying((3, 4), (8, 12)), "data_options": {"size": (8, 12)}},
            "Carrying carries a state from batch to batch",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_before_a_process_starts(options, words, monkeypatch):
    monkeypatch.setattr(parallel, "launch", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(gl.UsageError, match=words):
        trained({"devices": 2, **options})


DIES = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_a_process_that_dies_is_told_of(monkeypatch):
    """Its worker ends, as one that is killed does, and nobody waits for it, nor for the other."""
    monkeypatch.setattr(parallel, "LAST_WORDS", 0.1)
    monkeypatch.setattr("gpulab.training.workers.WORKER", [sys.executable, "-c", DIES])
    with pytest.raises(gl.GpulabError, match="process 1 of 2: its worker process ended with status -9"):
        trained(IMAGES, devices=2)


COMMAND = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
COMMAND += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


KILLED = """
import os, signal
import gpulab as gl

restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def watch(model, step):
    if restart == 0 and os.environ["RANK"] == "1" and step >= 9:
        os.kill(os.getpid(), signal.SIGKILL)

options = {"hidden": [16], "batch_size": 7}
setting = "cpu:threads=1,precision=float64"
gl.train("autoencoder", setting=setting, profile="smoke", frames=100, model_options=options, store="killed",
         checkpoint_seconds=0, watch=watch, progress=False)
"""


@starts_processes
def test_a_worker_killed_half_way_is_restarted_from_the_last_checkpoint_with_the_same_end(tmp_path):
    file = tmp_path / "training.py"
    file.write_text(KILLED)
    command, environment = [*COMMAND, "--max-restarts", "1", file], {**os.environ, **LOOPBACK}
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=120)
    (killed,) = (run_files.read_run(file.parent) for file in tmp_path.glob("killed/*/run.json"))
    # It died after three windows of three updates; the checkpoint is of the third, or the second.
    assert killed[0]["resumed_at"] in (2, 3)
    alone = trained(IMAGES, setting=DOUBLE)
    assert killed[1].loss.tolist() == pytest.approx(alone.history.loss.tolist(), abs=1e-10)


def test_processes_with_different_trainings_do_not_share_one(monkeypatch, tmp_path):
    """Stands in for the first of two: it says that it has something else to do."""
    monkeypatch.setattr(dist, "broadcast_object_list", lambda answer, _: answer.__setitem__(0, "something else"))
    plan = plan_run("autoencoder", profile="smoke", devices=2, model_options={"batch_size": 7})
    keeping, _ = data_parallel.in_group(plan, Keeping(store=tmp_path), parallel.Group(1, 2))
    with pytest.raises(gl.GpulabError, match="process 1 of 2 has another training to do than the first"):
        keeping.existing_run(plan.identity(gl.passport()))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_inference_on_two_devices_is_that_on_one(rows):
    net = gl.models.Autoencoder((16,)).double().train()
    images = torch.rand(rows, 1, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(data_parallel.predict(net, images, ["cpu", "cpu"]), net(images), rtol=0, atol=1e-14)
    assert net.training
