"""A whitener whose encoder begins with a convolution, for the retunings in notebook 09."""

from __future__ import annotations

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gpulab as gl
from gpulab.models.autoencoders import covariance, whiten

CHANNELS, CODE, BATCH = 8, 24, 50
LAST = 5  # the final loss is the mean over the last fifth of the updates
UPDATES = {"smoke": 40, "quick": 100, "paper": 400}


class ConvolutionalWhitener(nn.Module):
    """Reconstruct images of 28×28 pixels from a whitened code of 24 numbers.

    The encoder is a convolution with `CHANNELS` channels, a ReLU, a linear layer and a sigmoid. The
    decoder is the same as in `gpulab.models.Whitener`: two linear layers.

    Args:
        kernel: The edge of the convolution's kernel, an odd number of pixels.
        stride: How many pixels the kernel moves at each step.

    Examples:
        >>> net = ConvolutionalWhitener(kernel=3, stride=2)
        >>> net(torch.rand(50, 1, 28, 28)).shape
        torch.Size([50, 1, 28, 28])
    """

    def __init__(self, kernel: int = 5, stride: int = 2) -> None:
        super().__init__()
        convolution = nn.Conv2d(1, CHANNELS, kernel, stride, padding=kernel // 2)
        edge = math.ceil(28 / stride)
        self.encoder = nn.Sequential(
            convolution,
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(CHANNELS * edge * edge, CODE),
            nn.Sigmoid(),
        )
        self.decoder = nn.Sequential(
            nn.Linear(CODE, 128), nn.ReLU(), nn.Linear(128, 28 * 28), nn.Sigmoid()
        )

    def forward(self, images: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b 1 h w"]:
        """Reconstruct images; all NaN if the code cannot be whitened."""
        codes = self.encoder(images)
        whitened = whiten(codes, covariance(codes, "one-pass"))
        return self.decoder(whitened).view_as(images)


def train_convolutional(
    seed: int, setting: gl.Setting, kernel: int = 5, stride: int = 2, updates: int = 100
) -> float:
    """Train the network on digits, 50 images an update, with Adam at 1e-3.

    Args:
        seed: Seeds the initial weights and the order of the images.
        setting: Where and how to compute; it is applied already.
        kernel: The edge of the convolution's kernel.
        stride: How many pixels the kernel moves at each step.
        updates: How many updates to make.

    Returns:
        The mean loss over the last fifth of the updates; NaN if a loss was not a number.
    """
    torch.manual_seed(seed)
    net = ConvolutionalWhitener(kernel, stride).to(setting.device)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    losses: list[float] = []
    for window in itertools.islice(gl.load("digits").windows(BATCH, seed), updates):
        images = torch.from_numpy(window.frames).to(setting.device).float() / 255
        optimizer.zero_grad()
        loss = mse_loss(net(images), images)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return math.nan
    kept = losses[-max(1, len(losses) // LAST) :]
    return math.fsum(kept) / len(kept)
