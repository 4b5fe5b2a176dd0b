"""Worker processes: each trains under one setting, job after job; `worker` is what runs in one."""

from __future__ import annotations

import base64
import collections
import contextlib
import importlib
import itertools
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from gpulab.errors import GpulabError, extra
from gpulab.passports import Passport, passport
from gpulab.settings import Setting
from gpulab.training.functions import is_function

# With -P nothing that lies in the current folder is imported, such as a queue.py.
WORKER = [sys.executable, "-P", "-m", "gpulab.training.worker"]
INSIDE = "GPULAB_WORKER"  # in the environment of workers, which must not start others
MOST_THREADS = 16  # trainings that share a GPU: more gain nothing, and torch has 32 streams
DEAF = 10.0  # seconds after which a worker that was asked to end is killed


class Worker:
    """A process that trains under one setting: job after job, or several in threads.

    Args:
        setting: The setting.
        beside: How many trainings go on at the same time, in this process and others.
        threads: How many of them are in threads of this process; 1 for job after job.
    """

    def __init__(self, setting: str, beside: int = 1, threads: int = 1) -> None:
        self.setting, self.stopped, self.ended = setting, False, False
        environment = {**os.environ, **Setting.parse(setting).environment(), INSIDE: "1"}
        arguments = [setting, str(threads)] if threads > 1 else []
        if beside > 1 and not setting.startswith("cpu"):
            environment["OMP_NUM_THREADS"] = "1"  # the work is the GPU's; the cores are shared
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                [*WORKER, *arguments],
                env=environment,
                text=True,
                encoding="utf-8",
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
            )
        except OSError as error:
            raise GpulabError(f"its worker process could not be started: {error}") from None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.jobs, self.answers = self.process.stdin, self.process.stdout
        self.lock, self.numbers = threading.Lock(), itertools.count()
        self.asked: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}  # what is answered to each job
        # Both are read all the time, so that the process never waits for a reader; the end of its errors is kept.
        self.last_words: collections.deque[str] = collections.deque(maxlen=3)
        self.listener = threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True)
        self.listener.start()
        threading.Thread(target=self._hear, daemon=True).start()

    def _listen(self, errors: IO[str]) -> None:
        with errors:
            self.last_words.extend(map(str.strip, errors))

    def _hear(self) -> None:
        with self.answers:
            try:
                for line in self.answers:
                    message = json.loads(line)
                    self.asked[message.pop("number")].put(message)
            except (ValueError, KeyError):  # who says this is no worker of ours
                self.process.kill()
        with self.lock:
            self.ended = True
            for waiting in [*self.asked.values()]:
                waiting.put(None)

    def train(self, job: dict[str, Any], tell: Callable[[int, float], None]) -> Any:
        """Have a job done, and return what `outcome` does."""
        return outcome(self.answers_to(as_text(job)), tell)

    def answers_to(self, text: str) -> Iterator[dict[str, Any]]:
        """Have a job done, given as text; yields its progress, and last its end, as `outcome` reads them."""
        with self.lock:
            number, answers = next(self.numbers), queue.SimpleQueue[dict[str, Any] | None]()
            self.asked[number] = answers
            if self.ended:
                answers.put(None)
            with contextlib.suppress(OSError, ValueError):  # if it has died, the end of its answers says so
                self.jobs.write(f'{{"number": {number}, {text[1:]}\n')
                self.jobs.flush()
        while (message := answers.get()) is not None:
            yield message
            if "done" not in message:
                del self.asked[number]
                return
        status = self.process.wait()
        self.listener.join(timeout=5)  # what it said last may still be on its way
        words = " ".join(self.last_words) or "it said nothing (killed, or out of memory?)"
        raise GpulabError(f"its worker process ended with status {status}: {words}")

    def end(self) -> None:
        """No more jobs."""
        with contextlib.suppress(OSError):
            self.jobs.close()

    def close(self) -> None:
        """No more jobs: wait until it ends; one that was asked to and does not hear is killed."""
        self.end()
        try:
            self.process.wait(DEAF if self.stopped else None)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """Ask it to save a checkpoint and end."""
        self.stopped = True
        self.process.terminate()


def outcome(messages: Iterable[dict[str, Any]], tell: Callable[[int, float], None]) -> Any:
    """How a job ended: the run's id, or without a store its metrics. `tell` hears (frames done, loss) until then."""
    for message in messages:
        if "error" in message:
            raise GpulabError(message["error"])
        if "done" not in message:
            return message["id"] if "id" in message else message["metrics"]
        tell(message["done"], message["loss"])
    raise GpulabError("its worker process said nothing of its end")


class Workers:
    """The processes in which `count` trainings go on at the same time.

    Each has a process of its own, which is replaced when a setting needs another one, or when it has died. Those that
    may share a GPU are threads of one process, one for each setting.
    """

    def __init__(self, count: int) -> None:
        self.count, self.stopped, self.lock = count, False, threading.Lock()
        self.all: dict[int | str, Worker] = {}  # by thread, or by setting for those that share a GPU

    def train(self, job: dict[str, Any], tell: Callable[[int, float], None]) -> Any:
        """Have a job done by the worker of this thread, or by the one that all threads share for its setting."""
        setting, shared = job["setting"], self.count > 1 and may_share(job)
        key = setting if shared else threading.get_ident()
        with self.lock:
            if self.stopped:
                raise GpulabError("interrupted")
            worker = self.all.get(key)
            if worker and (not _may_follow(worker.setting, setting) or worker.process.poll() is not None):
                worker.close()
                worker = None
            threads = min(self.count, MOST_THREADS) if shared else 1
            worker = self.all[key] = worker or Worker(setting, self.count, threads)
        return worker.train(job, tell)

    def passports(self, setting: str) -> list[Passport]:  # noqa: ARG002
        """Those of the machines on which a run may be done: this one."""
        return [passport()]

    def stop(self) -> None:
        """Ask every worker to save a checkpoint and end, and start no other."""
        self.stopped = True
        for worker in [*self.all.values()]:
            worker.stop()

    def close(self) -> None:
        """Wait until every worker has ended."""
        for worker in [*self.all.values()]:
            worker.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _may_follow(before: str, setting: str) -> bool:
    """Whether a process that trained under one setting may train under another.

    On a CPU, where both want the same environment and neither switches denormal numbers, which each thread keeps for
    itself. On a GPU libraries remember what they chose.
    """
    if before == setting:
        return True
    first, second = Setting.parse(before), Setting.parse(setting)
    on_cpu = first.kind == second.kind == "cpu" and first.denormals is None and second.denormals is None
    return on_cpu and first.environment() == second.environment()


def may_share(job: dict[str, Any]) -> bool:
    """Whether a training, given by the arguments of `gpulab.train`, may share a GPU with others in threads.

    gpulab's own networks may; a function of the user's draws from torch's global generators, and a guard watches the
    whole process.
    """
    own = isinstance(job.get("net"), str) and not is_function(job["net"])  # a pickled one is of the user's
    return own and not job.get("guard") and Setting.parse(job["setting"]).kind == "cuda"


def as_text(job: dict[str, Any]) -> str:
    """A job on one line: JSON, and what it cannot carry, such as a function, as bytes inside it."""
    try:
        return json.dumps(job)
    except TypeError:
        pickler: Any = pickle
    net = job["net"]
    if not getattr(net, "named", type(net).__module__ != "__main__"):  # what is typed in goes by value
        with extra("workers"):
            pickler = importlib.import_module("cloudpickle")
    try:
        pickled = pickler.dumps(job)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        name = getattr(net, "name", type(net).__name__)
        raise GpulabError(f"{name} cannot be sent to a worker process: {error}") from None
    return json.dumps({"pickled": base64.b64encode(pickled).decode(), "path": sys.path})
