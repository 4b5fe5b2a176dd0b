"""Who holds a piece of memory: the variables of the user's frames that share it, and the line that is at work."""

from __future__ import annotations

import functools
import gc
import itertools
import linecache
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

PACKAGE = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent)
INSTALLED = (TORCH, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
OWN = str(Path(__file__).parent) + os.sep  # the guard, which is nobody's
Span = tuple[int, int]  # the first address of a piece of memory and the one after its last


class Line(NamedTuple):
    """A line of source."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """The source of the line, empty where there is none."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        shown = Path(self.file)  # gpulab's files and those below the current folder without what is above
        for folder in (Path(PACKAGE).parent, Path.cwd()):
            if shown.is_relative_to(folder):
                shown = shown.relative_to(folder)
        return f"{self.function}, {shown.as_posix()}:{self.number}"


def is_plain(tensor: Any) -> bool:
    """Whether something is a tensor and memory, no more: of no subclass, sparse, nested, meta, or in a transform."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_nested


def span_of(tensor: Any) -> Span:
    """The memory from the first to the last element of a tensor that is plain; else none, which nothing overlaps."""
    if not is_plain(tensor) or tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@functools.cache
def _is_users(file: str) -> bool:
    """Whether a file is neither the guard nor installed; gpulab's own models and loops count as a user's."""
    return not file.startswith((OWN, "<frozen")) and (file.startswith(PACKAGE) or not file.startswith(INSTALLED))


def _frames(thread: int = 0) -> Iterator[types.FrameType]:
    """The frames of this thread, the innermost first, and then those of another thread."""
    frame: types.FrameType | None
    for frame in (sys._getframe(), sys._current_frames().get(thread)):
        while frame is not None:
            yield frame
            frame = frame.f_back


def user_line(thread: int = 0) -> Line:
    """The user's line that is at work in this thread, or else in another; if there is none, the line outside torch."""
    for frame in _frames(thread):
        if _is_users(frame.f_code.co_filename):
            return line_of(frame)
    others = (frame for frame in _frames(thread) if not frame.f_code.co_filename.startswith((OWN, TORCH)))
    return next(map(line_of, others), Line("<unknown>", 0, "<unknown>"))


def line_of(frame: types.FrameType) -> Line:
    """The line at which a frame is."""
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


class Holder(NamedTuple):
    """A variable that shares the memory: in words, and by name if it is a NumPy array."""

    array: str
    words: str
    span: Span


def nearest_holder(span: Span, thread: int) -> Holder | None:
    """The user's nearest NumPy array that shares this memory; without one, the nearest tensor."""
    nearest_tensor = None
    for frame, name, value in _variables(thread) if span[1] else ():
        array = name if isinstance(value, np.ndarray) else ""
        value_span = np.lib.array_utils.byte_bounds(value) if array else span_of(value)
        if overlap(value_span, span):
            kind = "NumPy array" if array else "tensor"
            words = f"the {kind} `{name}` ({value.dtype}, shape {tuple(value.shape)}) in {line_of(frame)}"
            holder = Holder(array, words, value_span)
            if array:
                return holder
            nearest_tensor = nearest_tensor or holder
    return nearest_tensor


def overlap(first: Span, second: Span) -> bool:
    """Whether two pieces of memory have an address in common."""
    return first[0] < second[1] and second[0] < first[1]


def _variables(thread: int) -> Iterator[tuple[types.FrameType, str, Any]]:
    """(frame, name, value) of what the user's frames reach, the innermost first, and one level down in it."""
    for frame in itertools.chain(_frames(thread), _suspended_frames()):
        if not _is_users(frame.f_code.co_filename):
            continue
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            yield frame, name, value
            if isinstance(value, list | tuple):
                yield from ((frame, f"{name}[{index}]", item) for index, item in enumerate(value[:1000]))
            elif not isinstance(value, types.ModuleType | type) and isinstance(getattr(value, "__dict__", None), dict):
                yield from ((frame, f"{name}.{key}", item) for key, item in list(vars(value).items()))


def _suspended_frames() -> Iterator[types.FrameType]:
    """The frames of suspended generators: a loader that a `for` loop draws from has no name in any other frame."""
    generators = (thing for thing in gc.get_objects() if type(thing) is types.GeneratorType)
    yield from (generator.gi_frame for generator in generators if generator.gi_suspended)  # type: ignore[misc]
