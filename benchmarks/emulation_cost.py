"""What `gpulab.emulate` costs: a training step under it over the same step without it.

    python benchmarks/emulation_cost.py --write benchmarks/emulation_cost.md

Steps with and without take turns; a ratio is the median of the paired ratios, with the quartiles.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import guard_cost
import torch
import typer

import gpulab as gl
from gpulab.numerics.arithmetic import CHIPS

ARITHMETICS = {
    "tf32": {"name": "tf32"},
    "bfloat16": {"name": "bfloat16"},
    "float16": {"name": "float16"},
    "float8_e4m3fn": {"name": "float8_e4m3fn"},
    "float32_ftz": {"name": "float32_ftz"},
    "ampere": {"name": CHIPS["ampere"]},  # in TF32, whatever this program allows
    "hopper": {"name": CHIPS["hopper"]},
    "split-4": {"order": "split-4"},
}
SLOW = {
    "pairwise": {"order": "pairwise"},
    "sequential": {"order": "sequential"},
    "hopper, tensor-core": {"name": replace(CHIPS["hopper"], order="tensor-core")},
}


def training_steps() -> dict[str, Callable[[], object]]:
    """Training steps of the size that people train on a laptop."""

    def of(net: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
        return lambda: net(x).square().mean().backward()

    steps: dict[str, Callable[[], object]] = {
        name: of(make(), torch.randn(shape))
        for name, (make, shape) in guard_cost.CASES.items()
        if name not in ("resnet18, batch 16", "mobilenet_v3_small", "vit_b_16")
    }
    frames = torch.rand(10, 1, 3, 48, 64)
    prednet, autoencoder = gl.models.PredNet(channels=(3, 16, 32), size=(48, 64)), gl.models.Autoencoder()
    images = torch.rand(1, 1, 28, 28)

    def window() -> None:
        predictions, _ = prednet(frames)
        torch.nn.functional.mse_loss(predictions[:-1], frames[1:]).backward()

    steps["PredNet, a window of the quick profile"] = window
    steps["autoencoder, one image"] = lambda: torch.nn.functional.mse_loss(autoencoder(images), images).backward()
    return steps


def ratios(step: Callable[[], object], arithmetic: dict[str, Any], repeats: int) -> list[float]:
    """Paired ratios of the time under emulation to the time without."""

    def seconds(context: contextlib.AbstractContextManager[object]) -> float:
        start = time.perf_counter()
        with context:
            step()
        return time.perf_counter() - start

    pairs = [(seconds(contextlib.nullcontext()), seconds(gl.emulate(**arithmetic))) for _ in range(repeats + 1)]
    return [emulated / plain for plain, emulated in pairs[1:]]  # the first warms up


def main(
    repeats: int = 9,
    slow: Annotated[bool, typer.Option(help="also the orders that are summed one by one")] = True,
    write: Annotated[Path | None, typer.Option(help="write the table to this file")] = None,
) -> None:
    """Print the table."""
    processor = gl.passport()["cpu"]["model"]
    lines = [
        "# What emulation costs",
        f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}. Time of a training step under "
        f"emulation over that of a plain one: median of {repeats} pairs, quartiles in brackets.",
        "",
        f"| step | plain, ms | {' | '.join(ARITHMETICS)} |",
        f"|---|---|{'---|' * len(ARITHMETICS)}",
    ]
    for name, step in training_steps().items():
        step()
        start = time.perf_counter()
        step()
        cells = [f"{1000 * (time.perf_counter() - start):.3g}"]
        for arithmetic in ARITHMETICS.values():
            low, middle, high = statistics.quantiles(ratios(step, arithmetic, repeats), n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if slow:
        step = training_steps()["PredNet, a window of the quick profile"]
        lines += ["", "Sums made one by one here, on the window of PredNet:", "", "| order | ratio |", "|---|---|"]
        lines += [f"| {name} | {statistics.median(ratios(step, how, 1)):.0f} |" for name, how in SLOW.items()]
    text = "\n".join(lines) + "\n"
    print(text)
    if write is not None:
        write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
