"""A piece of memory: who holds it, which line is at work on it, and a number that stands for its content.

Who holds it are the variables of the user's frames that share it. The number, a fingerprint, changes with the content.
Last comes what keeps the guard's own work apart: it is no operation of the user's, and nothing for TorchDynamo to
compile.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import linecache
import math
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PACKAGE = str(Path(__file__).parents[1]) + os.sep
TORCH = str(Path(torch.__file__).parent)
INSTALLED = (TORCH, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
OWN = str(Path(__file__).parent) + os.sep  # the guard, which is nobody's
OUTSIDE = os.path.join(PACKAGE, "audits", "recording.py")  # what calls an audited step is none of its lines
Span = tuple[int, int]  # the first address of a piece of memory and the one after its last


def is_notebook_cell(file: str) -> bool:
    """Whether a file of source is a notebook's cell, to which a kernel gives the name of a temporary file.

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
        """The source of the line, empty where there is none."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        if is_notebook_cell(self.file):
            return f"{self.function}, a notebook cell:{self.number}"
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
    users = (frame for frame in _frames(thread) if _is_users(frame.f_code.co_filename))
    others = (frame for frame in _frames(thread) if not frame.f_code.co_filename.startswith((OWN, TORCH)))
    return next(map(line_of, itertools.chain(users, others)), Line("<unknown>", 0, "<unknown>"))


def line_of(frame: types.FrameType) -> Line:
    """The line at which a frame is."""
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def innermost_line() -> str:
    """The innermost line of this thread that is neither torch's nor gpulab's, its models apart: `file:line: text`."""
    for frame in itertools.takewhile(lambda frame: frame.f_code.co_filename != OUTSIDE, _frames()):
        file = frame.f_code.co_filename
        if not file.startswith((TORCH + os.sep, PACKAGE, "<eval_with_key>")) or file.startswith(PACKAGE + "models"):
            name = "a notebook cell" if is_notebook_cell(file) else os.path.basename(file)
            return f"{name}:{frame.f_lineno}: {line_of(frame).text}"
    return ""


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
        line = innermost_line()
        # The newest node is this operation's, if it has one; else it is known already.
        self.made_by.setdefault(torch.autograd._get_sequence_nr() - 1, (module, line))
        return "forward", module, line


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


TABLE = 1 << 16  # random numbers, one for each place in a row of words
SPARSE: dict[torch.layout, tuple[str, ...]] = {  # the methods that give a layout's parts
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
NARROWEST = 1 << 6  # words in a row; a tensor that would have shorter ones is filled up with zeros
CHUNK = 1 << 24  # words that are multiplied at a time: what bounds the memory for it
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by their bytes: the widest that a tensor consists of
FEW = 1 << 12  # numbers that are brought from a GPU to be hashed


def fingerprint(tensor: Tensor) -> int | Tensor | None:
    """A number that stands for the content of a tensor, bit by bit and place by place.

    On a CPU it is the XXH3 hash of the tensor's memory. On another device it is the sum of the 32-bit words, each times
    a random 64-bit number of its place, modulo 2^64; of a large tensor each row has such a sum, and then the sums have
    one. Two contents share a fingerprint by accident with a probability of about 2^-32. Dense memory is read where it
    lies; a view with gaps is copied.

    Args:
        tensor: of any shape, type and layout.

    Returns:
        On a CPU a whole number; elsewhere an int64 tensor () that stays there, so that nobody has to wait for it;
        None where torch gives no content away.

    Examples:
        >>> x = torch.arange(6.0)
        >>> fingerprint(x) == fingerprint(x.clone()), fingerprint(x) == fingerprint(x.flip(0))
        (True, False)

    References:
        Carter, Wegman 1979, *Universal classes of hash functions*.
    """
    ordinary = component_tensors(tensor.detach())
    if not ordinary:
        return None
    with torch._C._DisableTorchDispatch():  # nobody who watches operations is to see these
        if any(component.device.type != "cpu" for component in ordinary):
            digests = [_digest(component) for component in ordinary]
            return digests[0] if len(digests) == 1 else _digest(torch.stack(digests))
        hashed = xxhash.xxh3_64()
        for flat in map(_flat, ordinary):
            hashed.update(memory(flat.data_ptr(), flat.data_ptr() + flat.nbytes))
        return hashed.intdigest()


def component_tensors(tensor: Tensor) -> list[Tensor]:
    """The ordinary tensors that a tensor consists of; none if its content cannot be seen."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.device.type == "meta":
        return []
    if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # when nobody may wait for it
        return []
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [component for name in names for component in component_tensors(getattr(tensor, name))]
    if type(tensor) is not Tensor:
        tensor = tensor.as_subclass(Tensor)
        if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):  # a FakeTensor and its like
            return []
    if methods := SPARSE.get(tensor.layout):
        return [getattr(tensor, method)() for method in methods]
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return []
    if tensor.is_conj():  # a flag, with the memory as it was; taking it off copies nothing
        tensor = tensor.conj()
    return [torch._neg_view(tensor) if tensor.is_neg() else tensor]


def _flat(tensor: Tensor) -> Tensor:
    """The elements in the order in which they lie in memory, each once; a copy only if there are gaps.

    >>> _flat(torch.arange(6).reshape(2, 3).T).tolist(), _flat(torch.ones(1, 1).expand(4, 1)).tolist()
    ([0, 1, 2, 3, 4, 5], [1.0])
    """
    if not tensor.is_contiguous():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim])).contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def memory(begin: int, end: int) -> ctypes.Array[ctypes.c_char]:
    """The host's memory from one address to before another, as it is whenever it is read."""
    # Not through .numpy(), after which torch would refuse to resize the tensor.
    return (ctypes.c_char * (end - begin)).from_address(begin)


def memory_digest(begin: int, end: int) -> int:
    """A number of 64 bits that stands for what lies in the host's memory from one address to before another."""
    return xxhash.xxh3_64_intdigest(memory(begin, end))


def content(tensor: Tensor) -> int:
    """A number of 64 bits that stands for the content of an ordinary tensor.

    A large tensor has one on a CPU and another on a GPU, where it is not worth to be brought from.

    >>> content(torch.arange(3.0)), content(torch.arange(2**24 + 1))  # which the names of recorded values come from
    (7541795801147682588, 12559343085713087326)
    """
    ordered = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return int(fingerprint(ordered if ordered.numel() > FEW else ordered.cpu()))  # type: ignore[arg-type]


def _digest(tensor: Tensor, level: int = 0) -> Tensor:
    """Few kernels: on a GPU it is their launching that costs."""
    flat = _flat(tensor)
    size = flat.element_size()
    words = flat.view(WORDS[math.gcd(4, size * len(flat), size * flat.storage_offset())])
    table = _table(str(words.device), level)
    if len(words) <= TABLE:
        return (words * table[: len(words)]).sum()
    if len(words) > CHUNK:
        return _digest(torch.stack([_digest(chunk, level) for chunk in words.split(CHUNK)]), level + 2)
    width = min(len(words) & -len(words), TABLE)  # the largest power of two that leaves no rest
    if width < NARROWEST:
        words, width = torch.nn.functional.pad(words, (0, -len(words) % TABLE)), TABLE
    return _digest((words.view(-1, width) * table[:width]).sum(1), level + 1)


@functools.cache
def _table(device: str, level: int) -> Tensor:
    generator = torch.Generator().manual_seed(level)  # the user's random numbers are left alone
    return torch.randint(-(1 << 63), (1 << 63) - 1, (TABLE,), generator=generator).to(device)
