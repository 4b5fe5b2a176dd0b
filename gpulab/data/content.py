"""What files hold: a digest, which a process keeps until a file's size, time or inode is another."""

from __future__ import annotations

import functools
import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path

from gpulab.errors import DataError

Stamp = tuple[int, int, int]  # what tells that a file is another one, without reading it
Stamps = Mapping[Path, Stamp]


def stamp(file: Path) -> Stamp:
    """The size, the time of writing (ns) and the inode of a file; `DataError` where it is missing, or no file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        raise DataError(f"{file}: no such file") from None
    except (OSError, ValueError) as error:  # too long a name, or one with a NUL in it
        raise DataError(f"{file}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise DataError(f"{file}: cannot be read: not a file, but {kind}")
    return status.st_size, status.st_mtime_ns, status.st_ino


def check_unchanged(stamps: Stamps) -> None:
    """Raise `DataError`, naming the file, if one has another size, time or inode than its stamp."""
    for file, before in stamps.items():
        if stamp(file) != before:
            raise DataError(f"{file}: was changed while it was read; run again")


def digest(stamps: Stamps, named: bool = False) -> str:
    """The SHA-256 (hex) of what the files hold, in their order; a process reads the same files once.

    Args:
        stamps: The files.
        named: Digest their names, too, and where each ends.

    Raises:
        DataError: Where a file cannot be read, or is not what its stamp says.
    """
    check_unchanged(stamps)
    return _digest(tuple(stamps.items()), named)


@functools.lru_cache(maxsize=256)  # an experiment asks for its film once a run
def _digest(stamps: tuple[tuple[Path, Stamp], ...], named: bool) -> str:
    content = hashlib.sha256()
    for file, _ in stamps:
        try:
            with open(file, "rb") as stream:
                if named:
                    content.update(json.dumps(file.name).encode() + hashlib.file_digest(stream, "sha256").digest())
                else:
                    while block := stream.read(1 << 20):
                        content.update(block)
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None
    check_unchanged(dict(stamps))
    return content.hexdigest()
