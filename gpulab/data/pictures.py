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
ORIENTATION = 0x0112  # the number of this note in Exif
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


def upright_size(image: PIL.Image.Image) -> tuple[int, int]:
    """(width, height) of an image as it is to be shown: a camera notes (in Exif) how it was held."""
    # Pillow says the size of a TIFF so already. Of a PNG without a note before its pixels it would read all of them.
    noted = image.format != "TIFF" and "exif" in image.info
    sideways = noted and image.getexif().get(ORIENTATION, 1) > 4
    return (image.height, image.width) if sideways else image.size


def fit(image: PIL.Image.Image, size: tuple[int, int], grey: bool) -> npt.NDArray[np.uint8]:
    """Cut the middle out in the shape of `size` and scale it, as it is to be shown: (C, H, W) bytes."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
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
