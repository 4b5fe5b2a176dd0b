"""How fast a device can compute and move data: its roofline (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpulab.errors import UsageError
from gpulab.passports import passport
from gpulab.records import machine, read_documents, write_json
from gpulab.settings import Setting, arithmetic

if TYPE_CHECKING:
    import pandas as pd
    import torch

COPY_BYTES = {"cpu": 2**27, "cuda": 2**31, "mps": 2**29, "xpu": 2**30}
LARGEST_MATRIX = {"cpu": 1024, "cuda": 8192, "mps": 4096, "xpu": 4096}
TRANSFER_BYTES = 2**28
LONG = 0.02  # seconds of a product that is large enough
UNDER_THE_ROOF = ("memory", "matrix", "network")  # what the setting's own ceilings are drawn over


def roofline(setting: Setting | str = "cpu", repeats: int = 7, progress: bool = True) -> pd.DataFrame:
    """Measure a device, for some ten seconds: a copy, matrix products, layers of the two networks, transfers, launches.

    Args:
        setting: where and how to compute.
        repeats: batches of calls, at least 2; each takes a few hundredths of a second.
        progress: whether to show a bar.

    Returns:
        One row an operation: `operation`, `kind`, `flop` and `bytes` (counted: each input read once, each output
        written once), `intensity` in flop per byte, `seconds` (the median of one call, after a warm-up), `spread` (the
        interquartile range over the median), `gflops`, `gigabytes_per_second`, `setting`, and for products their
        `precision`. The kinds:

        - `memory`, `matrix`, `network`: a copy and an addition, products of growing size, layers, in the setting's
          number format;
        - `precision`: a large product in every precision that the device has, whatever the setting: float32, tf32
          (CUDA), bfloat16, float16, float64 (a CPU without instructions for one is slow in it);
        - `transfer`: between the host and another device, from and to pageable memory, for CUDA pinned memory, too;
        - `launch`: an operation on a single number, called again and again, which is what calling one costs at
          least; on another device than the CPU also with waiting for its end.

    Raises:
        UsageError: for too few repeats.

    References:
        Williams, Waterman, Patterson 2009, *Roofline* (Communications of the ACM 52:4).
    """
    import pandas as pd

    from gpulab.progress import Progress

    if repeats < 2:
        raise UsageError(f"repeats={repeats}: a median with its spread needs at least 2")
    parsed = Setting.parse(setting)
    rows: list[tuple[str, str, float, float, float, float, str]] = []
    with parsed.apply(), Progress(unit="operation", leave=False, disable=not progress) as bar:

        def measure(operations: Iterable[Operation], precision: str) -> None:
            for operation, kind, flop, moved, work in operations:
                format_of_products = precision if kind in ("matrix", "precision") else ""
                rows.append((operation, kind, flop, moved, *timed(parsed, work, repeats), format_of_products))
                bar.update()

        usual = str(parsed.dtype).removeprefix("torch.")
        if (parsed.kind, usual, arithmetic()["matmul_fp32"]) == ("cuda", "float32", "tf32"):
            usual = "tf32"
        for operations in (_operations(parsed), _transfers(parsed), _launches(parsed)):
            measure(operations, usual)
        for precision, under, dtype in _precisions(parsed):
            with under.apply():
                measure([_large_product(under, precision, dtype)], precision)
    frame = pd.DataFrame(rows, columns=["operation", "kind", "flop", "bytes", "seconds", "spread", "precision"])
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

    frame = frame[frame.kind.isin(UNDER_THE_ROOF)]
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
    frames = [
        pd.DataFrame(
            {**row, "machine": machine(record["passport"], row["setting"].partition(":")[0])} for row in record["rows"]
        )
        for record in records
    ]
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


def _precisions(setting: Setting) -> Iterator[tuple[str, Setting, torch.dtype]]:
    """(name, the setting under which products are that precise, the type of their numbers) of what a device has."""
    import torch

    if setting.kind == "cuda":
        yield "tf32", replace(setting, tf32=True), torch.float32
    yield "float32", replace(setting, tf32=False) if setting.kind == "cuda" else setting, torch.float32
    for name in ("bfloat16", "float16", "float64"):
        if (setting.kind, name) != ("mps", "float64"):
            yield name, setting, getattr(torch, name)


def _large_product(setting: Setting, precision: str, dtype: torch.dtype) -> Operation:
    """A product as large as it takes to be at work for a while: some CPUs compute in float16 a number at a time."""
    import torch

    edge = 64
    while True:
        a, b = (torch.randn(edge, edge).to(setting.device, dtype) for _ in range(2))
        work = functools.partial(torch.mm, a, b)
        work()
        if edge >= LARGEST_MATRIX[setting.kind] or min(_seconds(setting, work, 1) for _ in range(3)) > LONG:
            moved = 3.0 * dtype.itemsize * edge**2
            return f"matrix product {edge}, {precision}", "precision", 2.0 * edge**3, moved, work
        edge *= 2


def _transfers(setting: Setting) -> Iterator[Operation]:
    """Copies between the host's memory and the device's."""
    import torch

    if setting.kind == "cpu":
        return
    there = torch.ones(TRANSFER_BYTES, dtype=torch.uint8, device=setting.device)
    for memory in ("pageable", "pinned") if setting.kind == "cuda" else ("pageable",):
        here = torch.ones(TRANSFER_BYTES, dtype=torch.uint8, pin_memory=memory == "pinned")
        for name, target, source in (("host to device", there, here), ("device to host", here, there)):
            work = functools.partial(target.copy_, source, non_blocking=memory == "pinned")
            yield f"{name}, {memory}", "transfer", 0.0, float(TRANSFER_BYTES), work


def _launches(setting: Setting) -> Iterator[Operation]:
    """An operation on one number: calling it is all that takes time."""
    import torch

    one = torch.zeros(1, device=setting.device)

    def launch_and_wait() -> None:
        one.add_(1)
        getattr(torch, setting.kind).synchronize()

    yield "launch", "launch", 1.0, 8.0, lambda: one.add_(1)
    if setting.kind != "cpu":
        yield "launch, waited for", "launch", 1.0, 8.0, launch_and_wait


def timed(setting: Setting, work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The median time of one call after a warm-up, and the interquartile range over it."""
    once = max(_seconds(setting, work, 3), 1e-7)
    calls = max(1, int(0.03 / once))
    _seconds(setting, work, calls)  # warms up
    times = [_seconds(setting, work, calls) for _ in range(repeats)]
    first, _, third = statistics.quantiles(times, n=4)
    median = statistics.median(times)
    return median, (third - first) / median


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
