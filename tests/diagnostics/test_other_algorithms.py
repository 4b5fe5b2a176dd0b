"""Bounds allow every order of summation and every documented algorithm of GPUs' libraries, and no wrong kernel.

The algorithms are written down here in float32: a CPU has few of them.
"""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_steps import compared, drawn, ratio

aten = torch.ops.aten


def measured(operation, args, out, **kwargs):
    """The error in units of what rounding explains, which must have been measured."""
    seen = compared(operation, args, out, **kwargs)
    assert seen.error is not None, f"{operation} was not compared"
    assert seen.format is None
    return ratio(seen)


def tells(operation, args, right, *wrong):
    """Of one result that rounding explains it, and of others that it does not."""
    assert measured(operation, args, right) < 1
    for result in wrong:
        assert measured(operation, args, result) > 1


# --- sums, whose terms may come in any order --------------------------------------------------------------------

NUMBERS = {
    "normal": drawn,
    "of one sign": lambda n: drawn(n).abs(),
    "in ascending order": lambda n: torch.linspace(-1, 1, n) + 1e-3,
    "which cancel": lambda n: torch.cat([drawn(n // 2), -(1 + 1e-4) * drawn(n // 2)]),
    "far from zero": lambda n: 1000 + drawn(n),
    "all equal": lambda n: torch.full((n,), 1 / 3),
}


def in_turn(x):
    """Float32 sums along the first dimension, one number after the other."""
    return torch.from_numpy(np.cumsum(x.numpy(), axis=0, dtype=np.float32))


def in_blocks(x, size=512):
    """A running sum as GPUs have it: of each block by itself, and of the blocks before."""
    blocks = [in_turn(block) for block in x.split(size)]
    before = in_turn(torch.stack([torch.zeros(()), *(block[-1] for block in blocks)]))
    return torch.cat([block + start for block, start in zip(blocks, before[:-1], strict=True)])


ORDERS = {
    "in turn": lambda x: in_turn(x)[-1],
    "backwards": lambda x: in_turn(x.flip(0))[-1],
    "at random": lambda x: in_turn(x[torch.randperm(len(x), generator=torch.Generator().manual_seed(3))])[-1],
    "largest first": lambda x: in_turn(x.sort(descending=True).values)[-1],
    "in blocks": lambda x: in_blocks(x)[-1],
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_sum_or_mean_in_any_order_is_right(numbers, order):
    """But for 50,000 numbers that are next to equal and that no library adds up in turn: they would round alike."""
    x = NUMBERS[numbers](5000 if numbers in ("far from zero", "all equal") else 50_000)
    total = ORDERS[order](x)
    assert measured(aten.sum.default, (x,), total) < 1
    assert measured(aten.mean.default, (x,), total / len(x)) < 1


@pytest.mark.parametrize("numbers", ["normal", "of one sign", "far from zero"])
def test_a_sum_that_misses_a_part_or_is_divided_by_another_number_is_wrong(numbers):
    x = NUMBERS[numbers](1000)
    assert measured(aten.sum.default, (x,), x[:-3].sum()) > 1
    assert measured(aten.mean.default, (x,), x.sum() / 999) > 1 or numbers == "normal"


@pytest.mark.parametrize(
    ("numbers", "scan"), [(n, in_blocks) for n in NUMBERS] + [(n, in_turn) for n in NUMBERS if n != "all equal"]
)
def test_running_sums_in_float32_are_right(numbers, scan):
    x = NUMBERS[numbers](50_000)
    assert measured(aten.cumsum.default, (x, 0), scan(x)) < 1
    wrong = scan(x)
    wrong[513:] += 0.02 * float(wrong.norm()) / math.sqrt(len(x))
    assert measured(aten.cumsum.default, (x, 0), wrong) > 1 or numbers != "of one sign"


def test_running_products_in_float32_are_right():
    x = 1 + 0.01 * drawn(20_000)
    product = torch.from_numpy(np.cumprod(x.numpy(), dtype=np.float32))
    assert measured(aten.cumprod.default, (x, 0), product) < 1
    late = product[:5000].clone()
    late[1000:] *= 1.001
    assert measured(aten.cumprod.default, (x[:5000], 0), late) > 1


@pytest.mark.parametrize("numbers", ["normal", "of one sign", "far from zero", "all equal"])
@pytest.mark.parametrize("places", ["evenly", "one alone", "most in one"])
def test_sums_by_index_in_any_order_are_right(numbers, places):
    count = 20_000
    index = {
        "evenly": torch.arange(count) % 50,
        "one alone": torch.full((count,), 7),
        "most in one": (torch.arange(count) % 500 - 450).clamp_min(0),
    }[places]
    x = NUMBERS[numbers](count)
    sums = torch.zeros(50)
    np.add.at(sums.numpy(), index.numpy(), x.numpy())
    nothing = torch.zeros(50)
    calls = [
        (aten.index_add.default, (nothing, 0, index, x), sums),
        (aten.scatter_add.default, (nothing, 0, index, x), sums),
        (aten.index_put.default, (nothing, [index], x, True), sums),
        (aten.embedding_dense_backward.default, (x[:, None], index, 50, -1, False), sums[:, None]),
    ]
    for operation, args, right in calls:
        tells(operation, args, right, 1.01 * right)


# --- means and variances -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("count", [2, 100, 10_000])
def test_a_variance_in_one_pass_is_right_and_one_of_another_normaliser_is_not(offset, count):
    x = offset + drawn(count, 3)
    mean = in_turn(x)[-1] / count
    by_one_pass = (in_turn(x.square())[-1] / count - mean.square()).clamp_min(0)
    for correction, (operation, power) in itertools.product(
        (0, 1), ((aten.var.correction, 1), (aten.std.correction, 0.5))
    ):
        right = by_one_pass * count / (count - correction)
        assert measured(operation, (x, [0]), right**power, correction=correction) < 1
        if count == 100 and offset <= 30:
            assert (
                measured(operation, (x, [0]), x.var(0, correction=correction) ** power, correction=1 - correction) > 1
            )


def normalised_in_one_pass(x, dims, eps=1e-5):
    mean = x.mean(dims, keepdim=True)
    variance = (x.square().mean(dims, keepdim=True) - mean.square()).clamp_min(0)
    reciprocal = (variance + eps).rsqrt()
    return (x - mean) * reciprocal, mean, reciprocal


@pytest.mark.parametrize("offset", [0.0, 5.0, 100.0])
@pytest.mark.parametrize("count", [2, 64])
def test_normalisations_in_one_pass_are_right(offset, count):
    x = offset + drawn(count, 6, 8)
    batch, mean, reciprocal = normalised_in_one_pass(x[:, :, 0], (0,))
    none = (None, None)
    args = (x[:, :, 0], *none, None, None, True, 0.1, 1e-5)
    assert measured(aten.native_batch_norm.default, args, (batch, mean[0], reciprocal[0])) < 1
    layer = normalised_in_one_pass(x, (1, 2))
    assert measured(aten.native_layer_norm.default, (x, [6, 8], *none, 1e-5), layer) < 1
    group, mean, reciprocal = normalised_in_one_pass(x.view(count, 3, 16), (2,))
    result = group.view(x.shape), mean[..., 0], reciprocal[..., 0]
    assert measured(aten.native_group_norm.default, (x, *none, count, 6, 8, 3, 1e-5), result) < 1


# --- products ------------------------------------------------------------------------------------------------------

# Lavin and Gray 2016 (arXiv 1509.09308): the transforms of input, kernel and result for tiles of 4 × 4 results.
OF_INPUT = [
    [4, 0, -5, 0, 1, 0],
    [0, -4, -4, 1, 1, 0],
    [0, 4, -4, -1, 1, 0],
    [0, -2, -1, 2, 1, 0],
    [0, 2, -1, -2, 1, 0],
    [0, 4, 0, -5, 0, 1],
]
OF_KERNEL = [[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]  # divided by 24
OF_RESULT = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]


def by_winograd(x, w):
    of_input, of_kernel, of_result = map(torch.tensor, (OF_INPUT, OF_KERNEL, OF_RESULT))
    of_input, of_kernel, of_result = of_input.float(), of_kernel.float() / 24, of_result.float()
    tiles = of_input @ x.unfold(2, 6, 4).unfold(3, 6, 4) @ of_input.T
    kernels = of_kernel @ w @ of_kernel.T
    summed = sum(tiles[:, None, c] * kernels[None, :, c, None, None] for c in range(x.shape[1]))
    results = of_result @ summed @ of_result.T
    count, channels, rows, columns = results.shape[:4]
    return results.permute(0, 1, 2, 4, 3, 5).reshape(count, channels, rows * 4, columns * 4)


def by_fourier(x, w):
    size = x.shape[-2:]
    spectra = torch.fft.rfft2(x), torch.fft.rfft2(w.flip(-1, -2), s=size)
    return torch.fft.irfft2(torch.einsum("nchw,kchw->nkhw", *spectra), s=size)[..., 2:, 2:]


@pytest.mark.parametrize("channels", [1, 3, 32])
@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("algorithm", [by_winograd, by_fourier])
def test_convolutions_by_other_algorithms_are_right_and_a_wrong_one_is_not(algorithm, offset, channels):
    x, w = offset + drawn(2, channels, 34, 34), drawn(4, channels, 3, 3, seed=1)
    args = (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    made = algorithm(x, w)
    assert made.shape == (2, 4, 32, 32)
    assert measured(aten.convolution.default, args, made) < 1
    made[0, 0, 5, 7] += 0.05 * w.norm()
    assert measured(aten.convolution.default, args, made) > 1


def test_distances_by_a_product_are_right_though_they_cancel():
    x, y = 3 + drawn(64, 32), 3 + drawn(50, 32, seed=1)
    for other in (x, y):
        squares = x.square().sum(1)[:, None] - 2 * x @ other.T + other.square().sum(1)
        made = squares.clamp_min(0).sqrt()
        assert measured(aten._euclidean_dist.default, (x, other), made) < 1
    made[3, 4] += 0.1
    for wrong in (made, squares.clamp_min(0)):
        assert measured(aten._euclidean_dist.default, (x, y), wrong) > 1


# --- one right result and wrong ones -------------------------------------------------------------------------------


def algorithms():
    """Operation, arguments, what another right algorithm makes of them, and wrong results."""
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

    for inner in (1, 10, 1000):  # complex products of three real ones
        a, b = (torch.complex(drawn(20, inner, seed=s), drawn(20, inner, seed=s + 1)) for s in (0, 2))
        b = b.mT.contiguous()
        first, second = a.real @ b.real, a.imag @ b.imag
        both = (a.real + a.imag) @ (b.real + b.imag)
        made = torch.complex(first - second, both - first - second)
        yield aten.mm.default, (a, b), made, 1.001 * made, made.conj().resolve_conj()

    for transform, x in (
        (aten._fft_r2c.default, drawn(8, 300)),
        (aten._fft_c2c.default, torch.complex(*drawn(2, 8, 300))),
    ):
        made = transform(x, [1], 0, True)
        yield transform, (x, [1], 0, True), made, 1.0001 * made

    x, y = drawn(6, 5000), drawn(7, 5000, seed=1)
    distances = in_turn((x[:, None] - y).square().permute(2, 0, 1))[-1].sqrt()
    yield aten._cdist_forward.default, (x, y, 2.0, 2), distances, 1.001 * distances

    # Connectionist temporal classification: sums over paths, in logarithms, step by step.
    x = (3 * drawn(400, 2, 20)).log_softmax(2)
    targets = torch.randint(1, 20, (2, 60), generator=torch.Generator().manual_seed(0))
    args = (x, targets, [400, 400], [60, 60])
    loss, alpha = aten._ctc_loss.default(*args)
    yield aten._ctc_loss.default, args, (loss, alpha), (1.001 * loss, alpha)
    args = (torch.ones(2), *args, loss, alpha, 0)
    back = aten._ctc_loss_backward.default(*args)
    yield aten._ctc_loss_backward.default, args, back, 1.5 * back

    grad = drawn(1, 2, 60, 44).abs()
    args = (grad, [60, 44], [1, 2, 5, 4], False, None, None)
    made = aten.upsample_bilinear2d_backward.default(*args)
    shares = F.interpolate(torch.eye(5 * 4).view(20, 1, 5, 4), size=(60, 44), mode="bilinear")[:, 0].flatten(1)
    in_any_order = in_turn((shares * grad.flatten(2)[0, :, None]).permute(2, 0, 1))[-1].view(1, 2, 5, 4)
    yield aten.upsample_bilinear2d_backward.default, args, made, 1.01 * made
    yield aten.upsample_bilinear2d_backward.default, args, in_any_order


@pytest.mark.parametrize("call", list(algorithms()), ids=lambda call: str(call[0]))
def test_another_algorithm_is_right_and_what_is_a_little_off_is_not(call):
    tells(*call)
