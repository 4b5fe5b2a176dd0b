"""What one training is asked for: `RunSpec`. It is the one place where a request is checked, and becomes a run's id."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import math
import shlex
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gpulab.content import plain, weights_digest
from gpulab.data.base import Data
from gpulab.data.datasets import load
from gpulab.errors import UsageError
from gpulab.models import MODELS
from gpulab.models.base import Trainable, check_weight, flip_bit
from gpulab.passports import Passport
from gpulab.settings import Setting
from gpulab.store.factors import FACTORS, OPTIONS, factors_of_run
from gpulab.store.identities import Identity, identified
from gpulab.training.functions import TrainingFunction, is_function
from gpulab.training.protocol import Protocol, protocol

# The version of all code that decides what a training gives: loop, optimiser, engines, models, data, arithmetic. Raise
# it whenever the same request gives other losses: then no run of before stands for one of now. The test
# `test_losses_are_those_of_this_code_version` fails until that is done.
CODE_VERSION = 1


@dataclass(frozen=True)
class RunSpec:
    """What `gpulab.train` was asked for, checked, with the model made and the data loaded.

    Attributes:
        experiment: The name of the network, or of the user's function.
        setting: Where and how to compute.
        seed: What the weights and the order of images are drawn from.
        profile: How large; `own` for a function.
        rerun: The number of this repetition.
        configuration: What is trained, on what and how long, as the record keeps it.
        contents: The digests of what names in the configuration stand for, by name.
        unknown: What of it cannot be known by its content; empty where all can.
        factors: The value of each factor that is an argument of `gpulab.train`.
        asked: The arguments that a command line can give; None where it cannot, for data and models that are objects.
        model: The network, with its weights still to be drawn unless it holds loaded ones; None for a function.
        data: What it learns from; None for a function.
        function: The user's training with its options, to be called with what else it takes; None for a network.
    """

    experiment: str
    setting: Setting
    seed: int
    profile: str
    rerun: int
    configuration: dict[str, Any]
    contents: dict[str, str]
    unknown: str
    factors: dict[str, Any]
    asked: dict[str, Any] | None
    model: Any = field(default=None, compare=False)
    data: Any = field(default=None, compare=False)
    function: Callable[..., Any] | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        net: Trainable | TrainingFunction | Callable[..., Any] | str,
        data: Data | str | None = None,
        setting: Setting | str = "cpu",
        seed: int = 0,
        profile: str = "quick",
        rerun: int = 0,
        *,
        data_options: dict[str, Any] | None = None,
        model_options: dict[str, Any] | None = None,
        **chosen: Any,
    ) -> RunSpec:
        """Check what `gpulab.train` was asked for, load the data and make the model.

        Args:
            net, data, setting, seed, profile, rerun, data_options, model_options: As of `gpulab.train`.
            **chosen: Its `frames`, `window` and `learning_rate`, and factors; or options of a function.

        Returns:
            The specification.

        Raises:
            UsageError: For what makes no sense.
            DataError: For data that cannot be read.

        Examples:
            >>> RunSpec.of("prednet", profile="smoke", seed=3, flip=0).command()
            'gpulab train prednet --profile smoke --setting cpu --seed 3 --option flip=0'
        """
        parsed = Setting.parse(setting)
        given = {name: value for name, value in {"data": data, **chosen}.items() if value is not None}
        if is_function(net):
            function = net if isinstance(net, TrainingFunction) else TrainingFunction(net)
            of_data = {"data_options": data_options} if data_options else {}
            options = function.checked({**given, **(model_options or {}), **of_data})
            what = (*function.described(options), function.unknown)
            asked = {"net": function.text, "option": options} if function.text else None
            train = functools.partial(function.train, options)
            return cls(function.name, parsed, seed, "own", rerun, *what, {}, asked, function=train)
        named = isinstance(net, str) and not isinstance(data, Data)
        name = net if isinstance(net, str) else type(net).__name__.lower()
        if not isinstance(net, str) and (model_options or type(net) not in MODELS.values()):
            given_as = type(net).__name__ + f" with model_options {model_options}" * bool(model_options)
            networks = f"{', '.join(MODELS)}, a network of these kinds"
            raise UsageError(
                f"net is a {given_as}: expected {networks}, or the function that trains yours, train(seed, setting)"
            )
        usual = protocol(name, profile)
        length = {key: given.get(key, getattr(usual, key)) for key in ("frames", "window", "learning_rate")}
        _check_length(**length)
        length["learning_rate"] = float(length["learning_rate"])  # 1 and 1.0 are one run
        factors = factors_of_run(**{key: value for key, value in given.items() if key not in ("data", *length)})
        model = _model(net, usual, model_options or {})
        _check_factors(model, factors)
        loaded = _data(data, model, usual, length["frames"], data_options or {})
        content = loaded.content if type(loaded).__module__.startswith("gpulab.") else None
        flags = {"option": given | (model_options or {}), "data-option": data_options or {}}
        return cls(
            experiment=name,
            setting=parsed,
            seed=seed,
            profile=profile,
            rerun=rerun,
            configuration={
                "model": name,
                "model_options": _described_model(net, model, usual, model_options or {}),
                "data": loaded.name,
                "data_options": loaded.options(),
                **length,
            },
            contents={"code": str(CODE_VERSION), "content": content or ""},
            unknown=f"data {loaded.name!r}" if content is None else "",
            factors=factors,
            asked={"net": net, **flags} if named else None,
            model=model,
            data=loaded,
        )

    @classmethod
    def of_job(cls, job: dict[str, Any]) -> RunSpec:
        """The same of all arguments of a call of `gpulab.train`, without those that say how it is done."""
        what = inspect.signature(cls.of).parameters.keys() | OPTIONS.keys()
        return cls.of(**{name: value for name, value in job.items() if name in what})

    @property
    def frames(self) -> int:
        """How many frames or images to train on."""
        return self.configuration["frames"]

    @property
    def window(self) -> int:
        """How many of them the loss is noted for."""
        return self.configuration["window"]

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """What the training needs in force: its setting, and no more threads than the model can use."""
        with self.setting.apply(), torch.random.fork_rng(devices=[]):
            if self.setting.threads is None and (threads := getattr(self.model, "threads", None)):
                torch.set_num_threads(min(threads, torch.get_num_threads()))
            yield

    def draw_weights(self) -> None:
        """Give the model the weights that training starts from: those of the seed, unless it holds loaded ones."""
        if self.model.fresh:
            device = self.setting.device if self.factors["draws"] == "device" else "cpu"
            self.model.draw_weights(torch.Generator(device).manual_seed(self.seed))
        if self.factors["flip"] is not None:
            flip_bit(self.model, self.factors["flip"])

    def identity(self, here: Passport, kept: bool = True) -> Identity:
        """What makes this run this run, and its id; `UsageError` for one to be kept that is known by no content."""
        if kept and self.unknown:
            why = "its content cannot be known, so that a store might take another run for this one"
            raise UsageError(f"{self.unknown}: {why}; train it without a store")
        names = ("experiment", "profile", "seed", "rerun", "configuration")
        asked = {"setting": str(self.setting), **{name: getattr(self, name) for name in names}}
        asked |= {name: value for name, value in self.factors.items() if value != FACTORS[name].usual}
        return identified(asked, here, self.contents | ({"unknown": uuid.uuid4().hex} if self.unknown else {}))

    def command(self) -> str | None:
        """The command line that makes this run, where there is one."""
        if self.asked is None:
            return None
        parts = ["gpulab", "train", self.asked["net"], *(() if self.function else ("--profile", self.profile))]
        parts += ["--setting", str(self.setting), "--seed", str(self.seed)]
        parts += ["--rerun", str(self.rerun)] if self.rerun else []
        for flag in ("option", "data-option"):
            for name, value in self.asked.get(flag, {}).items():
                parts += [f"--{flag}", f"{name}={value if isinstance(value, str) else plain(value)}"]
        return shlex.join(parts)


def _check_length(frames: int, window: int, learning_rate: float) -> None:
    if not isinstance(window, int) or window < 2:
        raise UsageError(f"window={window!r}: expected a whole number from 2")
    if not isinstance(frames, int) or frames < window:
        raise UsageError(f"frames={frames!r}: expected a whole number; a window alone has {window}")
    if type(learning_rate) not in (int, float) or not 0 <= learning_rate < math.inf:
        raise UsageError(f"learning_rate={learning_rate!r}: expected a number, 0 or above")


def _check_factors(model: Trainable, factors: dict[str, Any]) -> None:
    """Refuse factors that cannot act on this model."""
    check_weight(model, factors["flip"])
    batch_size = getattr(model, "batch_size", 1)
    if factors["loader"] != "window" and batch_size > 1:
        raise UsageError(
            f"loader {factors['loader']!r} hands over one frame after another, and {type(model).__name__} sees "
            f"{batch_size} at a time: give it batch_size=1, or loader 'window'"
        )


def _model(net: Any, usual: Protocol, options: dict[str, Any]) -> Trainable:
    """A network of gpulab's: a copy of the one that is given, or a new one."""
    if not isinstance(net, str):
        return copy.deepcopy(net)
    try:
        with torch.random.fork_rng(devices=[]):  # the random numbers of the caller are left alone
            return MODELS[net](**{"size": usual.size, **usual.model, **options})
    except TypeError as error:
        raise UsageError(f"model {net!r} with {options}: {error}") from None


def _described_model(net: Any, model: Trainable, usual: Protocol, options: dict[str, Any]) -> dict[str, Any]:
    """What makes this model: its options; or of one that was handed in its layers, and the weights if it has any."""
    if not isinstance(net, str):
        held = {name: value for name, value in vars(model).items() if name[0] != "_" and name != "training"}
        weights = None if model.fresh else weights_digest(model.state_dict())
        return {"layers": repr(model), "held": json.loads(plain(held)), "weights": weights}
    factors = {name: option for name, option in FACTORS.items() if option.of == "model" and hasattr(model, name)}
    described = {"size": list(usual.size), **usual.model, **options}
    described |= {name: getattr(model, name) for name in factors}
    named = {name: v for name, v in described.items() if name not in factors or v != factors[name].usual}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in named.items()}


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
