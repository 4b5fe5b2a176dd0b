"""What files hold, known as build tools know it: a digest, kept until a file's size, times or inode are others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gpulab import files
from gpulab.errors import DataError, GpulabError

RACY = 2 * 10**9  # ns: a file written since may be written again without another time, as Git's documents say
MOST_ENTRIES, MOST_BYTES = 4000, 1 << 20  # of the cache


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
    """The SHA-256 (hex) of what the files hold, in their order, read only if it is not in the cache of digests.

    Args:
        stamps: The files.
        named: Digest their names, too, and where each ends.

    Returns:
        The digest: 64 characters.

    Raises:
        DataError: Where a file cannot be read, or is not what its stamp says.
    """
    asked = [named, *([os.path.realpath(file), *stamped] for file, stamped in stamps.items())]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    cache = _cache()
    known = _read(cache)
    check_unchanged(stamps)
    if key in known:
        return known[key]
    whole = hashlib.sha256()
    for file in stamps:
        with _reading(file), open(file, "rb") as stream:
            if named:
                whole.update(json.dumps(file.name).encode() + hashlib.file_digest(stream, "sha256").digest())
            else:
                while part := stream.read(1 << 20):
                    whole.update(part)
    check_unchanged(stamps)
    newest = max(max(stamped.written, stamped.changed) for stamped in stamps.values())
    if cache and newest < time.time_ns() - RACY:
        _write(cache, {**_read(cache), key: whole.hexdigest()})  # what others wrote meanwhile stays
    return whole.hexdigest()


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None


def _cache() -> Path | None:
    """The file of digests, in the user's cache folder; `None` where there is no home."""
    file = files.cache_folder() / "digests.json"
    return file if file.is_absolute() else None


def _read(cache: Path | None) -> dict[str, str]:
    """What is known; of a cache that is missing or damaged, nothing."""
    with contextlib.suppress(DataError, AttributeError, TypeError, KeyError):
        if cache:
            content = files.read(cache, MOST_BYTES)
            files.check_seal(cache, content)
            known = files.read_json(cache, content)["digests"]
            return {key: value for key, value in known.items() if re.fullmatch("[0-9a-f]{64}", value)}
    return {}


def _write(cache: Path, known: dict[str, str]) -> None:
    content = {"digests": dict(list(known.items())[-MOST_ENTRIES:]), "checksum": files.UNSEALED}
    with contextlib.suppress(GpulabError):  # a home that cannot be written to
        files.write(cache, files.seal(json.dumps(content, indent=0).encode()))
