"""One run: one training, from one seed, under one setting."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.optim.adam import adam
from tqdm.auto import tqdm

from gpulab.data.datasets import Data, Window, load
from gpulab.data.feed import LOADERS, Loader
from gpulab.diagnostics import guards
from gpulab.errors import UsageError
from gpulab.models import MODELS
from gpulab.models.base import Trainable, check_weight, flip_bit
from gpulab.passports import Passport, passport
from gpulab.settings import Setting, arithmetic
from gpulab.training import store as stores
from gpulab.training.protocol import Protocol, protocol

DRAWS = ("cpu", "device")
LAST_FIFTH = 5
CHECKPOINT_SECONDS = 10.0


@dataclass
class Run:
    """What one training left: the trained `model`, the `data` it saw, its `history` and `record`.

    `history` has a row for each window: `window`, `step` (updates so far), `loss` (mean squared
    error per frame, averaged over the window), `seconds`.
    """

    model: Trainable
    data: Data
    history: pd.DataFrame
    record: dict[str, Any]
    path: Path | None = None

    @property
    def status(self) -> str:
        """`finished` or `diverged`."""
        return self.record["status"]

    @property
    def final_loss(self) -> float:
        """The mean of the loss over the last fifth of the windows; NaN when diverged."""
        return _number(self.record["summary"]["final_loss"])

    @property
    def heldout_loss(self) -> float:
        """The mean squared error per held-out frame after training; NaN when diverged."""
        return _number(self.record["summary"]["heldout_loss"])

    @torch.no_grad()
    def predict(self, data: Data | None = None) -> tuple[Tensor, Tensor]:
        """The held-out part of the data in [0, 1] and what the trained model makes of it, in float32.

        For a sequence both are (T, 1, C, H, W): the frames from the second on, and the prediction of
        each made from the frames before it. For images both are (N, C, H, W): images, reconstructions.
        """
        data = self.data if data is None else data
        model = copy.deepcopy(self.model).float().eval()
        length = self.record["configuration"]["window"]
        pieces = [w.frames if w.restart else w.frames[1:] for w in data.heldout(length)]
        inputs = torch.from_numpy(np.concatenate(pieces)).float().div(255)
        if not data.sequential:
            return inputs, model(inputs)
        predicted, _ = model(inputs[:-1, None])
        return inputs[1:, None], predicted

    def __repr__(self) -> str:
        record, summary = self.record, self.record["summary"]
        where = f"{record['experiment']} under {record['setting']}, seed {record['seed']}"
        if self.status == "diverged":
            return f"{where}: diverged at step {record['diverged_at']}"
        return (
            f"{where}: final loss {self.final_loss:.5f}, held out {self.heldout_loss:.5f}, "
            f"{summary['seconds']:.1f} s ({summary['frames_per_second']:.0f} frames/s)"
        )


def train(
    net: Trainable | str,
    data: Data | str | None = None,
    setting: Setting | str = "cpu",
    seed: int = 0,
    profile: str = "quick",
    *,
    frames: int | None = None,
    learning_rate: float | None = None,
    loader: str = "window",
    data_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    store: str | Path | None = None,
    resume: bool = True,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    keep_weights: bool = True,
    rerun: int = 0,
    guard: bool = False,
    flip: int | None = None,
    draws: str = "cpu",
    watch: Callable[[Trainable, int], None] | None = None,
    progress: bool | Callable[[int, float], None] = True,
    command: str | None = None,
) -> Run:
    """Train a copy of a network by the published protocol, and return the run.

    `net` is `"autoencoder"`, `"prednet"`, `"whitener"`, or a module derived from `Trainable`. The weights of a
    fresh network are drawn from `seed`; a network that holds loaded weights starts from those. `net`
    itself is left as it was, so that the next training starts from the same place. The profile says
    how long and on what, unless `data` (a name or loaded), `frames`, `learning_rate`, `data_options`
    (of `gpulab.load`) or `model_options` (of the model named) say otherwise.

    PredNet: windows of 20 frames, one update each, the state carried from window to window; Adam with
    learning rate 1e-3, beta 0.9 and 0.999, eps 1e-8; a batch of one. The autoencoder: one image per
    update; the whitener: 50. The loss reported is the mean squared error per frame. `final_loss` is its mean over the
    last fifth of the windows. A loss that is not finite ends the run as `diverged`.

    With a `store` (a folder), the run is kept there, an interrupted one resumes from its last
    checkpoint, and one that is already there is returned without training (unless it was kept without
    the weights that `keep_weights` asks for). `progress` is true for a
    bar, or is called with (frames done, loss). `command` is noted in the record.

    With `guard`, a tensor that is overwritten between its saving and the backward pass ends the run with
    `OverwrittenError`; see `gpulab.guard`. What is computed stays the same bits. A run that is in the
    store already is trained again, for it may have been kept without a guard.

    Two things that a device may change before the first step: `flip` changes the last bit of the weight of
    that number (`gpulab.flip_bit`); `draws` says whose generator draws the initial weights, the `cpu`'s or
    the `device`'s own, which gives other numbers from the same seed.

    `watch` is called with the model and the number of updates, before the first and after each window.

    >>> run = train("autoencoder", profile="smoke", progress=False)
    >>> run.status, len(run.history)
    ('finished', 20)
    """
    with torch.random.fork_rng(devices=[]):  # the random numbers of the caller are left alone
        plan = plan_run(
            net,
            data,
            setting=setting,
            seed=seed,
            profile=profile,
            frames=frames,
            learning_rate=learning_rate,
            loader=loader,
            data_options=data_options,
            model_options=model_options,
            rerun=rerun,
            flip=flip,
            draws=draws,
        )
    model, parsed, folder = plan.model, plan.setting, None if store is None else Path(store)
    with parsed.apply():
        record = plan.record(passport(), command)
        if folder is not None and resume and not guard and stores.is_done(folder, record["id"], keep_weights):
            return _stored(folder / record["id"], plan)
        file = None if folder is None else stores.checkpoint_file(folder, record["id"])
        plan.begin()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            trainer = _Trainer(plan)
            if file is not None and resume and (checkpoint := stores.read_checkpoint(file)):
                trainer.restore(*checkpoint)
                record["resumed_at"] = trainer.windows_done
            with guards.guard() if guard else contextlib.nullcontext():
                trainer.run(file, checkpoint_seconds, progress, watch)
            record |= trainer.outcome()
    history = pd.DataFrame(trainer.history, columns=["window", "step", "loss", "seconds"])
    history["seconds"] = history.seconds.astype("float32")
    model.fresh = False
    run = Run(model.cpu(), plan.data, history, record)
    if folder is not None and file is not None:
        run.path = stores.write_run(folder, record, history, model.state_dict() if keep_weights else None)
        file.unlink(missing_ok=True)
    return run


def planned_id(net: str, *, setting: str, seed: int, profile: str, **options: Any) -> str:
    """The id that `train` would give to a run with these arguments on this machine."""
    asked = {name: options[name] for name in inspect.signature(plan_run).parameters if name in options}
    with torch.random.fork_rng(devices=[]):
        plan = plan_run(net, setting=setting, seed=seed, profile=profile, **asked)
    return plan.identity(passport())["id"]


@dataclass
class Plan:
    """All that `train` was asked for, checked."""

    name: str
    model: Trainable
    data: Data
    setting: Setting
    seed: int
    profile: str
    rerun: int
    frames: int
    window: int
    learning_rate: float
    loader: str
    model_options: dict[str, Any]
    flip: int | None = None
    draws: str = "cpu"

    def begin(self) -> None:
        """Give the model the weights that training starts from."""
        if self.model.fresh:
            device = self.setting.device if self.draws == "device" else "cpu"
            self.model.draw_weights(torch.Generator(device).manual_seed(self.seed))
        if self.flip is not None:
            flip_bit(self.model, self.flip)

    def identity(self, here: Passport) -> dict[str, Any]:
        """What makes this run this run, and its id. On another chip or torch it is another run."""
        chip = here["cpu"]["model"] if self.setting.kind == "cpu" else here["gpus"]
        identity = {
            "experiment": self.name,
            "profile": self.profile,
            "setting": str(self.setting),
            "seed": self.seed,
            "rerun": self.rerun,
            "configuration": {
                "model": self.name,
                "model_options": self.model_options,
                "data": self.data.name,
                "data_options": self.data.options(),
                "frames": self.frames,
                "window": self.window,
                "learning_rate": self.learning_rate,
            },
        }
        # What a device may do otherwise, and what is learned does not: a factor, no part of the configuration.
        usual = {"loader": "window", "decoder": None, "flip": None, "draws": "cpu"}
        chosen = {"loader": self.loader, "decoder": self.data.decoder, "flip": self.flip, "draws": self.draws}
        identity |= {name: value for name, value in chosen.items() if value != usual[name]}
        software = {key: here["software"][key] for key in ("torch", "gpulab")}
        return {"id": stores.run_id({**identity, "chip": chip, **software}), **identity}

    def record(self, here: Passport, command: str | None) -> dict[str, Any]:
        """The record of a run that begins now."""
        return {
            "format": stores.RUN_FORMAT,
            **self.identity(here),
            "arithmetic": arithmetic(),
            "passport": dict(here),
            "command": command,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }


def plan_run(
    net: Trainable | str,
    data: Data | str | None = None,
    *,
    setting: Setting | str = "cpu",
    seed: int = 0,
    profile: str = "quick",
    frames: int | None = None,
    learning_rate: float | None = None,
    loader: str = "window",
    data_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    rerun: int = 0,
    flip: int | None = None,
    draws: str = "cpu",
) -> Plan:
    """Check what `train` was asked for, load the data and make the model."""
    data_options, model_options = data_options or {}, model_options or {}
    name = net if isinstance(net, str) else type(net).__name__.lower()
    plan = protocol(name if isinstance(net, str) or name in MODELS else "prednet", profile)
    frames = plan.frames if frames is None else frames
    if not isinstance(frames, int) or frames < plan.window:
        raise UsageError(f"frames={frames!r}: expected a whole number; a window alone has {plan.window}")
    rate = plan.learning_rate if learning_rate is None else learning_rate
    if not 0 <= rate < math.inf:
        raise UsageError(f"learning_rate={rate!r}: expected a number, 0 or above")
    if loader not in LOADERS:
        raise UsageError(f"loader {loader!r}: expected one of {', '.join(LOADERS)}")
    if draws not in DRAWS:
        raise UsageError(f"draws {draws!r}: expected one of {', '.join(DRAWS)}")
    model = _model(net, plan, model_options)
    check_weight(model, flip)
    return Plan(
        name=name,
        model=model,
        data=_data(data, model, plan, frames, data_options),
        setting=Setting.parse(setting),
        seed=seed,
        profile=profile,
        rerun=rerun,
        frames=frames,
        window=plan.window,
        learning_rate=rate,
        loader=loader,
        model_options=_model_description(net, model, plan, model_options),
        flip=flip,
        draws=draws,
    )


class _Trainer:
    """The loop over windows, and everything that must survive an interruption."""

    def __init__(self, plan: Plan) -> None:
        self.data, self.setting, self.seed = plan.data, plan.setting, plan.seed
        self.window, self.count = plan.window, plan.frames // plan.window
        self.loader = Loader(plan.loader, self.setting)
        self.model = plan.model.to(self.setting.device, self.setting.dtype)
        self.optimizer = _Adam([p for p in self.model.parameters() if p.requires_grad], plan.learning_rate)
        self.state: Any = None
        self.random = torch.get_rng_state()
        self.history: list[tuple[int, int, float, float]] = []
        self.step = 0
        self.diverged_at: int | None = None
        self.seconds = 0.0

    @property
    def windows_done(self) -> int:
        return len(self.history)

    def run(
        self,
        file: Path | None,
        every: float,
        progress: bool | Callable[[int, float], None],
        watch: Callable[[Trainable, int], None] | None = None,
    ) -> None:
        """Train window by window until the end, a loss that is not finite, or an interruption."""
        self.model.train()
        if watch:
            watch(self.model, self.step)
        windows = self.data.windows(self.window, self.seed, self.windows_done)
        started = time.perf_counter() - self.seconds
        saved = time.monotonic()
        with _Progress(self.count * self.window, self.windows_done * self.window, progress) as shown:
            try:
                while self.windows_done < self.count and self.diverged_at is None:
                    loss = self._train_window(next(windows))
                    self.seconds = time.perf_counter() - started
                    self.history.append((self.windows_done, self.step, loss, self.seconds))
                    self.random = torch.get_rng_state()
                    shown.advance(self.window, loss)
                    if watch:
                        watch(self.model, self.step)
                    if file is not None and self.diverged_at is None and time.monotonic() - saved >= every:
                        stores.write_checkpoint(file, *self.checkpoint())
                        saved = time.monotonic()
            except KeyboardInterrupt:
                if file is not None and self._at_a_window():
                    stores.write_checkpoint(file, *self.checkpoint())
                raise

    def _at_a_window(self) -> bool:
        """Whether nothing has changed since the last window ended, so that one can go on from there."""
        changing = next(self.model.buffers(), None) is not None
        return bool(self.history) and self.step == self.history[-1][1] and not changing and self.diverged_at is None

    def _train_window(self, window: Window) -> float:
        """One window: an update for each of its batches. Returns the loss per frame."""
        state, losses = None if window.restart else self.state, []
        for batch in self.loader.batches(self.model, window.frames):
            self.optimizer.forget_gradients()
            objective, per_frame, state = self.model.training_loss(batch, state)  # type: ignore[arg-type]
            objective.backward()
            self.step += 1
            self.optimizer.step()
            losses.append(per_frame.double().mean() if per_frame.device.type != "mps" else per_frame.mean())
        self.state = state
        # One look at the device per window: asking after every update would wait for it each time.
        values = torch.stack(losses).tolist()
        for place, value in enumerate(values):
            if not math.isfinite(value):
                self.diverged_at = self.step - len(values) + place + 1
                return value
        return math.fsum(values) / len(values)

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """The mean squared error per held-out frame."""
        self.model.eval()
        state, errors = None, []
        for window in self.data.heldout(self.window):
            state = None if window.restart else state
            for batch in self.model.batches(self.loader.window(window.frames)):
                _, per_frame, state = self.model.training_loss(batch, state)
                errors += per_frame.tolist()
        return math.fsum(errors) / len(errors)

    def outcome(self) -> dict[str, Any]:
        """Status and summary for the record."""
        heldout = math.nan if self.diverged_at else self.heldout_loss()
        if not math.isfinite(heldout) and self.diverged_at is None:
            self.diverged_at = self.step  # the last update ruined the weights, and no later loss shows it
        diverged = self.diverged_at is not None
        last = [loss for _, _, loss, _ in self.history[-max(1, self.count // LAST_FIFTH) :]]
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(_bytes(tensor))
        return {
            "status": "diverged" if diverged else "finished",
            "diverged_at": self.diverged_at,
            "summary": {
                # JSON has no NaN.
                "final_loss": None if diverged else math.fsum(last) / len(last),
                "heldout_loss": None if diverged else heldout,
                "seconds": self.seconds,
                "frames_per_second": self.windows_done * self.window / self.seconds,
                "weights": digest.hexdigest(),
            },
        }

    def checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything needed to go on: weights, Adam's moments, the state, the random numbers."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, moments in self.optimizer.state.items():
            tensors |= {f"adam.{name}.{index}": tensor for index, tensor in enumerate(moments)}
        notes = {"step": self.step, "state": _packed(self.state, tensors)}
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
        torch.set_rng_state(self.random)
        rows = tensors["history"].tolist()
        self.history = [(int(window), int(step), loss, seconds) for window, step, loss, seconds in rows]
        self.step, self.seconds = notes["step"], self.history[-1][3]


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


class _Adam:
    """Adam (Kingma, Ba 2014) with its usual constants, by torch's fused kernel.

    The same bits as `torch.optim.Adam(fused=True)`, whose class imports torch's compiler when it is
    first used: 150 MB and two seconds in every process.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], rate: float) -> None:
        self.parameters, self.rate = parameters, rate
        self.state = {
            "step": [torch.zeros((), dtype=torch.float32, device=p.device) for p in parameters],
            "exp_avg": [torch.zeros_like(p) for p in parameters],
            "exp_avg_sq": [torch.zeros_like(p) for p in parameters],
        }

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        used = [index for index, parameter in enumerate(self.parameters) if parameter.grad is not None]
        moments = {name: [tensors[index] for index in used] for name, tensors in self.state.items()}
        adam(
            [self.parameters[index] for index in used],
            [self.parameters[index].grad for index in used],  # type: ignore[misc]
            moments["exp_avg"],
            moments["exp_avg_sq"],
            [],
            moments["step"],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.rate,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )


class _Progress:
    """A bar with loss, rate and time left; or a function that is told; or nothing."""

    def __init__(self, total: int, done: int, wanted: bool | Callable[[int, float], None]) -> None:
        self.tell = wanted if callable(wanted) else None
        self.done = done
        self.bar = tqdm(total=total, initial=done, unit="frame", leave=False) if wanted is True else None

    def advance(self, frames: int, loss: float) -> None:
        self.done += frames
        if self.tell:
            self.tell(self.done, loss)
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self.bar.update(frames)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()


def _model(net: Trainable | str, plan: Protocol, options: dict[str, Any]) -> Trainable:
    if not isinstance(net, str):
        if not isinstance(net, Trainable):
            raise UsageError(
                f"net is a {type(net).__name__}: derive it from gpulab.models.base.Trainable, which says what "
                f"the training loop asks for, or name one of {', '.join(MODELS)}"
            )
        if options:
            raise UsageError("model_options go with the name of a model, not with a model")
        return copy.deepcopy(net)
    if net not in MODELS:
        raise UsageError(f"model {net!r}: expected one of {', '.join(MODELS)}")
    wanted = {"size": plan.size, **plan.model, **options}
    try:
        return MODELS[net](**wanted)
    except TypeError as error:
        raise UsageError(f"model {net!r} with {options}: {error}") from None


def _model_description(
    net: Trainable | str, model: Trainable, plan: Protocol, options: dict[str, Any]
) -> dict[str, Any]:
    """What makes this model: its options, and for one that was loaded the digest of its weights."""
    if isinstance(net, str):
        described: dict[str, Any] = {"size": list(plan.size), **plan.model, **options}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in described.items()}
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    digest = hashlib.sha256(repr(sorted(shapes.items())).encode())
    digest.update(repr(model).encode())
    if not model.fresh:
        for tensor in model.state_dict().values():
            digest.update(_bytes(tensor))
    return {"class": type(net).__qualname__, "digest": digest.hexdigest()}


def _data(data: Data | str | None, model: Trainable, plan: Protocol, frames: int, options: dict[str, Any]) -> Data:
    """The data to train on, checked against what the model takes."""
    if isinstance(data, Data):
        if options:
            raise UsageError(f"data_options {options} go with the name of a data set, not with one that is loaded")
    else:
        size = tuple(getattr(model, "size", plan.size))
        try:
            data = load(data or plan.data, **{"frames": frames, "size": size, **options})
        except TypeError as error:
            raise UsageError(f"data_options {options}: {error}") from None
    if data.sequential != model.sequential:
        kinds = {True: "a sequence of frames", False: "a set of images"}
        raise UsageError(
            f"{data.name} is {kinds[data.sequential]}; {type(model).__name__} learns from {kinds[model.sequential]}"
        )
    channels: Any = getattr(model, "channels", (data.channels,))
    wanted = (channels[0], *getattr(model, "size", data.size))
    if (data.channels, *data.size) != wanted:
        raise UsageError(f"{data.name} has frames of shape {(data.channels, *data.size)}; the model takes {wanted}")
    return data


def _stored(folder: Path, plan: Plan) -> Run:
    """A run that was done before; without kept weights its model is untrained."""
    from safetensors.torch import load_file

    record, history = stores.read_run(folder)
    weights = folder / "weights.safetensors"
    if weights.is_file():
        plan.model.to(dtype=plan.setting.dtype).load_state_dict(load_file(weights))
    return Run(plan.model, plan.data, history, record, folder)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _number(value: float | None) -> float:
    return math.nan if value is None else value
