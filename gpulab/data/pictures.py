"""Images, opened by the decoders that are meant and no other, and none that would fill the memory."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import PIL.Image

MOST_PIXELS = 1 << 27  # of a frame or an image
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")  # EPS would start Ghostscript


def opened(file: Path | IO[bytes], formats: Collection[str] = FORMATS) -> PIL.Image.Image:
    """An image whose header is read, and its pixels not yet; `ValueError` for one of more than `MOST_PIXELS`."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow's own bound
        image = Image.open(file, formats=list(formats))
    if image.width * image.height > MOST_PIXELS:
        image.close()
        raise ValueError(f"it has {image.width:,}×{image.height:,} pixels, and may have {MOST_PIXELS:,}")
    return image


def fit(image: PIL.Image.Image, size: tuple[int, int], grey: bool) -> npt.NDArray[np.uint8]:
    """Cut the middle out in the shape of `size` and scale it: (C, H, W) bytes."""
    from PIL import Image

    scale = min(image.width / size[1], image.height / size[0])
    width, height = size[1] * scale, size[0] * scale
    left, top = (image.width - width) / 2, (image.height - height) / 2
    if image.mode.startswith("I;16"):  # Pillow would cut 16 bits off at 255
        image = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    box = (left, top, left + width, top + height)
    image = image.convert("L" if grey else "RGB").resize(size[::-1], Image.Resampling.BILINEAR, box=box)
    return channels_first(np.asarray(image))


def channels_first(pixels: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Pixels (H, W) or (H, W, C) as (C, H, W)."""
    return np.ascontiguousarray(np.atleast_3d(pixels).transpose(2, 0, 1))
