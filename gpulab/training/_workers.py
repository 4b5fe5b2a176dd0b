"""Worker processes for runs, and threads for runs that share a GPU.

A training may start processes itself, such as those of a `DataLoader`.
`gpulab.training._worker_process` prepares a worker for that. On Linux and macOS each worker leads a
process group. All processes that it starts belong to the group, so they can be ended even after the
worker was killed.
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

# An environment variable that is set in workers, since a worker must not start an experiment.
WORKER_VARIABLE = "GPULAB_WORKER"
# Seconds between two checks for Ctrl-C, which does not end a wait on some systems, such as Windows.
POLL_SECONDS = 1.0
KILL_TIMEOUT = 10.0  # seconds after which a process that was asked to end is killed
# Seconds after which a process without work ends by itself, for example if its parent was killed.
IDLE_TIMEOUT = 20.0
SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
CACHED_CHUNKS = 100  # chunks of a film that are kept in memory: 5,000 frames of 160×120, 288 MB


class Workers(contextlib.AbstractContextManager):
    """Execute up to `count` training runs at the same time, each given by the arguments of
    `gpulab.train`.

    A training runs in a worker process, which has the environment of one setting and only does runs
    under this setting. Training runs that may share a GPU execute in threads of this process, each
    on its own CUDA stream.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.stop_requested = threading.Event()

        # One process for each thread and setting, by the thread's id and the setting's text.
        self.pools: dict[tuple[int, str], ProcessPoolExecutor] = {}
        self.reaper = Reaper()

    def run_each(
        self,
        run_one: Callable[[int], None],
        jobs: dict[int, dict[str, Any]],
        after_poll: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `run_one` with each run's number in threads, and `after_poll` about every second.

        If this is interrupted or `run_one` raises, the active runs save checkpoints and end, and
        the error is raised again.
        """
        # The flags of a setting apply to all threads of a process. So only runs of one setting
        # share the GPU at the same time. Jobs are ordered by setting, as `groupby` requires.
        for setting, numbers in itertools.groupby(
            jobs, lambda number: self._shared_setting(jobs[number])
        ):
            context = share_gpu(setting) if setting else contextlib.nullcontext()
            with (
                context as initializer,
                ThreadPoolExecutor(self.count, initializer=initializer) as threads,
            ):
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
        """Return the setting of a run that may share a GPU with others, and "" if it may not.

        The built-in networks may share a GPU: each run has its own random generators, and its
        CUDA stream keeps its kernels in order. Training functions may not, since they draw from
        torch's global generators. Compiled networks may not, since torch refuses to run a compiled
        function in one thread while another thread compiles.
        """
        setting = Setting.parse(job["setting"])
        may_share = isinstance(job["net"], str) and setting.kind == "cuda" and not setting.compile
        return job["setting"] if may_share and self.count > 1 else ""

    def run_job(self, job: dict[str, Any], share_file: Path | None = None) -> str:
        """Train a run, and return its id once it is stored.

        The training of a built-in network writes the finished share of the run into `share_file`.

        Raises:
            GpulabError: If the arguments cannot be pickled, or the worker process dies.
        """
        if self._shared_setting(job):
            with write_share_to(share_file):
                return train(**job, watch=self.check_stopping, progress=False).record["id"]
        try:
            pickled = cloudpickle.dumps(job)  # pickles functions of notebooks by value
        except Exception as error:  # pickling an object can raise any error
            name = getattr(job["net"], "name", job["net"])
            raise GpulabError(f"{name} cannot be sent to a process: {error}") from None
        try:
            return self._do_in_process(self._pool(job["setting"]), pickled, share_file)
        except process_executor.BrokenProcessPool as error:  # killed, or out of memory?
            # The next run of this thread and setting gets a new process.
            self.pools.pop((threading.get_ident(), job["setting"]))
            raise GpulabError(f"its worker process ended: {error}") from None

    def _do_in_process(self, pool: ProcessPoolExecutor, job: bytes, share_file: Path | None) -> str:
        """Train a pickled run in the process of a pool, and return the id of the run.

        If the process dies, the processes that it has started are killed. The pool may not notice
        the death: it waits for a pipe to be closed, and a forked child of the dead process keeps
        the pipe open. This is why the process itself is polled.
        """
        run = pool.submit(train_job, job, share_file)
        processes = process_ids(pool)
        self.reaper.watch(processes)  # the reaper ends them if this process dies
        while not wait([run], POLL_SECONDS).done:
            for process in filter(has_died, processes):
                kill_group(process)  # this closes the pipe, so that the pool notices the death
        if isinstance(run.exception(), process_executor.BrokenProcessPool):
            for process in processes:
                kill_group(process)
        return run.result()

    def _pool(self, setting: str) -> ProcessPoolExecutor:
        """Return this thread's pool for a setting; it is created on first use.

        The pool has one process, with the environment of the setting. If the process dies, no other
        run is affected. The thread's process for another setting is ended first, because both need
        half a gigabyte, and jobs are ordered by setting.
        """
        thread = threading.get_ident()
        key = thread, setting
        if key not in self.pools:
            for other_thread, other_setting in list(self.pools):
                if other_thread == thread:
                    end_pool(self.pools.pop((other_thread, other_setting)))
            # With a safe path, the starting process does not import modules from the current
            # folder, such as a queue.py of the user's.
            environment = {
                **Setting.parse(setting).environment(),
                WORKER_VARIABLE: "1",
                SAFE_PATH_VARIABLE: "1",
            }
            if self.count > 1 and not setting.startswith("cpu"):
                # The GPU does the work, and the processes share the CPU's cores.
                environment["OMP_NUM_THREADS"] = "1"
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
        """Raise `KeyboardInterrupt` if `stop` was called; a run calls this after each window.

        It interrupts runs in threads of this process, as a signal interrupts worker processes.
        """
        if self.stop_requested.is_set():
            raise KeyboardInterrupt

    def stop(self, tasks: set[Future[Any]]) -> None:
        """Ask active runs to save checkpoints and end, and kill processes that do not respond.

        The processes that the workers have started are killed, too.
        """
        self.stop_requested.set()
        pools = list(self.pools.values())
        processes = [process for pool in pools for process in process_ids(pool)]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        unresponsive = wait(tasks, KILL_TIMEOUT).not_done
        for pool in pools:
            pool.shutdown(wait=False, kill_workers=bool(unresponsive))
        wait_for_end(processes)
        for process in processes:
            kill_group(process)

    def __exit__(self, *_: object) -> None:
        for pool in self.pools.values():
            end_pool(pool)
        self.reaper.stop()


class Reaper:
    """Starts and stops the program `gpulab.training._reaper`.

    The program is a process that ends the workers if this process dies without ending them. There
    is none on Windows, which has no process groups.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def watch(self, workers: list[int]) -> None:
        """Register the ids of workers with the process, which is started at the first call."""
        if not hasattr(os, "killpg"):
            return
        with self.lock:
            if self.process is None:
                # A new session, so that signals to the group of this process do not end it. With
                # -P it imports no modules from its own folder.
                command = [sys.executable, "-P", reaper.__file__, str(os.getpid())]
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
                )
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the process may have been killed
                self.process.stdin.write("".join(f"{worker}\n" for worker in workers).encode())

    def stop(self) -> None:
        """Kill the process. The workers must have ended before."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


@contextlib.contextmanager
def share_gpu(setting: str) -> Iterator[Callable[[], None]]:
    """Activate a setting for the threads of a block, which share rendered frames.

    Yields a function that each thread must call first. It gives the thread its own CUDA stream.
    """
    parsed = Setting.parse(setting)

    def use_own_stream() -> None:
        """Give the calling thread a CUDA stream of its own; do nothing on other devices."""
        if parsed.kind == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(parsed.device))

    with scenes.remembered_chunks(CACHED_CHUNKS), parsed.apply():
        yield use_own_stream


def train_job(job: bytes, share_file: Path | None = None) -> str:
    """Train a run and return its id.

    The job is unpickled here, since loky ends a process that cannot unpickle its work.
    """
    worker_process.reset_start_method()
    with write_share_to(share_file):
        return train(**cloudpickle.loads(job), progress=False).record["id"]


def process_ids(pool: ProcessPoolExecutor) -> list[int]:
    """Return the ids of a pool's processes."""
    return list(pool._processes)


def end_pool(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool without work, and those that they have started."""
    processes = process_ids(pool)
    pool.shutdown()
    for process in processes:
        kill_group(process, signal.SIGTERM)


def has_died(process: int) -> bool:
    """Return whether a process has ended, even if its parent has not yet collected its status."""
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
    """Send a signal, by default SIGKILL, to all processes of a worker's group.

    Nothing happens if the group has no processes left, or on Windows.
    """
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL if number is None else number)


def chosen_start_method() -> str | None:
    """Return the start method that the user chose for `multiprocessing`; None for the default."""
    method = multiprocessing.get_start_method(allow_none=True)
    default, *_ = multiprocessing.get_all_start_methods()  # Python lists the default first
    return None if method == default else method


@contextlib.contextmanager
def end_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt the block, as Ctrl-C does, and then end this process.

    The first signal raises `KeyboardInterrupt` in the block; later ones have no effect until the
    block has ended. Signals are left alone in threads other than the main thread, in which Python
    cannot handle them, and if the program already handles or ignores them.
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
