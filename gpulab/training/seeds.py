"""One training of your own from several seeds, without an experiment around it: `seed_runs`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.errors import UsageError, check_count
from gpulab.settings import Setting
from gpulab.training.experiment import Experiment
from gpulab.training.functions import TrainingFunction
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
        store: A folder in which runs are kept. By default nothing is kept.
        workers: How many seeds train at the same time, each in a process of its own. With one, and without a store,
            they train in this process.
        progress: Whether to show a progress bar.
        **changes: Options of `train`, by name.

    Returns:
        A data frame with a row for each seed, as `gpulab.verdict` takes it. It has the columns
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
    if parsed.isa is None:  # an instruction set is for a fresh process to check
        parsed.check()
    function = TrainingFunction(train)
    job = {"net": function, "setting": str(parsed), "model_options": function.checked(changes)}
    runs = metrics_of([{**job, "seed": seed} for seed in seeds], workers)
    metrics = dict(zip(seeds, Progress(runs, total=len(seeds), unit="run", disable=not progress), strict=True))
    frame = pd.DataFrame({"setting": str(parsed), "seed": seeds})
    frame["status"] = ["finished" if metrics[seed] else "diverged" for seed in seeds]
    names = dict.fromkeys(["final_loss", *(name for each in metrics.values() for name in each)])
    return frame.assign(**{name: [metrics[seed].get(name, math.nan) for seed in seeds] for name in names})


def metrics_of(jobs: list[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """The numbers that each training gave, none where it diverged; the first that fails raises its error.

    Args:
        jobs: Arguments of `gpulab.train`, with a function of the user's.
        count: How many are trained at the same time, in worker processes; with 1 they are trained in this process.
    """
    if count == 1:
        yield from (train_one(**job, progress=False).metrics for job in jobs)
        return
    with Workers(count) as workers, ThreadPoolExecutor(count) as threads:
        try:
            yield from threads.map(lambda job: workers.train(job, lambda *_: None), jobs)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            workers.stop()
            raise
