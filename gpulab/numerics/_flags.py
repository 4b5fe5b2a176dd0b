"""Flags of the arithmetic: TF32 and denormal numbers.

Newer versions of torch have two interfaces for TF32; torch 2.6 has only the old one. No other
module reads or writes these flags. Denormal numbers (in float32, those below 1.2e-38) are either
kept or replaced by zero; every thread has its own flag for this.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.backends import cuda, cudnn

from gpulab.errors import GpulabError

# --- TF32 -----------------------------------------------------------------------------------------


def _old_interface() -> tuple[bool, str] | None:
    """Return the flags of the old interface: whether cuDNN may use TF32, and matmul's precision.

    Returns None if the program has used the new interface, because torch then raises an error.
    """
    try:
        return cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


class _HasPrecision(Protocol):
    """A backend of torch with the new interface, which torch 2.6 does not have."""

    fp32_precision: str


def _new_interface() -> dict[str, _HasPrecision]:
    """Return the backends of the new interface, by kind of product; none in torch 2.6."""
    if not hasattr(torch.backends, "fp32_precision"):
        return {}
    # torch adds these attributes at run time, so mypy does not know them.
    backends: Any = torch.backends
    conv = backends.cudnn.conv
    rnn = backends.cudnn.rnn
    return {
        "matmul": backends.cuda.matmul,
        "conv": conv,
        "rnn": rnn,
        "onednn": backends.mkldnn.matmul,
    }


def precision_allowed(product: str) -> str:
    """Return the precision that torch allows for float32 products of a kind, `matmul` or `conv`.

    It reads the new interface if there is one. The result is correct whichever interface was set.
    """
    backends = _new_interface()
    if backends:
        return backends[product].fp32_precision
    old_backend = cuda.matmul if product == "matmul" else cudnn
    return "tf32" if old_backend.allow_tf32 else "ieee"


def switch_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 through the interface that the program uses."""
    if _old_interface() is None:
        for product in ("matmul", "conv", "rnn"):
            _new_interface()[product].fp32_precision = "tf32" if allowed else "ieee"
    else:  # The old interface sets the new one as well, so both can still be read.
        cuda.matmul.allow_tf32 = cudnn.allow_tf32 = allowed


@contextlib.contextmanager
def restore_tf32_on_exit() -> Iterator[None]:
    """Restore the TF32 flags of both interfaces on exit.

    Only flags that have changed are written, because a flag that was written no longer follows
    torch's default.
    """
    backends = list(_new_interface().values())
    old_flags = _old_interface()
    precisions = [backend.fp32_precision for backend in backends]
    try:
        yield
    finally:
        if old_flags is not None and old_flags != _old_interface():
            cudnn.allow_tf32, matmul_precision = old_flags
            # This sets `cuda.matmul.allow_tf32` as well.
            torch.set_float32_matmul_precision(matmul_precision)
        for backend, precision in zip(backends, precisions, strict=True):
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision


# --- denormal numbers -----------------------------------------------------------------------------


def switch_denormals(keep_denormals: bool, stack: contextlib.ExitStack) -> None:
    """Keep denormal numbers in all threads, or flush them; the stack restores the flags.

    Every thread has its own flag, and `torch.set_flush_denormal` sets only that of the calling
    thread.

    Raises:
        GpulabError: If the flag could not be set in all threads.
    """
    # The flag that is restored is that of the calling thread.
    was_flushing = not _keeps_denormals(threads=1)
    stack.callback(_flush_denormals, was_flushing)
    _flush_denormals(not keep_denormals)
    threads = torch.get_num_threads()
    if _keeps_denormals(threads) != keep_denormals:  # also if only some of the threads do
        value = "on" if keep_denormals else "off"
        raise GpulabError(
            f"denormals={value}: this machine cannot switch denormal numbers off"
            f" in all of its {threads} threads; a single thread may work: add threads=1"
        )


def _keeps_denormals(threads: int) -> bool | None:
    """Return whether denormal numbers are kept in `threads` threads; None if only in some of them.

    >>> _keeps_denormals(2)
    True
    """
    # The tensor is large enough for each thread to compute a part.
    numbers = torch.full((threads * 2**16,), 1e-30, dtype=torch.float32)
    is_kept = (numbers * 1e-10).ne(0)  # 1e-40 is a denormal number
    is_same_everywhere = is_kept.min() == is_kept.max()
    return bool(is_kept[0]) if is_same_everywhere else None


def _flush_denormals(flush: bool) -> None:
    """Set torch's flag for denormal numbers in this thread and in its OpenMP threads.

    torch has no function for the other threads. OpenMP itself is therefore made to run a function
    in each of them.
    """
    from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

    torch.set_flush_denormal(flush)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def flush_in_thread(_: int) -> None:
        torch.set_flush_denormal(flush)

    for library in threadpool_info():
        if library["user_api"] == "openmp":
            # `GOMP_parallel(function, data, threads, flags)` is what compilers generate for a
            # parallel region. Some runtimes lack it; the caller checks the result in all threads.
            with contextlib.suppress(AttributeError):
                ctypes.CDLL(library["filepath"]).GOMP_parallel(
                    flush_in_thread, None, torch.get_num_threads(), 0
                )


# --- all active flags -----------------------------------------------------------------------------


def arithmetic() -> dict[str, bool | int | str]:
    """Return the active arithmetic flags, under the names that runs record."""
    return {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": cudnn.enabled,
        "cudnn_benchmark": cudnn.benchmark,
        "cudnn_deterministic": cudnn.deterministic,
        "matmul_fp32": precision_allowed("matmul"),
        "convolution_fp32": precision_allowed("conv"),
    }
