"""One training from several seeds, without an experiment around it: `seed_runs`, and what a search trains with."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.errors import UsageError, check_count
from gpulab.settings import Setting
from gpulab.store import run_files
from gpulab.training.experiment import Experiment
from gpulab.training.functions import TrainingFunction
from gpulab.training.request import planned
from gpulab.training.request import train as train_one
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
    """Train a network of your own from several seeds under one setting.

    Without a store nothing is kept, and the first seed that fails ends it. With one it is an `Experiment` of one
    setting: runs that the store has already are not trained again.

    Args:
        train: A function `train(seed, setting)`, as `gpulab.train` describes it, or the text `"my_training.py:train"`.
        setting: The setting to train under.
        seeds: How many (from 0 on), or the seeds themselves.
        store: A folder in which runs are kept, or `s3://bucket/prefix`. By default nothing is kept.
        workers: How many seeds train at the same time, each in a process of its own. With one, and without a store,
            they train in this process.
        progress: Whether to show a progress bar.
        **changes: Options of `train`, by name.

    Returns:
        A data frame with a row for each seed, as `gpulab.verdict` and `gpulab.reproduce` take it. It has the columns
        `setting`, `seed`, `status` (`finished` or `diverged`), `final_loss` (NaN when diverged), and one for each other
        number that the training gave. With a store it has the columns of `gpulab.runs`.

    Raises:
        UsageError: For arguments that make no sense.
        GpulabError: When the setting cannot run here, or a training fails.

    Examples:
        >>> import gpulab as gl
        >>> runs = gl.seed_runs(lambda seed: 1.0 / seed, seeds=range(3), progress=False)
        >>> runs.status.tolist()  # seed 0 divides by zero
        ['diverged', 'finished', 'finished']
    """
    import pandas as pd

    from gpulab.progress import Progress

    check_count("workers", workers)
    parsed = Setting.parse(setting)
    asked, seeds = seeds, list(range(seeds) if isinstance(seeds, int) else seeds)
    if not seeds:
        raise UsageError(f"seeds={asked!r}: at least one is needed")
    if store is not None:
        return Experiment(train, [str(parsed)], seeds, store=store, workers=workers, options=changes).run(progress)
    check_runs_here(parsed)
    function = TrainingFunction(train)
    job = {"net": function, "setting": str(parsed), "model_options": function.checked(changes)}
    with trainings(workers) as train_all:
        runs = train_all([{**job, "seed": seed} for seed in seeds])
        metrics = dict(Progress(runs, total=len(seeds), unit="run", disable=not progress))
    frame = pd.DataFrame({"setting": str(parsed), "seed": seeds})
    frame["status"] = ["finished" if metrics[seed] else "diverged" for seed in seeds]
    names = dict.fromkeys(["final_loss", *(name for each in metrics.values() for name in each)])
    return frame.assign(**{name: [metrics[seed].get(name, math.nan) for seed in seeds] for name in names})


Metrics = Callable[[list[dict[str, Any]]], Iterator[tuple[int, dict[str, Any]]]]


@contextlib.contextmanager
def trainings(count: int) -> Iterator[Metrics]:
    """What does jobs, which are arguments of `gpulab.train`: `count` at the same time, each in a worker process.

    With a count of one, functions of the user's are called in this process. It gives the seed of each job and the
    numbers that its training gave, none where it diverged; the first job that fails raises its error.
    """
    workers, threads = Workers(count), ThreadPoolExecutor(count)

    def metrics_of(job: dict[str, Any]) -> dict[str, Any]:
        if count == 1 and isinstance(job["net"], TrainingFunction):
            return train_one(**job, progress=False).metrics
        if "store" not in job:
            return workers.train(job, lambda *_: None)
        # A run that is there needs no worker, whose process takes seconds to start.
        store = Path(job["store"])
        run = run_files.find(store, planned(**job)) or store / workers.train(job, lambda *_: None)
        record = run_files.read_record(run)
        return {} if record["status"] == "diverged" else record.get("metrics") or record["summary"]

    def metrics(jobs: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        done = map(metrics_of, jobs) if count == 1 else threads.map(metrics_of, jobs)
        return zip([job["seed"] for job in jobs], done, strict=True)

    try:
        yield metrics
    except BaseException:
        workers.stop()
        raise
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        workers.close()
        threads.shutdown()


def check_runs_here(setting: Setting) -> None:
    """Raise where the machine cannot run a setting; an instruction set is for a fresh process to check."""
    if setting.isa is None:
        setting.check()
