"""The library as a factor: PyTorch, JAX and Keras from the same weights, on the same frames, by the same protocol.

The trainings are `gpulab.companion.in_jax:prednet` and `:autoencoder`, and the same in `in_keras`, for `gpulab.train`
and `gpulab.Experiment`; torch's are gpulab's own, `prednet` and `autoencoder`.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from gpulab.errors import UsageError
from gpulab.settings import Setting
from gpulab.stats.verdicts import Verdict, verdict
from gpulab.training.protocol import protocol
from gpulab.training.run import train
from gpulab.training.step import FirstWindow

LIBRARIES = ("jax", "keras")
TORCH = "torch"


def one_step(
    net: str = "prednet", setting: str = "cpu", seed: int = 0, size: str = "quick", libraries: Sequence[str] = LIBRARIES
) -> pd.DataFrame:
    """The first window of a training, before any update, in other libraries against torch.

    Args:
        net: `prednet` or `autoencoder`.
        setting: For all of them.
        seed: Of the weights.
        size: A profile.
        libraries: Of `jax` and `keras`.

    Returns:
        A row a library, with the relative distances of its losses and of its gradient to torch's
        (`loss_difference`, `gradient_difference`), and the same in units of `torch.finfo(…).eps`, the relative
        distance of neighbouring numbers in the setting's precision (`loss_roundings`, `gradient_roundings`).

    Raises:
        GpulabError: For a library that is not installed, or cannot honour the setting.

    Examples:
        >>> float(one_step("autoencoder", size="smoke", libraries=["jax"]).gradient_roundings.max()) < 100
        True
    """
    import torch

    usual = FirstWindow(net, seed=seed, profile=size).gradient(setting)
    eps, rows = torch.finfo(Setting.parse(setting).dtype).eps, []
    for library in libraries:
        found = _in(library).first_window(net, setting, seed, size)
        losses = float((found.losses - usual.losses).norm() / usual.losses.norm())
        gradient = found.against(usual)["gradient_difference"]
        row = {"library": library, "network": net, "setting": setting, "loss_difference": losses}
        row |= {"loss_roundings": losses / eps, "gradient_difference": gradient, "gradient_roundings": gradient / eps}
        rows.append(row)
    return pd.DataFrame(rows)


def library_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Runs from `gpulab.runs` of torch's own networks and of those in other libraries, with a column `library`.

    `experiment` is then the network and `profile` the size, whatever the library.

    Raises:
        UsageError: For runs of something else, and for torch's on other data or of another length than the profile's.
    """
    named = frame.experiment.str.extract(r"^(?:in_(?P<library>\w+)\.py:)?(?P<network>prednet|autoencoder)$")
    if len(others := frame.experiment[named.network.isna()]):
        raise UsageError(f"runs of {others.iloc[0]}: expected prednet or autoencoder, in torch or another library")
    of_torch = named.library.isna()
    for run in frame[of_torch].itertuples():
        usual = protocol(run.experiment, run.profile)
        if (run.data, run.frames) != (usual.data, usual.frames):
            raise UsageError(
                f"a run on {run.frames} frames of {run.data}: expected the profile's, {usual.frames} of {usual.data}"
            )
    sizes = frame.profile if of_torch.all() else frame.profile.where(of_torch, frame["size"])
    more = {"library": named.library.fillna(TORCH), "experiment": named.network, "profile": sizes}
    return frame.assign(**more, protocol=frame.truncation).drop(columns=["options", "frames"], errors="ignore")


def library_verdicts(frame: pd.DataFrame, margin: str | float | None = None) -> dict[tuple[str, str, str], Verdict]:
    """What other libraries do to the final loss, against torch on the same seeds.

    Args:
        frame: Runs, recorded or fresh, as for `library_runs`.
        margin: As of `gpulab.verdict`.

    Returns:
        A verdict for each network, size and setting.
    """
    groups = library_runs(frame).groupby(["experiment", "profile", "setting"])
    return {key: verdict(some, factor="library", reference=TORCH, margin=margin) for key, some in groups}


def library_speeds(
    net: str = "prednet",
    setting: str = "cpu",
    size: str = "quick",
    libraries: Sequence[str] = (TORCH, *LIBRARIES),
    rounds: int = 3,
    windows: int = 10,
) -> pd.DataFrame:
    """Frames per second of trainings that take turns.

    Args:
        net: `prednet` or `autoencoder`.
        setting: For all of them.
        size: A profile.
        libraries: Which.
        rounds: How many trainings each.
        windows: Of a training; the first two, in which a library may compile, are not timed.

    Returns:
        A row a library and round: `frames_per_second` by the median window, `first_two` the seconds until the second
        window was done.

    Raises:
        UsageError: For fewer than three windows.
    """
    if windows < 3:
        raise UsageError(f"windows={windows}: expected 3 or more, for the first two are not timed")
    length, rows = protocol(net, size).window, []
    for number, library in itertools.product(range(rounds), libraries):
        if library == TORCH:
            run = train(net, setting=setting, profile=size, frames=windows * length, progress=False)
            seconds = run.history.seconds.tolist()
        else:
            begun = time.perf_counter()
            steps = itertools.islice(getattr(_in(library), net)(0, Setting.parse(setting), size), windows)
            seconds = [time.perf_counter() - begun for _ in steps]
        speed = length / float(np.median(np.diff(seconds[1:])))
        row = {"library": library, "round": number, "frames_per_second": speed, "first_two": seconds[1]}
        rows.append({"network": net, "setting": setting, **row})
    return pd.DataFrame(rows)


def _in(library: str) -> Any:
    """The module of a library's trainings; `GpulabError`, which says how to install it, where it is not there."""
    if library not in LIBRARIES:
        raise UsageError(f"library {library!r}: expected one of {', '.join(LIBRARIES)}")
    return importlib.import_module(f"gpulab.companion.in_{library}")
