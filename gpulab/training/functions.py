"""A training of the user's own: any function of a seed, called under a setting, whose numbers are kept as a run.

Which run it is depends on the function's options and on the text of its file, with whatever lies beside it that
it imports: after an edit, of a comment too, the same seeds are other runs, and those of the old text stay in the store.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import shlex
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpulab.diagnostics import guards
from gpulab.diagnostics.steps import find_function, seeded
from gpulab.errors import GpulabError, UsageError, check_name, in_one_line
from gpulab.passports import Passport, passport
from gpulab.settings import Setting
from gpulab.store import identities
from gpulab.store import runs as stores
from gpulab.store.identities import plain
from gpulab.training.keeping import Keeping, StoredRun
from gpulab.training.protocol import LAST_FIFTH
from gpulab.training.run import Run, Told, history_columns, told

GIVEN = ("seed", "setting", "folder")  # parameters that gpulab fills in, by name; all others are options
FIRST = "final_loss"  # the name of a number without one
NO_METRIC = {*stores.COLUMNS, "options"} - {FIRST, "heldout_loss"}


class TrainingFunction:
    """A function `train(seed, setting, …)`, checked: what it is called, its options, and what it was.

    Attributes:
        name: `file.py:name`, or the name alone for a function typed into a notebook.
        options: Its keyword parameters with their defaults, which say what was trained.
        source: A hash of its text and of what it is bound to.
        unknown: What of it cannot be known by its content.

    Raises:
        UsageError: Where it cannot be found, or does not take a seed.
    """

    profile = "own"  # of all its runs

    def __init__(self, train: Callable[..., Any] | str) -> None:
        from gpulab.store.sources import UnknownContentError, content_hash, file_of, texts_of

        self.text, self.named, file = None, None, None
        if isinstance(train, str):
            where, _, attribute = train.rpartition(":")
            self.text, self.named, train = train, train, find_function(train, "train")
            if where.endswith(".py"):
                file = Path(where).resolve()
                self.named = f"{file}:{attribute}"
        if not callable(train):
            raise UsageError(f"train {train!r}: expected a function train(seed, setting), or its file.py:name")
        self.function: Callable[..., Any] = train
        function = _innermost(train)
        self.file = file or file_of(function)
        code = getattr(function, "__code__", None)
        self.where = str(self.file or (code.co_filename if code else ""))
        name = getattr(function, "__qualname__", "train")
        self.name = f"{self.file.name}:{name}" if self.file else name
        check_name(self.text or self.name)
        parameters = _parameters(train, self.name)
        self.takes = [name for name in GIVEN if name in parameters]
        self.options = {name: p.default for name, p in parameters.items() if name not in GIVEN}
        texts = texts_of(self.file) if self.file else {}
        self.unknown: tuple[str, ...] = ()
        try:
            self.source = content_hash([train, texts])
        except UnknownContentError as error:
            self.source, self.unknown = content_hash(texts), (f"{self.name} ({error})",)

    def __reduce__(self) -> Any:
        """By name, so that another process reads the file itself; or else the function, by cloudpickle."""
        return (_unchanged, (self.named, self.source, self.text)) if self.named else super().__reduce__()

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options; `UsageError` for one that the function has not."""
        for name, value in options.items():
            check_name(value)
            if name not in self.options:
                raise UsageError(f"{self.name} has no option {name!r}; it has {', '.join(self.options) or 'none'}")
        return dict(options)

    def identity(
        self, here: Passport, setting: Setting, seed: int, rerun: int, options: Mapping[str, Any]
    ) -> identities.Identity:
        """What makes a run of it this run, and its id. An option that names a file stands for what is in it."""
        from gpulab.store.sources import UnknownContentError, content_hash

        values: dict[str, Any] = {**self.options, **options}
        content, unknown = "", self.unknown
        own = {"experiment": self.name, "profile": self.profile, "setting": str(setting), "seed": seed, "rerun": rerun}
        as_json = {name: json.loads(plain(value)) for name, value in values.items()}
        files = [Path(value) for value in values.values() if isinstance(value, str | Path) and os.path.isfile(value)]
        contents = [identities.content_of({file: identities.stamp(file)}) for file in files]
        hidden = [value for value in values.values() if not _is_json(value)]
        try:
            content = content_hash([contents, hidden]) if contents or hidden else ""
        except UnknownContentError as error:
            unknown += (f"an option of {self.name} ({error})",)
        identity = {**own, "configuration": {"source": self.source, "options": as_json}}
        return identities.identified(identity, here, {"content": content}, unknown)

    def command(self, setting: Setting, seed: int, rerun: int, options: Mapping[str, Any]) -> str | None:
        """The command line that makes a run, where there is one."""
        if not self.text:
            return None
        parts = ["gpulab", "train", self.text, "--setting", str(setting), "--seed", str(seed)]
        parts += ["--rerun", str(rerun)] if rerun else []
        for name, value in options.items():
            parts += ["--option", f"{name}={value if isinstance(value, str) else plain(value)}"]
        return shlex.join(parts)

    def call(
        self,
        setting: Setting,
        seed: int,
        options: Mapping[str, Any],
        folder: Path | None,
        tell: Callable[[int, float], None],
    ) -> tuple[dict[str, Any] | None, list[tuple[int, int, float, float]]]:
        """Train, under a setting that is in force. Returns the metrics, None when it diverged, and the history."""
        import torch

        history: list[tuple[int, int, float, float]] = []
        begin = time.perf_counter()

        def hear(loss: float) -> None:
            history.append((len(history), len(history) + 1, loss, time.perf_counter() - begin))
            tell(len(history), loss)

        with seeded(setting, seed), contextlib.ExitStack() as stack:
            given, before = {"seed": seed, "setting": setting}, _allocated(setting)
            if "folder" in self.takes:
                given["folder"] = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                metrics = _metrics(self.function(**{n: given[n] for n in self.takes}, **options), hear)
            except (ArithmeticError, np.linalg.LinAlgError, torch.linalg.LinAlgError):
                metrics = None
            except GpulabError:
                raise
            except (Exception, SystemExit) as error:
                raise GpulabError(in_one_line(error, self.where)) from error
        if before is not None and _allocated(setting) == before:
            warnings.warn(
                f"{self.name} left {setting.device} alone: a setting moves nothing, tensor.to(setting.device) does",
                stacklevel=2,
            )
        if not history:
            hear(math.nan if metrics is None else float(next(iter(metrics.values()))))
        if metrics is None or not all(map(math.isfinite, metrics.values())):
            return None, history
        if taken := sorted((NO_METRIC | self.options.keys() - {"loss"}) & metrics.keys()):
            raise GpulabError(
                f"a metric cannot be called {taken[0]!r}, a column of gpulab.runs or an option; give it another name"
            )
        if "loss" in metrics:
            metrics.setdefault(FIRST, metrics["loss"])
        return metrics, history


def run_function(
    training: TrainingFunction,
    setting: Setting,
    seed: int,
    rerun: int,
    options: Mapping[str, Any],
    keeping: Keeping,
    guard: bool,
    progress: Told,
    notes: dict[str, str | None],
) -> Run:
    """One run of a function of the user's, kept as `gpulab.train` says."""
    here, own_files = passport(), None
    identity = training.identity(here, setting, seed, rerun, options)
    existing = keeping.existing_run(identity)
    if existing:
        folder, record, history, _ = existing
        return Run(None, None, history, record, folder)
    if keeping.store is not None and "folder" in training.takes and not identity.unknown:
        own_files = stores.files_folder(keeping.store, identity.id, keeping.use_checkpoints)
    with contextlib.ExitStack() as stack:
        stack.enter_context(setting.apply())
        notes["command"] = notes["command"] or training.command(setting, seed, rerun, options)
        record = stores.begun(identity, here, **notes)
        stack.enter_context(guards.guard() if guard else contextlib.nullcontext())
        tell = stack.enter_context(told(progress, unit="step"))
        begin = time.perf_counter()
        metrics, rows = training.call(setting, seed, options, own_files, tell)
        summary = {name: (metrics or {}).get(name) for name in ("final_loss", "heldout_loss")}
        record |= {"status": "diverged" if metrics is None else "finished", "metrics": metrics}
        record |= {"summary": summary | {"seconds": time.perf_counter() - begin}}
        record |= {"diverged_at": len(rows)} if metrics is None else {}
    run = Run(None, None, history_columns(rows), record)
    run.path = keeping.keep(StoredRun(None, record, run.columns, None), own_files)
    return run


def _innermost(train: Any) -> Any:
    """The function below partial, methods and decorators."""
    for below in ("func", "__func__", "__wrapped__"):
        if hasattr(train, below):
            return _innermost(getattr(train, below))
    return train if isinstance(train, types.FunctionType | type) else type(train).__call__


def _is_json(value: Any) -> bool:
    """Whether JSON can carry a value as it is."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return isinstance(value, Path)
    return True


def is_function(net: Any) -> bool:
    """Whether something stands for a training of the user's own: a function, or the name of one."""
    import torch

    return ":" in net if isinstance(net, str) else callable(net) and not isinstance(net, torch.nn.Module)


def _unchanged(name: str, source: str, text: str) -> TrainingFunction:
    training = TrainingFunction(name)
    training.text = text
    if training.source != source:
        raise GpulabError(f"{training.name} was changed while the experiment ran; run it again")
    return training


def _allocated(setting: Setting) -> int | None:
    """How often torch took memory of a GPU of CUDA, ever; None for another device."""
    import torch

    if setting.kind != "cuda":
        return None
    return torch.cuda.memory_stats(setting.device).get("allocation.all.allocated", 0)


# --- what a training gives ---------------------------------------------------------------------------------


def _metrics(outcome: Any, hear: Callable[[float], None]) -> dict[str, Any]:
    """The numbers a training returned; of those it yielded, the mean of the last fifth. `hear` gets each loss.

    What is not finite ends it at once.
    """
    if not isinstance(outcome, Iterable) or isinstance(outcome, str | Mapping) or getattr(outcome, "ndim", 1) == 0:
        return _numbers(outcome)
    yielded: dict[str, list[float]] = {}
    returned, steps = None, iter(outcome)
    while True:
        try:
            numbers = _numbers(next(steps))
        except StopIteration as end:
            returned = end.value
            break
        hear(float(numbers.get("loss", next(iter(numbers.values())))))
        if not all(map(math.isfinite, numbers.values())):
            return numbers
        for name, number in numbers.items():
            yielded.setdefault(name, []).append(number)
    if not yielded and returned is None:
        raise GpulabError("it yielded nothing; expected losses")
    last = {name: values[-max(1, len(values) // LAST_FIFTH) :] for name, values in yielded.items()}
    means = {name: math.fsum(values) / len(values) for name, values in last.items()}
    return means | ({} if returned is None else _numbers(returned))


def _numbers(value: Any) -> dict[str, Any]:
    """{name: number} of a dict, or of a number alone."""
    named = value if isinstance(value, Mapping) else {FIRST: value}
    try:
        if not named or any(isinstance(number, str | bytes) for number in named.values()):
            raise TypeError
        values = {str(name): getattr(number, "detach", lambda n=number: n)() for name, number in named.items()}
        return {name: bool(v) if isinstance(v, bool | np.bool_) else float(v) for name, v in values.items()}
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, of a tensor with many numbers
        raise GpulabError(f"it gave {value!r:.200}; expected a number, a dict of numbers, or to yield these") from None


# --- what a training is ------------------------------------------------------------------------------------


def _parameters(train: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a training; `UsageError` unless they are `seed`, `setting`, `folder` and options."""
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError):
        raise UsageError(f"train {name}: its parameters cannot be read; wrap it in a function") from None
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = {name: p for name, p in signature.parameters.items() if p.kind not in several}
    wrong = [n for n, p in parameters.items() if n not in GIVEN and p.default is p.empty]
    wrong += [n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
    if wrong or "seed" not in parameters:
        problem = f"{wrong[0]} without a default, which says what was trained" if wrong else "it takes no seed"
        raise UsageError(
            f"train {name}{signature}: {problem}; expected, by name and in any order, seed, where wanted setting and "
            "folder, and options"
        )
    if taken := ({*stores.COLUMNS, "options"} - stores.OPEN) & (parameters.keys() - set(GIVEN)):
        raise UsageError(f"train {name}: option {min(taken)!r} is a column of gpulab.runs; give it another name")
    return parameters
