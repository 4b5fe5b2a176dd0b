"""The numbers that `torch.rand` draws on an NVIDIA GPU, computed on a CPU for any model of GPU.

A seed alone does not say what a GPU draws. Every thread of the kernel has a random sequence of its own, and a tensor
with more numbers than the GPU runs threads goes round: the threads draw again. How many threads there are is a matter
of the model, so that from the first round on another thread, and another sequence, fills a place on another GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpulab.errors import UsageError

BLOCK = 256  # threads of a block in torch's kernels that draw
LANES = 4  # numbers that a thread draws at a time
LARGEST = 1 << 29  # float32 numbers that one kernel addresses; torch splits a larger draw
THREADS = {  # multiprocessors, times the most threads that each can run
    "K80": 13 * 2048,
    "P100": 56 * 2048,
    "V100": 80 * 2048,
    "T4": 40 * 1024,
    "RTX 2080 Ti": 68 * 1024,
    "A100": 108 * 2048,
    "A100 PCIe": 108 * 2048,
    "A10G": 80 * 1536,
    "RTX 3090": 82 * 1536,
    "RTX 4090": 128 * 1536,
    "L4": 58 * 1536,
    "L40": 142 * 1536,
    "L40S": 142 * 1536,
    "H100 PCIe": 114 * 2048,
    "H100": 132 * 2048,  # with SXM
    "H200": 132 * 2048,
}
DIVIDED_ALIKE = {"rand", "randn", "randint", "random", "uniform", "normal", "log_normal", "exponential", "cauchy"}


def card_name(gpu: str) -> str:
    """The name in `THREADS` of a GPU as its driver calls it, without maker, socket and memory.

    Examples:
        >>> [card_name(name) for name in ("Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe")]
        ['V100', 'H100', 'H100 PCIe']
    """
    return re.sub(r"^NVIDIA |Tesla |GeForce |[- ](SXM\d?|PCIE|\d+GB|HBM\w+)\b", "", gpu)


def cuda_threads(card: str | int) -> int:
    """How many threads draw at a time on a card, of which the name or this number itself is given."""
    if isinstance(card, str) and card_name(card) not in THREADS:
        raise UsageError(
            f"card {card!r}: expected one of {', '.join(THREADS)}; or the number of its threads, which is its "
            "multiprocessors times the most threads of each (torch.cuda.get_device_properties)"
        )
    threads = THREADS[card_name(card)] if isinstance(card, str) else card
    if threads <= 0 or threads % BLOCK:
        raise UsageError(f"card {card!r}: the number of threads is a multiple of {BLOCK}, and not zero")
    return threads


def cuda_uniform(seed: int, shape: Sequence[int], card: str | int = "T4") -> Tensor:
    """Compute on a CPU the numbers that `torch.rand` draws on an NVIDIA GPU, for any model of GPU.

    They are those of `torch.manual_seed(seed); torch.rand(shape, device="cuda")`. The function follows the kernel of
    torch 2.15 thread by thread (ATen/native/cuda/DistributionTemplates.h), and cuRAND's way of making a float32 in (0,
    1] of 32 random bits. Where there is a CUDA GPU, a test compares it with `torch.rand` bit by bit; elsewhere with
    numbers that others have published.

    Args:
        seed: From 0 to 2^64 - 1.
        shape: The shape of the draw, of at most 2^29 numbers.
        card: The model of GPU: a name such as `T4`, `A100` or `H100` (the error for an unknown one lists them all), or
            what `torch.cuda.get_device_name` returns. For another model, how many threads it runs at once: its
            multiprocessors times the most threads of each.

    Returns:
        A float32 tensor on the CPU, of this shape, with numbers in [0, 1).

    Raises:
        UsageError: For an unknown model, a number of threads that is no multiple of 256, a seed out of range, and a
            larger draw.

    Examples:
        >>> import gpulab as gl
        >>> t4, h100 = gl.numerics.cuda_uniform(0, (60_000,), "T4"), gl.numerics.cuda_uniform(0, (60_000,), "H100")
        >>> bool((t4[:40_960] == h100[:40_960]).all()), bool((t4 == h100).all())
        (True, False)

    References:
        Salmon, Moraes, Dror, Shaw 2011, *Parallel random numbers: as easy as 1, 2, 3* (Philox).
    """
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"seed {seed}: expected 0 to 2^64 - 1")
    numbers = math.prod(shape)
    if numbers > LARGEST:
        raise UsageError(f"shape {tuple(shape)}: expected at most 2^29 numbers, since torch splits a larger draw")
    threads = min(cuda_threads(card), math.ceil(numbers / BLOCK) * BLOCK)
    rounds = math.ceil(numbers / (LANES * threads)) if numbers else 0
    counter = (np.arange(rounds)[:, None], 0, np.arange(threads), 0)
    words = np.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32)), axis=1)  # (rounds, lanes, threads)
    drawn = words.reshape(-1)[:numbers].astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    drawn[drawn == 1] = 0  # torch turns (0, 1] into [0, 1)
    return torch.from_numpy(drawn).reshape(tuple(shape))


def philox(counter: Sequence[np.ndarray | int], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox 4×32-10: four uint32 arrays of random bits for four counters that broadcast, and a seed's two halves.

    NumPy has Philox 4×64 alone.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b, c, d = np.broadcast_arrays(*(np.asarray(number, dtype=np.uint64) for number in counter))
    for turn in range(10):
        first_key = np.uint64((key[0] + turn * 0x9E3779B9) % (1 << 32))
        second_key = np.uint64((key[1] + turn * 0xBB67AE85) % (1 << 32))
        of_a, of_c = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (of_c >> half) ^ b ^ first_key, of_c & low, (of_a >> half) ^ d ^ second_key, of_a & low
    return [word.astype(np.uint32) for word in (a, b, c, d)]


def same_draws(card: str | int, other: str | int, numbers: int) -> int:
    """Count the numbers of one draw that two GPUs have in common, from the same seed: always the first ones.

    Each thread of a GPU has a random sequence of its own. A draw of more numbers than the GPU runs threads goes round:
    the threads draw again. Two models give the same number at a place only as long as no thread of either has drawn
    twice. Later numbers agree by chance, about one in 2^24; these are not counted.

    Args:
        card: A model of GPU, as for `gpulab.numerics.cuda_uniform`.
        other: Another one.
        numbers: How many numbers are drawn.

    Returns:
        How many of them are the same, counted from the first: all of them where both run equally many threads.

    Raises:
        UsageError: For an unknown model, a number of threads that is no multiple of 256, and `numbers` below 0.

    Examples:
        >>> import gpulab as gl
        >>> gl.numerics.same_draws("T4", "H100", 60_000), gl.numerics.same_draws("H100", "H200", 60_000)
        (40960, 60000)

    References:
        Salmon, Moraes, Dror, Shaw 2011, *Parallel random numbers: as easy as 1, 2, 3* (Philox).
    """
    if numbers < 0:
        raise UsageError(f"numbers={numbers}: expected a whole number from 0")
    threads, others = cuda_threads(card), cuda_threads(other)
    return numbers if threads == others else min(numbers, threads, others)


def explain_draws(operation: str, numbers: int, gpu: str, other: str) -> str:
    """A sentence on why two GPUs drew other numbers, as their names in two passports tell it.

    It holds for a draw before which both generators had drawn alike, as for the first that differs. It is empty where
    the models do not explain a difference or one is not listed, and for operations that divide their numbers among
    threads in another way, such as dropout.
    """
    listed = THREADS.keys() >= {card_name(gpu), card_name(other)}
    if operation.rstrip("_") not in DIVIDED_ALIKE or not listed or same_draws(gpu, other, numbers) == numbers:
        return ""
    common = f"the first {same_draws(gpu, other, numbers):,} of its {numbers:,} numbers are the same"
    return f"{common}: {gpu} draws with {cuda_threads(gpu):,} threads, {other} with {cuda_threads(other):,}"
