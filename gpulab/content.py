"""What files, tensors and JSON documents hold, as a hash: equal for equal content, wherever it lies."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import files
from gpulab.errors import DataError

if TYPE_CHECKING:
    import torch

Stamp = tuple[int, int, int]  # what tells that a file is another one, without reading it
Stamps = Mapping[Path, Stamp]


def digest(document: Any) -> str:
    """The SHA-256 of a JSON document, whatever the order of its names."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def plain(value: Any) -> str:
    """A value as JSON; what JSON has not goes by its name, or by how it is written unless that is an address."""

    def as_text(item: Any) -> str:
        text = repr(item)
        return getattr(item, "__qualname__", type(item).__qualname__ if " at 0x" in text else text)

    return json.dumps(value, default=as_text, sort_keys=True, skipkeys=True)


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 of weights by name: equal for equal bits."""
    import torch

    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def stamp(file: Path) -> Stamp:
    """The size, the time of writing (ns) and the inode of a file; `DataError` where it is missing, or no file."""
    status = files.status_of(file)
    return status.st_size, status.st_mtime_ns, status.st_ino


def check_unchanged(stamps: Stamps) -> None:
    """Raise `DataError`, naming the file, if one has another size, time or inode than its stamp."""
    for file, before in stamps.items():
        if stamp(file) != before:
            raise DataError(f"{file}: was changed while it was read; run again")


def content_of(stamps: Stamps) -> str:
    """The SHA-256 (hex) of what a file holds, or of the names and contents of several; a process reads them once.

    Raises:
        DataError: Where a file cannot be read, or is not what its stamp says.
    """
    check_unchanged(stamps)
    return _content_of(tuple(stamps.items()))


@functools.lru_cache(maxsize=256)  # an experiment asks for its film once a run
def _content_of(stamps: tuple[tuple[Path, Stamp], ...]) -> str:
    digests = []
    for file, _ in stamps:
        with files.reading(file), open(file, "rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256"))
    check_unchanged(dict(stamps))
    if len(digests) == 1:
        return digests[0].hexdigest()
    named = [json.dumps(file.name).encode() + d.digest() for (file, _), d in zip(stamps, digests, strict=True)]
    return hashlib.sha256(b"".join(named)).hexdigest()
