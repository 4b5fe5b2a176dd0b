"""Frames, predictions and reconstructions as pictures in rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from gpulab.plots.style import Picture

if TYPE_CHECKING:
    import torch

    from gpulab.data.datasets import Data
    from gpulab.training.run import Run


def predictions(run: Run, moments: int = 5, skip: int = 10) -> Picture:
    """What a trained PredNet saw coming: frame, next frame, prediction and difference, in rows.

    The frames are held-out ones, after `skip` frames for the state to settle.
    """
    coming, predicted = (tensor[:, 0] for tensor in run.predict())
    skip = min(skip, len(coming) // 2)
    chosen = np.linspace(skip, len(coming) - 1, moments).astype(int)
    seen, following, guess = coming[chosen - 1], coming[chosen], predicted[chosen]
    error = (guess - following).square().mean().item()
    still = (seen - following).square().mean().item()
    rows = {"frame t": seen, "frame t + 1": following, "predicted": guess, "difference": (guess - following).abs()}
    return _picture_rows(
        rows,
        [f"t = {t}" for t in chosen],
        f"Mean squared error of these predictions {error:.4f}; of repeating frame t {still:.4f}",
    )


def reconstructions(run: Run, count: int = 8) -> Picture:
    """What a trained autoencoder makes of held-out images: image, reconstruction, difference."""
    images, made = (tensor[:count] for tensor in run.predict())
    error = (made - images).square().mean().item()
    rows = {"image": images, "reconstructed": made, "difference": (made - images).abs()}
    return _picture_rows(rows, [""] * count, f"Mean squared error of these {len(images)} images: {error:.4f}")


def sample(run: Run) -> Picture:
    """What a run's trained network makes of the held-out part of its data."""
    return predictions(run) if run.data.sequential else reconstructions(run)


def frames(data: Data, count: int = 10, every: int = 30) -> Picture:
    """Frames of a data set in two rows, `every` so many frames."""
    import torch

    stream = next(iter(data.windows(count * every))).frames[::every][:count]
    pictures = torch.from_numpy(stream).float().div(255)
    half = (count + 1) // 2
    rows = {"": pictures[:half], " ": pictures[half:]}
    return _picture_rows(rows, [], f"{data.name}: every {every}th frame")


def _picture_rows(rows: dict[str, torch.Tensor], titles: Sequence[str], headline: str) -> Picture:
    count = max(len(pictures) for pictures in rows.values())
    height, width = next(iter(rows.values())).shape[-2:]
    cell = 7.2 / count
    figure = Figure(figsize=(7.2, cell * height / width * len(rows) + 0.6), layout="constrained")
    grid = figure.subplots(len(rows), count, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for (name, pictures), line in zip(rows.items(), grid, strict=True):
        for place, picture in enumerate(pictures):
            pixels = picture.permute(1, 2, 0).clamp(0, 1).numpy()
            line[place].imshow(pixels if pixels.shape[2] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
        line[0].text(-0.06, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    for axes, title in zip(grid[0], titles, strict=False):
        axes.set_title(title, fontsize=8)
    figure.suptitle(headline, fontsize=10)
    return Picture(figure, f"Rows of pictures: {', '.join(name.strip() or 'frames' for name in rows)}. {headline}.")
