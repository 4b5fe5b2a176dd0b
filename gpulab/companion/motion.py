"""Has a network learned motion? It has if it beats the laziest prediction: that the next frame is the last one."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pandas as pd

from gpulab import records
from gpulab.data.datasets import Sequence, load
from gpulab.training.protocol import protocol
from gpulab.training.step import LAST_FIFTH
from gpulab.training.store import runs

RENDERED = ("walk", "moving-digits")


def repeat_losses(frame: pd.DataFrame) -> pd.Series:
    """For each run the loss of repeating the last frame, over the frames that its `final_loss` is the mean of.

    Args:
        frame: From `gpulab.runs`.

    Returns:
        Mean squared errors of frames in [0, 1]; NaN where no film was rendered.
    """
    return _of_film(frame, _repeat_loss)


def missing_colour_losses(frame: pd.DataFrame) -> pd.Series:
    """For each run the least loss of a network with a dead colour; infinite where no film was rendered."""
    return _of_film(frame, _missing_colour_loss).fillna(math.inf)


def motion_finding(frame: pd.DataFrame) -> str:
    """How many of these runs beat repeating the last frame, in a sentence.

    Examples:
        >>> from gpulab.training.store import recorded_runs
        >>> print(motion_finding(recorded_runs().query("experiment == 'autoencoder'")))
        No run here predicts frames of a rendered film.
    """
    known = repeat_losses(frame)
    better = int((frame.final_loss < known).sum())
    if not (of := int(known.notna().sum())):
        return "No run here predicts frames of a rendered film."
    if not better:
        return f"No network has learned motion here: none of {of} runs beats repeating the last frame."
    return f"{better} of {of} runs beat repeating the last frame."


def recorded_films() -> pd.DataFrame:
    """Recorded runs of PredNet from several seeds on several films, for `gpulab.stats.variance_components`.

    Films are other towns, ways and people of the walk. `gpulab.recorded_runs` does not have these runs. The column
    `protocol` is left out, since a film is part of it.

    Examples:
        >>> bool((recorded_films().groupby("seed").scene_seed.nunique() > 1).all())
        True
    """
    return runs(records.recorded_folder("films")).assign(recorded=True).drop(columns="protocol")


def _of_film(frame: pd.DataFrame, loss: functools._lru_cache_wrapper[float]) -> pd.Series:
    columns = [frame[name] for name in ("data", "frames", "frame_size", "scene_seed", "speed")]
    values = [loss(*row) if row[0] in RENDERED else math.nan for row in zip(*columns, strict=True)]
    return pd.Series(values, frame.index, dtype=float)


@functools.cache
def _film(data: str, frames: int, size: str, scene: float, speed: float) -> Sequence:
    height, width = map(int, size.split("x"))
    loaded = load(data, frames, (height, width), seed=int(scene), speed=speed)
    assert isinstance(loaded, Sequence)
    return loaded


@functools.cache
def _repeat_loss(data: str, frames: int, size: str, scene: float, speed: float) -> float:
    length = protocol("prednet", "paper").window
    count = frames // length
    last = max(1, count // LAST_FIFTH)
    windows = _film(data, frames, size, scene, speed).windows(length, start=count - last)
    errors = [np.square(np.diff(part.frames / 255, axis=0)).mean() for part in itertools.islice(windows, last)]
    return float(np.mean(errors))


@functools.cache
def _missing_colour_loss(data: str, frames: int, size: str, scene: float, speed: float) -> float:
    return _film(data, frames, size, scene, speed).missing_colour_loss()
