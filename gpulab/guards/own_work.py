"""The guard's own work: no operation of the user's, and nothing for TorchDynamo to compile."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])
_thread = threading.local()


def at_work() -> bool:
    """Whether the guard itself is at work in this thread: what torch computes now is no operation of the user's."""
    return getattr(_thread, "at_work", False)


def own_work(function: Function) -> Function:
    """While the function runs, `at_work` is true in its thread, which may be one of autograd's."""

    @functools.wraps(function)
    def work(*args: Any, **kwargs: Any) -> Any:
        before, _thread.at_work = at_work(), True
        try:
            return function(*args, **kwargs)
        finally:
            _thread.at_work = before

    return uncompiled(work)  # type: ignore[return-value]


def uncompiled(function: Function) -> Function:
    """Keep TorchDynamo from compiling a function and what that calls, and from tracing into it.

    `torch.compiler.disable` does the same, and imports the compiler, which takes seconds and 150 MB. An older torch
    (2.6) has nothing else, and compiles the function where a compiled one calls `backward`.
    """
    if action := getattr(eval_frame, "_FrameAction", None):
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
