"""JPEG decoders that work on this machine, for notebook 09."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

Bytes = npt.NDArray[np.uint8]
Decoder = Callable[[bytes], Bytes]


def encode_jpeg(frame: Bytes, quality: int = 75, colours: str = "4:2:0") -> bytes:
    """Encode an RGB frame (3, H, W) as JPEG with Pillow.

    `colours` is the chroma subsampling: `4:4:4` keeps the colours at full size, and `4:2:0` halves
    their width and height.
    """
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0))).save(
        file, "JPEG", quality=quality, subsampling=colours
    )
    return file.getvalue()


def _pillow(file: bytes) -> Bytes:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).transpose(2, 0, 1)


def _torchvision(file: bytes, device: str = "cpu") -> Bytes:
    from torchvision.io import decode_jpeg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchCodec will replace it
        return (
            decode_jpeg(torch.frombuffer(bytearray(file), dtype=torch.uint8), device=device)
            .cpu()
            .numpy()
        )


def _nvjpeg(file: bytes) -> Bytes:
    if not torch.cuda.is_available():  # torchvision would print pages of C++ errors
        raise RuntimeError("no GPU")
    return _torchvision(file, "cuda")


def _av(file: bytes) -> Bytes:
    import av

    (frame,) = av.CodecContext.create("mjpeg", "r").decode(av.Packet(file))
    return np.asarray(frame.to_ndarray(format="rgb24"), np.uint8).transpose(2, 0, 1)


def jpeg_decoders() -> dict[str, Decoder]:
    """Find the available JPEG decoders, functions from a file to RGB bytes (3, H, W), by name.

    `av` is FFmpeg's decoder, through PyAV; `nvjpeg` is NVIDIA's, on the GPU. Each is tried once.

    >>> "pillow" in jpeg_decoders()
    True
    """
    probe = encode_jpeg(np.full((3, 16, 16), 128, np.uint8))
    known: dict[str, Decoder] = {
        "pillow": _pillow,
        "torchvision": _torchvision,
        "av": _av,
        "nvjpeg": _nvjpeg,
    }
    working: dict[str, Decoder] = {}
    for name, decode in known.items():
        # libraries that are missing or built without the decoder raise various errors
        with contextlib.suppress(Exception):
            decode(probe)
            working[name] = decode
    return working
