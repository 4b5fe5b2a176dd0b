"""Chooses the fastest of several algorithms for the same numbers on a GPU, by trying each once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

TIMED_CALLS = 3  # timed calls of each candidate

_choices: dict[Hashable, int] = {}


def fastest_candidate(
    key: Hashable, candidates: Sequence[Callable[[], Tensor]], device: torch.device, workspace: int
) -> int:
    """Return the index of the fastest candidate, measured when a key is first seen.

    While a CUDA graph is being captured nothing can be measured: a new key then gets the first
    candidate.

    Args:
        key: What the choice depends on: shapes, formats, the device and the flags of torch.
        candidates: Functions that compute the same numbers.
        device: The GPU.
        workspace: How many bytes a candidate may allocate; one that needs more is never chosen.
    """
    if key not in _choices and not torch.cuda.is_current_stream_capturing():
        times = [_time_within_workspace(candidate, device, workspace) for candidate in candidates]
        _choices[key] = times.index(min(times))
    return _choices.get(key, 0)


def _time_within_workspace(
    candidate: Callable[[], Tensor], device: torch.device, workspace: int
) -> float:
    """Time a candidate, in seconds, after a first call that may allocate `workspace` bytes.

    Infinite for a candidate that needs more.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    previous_fraction = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, (torch.cuda.memory_reserved(device) + workspace) / total), device
    )
    try:
        candidate()
    except torch.OutOfMemoryError:
        return math.inf
    finally:
        torch.cuda.set_per_process_memory_fraction(previous_fraction, device)
    torch.cuda.current_stream().synchronize()
    start_time = time.perf_counter()
    for _ in range(TIMED_CALLS):
        candidate()
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start_time
