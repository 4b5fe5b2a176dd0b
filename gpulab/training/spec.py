"""What one training is asked for: arguments are checked here, and the identity of the run follows from them."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import shlex
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

from gpulab.data.base import Data
from gpulab.data.datasets import load
from gpulab.errors import UsageError, check_count
from gpulab.models import MODELS
from gpulab.models.base import Trainable, check_weight, flip_bit
from gpulab.passports import Passport
from gpulab.run_options import FACTORS, options_of_run
from gpulab.settings import Setting
from gpulab.store.identities import Identity, identified, weights_digest
from gpulab.training.functions import TrainingFunction, function_of, plain
from gpulab.training.profiles import Protocol, protocol

# The version of all code that decides what a training gives: loop, optimiser, engines, models, data, arithmetic. Raise
# it whenever the same request gives other losses: then no run of before stands for one of now. The test
# `test_losses_are_those_of_this_code_version` fails until that is done.
CODE_VERSION = 1
# Arguments of `gpulab.train` that say how a run is done, and nothing of what it is.
HOW = ("store", "keep_weights", "watch", "progress", "registered")
# Those that `gpulab.train` gives as None where nothing was said; any other None is the value of an option.
UNSAID = ("data", "frames", "window", "learning_rate", "data_options", "model_options", *HOW)


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
    asked: dict[str, Any]
    model: Any = None
    data: Any = None
    function: TrainingFunction | None = None

    @classmethod
    def of(cls, net: Any, setting: Setting | str = "cpu", seed: int = 0, profile: str = "quick", **more: Any) -> Self:
        """Check what `gpulab.train` was asked for, load the data and make the model.

        Args:
            net, setting, seed, profile: As of `gpulab.train`.
            **more: Its other arguments. Those that only say how a run is done, such as `store`, are not looked at.

        Returns:
            The specification.

        Raises:
            UsageError: For what makes no sense.
            DataError: For data that cannot be read.

        Examples:
            >>> RunSpec.of("prednet", profile="smoke", seed=3, flip=0).command()
            'gpulab train prednet --profile smoke --setting cpu --seed 3 --option flip=0'
        """
        given = {name: value for name, value in more.items() if value is not None and name not in HOW}
        rerun, model_options = given.pop("rerun", 0), given.pop("model_options", {})
        for name, value in (("seed", seed), ("rerun", rerun)):
            check_count(name, value, least=0)
        seed, rerun = int(seed), int(rerun)  # NumPy's have no JSON
        for name, value in (("model_options", model_options), ("data_options", given.get("data_options", {}))):
            if not isinstance(value, dict):
                raise UsageError(f"{name}={value!r}: expected a dictionary of options by name")
        setting = Setting.parse(setting)
        if function := function_of(net):
            of_none = {name: None for name, value in more.items() if value is None and name not in UNSAID}
            asked = {"net": function.text, "option": of_none | given | model_options}
            what = (*function.described(asked["option"]), function.unknown)
            return cls(function.name, setting, seed, "own", rerun, *what, {}, asked, function=function)
        if not isinstance(net, str) and (model_options or type(net) not in MODELS.values()):
            raise UsageError(
                f"net is a {type(net).__name__}, model_options={model_options}: expected one of {', '.join(MODELS)}, a "
                "network of these kinds without options, or the function that trains yours, train(seed, setting)"
            )
        name = net if isinstance(net, str) else type(net).__name__.lower()
        usual = protocol(name, profile)
        data_options = given.pop("data_options", {})
        asked, data = {"option": given | model_options, "data-option": data_options}, given.pop("data", None)
        asked["net"] = net if isinstance(net, str) and not isinstance(data, Data) else None
        length = {key: getattr(usual, key) for key in ("frames", "window", "learning_rate")}
        factors = options_of_run(**length | given)
        length = {key: factors.pop(key) for key in length}
        if not 2 <= length["window"] <= length["frames"] or not 0 <= length["learning_rate"] < math.inf:
            raise UsageError(f"{length}: expected a window from 2, as many frames at least, and a rate from 0")
        model, described = _network(net, usual, model_options)
        check_weight(model, factors["flip"])
        if factors["loader"] != "window" and (batch_size := getattr(model, "batch_size", 1)) > 1:
            raise UsageError(
                f"loader {factors['loader']!r} hands over one frame after another, and {type(model).__name__} sees "
                f"{batch_size} at a time: give it batch_size=1, or loader 'window'"
            )
        loaded = _data(data, model, usual, length["frames"], data_options)
        content = loaded.content if type(loaded).__module__.startswith("gpulab.") else None
        trained = {"model": name, "model_options": described, "data": loaded.name, "data_options": loaded.options()}
        return cls(
            experiment=name,
            setting=setting,
            seed=seed,
            profile=profile,
            rerun=rerun,
            configuration=trained | length,
            contents={"code": str(CODE_VERSION), "content": content or ""},
            unknown=f"data {loaded.name!r}" if content is None else "",
            factors=factors,
            asked=asked,
            model=model,
            data=loaded,
        )

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
        """What the training needs in force: its setting, and no more threads than the model can use.

        >>> from gpulab.settings import setting
        >>> with setting("cpu:threads=2"), RunSpec.of("autoencoder", profile="smoke").in_force():
        ...     torch.get_num_threads()  # more would be waited for
        1
        """
        with self.setting.apply(), torch.random.fork_rng(devices=[]), contextlib.ExitStack() as stack:
            if self.setting.threads is None and (threads := getattr(self.model, "threads", None)):
                torch.set_num_threads(min(threads, torch.get_num_threads()))
            if self.model is not None and self.setting.compile:
                part = self.model.compiled_part
                setattr(self.model, part, self.setting.compiled(getattr(self.model, part)))
                stack.callback(delattr, self.model, part)  # a copy of the model would call this one's
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
        if self.asked["net"] is None:
            return None
        parts = ["gpulab", "train", self.asked["net"], *(() if self.function else ("--profile", self.profile))]
        parts += ["--setting", str(self.setting), "--seed", str(self.seed)]
        parts += ["--rerun", str(self.rerun)] if self.rerun else []
        for flag in ("option", "data-option"):
            for name, value in self.asked.get(flag, {}).items():
                parts += [f"--{flag}", f"{name}={value if isinstance(value, str) else plain(value)}"]
        return shlex.join(parts)


def _network(net: Any, usual: Protocol, options: dict[str, Any]) -> tuple[Trainable, dict[str, Any]]:
    """A network of gpulab's: a copy of the one that is given, or a new one; and what makes it, for the record.

    That are its options; or of one that was handed in its layers, and the weights if it has any.

    >>> own = MODELS["prednet"](channels=(3, 4), size=(16, 16))
    >>> _network(own, PROTOCOLS["prednet", "smoke"], {})[1]["held"]
    {'channels': [3, 4], 'size': [16, 16], 'truncation': 'loss'}
    """
    if not isinstance(net, str):
        model = copy.deepcopy(net)
        held = {name: value for name, value in vars(model).items() if name[0] != "_" and name != "training"}
        weights = None if model.fresh else weights_digest(model.state_dict())
        return model, {"layers": repr(model), "held": json.loads(plain(held)), "weights": weights}
    described = {"size": usual.size, **usual.model, **options}
    try:
        with torch.random.fork_rng(devices=[]):  # the random numbers of the caller are left alone
            model = MODELS[net](**described)
    except TypeError as error:
        raise UsageError(f"model {net!r} with {options}: {error}") from None
    factors = {name: getattr(model, name, option.usual) for name, option in FACTORS.items() if option.of == "model"}
    return model, {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in (described | factors).items()
        if name not in factors or value != FACTORS[name].usual
    }


def _data(data: Data | str | None, model: Any, usual: Protocol, frames: int, options: dict[str, Any]) -> Data:
    """The data to train on, checked against what the model takes."""
    if not isinstance(data, Data):
        usual_options = usual.data_options if data in (None, usual.data) else {}
        try:
            data = load(data or usual.data, **{"frames": frames, "size": model.size, **usual_options, **options})
        except TypeError as error:
            raise UsageError(f"data_options {options}: {error}") from None
    elif options:
        raise UsageError(f"data_options {options} go with the name of a data set, not with one that is loaded")
    if data.sequential != model.sequential:
        kinds = {True: "a sequence of frames", False: "a set of images"}
        raise UsageError(
            f"{data.name} is {kinds[data.sequential]}; {type(model).__name__} learns from {kinds[model.sequential]}"
        )
    wanted = (getattr(model, "channels", (1,))[0], *model.size)
    if (data.channels, *data.size) != wanted:
        raise UsageError(f"{data.name} has frames of shape {(data.channels, *data.size)}; the model takes {wanted}")
    if data.sequential and len(data) < frames:
        there = f"{data.name}: {len(data)} frames to train on, fewer than the {frames} of this training"
        warnings.warn(f"{there}: they are passed over again", stacklevel=4)
    return data
