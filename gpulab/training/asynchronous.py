"""Stochastic gradient descent by several processes on the same weights, without a lock: Hogwild.

Every worker reads the weights, computes the gradient of a batch of its own and subtracts it, and none waits: what it
read may be old when it writes, and of two that write a weight at the same moment one is lost. `delay` bounds how far a
worker may be ahead of the slowest; `synchronous` adds the gradients up, as data-parallel training does.

The weights lie in a file that all workers map into their memory, each beside a count of its updates: pairs, read and
written by the same instruction, so that a count is lost where an update is.

Sources: Recht, Ré, Wright, Niu 2011, *Hogwild: a lock-free approach to parallelizing stochastic gradient descent*
(arXiv 1106.5730); with a bounded delay Ho et al. 2013, *More effective distributed ML via a stale synchronous parallel
parameter server*.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gpulab.data.datasets import load
from gpulab.data.feed import Loader
from gpulab.diagnostics.guards import guard as guarded
from gpulab.errors import UsageError, check_count
from gpulab.models.autoencoders import Autoencoder
from gpulab.settings import Setting
from gpulab.training import parallel

if TYPE_CHECKING:
    import pandas as pd

MODES = ("lock-free", "bounded", "synchronous")
COLUMNS = ("update", "seconds", "loss", "staleness", "overwritten")
SIZE = (28, 28)
as_tensor = Loader("window", Setting.parse("cpu")).window
PARTS = ("training/parallel.py", "models/autoencoders.py", "data")  # of gpulab, on which `work` depends


@dataclass
class Descent:
    """What the workers of `descend` did together.

    Attributes:
        history: A data frame with a row for each update, in the order of time: `worker`, `update` (its number among
            that worker's, from 0), `seconds` since the start, `loss` (of its batch, at the weights that the worker
            read), `staleness` (how many updates others made between its reading and its writing), and `overwritten` (1
            where the guard found that memory had changed before the backward pass used it, else 0; NaN without a
            guard).
        summary: A dictionary with `mode`, `seed`, `workers`, `delay` and `updates` as they were asked for;
            `heldout_loss`, the mean squared error on the held-out images at the end; `seconds` and
            `updates_per_second`; `staleness`, the mean; `weights`, how many there are; `lost`, how many changes of a
            single weight another worker's has overwritten; `lost_share`, the share of all changes of a weight; and
            `overwritten_steps`, the share of updates.
    """

    history: pd.DataFrame
    summary: dict[str, Any]


def descend(
    mode: str = "lock-free",
    seed: int = 0,
    workers: int = 2,
    updates: int = 400,
    delay: int | None = None,
    batch_size: int = 20,
    learning_rate: float = 1.0,
    hidden: tuple[int, ...] = (64, 16),
    data: str = "digits",
    guard: bool = False,
    processes: parallel.Processes | None = None,
) -> Descent:
    """Train an autoencoder by gradient descent in several processes that share the weights, on one CPU.

    This shows what happens when workers do not wait for each other. In all modes the workers compute the same number of
    gradients, of the same batches, and subtract each with the same learning rate.

    Args:
        mode: `lock-free`: every worker changes the shared weights when it is ready, and none waits (Hogwild).
            `bounded`: the same, but no worker is more than `delay` updates ahead of another. `synchronous`: all workers
            compute at the same weights, which then change by the sum of their gradients.
        seed: What the initial weights and the order of images are drawn from.
        workers: How many processes, of one thread each.
        updates: How many updates all workers make together; a multiple of `workers`.
        delay: For `bounded` alone: how many updates, from 0.
        batch_size: How many images each gradient is of.
        learning_rate: Of plain gradient descent, without momentum.
        hidden: The widths of the autoencoder's layers up to the code.
        data: Images, by a name that `gpulab.load` knows.
        guard: Whether each step is under `gpulab.guard`, which notes whether weights changed before the backward pass
            used them.
        processes: A `gpulab.training.parallel.Processes` of as many processes as `workers`, under `cpu:threads=1`, to
            do it. By default they are started for it, which takes seconds.

    Returns:
        The `Descent`, with `history`, a row for each update, and `summary`.

    Raises:
        UsageError: For arguments that make no sense, before a process starts.
        GpulabError: Where a process fails.

    Examples:
        >>> import gpulab as gl
        >>> descent = gl.training.descend("bounded", delay=1, updates=40)  # starts two processes  # doctest: +SKIP
        >>> len(descent.history), descent.summary["mode"]  # doctest: +SKIP
        (40, 'bounded')

    References:
        Recht, Ré, Wright, Niu 2011, *Hogwild: a lock-free approach to parallelizing stochastic gradient descent* (arXiv
        1106.5730); for `bounded`, Ho et al. 2013, *More effective distributed ML via a stale synchronous parallel
        parameter server*.
    """
    import pandas as pd

    if mode not in MODES:
        raise UsageError(f"mode {mode!r}: expected one of {', '.join(MODES)}")
    if (mode == "bounded") != (type(delay) is int and delay >= 0):
        raise UsageError(f"delay={delay!r} with mode {mode!r}: bounded takes a whole number from 0, the others none")
    for name, value in {"workers": workers, "updates": updates, "batch_size": batch_size}.items():
        check_count(name, value)
    if not 0 < learning_rate < math.inf:
        raise UsageError(f"learning_rate={learning_rate!r}: expected a number above 0")
    if processes is not None and processes.devices != workers:
        raise UsageError(f"workers={workers} with {processes.devices} processes: expected as many")
    if updates % workers:
        raise UsageError(f"updates={updates}: expected a multiple of {workers} workers")
    model = Autoencoder(hidden, SIZE)
    model.draw_weights(torch.Generator().manual_seed(seed))
    images = load(data, size=SIZE)
    if images.sequential:
        raise UsageError(f"data {data!r} is a sequence of frames; an autoencoder learns from images")
    task = {"mode": mode, "updates": updates, "delay": delay, "batch_size": batch_size, "guard": guard}
    task |= {"learning_rate": learning_rate, "hidden": list(hidden), "data": data}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shared = Memory(Path(folder), model, workers, create=True)
        job: dict[str, Any] = {"net": "gpulab.training.asynchronous:work", "setting": "cpu:threads=1", "seed": seed}
        job["model_options"] = {"memory": folder, "task": json.dumps(task)}
        answers = parallel.launch(job, workers) if processes is None else processes.do(job)
        logs = [np.load(Path(folder, f"{rank}.npy"), allow_pickle=False) for rank in range(workers)]
        counted = int(shared.pairs[:, 1].double().sum())
        vector_to_parameters(shared.pairs[:, 0].clone(), model.parameters())
        del shared  # the mapping of a file that is about to go
    with torch.no_grad():
        heldout = torch.cat([as_tensor(window.frames) for window in images.heldout(len(images))])
        heldout_loss = model.eval().training_loss(heldout, None)[0].item()
    frames = [pd.DataFrame(log, columns=COLUMNS).assign(worker=rank) for rank, log in enumerate(logs)]
    begin = min(answer["begin"] for answer in answers)  # one clock for all processes of a machine
    seconds = max(answer["end"] for answer in answers) - begin
    history = pd.concat(frames).astype({"update": int, "staleness": int})
    history = history.sort_values("seconds", ignore_index=True).assign(seconds=lambda row: row.seconds - begin)
    weights = sum(parameter.numel() for parameter in model.parameters())
    lost = updates * weights - counted
    summary = {
        "mode": mode,
        "seed": seed,
        "workers": workers,
        "delay": delay,
        "updates": updates,
        "heldout_loss": heldout_loss,
        "seconds": seconds,
        "updates_per_second": updates / seconds,
        "staleness": float(history.staleness.mean()),
        "weights": weights,
        "lost": lost,
        "lost_share": lost / (updates * weights),
        "overwritten_steps": float(history.overwritten.mean()),
    }
    return Descent(history, summary)


class Memory:
    """Weights (n, 2), each beside the count of its updates, and clocks (workers,), mapped by all processes."""

    def __init__(self, folder: Path, model: torch.nn.Module, workers: int, create: bool = False) -> None:
        count = sum(parameter.numel() for parameter in model.parameters())
        self.pairs = torch.from_file(str(folder / "pairs"), shared=True, size=2 * count).view(count, 2)
        self.clocks = torch.from_file(str(folder / "clocks"), shared=True, size=workers, dtype=torch.int64)
        if create:
            with torch.no_grad():
                flat = parameters_to_vector(model.parameters())
                self.pairs.copy_(torch.stack([flat, torch.zeros_like(flat)], 1))
                self.clocks.fill_(-1)  # until a worker is there

    def views(self, model: torch.nn.Module) -> Iterator[Tensor]:
        """The weights, in the shapes of the model's parameters."""
        parameters = [*model.parameters()]
        for parameter, flat in zip(parameters, self.pairs[:, 0].split([p.numel() for p in parameters]), strict=True):
            yield flat.view(parameter.shape)

    def add(self, change: Tensor) -> None:
        """Change every weight, (n,), and count it: one pass over memory, without a lock."""
        self.pairs.add_(torch.stack([change, torch.ones_like(change)], 1))


def work(seed: int, setting: Setting, memory: str = "", task: str = "{}") -> dict[str, float]:
    """What one worker does: its share of the updates. `launch` calls it."""
    what, rank, workers = json.loads(task), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = Autoencoder(what["hidden"], SIZE)
    shared = Memory(Path(memory), model, workers)
    synchronous, rate = what["mode"] == "synchronous", what["learning_rate"]
    for parameter, view in zip(model.parameters(), shared.views(model), strict=True):
        parameter.data = view.clone() if synchronous else view
    windows = load(what["data"], size=SIZE).windows(what["batch_size"], seed)
    frames = itertools.islice(windows, rank, what["updates"], workers)
    batches = [as_tensor(window.frames) for window in frames]
    log = []
    with parallel.join(setting, workers if synchronous else 1):
        shared.clocks[rank] = 0
        while int(shared.clocks.min()) < 0:
            time.sleep(0)
        begin = time.perf_counter()
        for update, batch in enumerate(batches):
            while what["mode"] == "bounded" and update - int(shared.clocks.min()) > what["delay"]:
                time.sleep(0)
            read = int(shared.clocks.sum())
            loss, overwritten = _backward(model, batch, what["guard"])
            gradients: Any = [parameter.grad for parameter in model.parameters()]
            change = parameters_to_vector(gradients).mul_(-rate)
            stale = 0 if synchronous else int(shared.clocks.sum()) - read
            if not synchronous:
                shared.add(change)
            else:
                if workers > 1:
                    dist.all_reduce(change)
                flat = parameters_to_vector(model.parameters()).detach()
                vector_to_parameters(flat + change, model.parameters())
            log.append((update, time.perf_counter(), loss, stale, overwritten))  # before another may go on for it
            shared.clocks[rank] = update + 1
        end = time.perf_counter()
    if synchronous and rank == 0:  # the same in all of them
        shared.pairs[:, 0] = parameters_to_vector(model.parameters()).detach()
        shared.pairs[:, 1] = what["updates"]
    np.save(Path(memory, f"{rank}.npy"), np.array(log, dtype=float))
    return {"begin": begin, "end": end}


def _backward(model: Autoencoder, batch: Tensor, is_guarded: bool) -> tuple[float, float]:
    """Put the gradient in place; returns the loss, and whether the guard found overwritten memory."""
    model.zero_grad()
    with contextlib.ExitStack() as stack:
        report = None
        if is_guarded:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            report = stack.enter_context(guarded(on="warn"))
        loss, _, _ = model.training_loss(batch, None)
        loss.backward()
    return loss.item(), math.nan if report is None else float(bool(report.findings))
