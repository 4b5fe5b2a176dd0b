"""The errors that gpulab raises on purpose; each names the offending value and what to do."""

import contextlib
import importlib.metadata
import importlib.util
import numbers
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

# A `gpulab.guards.Overwritten`. That class is in a layer above this module, so it cannot be
# imported.
GuardFinding = Any

UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Escape control characters and marks of text direction in a text.

    Examples:
        >>> printable("a\x1b[31mred")
        'a\\x1b[31mred'
    """
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class GpulabError(Exception):
    r"""Something could not be done; the message says what, why, and what to do.

    All errors that gpulab raises on purpose derive from this class. Control characters in the
    message, such as `\x1b`, are escaped, because the message may quote the content of a file.

    Args:
        message: What could not be done, for the user to read.

    Examples:
        >>> import gpulab as gl
        >>> try:
        ...     gl.load("no-such-data")
        ... except gl.GpulabError as error:
        ...     print(type(error).__name__)
        UsageError
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


class UsageError(GpulabError, ValueError):
    """The request is invalid: an unknown option, a value out of range, an indivisible size.

    It is also a `ValueError`.

    Args:
        message: Which value was wrong, and what was expected.

    Examples:
        >>> import gpulab as gl
        >>> gl.Setting.parse("cpu:threads=0")
        Traceback (most recent call last):
        gpulab.errors.UsageError: ... threads='0' must be a number from 1 to 9999
    """


def check_count(name: str, value: object, maximum: int | None = None, minimum: int = 1) -> None:
    """Raise `UsageError` unless `value` is a whole number from `minimum` to `maximum`."""
    is_allowed = _is_count(value, minimum) and (maximum is None or int(value) <= maximum)  # type: ignore[call-overload]
    if not is_allowed:
        up_to = "" if maximum is None else f" to {maximum:,}"
        raise UsageError(f"{name}={value!r}: expected a whole number from {minimum}{up_to}")


def _is_count(value: object, minimum: int = 1) -> bool:
    """Return whether a value is a whole number of at least `minimum`; Booleans are not."""
    return (
        isinstance(value, numbers.Integral)
        and not isinstance(value, bool)
        and int(value) >= minimum
    )


def check_counts(name: str, values: object, parts: tuple[str, ...] = ()) -> tuple[int, ...]:
    """Return `values` as a tuple of whole numbers from 1.

    Args:
        name: The name of the argument in the error message.
        values: The value of the argument.
        parts: The name of each number, such as ("height", "width"). Without names, any positive
            number of entries is accepted.

    Raises:
        UsageError: If `values` is not a list, tuple or array of the expected number of whole
            numbers from 1.

    Examples:
        >>> check_counts("size", [12, 16], ("height", "width"))
        (12, 16)
        >>> check_counts("size", (12,), ("height", "width"))
        Traceback (most recent call last):
        gpulab.errors.UsageError: size=(12,): expected (height, width), whole numbers from 1
    """
    entries: list[object] = []
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | Set):
        with contextlib.suppress(TypeError):  # an array without dimensions
            entries = list(values)
    wrong = [number for number, value in enumerate(entries) if not _is_count(value)]
    if wrong or not entries or (parts and len(entries) != len(parts)):
        expectation = "one or more whole numbers from 1"
        if parts:
            expectation = f"({', '.join(parts)}), whole numbers from 1"
        if wrong and len(entries) == len(parts):
            expectation += f", got {parts[wrong[0]]}={entries[wrong[0]]!r}"
        raise UsageError(f"{name}={values!r}: expected {expectation}")
    return tuple(int(value) for value in entries)  # type: ignore[call-overload]


class DataError(GpulabError):
    r"""An input file or folder is missing, damaged or of the wrong kind.

    Args:
        message: Which file or folder, and what is wrong with it. Line breaks become spaces: the
            message is one line.

    Examples:
        >>> import gpulab as gl
        >>> print(gl.DataError("film.mp4: holds\nno video"))
        film.mp4: holds no video
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(" ".join(str(message).split()))


class UnsupportedError(GpulabError):
    """A computation that one method does not support; another method may."""


class OverwrittenError(GpulabError):
    """Under `gpulab.guard`, a tensor with overwritten memory was about to be used.

    Args:
        finding: What the guard found.

    Attributes:
        finding: Which tensor it was, where it was saved or made, and what overwrote it, as a
            `gpulab.guards.Overwritten`.

    Examples:
        >>> import torch
        >>> import gpulab as gl
        >>> x, scale = torch.ones(3, requires_grad=True), torch.ones(3)
        >>> try:
        ...     with gl.guard():
        ...         loss = (x * scale).sum()
        ...         scale.numpy()[:] = 2  # autograd does not notice this write
        ...         loss.backward()
        ... except gl.OverwrittenError as error:
        ...     print(error.finding.function, error.finding.shape)
        mul (3,)
    """

    def __init__(self, finding: GuardFinding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class OverwrittenWarning(UserWarning):
    """The warning of `gpulab.guard(on="warn")`, issued instead of an `OverwrittenError`.

    The warning is issued once, at the end of the guard's block, and describes all findings. The
    findings themselves are in `findings` of the `Guard`.

    Examples:
        >>> import warnings
        >>> import torch
        >>> import gpulab as gl
        >>> x, scale = torch.ones(3, requires_grad=True), torch.ones(3)
        >>> with (
        ...     warnings.catch_warnings(record=True, action="always") as caught,
        ...     gl.guard(on="warn"),
        ... ):
        ...     loss = (x * scale).sum()
        ...     scale.numpy()[:] = 2
        ...     loss.backward()
        >>> [warning.category.__name__ for warning in caught]
        ['OverwrittenWarning']
    """


DISTRIBUTIONS = {
    "cpuinfo": "py-cpuinfo",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""The distribution to install for a module, if the two have different names."""


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Wrap imports of optional libraries; the error for a missing one names the extra to install.

    If gpulab always needs the library, the message says so instead, and `name` may be empty. If
    another extra contains the library, the message names that one.

    Raises:
        GpulabError: If a library is missing.

    Examples:
        >>> with extra("notebooks"):
        ...     import no_such_library
        Traceback (most recent call last):
        gpulab.errors.GpulabError: no_such_library is not installed: pip install 'gpulab[notebooks]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if error.name is None or library == __package__:
            raise  # the error is not about a library that can be installed
        raise GpulabError(_missing_library(library, error.name, name)) from None


def _missing_library(library: str, module: str, extra_name: str) -> str:
    """Return the message for a missing module, with the command that installs it."""
    distribution = DISTRIBUTIONS.get(library, library)
    spec = None
    with contextlib.suppress(ValueError):  # the module was created without a file
        spec = importlib.util.find_spec(library)
    if spec is not None:  # another version is installed, or another file of this name was found
        return (
            f"{library} ({spec.origin}) has no module {module}: pip install --upgrade"
            f" {distribution}"
        )
    extras = _extras_of(distribution)
    if "" in extras or not extra_name:
        name = library if library == distribution else f"{library} (the package {distribution})"
        return f"{name} is not installed, and gpulab needs it: pip install gpulab"
    extra_to_install = extra_name if extra_name in extras or not extras else extras[0]
    return f"{library} is not installed: pip install 'gpulab[{extra_to_install}]'"


def _extras_of(distribution: str) -> list[str]:
    """Return the extras of gpulab that install a library; "" stands for gpulab without extras.

    Examples:
        >>> _extras_of("pandas"), _extras_of("pillow"), _extras_of("no-such-library")
        ([''], ['notebooks'], [])
    """
    try:
        requirements = importlib.metadata.requires(__package__) or []
    except importlib.metadata.PackageNotFoundError:  # gpulab's folder was copied, not installed
        requirements = []
    extras = []
    for requirement in requirements:
        named, _, condition = requirement.partition(";")
        required = re.match(r"[\w.-]+", named)
        if required and _normal_name(required[0]) == _normal_name(distribution):
            of_extra = re.search(r"extra\s*==\s*[\"']([\w-]+)", condition)
            extras.append(of_extra[1] if of_extra else "")
    return extras


def _normal_name(distribution: str) -> str:
    """Return the normalised name of a distribution, which ignores case and separators."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def describe_error(error: BaseException, file: str | Path = "") -> str:
    """Return the last line of an error's traceback, with the line of `file` that led to it.

    Examples:
        >>> try:
        ...     {}["loss"]
        ... except KeyError as error:
        ...     describe_error(error).partition(" (")[0]
        "KeyError: 'loss'"
    """
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame for frame in frames if file and Path(frame.filename).resolve() == Path(file).resolve()
    ] or frames
    location = (
        f" ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})" if user_frames else ""
    )
    return traceback.format_exception_only(error)[-1].strip() + location
