"""Atomic writes; validated, size-limited reads.

What files, tensors and JSON documents hold has a hash, equal for equal content wherever it lies.

A *seal* is a checksum of the whole file inside it: any text of the file's own description may hold
`UNSEALED`, which `seal` replaces by the checksum of the content as it was until then. One way for
JSON, Parquet and safetensors alike.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from gpulab.errors import DataError, GpulabError

if TYPE_CHECKING:
    import pyarrow.parquet

# The content of a JSON document: dictionaries by text, lists, texts, numbers, booleans and None.
# How they are nested depends on the kind of document, and whoever reads one checks what it needs.
JSON = Any

PACKAGE = Path(__file__).parent
SEAL = b"sealed by xxh3 "
SEAL_DIGITS = 32
UNSEALED = SEAL.decode() + SEAL_DIGITS * "0"
MAX_FILE_BYTES = 1 << 32  # bytes that are read of a file, unless it is known to be smaller
MAX_COLUMN_VALUES = 1 << 28  # numbers in a column of a table
Stamp = tuple[int, int, int]  # shows that a file has changed, without reading it
Stamps = Mapping[Path, Stamp]
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)  # a disk, or what a user may have of it


# --- writing --------------------------------------------------------------------------------------


@contextlib.contextmanager
def convert_write_errors(target: str | Path) -> Iterator[None]:
    """Convert an `OSError` raised inside into a `GpulabError` with file, reason and remedy."""
    try:
        yield
    except OSError as error:
        space = "free some space and run the same command again"
        remedy = space if error.errno in DISK_FULL_ERRORS else "name another file or folder"
        raise GpulabError(
            f"{target}: cannot be written: {error.strerror or error}; {remedy}"
        ) from None


def write(file: str | Path, content: bytes) -> None:
    """Write a file whole or not at all; its folder is made if need be.

    Raises:
        GpulabError: Where it cannot be written, with what to do; the file is as it was.
    """
    file = Path(file)
    scratch = file.with_name(scratch_name())
    with convert_write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(scratch, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())  # a name on the disk must not come before its content
            os.replace(scratch, file)
        finally:
            scratch.unlink(missing_ok=True)


def scratch_name() -> str:
    """A name for a temporary file of this process."""
    return f".{uuid.uuid4().hex}.part"


def check_writable(file: str | Path) -> None:
    """Raise now what writing a file later would raise; nothing is left behind."""
    file = Path(file).absolute()
    with convert_write_errors(file):
        if file.exists() and not file.is_file():
            raise OSError(errno.EISDIR, "not a file, but a folder, a pipe or a device")
        scratch = next(folder for folder in file.parents if folder.exists()) / scratch_name()
        # Permissions are not enough: root has them all, and /proc accepts no files.
        scratch.touch()
        scratch.unlink()


# --- reading --------------------------------------------------------------------------------------


@contextlib.contextmanager
def convert_read_errors(file: str | Path, kind: str = "cannot be read") -> Iterator[None]:
    """Convert any error raised while reading `file` into a `DataError` that names it."""
    try:
        yield
    except Exception as error:
        # These errors do not come from the content of the file.
        if isinstance(error, GpulabError) or type(error) is MemoryError:
            raise
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error!s:.300}"
        raise DataError(f"{file}: {kind}: {reason}") from None


def status_of(file: str | Path) -> os.stat_result:
    """The status of a regular file; `DataError` if it is missing, a pipe or a device."""
    with convert_read_errors(file):
        status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):  # a pipe without a writer would be waited for
        raise DataError(f"{file}: cannot be read: not a file, but a folder, a pipe or a device")
    return status


def read(file: str | Path, max_size: int = MAX_FILE_BYTES) -> bytes:
    """The content of a regular file.

    Raises `DataError` for a pipe, a device, or more than `max_size` bytes.
    """
    size = status_of(file).st_size
    if size > max_size:
        raise DataError(f"{file}: cannot be read: it has {size:,} bytes, and may have {max_size:,}")
    with convert_read_errors(file), open(file, "rb") as stream:
        return stream.read()


def read_json(file: str | Path, content: bytes) -> JSON:
    """Parse the content of a JSON file; `DataError` if it is damaged."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: not whole JSON: {error}") from None


def check_table_size(
    file: str | Path, metadata: pyarrow.parquet.FileMetaData, max_size: int = MAX_COLUMN_VALUES
) -> None:
    """Raise `DataError` for a Parquet file that unpacks into more than gpulab ever writes."""
    for number in range(metadata.num_columns):
        chunks = [
            metadata.row_group(group).column(number) for group in range(metadata.num_row_groups)
        ]
        numbers = sum(chunk.num_values for chunk in chunks)
        if (
            numbers > max_size
            or sum(chunk.total_uncompressed_size for chunk in chunks) > 8 * max_size
        ):
            raise DataError(f"{file}: too large: more than {max_size} numbers in a column")


def find_shipped(file: str | Path) -> Path:
    """A file; without a checkout, the copy of an example file in the installed package."""
    folder, *subpath = Path(file).parts or (".",)
    copy = PACKAGE.joinpath("recorded", *subpath)
    if folder == "data" and copy.is_file() and not Path(file).exists():
        return copy
    return Path(file)


# --- seals ----------------------------------------------------------------------------------------


def seal(content: bytes) -> bytes:
    """The content with its checksum in place of its last `UNSEALED`."""
    start = content.rfind(SEAL) + len(SEAL)
    placeholder = content[start - len(SEAL) : start + SEAL_DIGITS]
    assert placeholder == UNSEALED.encode(), "what is to be sealed says UNSEALED last"
    return (
        content[:start]
        + xxhash.xxh3_128_hexdigest(content).encode()
        + content[start + SEAL_DIGITS :]
    )


def check_seal(file: str | Path, content: bytes) -> None:
    """Raise `DataError`, naming the file, unless its content matches its seal."""
    start = content.rfind(SEAL) + len(SEAL)
    if start < len(SEAL):
        raise DataError(f"{file}: damaged: its checksum is missing")
    if seal(content[:start] + SEAL_DIGITS * b"0" + content[start + SEAL_DIGITS :]) != content:
        raise DataError(
            f"{file}: damaged: its checksum is that of another content (a flipped bit, or cut"
            " short?)"
        )


# --- their content --------------------------------------------------------------------------------


def digest(document: JSON) -> str:
    """The SHA-256 of a JSON document, independent of the order of its names."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def stamp(file: Path) -> Stamp:
    """The size, modification time (ns) and inode of a file; `DataError` if it is missing."""
    status = status_of(file)
    return status.st_size, status.st_mtime_ns, status.st_ino


def check_unchanged(stamps: Stamps) -> None:
    """Raise `DataError` if a file's size, time or inode differs from its stamp."""
    for file, expected_stamp in stamps.items():
        if stamp(file) != expected_stamp:
            raise DataError(f"{file}: was changed while it was read; run again")


def content_digest(stamps: Stamps) -> str:
    """The SHA-256 (hex) of a file, or of the names and contents of several files.

    A process reads them once.

    Raises:
        DataError: Where a file cannot be read, or is not what its stamp says.
    """
    check_unchanged(stamps)
    return _content_digest(tuple(stamps.items()))


@functools.lru_cache(maxsize=256)  # an experiment asks for its film once a run
def _content_digest(stamps: tuple[tuple[Path, Stamp], ...]) -> str:
    digests = []
    for file, _ in stamps:
        with convert_read_errors(file), open(file, "rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256"))
    check_unchanged(dict(stamps))
    if len(digests) == 1:
        return digests[0].hexdigest()
    named_digests = [
        json.dumps(file.name).encode() + d.digest()
        for (file, _), d in zip(stamps, digests, strict=True)
    ]
    return hashlib.sha256(b"".join(named_digests)).hexdigest()
