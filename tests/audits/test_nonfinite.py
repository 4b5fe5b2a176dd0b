"""NaN and infinity are reported first, with the operation that produced them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpulab as gl
from tests.audits._faulty_kernels import Kernels, under_b
from tests.audits._helpers import A, B, audited, drawn, seeded

TF32 = "cpu:emulate=tf32"
pytestmark = pytest.mark.usefixtures("two_threads")


class Attention(nn.Module):
    """Single-head attention in which all words of a sentence may be masked."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, words, hidden):
        scores = self.query(words) @ self.key(words).mT
        return scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1) @ words


def masked_step(sentence):
    hidden = torch.zeros(4, 5, dtype=torch.bool)
    hidden[sentence] = True
    return gl.Step(seeded(Attention), {"words": drawn(4, 5, 16), "hidden": hidden})


@pytest.mark.parametrize("b", [B, TF32])
def test_audit_tells_nan_of_a_masked_sentence_before_tf32(b):
    report = audited(masked_step(2), A, b)
    first = report.findings[0]
    assert (first.kind, first.operation, first.module) == ("not finite", "_softmax", "Attention")
    assert "it reaches the loss" in first.detail
    assert (
        "produces NaN from the infinity that masked_fill (forward) in Attention produced"
        in first.detail
    )
    assert report.faulty
    assert "mismatch" not in {finding.kind for finding in report.findings}


def test_audit_takes_masks_of_infinity_that_softmax_removes():
    report = audited(masked_step([]), A, TF32)
    assert report.kind == "reduced precision"
    assert not report.faulty


def test_audit_tells_an_infinite_ctc_loss_by_its_forward_operation():
    """Nine letters do not fit into six time steps."""

    def step(setting):
        scores = drawn(6, 2, 5).to(setting.dtype).requires_grad_()
        lengths = torch.tensor([6, 6]), torch.tensor([9, 9])
        loss = F.ctc_loss(
            scores.log_softmax(-1), torch.ones(2, 9, dtype=torch.long), *lengths, reduction="sum"
        )
        loss.backward()
        return loss

    first = audited(step).findings[0]
    assert (first.kind, first.operation, first.phase) == ("not finite", "_ctc_loss", "forward")
    assert "turns finite numbers into infinity; it reaches the loss" in first.detail


def test_audit_tells_nan_in_the_data():
    first = audited(
        gl.Step(seeded(lambda: nn.Linear(4, 2)), torch.full((3, 4), torch.nan))
    ).findings[0]
    assert (first.kind, first.operation) == ("not finite", "addmm")
    assert (
        "receives NaN, which no operation of the step produced: it is in the data or the weights"
        in first.detail
    )


def test_audit_says_where_float64_stays_finite():
    """The squares are beyond the range of float32, but not of float64."""
    step = gl.Step(nn.Identity(), drawn(200, 4).mul(1e25).requires_grad_())
    first = audited(step).findings[0]
    assert first.kind == "not finite"
    assert first.detail.endswith("in float64, the loss is finite")


def test_audit_says_which_setting_alone_makes_an_infinite_loss():
    def step(setting):
        x = drawn(8, 3).to(setting.dtype).requires_grad_()
        loss = (x.square() * (torch.inf if under_b() else 1.0)).sum()
        loss.backward()
        return loss

    report = audited(step)
    assert (
        f"infinity reaches the loss and 1 more result under {B} alone, from mul (forward); "
        in report.headline
    )
    assert report.kind == "mismatch"


def scaled_step(init_scale=2.0**24):
    """Return a step whose gradients overflow in float16, so that the gradient scaler skips the
    update.
    """
    net = seeded(lambda: nn.Linear(16, 16))
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    loss = net(drawn(8, 16)).float().square().mean()
    scaler.scale(loss).backward()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def test_audit_names_the_conversion_that_overflows_where_a_scaler_skips_the_step():
    report = audited(scaled_step, A, "cpu:autocast=float16")
    first = report.findings[0]
    assert "under cpu:autocast=float16 alone, from _to_copy (backward); " in report.headline
    assert "all is well" not in report.headline
    assert (first.kind, first.operation, first.phase) == (
        "reduced precision",
        "_to_copy",
        "backward",
    )
    assert "it turns numbers beyond the range of float16 into infinity" in first.detail
    assert "the gradient scaler skipped the step, so 2 parameters keep their values" in first.detail
    assert "a smaller init_scale skips fewer" in first.advice
    assert not report.faulty
    followed = audited(partial(scaled_step, init_scale=2.0**10), A, "cpu:autocast=float16")
    assert "skipped" not in str(followed)


def one_pass(setting):
    """Divide rows by a variance that is computed as a difference of large numbers."""
    x = drawn(16, 64).add(1000.0).to(setting.dtype).requires_grad_()
    variance = x.square().mean(1) - x.mean(1).square()
    loss = (x / variance.sqrt()[:, None]).mean()
    loss.backward()
    return loss.detach()


def test_audit_names_the_subtraction_that_lost_the_digits_before_nan():
    report = audited(one_pass, A, "cpu:precision=bfloat16")
    first = report.findings[0]
    assert (first.kind, first.operation) == ("reduced precision", "sub")
    assert "nearly all digits are lost in it, and " in first.detail
    assert " under cpu:precision=bfloat16 alone, from " in report.headline


def underflow():
    """Divide by a square that float32 can represent and float16 rounds to zero."""
    x = drawn(8, 3).abs().add(1.0).requires_grad_()
    y = (x @ torch.eye(3)).mul(1e-5)
    loss = (y / y.square().to(y.dtype)).float().sum()
    loss.backward()
    return loss.detach()


def test_audit_names_the_underflow_before_a_division_by_zero_and_no_overflow():
    report = audited(underflow, A, "cpu:autocast=float16")
    first = report.findings[0]
    assert (first.kind, first.operation) == ("reduced precision", "pow")
    assert "nearly all digits are lost in it, and div (forward) at " in first.detail
    assert "beyond the range" not in first.detail + first.advice


def test_audit_calls_nan_of_one_setting_in_float32_a_fault_and_names_the_lost_digits():
    """Only the order of summation decides the sign of a variance.

    The variance is 0.037 in float64, and 1 or -1 in float32.
    """

    def step(setting):
        x = torch.tensor([2999.9375, 2999.875, 3000.3125]).to(setting.dtype).requires_grad_()
        first, second, third = x.flip(0) if under_b() else x
        mean = (first + second + third) / 3
        variance = (first * first + second * second + third * third) / 3 - mean * mean
        loss = variance.sqrt()
        loss.backward()
        return loss.detach()

    report = audited(step)
    assert (
        f"NaN reaches the loss and 1 more result under {B} alone, from sqrt (forward); 1 × not"
        " finite" in report.headline
    )
    assert report.faulty
    (first, *_) = report.findings
    assert (first.kind, first.operation) == ("not finite", "sqrt")
    assert "nearly all digits were lost before, in sub (forward) at " in first.detail
    assert first.detail.endswith("in float64, the loss is finite")


# --- functions that are not finite for rounded inputs ---------------------------------------------


def log_of_a_small_probability(z):
    return -torch.log(torch.softmax(z * 30, -1) + 1e-8).mean()


def angle_between_parallel_vectors(z):
    return torch.acos(F.cosine_similarity(z, z * 1.5 + 1e-3, dim=-1)).mean()


def inverse_of_tanh(z):
    return torch.atanh(torch.tanh(z * 4)).mean()


@pytest.mark.parametrize(
    ("function", "b", "operation"),
    [
        (log_of_a_small_probability, "cpu:autocast=float16", "log"),
        (angle_between_parallel_vectors, "cpu:precision=bfloat16", "acos"),
        (angle_between_parallel_vectors, "cpu:autocast=float16", "acos"),
        (inverse_of_tanh, "cpu:precision=bfloat16", "atanh"),
    ],
)
def test_audit_places_nan_where_a_function_gets_rounded_inputs(function, b, operation):
    """The function is right for its inputs, but a finding names it and its line."""
    x = drawn(32, 8)

    def step(setting):
        layer = seeded(lambda: nn.Linear(8, 8, dtype=torch.float32)).to(setting.dtype)
        loss = function(layer(x.to(setting.dtype)))
        loss.backward()
        return loss.detach()

    report = audited(step, a="cpu", b=b)
    first = report.findings[0]
    assert (first.kind, first.operation) == ("reduced precision", operation), str(report)
    assert "inputs were rounded" in first.detail
    assert "test_nonfinite.py:" in first.line
    assert f"{operation} (forward)" in report.headline


# --- what the first line says ---------------------------------------------------------------------


def test_audit_says_identical_where_all_bits_are_the_same():
    step = gl.Step(seeded(lambda: nn.Linear(4, 2)), drawn(3, 4))
    for b, said in (
        (A, "identical to the last bit"),
        ("cpu:precision=float64", "all is well: rounding alone"),
    ):
        assert said in str(audited(step, A, b)).partition("\n")[0]


def test_audit_says_last_what_both_settings_share():
    def step():
        x = drawn(8, 3).to(torch.bfloat16).requires_grad_()
        loss = (x * 3).tanh().sum()
        loss.backward()
        return loss

    headline = str(audited(step)).partition(".")[0]
    assert headline.startswith(f"{A} against {B}: identical to the last bit; under both ")


def test_audit_says_that_no_gradient_was_compared():
    report = audited(lambda setting: torch.ones(3, dtype=setting.dtype).exp().sum())
    assert "It left no gradient and updated nothing" in str(report).partition("\n")[0]


# --- what does not reach the loss -----------------------------------------------------------------


def mirrored(*call):
    """Return the vectors with different signs, which also satisfy the definition."""
    u, values, vh = call[-1]
    return -u, values, -vh


@pytest.mark.parametrize(("alone", "kind"), [(True, "rounding"), (False, "another valid answer")])
def test_audit_takes_singular_values_whose_vectors_differ_in_sign(alone, kind):
    def step(setting):
        u, values, vh = torch.linalg.svd(
            drawn(8, 5).to(setting.dtype).requires_grad_(), full_matrices=False
        )
        loss = values.square().mean() if alone else (u[:5] * vh).sum() + u.sum()
        loss.backward()
        return loss

    with Kernels("_linalg_svd", mirrored, always=False):
        report = audited(step)
    assert report.kind == kind
    assert "another valid answer" in {finding.kind for finding in report.findings}
