"""How fast a device can compute and move data: its roofline (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

import functools
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

from gpulab.errors import UsageError
from gpulab.progress import Progress
from gpulab.settings import Setting, arithmetic
from gpulab.store.recorded import recorded_table

COPY_BYTES = {"cpu": 2**27, "cuda": 2**31, "mps": 2**29, "xpu": 2**30}
LARGEST_MATRIX = {"cpu": 1024, "cuda": 8192, "mps": 4096, "xpu": 4096}
LONG = 0.02  # seconds of a product that is large enough
UNDER_THE_ROOF = ("memory", "matrix", "network")  # what the setting's own ceilings are drawn over


def roofline(setting: Setting | str = "cpu", repeats: int = 7, progress: bool = True) -> pd.DataFrame:
    """Measure how fast a device computes and moves data, in some ten seconds.

    Measured are copies in memory, matrix products of growing size and in several formats, layers of the autoencoder and
    of PredNet, and the launch of an operation. From these follow the ceilings of the roofline model: what a computation
    can reach at most, by how many operations it does for each byte it moves.

    Args:
        setting: Where and how to compute.
        repeats: How many batches of calls are timed, at least 2. Each takes a few hundredths of a second.
        progress: Whether to show a progress bar.

    Returns:
        A data frame with a row for each measured operation.

        It has these columns:

        - `operation`: The name of what was measured.
        - `kind`: `memory` (a copy, an addition), `matrix` (products of growing size) and `network` (layers), all in the
          setting's own format; `launch` (an operation on a single number, which is what calling one costs at least);
          and `precision` (a large product in each format that the device has: float32, tf32 on CUDA, bfloat16, float16,
          and float64, which Apple's GPUs lack). A CPU without instructions for a format is slow in it.
        - `flop`, `bytes`: What the operation computes and moves, by count. Each input is read once, each output written
          once.
        - `seconds`: The median time of one call, after a warm-up.
        - `spread`: The interquartile range of that time, over the median.
        - `precision`: The format of a product, else an empty text.
        - `intensity`: `flop` over `bytes`.
        - `gflops`, `gigabytes_per_second`: The rates reached, in 10⁹ a second.
        - `setting`: The setting, as a text.

    Raises:
        UsageError: For fewer than 2 repeats, or a malformed setting.
        GpulabError: For a setting that cannot run here.

    Examples:
        >>> import gpulab as gl
        >>> frame = gl.roofline("cuda", progress=False)  # doctest: +SKIP
        >>> frame[frame.kind == "memory"].gigabytes_per_second.max()  # of an H200  # doctest: +SKIP
        4328.1
        >>> list(gl.device.recorded_rooflines())[:6]  # the same columns
        ['operation', 'kind', 'flop', 'bytes', 'seconds', 'spread']

    References:
        Williams, Waterman, Patterson 2009, *Roofline* (Communications of the ACM 52:4).
    """
    parsed = Setting.parse(setting)
    operations_by_setting = [(parsed, _operations(parsed))]
    operations_by_setting += [
        (under, _large_product(under, precision)) for precision, under in _precisions(parsed).items()
    ]
    rows = []
    with Progress(unit="operation", leave=False, disable=not progress) as bar:
        for under, operations in operations_by_setting:
            with under.apply():
                for counted, work in operations:
                    rows.append((*counted, *timed(under, work, repeats)))
                    bar.update()
    frame = pd.DataFrame(rows, columns=[*Counted._fields, "seconds", "spread"])
    frame["intensity"] = frame.flop / frame.bytes
    frame["gflops"] = frame.flop / frame.seconds / 1e9
    frame["gigabytes_per_second"] = frame.bytes / frame.seconds / 1e9
    return frame.assign(setting=str(parsed))


def bounds(frame: pd.DataFrame) -> pd.DataFrame:
    """Say what holds each layer of the two networks back, memory or arithmetic, by measured ceilings.

    Args:
        frame: A data frame from `gpulab.roofline`, of one setting or several of one machine.

    Returns:
        A data frame with a row for each layer and setting. `operation`, `setting` and `intensity` (flop per byte) are
        as in `frame`. `ridge` is the intensity at which the ceilings of memory and arithmetic meet. `bound` is `memory`
        below it and `arithmetic` from it on. `reached` is the measured rate over the ceiling at that intensity; it can
        be above 1, where a layer fits into a cache.

    Examples:
        >>> import gpulab as gl
        >>> gl.device.bounds(gl.device.recorded_rooflines()).bound.value_counts().to_dict()
        {'arithmetic': 4, 'memory': 2}

    References:
        Williams, Waterman, Patterson 2009, *Roofline* (Communications of the ACM 52:4).
    """
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


def recorded_rooflines() -> pd.DataFrame:
    """Read the rooflines that are shipped with gpulab.

    Returns:
        A data frame with the columns of `gpulab.roofline`, and `machine`, the name of the chip. Beside its operations
        there are copies between host and GPU (the kind `transfer`), and a launch that is waited for.

    Examples:
        >>> import gpulab as gl
        >>> frame = gl.device.recorded_rooflines()
        >>> sorted(set(frame.kind))
        ['launch', 'matrix', 'memory', 'network', 'precision', 'transfer']
    """
    return recorded_table("rooflines").drop(columns="recorded")


class Counted(NamedTuple):
    """An operation that is measured: its FLOP, the bytes that it moves, and for products their precision."""

    operation: str
    kind: str
    flop: float
    bytes: float
    precision: str = ""


Operations = Iterator[tuple[Counted, Callable[[], object]]]


def _operations(setting: Setting) -> Operations:
    """Copies, products and layers in the setting's own number format, and a launch."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(setting.device, setting.dtype)

    size, precision = setting.dtype.itemsize, str(setting.dtype).removeprefix("torch.")
    if (setting.kind, precision, arithmetic()["matmul_fp32"]) == ("cuda", "float32", "tf32"):
        precision = "tf32"
    count = COPY_BYTES[setting.kind] // size
    source, second_source, target = random(count), random(count), random(count)
    yield Counted("copy", "memory", 0.0, 2.0 * size * count), lambda: target.copy_(source)
    yield (
        Counted("add", "memory", 1.0 * count, 3.0 * size * count),
        lambda: torch.add(source, second_source, out=target),
    )
    for edge in (2**power for power in range(4, LARGEST_MATRIX[setting.kind].bit_length())):
        product = Counted(f"matrix product {edge}", "matrix", 2.0 * edge**3, 3.0 * size * edge**2, precision)
        yield product, functools.partial(torch.mm, random(edge, edge), random(edge, edge))
    image, weight = random(1, 784), random(128, 784)
    layer = Counted("autoencoder, first layer", "network", 2.0 * 784 * 128, size * (784.0 * 128 + 784 + 128))
    yield layer, functools.partial(F.linear, image, weight)
    for profile, height, width, channels in (("quick", 24, 32, 16), ("paper", 60, 80, 48)):
        # The convolution of PredNet's layer 1: errors, from above, hidden.
        inside, outside = 5 * channels, 4 * channels
        maps, kernel = random(1, inside, height, width), random(outside, inside, 3, 3)
        flop = 2.0 * 9 * inside * outside * height * width
        moved = size * (9.0 * inside * outside + (inside + outside) * height * width)
        gates = Counted(f"PredNet ({profile}), gates", "network", flop, moved)
        yield gates, functools.partial(F.conv2d, maps, kernel, padding=1)
    number = torch.zeros(1, device=setting.device)
    yield Counted("launch", "launch", 1.0, 8.0), lambda: number.add_(1)


def _precisions(setting: Setting) -> dict[str, Setting]:
    """What a device can multiply in, and the setting under which it does."""
    names = ["float32", "bfloat16", "float16"] + (["float64"] if setting.kind != "mps" else [])
    if setting.kind != "cuda":
        return dict.fromkeys(names, setting)
    tf32 = {"tf32": replace(setting, tf32=True), "float32": replace(setting, tf32=False)}
    return tf32 | dict.fromkeys(names[1:], setting)


def _large_product(setting: Setting, precision: str) -> Operations:
    """A product as large as it takes to be at work for a while: some CPUs compute in float16 a number at a time."""
    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    edge, seconds = 32, 0.0
    while edge < LARGEST_MATRIX[setting.kind] and seconds <= LONG:
        edge *= 2
        a, b = (torch.randn(edge, edge).to(setting.device, dtype) for _ in range(2))
        work = functools.partial(torch.mm, a, b)
        seconds = min(_timer(setting, work).repeat(4, 1))  # the first warms up
    moved = 3.0 * dtype.itemsize * edge**2
    yield Counted(f"matrix product {edge}, {precision}", "precision", 2.0 * edge**3, moved, precision), work


def timed(setting: Setting, work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The median time of one call after a warm-up, and the interquartile range over it."""
    if repeats < 2:
        raise UsageError(f"repeats={repeats}: a median with its spread needs at least 2")
    timer = _timer(setting, work)
    calls = max(1, int(0.03 / max(timer.timeit(3) / 3, 1e-7)))
    timer.timeit(calls)  # warms up
    first, median, third = statistics.quantiles(timer.repeat(repeats, calls), n=4)
    return median / calls, (third - first) / median


def _timer(setting: Setting, work: Callable[[], object]) -> timeit.Timer:
    """A timer whose clock waits for the device, which works on while Python goes ahead."""

    def clock() -> float:
        getattr(torch, setting.kind).synchronize()
        return time.perf_counter()

    return timeit.Timer(work, timer=clock)
