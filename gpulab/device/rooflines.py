"""How fast a device can compute and move data: its roofline (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

import functools
import re
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

from gpulab.audits import count_sketch as sk
from gpulab.audits.tracer import EMPTY, OVERWRITES
from gpulab.audits.twins import outcome
from gpulab.errors import check_count
from gpulab.numerics.call_sites import UncompiledDispatchMode
from gpulab.progress import Progress
from gpulab.settings import Setting, arithmetic
from gpulab.store.recorded import recorded_table

COPY_BYTES = {"cpu": 2**27, "cuda": 2**31, "mps": 2**29, "xpu": 2**30}
LARGEST_MATRIX = {"cpu": 1024, "cuda": 8192, "mps": 4096, "xpu": 4096}
LONG = 0.02  # seconds of a product that is large enough
MULTIPLIES = re.compile(r"attention|rnn|lstm|gru|linear|conv|mm$|fft|cdist")  # what should have a formula
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
    works_by_setting = [(parsed, _operations(parsed))]
    works_by_setting += [(under, _large_product(under, precision)) for precision, under in _precisions(parsed).items()]
    rows = []
    with Progress(unit="operation", leave=False, disable=not progress) as bar:
        for under, works in works_by_setting:
            with under.apply():
                for work in works:
                    rows.append((work.operation, work.kind, *_counted(work), *timed(under, work.call, repeats)))
                    bar.update()
    frame = pd.DataFrame(rows, columns=["operation", "kind", "flop", "bytes", "precision", "seconds", "spread"])
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


class Work(NamedTuple):
    """An operation that is measured; `additions` are the FLOP for which torch has no formula."""

    operation: str
    kind: str
    call: Callable[[], object]
    additions: int = 0


def _operations(setting: Setting) -> Iterator[Work]:
    """Copies, products and layers in the setting's own number format, and a launch."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(setting.device, setting.dtype)

    count = COPY_BYTES[setting.kind] // setting.dtype.itemsize
    source, second_source, target = random(count), random(count), random(count)
    yield Work("copy", "memory", lambda: target.copy_(source))
    yield Work("add", "memory", lambda: torch.add(source, second_source, out=target), count)
    for edge in (2**power for power in range(4, LARGEST_MATRIX[setting.kind].bit_length())):
        product = functools.partial(torch.mm, random(edge, edge), random(edge, edge))
        yield Work(f"matrix product {edge}", "matrix", product)
    # What a linear layer without a bias calls.
    layer = functools.partial(torch.mm, random(1, 784), random(128, 784).t())
    yield Work("autoencoder, first layer", "network", layer)
    for profile, height, width, channels in (("quick", 24, 32, 16), ("paper", 60, 80, 48)):
        # The convolution of PredNet's layer 1: errors, from above, hidden.
        maps, kernel = random(1, 5 * channels, height, width), random(4 * channels, 5 * channels, 3, 3)
        gates = functools.partial(F.conv2d, maps, kernel, padding=1)
        yield Work(f"PredNet ({profile}), gates", "network", gates)
    number = torch.zeros(1, device=setting.device)
    yield Work("launch", "launch", lambda: number.add_(1), 1)


def _precisions(setting: Setting) -> dict[str, Setting]:
    """What a device can multiply in, and the setting under which it does."""
    names = ["float32", "bfloat16", "float16"] + (["float64"] if setting.kind != "mps" else [])
    if setting.kind != "cuda":
        return dict.fromkeys(names, setting)
    tf32 = {"tf32": replace(setting, tf32=True), "float32": replace(setting, tf32=False)}
    return tf32 | dict.fromkeys(names[1:], setting)


def _large_product(setting: Setting, precision: str) -> Iterator[Work]:
    """A product as large as it takes to be at work for a while: some CPUs compute in float16 a number at a time."""
    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    edge, seconds = 32, 0.0
    while edge < LARGEST_MATRIX[setting.kind] and seconds <= LONG:
        edge *= 2
        a, b = (torch.randn(edge, edge).to(setting.device, dtype) for _ in range(2))
        work = functools.partial(torch.mm, a, b)
        seconds = min(_timer(setting, work).repeat(4, 1))  # the first warms up
    yield Work(f"matrix product {edge}, {precision}", "precision", work)


def timed(setting: Setting, work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The median time of one call after a warm-up, and the interquartile range over it."""
    check_count("repeats", repeats, least=2)  # a median with its spread
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


# --- what operations compute and move --------------------------------------------------------------------


def _counted(work: Work) -> tuple[float, float, str]:
    """The FLOP of an operation, the bytes that it moves, and the precision of a product."""
    with OperationCounter() as counter:
        work.call()
    precision = "".join(counter.flop) if work.kind in ("matrix", "precision") else ""
    return float(counter.flop.total() + work.additions), float(counter.moved), precision


class OperationCounter(UncompiledDispatchMode):
    """Counts what operations compute, move and launch."""

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # imports Triton: 70 MB

        self.formulas, self.flags = flop_registry, arithmetic()
        self.operations = self.moved = 0
        self.flop, self.unknown = Counter[str](), set[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count."""
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        name = operation._schema.name.partition("::")[2].rstrip("_")
        written = _distinct(outcome(operation, args, out))
        inputs = {key: value for key, value in kwargs.items() if key != "out"}
        read = _distinct((args[1:] if name in OVERWRITES else args, inputs))
        view = written.keys() <= read.keys() and not operation._schema.is_mutable
        if view or name.startswith(EMPTY):
            return out
        self.operations += 1
        self.moved += sum(read.values()) + sum(written.values())
        formula = self.formulas.get(operation._overloadpacket)
        if formula is not None:
            self.flop[self._precision(name, args)] += formula(*args, **kwargs, out_val=out)
        elif MULTIPLIES.search(name):
            self.unknown.add(name)
        return out

    def _precision(self, name: str, args: Sequence[Any]) -> str:
        """The format that a product is computed in, as the ceilings name it."""
        tensors = sk.leaves(args)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        flag = self.flags["convolution_fp32" if "conv" in name else "matmul_fp32"]
        return "tf32" if (dtype, flag, tensors[0].is_cuda) == ("float32", "tf32", True) else dtype


def _distinct(values: Any) -> dict[int, int]:
    """The bytes of each piece of memory among the tensors of nested values, each once; an expanded one as it lies."""
    sizes: dict[int, int] = {}
    for tensor in sk.leaves(values):
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            size = min(tensor.numel() * tensor.element_size(), storage.nbytes())
            sizes[storage._cdata] = max(size, sizes.get(storage._cdata, 0))
    return sizes
