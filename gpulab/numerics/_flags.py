"""Flags of the arithmetic that take more than a line: TF32, and denormal numbers.

Whether products may use TF32 is said by both of torch's interfaces, of which torch 2.6 has the old
one alone; no other module reads or writes these flags. Denormal numbers, those below 1.2e-38 in
float32, are kept or taken for zero in every thread that computes.
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
    """The flags of the old interface; None once the new one was used, as torch then refuses."""
    try:
        return cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


class _HasPrecision(Protocol):
    """A backend of torch with the new interface, which torch 2.6 does not have."""

    fp32_precision: str


def _new_interface() -> dict[str, _HasPrecision]:
    """The flags of the new interface by the kind of product; nothing in torch 2.6."""
    if not hasattr(torch.backends, "fp32_precision"):
        return {}
    # torch adds these attributes when it runs, so mypy knows none of them
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
    """The precision that torch allows for float32 products of a kind, `matmul` or `conv`.

    Where there is the new interface it says so, whichever was used.
    """
    backends = _new_interface()
    if backends:
        return backends[product].fp32_precision
    old_backend = cuda.matmul if product == "matmul" else cudnn
    return "tf32" if old_backend.allow_tf32 else "ieee"


def switch_tf32(allowed: bool) -> None:
    """Allow TF32, or not, by the interface that is in use."""
    if _old_interface() is None:
        for product in ("matmul", "conv", "rnn"):
            _new_interface()[product].fp32_precision = "tf32" if allowed else "ieee"
    else:  # this sets the new interface as well, so that both can still be read
        cuda.matmul.allow_tf32 = cudnn.allow_tf32 = allowed


@contextlib.contextmanager
def restore_tf32_on_exit() -> Iterator[None]:
    """Restore both interfaces on exit.

    Unchanged values are not written, because writing pins them.
    """
    backends = list(_new_interface().values())
    old_flags = _old_interface()
    precisions = [backend.fp32_precision for backend in backends]
    try:
        yield
    finally:
        if old_flags is not None and old_flags != _old_interface():
            cudnn.allow_tf32, matmul_precision = old_flags
            # sets `cuda.matmul.allow_tf32` as well
            torch.set_float32_matmul_precision(matmul_precision)
        for backend, precision in zip(backends, precisions, strict=True):
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision


# --- denormal numbers -----------------------------------------------------------------------------


def switch_denormals(keep_denormals: bool, stack: contextlib.ExitStack) -> None:
    """Keep denormal numbers in all threads, or flush them; the stack restores the flags.

    Every thread has a flag of its own, and `torch.set_flush_denormal` sets it in the thread that
    calls it alone.
    """
    stack.callback(_flush_denormals, not _keeps_denormals(1))
    _flush_denormals(not keep_denormals)
    threads = torch.get_num_threads()
    if _keeps_denormals(threads) != keep_denormals:
        value = "on" if keep_denormals else "off"
        raise GpulabError(
            f"denormals={value}: this machine cannot switch denormal numbers off"
            f" in all of its {threads} threads; one may be enough: add threads=1"
        )


def _keeps_denormals(threads: int) -> bool | None:
    """Whether products that are denormal numbers are kept; None if only some are.

    >>> _keeps_denormals(2)
    True
    """
    # The tensor is large enough for each thread to compute a part.
    numbers = torch.full((threads << 16,), 1e-30, dtype=torch.float32)
    is_kept = (numbers * 1e-10).ne(0)
    return bool(is_kept[0]) if is_kept.min() == is_kept.max() else None


def _flush_denormals(flush: bool) -> None:
    """Set the flag in this thread, and in the threads of OpenMP that compute for it."""
    from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

    torch.set_flush_denormal(flush)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def flush_in_thread(_: int) -> None:
        torch.set_flush_denormal(flush)

    for library in threadpool_info():
        if library["user_api"] == "openmp":
            # Some runtimes lack the function; the caller checks all threads.
            with contextlib.suppress(AttributeError):
                ctypes.CDLL(library["filepath"]).GOMP_parallel(
                    flush_in_thread, None, torch.get_num_threads(), 0
                )


# --- all active flags -----------------------------------------------------------------------------


def arithmetic() -> dict[str, bool | int | str]:
    """The active flags, under the names that a run records them with."""
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
