"""One training on several devices, a process each: every one takes its share of each batch, and gradients are added up.

One `all_reduce` an update adds all gradients, each weighted by its share of the batch, so that a batch need not divide.
It works on what lies in `.grad`, whether autograd or the formulas of `prednet_windows` put it there. torch's
DistributedDataParallel hears of autograd's gradients alone, of a `forward` alone, and weights every process alike;
where it can be used its gradients are the same.

The processes are started here, on one machine, or by torchrun, on any number.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpulab.data.feed import Feed
from gpulab.errors import GpulabError, UsageError
from gpulab.settings import Setting
from gpulab.training.accumulation import GradientAccumulation
from gpulab.training.plan import Plan
from gpulab.training.step import Trainer
from gpulab.training.workers import RENDEZVOUS, TORCHRUN, Worker

LAST_WORDS = 5.0  # seconds in which the others of a process that failed say why they did
LOOPBACK = {"linux": "lo", "darwin": "lo0"}  # the only interface that processes on one machine talk over
ALONE = "or leave devices away, and let each train another seed: gpulab.Experiment"
# NVLink multicast hangs where several containers share one host's switch.
NCCL = {"NCCL_NVLS_ENABLE": "0"}


# --- the processes ---------------------------------------------------------------------------------------


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


# --- what can be divided ---------------------------------------------------------------------------------


def check_divides(plan: Plan) -> None:
    """Raise `UsageError`, with a name and what to do, where the devices of a plan would have nothing to share.

    Whether a batch in parts has the gradient of the whole is tried on three of its examples, as for
    `GradientAccumulation`.
    """
    devices, model = plan.factors["devices"], copy.deepcopy(plan.model).train()
    name = type(model).__name__
    if plan.factors["loader"] != "window":
        raise UsageError(f"loader {plan.factors['loader']!r} hands over one frame after another: nothing to divide")
    window = next(plan.data.windows(plan.window, plan.seed)).frames
    batches = list(model.batches(torch.from_numpy(window).to(next(model.parameters()).dtype).div(255)))
    if not all(isinstance(batch, Tensor) for batch in batches):
        raise UsageError(f"{name} learns from batches that are no tensors, which devices cannot share")
    largest = max(batches, key=lambda batch: batch.shape[examples(model)])
    size = largest.shape[examples(model)]
    if size < devices:
        how = "model_options={'batch_size': N} (--option batch_size=N)" if hasattr(model, "batch_size") else "`batches`"
        raise UsageError(
            f"{name} learns from a batch of {size}, which {devices} devices cannot share: give it a larger one, by "
            f"{how}, within a window ({plan.window} frames: window=N, --window N); {ALONE}"
        )
    try:
        Shares(model).check(largest)
    except UsageError as error:
        raise UsageError(f"{devices} devices cannot share a batch: {error}; {ALONE}") from None


def examples(model: Any) -> int:
    """The dimension of a batch along which its examples lie: (t, b, …) where order matters, else (b, …)."""
    return int(model.sequential)


class Shares(GradientAccumulation):
    """Tries whether a batch can be divided, of films (t, b, c, h, w), too."""

    def check(self, batch: Tensor) -> None:
        """Raise `UsageError`, with a name, for a batch that is not the mean of its parts."""
        batch = batch.movedim(examples(self.model), 0)
        self._check(batch, len(batch))

    def _loss(self, part: Tensor, count: int) -> Tensor:
        model: Any = self.model
        loss, _, state = model.training_loss(part.movedim(0, examples(self.model)), None)
        if state is not None:
            raise UsageError(
                f"{type(self.model).__name__} carries a state from batch to batch, which devices cannot share: let "
                "each batch begin anew, and return None as its state"
            )
        return loss * (len(part) / count)


# --- the loop --------------------------------------------------------------------------------------------


class DataParallel(Trainer):
    """The loop over windows in one of several processes, each of which takes its share of every batch.

    Weights and Adam's moments are the same bits in all of them. With `timed`, `times` has the seconds of an update
    that went into waiting for the others and communicating; it takes a barrier an update.
    """

    def __init__(self, plan: Plan, group: Group) -> None:
        super().__init__(plan)
        self.group, self.timed = group, False
        self.times = {"wait": 0.0, "communicate": 0.0}
        self.used: list[bool] | None = None  # which parameters the loss depends on

    def share(self) -> None:
        """Begin where the first process does: its weights, or its checkpoint."""

        def begin() -> Any:
            tensors, notes = self.checkpoint()
            return {name: tensor.cpu() for name, tensor in tensors.items()}, notes

        begun = self.group.ask(lambda: begin() if self.history else None)
        if begun is None:
            for tensor in self.model.state_dict().values():
                dist.broadcast(tensor, 0)
        elif self.group.rank:
            self.restore(*begun)

    def _can_be_captured(self, state: Any) -> bool:  # noqa: ARG002
        return False  # what is captured must not wait for others

    def _updates(self, batches: Iterable[Tensor | Feed], state: Any, fast: bool) -> tuple[Tensor, Any]:
        losses, state = super()._updates(batches, state, fast)
        dist.all_reduce(losses)
        return losses, state

    def _gradients(self, batch: Tensor | Feed, state: Any, fast: bool) -> tuple[Tensor, Any]:
        """Those of the whole batch; the losses are this process's part of the whole."""
        assert isinstance(batch, Tensor)
        along = examples(self.model)
        mine = batch.tensor_split(self.group.size, along)[self.group.rank]
        share = mine.shape[along] / batch.shape[along]
        if share:
            per_frame, _ = super()._gradients(mine, state, fast)
        else:  # a last batch may have fewer examples than there are devices
            self.optimizer.zero_grad()
            per_frame = batch.new_zeros(1)
        self._add_up(share)
        return per_frame * share, None

    def _add_up(self, share: float) -> None:
        """Put the gradients of the whole batch in place: the shares' own, each weighted by its share of the batch."""
        begin = self._now()
        if self.timed:
            dist.barrier()
        self.times["wait"] += self._now() - begin
        parameters = self.optimizer.parameters
        has = [p.grad is not None for p in parameters]
        if self.used is None:
            counts = torch.tensor(has, dtype=torch.int32, device=parameters[0].device)
            dist.all_reduce(counts)
            self.used = [number > 0 for number in counts.tolist()]
        elif share and has != self.used:
            raise GpulabError(
                f"{type(self.model).__name__} uses other parameters than at first: devices cannot share it"
            )
        used = [p for p, is_used in zip(parameters, self.used, strict=True) if is_used]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in used])
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32)).mul_(share)
        begin = self._now()
        dist.all_reduce(flat)
        for parameter, whole in zip(used, flat.split([p.numel() for p in used]), strict=True):
            parameter.grad = whole.view_as(parameter).to(parameter.dtype)
        self.times["communicate"] += self._now() - begin

    def _now(self) -> float:
        if self.timed and self.setting.kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def outcome(self) -> dict[str, Any]:
        """As of one process, when all have ended with the same weights."""
        outcome = super().outcome()
        self.group.agree(outcome["summary"]["weights"], "other weights")
        return outcome


def trainer(plan: Plan, group: Group) -> Trainer:
    """What trains in one process of a group, or alone."""
    if group.size == 1:
        return Trainer(plan)
    if TORCHRUN in os.environ:  # else that has been done by the process that started this one
        check_divides(plan)
    return DataParallel(plan, group)


# --- inference -------------------------------------------------------------------------------------------


@torch.no_grad()
def predict(model: torch.nn.Module, inputs: Tensor, devices: Iterable[str]) -> Tensor:
    """What a model makes of inputs, a copy of it on each device, each given its share of the rows.

    Args:
        model: Called in evaluation mode; itself left as it is.
        inputs: (n, …); n need not divide.
        devices: Such as `["cuda:0", "cuda:1"]`, or `["cpu", "cpu"]`.

    Returns:
        The outputs in the inputs' order, on the inputs' device.

    Raises:
        UsageError: Without a device, or for a text instead of a list of them.

    Examples:
        >>> model, inputs = torch.nn.Linear(3, 2), torch.rand(5, 3)
        >>> torch.allclose(predict(model, inputs, ["cpu", "cpu"]), model(inputs))
        True
    """
    places = list(devices)
    if not places or isinstance(devices, str):
        raise UsageError(f"devices={devices!r}: expected a list of one or more, such as ['cuda:0', 'cuda:1']")
    parts = [part for part in inputs.tensor_split(len(places)) if len(part)] or [inputs]
    copies = [copy.deepcopy(model).eval().to(place) for place, _ in zip(places, parts, strict=False)]
    waiting = [part.to(place, non_blocking=True) for place, part in zip(places, parts, strict=False)]

    def work(number: int) -> Tensor:
        with torch.no_grad():  # which every thread has for itself
            return copies[number](waiting[number])

    with ThreadPoolExecutor(len(parts)) as pool:
        return torch.cat([output.to(inputs.device) for output in pool.map(work, range(len(parts)))])
