"""Marks the guard's own tensor operations, so that they are not checked like the user's."""

from __future__ import annotations

import functools
import threading

from gpulab._torch_internals import Function, Nested, dispatch_disabled, uncompiled

_thread = threading.local()


def is_guard_running() -> bool:
    """Return whether this thread runs the guard's own work, whose operations are not the user's."""
    return getattr(_thread, "is_guard_running", False)


def as_guard_work(function: Function) -> Function:
    """Decorate a function so that `is_guard_running` is true in its thread while it runs."""

    @functools.wraps(function)
    def wrapper(*args: Nested, **kwargs: Nested) -> Nested:
        # The previous value is restored, because such functions may call each other.
        was_running = is_guard_running()
        _thread.is_guard_running = True
        try:
            return function(*args, **kwargs)
        finally:
            _thread.is_guard_running = was_running

    return uncompiled(wrapper)  # type: ignore[return-value]


def without_dispatch_modes(function: Function) -> Function:
    """Decorate a function so that dispatch modes do not see the operations that it calls."""

    @functools.wraps(function)
    def wrapper(*args: Nested, **kwargs: Nested) -> Nested:
        with dispatch_disabled():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]
