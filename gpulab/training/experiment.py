"""Experiments: seeds × settings, each run in a worker process, so that no setting affects another."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import SoftFileLease, Timeout

from gpulab import files
from gpulab.errors import GpulabError, UsageError, check_count
from gpulab.passports import passport
from gpulab.report import Progress
from gpulab.settings import Setting
from gpulab.store import runs as stores
from gpulab.store import tables
from gpulab.training import run
from gpulab.training.functions import function_of
from gpulab.training.profiles import protocol
from gpulab.training.spec import RunSpec
from gpulab.training.workers import INSIDE, Workers

if TYPE_CHECKING:
    import pandas as pd

WAIT = 1.0  # seconds between looks at what other drivers are doing
CLAIMS = ".claims"  # the folder in a store in which a lock says that a run is being trained
LEASE = 120.0  # seconds after which a lock that nobody refreshes is taken: network file systems may be 60 behind


@dataclass
class Experiment:
    """Train the same model under several settings from the same seeds, for a comparison by `gpulab.verdict`.

    Each run is trained in a worker process, so that no setting leaks into another. All runs are kept in a store; those
    that it has already are not trained again.

    Args:
        model: A training of your own, `train(seed, setting)` or `"my_training.py:train"`, as `gpulab.train` describes
            it; or `autoencoder`, `prednet` or `whitener`.
        settings: The settings to compare, as texts.
        seeds: How many (from 0 on), or the seeds themselves. By default the profile says, and 10 for a training of your
            own.
        profile: For gpulab's own networks, how long to train and on what: `smoke`, `quick` or `paper`; for PredNet also
            `motion`.
        store: The folder in which runs are kept. By default `$GPULAB_STORE`, or the folder `runs`.
        reruns: How often each seed and setting is run.
        workers: How many runs are trained at the same time, each in a process of its own. With more than one, the
            `seconds` of a run say nothing. Under a setting of a CUDA GPU, gpulab's own networks share the GPU: they
            are threads of one process, each on a stream of its own. Each has the result that it has alone, to the bit,
            and its record says `shared`.
        options: Options of your training by name, with the values that all runs have. For gpulab's own networks,
            arguments of `gpulab.train` that JSON can carry, such as `frames` or `data`. Weights are kept only with
            `keep_weights=True` among these.
        variants: Dictionaries of further options. Each of them is trained under every setting from every seed.
        registered: A file that says what is asked, written before the first run, as of `gpulab.train`.

    Attributes:
        settings: The settings as a list of texts.
        seeds: The seeds as a list of numbers.
        variants: The variants as a list.
        folder: Where the runs are kept, a `Path`.

    Raises:
        UsageError: For arguments that make no sense, before any worker starts.

    Examples:
        >>> import tempfile
        >>> import gpulab as gl
        >>> settings = ["cpu", "cpu:threads=1"]
        >>> exp = gl.Experiment("autoencoder", settings, seeds=1, profile="smoke", store=tempfile.mkdtemp())
        >>> exp.run(progress=False)[["setting", "seed", "status"]].values.tolist()
        [['cpu', 0, 'finished'], ['cpu:threads=1', 0, 'finished']]
    """

    model: str | Callable[..., Any]
    settings: Iterable[str]
    seeds: int | Iterable[int] | None = None
    profile: str = "quick"
    store: str | Path | None = None
    reruns: int = 1
    workers: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    variants: Iterable[dict[str, Any]] = ({},)
    registered: str | Path | None = None

    def __post_init__(self) -> None:
        self.training = function_of(self.model)
        usual = 10 if self.training else protocol(str(self.model), self.profile).seeds
        settings = [self.settings] if isinstance(self.settings, str | Setting) else self.settings
        self.settings = [str(Setting.parse(text)) for text in settings]
        seeds = usual if self.seeds is None else self.seeds
        self.seeds = list(range(seeds) if isinstance(seeds, int) else seeds)
        self.variants = list(self.variants)
        self.folder = stores.store_folder(self.store)
        check_count("reruns", self.reruns)
        check_count("workers", self.workers)
        if not (self.settings and self.seeds and self.variants):
            asked = f"settings={self.settings}, seeds={seeds!r}, variants={self.variants}"
            raise UsageError(f"{asked}: an experiment needs one of each at least")

    def jobs(self) -> list[dict[str, Any]]:
        """List the arguments of each training, as `gpulab.train` takes them, ordered by setting."""
        seeds: Any = self.seeds
        of_all = {"profile": self.profile, "store": str(self.folder), "registered": self.registered}
        given = [{**self.options, **variant} for variant in self.variants]
        # Weights are of no use for a verdict, unless the options ask for them.
        given = [{"model_options": each} if self.training else {"keep_weights": False, **each} for each in given]
        return [
            {"net": self.training or self.model, "setting": setting, "seed": seed, "rerun": rerun, **each, **of_all}
            for setting, each, rerun, seed in itertools.product(self.settings, given, range(self.reruns), seeds)
        ]

    def run(self, progress: bool = True) -> pd.DataFrame:
        """Train the runs that the store does not have yet, and return all runs of this experiment.

        An interrupted experiment goes on where it was when it is called again. Runs that fail do not stop the others:
        the error comes at the end and names them. Another process may do the same experiment at the same time, on this
        machine or another that sees the store. No run is then done twice, and both wait until all are done.

        Args:
            progress: Whether to show a progress bar.

        Returns:
            A data frame with a row for each run, ordered by setting and seed, with the columns of `gpulab.runs`.

        Raises:
            UsageError: For arguments that make no sense, and a script that starts an experiment outside
                `if __name__ == "__main__"`.
            GpulabError: Where runs failed, or the store cannot be written.
        """
        if INSIDE in os.environ:
            raise UsageError("an experiment began as a worker imported its file: put it under __name__ == '__main__'")
        finished = self._train(self.jobs(), progress)
        frame = tables.runs(self.folder)
        # Variants of one setting and seed come as they were given: the store lists them by their ids.
        frame = frame[frame.id.isin(finished)].sort_values("id", key=lambda ids: ids.map(finished.index))
        return frame.sort_values(["setting", "seed"], ignore_index=True, kind="stable")

    def _train(self, jobs: list[dict[str, Any]], progress: bool) -> list[str]:
        """Do the runs that the store has not, and return the ids of all."""
        here = passport()
        wanted = [RunSpec.of(**job).identity(here) for job in jobs]  # `UsageError` for what has no identity
        # A lock that knows a dead holder of this machine at once, and one of another by a mark that is not refreshed:
        # for that it has to be the same at every look.
        marks = [self.folder / CLAIMS / f"{identity.id}.lock" for identity in wanted]
        locks = [SoftFileLease(mark, lease_duration=LEASE, blocking=False, thread_local=False) for mark in marks]
        done = {number for number, identity in enumerate(wanted) if stores.find_run(self.folder, identity)}
        failures: dict[int, str] = {}  # why, by the number of the run

        def do(number: int) -> None:
            """Have a run done, unless another driver is doing it."""
            lock, identity = locks[number], wanted[number]
            with files.writing(lock.lock_file), contextlib.suppress(Timeout), lock:
                try:
                    if not stores.find_run(self.folder, identity) and workers.do(jobs[number]) != identity.id:
                        raise GpulabError("its function or data were changed while the experiment ran; run it again")
                    done.add(number)
                except Exception as error:
                    kind = "" if isinstance(error, GpulabError) else f"{type(error).__name__}: "
                    failures[number] = f"{jobs[number]['setting']} seed {jobs[number]['seed']}: {kind}{error}"
                bar.update(len(done) + len(failures) - bar.n)

        bar = Progress(total=len(jobs), unit="run", leave=False, disable=not progress)
        with Workers(self.workers) as workers, bar:
            while waiting := {n: job for n, job in enumerate(jobs) if n not in done and n not in failures}:
                workers.each(do, waiting)
                time.sleep(WAIT * (len(done) + len(failures) < len(jobs)))  # for another driver
        if failures:
            raise GpulabError(
                f"{len(failures)} of {len(jobs)} runs failed, the others are kept in {self.folder}; "
                f"run again to try those: {'; '.join(failures.values())}"
            )
        return [identity.id for identity in wanted]


def seed_runs(
    train: Callable[..., Any] | str,
    setting: Setting | str = "cpu",
    seeds: int | Iterable[int] = 10,
    *,
    progress: bool = True,
    **changes: Any,
) -> pd.DataFrame:
    """Train a network of your own from several seeds under one setting, in this process; nothing is kept.

    The first seed that fails ends it. An `Experiment` keeps runs in a store, and goes on where it was interrupted.

    Args:
        train: A function `train(seed, setting)`, as `gpulab.train` describes it, or the text `"my_training.py:train"`.
        setting: The setting to train under.
        seeds: How many (from 0 on), or the seeds themselves.
        progress: Whether to show a progress bar.
        **changes: Options of `train`, by name.

    Returns:
        A data frame with a row for each seed, as `gpulab.verdict` takes it. It has the columns
        `setting`, `seed`, `status` (`finished` or `diverged`), `final_loss` (NaN when diverged), and one for each other
        number that the training gave.

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

    jobs = Experiment(train, [str(setting)], seeds, options=changes).jobs()
    rows = []
    for job in Progress(jobs, unit="run", disable=not progress):
        one = run.train(**job | {"store": None}, progress=False)
        of_run = {"setting": job["setting"], "seed": job["seed"], "status": one.status, "final_loss": one.final_loss}
        rows.append(of_run | one.metrics)
    return pd.DataFrame(rows)
