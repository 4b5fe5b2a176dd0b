"""Steps without complete float64 references are compared as recorded.

The first line names the operations without a reference.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import gpulab as gl
from gpulab.audits._references import References
from tests.audits._faulty_kernels import under_b
from tests.audits._helpers import Own, audited, drawn, labels, recorded, seeded, with_a_function

pytestmark = pytest.mark.usefixtures("two_threads")
TF32, BFLOAT16, AUTOCAST = "cpu:emulate=tf32", "cpu:precision=bfloat16", "cpu:autocast=bfloat16"
B = "cpu:threads=1"
X = drawn(8, 20)
ROUNDING = ("rounding", "reduced precision")
OUTSIDE = "Values from outside torch (such as NumPy)"
UNFOLLOWED = "Without a float64 reference, and compared as recorded: "


def first_line(report):
    return str(report).partition("\n")[0]


def assert_no_fault(report):
    assert report.kind in ROUNDING, str(report)
    assert not report.faulty, str(report)
    assert {"mismatch", "other data", "cause not found"}.isdisjoint(
        finding.kind for finding in report.findings
    )


# --- memory ---------------------------------------------------------------------------------------


def two_updates(setting):
    network = seeded(
        lambda: nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.LayerNorm(30), nn.Linear(30, 5))
    )
    network.to(setting.dtype)
    optimizer = torch.optim.AdamW(network.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(X.to(setting.dtype)), labels(8))
        loss.backward()
        optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("b", [B, TF32, BFLOAT16, AUTOCAST])
@pytest.mark.parametrize(
    "step",
    [two_updates, gl.Step(seeded(lambda: nn.Linear(20, 5)), (X, labels(8)), F.cross_entropy)],
)
@pytest.mark.parametrize("copies", [0, 1, 5])
def test_audit_without_memory_for_references_goes_on_without_them(step, b, copies, monkeypatch):
    """Imitate a lack of memory, as with seven billion weights on one GPU."""
    store = References.store
    callers = []

    def store_a_few(self, *args, **options):
        callers.append(self)
        if callers.count(self) > copies:
            raise torch.OutOfMemoryError("CUDA out of memory")
        store(self, *args, **options)

    monkeypatch.setattr(References, "store", store_a_few)
    report = audited(step, "cpu", b)
    assert not report.faulty, str(report)
    assert report.kind in (*ROUNDING, "cannot be told")
    assert f"{UNFOLLOWED}all operations" in first_line(report)
    assert "rounding alone explains" not in first_line(report)


# --- a format that the step requests --------------------------------------------------------------


@pytest.mark.parametrize("b", [B, TF32, BFLOAT16, AUTOCAST, "cpu:precision=float64"])
def test_references_are_exact_for_a_step_that_asks_for_float32(b):
    mask = torch.ones(30)
    report = audited(with_a_function(lambda h: (h.float() * mask).softmax(-1).to(h.dtype)), b=b)
    assert_no_fault(report)
    assert UNFOLLOWED not in first_line(report)
    assert all(value.exact for trace in (report.a, report.b) for value in trace.values.values())


# --- operations without a kernel for float64 ------------------------------------------------------

LIBRARY = torch.library.Library("gpulab_tests", "DEF")
LIBRARY.define("waves(Tensor x, float factor) -> Tensor")


def waves(x, factor):
    """A kernel without a version for double, like many custom kernels."""
    if x.dtype == torch.float64:
        raise RuntimeError("waves is not implemented for 'Double'")
    return torch.from_numpy(np.sin(factor * x.float().numpy())).to(x.dtype)


LIBRARY.impl("waves", waves, "CompositeExplicitAutograd")


class Waves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return torch.ops.gpulab_tests.waves(x, factor)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * (ctx.factor * x).cos(), None


@pytest.mark.parametrize("b", [B, TF32, BFLOAT16, AUTOCAST])
def test_references_missing_for_an_operation_are_named_and_replaced_by_recorded_values(b):
    report = audited(with_a_function(lambda h: Waves.apply(h, 2.0)), b=b)
    assert_no_fault(report)
    assert UNFOLLOWED + "waves." in first_line(report)
    assert report.a.without_reference == {"waves": "waves is not implemented for 'Double'"}


def test_references_are_exact_before_and_not_after_an_operation_without_float64():
    trace = recorded(with_a_function(lambda h: Waves.apply(h, 2.0)))
    exact = {
        (op.name, op.phase, op.module): trace.values[op.outputs[0]].exact for op in trace.operations
    }
    assert exact["addmm", "forward", "0"]
    assert not exact["waves", "forward", "1"]
    assert not exact["addmm", "forward", "2"]
    assert not exact["loss", "result", ""]


def with_waves_that_differ(what):
    """Return a step with a fault in the argument or after the result of an operation without
    float64.
    """
    if what == "argument":
        return with_a_function(lambda h: Waves.apply(h, 2.5 if under_b() else 2.0))
    return with_a_function(lambda h: Waves.apply(h, 2.0) * (1.5 if under_b() else 1.0))


@pytest.mark.parametrize("what", ["argument", "result"])
def test_audit_reports_a_fault_at_or_behind_an_operation_without_float64(what):
    report = audited(with_waves_that_differ(what))
    assert report.faulty
    assert report.comparison.differing_results


@pytest.mark.parametrize(("what", "operation"), [("argument", "waves"), ("result", "mul")])
def test_audit_places_a_fault_at_or_behind_an_operation_without_float64(what, operation):
    first = audited(with_waves_that_differ(what)).findings[0]
    assert (first.operation, first.phase, first.module) == (operation, "forward", "1")


# --- fake quantisation ----------------------------------------------------------------------------


def quantised(h):
    return torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127)


def quantised_by_channel(h):
    scales, zeros = torch.full((30,), 0.1), torch.zeros(30, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(h.float(), scales, zeros, 1, -128, 127).to(
        h.dtype
    )


@pytest.mark.parametrize("function", [quantised, quantised_by_channel])
@pytest.mark.parametrize("b", [B, TF32])
def test_audit_accepts_fake_quantization(function, b):
    """Earlier rounding errors may move a number to the next step of the grid."""
    assert_no_fault(audited(with_a_function(function), b=b))


def test_audit_finds_another_grid_of_fake_quantization():
    def other_grid(h):
        return torch.fake_quantize_per_tensor_affine(h, 0.2 if under_b() else 0.1, 0, -128, 127)

    report = audited(with_a_function(other_grid))
    assert report.faulty
    assert "fake_quantize" in report.findings[0].operation


# --- numbers that pass through NumPy --------------------------------------------------------------


def through_numpy(wrong=None):
    """Return a step with a scale that NumPy computes from activations, wrong on one side if
    required.
    """

    def step(setting):
        model = copy.deepcopy(MODEL).to(setting.device, setting.dtype)
        x = X.to(setting.dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(setting.autocast)):
            h = model[0](x)
            scale = np.tanh(h.detach().float().numpy()).mean(0)
            scale = scale * (wrong if wrong and under_b() else 1.0)
            loss = F.cross_entropy(model[1](h * torch.from_numpy(scale).to(h.dtype)), labels(8))
        loss.backward()
        return loss.detach()

    return step


MODEL = seeded(lambda: nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 3)))


@pytest.mark.parametrize("b", [B, "cpu:order=pairwise", TF32, AUTOCAST])
def test_audit_accepts_values_that_pass_through_numpy(b):
    assert_no_fault(audited(through_numpy(), b=b))


@pytest.mark.parametrize("b", [TF32, AUTOCAST])
def test_audit_first_line_says_that_values_enter_from_outside(b):
    assert OUTSIDE in first_line(audited(through_numpy(), b=b))


@pytest.mark.parametrize(
    "ends", [(B, "cpu"), ("cpu:threads=1,autocast=bfloat16", AUTOCAST), ("cpu", B)]
)
def test_audit_finds_values_of_numpy_that_are_five_percent_off(ends):
    report = audited(through_numpy(1.05), *ends)
    assert report.faulty, str(report)


# --- transforms of functions and other layouts ----------------------------------------------------


def by_samples(setting):
    """Compute the gradient of each sample with torch.func."""
    model, x = copy.deepcopy(MODEL).to(setting.dtype), X.to(setting.dtype)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(weights, x, label):
        return F.cross_entropy(functional_call(model, weights, (x[None],)), label[None])

    return vmap(grad(loss), (None, 0, 0))(weights, x, labels(8))


def by_second_derivatives(setting):
    x = X[0, :6].to(setting.dtype)
    return torch.func.hessian(lambda x: (x.sin() * x.flip(0)).square().sum())(x)


@pytest.mark.parametrize("step", [by_samples, by_second_derivatives])
@pytest.mark.parametrize("b", [B, TF32, BFLOAT16, "cpu:precision=float64"])
def test_audit_accepts_transforms_of_functions(step, b):
    assert_no_fault(audited(step, b=b))


EDGES = torch.tensor([[0, 1, 2, 3, 5, 7, 7], [1, 0, 3, 2, 6, 1, 4]])
ADJACENCY = torch.sparse_coo_tensor(EDGES, torch.linspace(0.1, 1, 7), (8, 8)).coalesce()
SPARSE = {
    "coo": lambda y: torch.sparse.mm(ADJACENCY.to(y.dtype), y),
    "csr": lambda y: ADJACENCY.to_sparse_csr().to(y.dtype) @ y,
    "made in the step": lambda y: torch.sparse.mm((y[:, :8] > 0).to(y.dtype).to_sparse(), y),
    "with a gradient": lambda y: torch.sparse.mm(y[:, :8].to_sparse(), y),
    "summed": lambda y: y * torch.sparse.sum(y[:, :8].to_sparse(), 1).to_dense()[:, None],
}


@pytest.mark.parametrize("name", SPARSE)
def test_audit_accepts_sparse_tensors(name):
    assert_no_fault(audited(with_a_function(SPARSE[name])))


@pytest.mark.parametrize("name", SPARSE)
def test_audit_accepts_sparse_tensors_of_rounded_numbers(name):
    assert_no_fault(audited(with_a_function(SPARSE[name]), b=TF32))


@pytest.mark.parametrize("b", [B, TF32, BFLOAT16])
def test_audit_accepts_sparse_gradients_of_an_embedding(b):
    def step(setting):
        words = nn.Embedding.from_pretrained(
            X.view(40, 4).to(setting.dtype), freeze=False, sparse=True
        )
        optimizer = torch.optim.SGD(words.parameters(), lr=0.1)
        words(torch.tensor([1, 3, 3, 8])).square().sum().backward()
        optimizer.step()

    assert_no_fault(audited(step, b=b))


@pytest.mark.xfail(
    strict=True, reason="what is done to the numbers of a sparse tensor has no float64 reference"
)
def test_audit_finds_a_wrong_sparse_product():
    wrong = Own(lambda y: torch.sparse.mm(ADJACENCY.to(y.dtype) * (1.5 if under_b() else 1.0), y))
    report = audited(gl.Step(seeded(lambda: nn.Sequential(nn.Linear(20, 30), wrong)), drawn(8, 20)))
    assert report.faulty


def test_comparison_does_not_take_a_float32_step_on_a_cpu_for_a_short_format():
    """Otherwise, values without a reference would be compared with the tolerance of bfloat16."""
    report = audited(with_a_function(torch.tanh), b="cpu:order=pairwise")
    assert not report.comparison.uses_short_format(0)
    assert "rounding alone explains" in first_line(report)
