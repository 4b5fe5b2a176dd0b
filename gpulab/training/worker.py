"""`python -P -m gpulab.training.worker`: a process in which an experiment trains, or a device of a training."""

from __future__ import annotations

import os
import sys

from gpulab import signals

TYPE_CHECKING = False  # as typing's, which takes a while to load
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def main() -> None:
    """Do the jobs that come on standard input; save a checkpoint and end when asked to."""
    signals.leave_quietly()
    import contextlib

    jobs = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a function that reads its input does not read the jobs
    with signals.Raising("interrupted"), contextlib.suppress(BrokenPipeError):
        worker_loop(iter(jobs.readline, ""))


def worker_loop(lines: Iterator[str]) -> None:
    """What a worker process does: read a job a line, train, and answer with a line of JSON each.

    A line holds the number of a job and the arguments of `gpulab.train`, pickled where a function is among them; that
    comes from the process that started this one. Trainings that may share a GPU are done together.
    """
    import base64
    import json
    import pickle

    from gpulab.training import replicas
    from gpulab.training.request import train  # with all that it imports, before the user's folders are looked in
    from gpulab.training.workers import may_share

    # Whatever a library prints, from Python or from C, must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    process = os.getpid()

    def answer(number: int, **message: Any) -> None:
        if os.getpid() != process:  # a function forked, and this is the child that came back
            os._exit(1)
        print(json.dumps({"number": number, **message}), file=answers, flush=True)

    coming = replicas.Coming(lines)
    for number, job in coming:
        if may_share(job):
            replicas.train_together(number, job, coming, answer)
            continue
        try:
            if "pickled" in job:
                sys.path[:] = job["path"]  # as where the function was defined
                job = pickle.loads(base64.b64decode(job["pickled"]))

            def tell(done: int, loss: float, number: int = number) -> None:
                answer(number, done=done, loss=loss)

            answer(number, **replicas.result(train(**job, progress=tell), job))
        except Exception as error:
            answer(number, **replicas.failure(error))


if __name__ == "__main__":
    main()
