"""Audits of compiled networks: no false alarms, and faults are located in the smallest module."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpulab as gl
from benchmarks.correctness import compiled_cases, public_cases
from tests.audits._helpers import audited

CASES = {one.name: one for one in compiled_cases.CASES if "compile=" in one.pairs[1][1]}
INDUCTOR = [name for name, one in CASES.items() if "inductor" in one.pairs[1][1]]


def step_of(*modules, width=8):
    torch.manual_seed(0)
    model = nn.Sequential(*modules)
    return gl.Step(
        model, (torch.randn(6, width), torch.zeros(1)), lambda output, _: output.square().mean()
    )


SLOW = pytest.mark.slow("Inductor compiles for half a minute")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] * (name in INDUCTOR)) for name in CASES]
)
def test_compiled_audit_first_line_is_right_for_each_case(name):
    row = public_cases.examined(CASES[name], CASES[name].pairs[1])
    assert row["right"], row["text"]


def test_compiled_audit_names_module_line_result_and_part_of_the_compiler():
    answer = audited(CASES["minuend_and_subtrahend"].step(), b="cpu:compile=swaps")
    (finding,) = answer.findings
    assert (finding.kind, finding.operation, finding.module) == ("mismatch", "Difference", "2")
    assert (finding.phase, answer.faulty) == ("forward", True)
    assert "torch.sub(x.roll(1, -1), x)" in finding.line
    assert "aot_eager is right" in finding.detail
    assert "the code that swaps makes" in finding.detail
    assert answer.table.set_index("result").wrong["loss"]
    assert "1 × mismatch" in str(answer).splitlines()[0]


def test_compiled_audit_names_two_modules_that_are_wrong_only_together():
    answer = audited(CASES["two_that_are_wrong_together"].step(), b="cpu:compile=fuses_wrongly")
    assert "no module inside is wrong alone, only with" in answer.findings[0].detail
    assert "2.act" in answer.findings[0].detail


def test_compiled_audit_of_aot_eager_keeps_a_view_that_another_backend_loses():
    answer = audited(CASES["a_view_that_is_lost"].step(), b="cpu:compile=aot_eager")
    assert answer.table.difference.max() == 0
    assert "identical to the last bit" in answer.headline


def test_compiled_audit_leaves_the_model_as_it_was():
    step = step_of(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    answer = audited(step, b="cpu:compile=aot_eager")
    assert answer.kind == "rounding"
    assert "updated 1.running_mean" in set(answer.table.result)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items()
    )
    assert step.model._compiled_call_impl is None
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_compiled_audit_takes_a_compiled_model_and_shared_modules():
    layer = nn.Linear(8, 8)
    step = step_of(layer, nn.Tanh(), layer)
    assert audited(step, b="cpu:compile=aot_eager").kind == "rounding"
    compiled = gl.Step(torch.compile(step.model, backend="aot_eager"), step.batch, step.loss)
    assert audited(compiled, b="cpu:compile=aot_eager").kind == "rounding"


def test_compiled_audit_reports_a_nonfinite_loss_first():
    step = step_of(nn.Linear(8, 8), nn.Softmax(-1))
    step = gl.Step(step.model, step.batch, lambda output, _: (output - output).log().mean())
    answer = audited(step, b="cpu:compile=aot_eager")
    assert [finding.kind for finding in answer.findings] == ["not finite"], (
        "NaN in both executions counts as equal"
    )


def step_that_hides_its_network():
    return torch.ones(2)


class RefusedAudit(NamedTuple):
    """A step and a first setting that cannot be compared, and the error message."""

    id: str
    step: object
    setting: str
    message: str


REFUSED_AUDITS = [
    RefusedAudit(
        "function",
        step_that_hides_its_network,
        "cpu",
        r"has to be a gpulab.Step\(model, batch, loss\)",
    ),
    RefusedAudit(
        "settings that differ",
        step_of(nn.Linear(8, 8)),
        "cpu:threads=1",
        "the same setting without and with compile",
    ),
    RefusedAudit(
        "nothing compiled",
        step_of(torch.compiler.disable(nn.Linear(8, 8))),
        "cpu",
        "no part of Sequential was compiled",
    ),
]


@pytest.mark.parametrize("case", REFUSED_AUDITS, ids=lambda case: case.id)
def test_compiled_audit_refuses_unsupported_steps(case):
    with pytest.raises(gl.GpulabError, match=case.message):
        audited(case.step, case.setting, "cpu:compile=aot_eager")


def test_record_refuses_compiled_code():
    with pytest.raises(gl.UsageError, match="no operations to record"):
        gl.record(step_of(nn.Linear(8, 8)), "cpu:compile=aot_eager")


def test_compiled_audit_reports_a_failing_compiler_in_one_line():
    def backend(graph, inputs):
        raise NotImplementedError("no such kernel")

    torch._dynamo.register_backend(backend, "fails")
    with pytest.raises(
        gl.GpulabError, match=r"'cpu:compile=fails'.*compiler fails on this step: .*no such kernel"
    ):
        audited(step_of(nn.Linear(8, 8)), b="cpu:compile=fails")


def test_train_compiled_gives_the_loss_of_train_uncompiled():
    plain, compiled = (
        gl.train("prednet", setting=setting, profile="smoke", frames=40, progress=False)
        for setting in ("cpu", "cpu:compile=aot_eager")
    )
    assert compiled.final_loss == pytest.approx(plain.final_loss, rel=1e-5)
    assert "step" not in vars(compiled.model)
    assert compiled.predict()[1].shape == plain.predict()[1].shape


@pytest.mark.parametrize("b", ["cpu:threads=1", "cpu:compile=aot_eager"])
def test_audit_leaves_a_batch_that_the_model_changes_in_place(b):
    step = step_of(nn.ReLU(inplace=True), nn.Linear(8, 8))
    before = step.batch[0].clone()
    assert audited(step, b=b).kind == "rounding"
    assert torch.equal(step.batch[0], before)


# --- no float64 reference -------------------------------------------------------------------------


class HeadInFloat32(nn.Module):
    """A network whose last layer, after a normalisation, requests float32."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        h = torch.relu(self.norm(self.body(x)))
        return self.head(h.float())


class MixedAttention(nn.Module):
    """Attention with keys and values in float32."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x):
        keys = x.to(torch.float32)
        return F.scaled_dot_product_attention(self.query(x), keys, keys)


class GridInFloat32(nn.Module):
    """A grid of positions in float32, as in torchvision's RAFT."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        places = torch.arange(16, dtype=torch.float32)
        return self.layer(places + 0 * places) * x


class OutsideOfState(nn.Module):
    """A matrix that is a plain attribute, so that `Module.to` does not move it."""

    def __init__(self):
        super().__init__()
        self.layer, self.matrix = nn.Linear(16, 16), torch.eye(16)

    def forward(self, x):
        return self.layer(x) @ self.matrix


class Fails(nn.Module):
    """A network that fails when it is run, whether compiled or not."""

    def forward(self, x):
        return x @ torch.ones(3)


def one_module(make, rows=8):
    torch.manual_seed(0)
    return gl.Step(
        make(), (torch.randn(2, rows, 16), torch.zeros(1)), lambda output, _: output.square().mean()
    )


REQUESTS = {
    HeadInFloat32: "In this line|return self.head(h.float()) (in HeadInFloat32) requests float32",
    MixedAttention: "keys = x.to(torch.float32) (in MixedAttention) requests float32",
    GridInFloat32: (
        "places = torch.arange(16, dtype=torch.float32) (in GridInFloat32) requests float32"
    ),
}


@pytest.mark.parametrize("make", REQUESTS)
def test_compiled_audit_compares_a_float32_step_without_a_float64_reference(make):
    answer = audited(one_module(make), b="cpu:compile=aot_eager")
    assert (answer.kind, answer.faulty) == ("rounding", False)
    assert answer.table[["error", "plain_error"]].isna().all(axis=None)
    assert answer.table.tolerance.between(0, 1e-3).all(), (
        "measured by executions with perturbed numbers"
    )
    assert "There was no float64 reference: " in answer.headline
    assert any(words in answer.headline for words in REQUESTS[make].split("|"))
    assert "x.dtype" in answer.headline
    assert "setting.dtype" in answer.headline
    assert "nearer to float64" not in answer.headline
    assert "nan" not in str(answer)


def test_compiled_audit_names_a_tensor_that_module_to_does_not_reach():
    answer = audited(one_module(OutsideOfState), b="cpu:compile=aot_eager")
    assert answer.kind == "rounding"
    assert "OutsideOfState.matrix (torch.float32 on cpu): make it a buffer" in answer.headline
    assert "x.dtype" not in answer.headline, "the step requests no format"


def test_compiled_audit_finds_a_fault_without_a_float64_reference():
    answer = audited(one_module(HeadInFloat32), b="cpu:compile=forgets_the_rest")
    (finding,) = answer.findings
    assert (finding.kind, finding.operation, finding.module) == ("mismatch", "LayerNorm", "norm")
    assert "from float64" in finding.detail, "the module alone has a reference"


def test_compiled_audit_says_when_a_wrong_module_has_no_float64_reference():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), HeadInFloat32(), nn.Linear(5, 16))
    step = gl.Step(
        model, (torch.randn(8, 16), torch.zeros(1)), lambda output, _: output.square().mean()
    )
    compiled_cases.planted(
        "head_off", "self.head(h.float())", "linear", compiled_cases.followed_by(lambda x: x * 1.01)
    )
    answer = audited(step, b="cpu:compile=head_off")
    assert [finding.kind for finding in answer.findings] == ["mismatch"]
    assert (answer.findings[0].operation, answer.findings[0].module) == ("HeadInFloat32", "1")
    assert "There was no float64 reference" in answer.headline
    assert "from float64" not in answer.findings[0].detail


def test_compiled_audit_of_torchvision_raft_is_not_faulty():
    flows = pytest.importorskip("torchvision.models.optical_flow")

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.raft = flows.raft_small(weights=None)

        def forward(self, x):
            return self.raft(x, x.flip(-1), num_flow_updates=1)[-1]

    torch.manual_seed(0)
    answer = audited(gl.Step(Flow(), torch.rand(1, 3, 128, 128)), b="cpu:compile=aot_eager")
    assert answer.kind == "rounding"
    assert ".float() (in raft) requests float32" in answer.headline


def test_compiled_audit_of_a_step_that_fails_uncompiled_names_its_line():
    with pytest.raises(
        gl.UsageError,
        match=r"the step fails under cpu: RuntimeError: .*\(at test_compiled\.py:\d+: ",
    ):
        audited(one_module(Fails), b="cpu:compile=aot_eager")


def test_compiled_audit_of_code_that_fails_when_it_runs_is_one_sentence():
    def run(*_):
        raise ValueError("no such buffer")

    torch._dynamo.register_backend(lambda *_: run, "fails_later")
    with pytest.raises(
        gl.GpulabError, match="fails under cpu:compile=fails_later: ValueError: no such buffer"
    ):
        audited(step_of(nn.Linear(8, 8)), b="cpu:compile=fails_later")


# --- bfloat16 and float16 -------------------------------------------------------------------------

SHORT = ("precision=bfloat16", "autocast=bfloat16", "autocast=float16")


class Attention(nn.Module):
    """Single-head attention, written out."""

    def __init__(self, width):
        super().__init__()
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        query, key, value = self.inputs(3 * x).chunk(3, -1)
        scores = query @ key.mT
        return self.output(torch.div(scores, math.sqrt(x.shape[-1])).softmax(-1) @ value)


def transformer(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.LayerNorm(16), Attention(16), compiled_cases.Mlp(16), nn.Linear(16, 4))
    return gl.Step(model, (torch.randn(8, 6, 16), torch.randn(8, 6, 4)), F.mse_loss)


def convolutional(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    return gl.Step(model, (0.3 * torch.randn(8, 3, 8, 8), torch.arange(8) % 4), F.cross_entropy)


def recurrent(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.GRUCell(16, 24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))
    return gl.Step(model, (torch.randn(16, 16), torch.arange(16) % 4), F.cross_entropy)


def autoencoder(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.ConvTranspose2d(8, 1, 3), nn.Sigmoid()
    )
    return gl.Step(model, (torch.rand(4, 1, 8, 8), torch.rand(4, 1, 8, 8)), F.mse_loss)


def another_epsilon(_, node):
    node.args = tuple(1e-2 if arg == 1e-5 else arg for arg in node.args)


def without_bias(_, node):
    node.args = (*node.args[:2], None, *node.args[3:])


PLANTED = {
    "off_by_5_percent": (
        "self.down(self.act(",
        "linear",
        compiled_cases.followed_by(lambda x: x * 1.05),
        transformer,
        "Mlp|Linear",
    ),
    "forgets_a_bias": ("", "linear", without_bias, transformer, "Linear"),
    "forgets_the_root": (
        "torch.div(scores",
        "div",
        compiled_cases.left_out,
        transformer,
        "Attention",
    ),
    "other_epsilon": ("", "batch_norm", another_epsilon, convolutional, "BatchNorm2d"),
}
for name, (line, target, change, *_) in PLANTED.items():
    compiled_cases.planted(name, line, target, change)


@pytest.mark.parametrize("setting", SHORT)
@pytest.mark.parametrize("name", PLANTED)
def test_compiled_audit_finds_a_fault_in_a_short_format(name, setting):
    *_, make, operation = PLANTED[name]
    answer = audited(make(), f"cpu:{setting}", f"cpu:{setting},compile={name}")
    assert answer.kind == "mismatch", answer
    assert answer.findings[0].operation in operation.split("|")


def fewer_roundings(program, _):
    """A correct backend with different rounding: like fused code, it computes in float32."""

    def widened(value):
        return (
            value.float()
            if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
            else value
        )

    def run(*args):
        return [
            x.bfloat16() if x.is_floating_point() else x
            for x in program.forward(*map(widened, args))
        ]

    return run


torch._dynamo.register_backend(fewer_roundings, "fewer_roundings")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [transformer, autoencoder])
def test_compiled_audit_accepts_a_right_network_that_rounds_elsewhere(make, seed):
    answer = audited(
        make(seed), "cpu:precision=bfloat16", "cpu:precision=bfloat16,compile=fewer_roundings"
    )
    assert answer.kind == "rounding", answer
    assert answer.table.difference.max() > 1e-3, "bfloat16 rounds otherwise"
    assert answer.table.tolerance.median() < 0.05


@pytest.mark.slow("Inductor compiles for half a minute")
@pytest.mark.parametrize("setting", SHORT)
@pytest.mark.parametrize("make", [transformer, convolutional, recurrent])
def test_compiled_audit_accepts_inductor_in_a_short_format(make, setting):
    for seed in range(2):
        answer = audited(make(seed), f"cpu:{setting}", f"cpu:{setting},compile=inductor")
        assert answer.kind == "rounding", answer


@pytest.mark.slow("Inductor compiles for half a minute")
@pytest.mark.parametrize(
    "setting", ["precision=bfloat16", "autocast=bfloat16", "autocast=float16", "threads=1"]
)
def test_compiled_audit_notices_other_random_numbers_however_small_their_effect(setting):
    for rate in (0.3, 1e-3):
        step = step_of(nn.Linear(8, 8), nn.Dropout(rate), nn.Linear(8, 8))
        answer = audited(step, f"cpu:{setting}", f"cpu:{setting},compile=inductor")
        assert answer.kind == "different random numbers", answer


def test_compiled_audit_float64_reference_begins_with_the_rounded_numbers():
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16))

        def forward(self, x):
            return 2 * x + 0 * self.weight

    answer = audited(
        one_module(Doubled), "cpu:precision=bfloat16", "cpu:precision=bfloat16,compile=aot_eager"
    )
    assert answer.table.set_index("result").plain_error["output"] == 0, (
        "bfloat16 doubles without a rounding"
    )
