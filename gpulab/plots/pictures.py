"""Frames, predictions and reconstructions as pictures in rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpulab.data.base import Data
from gpulab.plots import style
from gpulab.report import Picture
from gpulab.training.run import Run


def predictions(run: Run) -> Picture:
    """What a trained PredNet saw coming: held-out frame, next frame, prediction and difference, in rows."""
    coming, predicted = (tensor[:, 0] for tensor in run.predict())
    settled = min(10, len(coming) // 2)  # so many frames fill the state first
    moment = np.linspace(settled, len(coming) - 1, 5).astype(int)
    before, after, guess = coming[moment - 1], coming[moment], predicted[moment]
    rows = {"frame t": before, "frame t + 1": after, "predicted": guess, "difference": (guess - after).abs()}
    error, still = (((frames - after) ** 2).mean() for frames in (guess, before))
    headline = f"Mean squared error of these predictions {error:.3g}; of repeating frame t {still:.3g}"
    return in_rows(rows, [f"t = {t}" for t in moment], headline)


def reconstructions(run: Run) -> Picture:
    """What a trained autoencoder makes of held-out images: image, reconstruction, difference."""
    images, output = (tensor[:8] for tensor in run.predict())
    rows = {"image": images, "reconstructed": output, "difference": (output - images).abs()}
    error = ((output - images) ** 2).mean()
    return in_rows(rows, [], f"Mean squared error of these {len(images)} images: {error:.3g}")


def sample(run: Run) -> Picture:
    """What a run's trained network makes of the held-out part of its data."""
    return predictions(run) if run.data.sequential else reconstructions(run)


def frames(data: Data, every: int = 30) -> Picture:
    """Ten frames of a data set in two rows, one in `every`."""
    shown = next(iter(data.windows(10 * every))).frames[::every][:10]
    stream = torch.from_numpy(shown.astype(np.float32)) / 255
    return in_rows({"": stream[:5], " ": stream[5:]}, [], f"{data.name}: every {every}th frame")


def in_rows(rows: dict[str, torch.Tensor], titles: Sequence[str], headline: str) -> Picture:
    """Rows of pictures (N, C, H, W) of numbers from 0 to 1, by what they show; `titles` stand above the first."""
    count = max(map(len, rows.values()))
    height, width = next(iter(rows.values())).shape[-2:]
    figure, panels = style.canvas(count, height=7.2 / count * height / width * len(rows) + 0.6, rows=len(rows))
    for axes in panels:
        axes.set_axis_off()
    for row, (name, pictures) in enumerate(rows.items()):
        line = panels[row * count : (row + 1) * count]
        line[0].text(-0.06, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
        for axes, picture in zip(line, pictures, strict=False):
            pixels = picture.movedim(0, -1).clamp(0, 1).squeeze(-1).numpy()
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")  # as they are, and a small file
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(title)
    names = ", ".join(name.strip() or "frames" for name in rows)
    return style.finished(figure, headline, f"Rows of pictures: {names}.")
