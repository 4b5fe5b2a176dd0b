"""How fast a device can compute and move data: its roofline (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpulab.errors import UsageError
from gpulab.passports import passport
from gpulab.records import machine, read_documents, write_json
from gpulab.settings import Setting

if TYPE_CHECKING:
    import pandas as pd
    import torch

COPY_BYTES = {"cpu": 2**27, "cuda": 2**31, "mps": 2**29, "xpu": 2**30}
LARGEST_MATRIX = {"cpu": 1024, "cuda": 8192, "mps": 4096, "xpu": 4096}


def roofline(setting: Setting | str = "cpu", repeats: int = 7) -> pd.DataFrame:
    """Measure a device, for about ten seconds: a copy, matrix products of growing size, layers of the two networks.

    Args:
        setting: where and how to compute.
        repeats: batches of calls, at least 2; each takes a few hundredths of a second.

    Returns:
        One row an operation: `operation`, `kind` (memory, matrix, network), `flop` and `bytes` (counted: each input
        read once, each output written once), `intensity` in flop per byte, `seconds` (the median of one call, after a
        warm-up), `spread` (the interquartile range over the median), `gflops`, `gigabytes_per_second`, `setting`.

    Raises:
        UsageError: for too few repeats.

    References:
        Williams, Waterman, Patterson 2009, *Roofline* (Communications of the ACM 52:4).
    """
    import pandas as pd

    if repeats < 2:
        raise UsageError(f"repeats={repeats}: a median with its spread needs at least 2")
    parsed = Setting.parse(setting)
    rows = []
    with parsed.apply():
        for operation, kind, flop, moved, work in _operations(parsed):
            once = max(_seconds(parsed, work, 3), 1e-7)
            calls = max(1, int(0.03 / once))
            _seconds(parsed, work, calls)  # warms up
            times = [_seconds(parsed, work, calls) for _ in range(repeats)]
            first, _, third = statistics.quantiles(times, n=4)
            median = statistics.median(times)
            rows.append((operation, kind, flop, moved, median, (third - first) / median))
    frame = pd.DataFrame(rows, columns=["operation", "kind", "flop", "bytes", "seconds", "spread"])
    frame["intensity"] = frame.flop / frame.bytes
    frame["gflops"] = frame.flop / frame.seconds / 1e9
    frame["gigabytes_per_second"] = frame.bytes / frame.seconds / 1e9
    return frame.assign(setting=str(parsed))


def bounds(frame: pd.DataFrame) -> pd.DataFrame:
    """What holds each layer of the two networks back, by the ceilings that `roofline` measured.

    Args:
        frame: from `roofline`, of one setting or several.

    Returns:
        One row a layer and setting: `operation`, `setting`, `intensity`, `ridge` (the intensity at which the ceilings
        of bandwidth and arithmetic meet), `bound` (`memory` to the left of it, `arithmetic` to the right) and
        `reached`, the measured rate over the ceiling there (a layer that fits into a cache can reach more).
    """
    import numpy as np

    layers = frame[frame.kind == "network"]
    bandwidth = layers.setting.map(frame[frame.kind == "memory"].groupby("setting").gigabytes_per_second.max())
    peak = layers.setting.map(frame.groupby("setting").gflops.max())
    rows = layers[["operation", "setting", "intensity"]].assign(
        ridge=peak / bandwidth,
        bound=np.where(layers.intensity < peak / bandwidth, "memory", "arithmetic"),
        reached=layers.gflops / np.minimum(bandwidth * layers.intensity, peak),
    )
    return rows.reset_index(drop=True)


def write_roofline(frame: pd.DataFrame, file: Path, command: str) -> None:
    """Keep a measured roofline with this machine's passport and the command that made it."""
    write_json(file, {"passport": passport(), "command": command, "rows": frame.to_dict("records")})


def recorded_rooflines() -> pd.DataFrame:
    """The rooflines shipped with gpulab, as `roofline`, with the column `machine`."""
    import pandas as pd

    records = read_documents("rooflines")
    frames = [pd.DataFrame(record["rows"]).assign(machine=machine(record["passport"])) for record in records]
    return pd.concat([pd.DataFrame(), *frames], ignore_index=True)


Operation = tuple[str, str, float, float, Callable[[], object]]


def _operations(setting: Setting) -> list[Operation]:
    """(name, kind, flop, bytes, the operation) of everything that is measured."""
    import torch
    from torch.nn import functional as F

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(setting.device, setting.dtype)

    def product(edge: int) -> Operation:
        a, b = random(edge, edge), random(edge, edge)
        return f"matrix product {edge}", "matrix", 2.0 * edge**3, 3.0 * size * edge**2, lambda: a @ b

    def gates(profile: str, height: int, width: int, channels: int) -> Operation:
        # The convolution of PredNet's layer 1: errors, from above, hidden.
        inside, outside = 5 * channels, 4 * channels
        maps, kernel = random(1, inside, height, width), random(outside, inside, 3, 3)
        flop = 2.0 * 9 * inside * outside * height * width
        moved = size * (9.0 * inside * outside + (inside + outside) * height * width)
        return f"PredNet ({profile}), gates", "network", flop, moved, lambda: F.conv2d(maps, kernel, padding=1)

    size = setting.dtype.itemsize
    count = COPY_BYTES[setting.kind] // size
    source, other, target = random(count), random(count), random(count)
    image, layer = random(1, 784), random(128, 784)
    flop, moved = 2.0 * 784 * 128, size * (784.0 * 128 + 784 + 128)
    return [
        ("copy", "memory", 0.0, 2.0 * size * count, lambda: target.copy_(source)),
        ("add", "memory", 1.0 * count, 3.0 * size * count, lambda: torch.add(source, other, out=target)),
        *(product(2**power) for power in range(4, LARGEST_MATRIX[setting.kind].bit_length())),
        ("autoencoder, first layer", "network", flop, moved, lambda: F.linear(image, layer)),
        gates("quick", 24, 32, 16),
        gates("paper", 60, 80, 48),
    ]


def _seconds(setting: Setting, work: Callable[[], object], calls: int) -> float:
    """The mean time of one call. A device works on while Python goes ahead: wait until it is done."""
    import torch

    wait = getattr(torch, setting.kind).synchronize
    wait()
    started = time.perf_counter()
    for _ in range(calls):
        work()
    wait()
    return (time.perf_counter() - started) / calls
