"""The smallest change that a network's weights allow: one bit of one of them."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from gpulab.errors import UsageError

Model = TypeVar("Model", bound=nn.Module)
BITS = 32


def flip_bit(model: Model, weight: int = 0, bit: int = 0) -> Model:
    """Change one bit of one weight of a model in place; returns the model.

    `weight` counts through the model's parameters in their order. `bit` counts from the last place of the
    fraction, 0, up to the sign, 31: bit 0 is the smallest change that there is. Doing it twice undoes it.
    Raises `UsageError` where there is no such weight or bit, or the weight is not float32.

    >>> layer = torch.nn.Linear(1, 1)
    >>> with torch.no_grad():
    ...     _ = layer.weight.fill_(1.0)
    >>> flip_bit(layer).weight.item()
    1.0000001192092896

    Source: Summers, Dinneen 2021, *Nondeterminism and instability in neural network optimization*
    (arXiv 2103.04514).
    """
    check_weight(model, weight)
    if not isinstance(bit, int) or not 0 <= bit < BITS:
        raise UsageError(f"bit {bit!r}: expected a whole number from 0, the last place, to {BITS - 1}, the sign")
    for parameter in model.parameters():
        if weight < parameter.numel():
            break
        weight -= parameter.numel()
    if parameter.dtype != torch.float32:
        raise UsageError(f"a bit is flipped in float32 weights, and these are {parameter.dtype}")
    with torch.no_grad():
        place = torch.unravel_index(torch.tensor(weight), parameter.shape)
        value = parameter[place].cpu()
        mask = torch.tensor(1 << bit if bit < BITS - 1 else -(1 << bit), dtype=torch.int32)
        parameter[place] = (value.view(torch.int32) ^ mask).view(torch.float32).to(parameter.device)
    return model


def check_weight(model: nn.Module, weight: int | None) -> None:
    """Raise `UsageError` unless the model has a weight of that number; None asks for none."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if weight is not None and not (type(weight) is int and 0 <= weight < count):
        raise UsageError(f"flip {weight!r}: expected the number of a weight, from 0 to {count - 1}")
