"""Tensors in sealed safetensors files, with notes as JSON in the header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import files
from gpulab.store import recorded

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]  # by name, such as the weights of a model


def write_tensors(file: Path, tensors: Tensors, notes: dict[str, Any]) -> None:
    """Write tensors atomically as a safetensors file, with JSON notes and a seal."""
    from safetensors.torch import save

    # safetensors refuses tensors that share memory, so each is cloned.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    header = {
        "gpulab": json.dumps({"format": recorded.FORMAT_VERSION, **notes}),
        "seal": files.UNSEALED,
    }
    files.write(file, files.seal(save(copies, header)))


def read_tensors(file: Path) -> tuple[Tensors, dict[str, Any]]:
    """Read the tensors and the notes of a file written by `write_tensors`.

    Raises:
        DataError: If the file is damaged or foreign.
    """
    from safetensors.torch import load

    content = files.read(file)
    with files.convert_read_errors(file, "not a file of tensors"):
        # The file begins with the length of the header in 8 bytes, followed by the header as JSON.
        header_length = int.from_bytes(content[:8], "little")
        header = files.read_json(file, content[8 : 8 + header_length])
        document = files.read_json(file, header["__metadata__"]["gpulab"].encode())
        return load(content), recorded.check_document(file, document, content)
