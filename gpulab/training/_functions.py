"""Custom training functions, which are called with a seed and whose metrics are stored as a run.

The identity of the run depends on the function's options and on its source: the text of its file
and of the modules in the same folder or package that it imports. After any edit, even of a comment,
the same seeds give new runs. The runs of the old text stay in the store.
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

# The parameters that gpulab passes to a function by name. All other parameters are options.
FILLED_PARAMETERS = (
    "seed",
    "setting",
)
DEFAULT_METRIC = "final_loss"  # the name of a number that a function returns without a name


class TrainingFunction:
    """A checked function `train(seed, setting, …)`: its name, its options and its source.

    Attributes:
        name: `file.py:name`, or the name alone for a function typed into a notebook.
        options: Its parameters except `seed` and `setting`, with their defaults.
        source: A digest of its source; empty if the source cannot be read.
        unknown_source: The reason why the source cannot be read; empty if it can.
        reference: The text that it was given by, such as `file.py:name`; None if it was given as a
            function.

    Raises:
        UsageError: If it cannot be found, does not take a seed, or has unsuitable options.
    """

    def __init__(self, train: Callable[..., Any] | str) -> None:
        self.reference = train if isinstance(train, str) else None
        module = self.reference.rpartition(":")[0] if self.reference else ""
        if isinstance(train, str):
            train = find_function(train, "train")
        self.function: Callable[..., Any] = train
        # The function as it was written: `func` is that of a `functools.partial`, and decorators
        # are removed.
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
        """Pickle a function that a file defines by reference, and any other one as a whole.

        Another process can read the file. The source of a function that was typed into a notebook
        is available only in this process, so all attributes that depend on it are pickled.
        """
        if self.file:
            return TrainingFunction, (self.reference or self.function,)
        return super().__reduce__()

    def describe_options(self, options: Options) -> tuple[Options, dict[str, str]]:
        """Return all options in JSON types, and the digest of the files that they name, if any.

        Options that are not given have their defaults. An option names a file if its value is the
        path of an existing file.

        Raises:
            UsageError: For an option that the function does not have, or that JSON cannot
                represent.
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
                    f"{self.name}: option {name}={value!r:.80}: expected a value that JSON can"
                    " represent"
                ) from None
        values: dict[str, Any] = {**self.options, **options}
        json_options = {name: json.loads(as_json(value)) for name, value in values.items()}
        paths = [
            Path(value)
            for value in values.values()
            if isinstance(value, str | Path) and os.path.isfile(value)
        ]
        contents = [files.content_digest({path: files.stamp(path)}) for path in paths]
        option_files = {"content": files.digest(contents)} if contents else {}
        return json_options, option_files

    def __call__(self, setting: Setting, seed: int, options: Options) -> dict[str, Any]:
        """Seed all random generators, call the function, and return its metrics by name.

        An `ArithmeticError` or a `LinAlgError` means that the training diverged; the result is then
        empty. The caller must have activated the setting.

        Raises:
            GpulabError: If the function raises another error, or returns anything but numbers.
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
    """One run of a training function.

    Attributes:
        function: The function.
        options: The options that were given.
        described_options: All options of the function, in JSON types.
        option_files: The digest of the files that options name, under the name `content`; empty if
            there are no such files.
    """

    function: TrainingFunction
    options: Options
    described_options: Options
    option_files: dict[str, str]

    @classmethod
    def plan(
        cls, function: TrainingFunction, setting: Setting, seed: int, rerun: int, options: Options
    ) -> FunctionRun:
        """Check the arguments of a run of a training function.

        Raises:
            UsageError: For an option that the function does not have, or that JSON cannot
                represent.
        """
        seed, rerun = check_repetition(seed, rerun)
        json_options, contents = function.describe_options(options)
        return cls(
            experiment=function.name,
            setting=setting,
            seed=seed,
            profile="own",
            rerun=rerun,
            command_net=function.reference,
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
        """Call the function; it has no checkpoints, no `watch` and no progress bar.

        A warning is given if the setting is one of a CUDA GPU and the function allocated no memory
        there.
        """
        n_allocations = _count_allocations(self.setting)  # None without a CUDA GPU
        started = time.perf_counter()
        metrics = self.function(self.setting, self.seed, self.options)
        if n_allocations is not None and _count_allocations(self.setting) == n_allocations:
            problem = f"{self.function.name} allocated no memory on {self.setting.device}"
            warnings.warn(
                f"{problem}: a setting moves no tensors; use tensor.to(setting.device)",
                stacklevel=3,
            )
        self._check_metric_names(metrics)
        seconds = time.perf_counter() - started
        # The history has a single row, whose loss is the first metric.
        first_metric = float(next(iter(metrics.values()), math.nan))
        row = WindowRecord(window=0, step=1, loss=first_metric, seconds=seconds)
        return TrainingOutcome([row], _summarize_metrics(metrics, seconds))

    def restore(self, stored: StoredRun, keep_weights: bool) -> RestoredRun:  # noqa: ARG002
        """Return a result without network and data, which a training function does not give."""
        return RestoredRun(None, None)

    def _check_metric_names(self, metrics: dict[str, Any]) -> None:
        """Raise `GpulabError` if a metric is named like a column of the table or an option."""
        # Columns that are meant for these metrics. An option may also be called `loss`.
        allowed = {DEFAULT_METRIC, "heldout_loss", "loss"}
        reserved = {*RUN_COLUMNS, "options", *self.function.options} - allowed
        clashes = reserved & metrics.keys()
        if clashes:
            problem = (
                f"a metric cannot be called {min(clashes)!r}, which is a column of gpulab.runs or"
                " an option"
            )
            raise GpulabError(f"{problem}; give it another name")


def _summarize_metrics(metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Build the results for the record of a run with these metrics.

    If there are no metrics, or one of them is not finite, the training diverged, and no metrics are
    recorded. A metric `loss` also becomes the `final_loss`, unless there is one.
    """
    if not all(map(math.isfinite, metrics.values())):
        metrics = {}
    if "loss" in metrics:
        metrics.setdefault(DEFAULT_METRIC, metrics["loss"])
    return {
        "status": "finished" if metrics else "diverged",
        "metrics": metrics or None,
        "summary": {
            DEFAULT_METRIC: metrics.get(DEFAULT_METRIC),
            "heldout_loss": metrics.get("heldout_loss"),
            "seconds": seconds,
        },
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
    """Return how often torch has allocated memory on a CUDA GPU; None for other devices."""
    if setting.kind != "cuda":
        return None
    return torch.cuda.memory_stats(setting.device).get("allocation.all.allocated", 0)


def _parse_metrics(value: object) -> dict[str, Any]:
    """Convert what a training function returned to Python numbers by name.

    A number without a name is called `final_loss`. Numbers may be tensors with one element.

    Raises:
        GpulabError: If the value is neither a number nor a dictionary of numbers, or is empty.
    """
    metrics: Mapping[Any, Any] = value if isinstance(value, Mapping) else {DEFAULT_METRIC: value}
    try:
        # `float` would accept texts, so they are rejected here.
        if not metrics or any(isinstance(number, str | bytes) for number in metrics.values()):
            raise TypeError
        # A tensor that requires gradients is detached, because `float` would warn.
        detached_numbers = {
            str(name): number.detach() if hasattr(number, "detach") else number
            for name, number in metrics.items()
        }
        return {
            name: bool(number) if isinstance(number, bool | np.bool_) else float(number)
            for name, number in detached_numbers.items()
        }
    except (TypeError, ValueError, RuntimeError):
        # torch raises a `RuntimeError` for a tensor with several elements.
        raise GpulabError(
            f"the function returned {value!r:.200}; expected a number, or a dict of numbers by name"
        ) from None


def _check_parameters(train: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a training function by name, without `*args` and `**kwargs`.

    Raises:
        UsageError: If `seed` is missing, if an option has no default, or if an option is named like
            a column of `gpulab.runs`.
    """
    signature = inspect.signature(train)
    parameters = {
        parameter_name: parameter
        for parameter_name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    required_parameters = [
        parameter_name
        for parameter_name, parameter in parameters.items()
        if parameter_name not in FILLED_PARAMETERS and parameter.default is parameter.empty
    ]
    if required_parameters or "seed" not in parameters:
        problem = "it takes no seed"
        if required_parameters:
            problem = f"{required_parameters[0]} has no default"
        raise UsageError(
            f"train {name}{signature}: {problem}; expected a parameter seed, optionally setting,"
            " and options with defaults, in any order"
        )
    reserved = {*RUN_COLUMNS, "options"} - OVERRIDABLE_COLUMNS
    clashes = reserved & (parameters.keys() - set(FILLED_PARAMETERS))
    if clashes:
        raise UsageError(
            f"train {name}: option {min(clashes)!r} is a column of gpulab.runs; give it another"
            " name"
        )
    return parameters
