"""Rendered films, and the losses that a network has to beat on them to have learned something.

A network that learned hardly anything is no better than the best prediction without one of the
colours. A network that learned motion predicts the next frame better than repeating the last one
does; but a blurred copy of the last frame can do so, too, without any motion.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from gpulab.data import load
from gpulab.data._base import Sequence
from gpulab.store.recorded import recorded_table
from gpulab.training._profiles import FINAL_LOSS_DIVISOR, protocol

RENDERED = ("walk", "moving-digits")
# the columns of a table of runs that describe its film
COLUMNS = (
    "data",
    "frames",
    "frame_size",
    "scene_seed",
    "speed",
)
# standard deviations, in 1/64 of a frame's width
BLUR_WIDTHS = (
    0.25,
    0.35,
    0.5,
    0.7,
    1.0,
    1.4,
    2.0,
    2.8,
)


@dataclass(frozen=True)
class Film:
    """The parameters that determine the frames of a rendered film.

    Attributes:
        data: The name of the scene, `walk` or `moving-digits`.
        frames: How many frames a run is trained on.
        frame_size: Height and width in pixels, such as `48x64`.
        scene_seed: The seed from which the scene is drawn.
        speed: How fast it moves, as a multiple of its usual speed.

    Examples:
        >>> film = Film("walk", frames=200, frame_size="24x32", scene_seed=0, speed=1.0)
        >>> round(film.repeat_loss(), 4), round(film.missing_colour_loss(), 4)
        (0.0104, 0.0662)
    """

    data: str
    frames: int
    frame_size: str
    scene_seed: int
    speed: float

    def repeat_loss(self) -> float:
        """The loss of repeating the last frame, over the frames behind a run's `final_loss`."""
        return losses_of(self).repeat

    def blurred_loss(self) -> float:
        """The same for the last frame, blurred by the Gaussian that gives the smallest loss."""
        return losses_of(self).blurred

    def missing_colour_loss(self) -> float:
        """The least held-out loss that a network with one dead output channel can have."""
        return losses_of(self).missing_colour


def films_of_runs(runs: pd.DataFrame) -> list[Film | None]:
    """The film that each run was trained on; None if that was not a rendered one."""
    rows = zip(*(runs[name] for name in COLUMNS), strict=True)
    return [_film(*row) if row[0] in RENDERED else None for row in rows]


def _film(data: str, frames: float, frame_size: str, scene_seed: float, speed: float) -> Film:
    # If some runs of a table have no frames or no seed, pandas holds these columns as floats.
    return Film(data, int(frames), frame_size, int(scene_seed), float(speed))


# --- losses ---------------------------------------------------------------------------------------


class RecordedLosses(NamedTuple):
    """The recorded losses of a film."""

    repeat: float
    blurred: float
    missing_colour: float


class RenderedLosses:
    """The losses of a film, each computed from the rendered frames when it is first read.

    They are mean squared errors of frames in [0, 1].
    """

    def __init__(self, film: Film) -> None:
        height, width = map(int, film.frame_size.split("x"))
        frames = load(
            film.data, film.frames, (height, width), seed=film.scene_seed, speed=film.speed
        )
        assert isinstance(frames, Sequence)
        self.frames = frames

    @functools.cached_property
    def repeat(self) -> float:
        """The loss of repeating the last frame."""
        return float(
            np.mean([np.square(np.diff(frames, axis=0)).mean() for frames in self._last_windows()])
        )

    @functools.cached_property
    def blurred(self) -> float:
        """The loss of repeating the blurred last frame, estimated on every fifth frame."""
        pairs = [(frames[:-1:5].copy(), frames[1::5].copy()) for frames in self._last_windows()]
        last_frames, next_frames = zip(*pairs, strict=True)
        return best_blurred_loss(np.concatenate(last_frames), np.concatenate(next_frames))

    @functools.cached_property
    def missing_colour(self) -> float:
        """The smallest loss with one dead output channel."""
        return self.frames.missing_colour_loss()

    def _last_windows(self) -> Iterator[np.ndarray]:
        """The windows that a run's final loss averages, in [0, 1], one by one to save 250 MB."""
        length = protocol("prednet", "paper").window
        count = len(self.frames) // length
        last = max(1, count // FINAL_LOSS_DIVISOR)
        windows = self.frames.windows(length, start=count - last)
        yield from (window.frames / np.float32(255) for window in itertools.islice(windows, last))


@functools.cache
def losses_of(film: Film) -> RecordedLosses | RenderedLosses:
    """The losses of a film: recorded for films of recorded runs, otherwise computed.

    Films of recorded runs take long to render.
    """
    return recorded_losses().get(film) or RenderedLosses(film)


@functools.cache
def recorded_losses() -> dict[Film, RecordedLosses]:
    """The recorded losses of each film that recorded runs were trained on."""
    table = recorded_table("films")
    losses = zip(table["repeat"], table.blurred, table.missing_colour, strict=True)
    films = [_film(*row) for row in zip(*(table[name] for name in COLUMNS), strict=True)]
    return {film: RecordedLosses(*map(float, row)) for film, row in zip(films, losses, strict=True)}


def best_blurred_loss(frames: np.ndarray, next_frames: np.ndarray) -> float:
    """The mean squared error of predicting each frame by the previous one under the best blur."""
    from scipy.ndimage import gaussian_filter

    widths = frames.shape[-1] / 64 * np.array(BLUR_WIDTHS)
    blurred = (gaussian_filter(frames, (0, 0, width, width)) for width in widths)
    return float(min(np.square(prediction - next_frames).mean() for prediction in blurred))
