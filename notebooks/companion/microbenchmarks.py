"""Microbenchmarks of notebook 01: each shows one property of a CPU or a GPU.

There are five, and two more where there is a GPU:

- `memory`: one operation reads the same numbers again and again. The more memory they occupy, the
  fewer caches can hold them, so the bandwidth falls in steps.
- `access`: a fixed number of values is read one after another, at a distance, or in random order.
- `launch`: an addition of one number takes nearly as long as an addition of thousands, because
  starting an operation has a fixed cost.
- `blocks`: equal tasks are given to the cores of a CPU, equal blocks of threads to the SMs of a
  GPU. If there is one more task than there are cores, the last one has to wait.
- `branch`: on a CPU, a branch that cannot be predicted; on a GPU, a branch that only some of the 32
  threads of a warp take.
- `threads` (NVIDIA and AMD GPUs): the more threads, the more arithmetic per second.
- `bus` (GPUs): copies between the host and the GPU.

On a CPU, all but `blocks` use one thread. On a GPU, `memory`, `access`, `blocks`, `branch` and
`threads` run the CUDA source `KERNELS`, because torch has no operations that isolate these effects.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from gpulab.errors import UsageError, check_count
from gpulab.settings import Setting

MEASURED = ["memory", "access", "launch", "blocks", "branch", "threads", "bus"]
CPU_BENCHMARKS = ["memory", "access", "launch", "blocks", "branch"]
OTHER_BENCHMARKS = ["launch", "bus"]  # for GPUs without CUDA or ROCm: mps, xpu
MIN_SECONDS = 0.004  # calls are repeated until they take this long in total
STRIDES = (1, 2, 4, 8, 16, 32)
MEMORY_SIZES = {  # bytes
    "cpu": [2**power for power in range(13, 28)],
    "cuda": [2**power for power in range(14, 31)],
}
MEMORY_TRAFFIC = {"cpu": 2**26, "cuda": 2**32}  # bytes that a call reads, or a little more
CHAIN_STEPS = 40_000  # multiplications with additions by each thread of a block
WARP = 32  # threads
THREADS_PER_BLOCK = {"read_memory": 512, "read_at": 512, "take_branch": 1024}
BRANCH_LANES = (0, 1, 2, 4, 8, 16, 24, 28, 31, 32)
BRANCH_SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
BUS_SIZES = (2**12, 2**16, 2**20, 2**24, 2**28)  # bytes
GRAPH_LAUNCHES = 100

KERNELS = r"""extern "C" {

// Every block reads the numbers from a different place, and starts again at the end.
__global__ void __launch_bounds__(512)
read_memory(const float4* __restrict__ numbers, int count, int reads, float* result) {
    int position = (int)((long long)blockIdx.x * count / gridDim.x) + threadIdx.x;
    float sum = 0.0f;
    #pragma unroll 4
    for (int i = 0; i < reads; ++i) {
        if (position >= count) position -= count;
        float4 read = numbers[position];
        sum += read.x + read.y + read.z + read.w;
        position += blockDim.x;
    }
    if (sum == -1.0f) result[0] = sum;  // never true, but forces the compiler to compute the sum
}

// Neighbouring threads read numbers that lie `stride` apart or, with stride 0, in random order.
__global__ void __launch_bounds__(512)
read_at(const float* __restrict__ numbers, int mask, int stride, int reads, float* result) {
    unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned threads = gridDim.x * blockDim.x;
    float sum = 0.0f;
    #pragma unroll 4
    for (int i = 0; i < reads; ++i) {
        unsigned place = thread + i * threads;
        if (stride > 0) {
            place *= stride;
        } else {  // the last steps of the hash function murmur3, which mix all bits
            place = (place ^ (place >> 16)) * 0x85ebca6bu;
            place = (place ^ (place >> 13)) * 0xc2b2ae35u;
            place ^= place >> 16;
        }
        sum += numbers[place & mask];
    }
    if (sum == -1.0f) result[0] = sum;
}

// `taking` out of 32 take the first branch: threads of each warp, or whole warps.
__global__ void __launch_bounds__(1024)
take_branch(int taking, int whole_warps, int steps, float* result) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    int position = whole_warps ? (thread / 32) % 32 : thread % 32;
    float value = threadIdx.x;
    if (position < taking) {
        #pragma unroll 16
        for (int i = 0; i < steps; ++i) value = value * 0.999f + 0.5f;
    } else {
        #pragma unroll 16
        for (int i = 0; i < steps; ++i) value = 0.25f - value * 0.998f;
    }
    if (value == -1.0f) result[0] = value;
}

}
"""


class Probe(NamedTuple):
    """One point of a microbenchmark: what is called, and its place on the x axis.

    Attributes:
        benchmark: One of `MEASURED`.
        case: The line of the figure that the point belongs to.
        x: Bytes (`memory`, `bus`), the distance of numbers in float32 (`access`; 0 for random
            order), numbers (`launch`), tasks or blocks (`blocks`), the share that takes the branch
            (`branch`), threads (`threads`).
        amount: What one call does: bytes (`memory`, `bus`), numbers (`access`, `branch` on a CPU),
            operations of torch (`launch`), tasks (`blocks`), flop (`threads`, `branch` on a GPU).
        call: Performs one call.
    """

    benchmark: str
    case: str
    x: float
    amount: float
    call: Callable[[], Any]


def measure_inside(
    setting: Setting | str = "cpu",
    benchmarks: Sequence[str] | None = None,
    rounds: int = 7,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure the microbenchmarks of a device.

    All points of a microbenchmark take turns in each round, so a temporary slowdown of the machine
    affects all of them.

    Args:
        setting: The setting of the device, such as `cpu` or `cuda:tf32=off`.
        benchmarks: Some of `MEASURED`; by default, all that are available on the device.
        rounds: The number of times that each point is timed, at least 2.
        progress: Whether to show a progress bar.

    Returns:
        A data frame with a row for each point: `benchmark`, `case`, `x` and `amount` as in `Probe`;
        `seconds`, the median over the rounds of the time of one call; `fastest`, `lower`, `upper`
        and `slowest`, the minimum, the quartiles and the maximum over the rounds; `rounds`;
        `setting`.

    Raises:
        UsageError: For a microbenchmark that is not available on the device, or fewer than 2
            rounds.

    Examples:
        >>> frame = measure_inside("cpu", ["launch"], rounds=2, progress=False)
        >>> list(frame.columns[:5])
        ['benchmark', 'case', 'x', 'amount', 'seconds']
    """
    parsed = Setting.parse(setting)
    check_count("rounds", rounds, minimum=2)
    allowed = allowed_benchmarks(parsed.kind)
    wanted = list(allowed if benchmarks is None else benchmarks)
    if unknown := [name for name in wanted if name not in allowed]:
        raise UsageError(
            f"microbenchmarks on {parsed.kind}: expected some of {', '.join(allowed)}, got"
            f" {', '.join(unknown)}"
        )
    rows = []
    with parsed.apply(), one_thread_on_cpu(parsed.kind):
        for name in tqdm(wanted, desc="microbenchmarks", disable=not progress, leave=False):
            probes = list(PROBES[name](parsed.kind))
            times = time_in_rounds([probe.call for probe in probes], parsed.kind, rounds)
            for probe, seconds in zip(probes, times, strict=True):
                rows.append({**describe_probe(probe), **summarise_rounds(seconds)})
            del probes  # on a GPU they hold gigabytes
    return pd.DataFrame(rows).assign(setting=str(parsed))


def allowed_benchmarks(kind: str) -> list[str]:
    """List the microbenchmarks available on a kind of device: `cpu`, `cuda`, `mps` or `xpu`."""
    return {"cpu": CPU_BENCHMARKS, "cuda": MEASURED}.get(kind, OTHER_BENCHMARKS)


def describe_probe(probe: Probe) -> dict[str, Any]:
    """Return the columns of a probe, which are all of its fields except `call`."""
    return {
        "benchmark": probe.benchmark,
        "case": probe.case,
        "x": probe.x,
        "amount": probe.amount,
    }


# --- timing ---------------------------------------------------------------------------------------


@contextmanager
def one_thread_on_cpu(kind: str) -> Iterator[None]:
    """Restrict torch to one thread in this context on a CPU; do nothing on other devices."""
    threads = torch.get_num_threads()
    if kind == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def time_in_rounds(
    calls: Sequence[Callable[[], Any]],
    kind: str,
    rounds: int = 7,
    min_seconds: float = MIN_SECONDS,
) -> list[list[float]]:
    """Time several calls that take turns.

    Args:
        calls: The functions to time. Each is called at least twice beforehand.
        kind: The kind of the device whose work is waited for, such as `cuda`.
        rounds: The number of times that each is timed.
        min_seconds: A call is repeated until this many seconds have passed, and the time is divided
            by the number of calls.

    Returns:
        For each call its seconds in each round.
    """
    repeats = []
    for call in calls:
        call()
        once = time_calls(call, kind, 1)
        repeats.append(max(1, round(min_seconds / max(once, 1e-7))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for seconds, call, count in zip(times, calls, repeats, strict=True):
            seconds.append(time_calls(call, kind, count))
    return times


def time_calls(call: Callable[[], Any], kind: str, count: int) -> float:
    """Return the seconds of one call: the mean of `count` calls that the device completed."""
    wait_for(kind)
    started = time.perf_counter()
    for _ in range(count):
        call()
    wait_for(kind)
    return (time.perf_counter() - started) / count


def wait_for(kind: str) -> None:
    """Wait until a device, such as `cuda`, has completed its work."""
    getattr(torch, kind).synchronize()


def summarise_rounds(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, extremes and quartiles of the times of several rounds."""
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return {
        "seconds": median,
        "fastest": min(seconds),
        "lower": lower,
        "upper": upper,
        "slowest": max(seconds),
        "rounds": len(seconds),
    }


# --- the probes -----------------------------------------------------------------------------------


def probe_memory(kind: str) -> Iterator[Probe]:
    """Read a constant number of bytes from a growing working set."""
    if kind == "cuda":
        yield from probe_gpu_memory()
        return
    numbers = torch.ones(max(MEMORY_SIZES[kind]) // 4)
    for size in MEMORY_SIZES[kind]:
        count = size // 4
        sweeps = max(1, MEMORY_TRAFFIC[kind] // size)
        # Expanding copies nothing: all rows share the same memory.
        rows = numbers[:count].expand(sweeps, count)
        yield Probe("memory", "read", size, sweeps * size, partial(rows.sum, dim=1))


def probe_gpu_memory() -> Iterator[Probe]:
    """Read from a growing working set, with all SMs of a GPU."""
    free = torch.cuda.mem_get_info()[0]
    sizes = [size for size in MEMORY_SIZES["cuda"] if size < free / 2]
    numbers = torch.zeros(max(sizes) // 4, device="cuda")
    result = torch.zeros(1, device="cuda")
    kernel = compile_kernel("read_memory")
    grid, block = 4 * count_sms(), THREADS_PER_BLOCK["read_memory"]
    for size in sizes:
        reads = max(1, MEMORY_TRAFFIC["cuda"] // (16 * grid * block))
        call = partial(kernel, grid, block, numbers, size // 16, reads, result)
        yield Probe("memory", "read", size, 16 * grid * block * reads, call)


def probe_access(kind: str) -> Iterator[Probe]:
    """Read a fixed number of values, one after another, at a distance, or in random order."""
    if kind == "cuda":
        yield from probe_gpu_access()
        return
    numbers = torch.ones(2**25)  # 128 MiB, larger than a cache
    count = len(numbers) // max(STRIDES)
    result = torch.empty(count)
    orders = {stride: stride * torch.arange(count) for stride in STRIDES}
    orders[0] = torch.randperm(len(numbers))[:count]
    for stride, places in orders.items():
        call = partial(torch.index_select, numbers, 0, places, out=result)
        yield Probe("access", "random order" if stride == 0 else "strided", stride, count, call)


def probe_gpu_access() -> Iterator[Probe]:
    """Read a fixed number of values in several orders, with all SMs of a GPU."""
    free = torch.cuda.mem_get_info()[0]
    length = 2**30  # numbers
    while 4 * length > free / 4:
        length //= 2
    numbers = torch.zeros(length, device="cuda")
    result = torch.zeros(1, device="cuda")
    kernel = compile_kernel("read_at")
    block, reads = THREADS_PER_BLOCK["read_at"], 16
    count = length // max(STRIDES)
    grid = count // (block * reads)
    for stride in (*STRIDES, 0):
        call = partial(kernel, grid, block, numbers, length - 1, stride, reads, result)
        yield Probe("access", "random order" if stride == 0 else "strided", stride, count, call)


def probe_launch(kind: str) -> Iterator[Probe]:
    """Add 1 to more and more numbers: in one call of torch each, and on CUDA also in a graph."""
    largest = 22 if kind == "cpu" else 26
    numbers = torch.zeros(2**largest, device=kind)
    for power in range(0, largest + 1, 2):
        part = numbers[: 2**power]
        yield Probe("launch", "one by one", 2**power, 1, partial(part.add_, 1.0))
        if kind == "cuda":
            call = capture_additions(part)
            yield Probe("launch", "in a CUDA graph", 2**power, GRAPH_LAUNCHES, call)


def capture_additions(numbers: torch.Tensor) -> Callable[[], None]:
    """Capture `GRAPH_LAUNCHES` additions in a CUDA graph, which one call launches."""
    numbers.add_(1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_LAUNCHES):
            numbers.add_(1.0)
    return graph.replay


def probe_blocks(kind: str) -> Iterator[Probe]:
    """Give more and more equal tasks to the cores of a CPU, or blocks to the SMs of a GPU."""
    if kind == "cuda":
        sms = count_sms()
        result = torch.zeros(1, device="cuda")
        kernel = compile_kernel("take_branch")
        for blocks in blocks_to_try(sms):
            block = THREADS_PER_BLOCK["take_branch"]
            call = partial(kernel, blocks, block, WARP, 0, CHAIN_STEPS, result)
            yield Probe("blocks", "blocks of 1,024 threads", blocks, blocks, call)
        return
    cores = count_cores()
    pool = ThreadPoolExecutor(cores)
    for tasks in blocks_to_try(cores):
        yield Probe("blocks", "tasks", tasks, tasks, partial(do_tasks, pool, tasks))


def blocks_to_try(units: int, waves: int = 4, points: int = 32) -> list[int]:
    """Choose counts up to `waves` times the units, including each multiple and the count after."""
    step = max(1, units * waves // points)
    counts = {1, *range(step, units * waves + 1, step)}
    for wave in range(1, waves + 1):
        counts |= {wave * units, wave * units + 1}
    return sorted(counts)


def do_tasks(pool: ThreadPoolExecutor, tasks: int) -> None:
    """Compute a number of equal tasks, and wait for the last one."""
    list(pool.map(do_task, range(tasks)))


def do_task(_: int) -> None:
    """Compute for some milliseconds on one core. NumPy releases the lock for other threads."""
    values = np.linspace(0.0, 1.0, 100_000)
    for _ in range(12):
        np.exp(values, out=values)
        np.subtract(values, 1.0, out=values)
        np.minimum(values, 1.0, out=values)


def probe_branch(kind: str) -> Iterator[Probe]:
    """Take a branch with a given share of numbers or threads: mixed, or in order."""
    if kind == "cuda":
        result = torch.zeros(1, device="cuda")
        kernel = compile_kernel("take_branch")
        blocks, block = 2 * count_sms(), THREADS_PER_BLOCK["take_branch"]
        flop = 2 * CHAIN_STEPS * blocks * block
        for case, whole in {"threads of each warp": 0, "whole warps": 1}.items():
            for lanes in BRANCH_LANES:
                call = partial(kernel, blocks, block, lanes, whole, CHAIN_STEPS, result)
                yield Probe("branch", case, lanes / WARP, flop, call)
        return
    count = 2**20
    shuffled = torch.randperm(count)
    for share in BRANCH_SHARES:
        in_order = torch.arange(count) < share * count
        yield Probe("branch", "in order", share, count, partial(torch.nonzero, in_order))
        yield Probe("branch", "shuffled", share, count, partial(torch.nonzero, in_order[shuffled]))


def probe_threads(_: str) -> Iterator[Probe]:
    """Run the same arithmetic in more and more threads of a GPU."""
    sms = count_sms()
    result = torch.zeros(1, device="cuda")
    kernel = compile_kernel("take_branch")
    shapes = [(1, 32), (1, 256), (1, 1024), (sms // 4, 1024)]  # blocks, threads of a block
    shapes += [(sms, threads) for threads in (32, 64, 128, 256, 512, 1024)]
    shapes += [(2 * sms, 1024)]
    for blocks, threads in shapes:
        flop = 2 * CHAIN_STEPS * blocks * threads
        call = partial(kernel, blocks, threads, WARP, 0, CHAIN_STEPS, result)
        yield Probe("threads", "multiplications with additions", blocks * threads, flop, call)


def probe_bus(kind: str) -> Iterator[Probe]:
    """Copy between the host and the device, from ordinary and, on CUDA, from pinned memory."""
    memories = {"ordinary memory": False} | ({"pinned memory": True} if kind == "cuda" else {})
    for memory, is_pinned in memories.items():
        for size in BUS_SIZES:
            host = torch.ones(size // 4).pin_memory() if is_pinned else torch.ones(size // 4)
            there = torch.ones(size // 4, device=kind)
            copy_there = partial(there.copy_, host, non_blocking=is_pinned)
            copy_back = partial(host.copy_, there, non_blocking=is_pinned)
            yield Probe("bus", f"to the device, {memory}", size, size, copy_there)
            yield Probe("bus", f"from the device, {memory}", size, size, copy_back)


PROBES: dict[str, Callable[[str], Iterator[Probe]]] = {
    "memory": probe_memory,
    "access": probe_access,
    "launch": probe_launch,
    "blocks": probe_blocks,
    "branch": probe_branch,
    "threads": probe_threads,
    "bus": probe_bus,
}


# --- CUDA -----------------------------------------------------------------------------------------


@cache
def compile_kernel(name: str) -> Callable[..., None]:
    """Compile one of `KERNELS` for the current GPU.

    If torch cannot compile it, CuPy is used if it is installed.

    Returns:
        A function of the number of blocks, the threads per block, and the kernel's arguments, which
        are tensors and integers.

    Raises:
        UsageError: If neither can compile it.
    """
    try:
        kernel = torch.cuda._compile_kernel(KERNELS, name)
    except (AttributeError, ImportError, OSError, RuntimeError) as problem:
        return compile_with_cupy(name, problem)

    def launch(blocks: int, threads: int, *arguments: torch.Tensor | int) -> None:
        kernel((blocks, 1, 1), (threads, 1, 1), list(arguments))

    return launch


def compile_with_cupy(name: str, problem: Exception) -> Callable[..., None]:
    """Compile a kernel with CuPy, after torch failed with `problem`."""
    try:
        import cupy  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UsageError(
            f"torch could not compile the kernel {name} ({problem}); install CuPy, or leave out the"
            " microbenchmark"
        ) from problem
    kernel = cupy.RawKernel(KERNELS, name)

    def launch(blocks: int, threads: int, *arguments: torch.Tensor | int) -> None:
        converted = [
            np.int32(value) if isinstance(value, int) else np.uintp(value.data_ptr())
            for value in arguments
        ]
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            kernel((blocks,), (threads,), tuple(converted))

    return launch


def count_sms() -> int:
    """Return the number of streaming multiprocessors of the current GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.multi_processor_count)


def count_cores() -> int:
    """Return the number of logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
