"""Real processes on 127.0.0.1: a training on several devices ends where one on a single device does."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gpulab as gl
from gpulab.models.base import Trainable, draw_linear_
from gpulab.store import run_files
from gpulab.training import data_parallel, parallel

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


# --- the same end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [IMAGES, FILMS], ids=["images", "films"])
@pytest.mark.parametrize(("setting", "bound"), [("cpu:threads=1", 1e-5), (DOUBLE, 1e-10)])
def test_two_devices_end_where_one_does(what, setting, bound):
    """Batches of 7, 7 and 6 images, of 5 films: the shares of two are not equal."""
    alone = trained(what, setting=setting)
    shared = trained(what, setting=setting, devices=2)
    assert 0 <= distance(alone, shared) < bound
    assert shared.history.step.tolist() == alone.history.step.tolist()
    assert shared.history.loss.iloc[-1] != shared.history.loss.iloc[0]


def test_more_devices_than_examples_in_the_last_batch():
    """The window's last batch has 2 images, of which one of three devices has none."""
    what = IMAGES | {"model_options": {"hidden": [16], "batch_size": 9}}
    assert distance(trained(what, setting=DOUBLE), trained(what, setting=DOUBLE, devices=3)) < 1e-10


def test_the_run_is_kept_as_another_with_its_command(tmp_path):
    seen = []
    options = {"devices": 2, "store": tmp_path, "progress": lambda done, loss: seen.append((done, loss))}
    run = trained(IMAGES, **options)
    assert [done for done, _ in seen] == [20, 40, 60, 80, 100]
    assert "--devices 2" in run.record["command"]
    trained(IMAGES, store=tmp_path)
    frame = gl.runs(tmp_path)
    assert sorted(frame.devices) == [1, 2]
    assert gl.verdict(frame, factor="devices", reference=1).decision == "inconclusive"  # one pair


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


def test_a_run_that_is_there_starts_no_process(tmp_path, monkeypatch):
    options = {"devices": 2, "store": tmp_path, "keep_weights": False}
    run = trained(IMAGES, **options)
    assert not (run.path / run_files.WEIGHTS).exists()
    monkeypatch.setattr("gpulab.training.workers.WORKER", [sys.executable, "-c", DIES])
    assert trained(IMAGES, **options).record == run.record
    with pytest.raises(gl.GpulabError, match="ended with status"):
        trained(IMAGES, **options, resume=False)


def test_a_network_of_ones_own(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
    net = Mine()
    what = {"net": net, "data": "digits", "setting": DOUBLE, "frames": 60}
    alone, shared = trained(what), trained(what, devices=2)
    assert distance(alone, shared) < 1e-10
    assert torch.equal(shared.model.spare.weight, alone.model.spare.weight), "what has no gradient is left alone"


# --- what cannot be shared -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"net": "prednet"}, "PredNet learns from a batch of 1, which 2 devices cannot share.*batch_size"),
        ({"net": "autoencoder"}, "Autoencoder learns from a batch of 1.*--window"),
        ({"net": "whitener"}, "2 devices cannot share a batch: the batch of Whitener cannot be split.*another seed"),
        (
            {"net": Mine(nn.BatchNorm1d(784)), "data": "digits"},
            r"BatchNorm1d \(layer\) computes with mean and var",
        ),
        ({"net": Mine(nn.Dropout()), "data": "digits"}, r"Dropout \(layer\) draws other numbers"),
        (IMAGES | {"devices": 0}, "devices=0: expected a whole number from 1"),
        (IMAGES | {"loader": "reused"}, "'reused' hands over one frame after another"),
        (IMAGES | {"setting": "mps"}, "devices=2 under mps"),
        (IMAGES | {"setting": "cuda:1"}, "say cuda, without a number"),
        (IMAGES | {"watch": print}, "torchrun"),
        (IMAGES | {"window": 1}, "window=1"),
        (FILMS | {"window": 8}, "batch_size=5: of a window of 8 frames too few"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_a_process_starts(options, words, monkeypatch):
    monkeypatch.setattr(parallel, "launch", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(gl.UsageError, match=words):
        trained({"devices": 2, **options})


class Carrying(gl.models.PredNet):
    """It cuts every frame into two, and carries their states on."""

    def batches(self, window):
        yield torch.stack([window, window.flip(0)], 1)


def test_a_state_that_is_carried_on_is_refused():
    net = Carrying((3, 4), (8, 12))
    with pytest.raises(gl.UsageError, match="Carrying carries a state from batch to batch"):
        trained({"net": net, "data_options": {"size": (8, 12)}, "devices": 2})


def test_a_process_that_dies_is_told_of(monkeypatch):
    """Its worker ends, as one that is killed does, and nobody waits for it."""
    monkeypatch.setenv("GPULAB_TEST", "1")
    monkeypatch.setattr("gpulab.training.workers.WORKER", [sys.executable, "-c", DIES])
    with pytest.raises(gl.GpulabError, match="process 1 of 2: its worker process ended with status -9"):
        trained(IMAGES, devices=2)


DIES = """
import os, signal
from gpulab.training.worker import main
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
main()
"""


# --- torchrun --------------------------------------------------------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def torchrun(*arguments, cwd, may_fail=False):
    """The output of a program that torchrun starts twice."""
    command, environment = [*TORCHRUN, *map(str, arguments)], {**os.environ, **LOOPBACK}
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert may_fail or done.returncode == 0, done.stderr[-3000:]
    return done.stdout


KILLED = """
import os, signal, sys
import gpulab as gl

restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def watch(model, step):
    if sys.argv[1] == "killed" and restart == 0 and os.environ["RANK"] == "1" and step >= 9:
        os.kill(os.getpid(), signal.SIGKILL)

options = {"hidden": [16], "batch_size": 7}
setting = "cpu:threads=1,precision=float64"
gl.train("autoencoder", setting=setting, profile="smoke", frames=100, model_options=options, store=sys.argv[1],
         checkpoint_seconds=0, watch=watch, progress=False)
"""


def test_a_worker_killed_half_way_is_restarted_from_the_last_checkpoint_with_the_same_end(tmp_path):
    file = tmp_path / "training.py"
    file.write_text(KILLED)
    for store in ("killed", "whole"):
        torchrun("--max-restarts", 1, file, store, cwd=tmp_path)
    (killed,), (whole,) = (
        [run_files.read_run(p.parent) for p in (tmp_path / s).glob("*/run.json")] for s in ("killed", "whole")
    )
    # It died after three windows of three updates; the checkpoint is of the third, or the second.
    assert killed[0]["resumed_at"] in (2, 3)
    assert "resumed_at" not in whole[0]
    assert killed[0]["summary"]["weights"] == whole[0]["summary"]["weights"], "the same bits"
    assert killed[1].loss.tolist() == whole[1].loss.tolist()
    alone = trained(IMAGES, setting=DOUBLE)
    assert alone.final_loss == pytest.approx(killed[0]["summary"]["final_loss"], abs=1e-10)


def test_the_command_line_under_torchrun_tells_of_one_run(tmp_path):
    command = ["-m", "gpulab", "train", "autoencoder", "--profile", "smoke", "--setting", "cpu:threads=1"]
    command += ["--frames", "60", "--option", "batch_size=7", "--store", tmp_path / "runs"]
    for _ in range(2):  # trained, and found
        assert torchrun(*command, cwd=tmp_path).count("kept in") == 1
    assert gl.runs(tmp_path / "runs").devices.tolist() == [2]


def test_two_nodes_train_one_network_and_need_no_common_folder(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", "gpulab", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["--local-addr", "127.0.0.1", "-m", "gpulab", "train", "autoencoder", "--profile", "smoke"]
    command += ["--setting", "cpu:threads=1", "--frames", "60", "--option", "batch_size=7"]
    nodes = []
    for node in ("one", "two"):
        words = [*command, "--store", str(tmp_path / node)]
        pipe = subprocess.PIPE
        nodes.append(subprocess.Popen(words, env={**os.environ, **LOOPBACK}, stdout=pipe, stderr=pipe, text=True))
    said = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert sum("kept in" in out for out, _ in said) == 1
    (run,) = [run_files.read_record(file.parent) for file in tmp_path.glob("*/*/run.json")]
    assert run["devices"] == 2


OTHERS = """
import os
import gpulab as gl

options = {"model_options": {"hidden": [16], "batch_size": 7}, "profile": "smoke", "frames": 40, "progress": False}
rank = int(os.environ["RANK"])
alone = gl.train("autoencoder", seed=rank, devices=1, **options)  # each its own
try:
    gl.train("autoencoder", seed=rank, **options)
except gl.GpulabError as error:
    print("refused:", error)
try:
    gl.train("autoencoder", devices=3, **options)
except gl.UsageError as error:
    print("refused:", error)
"""


def test_processes_with_different_trainings_do_not_share_one(tmp_path):
    (tmp_path / "others.py").write_text(OTHERS)
    said = torchrun("others.py", cwd=tmp_path, may_fail=True)  # the first waits for one that has left
    assert "process 1 of 2 has another training to do than the first" in said
    assert "devices=3, and torchrun has started 2 processes" in said


# --- against torch's own ---------------------------------------------------------------------------------


def gradients_by_both(seed, batch=6):
    """In one of two processes: the distance between our gradients and DistributedDataParallel's."""
    with parallel.join(gl.Setting.parse("cpu"), 2) as group:
        from gpulab.training.engines import Engines
        from gpulab.training.plan import plan_run
        from gpulab.training.run import set_up

        net = Mine().double()
        net.draw_weights(torch.Generator().manual_seed(seed))
        plan = plan_run(net, "digits", setting="cpu:precision=float64", profile="smoke", devices=2)
        engine = data_parallel.DataParallel(Engines(plan, set_up(plan)), group)
        images = torch.rand(batch, 1, 28, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        engine.gradients(images, None)
        theirs = DistributedDataParallel(net, find_unused_parameters=True)
        mine = images.tensor_split(2)[group.rank]
        (theirs(mine) - mine).square().mean().backward()
        pairs = [(one.grad, other.grad) for one, other in zip(plan.model.parameters(), net.parameters(), strict=True)]
        return max((one - other).abs().max().item() for one, other in pairs if one is not None)


def test_equal_shares_have_the_gradient_of_distributed_data_parallel():
    name = f"{__file__}:gradients_by_both"
    answers = parallel.launch({"net": name, "setting": "cpu", "seed": 3, "profile": "smoke"}, 2)
    assert [answer["final_loss"] < 1e-15 for answer in answers] == [True, True]


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_inference_on_two_devices_is_that_on_one(rows):
    net = gl.models.Autoencoder((16,)).double().train()
    images = torch.rand(rows, 1, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(data_parallel.predict(net, images, ["cpu", "cpu"]), net(images), rtol=0, atol=1e-14)
    assert net.training
    for devices in ([], "cpu"):
        with pytest.raises(gl.UsageError, match="expected a list of one or more"):
            data_parallel.predict(net, images, devices)


def test_more_processes_than_cores_are_told(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.warns(UserWarning, match="devices=3: this machine has 2 cores"):
        parallel.check_devices(gl.Setting.parse("cpu"), 3)
