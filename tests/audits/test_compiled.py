"""Audits of compiled networks: what is right is not suspected, and what is wrong is named by its smallest module."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gpulab as gl

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
compiled_cases, public_cases = map(importlib.import_module, ("compiled_cases", "public_cases"))
CASES = {one.name: one for one in compiled_cases.CASES if "compile=" in one.pairs[1][1]}
INDUCTOR = [name for name, one in CASES.items() if "inductor" in one.pairs[1][1]]


def step_of(*modules, width=8):
    torch.manual_seed(0)
    model = nn.Sequential(*modules)
    return gl.Step(model, (torch.randn(6, width), torch.zeros(1)), lambda output, _: output.square().mean())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow("Inductor compiles for half a minute")) if name in INDUCTOR else name
        for name in CASES
    ],
)
def test_first_line_of_a_compiled_case(name):
    row = public_cases.examined(CASES[name], CASES[name].pairs[1])
    assert row["right"], row["text"]


def test_finding_names_module_line_result_and_part_of_the_compiler():
    step = CASES["minuend_and_subtrahend"].step()
    answer = gl.audit(step, "cpu", "cpu:compile=swaps", progress=False)
    (finding,) = answer.findings
    assert (finding.kind, finding.operation, finding.module, finding.phase) == (
        "mismatch",
        "Difference",
        "2",
        "forward",
    )
    assert "torch.sub(x.roll(1, -1), x)" in finding.line
    assert "aot_eager is right, so it comes from the code that swaps makes" in finding.detail
    assert answer.faulty
    assert answer.table.set_index("result").wrong["loss"]
    assert "1 × mismatch" in str(answer).splitlines()[0]


def test_two_modules_that_are_wrong_only_together_are_named():
    answer = gl.audit(CASES["two_that_are_wrong_together"].step(), "cpu", "cpu:compile=fuses_wrongly", progress=False)
    assert "no module inside is wrong alone, only with" in answer.findings[0].detail
    assert "2.act" in answer.findings[0].detail


class DrawsByType(nn.Module):
    """In float64 another number comes, as from a GPU's generator."""

    def forward(self, x):
        return x * (1.5 if x.dtype == torch.float64 else 1.0)


def test_float64_that_draws_other_numbers_hides_no_fault():
    step = step_of(nn.Linear(8, 8), nn.LayerNorm(8), DrawsByType())
    assert gl.audit(step, "cpu", "cpu:compile=aot_eager", progress=False).kind == "rounding"
    answer = gl.audit(step, "cpu", "cpu:compile=forgets_the_rest", progress=False)
    assert (answer.kind, answer.findings[0].operation) == ("mismatch", "LayerNorm")


class Masked(nn.Module):
    """Holds a module whose result is no number."""

    def __init__(self):
        super().__init__()
        self.mask, self.inner = Above(), nn.Linear(16, 16)

    def forward(self, x):
        return torch.where(self.mask(x), self.inner(x), x)


class Above(nn.Module):
    def forward(self, x):
        return x > 0


def test_module_that_makes_no_numbers_is_passed_over():
    answer = gl.audit(step_of(Masked(), width=16), "cpu", "cpu:compile=rounds", progress=False)
    assert (answer.kind, answer.findings[0].operation) == ("mismatch", "Linear")


def test_functionalisation_is_told_from_generated_code():
    answer = gl.audit(CASES["view_with_gaps"].step(), "cpu", "cpu:compile=drops_a_view", progress=False)
    assert answer.kind == "rounding", "this backend leaves a view with gaps alone"
    answer = gl.audit(CASES["a_view_that_is_lost"].step(), "cpu", "cpu:compile=aot_eager", progress=False)
    assert answer.table.difference.max() == 0
    assert "identical to the last bit" in answer.headline


def test_model_is_left_as_it_was():
    step = step_of(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    answer = gl.audit(step, "cpu", "cpu:compile=aot_eager", progress=False)
    assert answer.kind == "rounding"
    assert "updated 1.running_mean" in set(answer.table.result)
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items())
    assert step.model._compiled_call_impl is None
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_model_that_is_compiled_already_and_shared_modules():
    layer = nn.Linear(8, 8)
    step = step_of(layer, nn.Tanh(), layer)
    assert gl.audit(step, "cpu", "cpu:compile=aot_eager", progress=False).kind == "rounding"
    compiled = gl.Step(torch.compile(step.model, backend="aot_eager"), step.batch, step.loss)
    assert gl.audit(compiled, "cpu", "cpu:compile=aot_eager", progress=False).kind == "rounding"


@pytest.mark.parametrize(
    "loss", [lambda output, _: (output - output).log().mean(), lambda output, _: (1e3 * output).exp().mean()]
)
def test_loss_that_is_not_finite_is_told_first(loss):
    step = step_of(nn.Linear(8, 8), nn.Softmax(-1))
    step = gl.Step(step.model, step.batch, loss)
    answer = gl.audit(step, "cpu", "cpu:compile=aot_eager", progress=False)
    assert [finding.kind for finding in answer.findings] == ["not finite"], "NaN that is NaN again repeats itself"


def test_compiled_audits_that_cannot_be_are_refused():
    step = step_of(nn.Linear(8, 8))
    with pytest.raises(gl.UsageError, match="a function hides its network"):
        gl.audit(lambda: torch.ones(2), "cpu", "cpu:compile=aot_eager")
    with pytest.raises(gl.UsageError, match="one setting without compile"):
        gl.audit(step, "cpu:threads=1", "cpu:compile=aot_eager")
    with pytest.raises(gl.UsageError, match="no operations to record"):
        gl.record(step, "cpu:compile=aot_eager")
    with pytest.raises(gl.GpulabError, match="nothing of Sequential was compiled"):
        gl.audit(step_of(torch.compiler.disable(nn.Linear(8, 8))), "cpu", "cpu:compile=aot_eager", progress=False)


def test_compiler_that_fails_is_one_line():
    def backend(graph, inputs):
        raise NotImplementedError("no such kernel")

    torch._dynamo.register_backend(backend, "fails")
    with pytest.raises(gl.GpulabError, match=r"'cpu:compile=fails'.*compiler fails on this step: .*no such kernel"):
        gl.audit(step_of(nn.Linear(8, 8)), "cpu", "cpu:compile=fails", progress=False)


def test_networks_of_gpulab_are_compiled_and_give_the_same():
    plain, compiled = (
        gl.train("prednet", setting=setting, profile="smoke", frames=40, progress=False)
        for setting in ("cpu", "cpu:compile=aot_eager")
    )
    assert compiled.final_loss == pytest.approx(plain.final_loss, rel=1e-5)
    assert "step" not in vars(compiled.model)
    assert compiled.predict()[1].shape == plain.predict()[1].shape


@pytest.mark.parametrize("other", ["cpu:threads=1", "cpu:compile=aot_eager"])
def test_batch_that_the_model_changes_in_place_stays_as_it_was(other):
    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x.mul_(2))

    step = step_of(Doubling())
    before = step.batch[0].clone()
    assert (
        gl.audit(step, "cpu:threads=1" if "compile" not in other else "cpu", other, progress=False).kind == "rounding"
    )
    assert torch.equal(step.batch[0], before)
