"""The options of a run: what `gpulab.train` and the commands accept beside the setting.

Store, command line and experiments all read `RUN_OPTIONS`. A new option, or a new factor, is one
entry here, and the line of code in which it acts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpulab.errors import UsageError

# The value of an option is a text, a number, a boolean, a list of numbers, or None. Its type
# depends on the option's entry in `RUN_OPTIONS`: a union would have to be narrowed wherever one is
# read.
OptionValue = Any

LOADERS = ("window", "copied", "reused", "imitated")


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
class RunOption:
    """One thing that may be chosen for a run: an argument of `gpulab.train`, an option of the
    commands.

    Attributes:
        help: What the page on the command line says of it; nothing of one that cannot be chosen.
        parse: What makes its value of the command line's text: a type, or a function.
        argument_group: Where `gpulab.train` takes it: as an argument of its own (`run`), or in
            `data_options` or `model_options` (`data`, `model`).
        default: Its value where nothing is said; None where the profile says. Runs record a factor
            only when it has another value.
        factor: Whether the option may affect numerics but not the learning task. A factor is a
            column of `gpulab.runs`, and runs that differ in nothing else can be compared.
        choices: The values that there are, if they can be listed.
    """

    help: str
    parse: Callable[[str], OptionValue] = str
    argument_group: str = "run"
    default: OptionValue = None
    factor: bool = False
    choices: tuple[OptionValue, ...] = ()


RUN_OPTIONS: dict[str, RunOption] = {
    "data": RunOption("digits, mnist, mnist:DIR, walk, moving-digits, video:FILE, frames:DIR"),
    "frames": RunOption("how many frames, or images, to train on", int),
    "window": RunOption("frames, or images, between two looks at the loss", int),
    "size": RunOption(
        "height and width of the frames, such as [48,64]", whole_numbers, argument_group="model"
    ),
    "channels": RunOption(
        "PredNet's channels, such as [3,16,32]", whole_numbers, argument_group="model"
    ),
    "speed": RunOption("how fast walk and moving-digits move", float, argument_group="data"),
    "grey": RunOption(
        "read a video or a folder in grey, as one channel", bool, argument_group="data"
    ),
    "learning_rate": RunOption("Adam's", float),
    "loader": RunOption(
        "how frames reach the device: window (at once); or one by one through a buffer, copied,"
        " reused or imitated",
        default="window",
        factor=True,
        choices=LOADERS,
    ),
    # Of recorded runs only, made while frames could be encoded as JPEG and decoded by a decoder of
    # one's choice.
    "decoder": RunOption("", argument_group="data", factor=True),
    "flip": RunOption(
        "which initial weight, by its number, has its last bit changed", int, factor=True
    ),
    "fast": RunOption(
        "compute gradients in fewer operations where that can be done, equal up to rounding",
        bool,
        default=True,
        factor=True,
        choices=(True, False),
    ),
    "draws": RunOption(
        "whose generator draws the initial weights: cpu or device",
        default="cpu",
        factor=True,
        choices=("cpu", "device"),
    ),
    "covariance": RunOption("how the whitener computes it", argument_group="model", factor=True),
    # A record that does not say was made with the whole state cut off.
    "truncation": RunOption(
        "what PredNet's backpropagation through time is cut off from: loss or state",
        argument_group="model",
        default="state",
        factor=True,
    ),
}
FACTORS = {name: option for name, option in RUN_OPTIONS.items() if option.factor}


def check_option(name: str, value: OptionValue) -> OptionValue:
    """Return the value of an option of `RUN_OPTIONS`. A whole number for a float is converted: 1
    and 1.0 are one run.

    Raises:
        UsageError: For a value of another type, or one that is not among the choices.

    Examples:
        >>> check_option("learning_rate", 1)
        1.0
    """
    option = RUN_OPTIONS[name]
    if option.choices and value not in option.choices:
        raise UsageError(f"{name} {value!r}: expected one of {', '.join(map(str, option.choices))}")
    if type(value) is int and option.parse is float:
        return float(value)
    if value is not None and type(value) is not option.parse:
        raise UsageError(
            f"{name} {value!r}: expected {option.parse.__name__}, not {type(value).__name__}"
        )
    return value


def factors_of_run(**values: OptionValue) -> dict[str, OptionValue]:
    """Return the value of each factor that is an argument of `gpulab.train`; those not given have
    their usual value.

    Raises:
        UsageError: For an unknown name, or a value that the factor cannot have.

    Examples:
        >>> factors_of_run(loader="copied")
        {'loader': 'copied', 'flip': None, 'fast': True, 'draws': 'cpu'}
    """
    arguments = [
        name
        for name, option in RUN_OPTIONS.items()
        if option.argument_group == "run" and name != "data"
    ]
    factors = {
        name: option.default for name, option in FACTORS.items() if option.argument_group == "run"
    }
    unknown = sorted(values.keys() - factors.keys())
    if unknown:
        raise UsageError(f"no option {unknown[0]!r}; there are {', '.join(arguments)}")
    return factors | {name: check_option(name, value) for name, value in values.items()}
