"""What documents must hold that gpulab reads, whoever wrote them: a schema for each kind, checked in one place."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from gpulab.errors import DataError

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,255}$")]  # of a folder


class _Open(TypedDict):
    """What may hold more than is named: the kinds below inherit it."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]


class _Processor(_Open):
    model: str


class _Gpu(_Open):
    name: str


class _Software(_Open):
    torch: str
    gpulab: str


class Passport(_Open):
    """Of a machine."""

    cpu: _Processor
    gpus: list[_Gpu]
    software: _Software


class _DataOptions(_Open):
    speed: NotRequired[Number | None]


class _OfNetwork(_Open):
    data: str
    frames: Whole
    window: NotRequired[Whole]
    model_options: NotRequired[dict[str, Any]]
    data_options: NotRequired[_DataOptions]


class _OfFunction(_Open):
    source: str
    options: dict[str, Any]


class _Summary(_Open):
    final_loss: Number | None
    heldout_loss: Number | None
    seconds: Number
    frames_per_second: NotRequired[Number | None]
    weights: NotRequired[str | None]


class Run(_Open):
    """A run's `run.json`, or what a file of packed runs has of it."""

    id: Name
    experiment: str
    profile: str
    setting: str
    seed: Whole
    status: Literal["finished", "diverged"]
    summary: _Summary
    passport: Passport
    configuration: _OfFunction | _OfNetwork
    rerun: NotRequired[Whole]
    diverged_at: NotRequired[Whole | None]
    command: NotRequired[str | None]
    started: NotRequired[str | None]
    registered: NotRequired[str]
    metrics: NotRequired[dict[str, Number | bool] | None]
    flip: NotRequired[Whole | None]
    loader: NotRequired[str | None]
    decoder: NotRequired[str | None]
    draws: NotRequired[str | None]


class Recording(_Open):
    """The notes of a recorded table."""

    passport: Passport


class Overwritten(TypedDict):
    """A tensor that the guard found overwritten."""

    operation: str
    line: str
    why: str
    remedy: str


class Trace(TypedDict):
    """The notes of a trace."""

    setting: str
    label: str
    overwritten: list[Overwritten]
    passport: dict[str, Any]
    arithmetic: dict[str, Any]


class Checkpoint(_Open):
    """The notes of a checkpoint."""

    step: Whole
    state: dict[str, Any]
    ways: list[str]


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def fits(kind: Any, value: Any) -> bool:
    """Whether a value is of a kind.

    Examples:
        >>> fits(Name, "a/b")
        False
    """
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def check(kind: Any, document: Any, file: str | Path) -> Any:
    """The document; `DataError`, naming the file, the place and the value, unless it is of this kind.

    Examples:
        >>> check(Whole, 3, "a file")
        3
    """
    try:
        _adapter(kind).validate_python(document, strict=True)
    except RecursionError:
        raise DataError(f"{file}: a damaged record: nested too deeply") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"] if not str(step).startswith("_Of"))
        problem = f"{where or 'the whole'}: {first['msg']}, not {first['input']!r:.60}"
        raise DataError(f"{file}: a damaged record: {problem}") from None
    return document
