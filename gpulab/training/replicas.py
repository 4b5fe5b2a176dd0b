"""Many small networks on one GPU at once: each trains on a stream of its own, and they take turns window by window.

One network with a batch of one leaves most of a GPU idle, for its kernels wait for each other; those of another need
not wait for them. Each has the kernels, and so the result, that it would have alone.
"""

from __future__ import annotations

import collections
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from gpulab.errors import GpulabError
from gpulab.models import MODELS
from gpulab.settings import Setting
from gpulab.store import records
from gpulab.training import run
from gpulab.training.engines import Engines
from gpulab.training.plan import plan_with_command
from gpulab.training.run import Run
from gpulab.training.uploads import keeping_in
from gpulab.training.workers import TOGETHER

TELL = 0.2  # seconds between what a training says of its progress
CHECKPOINT = 120.0  # seconds between checkpoints of each, for which all others wait; an interruption saves anyway

Job = dict[str, Any]
# Who hears of a job, by its number: `done` and `loss` now and then, and last its `id` or an `error`.
Answer = Callable[..., None]


class Coming:
    """Numbered jobs, a line of JSON each, as they come; `line["number"]` is the number, the rest the job."""

    def __init__(self, lines: Iterator[str]) -> None:
        self.jobs = (_numbered(json.loads(line)) for line in lines)
        self.queue: queue.SimpleQueue[tuple[int, Job] | None] | None = None  # filled by a thread, once there is one

    def __iter__(self) -> Iterator[tuple[int, Job]]:
        while (item := next(self.jobs, None) if self.queue is None else self.queue.get()) is not None:
            yield item

    def now(self) -> tuple[int, Job] | None:
        """The next, if it has come already."""
        if self.queue is None:
            self.queue = queue.SimpleQueue()
            threading.Thread(target=self._listen, args=(self.queue,), daemon=True).start()
        with contextlib.suppress(queue.Empty):
            if (item := self.queue.get_nowait()) is not None:
                return item
            self.queue.put(None)  # the end, for who asks next
        return None

    def _listen(self, into: queue.SimpleQueue[tuple[int, Job] | None]) -> None:
        for item in self.jobs:
            into.put(item)
        into.put(None)


def _numbered(job: Job) -> tuple[int, Job]:
    return job.pop("number"), job


def result(done: Run, job: Job) -> dict[str, Any]:
    """What is answered to a job that was done."""
    return {"id": done.record["id"]} if "store" in job else {"metrics": done.metrics}


def failure(error: Exception) -> dict[str, Any]:
    """What is answered to one that failed; what is no error of gpulab's is of arguments that make no sense."""
    return {"error": str(error) if isinstance(error, GpulabError) else f"{type(error).__name__}: {error}"}


class Replica:
    """A training that takes turns with others; what it computes goes to its `stream`, where the device has any."""

    def __init__(self, number: int, job: Job, answer: Answer, stream: torch.cuda.Stream | None) -> None:
        self.number, self.job, self.answer, self.stream = number, job, answer, stream
        self.interrupted, self.told = False, time.monotonic()
        self.random = torch.get_rng_state()
        self.turns = self._train()

    def turn(self) -> None:
        """Give one window to the device, after a look at the last; random numbers are its own, whoever else draws."""
        torch.set_rng_state(self.random)
        with torch.cuda.stream(self.stream):  # of None it is none
            next(self.turns)
        self.random = torch.get_rng_state()

    def interrupt(self) -> None:
        """End it after the window that the device has; it saves a checkpoint."""
        self.interrupted = True
        with contextlib.suppress(KeyboardInterrupt, StopIteration, GpulabError):
            self.turn()

    def _train(self) -> Generator[None, None, Run]:
        job: Job = {"data": None, "seed": 0, "profile": "quick", "rerun": 0, **self.job}
        store, weights = job.pop("store", None), job.pop("keep_weights", True)
        command, registered = job.pop("command", None), job.pop("registered", None)
        plan, usual_command = plan_with_command(**job)
        keeping = keeping_in(store, checkpoint_seconds=CHECKPOINT, weights=weights)
        notes = {"command": command or usual_command, **records.registration(registered)}
        return (yield from run.carry_out(plan, notes, keeping, Engines, alone=False, progress=self._tell))

    def _tell(self, done: int, loss: float) -> None:
        """Hears of each window, when all is noted of it: the place to be interrupted."""
        if self.interrupted:
            raise KeyboardInterrupt
        if time.monotonic() - self.told > TELL:
            self.told = time.monotonic()
            self.answer(self.number, done=done, loss=loss)


def train_together(number: int, job: Job, coming: Coming, answer: Answer, most: int = TOGETHER) -> None:
    """Do a job, and with it those that come meanwhile, all under its setting, until none is going on.

    One that does not fit into the device's memory beside others waits until one of them has ended.
    """
    model: Any = MODELS[job["net"]]
    with contextlib.ExitStack() as stack:
        try:
            setting = Setting.parse(job["setting"])
            stack.enter_context(run.under(setting, model.threads))
            streams = [torch.cuda.Stream(setting.device) if setting.kind == "cuda" else None for _ in range(most)]
        except GpulabError as error:
            answer(number, **failure(error))
            return
        _take_turns([(number, job)], streams, coming, answer)


def _take_turns(
    jobs: list[tuple[int, Job]], streams: list[torch.cuda.Stream | None], coming: Coming, answer: Answer
) -> None:
    """Do jobs and those that come, as many at once as there are streams."""
    most, waiting, going = len(streams), collections.deque(jobs), dict[int, Replica]()
    try:
        while waiting or going:
            while len(going) < most and (item := waiting.popleft() if waiting else coming.now()):
                going[item[0]] = Replica(*item, answer, streams.pop())
            for number, replica in [*going.items()]:
                try:
                    replica.turn()
                    continue
                except StopIteration as end:
                    answer(number, **result(end.value, replica.job))
                except torch.OutOfMemoryError as error:
                    most = max(1, len(going) - 1)
                    if len(going) > 1:
                        waiting.append((number, replica.job))
                    else:
                        answer(number, **failure(error))
                except Exception as error:
                    answer(number, **failure(error))
                streams.append(going.pop(number).stream)
    except KeyboardInterrupt:
        for replica in going.values():
            replica.interrupt()
        raise
