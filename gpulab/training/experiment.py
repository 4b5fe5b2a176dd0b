"""Experiments: seeds × settings, each run in a worker process, so that no setting leaks into another.

First the workers: processes of their own, or threads that share a GPU. Then the experiment.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from filelock import SoftFileLease, Timeout
from joblib.externals.loky import ProcessPoolExecutor, process_executor

from gpulab import files
from gpulab.data import scenes
from gpulab.errors import GpulabError, UsageError, check_count
from gpulab.passports import passport
from gpulab.report import Progress
from gpulab.settings import Setting
from gpulab.store import runs as stores
from gpulab.training import run
from gpulab.training.functions import function_of
from gpulab.training.run import train
from gpulab.training.spec import RunSpec, protocol

if TYPE_CHECKING:
    import pandas as pd

# --- workers ---------------------------------------------------------------------------------------------

INSIDE = "GPULAB_WORKER"  # in the environment of workers, which must not start others
LOOK = 1.0  # seconds after which Ctrl-C is heard where waiting does not hear it, as on Windows
DEAF = 10.0  # seconds after which a process that was asked to end is killed
IDLE = 20.0  # seconds after which a process without work ends by itself, such as one whose parent was killed
WHOLE_FILM = 100  # chunks of frames: 5,000 frames of 160×120, 288 MB


class Workers(contextlib.AbstractContextManager):
    """Does up to `count` runs at the same time, each of them given by the arguments of `gpulab.train`.

    Each is done in a process of its own, which has the environment of its setting and does no run of another. Those
    that may share a GPU are done in threads of this process, each on a stream of its own.
    """

    def __init__(self, count: int) -> None:
        self.count, self.stopping = count, threading.Event()
        self.pools: dict[tuple[int, str], ProcessPoolExecutor] = {}  # by thread and setting, of one process each

    def each(self, do: Callable[[int], None], jobs: dict[int, dict[str, Any]]) -> None:
        """Call `do` with the number of every run, in threads. When Ctrl-C comes, those under way save checkpoints."""
        # The flags of a setting hold for all threads of a process, so those that share a GPU have one setting.
        for setting, numbers in itertools.groupby(jobs, lambda number: self._shared_setting(jobs[number])):
            initialized = sharing(setting) if setting else contextlib.nullcontext()
            with initialized as initializer, ThreadPoolExecutor(self.count, "", initializer) as threads:
                tasks: set[Future[None]] = set()
                try:
                    tasks = {threads.submit(do, number) for number in numbers}
                    while tasks:
                        ended, tasks = wait(tasks, LOOK, FIRST_COMPLETED)
                        for task in ended:
                            task.result()  # raises what `do` raised
                except BaseException:
                    threads.shutdown(wait=False, cancel_futures=True)
                    self.stop({task for task in tasks if not task.cancelled()})
                    raise

    def _shared_setting(self, job: dict[str, Any]) -> str:
        """The setting of a run that is to share a GPU with others in threads, or nothing.

        gpulab's own networks may: weights and orders are drawn from generators that each training has for itself, and a
        stream keeps its kernels in their order. A function of the user's draws from torch's global generators, and
        torch's compiler, which traces in one thread, refuses to run what it has compiled in another meanwhile.
        """
        setting = Setting.parse(job["setting"])
        may_share = isinstance(job["net"], str) and setting.kind == "cuda" and not setting.compile
        return job["setting"] if may_share and self.count > 1 else ""

    def do(self, job: dict[str, Any]) -> str:
        """Do a run, and return its id when it is done and kept. `GpulabError` where its process ends by itself."""
        if self._shared_setting(job):
            return train(**job, watch=self.check_stopping, progress=False).record["id"]
        try:
            pickled = cloudpickle.dumps(job)  # what is typed into a notebook goes by value
        except Exception as error:  # whatever an object says that hides what it holds
            named = getattr(job["net"], "name", job["net"])
            raise GpulabError(f"{named} cannot be sent to a process: {error}") from None
        try:
            return self._pool(job["setting"]).submit(do_run, pickled).result()
        except process_executor.BrokenProcessPool as error:  # killed, or out of memory?
            self.pools.pop((threading.get_ident(), job["setting"]))
            raise GpulabError(f"its worker process ended: {error}") from None

    def _pool(self, setting: str) -> ProcessPoolExecutor:
        """This thread's process, with the environment of a setting: a pool of one, whose end costs others nothing."""
        key = threading.get_ident(), setting
        if key not in self.pools:
            # Python does not look in the current folder while it starts, where a queue.py may lie.
            environment = {**Setting.parse(setting).environment(), INSIDE: "1", "PYTHONSAFEPATH": "1"}
            if self.count > 1 and not setting.startswith("cpu"):
                environment["OMP_NUM_THREADS"] = "1"  # the work is the GPU's; the cores are shared
            self.pools[key] = ProcessPoolExecutor(1, timeout=IDLE, env=environment, initializer=_begin)
        return self.pools[key]

    def check_stopping(self, *_: Any) -> None:
        """Interrupt a run that shares this process, after a window, as a signal does in a process of its own."""
        if self.stopping.is_set():
            raise KeyboardInterrupt

    def stop(self, tasks: set[Future[Any]]) -> None:
        """Have what is under way save checkpoints and end; a process that does not hear is killed."""
        self.stopping.set()
        for pool in list(self.pools.values()):
            for process in list(pool._processes.values()):
                process.terminate()  # SIGTERM
        deaf = wait(tasks, DEAF)[1]
        for pool in list(self.pools.values()):
            pool.shutdown(kill_workers=bool(deaf))

    def __exit__(self, *_: object) -> None:
        for pool in self.pools.values():
            pool.shutdown()


@contextlib.contextmanager
def sharing(setting: str) -> Iterator[Callable[[], None]]:
    """Have a setting in force around threads; yields what each of them calls first: it takes a stream of its own."""
    parsed = Setting.parse(setting)
    with scenes.remembered_chunks(WHOLE_FILM), parsed.apply():
        on_gpu = parsed.kind == "cuda"
        yield lambda: torch.cuda.set_stream(torch.cuda.Stream(parsed.device)) if on_gpu else None


def do_run(job: bytes) -> str:
    """Do a run, and return its id. It is unpickled here, since loky ends a process that cannot unpickle its work."""
    return train(**cloudpickle.loads(job), progress=False).record["id"]


def _begin() -> None:
    """Ctrl-C in a terminal comes to all processes: what becomes of the runs is for the parent to say, by SIGTERM."""

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupt)
    process_executor._MAX_MEMORY_LEAK_SIZE = math.inf  # loky would begin a new process when a training needs memory


WAIT = 1.0  # seconds between looks at what other drivers are doing
CLAIMS = ".claims"  # the folder in a store in which a lock says that a run is being trained
LEASE = 120.0  # seconds after which a lock that nobody refreshes is taken: network file systems may be 60 behind


# --- experiments -----------------------------------------------------------------------------------------


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
        frame = stores.runs(self.folder)
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
        done = {number for number, identity in enumerate(wanted) if stores.find(self.folder, identity)}
        failures: dict[int, str] = {}  # why, by the number of the run

        def do(number: int) -> None:
            """Have a run done, unless another driver is doing it."""
            lock, identity = locks[number], wanted[number]
            with files.writing(lock.lock_file), contextlib.suppress(Timeout), lock:
                try:
                    if not stores.find(self.folder, identity) and workers.do(jobs[number]) != identity.id:
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
