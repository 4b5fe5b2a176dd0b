"""The search for variables of the user's program that share a piece of memory."""

from __future__ import annotations

import gc
import itertools
import types
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gpulab._torch_internals import Nested, Span, span_of
from gpulab.guards._call_sites import is_user_file, line_of, stack_frames


class Holder(NamedTuple):
    """A variable of the user's program that shares a piece of memory."""

    array: str  # the name of the variable if it is a NumPy array, otherwise empty
    words: str  # a description for messages
    span: Span  # the memory of the variable's value


def nearest_holder(span: Span, thread: int) -> Holder | None:
    """Return the user's nearest NumPy array over this memory, or else the nearest tensor.

    The nearest variable is the one in the innermost frame. Memory at address 0 has no holder.
    """
    _, end = span
    if not end:
        return None
    nearest_tensor = None
    for frame, name, value in _variables(thread):
        array = name if isinstance(value, np.ndarray) else ""
        value_span = np.lib.array_utils.byte_bounds(value) if array else span_of(value)
        if spans_overlap(value_span, span):
            kind = "NumPy array" if array else "tensor"
            words = (
                f"the {kind} `{name}` ({value.dtype}, shape {tuple(value.shape)}) in"
                f" {line_of(frame)}"
            )
            holder = Holder(array, words, value_span)
            if array:
                return holder
            if nearest_tensor is None:
                nearest_tensor = holder
    return nearest_tensor


def spans_overlap(first: Span, second: Span) -> bool:
    """Return whether two pieces of memory have an address in common."""
    return first[0] < second[1] and second[0] < first[1]


def _variables(thread: int) -> Iterator[tuple[types.FrameType, str, Nested]]:
    """Yield (frame, name, value) of the user's variables, those of the innermost frame first.

    The items of lists and tuples (the first 1,000), and attributes of objects, are variables too.
    """
    for frame in itertools.chain(stack_frames(thread), _suspended_frames()):
        if not is_user_file(frame.f_code.co_filename):
            continue
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            yield frame, name, value
            if isinstance(value, list | tuple):
                yield from (
                    (frame, f"{name}[{index}]", item) for index, item in enumerate(value[:1000])
                )
            elif not isinstance(value, types.ModuleType | type) and isinstance(
                getattr(value, "__dict__", None), dict
            ):
                yield from (
                    (frame, f"{name}.{key}", item) for key, item in list(vars(value).items())
                )


def _suspended_frames() -> Iterator[types.FrameType]:
    """Yield the frames of suspended generators, such as a data loader inside a `for` loop."""
    generators = (value for value in gc.get_objects() if type(value) is types.GeneratorType)
    yield from (generator.gi_frame for generator in generators if generator.gi_suspended)  # type: ignore[misc]
