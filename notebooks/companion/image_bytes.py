"""How the bytes of an image become numbers, and a JPEG file becomes bytes: notebook 09."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

import gpulab as gl
from gpulab.plots.pictures import in_rows
from gpulab.report import Picture

Bytes = npt.NDArray[np.uint8]
Decoder = Callable[[bytes], Bytes]
FORMATS = (torch.float32, torch.float16, torch.bfloat16)


# --- bytes and numbers -----------------------------------------------------------------------------------


def numbers_of_bytes(pixels: Tensor, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Bytes (256,) as numbers from 0 to 1, in each of the ways in which programs convert images.

    >>> numbers_of_bytes(torch.tensor([0, 255], dtype=torch.uint8), "cpu", torch.float32)["x / 255"]
    tensor([0., 1.])
    """
    from torchvision import tv_tensors
    from torchvision.transforms.functional import to_tensor
    from torchvision.transforms.v2 import ToDtype

    on_device = pixels.to(device)
    image = tv_tensors.Image(on_device.view(1, 1, -1))
    return {
        "x / 255": on_device.to(dtype) / 255,
        "x * (1 / 255)": on_device.to(dtype) * (1 / 255),
        "x / 255 in float32, then rounded": (pixels.float() / 255).to(device, dtype),  # as a loader does, on the CPU
        "torchvision to_tensor": to_tensor(Image.fromarray(pixels[None].numpy())).flatten().to(device, dtype),
        "torchvision ToDtype(scale=True)": ToDtype(dtype, scale=True)(image).flatten().as_subclass(Tensor),
    }


def byte_round_trip(device: str = "cpu") -> pd.DataFrame:
    """Convert all 256 bytes to numbers under a setting and back: a row for each `way` and `format`.

    `returned` is how many bytes come back when the number is multiplied by 255 and rounded to the nearest;
    `as_division`, how many numbers have the bits of x / 255, computed on this machine's CPU in that format.

    >>> byte_round_trip().set_index(["way", "format"]).loc[("x / 255", "float32"), "returned"]
    np.int64(256)
    """
    pixels = torch.arange(256, dtype=torch.uint8)
    rows = []
    with gl.setting(device) as setting:
        for dtype in FORMATS:
            for way, numbers in numbers_of_bytes(pixels, setting.device, dtype).items():
                returned = (numbers * 255).round().to(torch.uint8).cpu() == pixels
                as_division = numbers.cpu() == pixels.to(dtype) / 255
                rows.append((way, str(dtype).removeprefix("torch."), int(returned.sum()), int(as_division.sum())))
    return pd.DataFrame(rows, columns=["way", "format", "returned", "as_division"])


# --- JPEG files ------------------------------------------------------------------------------------------


def encode_jpeg(frame: Bytes, quality: int = 75, colours: str = "4:2:0") -> bytes:
    """An RGB frame (3, H, W) of bytes as a JPEG file, by Pillow; `colours` says how they are thinned out.

    `4:4:4` not at all, `4:2:0` by half across and down.
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
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchCodec is to take its place
        return decode_jpeg(torch.frombuffer(bytearray(file), dtype=torch.uint8), device=device).cpu().numpy()


def _nvjpeg(file: bytes) -> Bytes:
    if not torch.cuda.is_available():  # asked all the same, torchvision prints pages from C++
        raise RuntimeError("no GPU")
    return _torchvision(file, "cuda")


def _av(file: bytes) -> Bytes:
    import av

    (frame,) = av.CodecContext.create("mjpeg", "r").decode(av.Packet(file))
    return np.asarray(frame.to_ndarray(format="rgb24"), np.uint8).transpose(2, 0, 1)


def jpeg_decoders() -> dict[str, Decoder]:
    """The JPEG decoders that work on this machine, each by its name: from a file to RGB bytes (3, H, W).

    `av` is FFmpeg's, by PyAV; `nvjpeg` NVIDIA's, on the GPU. Each is tried once.

    >>> "pillow" in jpeg_decoders()
    True
    """
    probe = encode_jpeg(np.full((3, 16, 16), 128, np.uint8))
    known: dict[str, Decoder] = {"pillow": _pillow, "torchvision": _torchvision, "av": _av, "nvjpeg": _nvjpeg}
    working: dict[str, Decoder] = {}
    for name, decode in known.items():
        with contextlib.suppress(Exception):  # whatever a library says that is missing, or built without it
            decode(probe)
            working[name] = decode
    return working


def decoded(frame: Bytes) -> Picture:
    """A frame (3, H, W) of bytes as each decoder makes it of the same JPEG file, and how far it is from the first."""
    decoders, file = jpeg_decoders(), encode_jpeg(frame)
    pictures = torch.from_numpy(np.stack([decode(file) for decode in decoders.values()])).float() / 255
    differences = (pictures - pictures[0]).abs()
    titles = [
        f"{name}\n{(difference > 0).float().mean():.0%} differ, by up to {255 * difference.max():.0f} of 255"
        for name, difference in zip(decoders, differences, strict=True)
    ]
    off = differences.amax(1, keepdim=True) / differences.max().clamp(min=1 / 255)
    rows = {"decoded": pictures, "difference": 1 - off}
    headline = (
        f"One JPEG file, {len(decoders)} decoders; below, the darker, the further from {next(iter(decoders))}'s pixels"
    )
    return in_rows(rows, titles, headline)
