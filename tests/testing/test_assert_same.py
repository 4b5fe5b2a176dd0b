"""Typical changes to a training step, correct and wrong."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpulab as gl
from gpulab.testing import assert_same
from tests.audits._helpers import drawn, labels, seeded

MODEL = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)))
X = drawn(7, 6)


def whole():
    loss = F.cross_entropy(MODEL(X), labels(7))
    loss.backward()
    return loss.detach()


def checkpointed():
    loss = F.cross_entropy(MODEL[2](checkpoint(MODEL[:2], X, use_reentrant=False)), labels(7))
    loss.backward()
    return loss.detach()


def accumulated():
    total = 0.0
    for x, y in zip(X.split(4), labels(7).split(4), strict=True):
        loss = F.cross_entropy(MODEL(x), y, reduction="sum") / 7
        loss.backward()
        total = total + loss.detach()
    return total


def mean_of_means():
    total = 0.0
    for x, y in zip(X.split(4), labels(7).split(4), strict=True):
        loss = F.cross_entropy(MODEL(x), y) / 2
        loss.backward()
        total = total + loss.detach()
    return total


def detached():
    loss = F.cross_entropy(MODEL[2](MODEL[:2](X).detach()), labels(7))
    loss.backward()
    return loss.detach()


def in_bfloat16():
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(MODEL(X), labels(7))
    loss.backward()
    return loss.detach()


def with_dropout(seed=0):
    torch.manual_seed(seed)
    loss = F.cross_entropy(MODEL[2](F.dropout(MODEL[:2](X))), labels(7))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("other", [whole, checkpointed, accumulated])
def test_assert_same_accepts_another_way_to_compute_a_step(other):
    assert_same(whole, other)
    assert_same(whole, other, setting="cpu:autocast=bfloat16")


def test_assert_same_names_results_distance_and_line():
    with pytest.raises(AssertionError) as failure:
        assert_same(whole, mean_of_means)
    summary, first_result, *_ = str(failure.value).splitlines()
    assert summary == "mean_of_means does not compute what whole computes."
    assert "differs by" in first_result
    assert "times the rounding errors of the two steps" in first_result
    assert "loss = F.cross_entropy(MODEL(x), y) / 2" in str(failure.value)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (detached, r"the gradient of 0\.weight: only whole "),
        (in_bfloat16, "in_bfloat16 computes in another number format what whole computes"),
        (with_dropout, "with_dropout cannot be shown to compute what whole computes"),
    ],
)
def test_assert_same_fails_where_a_step_is_not_shown_to_be_the_same(other, said):
    with pytest.raises(AssertionError, match=said):
        assert_same(whole, other)


def test_assert_same_accepts_the_same_random_numbers():
    assert_same(with_dropout, lambda: with_dropout(0))
    with pytest.raises(AssertionError, match="different random numbers"):
        assert_same(with_dropout, lambda: with_dropout(1))


def test_assert_same_fails_if_nothing_was_compared():
    with pytest.raises(AssertionError, match="have no result in common, so nothing was compared"):
        assert_same(whole, lambda: {"sum": X.sum(), "mean": X.mean()})


def test_assert_same_takes_steps_and_updates():
    def update(foreach, decay=0.1):
        net = copy.deepcopy(MODEL)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=foreach, weight_decay=decay)
        F.cross_entropy(net(X), labels(7)).backward()
        optimizer.step()

    assert_same(lambda: update(True), lambda: update(False))
    with pytest.raises(AssertionError, match=r"updated 0\.weight differs"):
        assert_same(lambda: update(True), lambda: update(True, decay=0.2))
    step = gl.Step(MODEL, (X, labels(7)), nn.functional.cross_entropy)
    assert_same(step, step)


def test_assert_same_message_can_be_replaced():
    with pytest.raises(AssertionError, match=r"^not the same$"):
        assert_same(whole, mean_of_means, msg="not the same")


def test_assert_same_refuses_what_is_no_step():
    with pytest.raises(gl.UsageError, match="expected"):
        assert_same(MODEL, whole)
