"""Plan a run of a network or of a function from the arguments of `gpulab.train`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpulab.data._base import Data
from gpulab.models._base import Trainable
from gpulab.settings import Setting
from gpulab.training._functions import FunctionRun, TrainingFunction, as_training_function
from gpulab.training._networks import NetworkRun
from gpulab.training._planned_run import Options, check_options


def plan_run(
    net: Trainable | TrainingFunction | Callable[..., Any] | str,
    data: Data | str | None = None,
    setting: Setting | str = "cpu",
    seed: int = 0,
    profile: str = "quick",
    *,
    frames: int | None = None,
    learning_rate: float | None = None,
    window: int | None = None,
    data_options: Options | None = None,
    model_options: Options | None = None,
    rerun: int = 0,
    **factors: Any,
) -> NetworkRun | FunctionRun:
    """Check the arguments of `gpulab.train`, which have the same names here.

    Returns:
        A `NetworkRun`, with the model created and the data loaded, or a `FunctionRun`.

    Raises:
        UsageError: If arguments are invalid.
        DataError: If the data cannot be read.

    Examples:
        >>> plan_run(lambda seed, power=2: seed**power, seed=3, power=1).configuration["options"]
        {'power': 1}
    """
    lengths: Options = {"frames": frames, "window": window, "learning_rate": learning_rate}
    function = as_training_function(net)
    if function is None:
        return NetworkRun.plan(
            net,
            data,
            setting,
            seed,
            profile,
            rerun=rerun,
            data_options=data_options,
            model_options=model_options,
            **lengths,
            **factors,
        )
    # A training function may have options with the names of these arguments. Arguments that are
    # None, the default, were not given. But a keyword that is None was given with this value.
    model_options = check_options("model_options", model_options)
    # The function receives data options as they were given, so their default is not filled in.
    check_options("data_options", data_options)
    arguments = {"data": data, **lengths, "data_options": data_options}
    given_arguments = {name: value for name, value in arguments.items() if value is not None}
    empty_factors = {name: None for name, value in factors.items() if value is None}
    options = empty_factors | given_arguments | factors | model_options
    return FunctionRun.plan(function, Setting.parse(setting), seed, rerun, options)
