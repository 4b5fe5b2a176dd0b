"""What documents must hold that gpulab reads, whoever wrote them: a schema for each kind, checked in one place."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, get_origin

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError
from typing_extensions import TypedDict, get_type_hints, is_typeddict

from gpulab.errors import DataError
from gpulab.files import printable

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
    """What one of gpulab's networks was trained on."""

    data: str
    frames: Whole
    window: NotRequired[Whole]
    model_options: NotRequired[dict[str, Any]]
    data_options: NotRequired[_DataOptions]


class _OfFunction(_Open):
    """What a function of the user's was."""

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
    ways: NotRequired[list[str]]


# --- contributed runs: what may be in one, and nothing else -----------------------------------------------


class _Shut(TypedDict):
    """What may hold nothing but what is named."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]


Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[float, Field(ge=0, lt=1e75, allow_inf_nan=False)]
Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,64}$")]
# Without slashes, tildes and the @ of an address: nothing that names a place or a person.
Words = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9 .,:=+()_-]| @ | w/ ){0,119}$")]
Version = Annotated[str, StringConstraints(pattern=r"^[0-9][0-9A-Za-z.+-]{0,39}$")]
Extent = list[Annotated[int, Field(ge=1, le=1 << 16)]]


class _SharedProcessor(_Shut):
    model: Words
    architecture: NotRequired[Words]
    physical_cores: NotRequired[Annotated[int, Field(ge=1, le=4096)]]
    logical_cores: NotRequired[Annotated[int, Field(ge=1, le=4096)]]
    vector_extensions: NotRequired[list[Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,24}$")]]]


class _SharedGpu(_Shut):
    name: Words
    kind: NotRequired[Literal["cuda", "mps", "xpu"]]
    compute_capability: NotRequired[Version]
    multiprocessors: NotRequired[Count]
    memory_bytes: NotRequired[Count]
    driver: NotRequired[Version | None]


class _SharedSoftware(_Shut):
    torch: Version
    gpulab: Version
    cuda: NotRequired[Version | None]
    rocm: NotRequired[Version | None]
    cudnn: NotRequired[Version | None]
    blas: NotRequired[Words | None]
    onednn: NotRequired[Version | None]
    python: NotRequired[Version]
    os: NotRequired[Literal["Linux", "Windows", "macOS"]]
    commit: NotRequired[Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{7,40}(-dirty)?$")] | None]


class _SharedPassport(_Shut):
    format: NotRequired[Count]
    cpu: _SharedProcessor
    memory_bytes: NotRequired[Count]
    gpus: Annotated[list[_SharedGpu], Field(max_length=64)]
    software: _SharedSoftware


class _SharedArithmetic(_Shut):
    threads: NotRequired[Count]
    cpu_capability: NotRequired[Words]
    deterministic: NotRequired[bool]
    cudnn: NotRequired[bool]
    cudnn_benchmark: NotRequired[bool]
    cudnn_deterministic: NotRequired[bool]
    matmul_fp32: NotRequired[Words]
    convolution_fp32: NotRequired[Words]


class _SharedModel(_Shut):
    size: NotRequired[Extent]
    channels: NotRequired[Extent]
    hidden: NotRequired[Extent | Count]
    code: NotRequired[Count]
    batch_size: NotRequired[Count]
    kernel_size: NotRequired[Count]
    variant: NotRequired[Literal["published", "lotter"]]
    covariance: NotRequired[Words]
    truncation: NotRequired[Literal["loss", "state"]]


class _SharedData(_Shut):
    size: NotRequired[Extent]
    frames: NotRequired[Count]
    images: NotRequired[Count]
    heldout: NotRequired[Count]
    scene_seed: NotRequired[Count]
    speed: NotRequired[Positive]
    quality: NotRequired[Count]
    subsampling: NotRequired[Literal["4:4:4", "4:2:2", "4:2:0"]]


class _SharedConfiguration(_Shut):
    model: Literal["autoencoder", "prednet", "whitener"]
    model_options: _SharedModel
    data: Annotated[str, StringConstraints(pattern=r"^(jpeg:)?(digits|mnist|walk|moving-digits)$")]
    data_options: _SharedData
    frames: Annotated[int, Field(ge=1, le=10**9)]
    window: Annotated[int, Field(ge=1, le=10**6)]
    learning_rate: Positive


class _SharedSummary(_Shut):
    final_loss: Positive | None
    heldout_loss: Positive | None
    seconds: Positive
    frames_per_second: NotRequired[Positive | None]
    weights: NotRequired[Hex]


class _SharedHistory(_Shut):
    window: list[Count]
    step: list[Count]
    loss: list[Positive | None]
    seconds: list[Positive]


class SharedRun(_Shut):
    """A run in a contribution: these fields and no others."""

    id: Name
    experiment: Literal["autoencoder", "prednet", "whitener"]
    profile: Literal["smoke", "quick", "motion", "paper"]
    setting: Words
    seed: Count
    rerun: Count
    status: Literal["finished", "diverged"]
    diverged_at: NotRequired[Count | None]
    started: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    resumed_at: NotRequired[Count]
    loader: NotRequired[Literal["copied", "reused", "imitated"]]
    decoder: NotRequired[Literal["pillow", "torchvision", "av", "nvjpeg"]]
    flip: NotRequired[Count]
    fast: NotRequired[bool]
    draws: NotRequired[Literal["device"]]
    devices: NotRequired[Count]
    gradients: NotRequired[Words]
    captured: NotRequired[bool]
    shared: NotRequired[bool]
    code: NotRequired[Hex]
    content: NotRequired[Hex]
    summary: _SharedSummary
    configuration: _SharedConfiguration
    arithmetic: _SharedArithmetic
    passport: _SharedPassport
    history: _SharedHistory
    checksum: Hex


class Contribution(_Shut):
    """A file of contributed runs."""

    kind: Literal["gpulab contribution"]
    format: Count
    seal: str
    runs: Annotated[list[SharedRun], Field(min_length=1, max_length=5000)]


def sift(kind: Any, document: Any) -> Any:
    """Of a document what its schema names; of what need not be there, only what fits.

    Examples:
        >>> sift(_SharedProcessor, {"model": "AMD EPYC", "architecture": "~/me", "host": "anna-laptop"})
        {'model': 'AMD EPYC'}
    """
    if not (is_typeddict(kind) and isinstance(document, dict)):
        items = getattr(kind, "__args__", ()) if get_origin(kind) is list else ()
        return [sift(items[0], each) for each in document] if items and isinstance(document, list) else document
    kept = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in document:
            continue
        optional = get_origin(hint) is NotRequired
        inner = hint.__args__[0] if optional else hint
        bare = inner.__origin__ if get_origin(inner) is Annotated else inner
        value = sift(bare, document[name])
        if not (optional and _misfits(inner, value)):
            kept[name] = value
    return kept


def _misfits(kind: Any, value: Any) -> bool:
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return True
    return False


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check(kind: Any, document: Any, file: str | Path) -> Any:
    """The document; `DataError`, naming the file, the place and the value, unless it is of this kind.

    Examples:
        >>> check(Whole, 3, "a file")
        3
    """
    try:
        _adapter(kind).validate_python(document, strict=True)
    except (ValidationError, RecursionError) as error:
        raise DataError(f"{file}: a damaged record: {_first(error)}") from None
    return document


def _first(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("_Of"))
    try:
        value = repr(first["input"])[:60]
    except ValueError:  # a number of more digits than Python writes
        value = "a number of thousands of digits"
    return printable(f"{place or 'the whole'}: {first['msg']}, not {value}")
