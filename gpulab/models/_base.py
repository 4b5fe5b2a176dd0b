"""The interface of models for the training loop, and what gpulab's own models share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpulab.errors import UsageError

Model = TypeVar("Model", bound=nn.Module)

# What one update sees, and what is remembered from one update to the next, depend on the network.
# PredNet takes a tensor or a `Feed`, and its state is a list of `LayerState`; an autoencoder takes
# images and has no state. The training loop passes both on without looking inside.
Batch = Any
ModelState = Any


class Trainable(nn.Module):
    """The base class of gpulab's networks, which `gpulab.train` trains.

    Its loop hands windows of frames to the model. A derived class says how they are used, by three
    methods: `batches` cuts a window into the pieces that one update sees, `training_loss` computes
    what is differentiated, and `draw_weights` draws the initial weights. To compare what the model
    makes with held-out data (`Run.predict`), it also needs a `forward`. A network of your own is
    trained by a function of yours: see `gpulab.train`.

    Attributes:
        sequential: Whether the order of the frames matters, and a state goes from piece to piece.
            False unless a class says otherwise.
        threads: The number of CPU threads beyond which the model gains nothing; None where that is
            not known.
        compiled_part: The method that is compiled under a setting with `compile`.
        size: The height and width of the frames that it learns from.
        fresh: Whether the weights are still to be drawn from the seed of a run. `load_state_dict`
            makes it False: training then starts from the loaded weights.
    """

    sequential: ClassVar[bool] = False
    threads: ClassVar[int | None] = None
    compiled_part: ClassVar[str] = "training_loss"
    size: tuple[int, int]
    fresh: bool = True

    def batches(self, window: Float[Tensor, "t c h w"]) -> Iterator[Tensor]:
        """Split a window into batches; the weights are updated after each of them.

        Args:
            window: Frames (T, C, H, W), numbers in [0, 1].

        Yields:
            The pieces, in the shape that `training_loss` takes.
        """
        raise NotImplementedError

    def training_loss(self, batch: Batch, state: ModelState) -> tuple[Tensor, Tensor, ModelState]:
        """Compute the loss of one piece, on which the loop calls `backward`.

        Args:
            batch: A piece of a window, a tensor; or what gives its frames one after the other.
            state: What this method returned as state for the piece before; None at the beginning of
                a sequence.

        Returns:
            Three things: the loss to differentiate, a scalar; the mean squared error of each frame,
            (n,), for the history; and the next state, detached from the graph. A state is None, or
            for each layer a list of tensors.
        """
        raise NotImplementedError

    def check_state(self, state: ModelState) -> None:
        """Check a state that was read from a file, such as a checkpoint, before resuming from it.

        A tensor of another shape may broadcast, and then nothing else would notice. By default
        every state is taken.

        Args:
            state: What `training_loss` may have returned.

        Raises:
            UsageError: For one that it cannot have returned.
        """

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw the initial weights.

        Args:
            generator: Where the random numbers come from. Draw in float32 on its own device,
                whatever the setting is.
        """
        raise NotImplementedError

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> tuple[list[str], list[str]]:
        """Load weights as `torch.nn.Module.load_state_dict` does; training then starts from them.

        Args:
            state_dict: Tensors by the names of parameters and buffers.
            strict: Whether missing and unexpected names are errors.
            assign: Whether the tensors themselves become the weights, instead of their values.

        Returns:
            What torch's method returns: the missing and the unexpected names.
        """
        self.fresh = False
        return super().load_state_dict(state_dict, strict, assign)


def draw_normal_(parameter: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Fill with a normal of variance 1 / fan_in (LeCun et al. 1998), drawn in float32."""
    normal_values = torch.randn(
        parameter.shape, generator=generator, dtype=torch.float32, device=generator.device
    ).cpu()
    with torch.no_grad():
        parameter.copy_(normal_values / math.sqrt(fan_in))


def draw_linear_(model: nn.Module, generator: torch.Generator) -> None:
    """Draw LeCun-normal weights for every linear layer; biases are zero."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            draw_normal_(layer.weight, layer.in_features, generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def flip_bit(model: Model, weight: int = 0) -> Model:
    """Flip the last bit of one weight in place, the smallest possible change; twice restores it.

    Args:
        model: A network with float32 weights.
        weight: The number of the weight, from 0, counted through all of the model's parameters in
            their order.

    Returns:
        The same model.

    Raises:
        UsageError: Where there is no such weight, or the weight is not float32.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> layer = torch.nn.Linear(1, 1)
        >>> with torch.no_grad():
        ...     _ = layer.weight.fill_(1.0)
        >>> gl.models.flip_bit(layer).weight.item()
        1.0000001192092896

    References:
        Summers, Dinneen 2021, *Nondeterminism and instability in neural network optimization*
            (arXiv 2103.04514).
    """
    check_weight(model, weight)
    for parameter in model.parameters():
        if weight < parameter.numel():
            break
        weight -= parameter.numel()
    if parameter.dtype != torch.float32:
        raise UsageError(f"a bit is flipped in float32 weights, and these are {parameter.dtype}")
    position = torch.unravel_index(torch.tensor(weight), parameter.shape)
    parameter.detach().view(torch.int32)[position] ^= 1
    return model


def check_weight(model: nn.Module, weight: int | None) -> None:
    """Raise `UsageError` unless the model has a weight of that number; None asks for none."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if weight is not None and not (type(weight) is int and 0 <= weight < count):
        raise UsageError(f"flip {weight!r}: expected the number of a weight, from 0 to {count - 1}")
