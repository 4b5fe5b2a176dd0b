"""Whether TF32 is allowed, by both of torch's interfaces, and by the old one alone, as an older torch has it."""

import pytest
import torch

import gpulab as gl
from gpulab.numerics.flags import precision_allowed, switch_tf32, tf32_restored
from gpulab.settings import arithmetic


@pytest.fixture(params=["both interfaces", "the old one alone"])
def torch_with(request, monkeypatch):
    if request.param == "the old one alone":
        monkeypatch.delattr(type(torch.backends), "fp32_precision", raising=False)
        assert not hasattr(torch.backends, "fp32_precision")
    elif not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has only the old interface")


@pytest.mark.usefixtures("torch_with")
def test_tf32_is_switched_read_and_put_back():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()
    for allowed in (True, False):
        with tf32_restored():
            switch_tf32(allowed)
            assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
            assert [precision_allowed(product) == "tf32" for product in ("matmul", "conv")] == [allowed, allowed]
        assert (matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()) == before


@pytest.mark.usefixtures("torch_with")
def test_matrix_products_and_convolutions_are_told_apart():
    with tf32_restored():
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = True, False
        assert precision_allowed("matmul") == "tf32"
        assert precision_allowed("conv") != "tf32"
        assert (arithmetic()["matmul_fp32"], arithmetic()["convolution_fp32"]) == ("tf32", precision_allowed("conv"))


@pytest.mark.usefixtures("torch_with")
def test_emulated_card_asks_whichever_interface_there_is():
    x = torch.tensor([[1 + 3 * 2.0**-12]])
    for text, rounded in (("cpu:tf32=on,emulate=ampere", True), ("cpu:tf32=off,emulate=ampere", False)):
        with gl.setting(text):
            assert (x @ torch.ones(1, 1) != x).item() is rounded
