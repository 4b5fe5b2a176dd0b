"""Whether matrix products and convolutions may use TF32, by both of torch's interfaces, and code that may not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.backends import cuda, cudnn

from gpulab.numerics.emulation import emulate, emulators


def _old_interface() -> tuple[bool, bool, str] | None:
    """What it says; None, because it refuses to be read, once the new one has been used."""
    try:
        return cuda.matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def switch_tf32(allowed: bool) -> None:
    """Allow TF32, or not, by the interface that is in use."""
    backends: Any = torch.backends
    if _old_interface() is None:
        for backend in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
            backend.fp32_precision = "tf32" if allowed else "ieee"
    else:  # this sets the new interface as well, so that both can still be read
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = allowed


@contextlib.contextmanager
def tf32_restored() -> Iterator[None]:
    """Put both interfaces back afterwards; what has not changed is left alone, for writing a value pins it."""
    backends: Any = torch.backends
    # What `set_float32_matmul_precision` sets as well.
    every = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
    old, new = _old_interface(), [backend.fp32_precision for backend in every]
    try:
        yield
    finally:
        if old is not None and old != _old_interface():
            backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, precision = old
            if old != _old_interface():  # None, too, where it was switched after "medium"
                torch.set_float32_matmul_precision(precision)
        for backend, precision in zip(every, new, strict=True):
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision


@contextlib.contextmanager
def float32_products() -> Iterator[None]:
    """Inside the `with` block matrix products and convolutions keep float32, whatever the setting allows.

    For the one line of a training that needs all digits, while the rest may use TF32 or emulated arithmetic. The
    gradients of what is computed inside are computed later, as the setting says.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> x = torch.tensor([[1.0, 1 / 3]])
        >>> with gl.setting("cpu:emulate=tf32"):
        ...     with gl.float32_products():
        ...         inside = (x @ x.T).item()
        ...     inside, (x @ x.T).item()
        (1.1111111640930176, 1.1110568046569824)
    """
    with tf32_restored(), emulate("float32") if emulators() else contextlib.nullcontext():
        switch_tf32(False)
        yield
