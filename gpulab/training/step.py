"""The loop over windows: loss, backward pass and update."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from gpulab.data.datasets import Window
from gpulab.data.feed import Feed, Loader
from gpulab.models import MODELS
from gpulab.models.base import Trainable, is_plain
from gpulab.models.prednet_windows import Windows
from gpulab.progress import Progress
from gpulab.store import identities, run_files
from gpulab.training.capture import Captured
from gpulab.training.plan import Plan

LAST_FIFTH = 5


class Trainer:
    """The loop over windows, and everything that must survive an interruption."""

    def __init__(self, plan: Plan) -> None:
        self.data, self.setting, self.seed = plan.data, plan.setting, plan.seed
        self.window, self.count = plan.window, plan.frames // plan.window
        self.loader = Loader(plan.factors["loader"], self.setting)
        # A buffer that is reused is shown at work, not imitated; with what it is compared must differ in nothing else.
        followed = ("window", "copied", "imitated") if self.setting.kind == "cuda" else ("window",)
        self.fast = plan.factors["fast"] and self.loader.name in followed
        self.written_out: tuple[torch.Size, Windows] | None = None  # for batches of the last shape
        self.captured: tuple[torch.Size, Captured] | None = None  # for windows of the last shape
        self.ways: set[str] = set()  # in which gradients were computed
        self.crowded = False  # whether other trainings share the device
        self.model = plan.model.to(self.setting.device, self.setting.dtype)
        self.optimizer = Adam([p for p in self.model.parameters() if p.requires_grad], plan.learning_rate)
        self.state: Any = None
        self.random = torch.get_rng_state()
        self.history: list[tuple[int, int, float, float]] = []
        self.step = 0
        self.updating = False  # whether an interruption now comes between the updates of a window
        self.diverged_at: int | None = None
        self.seconds = 0.0

    @property
    def windows_done(self) -> int:
        """How many windows lie behind."""
        return len(self.history)

    def run(
        self,
        file: Path | None,
        every: float,
        progress: bool | Callable[[int, float], None],
        watch: Callable[[Trainable, int], None] | None = None,
    ) -> None:
        """Train window by window until the end, a loss that is not finite, or an interruption.

        A checkpoint goes into `file` each so many seconds (`every`), and when an interruption comes between windows.
        """
        for _ in self.turns(file, every, progress, watch):
            pass

    def turns(
        self,
        file: Path | None,
        every: float,
        progress: bool | Callable[[int, float], None],
        watch: Callable[[Trainable, int], None] | None = None,
    ) -> Iterator[None]:
        """The same, in turns with others: each ends when a window has been given to the device, which may take a while.

        An interruption that is thrown in comes after that window.
        """
        self.model.train()
        if watch:
            watch(self.model, self.step)
        windows = self._ahead(self.data.windows(self.window, self.seed, self.windows_done))
        started = time.perf_counter() - self.seconds
        saved = time.monotonic()
        frames: Any = {"total": self.count * self.window, "initial": self.windows_done * self.window, "unit": "frame"}
        with told(progress, **frames) as tell:
            try:
                while self.windows_done < self.count and self.diverged_at is None:
                    interruption = None
                    torch.set_rng_state(self.random)  # others may have drawn since
                    losses = self._launch(next(windows))
                    self.random = torch.get_rng_state()
                    try:
                        yield
                    except KeyboardInterrupt as thrown:
                        interruption = thrown
                    loss = self._look(losses)
                    self.seconds = time.perf_counter() - started
                    self.history.append((self.windows_done, self.step, loss, self.seconds))
                    if interruption:
                        raise interruption
                    tell(self.windows_done * self.window, loss)
                    if watch:
                        watch(self.model, self.step)
                    if file is not None and self.diverged_at is None and time.monotonic() - saved >= every:
                        run_files.write_checkpoint(file, *self.checkpoint())
                        saved = time.monotonic()
            except KeyboardInterrupt:
                if file is not None and self._at_a_window():
                    run_files.write_checkpoint(file, *self.checkpoint())
                raise
        torch.set_rng_state(self.random)

    def _at_a_window(self) -> bool:
        """Whether nothing has changed since the last window ended, so that one can go on from there."""
        changing = next(self.model.buffers(), None) is not None
        done = not self.updating and bool(self.history) and self.step == self.history[-1][1]
        return done and not changing and self.diverged_at is None

    def _launch(self, window: Window) -> Tensor:
        """One window: an update for each of its batches. Returns their losses, which a device may still compute."""
        state, fast = None if window.restart else self.state, self.fast and not _watched()
        fast = fast and (self.loader.name == "window" or Windows.follows(self.model))
        self.updating = True
        if fast and self._can_be_captured(state):
            losses, self.state = self._replay(self.loader.window(window.frames), state)
        elif fast:
            losses, self.state = self._updates(self.model.batches(self.loader.window(window.frames)), state, fast)
        else:
            losses, self.state = self._updates(self.loader.batches(self.model, window.frames), state, fast)
        return losses

    def _look(self, losses: Tensor) -> float:
        """The loss per frame; one look at the device per window, since every look waits for it."""
        values = losses.tolist()
        self.updating, self.step = False, self.step + len(values)
        for place, value in enumerate(values):
            if not math.isfinite(value):
                self.diverged_at = self.step - len(values) + place + 1
                return value
        return math.fsum(values) / len(values)

    def _updates(self, batches: Iterable[Tensor | Feed], state: Any, fast: bool) -> tuple[Tensor, Any]:
        """An update for each batch. Returns their losses per frame and the next state."""
        losses = []
        for batch in batches:
            per_frame, state = self._gradients(batch, state, fast)
            self.optimizer.step()
            losses.append(per_frame.double().mean() if per_frame.device.type != "mps" else per_frame.mean())
        return torch.stack(losses), state

    def _can_be_captured(self, state: Any) -> bool:
        """Whether the updates of a window may be one CUDA graph; one in which a sequence begins is not."""
        begins = self.model.sequential and state is None
        ours = type(self.model) in MODELS.values() and is_plain(self.model)
        return self.setting.kind == "cuda" and ours and not begins

    def _replay(self, frames: Tensor, state: Any) -> tuple[Tensor, Any]:
        if self.captured is None or self.captured[0] != frames.shape:
            changed = [*self.model.parameters(), *itertools.chain(*self.optimizer.state.values())]
            captured = Captured(lambda f, s: self._updates(self.model.batches(f), s, True), frames, state, changed)
            self.captured = frames.shape, captured
        return self.captured[1](frames, state)

    def _gradients(self, batch: Tensor | Feed, state: Any, fast: bool) -> tuple[Tensor, Any]:
        """Put the gradients of a batch in place. Returns the loss of each frame and the next state."""
        model: Any = self.model
        if fast and isinstance(batch, Tensor) and Windows.follows(model):
            self.ways.add("written out")
            if self.written_out is None or self.written_out[0] != batch.shape:
                self.written_out = batch.shape, Windows(model, batch, self.loader.name == "imitated", not self.crowded)
            return self.written_out[1](batch, state)
        self.ways.add("autograd")
        self.optimizer.zero_grad()
        objective, per_frame, state = model.training_loss(batch, state)
        objective.backward()
        return per_frame, state

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """The mean squared error per held-out frame."""
        self.model.eval()
        state, errors = None, []
        for window in self._ahead(self.data.heldout(self.window)):
            state = None if window.restart else state
            for batch in self.model.batches(self.loader.window(window.frames)):
                _, per_frame, state = self.model.training_loss(batch, state)
                errors.append(per_frame)
        found = torch.cat(errors).tolist()  # one look at the device, since every look waits for it
        return math.fsum(found) / len(found)

    def _ahead(self, windows: Iterator[Window]) -> Iterator[Window]:
        """The windows; where a device computes, the next is made meanwhile, by several threads."""
        if self.setting.kind == "cpu":
            return windows
        self.data.threads = min(4, os.cpu_count() or 1)
        return ahead(windows)

    def outcome(self) -> dict[str, Any]:
        """Status and summary for the record."""
        heldout = math.nan if self.diverged_at else self.heldout_loss()
        if not math.isfinite(heldout) and self.diverged_at is None:
            self.diverged_at = self.step  # the last update ruined the weights, and no later loss shows it
        diverged = self.diverged_at is not None
        last = [loss for _, _, loss, _ in self.history[-max(1, self.count // LAST_FIFTH) :]]
        return {
            "status": "diverged" if diverged else "finished",
            "gradients": " and ".join(sorted(self.ways)),
            "captured": self.captured is not None,
            "diverged_at": self.diverged_at,
            "summary": {
                # JSON has no NaN.
                "final_loss": None if diverged else math.fsum(last) / len(last),
                "heldout_loss": None if diverged else heldout,
                "seconds": self.seconds,
                "frames_per_second": self.windows_done * self.window / self.seconds,
                "weights": identities.weights_digest(self.model.state_dict()),
            },
        }

    def checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything needed to go on: weights, Adam's moments, the state, the random numbers."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, moments in self.optimizer.state.items():
            tensors |= {f"adam.{name}.{index}": tensor for index, tensor in enumerate(moments)}
        notes = {"step": self.step, "state": _packed(self.state, tensors), "ways": sorted(self.ways)}
        tensors["random"] = self.random
        tensors["history"] = torch.tensor(self.history, dtype=torch.float64)
        return tensors, notes

    def restore(self, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Go back to where `checkpoint` was called."""

        def below(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        torch.nn.Module.load_state_dict(self.model, below("model."))
        for name, moments in self.optimizer.state.items():
            for index, tensor in enumerate(moments):
                tensor.copy_(tensors[f"adam.{name}.{index}"])
        self.state = _unpacked(notes["state"], tensors, self.setting.device)
        self.random = tensors["random"]
        rows = tensors["history"].tolist()
        self.history = [(int(window), int(step), loss, seconds) for window, step, loss, seconds in rows]
        self.step, self.seconds = notes["step"], self.history[-1][3]
        self.ways = set(notes["ways"])


@contextlib.contextmanager
def told(progress: bool | Callable[[int, float], None], **bar_options: Any) -> Iterator[Callable[[int, float], None]]:
    """What hears (done so far, loss), and shows it as `train`'s `progress` says."""
    with Progress(**bar_options, leave=False, disable=progress is not True) as bar:

        def tell(done: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3g}", refresh=False)
            bar.update(done - bar.n)
            if callable(progress):
                progress(done, loss)

        yield tell


def ahead(windows: Iterator[Window]) -> Iterator[Window]:
    """The same, each made while this thread waits for a device to be done with the one before."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, windows, None)
        while (window := coming.result()) is not None:
            coming = pool.submit(next, windows, None)
            yield window


def _watched() -> bool:
    """Whether a guard, a trace or an emulated arithmetic has to see every operation that autograd does."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return bool(modes or torch._C._autograd._top_saved_tensors_default_hooks(True))


def _packed(state: Any, tensors: dict[str, Tensor]) -> Any:
    """A state as JSON; its tensors go into `tensors`, under the names that stand in for them."""
    if isinstance(state, Tensor):
        name = f"state.{len(tensors)}"
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, dict):
        return {"dict": [[key, _packed(value, tensors)] for key, value in state.items()]}
    if isinstance(state, list | tuple):
        kind = "list" if isinstance(state, list) else "tuple"
        return {kind: [_packed(value, tensors) for value in state]}
    return {"value": state}


def _unpacked(packed: Any, tensors: dict[str, Tensor], device: str) -> Any:
    """The state that `_packed` took apart."""
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content].to(device)
    if kind == "dict":
        return {key: _unpacked(value, tensors, device) for key, value in content}
    if kind in ("list", "tuple"):
        values = [_unpacked(value, tensors, device) for value in content]
        return values if kind == "list" else tuple(values)
    return content


class Adam:
    """Adam (Kingma, Ba 2014) with its usual constants, by torch's fused kernel.

    The same bits as `torch.optim.Adam(fused=True)`, whose class imports torch's compiler when it is
    first used: 150 MB and two seconds in every process.
    """

    CONSTANTS = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}

    def __init__(self, parameters: list[torch.nn.Parameter], learning_rate: float) -> None:
        self.parameters, self.learning_rate = parameters, learning_rate
        self.state = {
            "step": [torch.zeros((), dtype=torch.float32, device=p.device) for p in parameters],
            "exp_avg": [torch.zeros_like(p) for p in parameters],
            "exp_avg_sq": [torch.zeros_like(p) for p in parameters],
        }

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        used = [place for place, parameter in enumerate(self.parameters) if parameter.grad is not None]
        steps, averages, squares = ([tensors[place] for place in used] for tensors in self.state.values())
        weights: list[Tensor] = [self.parameters[place] for place in used]
        gradients: Any = [parameter.grad for parameter in weights]
        options: Any = {**self.CONSTANTS, "lr": self.learning_rate, "fused": True}
        adam(weights, gradients, averages, squares, [], steps, **options)
