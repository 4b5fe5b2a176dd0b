"""Notebook 02: the random numbers that a GPU draws from a seed, computed on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Threads per block of torch's random kernels; numbers that a thread draws at a time.
BLOCK, LANES = (
    256,
    4,
)
# The number of threads on a GPU, each with its own random sequence: the number of multiprocessors
# times the largest number of threads on each. If a tensor has more elements, the threads draw
# again, and from this second round on, a different GPU fills an element from a different thread.
THREADS = {
    "T4": 40 * 1024,
    "V100": 80 * 2048,
    "RTX 4090": 128 * 1536,
    "A100": 108 * 2048,
    "H100": 132 * 2048,
}


def cuda_uniform(seed: int, shape: Sequence[int], card: str) -> Tensor:
    """Compute on a CPU what `torch.rand(shape, device="cuda")` draws after `torch.manual_seed`.

    `card` is one of the GPU models in `THREADS`. This follows torch's kernel thread by thread
    (ATen/native/cuda/DistributionTemplates.h, torch 2.15), for at most 2^29 numbers. A thread draws
    four numbers at a time, and cuRAND converts 32 random bits to a float32 in (0, 1].

    >>> t4, h100 = cuda_uniform(0, (60_000,), "T4"), cuda_uniform(0, (60_000,), "H100")
    >>> bool((t4[:40_960] == h100[:40_960]).all()), bool((t4 == h100).all())
    (True, False)
    """
    count = math.prod(shape)
    threads = min(THREADS[card], math.ceil(count / BLOCK) * BLOCK)
    turns = np.arange(math.ceil(count / (LANES * threads)))[:, None]
    words = np.stack(
        philox((turns, 0, np.arange(threads), 0), (seed & 0xFFFFFFFF, seed >> 32)), axis=1
    )
    drawn = words.reshape(-1)[:count].astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    drawn[drawn == 1] = 0  # torch turns (0, 1] into [0, 1)
    return torch.from_numpy(drawn).reshape(tuple(shape))


def philox(counter: Sequence[np.ndarray | int], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox 4×32-10: four uint32 arrays of random bits for four counters and two seed halves.

    NumPy has only Philox 4×64. Source: Salmon, Moraes, Dror, Shaw 2011, *Parallel random numbers:
    as easy as 1, 2, 3*.
    """
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b, c, d = np.broadcast_arrays(*(np.asarray(number, dtype=np.uint64) for number in counter))
    for turn in range(10):
        first_key = np.uint64((key[0] + turn * 0x9E3779B9) % (1 << 32))
        second_key = np.uint64((key[1] + turn * 0xBB67AE85) % (1 << 32))
        of_a, of_c = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (of_c >> half) ^ b ^ first_key,
            of_c & low,
            (of_a >> half) ^ d ^ second_key,
            of_a & low,
        )
    return [word.astype(np.uint32) for word in (a, b, c, d)]
