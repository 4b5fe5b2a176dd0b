"""Record a step of a running training, and compare a resumed training with it."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import gpulab as gl
from gpulab.cli import app
from tests.audits._helpers import drawn, faults

INPUTS = drawn(64, 8, seed=5)
LABELS = (INPUTS.sum(1) > 0).long()


class Trainer:
    """A typical training with dropout, a gradient scaler, a schedule and an averaged model."""

    def __init__(self, autocast=False):
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 2)
        )
        self.average = copy.deepcopy(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.batches = list(DataLoader(TensorDataset(INPUTS, LABELS), batch_size=8))
        self.n_steps = 0
        self.autocast = autocast

    def step(self):
        x, y = self.batches[self.n_steps % len(self.batches)]
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = F.cross_entropy(self.net(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        with torch.no_grad():
            for mean, parameter in zip(
                self.average.parameters(), self.net.parameters(), strict=True
            ):
                mean.lerp_(parameter, 0.1)
        self.n_steps += 1
        return loss.detach()

    def state(self):
        return {
            **{name: getattr(self, name).state_dict() for name in STATES},
            "n_steps": self.n_steps,
            "generator": torch.get_rng_state(),
        }

    def load(self, state, left_out=()):
        for name in STATES:
            if name not in left_out:
                getattr(self, name).load_state_dict(state[name])
        if "n_steps" not in left_out:
            self.n_steps = state["n_steps"]
        if "generator" not in left_out:
            torch.set_rng_state(state["generator"])


STATES = ("net", "average", "optimizer", "schedule", "scaler")


def recorded(trainer, label=""):
    state = {name: getattr(trainer, name) for name in ("schedule", "scaler", "average")}
    with gl.record_step(state=state, label=label) as recording:
        recording.add(loss=trainer.step())
    return recording.trace


def after_three_steps(**options):
    trainer = Trainer(**options)
    for _ in range(3):
        trainer.step()
    return trainer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the file of a checkpoint, and the trace of the uninterrupted step after it."""
    trainer = after_three_steps()
    file = tmp_path_factory.mktemp("resumed") / "checkpoint.pt"
    torch.save(trainer.state(), file)
    return file, recorded(trainer, "uninterrupted")


def audit_of_resumed(checkpoint, left_out=()):
    file, uninterrupted = checkpoint
    trainer = Trainer()
    torch.manual_seed(7)  # a new process draws different numbers
    trainer.load(torch.load(file), left_out)
    return gl.audit(uninterrupted, recorded(trainer, "resumed"))


def test_resumed_training_that_restores_everything_is_rounding(checkpoint):
    report = audit_of_resumed(checkpoint)
    assert report.kind == "rounding", str(report)
    assert not report.comparison.differing_results


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("optimizer", "exp_avg of 0.weight (AdamW) and of 5 more (the second side has none)"),
        ("schedule", "schedule['last_epoch'] (3 and 0)"),
        ("scaler", "scaler['scale'] (2048.0 and 1024.0)"),
        ("average", "average['0.weight']"),
        ("generator", "random numbers of torch"),
    ],
)
def test_resumed_training_names_the_state_that_was_not_restored(checkpoint, left_out, said):
    report = audit_of_resumed(checkpoint, [left_out])
    first = report.findings[0]
    assert (first.kind, first.operation, first.phase) == ("other data", "state", "before the step")
    assert said in first.detail, first.detail
    assert report.faulty


@pytest.mark.parametrize("left_out", ["n_steps", "net"])
def test_resumed_training_names_the_line_that_is_given_other_data(checkpoint, left_out):
    """The loader starts again, or the weights were not loaded."""
    report = audit_of_resumed(checkpoint, [left_out])
    assert report.findings[0].kind == "other data"
    assert "loss = F.cross_entropy(self.net(x), y)" in report.findings[0].line


def test_resumed_training_names_a_learning_rate_without_being_told(checkpoint):
    file, uninterrupted = checkpoint
    trainer = Trainer()
    trainer.load(torch.load(file))
    trainer.optimizer.param_groups[0]["lr"] = 0.1
    with gl.record_step() as recording:
        trainer.step()
    (state, *_) = faults(gl.audit(uninterrupted, recording.trace))
    assert "lr of group 0 (AdamW) (0.005 and 0.1)" in state.detail


# --- the recording --------------------------------------------------------------------------------


def test_record_step_leaves_the_training_as_it_is():
    plain, watched = after_three_steps(), None
    random_state = torch.get_rng_state()
    losses = [plain.step() for _ in range(3)]
    watched = after_three_steps()
    torch.set_rng_state(random_state)
    with gl.record_step():
        first = watched.step()
    assert torch.equal(torch.stack(losses), torch.stack([first, watched.step(), watched.step()]))
    for a, b in zip(
        plain.net.state_dict().values(), watched.net.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


def test_record_step_compares_precisions():
    full, short = (recorded(after_three_steps(autocast=short)) for short in (False, True))
    report = gl.audit(full, short)
    assert report.kind in ("reduced precision", "other data")
    # A state contains the tensors themselves, so the first training would change them.
    state = copy.deepcopy(after_three_steps().state())

    def from_the_same_state(autocast):
        trainer = Trainer(autocast)
        trainer.load(copy.deepcopy(state))
        return recorded(trainer)

    report = gl.audit(from_the_same_state(False), from_the_same_state(True))
    assert (report.kind, report.faulty) == ("reduced precision", False), str(report)


def test_record_step_counts_lost_updates():
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-4)

    def train_step():
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    traces = []
    for _ in range(2):
        with gl.record_step() as recording:
            train_step()
        traces.append(recording.trace)
    assert any("update lost" in finding.detail for finding in gl.audit(*traces).findings)


def test_record_step_notes_only_generators_that_the_step_uses():
    x = drawn(4, 4)
    traces = {}
    for name in ("torch", "NumPy", "Python"):
        with gl.record_step() as recording:
            number = {
                "torch": lambda: torch.rand(()).item(),
                "NumPy": np.random.rand,
                "Python": random.random,
            }[name]()
            recording.add(sum=(x * number).sum())
        traces[name] = recording.trace
        assert list(recording.trace.state) == [f"random numbers of {name}"]


def test_record_step_file_has_the_state(tmp_path):
    x = drawn(4, 4)
    with gl.record_step(tmp_path / "step.trace", state={"epoch": 3, "moved": x}) as recording:
        recording.add(sum=x.exp().sum())
    loaded = gl.audits.Trace.load(tmp_path / "step.trace")
    assert loaded.state == recording.trace.state
    assert loaded.state["epoch"] == "3"
    assert gl.audit(loaded, recording.trace).kind == "rounding"


def test_record_step_ends_with_an_error_of_the_program():
    with pytest.raises(ZeroDivisionError), gl.record_step() as recording:
        raise ZeroDivisionError
    assert recording.trace is None
    with gl.record_step() as recording:
        drawn(3).exp()
    assert len(recording.trace.operations) < 8


def test_record_step_refuses_what_it_cannot_compare():
    with (
        pytest.raises(gl.UsageError, match=r"state\['loader'\].*: expected .* got a DataLoader"),
        gl.record_step(state={"loader": DataLoader(INPUTS)}),
    ):
        pass
    with pytest.raises(gl.UsageError, match="inside the with block"), gl.record_step():
        pass
    with gl.record_step() as recording:
        drawn(3).exp()
    with pytest.raises(gl.UsageError, match="call add inside the with block"):
        recording.add(loss=1.0)


# --- an unchanged script --------------------------------------------------------------------------

SCRIPT = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=float(sys.argv[1]))
for step in range(1, 6):
    x = torch.full((3, 4), float(step))
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    monkeypatch.setattr("sys.argv", list(__import__("sys").argv))
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    monkeypatch.chdir(tmp_path)
    return file


def command(*arguments):
    return CliRunner().invoke(app, ["record", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize("step", [1, 3])
def test_record_at_step_records_that_step_of_a_script(script, tmp_path, step):
    printed = command(script, "plain.trace", "--at-step", 5, "0.01").stdout
    result = command(script, "a.trace", "--at-step", step, "0.01")
    assert result.exit_code == 0
    assert result.stdout == printed  # the training continues as without the recording
    trace = gl.audits.Trace.load(tmp_path / "a.trace")
    assert {op.module for op in trace.operations if op.name == "addmm"} == {"0", "2"}
    updated = [op.module for op in trace.operations if op.name == "updated"]
    assert "0.weight" in updated
    assert "exp_avg of 2.bias" in updated
    has_averages = "exp_avg of 0.weight (Adam)" in trace.state
    assert has_averages == (step > 1)
    command(script, "b.trace", "--at-step", step, "0.02")
    report = gl.audit(tmp_path / "a.trace", tmp_path / "b.trace")
    assert "lr of group 0 (Adam) (0.01 and 0.02)" in report.findings[0].detail


def test_record_at_step_says_what_it_cannot_do(script):
    with pytest.raises(
        gl.GpulabError, match="ended after 5 steps of its optimizer; expected at least 9"
    ):
        command(script, "a.trace", "--at-step", 9, "0.01")
    for arguments, said in (
        ([script, "a.trace", "--at-step", 0], "expected a whole number from 1"),
        (["missing.py", "a.trace", "--at-step", 1], "no such script"),
        ([script, "a.trace", "0.01"], "a script that --at-step runs"),
        (
            [script, "a.trace", "--at-step", 1, "--setting", "cpu:threads=1"],
            "its own device; leave",
        ),
    ):
        with pytest.raises(gl.UsageError, match=said):
            command(*arguments)
