"""Updates that leave the bits of weights unchanged, and updates that a gradient scaler skips."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.audits._helpers import audited, drawn, faults, labels, recorded, seeded

BFLOAT16, FLOAT16 = "cpu:precision=bfloat16", "cpu:precision=float16"
X = drawn(5, 8)
LOST = re.compile(
    r"update lost: ([\d,]+) of the ([\d,]+) numbers in (.+?) that change in float64 keep their old"
    r" value"
)


def near_one(rate, optimizer=torch.optim.SGD, updates=1):
    """Return a step that updates layers with weights close to 1 at a given rate."""
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(1 + 0.1 * drawn(*parameter.shape, seed=seed))

    def step(setting):
        net = copy.deepcopy(model).to(setting.dtype)
        by = optimizer(net.parameters(), lr=rate)
        for _ in range(updates):
            by.zero_grad()
            loss = F.cross_entropy(net(X.to(setting.dtype) / 4), labels(5))
            loss.backward()
            by.step()
        return loss.detach()

    return step


def losses(report):
    """Return, for each finding of lost updates, the numbers of lost and of all updates, and the
    parameters.
    """
    found = [LOST.match(finding.detail) for finding in report.findings]
    return [
        (*(int(number.replace(",", "")) for number in m.groups()[:2]), m[3]) for m in found if m
    ]


def of_lost_updates(report):
    """Return the only finding of lost updates."""
    (finding,) = (finding for finding in report.findings if LOST.match(finding.detail))
    return finding


def test_lost_updates_of_bfloat16_weights_at_a_small_rate_are_reported_with_their_number():
    report = audited(near_one(1e-4), b=BFLOAT16)
    assert (report.kind, report.faulty) == ("reduced precision", False)
    assert all(result.agrees for result in report.comparison.results)
    assert losses(report) == [(75, 75, "0.bias, 0.weight, 2.bias and 1 more")], (
        "6 × 8 + 6 + 3 × 6 + 3 numbers"
    )
    found = of_lost_updates(report)
    assert (found.kind, found.setting) == ("reduced precision", BFLOAT16)
    assert "by.step()" in found.line
    assert "(in 4 of 4 updated tensors)" in found.detail
    assert "keep the weights in float32" in found.advice
    assert (
        "a bfloat16 number cannot represent a relative change of less than about 2e-03"
        in found.advice
    )


def test_lost_updates_are_reported_first_where_little_else_is_rounded():
    def step(setting):
        layer = nn.Linear(4, 1, bias=False, device=setting.device, dtype=setting.dtype)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        loss = layer(torch.eye(4).to(setting.dtype)).sum()
        loss.backward()
        torch.optim.SGD(layer.parameters(), lr=1e-3).step()
        return loss.detach()

    report = audited(step, b=BFLOAT16)
    assert losses(report) == [(4, 4, "weight")]
    assert report.findings[0] == of_lost_updates(report), str(report)


def test_lost_updates_are_reported_before_roundings_of_the_forward_pass():
    report = audited(near_one(1e-4), b=BFLOAT16)
    assert report.findings[0] == of_lost_updates(report)


def test_lost_updates_are_found_in_a_model_that_was_converted_outside_the_step():
    layers = {dtype: nn.Linear(4, 1, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    for layer in layers.values():
        nn.init.constant_(layer.weight, 1.0)
        nn.init.constant_(layer.bias, 0.0)

    def step(setting):
        layer = layers[setting.dtype]
        layer(torch.eye(4).to(setting.dtype)).sum().backward()
        torch.optim.SGD(layer.parameters(), lr=1e-3).step()

    assert losses(audited(step, b=BFLOAT16)) == [(4, 4, "weight")]


def test_lost_updates_are_counted_as_by_hand():
    """Two of four updates are lost."""
    start, gradient = (
        torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]),
        torch.tensor([0.5, 1e-4, -1e-4, 1e-4, 0.0]),
    )

    def step(setting):
        layer = nn.Module()
        layer.weight = nn.Parameter(start.to(setting.dtype))
        loss = (layer.weight * gradient.to(setting.dtype)).sum()
        loss.backward()
        torch.optim.SGD(layer.parameters(), lr=1.0).step()

    trace = recorded(step, BFLOAT16)
    (update,) = (op for op in trace.operations if op.phase == "result" and op.name == "updated")
    assert update.arguments == {"moved": 4, "lost": 2}
    ((lost, moved, name),) = losses(audited(step, b=BFLOAT16))
    assert (lost, moved, name) == (2, 4, "tensor 1 of shape (5,)")


@pytest.mark.parametrize("rate", [1e-4, 1e-2, 1.0])
def test_lost_updates_are_absent_in_float32(rate):
    report = audited(near_one(rate))
    assert (report.kind, losses(report)) == ("rounding", [])


def test_lost_updates_are_absent_in_bfloat16_at_a_large_rate():
    assert not losses(audited(near_one(100.0), b=BFLOAT16))


def test_lost_updates_are_found_in_float32_at_a_tiny_rate():
    report = audited(near_one(1e-9))
    ((lost, moved, _),) = losses(report)
    assert lost == moved == 75
    assert report.findings[0].setting == "cpu and cpu:threads=1"
    assert not report.faulty


def test_lost_updates_do_not_include_frozen_weights():
    def step(setting):
        net = seeded(lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))).to(setting.dtype)
        net[0].requires_grad_(False)
        net(X.to(setting.dtype)).square().mean().backward()
        torch.optim.SGD(net.parameters(), lr=1.0).step()

    assert not losses(audited(step, b=BFLOAT16))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_lost_updates_are_found_with_other_optimizers(optimizer):
    ((lost, moved, _),) = losses(audited(near_one(1e-4, optimizer), b=BFLOAT16))
    assert lost >= 0.9 * moved > 60


def test_lost_updates_are_absent_under_autocast():
    """Weights remain in float32."""
    assert not losses(audited(near_one(1e-4), b="cpu:autocast=bfloat16"))


# --- a gradient scaler ----------------------------------------------------------------------------


def scaled(scale, short=torch.float16):
    """Return a float32 step whose scaled loss is computed in a short format under one setting."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)))

    def step(setting):
        net, x = copy.deepcopy(model), X
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with torch.autocast("cpu", short, enabled=setting.threads is None):
            loss = F.cross_entropy(net(x), labels(5))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def test_grad_scaler_that_skips_a_step_is_no_fault():
    report = audited(scaled(2.0**26), a="cpu:threads=1", b="cpu")
    assert not report.faulty, str(report)
    first = report.findings[0]
    made = [
        op
        for op in report.b.operations
        if op.outputs and report.b.values[op.outputs[0]].dtype == "float16"
    ]
    infinite = next(
        op for op in made if any(math.isinf(x) for x in report.b.values[op.outputs[0]].sketch)
    )
    assert (first.operation, first.phase, first.setting) == (infinite.name, infinite.phase, "cpu")
    assert "infinity" in first.detail
    assert "skip" in first.detail
    assert "4 parameters" in first.detail
    assert "mismatch" not in {finding.kind for finding in report.findings}


def test_grad_scaler_that_skips_a_step_on_both_sides_is_no_difference():
    report = audited(scaled(2.0**26), a="cpu", b="cpu")
    assert "mismatch" not in {finding.kind for finding in report.findings}
    assert all(result.agrees for result in report.comparison.results)


def test_grad_scaler_that_skips_a_step_on_both_sides_is_no_fault():
    report = audited(scaled(2.0**26), a="cpu", b="cpu")
    assert (report.kind, report.faulty) == ("reduced precision", False)
    assert "scaler skipped the step under both" in report.headline
    assert "all is well" not in report.headline
    assert any("skip" in finding.detail for finding in report.findings)


def test_gradients_that_overflow_on_both_sides_without_a_scaler_are_a_fault():
    def step():
        net = seeded(lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)))
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(net(X), labels(5))
        (loss * 2.0**26).backward()
        return loss.detach(), *(parameter.grad for parameter in net.parameters())

    report = audited(step, a="cpu", b="cpu")
    assert (report.kind, report.faulty) == ("not finite", True), str(report)


def test_grad_scaler_with_an_infinite_loss_on_both_sides_is_a_fault():
    """The scaler skips this step, too, but for a reason that a smaller scale does not remove."""

    def step():
        net = seeded(lambda: nn.Linear(8, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        with torch.autocast("cpu", torch.float16):
            loss = (net(X) * 1e6).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    report = audited(step, a="cpu", b="cpu")
    assert (report.kind, report.faulty) == ("not finite", True), str(report)


@pytest.mark.parametrize("scale", [1.0, 2.0**8])
def test_grad_scaler_that_does_not_overflow_is_plain_reduced_precision(scale):
    report = audited(scaled(scale), a="cpu:threads=1", b="cpu")
    assert (report.kind, report.faulty) == ("reduced precision", False), str(report)
    assert all(result.agrees for result in report.comparison.results)
    assert "results agree in float64" in report.headline
    assert not any("skip" in finding.detail for finding in faults(report))
