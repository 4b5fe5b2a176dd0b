"""One training step, operation by operation: what each computed, how exactly, and for whom.

A trace is a file of its own: two laboratories record the same step, each on its card, and compare.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import linecache
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gpulab.diagnostics import trace_files
from gpulab.diagnostics.fingerprints import memory
from gpulab.diagnostics.guards import guard
from gpulab.diagnostics.reference import forward_error
from gpulab.diagnostics.steps import ready
from gpulab.errors import DataError, OverwrittenWarning, UsageError
from gpulab.passports import passport
from gpulab.settings import Setting, arithmetic

SKETCH = 64  # how many numbers stand for a tensor: distances between sketches are right to about a fifth
IN_FULL = 64  # a tensor of up to so many numbers is kept as it is
EXACT = "cpu:precision=float64"
SEED = 0  # torch's random numbers begin here in every execution of a step

OVERWRITES = {"copy", "fill", "zero"}  # in place, whatever was there before; so does every random draw
# What computes nothing: changes of shape, and memory that has not been written yet.
SILENT = {"detach", "alias", "set"}
EMPTY = ("empty", "new_empty")
TORCH, GPULAB = os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[1]) + os.sep
OVERWRITTEN = {"operation", "line", "why", "remedy"}


@dataclass
class Operation:
    """What one operation did.

    `name` is torch's, without device or overload; `module` the path of the module that called it
    (for the backward pass: that called what is differentiated); `line` the line of the user's code;
    `inputs`, `outputs` and `changed` (inputs that it wrote to) name values of the trace. `arguments`
    are those of the call by the names of torch's schema, as JSON has them (a tensor is "Tensor"), and
    `defaults` stand for the others. `error` is its own error against float64 from the same inputs,
    `bound` what rounding explains, both relative to the exact result; `format` the short number format
    that a product was computed in. `steady` says whether the operation gave the same bits when it was
    called again at once, `repeats` whether it did so, and in the whole step done again as well. `nans`
    says whether there is a NaN in what it returned.
    """

    name: str
    phase: str
    module: str
    line: str
    inputs: list[str]
    outputs: list[str]
    shape: list[int]
    dtype: str
    arguments: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    random: bool = False
    repeats: bool | None = None
    steady: bool = True
    error: float | None = None
    bound: float | None = None
    format: str | None = None
    rounded_before: bool = False
    nans: bool = False

    @property
    def values(self) -> list[str]:
        """The names of all values that it met."""
        return [*self.inputs, *self.outputs, *self.changed]

    @property
    def ratio(self) -> float | None:
        """The error in units of what rounding explains."""
        if self.error is None or self.bound is None:
            return None
        return self.error / self.bound if self.bound else (np.inf if self.error else 0.0)


@dataclass
class Trace:
    """One step under one setting: its `operations`, and a sketch of each value that they met.

    `reference` are the operations of the same step in float64, and `sketches` hold the values of both:
    float64 arrays of at most 64 numbers, by name. `overwritten` is what the guard found, `passport` the
    machine, `arithmetic` the flags in force; reports call the trace by its `label`, or by its setting.
    """

    setting: str
    operations: list[Operation]
    reference: list[Operation]
    sketches: dict[str, np.ndarray]
    overwritten: list[dict[str, str]] = field(default_factory=list)
    passport: dict[str, Any] = field(default_factory=dict)
    arithmetic: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def title(self) -> str:
        """What the trace is called in reports: its label, or the setting."""
        return self.label or self.setting

    def __repr__(self) -> str:
        return f"trace of {len(self.operations)} operations under {self.setting}"

    def save(self, file: str | Path) -> Path:
        """Write the trace to one file (Parquet, compressed), whole or not at all."""
        file = Path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        names = ("setting", "label", "overwritten", "passport", "arithmetic")
        rows = [vars(op) | {"reference": False} for op in self.operations]
        rows += [vars(op) | {"reference": True} for op in self.reference]
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        trace_files.write(scratch, {name: getattr(self, name) for name in names}, rows, self.sketches)
        scratch.replace(file)
        return file

    @classmethod
    def load(cls, file: str | Path) -> Trace:
        """Read a trace, those of gpulab 0.1.0 too.

        Raises:
            DataError: naming the file, for one that is missing, cut short, damaged or foreign.
        """
        notes, rows, sketches = trace_files.read(file)
        parts: dict[bool, list[Operation]] = {False: [], True: []}
        for row in rows:
            parts[row.pop("reference")].append(Operation(**row))
        try:
            trace = cls(operations=parts[False], reference=parts[True], sketches=sketches, **notes)
            trace._check()
        except (ValueError, TypeError, AttributeError, UsageError) as error:
            raise DataError(f"{file}: a damaged trace: {error!r}") from None
        return trace

    def _check(self) -> None:
        """Raise `TypeError` or `ValueError`, naming it, for what `record` never writes and the file's types allow."""
        Setting.parse(self.setting)
        if not isinstance(self.arithmetic, dict) or not isinstance(self.passport, dict):
            raise TypeError("arithmetic or passport")
        for entry in self.overwritten:
            if entry.keys() != OVERWRITTEN or not all(isinstance(text, str) for text in entry.values()):
                raise ValueError(f"overwritten {entry!r}")
        for op in (*self.operations, *self.reference):
            if not op.outputs:
                raise ValueError(f"no outputs of {op.name!r}")
            if not isinstance(op.arguments, dict) or not isinstance(op.defaults, dict):
                raise TypeError(f"arguments of {op.name!r}: {op.arguments!r}, {op.defaults!r}")


def record(
    step: Callable[..., Any],
    setting: Setting | str = "cpu",
    file: str | Path | None = None,
    *,
    reference: Trace | None = None,
    label: str = "",
    progress: bool = True,
) -> Trace:
    """Do a step under a setting and note what every operation computed.

    The step is done three times from the same random numbers: twice under the setting, to see whether it
    repeats itself, and once in float64 on the CPU.

    Args:
        step: a `Step`, or a function that does one training step, backward pass included. It is called
            with the `Setting`, whose `.device` and `.dtype` it puts its tensors on, or, if it takes no
            argument, with these as torch's defaults.
        setting: what it is done under.
        file: where the trace is kept, if anywhere.
        reference: another trace of the step, whose execution in float64 serves again.
        label: what reports call the trace; by default its setting.
        progress: whether to show a bar.

    Raises:
        UsageError: for a step that is none, or does nothing on floating-point numbers.
        GpulabError: for a setting that cannot run here.

    Examples:
        >>> record(lambda setting: torch.ones(3, dtype=setting.dtype).exp(), "cpu:threads=1", progress=False)
        trace of 2 operations under cpu:threads=1
    """
    from tqdm.auto import tqdm

    parsed = Setting.parse(setting)
    if not callable(step):
        raise UsageError(f"step is a {type(step).__name__}; expected gpulab.Step or a function that does one step")
    parsed.check()
    sketches = dict(reference.sketches) if reference else {}
    first = _perform(step, parsed, sketches)
    total = len(first.operations) * (1 if reference else 2)
    with tqdm(total=total, unit="operation", leave=False, disable=not progress) as bar:
        trace = _perform(step, parsed, sketches, bar, measured=True)
        exact = reference.reference if reference else _perform(step, Setting.parse(EXACT), sketches, bar).operations
    for op, before in aligned(trace.operations, first.operations):
        if op is not None and not op.random:
            same = before is not None and (before.inputs != op.inputs or before.outputs == op.outputs)
            op.repeats = op.steady and same
    trace.reference, trace.label, trace.passport = exact, label, dict(passport())
    trace.sketches = {value: sketches[value] for op in (*trace.operations, *exact) for value in op.values}
    if file is not None:
        trace.save(file)
    return trace


def _perform(
    step: Callable[..., Any], setting: Setting, sketches: dict[str, np.ndarray], bar: Any = None, measured: bool = False
) -> Trace:
    """Do the step once under a setting, watched; where `measured`, each operation's error is as well."""
    watcher = _Watcher(sketches, bar, measured)
    devices = [torch.device(setting.device)] if setting.kind == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        setting.apply(),
        ready(step, setting) as run,
        watcher.modules(),
        warnings.catch_warnings(action="ignore", category=OverwrittenWarning),
        guard(on="warn") as report,
        watcher,
    ):
        torch.manual_seed(SEED)
        run()
        flags = arithmetic()
    if not watcher.operations:
        raise UsageError("the step ran no operation of torch on floating-point numbers: there is nothing to compare")
    overwritten = [
        {"operation": f.operation, "line": f"{f.line}: {f.line.text}", "why": f.explanation, "remedy": f.remedy}
        for f in report.findings
    ]
    return Trace(str(setting), watcher.operations, [], sketches, overwritten, arithmetic=flags)


# --- watching --------------------------------------------------------------------------------------------


class _Watcher(TorchDispatchMode):
    """Notes every operation below autograd, forward and backward."""

    def __init__(self, sketches: dict[str, np.ndarray], bar: Any, measured: bool) -> None:
        super().__init__()
        self.sketches, self.bar, self.measured = sketches, bar, measured
        self.operations: list[Operation] = []
        self.path: list[str] = []
        self.names: dict[int, str] = {}
        self.made_by: dict[int, tuple[str, str]] = {}  # autograd's number of a node: who called it

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note what it did."""
        kwargs = kwargs or {}
        name = operation._schema.name.partition("::")[2].rstrip("_")
        if name in SILENT or name.startswith(EMPTY) or _called_by_the_guard():
            return operation(*args, **kwargs)
        writes = operation._schema.is_mutable or "batch_norm" in name  # which does not say that it does
        args_before, kwargs_before = tree_map(_copy, (args, kwargs)) if writes else (args, kwargs)
        arguments, defaults = trace_files.by_name(operation._schema, args, kwargs)
        random = _is_random(operation, arguments | defaults)
        blind = writes and (random or name in OVERWRITES)
        read = (args_before[1:] if blind else args_before, kwargs_before)
        inputs = [self._value(t) for t in tree_leaves(read) if _counts(t)]
        out = operation(*args, **kwargs)
        results = _results(operation, args, out)
        if not results:
            return out
        phase, module, line = self._caller()
        op = Operation(
            name=name,
            phase=phase,
            module=module,
            line=line,
            inputs=inputs,
            outputs=[self._value(t) for t in results],
            shape=list(results[0].shape),
            dtype=str(results[0].dtype).removeprefix("torch."),
            arguments=arguments,
            defaults=defaults,
            changed=self._changed((args_before, kwargs_before), (args, kwargs)) if writes and not blind else [],
            random=random,
            # The sum is quicker, and NaN if any number is.
            nans=any(bool(t.sum(dtype=torch.float32).isnan()) and bool(t.isnan().any()) for t in results),
        )
        if self.measured and not random and not operation.is_view:
            error = forward_error(operation, name, args_before, kwargs_before, out)
            op.error, op.bound, op.format, op.rounded_before = astuple(error)
            again = _results(operation, args_before, operation(*args_before, **kwargs_before))
            op.steady = len(again) == len(results) and all(map(_same_bits, again, results))
        self.operations.append(op)
        if self.bar is not None:
            self.bar.update()
        return out

    def _value(self, tensor: Tensor) -> str:
        """The name of a tensor's content, which is a hash of it; its sketch is kept."""
        content = tensor.detach().to("cpu").contiguous()
        digest = hashlib.blake2b(f"{content.dtype}{tuple(content.shape)}".encode(), digest_size=12)
        digest.update(memory(content))
        name = digest.hexdigest()
        if name not in self.sketches:
            self.sketches[name] = sketch(content)
        return name

    def _changed(self, before: Any, after: Any) -> list[str]:
        """The values that an operation left in its inputs, where it wrote to them."""
        pairs = [(then, now) for then, now in zip(tree_leaves(before), tree_leaves(after), strict=True) if _counts(now)]
        return [self._value(now) for then, now in pairs if not _counts(then) or not _same_bits(then, now)]

    def _caller(self) -> tuple[str, str, str]:
        node = torch._C._current_autograd_node()
        if node is not None:
            return "backward", *self.made_by.get(node._sequence_nr(), ("", ""))
        module, line = self.path[-1] if self.path else "", _users_line()
        self.made_by[torch.autograd._get_sequence_nr() - 1] = module, line
        return "forward", module, line

    @contextlib.contextmanager
    def modules(self) -> Iterator[None]:
        """Follow which module is at work."""

        def enter(module: nn.Module, inputs: Any) -> None:  # noqa: ARG001
            if not self.path:
                self.names = {id(part): name or type(module).__name__ for name, part in module.named_modules()}
            self.path.append(self.names.get(id(module), type(module).__name__))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
            if self.path:
                self.path.pop()

        before = hooks.register_module_forward_pre_hook(enter)
        after = hooks.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()


# torch wraps the method so that its compiler leaves it alone, and the wrapper imports the compiler: 120 MB.
_Watcher.__torch_dispatch__ = getattr(_Watcher.__torch_dispatch__, "__wrapped__", _Watcher.__torch_dispatch__)  # type: ignore[method-assign]


def _results(operation: Any, args: Sequence[Any], out: Any) -> list[Tensor]:
    """What an operation returned; what it wrote to, for one that returns nothing, as optimizers' do."""
    if out is None:
        named = zip(operation._schema.arguments, args, strict=False)
        out = [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]
    return [t for t in tree_leaves(out) if _counts(t)]


def _counts(value: Any) -> bool:
    """Whether a value is one that rounding can touch."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0 and not value.is_sparse


def _same_bits(x: Tensor, y: Tensor) -> bool:
    x_bytes, y_bytes = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (x, y))
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(x_bytes, y_bytes)


def _copy(value: Any) -> Any:
    """A tensor copied so that it lies in memory as it did, gaps included: another layout may be another kernel."""
    if not isinstance(value, Tensor):
        return value
    if value.layout != torch.strided or value.is_conj() or value.is_neg() or not value.numel():
        return value.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.detach().as_strided((span,), (1,)).clone().as_strided(value.shape, value.stride())


def _is_random(operation: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether an operation draws; attention and an LSTM are marked as drawing also when they drop nothing."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    return all(arguments.get(name) != 0.0 for name in ("dropout_p", "dropout"))


def aligned(
    first: list[Operation], second: list[Operation], twins: dict[str, str] | None = None, at_least: int = 1
) -> list[tuple[Operation | None, Operation | None]]:
    """Operations that stand for each other, in order, and None beside one that only one of the two ran.

    Phase, module and name must agree; `twins` maps names of kernels to the name that they share. Fewer
    than `at_least` in a row do not count.
    """

    def keys(operations: list[Operation]) -> list[tuple[str, str, str]]:
        return [(op.phase, op.module, (twins or {}).get(op.name, op.name)) for op in operations]

    pairs: list[tuple[Operation | None, Operation | None]] = []
    matcher = difflib.SequenceMatcher(None, keys(first), keys(second), autojunk=False)
    for tag, a, a_end, b, b_end in matcher.get_opcodes():
        if tag == "equal" and a_end - a >= min(at_least, len(first), len(second)):
            pairs += zip(first[a:a_end], second[b:b_end], strict=True)
        else:
            pairs += [(op, None) for op in first[a:a_end]]
            pairs += [(None, op) for op in second[b:b_end]]
    return pairs


# --- values ----------------------------------------------------------------------------------------------


def sketch(tensor: Tensor) -> np.ndarray:
    """A small tensor as it is, a large one as `SKETCH` sums of its numbers under signs from a hash.

    The count sketch (Charikar, Chen, Farach-Colton 2002): linear, so that the distance of two tensors
    can be told from their sketches; float64. The signs depend on the place alone, on every machine.
    """
    numbers = tensor.detach().reshape(-1).to(torch.float64, copy=True).numpy()
    if numbers.size <= IN_FULL:
        return numbers
    bucket, sign = _places(numbers.size)
    sums = np.bincount(bucket, weights=numbers * sign, minlength=SKETCH)
    if np.isfinite(sums).all():
        return sums
    return np.bincount(bucket, weights=np.nan_to_num(numbers * sign), minlength=SKETCH)


@functools.lru_cache(maxsize=32)
def _places(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The bucket and the sign of each place, by splitmix64's mixing function (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x % np.uint64(SKETCH)).astype(np.uint8), np.where(x >> np.uint64(63), np.int8(-1), np.int8(1))


# --- whose line ------------------------------------------------------------------------------------------


def _users_line() -> str:
    """The innermost line of code that is neither torch's nor gpulab's, its models apart, as `file:line: text`."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _perform.__code__:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, GPULAB)) or file.startswith(f"{GPULAB}models{os.sep}"):
            return f"{os.path.basename(file)}:{frame.f_lineno}: {linecache.getline(file, frame.f_lineno).strip()}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _called_by_the_guard() -> bool:
    frame = sys._getframe(1).f_back  # none on a thread of autograd's, where a GPU's backward pass runs
    for _ in range(16):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith("guards.py"):
            return True
        frame = frame.f_back
    return False
