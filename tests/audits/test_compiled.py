"""Audits of compiled networks: what is right is not suspected, and what is wrong is named by its smallest module."""

import pytest
import torch
from small_steps import audited
from torch import nn

import gpulab as gl
from benchmarks.correctness import compiled_cases, public_cases

CASES = {one.name: one for one in compiled_cases.CASES if "compile=" in one.pairs[1][1]}
INDUCTOR = [name for name, one in CASES.items() if "inductor" in one.pairs[1][1]]


def step_of(*modules, width=8):
    torch.manual_seed(0)
    model = nn.Sequential(*modules)
    return gl.Step(model, (torch.randn(6, width), torch.zeros(1)), lambda output, _: output.square().mean())


SLOW = pytest.mark.slow("Inductor compiles for half a minute")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[SLOW] * (name in INDUCTOR)) for name in CASES])
def test_first_line_of_a_compiled_case(name):
    row = public_cases.examined(CASES[name], CASES[name].pairs[1])
    assert row["right"], row["text"]


def test_finding_names_module_line_result_and_part_of_the_compiler():
    answer = audited(CASES["minuend_and_subtrahend"].step(), b="cpu:compile=swaps")
    (finding,) = answer.findings
    assert (finding.kind, finding.operation, finding.module) == ("mismatch", "Difference", "2")
    assert (finding.phase, answer.faulty) == ("forward", True)
    assert "torch.sub(x.roll(1, -1), x)" in finding.line
    assert "aot_eager is right, so it comes from the code that swaps makes" in finding.detail
    assert answer.table.set_index("result").wrong["loss"]
    assert "1 × mismatch" in str(answer).splitlines()[0]


def test_two_modules_that_are_wrong_only_together_are_named():
    answer = audited(CASES["two_that_are_wrong_together"].step(), b="cpu:compile=fuses_wrongly")
    assert "no module inside is wrong alone, only with" in answer.findings[0].detail
    assert "2.act" in answer.findings[0].detail


def test_view_that_a_backend_loses_is_not_lost_by_functionalisation():
    answer = audited(CASES["a_view_that_is_lost"].step(), b="cpu:compile=aot_eager")
    assert answer.table.difference.max() == 0
    assert "identical to the last bit" in answer.headline


def test_compiled_audit_leaves_the_model_as_it_was():
    step = step_of(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    answer = audited(step, b="cpu:compile=aot_eager")
    assert answer.kind == "rounding"
    assert "updated 1.running_mean" in set(answer.table.result)
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items())
    assert step.model._compiled_call_impl is None
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_model_that_is_compiled_already_and_shared_modules():
    layer = nn.Linear(8, 8)
    step = step_of(layer, nn.Tanh(), layer)
    assert audited(step, b="cpu:compile=aot_eager").kind == "rounding"
    compiled = gl.Step(torch.compile(step.model, backend="aot_eager"), step.batch, step.loss)
    assert audited(compiled, b="cpu:compile=aot_eager").kind == "rounding"


def test_loss_that_is_not_finite_is_told_first():
    step = step_of(nn.Linear(8, 8), nn.Softmax(-1))
    step = gl.Step(step.model, step.batch, lambda output, _: (output - output).log().mean())
    answer = audited(step, b="cpu:compile=aot_eager")
    assert [finding.kind for finding in answer.findings] == ["not finite"], "NaN that is NaN again repeats itself"


REFUSED = {
    "a function hides its network": (lambda: torch.ones(2), "cpu"),
    "one setting without compile": (step_of(nn.Linear(8, 8)), "cpu:threads=1"),
    "nothing of Sequential was compiled": (step_of(torch.compiler.disable(nn.Linear(8, 8))), "cpu"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_compiled_audits_that_cannot_be_are_refused(words):
    with pytest.raises(gl.GpulabError, match=words):
        audited(*REFUSED[words], "cpu:compile=aot_eager")


def test_recording_of_compiled_code_is_refused():
    with pytest.raises(gl.UsageError, match="no operations to record"):
        gl.record(step_of(nn.Linear(8, 8)), "cpu:compile=aot_eager")


def test_compiler_that_fails_is_one_line():
    def backend(graph, inputs):
        raise NotImplementedError("no such kernel")

    torch._dynamo.register_backend(backend, "fails")
    with pytest.raises(gl.GpulabError, match=r"'cpu:compile=fails'.*compiler fails on this step: .*no such kernel"):
        audited(step_of(nn.Linear(8, 8)), b="cpu:compile=fails")


def test_networks_of_gpulab_are_compiled_and_give_the_same():
    plain, compiled = (
        gl.train("prednet", setting=setting, profile="smoke", frames=40, progress=False)
        for setting in ("cpu", "cpu:compile=aot_eager")
    )
    assert compiled.final_loss == pytest.approx(plain.final_loss, rel=1e-5)
    assert "step" not in vars(compiled.model)
    assert compiled.predict()[1].shape == plain.predict()[1].shape


@pytest.mark.parametrize("b", ["cpu:threads=1", "cpu:compile=aot_eager"])
def test_batch_that_the_model_changes_in_place_stays_as_it_was(b):
    step = step_of(nn.ReLU(inplace=True), nn.Linear(8, 8))
    before = step.batch[0].clone()
    assert audited(step, b=b).kind == "rounding"
    assert torch.equal(step.batch[0], before)
