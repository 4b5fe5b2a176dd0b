"""What a search trains: gpulab's own networks as the records of runs say, or a function of the user's."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.errors import GpulabError, UsageError
from gpulab.settings import OPTIONS, Setting
from gpulab.training import folders
from gpulab.training import store as stores
from gpulab.training.experiment import Experiment
from gpulab.training.functions import TrainingFunction
from gpulab.training.protocol import FACTORS, Specification
from gpulab.training.remote import folder_of
from gpulab.training.workers import Workers

if TYPE_CHECKING:
    import pandas as pd


def seed_runs(
    train: Callable[..., Any] | str,
    setting: Setting | str = "cpu",
    seeds: int | Iterable[int] = 10,
    *,
    store: str | Path | None = None,
    workers: int = 1,
    progress: bool = True,
    **changes: Any,
) -> pd.DataFrame:
    """Train a network of your own from several seeds, under one setting.

    With a `store` it is an `Experiment`: what is there is not trained again. Without one nothing is kept, one worker
    is this process, and the first seed that fails ends it.

    Args:
        train: A function `train(seed, setting)`, as `gpulab.train` describes it, or its `file.py:name`.
        setting: What to train under.
        seeds: How many, or the seeds themselves.
        store: A folder in which runs are kept.
        workers: How many seeds train at the same time.
        progress: Whether to show a bar.
        **changes: Options of `train`.

    Returns:
        A row a run, as `verdict` and `reproduce` take it: `setting`, `seed`, `status` (`finished` or
        `diverged`), `final_loss` (NaN when diverged), and a column for each other metric. With a store, the columns
        of `gpulab.runs`.

    Raises:
        UsageError: For what makes no sense.
        GpulabError: When the setting cannot run here, or a training fails.

    Examples:
        >>> runs = seed_runs(lambda seed: 1.0 / seed, seeds=range(3), progress=False)
        >>> runs.status.tolist()  # one over nothing
        ['diverged', 'finished', 'finished']
    """
    import pandas as pd

    from gpulab.progress import Progress

    check_numbers(workers=workers)
    parsed = Setting.parse(setting)
    seeds = list(range(seeds) if isinstance(seeds, int) else seeds)
    if not seeds:
        raise UsageError("seeds: at least one is needed")
    if store is not None:
        return Experiment(train, [str(parsed)], seeds, store=store, workers=workers, options=changes).run(progress)
    check_runs_here(parsed)
    function = UserFunction(train)
    function.training.checked(changes)
    with Trainings(function.metrics, workers) as trainings:
        runs = trainings.results(str(parsed), seeds, changes)
        metrics = dict(Progress(runs, total=len(seeds), unit="run", disable=not progress))
    frame = pd.DataFrame({"setting": str(parsed), "seed": seeds})
    frame["status"] = ["finished" if metrics[seed] else "diverged" for seed in seeds]
    names = dict.fromkeys(["final_loss", *(name for each in metrics.values() for name in each)])
    return frame.assign(**{name: [metrics[seed].get(name, math.nan) for seed in seeds] for name in names})


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
        self.folder = folder_of(stores.default_store() if store is None else store)
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
        from gpulab.training.plan import planned

        job = self.job(setting, seed, changes)
        run = folders.find(self.folder, planned(**job)) or self.folder / workers.train(job, lambda *_: None)
        value = folders.read_record(run)["summary"][self.metric]
        return math.nan if value is None else float(value)


class UserFunction(Objective):
    """Trains by calling a function, in this process or, several at the same time, in others."""

    trainer = " by train()"

    def __init__(
        self, train: Callable[..., Any] | str, metric: str = "final_loss", runs: pd.DataFrame | None = None
    ) -> None:
        self.training, self.metric = TrainingFunction(train), metric
        self.given: dict[str, Any] = {}  # with what it made the runs, where that was not its defaults
        if runs is not None and "options" in runs and runs.experiment.iloc[0] == self.training.name:
            done, usual = json.loads(runs.options.iloc[0]), self.training.plain_options({})
            self.given = {name: value for name, value in done.items() if name in usual and value != usual[name]}
        self.originals = self.training.options | self.given
        self.identity = [self.training.name, self.training.source, self.given]

    def metrics(self, setting: str, seed: int, changes: Mapping[str, Any], workers: Workers) -> dict[str, Any]:
        """What the function gave; nothing when it diverged."""
        from gpulab.training.run import train

        job: dict[str, Any] = {"net": self.training, "setting": setting, "seed": seed}
        job["model_options"] = {**self.given, **changes}
        return train(**job, progress=False).metrics if workers.count == 1 else workers.train(job, lambda *_: None)

    def loss(self, setting: str, seed: int, changes: Mapping[str, Any], workers: Workers) -> float:
        """The metric among what the function gave."""
        metrics = self.metrics(setting, seed, changes, workers)
        if metrics and self.metric not in metrics:
            raise GpulabError(f"{self.training.name} gave no {self.metric!r}; it gave {', '.join(metrics)}")
        return float(metrics.get(self.metric, math.nan))


class Trainings:
    """Trains seeds, as a context: one after the other in this thread, or `count` at the same time."""

    def __init__(self, train: Callable[[str, int, Mapping[str, Any], Workers], Any], count: int) -> None:
        self.train = train
        self.workers = Workers(count)
        self.pool = ThreadPoolExecutor(count)

    def results(self, setting: str, seeds: Iterable[int], changes: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
        """(seed, what training gave) of each, as they end. The first that fails ends it, and its error is raised."""
        if self.workers.count == 1:
            for seed in seeds:
                yield seed, self.train(setting, seed, changes, self.workers)
            return
        futures = {self.pool.submit(self.train, setting, seed, changes, self.workers): seed for seed in seeds}
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
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.workers.__exit__()
        self.pool.shutdown()


def check_runs_here(setting: Setting) -> None:
    """Raise where the machine cannot run a setting; an instruction set is for a fresh process to check."""
    if setting.isa is None:
        setting.check()


def check_numbers(**numbers: int) -> None:
    """Raise `UsageError` for one that is not a whole number from 1."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}={value!r}: expected a whole number from 1")
