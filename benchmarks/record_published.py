"""Hold the first windows of the published network against one another, on a CPU and on a GPU, and keep that.

    python benchmarks/record_published.py prednet_in_chainer_py3/PredNet data/measured/windows-nvidia-h200.json

What is compared was registered in data/README.md; the runs themselves are made by `published.py`.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from published import Arrays, Published, windows
from stock_chainer import AUTHORS

from gpulab.data.base import Sequence as Frames
from gpulab.data.datasets import load
from gpulab.errors import UsageError
from gpulab.store import records
from gpulab.training.protocol import protocol

FOLDER = "GPULAB_CHAINER_PREDNET"  # the environment variable that names the authors' folder


class Cell(NamedTuple):
    """A device and a way of handing over frames.

    Attributes:
        kind: `cpu` or `cuda`.
        loader: As of `published.Published`.
        round_trip: Likewise.
    """

    kind: str
    loader: str
    round_trip: bool = True

    def __str__(self) -> str:
        return f"{self.kind} {self.loader}" + ("" if self.round_trip else ", no round trip")


USUAL = ((Cell("cpu", "copied"), Cell("cpu", "reused")),)


def published_windows(
    net: str | Path | None = None,
    pairs: Sequence[tuple[Cell, Cell]] = USUAL,
    count: int = 1,
    seed: int = 0,
    profile: str = "smoke",
    speed: float = 1.0,
) -> pd.DataFrame:
    """The first windows of the authors' own network in Chainer, each cell trained by itself, cell against cell.

    Args:
        net: The authors' `net.py` or its folder, else `$GPULAB_CHAINER_PREDNET`.
        pairs: What to compare: the second of each with the first.
        count: Of windows; the weights of the second and later ones have come apart already.
        seed: Of the weights.
        profile: How large.
        speed: Of the walk.

    Returns:
        A row for each pair and window: `same_losses` counts the forward losses with the same bits, of `losses`;
        `loss_difference` is the largest relative one; `gradient_difference` the relative distance of the whole
        gradient, `cosine` its direction, and `worst_array` the relative distance of the worst single array.

    Raises:
        GpulabError: Without Chainer, or CuPy where a GPU is asked for; the message says how to install it.
    """
    net = net or os.environ.get(FOLDER)
    if not net:
        raise UsageError(f"the authors' net.py: give its folder, or set ${FOLDER} to PredNet in a clone of {AUTHORS}")
    usual = protocol("prednet", profile)
    frames = load("walk", usual.frames, usual.size, speed=speed)
    assert isinstance(frames, Frames)
    found = {cell: _run(net, cell, frames, count, seed, usual.model["channels"]) for cell in {*itertools.chain(*pairs)}}
    rows = []
    for pair in pairs:
        for number, (before, after) in enumerate(zip(*(found[cell] for cell in pair), strict=True)):
            rows.append({"of": str(pair[1]), "against": str(pair[0]), "window": number, **_compared(before, after)})
    return pd.DataFrame(rows)


def _run(
    net: str | Path, cell: Cell, frames: Frames, count: int, seed: int, channels: Sequence[int]
) -> list[tuple[list[float], Arrays]]:
    """The losses and the gradients of each window."""
    callers = np.random.get_state()
    trained = Published(net, cell.kind, seed, frames.size, tuple(channels), cell.loader, cell.round_trip)
    np.random.set_state(callers)
    found = []
    for window, restart in itertools.islice(windows(frames), count):
        if restart:
            trained.restart(window[0])
        gradients: Arrays = {}
        losses = trained.window(window[1:] if restart else window, lambda: gradients.update(trained.gradients()))  # noqa: B023
        found.append((losses, gradients))
    return found


def _compared(before: tuple[list[float], Arrays], after: tuple[list[float], Arrays]) -> dict[str, float]:
    losses, others = np.array(before[0]), np.array(after[0])
    right, wrong = (
        [array.ravel().astype(np.float64) for _, array in sorted(gradients.items())]
        for gradients in (before[1], after[1])
    )
    of_each = [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in zip(right, wrong, strict=True) if a.any()]
    whole, other = np.concatenate(right), np.concatenate(wrong)
    lengths = np.linalg.norm(whole), np.linalg.norm(other)
    return {
        "same_losses": int((losses == others).sum()),
        "losses": len(losses),
        "loss_difference": float(np.abs(others / losses - 1).max()),
        "gradient_difference": float(np.linalg.norm(other - whole) / lengths[0]),
        "cosine": float(whole @ other / lengths[0] / lengths[1]),
        "worst_array": float(max(of_each)),
    }


COPIED, REUSED, SHARED = (Cell("cpu", loader) for loader in ("copied", "reused", "shared"))
ON_GPU = [Cell("cuda", loader) for loader in ("reused", "copied", "shared")]
PAIRS = [
    (ON_GPU[0], ON_GPU[1]),  # as published on a GPU, against copies there
    (COPIED, ON_GPU[0]),  # alike on both
    (REUSED, ON_GPU[2]),
    (COPIED, REUSED),  # the line, on a CPU and on a GPU
    (ON_GPU[0], ON_GPU[2]),
    (ON_GPU[0], Cell("cuda", "reused", round_trip=False)),
]

if __name__ == "__main__":
    net, file, *profile = sys.argv[1:]
    table = published_windows(net, PAIRS, count=3, seed=100, profile=(profile or ["paper"])[0], speed=2.0)
    print(table.to_string())
    records.write_json(Path(file), records.measured("cuda", rows=table.to_dict("list")))
