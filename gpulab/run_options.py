"""The options of a run that `gpulab.train` and the commands accept besides the setting.

The store, the command line and experiments all read `RUN_OPTIONS`. A new option or factor needs one
entry here, and the code in which it takes effect.
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
    """Parse whole numbers from a text such as `3,16,32` or `48x64`.

    Raises:
        UsageError: If the text is not a list of whole numbers from 0.
    """
    try:
        numbers = [int(digits) for digits in re.split("[,x×/]", text)]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise UsageError(f"{text!r}: expected whole numbers, such as 3,16,32 or 48x64")
    return numbers


@dataclass(frozen=True)
class RunOption:
    """An option of a run, which is an argument of `gpulab.train` and an option of the commands.

    Attributes:
        help: The help text on the command line. Empty for an option that cannot be chosen.
        parse: A type or a function that converts the text of the command line to a value.
        argument_group: How `gpulab.train` takes the option: as an argument of its own (`run`), in
            `data_options` (`data`) or in `model_options` (`model`).
        default: The default value; None if the profile determines it. The record of a run has a
            factor only if its value is not the default.
        factor: Whether the option may affect numerics but not the learning task. A factor is a
            column of `gpulab.runs`. Runs that differ only in factors can be compared.
        choices: All possible values, if there is a fixed set of them.
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
    "window": RunOption("frames, or images, in a window, for which one loss is recorded", int),
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
    "learning_rate": RunOption("learning rate of Adam", float),
    "loader": RunOption(
        "how frames are copied to the device: window (all at once), or one by one through a buffer"
        " (copied, reused or imitated)",
        default="window",
        factor=True,
        choices=LOADERS,
    ),
    # Only recorded runs have it. They were made with an earlier version, in which frames could be
    # encoded as JPEG and decoded with a choice of decoders.
    "decoder": RunOption("", argument_group="data", factor=True),
    "flip": RunOption("number of the initial weight whose last bit is changed", int, factor=True),
    "fast": RunOption(
        "compute gradients in fewer operations if possible; they are equal up to rounding",
        bool,
        default=True,
        factor=True,
        choices=(True, False),
    ),
    "draws": RunOption(
        "the generator that draws the initial weights: cpu or device",
        default="cpu",
        factor=True,
        choices=("cpu", "device"),
    ),
    "covariance": RunOption(
        "how the whitener computes the covariance", argument_group="model", factor=True
    ),
    # Records without this entry are older: the gradient was then always truncated at the state.
    "truncation": RunOption(
        "where PredNet's backpropagation through time is truncated: loss or state",
        argument_group="model",
        default="state",
        factor=True,
    ),
}
FACTORS = {name: option for name, option in RUN_OPTIONS.items() if option.factor}


def check_option(name: str, value: OptionValue) -> OptionValue:
    """Check the value of an option of `RUN_OPTIONS`, and return it.

    A whole number is converted if the option is a float, so that 1 and 1.0 are the same run.

    Raises:
        UsageError: If the value has a different type or is not among the choices.

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
            f"{name} {value!r}: expected {option.parse.__name__}, got {type(value).__name__}"
        )
    return value


def factors_of_run(**values: OptionValue) -> dict[str, OptionValue]:
    """Return the values of all factors that are arguments of `gpulab.train`.

    Factors that are not given have their default values.

    Raises:
        UsageError: If a name is unknown, or a value is not allowed.

    Examples:
        >>> factors_of_run(loader="copied")
        {'loader': 'copied', 'flip': None, 'fast': True, 'draws': 'cpu'}
    """
    # All arguments of `gpulab.train` that are options, for the error message.
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
        raise UsageError(f"no option {unknown[0]!r}; the options are {', '.join(arguments)}")
    return factors | {name: check_option(name, value) for name, value in values.items()}
