"""Experiments: seeds × settings, each run in a worker process, so that no setting leaks into another."""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gpulab import files
from gpulab.errors import GpulabError, UsageError
from gpulab.settings import Setting
from gpulab.training import folders
from gpulab.training import store as stores
from gpulab.training.functions import TrainingFunction, is_function, optional
from gpulab.training.protocol import Specification, protocol

if TYPE_CHECKING:
    import pandas as pd

# With -P nothing that lies in the current folder is imported, such as a queue.py.
WORKER = [sys.executable, "-P", "-m", "gpulab.training.worker"]
INSIDE = "GPULAB_WORKER"  # in the environment of workers, which must not start others
DEAF = 10.0  # seconds after which a worker that was asked to end is killed


@dataclass
class Experiment:
    """Train one model, or by a function of your own, under several settings from the same seeds.

    Args:
        model: A training of your own, `train(seed, setting)` or `"my_training.py:train"`, as `gpulab.train` describes
            it; or `autoencoder`, `prednet` or `whitener`.
        settings: The settings to compare.
        seeds: How many, or the seeds themselves; without it the profile says, or 10.
        profile: `smoke`, `quick` or `paper`, for gpulab's own networks.
        store: The folder in which runs are kept.
        reruns: How often each seed and setting is run.
        workers: How many runs go on at the same time: more than one is for a GPU that a single small network
            cannot fill, and makes `seconds` say nothing.
        options: Those of the function; or those of `gpulab.train` that JSON can carry, such as `frames` or `data`.
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

    model: str | Callable[..., Any]
    settings: Iterable[str]
    seeds: int | Iterable[int] | None = None
    profile: str = "quick"
    store: str | Path | None = None
    reruns: int = 1
    workers: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    variants: Iterable[dict[str, Any]] = ({},)

    def __post_init__(self) -> None:
        self.training, usual, frames = None, 10, 1
        if isinstance(self.model, str) and not is_function(self.model):
            plan = protocol(self.model, self.profile)
            usual, frames = plan.seeds, self.options.get("frames") or plan.frames
        else:
            self.training = TrainingFunction(self.model)
        self.length, self.unit = frames, "run" if self.training else "frame"
        self.settings = [str(Setting.parse(text)) for text in self.settings]
        seeds = usual if self.seeds is None else self.seeds
        self.seeds = list(range(seeds) if isinstance(seeds, int) else seeds)
        self.variants = list(self.variants)
        self.folder = Path(stores.default_store() if self.store is None else self.store)
        if not (self.settings and self.seeds and self.variants) or self.reruns < 1 or self.workers < 1:
            raise UsageError("an experiment needs settings, seeds, variants, reruns and workers, at least one of each")

    def jobs(self) -> list[dict[str, Any]]:
        """The arguments of each training, ordered by setting."""
        where = {"keep_weights": False, "store": str(self.folder)}
        return [
            self._arguments(setting, seed, rerun, {**self.options, **variant}) | where
            for setting in self.settings
            for variant in self.variants
            for rerun in range(self.reruns)
            for seed in self.seeds  # type: ignore[union-attr]
        ]

    def _arguments(self, setting: str, seed: int, rerun: int, options: dict[str, Any]) -> dict[str, Any]:
        if self.training is None:
            return Specification(str(self.model), setting, seed, self.profile, rerun, options).arguments()
        own = {"net": self.training, "setting": setting, "seed": seed, "rerun": rerun}
        return own | {"model_options": self.training.checked(options)}

    def run(self, progress: bool = True) -> pd.DataFrame:
        """Do what is not done yet and return this experiment's runs, as `gpulab.runs` does.

        An interrupted experiment goes on where it was. Runs that fail do not stop the others; they
        are named in a `GpulabError` at the end.
        """
        from tqdm.auto import tqdm

        from gpulab.training.plan import planned

        if INSIDE in os.environ:
            raise UsageError(
                "an experiment began while a worker imported its file: put it under __name__ == '__main__'"
            )
        jobs = self.jobs()
        frames = self.length
        found = [folders.find(self.folder, planned(**job)) for job in jobs]
        is_done = [folder is not None for folder in found]
        finished = [folder.name for folder in found if folder is not None]
        if not all(is_done):
            files.check_writable(self.folder / "run")
        failures: dict[str, list[str]] = {}  # which runs, by why
        frames_done, lock = [frames if done else 0 for done in is_done], threading.Lock()
        total = {"total": len(jobs) * frames, "initial": sum(frames_done), "unit": self.unit}
        bar = tqdm(**total, leave=False, disable=not progress, miniters=0)  # a step of unknown length counts nothing

        def tell(number: int, done: int, loss: float | None = None) -> None:
            with lock:
                if loss is not None:
                    bar.set_description(f"{jobs[number]['setting']} seed {jobs[number]['seed']}", refresh=False)
                    bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                    done = 0 if self.training else done  # nobody knows how long it is
                done = min(done, frames)
                bar.update(done - frames_done[number])
                frames_done[number] = done

        def work(number: int) -> None:
            job = jobs[number]
            try:
                finished.append(workers.train(job, functools.partial(tell, number)))
            except GpulabError as error:
                failures.setdefault(str(error), []).append(f"{job['setting']} seed {job['seed']}")
            tell(number, frames)

        with bar, ThreadPoolExecutor(self.workers) as pool, Workers(self.workers) as workers:
            trainings = [pool.submit(work, number) for number, done in enumerate(is_done) if not done]
            try:
                for training in trainings:
                    training.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                workers.stop()
                raise
        if failures:
            raise GpulabError(
                f"{sum(map(len, failures.values()))} of {len(jobs)} runs failed, the others are kept in {self.folder}; "
                f"run again to try those: " + "; ".join(f"{', '.join(of)}: {why}" for why, of in failures.items())
            )
        frame = stores.runs(self.folder)
        return frame[frame.id.isin(finished)].reset_index(drop=True)


class _Worker:
    """A process that trains under one setting, job after job."""

    def __init__(self, setting: str, beside: int) -> None:
        self.setting, self.stopped = setting, False
        environment = {**os.environ, **Setting.parse(setting).environment(), INSIDE: "1"}
        if beside > 1 and not setting.startswith("cpu"):
            environment["OMP_NUM_THREADS"] = "1"  # the work is the GPU's; the cores are shared
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                WORKER, env=environment, text=True, encoding="utf-8", stdin=pipe, stdout=pipe, stderr=pipe
            )
        except OSError as error:
            raise GpulabError(f"its worker process could not be started: {error}") from None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.jobs, self.answers = self.process.stdin, self.process.stdout
        # Standard error is read all the time, so that the process never waits for a reader; its end is kept.
        self.last_words: collections.deque[str] = collections.deque(maxlen=3)
        self.listener = threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True)
        self.listener.start()

    def _listen(self, errors: IO[str]) -> None:
        with errors:
            self.last_words.extend(map(str.strip, errors))

    def train(self, job: dict[str, Any], tell: Callable[[int, float], None]) -> Any:
        """Have a job done; returns the run's id, or without a store its metrics. `tell` hears (frames done, loss)."""
        with contextlib.suppress(OSError):  # if it has died, the end of its answers says so
            self.jobs.write(_as_text(job) + "\n")
            self.jobs.flush()
        for line in self.answers:
            message = json.loads(line)
            if "error" in message:
                raise GpulabError(message["error"])
            if "done" not in message:
                return message["id"] if "id" in message else message["metrics"]
            tell(message["done"], message["loss"])
        status = self.process.wait()
        self.listener.join(timeout=5)  # what it said last may still be on its way
        words = " ".join(self.last_words) or "it said nothing (killed, or out of memory?)"
        raise GpulabError(f"its worker process ended with status {status}: {words}")

    def close(self) -> None:
        """No more jobs: wait until it ends; one that was asked to and does not hear is killed."""
        with contextlib.suppress(OSError):
            self.jobs.close()
        try:
            self.process.wait(DEAF if self.stopped else None)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.answers.close()

    def stop(self) -> None:
        """Ask it to save a checkpoint and end."""
        self.stopped = True
        self.process.terminate()


class Workers:
    """One worker a thread, replaced when the setting changes or it has died."""

    def __init__(self, count: int) -> None:
        self.count, self.stopped = count, False
        self.mine = threading.local()
        self.all: set[_Worker] = set()

    def train(self, job: dict[str, Any], tell: Callable[[int, float], None]) -> Any:
        """Have a job done by this thread's worker."""
        if self.stopped:
            raise GpulabError("interrupted")
        worker: _Worker | None = getattr(self.mine, "worker", None)
        if worker is None or worker.setting != job["setting"] or worker.process.poll() is not None:
            if worker is not None:
                worker.close()
                self.all.discard(worker)
            worker = self.mine.worker = _Worker(job["setting"], self.count)
            self.all.add(worker)
        return worker.train(job, tell)

    def stop(self) -> None:
        """Ask every worker to save a checkpoint and end, and start no other."""
        self.stopped = True
        for worker in [*self.all]:
            worker.stop()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in [*self.all]:
            worker.close()


def _as_text(job: dict[str, Any]) -> str:
    """A job on one line: JSON, and a function as bytes inside it."""
    training = job["net"]
    if isinstance(training, str):
        return json.dumps(job)
    try:
        pickled = (pickle if training.named else optional("cloudpickle")).dumps(job)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise GpulabError(f"{training.name} cannot be sent to a worker process: {error}") from None
    return json.dumps({"pickled": base64.b64encode(pickled).decode(), "path": sys.path})


def worker_loop(lines: Iterator[str]) -> None:
    """What a worker process does: read a job a line, train, and answer with a line of JSON each.

    A job holds the arguments of `gpulab.train`, pickled where a function is among them; that comes from the process
    that started this one.
    """
    # Whatever a library prints, from Python or from C, must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    process = os.getpid()

    def answer(**message: Any) -> None:
        if os.getpid() != process:  # a function forked, and this is the child that came back
            os._exit(1)
        print(json.dumps(message), file=answers, flush=True)

    from gpulab.training.run import train  # with all that it imports, before the user's folders are looked in

    for line in lines:
        job = json.loads(line)
        try:
            if "pickled" in job:
                sys.path[:] = job["path"]  # as where the function was defined
                job = pickle.loads(base64.b64decode(job["pickled"]))
            run = train(**job, progress=lambda done, loss: answer(done=done, loss=loss))
            result = {"id": run.record["id"]} if "store" in job else {"metrics": run.metrics}
        except GpulabError as error:
            result = {"error": str(error)}
        except Exception as error:  # arguments that make no sense to a model or to Python
            result = {"error": f"{type(error).__name__}: {error}"}
        answer(**result)
