"""`python -P -m gpulab.training.worker [SETTING THREADS]`: a process in which an experiment trains."""

from __future__ import annotations

import os
import sys

from gpulab import signals

TYPE_CHECKING = False  # as typing's, which takes a while to load
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Answer = Callable[..., None]  # of a job's number: `done` and `loss` now and then, and last its end

TELL_SECONDS = 0.2  # between what a training says of its progress
WHOLE_FILM = 1000  # chunks of frames: 5,000 frames of 160×120, 288 MB


def main(arguments: list[str]) -> None:
    """Do the jobs that come on standard input; save checkpoints and end when asked to.

    Args:
        arguments: None, for one job after another. Or a setting and a number of threads, for trainings under that
            setting which share a GPU.
    """
    signals.leave_quietly()
    import contextlib

    jobs = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a function that reads its input does not read the jobs
    with signals.Raising("interrupted"), contextlib.suppress(BrokenPipeError):
        lines = iter(jobs.readline, "")
        if arguments:
            train_together(lines, _answers(), arguments[0], int(arguments[1]))
        else:
            train_one_by_one(lines, _answers())


def train_one_by_one(lines: Iterable[str], answer: Answer) -> None:
    """Read a job a line, and train.

    A line holds the number of a job and the arguments of `gpulab.train`, pickled where a function is among them; that
    comes from the process that started this one.
    """
    import base64
    import json
    import pickle

    import gpulab.training.request  # noqa: F401  # with all that it imports, before the user's folders are looked in

    for line in lines:
        job = json.loads(line)
        number = job.pop("number")
        if "pickled" in job:
            sys.path[:] = job["path"]  # as where the function was defined
            try:
                job = pickle.loads(base64.b64decode(job["pickled"]))
            except Exception as error:
                answer(number, error=f"{type(error).__name__}: {error}")
                continue
        _do(number, job, answer, lambda: None)


def train_together(lines: Iterable[str], answer: Answer, setting: str, threads: int) -> None:
    """Do jobs as they come, all under one setting, each in a thread and on a GPU on a stream of its own.

    One network with a batch of one leaves most of a GPU idle. What others compute changes nothing: weights and orders
    are drawn from generators that each training has for itself, and a stream keeps its kernels in their order.
    """
    import contextlib
    import json
    import queue
    import threading
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from gpulab.data import scenes
    from gpulab.settings import Setting

    parsed, stopping = Setting.parse(setting), threading.Event()
    streams: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def check_stopping() -> None:
        if stopping.is_set():
            raise KeyboardInterrupt  # a signal reaches the main thread alone

    def do(number: int, job: dict[str, Any]) -> None:
        stream = streams.get()  # torch has 32 streams, and hands the first out again after the last
        with contextlib.suppress(KeyboardInterrupt), torch.cuda.stream(stream):  # of None it is none
            _do(number, job, answer, check_stopping)
        streams.put(stream)

    # Each training puts the setting in force and takes it back; around all of them it stays in force.
    with scenes.remembered_chunks(WHOLE_FILM), parsed.apply(), ThreadPoolExecutor(threads) as pool:
        for _ in range(threads):
            streams.put(torch.cuda.Stream(parsed.device) if parsed.kind == "cuda" else None)
        try:
            for line in lines:
                job = json.loads(line)
                pool.submit(do, job.pop("number"), job)
        except BaseException:
            stopping.set()
            raise


def _answers() -> Answer:
    """What writes answers, a line of JSON each, to standard output, which nothing else writes to from now on."""
    import json
    import threading

    # Whatever a library prints, from Python or from C, must not come between the answers.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    process, writing = os.getpid(), threading.Lock()

    def answer(number: int, **message: Any) -> None:
        if os.getpid() != process:  # a function forked, and this is the child that came back
            os._exit(1)
        with writing:
            print(json.dumps({"number": number, **message}), file=output, flush=True)

    return answer


def _do(number: int, job: dict[str, Any], answer: Answer, check_stopping: Callable[[], None]) -> None:
    """Train, and say now and then how far it is, and how it ended."""
    import time

    from gpulab.errors import GpulabError
    from gpulab.training.request import train

    told = time.monotonic()

    def tell(done: int, loss: float) -> None:
        nonlocal told
        check_stopping()
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            answer(number, done=done, loss=loss)

    try:
        run = train(**job, progress=tell)
        answer(number, **({"id": run.record["id"]} if "store" in job else {"metrics": run.metrics}))
    except Exception as error:  # what is no error of gpulab's is of arguments that make no sense
        answer(number, error=str(error) if isinstance(error, GpulabError) else f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
