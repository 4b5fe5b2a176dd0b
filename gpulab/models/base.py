"""What the training loop asks of a model, and the part that gpulab's own models share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpulab.errors import UsageError

Model = TypeVar("Model", bound=nn.Module)
BITS = 32


class Trainable(nn.Module):
    """A model that `gpulab.train` can train. A model of your own derives from this class.

    The loop hands over windows of frames in [0, 1]: `batches` cuts a window into what one update sees, and
    `training_loss` says what is differentiated.
    """

    sequential: ClassVar[bool] = False  # whether the frames' order matters, and a state goes from batch to batch
    threads: ClassVar[int | None] = None  # of a CPU, more of which gain it nothing
    fresh: bool = True  # until weights are loaded: training draws those of a fresh model from the seed

    def batches(self, window: Float[Tensor, "t c h w"]) -> Iterator[Tensor]:
        """The pieces of a window after each of which the weights are updated."""
        raise NotImplementedError

    def training_loss(self, batch: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """What `backward` is called on, and what comes with it.

        Args:
            batch: A piece of a window.
            state: The one returned for the piece before; None at the beginning of a sequence.

        Returns:
            The objective; the mean squared error of each frame, (n,), for the history; the next state, cut off from
            the graph: None, or tensors and numbers, in lists, tuples or dictionaries.
        """
        raise NotImplementedError

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw initial weights from a generator, in float32 on its own device, whatever the setting is."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load weights, which training then starts from."""
        self.fresh = False
        return super().load_state_dict(state_dict, *args, **options)


def is_plain(model: nn.Module) -> bool:
    """Whether a network computes what its class says: no hook sees or changes it, no part has another `forward`."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = any("forward" in vars(part) or any(getattr(part, name) for name in hooks) for part in model.modules())
    watched = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    return not (hooked or watched or torch.nn.modules.module._has_any_global_hook())


def draw_normal_(parameter: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Fill with a normal of variance 1 / fan_in (LeCun et al. 1998), drawn on the generator's device in float32."""
    drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device=generator.device).cpu()
    with torch.no_grad():
        parameter.copy_(drawn / math.sqrt(fan_in))


def draw_linear_(model: nn.Module, generator: torch.Generator) -> None:
    """Draw LeCun-normal weights for every linear layer; biases are zero."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            draw_normal_(layer.weight, layer.in_features, generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def flip_bit(model: Model, weight: int = 0, bit: int = 0) -> Model:
    """Change one bit of one weight of a model in place. Doing it twice undoes it.

    Args:
        model: With float32 weights.
        weight: Which, counted through the model's parameters in their order.
        bit: From 0, the last place of the fraction and the smallest change that there is, to 31, the sign.

    Returns:
        The model.

    Raises:
        UsageError: Where there is no such weight or bit, or the weight is not float32.

    Examples:
        >>> layer = torch.nn.Linear(1, 1)
        >>> with torch.no_grad():
        ...     _ = layer.weight.fill_(1.0)
        >>> flip_bit(layer).weight.item()
        1.0000001192092896

    References:
        Summers, Dinneen 2021, *Nondeterminism and instability in neural network optimization* (arXiv 2103.04514).
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
    place = torch.unravel_index(torch.tensor(weight), parameter.shape)
    parameter.detach().view(torch.int32)[place] ^= 1 << bit if bit < BITS - 1 else -(1 << bit)
    return model


def check_weight(model: nn.Module, weight: int | None) -> None:
    """Raise `UsageError` unless the model has a weight of that number; None asks for none."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if weight is not None and not (type(weight) is int and 0 <= weight < count):
        raise UsageError(f"flip {weight!r}: expected the number of a weight, from 0 to {count - 1}")
