"""Autoencoders for images: the paper's control experiment, a linear one, and a whitening one."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpulab.errors import UsageError, check_count, check_counts
from gpulab.models._base import Trainable, draw_linear_
from gpulab.numerics._emulation import float32_products

Size = tuple[int, int]
COVARIANCES = ("one-pass", "float32", "centred")
EPSILON = 1e-5  # added to every variance, as batch normalisation does


class _Images(Trainable):
    """A network of linear layers that reconstructs images of one `size` in mean squared error."""

    size: Size
    # The layers are so small that a second thread does not help, and waits for a busy core.
    threads: ClassVar[int | None] = 1

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw LeCun-normal weights from a generator, and set all biases to zero.

        Args:
            generator: The generator of the random numbers, which are drawn in float32 on its
                device.
        """
        draw_linear_(self, generator)

    def flat(self, images: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b pixels"]:
        """Turn each image into one row.

        Args:
            images: (B, 1, height, width).

        Returns:
            (B, height · width).

        Raises:
            UsageError: If the shape of the images does not match the network's `size`.
        """
        if tuple(images.shape[1:]) != (1, *self.size):
            raise UsageError(
                f"images of shape {tuple(images.shape)}: expected (B, 1, {self.size[0]},"
                f" {self.size[1]})"
            )
        return images.flatten(1)


class Autoencoder(_Images):
    """A fully connected autoencoder for images, by default 784 → 128 → 32 → 128 → 784 units.

    Every layer ends in a ReLU, except the last, which ends in a sigmoid. `gpulab.train` trains the
    network as in the paper cited below: one image per update, on the mean squared error of the
    reconstruction. A new object has weights drawn from seed 0; `gpulab.train` draws new ones from
    the seed of its run.

    Args:
        hidden: The numbers of units of the layers from the first to the code. The layers after the
            code have the same numbers in reversed order.
        size: The height and width of an image in pixels.
        batch_size: The number of images per update.

    Attributes:
        layers: All layers, as a `torch.nn.Sequential`.
        size: The height and width of an image in pixels.
        batch_size: The number of images per update.

    Raises:
        UsageError: If there are no widths, or if a width, a size or the batch size is not a
            positive integer.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> images = torch.rand(5, 1, 28, 28)
        >>> gl.models.Autoencoder()(images).shape
        torch.Size([5, 1, 28, 28])

    References:
        Pietrowski et al. 2021, *Impact of GPU uncertainty on the training of predictive deep neural
        networks* (arXiv 2109.01451, since retracted).
    """

    def __init__(
        self, hidden: Sequence[int] = (128, 32), size: Size = (28, 28), batch_size: int = 1
    ) -> None:
        super().__init__()
        hidden = check_counts("hidden", hidden)
        check_count("batch_size", batch_size)
        height, width = check_counts("size", size, ("height", "width"))
        self.size = (height, width)
        self.batch_size = int(batch_size)
        widths = [height * width, *hidden]
        widths += widths[-2::-1]  # the same widths in reversed order, without the code
        layers = [
            layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())
        ]
        self.layers = nn.Sequential(*layers[:-1], nn.Sigmoid())
        self.draw_weights(torch.Generator().manual_seed(0))

    def forward(self, images: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b 1 h w"]:
        """Reconstruct images.

        Args:
            images: (B, 1, height, width), numbers in [0, 1].

        Returns:
            The reconstructions, in the same shape and range.

        Raises:
            UsageError: If the shape of the images does not match the network's `size`.
        """
        return self.layers(self.flat(images)).view_as(images)

    def batches(self, window: Float[Tensor, "t 1 h w"]) -> Iterator[Tensor]:
        """Split a window of images into batches of `batch_size`; the last one may be smaller.

        Args:
            window: (T, 1, height, width).

        Yields:
            The images of one update, (B, 1, height, width). B is `batch_size`, except at the end.
        """
        yield from window.split(self.batch_size)

    def training_loss(self, batch: Tensor, state: None) -> tuple[Tensor, Tensor, None]:  # noqa: ARG002
        """Compute the mean squared error of the reconstruction.

        Args:
            batch: Images (B, 1, height, width) in [0, 1].
            state: Not used: images have no order.

        Returns:
            The loss, a scalar to differentiate; the same number for each image, (B,), for the
            history; and None, because there is no state.
        """
        loss = (self(batch) - batch).square().mean()
        return loss, loss.detach().expand(len(batch)), None

    def extra_repr(self) -> str:
        """Add the batch size to the printed network, unless it is 1.

        >>> Autoencoder().extra_repr(), Autoencoder(batch_size=20).extra_repr()
        ('', 'batch_size=20')
        """
        return "" if self.batch_size == 1 else f"batch_size={self.batch_size}"


class LinearAutoencoder(nn.Module):
    """A linear autoencoder without biases: decoder(encoder(x)), features → hidden → features.

    `gpulab.saddles.linear_autoencoder_saddle` builds critical points of its mean squared error in
    closed form. A new object has weights drawn from seed 0.

    Args:
        features: The width of input and output.
        hidden: The width of the code.

    Attributes:
        encoder: The first layer, whose weight is (hidden, features).
        decoder: The second layer, whose weight is (features, hidden).

    Raises:
        UsageError: If a width is not a positive integer.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> gl.models.LinearAutoencoder(features=5, hidden=2)(torch.rand(7, 5)).shape
        torch.Size([7, 5])

    References:
        Baldi, Hornik 1989, *Neural networks and principal component analysis* (Neural Networks
            2:53).
    """

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        for name, width in (("features", features), ("hidden", hidden)):
            check_count(name, width)
        self.encoder = nn.Linear(features, hidden, bias=False)
        self.decoder = nn.Linear(hidden, features, bias=False)
        self.draw_weights(torch.Generator().manual_seed(0))

    def draw_weights(self, generator: torch.Generator) -> None:
        """Draw LeCun-normal weights from a generator.

        Args:
            generator: The generator of the random numbers, which are drawn in float32 on its
                device.
        """
        draw_linear_(self, generator)

    def forward(self, x: Float[Tensor, "n features"]) -> Float[Tensor, "n features"]:
        """Reconstruct each row.

        Args:
            x: (N, features).

        Returns:
            The reconstructions, (N, features).
        """
        return self.decoder(self.encoder(x))


class Whitener(_Images):
    """An autoencoder whose code is whitened over each batch: uncorrelated, with unit variance.

    The layers are fully connected, by default 784 → 128 → 24 → 128 → 784. The two hidden layers end
    in a ReLU, the code and the output in a sigmoid. Because of the whitening, no element of the
    code can be a linear function of another. The whitened code is z = L⁻¹ (h − m), where m is the
    mean of the batch's codes h, and L Lᵀ is the Cholesky decomposition of their covariance. As in
    batch normalisation, 1e-5 is first added to each variance. `covariance` selects how the
    covariance of n codes is computed:

    - `one-pass`: hᵀh / n − m mᵀ, which needs only sums over the batch. If a variance is small,
      rounding of the product can make it negative. Then L does not exist, and the loss is NaN.
    - `float32`: the same formula, but the product hᵀh is computed in float32, whatever the setting
      allows (see `gpulab.float32_products`).
    - `centred`: (h − m)ᵀ(h − m) / n. No variance can be negative, however the factors are rounded.

    `gpulab.train` trains it on the mean squared error of the reconstruction. A new object has
    weights drawn from seed 0; `gpulab.train` draws new ones from the seed of the run.

    Args:
        hidden: The width of the layer on either side of the code, in units.
        code: The width of the code.
        batch_size: The number of images per update; larger than the width of the code.
        covariance: `one-pass`, `float32` or `centred`, as above.
        size: (height, width) of an image in pixels.

    Attributes:
        encoder: The layers from the image to the code, before it is whitened.
        decoder: The layers from the whitened code to the reconstruction.
        size: (height, width) of an image in pixels.
        batch_size: The number of images per update.
        covariance: The way in which the covariance is computed.

    Raises:
        UsageError: If the `covariance` is unknown, if widths or sizes are not positive integers, or
            if a batch is not larger than the code.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> images = torch.rand(100, 1, 28, 28)
        >>> net = gl.models.Whitener()
        >>> net(images).shape, net.whitened(images).std(0, correction=0).mean().item() > 0.7
        (torch.Size([100, 1, 28, 28]), True)

    References:
        Huang, Yang, Lang, Deng 2018, *Decorrelated batch normalization* (CVPR, arXiv 1804.08450).
        With the Cholesky decomposition: Siarohin, Sangineto, Sebe 2019, *Whitening and coloring
        batch transform for GANs* (ICLR, arXiv 1806.00420); Ermolov et al. 2021, *Whitening for
        self-supervised representation learning* (ICML, arXiv 2007.06346). On the dangers of the
        one-pass formula: Chan, Golub, LeVeque 1983, *Algorithms for computing the sample variance*.
    """

    def __init__(
        self,
        hidden: int = 128,
        code: int = 24,
        batch_size: int = 50,
        covariance: str = "one-pass",
        size: Size = (28, 28),
    ) -> None:
        super().__init__()
        if covariance not in COVARIANCES:
            raise UsageError(f"covariance={covariance!r}: expected one of {', '.join(COVARIANCES)}")
        for name, count in (("hidden", hidden), ("code", code), ("batch_size", batch_size)):
            check_count(name, count)
        if batch_size <= code:
            raise UsageError(
                f"batch_size={batch_size!r}: expected more than {code} images, because the code has"
                f" {code} elements"
            )
        height, width = check_counts("size", size, ("height", "width"))
        self.size = (height, width)
        self.batch_size = int(batch_size)
        self.covariance = covariance
        pixels = height * width
        self.encoder = nn.Sequential(
            nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, code), nn.Sigmoid()
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, pixels), nn.Sigmoid()
        )
        self.draw_weights(torch.Generator().manual_seed(0))

    def forward(self, images: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b 1 h w"]:
        """Reconstruct images from their whitened codes.

        Args:
            images: (B, 1, height, width), numbers in [0, 1].

        Returns:
            The reconstructions, in the same shape and range. All are NaN if the codes cannot be
            whitened.

        Raises:
            UsageError: If the shape of the images does not match the network's `size`.
        """
        return self.decoder(self.whitened(images)).view_as(images)

    def codes(self, images: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b k"]:
        """Compute the codes of images before they are whitened.

        Args:
            images: (B, 1, height, width), numbers in [0, 1].

        Returns:
            (B, code), numbers in (0, 1).
        """
        return self.encoder(self.flat(images))

    def whitened(self, images: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b k"]:
        """Compute codes that are uncorrelated and have unit variance over these images.

        Args:
            images: (B, 1, height, width), numbers in [0, 1].

        Returns:
            The whitened codes, (B, code). All are NaN if the covariance has no Cholesky
            decomposition.
        """
        codes = self.codes(images)
        return whiten(codes, covariance(codes, self.covariance))

    def batches(self, window: Float[Tensor, "t 1 h w"]) -> Iterator[Tensor]:
        """Split a window into nearly equal batches of at least `batch_size` images each.

        Args:
            window: (T, 1, height, width). With fewer than `batch_size` images it is one batch.

        Yields:
            The images of one update, (B, 1, height, width).
        """
        yield from window.tensor_split(max(1, len(window) // self.batch_size))

    def training_loss(self, batch: Tensor, state: None) -> tuple[Tensor, Tensor, None]:  # noqa: ARG002
        """Compute the mean squared error of the reconstruction.

        Args:
            batch: Images (B, 1, height, width) in [0, 1].
            state: Not used: images have no order.

        Returns:
            The loss, a scalar to differentiate; the error of each image, (B,), for the history;
            None.
        """
        per_image = (self(batch) - batch).square().flatten(1).mean(1)
        return per_image.mean(), per_image.detach(), None


def covariance(codes: Float[Tensor, "b k"], method: str) -> Float[Tensor, "k k"]:
    """Compute the covariance of codes; see `Whitener` for the three methods.

    Examples:
        >>> covariance(torch.tensor([[1.0], [3.0]]), "centred")
        tensor([[1.]])
    """
    mean = codes.mean(0)
    if method == "centred":
        centred = codes - mean
        return centred.T @ centred / len(codes)
    with float32_products() if method == "float32" else contextlib.nullcontext():
        second_moment = codes.T @ codes / len(codes)
    return second_moment - torch.outer(mean, mean)


def whiten(codes: Float[Tensor, "b k"], covariance: Float[Tensor, "k k"]) -> Float[Tensor, "b k"]:
    """Whiten codes: make them uncorrelated with unit variance.

    All are NaN if the covariance, with `EPSILON` added to each variance, is not positive definite.
    """
    regularized = covariance + EPSILON * torch.eye(
        len(covariance), dtype=covariance.dtype, device=covariance.device
    )
    factor, failed = torch.linalg.cholesky_ex(regularized)
    # A failed factor has different content in different libraries, so it is replaced by NaN. No
    # error is raised, because that would wait for the device at every step.
    factor = factor.masked_fill(failed != 0, math.nan)
    return torch.linalg.solve_triangular(factor, (codes - codes.mean(0)).T, upper=False).T
