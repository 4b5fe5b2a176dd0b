"""The search for the line of the user's source that calls an operation."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from gpulab._torch_internals import current_node, newest_node_number, node_number

PACKAGE = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent)
INSTALLED = (TORCH, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
# Frames of the guard, and of the module through which it calls torch, are never reported as user
# code.
GUARD_FILES = (str(Path(__file__).parent) + os.sep, os.path.join(PACKAGE, "_torch_internals.py"))
# This file calls the audited step. Frames from here on outwards do not belong to the step.
STEP_CALLER_FILE = os.path.join(PACKAGE, "audits", "_recording.py")


def is_notebook_cell(file: str) -> bool:
    """Return whether a source file is a notebook cell, which a kernel names as a temporary file.

    >>> is_notebook_cell("/home/ada/train.py"), is_notebook_cell("/tmp/ipykernel_171/1402239833.py")
    (False, True)
    """
    return Path(file).parent.name.startswith("ipykernel_")


class Line(NamedTuple):
    """A line of source."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """The source text of the line; empty if it is unavailable."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        """Return the function, the file and the number of the line."""
        if is_notebook_cell(self.file):
            return f"{self.function}, a notebook cell:{self.number}"
        # Files of gpulab and of the current folder are shown by their relative paths.
        path = Path(self.file)
        for folder in (Path(PACKAGE).parent, Path.cwd()):
            if path.is_relative_to(folder):
                path = path.relative_to(folder)
        return f"{self.function}, {path.as_posix()}:{self.number}"


@functools.cache
def is_user_file(file: str) -> bool:
    """Return whether a file is the user's: neither a part of the guard nor installed.

    The other files of gpulab, such as its models and training loops, count as the user's.
    """
    return not file.startswith((*GUARD_FILES, "<frozen")) and (
        file.startswith(PACKAGE) or not file.startswith(INSTALLED)
    )


def stack_frames(thread: int = 0) -> Iterator[types.FrameType]:
    """Yield the frames of this thread, the innermost first, and then those of another thread."""
    frame: types.FrameType | None
    for frame in (sys._getframe(), sys._current_frames().get(thread)):
        while frame is not None:
            yield frame
            frame = frame.f_back


def user_line(thread: int = 0) -> Line:
    """Return the innermost line of user code in this thread, or else in another given thread.

    If there is none, return the innermost line outside torch and the guard.
    """
    ignored = (*GUARD_FILES, TORCH)
    user_frames = (
        frame for frame in stack_frames(thread) if is_user_file(frame.f_code.co_filename)
    )
    outer_frames = (
        frame for frame in stack_frames(thread) if not frame.f_code.co_filename.startswith(ignored)
    )
    return next(
        map(line_of, itertools.chain(user_frames, outer_frames)), Line("<unknown>", 0, "<unknown>")
    )


def line_of(frame: types.FrameType) -> Line:
    """Return the line that a frame executes."""
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def innermost_line() -> str:
    """Return this thread's innermost line (`file:line: text`) in user code or a model of gpulab.

    It is empty if there is none inside the audited step.
    """
    frames = itertools.takewhile(
        lambda frame: frame.f_code.co_filename != STEP_CALLER_FILE, stack_frames()
    )
    return _first_reported_line((frame.f_code.co_filename, frame.f_lineno) for frame in frames)


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of an error's traceback in user code or in a model of gpulab.

    Returns:
        `file:line: text`; empty if there is no such line.

    >>> try:
    ...     torch.ones(2) @ torch.ones(3)
    ... except RuntimeError as error:
    ...     line_of_error(error).partition(":")[0]
    '<doctest gpulab.guards._call_sites.line_of_error[0]>'
    """
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    return _first_reported_line((frame.f_code.co_filename, number) for frame, number in frames)


def _first_reported_line(places: Iterable[tuple[str, int]]) -> str:
    """Return the first of several lines, by file and number, in user code or a model of gpulab."""
    for file, number in places:
        is_internal = file.startswith((TORCH + os.sep, PACKAGE, "<frozen", "<eval_with_key>"))
        if not is_internal or file.startswith(PACKAGE + "models"):
            name = "a notebook cell" if is_notebook_cell(file) else os.path.basename(file)
            return f"{name}:{number}: {linecache.getline(file, number).strip()}"
    return ""


def line_of_forward_call(traceback_text: str) -> str:
    r"""Return the innermost user line (`file:line: text`) of a traceback from anomaly detection.

    >>> line_of_forward_call('  File "train.py", line 7, in step\n    y = f(x)\n')
    'train.py:7: y = f(x)'
    """
    for file, number, text in reversed(
        re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n *([^\n]*)', traceback_text)
    ):
        if not file.startswith((TORCH + os.sep, PACKAGE, "<")) or file.startswith(
            PACKAGE + "models"
        ):
            name = "a notebook cell" if is_notebook_cell(file) else os.path.basename(file)
            return f"{name}:{number}: {text.strip()}"
    return ""


class OperationCallers:
    """Finds the caller of operations below autograd: the phase, the module and the user's line.

    For an operation of a backward pass, the module and the line are those of the forward operation
    that it differentiates.
    """

    def __init__(self) -> None:
        self.creators: dict[int, tuple[str, str]] = {}  # by autograd's number of a node

    def caller_of_operation(self, module: str = "") -> tuple[str, str, str]:
        """Return the phase, module and line (`file:line: text`) of the current operation.

        In a forward pass, it also records the module and the line for the later backward pass.
        """
        node = current_node()
        if node is not None:
            return "backward", *self.creators.get(node_number(node), ("", ""))
        line = innermost_line()
        # If this operation made a node of autograd's graph, it is the newest one. Otherwise the
        # newest node has been recorded before.
        self.creators.setdefault(newest_node_number(), (module, line))
        return "forward", module, line
