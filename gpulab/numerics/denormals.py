"""Denormal numbers, those below 1.2e-38 in float32: kept, or taken for zero, in every thread that computes."""

from __future__ import annotations

import contextlib
import ctypes
from contextlib import ExitStack

import torch

from gpulab.errors import GpulabError


def switch_denormals(kept: bool, stack: ExitStack) -> None:
    """Keep denormal numbers in all threads, or take them for zero, and have the stack put the flags back.

    Every thread has a flag of its own, and `torch.set_flush_denormal` sets it in the thread that calls it alone.
    """
    stack.callback(_flush_denormals, not _keeps_denormals(1))
    _flush_denormals(not kept)
    if _keeps_denormals(threads := torch.get_num_threads()) != kept:
        raise GpulabError(
            f"denormals={'on' if kept else 'off'}: this machine cannot switch denormal numbers off in all of its "
            f"{threads} threads; one may be enough: add threads=1"
        )


def _keeps_denormals(threads: int) -> bool | None:
    """Whether products that are denormal numbers come out as such; None where some do and some do not."""
    long = torch.full((threads << 16,), 1e-30, dtype=torch.float32)  # so that each thread computes a part of it
    kept = (long * 1e-10).ne(0)
    return bool(kept[0]) if kept.min() == kept.max() else None


def _flush_denormals(flush: bool) -> None:
    """In this thread and those that compute for it, which OpenMP keeps."""
    from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

    torch.set_flush_denormal(flush)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def in_a_thread(_: int) -> None:
        torch.set_flush_denormal(flush)

    for library in threadpool_info():
        if library["user_api"] == "openmp":
            with contextlib.suppress(AttributeError):  # a runtime without it: whether all has been switched is checked
                ctypes.CDLL(library["filepath"]).GOMP_parallel(in_a_thread, None, torch.get_num_threads(), 0)
