"""Choice of the fastest of several GPU algorithms that compute the same numbers, by timing them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

TIMED_CALLS = 3  # timed calls of each candidate

_choices: dict[Hashable, int] = {}  # key -> index of the fastest candidate


def fastest_candidate(
    key: Hashable, candidates: Sequence[Callable[[], Tensor]], device: torch.device, workspace: int
) -> int:
    """Return the index of the fastest candidate.

    The candidates are timed when a key occurs for the first time. Nothing can be timed during the
    capture of a CUDA graph, so a new key then gets the first candidate.

    Args:
        key: Everything that the choice depends on: shapes, data types, the device and flags of
            torch.
        candidates: Functions that compute the same numbers.
        device: The GPU.
        workspace: The number of bytes that a candidate may allocate. One that needs more counts as
            infinitely slow.
    """
    if key not in _choices and not torch.cuda.is_current_stream_capturing():
        times = [_time_within_workspace(candidate, device, workspace) for candidate in candidates]
        _choices[key] = times.index(min(times))
    return _choices.get(key, 0)


def _time_within_workspace(
    candidate: Callable[[], Tensor], device: torch.device, workspace: int
) -> float:
    """Return the seconds that `TIMED_CALLS` calls of a candidate take, after a call to warm up.

    The result is infinite for a candidate that needs more than `workspace` bytes of new memory.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    previous_fraction = torch.cuda.get_per_process_memory_fraction(device)
    max_bytes = torch.cuda.memory_reserved(device) + workspace
    torch.cuda.set_per_process_memory_fraction(min(1.0, max_bytes / total), device)
    try:
        candidate()  # The call to warm up is the only one with limited memory.
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
