"""The record of a run: the content of `run.json`, and what tables and verdicts derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, cast

from gpulab import files
from gpulab.passports import machine
from gpulab.run_options import FACTORS, RUN_OPTIONS
from gpulab.store._run_identity import replace_path_by_content


class _RequiredSummary(TypedDict):
    final_loss: float | None
    heldout_loss: float | None
    seconds: float


class Summary(_RequiredSummary, total=False):
    """The results of a run. The losses of a diverged run are None, because JSON has no NaN."""

    frames_per_second: float | None
    weights: str


class _RequiredRecord(TypedDict):
    id: str
    experiment: str
    profile: str
    setting: str
    seed: int
    configuration: dict[str, Any]
    passport: dict[str, Any]
    status: str
    summary: Summary


class RunRecord(_RequiredRecord, total=False):
    """The stored record of a run, without its history and weights.

    It also has a key for each factor (`gpulab.run_options.FACTORS`) whose value is not the default.
    """

    rerun: int
    metrics: dict[str, float] | None
    gradients: str
    captured: bool
    shared: bool
    diverged_at: int | None
    windows_after_divergence: int
    resumed_at: int
    arithmetic: dict[str, Any]
    code: str
    content: str
    command: str | None
    registered: str
    started: str


def check_record(file: str, record: dict[str, Any]) -> RunRecord:
    """Check the record of a finished run, and return it as a `RunRecord`.

    Raises:
        DataError: If a required key is missing; the message names the file and the key.

    Examples:
        >>> check_record("runs/a/run.json", {"id": "a", "status": "finished"})
        Traceback (most recent call last):
        gpulab.errors.DataError: runs/a/run.json: a damaged record: KeyError: 'experiment'
    """
    with files.convert_read_errors(file, "a damaged record"):
        # A missing key raises a `KeyError`, which `convert_read_errors` turns into a `DataError`.
        for key in _RequiredRecord.__annotations__:
            record[key]
        for key in _RequiredSummary.__annotations__:
            record["summary"][key]
        _check_passport(record["passport"], device_of(record))
        _check_configuration(record["configuration"])
    return cast(RunRecord, record)


def _check_passport(passport: dict[str, Any], device: str) -> None:
    """Raise an error, usually `KeyError`, if a passport lacks a value for the table of runs."""
    # The values are only looked up: a missing one raises the error.
    machine(passport, device)
    for gpu in passport["gpus"]:
        gpu["name"]
    passport["cpu"]["model"]
    for library in ("torch", "gpulab"):
        passport["software"][library]


def _check_configuration(configuration: dict[str, Any]) -> None:
    """Raise an error, usually `KeyError`, if a configuration lacks a value for the table."""
    # The values are only looked up or converted: a missing or unsuitable one raises the error.
    if "source" in configuration:  # of a training function
        dict(configuration["options"])
        return
    for key in ("data", "frames"):
        configuration[key]
    dict(configuration.get("model_options", {}))
    list(configuration.get("data_options", {}).get("size", ()))


def factors_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every factor of a recorded run, including defaults.

    Factors of the model are among the model's options, and None for a model that does not have
    them. All other factors are keys of the record, unless they have their defaults.
    """
    model_options = model_options_of(record)
    factors = {}
    for name, option in FACTORS.items():
        if option.argument_group == "model":
            factors[name] = model_options.get(name)
        else:
            factors[name] = record.get(name, option.default)
    return factors


def model_options_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model options of a recorded run.

    Records leave out the default truncation of PredNet; it is added here.
    """
    options = dict(record["configuration"].get("model_options", {}))
    # A network that was passed as an object is recorded by its layers, and has no options.
    if record["experiment"] == "prednet" and "channels" in options:
        options.setdefault("truncation", RUN_OPTIONS["truncation"].default)
    return options


def learning_task(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that determines the learning task.

    This is the configuration without the model's factors. For a training function it is the digest
    of the source and that of the files that its options name. Runs with equal learning tasks can be
    compared.

    >>> configuration = {"model_options": {"channels": [3, 4], "truncation": "loss"}}
    >>> learning_task({"configuration": configuration})
    {'model_options': {'channels': [3, 4]}}
    """
    configuration = replace_path_by_content(record["configuration"], record)
    if "source" in configuration:
        task = {"source": configuration["source"]}
        if "content" in record:
            task["content"] = record["content"]
        return task
    if "model_options" not in configuration:
        return configuration
    options_without_factors = {
        name: value for name, value in configuration["model_options"].items() if name not in FACTORS
    }
    return {**configuration, "model_options": options_without_factors}


def device_of(record: Mapping[str, Any]) -> str:
    """Return the kind of device that a run was trained on, such as `cpu` or `cuda`."""
    return record["setting"].partition(":")[0]
