import contextlib
import copy
import resource
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpulab as gl
from gpulab.training import GradientAccumulation

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")


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
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"),
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


def test_a_gradient_that_was_there_is_as_before_where_it_fails():
    model, data = TooLarge(0, torch.OutOfMemoryError("CUDA out of memory")), batch(4)
    whole(model.inner, F.mse_loss, data)
    before = gradient(model).clone()
    with pytest.warns(UserWarning, match="nobody has tried"), pytest.raises(gl.GpulabError, match="one example"):
        GradientAccumulation(model, F.mse_loss)(data)
    assert torch.equal(gradient(model), before)


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
        (nn.MultiheadAttention, "draws random numbers"),
        (Noisy(), "draws random numbers"),
        (Counts(), "calls"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(layer, words):
    if layer is nn.MultiheadAttention:
        model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        model.self_attn.dropout = 0.5
        data = torch.rand(6, 3, 6), torch.rand(6, 3, 6)
    else:
        model, data = network(layer), batch()
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    with pytest.raises(gl.UsageError, match=words):
        GradientAccumulation(model, F.mse_loss, batch=3)(data)
    assert all(map(torch.equal, buffers, model.buffers()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(16).eval(), nn.Dropout(0.0), nn.Dropout(0.5).eval()])
def test_what_takes_each_example_alone_is_split(layer):
    check_parts(network(layer), F.mse_loss, batch(), batch=3)


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


class Named(nn.Sequential):
    """Takes a batch by the names of its tensors, and computes the loss itself."""

    def forward(self, x, y):
        return {"loss": F.mse_loss(super().forward(x), y)}


def test_a_batch_by_names_is_split():
    (x, y), layers = batch(), network()
    in_parts = GradientAccumulation(Named(*layers), batch=4)
    check_parts(layers, F.mse_loss, (x, y), lambda: in_parts({"x": x, "y": y}))


@pytest.mark.parametrize(
    ("arguments", "rows", "words"),
    [
        ({"batch": 0}, 3, "batch 0"),
        ({"reduction": "none"}, 3, "'none'"),
        ({"loss": nn.MSELoss(reduction="none")}, 3, "'none'"),
        ({"loss": F.mse_loss}, 4, r"\[3, 4\] rows"),
    ],
)
def test_nonsense_is_refused(arguments, rows, words):
    with pytest.raises(gl.UsageError, match=words):
        GradientAccumulation(network(), **arguments)((torch.rand(3, 6), torch.rand(rows, 3)))


@contextlib.contextmanager
def little_memory(device):
    """The allocator itself fails, of this process or of the GPU."""
    if device == "cpu":
        before, pages = resource.getrlimit(resource.RLIMIT_AS), int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 100 * 2**20, before[1]))
    else:
        torch.cuda.empty_cache()
        room = torch.cuda.memory_reserved() + 300 * 2**20
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        if device == "cpu":
            resource.setrlimit(resource.RLIMIT_AS, before)
        else:
            torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(("device", "width"), [("cpu", 500), pytest.param("cuda", 2000, marks=needs_cuda)])
@pytest.mark.skipif(sys.platform != "linux", reason="a process on Linux can limit its own memory")
def test_a_batch_that_really_does_not_fit_is_trained_on(device, width):
    torch.manual_seed(0)
    layers = nn.Linear(100, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    model, data = nn.Sequential(*layers).to(device), [torch.rand(20_000, n, device=device) for n in (100, 1)]
    # In float32 the whole batch's own rounding is 2e-6.
    value, expected = whole(copy.deepcopy(model).double(), F.mse_loss, [part.double() for part in data])
    with little_memory(device), gl.setting("cuda:tf32=off" if device == "cuda" else "cpu:threads=1"):
        with pytest.raises(RuntimeError, match="memory"):
            F.mse_loss(model(data[0]), data[1]).backward()
        model.zero_grad()
        backward = GradientAccumulation(model, F.mse_loss)
        torch.testing.assert_close(backward(data), value.float())
    assert 1 < backward.batch < 20_000
    assert (gradient(model) - expected.float()).norm() <= 1e-6 * expected.norm()
