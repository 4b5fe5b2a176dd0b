"""What a search trains: gpulab's own networks as the records of runs say, or a function of the user's."""

from __future__ import annotations

import base64
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.errors import GpulabError, UsageError
from gpulab.settings import OPTIONS, Setting
from gpulab.training import store as stores
from gpulab.training.experiment import Workers
from gpulab.training.protocol import FACTORS, Specification

if TYPE_CHECKING:
    import pandas as pd


def seed_runs(
    train: Callable[..., Any],
    setting: Setting | str = "cpu",
    seeds: int | Iterable[int] = 10,
    *,
    workers: int = 1,
    progress: bool = True,
    **changes: Any,
) -> pd.DataFrame:
    """Train a network of your own from several seeds.

    Args:
        train: A function `train(setting, seed, **changes)`, as `reproduce` describes it.
        setting: What to train under.
        seeds: How many, or the seeds themselves.
        workers: How many seeds train at the same time.
        progress: Whether to show a bar.
        **changes: Handed to `train`.

    Returns:
        A row a run, as `verdict` and `reproduce` take it: `setting`, `seed`, `status` (`finished` or
        `diverged`), `final_loss` (NaN when diverged).

    Raises:
        UsageError: For what makes no sense.
        GpulabError: When the setting cannot run here.

    Examples:
        >>> runs = seed_runs(lambda setting, seed: 1.0 / seed, seeds=range(3), progress=False)
        >>> runs.status.tolist()  # one over nothing
        ['diverged', 'finished', 'finished']
    """
    import pandas as pd
    from tqdm.auto import tqdm

    check_numbers(workers=workers)
    parsed = Setting.parse(setting)
    check_runs_here(parsed)
    frame = pd.DataFrame({"setting": str(parsed), "seed": list(range(seeds) if isinstance(seeds, int) else seeds)})
    if frame.empty:
        raise UsageError(f"seeds={seeds!r}: at least one is needed")
    objective = UserFunction(train)
    for name in changes:
        objective.original(name)
    with Trainings(objective, workers) as trainings:
        runs = trainings.losses(str(parsed), frame.seed.tolist(), changes)
        losses = frame.seed.map(dict(tqdm(runs, total=len(frame), unit="run", disable=not progress)))
    return frame.assign(status=np.where(np.isfinite(losses), "finished", "diverged"), final_loss=losses)


class Objective:
    """The loss of a training as a function of setting, seed and parameters."""

    originals: dict[str, Any]  # the parameters that can be changed, with what they were
    identity: Any  # what JSON can carry of everything else that decides a loss
    trainer = ""  # who takes the parameters, in the words of an error

    def original(self, name: str) -> Any:
        """What a parameter was; `UsageError` for one that cannot be changed."""
        if name not in self.originals:
            names = ", ".join([*self.originals, *OPTIONS])
            raise UsageError(f"search: nothing named {name!r} can be changed{self.trainer}; there are {names}")
        return self.originals[name]

    def loss(self, setting: str, seed: int, changes: Mapping[str, Any], workers: Workers) -> float:
        """Train, and return the loss; NaN for a diverged run."""
        raise NotImplementedError


class Records(Objective):
    """Trains gpulab's own networks as the records of the target's runs say. What the store has is not trained."""

    def __init__(self, runs: pd.DataFrame, metric: str, store: str | Path | None) -> None:
        from gpulab.models import MODELS

        if "path" not in runs:
            raise UsageError("target does not say how it was trained (no column 'path'); give train=")
        record = stores.record_of(runs.iloc[0])
        if record["experiment"] not in MODELS or metric not in record["summary"]:
            raise UsageError(
                f"target: {metric} of {record['experiment']!r} cannot be trained again from its record; give train="
            )
        for name in FACTORS.keys() & set(runs.columns):
            if FACTORS[name].of != "model" and len(values := runs[name].drop_duplicates()) > 1:
                raise UsageError(f"target mixes runs with {name} {', '.join(map(str, values))}; choose those of one")
        self.metric = metric
        self.folder = Path(stores.default_store() if store is None else store)
        self.specification = Specification.from_record(record)
        options = self.specification.options
        parameters = inspect.signature(MODELS[record["experiment"]]).parameters
        model = {name: parameter.default for name, parameter in parameters.items()} | options["model_options"]
        numbers_and_words = {name: value for name, value in model.items() if isinstance(value, str | int | float)}
        self.originals = {"learning_rate": options["learning_rate"]} | numbers_and_words
        self.identity = {"net": self.specification.model, "profile": self.specification.profile, **options}

    def job(self, setting: str, seed: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `gpulab.train`."""
        options = dict(self.specification.options)
        options["model_options"] = options["model_options"] | changes
        options["learning_rate"] = options["model_options"].pop("learning_rate", options["learning_rate"])
        varied = replace(self.specification, setting=setting, seed=seed, rerun=0, options=options)
        return varied.arguments() | {"keep_weights": False, "store": str(self.folder)}

    def loss(self, setting: str, seed: int, changes: Mapping[str, Any], workers: Workers) -> float:
        """The metric in the record of the run."""
        from gpulab.training.plan import planned_id

        job = self.job(setting, seed, changes)
        run = planned_id(**job)
        if not stores.is_done(self.folder, run):
            run = workers.train(job, lambda *_: None)
        value = stores.read_record(self.folder / run)["summary"][self.metric]
        return math.nan if value is None else float(value)


class UserFunction(Objective):
    """Trains by calling a function, in this process or, several at the same time, in others."""

    trainer = " by train()"

    def __init__(self, train: Callable[..., Any]) -> None:
        if not callable(train):
            raise UsageError(f"train {train!r}: expected a function train(setting, seed, **changes)")
        try:
            signature = inspect.signature(train)
        except (TypeError, ValueError):
            raise UsageError(f"train {train!r}: its parameters cannot be read; wrap it in a function") from None
        parameters = list(signature.parameters.values())
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if len(parameters) < 2 or any(p.kind not in positional for p in parameters[:2]):
            raise UsageError(f"train{signature}: expected train(setting, seed, **changes)")
        if missing := [p.name for p in parameters[2:] if p.default is p.empty and p.kind in positional]:
            raise UsageError(f"train: {', '.join(missing)} without a default, which says what was trained")
        self.train = train
        self.originals = {p.name: p.default for p in parameters[2:] if p.default is not p.empty}
        try:
            text = inspect.getsource(train)
        except (OSError, TypeError):
            text = ""
        self.identity = [getattr(train, "__qualname__", type(train).__qualname__), text, str(signature)]

    def loss(self, setting: str, seed: int, changes: Mapping[str, Any], workers: Workers) -> float:
        """What the function returned, or the mean of the end of what it yielded."""
        arguments = (self.train, setting, seed, dict(changes))
        if workers.count == 1:
            loss = final_loss(*arguments)
        else:
            call = base64.b64encode(optional("cloudpickle").dumps((final_loss, arguments))).decode()
            job = {"setting": setting, "seed": seed, "call": call, "path": sys.path}
            loss = workers.train(job, lambda *_: None)
        return math.nan if loss is None else float(loss)


def final_loss(
    train: Callable[..., Any],
    setting: str,
    seed: int,
    changes: Mapping[str, Any],
    tell: Callable[[int, float], None] = lambda *_: None,
) -> float | None:
    """The loss of one training by a function of the user's, None when it diverged; `tell` hears of every window."""
    import torch

    parsed = Setting.parse(setting)
    with parsed.apply(), torch.random.fork_rng([torch.cuda.current_device()] if parsed.kind == "cuda" else []):
        torch.manual_seed(seed)
        try:
            loss = _mean_of_the_end(train(parsed, seed, **changes), tell)
        except (ArithmeticError, np.linalg.LinAlgError, torch.linalg.LinAlgError):
            return None
    return loss if math.isfinite(loss) else None


def _mean_of_the_end(outcome: Any, tell: Callable[[int, float], None]) -> float:
    """The final loss: what a training returned, or the mean of the last fifth of what it yielded."""
    if not isinstance(outcome, Iterable) or getattr(outcome, "ndim", 1) == 0:
        return float(outcome)
    losses: list[float] = []
    for loss in outcome:
        losses.append(float(loss))
        if not math.isfinite(losses[-1]):
            return math.nan
        tell(len(losses), losses[-1])
    if not losses:
        raise ValueError("train gave no loss")
    last = losses[-max(1, len(losses) // 5) :]
    return math.fsum(last) / len(last)


class Trainings:
    """Trains seeds, as a context: one after the other in this thread, or `count` at the same time."""

    def __init__(self, objective: Objective, count: int) -> None:
        self.objective = objective
        self.workers = Workers(count)
        self.pool = ThreadPoolExecutor(count)

    def losses(self, setting: str, seeds: Iterable[int], changes: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
        """(seed, loss) of each, as they end. The first that fails ends it, and its error is raised."""
        if self.workers.count == 1:
            for seed in seeds:
                yield seed, self.objective.loss(setting, seed, changes, self.workers)
            return
        futures = {self.pool.submit(self.objective.loss, setting, seed, changes, self.workers): seed for seed in seeds}
        try:
            for done in as_completed(futures):
                yield futures[done], done.result()
        finally:
            for future in futures:
                future.cancel()

    def __enter__(self) -> Trainings:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.workers.stop()
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.workers.__exit__()


def check_runs_here(setting: Setting) -> None:
    """Raise where the machine cannot run a setting; an instruction set is for a fresh process to check."""
    if setting.isa is None:
        setting.check()


def check_numbers(**numbers: int) -> None:
    """Raise `UsageError` for one that is not a whole number from 1."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}={value!r}: expected a whole number from 1")


def optional(name: str) -> Any:
    """A module of the extra `search`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise GpulabError(f"the search needs {name}, which is not installed: pip install 'gpulab[search]'") from None
