"""Worker processes for runs, and threads for runs that share a GPU.

A training may start processes itself, such as those of a `DataLoader`:
`gpulab.training._worker_process` prepares a worker for that. On Linux and macOS a worker leads a
process group, to which all that it starts belongs, so that nothing is left behind where a worker is
killed.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import torch
from joblib.externals.loky import ProcessPoolExecutor, process_executor

from gpulab.data import _scenes as scenes
from gpulab.errors import GpulabError
from gpulab.settings import Setting
from gpulab.training import _reaper as reaper
from gpulab.training import _worker_process as worker_process
from gpulab.training._progress import write_share_to
from gpulab.training._run import train

WORKER_VARIABLE = "GPULAB_WORKER"  # in the environment of workers, which must not start experiments
# between two checks for Ctrl-C, which waiting does not notice on some systems, such as Windows
POLL_SECONDS = 1.0
KILL_TIMEOUT = 10.0  # seconds after which a process that was asked to end is killed
# seconds after which a process without work ends by itself, such as one whose parent was killed
IDLE_TIMEOUT = 20.0
SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
CACHED_CHUNKS = 100  # chunks of a film that are kept in memory: 5,000 frames of 160×120, 288 MB


class Workers(contextlib.AbstractContextManager):
    """Runs up to `count` trainings at once, each given by the arguments of `gpulab.train`.

    Each is done in a process of its own, which has the environment of its setting and does no run
    of another. Those that may share a GPU are done in threads of this process, each on a stream of
    its own.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.stop_requested = threading.Event()

        # One process for each thread and setting.
        self.pools: dict[tuple[int, str], ProcessPoolExecutor] = {}
        self.reaper = Reaper()

    def run_each(
        self,
        run_one: Callable[[int], None],
        jobs: dict[int, dict[str, Any]],
        after_poll: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `run_one` with each run's number in threads, and `after_poll` about every second.

        When Ctrl-C comes, the runs under way save checkpoints.
        """
        # The flags of a setting hold for all threads of a process, so those that share a GPU have
        # one setting.
        for setting, numbers in itertools.groupby(
            jobs, lambda number: self._shared_setting(jobs[number])
        ):
            context = share_gpu(setting) if setting else contextlib.nullcontext()
            with context as initializer, ThreadPoolExecutor(self.count, "", initializer) as threads:
                tasks: set[Future[None]] = set()
                try:
                    tasks = {threads.submit(run_one, number) for number in numbers}
                    while tasks:
                        ended, tasks = wait(tasks, POLL_SECONDS, FIRST_COMPLETED)
                        for task in ended:
                            task.result()  # raises what `run_one` raised
                        after_poll()
                except BaseException:
                    threads.shutdown(wait=False, cancel_futures=True)
                    self.stop({task for task in tasks if not task.cancelled()})
                    raise

    def _shared_setting(self, job: dict[str, Any]) -> str:
        """The setting of a run that is to share a GPU with others in threads, or nothing.

        gpulab's own networks may: weights and orders are drawn from generators that each training
        has for itself, and a stream keeps its kernels in their order. A function of the user's
        draws from torch's global generators, and torch's compiler, which traces in one thread,
        refuses to run what it has compiled in another meanwhile.
        """
        setting = Setting.parse(job["setting"])
        may_share = isinstance(job["net"], str) and setting.kind == "cuda" and not setting.compile
        return job["setting"] if may_share and self.count > 1 else ""

    def run_job(self, job: dict[str, Any], share_file: Path | None = None) -> str:
        """Train a run, and return its id once stored. Raises `GpulabError` if its process dies.

        The training of a network of gpulab's own writes into `share_file` how much of the run is
        done.
        """
        if self._shared_setting(job):
            with write_share_to(share_file):
                return train(**job, watch=self.check_stopping, progress=False).record["id"]
        try:
            pickled = cloudpickle.dumps(job)  # what is typed into a notebook goes by value
        except Exception as error:  # whatever an object says that hides what it holds
            name = getattr(job["net"], "name", job["net"])
            raise GpulabError(f"{name} cannot be sent to a process: {error}") from None
        try:
            return self._do_in_process(self._pool(job["setting"]), pickled, share_file)
        except process_executor.BrokenProcessPool as error:  # killed, or out of memory?
            self.pools.pop((threading.get_ident(), job["setting"]))
            raise GpulabError(f"its worker process ended: {error}") from None

    def _do_in_process(self, pool: ProcessPoolExecutor, job: bytes, share_file: Path | None) -> str:
        """Do a pickled run in a pool's process, and return its id.

        Where the process dies, what it has started is killed. What it has forked holds the pipe by
        whose end the pool notices a death, so this looks at the process itself.
        """
        run = pool.submit(train_job, job, share_file)
        processes = process_ids(pool)
        self.reaper.watch(processes)
        while not wait([run], POLL_SECONDS).done:
            for process in filter(has_died, processes):
                kill_group(process)
        if isinstance(run.exception(), process_executor.BrokenProcessPool):
            for process in processes:
                kill_group(process)
        return run.result()

    def _pool(self, setting: str) -> ProcessPoolExecutor:
        """This thread's process, a pool of one, with the environment of a setting.

        If it dies, no other run is affected.
        """
        key = threading.get_ident(), setting
        if key not in self.pools:
            # Python does not look in the current folder while it starts, where a queue.py may lie.
            environment = Setting.parse(setting).environment()
            environment = {**environment, WORKER_VARIABLE: "1", SAFE_PATH_VARIABLE: "1"}

            if self.count > 1 and not setting.startswith("cpu"):
                environment["OMP_NUM_THREADS"] = "1"  # the work is the GPU's; the cores are shared
            initializer_arguments = chosen_start_method(), os.environ.get(SAFE_PATH_VARIABLE)
            self.pools[key] = ProcessPoolExecutor(
                1,
                timeout=IDLE_TIMEOUT,
                env=environment,
                initializer=worker_process.prepare_worker,
                initargs=initializer_arguments,
            )
        return self.pools[key]

    def check_stopping(self, *_: Any) -> None:
        """Interrupt a run in this process after a window, as a signal does in a worker process."""
        if self.stop_requested.is_set():
            raise KeyboardInterrupt

    def stop(self, tasks: set[Future[Any]]) -> None:
        """Have active runs save checkpoints and end; a process that does not respond is killed."""
        self.stop_requested.set()
        pools = list(self.pools.values())
        processes = [process for pool in pools for process in process_ids(pool)]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        unresponsive = wait(tasks, KILL_TIMEOUT)[1]
        for pool in pools:
            pool.shutdown(wait=False, kill_workers=bool(unresponsive))
        wait_for_end(processes)
        for process in processes:
            kill_group(process)

    def __exit__(self, *_: object) -> None:
        for pool in self.pools.values():
            processes = process_ids(pool)
            pool.shutdown()
            for process in processes:
                kill_group(process, signal.SIGTERM)
        self.reaper.stop()


class Reaper:
    """A process that ends the workers if this one dies without doing so: `gpulab.training._reaper`.

    There is none on Windows, which has no process groups.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def watch(self, workers: list[int]) -> None:
        """Tell it of workers; it is started with the first."""
        if not hasattr(os, "killpg"):
            return
        with self.lock:
            if self.process is None:
                # In a session of its own no signal to this process's group ends it. -P: no file
                # beside it is imported.
                command = [sys.executable, "-P", reaper.__file__, str(os.getpid())]
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
                )
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # somebody may have killed it
                self.process.stdin.write("".join(f"{worker}\n" for worker in workers).encode())

    def stop(self) -> None:
        """End it: the workers have ended."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


@contextlib.contextmanager
def share_gpu(setting: str) -> Iterator[Callable[[], None]]:
    """Activate a setting around threads; yields a function that gives a thread its own stream."""
    parsed = Setting.parse(setting)
    with scenes.remembered_chunks(CACHED_CHUNKS), parsed.apply():
        on_gpu = parsed.kind == "cuda"
        yield lambda: torch.cuda.set_stream(torch.cuda.Stream(parsed.device)) if on_gpu else None


def train_job(job: bytes, share_file: Path | None = None) -> str:
    """Train a run and return its id.

    The job is unpickled here, since loky ends a process that cannot unpickle its work.
    """
    worker_process.reset_start_method()
    with write_share_to(share_file):
        return train(**cloudpickle.loads(job), progress=False).record["id"]


def process_ids(pool: ProcessPoolExecutor) -> list[int]:
    """The ids of a pool's processes."""
    return list(pool._processes)


def has_died(process: int) -> bool:
    """Whether a process has ended, whoever still waits for it."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(processes: list[int]) -> None:
    """Wait until processes have ended, and kill those that take too long."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while not all(map(has_died, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes:
        if not has_died(process):
            psutil.Process(process).kill()


def kill_group(leader: int, number: int | None = None) -> None:
    """End the children of a dead worker's process group by SIGKILL or another signal."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL if number is None else number)


def chosen_start_method() -> str | None:
    """The start method that the user chose for `multiprocessing`, unless it is the default."""
    method = multiprocessing.get_start_method(allow_none=True)
    return None if method == multiprocessing.get_all_start_methods()[0] else method


@contextlib.contextmanager
def end_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP interrupt the block, as Ctrl-C does, and then end this process.

    Nothing changes outside of the main thread, where Python handles no signals, nor for a signal
    that the program handles or ignores.
    """
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    in_main_thread = threading.current_thread() is threading.main_thread()
    handled_numbers = [
        number
        for number in numbers
        if in_main_thread and signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in handled_numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in handled_numbers:
            signal.signal(number, signal.SIG_DFL)
        if received:
            sys.stdout.flush()
            signal.raise_signal(received[0])
