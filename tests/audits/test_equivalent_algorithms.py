"""Error bounds accept any order of summation and all documented GPU algorithms, but no wrong
kernel.

The algorithms are implemented here in float32, because a CPU has few of them.
"""

import itertools

import numpy as np
import pytest
import torch

from tests.audits._helpers import compared, drawn, ratio

aten = torch.ops.aten


def measured(operation, args, out, **kwargs):
    """Return the error in units of what rounding explains; it must have been measured."""
    seen = compared(operation, args, out, **kwargs)
    assert seen.error is not None, f"{operation} was not compared"
    assert seen.format is None
    return ratio(seen)


def tells(operation, args, right, *wrong):
    """Assert that rounding explains the first result, and none of the others."""
    assert measured(operation, args, right) < 1
    for result in wrong:
        assert measured(operation, args, result) > 1


# --- sums, whose terms may come in any order ------------------------------------------------------

NUMBERS = {
    "normal": drawn,
    "of one sign": lambda n: drawn(n).abs(),
    "in ascending order": lambda n: torch.linspace(-1, 1, n) + 1e-3,
    "which cancel": lambda n: torch.cat([drawn(n // 2), -(1 + 1e-4) * drawn(n // 2)]),
    "far from zero": lambda n: 1000 + drawn(n),
    "all equal": lambda n: torch.full((n,), 1 / 3),
}


def in_turn(x):
    """Sum along the first dimension in float32, one number after the other."""
    return torch.from_numpy(np.cumsum(x.numpy(), axis=0, dtype=np.float32))


def in_blocks(x, size=512):
    """Compute a running sum as on GPUs: within each block, plus the sums of earlier blocks."""
    blocks = [in_turn(block) for block in x.split(size)]
    before = in_turn(torch.stack([torch.zeros(()), *(block[-1] for block in blocks)]))
    return torch.cat([block + start for block, start in zip(blocks, before[:-1], strict=True)])


ORDERS = {
    "in turn": lambda x: in_turn(x)[-1],
    "at random": lambda x: in_turn(
        x[torch.randperm(len(x), generator=torch.Generator().manual_seed(3))]
    )[-1],
    "in blocks": lambda x: in_blocks(x)[-1],
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("order", ORDERS)
def test_forward_error_accepts_sums_and_means_in_any_order(numbers, order):
    """Nearly equal numbers are fewer: 50,000 of them, summed in turn, would have equal rounding
    errors.

    No library adds so many numbers in turn.
    """
    x = NUMBERS[numbers](5000 if numbers in ("far from zero", "all equal") else 50_000)
    total = ORDERS[order](x)
    assert measured(aten.sum.default, (x,), total) < 1
    assert measured(aten.mean.default, (x,), total / len(x)) < 1


@pytest.mark.parametrize("numbers", NUMBERS)
def test_forward_error_accepts_cumsum_in_blocks(numbers):
    x = NUMBERS[numbers](50_000)
    assert measured(aten.cumsum.default, (x, 0), in_blocks(x)) < 1


def test_forward_error_accepts_sequential_cumsum_and_no_wrong_one():
    x = NUMBERS["of one sign"](50_000)
    right = in_turn(x)
    wrong = torch.where(
        torch.arange(len(x)) < 513, right, right + 0.02 * right.square().mean().sqrt()
    )
    tells(aten.cumsum.default, (x, 0), right, wrong)


@pytest.mark.parametrize("numbers", ["normal", "of one sign", "far from zero", "all equal"])
@pytest.mark.parametrize(
    "places", [torch.arange(20_000) % 50, (torch.arange(20_000) % 500 - 450).clamp_min(0)]
)
def test_forward_error_accepts_sums_by_index_in_any_order(numbers, places):
    x, nothing, sums = NUMBERS[numbers](len(places)), torch.zeros(50), torch.zeros(50)
    np.add.at(sums.numpy(), places.numpy(), x.numpy())
    for operation, args in [
        (aten.index_add.default, (nothing, 0, places, x)),
        (aten.scatter_add.default, (nothing, 0, places, x)),
        (aten.index_put.default, (nothing, [places], x, True)),
    ]:
        tells(operation, args, sums, 1.01 * sums)
    gradient = (x[:, None], places, 50, -1, False)
    tells(aten.embedding_dense_backward.default, gradient, sums[:, None], 1.01 * sums[:, None])


# --- means and variances --------------------------------------------------------------------------


def normalised_in_one_pass(x, dims, eps=1e-5):
    mean = x.mean(dims, keepdim=True)
    variance = (x.square().mean(dims, keepdim=True) - mean.square()).clamp_min(0)
    reciprocal = (variance + eps).rsqrt()
    return (x - mean) * reciprocal, mean, reciprocal


@pytest.mark.parametrize("offset", [0.0, 5.0, 100.0])
@pytest.mark.parametrize("count", [2, 64])
def test_forward_error_accepts_normalizations_in_one_pass(offset, count):
    x = offset + drawn(count, 6, 8)
    batch, mean, reciprocal = normalised_in_one_pass(x[:, :, 0], (0,))
    none = (None, None)
    args = (x[:, :, 0], *none, None, None, True, 0.1, 1e-5)
    assert measured(aten.native_batch_norm.default, args, (batch, mean[0], reciprocal[0])) < 1
    layer = normalised_in_one_pass(x, (1, 2))
    assert measured(aten.native_layer_norm.default, (x, [6, 8], *none, 1e-5), layer) < 1


# --- one right result and wrong ones --------------------------------------------------------------


def algorithms():
    """Yield an operation, its arguments, the result of another correct algorithm, and wrong
    results.
    """
    x = 10 * drawn(5000)
    running = torch.stack([*itertools.accumulate(x, torch.logaddexp)])
    yield aten.logcumsumexp.default, (x, 0), running, 1.001 * running

    x = drawn(100_000)
    yield aten.linalg_vector_norm.default, (x,), in_turn(x.square())[-1].sqrt(), 1.001 * x.norm()

    x, grad = 3 * drawn(30_000), drawn(30_000, seed=1)
    shifted, y = x - x.max(), x.softmax(0)
    total, back = in_turn(shifted.exp())[-1], y * (grad - in_turn(grad * y)[-1])
    yield aten._softmax.default, (x, 0, False), shifted.exp() / total, 1.001 * shifted.exp() / total
    yield aten._log_softmax.default, (x, 0, False), shifted - total.log()
    yield aten._softmax_backward_data.default, (grad, y, 0, torch.float32), back, 1.01 * back

    x, grad = 5 + drawn(3000, 4), 1 + drawn(3000, 4, seed=1)
    mean, reciprocal = x.mean(0), (x.var(0, correction=0) + 1e-5).rsqrt()
    standard = (x - mean) * reciprocal
    of_weight, of_bias = in_turn(grad * standard)[-1], in_turn(grad)[-1]
    of_x = reciprocal * (grad - of_bias / 3000 - standard * of_weight / 3000)
    args = (grad, x, torch.ones(4), None, None, mean, reciprocal, True, 1e-5, [True, True, True])
    without_mean = reciprocal * (grad - standard * of_weight / 3000)
    wrong = (without_mean, of_weight, of_bias), (of_x, 1.01 * of_weight, of_bias)
    yield aten.native_batch_norm_backward.default, args, (of_x, of_weight, of_bias), *wrong

    x, y = drawn(6, 5000), drawn(7, 5000, seed=1)
    distances = in_turn((x[:, None] - y).square().permute(2, 0, 1))[-1].sqrt()
    yield aten._cdist_forward.default, (x, y, 2.0, 2), distances, 1.001 * distances


@pytest.mark.parametrize("call", list(algorithms()), ids=lambda call: str(call[0]))
def test_forward_error_accepts_other_algorithms_and_no_slightly_wrong_result(call):
    tells(*call)
