"""Profiles: how large an experiment is. `smoke` for tests, `quick` for a laptop, `paper` as published."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from gpulab.errors import UsageError

PROFILES = ("smoke", "quick", "paper")


@dataclass(frozen=True)
class Protocol:
    """What a profile means for one model.

    `frames` are trained on in windows of `window`; `seeds` is how many an experiment uses unless
    told; `data`, `size` (height, width) and `model` (options of the model) are what is trained.
    """

    data: str
    frames: int
    window: int
    seeds: int
    size: tuple[int, int]
    model: dict[str, Any]
    learning_rate: float = 1e-3

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"size": list(self.size)}


WHITENER = {"hidden": 128, "code": 24, "batch_size": 50, "covariance": "one-pass"}
PROTOCOLS = {
    "autoencoder": {
        "smoke": Protocol("digits", 400, 20, 2, (28, 28), {"hidden": [64, 16]}),
        "quick": Protocol("digits", 3_000, 20, 5, (28, 28), {"hidden": [128, 32]}),
        "paper": Protocol("mnist", 60_000, 20, 10, (28, 28), {"hidden": [128, 32]}),
    },
    "prednet": {
        "smoke": Protocol("walk", 200, 20, 2, (24, 32), {"channels": [3, 8, 16]}),
        "quick": Protocol("walk", 1_000, 20, 5, (48, 64), {"channels": [3, 16, 32]}),
        "paper": Protocol("walk", 5_000, 20, 10, (120, 160), {"channels": [3, 48, 96, 192]}),
    },
    "whitener": {
        "smoke": Protocol("digits", 4_000, 200, 6, (28, 28), WHITENER),
        "quick": Protocol("digits", 20_000, 200, 10, (28, 28), WHITENER),
        "paper": Protocol("mnist", 60_000, 200, 10, (28, 28), WHITENER),
    },
}


def profile(name: str) -> str:
    """The profile to use: the environment variable `GPULAB_PROFILE` if it is set, else `name`.

    Notebooks ask here, so that the tests can run them small. An unknown name raises `UsageError`.

    >>> profile("quick") in PROFILES
    True
    """
    chosen = os.environ.get("GPULAB_PROFILE") or name
    if chosen not in PROFILES:
        raise UsageError(f"profile {chosen!r}: expected one of {', '.join(PROFILES)}")
    return chosen


def protocol(model: str, name: str) -> Protocol:
    """What the profile `name` means for a model.

    >>> protocol("prednet", "paper").frames
    5000
    """
    if model not in PROTOCOLS:
        raise UsageError(f"model {model!r}: expected one of {', '.join(PROTOCOLS)}")
    if name not in PROFILES:
        raise UsageError(f"profile {name!r}: expected one of {', '.join(PROFILES)}")
    return PROTOCOLS[model][name]
