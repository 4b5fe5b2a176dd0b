"""Processes that share a training, a device each: started here, on one machine, or by torchrun, on any number."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpulab.errors import GpulabError, UsageError
from gpulab.settings import Setting
from gpulab.training.workers import RENDEZVOUS, TORCHRUN, Worker

LAST_WORDS = 5.0  # seconds in which the others of a process that failed say why they did
LOOPBACK = {"linux": "lo", "darwin": "lo0"}  # the only interface that processes on one machine talk over
# NVLink multicast hangs where several containers share one host's switch.
NCCL = {"NCCL_NVLS_ENABLE": "0"}


def count(asked: int | None) -> int:
    """How many devices share a training: as many as asked for, or else as torchrun has started processes, or one.

    Raises:
        UsageError: For what is no number, and for another number than that of torchrun's processes.
    """
    started = int(os.environ["WORLD_SIZE"]) if started_here() else None
    if asked is None:
        return started or 1
    if type(asked) is not int or asked < 1:
        raise UsageError(f"devices={asked!r}: expected a whole number from 1")
    if started and asked not in (1, started):
        raise UsageError(f"devices={asked}, and torchrun has started {started} processes: leave devices away")
    return asked


def started_here() -> bool:
    """Whether this process is one of several that share a training."""
    return TORCHRUN in os.environ or RENDEZVOUS in os.environ


def launch(job: dict[str, Any], devices: int, tell: Callable[[int, float], None] = lambda *_: None) -> list[Any]:
    """Have the same job, arguments of `gpulab.train`, done by so many processes here, and return their answers.

    `tell` hears the first.
    """
    with Processes(job["setting"], devices) as processes:
        return processes.do(job, tell)


class Processes:
    """So many processes here, which do the same jobs together, one after another.

    They meet through a file and talk over the loopback interface: nothing listens on a network. When one fails, the
    others are ended.
    """

    def __init__(self, setting: str, devices: int) -> None:
        check_devices(Setting.parse(setting), devices)
        self.devices, self.workers = devices, list[Worker]()
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            shared = {"WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(devices), **NCCL}
            shared[RENDEZVOUS] = Path(folder, "meeting").as_uri()
            if name := LOOPBACK.get(sys.platform):
                shared |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
            if Setting.parse(setting).threads is None:
                shared["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // devices))
            self.pool = stack.enter_context(ThreadPoolExecutor(devices))
            for rank in range(devices):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.workers.append(Worker(setting, 1, {**shared, **own}))
                stack.callback(self.workers[-1].close)
            for worker in self.workers:  # NCCL ends in all processes at once: each hears of it before any is waited for
                stack.callback(worker.end)
            self.stack = stack.pop_all()

    def do(self, job: dict[str, Any], tell: Callable[[int, float], None] = lambda *_: None) -> list[Any]:
        """Have a job done by all, under their setting, and return their answers; `tell` hears the first."""
        workers = list(enumerate(self.workers))
        answers = [self.pool.submit(w.train, job, tell if rank == 0 else _nobody) for rank, w in workers]
        try:
            wait(answers, return_when="FIRST_EXCEPTION")
            if any(answer.done() and answer.exception() for answer in answers):
                wait(answers, LAST_WORDS)
                for worker in self.workers:
                    worker.process.kill()  # those that are left wait for one that will not come
                errors = [f"process {n} of {self.devices}: {e}" for n, a in enumerate(answers) if (e := a.exception())]
                raise GpulabError("; ".join(errors))
        except KeyboardInterrupt:
            for worker in self.workers:
                worker.stop()
            raise
        return [answer.result() for answer in answers]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.close()


def _nobody(done: int, loss: float) -> None:
    """Hears the progress of all processes but the first."""


def check_devices(setting: Setting, devices: int) -> None:
    """Raise `UsageError` unless a machine of this kind can give every process a device of its own."""
    if setting.kind not in ("cpu", "cuda"):
        raise UsageError(f"devices={devices} under {setting}: several devices share a training on cpu and cuda")
    if setting.kind == "cuda" and setting.device != "cuda":
        raise UsageError(f"devices={devices} under {setting}: say cuda, without a number; each process takes its own")
    here, cores = int(os.environ.get("LOCAL_WORLD_SIZE", devices)), os.cpu_count() or 1
    if setting.kind == "cpu" and here > cores:
        warnings.warn(f"devices={devices}: this machine has {cores} cores, which so many processes share", stacklevel=3)
    if setting.kind == "cuda" and here > torch.cuda.device_count():
        raise UsageError(f"devices={devices}: this machine has {torch.cuda.device_count()} CUDA GPU(s)")


class Group:
    """The processes that share a training: this is number `rank` of `size`."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def ask(self, question: Callable[[], Any]) -> Any:
        """What the first process answers, in all of them."""
        answer = [question() if self.rank == 0 else None]
        if self.size > 1:
            dist.broadcast_object_list(answer, 0)
        return answer[0]

    def agree(self, mine: Any, what: str) -> None:
        """Raise `GpulabError` unless this is the same in all processes."""
        if mine != self.ask(lambda: mine):
            raise GpulabError(f"process {self.rank} of {self.size} has {what} than the first")


@contextlib.contextmanager
def join(setting: Setting, devices: int) -> Iterator[Group]:
    """The group of processes that share a training, of which this is one; a group of one where it trains alone.

    On GPUs they talk through NCCL, on CPUs through gloo. The group stays, for the next training.
    """
    if devices == 1:
        yield Group()
        return
    check_devices(setting, devices)
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if setting.kind == "cuda":
        torch.cuda.set_device(local)
        for name, value in NCCL.items():
            os.environ.setdefault(name, value)
    if not dist.is_initialized():
        store, rank, _ = next(dist.rendezvous(os.environ.get(RENDEZVOUS, "env://"), rank, devices))
        # torchrun keeps its store when it restarts: there the processes that have died still have addresses.
        store = dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend = "nccl" if setting.kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=devices)
        atexit.register(_leave)
    yield Group(rank, devices)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
