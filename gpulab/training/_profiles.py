"""The profiles of experiments: how long they train, on what, and with which sizes."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from gpulab.errors import UsageError

PROFILES = ("smoke", "quick", "paper")
FINAL_LOSS_DIVISOR = 5  # the final loss is the mean over the last 1/5 of the windows


class Protocol(NamedTuple):
    """The protocol of a model in a profile.

    Attributes:
        data: The name of the data.
        frames: The number of frames or images to train on.
        window: The number of frames or images in a window.
        seeds: The default number of seeds of an experiment.
        size: The height and width of a frame.
        model: The options of the model.
        learning_rate: The learning rate of Adam.
        data_options: The options of the data.
    """

    data: str
    frames: int
    window: int
    seeds: int
    size: tuple[int, int]
    model: dict[str, Any]
    learning_rate: float = 1e-3
    data_options: dict[str, Any] = {}


WHITENER = {"hidden": 128, "code": 24, "batch_size": 50, "covariance": "one-pass"}
PROTOCOLS = {
    ("autoencoder", "smoke"): Protocol("digits", 400, 20, 2, (28, 28), {"hidden": [64, 16]}),
    ("autoencoder", "quick"): Protocol("digits", 3_000, 20, 3, (28, 28), {"hidden": [128, 32]}),
    ("autoencoder", "paper"): Protocol("mnist", 60_000, 20, 10, (28, 28), {"hidden": [128, 32]}),
    ("prednet", "smoke"): Protocol("walk", 200, 20, 2, (24, 32), {"channels": [3, 8, 16]}),
    ("prednet", "quick"): Protocol("walk", 1_000, 20, 5, (48, 64), {"channels": [3, 16, 32]}),
    # Longer than `quick`, with a faster walk and a higher learning rate: most seeds beat repeating
    # the last frame.
    ("prednet", "motion"): Protocol(
        "walk", 3_000, 20, 5, (48, 64), {"channels": [3, 16, 32]}, 3e-3, {"speed": 4.0}
    ),
    ("prednet", "paper"): Protocol(
        "walk", 5_000, 20, 10, (120, 160), {"channels": [3, 48, 96, 192]}
    ),
    ("whitener", "smoke"): Protocol("digits", 4_000, 200, 6, (28, 28), WHITENER),
    ("whitener", "quick"): Protocol("digits", 20_000, 200, 8, (28, 28), WHITENER),
    ("whitener", "paper"): Protocol("mnist", 60_000, 200, 10, (28, 28), WHITENER),
}


def profile(name: str) -> str:
    """Choose the profile, the size of experiments: `GPULAB_PROFILE` if set, else `name`.

    Notebooks call this function, so that one environment variable can make all of them run quickly
    in a test.

    Args:
        name: `smoke` (seconds), `quick` (minutes on a laptop) or `paper` (as published).

    Returns:
        `smoke`, `quick` or `paper`. PredNet's extra profile, `motion`, is for `gpulab.train` and
        `gpulab.Experiment`.

    Raises:
        UsageError: If `name` or the environment variable has any other value.

    Examples:
        >>> import gpulab as gl
        >>> gl.profile("quick") in ("smoke", "quick", "paper")
        True
    """
    chosen = os.environ.get("GPULAB_PROFILE") or name
    if chosen not in PROFILES:
        raise UsageError(f"profile {chosen!r}: expected one of {', '.join(PROFILES)}")
    return chosen


def protocol(model: str, name: str) -> Protocol:
    """Return the protocol of a model in the profile `name`.

    PredNet has an extra profile, `motion`, in which the walk is faster.

    Examples:
        >>> protocol("prednet", "paper").frames
        5000
    """
    if (model, name) not in PROTOCOLS:
        known = ", ".join(f"{known_model} ({profile})" for known_model, profile in PROTOCOLS)
        raise UsageError(
            f"model {model!r}, profile {name!r}: expected one of {known}, or your own training"
            " function, such as my.py:train"
        )
    return PROTOCOLS[model, name]
