"""An emulated card uses TF32 where the program allows it, as the card would."""

import pytest
import torch
from torch.nn import functional as F

import gpulab as gl
from gpulab.numerics.emulation import CHIPS, emulate
from gpulab.settings import TF32_CARDS


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
    for how, allowed, expected in ((CHIPS[chip], True, has), (CHIPS[chip], False, has), ("tf32", False, True)):
        with gl.setting("cpu"), emulate(how):
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
            assert short() == (expected, expected), "what is given as an arithmetic, or asked for by its name, holds"


NEW_INTERFACE = """
import torch
import gpulab as gl

x = torch.full((1, 1, 1, 1), 1 + 3 * 2.0**-12)
one, conv = torch.ones(1, 1, 1, 1), torch.nn.functional.conv2d
matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
for backend, precision in (
    (torch.backends, "ieee"), (matmul, "tf32"), (convolution, "tf32"), (matmul, "ieee"), (convolution, "ieee")
):
    with gl.emulate("ampere"):
        backend.fp32_precision = precision
        print((x[0, 0] @ one[0, 0] != x).item(), (conv(x, one) != x).item())
for text in ("cpu:tf32=on,emulate=ampere", "cpu:tf32=off,emulate=ampere"):
    with gl.setting(text):
        print((x[0, 0] @ one[0, 0] != x).item(), (conv(x, one) != x).item())
"""


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has only the old interface")
def test_torchs_new_interface_to_tf32_is_obeyed_too(python):
    first, *lines = python(NEW_INTERFACE).stdout.splitlines()
    assert first.startswith("False")  # whether convolutions follow differs between versions of torch
    assert lines[0].startswith("True")
    assert lines[1:] == ["True True", "False True", "False False", "True True", "False False"]
