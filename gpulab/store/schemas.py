"""What documents must hold that gpulab reads, whoever wrote them, checked in one place."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from gpulab.errors import DataError

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,255}$")]  # of a folder


def _object(fields: Mapping[str, Any]) -> Any:
    """A JSON object with at least these fields; one whose name ends in ? may be missing, a dict is an object in it."""
    field_types = {
        name: _object(field_type) if isinstance(field_type, dict) else field_type for name, field_type in fields.items()
    }
    named = {
        name.rstrip("?"): NotRequired[field_type] if name[-1] == "?" else field_type
        for name, field_type in field_types.items()
    }
    return with_config(ConfigDict(extra="allow", strict=True))(TypedDict("Object", named))  # type: ignore[operator]


Passport = _object(
    {
        "cpu": {"model": str},
        "gpus": list[_object({"name": str})],  # type: ignore[misc]
        "software": {"torch": str, "gpulab": str},
    }
)
OfFunction = _object({"source": str, "options": dict[str, Any]})
OfNetwork = _object(
    {
        "data": str,
        "frames": Whole,
        "window?": Whole,
        "model_options?": dict[str, Any],
        "data_options?": _object({"speed?": Number | None}),
    }
)
# A run's `run.json`, or what a file of packed runs has of it.
Run = _object(
    {
        "id": Name,
        **dict.fromkeys(("experiment", "profile", "setting"), str),
        "seed": Whole,
        "status": Literal["finished", "diverged"],
        "summary": {
            "final_loss": Number | None,
            "heldout_loss": Number | None,
            "seconds": Number,
            "frames_per_second?": Number | None,
            "weights?": str | None,
        },
        "passport": Passport,
        "configuration": OfFunction | OfNetwork,
        "rerun?": Whole,
        **dict.fromkeys(("diverged_at?", "flip?"), Whole | None),
        **dict.fromkeys(("command?", "started?", "loader?", "decoder?", "draws?"), str | None),
        "registered?": str,
        "metrics?": dict[str, Number | bool] | None,
    }
)
Recording = _object({"passport": Passport})  # the notes of a recorded table
Checkpoint = _object({"step": Whole, "state": dict[str, Any], "ways": list[str]})  # the notes of one


@functools.cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def fits(schema: Any, value: Any) -> bool:
    """Whether a value fits a schema.

    Examples:
        >>> fits(Name, "a/b")
        False
    """
    try:
        _adapter(schema).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def check(schema: Any, document: Any, file: str | Path) -> Any:
    """The document; `DataError`, naming the file, the place and the value, unless it fits the schema.

    Examples:
        >>> check(Whole, 3, "a file")
        3
    """
    try:
        _adapter(schema).validate_python(document, strict=True)
    except RecursionError:
        raise DataError(f"{file}: a damaged record: nested too deeply") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"] if step != "Object")
        problem = f"{where or 'the whole'}: {first['msg']}, not {first['input']!r:.60}"
        raise DataError(f"{file}: a damaged record: {problem}") from None
    return document
