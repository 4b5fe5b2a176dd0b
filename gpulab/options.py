"""The options that several commands have, each declared once, those of a run among them, and what texts mean."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulab import files
from gpulab.errors import UsageError
from gpulab.settings import Setting
from gpulab.store.factors import OPTIONS
from gpulab.training.protocol import protocol

if TYPE_CHECKING:
    import pandas as pd


def option(words: str, usually: str | bool = True, flag: str = "", **more: Any) -> Any:
    """What an option says, and what holds where nothing is said, if the parameter's default does not tell."""
    return typer.Option(*filter(None, [flag]), help=words, show_default=usually, **more)


def argument(words: str, usually: str | bool = False, **more: Any) -> Any:
    """What an argument says, and what holds where it is left out."""
    return typer.Argument(help=words, show_default=usually, **more)


def writable(file: Path | None) -> Path | None:
    """A file that a command is to write, tried before any work; `GpulabError` where it could not be written after."""
    if file:
        files.check_writable(file)
    return file


def prepared(setting: str) -> str:
    """A setting, whose instruction set this process shall have: torch reads that when it is loaded."""
    Setting.parse(setting).prepare()
    return setting


STEP = "module:name or file.py:name of a gpulab.Step or a function of one step"
SETTING = "such as cpu, cpu:threads=1, cuda:tf32=off,cudnn=off"
MARGIN = "largest difference that would not matter, such as 0.25sd or 0.001; for yes and no a share, such as 0.1"
STORE = "folder in which runs are kept, or a file of packed runs"
USUAL_STORE = "$GPULAB_STORE or ./runs"
PROFILE = "smoke (seconds), quick (a laptop), paper (as published), prednet's motion; a function of yours has none"
REGISTERED = "file written before the runs, with the question and how it will be answered; its digest is kept"

Training = Annotated[str, argument("autoencoder, prednet or whitener; or file.py:name, a training of your own")]
OneSetting = Annotated[str, option(SETTING, callback=prepared)]
Profile = Annotated[str, option(PROFILE)]
Store = Annotated[Path | None, option(STORE, USUAL_STORE)]
StoreArgument = Annotated[Path | None, argument(STORE, USUAL_STORE)]
StoreOption = Annotated[Path | None, option("the same, as an option", False, "--store")]
Picture = Annotated[Path | None, option("draw every run and difference into this PNG file", callback=writable)]
Where = Annotated[list[str] | None, option("only runs with column=value; several times")]


# --- the options of a run --------------------------------------------------------------------------------


def how_to_train(
    fresh: Annotated[bool, option("train again, whatever run or checkpoint is there", flag="--fresh")] = False,
    checkpoint_seconds: Annotated[
        float | None, option("time between checkpoints of gpulab's own networks", "10", min=0)
    ] = None,
    registered: Annotated[Path | None, option(REGISTERED)] = None,
) -> dict[str, Any]:
    """How a run is done, in arguments of `gpulab.train`."""
    asked: dict[str, Any] = {"resume": False if fresh else None, "checkpoint_seconds": checkpoint_seconds}
    asked["registered"] = str(registered) if registered else None
    return {name: value for name, value in asked.items() if value is not None}


def what_to_train(
    model: Training,
    profile: Profile,
    flags: dict[str, Any],
    option: Annotated[list[str] | None, option("an option of the model or function, such as width=64; several times")],
    data_option: Annotated[list[str] | None, option("an option of the data, such as seed=3; several times")],
) -> dict[str, Any]:
    """What is trained, in arguments of `gpulab.train`, or in options of a function."""
    of_model, of_data = ({name: value(text) for name, text in pairs(texts)} for texts in (option, data_option))
    if ":" in model:
        if of_data:
            raise UsageError(f"--data-option {next(iter(of_data))}: a function takes what it has as --option")
        given = {name: text for name, text in flags.items() if not OPTIONS[name].says_nothing(text)}
        return {name: OPTIONS[name].read(text) for name, text in given.items()} | of_model
    arguments = {name for name, each in OPTIONS.items() if each.of == "run"} | {"data_options", "model_options"}
    options: dict[str, Any] = {"data_options": {}, "model_options": {}}
    options |= {name: of_model.pop(name) for name in arguments & of_model.keys()}
    for name, text in flags.items():
        if not OPTIONS[name].says_nothing(text):
            of = OPTIONS[name].of
            (options if of == "run" else options[f"{of}_options"])[name] = OPTIONS[name].read(text)
    if flags.get("grey") and model == "prednet":  # its lowest layer has as many channels as the frames
        options["model_options"].setdefault("channels", [1, *protocol(model, profile).model["channels"][1:]])
    options["model_options"] |= of_model
    options["data_options"] |= of_data
    return {name: text for name, text in options.items() if text != {}}


def of_a_run(command: Callable[..., None]) -> Callable[..., None]:
    """A command that is given, as `how` and `options`, all that `how_to_train`, `OPTIONS` and `what_to_train` list."""
    own, how, what = (
        dict(inspect.signature(function, eval_str=True).parameters)
        for function in (command, how_to_train, what_to_train)
    )
    parameters = {name: each for name, each in own.items() if name not in ("how", "options")} | how
    for name, each in OPTIONS.items():
        if each.flag:
            flag = f"--{name.replace('_', '-')}" + (f"/--no-{name}" if each.usual is True else "")
            kind = each.read if isinstance(each.read, type) else str
            usually = True if each.factor or kind is bool else "the profile's"
            annotation = Annotated[kind, option(each.help, usually, flag)]  # type: ignore[valid-type]
            default = bool(each.usual) if kind is bool else each.usual
            parameters[name] = own["model"].replace(name=name, default=default, annotation=annotation)
    parameters |= {name: what[name].replace(default=None) for name in ("option", "data_option")}

    def with_options(**given: Any) -> None:
        arguments = {name: given.pop(name) for name in how}
        flags = {name: given.pop(name) for name in OPTIONS if name in given}
        texts = given.pop("option"), given.pop("data_option")
        options = what_to_train(given["model"], given["profile"], flags, *texts)
        command(**given, how=how_to_train(**arguments), options=options)

    with_options.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
    return with_options


# --- what texts mean -------------------------------------------------------------------------------------


def either(argument: Path | None, option: Path | None) -> Path | None:
    """A store that is named in one of two ways."""
    if argument and option:
        raise UsageError(f"{argument} and --store {option}: expected one store")
    return argument or option


def pairs(options: list[str] | None) -> Iterator[tuple[str, str]]:
    """The names and the texts of options written `name=text`."""
    for option in options or ():
        name, _, text = option.partition("=")
        if not (name and text):
            raise UsageError(f"{option!r}: expected name=value")
        yield name, text


def value(text: str) -> Any:
    """A number, a list of them, true or false; or else a word."""
    for read in (int, float, json.loads):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


def rows_where(frame: pd.DataFrame, where: list[str] | None) -> pd.DataFrame:
    """The rows of runs that `--where` asks for."""
    from gpulab.stats.pairs import find_column

    for name, text in pairs(where):
        frame = frame[frame[find_column(frame.columns, name)].astype(str) == text]
    return frame
