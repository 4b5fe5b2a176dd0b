"""A simple autoencoder for 28×28 images, the paper's control experiment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpulab.errors import UsageError
from gpulab.models.base import Trainable, draw_normal_, zero_bias_


class Autoencoder(Trainable):
    """Fully connected: 784 → 128 → 32 → 128 → 784, rectified inside, a sigmoid at the end.

    Trained as the article describes: one image per update (or `batch_size`), mean squared error.

    >>> images = torch.rand(5, 1, 28, 28)
    >>> Autoencoder()(images).shape
    torch.Size([5, 1, 28, 28])
    """

    def __init__(
        self, hidden: Sequence[int] = (128, 32), size: tuple[int, int] = (28, 28), batch_size: int = 1
    ) -> None:
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise UsageError(f"hidden={tuple(hidden)!r}: expected the widths of one or more layers")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UsageError(f"batch_size={batch_size!r}: expected a whole number from 1")
        self.size, self.batch_size = size, batch_size
        widths = [size[0] * size[1], *hidden]
        widths += widths[-2::-1]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1], nn.Sigmoid())
        self.draw_weights(torch.Generator().manual_seed(0))

    def draw_weights(self, generator: torch.Generator) -> None:
        """LeCun-normal weights, zero biases."""
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                draw_normal_(layer.weight, layer.in_features, generator)
                zero_bias_(layer)

    def forward(self, images: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b 1 h w"]:
        """Reconstructions of images in [0, 1], same shape."""
        if tuple(images.shape[1:]) != (1, *self.size):
            raise UsageError(f"images of shape {tuple(images.shape)}: expected (B, 1, {self.size[0]}, {self.size[1]})")
        return self.layers(images.flatten(1)).view_as(images)

    def batches(self, window: Float[Tensor, "t 1 h w"]) -> Iterator[Tensor]:
        """`batch_size` images per update, fewer where a window ends."""
        yield from window.split(self.batch_size)

    def training_loss(self, batch: Tensor, state: None) -> tuple[Tensor, Tensor, None]:  # noqa: ARG002
        """The mean squared error of the reconstruction."""
        loss = (self(batch) - batch).square().mean()
        return loss, loss.detach().expand(len(batch)), None

    def extra_repr(self) -> str:
        """What tells two networks of equal layers apart."""
        return "" if self.batch_size == 1 else f"batch_size={self.batch_size}"
