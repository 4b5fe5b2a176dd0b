"""Batches in parts that fit into memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpulab as gl
from gpulab.training import GradientAccumulation


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *layers, nn.Linear(16, 3))


def batch(count=10):
    draw = torch.Generator().manual_seed(1)
    return torch.rand(count, 6, generator=draw), torch.rand(count, 3, generator=draw)


def gradient(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def whole(model, loss, data):
    model.zero_grad()
    value = loss(model(data[0]), data[1])
    value.backward()
    return value.detach(), gradient(model)


def check_parts(model, loss, data, in_parts=None, **how):
    """The loss and the gradient in parts are those of the whole."""
    expected, of_the_whole = whole(model, loss, data)
    model.zero_grad()
    value = in_parts() if in_parts else GradientAccumulation(model, loss, **how)(data)
    torch.testing.assert_close(value, expected)
    assert (gradient(model) - of_the_whole).norm() <= 1e-6 * of_the_whole.norm()


@pytest.mark.parametrize("size", [1, 3, 4, 9, 10, 50])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_in_parts_is_that_of_the_whole(size, reduction):
    check_parts(network(), nn.MSELoss(reduction=reduction), batch(), batch=size)


def test_it_adds_to_the_gradient_that_is_there():
    model, data = network(), batch()
    _, once = whole(model, F.mse_loss, data)
    held = [p.grad for p in model.parameters()]
    GradientAccumulation(model, F.mse_loss, batch=4)(data)
    torch.testing.assert_close(gradient(model), 2 * once)
    assert all(p.grad is before for p, before in zip(model.parameters(), held, strict=True))


class TooLarge(nn.Module):
    """Has no room for more than so many examples: the error comes in the backward pass."""

    def __init__(self, room, error):
        super().__init__()
        self.inner, self.room, self.error, self.sizes = network(), room, error, []

    def forward(self, x):
        self.sizes.append(len(x))
        out = self.inner(x)
        if len(x) > self.room:
            out.register_hook(self.fail)
        return out

    def fail(self, _):
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("MPS backend out of memory"),
    ],
)
def test_a_batch_is_halved_until_it_fits_and_the_size_is_remembered(error):
    model, data = TooLarge(3, error), batch()
    backward = GradientAccumulation(model, F.mse_loss)
    backward(data)
    assert backward.batch == 3
    tried = [size for size in model.sizes if size != 1 and size != 2]
    assert tried == [10, 3, 3, 5, 3, 3, 3], "whole; two gradients of three examples; five; then three at a time"
    model.sizes.clear()
    backward(data)
    assert model.sizes == [3, 3, 3, 1]
    check_parts(model.inner, F.mse_loss, data, lambda: backward(data))


def test_another_error_is_not_taken_for_too_little_memory():
    model, data = TooLarge(0, RuntimeError("a bug")), batch()
    with pytest.raises(RuntimeError, match="a bug"):
        GradientAccumulation(model, F.mse_loss)(data)
    assert model.sizes == [10]
    assert all(p.grad is None for p in model.parameters())


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm1d(16), r"BatchNorm1d \(2\)"),
        (nn.BatchNorm1d(16, track_running_stats=False).eval(), r"BatchNorm1d \(2\)"),
        (nn.Dropout(0.5), r"Dropout \(2\) draws"),
        (Noisy(), "draws random numbers"),
        (Counts(), "calls"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(layer, words):
    model, data = network(layer), batch()
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    with pytest.raises(gl.UsageError, match=words):
        GradientAccumulation(model, F.mse_loss, batch=3)(data)
    assert all(map(torch.equal, buffers, model.buffers()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_a_mean_over_what_a_mask_leaves_is_refused_and_its_sum_is_not():
    model, (inputs, _) = network(), batch()
    targets = torch.tensor([0, -100, 1, 2, -100, -100, 0, 1, 2, -100])
    with pytest.raises(gl.UsageError, match="cannot be split"):
        GradientAccumulation(model, F.cross_entropy, batch=3)((inputs, targets))
    check_parts(model, nn.CrossEntropyLoss(reduction="sum"), (inputs, targets), batch=3)


def test_gpulabs_networks_are_split_or_refused_by_name():
    images, net = torch.rand(12, 1, 28, 28), gl.models.Autoencoder(batch_size=12)
    in_parts = GradientAccumulation(net, batch=5)
    check_parts(net, lambda *_: net.training_loss(images, None)[0], (images, None), lambda: in_parts(images))
    with pytest.raises(gl.UsageError, match="batch of Whitener cannot be split"):
        GradientAccumulation(gl.models.Whitener(), batch=30)(torch.rand(50, 1, 28, 28))
    with pytest.raises(gl.UsageError, match="PredNet carries a state"):
        GradientAccumulation(gl.models.PredNet(channels=(3, 4), size=(12, 16)), batch=2)(torch.rand(5, 1, 3, 12, 16))
