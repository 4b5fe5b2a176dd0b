"""Following gpulab's advice to the letter removes the finding that the advice was given for.

Each case is a program with an argument, `cured`. If it is false, the finding is reported with its
advice; if it is true, the program does what the advice says. Remedies that need a GPU (`tf32=off`,
waiting for a copy) are not tested in this file.
"""

import copy
import random
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import gpulab as gl

PLAIN, ONE_THREAD = "cpu:threads=2", "cpu:threads=1"
BFLOAT16, AUTOCAST, TF32 = "cpu:precision=bfloat16", "cpu:autocast=bfloat16", "cpu:emulate=tf32"
REQUESTED = "requests it"
DOUBLE = torch.float64


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, LABELS = drawn(6, 8), torch.arange(6) % 3


def weighted(make, seed=0):
    """Make a network with weights that are drawn from a seed."""
    torch.manual_seed(seed)
    return make()


class TwoLayers(nn.Module):
    """Two layers; the second is called by a given function."""

    def __init__(self, call):
        super().__init__()
        self.first, self.last, self.call = nn.Linear(8, 16), nn.Linear(16, 3), call

    def forward(self, x):
        return self.call(self.last, torch.tanh(self.first(x)))


def plainly(layer, h):
    return layer(h)


def step_of(model, loss=F.cross_entropy, labels=LABELS):
    return gl.Step(model, (X, labels), loss)


def two_layers(call, loss=F.cross_entropy):
    return step_of(weighted(lambda: TwoLayers(call)), loss)


# --- the audit ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cure:
    """A program with a fault, and the same program after the advice was followed.

    Attributes:
        audit: A function that audits the program; its argument says whether the advice was
            followed.
        kind: The kind of the finding.
        advice: A regular expression that matches its advice.
        module: The module that the advice is about, if other modules have findings of their own.
    """

    audit: Callable
    kind: str
    advice: str
    module: str | None = None

    def findings(self, cured):
        report = self.audit(cured)
        found = [
            f for f in report.findings if f.kind == self.kind and re.search(self.advice, f.advice)
        ]
        return report, [f for f in found if self.module in (None, f.module)]


CURES = {}


def cure(kind, advice, module=None, name=""):
    def note(function):
        CURES[name or function.__name__] = Cure(function, kind, advice, module)
        return function

    return note


def audited(*sides, **options):
    return gl.audit(*sides, **options, progress=False)


@cure(
    "reduced precision",
    r"torch.autocast\('cpu', enabled=False\) around this line, with .float\(\)",
    "last",
)
def a_layer_under_autocast(cured):
    def in_float32(layer, h):
        with torch.autocast("cpu", enabled=False):
            return layer(h.float())

    return audited(two_layers(in_float32 if cured else plainly), PLAIN, AUTOCAST)


@cure("reduced precision", "`backward` outside autocast", "last")
def a_layer_under_autocast_in_a_function(cured):
    def in_float32(layer, h):
        with torch.autocast("cpu", enabled=False):
            return layer(h.float())

    def step():
        loss = F.cross_entropy(
            weighted(lambda: TwoLayers(in_float32 if cured else plainly))(X), LABELS
        )
        with torch.autocast("cpu", enabled=False) if cured else nullcontext():
            loss.backward()
        return loss.detach()

    return audited(step, PLAIN, AUTOCAST)


@cure(
    "reduced precision",
    rf"bfloat16 {REQUESTED}; if it matters, .float\(\) on all inputs of this line",
    "last",
)
def a_layer_in_bfloat16(cured):
    def in_float32(layer, h):
        return F.linear(h.float(), layer.weight.float(), layer.bias.float())

    return audited(two_layers(in_float32 if cured else plainly), PLAIN, BFLOAT16)


@cure(
    "reduced precision",
    rf"bfloat16 {REQUESTED}; if it matters, .float\(\) on all inputs of the loss",
)
def a_loss_in_bfloat16(cured):
    def loss(output, labels):
        return F.cross_entropy(output.float(), labels)

    return audited(two_layers(plainly, loss if cured else F.cross_entropy), PLAIN, BFLOAT16)


@cure(
    "reduced precision",
    "bfloat16 requests it; autocast=bfloat16 keeps parameters, buffers and the batch in float32",
)
def parameters_in_bfloat16(cured):
    return audited(two_layers(plainly), PLAIN, AUTOCAST if cured else BFLOAT16)


@cure("reduced precision", r"gpulab.float32_products\(\) around this line", "last")
def an_emulated_product(cured):
    def in_float32(layer, h):
        with gl.float32_products():
            return layer(h)

    return audited(two_layers(in_float32 if cured else plainly), PLAIN, TF32)


@cure(
    "reduced precision",
    r"gpulab.float32_products\(\) around `backward`, in a function step",
)
def emulated_products_of_the_backward_pass(cured):
    def step():
        loss = F.cross_entropy(weighted(lambda: TwoLayers(plainly))(X), LABELS)
        with gl.float32_products() if cured else nullcontext():
            loss.backward()
        return loss.detach()

    return audited(step, PLAIN, TF32)


@cure("reduced precision", r"look for autocast or .to\(torch.bfloat16\) if float32 was meant")
def a_cast_of_the_program(cured):
    def call(layer, h):
        return layer(h if cured else h.to(torch.bfloat16).to(h.dtype))

    return audited(two_layers(call), PLAIN, ONE_THREAD)


@cure(
    "reduced precision",
    "look for what rounds to bfloat16 before this line: .* or a cast to bfloat16 and back",
)
def factors_that_were_rounded_before(cured):
    return a_cast_of_the_program(cured)


@cure("reduced precision", "look for autocast")
def autocast_of_the_program(cured):
    def call(layer, h):
        with torch.autocast("cpu", torch.bfloat16, enabled=not cured):
            return layer(h)

    return audited(two_layers(call), PLAIN, ONE_THREAD)


def tiny(scale=1.0, keep=False):
    def step(setting):
        if keep:
            torch.set_flush_denormal(False)
        x = torch.linspace(1e-30, 2e-30, 8, dtype=setting.dtype)
        return (scale * x * 1e-9).sum()

    return step


@cure("reduced precision", "denormals=on, or")
def subnormals_by_the_setting(cured):
    return audited(tiny(), ONE_THREAD, "cpu:denormals=on" if cured else "cpu:denormals=off")


@cure("reduced precision", r"torch.set_flush_denormal\(False\), keeps them")
def subnormals_by_the_program(cured):
    return audited(tiny(keep=cured), ONE_THREAD, "cpu:denormals=off")


@cure("reduced precision", "or scale the numbers up before this line")
def subnormals_that_are_scaled_up(cured):
    return audited(tiny(1e20 if cured else 1.0), ONE_THREAD, "cpu:denormals=off")


def next_to_one(rate, updates=1):
    model = nn.Linear(8, 3)
    for parameter in model.parameters():
        nn.init.ones_(parameter)

    def step(setting):
        net = copy.deepcopy(model).to(setting.dtype)
        optimizer = torch.optim.SGD(net.parameters(), rate)
        for _ in range(updates):
            loss = F.cross_entropy(net(X.to(setting.dtype)), LABELS)
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@cure(
    "reduced precision",
    "keep the weights in float32 and cast them for the forward pass, as autocast does",
)
def updates_that_bfloat16_loses(cured):
    return audited(next_to_one(1e-3), PLAIN, AUTOCAST if cured else BFLOAT16)


@cure("reduced precision", "keep the weights in float64, as precision=float64 does")
def updates_that_float32_loses(cured):
    precision = ",precision=float64" if cured else ""
    return audited(next_to_one(1e-9), PLAIN + precision, ONE_THREAD + precision)


@cure("reduced precision", "collect updates and apply them together")
def updates_that_float32_loses_one_by_one(cured):
    return audited(next_to_one(2e-8, 60 if cured else 1), PLAIN, ONE_THREAD)


@cure(
    "reduced precision",
    "compute it in torch.float32 if it matters: bfloat16 represents all integers only up to 256",
)
def places_that_bfloat16_cannot_count(cured):
    def call(layer, h):
        places = torch.arange(300, 300 + len(h), dtype=torch.float32 if cured else h.dtype)
        return layer(h) * places.sin()[:, None].to(h.dtype)

    return audited(two_layers(call), PLAIN, BFLOAT16)


def with_epsilon(use):
    def of(cured):
        def call(layer, h):
            return use(layer(h), torch.finfo(torch.float32 if cured else h.dtype).eps)

        return audited(two_layers(call), PLAIN, BFLOAT16)

    return of


EPSILONS = {
    "added": lambda h, eps: h / (h.norm(dim=-1, keepdim=True) + eps),
    "a limit": lambda h, eps: h.abs().clamp_min(eps).log(),
    "of a normalisation": lambda h, eps: F.layer_norm(h, (3,), eps=eps),
}
for use in EPSILONS:
    under_both = "take the number from torch.float32 under both settings"
    cure("reduced precision", under_both, name=f"epsilon of a format, {use}")(
        with_epsilon(EPSILONS[use])
    )


class Recomputed(nn.Module):
    """Dropout in a part that the backward pass recomputes, unless `preserve` is None."""

    def __init__(self, preserve):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)
        self.preserve = preserve

    def part(self, x):
        return self.drop(torch.relu(self.first(x)))

    def forward(self, x):
        if self.preserve is None:
            return self.last(self.part(x))
        return self.last(
            checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=self.preserve)
        )


@cure("different random numbers", "preserve_rng_state=True")
def dropout_in_a_recomputed_part(cured):
    steps = [
        step_of(weighted(lambda preserve=preserve: Recomputed(preserve)))
        for preserve in (None, cured)
    ]
    return audited(*steps, setting="cpu")


IN_ORDER = (
    "draw from a torch.Generator that the step seeds, in the same order and with the same shapes"
)
CONTINUES = torch.Generator().manual_seed(0)


@cure("different random numbers", IN_ORDER)
def a_generator_that_continues(cured):
    def step(setting):
        generator = torch.Generator().manual_seed(0) if cured else CONTINUES
        return torch.randn(6, 8, generator=generator).to(setting.dtype).tanh().sum()

    return audited(step, PLAIN, ONE_THREAD)


def product_of_draws(first):
    """Draw data and weights from one generator, beginning with the one that `first` names."""

    def step():
        generator, made = torch.Generator().manual_seed(0), {}
        shapes = {"data": (6, 8), "weights": (8, 3)}
        for name in sorted(shapes, key=lambda name: name != first):
            made[name] = torch.randn(shapes[name], generator=generator)
        return (made["data"] @ made["weights"]).tanh().sum()

    return step


@cure("different random numbers", IN_ORDER)
def draws_in_another_order(cured):
    return audited(
        product_of_draws("data"), product_of_draws("data" if cured else "weights"), setting="cpu"
    )


SEED_IT = "seed it inside the step, or draw once and reuse the result"
OWN, OF_PYTHON = np.random.default_rng(), random.Random()


@cure("nondeterminism", SEED_IT)
def data_from_an_unseeded_generator_of_numpy(cured):
    def step(setting):
        generator = np.random.default_rng(0) if cured else OWN
        return torch.from_numpy(generator.standard_normal((6, 8))).to(setting.dtype).tanh().sum()

    return audited(step, PLAIN, ONE_THREAD)


@cure("nondeterminism", SEED_IT)
def a_factor_from_an_unseeded_generator_of_python(cured):
    def step(setting):
        generator = random.Random(0) if cured else OF_PYTHON
        return (generator.random() * X.to(setting.dtype)).tanh().sum()

    return audited(step, PLAIN, ONE_THREAD)


@cure("nondeterminism", SEED_IT)
def a_row_from_an_unseeded_generator_of_python(cured):
    def step(setting):
        generator = random.Random(0) if cured else OF_PYTHON
        return X.repeat(50, 1).cumsum(0)[generator.randrange(300)].to(setting.dtype).tanh().sum()

    return audited(step, PLAIN, ONE_THREAD)


@cure("nondeterminism", "a loader that continues")
def batches_of_a_loader_that_continues(cured):
    loader = iter(DataLoader(TensorDataset(drawn(60, 8), torch.arange(60) % 3), 6))
    drawn_once = next(loader)

    def step(setting):
        x, labels = drawn_once if cured else next(loader)
        model = weighted(lambda: nn.Linear(8, 3)).to(setting.dtype)
        loss = F.cross_entropy(model(x.to(setting.dtype)), labels)
        loss.backward()
        return loss.detach()

    return audited(step, PLAIN, ONE_THREAD)


@cure("nondeterminism", "make the step start from the same weights and optimizer state")
def weights_that_the_last_execution_left(cured):
    held = [torch.ones(8)]

    def step(setting):
        weights = torch.ones(8) if cured else held[0]
        loss = (X.to(setting.dtype) * weights).tanh().sum()
        held[0] = 0.9 * weights
        return loss

    return audited(step, PLAIN, ONE_THREAD)


@cure("nondeterminism", "make its kernel seed what it draws")
def an_operation_of_ones_own_that_draws(cured):
    with torch.library._scoped_library("gpulab_cures", "FRAGMENT") as library:

        def noisy(x):
            return x + float((np.random.default_rng(0) if cured else OWN).standard_normal())

        library.define("noisy(Tensor x) -> Tensor")
        library.impl("noisy", noisy, "CompositeExplicitAutograd")
        return audited(
            lambda setting: torch.ops.gpulab_cures.noisy(X.to(setting.dtype)).sum(),
            PLAIN,
            ONE_THREAD,
        )


SAME_DATA = "use the same batch, weights and seeds on both sides"


@cure("other data", SAME_DATA)
def another_batch(cured):
    other = X if cured else drawn(6, 8, seed=1)
    model = weighted(lambda: nn.Linear(8, 3))
    return audited(step_of(model), gl.Step(model, (other, LABELS), F.cross_entropy), setting="cpu")


@cure("other data", SAME_DATA)
def other_labels(cured):
    model = weighted(lambda: nn.Linear(8, 3))
    return audited(
        step_of(model), step_of(model, labels=LABELS if cured else (LABELS + 1) % 3), setting="cpu"
    )


@cure("other data", SAME_DATA)
def other_weights(cured):
    models = [weighted(lambda: nn.Linear(8, 3), seed) for seed in (0, 0 if cured else 1)]
    return audited(*map(step_of, models), setting="cpu")


@cure(
    "mismatch",
    "check why .* calls it with different arguments .* it computes a different function there",
)
def another_argument(cured):
    def of(eps):
        return two_layers(lambda layer, h: F.layer_norm(layer(h), (3,), eps=eps))

    return audited(of(1e-5), of(1e-5 if cured else 1e-2), setting="cpu")


@cure("mismatch", "check what .* does under .*: it computes a different function there")
def another_activation(cured):
    def of(activation):
        return two_layers(lambda layer, h: activation(layer(h)))

    return audited(of(F.gelu), of(F.gelu if cured else F.silu), setting="cpu")


@cure(
    "mismatch",
    "check why cpu:threads=1 does not compute it: it computes a different function there",
)
def a_gradient_of_one_side_alone(cured):
    def step(setting):
        model = weighted(lambda: TwoLayers(plainly))
        model.last.bias.requires_grad_(cured or setting.threads == 2)
        loss = F.cross_entropy(model(X), LABELS)
        loss.backward()
        return loss.detach()

    return audited(step, PLAIN, ONE_THREAD)


@cure("cause not found", "control flow")
def another_result_returned(cured):
    def of(second):
        def step():
            results = X.square().sum(), X.exp().sum()
            return results[second]

        return step

    return audited(of(0), of(0 if cured else 1), setting="cpu")


@cure("overwritten", r"copy it: torch.tensor\(frame\) or torch.as_tensor\(frame.copy\(\)\)")
def a_frame_that_numpy_overwrites(cured):
    frame = np.ones((6, 8), np.float32)

    def step():
        frame[:] = 1
        model = weighted(lambda: nn.Linear(8, 3))
        loss = F.cross_entropy(
            model(torch.tensor(frame) if cured else torch.from_numpy(frame)), LABELS
        )
        frame[:] = 2
        loss.backward()
        return loss.detach()

    return audited(step, PLAIN, ONE_THREAD)


@cure("reduced precision", "leave out the conversion in this line")
def a_conversion_of_the_program(cured):
    def step(setting):
        x = X if cured else X.to(setting.dtype)
        return x.cos().float().sum()

    return audited(step, PLAIN, BFLOAT16)


@cure("mismatch", "compare the kernels registered for both settings")
def a_kernel_that_differs_and_has_no_float64(cured):
    with torch.library._scoped_library("gpulab_cures", "FRAGMENT") as library:

        def waves(x):
            if x.dtype == DOUBLE:
                raise RuntimeError("waves is not implemented for 'Double'")
            return x.sin() * (1.1 if torch.get_num_threads() == 1 and not cured else 1.0)

        library.define("waves(Tensor x) -> Tensor")
        library.impl("waves", waves, "CompositeExplicitAutograd")
        return audited(
            lambda setting: torch.ops.gpulab_cures.waves(X.to(setting.dtype)).sum(),
            PLAIN,
            ONE_THREAD,
        )


@cure("cannot be told", "make it compute in float64 if its inputs are float64")
def steps_of_an_operation_without_float64(cured):
    with torch.library._scoped_library("gpulab_cures", "FRAGMENT") as library:

        def waves(x):
            if x.dtype == DOUBLE and not cured:
                raise RuntimeError("waves is not implemented for 'Double'")
            return x.sin()

        library.define("waves(Tensor x) -> Tensor")
        library.impl("waves", waves, "CompositeExplicitAutograd")

        def step(setting):
            product = drawn(64, 64, dtype=setting.dtype) @ drawn(
                64, 64, seed=1, dtype=setting.dtype
            )
            return (1e5 * torch.ops.gpulab_cures.waves(product)).round().remainder(7).sum(0)

        return audited(step, "cpu:order=sequential", "cpu:order=pairwise")


def finite(name, advice, call):
    """Add a case of NaN or infinity in the last layer of a network."""

    @cure("not finite", f"fix this first, .*{advice}", name=name)
    def of(cured):
        return audited(two_layers(lambda layer, h: call(layer(h), cured)), PLAIN, ONE_THREAD)


def masked(h, cured):
    mask = torch.zeros_like(h)
    mask[2, cured:] = -torch.inf
    return (h + mask).softmax(-1)


finite("a masked row", "look for a row that is masked out entirely", masked)
finite(
    "a logarithm of zero",
    "look for a logarithm or square",
    lambda h, cured: (F.relu(h) + 1e-3 * cured).log(),
)
finite(
    "a square root below zero",
    "look for a logarithm or square root",
    lambda h, cured: (h + 9 * cured).sqrt(),
)
finite(
    "a division by zero",
    "look for a division by zero",
    lambda h, cured: h / (0 * h.detach() + cured),
)
finite(
    "a square root at zero",
    "an infinite derivative",
    lambda h, cured: (h - h + 1e-6 * cured).sqrt(),
)
finite(
    "an exponential",
    "beyond the range of float32: scale them down",
    lambda h, cured: (h * 500 ** (1 - cured)).exp(),
)
finite(
    "its largest",
    "subtract the largest",
    lambda h, cured: (500 * (h - cured * h.detach().amax(1, True))).exp(),
)


@cure("not finite", "remove NaN and infinity from the data and the weights before the step")
def a_weight_that_is_nan(cured):
    model = weighted(lambda: nn.Linear(8, 3))
    if not cured:
        model.weight.data[0, 0] = torch.nan
    return audited(step_of(model), PLAIN, ONE_THREAD)


@cure("reduced precision", "keeps it in float32", "last")
def numbers_beyond_the_range_of_float16(cured):
    def call(layer, h):
        with torch.autocast("cpu", enabled=False) if cured else nullcontext():
            return layer((h.float() if cured else h) * 3e5) * 1e-6

    return audited(two_layers(call), PLAIN, "cpu:autocast=float16")


@pytest.mark.parametrize("name", CURES)
def test_advice_of_an_audit_removes_the_finding(name):
    cure = CURES[name]
    report, found = cure.findings(False)
    assert found, f"{cure.kind}, {cure.advice}: not in\n{report}"
    cured_report, left = cure.findings(True)
    assert not left, f"still there:\n{cured_report}"
    assert not cured_report.faulty, str(cured_report)
    assert {f.kind for f in cured_report.findings} <= {f.kind for f in report.findings}, str(
        cured_report
    )


# An additional finding that names a cause which is not present misleads as much as wrong advice.
ONE_KIND = [
    "dropout_in_a_recomputed_part",
    "draws_in_another_order",
    "batches_of_a_loader_that_continues",
    "a_factor_from_an_unseeded_generator_of_python",
    "a_row_from_an_unseeded_generator_of_python",
    "other_labels",
    "epsilon of a format, a limit",
]


@pytest.mark.parametrize("name", ONE_KIND)
def test_audit_gives_findings_of_one_kind_for_one_cause(name):
    report, _ = CURES[name].findings(False)
    assert {f.kind for f in report.findings} == {CURES[name].kind, "rounding"}, str(report)


def test_audit_accepts_a_loss_that_does_not_depend_on_which_answer_is_given():
    basis = torch.linalg.qr(drawn(64, 64))[0]  # basis @ basis.T is the identity up to rounding

    def step(independent):
        def of(setting):
            x = basis.to(setting.dtype)
            vectors = torch.linalg.eigh(x @ x.T)[1]
            return (
                (vectors @ vectors.T)[0].square().sum()
                if independent
                else vectors[:, 0].tanh().sum()
            )

        return of

    orders = "cpu:order=sequential", "cpu:order=pairwise"
    report = audited(step(False), *orders)
    assert report.kind == "another valid answer"
    assert "nothing, unless the loss depends on" in report.findings[0].advice
    assert "such as the outer product of a vector with itself" in report.findings[0].advice
    assert audited(step(True), *orders).kind == "rounding"


def test_deterministic_algorithms_repeat_what_threads_add_up_in_any_order():
    places, numbers = torch.arange(2_000_000) % 3, drawn(2_000_000)

    def step(setting):
        sums = torch.zeros(3, dtype=setting.dtype)
        return sums.index_put((places,), numbers.to(setting.dtype), accumulate=True)

    found = [
        f
        for f in audited(step, PLAIN, "cpu:threads=2,denormals=on").findings
        if f.kind == "nondeterminism"
    ]
    if not found:
        pytest.skip("the threads of this machine came in the same order twice")
    assert "use deterministic=on" in found[0].advice
    cured = audited(
        step, PLAIN + ",deterministic=on", "cpu:threads=2,denormals=on,deterministic=on"
    )
    assert cured.kind == "rounding"


@pytest.mark.parametrize("setting", ["cpu", "cpu:deterministic=on"])
def test_audit_does_not_advise_deterministic_for_a_custom_operation(setting):
    with torch.library._scoped_library("gpulab_cures", "FRAGMENT") as library:
        library.define("waves(Tensor x) -> Tensor")
        library.impl("waves", lambda x: x * OF_PYTHON.random(), "CompositeExplicitAutograd")
        report = audited(
            lambda: torch.ops.gpulab_cures.waves(X).sum(),
            setting,
            f"{setting},threads=1".replace("u,", "u:"),
        )
    (found,) = (f for f in report.findings if f.kind == "nondeterminism")
    assert "make its kernel seed what it draws" in found.advice


def test_compiled_audit_that_finds_nan_names_the_audit_that_explains_it():
    def step(cured):
        return two_layers(lambda layer, h: masked(layer(h), cured))

    (found,) = audited(step(False), "cpu", "cpu:compile=aot_eager").findings
    assert found.kind == "not finite"
    assert "audit cpu against another device or number of threads" in found.detail
    assert (
        audited(step(False), "cpu", ONE_THREAD)
        .findings[0]
        .advice.endswith("a row that is masked out entirely")
    )
    assert audited(step(True), "cpu", "cpu:compile=aot_eager").kind == "rounding"


@pytest.mark.slow("compiles C++")
def test_compiled_audit_advice_fallback_random_gives_uncompiled_random_numbers():
    from torch._inductor import config

    model = weighted(lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3)))
    (found,) = audited(step_of(model), "cpu", "cpu:compile=inductor").findings
    assert found.kind == "different random numbers"
    assert (
        "torch._inductor.config.fallback_random = True draws them as uncompiled code does"
        in found.advice
    )
    with config.patch(fallback_random=True):
        assert audited(step_of(model), "cpu", "cpu:compile=inductor").kind == "rounding"


class Waves(nn.Module):
    def forward(self, x):
        return 2 * x.sin()


class WavesUncompiled(Waves):
    forward = torch.compiler.disable(Waves.forward)


class Between(nn.Module):
    """A module between two layers."""

    def __init__(self, module):
        super().__init__()
        self.first, self.module, self.last = nn.Linear(8, 16), module, nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.module(self.first(x)))


@pytest.fixture
def compiler_of_wrong_sines():
    """A backend of torch.compile that replaces sines by cosines."""

    def backend(graph, _):
        for node in graph.graph.nodes:
            if node.target == "sin":
                node.target = "cos"
        graph.recompile()
        return graph.forward

    from torch._dynamo.backends import registry

    registry.register_backend(backend, name="wrong_sines")
    yield "wrong_sines"
    registry._BACKENDS.pop("wrong_sines")
    registry._COMPILER_FNS.pop("wrong_sines", None)


def test_compiled_audit_advice_to_keep_a_module_uncompiled_makes_it_right(
    compiler_of_wrong_sines,
):
    pair = "cpu", f"cpu:compile={compiler_of_wrong_sines}"
    first = audited(step_of(weighted(lambda: Between(Waves()))), *pair).findings[0]
    assert (first.kind, first.module) == ("mismatch", "module")
    assert "uncompiled for now, with torch.compiler.disable" in first.advice
    assert not audited(step_of(weighted(lambda: Between(WavesUncompiled()))), *pair).faulty


# --- the guard ------------------------------------------------------------------------------------

GUARDED = {}


def guarded(cause, remedy, reads="backward"):
    def note(program):
        GUARDED[program.__name__] = program, cause, remedy, reads
        return program

    return note


def found_by_guard(program, cured, reads):
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads=reads) as report:
        program(cured)
    return report.findings


@guarded("inplace", "use the out-of-place operation")
def an_operation_in_place(cured):
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = (weight * x).sum()
    x = x.add(1) if cured else x.add_(1)
    loss.backward()


@guarded("inplace", r"or give autograd a copy: .clone\(\)")
def an_operation_in_place_on_what_was_copied(cured):
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = (weight * (x.clone() if cured else x)).sum()
    x.add_(1)
    loss.backward()


@guarded("replaced", "assign to it after backward")
def other_values_assigned(cured):
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    loss = (weight * x).sum()
    if cured:
        loss.backward()
    weight.data = torch.full((3,), 9.0)
    if not cured:
        loss.backward()


def of_a_buffer(make):
    weight, buffer = torch.ones(3, requires_grad=True), np.ones(3, np.float32)
    loss = (weight * make(buffer)).sum()
    buffer[:] = 2
    loss.backward()


@guarded("numpy", r"torch.tensor\(buffer\)")
def a_buffer_of_numpy_as_a_tensor(cured):
    of_a_buffer(torch.tensor if cured else torch.from_numpy)


@guarded("numpy", r"torch.as_tensor\(buffer.copy\(\)\)")
def a_buffer_of_numpy_as_a_copy(cured):
    of_a_buffer(lambda buffer: torch.as_tensor(buffer.copy() if cured else buffer))


@guarded("data", r"copy it before it is overwritten: .clone\(\)")
def a_write_through_data(cured):
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = (weight * (x.clone() if cured else x)).sum()
    x.data.mul_(2)
    loss.backward()


@guarded("data", r".clone\(\)")
def a_loader_that_fills_one_tensor(cured):
    weight, buffer, losses = torch.ones(3, requires_grad=True), torch.zeros(3), []
    for number in range(3):
        buffer.data.fill_(number)
        losses.append((weight * (buffer.clone() if cured else buffer)).sum())
    sum(losses).backward()


def actor_and_critic(cured, anew):
    actor, critic = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.Adam(critic.parameters())
    actions = actor(torch.rand(6, 4))
    value, actor_loss = critic(actions.detach()).square().mean(), -critic(actions).mean()
    value.backward()
    if cured and not anew:
        actor_loss.backward()
    optimizer.step()
    if cured and anew:
        actor_loss = -critic(actions).mean()
    if anew or not cured:
        actor_loss.backward()


@guarded("step", "step after backward: before the step, call `backward` on every loss")
def a_step_before_another_loss(cured):
    actor_and_critic(cured, anew=False)


@guarded("step", "or recompute that loss after the step")
def a_step_before_another_loss_that_is_computed_anew(cured):
    actor_and_critic(cured, anew=True)


def of_observations(cured, use):
    seen, kept = np.zeros(4, np.float32), []
    for _ in range(3):
        seen += 1
        kept.append(torch.from_numpy(seen.copy() if cured else seen))
    use(kept)


@guarded("stale", r"copy the data when you create the tensor: torch.tensor\(seen\)", "any")
def an_observation_that_is_read_later(cured):
    of_observations(cured, lambda kept: kept[0].sum())


@guarded("together", r"torch.from_numpy\(seen.copy\(\)\)", "any")
def observations_that_are_stacked_later(cured):
    of_observations(cured, torch.stack)


@pytest.mark.parametrize("name", GUARDED)
def test_guard_remedy_removes_the_finding(name):
    program, cause, remedy, reads = GUARDED[name]
    found = found_by_guard(program, False, reads)
    assert cause in {finding.cause for finding in found}, found
    assert any(re.search(remedy, finding.remedy) for finding in found), found
    assert not found_by_guard(program, True, reads)


def test_guard_reads_any_finds_the_line_that_wrote_where_the_guard_says_so():
    (found,) = found_by_guard(a_buffer_of_numpy_as_a_tensor, False, "backward")
    assert 'gpulab.guard(reads="any") tries to find it' in found.explanation
    (found,) = found_by_guard(a_buffer_of_numpy_as_a_tensor, False, "any")
    assert [line.text for line in found.writers] == ["buffer[:] = 2"]


# --- verdicts -------------------------------------------------------------------------------------


def runs(epochs=1, seeds=8, effect=0.5, levels=("cpu", "cuda"), **columns):
    """A table of runs in which each level has a higher metric than the level before it."""
    rows = pd.MultiIndex.from_product(
        [levels, range(seeds), range(epochs)], names=["setting", "seed", "epoch"]
    )
    table = rows.to_frame(index=False)
    noise = np.random.default_rng(0).standard_normal(len(table))
    table["final_loss"] = 2 + effect * table.setting.map(levels.index) + 0.1 * noise
    table = table if epochs > 1 else table.drop(columns="epoch")
    return table.assign(**{name: make(table) for name, make in columns.items()})


EPOCHS, RUNS = runs(epochs=3), runs()
SCORES = EPOCHS.rename(columns={"final_loss": "score_of_it"})
HOLES = EPOCHS.assign(step=list(range(48)), epoch=EPOCHS.epoch.mask(EPOCHS.epoch == 1))
WITHOUT_BEST = EPOCHS.assign(val_loss=EPOCHS.final_loss.mask(EPOCHS.seed == 3))
AT_ANOTHER_EPOCH = EPOCHS.assign(
    val_loss=EPOCHS.epoch, acc=EPOCHS.epoch, final_loss=EPOCHS.final_loss.mask(EPOCHS.epoch == 0)
)
TWICE = pd.concat([runs(lr=lambda _: "1e-3"), runs(lr=lambda _: "1e-2")])
NAMED = pd.concat(
    [
        runs(3, run=lambda table: "a" + table.seed.astype(str), lr=lambda _: "1e-3"),
        runs(3, run=lambda table: "b" + table.seed.astype(str), lr=lambda _: "1e-2"),
    ]
)
FRAMES = RUNS.assign(frames=np.where(RUNS.seed < 4, 100, 200))
WITH_TEXT = RUNS.assign(final_loss=RUNS.final_loss.astype(object).mask(RUNS.index == 0, "n/a"))
INFINITE = RUNS.assign(final_loss=RUNS.final_loss.mask(RUNS.index == 0, 1e80), status="finished")
TEXT_SEEDS = RUNS.assign(
    seed=RUNS.seed.astype(object).where(RUNS.setting == "cpu", "s" + RUNS.seed.astype(str))
)
YES_NO = RUNS.assign(final_loss=RUNS.final_loss > 2)
UNNAMED = RUNS.rename(columns={"setting": "optimizer"})
WIDE = RUNS.pivot_table("final_loss", "seed", "setting").reset_index()
KILLED = RUNS.assign(status="killed")
EMPTY = RUNS.assign(setting=RUNS.setting.mask(RUNS.index == 0))


def verdict_of(table, **options):
    return lambda: gl.verdict(table, **options)


# For each case: the advice, a call of `verdict` that is refused, and one that follows the advice.
VERDICTS = {
    "several epochs, the last": (
        "take the last row with last='epoch'",
        verdict_of(EPOCHS),
        verdict_of(EPOCHS, last="epoch"),
    ),
    "several epochs, the best": (
        "or the best with best='final_loss'",
        verdict_of(EPOCHS),
        verdict_of(EPOCHS, best="final_loss"),
    ),
    "a metric of unknown direction": (
        "the best with best='score_of_it', mode='min'",
        verdict_of(SCORES, metric="score_of_it"),
        verdict_of(SCORES, metric="score_of_it", best="score_of_it", mode="min"),
    ),
    "best of unknown direction": (
        "give mode='min' or mode='max'",
        verdict_of(SCORES, metric="score_of_it", best="score_of_it"),
        verdict_of(SCORES, metric="score_of_it", best="score_of_it", mode="max"),
    ),
    "last and best together": (
        "expected only one of the two",
        verdict_of(EPOCHS, last="epoch", best="final_loss"),
        verdict_of(EPOCHS, best="final_loss"),
    ),
    "mode without best": (
        "give the column as best=",
        verdict_of(EPOCHS, mode="min"),
        verdict_of(EPOCHS, mode="min", best="final_loss"),
    ),
    "an unknown mode": (
        "expected 'min' or 'max'",
        verdict_of(EPOCHS, best="final_loss", mode="low"),
        verdict_of(EPOCHS, best="final_loss", mode="min"),
    ),
    "an unknown counting column": (
        "no such column; the columns are .*epoch",
        verdict_of(EPOCHS, last="epochs"),
        verdict_of(EPOCHS, last="epoch"),
    ),
    "holes in the counting column, another column": (
        "choose 'step'",
        verdict_of(HOLES, last="epoch"),
        verdict_of(HOLES, last="step"),
    ),
    "holes in the counting column, filled": (
        "or fill them",
        verdict_of(HOLES, last="epoch"),
        verdict_of(HOLES.fillna({"epoch": 1}), last="epoch"),
    ),
    "a run without the best column, left out": (
        "has no val_loss: leave out the run",
        verdict_of(WITHOUT_BEST, best="val_loss"),
        verdict_of(WITHOUT_BEST[WITHOUT_BEST.seed != 3], best="val_loss"),
    ),
    "a run without the best column, the last": (
        "has no val_loss: .* or take the last row with last=",
        verdict_of(WITHOUT_BEST, best="val_loss"),
        verdict_of(WITHOUT_BEST, last="epoch"),
    ),
    "no metric at the best row, the last": (
        "has no final_loss at epoch 0, where val_loss is best: take the last row with last=",
        verdict_of(AT_ANOTHER_EPOCH, best="val_loss"),
        verdict_of(AT_ANOTHER_EPOCH, last="epoch"),
    ),
    "no metric at the best row, another column": (
        "where val_loss is best: .* or give another column as best=",
        verdict_of(AT_ANOTHER_EPOCH, best="val_loss"),
        verdict_of(AT_ANOTHER_EPOCH, best="acc"),
    ),
    "rows of two kinds of runs": (
        "with different lr; keep the rows of one",
        verdict_of(TWICE),
        verdict_of(TWICE[TWICE.lr == "1e-3"]),
    ),
    "two named runs of one seed": (
        "2 runs, which differ in lr .*; keep the rows of one",
        verdict_of(NAMED, last="epoch"),
        verdict_of(NAMED[NAMED.lr == "1e-3"], last="epoch"),
    ),
    "two columns of one name": (
        "more than one column is called final_loss; rename or drop one",
        verdict_of(pd.concat([RUNS, RUNS[["final_loss"]]], axis=1)),
        verdict_of(RUNS),
    ),
    "an unknown column": (
        "choose the columns by metric=, factor= and block=",
        verdict_of(UNNAMED),
        verdict_of(UNNAMED, factor="optimizer"),
    ),
    "a column for each level": (
        "if each level is a column, pandas.melt turns it into rows",
        verdict_of(WIDE),
        verdict_of(pd.melt(WIDE, "seed", var_name="setting", value_name="final_loss")),
    ),
    "a metric with a reserved name": (
        "none of status, .*; rename yours",
        verdict_of(RUNS.rename(columns={"final_loss": "difference"}), metric="difference"),
        verdict_of(RUNS.rename(columns={"final_loss": "distance"}), metric="distance"),
    ),
    "a factor with a reserved name": (
        "a column of the verdict's own table; rename it",
        verdict_of(RUNS.rename(columns={"setting": "margin"}), factor="margin"),
        verdict_of(RUNS.rename(columns={"setting": "width"}), factor="width"),
    ),
    "a text among numbers": (
        "leave cells without a number empty",
        verdict_of(WITH_TEXT),
        verdict_of(WITH_TEXT.assign(final_loss=WITH_TEXT.final_loss.mask(WITH_TEXT.index == 0))),
    ),
    "a huge metric, marked as diverged": (
        "mark them as diverged",
        verdict_of(INFINITE),
        verdict_of(INFINITE.assign(status=INFINITE.status.mask(INFINITE.index == 0, "diverged"))),
    ),
    "a huge metric, left out": (
        "leave out their seeds",
        verdict_of(INFINITE),
        verdict_of(INFINITE[INFINITE.seed > 0]),
    ),
    "a huge metric, another metric": (
        "or choose another metric=",
        verdict_of(INFINITE.assign(accuracy=RUNS.final_loss)),
        verdict_of(INFINITE.assign(accuracy=RUNS.final_loss), metric="accuracy"),
    ),
    "an empty level": ("fill or drop them", verdict_of(EMPTY), verdict_of(EMPTY.dropna())),
    "two protocols, one of them": (
        "compare runs of one protocol at a time",
        verdict_of(FRAMES),
        verdict_of(FRAMES[FRAMES.frames == 100]),
    ),
    "two protocols, without the column": (
        "or drop columns that do not distinguish protocols",
        verdict_of(FRAMES),
        verdict_of(FRAMES.drop(columns="frames")),
    ),
    "seeds of several types": (
        "write them in the same way",
        verdict_of(TEXT_SEEDS),
        verdict_of(
            TEXT_SEEDS.assign(seed=[str(seed).removeprefix("s") for seed in TEXT_SEEDS.seed])
        ),
    ),
    "an unknown reference": (
        "the levels are .'cpu', 'cuda'",
        verdict_of(RUNS, reference="mps"),
        verdict_of(RUNS, reference="cuda"),
    ),
    "no finished run": (
        "write 'finished' into `status`",
        verdict_of(KILLED),
        verdict_of(KILLED.assign(status="finished")),
    ),
    "a margin without a number": (
        "such as '0.25sd' or '1%'",
        verdict_of(RUNS, margin="little"),
        verdict_of(RUNS, margin="1%"),
    ),
    "a margin in standard deviations for booleans": (
        "a share of the seeds below 1, such as 0.1",
        verdict_of(YES_NO, margin="0.25sd"),
        verdict_of(YES_NO, margin=0.1),
    ),
    "an alpha above one half": (
        "expected a number between 0 and 0.5, such as 0.05",
        verdict_of(RUNS, alpha=5),
        verdict_of(RUNS, alpha=0.05),
    ),
}


@pytest.mark.parametrize(("advice", "refused", "cured"), VERDICTS.values(), ids=VERDICTS)
def test_advice_of_a_verdict_that_refuses_lets_it_decide(advice, refused, cured):
    with pytest.raises(gl.UsageError, match=advice):
        refused()
    assert cured().rows[0].seeds > 1


def of_seeds(count, levels=("cpu", "cuda"), sd=0.03, effect=0.0, draw=1):
    """Runs that differ much between seeds and little between levels."""
    generator = np.random.default_rng(draw)
    of_seed = generator.standard_normal(count)
    parts = [
        pd.DataFrame({"setting": level, "seed": range(count)}).assign(
            final_loss=5 + of_seed + place * effect + sd * generator.standard_normal(count)
        )
        for place, level in enumerate(levels)
    ]
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("levels", [("cpu", "cuda"), ("cpu", "cuda", "mps", "xpu")])
def test_verdict_shows_a_difference_with_as_many_seeds_as_it_asks_for(levels):
    (sentence, *_) = gl.verdict(of_seeds(3, levels, effect=2.0)).sentences()
    enough = int(re.search(r"At least (\d+) seeds are needed", sentence)[1])
    assert gl.verdict(of_seeds(enough, levels, effect=2.0)).decision == "different"


@pytest.mark.parametrize("sd", [0.2, 0.4])
def test_verdict_is_settled_by_as_many_seeds_as_it_asks_for(sd):
    """The number is meant to suffice four times in five. It suffices less often if the spread was
    estimated from few seeds, so this test requires 12 of 20.
    """
    settled = 0
    for draw in range(20):
        (row,) = gl.verdict(of_seeds(12, sd=sd, draw=draw)).rows
        anew = of_seeds(round(row.seeds_needed), sd=sd, draw=1000 + draw)
        settled += gl.verdict(anew).decision == "equivalent"
    assert settled >= 12


@pytest.mark.parametrize("shared", [0, 1])
def test_verdict_compares_levels_once_their_common_seeds_are_run(shared):
    table = of_seeds(8, effect=2.0)
    without = table[(table.setting == "cpu") | (table.seed < shared)]
    without = pd.concat(
        [without, table[table.setting == "cuda"].assign(seed=lambda t: t.seed + 100)]
    )
    (sentence,) = gl.verdict(without).sentences()
    enough = int(re.search(r"Run at least (\d+) seeds under both", sentence)[1])
    assert gl.verdict(table[table.seed < enough]).decision == "different"


def test_verdict_asks_whether_the_setting_reached_the_training_until_it_does():
    table = of_seeds(8, sd=0.0)
    assert "Check that the setting" in gl.verdict(table).sentences()[0]
    assert "Check that" not in gl.verdict(of_seeds(8)).sentences()[0]


def test_verdict_has_a_margin_in_units_of_the_metric_where_seeds_have_no_spread():
    table = RUNS.assign(final_loss=RUNS.final_loss.where(RUNS.setting == "cuda", 1.0))
    assert "Give a margin in units of the metric" in str(gl.verdict(table))
    assert "Give a margin" not in str(gl.verdict(table, margin=0.1))


def test_verdict_takes_one_of_averaged_rows_by_the_column_that_its_note_names():
    table = EPOCHS.rename(columns={"epoch": "episode"})
    assert "last='episode' or best= takes one row of each run" in str(gl.verdict(table))
    for choice in ({"last": "episode"}, {"best": "final_loss"}):
        assert "averaged" not in str(gl.verdict(table, **choice))


# --- Hessians -------------------------------------------------------------------------------------

TOKENS, ROWS = torch.tensor([[1, 2, 2], [0, 6, 1]]), drawn(5, 3, dtype=DOUBLE)
TARGETS, NOISE = drawn(5, 2, seed=1, dtype=DOUBLE), torch.Generator().manual_seed(0)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context, gradient):
        return gradient * 3 * context.saved_tensors[0] ** 2


class CubedOnce(Cubed):
    backward = staticmethod(once_differentiable(Cubed.backward))


def layer():
    return weighted(lambda: nn.Linear(3, 2)).double()


def hessian_of_layer(loss):
    """The Hessian of a loss that takes the outputs of a layer."""
    model = layer()
    return gl.hessian(model, lambda: loss(model(ROWS)))


def with_evaluation(part):
    def of(cured):
        model = nn.Sequential(nn.Linear(3, 4), part(4), nn.Linear(4, 2)).double().train(not cured)
        return gl.hessian(model, F.mse_loss, (ROWS, TARGETS))

    return of


def with_embedding(cure, **options):
    def of(cured):
        model = weighted(
            lambda: nn.Sequential(nn.Embedding(7, 4, **options), nn.Linear(4, 2))
        ).double()
        if cured:
            cure(model[0])
        return gl.hessian(model, lambda: model(TOKENS).square().mean())

    return of


def shortened(embedding):
    embedding.weight.data.renorm_(embedding.norm_type, 0, embedding.max_norm)
    embedding.max_norm = None


def of_attention(cured):
    model = layer()

    def loss():
        query = model(ROWS).reshape(1, 1, 5, 2)
        with sdpa_kernel(SDPBackend.MATH if cured else SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, query, query).square().mean()

    return gl.hessian(model, loss)


def of_parameters_of_the_loss(cured):
    model = layer()
    held = list(model.parameters())
    return gl.hessian(
        model, lambda: sum(p.pow(4).sum() for p in (model.parameters() if cured else held))
    )


def of_a_root(cured):
    model = layer()
    nn.init.zeros_(model.bias)
    return gl.hessian(model, lambda: (model(ROWS * cured) ** 2).sum().sqrt())


def of_frozen_parameters(cured):
    model = layer().requires_grad_(False)
    if cured:
        model.requires_grad_()
    return gl.hessian(model, F.mse_loss, (ROWS, TARGETS))


def product(cured):
    H = gl.hessian(layer(), F.mse_loss, (ROWS, TARGETS))
    v = torch.ones(8)
    return H if (H @ (v.to(H.device, H.dtype) if cured else v)).shape == (8,) else None


def in_place(cured):
    return hessian_of_layer(lambda h: (h.exp().add(1) if cured else h.exp().add_(1)).mean())


def with_random_numbers(cured):
    drawn_before = torch.randn(5, 2, generator=NOISE)

    def loss(h):
        return (h + (drawn_before if cured else torch.randn(5, 2, generator=NOISE))).square().mean()

    return hessian_of_layer(loss)


def of_a_sequence(cured):
    """A loss of sequences, whose gradient torch cannot differentiate, or one that it can."""
    return hessian_of_layer(
        lambda h: (
            F.nll_loss(h.log_softmax(-1), LABELS[:5] % 2)
            if cured
            else F.ctc_loss(h.log_softmax(-1)[:, None], torch.tensor([[1]]), (5,), (1,))
        )
    )


def on(batch):
    return lambda cured: gl.hessian(layer(), F.mse_loss, (ROWS, TARGETS) if cured else batch)


# For each case: the advice, and a program that follows it if it is called with True.
HESSIANS = {
    "dropout in training mode": (
        r"\(Dropout\) is in training mode: call model.eval\(\)",
        with_evaluation(lambda _: nn.Dropout(0.5)),
    ),
    "batch normalisation in training mode": (
        r"\(BatchNorm1d\) is in training mode: call model.eval\(\)",
        with_evaluation(nn.BatchNorm1d),
    ),
    "an embedding with max_norm": (
        "rescale them once with weight.data.renorm_.* and set max_norm = None",
        with_embedding(shortened, max_norm=0.1),
    ),
    "an embedding with sparse gradients": (
        "use embeddings with sparse=False",
        with_embedding(lambda part: setattr(part, "sparse", False), sparse=True),
    ),
    "an embedding scaled by frequency": (
        "look for .* scale_grad_by_freq",
        with_embedding(
            lambda part: setattr(part, "scale_grad_by_freq", False), scale_grad_by_freq=True
        ),
    ),
    "a square root at 0": ("look for .* square roots of 0", of_a_root),
    "a loss that holds a parameter": (
        "get it from the model at each call",
        of_parameters_of_the_loss,
    ),
    "a loss that draws random numbers": ("or draw the numbers beforehand", with_random_numbers),
    "a function that is once differentiable": (
        "if torch can differentiate everything in its backward, remove the mark",
        lambda cured: hessian_of_layer(lambda h: (Cubed if cured else CubedOnce).apply(h).mean()),
    ),
    "attention": (
        "use the math kernel: torch.nn.attention.sdpa_kernel.torch.nn.attention.SDPBackend.MATH",
        of_attention,
    ),
    "an operation in place": ("use the out-of-place operation", in_place),
    "an operation without second derivatives": (
        "write it with operations that torch can differentiate twice",
        of_a_sequence,
    ),
    "frozen parameters": (r"call requires_grad_\(\) on the parameters", of_frozen_parameters),
    "a vector of another type": (r"use v.to\(H.device, H.dtype\)", product),
    "a loss of arguments without a batch": (
        r"there is no batch: pass a batch \(inputs, targets\)",
        on(None),
    ),
    "a batch without targets": (
        r"the batch is a tensor: pass a batch \(inputs, targets\)",
        on(ROWS),
    ),
}


@pytest.mark.parametrize(("advice", "program"), HESSIANS.values(), ids=HESSIANS)
def test_advice_of_a_hessian_that_is_refused_makes_one(advice, program):
    with pytest.raises((gl.UsageError, gl.DataError), match=advice):
        program(False)
    assert program(True).gradient.isfinite().all()


# --- steps and settings ---------------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer whose output is multiplied by a tensor, either a buffer or a plain attribute."""

    def __init__(self, is_buffer):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        if is_buffer:
            self.register_buffer("scale", torch.ones(3, 3))
        else:
            self.scale = torch.ones(3, 3)

    def forward(self, x):
        return self.layer(x) @ self.scale


def audited_layer(batch, loss=F.cross_entropy):
    return audited(gl.Step(nn.Linear(8, 3), batch, loss), PLAIN, ONE_THREAD)


def of_a_lazy_layer(cured):
    model = nn.LazyLinear(3)
    if cured:
        model(X)
    return audited(step_of(model), PLAIN, ONE_THREAD)


def of_batches(cured):
    loader = DataLoader(TensorDataset(X, LABELS), 6)
    return audited_layer(next(iter(loader)) if cured else loader)


# For each case: the advice, and a program that follows it if it is called with True.
STEPS = {
    "a data loader as the batch": (r"pass its first batch, next\(iter\(loader\)\)", of_batches),
    "a lazy layer": ("has lazy parameters: call it once", of_a_lazy_layer),
    "a tensor as a plain attribute": (
        "make it a buffer, with register_buffer",
        lambda cured: audited(step_of(Scaled(cured)), PLAIN, BFLOAT16),
    ),
    "a pair without a loss": (
        "pass loss=",
        lambda cured: audited_layer((X, LABELS), F.cross_entropy if cured else None),
    ),
    "a triple with a loss": (
        r"expected \(inputs, targets\)",
        lambda cured: audited_layer((X, LABELS) if cured else (X, LABELS, X)),
    ),
    "a model without a batch": (
        r"expected gpulab.Step\(model, batch, loss\)",
        lambda cured: audited(
            step_of(nn.Linear(8, 3)) if cured else nn.Linear(8, 3), PLAIN, ONE_THREAD
        ),
    ),
    "an audit of one setting": (
        "expected two settings, as in audit",
        lambda cured: audited(step_of(nn.Linear(8, 3)), "cpu", *([ONE_THREAD] if cured else [])),
    ),
    "a compiled setting with another number of threads": (
        "audit cpu:threads=2 against cpu:threads=1",
        lambda cured: audited(
            step_of(nn.Linear(8, 3)),
            PLAIN,
            ONE_THREAD if cured else "cpu:threads=1,compile=aot_eager",
        ),
    ),
    "a function step under a compiled setting": (
        r"a compiled step has to be a gpulab.Step\(model, batch, loss\)",
        lambda cured: audited(
            step_of(nn.Linear(8, 3)) if cured else lambda: X.sum(), "cpu", "cpu:compile=aot_eager"
        ),
    ),
    "a record under a compiled setting": (
        "compiled code has no operations to record; use gpulab.audit",
        lambda cured: (
            audited(step_of(nn.Linear(8, 3)), "cpu", "cpu:compile=aot_eager")
            if cured
            else gl.record(step_of(nn.Linear(8, 3)), "cpu:compile=aot_eager", progress=False)
        ),
    ),
    "autocast with a precision": (
        "leave out precision, emulate and order",
        lambda cured: audited(
            step_of(nn.Linear(8, 3)),
            "cpu",
            "cpu:autocast=bfloat16" + ("" if cured else ",precision=bfloat16"),
        ),
    ),
    "emulation with a precision": (
        "numbers: leave out precision",
        lambda cured: audited(
            step_of(nn.Linear(8, 3)), "cpu", TF32 + ("" if cured else ",precision=bfloat16")
        ),
    ),
}


@pytest.mark.parametrize(("advice", "program"), STEPS.values(), ids=STEPS)
def test_advice_of_a_step_that_is_refused_lets_it_be_done(advice, program):
    with pytest.raises(gl.UsageError, match=advice):
        program(False)
    assert not program(True).faulty


class AsksForFloat32(nn.Module):
    def __init__(self, cured):
        super().__init__()
        self.layer, self.cured = nn.Linear(8, 3), cured

    def forward(self, x):
        h = self.layer(x)
        return h @ torch.eye(3, dtype=h.dtype if self.cured else torch.float32)


def test_compiled_audit_has_a_float64_reference_if_the_step_takes_the_format_of_its_inputs():
    steps = [
        step_of(weighted(lambda: AsksForFloat32(False))),
        step_of(weighted(lambda: AsksForFloat32(True))),
    ]
    refused, cured = (audited(step, "cpu", "cpu:compile=aot_eager").headline for step in steps)
    assert "Take the format from the inputs (x.dtype) or the weights" in refused
    assert "There was no float64 reference" not in cured
