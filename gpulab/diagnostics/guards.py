"""A guard around a training step: nothing that autograd saved may be overwritten before it is used.

Autograd counts the in-place operations that torch itself does. It does not see NumPy writing into a
buffer that a tensor shares, a write through `.data`, or a loader that fills one buffer again and again:
`backward` then computes with whatever lies there, without a word. The guard takes a fingerprint of the
content of every tensor when it is saved and compares it when it is used.

Source: the hooks of `torch.autograd.graph.saved_tensors_hooks`. While they are in force torch skips its
own check of the version counter, so the guard does that as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import linecache
import os
import re
import sys
import sysconfig
import threading
import types
import warnings
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gpulab.errors import GpulabError, OverwrittenError, OverwrittenWarning, UsageError

TABLE = 1 << 16  # random numbers, one for each place in a row of words
CHUNK = 1 << 24  # words that are multiplied at a time: what bounds the memory for it
SCRATCH = (("running_mean", ("running_mean", "running_var")), ("noise", ("noise",)))
PACKAGE = str(Path(__file__).parent)
TORCH = str(Path(torch.__file__).parent)
INSTALLED = (TORCH, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))

_looking = threading.local()  # `.inside` while the guard itself reads what a node has saved


def guard(on: str = "raise") -> Guard:
    """A context manager that refuses tensors overwritten between their saving and `backward`.

    `on="raise"` raises `OverwrittenError` where the first one is about to be used, which ends
    `backward`. `on="warn"` collects into the object it yields, lets `backward` go on, and warns once
    at the end of the block. What is saved inside the block is checked, even when `backward` is called
    after it. A tensor that is overwritten but never used is no error, and the exit does not look for
    any. Gradients are the same bits with and without the guard.

    Raises `UsageError` for another `on`, and `GpulabError` where torch forbids its hooks (inside
    `torch.func.grad` and what is built on it).

    >>> buffer = np.ones(3, np.float32)
    >>> x = torch.ones(3, requires_grad=True)
    >>> with warnings.catch_warnings(action="ignore"), guard(on="warn") as report:
    ...     loss = (x * torch.from_numpy(buffer)).sum()
    ...     buffer[:] = 2  # the next frame arrives before backward
    ...     loss.backward()
    >>> report.findings[0].function, report.findings[0].cause, x.grad.tolist()
    ('mul', 'numpy', [2.0, 2.0, 2.0])
    """
    if on not in ("raise", "warn"):
        raise UsageError(f"on={on!r}: expected 'raise' or 'warn'")
    return Guard(on)


def _shown(file: str) -> str:
    """A path as its reader knows it: gpulab's own and those below the current folder without what is above."""
    for above in (Path(PACKAGE).parent, Path.cwd()):
        if Path(file).is_relative_to(above):
            return Path(file).relative_to(above).as_posix()
    return file


class Line(NamedTuple):
    """A line of source: `file`, `number`, `function` and `text`."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """The source of the line, empty where there is none."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.function}, {_shown(self.file)}:{self.number}"


@dataclass(frozen=True)
class Overwritten:
    """One finding: `operation` was about to use a tensor that had been overwritten since it was saved.

    `operation` is the name of autograd's node, `function` that of the forward function, `operand` which
    of its tensors (None where that is not known), `line` the user's line that saved it. `cause` is
    `numpy`, `foreign` (memory of another library), `shared` (a loader's shared memory), `data` (a write
    through `.data`), `replaced` (`.data` was assigned) or `inplace`; `explanation` says it in words with
    what the tensor shares memory with, `remedy` what to do. `count` is how many tensors this is true of.
    """

    operation: str
    function: str
    operand: str | None
    shape: tuple[int, ...]
    dtype: str
    device: str
    line: Line
    cause: str
    explanation: str
    remedy: str
    count: int = 1

    def __str__(self) -> str:
        operand = f"its `{self.operand}`" if self.operand else "a tensor"
        times = f" ({self.count} such tensors)" if self.count > 1 else ""
        source = f"\n      {self.line.text}" if self.line.text else ""
        return (
            f"the backward pass of {self.function} ({self.operation}) was given {operand}, {self.dtype} of shape "
            f"{self.shape} on {self.device}, overwritten since it was saved{times}\n"
            f"  saved by {self.line}{source}\n"
            f"  why: {self.explanation}\n"
            f"  do: {self.remedy}"
        )


class Guard:
    """What `guard` returns: a context manager, and a report that is true when something was found.

    `findings` has one `Overwritten` for each line and operation; `checked` counts the uses of saved
    tensors that were compared, `unchecked` those whose content torch does not give away (meta tensors,
    inside a transform such as vmap, while a CUDA graph is being captured).

    It may be entered again, and inside itself. torch's hooks belong to a thread: a graph that another
    thread builds is not seen. Of several pairs of hooks torch applies the innermost alone: inside
    `save_on_cpu` or a checkpointed function what is saved is theirs, and not seen either; and a guard
    inside `save_on_cpu` takes its place. On an accelerator the answers are read once, when `backward`
    ends, so the error comes then, before the optimizer's step, and the operand is not named.
    """

    def __init__(self, on: str = "raise") -> None:
        self.on = on
        self.checked = self.unchecked = 0
        self._found: dict[tuple[Line, str], Overwritten] = {}
        self._warned = 0
        self._lock = threading.Lock()
        self._threads: list[int] = []  # who is inside the block
        self._last_thread = threading.get_ident()
        self._names: dict[tuple[Line, tuple[int, int]], list[str]] = {}
        self._pending: dict[int, list[tuple[Tensor, _Facts, str, str]]] = {}

    @property
    def findings(self) -> list[Overwritten]:
        """What was found so far."""
        with self._lock:
            return list(self._found.values())

    def __bool__(self) -> bool:
        return bool(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __str__(self) -> str:
        findings = self.findings
        if not findings:
            return f"nothing was overwritten in {self.checked} uses of saved tensors"
        return "\n".join(str(finding) for finding in findings)

    def __repr__(self) -> str:
        return f"<guard on={self.on!r}: {len(self)} findings, {self.checked} checked, {self.unchecked} unchecked>"

    def __enter__(self) -> Guard:
        try:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        except RuntimeError as error:
            raise GpulabError(_forbidden(error)) from error
        self._last_thread = threading.get_ident()
        self._threads.append(self._last_thread)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._threads.remove(threading.get_ident())
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            raise GpulabError(_forbidden(error)) from error
        if not self._threads:
            self._names.clear()
            self._warn(stacklevel=2)

    def _pack(self, tensor: Tensor) -> _Saved:
        frame = _user_frame(sys._getframe(1)) or _user_frame(sys._current_frames().get(self._last_thread))
        saved = _Saved(tensor, _line(frame))
        if saved.foreign:
            saved.arrays = self._arrays(saved)
        return saved

    def _arrays(self, saved: _Saved) -> list[str]:
        """The NumPy arrays that the memory belongs to, while the loader that has filled them is still there."""
        key = (saved.line, _span(saved.tensor))
        if key not in self._names:
            self._names[key] = _holders(_facts(saved), self._last_thread)[0]
        return self._names[key]

    def _unpack(self, saved: _Saved) -> Tensor:
        if not getattr(_looking, "inside", False):
            self._check(saved, _current_node(sys._getframe().f_back))
        return saved.tensor

    def _check(self, saved: _Saved, node: Any) -> None:
        if saved.tensor._version != saved.version:
            self._found_one(_facts(saved), _name(node), _operand(node, saved.tensor), "inplace")
            return
        now = saved.current()
        digest = None if saved.digest is None else fingerprint(now)
        with self._lock:
            self.checked += digest is not None
            self.unchecked += digest is None
        if digest is None or (not isinstance(digest, Tensor) and digest == saved.digest):
            return
        if _is_scratch(node, saved.tensor):
            return
        cause = "data" if now is saved.tensor else "replaced"
        if isinstance(digest, Tensor):
            self._compare_later(saved, node, cause, digest)
        else:
            self._found_one(_facts(saved), _name(node), _operand(node, saved.tensor), cause)

    def _compare_later(self, saved: _Saved, node: Any, cause: str, digest: Tensor) -> None:
        """On an accelerator: compare there, and look at the answers once, when `backward` ends."""
        differs = torch.ne(digest, saved.digest)  # type: ignore[arg-type]  # both were taken on this device
        task = torch._C._current_graph_task_id()
        if task < 0:  # somebody looks at what a node has saved, outside of backward
            if differs.item():
                self._found_one(_facts(saved), _name(node), _operand(node, saved.tensor), cause)
            return
        with self._lock:
            first = task not in self._pending
            self._pending.setdefault(task, []).append((differs, _facts(saved), _name(node), cause))
        if first:
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._settle, task))

    def _settle(self, task: int) -> None:
        with self._lock:
            pending = self._pending.pop(task, [])
        for device in {differs.device for differs, *_ in pending}:
            here = [entry for entry in pending if entry[0].device == device]
            answers = torch.stack([differs for differs, *_ in here]).tolist()
            for answer, (_, facts, name, cause) in zip(answers, here, strict=True):
                if answer:
                    self._found_one(facts, name, None, cause)

    def _found_one(self, facts: _Facts, operation: str, operand: str | None, cause: str) -> None:
        key = (facts.line, operation)
        with self._lock:
            known = self._found.get(key)
            if known is not None:
                self._found[key] = replace(known, count=known.count + 1)
        if known is None:
            known = _describe(facts, operation, operand, cause, self._last_thread)
            with self._lock:
                self._found[key] = known
        if self.on == "raise":
            self._pending.pop(torch._C._current_graph_task_id(), None)  # this backward ends here
            raise OverwrittenError(known)
        if not self._threads:
            self._warn(stacklevel=2)

    def _warn(self, stacklevel: int) -> None:
        """Warn once of what has been found since the last warning."""
        findings = self.findings[self._warned :]
        self._warned += len(findings)
        if findings and self.on == "warn":
            text = "\n".join(str(finding) for finding in findings)
            warnings.warn(text, OverwrittenWarning, stacklevel=stacklevel + 1)


class _Saved:
    """What autograd keeps in place of a tensor."""

    __slots__ = ("arrays", "digest", "foreign", "line", "original", "tensor", "version")

    def __init__(self, tensor: Tensor, line: Line) -> None:
        # Detached: an operation that keeps its own output would otherwise keep itself alive for ever.
        self.tensor: Tensor = tensor.detach()
        self.version = self.tensor._version
        # Without a guard a leaf is kept itself, and sees what is assigned to its `.data`.
        self.original = weakref.ref(tensor) if tensor.is_leaf else None
        self.line = line
        self.digest = fingerprint(self.tensor)
        self.foreign = self._is_plain() and not self.tensor.untyped_storage().resizable()
        self.arrays: list[str] = []

    def _is_plain(self) -> bool:
        tensor = self.tensor
        return self.digest is not None and type(tensor) is Tensor and tensor.layout == torch.strided

    def current(self) -> Tensor:
        """What autograd would use if there were no guard."""
        original = None if self.original is None else self.original()
        if original is None or not self._is_plain():
            return self.tensor
        return self.tensor if original.data_ptr() == self.tensor.data_ptr() else original.detach()


class _Facts(NamedTuple):
    """What a finding says of a saved tensor, without keeping its content alive."""

    line: Line
    shape: tuple[int, ...]
    dtype: str
    device: str
    span: tuple[int, int]
    foreign: bool
    shared: bool
    versions: tuple[int, int]
    arrays: list[str]


def _facts(saved: _Saved) -> _Facts:
    tensor, plain = saved.tensor, saved._is_plain()
    return _Facts(
        saved.line,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
        _span(tensor) if plain else (0, 0),
        saved.foreign,
        plain and tensor.device.type == "cpu" and tensor.is_shared(),
        (saved.version, tensor._version),
        saved.arrays,
    )


# --- fingerprints ----------------------------------------------------------------------------------------


def fingerprint(tensor: Tensor) -> int | Tensor | None:
    """A number that stands for the content of a tensor, bit by bit and place by place.

    On a CPU a whole number, the CRC-32 of the tensor's memory. On another device an int64 tensor of no
    dimensions that stays there, so that nobody has to wait for it: the sum of the 32-bit words, each
    times a random 64-bit number of its place, modulo 2^64. Two contents share a fingerprint by accident
    with a probability of about 2^-32. Memory that is dense is read where it lies, in any order of
    dimensions; a view with gaps is copied. None where torch gives no content away.

    Source: Carter, Wegman 1979, Universal classes of hash functions.

    >>> x = torch.arange(6.0)
    >>> fingerprint(x) == fingerprint(x.clone()), fingerprint(x) == fingerprint(x.flip(0))
    (True, False)
    """
    parts = _parts(tensor.detach())
    if not parts:
        return None
    if all(part.device.type == "cpu" for part in parts):
        return functools.reduce(_checksum, parts, 0)
    digests = [_digest(part) for part in parts]
    return functools.reduce(lambda so_far, digest: so_far * 0x5851F42D4C957F2D + digest, digests)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The ordinary tensors that a tensor consists of; none if its content cannot be seen."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.device.type == "meta" or _capturing(tensor):
        return []
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    if type(tensor) is not Tensor:
        tensor = tensor.as_subclass(Tensor)
        if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):  # a FakeTensor and its like
            return []
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout != torch.strided or tensor.is_nested:
        return []
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.is_conj():  # a flag, with the memory as it was; taking it off copies nothing
        tensor = tensor.conj()
    return [torch._neg_view(tensor) if tensor.is_neg() else tensor]


def _capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, when nobody may wait for an answer."""
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _flat(tensor: Tensor) -> Tensor:
    """The elements in the order in which they lie in memory, each once; a copy only if there are gaps."""
    if not tensor.is_contiguous():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim])).contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def _checksum(so_far: int, tensor: Tensor) -> int:
    flat = _flat(tensor)
    return zlib.crc32(memory(flat), so_far) if flat.numel() else so_far


def memory(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a contiguous tensor on a CPU, where they lie; the tensor must outlive them."""
    # Not through .numpy(), after which torch would refuse to resize the tensor.
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())


def _digest(tensor: Tensor) -> Tensor:
    flat = _flat(tensor)
    words = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    # Few and small kernels: on a GPU it is their launching that costs.
    digests = [_chunk_digest(chunk, _table(str(words.device))) for chunk in words.split(CHUNK)] or [words.sum()]
    return functools.reduce(lambda so_far, digest: so_far * 0x5851F42D4C957F2D + digest, digests)


def _chunk_digest(words: Tensor, table: Tensor) -> Tensor:
    whole = len(words) // TABLE
    if whole == 0:
        return (words * table[: len(words)]).sum()
    rows, rest = words[: whole * TABLE].view(whole, TABLE), words[whole * TABLE :]
    digest = ((rows * table).sum(1) * table[-whole:]).sum()
    return digest * 0x2545F4914F6CDD1D + (rest * table[: len(rest)]).sum() if len(rest) else digest


@functools.cache
def _table(device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # the user's random numbers are left alone
    return torch.randint(-(1 << 63), (1 << 63) - 1, (TABLE,), generator=generator).to(device)


# --- what a finding says -----------------------------------------------------------------------------------


def _describe(facts: _Facts, operation: str, operand: str | None, cause: str, thread: int) -> Overwritten:
    arrays, tensors = _holders(facts, thread)
    arrays = facts.arrays or arrays
    if cause == "data" and arrays:
        cause = "numpy"
    elif cause == "data" and facts.shared:
        cause = "shared"
    elif cause == "data" and facts.foreign:
        cause = "foreign"
    sharing = "; ".join(arrays or tensors)
    sharing = f"it shares memory with {sharing}" if sharing else ""
    name = arrays[0].split("`")[1] if arrays else "array"
    explanation, remedy = {
        "inplace": (
            f"an in-place operation changed it (version {facts.versions[0]} when saved, {facts.versions[1]} now)",
            "use the operation that is not in place, or give autograd a copy: .clone()",
        ),
        "replaced": ("other values were assigned to its `.data`", "assign to it after backward"),
        "numpy": ("NumPy wrote into its memory", f"copy it: torch.tensor({name}) or torch.as_tensor({name}.copy())"),
        "shared": (
            "it lies in shared memory, such as a loader's buffer that is filled again and again",
            "copy each batch as it arrives: batch.clone()",
        ),
        "foreign": (
            "it lies in memory that torch does not own, such as the buffer of a NumPy array or of another library",
            "copy it as it arrives: .clone(), or torch.tensor(array)",
        ),
        "data": (
            "something wrote into its memory that autograd does not see: through .data or .numpy(), or a loader "
            "that fills one buffer again and again",
            "copy it before it is overwritten: .clone()",
        ),
    }[cause]
    explanation += f"; {sharing}" if sharing else ""
    function = _function(operation)
    return Overwritten(
        operation, function, operand, facts.shape, facts.dtype, facts.device, facts.line, cause, explanation, remedy
    )


def _current_node(caller: types.FrameType | None) -> Any:
    """The operation whose backward pass uses a saved tensor; None for a recomputation, and outside of backward."""
    node = torch._C._current_autograd_node()
    recomputing = caller is not None and caller.f_code.co_filename == torch.utils.checkpoint.__file__
    return None if recomputing and not isinstance(node, torch.autograd.function.BackwardCFunction) else node


def _name(node: Any) -> str:
    if node is None:
        return "recomputation" if torch._C._current_graph_task_id() >= 0 else "no operation"
    return node.name()


def _function(operation: str) -> str:
    """`mse_loss` for `MseLossBackward0`; the class itself for a `torch.autograd.Function`."""
    if not re.search(r"Backward\d+$", operation):
        return operation.removesuffix("Backward")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"Backward\d+$", "", operation)).lower()


def _kept(node: Any, attributes: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a node has saved, by name."""
    _looking.inside = True
    try:
        for attribute in attributes:
            if attribute.startswith("_saved_"):
                with contextlib.suppress(RuntimeError):
                    value = getattr(node, attribute)
                    if isinstance(value, Tensor):
                        yield attribute.removeprefix("_saved_"), value
    finally:
        _looking.inside = False


def _operand(node: Any, tensor: Tensor) -> str | None:
    if tensor.layout != torch.strided or tensor.device.type == "meta" or type(tensor) is not Tensor:
        return None
    same = [
        name
        for name, kept in _kept(node, dir(node))
        if kept.shape == tensor.shape and kept.data_ptr() == tensor.data_ptr()
    ]
    return same[0] if same else None


def _is_scratch(node: Any, tensor: Tensor) -> bool:
    """Whether the operation itself writes there after saving, as its backward pass expects.

    Batch normalisation in training moves its running mean and variance, and its backward pass never uses
    them; a randomised leaky ReLU keeps the tensor that it is about to fill with its noise.
    """
    written = next((names for name, names in SCRATCH if hasattr(type(node), f"_saved_{name}")), ())
    if not written or not getattr(node, "_saved_training", False):
        return False
    return any(kept.data_ptr() == tensor.data_ptr() for _, kept in _kept(node, [f"_saved_{name}" for name in written]))


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor's memory and the one after its last."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@functools.cache
def _is_users(file: str) -> bool:
    """Whether a file is neither the guard nor installed; gpulab's own models and loops count as a user's."""
    if file == __file__ or file.startswith("<frozen"):
        return False
    return file.startswith(PACKAGE + os.sep) or not file.startswith(INSTALLED)


def _user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost frame of the user; if there is none, the innermost outside torch."""
    outside_torch = None
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users(file):
            return frame
        if outside_torch is None and file != __file__ and not file.startswith(TORCH):
            outside_torch = frame
        frame = frame.f_back
    return outside_torch


def _line(frame: types.FrameType | None) -> Line:
    if frame is None:
        return Line("<unknown>", 0, "<unknown>")
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _holders(facts: _Facts, thread: int) -> tuple[list[str], list[str]]:
    """Up to three NumPy arrays, and up to three tensors, in reach of the user's frames that share the memory."""
    arrays: dict[str, None] = {}
    tensors: dict[str, None] = {}
    low, high = facts.span
    seen: set[int] = set()
    for where, name, value in _variables(thread) if high else ():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            first, after = np.lib.array_utils.byte_bounds(value)
            if facts.device == "cpu" and first < high and low < after:
                arrays[f"the NumPy array `{name}` ({value.dtype}, shape {value.shape}) in {where}"] = None
        elif str(value.device) == facts.device:
            first, after = _span(value)
            if first < high and low < after:
                tensors[f"the tensor `{name}` (shape {tuple(value.shape)}) in {where}"] = None
    return list(arrays)[:3], list(tensors)[:3]


def _variables(thread: int) -> Iterator[tuple[str, str, Any]]:
    """(where, name, value) of the arrays and tensors that the user's frames reach, the innermost frame first."""
    for start in (sys._getframe(), sys._current_frames().get(thread)):
        frame = start
        while frame is not None:
            if _is_users(frame.f_code.co_filename):
                where = str(_line(frame))
                yield from _inside(where, dict(frame.f_locals))
                for name, value in list(frame.f_globals.items()):
                    if _is_data(value):
                        yield f"the globals of {frame.f_code.co_filename}", name, value
            frame = frame.f_back
    yield from _generators()


def _generators() -> Iterator[tuple[str, str, Any]]:
    """The variables of suspended generators: a loader that a `for` loop draws from has no name there."""
    for held in gc.get_objects():
        if type(held) is types.GeneratorType and held.gi_suspended and _is_users(held.gi_code.co_filename):
            yield from _inside(str(_line(held.gi_frame)), dict(held.gi_frame.f_locals))  # type: ignore[union-attr]


def _inside(where: str, variables: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Arrays and tensors among variables, and one level down: in containers, and attributes of objects."""
    for name, value in variables.items():
        if _is_data(value):
            yield where, name, value
        elif isinstance(value, list | tuple) and len(value) <= 1000:
            yield from ((where, f"{name}[{place}]", part) for place, part in enumerate(value) if _is_data(part))
        elif isinstance(value, dict) and len(value) <= 1000:
            yield from ((where, f"{name}[{key!r}]", part) for key, part in list(value.items()) if _is_data(part))
        elif not isinstance(value, types.ModuleType | type) and isinstance(getattr(value, "__dict__", None), dict):
            yield from ((where, f"{name}.{key}", part) for key, part in list(vars(value).items()) if _is_data(part))


def _is_data(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return True
    plain = type(value) in (Tensor, torch.nn.Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    return plain and value.layout == torch.strided and value.device.type != "meta"


def _forbidden(error: RuntimeError) -> str:
    return (
        f"the guard needs torch's hooks for saved tensors, and torch forbids them here ({error}). "
        f"Put the guard around code that calls backward, not around torch.func transforms"
    )
