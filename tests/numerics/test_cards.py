"""An emulated card uses TF32 where the program allows it, as the card would."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpulab as gl
from gpulab.numerics.arithmetic import CHIPS
from gpulab.numerics.emulation import emulate
from gpulab.settings import TF32_CARDS


@contextlib.contextmanager
def allowed(matmul=True, convolution=True):
    """A program that allows TF32, or does not."""
    with gl.setting("cpu"):  # which puts everything back
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolution
        yield


def short():
    """Of matrix products and of convolutions, forward and backward: whether their factors were rounded to TF32."""
    x = torch.full((1, 1, 1, 1), 1 + 3 * 2.0**-12, requires_grad=True)
    weight = torch.ones(1, 1, 1, 1, requires_grad=True)
    values = []
    for make in (lambda: x[0, 0] @ weight[0, 0], lambda: F.conv2d(x, weight)):
        out = make()
        (gradient,) = torch.autograd.grad(out.sum(), weight)
        values.append([value.item() != x.item() for value in (out, gradient)])
    (product, by_weight), (convolution, by_kernel) = values
    assert (product, convolution) == (by_weight, by_kernel)
    return product, convolution


@pytest.mark.parametrize("chip", CHIPS)
def test_a_card_uses_tf32_where_the_program_allows_it(chip):
    has = CHIPS[chip].format == "tf32"
    assert has == (chip in TF32_CARDS)
    with gl.setting("cpu"), emulate(chip):
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True  # as a process begins
        assert short() == (False, has), "torch's own default: off for matrix products, on for convolutions"
        torch.backends.cuda.matmul.allow_tf32 = True
        assert short() == (has, has)
        torch.backends.cudnn.allow_tf32 = False
        assert short() == (has, False)
        torch.backends.cudnn.enabled = False  # then convolutions are matrix products to a card
        assert short() == (has, has)
        torch.backends.cudnn.enabled = True
        for precision, expected in (("highest", False), ("high", has), ("medium", has)):
            torch.set_float32_matmul_precision(precision)
            assert short() == (expected, False)
    with allowed(), emulate(CHIPS[chip]):
        assert short() == (has, has)
    with allowed(False, False), emulate(CHIPS[chip]):
        assert short() == (has, has), "what is given as an arithmetic holds"
    with allowed(False, False), emulate("tf32"):
        assert short() == (True, True), "what is asked for by its name, too"


NEW_INTERFACE = """
import torch
import gpulab as gl

x = torch.full((1, 1, 1, 1), 1 + 3 * 2.0**-12)
one, conv = torch.ones(1, 1, 1, 1), torch.nn.functional.conv2d
for backend, precision in (
    ("", "ieee"), ("cuda.matmul", "tf32"), ("cudnn.conv", "tf32"), ("cuda.matmul", "ieee"), ("cudnn.conv", "ieee")
):
    with gl.emulate("ampere"):
        place = torch.backends
        for name in backend.split(".") if backend else ():
            place = getattr(place, name)
        place.fp32_precision = precision
        print((x[0, 0] @ one[0, 0] != x).item(), (conv(x, one) != x).item())
for text in ("cpu:tf32=on,emulate=ampere", "cpu:tf32=off,emulate=ampere"):
    with gl.setting(text):
        print((x[0, 0] @ one[0, 0] != x).item(), (conv(x, one) != x).item())
"""


def test_torchs_new_interface_to_tf32_is_obeyed_too(python):
    first, *lines = python(NEW_INTERFACE).stdout.splitlines()
    assert first.startswith("False")  # whether convolutions follow differs between versions of torch
    assert lines[0].startswith("True")
    assert lines[1:] == ["True True", "False True", "False False", "True True", "False False"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_what_it_is_without_an_emulation(dtype):
    layer, x = nn.Linear(30, 20), torch.randn(8, 30)
    with torch.autocast("cpu", dtype):
        expected = layer(x)
        with emulate("ampere"):
            assert torch.equal(layer(x), expected)
