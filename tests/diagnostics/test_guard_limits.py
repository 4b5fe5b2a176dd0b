"""What `gl.guard` says of itself that it does not see is not seen, and what it advises is."""

import threading

import pytest
import torch

import gpulab as gl


class Times(torch.autograd.Function):
    """x · w, with x kept as an attribute, which no hook of torch's meets."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.x = x
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient * ctx.x


class TimesSaved(Times):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient * ctx.saved_tensors[0]


def hooked(x, w):
    out = w * 1
    out.register_hook(lambda gradient: gradient * x)
    return out


def in_thread(function):
    out = []
    thread = threading.Thread(target=lambda: out.append(function()))
    thread.start()
    thread.join()
    return out[0]


def on_cpu(x, w):
    with torch.autograd.graph.save_on_cpu():
        return x * w


def checkpointed(x, w):
    return torch.utils.checkpoint.checkpoint(torch.mul, x, w, use_reentrant=False)


def gradient(product):
    """That of w, which would be one, after x was overwritten with twos."""
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    loss = product(x, w).sum()
    x.data.fill_(2)
    loss.backward()
    return w.grad.tolist()


@pytest.mark.parametrize(
    ("product", "words"),
    [
        (Times.apply, "`ctx.x = x`"),
        (hooked, "closure"),
        (lambda x, w: in_thread(lambda: x * w), "another thread"),
        (on_cpu, "save_on_cpu"),
    ],
    ids=["an attribute", "a hook", "a thread", "save_on_cpu"],
)
def test_what_is_not_seen_is_said(product, words):
    assert words in gl.guard.__doc__
    with gl.guard() as report:
        assert gradient(product) == [2, 2, 2], "wrong, and nobody says so"
    assert not report
    assert report.checked == 0


def test_what_is_advised_instead_is_seen():
    def guarded_in_thread(x, w):
        def work():
            with guard:
                return x * w

        return in_thread(work)

    for product in (TimesSaved.apply, guarded_in_thread, checkpointed):
        guard = gl.guard()
        with pytest.raises(gl.OverwrittenError), guard:
            gradient(product)
