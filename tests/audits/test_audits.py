import copy
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_steps import A, B, FaultyKernels, audited, drawn, faults, recorded, seeded, under_b
from torch import nn

import gpulab as gl
from gpulab.audits.audits import Audit
from gpulab.numerics.formats import round_to
from gpulab.user_code import find_function

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("two_threads")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 5))


def network_step():
    return gl.Step(network(), drawn(4, 3, 6, 6))


def tf32(operation, *args, **kwargs):
    """A product that rounds its factors, and not what is added to them."""
    added = 1 if operation._schema.name == "aten::addmm" else 0
    factors = [round_to(arg, "tf32") for arg in args[added : added + 2]]
    return operation(*args[:added], *factors, *args[added + 2 :], **kwargs)


# --- planted faults: kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("always", [False, True], ids=["under b", "under both"])
def test_a_product_with_tf32_factors_is_reduced_precision_and_the_flag_is_named(always):
    with FaultyKernels(addmm=tf32, mm=tf32, always=always):
        report = audited(network_step())
    assert (report.kind, report.faulty) == ("reduced precision", False)
    products = {("addmm", "forward", "3"), ("mm", "backward", "3")}
    assert {(f.operation, f.phase, f.module) for f in faults(report)} == products
    assert {f.setting for f in faults(report)} == {f"{A} and {B}" if always else B}
    assert all("rounded to tf32 by the kernel" in f.detail for f in faults(report))
    assert all('torch.backends.mkldnn.matmul.fp32_precision = "ieee"' in f.advice for f in faults(report))
    with FaultyKernels(convolution=tf32):
        (of_convolution,) = faults(audited(network_step()))
    assert (of_convolution.operation, of_convolution.module) == ("convolution", "0")
    assert "torch.backends.mkldnn.conv.fp32_precision" in of_convolution.advice


def slightly_wrong(operation, *args, **kwargs):
    out = operation(*args, **kwargs)
    return out * (1 + 1e-3 * drawn(*out.shape))


def restless(size=2.0**-23):
    """A kernel that gives other bits every time, each of them as right as the others."""
    number = itertools.count()

    def kernel(operation, *args, **kwargs):
        return operation(*args, **kwargs) * (1 + size * (next(number) % 3))

    return kernel


def scatter_step(setting):
    values = drawn(200, 4).to(setting.dtype).requires_grad_()
    index = torch.arange(200) % 7
    torch.zeros(7, 4, dtype=setting.dtype).index_add(0, index, values).square().sum().backward()


@pytest.mark.parametrize("always", [False, True], ids=["under b", "under both"])
def test_a_scatter_that_does_not_repeat_itself_is_nondeterminism(always):
    with FaultyKernels(index_add=restless(), always=always):
        report = audited(scatter_step)
    assert report.kind == "nondeterminism"
    assert not report.faulty
    assert {(f.operation, f.setting) for f in faults(report)} == {("index_add", f"{A} and {B}" if always else B)}
    assert "deterministic=on" in faults(report)[0].advice


def test_another_solution_that_hardly_repeats_itself_is_another_valid_answer():
    number = itertools.count()

    def another(operation, *args, **kwargs):
        solution, *rest = operation(*args, **kwargs)
        null = torch.tensor([[1.0], [-2.0], [1.0]])  # the matrix makes nothing of it
        return solution + null * (1 + 1e-7 * (next(number) % 3)), *rest

    def step(setting):
        matrix = torch.arange(1.0, 10.0).view(3, 3).to(setting.dtype)
        return torch.linalg.lstsq(matrix, matrix).solution

    with FaultyKernels(linalg_lstsq=another):
        report = audited(step)
    assert (report.kind, report.findings[0].operation) == ("another valid answer", "linalg_lstsq"), str(report)
    assert "nondeterminism" in {finding.kind for finding in report.findings}


@pytest.mark.parametrize("nothing_under", [A, B])
def test_a_kernel_that_returns_nothing_but_zeros_is_found_whichever_side_it_is_on(nothing_under):
    threads = 2 if nothing_under == A else 1
    with torch.library._scoped_library("gpulab_tests", "FRAGMENT") as lib:
        lib.define("back(Tensor g) -> Tensor")
        lib.impl("back", lambda g: g * (torch.get_num_threads() != threads), "CompositeExplicitAutograd")
        report = audited(lambda setting: torch.ops.gpulab_tests.back(drawn(6, 5).to(setting.dtype) * 2).square().sum())
    assert report.kind == "mismatch"
    assert "back" in report.findings[0].operation


# --- planted faults: the step's own code --------------------------------------------------------------------


class Own(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def with_a_function(function):
    """A step of a network with the function between two layers."""
    return gl.Step(seeded(lambda: nn.Sequential(nn.Linear(20, 30), Own(function), nn.Linear(30, 5))), drawn(8, 20))


SQUARE = drawn(30, 30)


def in_short(h):
    return (h.bfloat16() @ SQUARE.bfloat16()).float() if h.dtype == torch.float32 else h @ SQUARE.to(h.dtype)


def test_bfloat16_in_one_layer_is_reduced_precision_there():
    report = audited(with_a_function(in_short))
    assert report.kind == "reduced precision"
    there = [f for f in faults(report) if f.module == "1"]
    assert {f.phase for f in there} == {"forward", "backward"}
    assert all(f.detail == "computed in bfloat16" and "autocast" in f.advice for f in there)
    elsewhere = [f.detail for f in faults(report) if f.module != "1"]
    assert elsewhere
    assert all("were rounded to bfloat16 before" in detail for detail in elsewhere)


def attended(h, causal):
    return F.scaled_dot_product_attention(*[h[None, None]] * 3, is_causal=causal)[0, 0]


GELU, ATTENTION = ("none", "tanh"), "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("function", "operation", "name", "here", "there"),
    [
        (lambda h: F.gelu(F.dropout(h), approximate=GELU[under_b()]), "gelu", "approximate", "'tanh'", "'none'"),
        (lambda h: F.layer_norm(h, (30,), eps=[1e-5, 1e-6][under_b()]), "native_layer_norm", "eps", 1e-06, 1e-05),
        (lambda h: F.dropout(h, 0.5 if under_b() else 0.4), "bernoulli", "p", 0.5, 0.6),
        (lambda h: attended(h, under_b()), ATTENTION, "is_causal", True, False),
    ],
)
def test_an_argument_that_depends_on_the_setting_is_a_mismatch_though_each_side_is_right(
    function, operation, name, here, there
):
    report = audited(with_a_function(function))
    assert report.kind == "mismatch"
    assert all(f.ratio <= 1 or math.isnan(f.ratio) for f in report.findings), "of what it was asked to compute"
    first = report.findings[0]
    assert (first.operation, first.phase, first.setting) == (operation, "forward", B)
    assert first.detail == f"called with {name}={here}; under {A} with {name}={there}"
    assert "under_b()" in first.line or "return" in first.line
    assert "other arguments under cpu:threads=1" in first.advice


# --- nothing wrong ----------------------------------------------------------------------------------------


def new_memory(setting):
    """Whatever happens to lie there is nobody's data. Mixtures of experts sort their words so."""
    x = drawn(5, 3).to(setting.dtype).requires_grad_()
    for _ in range(3):
        order = torch.arange(5).flip(0)
        back = torch.empty_like(order)
        back[order] = torch.arange(5)
        x = x[back] * 1.5
    x.sum().backward()


def difference_of_roundings(setting):
    """A row alone and in a batch: what a subtraction leaves of them is exact, and nothing but their roundings."""
    x, w = (drawn(*shape).to(setting.device, setting.dtype) for shape in ((32, 256), (256, 64)))
    return ((x @ w)[:1] - x[:1] @ w).abs().max()


def normalised(normalisation):
    """Its mean makes a common offset of the roundings of a convolution's factors."""
    layers = [nn.Conv2d(1, 16, 3, padding=1), normalisation, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10)]
    return gl.Step(seeded(lambda: nn.Sequential(*layers)), (drawn(64, 1, 8, 8).abs(), labels(64)), F.cross_entropy)


def labels(count):
    return torch.arange(count) % 10


LINEAR, LSTM = seeded(lambda: nn.Linear(4, 2)), seeded(lambda: nn.LSTM(8, 6, 2))
CONVOLUTION = gl.Step(seeded(lambda: nn.Conv2d(3, 8, 3)), drawn(4, 3, 12, 12))
TF32, SHORT = "cpu:emulate=tf32", "cpu:precision=bfloat16"
EXPLAINED = {
    "the same dimension": (with_a_function(lambda h: F.softmax(h, -1 if under_b() else 1)), B),
    "a number made from data": (with_a_function(lambda h: h * h.sum().item()), B),
    "a memory format": (
        with_a_function(lambda h: h.clone(memory_format=[torch.preserve_format, torch.contiguous_format][under_b()])),
        B,
    ),
    "a shape": (with_a_function(lambda h: h.view(*[(2, 120), (4, 60)][under_b()]).tanh().view(8, 30)), B),
    "a number format's epsilon": (with_a_function(lambda h: h.clamp(min=torch.finfo(h.dtype).eps)), SHORT),
    "new memory": (new_memory, B),
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


class Rotary(nn.Module):
    """Angles from a table that bfloat16 holds in three digits, times places up to 500."""

    def __init__(self, places=torch.float32):
        super().__init__()
        self.places, self.layer = places, nn.Linear(64, 64)
        self.register_buffer("frequencies", 10000 ** (-torch.arange(32) / 32))

    def forward(self, x):
        angles = torch.arange(500.0, dtype=self.places)[:, None] * self.frequencies.float()
        return (self.layer(x).float() * torch.cat([angles.cos(), angles.sin()], -1)).square()


def test_buffer_that_the_setting_rounded_is_reduced_precision():
    report = audited(gl.Step(seeded(Rotary), drawn(2, 500, 64)), A, SHORT)
    first = report.findings[0]
    assert (first.kind, first.operation, first.module) == ("reduced precision", "mul", "Rotary")
    assert "was given data or weights" in first.detail
    assert first.share > 0.9


def test_places_that_are_counted_in_bfloat16_are_reduced_precision():
    first = audited(gl.Step(seeded(lambda: Rotary(places=None)), drawn(2, 500, 64)), A, SHORT).findings[0]
    assert (first.kind, first.operation, first.detail) == ("reduced precision", "arange", "computed in bfloat16")
    assert first.share > 0.9
    assert "whole numbers up to 256" in first.advice


@pytest.mark.parametrize("name", EXPLAINED)
def test_what_is_right_is_explained_by_number_formats_and_rounding_alone(name):
    step, b = EXPLAINED[name]
    report = audited(step, A, b)
    assert report.kind == ("reduced precision" if b in (TF32, SHORT) else "rounding"), str(report)
    assert "mismatch" not in {f.kind for f in report.findings}
    assert not report.table.ratio_a.max() > 1
    assert b == TF32 or not report.table.ratio_b.max() > 1


def test_html_shows_the_picture_and_the_findings_and_escapes_what_others_named(tmp_path):
    net = nn.Sequential()
    net.add_module("<script>alert(1)</script>", nn.Linear(4, 4))
    with FaultyKernels(addmm=slightly_wrong):
        report = audited(gl.Step(net, drawn(3, 4)))
    report.save(tmp_path / "deep" / "report.html")
    page = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    for text in ("&lt;script&gt;", "<td>mismatch</td>", report.findings[0].detail, "data:image/png;base64,"):
        assert text in page
    assert "<script>" not in page
    assert "Audit: cpu against cpu:threads=1" in page


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
@pytest.mark.parametrize("setting", ["cuda:tf32=off", "cuda:tf32=on"])
@pytest.mark.parametrize("name", ["resnet18", "lstm", "transformer"])
def test_this_gpu_and_its_host_differ_by_nothing_unexplained(name, setting):
    report = audited(find_function(f"{ROOT}/benchmarks/networks.py:{name}", "step"), "cpu", setting)
    assert not report.faulty, str(report)
    assert {op.phase for op in report.b.operations} == {"forward", "backward", "result"}


# --- traces and arguments -------------------------------------------------------------------------------------


def test_two_traces_from_files_say_what_the_audit_of_the_step_says(tmp_path):
    with FaultyKernels(relu=slightly_wrong):
        here = audited(network_step())
        files = [gl.record(network_step(), s, tmp_path / f"{n}.trace", progress=False) for n, s in (("a", A), ("b", B))]
    there = gl.audit(tmp_path / "a.trace", str(tmp_path / "b.trace"))

    def told(report):
        return [(f.kind, f.operation, f.module, f.setting, f.ratio, f.detail) for f in report.findings]

    assert told(there) == told(here)
    assert str(gl.audit(*files)) == str(there)
    assert isinstance(there, Audit)


def test_traces_of_different_steps_data_weights_or_functions_are_refused():
    trace, other = recorded(network_step()), network()
    with torch.no_grad():
        other[3].weight[0, 0] += 0.1
    for step, words in [
        (gl.Step(nn.LSTM(4, 4), drawn(3, 4)), "different steps"),
        (gl.Step(network(), drawn(4, 3, 6, 6, seed=1)), "different data or weights"),
        (gl.Step(network(), drawn(5, 3, 6, 6)), "different data"),
        (gl.Step(other, drawn(4, 3, 6, 6)), "different data or weights"),
    ]:
        with pytest.raises(gl.DataError, match=words):
            gl.audit(trace, recorded(step))
    both = [recorded(with_a_function(lambda h, how=how: F.gelu(h, approximate=how))) for how in ("none", "tanh")]
    with pytest.raises(gl.DataError, match=r"of different steps: gelu in 1 has values"):
        gl.audit(*both)


def test_arguments_that_make_no_sense_are_refused():
    trace = recorded(scatter_step)
    for arguments in [(scatter_step, "cpu"), (scatter_step, "cpu", trace), (trace, trace, "cpu"), (3, "cpu", B)]:
        with pytest.raises(gl.UsageError):
            gl.audit(*arguments, progress=False)
    with pytest.raises(gl.GpulabError, match="cannot run here"):
        gl.audit(scatter_step, "cpu", "cuda:77")


# --- what explains most comes first -----------------------------------------------------------------------------


def rounded_twice(setting):
    """Two products in TF32, of which the second decides the loss; and a loss that is right."""
    x, y = drawn(40, 40).to(setting.dtype), (1e-3 * drawn(40, 40, seed=1)).to(setting.dtype).requires_grad_()
    small = x @ y
    large = x @ (1000 * x)
    loss = (small.sum() + large.sum()).square()
    loss.backward()
    return loss


def test_the_line_that_explains_the_result_comes_first():
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
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Own(middle), nn.Conv2d(8, 8, 3)]
    net = seeded(lambda: nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10)))
    return gl.Step(net, (drawn(8, 3, 12, 12), labels(8)), F.cross_entropy)


def ten_per_mille(h):
    return 1.01 * h if under_b() else h


def test_what_does_not_repeat_in_its_last_bits_comes_after_tf32_with_its_size_and_first_where_it_is_all():
    step = small_cnn(noisy)
    report = audited(step, A, "cpu:emulate=tf32")
    assert report.kind == "reduced precision"
    (restless_one,) = [finding for finding in faults(report) if finding.kind == "nondeterminism"]
    assert 1e-8 < restless_one.size < 1e-6
    assert f"{restless_one.size:.1e}"[-3:] in restless_one.detail
    assert restless_one.share < 0.01
    assert audited(step).kind == "nondeterminism"


@pytest.mark.parametrize("middle", [ten_per_mille, lambda h: ten_per_mille(noisy(h))], ids=["steady", "restless"])
def test_a_fault_beside_tf32_comes_first(middle):
    report = audited(small_cnn(middle), A, f"{B},emulate=tf32")
    assert (report.kind, report.findings[0].operation) == ("mismatch", "mul"), str(report)
    assert report.faulty


def test_wrong_memory_comes_first_beside_tf32_for_its_effect_has_no_bound():
    def step(setting):
        x, weight = drawn(8, 20).to(setting.dtype), drawn(20, 10, seed=1).to(setting.dtype).requires_grad_()
        weights = np.ones((8, 10), "float64" if setting.dtype == torch.float64 else "float32")
        loss = ((x @ weight) * torch.from_numpy(weights)).sum()
        weights[:] = 0
        loss.backward()

    report = audited(step, A, f"{B},emulate=tf32")
    first = report.findings[0]
    assert (first.kind, first.bounded) == ("overwritten", False)
    assert "copy" in first.advice
    assert "has no bound" in str(first)
    assert "reduced precision" in {finding.kind for finding in report.findings}


def test_weights_that_are_moved_inside_of_the_step_are_no_mismatch():
    net = seeded(lambda: nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 3)))

    def step(setting):
        model = copy.deepcopy(net) if setting.precision == "float64" else net
        model.to(setting.dtype)
        model.zero_grad()
        model(drawn(8, 50).to(setting.dtype)).square().mean().backward()

    assert "mismatch" not in {finding.kind for finding in audited(step, A, "cpu:precision=float64").findings}
