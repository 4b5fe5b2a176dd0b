"""Which line of the user's code an operation belongs to, forward and backward."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode

from gpulab.files import is_notebook_cell

TORCH, GPULAB = os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[1]) + os.sep
OUTSIDE = os.path.join(GPULAB, "audits", "recording.py")  # what calls a step is none of its lines


class Callers:
    """Follows who calls operations below autograd: the phase, a module that it is told, and the user's line.

    An operation of a backward pass has the module and the line of what it differentiates.
    """

    def __init__(self) -> None:
        self.made_by: dict[int, tuple[str, str]] = {}  # by autograd's number of a node

    def of_this(self, module: str = "") -> tuple[str, str, str]:
        """The phase, the module and the line (`file:line: text`) of the operation that is being called."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return "backward", *self.made_by.get(node._sequence_nr(), ("", ""))
        line = _users_line()
        # The newest node is this operation's, if it has one; else it is known already.
        self.made_by.setdefault(torch.autograd._get_sequence_nr() - 1, (module, line))
        return "forward", module, line


class UncompiledDispatchMode(TorchDispatchMode):
    """A dispatch mode that torch's compiler leaves alone, with all that it calls, where a compiled model is at work.

    torch wraps the method of every other mode to that end; the wrapper imports the compiler, which takes 120 MB. An
    older torch (2.6) wraps nothing, and compiles nothing where such a mode is entered.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__torch_dispatch__ = inspect.unwrap(cls.__torch_dispatch__)  # type: ignore[method-assign]
        if hasattr(eval_frame, "_FrameAction"):
            skip = eval_frame._FrameAction.SKIP
            strategy = eval_frame._FrameExecStrategy(skip, skip)  # of the method, and of what it calls
            eval_frame.set_code_exec_strategy(cls.__torch_dispatch__.__code__, strategy)


@functools.cache
def is_composite(operation: Any) -> bool:
    """Whether an operation consists of others, which a mode sees instead of it except in inference mode.

    One that also has a kernel of a device, as the backward pass of SiLU has, is an operation of its own.
    """
    keys = ("CompositeImplicitAutograd", "CPU", "CUDA", "MPS")
    composite, *own = (torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key) for key in keys)
    return composite and not any(own)


def _users_line() -> str:
    """The innermost line of code that is neither torch's nor gpulab's, its models apart, as `file:line: text`."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != OUTSIDE:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, GPULAB, "<eval_with_key>")) or file.startswith(f"{GPULAB}models{os.sep}"):
            name = "a notebook cell" if is_notebook_cell(file) else os.path.basename(file)
            return f"{name}:{frame.f_lineno}: {linecache.getline(file, frame.f_lineno).strip()}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
