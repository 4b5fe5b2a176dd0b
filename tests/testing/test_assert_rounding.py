"""Typical kernels, correct and wrong, compared with `torch.testing.assert_close`."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import gpulab as gl
from gpulab.testing import assert_rounding
from tests.audits._helpers import drawn

X = drawn(32, 64)


def with_gradient(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def layer_norm(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)


def attention(q, k, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def exact_gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


QUERIES = [drawn(2, 3, 24, 16, seed=seed) for seed in range(3)]
# A torch kernel, its inputs, and the formula that it computes.
RIGHT = {
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), [X], layer_norm),
    "shifted_layer_norm": (
        lambda x: F.layer_norm(x + 50, x.shape[-1:]),
        [X],
        lambda x: layer_norm(x + 50),
    ),
    "attention": (F.scaled_dot_product_attention, QUERIES, attention),
    "gelu": (F.gelu, [4 * X], exact_gelu),
    "product": (torch.mm, [drawn(20, 300), drawn(300, 20, seed=1)], lambda a, b: (b.T @ a.T).T),
    "convolution": (
        lambda x, w: F.conv2d(x, w, padding=1),
        [drawn(2, 4, 8, 8), drawn(4, 4, 3, 3, seed=1)],
        lambda x, w: (w.flatten(1) @ F.unfold(x, 3, padding=1)).reshape(2, 4, 8, 8),
    ),
    "logarithm_of_sum": (
        lambda x: x.logsumexp(-1),
        [30 * X],
        lambda x: F.softplus(x - x.amax(-1, keepdim=True)).expm1().sum(-1).log() + x.amax(-1),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_assert_rounding_accepts_a_kernel_and_its_formula(name, dtype):
    kernel, inputs, formula = RIGHT[name]
    if name == "logarithm_of_sum":
        # softplus(y) = log(1 + e^y), so the formula takes a detour with more rounding.
        formula = _logarithm_of_sum
    inputs = with_gradient(*(t.to(dtype) for t in inputs))
    assert_rounding(kernel, inputs, formula)
    assert_rounding(formula, inputs)


def _logarithm_of_sum(x):
    largest = x.amax(-1, keepdim=True)
    return (x - largest).exp().sum(-1).log() + largest.squeeze(-1)


def wrong_in_one_number(a, b):
    out = a @ b
    return torch.cat([out.flatten()[:-1], out.flatten()[-1:] + 0.05]).reshape(out.shape)


WRONG = {
    "another_gelu": (lambda x: F.gelu(x, approximate="tanh"), [X], exact_gelu),
    "another_epsilon": (
        lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-3),
        [X],
        layer_norm,
    ),
    "scale_of_few_digits": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.2501),
        QUERIES,
        attention,
    ),
    "last_number_of_a_tile": (
        wrong_in_one_number,
        [drawn(20, 30), drawn(30, 20, seed=1)],
        torch.mm,
    ),
    "variance_in_one_pass": (
        lambda x: (x + 200).square().mean(-1) - (x + 200).mean(-1).square(),
        [X],
        lambda x: (x + 200).var(-1, unbiased=False),
    ),
    "factors_in_bfloat16": (
        lambda a, b: (a.bfloat16() @ b.bfloat16()).float(),
        [drawn(20, 30), drawn(30, 20, seed=1)],
        torch.mm,
    ),
    "overflow": (lambda x: (200 * x).exp().sum(-1).log(), [X], lambda x: (200 * x).logsumexp(-1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_assert_rounding_finds_a_wrong_kernel(name):
    kernel, inputs, formula = WRONG[name]
    with pytest.raises(AssertionError, match="further from float64 than rounding explains"):
        assert_rounding(kernel, inputs, formula)


# --- comparison with assert_close -----------------------------------------------------------------


class MeanSquare(torch.autograd.Function):
    """A kernel with a custom backward pass, which may lack the factor 2."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * x / x.numel(), None


def mean_square(x):
    return x.square().mean()


def right_mean_square(x):
    return MeanSquare.apply(x, 2)


def wrong_mean_square(x):
    return MeanSquare.apply(x, 1)


def test_assert_rounding_finds_a_wrong_gradient_that_assert_close_accepts():
    """All gradients of a mean over many numbers are smaller than the absolute tolerance."""
    x, y = with_gradient(drawn(512, 1024), drawn(512, 1024))
    mean_square(x).backward()
    wrong_mean_square(y).backward()
    assert_close(y.grad, x.grad)
    assert_rounding(right_mean_square, x, mean_square)
    with pytest.raises(AssertionError) as failure:
        assert_rounding(wrong_mean_square, x, mean_square)
    message = str(failure.value)
    assert "gradient of inputs[0]" in message
    assert "times further than rounding explains" in message
    assert "mismatch: mul (backward), in wrong_mean_square" in message
    assert "at test_assert_rounding.py:" in message


def test_assert_rounding_accepts_a_right_product_that_assert_close_refuses():
    """Sums of 4,096 products differ by more than the tolerance if they are added in parts."""
    a, b = drawn(64, 4096), drawn(4096, 64, seed=1)

    def in_parts(a, b):
        return sum(x @ y for x, y in zip(a.split(256, 1), b.split(256, 0), strict=True))

    with pytest.raises(AssertionError, match="not close"):
        assert_close(in_parts(a, b), a @ b)
    assert_rounding(in_parts, (a, b), torch.mm)
    assert_rounding(in_parts, (a, b))


# --- the message ----------------------------------------------------------------------------------


def test_assert_rounding_names_the_number_and_how_far_it_is():
    a, b = drawn(20, 30), drawn(30, 20, seed=1)
    with pytest.raises(AssertionError) as failure:
        assert_rounding(wrong_in_one_number, (a, b), torch.mm)
    message = str(failure.value)
    assert message.startswith("wrong_in_one_number is further from float64 than rounding explains.")
    assert "at (19, 19): got" in message
    assert "(1 of 400 numbers are beyond their bound)" in message
    times = float(message.split("result: ")[1].split(" times")[0])
    explained = float(message.split("rounding explains ")[-1].split()[0])
    assert times * explained == pytest.approx(0.05, rel=0.05)


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


def test_assert_rounding_message_can_be_replaced():
    with pytest.raises(AssertionError, match=r"^own words$"):
        assert_rounding(triple, X, double, msg="own words")
    with pytest.raises(AssertionError, match=r"^Case 7: triple is further"):
        assert_rounding(triple, X, double, msg=lambda message: f"Case 7: {message}")


def test_assert_rounding_shows_the_line_of_the_test():
    with pytest.raises(AssertionError) as failure:
        assert_rounding(lambda x: 3 * x, X, lambda x: 2 * x)
    shown = failure.traceback.filter(failure)
    assert [str(entry.path) for entry in shown] == [__file__]


def test_assert_rounding_accepts_a_detour_of_an_exact_function():
    assert_rounding(lambda x: 3.1 * x - 1.1 * x, X, lambda x: 3.1 * x - 1.1 * x)
    assert_rounding(lambda x: (x / 3) * 6, X, double)
    assert_rounding(lambda x: x + x, X, double)


# --- a kernel and its own float64 execution -------------------------------------------------------


@torch.library.custom_op("gpulab_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, wrong: bool) -> torch.Tensor:
    """A kernel whose float32 version may use a constant with only three digits."""
    is_wrong = wrong and x.dtype == torch.float32
    return x * (0.318 if is_wrong else 1 / math.pi)


def test_assert_rounding_finds_what_is_wrong_in_one_format_alone():
    def kernel(x, wrong=False):
        return scaled(x, wrong).sin()

    assert_rounding(kernel, X)
    with pytest.raises(AssertionError) as failure:
        assert_rounding(lambda x: kernel(x, wrong=True), X)
    assert "the error of scaled (forward) is" in str(failure.value)
    assert "return scaled(x, wrong).sin()" in str(failure.value)


def test_assert_rounding_of_numpy_needs_an_expected_function():
    def kernel(x):
        return torch.from_numpy(np.sin(x.numpy())) + 0

    assert_rounding(kernel, X, torch.sin)
    with pytest.raises(AssertionError):
        assert_rounding(kernel, X, torch.cos)

    def into_a_buffer(x):
        out = torch.empty_like(x)
        out.numpy()[...] = np.sin(x.numpy())
        return out

    def continued(x):
        return into_a_buffer(x) + x

    for function in (into_a_buffer, continued):
        with pytest.raises(gl.UsageError, match="pass an expected_fn made of torch operations"):
            assert_rounding(function, X)


def test_assert_rounding_accepts_integers_that_rounding_decides():
    values = torch.tensor([1.0, 3.0, 2.0])
    assert_rounding(lambda x: x.sort(), values, lambda x: torch.sort(x * 1.0))
    with pytest.raises(AssertionError, match=r"result \['indices'\]|result \[1\]|result .*indices"):
        assert_rounding(lambda x: x.sort(descending=True), values, lambda x: x.sort())


def test_assert_rounding_does_not_change_its_inputs():
    def in_place(x):
        return x.mul_(2).add_(1)

    x = X.clone()
    assert_rounding(in_place, x, lambda x: 2 * x + 1)
    assert torch.equal(x, X)


# --- invalid arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [X.double(), torch.arange(3), ()])
def test_assert_rounding_needs_a_short_format(inputs):
    with pytest.raises(gl.UsageError, match="expected a tensor in float32 or a shorter format"):
        assert_rounding(lambda *x: x, inputs)


def test_assert_rounding_refuses_random_numbers():
    with pytest.raises(
        gl.UsageError, match=r"draws random numbers in .* pass the random numbers as an input"
    ):
        assert_rounding(F.dropout, X)


@pytest.mark.parametrize(
    ("actual", "said"),
    [
        (lambda x: x[:3], r"expected shape \(32, 64\), got \(3, 64\)"),
        (lambda x: x.bfloat16(), r"expected type torch.float32, got torch.bfloat16"),
        (lambda x: (x, x), r"expected result; got result \[0\], result \[1\]"),
        (lambda _: 3, r"expected result; got no tensor"),
    ],
)
def test_assert_rounding_compares_structure_shape_and_type(actual, said):
    with pytest.raises(AssertionError, match=said):
        assert_rounding(actual, X, lambda x: 1 * x)
