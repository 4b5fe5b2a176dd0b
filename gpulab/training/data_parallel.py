"""An engine: one of several processes takes its share of each batch, and the gradients are added up.

One `all_reduce` an update adds all gradients, each weighted by its share of the batch, so that a batch need not divide.
It works on what lies in `.grad`, whether autograd or the formulas of `prednet_windows` put it there. torch's
DistributedDataParallel hears of autograd's gradients alone, of a `forward` alone, and weights every process alike;
where it can be used its gradients are the same.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gpulab.data.feed import Feed
from gpulab.errors import GpulabError, UsageError
from gpulab.passports import passport
from gpulab.store import identities, run_files
from gpulab.training import checkpoints, parallel, run
from gpulab.training.engines import Engines
from gpulab.training.keeping import Keeping, StoredRun, stored_run
from gpulab.training.loop import Plain, Training
from gpulab.training.parallel import Group
from gpulab.training.plan import Plan
from gpulab.training.workers import TORCHRUN

ALONE = "or leave devices away, and let each train another seed: gpulab.Experiment"


# --- what can be divided ---------------------------------------------------------------------------------


def check_divides(plan: Plan) -> None:
    """Raise `UsageError`, with a name and what to do, where the devices of a plan would have nothing to share."""
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


def examples(model: Any) -> int:
    """The dimension of a batch along which its examples lie: (t, b, …) where order matters, else (b, …)."""
    return int(model.sequential)


# --- the engine ------------------------------------------------------------------------------------------


class DataParallel(Plain):
    """Computes windows in one of several processes, each of which takes its share of every batch.

    Weights and Adam's moments are the same bits in all of them. With `timed`, `times` has the seconds of an update
    that went into waiting for the others and communicating; it takes a barrier an update.
    """

    def __init__(self, engines: Engines, group: Group) -> None:
        super().__init__(engines.training, engines.plain.loader)
        self.engines, self.group, self.timed = engines, group, False
        self.inner: Plain = engines.plain  # computes this process's share
        self.times = {"wait": 0.0, "communicate": 0.0}
        self.used: list[bool] | None = None  # which parameters the loss depends on

    def train_window(self, frames: np.ndarray, state: Any) -> tuple[Tensor, Any]:  # noqa: ARG002
        """As of `Engine`; no state goes from batch to batch, and what waits for others cannot be captured."""
        self.inner = self.engines.uncaptured()
        self.engines.training.ways |= self.inner.ways
        losses, _ = self.update(self.inner.batches(frames), None)
        dist.all_reduce(losses)
        return losses, None

    def gradients(self, batch: Tensor | Feed, state: Any) -> tuple[Tensor, Any]:
        """Those of the whole batch; the losses are this process's part of the whole."""
        assert isinstance(batch, Tensor)
        along = examples(self.model)
        part = batch.tensor_split(self.group.size, along)[self.group.rank]
        share = part.shape[along] / batch.shape[along]
        if share:
            per_frame, _ = self.inner.gradients(part, state)
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
        if self.timed and self.engines.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


# --- the runs of a group -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GroupKeeping(Keeping):
    """What several processes keep of a training that they share: the first does it, as `keeping` says, for all."""

    keeping: Keeping
    group: Group

    def existing_run(self, identity: identities.Identity, with_weights: bool = False) -> StoredRun | None:
        """As of `Keeping`, when all agree on what there is to do."""
        self.group.agree({**identity.record, "id": None}, "another training to do")
        stored = self.group.ask(lambda: self.keeping.existing_run(identity, with_weights))
        return stored if self.group.rank == 0 or stored is None else stored._replace(folder=None)

    def resume(self, identity: identities.Identity, training: Training) -> bool:
        """All begin where the first does: with its weights, or at its checkpoint."""
        if self.group.rank == 0:
            self.keeping.resume(identity, training)

        def of_the_first() -> Any:
            tensors, notes = checkpoints.checkpoint(training)
            return {name: tensor.cpu() for name, tensor in tensors.items()}, notes

        begun = self.group.ask(lambda: of_the_first() if training.history else None)
        if begun is None:
            for tensor in training.model.state_dict().values():
                dist.broadcast(tensor, 0)
        elif self.group.rank:
            checkpoints.restore(training, *begun)
        return begun is not None

    def save_checkpoint(self, identity: identities.Identity, training: Training) -> None:
        """As of `Keeping`."""
        if self.group.rank == 0:
            self.keeping.save_checkpoint(identity, training)

    def keep(self, run: StoredRun, own_files: Path | None = None) -> Path | None:
        """As of `Keeping`, when all have ended with the same weights."""
        self.group.agree(run.record["summary"]["weights"], "other weights")
        return self.keeping.keep(run, own_files) if self.group.rank == 0 else None


def in_group(plan: Plan, keeping: Keeping, group: Group) -> tuple[Keeping, run.MakeEngine]:
    """By what keeping and what engine `run.carry_out` has the processes of a group share a training."""
    if TORCHRUN in os.environ:  # else that has been done by the process that started this one
        check_divides(plan)

    def make_engine(plan: Plan, training: Training, alone: bool) -> DataParallel:
        return DataParallel(Engines(plan, training, alone), group)

    how: dict[str, Any] = {name: getattr(keeping, name) for name in ("checkpoint_seconds", "weights")}
    return GroupKeeping(keeping=keeping, group=group, **how), make_engine


def launched(plan: Plan, job: dict[str, Any], keeping: Keeping, progress: run.Told) -> run.Run:
    """The run that several processes on this machine make, and put into a store.

    Args:
        plan: What to train.
        job: The same, as arguments of `gpulab.train`.
        keeping: Where it is kept.
        progress: As of `gpulab.train`.
    """
    devices = plan.factors["devices"]
    parallel.check_devices(plan.setting, devices)
    plan.draw_weights()
    check_divides(plan)
    existing = keeping.existing_run(plan.identity(passport()), keeping.weights)
    if existing:
        return run.with_model(plan, existing)
    with contextlib.ExitStack() as stack:
        # The trained weights come back through the store.
        store = keeping.store or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tell = stack.enter_context(run.told(progress, **run.bar_of(plan)))
        name = parallel.launch(job | {"store": keeping.address or str(store)}, devices, tell)[0]
        done = run.with_model(plan, stored_run(store / name))
        if not keeping.weights:
            run_files.write_results(store / name, name, done.columns)
    return done if keeping.store else replace(done, path=None)


# --- inference -------------------------------------------------------------------------------------------


@torch.no_grad()
def predict(model: torch.nn.Module, inputs: Tensor, devices: Iterable[str]) -> Tensor:
    """Compute a model's outputs on several devices at once: each has a copy of the model and a share of the rows.

    Args:
        model: The network. It is called in evaluation mode, without gradients, and returns one tensor with a row for
            each input. The model itself is left as it is.
        inputs: A tensor (n, …); n need not be a multiple of the number of devices.
        devices: The devices' names, such as `["cuda:0", "cuda:1"]`, or `["cpu", "cpu"]`.

    Returns:
        The outputs (n, …) in the order of the inputs, on the inputs' device.

    Raises:
        UsageError: Without a device, or for a text instead of a list of them.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> model, inputs = torch.nn.Linear(3, 2), torch.rand(5, 3)
        >>> torch.allclose(gl.training.predict(model, inputs, ["cpu", "cpu"]), model(inputs))
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
