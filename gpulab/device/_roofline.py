"""A device's roofline: how fast it computes and moves data, and where a training step lies.

Source: Williams, Waterman, Patterson 2009, *Roofline* (Communications of the ACM 52:4).
"""

from __future__ import annotations

import functools
import re
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

from gpulab._torch_internals import (
    Nested,
    OpOverload,
    UncompiledDispatchMode,
    find_tensors,
    flop_formulas,
    is_mutable,
    only_allocates,
    operation_name,
    overwrites_first_argument,
    returned_or_written,
    storage_identity,
)
from gpulab.errors import UsageError, check_count
from gpulab.numerics._flags import precision_allowed
from gpulab.passports import machine, passport
from gpulab.report import Progress, Report
from gpulab.settings import Setting
from gpulab.steps import PreparedStep, prepare_step
from gpulab.store.recorded import recorded_table

COPY_BYTES = {"cpu": 2**27, "cuda": 2**31, "mps": 2**29, "xpu": 2**30}  # size of a copied tensor
MAX_MATRIX_SIZE = {"cpu": 1024, "cuda": 8192, "mps": 4096, "xpu": 4096}  # rows of a square matrix
# Operations with these names multiply. Those for which torch has no FLOP formula are reported.
PRODUCT_NAMES = re.compile(r"attention|rnn|lstm|gru|linear|conv|mm$|fft|cdist")
MIN_PRODUCT_SECONDS = 0.02  # a product that takes this long is large enough to be timed
# The kinds of operations that are computed in the setting's own number format.
ROOFLINE_KINDS = ("memory", "matrix", "network")


def roofline(
    setting: Setting | str = "cpu", repeats: int = 7, progress: bool = True
) -> pd.DataFrame:
    """Measure how fast a device computes and moves data, in about ten seconds.

    The function measures copies in memory, matrix products of increasing size and in several number
    formats, layers of the autoencoder and of PredNet, and the launch of an operation. The results
    give the ceilings of the roofline model: the highest rate that a computation can reach with a
    given number of floating-point operations for each byte that it moves.

    Args:
        setting: The setting to measure.
        repeats: The number of batches of calls that are timed, at least 2. A batch takes a few
            hundredths of a second.
        progress: Whether to show a progress bar.

    Returns:
        A data frame with a row for each measured operation.

        It has these columns:

        - `operation`: The name of the operation.
        - `kind`: One of five kinds. `memory` (a copy, an addition), `matrix` (products of
          increasing size) and `network` (layers) are computed in the setting's own number format.
          `launch` is an operation on a single number; its time is the least that any operation
          takes. `precision` is a large product in each format that the device supports: float32,
          tf32 on CUDA, bfloat16, float16, and float64, which Apple's GPUs lack. A CPU without
          instructions for a format is slow in that format.
        - `flop`, `bytes`: The number of floating-point operations, and of bytes that are moved if
          each input is read once and each output is written once.
        - `seconds`: The median time of one call, after a warm-up.
        - `spread`: The interquartile range of that time, divided by the median.
        - `precision`: The number format of a product; empty for other operations.
        - `intensity`: `flop` divided by `bytes`.
        - `gflops`, `gigabytes_per_second`: The rates, in 10⁹ per second.
        - `setting`: The setting, as a string.

    Raises:
        UsageError: If `repeats` is below 2, or the setting is malformed.
        GpulabError: If the setting cannot run on this machine.

    Examples:
        >>> import gpulab as gl
        >>> frame = gl.roofline("cuda", progress=False)  # doctest: +SKIP
        >>> frame[frame.kind == "memory"].gigabytes_per_second.max()  # on an H200  # doctest: +SKIP
        4328.1
        >>> list(gl.device.recorded_rooflines())[:6]  # the same columns
        ['operation', 'kind', 'flop', 'bytes', 'seconds', 'spread']

    References:
        Williams, Waterman, Patterson 2009, *Roofline* (Communications of the ACM 52:4).
    """
    parsed = Setting.parse(setting)
    works_by_setting = [(parsed, _operations(parsed))]
    for precision, precision_setting in _precisions(parsed).items():
        works_by_setting.append((precision_setting, _large_product(precision_setting, precision)))
    rows = []
    for work_setting, works in works_by_setting:
        with work_setting.apply():
            for work in Progress(works, unit="operation", leave=False, disable=not progress):
                flop, moved_bytes, product_precision = _count_work(work)
                seconds, spread = time_calls(work_setting, work.call, repeats)
                rows.append(
                    {
                        "operation": work.operation,
                        "kind": work.kind,
                        "flop": flop,
                        "bytes": moved_bytes,
                        "precision": product_precision,
                        "seconds": seconds,
                        "spread": spread,
                    }
                )
    frame = pd.DataFrame(rows)
    frame["intensity"] = frame.flop / frame.bytes
    frame["gflops"] = frame.flop / frame.seconds / 1e9
    frame["gigabytes_per_second"] = frame.bytes / frame.seconds / 1e9
    return frame.assign(setting=str(parsed))


def bounds(frame: pd.DataFrame) -> pd.DataFrame:
    """Determine whether memory or arithmetic limits each layer that `roofline` measures.

    Args:
        frame: A data frame from `gpulab.roofline`, with one or several settings of one machine.

    Returns:
        A data frame with a row for each layer and setting.

        It has these columns:

        - `operation`, `setting`, `intensity` (flop per byte): As in `frame`.
        - `ridge`: The intensity at which the ceilings of memory and of arithmetic are equal.
        - `bound`: `memory` if the intensity is below the ridge, else `arithmetic`.
        - `reached`: The measured rate divided by the lower ceiling at this intensity. It is missing
          if the layer is faster than this ceiling. In that case either its data come from a cache,
          which is faster than the measured memory, or other programs slowed the measurement of the
          ceiling.

        The ceilings are measured on copies and matrix products and not on the layers, so no layer
        is compared with a ceiling that it set itself.

    Examples:
        >>> import gpulab as gl
        >>> gl.device.bounds(gl.device.recorded_rooflines()).bound.value_counts().to_dict()
        {'arithmetic': 4, 'memory': 2}

    References:
        Williams, Waterman, Patterson 2009, *Roofline* (Communications of the ACM 52:4).
    """
    frame = frame[frame.kind.isin(ROOFLINE_KINDS)]
    layers = frame[frame.kind == "network"]
    bandwidth = layers.setting.map(
        frame[frame.kind == "memory"].groupby("setting").gigabytes_per_second.max()
    )
    products = frame[frame.kind == "matrix"]
    peak = layers.setting.map(products.groupby("setting").gflops.max())
    ridge = peak / bandwidth
    reached = layers.gflops / np.minimum(bandwidth * layers.intensity, peak)
    rows = layers[["operation", "setting", "intensity"]].assign(
        ridge=ridge,
        bound=np.where(layers.intensity < ridge, "memory", "arithmetic"),
        reached=reached.where(reached <= 1),
    )
    return rows.reset_index(drop=True)


def recorded_rooflines() -> pd.DataFrame:
    """Load the rooflines that are shipped with gpulab.

    Returns:
        A data frame with the columns of `gpulab.roofline`, and `machine`, the name of the chip. It
        has two further operations: copies between host and GPU (of the kind `transfer`), and a
        launch whose result the host waits for.

    Examples:
        >>> import gpulab as gl
        >>> frame = gl.device.recorded_rooflines()
        >>> sorted(set(frame.kind))
        ['launch', 'matrix', 'memory', 'network', 'precision', 'transfer']
    """
    return recorded_table("rooflines").drop(columns="recorded")


# --- where a step stands --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Placement(Report):
    """The position of a training step under a device's roofline; `print` explains it in words.

    Attributes:
        setting: The setting under which the step ran.
        operations: The number of calls of torch operations that compute or move something. One call
            may launch several kernels.
        flop: The number of floating-point operations by precision, such as `{"float32": 256}`. Only
            matrix products, convolutions and attention are counted, by the formulas of
            `torch.utils.flop_counter`. A multiplication plus an addition counts as two.
        moved: The sum of the bytes that each operation reads and writes. Data that stay in a cache
            between two operations are also counted.
        seconds: The median time of one step, after a warm-up.
        spread: The interquartile range of that time, divided by the median.
        at_least: Three lower bounds on the time in seconds: for moving the bytes (`memory`), for
            the floating-point operations (`arithmetic`) and for launching the operations
            (`launches`), each at its measured ceiling.
        unknown: The names of operations that multiply and for which torch has no formula.
        roofline: The ceilings, as `gpulab.roofline` measures them.

    Examples:
        >>> import pandas as pd
        >>> import gpulab as gl
        >>> counts = {
        ...     "operations": 3,
        ...     "flop": {"float32": 10**9},
        ...     "moved": 10**8,
        ...     "seconds": 0.01,
        ...     "spread": 0.02,
        ... }
        >>> floors = {"memory": 0.004, "arithmetic": 0.005, "launches": 0.001}
        >>> found = gl.device.Placement(
        ...     "cpu", **counts, at_least=floors, unknown=(), roofline=pd.DataFrame()
        ... )
        >>> found.intensity, found.gflops, found.bound, found.reached
        (10.0, 100.0, 'arithmetic', 0.5)
    """

    setting: str
    operations: int
    flop: dict[str, int]
    moved: int
    seconds: float
    spread: float
    at_least: dict[str, float]
    unknown: tuple[str, ...]
    roofline: pd.DataFrame

    @property
    def intensity(self) -> float:
        """The number of floating-point operations per byte that is moved."""
        return sum(self.flop.values()) / max(1, self.moved)

    @property
    def gflops(self) -> float:
        """The rate that the step reached, in Gflop/s."""
        return sum(self.flop.values()) / self.seconds / 1e9

    @property
    def reached(self) -> float:
        """The share of the roof that the step reached.

        The roof is the lower of two ceilings: arithmetic in the step's precisions, and memory at
        the step's intensity. The share exceeds 1 if tensors stay in a cache that is faster than the
        measured memory, or if other programs slowed the measurement of the ceilings.
        """
        # A step at the roof takes exactly as long as the longer of these two lower bounds.
        seconds_at_roof = max(self.at_least["memory"], self.at_least["arithmetic"])
        return seconds_at_roof / self.seconds

    @property
    def reached_words(self) -> str:
        """The share `reached` in words.

        A share above 1 is not stated, because a measured ceiling is then too low.
        """
        return "faster than the roof" if self.reached > 1 else f"{self.reached:.0%} of the roof"

    @property
    def launch_share(self) -> float:
        """A lower bound on the share of the step's time spent launching its operations."""
        return self.at_least["launches"] / self.seconds

    @property
    def bound(self) -> str:
        """What limits the step: `memory`, `arithmetic` or `launches`, the longest in `at_least`."""
        return max(self.at_least, key=self.at_least.__getitem__)

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {flop / 1e9:.3g}" for name, flop in self.flop.items())
        bounds_text = ", ".join(
            f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.at_least.items()
        )
        lines = [
            (
                f"The step takes {1e3 * self.seconds:.3g} ms (spread {self.spread:.0%}) under"
                f" {self.setting}: {self.operations} operations, {self.moved / 1e6:.3g} MB moved,"
                f" Gflop: {kinds or 'none'}."
            ),
            (
                f"Lower bounds on this time, from the measured ceilings: {bounds_text}. The step is"
                f" bound by {self.bound}."
            ),
            (
                f"{self.intensity:.3g} flop per byte, {self.gflops:.3g} Gflop/s,"
                f" {self.reached_words} (the lower of the ceilings of memory and arithmetic);"
                f" launches take at least {self.launch_share:.0%} of the time."
            ),
        ]
        if self.reached > 1:
            lines.append(
                "A step cannot be faster than the roof. Either tensors stay in a cache that is"
                " faster than the measured memory, or other programs slowed the measurement of the"
                " ceilings; measure them again."
            )
        if self.unknown:
            lines.append(
                f"Not counted, because torch has no formula: the FLOP of {', '.join(self.unknown)}."
            )
        return "\n".join(lines)


def place(
    step: Callable[..., object], ceilings: pd.DataFrame | Setting | str = "cpu", repeats: int = 7
) -> Placement:
    """Determine what limits a training step: memory, arithmetic, or launching its operations.

    The function counts the step's operations and bytes, measures its time, and compares both with
    the ceilings of the device. To do so, it runs the step at least a dozen times. The model and the
    optimiser of a `Step` are restored afterwards, and its gradients are cleared before each run. If
    `step` is your own function, each run trains the model further.

    Args:
        step: A `Step`, or a function that does one training step, as for `gpulab.record`.
        ceilings: A data frame from `gpulab.roofline` on this machine, with a single setting; or a
            setting, whose roofline is then measured first. The step runs under this setting.
        repeats: The number of batches of calls that are timed, at least 2.

    Returns:
        A `Placement`, which can be printed.

    Raises:
        UsageError: If the ceilings are of several settings or of another machine, if `repeats` is
            below 2, or if the step has products in a format whose ceiling was not measured.
        GpulabError: If the setting cannot run on this machine.

    Examples:
        >>> import pandas as pd
        >>> import torch
        >>> import gpulab as gl
        >>> ceilings = pd.DataFrame(  # like the table of gpulab.roofline("cpu"), which takes longer
        ...     {
        ...         "operation": ["copy", "matrix product 1024, float32", "launch"],
        ...         "kind": ["memory", "precision", "launch"],
        ...         "precision": ["", "float32", ""],
        ...         "gigabytes_per_second": [20.0, 0.5, 0.01],
        ...         "gflops": [0.0, 100.0, 0.001],
        ...         "seconds": [1e-2, 2e-2, 1e-6],
        ...         "setting": "cpu",
        ...     }
        ... )
        >>> weight = torch.ones(8, 4, requires_grad=True)
        >>> found = gl.device.place(
        ...     lambda: (torch.ones(2, 4) @ weight.T).sum().backward(), ceilings
        ... )
        >>> found.flop, found.bound
        ({'float32': 256}, 'launches')

    References:
        Williams, Waterman, Patterson 2009, *Roofline* (Communications of the ACM 52:4).
    """
    frame = roofline(ceilings) if isinstance(ceilings, Setting | str) else ceilings
    settings = list(frame.setting.unique())
    if len(settings) != 1:
        raise UsageError(
            f"ceilings of {', '.join(settings) or 'nothing'}: expected those of one setting"
        )
    setting = Setting.parse(settings[0])
    this_machine = machine(passport(), setting.kind)
    other_machines = sorted(set(frame.get("machine", ())) - {this_machine})
    if other_machines:
        raise UsageError(
            f"ceilings of {other_machines[0]}: the step runs on {this_machine}; run"
            " gpulab.roofline on this machine"
        )
    default_dtype = torch.get_default_dtype()
    with setting.apply(), prepare_step(step, setting, default_dtype) as prepared_step:

        def run_step() -> None:
            if isinstance(prepared_step, PreparedStep):
                prepared_step.model.zero_grad()
            prepared_step()

        seconds, spread = time_calls(setting, run_step, repeats)
        # The operations are counted after the first step, which may also create state such as the
        # moments of Adam.
        with OperationCounter() as counter:
            run_step()
    flop = dict(counter.flop.most_common())
    peaks = frame[frame.precision != ""].groupby("precision").gflops.max()
    if flop.keys() - set(peaks.index):
        raise UsageError(
            f"the step has products in {', '.join(flop)}: expected only formats with a measured"
            f" ceiling ({', '.join(peaks.index)})"
        )
    at_least = {
        "memory": counter.moved_bytes
        / (1e9 * frame[frame.kind == "memory"].gigabytes_per_second.max()),
        "arithmetic": sum(number / (1e9 * peaks[precision]) for precision, number in flop.items()),
        "launches": counter.operations * frame[frame.operation == "launch"].seconds.iloc[0],
    }
    return Placement(
        setting=str(setting),
        operations=counter.operations,
        flop=flop,
        moved=counter.moved_bytes,
        seconds=seconds,
        spread=spread,
        at_least=at_least,
        unknown=tuple(sorted(counter.unknown)),
        roofline=frame,
    )


# --- what is measured -----------------------------------------------------------------------------


class Work(NamedTuple):
    """An operation that is measured.

    Attributes:
        operation: The name of the operation.
        kind: Its kind, as in the table of `roofline`.
        call: A function that does the operation once.
        additions: The number of its floating-point operations for which torch has no formula.
    """

    operation: str
    kind: str
    call: Callable[[], object]
    additions: int = 0


def _operations(setting: Setting) -> Iterator[Work]:
    """Yield copies, products and layers in the setting's own number format, and a launch."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(setting.device, setting.dtype)

    count = COPY_BYTES[setting.kind] // setting.dtype.itemsize
    source = random(count)
    second_source = random(count)
    target = random(count)
    yield Work("copy", "memory", lambda: target.copy_(source))
    yield Work(
        "add", "memory", lambda: torch.add(source, second_source, out=target), additions=count
    )
    # The powers of two from 16 to the largest size.
    for edge in (2**power for power in range(4, MAX_MATRIX_SIZE[setting.kind].bit_length())):
        product = functools.partial(torch.mm, random(edge, edge), random(edge, edge))
        yield Work(f"matrix product {edge}", "matrix", product)
    # The product that a linear layer without a bias calls.
    layer = functools.partial(torch.mm, random(1, 784), random(128, 784).t())
    yield Work("autoencoder, first layer", "network", layer)
    for profile, height, width, channels in (("quick", 24, 32, 16), ("paper", 60, 80, 48)):
        # The convolution of PredNet's layer 1. With c channels it has 5 c input channels: 2 c of
        # errors, 2 c from the layer above, and c of its hidden state. It computes four gates.
        maps = random(1, 5 * channels, height, width)
        kernel = random(4 * channels, 5 * channels, 3, 3)
        gates = functools.partial(F.conv2d, maps, kernel, padding=1)
        yield Work(f"PredNet ({profile}), gates", "network", gates)
    number = torch.zeros(1, device=setting.device)
    yield Work("launch", "launch", lambda: number.add_(1), additions=1)


def _precisions(setting: Setting) -> dict[str, Setting]:
    """List the precisions of a device's products, each with the setting under which to measure it.

    On CUDA, products of float32 numbers are measured without TF32 and with it.
    """
    settings = dict.fromkeys(["float32", "bfloat16", "float16"], setting)
    if setting.kind == "cuda":
        settings |= {"float32": replace(setting, tf32=False), "tf32": replace(setting, tf32=True)}
    if setting.kind != "mps":  # Apple's GPUs have no float64.
        settings["float64"] = setting
    return settings


def _large_product(setting: Setting, precision: str) -> Iterator[Work]:
    """Yield one matrix product that is large enough to be timed.

    The edge is doubled, starting at 64, until a product takes longer than `MIN_PRODUCT_SECONDS` or
    the edge reaches `MAX_MATRIX_SIZE`. A fixed size would take too long on CPUs without
    instructions for float16.
    """
    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    max_edge = MAX_MATRIX_SIZE[setting.kind]
    edge = 64
    while True:
        a, b = (torch.randn(edge, edge).to(setting.device, dtype) for _ in range(2))
        product = functools.partial(torch.mm, a, b)
        # Four calls. The first one is a warm-up: it is slower, so it is not the minimum.
        seconds = min(_timer(setting, product).repeat(repeat=4, number=1))
        if seconds > MIN_PRODUCT_SECONDS or edge >= max_edge:
            break
        edge *= 2
    yield Work(f"matrix product {edge}, {precision}", "precision", product)


def time_calls(setting: Setting, work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Measure the median time of one call, and its interquartile range divided by the median.

    After a warm-up, `repeats` batches of calls are timed, each of about 0.03 seconds.
    """
    check_count("repeats", repeats, minimum=2)  # quartiles need two values
    timer = _timer(setting, work)
    seconds_per_call = max(timer.timeit(3) / 3, 1e-7)  # not 0, which a coarse clock may measure
    calls = max(1, int(0.03 / seconds_per_call))
    timer.timeit(calls)  # a warm-up
    lower_quartile, median, upper_quartile = statistics.quantiles(timer.repeat(repeats, calls), n=4)
    return median / calls, (upper_quartile - lower_quartile) / median


def _timer(setting: Setting, work: Callable[[], object]) -> timeit.Timer:
    """Create a timer whose clock waits for the device, since its operations are asynchronous."""

    def clock() -> float:
        getattr(torch, setting.kind).synchronize()
        return time.perf_counter()

    return timeit.Timer(work, timer=clock)


# --- what operations compute and move -------------------------------------------------------------


def _count_work(work: Work) -> tuple[float, float, str]:
    """Count the FLOP of an operation and the bytes that it moves, and find a product's precision.

    The precision is an empty string for operations other than products.
    """
    with OperationCounter() as counter:
        work.call()
    precision = ""
    if work.kind in ("matrix", "precision"):
        (precision,) = counter.flop  # A product is a single operation, in one precision.
    return float(counter.flop.total() + work.additions), float(counter.moved_bytes), precision


class OperationCounter(UncompiledDispatchMode):
    """Counts the operations that run inside the block, their FLOP and the bytes that they move.

    Attributes:
        operations: The number of operations. Views and mere allocations do not count.
        moved_bytes: The bytes that operations read and write.
        flop: The floating-point operations by precision.
        unknown: The names of operations that multiply and for which torch has no formula.
    """

    def __init__(self) -> None:
        super().__init__()
        self.formulas = flop_formulas()
        self.operations = 0
        self.moved_bytes = 0
        self.flop: Counter[str] = Counter()
        self.unknown: set[str] = set()

    def __torch_dispatch__(
        self,
        operation: OpOverload,
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: dict[str, Nested] | None = None,
    ) -> Nested:
        """Run an operation, and count it, its bytes and its FLOP; return its result."""
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        name = operation_name(operation)
        written_bytes = _distinct_bytes(returned_or_written(operation, args, out))
        inputs = {key: value for key, value in kwargs.items() if key != "out"}
        # An argument that is only overwritten is not read.
        read_bytes = _distinct_bytes(
            (args[1:] if overwrites_first_argument(name) else args, inputs)
        )
        # The result of a view shares the memory of its inputs, and nothing is written to it.
        is_view = written_bytes.keys() <= read_bytes.keys() and not is_mutable(operation)
        if is_view or only_allocates(name):
            return out
        self.operations += 1
        self.moved_bytes += sum(read_bytes.values()) + sum(written_bytes.values())
        formula = self.formulas.get(operation.overloadpacket)
        if formula is not None:
            self.flop[_precision(name, args)] += formula(*args, **kwargs, out_val=out)
        elif PRODUCT_NAMES.search(name):
            # It multiplies, but torch has no formula for its FLOP. The step's report names it.
            self.unknown.add(name)
        return out


def _precision(name: str, args: Sequence[Nested]) -> str:
    """Return the precision in which a product is computed, as in the table of `roofline`.

    On CUDA, a product of float32 tensors is computed in `tf32` if the flags allow it.
    """
    first_tensor = find_tensors(args)[0]
    allowed = precision_allowed("conv" if "conv" in name else "matmul")
    is_tf32 = first_tensor.is_cuda and first_tensor.dtype == torch.float32 and allowed == "tf32"
    return "tf32" if is_tf32 else str(first_tensor.dtype).removeprefix("torch.")


def _distinct_bytes(values: Nested) -> dict[int, int]:
    """Compute the bytes of each storage among nested tensors, keyed by the storage's identity.

    Tensors that share a storage count once, with the size of the largest. An expanded tensor counts
    no more bytes than its storage has. Only strided tensors count.
    """
    sizes: dict[int, int] = {}
    for tensor in find_tensors(values):
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            size = min(tensor.numel() * tensor.element_size(), storage.nbytes())
            identity = storage_identity(storage)
            sizes[identity] = max(size, sizes.get(identity, 0))
    return sizes
