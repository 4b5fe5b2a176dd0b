"""Images, opened by the decoders that are meant and no other, and none that would fill the memory."""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING

from gpulab.data.films import MOST_PIXELS

if TYPE_CHECKING:
    import PIL.Image

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")  # EPS would start Ghostscript


def opened(content: bytes, formats: Collection[str] = FORMATS) -> PIL.Image.Image:
    """An image whose header is read, and its pixels not yet.

    Raises:
        ValueError: For one of more than `MOST_PIXELS`; and whatever Pillow raises for what is no image.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow's own bound
        try:
            image = Image.open(io.BytesIO(content), formats=list(formats))
        except Image.DecompressionBombError as error:
            raise ValueError(str(error)) from None
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"it has {image.width:,}×{image.height:,} pixels, and may have {MOST_PIXELS:,}")
    return image
