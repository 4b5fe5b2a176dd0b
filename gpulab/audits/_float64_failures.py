"""Find out why a step cannot run in float64: the line and module that request a shorter format.

Under a setting with `precision=float64`, parameters, inputs and torch's default type are float64. A
tensor in a shorter format then exists only if the step requests it, for example by `x.float()` or
`torch.zeros(3, dtype=torch.float32)`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpulab._torch_internals import Nested, WeakTensorKeyDictionary, tree_leaves
from gpulab.guards._call_sites import PACKAGE, TORCH, Line, is_notebook_cell

BELOW_FLOAT64_DTYPES = (torch.float32, torch.complex64, torch.float16, torch.bfloat16)
MODELS_DIR = os.path.join(PACKAGE, "models")


class Request(NamedTuple):
    """A place where a step requests a short format, or uses a tensor that already has one.

    Attributes:
        dtype: The short format.
        line: The user's line, as `file:line: text`; empty if only code of torch is involved.
        module: The path of the module, or the class of the whole model.
        is_made: Whether the step creates the tensor. If not, the tensor existed before.

    >>> print(
    ...     Request(torch.float32, "net.py:12: return self.head(x.float())", "head", is_made=True)
    ... )
    net.py:12: return self.head(x.float()) (in head) requests float32
    >>> print(Request(torch.float32, "", "head", is_made=False))
    head uses a float32 tensor that was made before the step
    """

    dtype: torch.dtype
    line: str
    module: str
    is_made: bool

    def __str__(self) -> str:
        """Return the line, the module and the request as a clause."""
        if self.line and self.module:
            location = f"{self.line} (in {self.module})"
        else:
            location = self.line or self.module
        format_name = str(self.dtype).removeprefix("torch.")
        does = (
            f"requests {format_name}"
            if self.is_made
            else f"uses a {format_name} tensor that was made before the step"
        )
        return f"{location or 'the step'} {does}"


class ShortFormatRequests(TorchFunctionMode):
    """Record the requests for short formats while a step runs in float64.

    Args:
        model: The model, which provides the names of its modules.
        calling_file: The file that calls the model. Only frames inside this call are searched.

    Attributes:
        requests: All requests, in the order in which they were made.
        failed_input_requests: The requests that led to the inputs of the operation that failed.
    """

    def __init__(self, model: nn.Module, calling_file: str) -> None:
        super().__init__()
        self.names = {
            id(module): name or type(module).__name__ for name, module in model.named_modules()
        }
        self.calling_file = calling_file
        self.requests: list[Request] = []
        self.failed_input_requests: list[Request] = []
        self.request_of_tensor = WeakTensorKeyDictionary()

    def __torch_function__(
        self,
        function: Callable[..., Nested],
        types: Sequence[type],
        args: Sequence[Nested] = (),
        kwargs: Mapping[str, Nested] | None = None,
    ) -> Nested:
        """Call an operation, and record the requests that led to its results in short formats.

        If the operation fails, the requests that led to its inputs are recorded as the likely
        cause.
        """
        inputs = [
            self._request_of(tensor, is_made=False) for tensor in _short_tensors((args, kwargs))
        ]
        try:
            output = function(*args, **(kwargs or {}))
        except Exception:
            if not self.failed_input_requests:
                self.failed_input_requests = inputs
            raise
        for tensor in _short_tensors(output):
            self._request_of(tensor, inputs)
        return output

    @property
    def most_likely(self) -> Request | None:
        """The request that most likely made the step fail; None if there was no request."""
        return next(iter([*self.failed_input_requests, *self.requests]), None)

    def _request_of(
        self, tensor: Tensor, inputs: Sequence[Request] = (), is_made: bool = True
    ) -> Request:
        """Return the request that led to a tensor in a short format.

        This is the request for the first such input, or else a new request for the current line.
        """
        if tensor not in self.request_of_tensor:
            self.request_of_tensor[tensor] = (
                inputs[0] if inputs else self._new_request(tensor, is_made)
            )
        request: Request = self.request_of_tensor[tensor]
        return request

    def _new_request(self, tensor: Tensor, is_made: bool) -> Request:
        """Record a request for the format of a tensor at the current line."""
        frames = _frames_inside(self.calling_file)
        owners = (self.names.get(id(frame.f_locals.get("self"))) for frame in frames)
        lines = (Line(frame.f_code.co_filename, frame.f_lineno, "") for frame in frames)
        request = Request(
            tensor.dtype, _innermost_line(lines), next(filter(None, owners), ""), is_made
        )
        self.requests.append(request)
        return request


def line_of_error(error: BaseException) -> str:
    """Return the innermost user line of an error's traceback, as `file:line: text`, or empty."""
    lines: list[Line] = []
    traceback = error.__traceback__
    while traceback is not None:
        lines.append(Line(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno, ""))
        traceback = traceback.tb_next
    return _innermost_line(reversed(lines))


def _short_tensors(values: Nested) -> list[Tensor]:
    """Return the tensors in formats shorter than float64 among nested values."""
    return [
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.dtype in BELOW_FLOAT64_DTYPES
    ]


def _frames_inside(calling_file: str) -> list[FrameType]:
    """Return the frames of this thread from the innermost one to the first one of a file."""
    frames: list[FrameType] = []
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != calling_file:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return frames


def _innermost_line(lines: Iterable[Line]) -> str:
    """Return the first line outside torch and gpulab; gpulab's models count as outside."""
    for line in lines:
        if not line.file.startswith((TORCH + os.sep, PACKAGE, "<")) or line.file.startswith(
            MODELS_DIR
        ):
            name = "a notebook cell" if is_notebook_cell(line.file) else Path(line.file).name
            return f"{name}:{line.number}: {line.text}"
    return ""
