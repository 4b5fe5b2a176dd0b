"""Experiments: seeds × settings, each run in a worker process, so that no setting leaks into another."""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.errors import GpulabError, UsageError
from gpulab.settings import PATIENCE, Setting
from gpulab.training import store as stores
from gpulab.training.protocol import Specification, protocol

if TYPE_CHECKING:
    import pandas as pd

WORKER = [sys.executable, "-m", "gpulab.training.worker"]


@dataclass
class Experiment:
    """Train one model under several settings from the same seeds.

    Args:
        model: `autoencoder`, `prednet` or `whitener`.
        settings: The settings to compare.
        seeds: How many, or the seeds themselves; without it the profile says.
        profile: `smoke`, `quick` or `paper`.
        store: The folder in which runs are kept.
        reruns: How often each seed and setting is run.
        workers: How many runs go on at the same time: more than one is for a GPU that a single small network
            cannot fill, and makes `seconds` say nothing.
        options: Those of `gpulab.train` that JSON can carry, such as `frames` or `data`.
        variants: Each adds options of its own: all of them are trained under every setting.

    Raises:
        UsageError: For what makes no sense, before any worker starts.

    Examples:
        >>> import tempfile
        >>> settings = ["cpu", "cpu:threads=1"]
        >>> exp = Experiment("autoencoder", settings, seeds=1, profile="smoke", store=tempfile.mkdtemp())
        >>> exp.run(progress=False)[["setting", "seed", "status"]].values.tolist()
        [['cpu', 0, 'finished'], ['cpu:threads=1', 0, 'finished']]
    """

    model: str
    settings: Iterable[str]
    seeds: int | Iterable[int] | None = None
    profile: str = "quick"
    store: str | Path | None = None
    reruns: int = 1
    workers: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    variants: Iterable[dict[str, Any]] = ({},)

    def __post_init__(self) -> None:
        plan = protocol(self.model, self.profile)
        self.settings = [str(Setting.parse(text)) for text in self.settings]
        seeds = plan.seeds if self.seeds is None else self.seeds
        self.seeds = list(range(seeds) if isinstance(seeds, int) else seeds)
        self.variants = list(self.variants)
        self.folder = Path(stores.default_store() if self.store is None else self.store)
        if not (self.settings and self.seeds and self.variants) or self.reruns < 1 or self.workers < 1:
            raise UsageError("an experiment needs settings, seeds, variants, reruns and workers, at least one of each")

    def jobs(self) -> list[dict[str, Any]]:
        """The arguments of each training, ordered by setting."""
        where = {"keep_weights": False, "store": str(self.folder)}
        return [
            Specification(self.model, setting, seed, self.profile, rerun, {**self.options, **variant}).arguments()
            | where
            for setting in self.settings
            for variant in self.variants
            for rerun in range(self.reruns)
            for seed in self.seeds  # type: ignore[union-attr]
        ]

    def run(self, progress: bool = True) -> pd.DataFrame:
        """Do what is not done yet and return this experiment's runs, as `gpulab.runs` does.

        An interrupted experiment goes on where it was. Runs that fail do not stop the others; they
        are named in a `GpulabError` at the end.
        """
        from gpulab.training.plan import planned_id

        jobs = self.jobs()
        plan = protocol(self.model, self.profile)
        frames = self.options.get("frames") or plan.frames
        finished: list[str] = []
        failures: list[str] = []
        pending: queue.SimpleQueue[int] = queue.SimpleQueue()
        with _Bar(len(jobs), frames, progress) as bar, Workers(self.workers) as workers:
            for number, job in enumerate(jobs):
                if stores.is_done(self.folder, name := planned_id(**job)):
                    finished.append(name)
                    bar.told(number, job, frames, None)
                else:
                    pending.put(number)

            def work() -> None:
                while True:
                    try:
                        number = pending.get_nowait()
                    except queue.Empty:
                        return
                    job = jobs[number]
                    try:
                        finished.append(workers.train(job, functools.partial(bar.told, number, job)))
                    except GpulabError as error:
                        failures.append(f"{job['setting']} seed {job['seed']}: {error}")
                    bar.told(number, job, frames, None)

            with ThreadPoolExecutor(self.workers) as pool:
                threads = [pool.submit(work) for _ in range(min(self.workers, len(jobs)))]
                try:
                    for thread in threads:
                        thread.result()
                except BaseException:
                    with contextlib.suppress(queue.Empty):
                        while True:
                            pending.get_nowait()
                    workers.stop()
                    raise
        if failures:
            raise GpulabError(
                f"{len(failures)} of {len(jobs)} runs failed, the others are kept in {self.folder}; "
                f"run again to try those: " + "; ".join(failures)
            )
        frame = stores.runs(self.folder)
        return frame[frame.id.isin(finished)].reset_index(drop=True)


class _Worker:
    """A process that trains under one setting, job after job."""

    def __init__(self, setting: str, beside: int) -> None:
        self.setting = setting
        environment = {**PATIENCE, **os.environ, **Setting.parse(setting).environment()}
        if beside > 1 and not setting.startswith("cpu"):
            environment["OMP_NUM_THREADS"] = "1"  # the work is the GPU's; the cores are shared
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                WORKER, env=environment, text=True, encoding="utf-8", stdin=pipe, stdout=pipe, stderr=pipe
            )
        except OSError as error:
            raise GpulabError(f"its worker process could not be started: {error}") from None
        self.last_words: collections.deque[str] = collections.deque(maxlen=3)
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def train(self, job: dict[str, Any], tell: Callable[[int, float], None]) -> Any:
        """Have a job done; returns the id of the run, or what a call gave. `tell` hears (frames done, loss)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):  # if it has died, the end of its answers says so
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            message = json.loads(line)
            if "error" in message:
                raise GpulabError(message["error"])
            if "id" in message:
                return message["id"]
            if "result" in message:
                return message["result"]
            tell(message["done"], message["loss"])
        status = self.process.wait()
        self.listener.join(timeout=5)  # what it said last may still be on its way
        words = " ".join(self.last_words) or "it said nothing (killed, or out of memory?)"
        raise GpulabError(f"its worker process ended with status {status}: {words}")

    def _listen(self) -> None:
        """Read standard error, so that the process never waits for a reader, and keep its end."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.last_words.append(line.strip())

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Ask it to save a checkpoint and end."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """No more jobs: wait until it ends."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        self.process.wait()


class Workers:
    """One worker a thread, replaced when the setting changes or it has died."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.mine = threading.local()
        self.all: list[_Worker] = []

    def train(self, job: dict[str, Any], tell: Callable[[int, float], None]) -> Any:
        """Have a job done by this thread's worker."""
        worker: _Worker | None = getattr(self.mine, "worker", None)
        if worker is None or worker.setting != job["setting"] or not worker.alive:
            if worker is not None:
                worker.close()
            worker = self.mine.worker = _Worker(job["setting"], self.count)
            self.all.append(worker)
        return worker.train(job, tell)

    def stop(self) -> None:
        """Ask every worker to save a checkpoint and end."""
        for worker in self.all:
            worker.stop()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self.all:
            worker.close()


class _Bar:
    """One bar for a whole experiment, in frames, with the setting, seed and loss of the latest word."""

    def __init__(self, jobs: int, frames: int, wanted: bool) -> None:
        from tqdm.auto import tqdm

        self.done: dict[int, int] = {}
        self.frames = frames
        self.lock = threading.Lock()
        self.bar = tqdm(total=jobs * frames, unit="frame", leave=False, disable=not wanted)

    def told(self, number: int, job: dict[str, Any], done: int, loss: float | None) -> None:
        with self.lock:
            if loss is not None:
                self.bar.set_description(f"{job['setting']} seed {job['seed']}", refresh=False)
                self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            done = min(done, self.frames)
            self.bar.update(done - self.done.get(number, 0))
            self.done[number] = done

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()


def worker_loop(lines: Iterator[str]) -> None:
    """What a worker process does: read a job a line, train, and answer with a line of JSON each.

    A job holds the arguments of `gpulab.train`, or in `call` a pickled function with its arguments, which
    comes from the process that started this one.
    """
    # Whatever a library prints, from Python or from C, must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    for line in lines:
        job = json.loads(line)
        try:
            if "call" in job:
                sys.path[:] = job["path"]  # as where the function was defined
                function, arguments = pickle.loads(base64.b64decode(job["call"]))
                answer(result=function(*arguments, lambda done, loss: answer(done=done, loss=loss)))
            else:
                from gpulab.training.run import train

                run = train(**job, progress=lambda done, loss: answer(done=done, loss=loss))
                answer(id=run.record["id"])
        except GpulabError as error:
            answer(error=str(error))
        except Exception as error:  # whatever a function of the user's raises
            answer(error=f"{type(error).__name__}: {error}")
