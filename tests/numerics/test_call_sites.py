"""Lines that keep float32, forward and backward, whatever the setting allows."""

import pytest
import torch

import gpulab as gl

TF32 = "cpu:emulate=tf32"


def products(setting):
    """Two products and the gradients of their sum; and the numbers of their lines."""
    x = torch.randn(30, 30, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = x.detach().clone().requires_grad_()
    with gl.setting(setting):
        first = x @ x
        second = y @ y
        (first.sum() + second.sum()).backward()
    line = products.__code__.co_firstlineno
    return (first.detach(), x.grad, second.detach(), y.grad), (
        f"test_call_sites.py:{line + 5}",
        f"test_call_sites.py:{line + 6}",
    )


def test_a_line_keeps_float32_forward_and_backward_and_the_other_does_not():
    plain, (one, other) = products("cpu")
    rounded, _ = products(TF32)
    assert not any(torch.equal(x, y) for x, y in zip(plain, rounded, strict=True))
    for lines, kept in (
        (one, {0, 1}),
        (other, {2, 3}),
        (f"{other}+{one}", {0, 1, 2, 3}),
        ("test_call_sites.py:1", set()),
    ):
        made, _ = products(f"{TF32},float32={lines}")
        expected = [(plain if place in kept else rounded)[place] for place in range(4)]
        assert all(map(torch.equal, made, expected)), lines
    for text in ("", "12", "model.py", "model.py:12+", "model.py:x"):
        with pytest.raises(gl.UsageError, match="lines of files"):
            gl.Setting.parse(f"{TF32},float32={text}")
