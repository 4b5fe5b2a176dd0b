"""Frames, predictions and reconstructions as rows of pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpulab.data._base import Data
from gpulab.picture import Picture
from gpulab.plots import theme
from gpulab.training._run import Run

NO_AXES = {"frame_on": False, "xticks": [], "yticks": []}


def predictions(run: Run) -> Picture:
    """Draw what a trained PredNet predicted at five points of the held-out film.

    The rows are the previous frame, the next frame, its prediction, and the absolute difference
    between prediction and next frame.

    Args:
        run: A run of PredNet from `gpulab.train`.

    Returns:
        A `gpulab.plots.Picture`. The title gives the mean squared error of these predictions, and
        that of predicting each frame by the previous one.

    Raises:
        UsageError: If the run has no network, as is the case for a custom training function.

    Examples:
        >>> import gpulab as gl
        >>> run = gl.train("prednet", profile="smoke", frames=40, progress=False)
        >>> picture = gl.plots.predictions(run)
        >>> print(picture.alt.partition(". ")[0])
        Rows of pictures: frame t, frame t + 1, predicted, difference
    """
    next_frames, predicted = (tensor[:, 0] for tensor in run.predict())
    # The first frames are not shown: the network's state still depends on its initial value.
    warm_up = min(10, len(next_frames) // 2)
    moments = np.linspace(warm_up, len(next_frames) - 1, 5).astype(int)
    frames_before = next_frames[moments - 1]
    frames_after = next_frames[moments]
    predictions_shown = predicted[moments]
    rows = {
        "frame t": frames_before,
        "frame t + 1": frames_after,
        "predicted": predictions_shown,
        "difference": (predictions_shown - frames_after).abs(),
    }
    error = ((predictions_shown - frames_after) ** 2).mean()
    repeat_error = ((frames_before - frames_after) ** 2).mean()
    headline = (
        f"Mean squared error: {error:.3g} for these predictions, {repeat_error:.3g} for repeating"
        " frame t"
    )
    return in_rows(rows, [f"t = {t}" for t in moments], headline)


def reconstructions(run: Run) -> Picture:
    """Draw a trained autoencoder's reconstructions of the first eight held-out images.

    The rows are the image, its reconstruction, and the absolute difference between the two.

    Args:
        run: A run of an autoencoder or a whitener from `gpulab.train`.

    Returns:
        A `gpulab.plots.Picture`. The title gives the mean squared error of these images.

    Raises:
        UsageError: If the run has no network, as is the case for a custom training function.

    Examples:
        >>> import gpulab as gl
        >>> run = gl.train("autoencoder", profile="smoke", frames=40, progress=False)
        >>> picture = gl.plots.reconstructions(run)
        >>> print(picture.alt.partition(". ")[0])
        Rows of pictures: image, reconstructed, difference
    """
    images, output = (tensor[:8] for tensor in run.predict())
    rows = {"image": images, "reconstructed": output, "difference": (output - images).abs()}
    error = ((output - images) ** 2).mean()
    return in_rows(rows, [], f"Mean squared error of these {len(images)} images: {error:.3g}")


def frames(data: Data, every: int = 30) -> Picture:
    """Draw ten training frames of a data set, in two rows.

    Args:
        data: From `gpulab.load`.
        every: The number of frames from one drawn frame to the next. Images are drawn in a random
            order.

    Returns:
        A `gpulab.plots.Picture`.

    Raises:
        DataError: If a film has fewer than ten times `every` frames to train on.

    Examples:
        >>> import gpulab as gl
        >>> gl.plots.frames(gl.load("walk", frames=300, size=(24, 32))).alt
        'Rows of pictures: frames, frames. walk: one frame in 30.'
    """
    first_window = next(iter(data.windows(10 * every)))
    chosen_frames = first_window.frames[::every][:10]
    scaled = torch.from_numpy(chosen_frames.astype(np.float32)) / 255
    rows = {"": scaled[:5], " ": scaled[5:]}  # two different names that are not visible
    return in_rows(rows, [], f"{data.name}: one frame in {every}")


@theme.with_theme
def in_rows(rows: dict[str, torch.Tensor], titles: Sequence[str], headline: str) -> Picture:
    """Draw labelled rows of pictures (N, C, H, W) in [0, 1], with `titles` above the first row."""
    count = max(map(len, rows.values()))
    height, width = next(iter(rows.values())).shape[-2:]
    # The panels have the shape of the pictures; 0.6 inches are for the titles.
    panel_height = theme.PAGE / count * height / width
    figure, panels = theme.canvas(
        count, height=panel_height * len(rows) + 0.6, rows=len(rows), subplot_kw=NO_AXES
    )
    for row, (name, pictures) in enumerate(rows.items()):
        panel_row = panels[row * count : (row + 1) * count]
        # The name is to the left of the first panel, at half its height.
        first_panel = panel_row[0]
        first_panel.text(-0.06, 0.5, name, transform=first_panel.transAxes, ha="right", va="center")
        # A row may have fewer pictures than panels.
        for axes, picture in zip(panel_row, pictures, strict=False):
            pixels = picture.movedim(0, -1).clamp(0, 1).squeeze(-1).numpy()
            # Without interpolation, pixels are shown unchanged, and the file is small.
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(title)
    names = ", ".join(name.strip() or "frames" for name in rows)
    return theme.finish_figure(figure, headline, f"Rows of pictures: {names}.")
