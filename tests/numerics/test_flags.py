"""The flags for TF32, with both interfaces of torch, and with the old one alone as in torch 2.6."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import gpulab as gl
from gpulab.numerics._emulation import CHIPS, emulate
from gpulab.numerics._flags import arithmetic, precision_allowed, restore_tf32_on_exit, switch_tf32

cublas, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.fixture(params=["both interfaces", "the old one alone"])
def torch_with(request, monkeypatch):
    if request.param == "the old one alone":
        monkeypatch.delattr(type(torch.backends), "fp32_precision", raising=False)
        assert not hasattr(torch.backends, "fp32_precision")
    elif not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has only the old interface")


@pytest.mark.usefixtures("torch_with")
def test_tf32_is_switched_read_and_restored():
    before = cublas.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()
    for allowed in (True, False):
        with restore_tf32_on_exit():
            switch_tf32(allowed)
            assert (cublas.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
            assert [precision_allowed(product) == "tf32" for product in ("matmul", "conv")] == [
                allowed,
                allowed,
            ]
            cublas.allow_tf32, cudnn.allow_tf32 = True, False
            assert [precision_allowed(product) == "tf32" for product in ("matmul", "conv")] == [
                True,
                False,
            ]
            assert arithmetic()["matmul_fp32"] != arithmetic()["convolution_fp32"]
        assert (cublas.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()) == before


def short():
    """Return whether factors were rounded to TF32, in matrix products and in convolutions.

    Both are tested in the forward and in the backward pass.
    """
    x = torch.full((1, 1, 1, 1), 1 + 3 * 2.0**-12)
    weight = torch.ones(1, 1, 1, 1, requires_grad=True)
    made = []
    for out in (x[0, 0] @ weight[0, 0], F.conv2d(x, weight)):
        (gradient,) = torch.autograd.grad(out.sum(), weight)
        assert (out.item() != x.item()) == (gradient.item() != x.item())
        made.append(out.item() != x.item())
    return tuple(made)


@pytest.mark.usefixtures("torch_with")
@pytest.mark.parametrize("chip", CHIPS)
def test_emulated_card_uses_tf32_where_the_program_allows_it(chip):
    with gl.setting("cpu"), emulate(chip):
        for in_products, in_convolutions, by_cudnn in itertools.product((False, True), repeat=3):
            cublas.allow_tf32, cudnn.allow_tf32, cudnn.enabled = (
                in_products,
                in_convolutions,
                by_cudnn,
            )
            # without cuDNN a card's convolutions are matrix products
            assert short() == (in_products, in_convolutions if by_cudnn else in_products)
        for precision, allowed in (("highest", False), ("high", True), ("medium", True)):
            torch.set_float32_matmul_precision(precision)
            assert short()[0] is allowed
    for how in (CHIPS[chip], "tf32"):
        with gl.setting("cpu"), emulate(how):
            switch_tf32(False)
            assert short() == (True, True), (
                "what is given as an arithmetic, or asked for by its name, holds"
            )
