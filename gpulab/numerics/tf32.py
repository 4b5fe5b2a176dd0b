"""Whether products may use TF32, by both of torch's interfaces. No other module reads or writes these flags.

Torch 2.6 has the old one alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.backends import cuda, cudnn


def _old_interface() -> tuple[bool, bool, str] | None:
    """What it says; None, because it refuses to be read, once the new one has been used."""
    try:
        return cuda.matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _new_interface() -> dict[str, Any]:
    """What it sets, by the kind of product: all that `set_float32_matmul_precision` sets, too; nothing in torch 2.6."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return {}
    conv, rnn = backends.cudnn.conv, backends.cudnn.rnn
    return {"matmul": backends.cuda.matmul, "conv": conv, "rnn": rnn, "onednn": backends.mkldnn.matmul}


def precision_allowed(product: str) -> str:
    """What torch allows a GPU for float32 products of a kind, `matmul` or `conv`: `tf32`, or another of its words.

    Where there is the new interface it says so, whichever was used.
    """
    if new := _new_interface():
        return new[product].fp32_precision
    old = cuda.matmul if product == "matmul" else cudnn
    return "tf32" if old.allow_tf32 else "ieee"


def switch_tf32(allowed: bool) -> None:
    """Allow TF32, or not, by the interface that is in use."""
    if _old_interface() is None:
        for product in ("matmul", "conv", "rnn"):
            _new_interface()[product].fp32_precision = "tf32" if allowed else "ieee"
    else:  # this sets the new interface as well, so that both can still be read
        cuda.matmul.allow_tf32 = cudnn.allow_tf32 = allowed


@contextlib.contextmanager
def tf32_restored() -> Iterator[None]:
    """Put both interfaces back afterwards; what has not changed is left alone, for writing a value pins it."""
    every = list(_new_interface().values())
    old, new = _old_interface(), [backend.fp32_precision for backend in every]
    try:
        yield
    finally:
        if old is not None and old != _old_interface():
            cuda.matmul.allow_tf32, cudnn.allow_tf32, precision = old
            if old != _old_interface():  # None, too, where it was switched after "medium"
                torch.set_float32_matmul_precision(precision)
        for backend, precision in zip(every, new, strict=True):
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision
