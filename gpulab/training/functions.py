"""A training of the user's own: any function of a seed, called under a setting, whose numbers are kept as a run.

Which run it is depends on the function's options and on the text of its file, with whatever lies beside it that
it imports: after an edit, of a comment too, the same seeds are other runs, and those of the old text stay in the store.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpulab import files
from gpulab.errors import GpulabError, UsageError, in_one_line
from gpulab.settings import Setting
from gpulab.steps import seeded
from gpulab.store.tables import COLUMNS, OPEN
from gpulab.training.loop import WindowNote
from gpulab.user_code import UnknownSourceError, file_of, find_function, source_of

GIVEN = ("seed", "setting")  # parameters that gpulab fills in, by name; all others are options
FIRST = "final_loss"  # the name of a number without one


class TrainingFunction:
    """A function `train(seed, setting, …)`, checked: what it is called, its options, and what it was.

    Attributes:
        name: `file.py:name`, or the name alone for a function typed into a notebook.
        options: Its keyword parameters with their defaults, which say what was trained.
        source: A digest of the text that it is written in.
        unknown: What has no text; empty where all has one.
        text: What it was called by, if by a text.

    Raises:
        UsageError: Where it cannot be found, or does not take a seed.
    """

    def __init__(self, train: Callable[..., Any] | str) -> None:
        self.text = train if isinstance(train, str) else None
        where = self.text.rpartition(":")[0] if self.text else ""
        if isinstance(train, str):
            train = find_function(train, "train")
        self.function: Callable[..., Any] = train
        written = inspect.unwrap(getattr(train, "func", train))
        self.file = Path(where).resolve() if where.endswith(".py") else file_of(written)
        name = getattr(written, "__qualname__", "train")
        self.name = f"{self.file.name}:{name}" if self.file else name
        parameters = _parameters(train, self.name)
        self.takes = [name for name in GIVEN if name in parameters]
        self.options = {name: p.default for name, p in parameters.items() if name not in GIVEN}
        self.source = self.unknown = ""
        try:
            self.source = files.digest(source_of(train, self.file))
        except UnknownSourceError as error:
            self.unknown = f"{self.name} ({error}: write all of it into a file)"

    def __reduce__(self) -> Any:
        """Another process reads a file itself; what was typed has its text here alone."""
        return (TrainingFunction, (self.text or self.function,)) if self.file else super().__reduce__()

    def described(self, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """What is trained, as JSON; and the digest of what is in the files that options name.

        `UsageError` for an option that the function has not, or that JSON cannot carry.
        """
        for name, value in options.items():
            if name not in self.options:
                raise UsageError(f"{self.name} has no option {name!r}; it has {', '.join(self.options) or 'none'}")
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise UsageError(f"{self.name}: option {name}={value!r:.80} is nothing that JSON can carry") from None
        values: dict[str, Any] = {**self.options, **options}
        as_json = {name: json.loads(plain(value)) for name, value in values.items()}
        named = [Path(value) for value in values.values() if isinstance(value, str | Path) and os.path.isfile(value)]
        held = [files.content_of({file: files.stamp(file)}) for file in named]
        return {"source": self.source, "options": as_json}, {"content": files.digest(held)} if held else {}

    def train(self, options: dict[str, Any], setting: Setting, seed: int) -> tuple[dict[str, Any], list[WindowNote]]:
        """Train, under a setting that is in force; returns what the record says of the end, and the history."""
        allocated, begin = _allocated(setting), time.perf_counter()
        given = {"seed": seed, "setting": setting}
        metrics: dict[str, Any] = {}
        with seeded(setting, seed):
            try:
                metrics = _numbers(self.function(**{name: given[name] for name in self.takes}, **options))
            except (ArithmeticError, np.linalg.LinAlgError, torch.linalg.LinAlgError):
                pass  # diverged
            except GpulabError:
                raise
            except (Exception, SystemExit) as error:
                raise GpulabError(in_one_line(error, self.file or "")) from error
        if allocated is not None and _allocated(setting) == allocated:
            left = f"{self.name} left {setting.device} alone"
            warnings.warn(f"{left}: a setting moves nothing, tensor.to(setting.device) does", stacklevel=2)
        if taken := ({*COLUMNS, "options", *self.options} - {FIRST, "heldout_loss", "loss"}) & metrics.keys():
            clash = f"a metric cannot be called {min(taken)!r}, a column of gpulab.runs or an option"
            raise GpulabError(f"{clash}; give it another name")
        seconds, first = time.perf_counter() - begin, float(next(iter(metrics.values()), math.nan))
        if not all(map(math.isfinite, metrics.values())):
            metrics = {}
        if "loss" in metrics:
            metrics.setdefault(FIRST, metrics["loss"])
        summary = {name: metrics.get(name) for name in (FIRST, "heldout_loss")} | {"seconds": seconds}
        end = {"status": "finished" if metrics else "diverged", "metrics": metrics or None, "summary": summary}
        return end, [WindowNote(0, 1, first, seconds)]


def function_of(net: Any) -> TrainingFunction | None:
    """The training of the user's own that a function stands for, or the name of one; None for anything else."""
    if isinstance(net, TrainingFunction):
        return net
    stands_for_one = ":" in net if isinstance(net, str) else callable(net) and not isinstance(net, torch.nn.Module)
    return TrainingFunction(net) if stands_for_one else None


def _allocated(setting: Setting) -> int | None:
    """How often torch took memory of a GPU of CUDA, ever; None for another device."""
    stats = torch.cuda.memory_stats(setting.device) if setting.kind == "cuda" else None
    return None if stats is None else stats.get("allocation.all.allocated", 0)


def _numbers(value: Any) -> dict[str, Any]:
    """{name: number} of a dict, or of a number alone."""
    named = value if isinstance(value, Mapping) else {FIRST: value}
    try:
        if not named or any(isinstance(number, str | bytes) for number in named.values()):
            raise TypeError
        values = {str(name): getattr(number, "detach", lambda n=number: n)() for name, number in named.items()}
        return {name: bool(v) if isinstance(v, bool | np.bool_) else float(v) for name, v in values.items()}
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, of a tensor with many numbers
        raise GpulabError(f"it gave {value!r:.200}; expected a number, or a dict of numbers by name") from None


def _parameters(train: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a training; `UsageError` unless they are `seed`, `setting` and options."""
    signature = inspect.signature(train)
    parameters = {n: p for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    wrong = [n for n, p in parameters.items() if n not in GIVEN and p.default is p.empty]
    if wrong or "seed" not in parameters:
        problem = f"{wrong[0]} without a default, which says what was trained" if wrong else "it takes no seed"
        raise UsageError(
            f"train {name}{signature}: {problem}; expected, by name and in any order, seed, where wanted "
            "setting, and options"
        )
    if taken := ({*COLUMNS, "options"} - OPEN) & (parameters.keys() - set(GIVEN)):
        raise UsageError(f"train {name}: option {min(taken)!r} is a column of gpulab.runs; give it another name")
    return parameters


def plain(value: Any) -> str:
    """A value as JSON; what JSON has not goes by its name, or by how it is written unless that is an address."""

    def as_text(item: Any) -> str:
        text = repr(item)
        return getattr(item, "__qualname__", type(item).__qualname__ if " at 0x" in text else text)

    return json.dumps(value, default=as_text, sort_keys=True, skipkeys=True)
