"""What makes a run this run: a name that depends on what was run, on which content, and on nothing else."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import stat
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import files
from gpulab.errors import DataError

if TYPE_CHECKING:
    import torch


# --- what a run is called --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """What makes a run this run.

    Attributes:
        id: Its name, which depends on what was run, on what, and on nothing else.
        record: What is recorded of it from the beginning, `id` included.
        unknown: What cannot be told from something else of its name: such a run is never taken for another.
    """

    id: str
    record: dict[str, Any]
    unknown: tuple[str, ...] = ()


def identified(
    identity: dict[str, Any],
    machine_passport: Mapping[str, Any],
    digests: Mapping[str, str] | None = None,
    unknown: tuple[str, ...] = (),
) -> Identity:
    """An identity with its id, which is another on another chip or torch.

    `digests` has those of what names in the identity stand for, which are recorded, too.
    """
    digests = {name: digest for name, digest in (digests or {}).items() if digest}
    named = {**identity, "configuration": of_content(identity["configuration"], digests), **digests}
    named["chip"] = (
        machine_passport["cpu"]["model"] if identity["setting"].startswith("cpu") else machine_passport["gpus"]
    )
    named |= {key: machine_passport["software"][key] for key in ("torch", "gpulab")}
    if unknown:
        named["unknown"] = uuid.uuid4().hex
    name = run_id(named)
    return Identity(name, {"id": name, **identity, **digests}, unknown)


def run_id(identity: dict[str, Any]) -> str:
    """A name for a run that depends on this and on nothing else."""
    words = (identity["experiment"], identity["profile"], identity["setting"], f"seed{identity['seed']}")
    # A file may have no longer name than 255 bytes on most systems.
    short = "-".join(re.sub(r"[^a-z0-9.]+", "_", str(word).lower()) for word in words)[:200]
    return f"{short}-{digest(identity)[:10]}"


def of_content(configuration: dict[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which a film or a folder of frames goes by its content instead of by its place."""
    by_path = re.match(r"(video|frames):", configuration.get("data", ""))
    if not record.get("content") or not by_path:
        return configuration
    return {**configuration, "data": by_path[0] + record["content"]}


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
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(bytes_of(tensor))
    return sha.hexdigest()


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor, for a digest."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# --- what files hold --------------------------------------------------------------------------------

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
    named = [
        json.dumps(file.name).encode() + file_digest.digest()
        for (file, _), file_digest in zip(stamps, digests, strict=True)
    ]
    return hashlib.sha256(b"".join(named)).hexdigest()
