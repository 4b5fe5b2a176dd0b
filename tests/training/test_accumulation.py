import copy

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


@pytest.mark.parametrize("size", [1, 3, 4, 9, 10, 50])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_in_parts_is_that_of_the_whole(size, reduction):
    model, data, loss = network(), batch(), nn.MSELoss(reduction=reduction)
    expected, of_the_whole = whole(model, loss, data)
    model.zero_grad()
    value = GradientAccumulation(model, loss, batch=size)(data)
    torch.testing.assert_close(value, expected)
    assert (gradient(model) - of_the_whole).norm() <= 1e-6 * of_the_whole.norm()


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
    _, of_the_whole = whole(model.inner, F.mse_loss, data)
    model.zero_grad()
    backward(data)
    assert (gradient(model) - of_the_whole).norm() <= 1e-6 * of_the_whole.norm()


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
    GradientAccumulation(network(layer), F.mse_loss, batch=3)(batch())


def test_a_mean_over_what_a_mask_leaves_is_refused_and_its_sum_is_not():
    model, (inputs, _) = network(), batch()
    targets = torch.tensor([0, -100, 1, 2, -100, -100, 0, 1, 2, -100])
    with pytest.raises(gl.UsageError, match="cannot be split"):
        GradientAccumulation(model, F.cross_entropy, batch=3)((inputs, targets))
    loss = nn.CrossEntropyLoss(reduction="sum")
    _, of_the_whole = whole(model, loss, (inputs, targets))
    model.zero_grad()
    GradientAccumulation(model, loss, batch=3)((inputs, targets))
    assert (gradient(model) - of_the_whole).norm() <= 1e-6 * of_the_whole.norm()


def test_gpulabs_networks_are_split_or_refused_by_name():
    images = torch.rand(12, 1, 28, 28)
    net = gl.models.Autoencoder(batch_size=12)
    net.training_loss(images, None)[0].backward()
    of_the_whole = gradient(net)
    net.zero_grad()
    GradientAccumulation(net, batch=5)(images)
    assert (gradient(net) - of_the_whole).norm() <= 1e-6 * of_the_whole.norm()
    with pytest.raises(gl.UsageError, match="batch of Whitener cannot be split"):
        GradientAccumulation(gl.models.Whitener(), batch=30)(torch.rand(50, 1, 28, 28))
    with pytest.raises(gl.UsageError, match="PredNet carries a state"):
        GradientAccumulation(gl.models.PredNet(channels=(3, 4), size=(12, 16)), batch=2)(torch.rand(5, 1, 3, 12, 16))


def test_a_batch_by_names_is_split():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x, y):
            return {"loss": F.mse_loss(self.inner(x), y)}

    (x, y), model = batch(), Named()
    expected, of_the_whole = whole(model.inner, F.mse_loss, (x, y))
    model.zero_grad()
    torch.testing.assert_close(GradientAccumulation(model, batch=4)({"x": x, "y": y}), expected)
    assert (gradient(model) - of_the_whole).norm() <= 1e-6 * of_the_whole.norm()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch": 0}, "batch 0"),
        ({"batch": "half"}, "'half'"),
        ({"reduction": "none"}, "'none'"),
        ({"loss": nn.MSELoss(reduction="none")}, "'none'"),
    ],
)
def test_nonsense_is_refused(arguments, words):
    with pytest.raises(gl.UsageError, match=words):
        GradientAccumulation(network(), **arguments)


def test_tensors_of_different_lengths_are_refused():
    with pytest.raises(gl.UsageError, match=r"\[3, 4\] rows"):
        GradientAccumulation(network(), F.mse_loss)((torch.rand(3, 6), torch.rand(4, 3)))


def test_a_batch_that_really_does_not_fit_is_trained_on(python):
    """A process whose address space is limited: the allocator itself fails."""
    done = python(
        """
        import copy
        import resource
        import torch
        from torch import nn
        from gpulab.training import GradientAccumulation

        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(100, 500), nn.Tanh(), nn.Linear(500, 500), nn.Tanh(), nn.Linear(500, 1))
        inputs, targets = torch.rand(20_000, 100), torch.rand(20_000, 1)
        loss = nn.functional.mse_loss
        exact = copy.deepcopy(model).double()  # in float32 the whole batch's own rounding is 2e-6
        whole = loss(exact(inputs.double()), targets.double())
        whole.backward()
        expected = [p.grad for p in exact.parameters()]
        used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20, -1))
        try:
            loss(model(inputs), targets).backward()
            print("the whole fits")
        except RuntimeError as error:
            print(str(error)[:300].replace(chr(10), " "))
        model.zero_grad()
        backward = GradientAccumulation(model, loss)
        value = backward((inputs, targets))
        pairs = [(p.grad, e) for p, e in zip(model.parameters(), expected)]
        off = max(float((got - want).norm() / want.norm()) for got, want in pairs)
        print(backward.batch, off, float((value - whole).abs() / whole))
        """,
        OMP_NUM_THREADS="1",
    )
    refused, numbers = done.stdout.splitlines()
    assert "memory" in refused
    size, off, loss = numbers.split()
    assert 1 < int(size) < 20_000
    assert float(off) <= 1e-6
    assert float(loss) <= 1e-6


@needs_cuda
def test_a_batch_that_does_not_fit_on_the_gpu_is_trained_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 2000), nn.Tanh(), nn.Linear(2000, 2000), nn.Tanh(), nn.Linear(2000, 1)).cuda()
    data = torch.rand(20_000, 100, device="cuda"), torch.rand(20_000, 1, device="cuda")
    exact = copy.deepcopy(model).double()
    _, expected = whole(exact, F.mse_loss, [part.double() for part in data])
    expected = expected.float()
    exact = None
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 300 * 2**20
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError):
            F.mse_loss(model(data[0]), data[1]).backward()
        model.zero_grad()
        backward = GradientAccumulation(model, F.mse_loss)
        with gl.setting("cuda:tf32=off"):
            backward(data)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1 < backward.batch < 20_000
    assert (gradient(model) - expected).norm() <= 1e-6 * expected.norm()
