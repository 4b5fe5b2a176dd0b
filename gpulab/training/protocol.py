"""What is trained: profiles, and the one specification of a run, with the options of `gpulab.store.factors`.

The command line, experiments and searches all read `Specification`.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpulab.errors import UsageError
from gpulab.store.factors import DATA_OPTIONS, model_options_of
from gpulab.store.factors import FACTORS as FACTORS
from gpulab.store.factors import OPTIONS as OPTIONS
from gpulab.store.factors import factors_of_record as factors_of_record
from gpulab.store.factors import factors_of_run as factors_of_run
from gpulab.store.factors import whole_numbers as whole_numbers

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
    """Choose the profile, which says how large experiments are: `GPULAB_PROFILE` if that is set, else `name`.

    Notebooks call it, so that one environment variable makes all of them small for a test.

    Args:
        name: `smoke` (seconds), `quick` (minutes on a laptop) or `paper` (as published).

    Returns:
        `smoke`, `quick` or `paper`. PredNet's further profile, `motion`, is for `gpulab.train` and `gpulab.Experiment`.

    Raises:
        UsageError: For another name, also in the environment variable.

    Examples:
        >>> import gpulab as gl
        >>> gl.profile("quick") in ("smoke", "quick", "paper")
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
        options |= {"data_options": data, "model_options": model_options_of(record)}
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
