"""How a network is trained again: as the record of a run says, or by a function of your own."""

from __future__ import annotations

import base64
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.errors import GpulabError, UsageError
from gpulab.settings import OPTIONS, Setting
from gpulab.training import store as stores
from gpulab.training.experiment import Workers

if TYPE_CHECKING:
    import pandas as pd

LAST_FIFTH = 5
NUMERIC_FAILURES: tuple[type[Exception], ...] = (ArithmeticError, np.linalg.LinAlgError)


def seed_runs(
    train: Callable[..., Any],
    setting: Setting | str = "cpu",
    seeds: int | Iterable[int] = 10,
    *,
    workers: int = 1,
    progress: bool = True,
    **changes: Any,
) -> pd.DataFrame:
    """Train a network of your own from several seeds: a row a run, as `verdict` and `reproduce` take it.

    `train` is what `reproduce` describes; `changes` are handed to it. Columns: `setting`, `seed`,
    `status` (`finished` or `diverged`), `final_loss` (NaN when diverged).

    >>> runs = seed_runs(lambda setting, seed: 1.0 / seed, seeds=range(3), progress=False)
    >>> runs.status.tolist()  # one over nothing
    ['diverged', 'finished', 'finished']
    """
    import pandas as pd
    from tqdm.auto import tqdm

    check_numbers(workers=workers)
    parsed = Setting.parse(setting)
    check_runs_here(parsed)
    wanted = list(range(seeds) if isinstance(seeds, int) else seeds)
    if not wanted:
        raise UsageError(f"seeds={seeds!r}: at least one is needed")
    lab = Own(train)
    for name in changes:
        lab.original(name)
    losses: dict[int, float] = {}
    with Trainings(lab, workers) as trainings, tqdm(total=len(wanted), unit="run", disable=not progress) as bar:
        for seed, loss in trainings.losses(str(parsed), wanted, changes):
            losses[seed] = loss
            bar.update()
    rows = [{"setting": str(parsed), "seed": seed, "final_loss": losses[seed]} for seed in wanted]
    frame = pd.DataFrame(rows)
    frame.insert(2, "status", np.where(np.isfinite(frame.final_loss), "finished", "diverged"))
    return frame


class Lab:
    """Knows how to train again: what can be changed, and the loss from one seed."""

    names: tuple[str, ...]
    identity: Any
    in_this_process = False

    def original(self, name: str) -> Any:
        """What a factor was; `UsageError` for one that cannot be changed."""
        raise NotImplementedError

    def job(self, setting: str, seed: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        """What a worker is told."""
        raise NotImplementedError

    def loss(self, job: dict[str, Any], answer: Any) -> float:
        """The loss that a worker's answer speaks of; NaN for a diverged run."""
        raise NotImplementedError

    def done(self, job: dict[str, Any]) -> Any:  # noqa: ARG002
        """The answer where the job was done before, else None."""
        return None

    def _unknown(self, name: str, setting: str = "") -> UsageError:
        known = ", ".join([*self.names, *OPTIONS])
        return UsageError(f"search: nothing named {name!r} can be changed{setting}; there are {known}")


class Records(Lab):
    """Trains gpulab's own networks as the records of the target's runs say."""

    def __init__(self, runs: pd.DataFrame, metric: str, store: str | Path | None) -> None:
        from gpulab.models import MODELS

        if "path" not in runs:
            raise UsageError("target does not say how it was trained (no column 'path'); give train=")
        record = stores.record_of(runs.iloc[0])
        if record["experiment"] not in MODELS or metric not in record["summary"]:
            raise UsageError(
                f"target: {metric} of {record['experiment']!r} cannot be trained again from its record; give train="
            )
        self.metric = metric
        self.folder = Path(stores.default_store() if store is None else store)
        done = record["configuration"]
        self.model_options = done["model_options"]
        takes = inspect.signature(MODELS[record["experiment"]]).parameters
        plain = {name: default.default for name, default in takes.items()} | self.model_options
        self.originals = {"learning_rate": done["learning_rate"]} | {
            name: value for name, value in plain.items() if isinstance(value, str | int | float)
        }
        self.names = tuple(self.originals)
        for name in {"loader", "decoder", "flip", "draws"} & set(runs.columns):
            if len(values := runs[name].drop_duplicates()) > 1:
                raise UsageError(f"target mixes runs with {name} {', '.join(map(str, values))}; choose those of one")
        known = {"size", "scene_seed", "speed", "grey"} & done["data_options"].keys()
        renamed = {"scene_seed": "seed"}
        chosen: dict[str, Any] = {name: record[name] for name in ("loader", "flip", "draws") if name in record}
        decoder = {"decoder": record["decoder"]} if record.get("decoder") else {}
        self.base: dict[str, Any] = {
            "net": record["experiment"],
            "profile": record["profile"],
            "data": done["data"],
            "data_options": {renamed.get(name, name): done["data_options"][name] for name in sorted(known)} | decoder,
            "frames": done["frames"],
            "keep_weights": False,
            **chosen,
        }
        self.identity = {**self.base, "learning_rate": done["learning_rate"], "model_options": self.model_options}

    def original(self, name: str) -> Any:
        """What a factor was."""
        if name not in self.originals:
            raise self._unknown(name)
        return self.originals[name]

    def job(self, setting: str, seed: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `gpulab.train`."""
        rate = changes.get("learning_rate", self.originals["learning_rate"])
        model = self.model_options | {name: value for name, value in changes.items() if name != "learning_rate"}
        given = {"setting": setting, "seed": seed, "learning_rate": rate, "model_options": model}
        return {**self.base, **given, "store": str(self.folder)}

    def done(self, job: dict[str, Any]) -> str | None:
        """The id of the run, where the store has it."""
        from gpulab.training.plan import planned_id

        name = planned_id(**job)
        return name if stores.is_done(self.folder, name) else None

    def loss(self, job: dict[str, Any], answer: Any) -> float:  # noqa: ARG002
        """The metric in the record of a run."""
        value = stores.read_record(self.folder / answer)["summary"][self.metric]
        return math.nan if value is None else float(value)


class Own(Lab):
    """Trains by calling a function."""

    in_this_process = True

    def __init__(self, train: Callable[..., Any]) -> None:
        if not callable(train):
            raise UsageError(f"train {train!r}: expected a function train(setting, seed, **changes)")
        try:
            given = list(inspect.signature(train).parameters.values())
        except (TypeError, ValueError):
            raise UsageError(f"train {train!r}: its parameters cannot be read; wrap it in a function") from None
        places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if len(given) < 2 or any(p.kind not in places for p in given[:2]):
            raise UsageError(f"train{inspect.signature(train)}: expected train(setting, seed, **changes)")
        self.train = train
        self.originals = {p.name: p.default for p in given[2:] if p.default is not p.empty}
        self.names = tuple(self.originals)
        if missing := [p.name for p in given[2:] if p.default is p.empty and p.kind in places]:
            raise UsageError(f"train: {', '.join(missing)} without a default, which says what was trained")
        try:
            text = inspect.getsource(train)
        except (OSError, TypeError):
            text = ""
        self.identity = [getattr(train, "__qualname__", type(train).__qualname__), text, str(inspect.signature(train))]

    def original(self, name: str) -> Any:
        """What a factor was."""
        if name not in self.originals:
            raise self._unknown(name, " by train()")
        return self.originals[name]

    def job(self, setting: str, seed: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The call, pickled."""
        call = optional("cloudpickle").dumps((final_loss, (self.train, setting, seed, dict(changes))))
        return {"setting": setting, "seed": seed, "call": base64.b64encode(call).decode(), "path": sys.path}

    def loss(self, job: dict[str, Any], answer: Any) -> float:  # noqa: ARG002
        """The answer itself."""
        return math.nan if answer is None else float(answer)


def final_loss(
    train: Callable[..., Any], setting: str, seed: int, changes: Mapping[str, Any], tell: Callable[[int, float], None]
) -> float | None:
    """The loss of one training by a function of the user's, None when it diverged; see `reproduce`."""
    import torch

    parsed = Setting.parse(setting)
    with parsed.apply():
        devices = [torch.cuda.current_device()] if parsed.kind == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            try:
                loss = _summary(train(parsed, seed, **changes), tell)
            except (*NUMERIC_FAILURES, torch.linalg.LinAlgError):
                return None
    return loss if math.isfinite(loss) else None


def _summary(outcome: Any, tell: Callable[[int, float], None]) -> float:
    """A final loss from what a training returned: a number, or the losses of its windows."""
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
    last = losses[-max(1, len(losses) // LAST_FIFTH) :]
    return math.fsum(last) / len(last)


class Trainings:
    """Trains seeds, several at the same time where asked to."""

    def __init__(self, lab: Lab, count: int) -> None:
        self.lab = lab
        self.here = lab.in_this_process and count == 1
        self.count = count
        self.workers = Workers(count)
        self.pool = ThreadPoolExecutor(count)

    def losses(self, setting: str, seeds: Iterable[int], changes: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
        """(seed, loss) of each, as they end. The first that fails ends it, and its error is raised."""
        if self.here:
            assert isinstance(self.lab, Own)
            for seed in seeds:
                answer = final_loss(self.lab.train, setting, seed, changes, lambda *_: None)
                yield seed, self.lab.loss({}, answer)
            return
        jobs = {self.pool.submit(self._one, self.lab.job(setting, seed, changes)): seed for seed in seeds}
        try:
            for done in as_completed(jobs):
                yield jobs[done], done.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            raise

    def _one(self, job: dict[str, Any]) -> float:
        answer = self.lab.done(job) or self.workers.train(job, lambda *_: None)
        return self.lab.loss(job, answer)

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
