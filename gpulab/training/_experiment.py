"""Experiments: seeds × settings, isolated from each other in worker processes."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import SoftFileLease, Timeout

from gpulab import files
from gpulab.errors import GpulabError, UsageError, check_count
from gpulab.passports import passport
from gpulab.report import Progress
from gpulab.settings import Setting
from gpulab.store import _tables as tables
from gpulab.store._run_identity import Identity
from gpulab.store._run_store import find_run, store_folder
from gpulab.training._functions import as_training_function
from gpulab.training._planned_run import Options, PlannedRun
from gpulab.training._planning import plan_run
from gpulab.training._profiles import protocol
from gpulab.training._progress import BAR_FORMAT, RunClock, read_share, update_bar
from gpulab.training._run import train as train_run
from gpulab.training._workers import WORKER_VARIABLE, Workers, end_on_signals

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_SEEDS = 10  # the default number of seeds for a training function
POLL_SECONDS = 1.0  # seconds between two checks of the runs that other processes are training
LOCK_FOLDER = ".claims"  # the folder in a store with a lock for each run that is being trained
# Seconds after which a lock that is not refreshed expires. The clocks of network file systems may
# be 60 seconds behind, so the lease is longer.
LOCK_LEASE_SECONDS = 120.0


class Experiment:
    """Train a model under several settings from the same seeds, for `gpulab.verdict` to compare.

    Runs are trained in worker processes, so that the flags of one setting do not affect another.
    All runs are stored, and a run that the store already has is not trained again.

    Args:
        model: One of gpulab's networks, `autoencoder`, `prednet` or `whitener`; or a custom
            training function, `train(seed, setting)` or `"my_training.py:train"`, as described in
            `gpulab.train`. The function may start processes, such as those of a `DataLoader`.
        settings: The settings to compare, as strings.
        seeds: The number of seeds, which are then counted from 0, or the seeds themselves. By
            default the number that the profile gives, and 10 for a custom training function.
        profile: The size of the training of gpulab's own networks: `smoke`, `quick` or `paper`; for
            PredNet also `motion`.
        store: The folder for the runs. By default `$GPULAB_STORE`, or the folder `runs`.
        reruns: The number of runs for each combination of seed and setting.
        workers: The number of runs that are trained at the same time, each in a process of its own.
            With more than one, the `seconds` of a run cannot be compared. On a CUDA GPU, gpulab's
            own networks share the GPU instead: they run in threads of one process, each on its own
            stream. Their results are bitwise the same as without sharing, and their records are
            marked as `shared`.
        options: Options of the custom training function, by name, for all runs. For gpulab's own
            networks, arguments of `gpulab.train` that JSON can represent, such as `frames` or
            `data`. Their weights are stored only if `keep_weights=True` is one of these options.
        variants: Dictionaries of further options. Each variant is trained under every setting from
            every seed.
        registered: A file that states the question and was written before the first run; see
            `gpulab.train`.

    Attributes:
        settings: The list of settings, as strings.
        seeds: The list of seeds.
        variants: The list of variants.
        folder: The folder of the store, a `Path`.

    Raises:
        UsageError: If arguments are invalid. This is raised before any worker starts.

    Examples:
        >>> import tempfile
        >>> import gpulab as gl
        >>> settings = ["cpu", "cpu:threads=1"]
        >>> exp = gl.Experiment(
        ...     "autoencoder", settings, seeds=1, profile="smoke", store=tempfile.mkdtemp()
        ... )
        >>> exp.run(progress=False)[["setting", "seed", "status"]].values.tolist()
        [['cpu', 0, 'finished'], ['cpu:threads=1', 0, 'finished']]
    """

    def __init__(
        self,
        model: str | Callable[..., Any],
        settings: str | Iterable[str],
        seeds: int | Iterable[int] | None = None,
        profile: str = "quick",
        store: str | Path | None = None,
        reruns: int = 1,
        workers: int = 1,
        options: Options | None = None,
        variants: Iterable[Options] = ({},),
        registered: str | Path | None = None,
    ) -> None:
        self.model = model
        self.profile = profile
        self.function = as_training_function(model)
        self.settings = _parse_settings(settings)
        default_seeds = DEFAULT_SEEDS if self.function else protocol(str(model), profile).seeds
        seeds = default_seeds if seeds is None else seeds
        self.seeds = list(range(seeds) if isinstance(seeds, int) else seeds)
        self.options = dict(options or {})
        self.variants = list(variants)
        self.folder = store_folder(store)
        self.reruns = reruns
        self.workers = workers
        self.registered = registered
        check_count("reruns", reruns)
        check_count("workers", workers)
        if not (self.settings and self.seeds and self.variants):
            request = f"settings={self.settings}, seeds={seeds!r}, variants={self.variants}"
            raise UsageError(f"{request}: expected at least one of each")

    def __repr__(self) -> str:
        name = self.function.name if self.function else self.model
        size = (
            f"{len(self.settings)} settings, {len(self.seeds)} seeds, {len(self.variants)} variants"
        )
        return f"Experiment with {name}: {size}, in {self.folder}"

    def jobs(self) -> list[dict[str, Any]]:
        """List the arguments of each run, as `gpulab.train` takes them, ordered by setting."""
        shared = {"profile": self.profile, "store": str(self.folder), "registered": self.registered}
        combinations = itertools.product(
            self.settings, self.variants, range(self.reruns), self.seeds
        )
        return [
            {
                "net": self.function or self.model,
                "setting": setting,
                "seed": seed,
                "rerun": rerun,
                **self._arguments(self.options | variant),
                **shared,
            }
            for setting, variant, rerun, seed in combinations
        ]

    def _arguments(self, options: Options) -> dict[str, Any]:
        """Return options as arguments of `gpulab.train`.

        Weights of gpulab's own networks are not stored unless the options require it, because no
        verdict needs them.
        """
        if self.function is not None:
            return {"model_options": options}
        return {"keep_weights": False, **options}

    def run(self, progress: bool = True) -> pd.DataFrame:
        """Train the runs that the store does not have yet, and return all runs of this experiment.

        After an interruption, a new call resumes the experiment. If a run fails, the others are
        still trained, and an error at the end names the failures. Several processes may run the
        same experiment at the same time, even on different machines that share the store. Each run
        is then trained by only one of them, and all of them wait for the last run.

        Args:
            progress: Whether to show a progress bar.

        Returns:
            A data frame with a row for each run, ordered by setting and seed. It has the columns of
            `gpulab.runs`. The columns `final_loss` and `heldout_loss` are missing if a custom
            training function uses only other names for its metrics.

        Raises:
            UsageError: If arguments are invalid, or if a script starts an experiment outside
                `if __name__ == "__main__"`.
            GpulabError: If runs failed, or the store cannot be written.
        """
        if WORKER_VARIABLE in os.environ:
            raise UsageError(
                "Experiment.run() was called while a worker imported this file: put the call under"
                " if __name__ == '__main__':"
            )
        with end_on_signals():
            finished = self._train_missing(self.jobs(), progress)
        frame = tables.runs(self.folder)
        # The store lists runs by their ids. Here the variants of a setting and seed are put in the
        # order in which they were given: the second sort is stable and keeps this order.
        frame = frame[frame.id.isin(finished)].sort_values(
            "id", key=lambda ids: ids.map(finished.index)
        )
        frame = frame.sort_values(["setting", "seed"], ignore_index=True, kind="stable")
        frame = tables.drop_empty_losses(frame)
        frame.attrs["source"] = str(self.folder)
        return frame

    def _train_missing(self, jobs: list[dict[str, Any]], progress: bool) -> list[str]:
        """Train the runs that the store does not have, and return the ids of all runs.

        Runs that another process is training are waited for. If runs fail, the others are still
        trained, and a `GpulabError` at the end names the failures.
        """
        machine_passport = passport()
        # This raises `UsageError` before any training if a run has no identity.
        identities = [plan_job(job).identity(machine_passport) for job in jobs]
        # If the holder of a lock has died, this is detected at once on the same machine. On another
        # machine it is detected when the lease expires, by polling the same lock object repeatedly.
        locks = [_lock(self.folder, identity) for identity in identities]
        finished_runs = {
            number for number, identity in enumerate(identities) if find_run(self.folder, identity)
        }
        failures: dict[int, str] = {}  # error messages, by the number of the run
        clock = RunClock([job["setting"] for job in jobs], self.workers)
        started_at = time.monotonic()
        for number in finished_runs:
            clock.skip(number)

        # These functions use `workers`, `bar` and `share_folder`, which are created below.
        def train_run_if_missing(number: int) -> None:
            """Train a run, unless the store has it or another process is training it.

            In the latter case the lock raises `Timeout` at once, and the run stays pending.
            """
            lock = locks[number]
            identity = identities[number]
            job = jobs[number]
            with files.convert_write_errors(lock.lock_file), contextlib.suppress(Timeout), lock:
                try:
                    if not find_run(self.folder, identity):
                        clock.start_run(number)
                        trained_id = workers.run_job(job, share_folder / str(number))
                        if trained_id != identity.id:
                            problem = (
                                "its function or data were changed while the experiment ran; run it"
                                " again"
                            )
                            raise GpulabError(problem)
                        clock.end_run(number)
                    finished_runs.add(number)
                except Exception as error:
                    prefix = "" if isinstance(error, GpulabError) else f"{type(error).__name__}: "
                    failures[number] = f"{job['setting']} seed {job['seed']}: {prefix}{error}"
                clock.skip(number)  # has no effect after `end_run`

        def pending_jobs() -> dict[int, dict[str, Any]]:
            """Return the jobs that have neither finished nor failed, by number."""
            return {
                number: job
                for number, job in enumerate(jobs)
                if number not in finished_runs and number not in failures
            }

        def update_progress() -> None:
            """Read the shares that active runs have reported, and update the progress bar."""
            shares = {
                number: read_share(share_folder / str(number)) for number in list(clock.started)
            }
            update_bar(bar, clock, len(finished_runs) + len(failures), shares, started_at)

        bar = Progress(
            total=len(jobs), unit="run", leave=False, disable=not progress, bar_format=BAR_FORMAT
        )
        with tempfile.TemporaryDirectory() as folder, Workers(self.workers) as workers, bar:
            share_folder = Path(folder)
            pending = pending_jobs()
            while pending:
                workers.run_each(train_run_if_missing, pending, update_progress)
                pending = pending_jobs()
                if pending:
                    time.sleep(POLL_SECONDS)  # another process trains these
                update_progress()
        if failures:
            raise GpulabError(
                f"{len(failures)} of {len(jobs)} runs failed; the others are stored in"
                f" {self.folder}. Run again to retry those that failed:"
                f" {'; '.join(failures.values())}"
            )
        return [identity.id for identity in identities]


# Arguments of `gpulab.train` that do not affect the identity of a run, such as `store`.
EXECUTION_ARGUMENTS = (
    inspect.signature(train_run).parameters.keys() - inspect.signature(plan_run).parameters.keys()
)


def plan_job(job: dict[str, Any]) -> PlannedRun:
    """Check the arguments of one run, an element of `Experiment.jobs`, and plan the run."""
    return plan_run(
        **{name: value for name, value in job.items() if name not in EXECUTION_ARGUMENTS}
    )


def _lock(store: Path, identity: Identity) -> SoftFileLease:
    """Create the lock of a run, which raises `Timeout` at once if another process holds it."""
    file = store / LOCK_FOLDER / f"{identity.id}.lock"
    return SoftFileLease(
        file, lease_duration=LOCK_LEASE_SECONDS, blocking=False, thread_local=False
    )


def _parse_settings(settings: str | Setting | Iterable[str]) -> list[str]:
    """Return one or several settings as a list of texts in canonical form."""
    texts = [settings] if isinstance(settings, str | Setting) else settings
    return [str(Setting.parse(text)) for text in texts]


def seed_runs(
    train: Callable[..., Any] | str,
    setting: Setting | str = "cpu",
    seeds: int | Iterable[int] = 10,
    *,
    progress: bool = True,
    **changes: Any,
) -> pd.DataFrame:
    """Call a custom training function with several seeds in this process, without a store.

    The first error ends the calls. Use `Experiment` to store runs and to resume after an
    interruption.

    Args:
        train: A function `train(seed, setting)`, as `gpulab.train` describes it, or a string such
            as `"my_training.py:train"`.
        setting: The setting to train under.
        seeds: The number of seeds, which are then counted from 0, or the seeds themselves.
        progress: Whether to show a progress bar.
        **changes: Options of the training function, by name.

    Returns:
        A data frame with a row for each seed, which `gpulab.verdict` accepts. Its columns are
        `setting`, `seed`, `status` (`finished` or `diverged`) and `final_loss` (NaN for a diverged
        run), and one for each other number that the function returned. The column `final_loss` is
        missing if the function uses only other names.

    Raises:
        UsageError: If arguments are invalid.
        GpulabError: If the setting cannot run on this machine, or the function raises an error.

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
        run = train_run(**job | {"store": None}, progress=False)
        row = {
            "setting": job["setting"],
            "seed": job["seed"],
            "status": run.status,
            "final_loss": run.final_loss,
        }
        rows.append(row | run.metrics)
    return tables.drop_empty_losses(pd.DataFrame(rows))
