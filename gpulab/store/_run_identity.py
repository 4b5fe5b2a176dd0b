"""The identity of a run: an id that depends only on what was run and on which content."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gpulab.files import digest

if TYPE_CHECKING:
    import torch


class Identity(NamedTuple):
    """The values that identify a run.

    Attributes:
        id: The name of the run, which depends only on the request, the chip and the software.
        record: The part of the run's record that is known from the beginning, including the `id`.
    """

    id: str
    record: dict[str, Any]


def identify_run(
    requested: dict[str, Any], passport: Mapping[str, Any], contents: Mapping[str, str]
) -> Identity:
    """Compute the identity of a requested run.

    The identity also depends on the chip and on the versions of torch and gpulab.

    Args:
        requested: The setting, the seed, the configuration and so on.
        passport: The passport of the machine.
        contents: The digests of the code and the files that the request refers to. They are also
            recorded.
    """
    contents = {name: content for name, content in contents.items() if content}
    # The id depends on the content of a film, wherever it is stored. The record names its path.
    configuration = replace_path_by_content(requested["configuration"], contents)
    on_cpu = requested["setting"].startswith("cpu")
    identifying = {
        **requested,
        "configuration": configuration,
        **contents,
        "chip": passport["cpu"]["model"] if on_cpu else passport["gpus"],
        "torch": passport["software"]["torch"],
        "gpulab": passport["software"]["gpulab"],
    }
    identifier = run_id(identifying)
    return Identity(identifier, {"id": identifier, **requested, **contents})


def run_id(identity: dict[str, Any]) -> str:
    """Compute the id of a run: a readable description and a digest of these values."""
    words = (
        identity["experiment"],
        identity["profile"],
        identity["setting"],
        f"seed{identity['seed']}",
    )
    # Most file systems allow names of at most 255 bytes.
    description = "-".join(re.sub(r"[^a-z0-9.]+", "_", str(word).lower()) for word in words)[:200]
    return f"{description}-{digest(identity)[:10]}"


def replace_path_by_content(
    configuration: dict[str, Any], record: Mapping[str, Any]
) -> dict[str, Any]:
    """Replace the path of a film or a folder of frames in a configuration by its content hash.

    >>> replace_path_by_content({"data": "video:walk.mp4", "seed": 0}, {"content": "1c9a"})
    {'data': 'video:1c9a', 'seed': 0}
    """
    by_path = re.match(r"(video|frames):", configuration.get("data", ""))
    if not record.get("content") or not by_path:
        return configuration
    return {**configuration, "data": by_path[0] + record["content"]}


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Compute the SHA-256 (hex) of weights and their names; it is equal for equal bits."""
    import torch

    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        hasher.update(name.encode())
        hasher.update(content.numpy().tobytes())
    return hasher.hexdigest()
