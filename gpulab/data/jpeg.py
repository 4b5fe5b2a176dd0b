"""JPEG decoders: the standard leaves the last bits to them, so the same file gives other pixels elsewhere.

ITU-T T.81 asks for an error of about one, not for exact bits, and leaves open how halved colours are enlarged.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.data import pictures
from gpulab.data.base import Bytes, Data, Sequence
from gpulab.errors import DataError, GpulabError, UsageError, extra, reason

if TYPE_CHECKING:
    import pandas as pd

SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")
CHANNELS = {1: ("grey",), 3: ("red", "green", "blue")}


@extra("notebooks")
def encode_jpeg(frame: Bytes, quality: int = 75, subsampling: str = "4:2:0") -> bytes:
    r"""Encode a frame as a JPEG file, by Pillow.

    Args:
        frame: An array (C, H, W) of bytes: grey with one channel, or RGB with three.
        quality: 1, the smallest file, to 100.
        subsampling: How colours are thinned out: `4:4:4` not at all, `4:2:2` by half across, `4:2:0` by half across and
            down. It does not matter for a grey frame.

    Returns:
        The content of the file, as bytes.

    Raises:
        UsageError: For another shape or type, quality or subsampling.
        GpulabError: Where Pillow is not installed.

    Examples:
        >>> import numpy as np
        >>> import gpulab as gl
        >>> gl.data.encode_jpeg(np.zeros((3, 16, 16), np.uint8))[:2]  # how every JPEG file begins
        b'\xff\xd8'

    References:
        ITU-T T.81, *Digital compression and coding of continuous-tone still images*.
    """
    from PIL import Image

    if not isinstance(quality, int) or not 1 <= quality <= 100:
        raise UsageError(f"quality={quality!r}: expected a whole number from 1 to 100")
    if subsampling not in SUBSAMPLINGS:
        raise UsageError(f"subsampling={subsampling!r}: expected one of {', '.join(SUBSAMPLINGS)}")
    if frame.dtype != np.uint8 or frame.ndim != 3 or len(frame) not in CHANNELS:
        raise UsageError(f"frame of shape {frame.shape} and type {frame.dtype}: expected (1 or 3, H, W) bytes")
    colour, file = len(frame) == 3, io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0) if colour else frame[0]))
    image.save(file, "JPEG", quality=quality, **({"subsampling": subsampling} if colour else {}))
    return file.getvalue()


@extra("notebooks")
def decode_jpeg(file: bytes, decoder: str = "pillow") -> Bytes:
    """Decode a JPEG file by one of several decoders, which may give different pixels.

    The standard asks for an error of about one step of 255, not for exact bits.

    Args:
        file: The content of the file.
        decoder: `pillow`, `torchvision`, `av` (FFmpeg, by PyAV) or `nvjpeg` (NVIDIA's, on the GPU).

    Returns:
        An array (C, H, W) of bytes, with one channel if the file is grey, else three, RGB.

    Raises:
        UsageError: For another decoder.
        GpulabError: For a decoder that cannot run on this machine.
        DataError: For a damaged file, or one of more than 2²⁷ pixels.

    Examples:
        >>> import numpy as np
        >>> import gpulab as gl
        >>> gl.data.decode_jpeg(gl.data.encode_jpeg(np.full((3, 8, 8), 200, np.uint8))).mean().item()
        200.0

    References:
        ITU-T T.81, *Digital compression and coding of continuous-tone still images*.
    """
    if decoder not in DECODERS:
        raise UsageError(f"decoder {decoder!r}: expected one of {', '.join(DECODERS)}")
    try:
        pictures.opened(io.BytesIO(file), ["JPEG"])  # none with too many pixels
        return DECODERS[decoder](file)
    except Exception as error:  # almost anything, at a broken file
        if decoder not in (available := available_decoders()):
            raise GpulabError(f"decoder {decoder!r} cannot run here; there are {', '.join(available)}") from None
        raise DataError(f"{decoder} cannot decode these {len(file)} bytes: {reason(error)}") from None


@functools.cache
def available_decoders() -> tuple[str, ...]:
    """List the JPEG decoders that work on this machine. Each is tried once, on a small picture.

    Returns:
        Some of the names `pillow`, `torchvision`, `av` and `nvjpeg`.

    Raises:
        GpulabError: Where Pillow, which encodes the picture, is not installed.

    Examples:
        >>> import gpulab as gl
        >>> "pillow" in gl.data.available_decoders()
        True
    """
    probe, names = encode_jpeg(np.full((3, 16, 16), 128, np.uint8)), []
    for name, decode in DECODERS.items():
        with contextlib.suppress(Exception):  # whatever a library says that is missing, or built without it
            decode(probe)
            names.append(name)
    return tuple(names)


def compare_decoders(frames: Bytes, quality: int = 75, subsampling: str = "4:2:0") -> pd.DataFrame:
    """Decode the same JPEG files by every decoder of this machine, and compare the pixels with Pillow's.

    Args:
        frames: An array (t, C, H, W) of bytes, grey or RGB. Pillow encodes each frame once.
        quality, subsampling: How the frames are encoded, as for `encode_jpeg`.

    Returns:
        A data frame with a row for each `decoder` and `channel` (`red`, `green`, `blue`; or `grey`). `pixels` is their
        number, `differ` the share that is not as Pillow's, and `mean` and `largest` are the mean and the largest
        absolute difference, in steps of a byte (0 to 255).

    Raises:
        UsageError: For frames, a quality or a subsampling that `encode_jpeg` refuses.
        GpulabError: Where Pillow is not installed.

    Examples:
        >>> import numpy as np
        >>> import gpulab as gl
        >>> gl.data.compare_decoders(np.zeros((1, 3, 16, 16), np.uint8)).largest.tolist()[:3]
        [0, 0, 0]
    """
    import pandas as pd

    files = [encode_jpeg(frame, quality, subsampling) for frame in frames]
    decoded = {name: np.stack([decode_jpeg(file, name) for file in files]) for name in available_decoders()}
    rows = []
    for name, pixels in decoded.items():
        differences = np.abs(pixels.astype(int) - decoded["pillow"]).swapaxes(0, 1)
        for channel, apart in zip(CHANNELS[frames.shape[1]], differences, strict=True):
            rows.append((name, channel, apart.size, float((apart > 0).mean()), float(apart.mean()), int(apart.max())))
    return pd.DataFrame(rows, columns=["decoder", "channel", "pixels", "differ", "mean", "largest"])


class Recompressed(Sequence):
    """Another sequence, each frame encoded as a JPEG file and decoded again by a decoder."""

    def __init__(self, inner: Data, quality: int = 75, subsampling: str = "4:2:0", decoder: str = "pillow") -> None:
        # What cannot be is told now.
        decode_jpeg(encode_jpeg(np.zeros((3, 8, 8), np.uint8), quality, subsampling), decoder)
        if not isinstance(inner, Sequence):
            raise UsageError(f"data 'jpeg:{inner.name}': expected a sequence of frames after jpeg:, such as jpeg:walk")
        super().__init__(f"jpeg:{inner.name}", inner.channels, inner.size, inner.frames, inner.held)
        self.inner, self.quality, self.subsampling, self.stamps = inner, quality, subsampling, inner.stamps
        self.decoder: str = decoder

    @property
    def content(self) -> str | None:
        """That of the inner data."""
        return self.inner.content

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """Frames `start` to `stop`, encoded and decoded as they are asked for."""
        for frame in self.inner.stream(start, stop):
            yield decode_jpeg(encode_jpeg(frame, self.quality, self.subsampling), self.decoder)

    def options(self) -> dict[str, Any]:
        """What makes the inner data, and how its frames are encoded."""
        return self.inner.options() | {"quality": self.quality, "subsampling": self.subsampling}


# --- the decoders ----------------------------------------------------------------------------------------


def _pillow(file: bytes) -> Bytes:
    with pictures.opened(io.BytesIO(file), ["JPEG"]) as image:
        return pictures.channels_first(np.asarray(image if image.mode == "L" else image.convert("RGB")))


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

    frames = av.CodecContext.create("mjpeg", "r").decode(av.Packet(file))
    if not frames:
        raise ValueError("no picture in them")
    grey = frames[0].format.name.startswith("gray")
    return pictures.channels_first(frames[0].to_ndarray(format="gray" if grey else "rgb24"))


Decoders = dict[str, Callable[[bytes], Bytes]]
DECODERS: Decoders = {"pillow": _pillow, "torchvision": _torchvision, "av": _av, "nvjpeg": _nvjpeg}
