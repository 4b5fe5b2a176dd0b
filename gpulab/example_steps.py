"""Training steps of well-known networks, the same on every machine: for `gpulab record` and the tests.

Each name of `NETWORKS` is a `gpulab.Step`, made when it is asked for. Weights and data are drawn from a
seed by one plain generator, because the initial weights of libraries change from version to version.

    gpulab record benchmarks/networks.py:resnet18 resnet18.trace --setting cuda:tf32=off
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import gpulab as gl


def images(model: nn.Module, size: int, batch: int) -> gl.Step:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, size, size, generator=generator)
    labels = torch.randint(0, 1000, (batch,), generator=generator)
    return gl.Step(_drawn(model), (images, labels), F.cross_entropy)


def _sequence(model: nn.Module, length: int, batch: int, width: int) -> gl.Step:
    return gl.Step(_drawn(model), torch.randn(length, batch, width, generator=torch.Generator().manual_seed(1)))


def _drawn(model: nn.Module) -> nn.Module:
    """Matrices and kernels normal with variance 1 / fan-in; vectors as the library has them."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            fan_in = parameter[0].numel()
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(fan_in))
        elif not parameter.data.any() or (parameter.data == 1).all():
            continue  # zeros and ones: biases and the weights of normalisations
        else:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.numel()))
    return model


def _prednet() -> gl.Step:
    frames = torch.from_numpy(next(gl.load("walk", frames=40, size=(48, 64)).windows(6)).frames).float().div(255)
    model = gl.models.PredNet(channels=(3, 16, 32), size=(48, 64))
    return gl.Step(model, (frames[:-1, None], frames[1:, None]), lambda out, coming: F.mse_loss(out[0], coming))


models = torchvision.models
NETWORKS: dict[str, Callable[[], gl.Step]] = {
    "resnet18": lambda: images(models.resnet18(), 64, 4),
    "mobilenet_v3_small": lambda: images(models.mobilenet_v3_small(), 64, 4),
    "vit_b_16": lambda: images(models.VisionTransformer(32, 16, 12, 12, 768, 3072), 32, 2),
    "lstm": lambda: _sequence(nn.LSTM(16, 32, 2), 12, 4, 16),
    "transformer": lambda: _sequence(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 2, enable_nested_tensor=False), 10, 4, 64
    ),
    "prednet": _prednet,
    "densenet121": lambda: images(models.densenet121(), 64, 4),
    "efficientnet_b0": lambda: images(models.efficientnet_b0(), 64, 4),
}


def __getattr__(name: str) -> gl.Step:
    if name not in NETWORKS:
        raise AttributeError(f"no network {name!r}; there are {', '.join(NETWORKS)}")
    return NETWORKS[name]()
