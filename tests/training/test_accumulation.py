"""Batches: in parts that fit into memory, and how large one should be."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpulab as gl
from gpulab.models import Autoencoder
from gpulab.models.base import Trainable
from gpulab.training import GradientAccumulation
from gpulab.training.batches import fit_law, noise_scale, steps_to_target


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


class Mean(Trainable):
    """It learns the mean of its examples: a gradient of w − x for each."""

    def __init__(self, width):
        super().__init__()
        self.w = nn.Parameter(torch.full((width,), 0.5))

    def training_loss(self, batch, state):  # noqa: ARG002
        loss = (self.w - batch).square().sum(1).mean() / 2
        return loss, loss.detach().expand(len(batch)), None


def test_the_noise_scale_is_known_in_closed_form():
    """Normal examples of deviation 0.3 in 50 dimensions: |G|² = 50 × 0.25, tr Σ = 50 × 0.09."""
    examples = 0.3 * torch.randn(20_000, 50, generator=torch.Generator().manual_seed(0))
    found = noise_scale(Mean(50), examples, 10)
    assert found.gradient == pytest.approx(12.5, rel=0.01)
    assert found.variance == pytest.approx(4.5, rel=0.03)
    assert found.scale == pytest.approx(0.36, rel=0.03)


def test_the_estimates_have_no_bias_with_few_examples():
    generator = torch.Generator().manual_seed(1)
    found = [noise_scale(Mean(5), torch.randn(8, 5, generator=generator), 2) for _ in range(2000)]
    assert np.mean([each.gradient for each in found]) == pytest.approx(1.25, abs=0.06)
    assert np.mean([each.variance for each in found]) == pytest.approx(5.0, abs=0.15)


def test_larger_batches_take_fewer_steps_to_a_target_and_more_examples():
    net, data = Autoencoder((16,)), gl.load("digits", size=(28, 28))
    table = steps_to_target(net, data, 0.04, (1, 8, 64), (1e-3, 3e-3), most=1500, progress=False)
    best = table[table.best].drop_duplicates("batch_size").set_index("batch_size")
    assert best.steps.is_monotonic_decreasing
    assert best.examples.is_monotonic_increasing
    assert math.isnan(steps_to_target(net, data, 1e-6, (1,), (1e-3,), most=5, progress=False).steps[0])


def test_the_law_is_found_again():
    sizes = [1, 2, 4, 8, 16, 32, 64]
    assert fit_law(sizes, [30 * (1 + 12 / size) for size in sizes]) == pytest.approx((30, 12), rel=1e-4)


def test_a_batch_that_does_not_divide_the_examples_is_refused():
    with pytest.raises(gl.UsageError, match="10 examples in batches of 3"):
        noise_scale(Mean(2), torch.rand(10, 2), 3)
