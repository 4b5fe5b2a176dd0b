"""What a training was asked for, checked, with the model made and the data loaded."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from gpulab.data.base import Data
from gpulab.data.datasets import load
from gpulab.errors import UsageError
from gpulab.models import MODELS
from gpulab.models.base import Trainable, check_weight, flip_bit
from gpulab.passports import Passport
from gpulab.settings import Setting
from gpulab.store import identities, sources
from gpulab.training.protocol import FACTORS, Protocol, Specification, factors_of_run, protocol

# What of gpulab's code its trainings are.
TRAINING_FILES = [f"training/{name}.py" for name in ("adam", "capture", "engines", "loop", "written_out")]
# What of gpulab's code a network is, beside what all share.
MODEL_FILES = {
    "prednet": ["models/prednet.py", "models/prednet_windows.py", "models/prednet_kernels.py"],
    "autoencoder": ["models/autoencoders.py"],
    "whitener": ["models/autoencoders.py"],
}


@dataclass
class Plan:
    """All that `gpulab.train` was asked for."""

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
    model_options: dict[str, Any]
    factors: dict[str, Any]
    own: bool = False  # whether the model is one that somebody else wrote
    unknown: tuple[str, ...] = ()  # what of the model cannot be known by its content

    def draw_weights(self) -> None:
        """Give the model the weights that training starts from: those of the seed, unless it holds loaded ones."""
        if self.model.fresh:
            device = self.setting.device if self.factors["draws"] == "device" else "cpu"
            self.model.draw_weights(torch.Generator(device).manual_seed(self.seed))
        if self.factors["flip"] is not None:
            flip_bit(self.model, self.factors["flip"])

    def identity(self, here: Passport) -> identities.Identity:
        """What makes this run this run, and its id; of a model of one's own after `begin`."""
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
        identity |= {name: value for name, value in self.factors.items() if value != FACTORS[name].usual}
        ours, emulated = type(self.data).__module__.startswith("gpulab."), self.setting.emulated
        content = self.data.content if ours else None
        modules = ["settings.py", "numerics/tf32.py", "data", *TRAINING_FILES, *(["numerics"] if emulated else [])]
        modules += ["models"] if self.own else ["models/base.py", *MODEL_FILES[self.name]]
        known = {"code": sources.of_gpulab(*modules), "content": content or ""}
        if self.own:
            known["initial"] = identities.weights_digest(self.model.state_dict())
        unknown = self.unknown + ((f"data {self.data.name!r}",) if content is None else ())
        return identities.identified(identity, here, known, unknown)


def plan_run(
    net: Trainable | str,
    data: Data | str | None = None,
    *,
    setting: Setting | str = "cpu",
    seed: int = 0,
    profile: str = "quick",
    rerun: int = 0,
    frames: int | None = None,
    learning_rate: float | None = None,
    window: int | None = None,
    data_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    **factors: Any,
) -> Plan:
    """Check what `train` was asked for, load the data and make the model."""
    chosen = factors_of_run(**factors)
    name = net if isinstance(net, str) else type(net).__name__.lower()
    usual = protocol(name if isinstance(net, str) or name in MODELS else "prednet", profile)
    frames = usual.frames if frames is None else frames
    window = usual.window if window is None else window
    if not isinstance(window, int) or window < 2:
        raise UsageError(f"window={window!r}: expected a whole number from 2")
    if not isinstance(frames, int) or frames < window:
        raise UsageError(f"frames={frames!r}: expected a whole number; a window alone has {window}")
    rate = usual.learning_rate if learning_rate is None else learning_rate
    if not 0 <= rate < math.inf:
        raise UsageError(f"learning_rate={rate!r}: expected a number, 0 or above")
    model = _model(net, usual, model_options or {})
    check_weight(model, chosen["flip"])
    batch_size = getattr(model, "batch_size", 1)
    if chosen["loader"] != "window" and batch_size > 1:
        raise UsageError(
            f"loader {chosen['loader']!r} hands over one frame after another, and {type(model).__name__} sees "
            f"{batch_size} at a time: give it batch_size=1, or loader 'window'"
        )
    described, unknown = _model_description(net, model, usual, model_options or {})
    return Plan(
        name=name,
        model=model,
        data=_data(data, model, usual, frames, data_options or {}),
        setting=Setting.parse(setting),
        seed=seed,
        profile=profile,
        rerun=rerun,
        frames=frames,
        window=window,
        learning_rate=rate,
        model_options=described,
        factors=chosen,
        own=not isinstance(net, str),
        unknown=unknown,
    )


def plan_with_command(
    net: Any, data: Data | str | None, setting: Setting | str, seed: int, profile: str, rerun: int, **chosen: Any
) -> tuple[Plan, str | None]:
    """The plan of a training, and the command line that makes it, where there is one."""
    with torch.random.fork_rng(devices=[]):  # the random numbers of the caller are left alone
        plan = plan_run(net, data, setting=setting, seed=seed, profile=profile, rerun=rerun, **chosen)
    if not isinstance(net, str) or not (data is None or isinstance(data, str)):
        return plan, None
    given = {name: value for name, value in {"data": data, **chosen}.items() if value is not None}
    return plan, Specification(net, str(plan.setting), seed, profile, rerun, given).command()


def _model(net: Trainable | str, usual: Protocol, options: dict[str, Any]) -> Trainable:
    if not isinstance(net, str):
        if not isinstance(net, Trainable):
            raise UsageError(
                f"net is a {type(net).__name__}: give the function that trains it, train(seed, setting), or name one "
                f"of {', '.join(MODELS)} (gpulab's own loop trains what derives from gpulab.models.base.Trainable)"
            )
        if options:
            raise UsageError("model_options go with the name of a model, not with a model")
        return copy.deepcopy(net)
    try:
        return MODELS[net](**{"size": usual.size, **usual.model, **options})
    except TypeError as error:
        raise UsageError(f"model {net!r} with {options}: {error}") from None


def _model_description(
    net: Trainable | str, model: Trainable, usual: Protocol, options: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What makes this model, and what of it cannot be known: its options, or a digest of its code and its state."""
    if isinstance(net, str):
        own = {name: option.usual for name, option in FACTORS.items() if option.of == "model" and hasattr(model, name)}
        described: dict[str, Any] = {"size": list(usual.size), **usual.model, **options}
        described |= {name: getattr(model, name) for name in own}
        named = {key: value for key, value in described.items() if key not in own or value != own[key]}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in named.items()}, ()
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = None if model.fresh else identities.weights_digest(model.state_dict())
    try:
        parts = [(name, sources.of_module(part)) for name, part in model.named_modules()]
        unknown: tuple[str, ...] = ()
    except sources.UnknownContentError as error:
        parts, unknown = [], (f"{type(net).__name__} ({error})",)
    digest = identities.digest([shapes, repr(model), weights, parts])
    return {"class": type(net).__qualname__, "digest": digest}, unknown


def _data(data: Data | str | None, model: Trainable, usual: Protocol, frames: int, options: dict[str, Any]) -> Data:
    """The data to train on, checked against what the model takes."""
    if isinstance(data, Data):
        if options:
            raise UsageError(f"data_options {options} go with the name of a data set, not with one that is loaded")
    else:
        size = tuple(getattr(model, "size", usual.size))
        try:
            usual_options = usual.data_options if data in (None, usual.data) else {}
            data = load(data or usual.data, **{"frames": frames, "size": size, **usual_options, **options})
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
    if data.sequential and len(data) < frames:
        there = f"{data.name}: {len(data)} frames to train on, fewer than the {frames} of this training"
        warnings.warn(f"{there}: they are passed over again", stacklevel=4)
    return data
