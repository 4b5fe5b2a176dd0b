"""What a step of the whitened autoencoder costs in float32, in TF32, and in TF32 with one product kept in float32.

python benchmarks/record_precision_price.py data/measured/precision-my-gpu.json
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from tqdm import tqdm

import gpulab as gl
from gpulab.store.records import measured, write_json

# One pass in TF32 is left out: it makes NaN, and a factorisation that fails may be done sooner.
WAYS = (("cuda:tf32=off", "one-pass"), ("cuda:tf32=on", "float32"), ("cuda:tf32=on", "centred"))


def main(
    output: Path,
    setting: Annotated[list[str], typer.Option(help="instead of float32 and TF32 on a GPU")] = [],  # noqa: B006
    hidden: int = 8192,
    code: int = 512,
    batch_size: int = 16384,
    rounds: Annotated[int, typer.Option(help="each way is timed once a round")] = 25,
    steps: Annotated[int, typer.Option(help="steps that are timed together")] = 4,
) -> None:
    """Time every way in turn, so that a machine that warms up or slows down favours none."""
    ways = list(itertools.product(setting, ("one-pass", "float32", "centred"))) if setting else list(WAYS)
    training = {way: _Training(*way, hidden, code, batch_size) for way in ways}
    times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for way in ways:
        training[way].seconds(steps)  # kernels are chosen and memory is taken
    for _ in tqdm(range(rounds), unit="round"):
        for way in ways:
            times[way].append(1000 * training[way].seconds(steps) / steps)
    rows = [_row(*way, times[way]) for way in ways]
    for row in rows:
        print(json.dumps(row))
    rows = [row | {"rounds": rounds, "batch_size": batch_size} for row in rows]
    device = gl.Setting.parse(ways[0][0]).kind
    write_json(output, measured(device, hidden=hidden, code=code, steps=steps, rows=rows))


class _Training:
    """Updates of one network on one batch of images, under one setting."""

    def __init__(self, setting: str, covariance: str, hidden: int, code: int, batch_size: int) -> None:
        self.setting = gl.Setting.parse(setting)
        self.net = gl.models.Whitener(hidden, code, batch_size, covariance).to(self.setting.device)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 0.0)  # no way learns more than another
        window = next(gl.load("digits").windows(batch_size)).frames
        self.images = torch.from_numpy(window).float().div(255).to(self.setting.device)

    def seconds(self, steps: int) -> float:
        """How long so many updates take."""
        wait: Callable[[], None] = torch.cuda.synchronize if self.setting.kind == "cuda" else lambda: None
        with self.setting.apply():
            wait()
            started = time.perf_counter()
            for _ in range(steps):
                self.optimizer.zero_grad()
                loss = self.net.training_loss(self.images, None)[0]
                loss.backward()
                self.optimizer.step()
            wait()
            taken = time.perf_counter() - started
        if not loss.isfinite():
            raise gl.GpulabError(f"the loss under {self.setting} is not finite: NaN may take another time than numbers")
        return taken


def _row(setting: str, covariance: str, times: list[float]) -> dict[str, object]:
    low, middle, high = statistics.quantiles(times, n=4)
    return {"setting": setting, "covariance": covariance, "ms": middle, "ms_low": low, "ms_high": high}


if __name__ == "__main__":
    typer.run(main)
