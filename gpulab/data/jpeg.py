"""JPEG decoders: the standard leaves the last bits to them, so the same file gives other pixels elsewhere.

A decoder may round its inverse cosine transform in its own way (ITU-T T.81 asks for an error of about one,
not for exact bits), and how halved colours are enlarged again is left open altogether.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpulab.errors import DataError, GpulabError, UsageError

if TYPE_CHECKING:
    import pandas as pd

Bytes = npt.NDArray[np.uint8]

SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")
CHANNELS = {1: ("grey",), 3: ("red", "green", "blue")}


def encode_jpeg(frame: Bytes, quality: int = 75, subsampling: str = "4:2:0") -> bytes:
    r"""A frame (C, H, W) of bytes, grey or RGB, as a JPEG file, encoded by Pillow.

    `subsampling` says how the colours are thinned out: `4:4:4` not at all, `4:2:2` by half across, `4:2:0`
    both ways, as most cameras do. Raises `UsageError` for another shape, quality or subsampling.

    >>> encode_jpeg(np.zeros((3, 16, 16), np.uint8))[:2]
    b'\xff\xd8'
    """
    from PIL import Image

    check_jpeg(quality, subsampling)
    if frame.dtype != np.uint8 or frame.ndim != 3 or len(frame) not in CHANNELS:
        raise UsageError(f"frame of shape {frame.shape} and type {frame.dtype}: expected (1 or 3, H, W) bytes")
    pixels = frame.transpose(1, 2, 0)
    image = Image.fromarray(np.ascontiguousarray(pixels if len(frame) == 3 else pixels[..., 0]))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, **({"subsampling": subsampling} if len(frame) == 3 else {}))
    return file.getvalue()


def check_jpeg(quality: int, subsampling: str) -> None:
    """Raise `UsageError` unless Pillow can encode so."""
    if not isinstance(quality, int) or not 1 <= quality <= 100:
        raise UsageError(f"quality={quality!r}: expected a whole number from 1 to 100")
    if subsampling not in SUBSAMPLINGS:
        raise UsageError(f"subsampling={subsampling!r}: expected one of {', '.join(SUBSAMPLINGS)}")


def decode_jpeg(file: bytes, decoder: str = "pillow") -> Bytes:
    """The pixels (C, H, W) that a decoder makes of a JPEG file: one channel if it is grey, else three.

    `decoder` is `pillow`, `torchvision`, `av` (FFmpeg, by PyAV) or `nvjpeg` (NVIDIA's, on the GPU). Raises
    `UsageError` for another, `GpulabError` for one that this machine lacks, `DataError` for a damaged file.

    >>> decode_jpeg(encode_jpeg(np.full((3, 8, 8), 200, np.uint8))).mean().item()
    200.0
    """
    if decoder not in DECODERS:
        raise UsageError(f"decoder {decoder!r}: expected one of {', '.join(DECODERS)}")
    try:
        return DECODERS[decoder](file)
    except (OSError, SyntaxError, ValueError, RuntimeError) as error:  # PyAV's errors are among these
        if decoder not in available_decoders():
            raise GpulabError(
                f"decoder {decoder!r} cannot run here; there are {', '.join(available_decoders())}"
            ) from None
        reason = re.sub(r" <.*?>", "", str(error).splitlines()[0])
        raise DataError(f"{decoder} cannot decode these {len(file)} bytes: {reason}") from None


@functools.cache
def available_decoders() -> tuple[str, ...]:
    """The JPEG decoders that work on this machine.

    >>> "pillow" in available_decoders()
    True
    """
    probe = encode_jpeg(np.full((3, 16, 16), 128, np.uint8))

    def works(decode: Callable[[bytes], Bytes]) -> bool:
        try:
            return decode(probe).shape == (3, 16, 16)
        except (ImportError, OSError, RuntimeError, ValueError, AssertionError):
            return False

    return tuple(name for name, decode in DECODERS.items() if works(decode))


def compare_decoders(
    frames: Bytes, quality: int = 75, subsampling: str = "4:2:0", reference: str = "pillow"
) -> pd.DataFrame:
    """How every decoder here decodes the same JPEG files: a row for each decoder and channel.

    `frames` (t, C, H, W) are encoded by Pillow once. Against the `reference` decoder: `differ`, the share of
    pixels with another value; `mean` and `largest`, the difference in steps of 255 over all pixels;
    `decoder`, `channel` and `pixels`.

    >>> compare_decoders(np.zeros((1, 3, 16, 16), np.uint8)).largest.tolist()[:3]
    [0, 0, 0]
    """
    import pandas as pd

    files = [encode_jpeg(frame, quality, subsampling) for frame in frames]
    decoded = {name: np.stack([decode_jpeg(file, name) for file in files]) for name in available_decoders()}
    if reference not in decoded:
        raise UsageError(f"reference {reference!r}: expected one of {', '.join(decoded)}")
    rows = []
    for name, pixels in decoded.items():
        apart = np.abs(pixels.astype(int) - decoded[reference])
        for number, channel in enumerate(CHANNELS[frames.shape[1]]):
            some = apart[:, number]
            rows.append(
                {
                    "decoder": name,
                    "channel": channel,
                    "pixels": some.size,
                    "differ": float((some > 0).mean()),
                    "mean": float(some.mean()),
                    "largest": int(some.max()),
                }
            )
    return pd.DataFrame(rows)


# --- the decoders ----------------------------------------------------------------------------------------


def _pillow(file: bytes) -> Bytes:
    from PIL import Image

    with Image.open(io.BytesIO(file), formats=["JPEG"]) as image:
        pixels = np.asarray(image if image.mode == "L" else image.convert("RGB"))
    return np.ascontiguousarray(np.atleast_3d(pixels).transpose(2, 0, 1))


def _torchvision(file: bytes, device: str = "cpu") -> Bytes:
    import torch
    from torchvision.io import decode_jpeg as decode

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchCodec is to take its place
        return decode(torch.frombuffer(bytearray(file), dtype=torch.uint8), device=device).cpu().numpy()


def _nvjpeg(file: bytes) -> Bytes:
    import torch

    if not torch.cuda.is_available():  # asked all the same, torchvision prints pages from C++
        raise RuntimeError("no GPU")
    return _torchvision(file, "cuda")


def _av(file: bytes) -> Bytes:
    import av

    found = av.CodecContext.create("mjpeg", "r").decode(av.Packet(file))
    if not found:
        raise ValueError("no picture in them")
    frame = found[0]
    if frame.format.name.startswith("gray"):
        return frame.to_ndarray(format="gray")[None].astype(np.uint8)
    return np.ascontiguousarray(frame.to_ndarray(format="rgb24").transpose(2, 0, 1), np.uint8)


DECODERS: dict[str, Callable[[bytes], Bytes]] = {
    "pillow": _pillow,
    "torchvision": _torchvision,
    "av": _av,
    "nvjpeg": _nvjpeg,
}
