"""NaN and infinity are told first, with the operation that made them; and what the first line says of the rest."""

import pytest
import torch
import torch.nn.functional as F
from faulty_kernels import Kernels, under_b
from small_networks import drawn
from small_steps import A, B, audited, seeded
from torch import nn

import gpulab as gl

TF32 = "cpu:emulate=tf32"
pytestmark = pytest.mark.usefixtures("two_threads")


class Attention(nn.Module):
    """One head, in which a sentence may have no word that is to be seen."""

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
    assert "makes NaN of numbers; it reaches the loss" in first.detail
    assert "the infinity that masked_fill (forward) in Attention makes; so it is in float64" in first.detail
    assert report.faulty
    assert "mismatch" not in {finding.kind for finding in report.findings}


def test_audit_takes_masks_of_infinity_that_softmax_removes():
    report = audited(masked_step([]), A, TF32)
    assert report.kind == "reduced precision"
    assert not report.faulty


def test_audit_tells_an_infinite_ctc_loss_by_its_forward_operation():
    """Six steps of time hold no nine letters."""

    def step(setting):
        scores = drawn(6, 2, 5).to(setting.dtype).requires_grad_()
        lengths = torch.tensor([6, 6]), torch.tensor([9, 9])
        loss = F.ctc_loss(scores.log_softmax(-1), torch.ones(2, 9, dtype=torch.long), *lengths, reduction="sum")
        loss.backward()
        return loss

    first = audited(step).findings[0]
    assert (first.kind, first.operation, first.phase) == ("not finite", "_ctc_loss", "forward")
    assert "makes infinity of numbers; it reaches the loss" in first.detail


def test_audit_tells_nan_in_the_data():
    first = audited(gl.Step(seeded(lambda: nn.Linear(4, 2)), torch.full((3, 4), torch.nan))).findings[0]
    assert (first.kind, first.operation) == ("not finite", "addmm")
    assert "is given NaN, which no operation of the step made: it is in the data or the weights" in first.detail


def test_audit_says_where_float64_stays_finite():
    """Squares beyond what float32 holds, and far from what float64 does."""
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
    assert f"Under {B} alone infinity reaches the loss, first in " in str(report)
    assert report.kind == "mismatch"


# --- what the first line says -----------------------------------------------------------------------------


def test_audit_says_identical_where_all_bits_are_the_same():
    step = gl.Step(seeded(lambda: nn.Linear(4, 2)), drawn(3, 4))
    for b, said in ((A, "identical to the last bit"), ("cpu:precision=float64", "all is well: rounding alone")):
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


# --- what does not reach the loss -------------------------------------------------------------------------


def mirrored(*call):
    """The vectors with other signs, which fit the definition as well."""
    u, values, vh = call[-1]
    return -u, values, -vh


@pytest.mark.parametrize(("alone", "kind"), [(True, "rounding"), (False, "another valid answer")])
def test_audit_takes_singular_values_whose_vectors_differ_in_sign(alone, kind):
    def step(setting):
        u, values, vh = torch.linalg.svd(drawn(8, 5).to(setting.dtype).requires_grad_(), full_matrices=False)
        loss = values.square().mean() if alone else (u[:5] * vh).sum() + u.sum()
        loss.backward()
        return loss

    with Kernels("_linalg_svd", mirrored, always=False):
        report = audited(step)
    assert report.kind == kind
    assert "another valid answer" in {finding.kind for finding in report.findings}
