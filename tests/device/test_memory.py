import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import gpulab as gl
from gpulab.device import memory_watch
from gpulab.device.memory import BEFORE, NO_TENSOR, leaks

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")


def trained(model, loss, steps, device="cpu", kept=None):
    """Watch a training of so many steps; `kept(value)` is what somebody keeps of each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with memory_watch(device) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss(model)
            value.backward()
            optimizer.step()
            if kept:
                kept(value)
            watch.step()
    return watch


def network(device="cpu"):
    return nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 1)).to(device)


def squared(model):
    x = torch.ones(64, 50, device=next(model.parameters()).device)
    return model(x).square().mean()


def before_bytes(watch):
    return watch.peak.bytes[watch.peak.line == BEFORE].sum()


def new_bytes(watch):
    """What was held at the peak and had not been there before, by kind."""
    rows = watch.peak[watch.peak.line != BEFORE]
    return rows.groupby("kind").bytes.sum().to_dict()


@pytest.mark.parametrize("layers", [3, 7])
def test_the_peak_of_a_chain_of_products_is_that_of_the_closed_form(layers):
    edge = 64
    unit = 4 * edge**2
    x, weights = torch.randn(edge, edge), [torch.randn(edge, edge, requires_grad=True) for _ in range(layers)]
    with memory_watch() as watch:
        h = x
        for weight in weights:
            h = h @ weight
        h.sum().backward()
        watch.step()
    # When the last product but one has been differentiated: two gradients of weights, the inputs of those that are
    # still to come, the output, the gradients of an input and of the one before it; and a few scalars.
    expected = {"gradients": 2 * unit, "saved for backward": (layers - 2) * unit, "other": 3 * unit}
    found = new_bytes(watch)
    assert found.keys() == expected.keys()
    assert all(0 <= found[kind] - size <= 16 for kind, size in expected.items())
    assert 0 <= watch.peak_bytes - before_bytes(watch) - (layers + 3) * unit <= 16
    lines = watch.peak[watch.peak.kind == "saved for backward"].line
    assert [line.partition(": ")[2] for line in lines if line != BEFORE] == ["h = h @ weight"]
    assert "1 steps are too few to see a leak" in str(watch)


def test_adams_moments_come_once_and_are_no_leak():
    model = network()
    model.without_memory = nn.LazyLinear(3), torch.eye(3).to_sparse(), torch.empty(3, device="meta")  # are left alone
    count = sum(p.numel() for p in model.parameters())
    watch = trained(model, squared, 20)
    assert watch.leaks.empty
    assert "No leak in 20 steps" in str(watch)
    assert watch.peak_step == 2, "the first in which Adam's moments are there from the beginning"
    assert new_bytes(watch)["optimizer state"] == 4 * (2 * count + 4)  # and a count of steps for each parameter
    assert new_bytes(watch)["gradients"] == 4 * (200 + 1), "of the last layer, before those of the first are there"


def test_a_list_that_keeps_losses_with_their_graphs_is_a_leak_with_its_line():
    model, kept = network(), []
    x = torch.ones(64, 50)

    def loss(model):
        kept.append(model(x).mean())  # validation, and nobody said no_grad
        return squared(model)

    watch = trained(model, loss, 8)
    (line,) = watch.leaks.index
    assert line.startswith("test_memory.py:")
    assert line.endswith("kept.append(model(x).mean())  # validation, and nobody said no_grad")
    # what the graph saves: the hidden layer, rectified; and the result, the mean
    assert watch.leaks[line] == pytest.approx(4 * (64 * 200 + 1), rel=0.2)
    assert f"A leak, 51.2 kB more a step: {line}" in str(watch)
    small = trained(network(), squared, 8, kept=[].append).leaks  # of losses whose graphs are freed
    assert small.tolist() == [4.0]
    assert small.index[0].endswith("return model(x).square().mean()")


def test_what_reference_cycles_hold_is_no_leak():
    class Own:
        first = None  # is kept, and is no leak

    def keep(_):
        own = Own()
        own.me, own.tensor = own, torch.ones(1000)
        Own.first = Own.first or own

    gc.disable()
    try:
        watch = trained(network(), squared, 8, kept=keep)
    finally:
        gc.enable()
    assert new_bytes(watch)["other"] > 7 * 4000, "it was held"
    assert watch.leaks.empty


def test_gradients_are_the_same_bits_and_the_graph_is_freed_as_ever():
    model = network()
    expected = torch.autograd.grad(squared(model), list(model.parameters()))
    with memory_watch():
        hidden = model[0](torch.ones(64, 50))
        squared(model).backward()
        freed = weakref.ref(hidden.untyped_storage())
        del hidden
        assert freed() is None
    assert all(torch.equal(p.grad, want) for p, want in zip(model.parameters(), expected, strict=True))


def test_after_the_watch_nothing_of_it_is_left():
    before = len(_global_optimizer_post_hooks)
    with pytest.raises(ValueError, match="of the program"), memory_watch():
        raise ValueError("of the program")
    assert len(_global_optimizer_post_hooks) == before
    with pytest.raises(gl.UsageError, match="'mps'"), memory_watch("mps"):
        pass


@pytest.mark.parametrize(
    ("held", "remaining", "is_leak"),
    [
        ([0, 1, 2, 3, 4, 5], 5, True),
        ([0, 0, 1, 1, 2, 3], 3, True),
        ([0, 1, 2, 3, 4, 5], 2, False),  # what is gone in the end
        ([0, 5, 6, 0, 5, 6], 6, False),  # a cache that is emptied
        ([0, 1, 2, 3, 3, 3, 3, 3], 3, False),  # one that is full
        ([0, 1, 2], 2, False),  # too few
    ],
)
def test_what_grows_and_never_shrinks_is_a_leak(held, remaining, is_leak):
    found = leaks([{"a line": size} for size in held], {"a line": remaining})
    assert found.to_dict() == ({"a line": (held[-1] - held[0]) / (len(held) - 1)} if is_leak else {})


def test_what_a_failed_backward_leaves_is_gone_after_the_block():
    """Else torch may end Python with it: docs/upstream_autograd_exit.md."""
    weight = torch.ones(3, requires_grad=True)
    with memory_watch():
        parts = [weight.exp() for _ in range(40)]
        loss = sum(part.sum() for part in parts)
        parts[20].add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()
    saved = weakref.ref(parts[0].untyped_storage())
    del parts, loss
    assert saved() is None


@needs_cuda
def test_on_cuda_the_peak_is_that_of_the_allocator():
    model = network("cuda")
    trained(model, squared, 2, "cuda")  # libraries take their workspaces once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    watch = trained(model, squared, 20, "cuda")
    assert watch.peak_bytes == pytest.approx(torch.cuda.memory_stats()["requested_bytes.all.peak"], rel=0.02)
    assert watch.leaks.empty
    assert watch.peak.bytes.sum() == watch.peak_bytes
    assert NO_TENSOR in set(watch.peak.line)
    count = sum(p.numel() for p in model.parameters())
    assert new_bytes(watch)["optimizer state"] >= 4 * 2 * count
    assert new_bytes(watch)["gradients"] > 0
