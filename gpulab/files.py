"""Atomic writes, validated and size-limited reads, checksums and content hashes.

A *seal* is a checksum of a whole file that is stored inside the file. The writer puts the
placeholder `UNSEALED` into the file's metadata, and `seal` replaces it by the checksum of the
content with the placeholder. This works for JSON, Parquet and safetensors alike.
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

# The content of a JSON document: dictionaries, lists, texts, numbers, Booleans and None. The
# nesting depends on the kind of document, so the code that reads one checks what it needs.
JSON = Any

PACKAGE = Path(__file__).parent
SEAL = b"sealed by xxh3 "
SEAL_DIGITS = 32
UNSEALED = SEAL.decode() + SEAL_DIGITS * "0"
MAX_FILE_BYTES = 1 << 32  # the default size limit of a file that is read
MAX_COLUMN_VALUES = 1 << 28  # the default limit of the numbers in a column of a table
Stamp = tuple[int, int, int]  # size, time and inode, which show that a file has changed
Stamps = Mapping[Path, Stamp]
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)  # the disk, or the quota of the user, is full


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
    """Write a file atomically; create its folder if necessary.

    Raises:
        GpulabError: If the file cannot be written. An existing file is then unchanged.
    """
    file = Path(file)
    scratch = file.with_name(scratch_name())
    with convert_write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(scratch, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())  # the content must be on the disk before it is renamed
            os.replace(scratch, file)
        finally:
            scratch.unlink(missing_ok=True)


def scratch_name() -> str:
    """Return a unique name for a temporary file."""
    return f".{uuid.uuid4().hex}.part"


def check_writable(file: str | Path) -> None:
    """Raise the `GpulabError` that writing a file would raise, without writing it.

    A temporary file is created in the folder, or the nearest existing one, and removed again.
    """
    file = Path(file).absolute()
    with convert_write_errors(file):
        if file.exists() and not file.is_file():
            raise OSError(errno.EISDIR, "it is a folder, a pipe or a device, not a regular file")
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
        # These errors are not caused by the content of the file.
        if isinstance(error, GpulabError) or type(error) is MemoryError:
            raise
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error!s:.300}"
        raise DataError(f"{file}: {kind}: {reason}") from None


def check_searchable(folder: str | Path) -> None:
    """Raise `DataError` unless this process may list a folder and open the files in it."""
    with convert_read_errors(folder):
        with os.scandir(folder):
            pass
        os.lstat(os.path.join(folder, os.curdir))


def status_of(file: str | Path) -> os.stat_result:
    """Return the status of a regular file; `DataError` if it is missing or not a regular file."""
    with convert_read_errors(file):
        status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):  # reading a pipe without a writer would never return
        raise DataError(
            f"{file}: cannot be read: it is a folder, a pipe or a device, not a regular file"
        )
    return status


def read(file: str | Path, max_size: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        DataError: If the file cannot be read, is not a regular file, or is larger than `max_size`
            bytes.
    """
    size = status_of(file).st_size
    if size > max_size:
        raise DataError(f"{file}: cannot be read: it has {size:,} bytes; the limit is {max_size:,}")
    with convert_read_errors(file), open(file, "rb") as stream:
        return stream.read()


def read_json(file: str | Path, content: bytes) -> JSON:
    """Parse the content of a JSON file; `DataError` if it is damaged."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: incomplete or invalid JSON: {error}") from None


def check_table_size(
    file: str | Path, metadata: pyarrow.parquet.FileMetaData, max_size: int = MAX_COLUMN_VALUES
) -> None:
    """Raise `DataError` for a Parquet file whose columns are too large when uncompressed.

    A column may have at most `max_size` numbers and 8 · `max_size` bytes.
    """
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
    """Return the path of a file, or of its copy in the installed package.

    The copy is used for example files in `data/` that do not exist, for instance without a
    checkout.
    """
    folder, *subpath = Path(file).parts or (".",)
    copy = PACKAGE.joinpath("recorded", *subpath)
    if folder == "data" and copy.is_file() and not Path(file).exists():
        return copy
    return Path(file)


# --- seals ----------------------------------------------------------------------------------------


def seal(content: bytes) -> bytes:
    """Return the content, with the last `UNSEALED` in it replaced by the content's checksum."""
    start = content.rfind(SEAL) + len(SEAL)
    placeholder = content[start - len(SEAL) : start + SEAL_DIGITS]
    assert placeholder == UNSEALED.encode(), "the last seal must be UNSEALED"
    return (
        content[:start]
        + xxhash.xxh3_128_hexdigest(content).encode()
        + content[start + SEAL_DIGITS :]
    )


def check_seal(file: str | Path, content: bytes) -> None:
    """Raise `DataError`, naming the file, unless its content matches its seal."""
    start = content.rfind(SEAL) + len(SEAL)
    if start < len(SEAL):  # `rfind` returned -1: there is no seal
        raise DataError(f"{file}: damaged: its checksum is missing")
    if seal(content[:start] + SEAL_DIGITS * b"0" + content[start + SEAL_DIGITS :]) != content:
        raise DataError(
            f"{file}: damaged: its checksum does not match its content (was a bit flipped, or"
            " the file cut short?)"
        )


# --- content hashes -------------------------------------------------------------------------------


def digest(document: JSON) -> str:
    """Return the SHA-256 of a JSON document, independently of the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def stamp(file: Path) -> Stamp:
    """Return size, modification time (ns) and inode of a file; `DataError` if it is missing."""
    status = status_of(file)
    return status.st_size, status.st_mtime_ns, status.st_ino


def check_unchanged(stamps: Stamps) -> None:
    """Raise `DataError` if a file's size, time or inode differs from its stamp."""
    for file, expected_stamp in stamps.items():
        if stamp(file) != expected_stamp:
            raise DataError(f"{file}: was changed while it was being read; run again")


def content_digest(stamps: Stamps) -> str:
    """Return the SHA-256 (hex) of a file, or of the names and contents of several files.

    The result is cached by the stamps, so unchanged files are read only once in a process.

    Raises:
        DataError: If a file cannot be read, or differs from its stamp.
    """
    check_unchanged(stamps)
    return _content_digest(tuple(stamps.items()))


@functools.lru_cache(maxsize=256)  # every run of an experiment needs the digest of its film
def _content_digest(stamps: tuple[tuple[Path, Stamp], ...]) -> str:
    """Compute the digest for `content_digest`, and check the stamps again after reading."""
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
