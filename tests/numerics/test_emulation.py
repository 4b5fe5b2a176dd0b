"""Emulated arithmetic compared with explicit products and with exact fractions.

`test_products.py` compares it with an H200.
"""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpulab as gl
from gpulab.numerics._emulation import ARITHMETICS, CHIPS, ORDERS, emulate, find_arithmetic
from gpulab.numerics._formats import FORMATS, round_to
from tests.numerics._helpers import draw, float32_of


def apart(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


A, B, V = draw(6, 5), draw(5, 4, seed=1), draw(5, seed=2)
BATCH, OTHER = draw(3, 6, 5, seed=3), draw(3, 5, 4, seed=4)
BIAS, BATCH_BIAS = draw(6, 4, seed=5), draw(3, 6, 4, seed=6)
PRODUCTS = {
    "mm": lambda r: r(A) @ r(B),
    "mv": lambda r: r(A) @ r(V),
    "vdot": lambda r: torch.vdot(r(V), r(V)),
    "bmm": lambda r: r(BATCH) @ r(OTHER),
    "addmm": lambda r: torch.addmm(BIAS, r(A), r(B), beta=0.5, alpha=2),
    "addmm without its first": lambda r: torch.addmm(BIAS * math.nan, r(A), r(B), beta=0),
    "addmv": lambda r: torch.addmv(BIAS[:, 0], r(A), r(V), beta=2, alpha=0.5),
    "baddbmm": lambda r: torch.baddbmm(BATCH_BIAS, r(BATCH), r(OTHER), beta=-1),
    "addbmm": lambda r: torch.addbmm(BIAS, r(BATCH), r(OTHER), alpha=3),
    "in place": lambda r: BIAS.clone().addmm_(r(A), r(B), beta=0.5),
    "into a tensor of another size": lambda r: torch.mm(r(A), r(B), out=torch.empty(0)),
    "convolution": lambda r: F.conv2d(
        r(draw(2, 3, 6, 5)), r(draw(4, 3, 3, 3, seed=1)), V[:4], padding=1
    ),
}


def convolution_over_one_dimension(r):
    return F.conv1d(r(draw(2, 3, 9)), r(draw(4, 3, 3, seed=1)), stride=2)


def convolution_over_three_dimensions(r):
    return F.conv3d(r(draw(1, 2, 4, 4, 4)), r(draw(3, 2, 2, 2, 2, seed=1)))


def transposed_convolution(r):
    return F.conv_transpose2d(r(draw(2, 4, 6, 5)), r(draw(4, 3, 3, 3, seed=1)), stride=2)


def dilated_convolution(r):
    return F.conv2d(r(draw(2, 3, 6, 5)), r(draw(4, 3, 3, 2, seed=1)), dilation=(1, 2))


def grouped_convolution(r):
    return F.conv2d(r(draw(2, 4, 6, 5)), r(draw(6, 2, 3, 3, seed=1)), groups=2, dilation=2)


# Products that an emulated order does not support, each with the option that the error names.
# `r` is applied to both factors, as in `PRODUCTS`.
UNORDERED_PRODUCTS = {
    convolution_over_one_dimension: "dimensions=1",
    convolution_over_three_dimensions: "dimensions=3",
    transposed_convolution: "transposed=True",
    dilated_convolution: "dilation=[1, 2]",
    grouped_convolution: "groups=2",
}
ALL_PRODUCTS = PRODUCTS | {product.__name__: product for product in UNORDERED_PRODUCTS}


@pytest.mark.parametrize("product", ALL_PRODUCTS.values(), ids=ALL_PRODUCTS)
def test_emulated_products_round_factors_and_16_bit_results(product):
    for name in ("tf32", "bfloat16", "float16"):
        with emulate(name):
            result = product(lambda x: x)
        expected = product(lambda x: round_to(x, name))  # noqa: B023
        assert torch.equal(result, round_to(expected, name) if "16" in name else expected)


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_emulated_order_of_every_kind_of_product_is_right_to_float32(product):
    with emulate(order="pairwise"):
        made = product(lambda x: x)
    assert made.shape == product(lambda x: x).shape
    assert apart(made, product(lambda x: x)) < 1e-6


@pytest.mark.parametrize(
    ("product", "option"),
    UNORDERED_PRODUCTS.items(),
    ids=[product.__name__ for product in UNORDERED_PRODUCTS],
)
def test_emulated_order_of_other_convolutions_is_refused(product, option):
    """This holds in the forward pass, and in the backward pass if only that is emulated."""
    out = product(lambda x: x.requires_grad_())
    for calculate in (lambda: product(lambda x: x), lambda: out.sum().backward()):
        with pytest.raises(gl.GpulabError) as error, emulate("tf32", order="split-2"):
            calculate()
        assert option in str(error.value)


def test_emulated_backward_pass_rounds_factors_and_not_the_gradient_of_a_bias():
    for layer, x in ((nn.Linear(30, 20), draw(8, 30)), (nn.Conv2d(3, 4, 3), draw(2, 3, 8, 7))):
        flow = draw(*layer(x).shape, seed=1)
        with emulate("tf32"):
            layer(x.requires_grad_()).backward(flow)
        weight, short, given = (round_to(t.detach(), "tf32") for t in (layer.weight, flow, x))
        expected = short @ weight if x.ndim == 2 else nn.grad.conv2d_input(x.shape, weight, short)
        assert torch.equal(x.grad, expected)
        expected = (
            short.T @ given if x.ndim == 2 else nn.grad.conv2d_weight(given, weight.shape, short)
        )
        assert torch.equal(layer.weight.grad, expected)
        assert apart(layer.bias.grad, flow.double().sum([0, *range(2, x.ndim)])) < 1e-6


def test_emulated_chips_round_ties_as_their_libraries_do():
    """TF32's neighbours of 1 + 2^-11 are 1 and 1 + 2^-10."""
    tie, one = torch.tensor([[1 + 2.0**-11]]), torch.ones(1, 1)
    expected = {"ampere": (1.0, 1 + 2.0**-10, 1 + 2.0**-10), "hopper": (1.0, 1.0, 1.0)}
    for chip, (product, convolution, gradient) in expected.items():
        kernel = one.view(1, 1, 1, 1).clone().requires_grad_()
        with gl.setting(f"cpu:tf32=on,emulate={chip}"):
            assert tie @ one == product
            out = F.conv2d(tie.view(1, 1, 1, 1), kernel)
            assert out == convolution
            out.backward()
        assert kernel.grad == gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16], ids=str)
def test_emulation_leaves_other_types_alone_whatever_the_order(dtype):
    a, b = A.to(dtype), B.to(dtype)
    plain = a @ b
    for name, order in itertools.product(ARITHMETICS, (None, "tensor-core", "pairwise")):
        with emulate(replace(ARITHMETICS[name], order=order)):
            assert torch.equal(a @ b, plain)


def test_emulated_float32_does_not_pass_tensor_cores():
    points, plain = draw(40, 6), A @ B
    distances = torch.cdist(points, points)
    with gl.setting("cpu:tf32=off,emulate=hopper,order=tensor-core"):
        assert torch.equal(A @ B, plain)
        assert torch.equal(torch.cdist(points, points), distances)


REACHED = {
    "affine grid": (lambda x: F.affine_grid(x, [2, 1, 5, 5], align_corners=False), (2, 2, 3)),
    "affine grid in space": (
        lambda x: F.affine_grid(x, [2, 1, 3, 4, 5], align_corners=False),
        (2, 3, 4),
    ),
    "bilinear": (lambda x: F.bilinear(x, x, x.new_ones(3, 6, 6) / 3), (40, 6)),
    "convolution in time": (
        lambda x: torch.conv_tbc(x, x[:3, :3].mT.contiguous() / 3, x.new_ones(3), 1),
        (9, 3, 3),
    ),
    "distances": (lambda x: torch.cdist(x, x), (40, 6)),
    "pseudoinverse": (torch.linalg.pinv, (40, 6)),
    "linear": (nn.Linear(6, 3), (40, 6)),
    "LSTM": (nn.LSTM(8, 8, num_layers=2), (5, 3, 8)),
    "Transformer": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (5, 3, 8)),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", REACHED)
def test_emulation_reaches_composite_operations_and_fused_layers(name, mode):
    """In inference, torch uses special paths for layers, which call no product operation."""
    function, shape = REACHED[name]
    if isinstance(function, nn.Module):
        function.train(mode is torch.enable_grad)
    made = []
    for how in ("float32", "tf32"):
        with mode(), emulate(how):
            out = function(draw(*shape))
        made.append(out[0] if isinstance(out, tuple) else out)
    assert 3e-5 < apart(made[1].detach(), made[0].detach()) < 3e-3


def test_emulation_refuses_fused_operations_that_it_cannot_reach():
    words = (
        r"inside linalg_matrix_exp: write it .* \(at test_emulation\.py:\d+:"
        r" torch\.linalg\.matrix_exp\(draw"
    )
    with pytest.raises(gl.GpulabError, match=words), emulate("tf32"):
        torch.linalg.matrix_exp(draw(2, 2, 2))


def test_emulation_refuses_an_order_and_names_the_line():
    words = r"dilation=\[2, 2\].* \(at test_emulation\.py:\d+: F\.conv2d\(draw"
    with pytest.raises(gl.GpulabError, match=words), emulate("tf32", order="tensor-core"):
        F.conv2d(draw(1, 1, 9, 9), draw(1, 1, 3, 3), dilation=2)


@pytest.mark.parametrize(
    ("points", "options"),
    [(40, {"p": 1.0}), (5, {}), (40, {"compute_mode": "donot_use_mm_for_euclid_dist"})],
)
def test_emulation_leaves_distances_without_products_alone(points, options):
    x = draw(points, 6)
    plain = torch.cdist(x, x, **options)
    with emulate("tf32"):
        assert torch.equal(torch.cdist(x, x, **options), plain)


# --- orders of summation --------------------------------------------------------------------------


def sequential(a, b, _):
    total = np.float32(0)
    for x, y in zip(a, b, strict=True):
        total = float32_of(Fraction(float(total)) + Fraction(x) * Fraction(y))
    return total


def pairwise(a, b, _):
    terms = [np.float32(x) * np.float32(y) for x, y in zip(a, b, strict=True)]
    while len(terms) > 1:
        terms = [sum(terms[n + 1 : n + 2], terms[n]) for n in range(0, len(terms), 2)]
    return terms[0]


def leading(value):
    """Return the exponent of a float32 number; for subnormals, that of the smallest normal one."""
    return max(math.frexp(value)[1] - 1, -126) if value else -126


def cut(value, last):
    """Truncate a fraction below 2^last."""
    return Fraction(math.trunc(value / Fraction(2) ** last)) * Fraction(2) ** last


def tensor_core(a, b, how):
    """Align to the largest exponent, truncate, add, and truncate the sum to the kept bits."""
    total = Fraction(0)
    for start in range(0, len(a), how.block_size):
        pairs = list(
            zip(a[start : start + how.block_size], b[start : start + how.block_size], strict=True)
        )
        last = (
            max([leading(x) + leading(y) for x, y in pairs] + [leading(float(total))])
            - how.fraction_bits
        )
        total = sum((cut(Fraction(x) * Fraction(y), last) for x, y in pairs), cut(total, last))
        size = math.floor(math.log2(abs(total))) if total else 0
        total = cut(total, max(size, -126) - how.significant_bits + 1)
    with np.errstate(over="ignore"):
        return np.float32(float(total))


DEFINITIONS = {"sequential": sequential, "pairwise": pairwise, "tensor-core": tensor_core}
SUMS = [("float32", "sequential"), ("float32", "pairwise")]
SUMS += [(name, "tensor-core") for name in ("hopper", "ampere", "float16", "float8_e4m3fn")]


@pytest.mark.parametrize("spread", [0, 6, 70])
@pytest.mark.parametrize("count", [1, 3, 8, 37])
@pytest.mark.parametrize(("name", "order"), SUMS)
def test_emulated_orders_of_summation_are_their_definition_in_exact_fractions(
    name, order, count, spread
):
    how, most = (
        find_arithmetic(name, order),
        12 if name == "float16" else 25 if name == "float32" else 70,
    )
    for seed in range(5):
        generator = np.random.default_rng(seed)
        powers = generator.integers(-min(spread, most), min(spread, most) + 1, (2, count))
        x = torch.from_numpy(
            (generator.standard_normal((2, count)) * 2.0**powers).astype(np.float32)
        )
        a, b = round_to(x, how.format).nan_to_num(0, 0, 0)
        a[generator.random(count) < 0.1] = 0
        assert (
            DEFINITIONS[order](a.tolist(), b.tolist(), how)
            == how.multiply(a[None], b[:, None]).item()
        )


def test_emulated_tensor_core_passes_on_what_is_not_finite():
    with gl.setting("cpu:tf32=on,emulate=hopper,order=tensor-core"):
        for given, expected in (
            ([math.inf, 1.0], math.inf),
            ([-math.inf, 1.0], -math.inf),
            ([3e38, 3e38], math.inf),
        ):
            assert (torch.tensor([given]) @ torch.tensor([[1.0], [1.0]])).item() == expected
        assert (
            (torch.tensor([[math.inf, -math.inf], [math.nan, 1.0]]) @ torch.ones(2, 1))
            .isnan()
            .all()
        )


@pytest.mark.parametrize("order", [*ORDERS, "tensor-core+split-3"])
@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 0, 2), (4, 3, 0), (4, 3, 2)], ids=str)
def test_emulated_products_without_numbers_or_of_zeros_are_zero(order, shape):
    rows, terms, columns = shape
    for name in ("tf32", "float8_e4m3fn"):
        with emulate(name, order=order):
            assert torch.equal(
                torch.zeros(rows, terms) @ torch.zeros(terms, columns), torch.zeros(rows, columns)
            )


@pytest.mark.parametrize("order", ["sequential", "split-3", "tensor-core+split-2"])
def test_emulated_order_of_convolutions_of_every_geometry_matches_float64(order):
    name, tolerance = ("tf32", 5e-3) if "tensor" in order else ("float32", 1e-5)
    for stride, padding in itertools.product(
        itertools.product((1, 3), (1, 2)), itertools.product((0, 1, 2), (0, 1))
    ):
        x, weight = draw(2, 4, 6, 5).requires_grad_(), draw(6, 4, 3, 2, seed=1).requires_grad_()
        right = F.conv2d(x.double(), weight.double(), stride=stride, padding=padding)
        flow = draw(*right.shape, seed=3)
        with emulate(name, order=order):
            out = F.conv2d(x, weight, stride=stride, padding=padding)
            made = out, *torch.autograd.grad(out, (x, weight), flow)
        for got, wanted in zip(
            made, (right, *torch.autograd.grad(right, (x, weight), flow.double())), strict=True
        ):
            assert got.shape == wanted.shape
            assert apart(got.detach(), wanted.detach()) < tolerance, (stride, padding)


# --- the block ------------------------------------------------------------------------------------


def test_emulation_inside_another_replaces_it_and_leaves_it_in_place():
    plain = A @ B
    with emulate("bfloat16"):
        outer = A @ B
        with emulate("tf32"):
            inner = A @ B
            with emulate():
                assert torch.equal(A @ B, plain)
        assert torch.equal(A @ B, outer)
    assert torch.equal(inner, round_to(A, "tf32") @ round_to(B, "tf32"))
    with pytest.raises(ZeroDivisionError), emulate("tf32"):
        _ = 1 / 0
    assert torch.equal(A @ B, plain), "also after an error inside"


def test_emulate_refuses_unknown_names_naming_what_there_is():
    for options, named in (
        ("emulate=tf23", ["'tf23'", *FORMATS, *CHIPS]),
        ("emulate=tf32,order=split-0", ["'split-0'", "1 to 9999", *ORDERS]),
        (
            "emulate=float32,order=tensor-core",
            ["no tensor cores for float32", "tf32, ampere or hopper"],
        ),
    ):
        with pytest.raises(gl.UsageError) as error, gl.setting(f"cpu:{options}"):
            pass
        assert [word for word in named if word not in str(error.value)] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
@pytest.mark.parametrize("order", [None, "tensor-core"])
def test_emulation_on_a_gpu_reaches_the_thread_of_the_backward_pass(order):
    def gradient(device):
        x = draw(2, 3, 6, 5).to(device).requires_grad_()
        with emulate(replace(CHIPS["hopper"], order=order)):
            F.conv2d(x, draw(4, 3, 3, 3, seed=1).to(device)).square().sum().backward()
        return x.grad.cpu()

    with gl.setting("cuda:tf32=off"):
        assert apart(gradient("cuda"), gradient("cpu")) < 1e-6
