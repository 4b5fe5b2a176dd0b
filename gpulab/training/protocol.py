"""What is trained: profiles, the options of a run, and the one specification of a run.

The store, the command line, experiments and searches all read `Specification` and `OPTIONS`. A new option, or a
new factor, is one entry in `OPTIONS`, and the line of code in which it acts.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpulab.errors import UsageError

PROFILES = ("smoke", "quick", "paper")
LAST_FIFTH = 5  # of a run's windows one in so many, the last, make its final loss


# --- profiles --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """What a profile means for one model.

    `frames` are trained on in windows of `window`; `seeds` is how many an experiment uses unless
    told; `data` with `data_options`, `size` (height, width) and `model` (options of the model) are what is trained.
    """

    data: str
    frames: int
    window: int
    seeds: int
    size: tuple[int, int]
    model: dict[str, Any]
    learning_rate: float = 1e-3
    data_options: dict[str, Any] = field(default_factory=dict)


WHITENER = {"hidden": 128, "code": 24, "batch_size": 50, "covariance": "one-pass"}
PROTOCOLS = {
    "autoencoder": {
        "smoke": Protocol("digits", 400, 20, 2, (28, 28), {"hidden": [64, 16]}),
        "quick": Protocol("digits", 3_000, 20, 5, (28, 28), {"hidden": [128, 32]}),
        "paper": Protocol("mnist", 60_000, 20, 10, (28, 28), {"hidden": [128, 32]}),
    },
    "prednet": {
        "smoke": Protocol("walk", 200, 20, 2, (24, 32), {"channels": [3, 8, 16]}),
        "quick": Protocol("walk", 1_000, 20, 5, (48, 64), {"channels": [3, 16, 32]}),
        # Longer than `quick`, at a faster walk and a higher rate: most seeds beat repeating the last frame.
        "motion": Protocol("walk", 3_000, 20, 5, (48, 64), {"channels": [3, 16, 32]}, 3e-3, {"speed": 4.0}),
        "paper": Protocol("walk", 5_000, 20, 10, (120, 160), {"channels": [3, 48, 96, 192]}),
    },
    "whitener": {
        "smoke": Protocol("digits", 4_000, 200, 6, (28, 28), WHITENER),
        "quick": Protocol("digits", 20_000, 200, 10, (28, 28), WHITENER),
        "paper": Protocol("mnist", 60_000, 200, 10, (28, 28), WHITENER),
    },
}


def profile(name: str) -> str:
    """The profile to use: the environment variable `GPULAB_PROFILE` if it is set, else `name`.

    Notebooks ask here, so that the tests can run them small.

    Args:
        name: `smoke` (seconds), `quick` (a laptop) or `paper` (as published).

    Raises:
        UsageError: For an unknown name.

    Examples:
        >>> profile("quick") in PROFILES
        True
    """
    chosen = os.environ.get("GPULAB_PROFILE") or name
    if chosen not in PROFILES:
        raise UsageError(f"profile {chosen!r}: expected one of {', '.join(PROFILES)}")
    return chosen


def protocol(model: str, name: str) -> Protocol:
    """What the profile `name` means for a model. PredNet has one more, `motion`, at a faster walk.

    Examples:
        >>> protocol("prednet", "paper").frames
        5000
    """
    if model not in PROTOCOLS:
        raise UsageError(
            f"model {model!r}: expected one of {', '.join(PROTOCOLS)}, or a training of your own, such as my.py:train"
        )
    if name not in PROTOCOLS[model]:
        raise UsageError(f"profile {name!r}: {model} has {', '.join(PROTOCOLS[model])}")
    return PROTOCOLS[model][name]


# --- options ---------------------------------------------------------------------------------------------


def whole_numbers(text: str, separator: str = ",", count: int | None = None, name: str = "") -> list[int]:
    """The numbers in a text such as `3,16,32`; `UsageError` for anything else."""
    try:
        numbers = [int(part) for part in text.replace("×", "x").split(separator)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or (count and len(numbers) != count):
        raise UsageError(f"{name} {text!r}: expected whole numbers separated by {separator!r}".lstrip())
    return numbers


@dataclass(frozen=True)
class Option:
    """One thing that may be chosen for a run: an argument of `gpulab.train`, an option of the commands.

    Attributes:
        help: What the command line says of it.
        kind: The type of its value on the command line.
        default: What the help says of it where it is left out.
        of: Where `gpulab.train` takes it: as an argument of its own (`run`), in `data_options`, in
            `model_options`, or in both of these (`data and model`).
        usual: Its value where nothing is said. Runs record a factor only when it has another one.
        factor: Whether a device may do it otherwise and what is to be learned stays the same. A factor is a column
            of `gpulab.runs`, and runs that differ in nothing else can be compared.
        choices: The values that there are, if they can be listed.
        parse: From the command line's text to the value, and `show` back.
        flag: Whether the commands have an option of this name; `--option` sets those of a model that have none.
    """

    help: str
    kind: type = str
    of: str = "run"
    default: str = ""
    usual: Any = None
    factor: bool = False
    choices: tuple[Any, ...] = ()
    parse: Callable[[Any], Any] = lambda value: value
    show: Callable[[Any], str] = str
    flag: bool = True

    def says_nothing(self, value: Any) -> bool:
        """Whether a value is what holds where nothing is said."""
        return value is None or value == self.usual or (value is False and not self.usual)


DATA_NAMES = "digits, mnist, mnist:DIR, walk, moving-digits, video:FILE, frames:DIR; or jpeg: and one of these"
OPTIONS: dict[str, Option] = {
    "data": Option(DATA_NAMES, default="the profile's"),
    "frames": Option("how many to train on", kind=int, default="the profile's"),
    "window": Option("frames, or images, between two looks at the loss", kind=int, default="the profile's"),
    "size": Option(
        "height×width of the frames, such as 48x64",
        of="data and model",
        parse=lambda text: tuple(whole_numbers(text, "x", 2, "--size")),
        show=lambda size: "x".join(map(str, size)),
    ),
    "channels": Option(
        "PredNet's channels, such as 3,16,32",
        of="model",
        parse=lambda text: whole_numbers(text, name="--channels"),
        show=lambda channels: ",".join(map(str, channels)),
    ),
    "speed": Option("of the motion in walk and moving-digits", float, "data"),
    "grey": Option("read a video or a folder with one channel", bool, "data"),
    "learning_rate": Option("Adam's", kind=float, default="0.001"),
    "loader": Option(
        "how frames reach the device: window, or one by one through a buffer: copied, reused, imitated",
        usual="window",
        factor=True,
        choices=("window", "copied", "reused", "imitated"),
    ),
    "decoder": Option(
        "who decodes jpeg:NAME: pillow, torchvision, av or nvjpeg", default="pillow", of="data", factor=True
    ),
    "quality": Option("of the frames of jpeg:NAME, 1 to 100", int, "data", default="75"),
    "subsampling": Option("of the colours of jpeg:NAME: 4:4:4, 4:2:2 or 4:2:0", of="data"),
    "flip": Option("number of the initial weight whose last bit is changed", int, factor=True),
    "fast": Option(
        "whether gradients are computed in fewer operations, equal up to rounding, where that can be done",
        kind=bool,
        usual=True,
        factor=True,
        choices=(True, False),
    ),
    "draws": Option(
        "whose generator draws the initial weights: cpu or device",
        usual="cpu",
        factor=True,
        choices=("cpu", "device"),
    ),
    "devices": Option("how many devices share each batch, a process each", int, default="1", usual=1, factor=True),
    "covariance": Option("how the whitener computes it", of="model", factor=True, flag=False),
    "truncation": Option(
        "what PredNet's backpropagation through time is cut off from: loss or state",
        of="model",
        usual="state",  # where a record does not say
        factor=True,
        flag=False,
    ),
}
DATA_OPTIONS = [name for name, option in OPTIONS.items() if "data" in option.of]
FACTORS = {name: option for name, option in OPTIONS.items() if option.factor}


def factors_of_run(**given: Any) -> dict[str, Any]:
    """The factors that `gpulab.train` takes as arguments of its own, checked, each with its value.

    Raises:
        UsageError: For an unknown factor, or a value that there is not.
    """
    own = {name: option for name, option in FACTORS.items() if option.of == "run"}
    if unknown := sorted(given.keys() - own):
        raise UsageError(f"no factor {unknown[0]!r}; there are {', '.join(own)}")
    for name, value in given.items():
        if (choices := own[name].choices) and value not in choices:
            raise UsageError(f"{name} {value!r}: expected one of {', '.join(map(str, choices))}")
    return {name: given.get(name, option.usual) for name, option in own.items()}


def factors_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Every factor of a recorded run, the usual ones, too."""
    model = _model_options(record)
    return {
        name: model.get(name) if option.of == "model" else record.get(name, option.usual)
        for name, option in FACTORS.items()
    }


def _model_options(record: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(record["configuration"].get("model_options", {}))
    if record["experiment"] == "prednet" and "channels" in options:
        options.setdefault("truncation", OPTIONS["truncation"].usual)
    return options


# --- the specification -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Specification:
    """One training: of what, on what, under which setting, from which seed, and an open mapping of options.

    `options` are arguments of `gpulab.train` that JSON can carry: those of `OPTIONS`, those of data and model in
    `data_options` and `model_options`.

    Examples:
        >>> Specification("prednet", "cpu", seed=3, options={"flip": 0}).command()
        'gpulab train prednet --profile quick --setting cpu --seed 3 --flip 0'
    """

    model: str
    setting: str = "cpu"
    seed: int = 0
    profile: str = "quick"
    rerun: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_options(cls, model: str, profile: str, options: Mapping[str, Any], **fields: Any) -> Specification:
        """From a flat mapping, as the command line has it: each option goes where `OPTIONS` says."""
        nested: dict[str, Any] = {"data_options": {}, "model_options": {}}
        for name, value in options.items():
            if OPTIONS[name].says_nothing(value):
                continue
            for place in OPTIONS[name].of.split(" and "):
                (nested if place == "run" else nested[f"{place}_options"])[name] = OPTIONS[name].parse(value)
        if options.get("grey") and model == "prednet":  # its lowest layer has as many channels as the frames
            usual = protocol(model, profile).model["channels"]
            nested["model_options"].setdefault("channels", [1, *usual[1:]])
        return cls(model, profile=profile, options=nested, **fields)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Specification:
        """The specification that a recorded run was made by."""
        done = record["configuration"]
        data = {name: done["data_options"][name] for name in DATA_OPTIONS if name in done["data_options"]}
        data |= {"seed": done["data_options"]["scene_seed"]} if "scene_seed" in done["data_options"] else {}
        options = {name: done[name] for name in ("data", "frames", "learning_rate")}
        if done["window"] != protocol(record["experiment"], record["profile"]).window:
            options["window"] = done["window"]
        for name, option in FACTORS.items():
            if name in record and option.of != "model":
                (data if option.of == "data" else options)[name] = record[name]
        if done["data"].startswith(("video:", "frames:")) and done["model_options"].get("channels", [3])[0] == 1:
            data["grey"] = True
        options |= {"data_options": data, "model_options": _model_options(record)}
        names = ("setting", "seed", "profile")
        return cls(record["experiment"], **{n: record[n] for n in names}, rerun=record.get("rerun", 0), options=options)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `gpulab.train`."""
        own = {name: getattr(self, name) for name in ("setting", "seed", "profile", "rerun")}
        return {"net": self.model, **own, **self.options}

    def command(self) -> str:
        """The command line that makes this run."""
        parts = ["gpulab", "train", self.model, "--profile", self.profile]
        parts += ["--setting", self.setting, "--seed", str(self.seed)]
        parts += ["--rerun", str(self.rerun)] if self.rerun else []
        return shlex.join([*parts, *self._flags()])

    def _flags(self) -> Iterator[str]:
        nested = {place: dict(self.options.get(f"{place}_options") or {}) for place in ("data", "model")}
        for name, option in OPTIONS.items():
            places = [self.options] if option.of == "run" else [nested[place] for place in option.of.split(" and ")]
            values = [place.get(name) for place in places]
            if not option.flag or any(map(option.says_nothing, values)):
                continue
            if len(texts := {option.show(value) for value in values}) > 1:
                continue
            yield f"--{'no-' if values[0] is False else ''}{name.replace('_', '-')}"
            yield from texts if option.kind is not bool else ()
            for place in nested.values():
                place.pop(name, None)
        for flag, place in (("--option", nested["model"]), ("--data-option", nested["data"])):
            for name, value in place.items():
                yield from (flag, f"{name}={value if isinstance(value, str) else json.dumps(value)}")
