"""Why two models of GPU draw other random numbers from the same seed.

Every thread of the kernel has a random sequence of its own, and a tensor with more numbers than the GPU runs threads
goes round: the threads draw again. How many threads there are is a matter of the model, so that from the first round on
another thread, and another sequence, fills a place on another GPU (ATen/native/cuda/DistributionTemplates.h).
"""

from __future__ import annotations

import re

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


def explain_draws(operation: str, numbers: int, gpu: str, other: str) -> str:
    """A sentence on why two GPUs drew other numbers, as their names in two passports tell it.

    It holds for a draw before which both generators had drawn alike, as for the first that differs. It is empty where
    the models do not explain a difference or one is not listed, and for operations that divide their numbers among
    threads in another way, such as dropout.
    """
    threads, others = (THREADS.get(card_name(name)) for name in (gpu, other))
    if operation.rstrip("_") not in DIVIDED_ALIKE or threads is None or others is None:
        return ""
    if threads == others or numbers <= min(threads, others):
        return ""
    common = f"the first {min(threads, others):,} of its {numbers:,} numbers are the same"
    return f"{common}: {gpu} draws with {threads:,} threads, {other} with {others:,}"
