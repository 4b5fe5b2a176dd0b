"""What files hold: a digest, which a process keeps until a file's size, times or inode are others."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpulab.errors import DataError

RACY = 2 * 10**9  # ns: a file written since may be written again without another time, as Git's documents say
KNOWN: dict[tuple[Any, ...], str] = {}  # the digests of files as their stamps say they are


class Stamp(NamedTuple):
    """What tells that a file is another one, without reading it; `changed`, its inode's time, on chmod, too."""

    size: int
    written: int
    inode: int
    changed: int


Stamps = Mapping[Path, Stamp]


def stamp(file: Path) -> Stamp:
    """The size, the time of writing (ns), the inode and its time (ns) of a file; `DataError` where it is missing."""
    try:
        found = file.stat()
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise DataError(f"{file}: {'no such file' if missing else f'cannot be read: {error}'}") from None
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


def check_unchanged(stamps: Stamps) -> None:
    """Raise `DataError`, naming the file, if one has another size, time or inode than its stamp."""
    for file, before in stamps.items():
        if stamp(file)[:3] != before[:3]:
            raise DataError(f"{file}: was changed while it was read; run again")


def digest(stamps: Stamps, named: bool = False) -> str:
    """The SHA-256 (hex) of what the files hold, in their order; a process reads the same files once.

    Args:
        stamps: The files.
        named: Digest their names, too, and where each ends.

    Returns:
        The digest: 64 characters.

    Raises:
        DataError: Where a file cannot be read, or is not what its stamp says.
    """
    check_unchanged(stamps)
    key = (named, *stamps.items())
    if key in KNOWN:
        return KNOWN[key]
    content = hashlib.sha256()
    for file in stamps:
        try:
            with open(file, "rb") as stream:
                if named:
                    content.update(json.dumps(file.name).encode() + hashlib.file_digest(stream, "sha256").digest())
                else:
                    while block := stream.read(1 << 20):
                        content.update(block)
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None
    check_unchanged(stamps)
    newest = max(max(stamped.written, stamped.changed) for stamped in stamps.values())
    if newest < time.time_ns() - RACY:
        KNOWN[key] = content.hexdigest()
    return content.hexdigest()
