"""Where an experiment's runs are done on this machine: in processes of their own, or in threads that share a GPU.

An engine of an experiment has these methods: `passports` says on which machines a run may be done, `start` begins one,
`news` says which have ended, and leaving its `with` block waits for those under way, after an error without their ends.
`Workers` is the engine of this machine, `gpulab.training.cluster.RayCluster` that of a cluster.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import cloudpickle
from joblib.externals.loky import ProcessPoolExecutor, process_executor

from gpulab.data import scenes
from gpulab.errors import GpulabError
from gpulab.passports import Passport, passport
from gpulab.settings import Setting
from gpulab.training.run import train

INSIDE = "GPULAB_WORKER"  # in the environment of workers, which must not start others
MOST_THREADS = 16  # trainings that share a GPU: more gain nothing, and torch has 32 streams
DEAF = 10.0  # seconds after which a process that was asked to end is killed
IDLE = 60.0  # seconds after which a process without work ends by itself, such as one whose parent was killed
WHOLE_FILM = 1000  # chunks of frames: 5,000 frames of 160×120, 288 MB
News = tuple[int, str | None, str]  # of a run that has ended: its number, its id, or why it has none


@dataclass
class Process:
    """A pool of one process, so that the end of one costs no other its work; and which process that is."""

    setting: str
    pool: ProcessPoolExecutor

    def submit(self, job: dict[str, Any]) -> Future[str]:
        """Have a run done."""
        try:
            pickled = cloudpickle.dumps(job)  # what is typed into a notebook goes by value
        except Exception as error:  # whatever an object says that hides what it holds
            raise GpulabError(
                f"{getattr(job['net'], 'name', job['net'])} cannot be sent to a process: {error}"
            ) from None
        self.number = self.pool.submit(os.getpid).result()
        return self.pool.submit(_do_pickled, pickled)


class Workers(contextlib.AbstractContextManager):
    """Does up to `count` runs at the same time.

    Each is done in a process of its own, which has the environment of its setting and does no run of another. Those
    that may share a GPU are threads of this process, each on a stream of its own.
    """

    def __init__(self, count: int) -> None:
        self.count, self.tasks = count, dict[Future[str], tuple[int, Process | None]]()
        self.idle: list[Process] = []
        self.sharing, self.stopping, self.shared = "", threading.Event(), contextlib.ExitStack()

    def passports(self, setting: str) -> list[Passport]:  # noqa: ARG002
        """Those of the machines on which a run may be done: this one."""
        return [passport()]

    def start(self, number: int, job: dict[str, Any]) -> bool:
        """Begin a run, given by the arguments of `gpulab.train`; False where it has to wait for others to end.

        One that cannot be begun, such as under a setting that cannot run here, fails: `news` says why.
        """
        sharing = self.count > 1 and may_share(job)
        if sharing and job["setting"] != self.sharing and any(process is None for _, process in self.tasks.values()):
            return False  # the flags of a setting hold for all threads
        try:
            task, process = self._in_thread(job) if sharing else self._in_process(job)
        except (GpulabError, process_executor.BrokenProcessPool) as error:
            task, process = Future(), None
            task.set_exception(error)
        self.tasks[task] = number, process
        return True

    def _in_thread(self, job: dict[str, Any]) -> tuple[Future[str], None]:
        if job["setting"] != self.sharing:
            self._share(Setting.parse(job["setting"]))
        return self.threads.submit(do_run, job, self.stopping), None

    def _in_process(self, job: dict[str, Any]) -> tuple[Future[str], Process]:
        setting = job["setting"]
        for process in [each for each in self.idle if each.setting != setting]:
            self.idle.remove(process)
            process.pool.shutdown()
        while self.idle:
            process = self.idle.pop()
            with contextlib.suppress(process_executor.BrokenProcessPool):  # it was killed while it had nothing to do
                return process.submit(job), process
        process = Process(setting, _pool(setting, self.count > 1))
        return process.submit(job), process

    def _share(self, setting: Setting) -> None:
        """Make threads for a setting, which stays in force around them: each training takes it back."""
        self.sharing = ""
        self.shared.close()
        self.shared.enter_context(scenes.remembered_chunks(WHOLE_FILM))
        self.shared.enter_context(setting.apply())
        pool = ThreadPoolExecutor(min(self.count, MOST_THREADS), initializer=_on_own_stream, initargs=(setting,))
        self.threads = self.shared.enter_context(pool)
        self.sharing = str(setting)

    def news(self, seconds: float) -> Iterator[News]:
        """Which runs have ended, waited for up to so many seconds."""
        if not self.tasks:
            time.sleep(seconds)
        for task in wait(self.tasks, seconds, FIRST_COMPLETED)[0]:
            number, process = self.tasks.pop(task)
            try:
                yield number, task.result(), ""
            except process_executor.BrokenProcessPool as error:  # killed, or out of memory?
                process = None
                yield number, None, f"its worker process ended: {error}"
            except GpulabError as error:
                yield number, None, str(error)
            except Exception as error:  # of arguments that make no sense
                yield number, None, f"{type(error).__name__}: {error}"
            if process:
                self.idle.append(process)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind:  # those under way save checkpoints and end
            self.stopping.set()
        busy = [process for _, process in self.tasks.values() if process]
        for process in busy if kind else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.number, signal.SIGTERM)
        self.shared.close()
        deaf = wait(self.tasks, DEAF if kind else None)[1]
        for idle in self.idle:
            idle.pool.shutdown()
        for task, (_number, doing) in self.tasks.items():
            if doing:
                doing.pool.shutdown(kill_workers=task in deaf)


def may_share(job: dict[str, Any]) -> bool:
    """Whether a training, given by the arguments of `gpulab.train`, may share a GPU with others in threads.

    gpulab's own networks may: weights and orders are drawn from generators that each training has for itself, and a
    stream keeps its kernels in their order. A function of the user's draws from torch's global generators, and a guard
    watches the whole process.
    """
    return isinstance(job["net"], str) and not job.get("guard") and Setting.parse(job["setting"]).kind == "cuda"


def do_run(job: dict[str, Any], stopping: threading.Event | None = None) -> str:
    """Train, and return the run's id; `stopping` interrupts it after a window, as a signal does in its own process."""

    def check_stopping(*_: Any) -> None:
        if stopping and stopping.is_set():
            raise KeyboardInterrupt

    return train(**job, progress=check_stopping).record["id"]


def _do_pickled(job: bytes) -> str:
    """The same in another process, which a job comes to through a pipe from its parent."""
    return do_run(cloudpickle.loads(job))


def _pool(setting: str, crowded: bool) -> ProcessPoolExecutor:
    """A process with the environment of a setting."""
    # Python does not look in the current folder while it starts, where a queue.py may lie.
    environment = {**Setting.parse(setting).environment(), INSIDE: "1", "PYTHONSAFEPATH": "1"}
    if crowded and not setting.startswith("cpu"):
        environment["OMP_NUM_THREADS"] = "1"  # the work is the GPU's; the cores are shared
    return ProcessPoolExecutor(1, timeout=IDLE, env=environment, initializer=_begin)


def _begin() -> None:
    """Ctrl-C in a terminal comes to all processes: what becomes of the runs is for the parent to say, by SIGTERM."""

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupt)
    process_executor._MAX_MEMORY_LEAK_SIZE = math.inf  # loky would begin a new process when a training needs memory


def _on_own_stream(setting: Setting) -> None:
    import torch

    if setting.kind == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(setting.device))
