"""Training steps of well-known networks, the same on every machine, for `gpulab record` and tests.

    gpulab record gpulab.models.example_steps:resnet18 resnet18.trace --setting cuda:tf32=off

Each name in `STEPS` is an attribute of this module: a `gpulab.Step`, which is made when the
attribute is read. Weights and data are drawn here from fixed seeds, because libraries change their
initial weights between versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpulab.data._datasets import load
from gpulab.errors import extra
from gpulab.models.prednet import PredNet
from gpulab.steps import Step


def _image_step(make_network: Callable[[Any], nn.Module], size: int, batch: int) -> Step:
    """Make a step of a network from `torchvision.models`, on square images."""
    with extra("notebooks"):
        from torchvision import models
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, size, size, generator=generator)
    labels = torch.randint(0, 1000, (batch,), generator=generator)
    return Step(_draw_weights(make_network(models)), (images, labels), F.cross_entropy)


def _sequence_step(model: nn.Module, length: int, batch: int, width: int) -> Step:
    """Make a step of a network on random sequences (length, batch, width)."""
    generator = torch.Generator().manual_seed(1)
    return Step(_draw_weights(model), torch.randn(length, batch, width, generator=generator))


def _draw_weights(model: nn.Module) -> nn.Module:
    """Draw matrices and kernels with variance 1 / fan-in; keep vectors of all zeros or all ones."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        is_vector = parameter.dim() <= 1
        is_constant = not parameter.data.any() or (parameter.data == 1).all()
        if is_vector and is_constant:
            continue  # Biases and the weights of normalisations keep their values.
        # The first dimension of a matrix or kernel counts the outputs.
        fan_in = parameter.numel() if is_vector else parameter[0].numel()
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(fan_in))
    return model


def _transformer() -> nn.Module:
    """Make a small Transformer of two layers."""
    layer = nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=128)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


def _prednet_step() -> Step:
    """Make a step of PredNet, which predicts five frames of a walk."""
    window = next(load("walk", frames=40, size=(48, 64)).windows(6))
    frames = torch.from_numpy(window.frames).float().div(255)
    model = PredNet(channels=(3, 16, 32), size=(48, 64))

    def loss(outputs: tuple[torch.Tensor, object], next_frames: torch.Tensor) -> torch.Tensor:
        predictions, _state = outputs
        return F.mse_loss(predictions, next_frames)

    return Step(model, (frames[:-1, None], frames[1:, None]), loss)


STEPS: dict[str, Callable[[], Step]] = {
    "resnet18": lambda: _image_step(lambda models: models.resnet18(), size=64, batch=4),
    "mobilenet_v3_small": lambda: _image_step(
        lambda models: models.mobilenet_v3_small(), size=64, batch=4
    ),
    "vit_b_16": lambda: _image_step(
        lambda models: models.VisionTransformer(
            image_size=32, patch_size=16, num_layers=12, num_heads=12, hidden_dim=768, mlp_dim=3072
        ),
        size=32,
        batch=2,
    ),
    "lstm": lambda: _sequence_step(
        nn.LSTM(input_size=16, hidden_size=32, num_layers=2), length=12, batch=4, width=16
    ),
    "transformer": lambda: _sequence_step(_transformer(), length=10, batch=4, width=64),
    "prednet": _prednet_step,
    "densenet121": lambda: _image_step(lambda models: models.densenet121(), size=64, batch=4),
    "efficientnet_b0": lambda: _image_step(
        lambda models: models.efficientnet_b0(), size=64, batch=4
    ),
}


def __getattr__(name: str) -> Step:
    if name not in STEPS:
        raise AttributeError(f"no step {name!r} in {__name__}; there are {', '.join(STEPS)}")
    return STEPS[name]()
