"""The options of a run: what `gpulab.train` and the commands accept beside the setting.

Store, command line and experiments all read `OPTIONS`. A new option, or a new factor, is one entry here, and the line
of code in which it acts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpulab.errors import UsageError


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
