"""The errors that gpulab raises on purpose. Each message names the offending value and what to do."""

from typing import Any


class GpulabError(Exception):
    """Something could not be done; the message says what, with the value, and what to do."""


class UsageError(GpulabError, ValueError):
    """The request itself was malformed: an unknown option, a size that does not divide."""


class DataError(GpulabError):
    """An input file or folder is missing, damaged or of the wrong kind; the message names it."""


class UnsupportedError(GpulabError):
    """A computation that one way cannot follow; another way may."""


class OverwrittenError(GpulabError):
    """A tensor that autograd saved was overwritten before it was used; `finding` says which, where and by what."""

    def __init__(self, finding: Any) -> None:
        super().__init__(str(finding))
        self.finding = finding


class OverwrittenWarning(UserWarning):
    """The same as a warning, for `guard(on="warn")`."""
