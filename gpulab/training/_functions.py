"""Custom training functions: called with a seed under a setting, their metrics kept as a run.

Which run it is depends on the function's options and on the text of its file, with whatever lies
beside it that it imports: after an edit, of a comment too, the same seeds are other runs, and those
of the old text stay in the store.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpulab import files
from gpulab.errors import GpulabError, UsageError, describe_error
from gpulab.settings import Setting
from gpulab.steps import seed_generators
from gpulab.store._run_store import StoredRun
from gpulab.store._tables import OVERRIDABLE_COLUMNS, RUN_COLUMNS
from gpulab.training._planned_run import (
    Options,
    PlannedRun,
    RestoredRun,
    TrainingOutcome,
    Watch,
    as_json,
    check_repetition,
)
from gpulab.training.loop import WindowRecord
from gpulab.user_code import UnknownSourceError, file_of, find_function, source_of

# parameters that gpulab fills in, by name; all others are options
FILLED_PARAMETERS = (
    "seed",
    "setting",
)
DEFAULT_METRIC = "final_loss"  # the name of a number without one


class TrainingFunction:
    """A checked function `train(seed, setting, …)`: its name, its options and its source.

    Attributes:
        name: `file.py:name`, or the name alone for a function typed into a notebook.
        options: Its keyword parameters with their defaults, which say what was trained.
        source: A digest of the text that it is written in.
        unknown_source: What has no readable source; empty if all of it has.
        text: What it was called by, if by a text.

    Raises:
        UsageError: Where it cannot be found, or does not take a seed.
    """

    def __init__(self, train: Callable[..., Any] | str) -> None:
        self.text = train if isinstance(train, str) else None
        module = self.text.rpartition(":")[0] if self.text else ""
        if isinstance(train, str):
            train = find_function(train, "train")
        self.function: Callable[..., Any] = train
        unwrapped = inspect.unwrap(getattr(train, "func", train))
        self.file = Path(module).resolve() if module.endswith(".py") else file_of(unwrapped)
        name = getattr(unwrapped, "__qualname__", "train")
        self.name = f"{self.file.name}:{name}" if self.file else name
        parameters = _check_parameters(train, self.name)
        self.filled_parameters = [name for name in FILLED_PARAMETERS if name in parameters]
        self.options = {
            name: p.default for name, p in parameters.items() if name not in FILLED_PARAMETERS
        }
        self.source = ""
        self.unknown_source = ""
        try:
            self.source = files.digest(source_of(train, self.file))
        except UnknownSourceError as error:
            self.unknown_source = f"{self.name} ({error}: write all of it into a file)"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Another process reads a file itself; what was typed has its text here alone."""
        return (
            (TrainingFunction, (self.text or self.function,)) if self.file else super().__reduce__()
        )

    def describe_options(self, options: Options) -> tuple[Options, dict[str, str]]:
        """Return all options as JSON, and the digest of the files that they name, if any.

        Raises:
            UsageError: For an option that the function does not have, or that JSON cannot carry.
        """
        for name, value in options.items():
            if name not in self.options:
                raise UsageError(
                    f"{self.name} has no option {name!r}; it has"
                    f" {', '.join(self.options) or 'none'}"
                )
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise UsageError(
                    f"{self.name}: option {name}={value!r:.80} is nothing that JSON can carry"
                ) from None
        values: dict[str, Any] = {**self.options, **options}
        json_options = {name: json.loads(as_json(value)) for name, value in values.items()}
        paths = [
            Path(value)
            for value in values.values()
            if isinstance(value, str | Path) and os.path.isfile(value)
        ]
        contents = [files.content_digest({path: files.stamp(path)}) for path in paths]
        return json_options, {"content": files.digest(contents)} if contents else {}

    def __call__(self, setting: Setting, seed: int, options: Options) -> dict[str, Any]:
        """Call the function with random numbers seeded; returns its metrics by name.

        Empty where the training diverged by an `ArithmeticError` or a `LinAlgError`. The setting is
        activated already.

        Raises:
            GpulabError: Where the function raises another error, or returns something else than
                numbers.
        """
        values = {"seed": seed, "setting": setting}
        arguments = {name: values[name] for name in self.filled_parameters}
        with seed_generators(setting, seed):
            try:
                return _parse_metrics(self.function(**arguments, **options))
            except (ArithmeticError, np.linalg.LinAlgError, torch.linalg.LinAlgError):
                return {}
            except GpulabError:
                raise
            except (Exception, SystemExit) as error:
                raise GpulabError(describe_error(error, self.file or "")) from error


@dataclass(kw_only=True)
class FunctionRun(PlannedRun):
    """One training by a function of the user's own.

    Attributes:
        function: The function.
        options: Those of its options that were given.
        described_options: All of its options, as JSON has them.
        option_files: The digest of the files that options name, under the name `content`; empty
            where none do.
    """

    function: TrainingFunction
    options: Options
    described_options: Options
    option_files: dict[str, str]

    @classmethod
    def plan(
        cls, function: TrainingFunction, setting: Setting, seed: int, rerun: int, options: Options
    ) -> FunctionRun:
        """Check the arguments of a training by a function.

        Raises:
            UsageError: For an option that the function does not have, or that JSON cannot carry.
        """
        seed, rerun = check_repetition(seed, rerun)
        json_options, contents = function.describe_options(options)
        return cls(
            experiment=function.name,
            setting=setting,
            seed=seed,
            profile="own",
            rerun=rerun,
            command_net=function.text,
            command_options=options,
            function=function,
            options=options,
            described_options=json_options,
            option_files=contents,
        )

    @property
    def configuration(self) -> dict[str, Any]:
        """The digest of the function's source, and its options."""
        return {"source": self.function.source, "options": self.described_options}

    @property
    def contents(self) -> dict[str, str]:
        """The digest of the files that options name."""
        return self.option_files

    @property
    def unknown_content(self) -> str:
        """The function, if its source cannot be read."""
        return self.function.unknown_source

    def train(
        self,
        checkpoint: Path | None,  # noqa: ARG002
        watch: Watch | None,  # noqa: ARG002
        progress: bool,  # noqa: ARG002
    ) -> TrainingOutcome:
        """Call the function. It keeps no checkpoint and shows its own progress."""
        n_allocations = _count_allocations(self.setting)
        started = time.perf_counter()
        metrics = self.function(self.setting, self.seed, self.options)
        if n_allocations is not None and _count_allocations(self.setting) == n_allocations:
            problem = f"{self.function.name} left {self.setting.device} alone"
            warnings.warn(
                f"{problem}: a setting moves nothing, tensor.to(setting.device) does", stacklevel=3
            )
        self._check_metric_names(metrics)
        seconds = time.perf_counter() - started
        first_metric = float(next(iter(metrics.values()), math.nan))
        return TrainingOutcome(
            [WindowRecord(0, 1, first_metric, seconds)], _summarize_metrics(metrics, seconds)
        )

    def restore(self, stored: StoredRun, keep_weights: bool) -> RestoredRun:  # noqa: ARG002
        """Return nothing: a function keeps its network and data to itself."""
        return RestoredRun(None, None)

    def _check_metric_names(self, metrics: dict[str, Any]) -> None:
        allowed = {DEFAULT_METRIC, "heldout_loss", "loss"}
        reserved = {*RUN_COLUMNS, "options", *self.function.options} - allowed
        clashes = reserved & metrics.keys()
        if clashes:
            problem = (
                f"a metric cannot be called {min(clashes)!r}, a column of gpulab.runs or an option"
            )
            raise GpulabError(f"{problem}; give it another name")


def _summarize_metrics(metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The record's summary of a training with these metrics."""
    if not all(map(math.isfinite, metrics.values())):
        metrics = {}
    if "loss" in metrics:
        metrics.setdefault(DEFAULT_METRIC, metrics["loss"])
    return {
        "status": "finished" if metrics else "diverged",
        "metrics": metrics or None,
        "summary": {name: metrics.get(name) for name in (DEFAULT_METRIC, "heldout_loss")}
        | {"seconds": seconds},
    }


def as_training_function(net: object) -> TrainingFunction | None:
    """Convert a function, or the name of one, to a `TrainingFunction`; None for anything else."""
    if isinstance(net, TrainingFunction):
        return net
    if isinstance(net, str):
        return TrainingFunction(net) if ":" in net else None
    if callable(net) and not isinstance(net, torch.nn.Module):
        return TrainingFunction(net)
    return None


def _count_allocations(setting: Setting) -> int | None:
    """How often torch has allocated memory of a CUDA GPU so far; None for another device."""
    stats = torch.cuda.memory_stats(setting.device) if setting.kind == "cuda" else None
    return None if stats is None else stats.get("allocation.all.allocated", 0)


def _parse_metrics(value: object) -> dict[str, Any]:
    """{name: number} of a dict, or of a number alone."""
    metrics: Mapping[Any, Any] = value if isinstance(value, Mapping) else {DEFAULT_METRIC: value}
    try:
        if not metrics or any(isinstance(number, str | bytes) for number in metrics.values()):
            raise TypeError
        values = {
            str(name): getattr(number, "detach", lambda n=number: n)()
            for name, number in metrics.items()
        }
        return {
            name: bool(v) if isinstance(v, bool | np.bool_) else float(v)
            for name, v in values.items()
        }
    except (TypeError, ValueError, RuntimeError):
        # The last is torch's, of a tensor with many numbers.
        raise GpulabError(
            f"it gave {value!r:.200}; expected a number, or a dict of numbers by name"
        ) from None


def _check_parameters(train: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a training; `UsageError` unless they are `seed`, `setting` and options."""
    signature = inspect.signature(train)
    parameters = {
        n: p
        for n, p in signature.parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    required_parameters = [
        n for n, p in parameters.items() if n not in FILLED_PARAMETERS and p.default is p.empty
    ]
    if required_parameters or "seed" not in parameters:
        problem = "it takes no seed"
        if required_parameters:
            problem = f"{required_parameters[0]} without a default, which says what was trained"
        raise UsageError(
            f"train {name}{signature}: {problem}; expected, by name and in any order, seed, where"
            " wanted setting, and options"
        )
    reserved = {*RUN_COLUMNS, "options"} - OVERRIDABLE_COLUMNS
    clashes = reserved & (parameters.keys() - set(FILLED_PARAMETERS))
    if clashes:
        raise UsageError(
            f"train {name}: option {min(clashes)!r} is a column of gpulab.runs; give it another"
            " name"
        )
    return parameters
