"""Worker processes for runs, and threads for runs that share a GPU."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from joblib.externals.loky import ProcessPoolExecutor, process_executor

from gpulab.data import scenes
from gpulab.errors import GpulabError
from gpulab.settings import Setting
from gpulab.training.progress import noted_in
from gpulab.training.run import train

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

    def each(
        self, do: Callable[[int], None], jobs: dict[int, dict[str, Any]], tick: Callable[[], None] = lambda: None
    ) -> None:
        """Call `do` with the number of every run, in threads, and meanwhile `tick` about once a second.

        When Ctrl-C comes, the runs under way save checkpoints.
        """
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
                        tick()
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

    def do(self, job: dict[str, Any], note: Path | None = None) -> str:
        """Do a run, and return its id when it is done and kept. `GpulabError` where its process ends by itself.

        A network of gpulab's writes meanwhile into the file `note` how much of the run is done.
        """
        if self._shared_setting(job):
            with noted_in(note):
                return train(**job, watch=self.check_stopping, progress=False).record["id"]
        try:
            pickled = cloudpickle.dumps(job)  # what is typed into a notebook goes by value
        except Exception as error:  # whatever an object says that hides what it holds
            named = getattr(job["net"], "name", job["net"])
            raise GpulabError(f"{named} cannot be sent to a process: {error}") from None
        try:
            return self._pool(job["setting"]).submit(do_run, pickled, note).result()
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


def do_run(job: bytes, note: Path | None = None) -> str:
    """Do a run, and return its id. It is unpickled here, since loky ends a process that cannot unpickle its work."""
    with noted_in(note):
        return train(**cloudpickle.loads(job), progress=False).record["id"]


def _begin() -> None:
    """Ctrl-C in a terminal comes to all processes: what becomes of the runs is for the parent to say, by SIGTERM."""

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupt)
    process_executor._MAX_MEMORY_LEAK_SIZE = math.inf  # loky would begin a new process when a training needs memory
