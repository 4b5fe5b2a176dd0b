"""The convolutional whitener, whose kernels and strides are retuned in notebook 09."""

import math

import pytest
import torch

import gpulab as gl
from companion.convolutional_whitener import ConvolutionalWhitener, train_convolutional

OLD = "cpu:threads=1"
NEW = "cpu:threads=1,tf32=on,emulate=ampere"


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_convolutional_whitener_reconstructs_images_of_their_size(kernel, stride):
    net = ConvolutionalWhitener(kernel, stride)
    assert net(torch.rand(50, 1, 28, 28)).shape == (50, 1, 28, 28)


def test_train_convolutional_learns_and_is_repeatable():
    with gl.setting(OLD) as setting:
        few = train_convolutional(3, setting, updates=5)
        many = train_convolutional(3, setting, updates=60)
        again = train_convolutional(3, setting, updates=60)
    assert many < 0.8 * few
    assert many == again


def test_train_convolutional_kernel_changes_the_training():
    with gl.setting(OLD) as setting:
        losses = {
            train_convolutional(0, setting, kernel, stride, 5)
            for kernel, stride in ((5, 2), (3, 2), (5, 4))
        }
    assert len(losses) == 3


def test_train_convolutional_is_nan_on_the_emulated_card():
    with gl.setting(NEW) as setting:
        assert math.isnan(train_convolutional(0, setting, updates=20))
