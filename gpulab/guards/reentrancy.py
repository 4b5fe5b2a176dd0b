"""Marks the guard's own tensor operations, which must not be checked as if they were the user's."""

from __future__ import annotations

import functools
import threading

from gpulab._torch_internals import Function, Nested, uncompiled

_thread = threading.local()


def at_work() -> bool:
    """Whether the guard itself is at work in this thread: what torch computes now is no operation of the user's."""
    return getattr(_thread, "at_work", False)


def own_work(function: Function) -> Function:
    """While the function runs, `at_work` is true in its thread, which may be one of autograd's."""

    @functools.wraps(function)
    def work(*args: Nested, **kwargs: Nested) -> Nested:
        before, _thread.at_work = at_work(), True
        try:
            return function(*args, **kwargs)
        finally:
            _thread.at_work = before

    return uncompiled(work)  # type: ignore[return-value]
