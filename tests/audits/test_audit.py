import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpulab as gl
from gpulab.models import example_steps
from tests.audits._faulty_kernels import WRONG, Kernels, short_products, under_b
from tests.audits._helpers import (
    A,
    B,
    Own,
    audited,
    convolutions,
    drawn,
    faults,
    labels,
    recorded,
    seeded,
    with_a_function,
)

pytestmark = pytest.mark.usefixtures("two_threads")


def network_step(batch=None):
    return gl.Step(seeded(convolutions), drawn(4, 3, 8, 8) if batch is None else batch)


# --- planted faults: kernels ----------------------------------------------------------------------


@pytest.mark.parametrize("always", [False, True], ids=["under b", "under both"])
def test_audit_names_products_in_tf32_and_the_flag(always):
    with Kernels("addmm", short_products, always), Kernels("mm", short_products, always):
        report = audited(network_step())
    assert (report.kind, report.faulty) == ("reduced precision", False)
    products = {("addmm", "forward", "7"), ("mm", "backward", "7")}
    assert {(f.operation, f.phase, f.module) for f in faults(report)} == products
    assert {f.setting for f in faults(report)} == {f"{A} and {B}" if always else B}
    assert all("the kernel rounds its factors to tf32" in f.detail for f in faults(report))
    assert all(
        'torch.backends.mkldnn.matmul.fp32_precision = "ieee"' in f.advice for f in faults(report)
    )


def test_audit_names_convolutions_in_tf32_and_the_flag():
    with Kernels("convolution", short_products, always=False):
        found = faults(audited(network_step()))
    assert {(f.operation, f.module) for f in found} == {("convolution", "0"), ("convolution", "4")}
    assert all("torch.backends.mkldnn.conv.fp32_precision" in f.advice for f in found)


# --- planted faults: the step's own code ----------------------------------------------------------


SQUARE = drawn(30, 30)


def in_short(h):
    return (
        (h.bfloat16() @ SQUARE.bfloat16()).float()
        if h.dtype == torch.float32
        else h @ SQUARE.to(h.dtype)
    )


def test_audit_calls_bfloat16_in_one_layer_reduced_precision_of_that_layer():
    report = audited(with_a_function(in_short))
    assert report.kind == "reduced precision"
    there = [f for f in faults(report) if f.module == "1"]
    assert {f.phase for f in there} == {"forward", "backward"}
    assert all(f.detail == "computed in bfloat16" and "autocast" in f.advice for f in there)
    elsewhere = [f.detail for f in faults(report) if f.module != "1"]
    assert elsewhere
    assert all("had already been rounded to bfloat16" in detail for detail in elsewhere)


GELU = ("none", "tanh")


@pytest.mark.parametrize(
    ("function", "operation", "name", "here", "there"),
    [
        (
            lambda h: F.gelu(F.dropout(h), approximate=GELU[under_b()]),
            "gelu",
            "approximate",
            "'tanh'",
            "'none'",
        ),
        (
            lambda h: F.layer_norm(h, (30,), eps=[1e-5, 1e-6][under_b()]),
            "native_layer_norm",
            "eps",
            1e-06,
            1e-05,
        ),
        (lambda h: F.dropout(h, 0.5 if under_b() else 0.4), "bernoulli", "p", 0.5, 0.6),
    ],
)
def test_audit_names_an_argument_that_depends_on_the_setting(
    function, operation, name, here, there
):
    report = audited(with_a_function(function))
    assert report.kind == "mismatch"
    assert all(f.ratio <= 1 or math.isnan(f.ratio) for f in report.findings), (
        "the operation is accurate for the arguments that it received"
    )
    first = report.findings[0]
    assert (first.operation, first.phase, first.setting) == (operation, "forward", B)
    assert first.detail.startswith(
        f"called with {name}={here}; under {A} with {name}={there}; in float64, "
    )
    assert "under_b()" in first.line or "return" in first.line
    assert "different arguments under cpu:threads=1" in first.advice


# --- nothing wrong --------------------------------------------------------------------------------


def difference_of_roundings(setting):
    """Subtract a row computed alone from the same row of a batch.

    The subtraction is exact, and its result consists of rounding errors.
    """
    x, w = (drawn(*shape).to(setting.device, setting.dtype) for shape in ((32, 256), (256, 64)))
    return ((x @ w)[:1] - x[:1] @ w).abs().max()


def normalised(normalisation):
    """A step in which the mean turns rounding errors of a convolution's factors into a common
    offset.
    """
    layers = [
        nn.Conv2d(1, 16, 3, padding=1),
        normalisation,
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    ]
    return gl.Step(
        seeded(lambda: nn.Sequential(*layers)),
        (drawn(64, 1, 8, 8).abs(), labels(64, 10)),
        F.cross_entropy,
    )


LSTM = seeded(lambda: nn.LSTM(8, 6, 2))
CONVOLUTION = gl.Step(seeded(lambda: nn.Conv2d(3, 8, 3)), drawn(4, 3, 12, 12))
TF32, SHORT = "cpu:emulate=tf32", "cpu:precision=bfloat16"
EXPLAINED = {
    "the same dimension": (with_a_function(lambda h: F.softmax(h, -1 if under_b() else 1)), B),
    "a number made from data": (with_a_function(lambda h: h * h.sum().item()), B),
    "a shape": (
        with_a_function(lambda h: h.view(*[(2, 120), (4, 60)][under_b()]).tanh().view(8, 30)),
        B,
    ),
    "a number format's epsilon": (
        with_a_function(lambda h: h.clamp(min=torch.finfo(h.dtype).eps)),
        SHORT,
    ),
    "another order of sums": (CONVOLUTION, "cpu:order=pairwise"),
    "a difference of roundings": (difference_of_roundings, "cpu:order=pairwise"),
    **{
        f"{name} under {b}": (step, b)
        for b in (B, TF32, SHORT)
        for name, step in {
            "an LSTM": gl.Step(LSTM, drawn(3, 4, 8)),
            "batch normalisation": normalised(nn.BatchNorm2d(16)),
            "group normalisation": normalised(nn.GroupNorm(4, 16)),
        }.items()
    },
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_audit_explains_right_steps_by_formats_and_rounding_alone(name):
    step, b = EXPLAINED[name]
    report = audited(step, A, b)
    assert report.kind == ("reduced precision" if b in (TF32, SHORT) else "rounding"), str(report)
    assert "mismatch" not in {f.kind for f in report.findings}
    assert not report.table.ratio_a.max() > 1
    assert b == TF32 or not report.table.ratio_b.max() > 1


def test_audit_html_shows_picture_and_findings_and_escapes_names(tmp_path):
    net = nn.Sequential()
    net.add_module("<script>alert(1)</script>", nn.Linear(4, 4))
    with Kernels("addmm", WRONG["a thousandth"], always=False):
        report = audited(gl.Step(net, drawn(3, 4)))
    report.save(tmp_path / "deep" / "report.html")
    page = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    for text in (
        "&lt;script&gt;",
        ">mismatch</span>",
        report.findings[0].detail[1:],
        "data:image/png;base64,",
    ):
        assert text in page
    assert "<script>" not in page


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
@pytest.mark.parametrize("setting", ["cuda:tf32=off", "cuda:tf32=on"])
@pytest.mark.parametrize("name", ["resnet18", "lstm", "transformer"])
def test_audit_of_this_gpu_and_its_host_is_not_faulty(name, setting):
    report = audited(getattr(example_steps, name), "cpu", setting)
    assert not report.faulty, str(report)
    assert {op.phase for op in report.b.operations} == {"forward", "backward", "result"}


# --- traces and arguments -------------------------------------------------------------------------


def heavier():
    model = convolutions()
    model[7].weight.data[0, 0] += 0.1
    return model


OTHERS = {
    "another network": gl.Step(nn.LSTM(4, 4), drawn(3, 4)),
    "another batch": network_step(drawn(4, 3, 8, 8, seed=1)),
    "a batch of another size": network_step(drawn(5, 3, 8, 8)),
    "one weight": gl.Step(seeded(heavier), drawn(4, 3, 8, 8)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_audit_of_traces_with_other_data_or_weights_says_so(what):
    report = gl.audit(recorded(network_step()), recorded(OTHERS[what]))
    assert (report.kind, report.faulty) == ("other data", True), report
    first = report.findings[0]
    module = {"another batch": "0", "a batch of another size": "0", "one weight": "7"}.get(
        what, first.module
    )
    assert first.module == module, report


@pytest.mark.parametrize(
    "arguments", [(network_step, "cpu"), (3, "cpu", B), ("a.trace", "b.trace", "cpu")]
)
def test_audit_refuses_arguments_that_make_no_sense(arguments):
    with pytest.raises(gl.UsageError):
        gl.audit(*arguments, progress=False)


def test_audit_refuses_a_setting_that_cannot_run_here():
    with pytest.raises(gl.GpulabError, match="cannot run here"):
        gl.audit(network_step(), "cpu", "cuda:77")


# --- what explains most comes first ---------------------------------------------------------------


def rounded_twice(setting):
    """A step with two products in TF32, of which the second determines the loss."""
    x, y = (
        drawn(40, 40).to(setting.dtype),
        (1e-3 * drawn(40, 40, seed=1)).to(setting.dtype).requires_grad_(),
    )
    small = x @ y
    large = x @ (1000 * x)
    loss = (small.sum() + large.sum()).square()
    loss.backward()
    return loss


def test_audit_tells_the_line_that_explains_the_result_first():
    report = audited(rounded_twice, A, "cpu:emulate=tf32")
    assert "large = " in report.findings[0].line
    of_small = [finding.share for finding in faults(report) if "small = " in finding.line]
    assert of_small
    assert max(of_small) < 0.05 < 0.5 < report.findings[0].share


@torch.library.custom_op("gpulab_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    noise = np.random.default_rng().standard_normal(x.shape)
    return (x * torch.from_numpy(1 + 1e-7 * noise)).to(x.dtype)


noisy.register_autograd(lambda ctx, gradient: gradient)  # noqa: ARG005


def small_cnn(middle):
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Own(middle),
        nn.Conv2d(8, 8, 3),
    ]
    net = seeded(
        lambda: nn.Sequential(
            *layers, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10)
        )
    )
    return gl.Step(net, (drawn(8, 3, 12, 12), labels(8, 10)), F.cross_entropy)


def ten_per_mille(h):
    return 1.01 * h if under_b() else h


def test_audit_tells_what_hardly_repeats_itself_after_tf32():
    report = audited(small_cnn(noisy), A, "cpu:emulate=tf32")
    assert report.kind == "reduced precision"
    (restless,) = [finding for finding in faults(report) if finding.kind == "nondeterminism"]
    assert 1e-8 < restless.size < 1e-6
    assert re.search(
        r"gave different bits when it was repeated, [1-3]\.\de-07 apart \(relative\)",
        restless.detail,
    )
    assert restless.share < 0.01


def test_audit_names_an_operation_that_does_not_repeat_itself():
    report = audited(small_cnn(noisy))
    assert (report.kind, report.faulty) == ("nondeterminism", False)
    assert {(f.operation, f.setting) for f in faults(report)} == {("noisy", f"{A} and {B}")}
    assert "deterministic=on" in faults(report)[0].advice


@pytest.mark.parametrize(
    "middle", [ten_per_mille, lambda h: ten_per_mille(noisy(h))], ids=["steady", "restless"]
)
def test_audit_tells_a_fault_before_tf32(middle):
    report = audited(small_cnn(middle), A, f"{B},emulate=tf32")
    assert (report.kind, report.findings[0].operation) == ("mismatch", "mul"), str(report)
    assert report.faulty


def test_audit_tells_overwritten_memory_before_tf32():
    def step(setting):
        x, weight = (
            drawn(8, 20).to(setting.dtype),
            drawn(20, 10, seed=1).to(setting.dtype).requires_grad_(),
        )
        weights = np.ones((8, 10), "float64" if setting.dtype == torch.float64 else "float32")
        loss = ((x @ weight) * torch.from_numpy(weights)).sum()
        weights[:] = 0
        loss.backward()

    report = audited(step, A, f"{B},emulate=tf32")
    assert (report.kind, report.findings[0].has_bound) == ("overwritten", False)
    assert "reduced precision" in {finding.kind for finding in report.findings}
