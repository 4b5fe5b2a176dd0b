"""What may be chosen for a run, and what a record says of it.

Store, command line and experiments all read `OPTIONS`. A new option, or a new factor, is one entry here, and the line
of code in which it acts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpulab.errors import UsageError


def whole_numbers(text: str, separator: str = ",", count: int | None = None, name: str = "") -> list[int]:
    """The numbers in a text such as `3,16,32`; `UsageError` for anything else."""
    try:
        numbers = [int(digits) for digits in text.replace("×", "x").split(separator)]
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
        of: Where `gpulab.train` takes it: as an argument of its own (`run`), or in `data_options` or `model_options`
            (`data`, `model`).
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


DATA_NAMES = "digits, mnist, mnist:DIR, walk, moving-digits, video:FILE, frames:DIR"
OPTIONS: dict[str, Option] = {
    "data": Option(DATA_NAMES, default="the profile's"),
    "frames": Option("how many frames, or images, to train on", kind=int, default="the profile's"),
    "window": Option("frames, or images, between two looks at the loss", kind=int, default="the profile's"),
    "size": Option(
        "height×width of the frames, such as 48x64",
        of="model",
        parse=lambda text: tuple(whole_numbers(text, "x", 2, "--size")),
        show=lambda size: "x".join(map(str, size)),
    ),
    "channels": Option(
        "PredNet's channels, such as 3,16,32",
        of="model",
        parse=lambda text: whole_numbers(text, name="--channels"),
        show=lambda channels: ",".join(map(str, channels)),
    ),
    "speed": Option("how fast walk and moving-digits move", float, "data"),
    "grey": Option("read a video or a folder in grey, as one channel", bool, "data"),
    "learning_rate": Option("Adam's", kind=float, default="0.001"),
    "loader": Option(
        "how frames reach the device: window (at once); or one by one through a buffer, copied, reused or imitated",
        usual="window",
        factor=True,
        choices=("window", "copied", "reused", "imitated"),
    ),
    # Of recorded runs only, made while frames could be encoded as JPEG and decoded by a decoder of one's choice.
    "decoder": Option("who decoded the JPEG frames", of="data", factor=True, flag=False),
    "flip": Option("which initial weight, by its number, has its last bit changed", int, factor=True),
    "fast": Option(
        "compute gradients in fewer operations where that can be done, equal up to rounding",
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
    "covariance": Option("how the whitener computes it", of="model", factor=True, flag=False),
    "truncation": Option(
        "what PredNet's backpropagation through time is cut off from: loss or state",
        of="model",
        usual="state",  # where a record does not say
        factor=True,
        flag=False,
    ),
}
FACTORS = {name: option for name, option in OPTIONS.items() if option.factor}


def factors_of_run(**factors: Any) -> dict[str, Any]:
    """The factors that `gpulab.train` takes as arguments of its own, checked, each with its value.

    Raises:
        UsageError: For an unknown factor, or a value that there is not.
    """
    own = {name: option for name, option in FACTORS.items() if option.of == "run"}
    if unknown := sorted(factors.keys() - own):
        raise UsageError(f"no factor {unknown[0]!r}; there are {', '.join(own)}")
    for name, value in factors.items():
        if (choices := own[name].choices) and value not in choices:
            raise UsageError(f"{name} {value!r}: expected one of {', '.join(map(str, choices))}")
    return {name: factors.get(name, option.usual) for name, option in own.items()}


def factors_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Every factor of a recorded run, the usual ones, too."""
    model = model_options_of(record)
    return {
        name: model.get(name) if option.of == "model" else record.get(name, option.usual)
        for name, option in FACTORS.items()
    }


def model_options_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a recorded run's model, the usual truncation, too."""
    options = dict(record["configuration"].get("model_options", {}))
    if record["experiment"] == "prednet" and "channels" in options:
        options.setdefault("truncation", OPTIONS["truncation"].usual)
    return options
