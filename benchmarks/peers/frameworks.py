"""The library as a factor: PyTorch, JAX and Keras with the same weights, frames and protocol.

    python benchmarks/peers/frameworks.py cpu:threads=1 --write benchmarks/results/frameworks.md
    python benchmarks/peers/frameworks.py cuda:tf32=off --size paper

This measures how much a first step differs from torch's, and frames per second. Trainings take
turns. A speed is the median over rounds; a round is the median window of a training without its
first two windows, in which JAX and TensorFlow compile.

The trainings are `benchmarks/peers/in_jax.py:prednet` and `:autoencoder`, and the same in
`in_keras.py`, for `gpulab train` and `gpulab experiment`; torch's are gpulab's own, `prednet` and
`autoencoder`. `benchmarks/README.md` shows how a verdict compares the libraries. The script needs
the extras jax and keras; `--libraries jax` needs only the first.
"""

from __future__ import annotations

import importlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer

import gpulab as gl
from benchmarks.measuring import made_by, markdown, run, show
from companion.first_windows import FirstWindow
from companion.workloads import REPEATS, Row, summary
from gpulab.errors import GpulabError, UsageError
from gpulab.settings import Setting
from gpulab.training import train
from gpulab.training._profiles import protocol

NETWORKS = ("autoencoder", "prednet")
LIBRARIES = ("jax", "keras")
TORCH = "torch"


def one_step(
    net: str = "prednet",
    setting: str = "cpu",
    seed: int = 0,
    size: str = "quick",
    libraries: Sequence[str] = LIBRARIES,
) -> pd.DataFrame:
    """Compare the first window of a training, before any update, in other libraries and in torch.

    The result has the relative distances of its losses and of its gradient to torch's
    (`loss_difference`, `gradient_difference`), and the same in units of `torch.finfo(…).eps`, the
    relative distance of neighbouring numbers in the setting's precision (`loss_roundings`,
    `gradient_roundings`). It is an error if a library is not installed or cannot honour the
    setting.

    Examples:
        >>> float(
        ...     one_step("autoencoder", size="smoke", libraries=["jax"]).gradient_roundings.max()
        ... ) < 100
        True
    """
    usual = FirstWindow(net, seed=seed, profile=size).gradient(setting)
    eps, rows = torch.finfo(Setting.parse(setting).dtype).eps, []
    for library in libraries:
        found = _in(library).first_window(net, setting, seed, size)
        losses = float((found.losses - usual.losses).norm() / usual.losses.norm())
        gradient = found.against(usual)["gradient_difference"]
        row = {"library": library, "network": net, "setting": setting, "loss_difference": losses}
        row |= {
            "loss_roundings": losses / eps,
            "gradient_difference": gradient,
            "gradient_roundings": gradient / eps,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def library_speeds(
    net: str = "prednet",
    setting: str = "cpu",
    size: str = "quick",
    libraries: Sequence[str] = (TORCH, *LIBRARIES),
    rounds: int = 3,
    windows: int = 10,
) -> pd.DataFrame:
    """Measure frames per second of trainings that take turns; a row for each library and round.

    The first two windows, in which a library may compile, are not timed; `first_two` is the time in
    seconds until the second was done. `frames_per_second` is that of the median window.
    """
    if windows < 3:
        raise UsageError(f"windows={windows}: expected at least 3, as the first two are not timed")
    length, rows = protocol(net, size).window, []
    for number, library in itertools.product(range(rounds), libraries):
        if library == TORCH:
            trained = train(
                net, setting=setting, profile=size, frames=windows * length, progress=False
            )
            seconds = trained.history.seconds.tolist()
        else:
            begun = time.perf_counter()
            steps = itertools.islice(
                _in(library).windows(net, 0, Setting.parse(setting), size), windows
            )
            seconds = [time.perf_counter() - begun for _ in steps]
        speed = length / float(np.median(np.diff(seconds[1:])))
        row = {
            "library": library,
            "round": number,
            "frames_per_second": speed,
            "first_two": seconds[1],
        }
        rows.append({"network": net, "setting": setting, **row})
    return pd.DataFrame(rows)


def libraries(setting: Setting, size: str) -> Iterator[Row]:
    """Time the autoencoder in PyTorch, JAX and Keras: images per second, one image per batch."""
    # By default JAX reserves most of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for library in (TORCH, *LIBRARIES) if size != "paper" else ():  # one image is one image
        try:
            table = library_speeds(
                "autoencoder", str(setting), size, [library], REPEATS[size], windows=6
            )
            median, _, spread = summary(table.frames_per_second.tolist())
            yield Row("autoencoder", library, median, "images/s", spread)
        except GpulabError as error:
            yield Row("autoencoder", library, note=str(error))


def _in(library: str) -> Any:
    """Return the module of a library's trainings; raise `GpulabError` if it is not installed."""
    if library not in LIBRARIES:
        raise UsageError(f"library {library!r}: expected one of {', '.join(LIBRARIES)}")
    return importlib.import_module(f"in_{library}")


def main(
    setting: Annotated[str, typer.Argument(help="such as cpu:threads=1 or cuda:tf32=off")] = "cpu",
    size: Annotated[str, typer.Option(help="smoke, quick or paper")] = "quick",
    compared: Annotated[
        list[str], typer.Option("--libraries", help="jax or keras; may be repeated")
    ] = LIBRARIES,
    rounds: int = 5,
    windows: int = 12,
    write: Annotated[Path | None, typer.Option(help="page of Markdown, between its marks")] = None,
) -> None:
    """Measure how much a first step differs from torch's, and frames per second."""
    software = gl.passport()["software"]
    versions = [
        f"{name} {software[name]}"
        for name in software
        if name.startswith(("jax", "keras", "tensorflow"))
    ]
    steps = pd.concat([one_step(net, setting, size=size, libraries=compared) for net in NETWORKS])
    both = [TORCH, *compared]
    speeds = pd.concat(
        [library_speeds(net, setting, size, both, rounds, windows) for net in NETWORKS]
    )
    groups = speeds.groupby(["network", "library"], sort=False)
    found = (
        groups.frames_per_second.agg(["median", "min", "max"])
        .round()
        .assign(first_two=groups.first_two.first())
    )
    made = f"{made_by()} {', '.join(versions)}."
    words = {"median": "frames/s, median", "first_two": "first two windows, s"}
    tables = [
        markdown(steps.round(9)),
        markdown(found.reset_index().rename(columns=words).round(1)),
    ]
    show("The library as a factor", write, measured="\n\n".join([made, *tables]))


if __name__ == "__main__":
    run(lambda: typer.run(main))
