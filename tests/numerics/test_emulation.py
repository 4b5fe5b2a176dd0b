"""Emulated arithmetic: against products written out, against exact fractions (test_products.py: an H200)."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact_numbers import draw, float32_of
from torch import nn
from torch.nn import functional as F

import gpulab as gl
from gpulab.numerics.emulation import CHIPS, KNOWN, ORDERS, arithmetic_of, emulate
from gpulab.numerics.formats import FORMATS, round_to
from gpulab.settings import TF32_CARDS


def apart(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


A, B, V = draw(6, 5), draw(5, 4, seed=1), draw(5, seed=2)
BATCH, OTHER = draw(3, 6, 5, seed=3), draw(3, 5, 4, seed=4)
PLAIN = A @ B
BIAS, BATCH_BIAS = draw(6, 4, seed=5), draw(3, 6, 4, seed=6)
PRODUCTS = {
    "mm": lambda r: r(A) @ r(B),
    "mv": lambda r: r(A) @ r(V),
    "dot": lambda r: r(V) @ r(V),
    "vdot": lambda r: torch.vdot(r(V), r(V)),
    "bmm": lambda r: r(BATCH) @ r(OTHER),
    "broadcast": lambda r: r(BATCH) @ r(B),
    "addmm": lambda r: torch.addmm(BIAS, r(A), r(B), beta=0.5, alpha=2),
    "addmm without its first": lambda r: torch.addmm(BIAS * math.nan, r(A), r(B), beta=0),
    "addmv": lambda r: torch.addmv(BIAS[:, 0], r(A), r(V), beta=2, alpha=0.5),
    "baddbmm": lambda r: torch.baddbmm(BATCH_BIAS, r(BATCH), r(OTHER), beta=-1),
    "addbmm": lambda r: torch.addbmm(BIAS, r(BATCH), r(OTHER), alpha=3),
    "in place": lambda r: BIAS.clone().addmm_(r(A), r(B), beta=0.5),
    "into a given tensor": lambda r: torch.mm(r(A), r(B), out=torch.empty(6, 4)),
    "into a tensor of another size": lambda r: torch.mm(r(A), r(B), out=torch.empty(0)),
    "einsum": lambda r: torch.einsum("bij,bjk->bik", r(BATCH), r(OTHER)),
    "linear": lambda r: F.linear(r(A), r(B).T, BIAS[0]),
    "convolution": lambda r: F.conv2d(r(draw(2, 3, 6, 5)), r(draw(4, 3, 3, 3, seed=1)), V[:4], padding=1),
    "one-dimensional": lambda r: F.conv1d(r(draw(2, 3, 9)), r(draw(4, 3, 3, seed=1)), stride=2),
    "transposed": lambda r: F.conv_transpose2d(r(draw(2, 4, 6, 5)), r(draw(4, 3, 3, 3, seed=1)), stride=2),
    "three-dimensional": lambda r: F.conv3d(r(draw(1, 2, 4, 4, 4)), r(draw(3, 2, 2, 2, 2, seed=1))),
    "in groups": lambda r: F.conv2d(r(draw(2, 4, 6, 5)), r(draw(6, 2, 3, 3, seed=1)), groups=2, dilation=2),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("name", ["tf32", "float32_ftz", "float32", "bfloat16", "float16"])
def test_factors_are_rounded_and_of_results_those_in_sixteen_bits(product, name):
    with emulate(name):
        result = product(lambda x: x)
    expected = product(lambda x: round_to(x, name))
    assert torch.equal(result, round_to(expected, name) if "16" in name else expected)
    if name == "tf32":
        assert not torch.equal(result, product(lambda x: x))


def test_the_backward_pass_is_emulated_and_the_gradient_of_a_bias_is_a_plain_sum():
    for layer, x in ((nn.Linear(30, 20), draw(8, 30)), (nn.Conv2d(3, 4, 3), draw(2, 3, 8, 7))):
        flow = draw(*layer(x).shape, seed=1)
        with emulate("tf32"):
            layer(x.requires_grad_()).backward(flow)
        weight, short, given = (round_to(t.detach(), "tf32") for t in (layer.weight, flow, x))
        if x.ndim == 2:
            expected = short @ weight, short.T @ given
            assert torch.equal(layer.bias.grad, flow.sum(0))
        else:
            expected = nn.grad.conv2d_input(x.shape, weight, short), nn.grad.conv2d_weight(given, weight.shape, short)
        assert torch.equal(x.grad, expected[0])
        assert torch.equal(layer.weight.grad, expected[1])
        assert apart(layer.bias.grad, flow.double().sum([0, *range(2, x.ndim)])) < 1e-6


def test_chips_round_as_their_libraries_do():
    """A tie: TF32's neighbours of 1 + 2^-11 are 1 and 1 + 2^-10."""
    tie, one = torch.tensor([[1 + 2.0**-11]]), torch.ones(1, 1)
    image, kernel = tie.view(1, 1, 1, 1), one.view(1, 1, 1, 1).requires_grad_()
    expected = {"ampere": (1.0, 1 + 2.0**-10, 1 + 2.0**-10), "hopper": (1.0, 1.0, 1.0)}
    for chip, (product, convolution, gradient) in expected.items():
        kernel.grad = None
        with gl.setting(f"cpu:{'tf32=on,' if chip in TF32_CARDS else ''}emulate={chip}"):
            assert tie @ one == product
            out = F.conv2d(image, kernel)
            assert out == convolution
            out.backward()
        assert kernel.grad == gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16, torch.float16], ids=str)
def test_other_types_are_left_alone_whatever_the_order(dtype):
    a, b = A.to(dtype), B.to(dtype)
    plain = a @ b
    for name, order in itertools.product(KNOWN, (None, "tensor-core", "pairwise")):
        with emulate(replace(KNOWN[name], order=order)):
            assert torch.equal(a @ b, plain)


def test_float32_without_tf32_does_not_pass_tensor_cores():
    points = draw(40, 6)
    plain = torch.cdist(points, points)
    with gl.setting("cpu:tf32=off,emulate=hopper,order=tensor-core"):
        assert torch.equal(A @ B, PLAIN)
        assert torch.equal(torch.cdist(points, points), plain)


def test_subnormal_numbers_are_zero_where_they_are_flushed_and_there_alone():
    tiny, large = torch.tensor([[2.0**-140, 1.0]]), torch.tensor([[2.0**100], [0.0]])
    for name, expected in (("float32_ftz", 0.0), ("float32", 2.0**-40)):
        with emulate(name):
            assert tiny @ large == expected


LAYERS = {
    "LSTM": lambda: nn.LSTM(8, 8, num_layers=2),
    "Transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_fused_layers_are_reached(name, train):
    """In use torch has paths of its own for them, which no product passes."""
    layer, x = LAYERS[name]().train(train), draw(5, 3, 8)
    with torch.set_grad_enabled(train):
        arguments = (x,) * 3 if name == "attention" else (x,)
        plain = layer(*arguments)
        with emulate("tf32"):
            made = layer(*arguments)
    plain, made = (out[0] if isinstance(out, tuple) else out for out in (plain, made))
    assert 3e-5 < apart(made.detach(), plain.detach()) < 3e-3


def test_products_that_are_not_emulated_are_named():
    q, attention = draw(1, 2, 4, 8), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with pytest.raises(gl.GpulabError, match=f"inside {attention.__name__}: write it"), emulate("tf32"):
        attention(q, q, q)


@pytest.mark.parametrize("order", ["pairwise", "split-2", "tensor-core"])
def test_convolutions_whose_order_of_summation_is_not_emulated_are_named(order):
    """Forward and backward; under a format alone all of them are emulated."""
    images, kernel = draw(2, 4, 6, 5).requires_grad_(), draw(4, 4, 3, 3, seed=1)
    for words, function in (
        ("has 3, ", lambda: F.conv3d(draw(1, 2, 4, 4, 4).requires_grad_(), draw(3, 2, 2, 2, 2, seed=1))),
        ("has 1, ", lambda: F.conv1d(images[:, :, 0], kernel[:, :, 0])),
        ("transposed=True", lambda: F.conv_transpose2d(images, kernel)),
        ("groups=2", lambda: F.conv2d(images, kernel[:, :2], groups=2)),
        (r"dilation=\[2, 2\]", lambda: F.conv2d(images, kernel, dilation=2)),
    ):
        with pytest.raises(gl.GpulabError, match=words), emulate("tf32", order=order):
            function()
        out = function()
        with pytest.raises(gl.GpulabError, match=words), emulate("tf32", order=order):
            out.sum().backward()


def sequential(a, b):
    total = np.float32(0)
    for x, y in zip(a, b, strict=True):
        total = float32_of(Fraction(float(total)) + Fraction(x) * Fraction(y))
    return total


def pairwise(a, b):
    terms = [np.float32(x) * np.float32(y) for x, y in zip(a, b, strict=True)]
    while len(terms) > 1:
        terms = [terms[n] + terms[n + 1] for n in range(0, len(terms), 2)]
    return terms[0]


def leading(value):
    """The exponent of a float32 number, of the smallest normal one for what is smaller."""
    return max(math.frexp(value)[1] - 1, -126) if value else -126


def cut(value, last):
    """A fraction without what lies below 2^last."""
    return Fraction(math.trunc(value / Fraction(2) ** last)) * Fraction(2) ** last


def tensor_core(a, b, how):
    """The definition, in exact fractions: align to the largest exponent, cut, add, cut to the bits kept."""
    total = Fraction(0)
    for start in range(0, len(a), how.block):
        pairs = list(zip(a[start : start + how.block], b[start : start + how.block], strict=True))
        top = max([leading(x) + leading(y) for x, y in pairs] + [leading(float(total))])
        total = sum(
            (cut(Fraction(x) * Fraction(y), top - how.fraction) for x, y in pairs), cut(total, top - how.fraction)
        )
        size = math.floor(math.log2(abs(total))) if total else 0
        total = cut(total, max(size, -126) - how.kept + 1)
    with np.errstate(over="ignore"):
        return np.float32(float(total))


def vectors(count, spread, seed):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((2, count)) * 2.0 ** generator.integers(-spread, spread + 1, (2, count))
    x[:, generator.random(count) < 0.1] = 0
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("spread", [0, 6, 25])
@pytest.mark.parametrize("count", [1, 2, 8, 64, 128])
def test_orders_are_those_of_exact_arithmetic(count, spread):
    for seed in range(5):
        a, b = vectors(count, spread, seed)
        for order, definition in (("sequential", sequential), ("pairwise", pairwise)):
            made = arithmetic_of(order=order).summed(a[None], b[:, None]).item()
            assert definition(a.tolist(), b.tolist()) == made


@pytest.mark.parametrize("spread", [0, 6, 25, 70])
@pytest.mark.parametrize("count", [1, 3, 8, 37])
@pytest.mark.parametrize("name", ["hopper", "ampere", "bfloat16", "float16", "float8_e4m3fn"])
def test_a_tensor_core_is_its_definition_in_exact_fractions(name, count, spread):
    how = replace(KNOWN[name], order="tensor-core")
    for seed in range(5):
        a, b = (round_to(x, how.format) for x in vectors(count, min(spread, 12 if "16" in name else 70), seed))
        a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
        assert tensor_core(a.tolist(), b.tolist(), how) == how.summed(a[None], b[:, None]).item()


def test_a_tensor_core_passes_on_what_is_not_finite():
    with gl.setting("cpu:tf32=on,emulate=hopper,order=tensor-core"):
        for given, expected in (([math.inf, 1.0], math.inf), ([-math.inf, 1.0], -math.inf), ([3e38, 3e38], math.inf)):
            assert (torch.tensor([given]) @ torch.tensor([[1.0], [1.0]])).item() == expected
        assert (torch.tensor([[math.inf, -math.inf]]) @ torch.ones(2, 1)).isnan().all()
        assert (torch.tensor([[math.nan, 1.0]]) @ torch.ones(2, 1)).isnan().all()


@pytest.mark.parametrize("order", [*ORDERS, "tensor-core+split-3"])
@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 0, 2), (4, 3, 0), (4, 3, 2)], ids=str)
@pytest.mark.parametrize("name", ["tf32", "float8_e4m3fn"])
def test_matrices_without_numbers_or_of_zeros_have_sums_of_zero_in_every_order(name, order, shape):
    rows, terms, columns = shape
    with emulate(name, order=order):
        assert torch.equal(torch.zeros(rows, terms) @ torch.zeros(terms, columns), torch.zeros(rows, columns))


@pytest.mark.parametrize("order", [*ORDERS, "split-3", "tensor-core+split-2"])
def test_convolutions_of_every_geometry_in_every_order_match_float64(order):
    name, tolerance = ("tf32", 5e-3) if "tensor" in order else ("float32", 1e-5)
    for stride in itertools.product((1, 2, 3), (1, 2)):
        for padding in itertools.product((0, 1, 2), (0, 1)):
            options = {"stride": stride, "padding": padding}
            x, weight = draw(2, 4, 6, 5).requires_grad_(), draw(6, 4, 3, 2, seed=1).requires_grad_()
            bias = draw(6, seed=2).requires_grad_()
            right = F.conv2d(x.double(), weight.double(), bias.double(), **options)
            flow = draw(*right.shape, seed=3)
            expected = right, *torch.autograd.grad(right, (x, weight, bias), flow.double())
            with emulate(name, order=order):
                out = F.conv2d(x, weight, bias, **options)
                made = out, *torch.autograd.grad(out, (x, weight, bias), flow)
            for got, wanted in zip(made, expected, strict=True):
                assert got.shape == wanted.shape
                assert apart(got.detach(), wanted.detach()) < tolerance, options


def test_an_inner_emulation_replaces_the_outer_one_and_leaves_it_in_place():
    with emulate("bfloat16"):
        outer = A @ B
        with emulate("tf32"):
            inner = A @ B
            with emulate():
                assert torch.equal(A @ B, PLAIN)
        assert torch.equal(A @ B, outer)
    assert torch.equal(inner, round_to(A, "tf32") @ round_to(B, "tf32"))
    with pytest.raises(ZeroDivisionError), emulate("tf32"):
        _ = 1 / 0
    assert torch.equal(A @ B, PLAIN), "also after an error inside"
    assert torch.backends.mha.get_fastpath_enabled()


def test_unknown_names_are_refused_naming_what_there_is():
    for options, named in (
        ("emulate=tf23", ["'tf23'", *FORMATS, *CHIPS]),
        ("emulate=tf32,order=split-0", ["'split-0'", "1 to 9999", *ORDERS]),
        ("emulate=float32,order=tensor-core", ["no tensor cores for float32", "tf32, ampere or hopper"]),
        ("emulate=turing", ["'turing'", *CHIPS]),
    ):
        with pytest.raises(gl.UsageError) as error, gl.setting(f"cpu:{options}"):
            pass
        assert [word for word in named if word not in str(error.value)] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
@pytest.mark.parametrize("order", [None, "pairwise", "tensor-core"])
def test_a_gpu_emulates_as_a_cpu_does_its_backward_pass_included(order):
    """The backward pass of a GPU runs on a thread of its own, which the emulation must reach as well."""

    def gradient(device):
        x = draw(2, 3, 6, 5).to(device).requires_grad_()
        F.conv2d(x, draw(4, 3, 3, 3, seed=1).to(device)).square().sum().backward()
        return x.grad.cpu()

    with gl.setting("cuda:tf32=off"):
        plain = gradient("cuda")
        with emulate(replace(CHIPS["hopper"], order=order)):
            made = gradient("cuda")
    with emulate(replace(CHIPS["hopper"], order=order)):
        assert apart(made, gradient("cpu")) < 1e-6
    assert apart(made, plain) > 1e-5


@pytest.mark.parametrize("inference", [False, True])
def test_affine_grid_and_cdist_are_emulated_and_matrix_exp_is_refused(inference):
    many, angles = draw(40, 6), draw(2, 2, 3)
    with torch.inference_mode(inference):
        for function, given in (
            (lambda x: F.affine_grid(x, [2, 1, 5, 5], align_corners=False), angles),
            (lambda x: torch.cdist(x, x), many),
        ):
            with gl.emulate("tf32"):
                emulated = function(given)
            assert 1e-6 < (emulated - function(given)).abs().max() < 0.2
        refused = pytest.raises(gl.GpulabError, match="inside linalg_matrix_exp: write it")
        with refused, gl.emulate("tf32"):
            torch.linalg.matrix_exp(angles[..., :2])


def test_products_in_inference_mode_are_emulated():
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    layer = torch.nn.Linear(7, 3)
    with torch.no_grad(), gl.emulate("tf32"):
        expected = layer(x)
    with torch.inference_mode(), gl.emulate("tf32"):
        assert torch.equal(layer(x), expected)
    assert not torch.equal(layer(x), expected)
