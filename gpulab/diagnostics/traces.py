"""One training step, operation by operation: what each computed, how exactly, and for whom.

A trace is a file of its own: two laboratories record the same step, each on its card, and compare.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import linecache
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from gpulab.diagnostics.fingerprints import memory
from gpulab.diagnostics.guards import guard
from gpulab.diagnostics.reference import examine
from gpulab.errors import DataError, OverwrittenWarning, UsageError
from gpulab.passports import passport
from gpulab.settings import Setting, arithmetic

TRACE_FORMAT = 1
SKETCH = 64  # how many numbers stand for a tensor: distances between sketches are right to about a fifth
IN_FULL = 64  # a tensor of up to so many numbers is kept as it is
EXACT = "cpu:precision=float64"
SEED = 0  # torch's random numbers begin here in every execution of a step

# What computes nothing: changes of shape, and memory that has not been written yet.
OVERWRITES = {"copy", "fill", "zero"}  # in place, whatever was there before; so does every random draw
SILENT = {"detach", "alias", "set"}
EMPTY = ("empty", "new_empty")
HERE = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
OVERWRITTEN = {"operation", "line", "why", "remedy"}


def _all(kind: Any, values: Any) -> bool:
    return all(isinstance(value, kind) for value in values)


# Whether a value read from a file is one of the type that a field of `Operation` is declared with.
FITS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "str | None": lambda value: value is None or isinstance(value, str),
    "bool | None": lambda value: value is None or isinstance(value, bool),
    "float | None": lambda value: value is None or isinstance(value, float | int),
    "list[str]": lambda value: isinstance(value, list) and _all(str, value),
    "list[int]": lambda value: isinstance(value, list) and _all(int, value),
}


@dataclass(frozen=True)
class Step:
    """A training step that can be done under any setting: one forward and one backward pass.

    The model is copied, moved to the setting's device and precision, and `loss(model(inputs), targets)`
    differentiated, where `batch` is (inputs, targets). The model itself stays as it is. Without a
    `loss`, the mean of the squared output is differentiated, and `batch` is the inputs alone.

    >>> step = Step(nn.Linear(4, 2), (torch.ones(3, 4), torch.zeros(3, 2)), nn.functional.mse_loss)
    >>> step(Setting.parse("cpu")).shape
    torch.Size([])
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None = None

    def __call__(self, setting: Setting) -> Tensor:
        """Do the step and return the loss."""
        return self.prepared(setting)()

    def prepared(self, setting: Setting) -> Callable[[], Tensor]:
        """The step with its model and batch in place; call it once."""

        def there(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(setting.device, setting.dtype if value.is_floating_point() else None)

        model, batch = copy.deepcopy(self.model).to(setting.device, setting.dtype), tree_map(there, self.batch)
        model.zero_grad()

        def once() -> Tensor:
            if self.loss is None:
                out = model(batch)
                loss = next(t for t in tree_flatten(out)[0] if isinstance(t, Tensor)).square().mean()
            else:
                inputs, targets = batch
                loss = self.loss(model(inputs), targets)
            loss.backward()
            return loss.detach()

        return once


@dataclass
class Operation:
    """What one operation did.

    `name` is torch's, without device or overload; `module` the path of the module that called it
    (for the backward pass: that called what is differentiated); `line` the line of the user's code;
    `inputs`, `outputs` and `changed` (inputs that it wrote to) name values of the trace. `error` is its
    own error against float64 from the same inputs, `bound` what rounding explains, both relative to the
    exact result; `format` the short number format that a product was computed in. `steady` says whether
    the operation gave the same bits when it was called again at once, `repeats` whether it did so, and
    in the whole step done again as well. `nans` says whether there is a NaN in what it returned.
    """

    name: str
    phase: str
    module: str
    line: str
    inputs: list[str]
    outputs: list[str]
    shape: list[int]
    dtype: str
    arguments: str
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
        """Write the trace to one file: safetensors, with JSON in its header."""
        from safetensors.numpy import save_file

        file = Path(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        notes = {"format": TRACE_FORMAT, **{k: v for k, v in asdict(self).items() if k != "sketches"}}
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        save_file(self.sketches, scratch, {"gpulab trace": json.dumps(notes, separators=(",", ":"))})
        scratch.replace(file)
        return file

    @classmethod
    def load(cls, file: str | Path) -> Trace:
        """Read a trace. Raises `DataError`, naming the file, for one that is missing, cut short or foreign."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(file), framework="numpy") as archive:
                header = archive.metadata() or {}
                sketches = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file}: not a trace that can be read (missing, or cut short?): {error}") from None
        if "gpulab trace" not in header:
            raise DataError(f"{file}: a safetensors file, but no trace; `gpulab record` writes one")
        try:
            notes = json.loads(header["gpulab trace"])
            if notes.pop("format") != TRACE_FORMAT:
                raise DataError(f"{file}: a trace of another format; this gpulab reads format {TRACE_FORMAT}")
            for key in ("operations", "reference"):
                notes[key] = [Operation(**operation) for operation in notes[key]]
            trace = cls(sketches=sketches, **notes)
            trace._check()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError) as error:
            raise DataError(f"{file}: a damaged trace: {error!r}") from None
        named = {
            value for op in (*trace.operations, *trace.reference) for value in (*op.inputs, *op.outputs, *op.changed)
        }
        if lacking := named - sketches.keys():
            raise DataError(f"{file}: a damaged trace: {len(lacking)} of {len(named)} values are missing")
        return trace

    def _check(self) -> None:
        """Raise `TypeError` or `ValueError`, naming it, for what `record` never writes."""
        Setting.parse(self.setting)
        if not _all(dict, (self.arithmetic, self.passport)):
            raise TypeError("arithmetic or passport")
        for found in self.overwritten:
            if found.keys() != OVERWRITTEN or not _all(str, found.values()):
                raise ValueError(f"overwritten {found!r}")
        for name, numbers in self.sketches.items():
            if numbers.dtype != np.float64 or numbers.ndim != 1:
                raise TypeError(f"value {name}: {numbers.dtype} of shape {numbers.shape}")
        for operation in (*self.operations, *self.reference):
            for part in fields(operation):
                if not FITS[str(part.type)](value := getattr(operation, part.name)):
                    raise TypeError(f"{part.name}={value!r} of {operation.name!r}")
            if not operation.outputs:
                raise ValueError(f"no outputs of {operation.name!r}")


def record(
    step: Callable[..., Any],
    setting: Setting | str = "cpu",
    file: str | Path | None = None,
    *,
    reference: Trace | None = None,
    label: str = "",
    progress: bool = True,
) -> Trace:
    """Do a step under a setting and note what every operation computed; with `file`, keep the trace.

    `step` is a `Step`, or a function that does one training step, backward pass included. It is called
    with the `Setting`, whose `.device` and `.dtype` it puts its tensors on, or, if it takes no
    argument, with these as torch's defaults. It is done three times from the same random numbers:
    twice under the setting, to see whether it repeats itself, and once in float64 on the CPU, unless
    another trace of the step serves as the `reference`. Reports call the trace by its `label`, or else
    by its setting.

    Raises `UsageError` for a step that is none, `GpulabError` for a setting that cannot run here.

    >>> record(Step(nn.Linear(4, 2), torch.ones(3, 4)), "cpu", progress=False).setting
    'cpu'
    """
    parsed = Setting.parse(setting)
    if not callable(step):
        raise UsageError(f"step is a {type(step).__name__}; expected gpulab.Step or a function that does one step")
    parsed.check()
    sketches: dict[str, np.ndarray] = {}
    first = _perform(step, parsed, sketches, None)
    with _bar(len(first.operations) * (1 if reference else 2), progress) as bar:
        second = _perform(step, parsed, sketches, bar, examined=True)
        if reference:
            exact = reference.reference
            sketches |= reference.sketches
        else:
            exact = _perform(step, Setting.parse(EXACT), sketches, bar).operations
    _note_repeats(second.operations, first.operations)
    trace = Trace(
        setting=str(parsed),
        operations=second.operations,
        reference=exact,
        sketches=sketches,
        overwritten=second.overwritten,
        passport=dict(passport()),
        arithmetic=second.arithmetic,
        label=label,
    )
    named = {value for op in (*trace.operations, *trace.reference) for value in (*op.inputs, *op.outputs, *op.changed)}
    trace.sketches = {name: sketches[name] for name in sketches if name in named}
    if file is not None:
        trace.save(file)
    return trace


@dataclass
class _Performance:
    operations: list[Operation]
    overwritten: list[dict[str, str]]
    arithmetic: dict[str, Any]


def _perform(
    step: Callable[..., Any], setting: Setting, sketches: dict[str, np.ndarray], bar: Any, examined: bool = False
) -> _Performance:
    """Do the step once under a setting, watched."""
    watcher = _Watcher(sketches, bar, examined)
    devices = [torch.device(setting.device)] if setting.kind == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        setting.apply(),
        _ready(step, setting) as run,
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
    found = [
        {"operation": f.operation, "line": f"{f.line}: {f.line.text}", "why": f.explanation, "remedy": f.remedy}
        for f in report.findings
    ]
    return _Performance(watcher.operations, found, flags)


@contextlib.contextmanager
def _ready(step: Callable[..., Any], setting: Setting) -> Iterator[Callable[[], Any]]:
    """The step as a function without arguments, under a setting that is in force."""
    if hasattr(step, "prepared"):
        yield step.prepared(setting)
    elif _takes_an_argument(step):
        yield functools.partial(step, setting)
    else:
        with torch.device(setting.device):
            yield step


def find_step(name: str) -> Callable[..., Any]:
    """The step that `module:name` or `file.py:name` stands for. Raises `UsageError` where there is none."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute.isidentifier():
        raise UsageError(f"step {name!r}: expected module:name or file.py:name, such as my_training:step")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(where)
    except (ImportError, OSError) as error:
        raise UsageError(f"step {name!r}: {where} cannot be imported: {error}") from error
    step = getattr(module, attribute, None)
    if not callable(step):
        raise UsageError(f"step {name!r}: {where} has no function or gpulab.Step named {attribute!r}")
    return step


def _takes_an_argument(step: Callable[..., Any]) -> bool:
    """Whether a function asks for a setting: it has a parameter without a default, or one called `setting`."""
    parameters = inspect.signature(step).parameters
    return "setting" in parameters or any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values()
    )


class _Watcher(TorchDispatchMode):
    """Sees every operation below autograd, forward and backward."""

    def __init__(self, sketches: dict[str, np.ndarray], bar: Any, examined: bool) -> None:
        super().__init__()
        self.sketches, self.bar, self.examined = sketches, bar, examined
        self.operations: list[Operation] = []
        self.path: list[str] = []
        self.names: dict[int, str] = {}
        self.made_by: dict[int, tuple[str, str]] = {}  # autograd's number of a node: who called it

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note what it did."""
        kwargs = kwargs or {}
        name = operation._schema.name.partition("::")[2]
        bare = name.rstrip("_")
        if bare in SILENT or bare.startswith(EMPTY) or _called_by_the_guard():
            return operation(*args, **kwargs)
        writes = operation._schema.is_mutable or "batch_norm" in bare  # which does not say that it does
        before = _copied(args, kwargs) if writes else (args, kwargs)
        random = _is_random(operation, args, kwargs)
        blind = writes and (random or bare in OVERWRITES)
        read = (before[0][1:], before[1]) if blind else before
        inputs = [self._value(t) for t in tree_flatten(read)[0] if _counts(t)]
        out = operation(*args, **kwargs)
        results = _results(operation, args, out)
        if not results:
            return out
        phase, module, line = self._caller()
        noted = Operation(
            name=bare,
            phase=phase,
            module=module,
            line=line,
            inputs=inputs,
            outputs=[self._value(t) for t in results],
            shape=list(results[0].shape),
            dtype=str(results[0].dtype).removeprefix("torch."),
            arguments=_plain(args, kwargs),
            changed=self._changed(before, (args, kwargs)) if writes and not blind else [],
            random=random,
            nans=any(bool(t.isnan().any()) for t in results),
        )
        if self.examined and not noted.random and not operation.is_view:
            exact = examine(operation, bare, *before, out)
            noted.error, noted.bound = exact.error, exact.bound
            noted.format, noted.rounded_before = exact.format, exact.rounded_before
            noted.steady = _steady(operation, before, noted.outputs)
        self.operations.append(noted)
        if self.bar is not None:
            self.bar.update()
        return out

    def _value(self, tensor: Tensor) -> str:
        content = tensor.detach().to("cpu").contiguous()
        name = _fingerprint(content)
        if name not in self.sketches:
            self.sketches[name] = sketch(content)
        return name

    def _changed(self, before: Any, after: Any) -> list[str]:
        """The values that an operation left in its inputs, where it wrote to them."""
        pairs = zip(tree_flatten(before)[0], tree_flatten(after)[0], strict=True)
        written = [(then, self._value(now)) for then, now in pairs if _counts(now)]
        return [now for then, now in written if not _counts(then) or self._value(then) != now]

    def _caller(self) -> tuple[str, str, str]:
        node = torch._C._current_autograd_node()
        if node is not None:
            module, line = self.made_by.get(node._sequence_nr(), ("", ""))
            return "backward", module, line
        module = self.path[-1] if self.path else ""
        line = _users_line()
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
    return [t for t in tree_flatten(out)[0] if _counts(t)]


def _steady(operation: Any, call: tuple[Sequence[Any], dict[str, Any]], outputs: list[str]) -> bool:
    """Whether the operation gives the same bits again from the same inputs, which it may write to."""
    args, kwargs = call
    again = _results(operation, args, operation(*args, **kwargs))
    return [_fingerprint(t.detach().to("cpu").contiguous()) for t in again] == outputs


def _note_repeats(operations: list[Operation], again: list[Operation]) -> None:
    """Compare two executions of one step: same inputs, same outputs?"""
    for operation, twin in aligned(operations, again):
        if operation is None or operation.random:
            continue
        same_inputs = twin is not None and twin.inputs == operation.inputs
        operation.repeats = (
            operation.steady and (twin is not None) and not (same_inputs and twin.outputs != operation.outputs)
        )


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
    return np.bincount(bucket, weights=np.nan_to_num(numbers * sign), minlength=SKETCH)


@functools.lru_cache(maxsize=8)
def _places(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The bucket and the sign of each place, by splitmix64's mixing function (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x % np.uint64(SKETCH)).astype(np.intp), np.where(x >> np.uint64(63), -1.0, 1.0)


def _fingerprint(content: Tensor) -> str:
    digest = hashlib.blake2b(f"{content.dtype}{tuple(content.shape)}".encode(), digest_size=12)
    digest.update(memory(content))
    return digest.hexdigest()


def _counts(value: Any) -> bool:
    """Whether a value is one that rounding can touch."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0 and not value.is_sparse


def _copied(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    return tree_map(lambda v: _copy(v) if isinstance(v, Tensor) else v, (args, kwargs))


def _copy(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does, gaps included: another layout may be another kernel."""
    plain = tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
    if not plain or not tensor.numel():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory_ = tensor.detach().as_strided((span,), (1,)).clone()
    return memory_.as_strided(tensor.shape, tensor.stride())


def _plain(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The arguments that are no tensors, nor devices or formats, which a setting may change."""

    def shown(value: Any) -> Any:
        if isinstance(value, Tensor):
            return "·"
        return None if isinstance(value, torch.device | torch.dtype | torch.layout | torch.Generator) else value

    return repr(tree_map(shown, (list(args), {k: v for k, v in kwargs.items() if k != "pin_memory"})))


def _is_random(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws; attention and an LSTM are marked as drawing also when they drop nothing."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given != 0.0
    return True


# --- whose line ------------------------------------------------------------------------------------------


def _users_line() -> str:
    """The innermost line of code that is neither torch's nor gpulab's, as `file:line: text`."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _perform.__code__:
        file = frame.f_code.co_filename
        if not file.startswith(HERE) or f"{os.sep}models{os.sep}" in file.removeprefix(HERE[1]):
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{os.path.basename(file)}:{frame.f_lineno}: {text}"
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


def _bar(total: int, wanted: bool) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, unit="operation", leave=False, disable=not wanted)
