"""What one training is asked for: `RunSpec`. It is the one place where a request is checked, and becomes a run's id."""

from __future__ import annotations

import copy
import json
import math
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gpulab.data.base import Data
from gpulab.data.datasets import load
from gpulab.errors import UsageError
from gpulab.models import MODELS
from gpulab.models.base import Trainable, check_weight, flip_bit
from gpulab.passports import Passport
from gpulab.settings import Setting
from gpulab.store import identities
from gpulab.store.factors import FACTORS, OPTIONS, factors_of_run
from gpulab.training.protocol import Protocol, protocol

# The version of all code that decides what a training gives: loop, optimiser, engines, models, data, arithmetic. Raise
# it whenever the same request gives other losses: then no run of before stands for one of now. The test
# `test_losses_are_those_of_this_code_version` fails until that is done.
CODE_VERSION = 1


@dataclass(frozen=True)
class RunSpec:
    """What `gpulab.train` was asked for, checked, with the model made and the data loaded.

    Attributes:
        experiment: The name of the network.
        model: The network, with its weights still to be drawn unless it holds loaded ones.
        data: What it learns from.
        setting: Where and how to compute.
        seed: What the weights and the order of images are drawn from.
        profile: How large.
        rerun: The number of this repetition.
        frames: How many frames or images to train on.
        window: How many of them the loss is noted for.
        learning_rate: Adam's.
        model_options: What makes the model, as JSON can carry it.
        factors: The value of each factor that is an argument of `gpulab.train`.
        asked: The arguments that a command line can give; None where it cannot, for data and models that are objects.
        unknown: What of a model of the user's own cannot be known by its content.
    """

    experiment: str
    model: Trainable = field(compare=False)
    data: Data = field(compare=False)
    setting: Setting
    seed: int
    profile: str
    rerun: int
    frames: int
    window: int
    learning_rate: float
    model_options: dict[str, Any]
    factors: dict[str, Any]
    asked: dict[str, Any] | None
    unknown: tuple[str, ...]

    @classmethod
    def of(
        cls,
        net: Trainable | str,
        data: Data | str | None = None,
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
    ) -> RunSpec:
        """Check what `gpulab.train` was asked for, load the data and make the model.

        Args:
            net, data, setting, seed, profile, rerun, frames, learning_rate, window: As of `gpulab.train`.
            data_options, model_options, **factors: As of `gpulab.train`.

        Returns:
            The specification.

        Raises:
            UsageError: For what makes no sense.
            DataError: For data that cannot be read.

        Examples:
            >>> RunSpec.of("prednet", profile="smoke", seed=3, flip=0).command()
            'gpulab train prednet --profile smoke --setting cpu --seed 3 --flip 0'
        """
        given = {"data": data, "frames": frames, "learning_rate": learning_rate, "window": window, **factors}
        given |= {"data_options": data_options, "model_options": model_options}
        named = isinstance(net, str) and not isinstance(data, Data)
        chosen = factors_of_run(**factors)
        name = net if isinstance(net, str) else type(net).__name__.lower()
        usual = protocol(name if isinstance(net, str) or name in MODELS else "prednet", profile)
        frames = usual.frames if frames is None else frames
        window = usual.window if window is None else window
        rate = usual.learning_rate if learning_rate is None else learning_rate
        _check_length(frames, window, rate)
        model = _model(net, usual, model_options or {})
        _check_factors(model, chosen)
        described, unknown = _described_model(net, model, usual, model_options or {})
        return cls(
            experiment=name,
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
            asked={key: value for key, value in given.items() if value is not None} if named else None,
            unknown=unknown,
        )

    def draw_weights(self) -> None:
        """Give the model the weights that training starts from: those of the seed, unless it holds loaded ones."""
        if self.model.fresh:
            device = self.setting.device if self.factors["draws"] == "device" else "cpu"
            self.model.draw_weights(torch.Generator(device).manual_seed(self.seed))
        if self.factors["flip"] is not None:
            flip_bit(self.model, self.factors["flip"])

    @property
    def own(self) -> bool:
        """Whether the model is one that somebody else wrote."""
        return "digest" in self.model_options

    def identity(self, here: Passport) -> identities.Identity:
        """What makes this run this run, and its id; of a model of one's own after `draw_weights`."""
        identity = {name: getattr(self, name) for name in ("experiment", "profile", "seed", "rerun")}
        identity["setting"] = str(self.setting)
        identity["configuration"] = {
            "model": self.experiment,
            "model_options": self.model_options,
            "data": self.data.name,
            "data_options": self.data.options(),
            "frames": self.frames,
            "window": self.window,
            "learning_rate": self.learning_rate,
        }
        identity |= {name: value for name, value in self.factors.items() if value != FACTORS[name].usual}
        content = self.data.content if type(self.data).__module__.startswith("gpulab.") else None
        known = {"code": str(CODE_VERSION), "content": content or ""}
        if self.own:
            known["initial"] = identities.weights_digest(self.model.state_dict())
        unknown = self.unknown + ((f"data {self.data.name!r}",) if content is None else ())
        return identities.identified(identity, here, known, unknown)

    def command(self) -> str | None:
        """The command line that makes this run, where there is one."""
        if self.asked is None:
            return None
        parts = ["gpulab", "train", self.experiment, "--profile", self.profile]
        parts += ["--setting", str(self.setting), "--seed", str(self.seed)]
        parts += ["--rerun", str(self.rerun)] if self.rerun else []
        return shlex.join([*parts, *_flags(self.asked)])


def _flags(asked: dict[str, Any]) -> Iterator[str]:
    """The options of a command line that give these arguments."""
    nested = {of: dict(asked.get(f"{of}_options") or {}) for of in ("data", "model")}
    for name, option in OPTIONS.items():
        values = asked if option.of == "run" else nested[option.of]
        if option.flag and not option.says_nothing(value := values.get(name)):
            yield f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
            if option.kind is not bool:
                yield option.show(value)
            nested.get(option.of, {}).pop(name, None)
    for flag, values in (("--option", nested["model"]), ("--data-option", nested["data"])):
        for name, value in values.items():
            yield from (flag, f"{name}={value if isinstance(value, str) else json.dumps(value)}")


def _check_length(frames: int, window: int, rate: float) -> None:
    if not isinstance(window, int) or window < 2:
        raise UsageError(f"window={window!r}: expected a whole number from 2")
    if not isinstance(frames, int) or frames < window:
        raise UsageError(f"frames={frames!r}: expected a whole number; a window alone has {window}")
    if not 0 <= rate < math.inf:
        raise UsageError(f"learning_rate={rate!r}: expected a number, 0 or above")


def _check_factors(model: Trainable, factors: dict[str, Any]) -> None:
    """Refuse factors that cannot act on this model."""
    check_weight(model, factors["flip"])
    batch_size = getattr(model, "batch_size", 1)
    if factors["loader"] != "window" and batch_size > 1:
        raise UsageError(
            f"loader {factors['loader']!r} hands over one frame after another, and {type(model).__name__} sees "
            f"{batch_size} at a time: give it batch_size=1, or loader 'window'"
        )


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
        with torch.random.fork_rng(devices=[]):  # the random numbers of the caller are left alone
            return MODELS[net](**{"size": usual.size, **usual.model, **options})
    except TypeError as error:
        raise UsageError(f"model {net!r} with {options}: {error}") from None


def _described_model(
    net: Trainable | str, model: Trainable, usual: Protocol, options: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What makes this model: its options, or a digest of its code and of what it holds; and what cannot be known."""
    if isinstance(net, str):
        factors = {name: option for name, option in FACTORS.items() if option.of == "model" and hasattr(model, name)}
        described = {"size": list(usual.size), **usual.model, **options}
        described |= {name: getattr(model, name) for name in factors}
        named = {name: v for name, v in described.items() if name not in factors or v != factors[name].usual}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in named.items()}, ()
    from gpulab.store import sources

    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    weights = None if model.fresh else model.state_dict()
    unknown: tuple[str, ...] = ()
    try:
        parts = [(name, type(part), _held(part)) for name, part in model.named_modules()]
        digest = sources.content_hash([shapes, repr(model), weights, parts])
    except sources.UnknownContentError as error:
        digest, unknown = "", (f"{type(net).__name__} ({error})",)
    return {"class": type(net).__qualname__, "digest": digest}, unknown


def _held(part: torch.nn.Module) -> dict[str, Any]:
    """What a module holds beside its parameters and parts: attributes, buffers, and hooks without their numbers."""
    held = {name: value for name, value in vars(part).items() if name not in ("_parameters", "_modules")}
    return {name: list(value.values()) if "_hooks" in name and value else value for name, value in held.items()}


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
