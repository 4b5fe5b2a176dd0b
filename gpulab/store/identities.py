"""What may be chosen for a run, and its id, which depends on what was run, on which content, and on nothing else.

Store, command line and experiments all read `OPTIONS`. A new option, or a new factor, is one entry here, and the line
of code in which it acts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gpulab.errors import UsageError
from gpulab.files import digest

if TYPE_CHECKING:
    import torch


def whole_numbers(text: str) -> list[int]:
    """The numbers in a text such as `3,16,32` or `48x64`; `UsageError` for anything else."""
    try:
        numbers = [int(digits) for digits in re.split("[,x×/]", text)]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise UsageError(f"{text!r}: expected whole numbers, such as 3,16,32 or 48x64")
    return numbers


@dataclass(frozen=True)
class Option:
    """One thing that may be chosen for a run: an argument of `gpulab.train`, an option of the commands.

    Attributes:
        help: What the page on the command line says of it; nothing of one that cannot be chosen.
        read: What makes its value of the command line's text: a type, or a function.
        of: Where `gpulab.train` takes it: as an argument of its own (`run`), or in `data_options` or `model_options`
            (`data`, `model`).
        usual: Its value where nothing is said; None where the profile says. Runs record a factor only when it has
            another one.
        factor: Whether a device may do it otherwise and what is to be learned stays the same. A factor is a column
            of `gpulab.runs`, and runs that differ in nothing else can be compared.
        choices: The values that there are, if they can be listed.
    """

    help: str
    read: Callable[[str], Any] = str
    of: str = "run"
    usual: Any = None
    factor: bool = False
    choices: tuple[Any, ...] = ()


OPTIONS: dict[str, Option] = {
    "data": Option("digits, mnist, mnist:DIR, walk, moving-digits, video:FILE, frames:DIR"),
    "frames": Option("how many frames, or images, to train on", int),
    "window": Option("frames, or images, between two looks at the loss", int),
    "size": Option("height and width of the frames, such as [48,64]", whole_numbers, of="model"),
    "channels": Option("PredNet's channels, such as [3,16,32]", whole_numbers, of="model"),
    "speed": Option("how fast walk and moving-digits move", float, of="data"),
    "grey": Option("read a video or a folder in grey, as one channel", bool, of="data"),
    "learning_rate": Option("Adam's", float),
    "loader": Option(
        "how frames reach the device: window (at once); or one by one through a buffer, copied, reused or imitated",
        usual="window",
        factor=True,
        choices=("window", "copied", "reused", "imitated"),
    ),
    # Of recorded runs only, made while frames could be encoded as JPEG and decoded by a decoder of one's choice.
    "decoder": Option("", of="data", factor=True),
    "flip": Option("which initial weight, by its number, has its last bit changed", int, factor=True),
    "fast": Option(
        "compute gradients in fewer operations where that can be done, equal up to rounding",
        bool,
        usual=True,
        factor=True,
        choices=(True, False),
    ),
    "draws": Option(
        "whose generator draws the initial weights: cpu or device", usual="cpu", factor=True, choices=("cpu", "device")
    ),
    "covariance": Option("how the whitener computes it", of="model", factor=True),
    # A record that does not say was made with the whole state cut off.
    "truncation": Option(
        "what PredNet's backpropagation through time is cut off from: loss or state",
        of="model",
        usual="state",
        factor=True,
    ),
}
FACTORS = {name: option for name, option in OPTIONS.items() if option.factor}


def options_of_run(**options: Any) -> dict[str, Any]:
    """The options that `gpulab.train` takes as arguments of its own, besides `data`, checked, each with its value.

    Raises:
        UsageError: For an unknown option, or a value that there is not.
    """
    own = {name: option for name, option in OPTIONS.items() if option.of == "run" and name != "data"}
    if unknown := sorted(options.keys() - own):
        raise UsageError(f"no option {unknown[0]!r}; there are {', '.join(own)}")
    for name, value in options.items():
        kind, choices = own[name].read, own[name].choices
        if choices and value not in choices:
            raise UsageError(f"{name} {value!r}: expected one of {', '.join(map(str, choices))}")
        options[name] = float(value) if (type(value), kind) == (int, float) else value  # 1 and 1.0 are one run
        if value is not None and type(options[name]) is not kind:
            raise UsageError(f"{name} {value!r}: expected {kind.__name__}, not {type(value).__name__}")
    return {name: options.get(name, option.usual) for name, option in own.items()}


def factors_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Every factor of a recorded run, the usual ones, too."""
    model = model_options_of(record)
    return {
        name: model.get(name) if option.of == "model" else record.get(name, option.usual)
        for name, option in FACTORS.items()
    }


def model_options_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a recorded run's model, with a PredNet's usual truncation, which records leave out."""
    options = dict(record["configuration"].get("model_options", {}))
    # A network that was handed in is recorded by its layers, and has no options.
    if record["experiment"] == "prednet" and "channels" in options:
        options.setdefault("truncation", OPTIONS["truncation"].usual)
    return options


class Identity(NamedTuple):
    """What makes a run this run.

    Attributes:
        id: Its name, which depends on what was run, on what, and on nothing else.
        record: What is recorded of it from the beginning, `id` included.
    """

    id: str
    record: dict[str, Any]


def identified(asked: dict[str, Any], passport: Mapping[str, Any], contents: Mapping[str, str]) -> Identity:
    """The identity of what was asked for, which is another on another chip or torch.

    `contents` has the digests of what names in it stand for, which are recorded, too.
    """
    contents = {name: content for name, content in contents.items() if content}
    named = {**asked, "configuration": of_content(asked["configuration"], contents), **contents}
    named["chip"] = passport["cpu"]["model"] if asked["setting"].startswith("cpu") else passport["gpus"]
    named |= {key: passport["software"][key] for key in ("torch", "gpulab")}
    name = run_id(named)
    return Identity(name, {"id": name, **asked, **contents})


def run_id(identity: dict[str, Any]) -> str:
    """A name for a run that depends on this and on nothing else."""
    words = (identity["experiment"], identity["profile"], identity["setting"], f"seed{identity['seed']}")
    # A file may have no longer name than 255 bytes on most systems.
    short = "-".join(re.sub(r"[^a-z0-9.]+", "_", str(word).lower()) for word in words)[:200]
    return f"{short}-{digest(identity)[:10]}"


def of_content(configuration: dict[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which a film or a folder of frames goes by its content instead of by its place.

    >>> of_content({"data": "video:walk.mp4", "seed": 0}, {"content": "1c9a"})
    {'data': 'video:1c9a', 'seed': 0}
    """
    by_path = re.match(r"(video|frames):", configuration.get("data", ""))
    if not record.get("content") or not by_path:
        return configuration
    return {**configuration, "data": by_path[0] + record["content"]}


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 of weights by name: equal for equal bits."""
    import torch

    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
