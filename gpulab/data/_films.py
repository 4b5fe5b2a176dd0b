"""Films, as PyAV (FFmpeg) reads them, and folders of images, as sequences of frames."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpulab.data._base import HELD_OUT, Bytes, Sequence, check_folder
from gpulab.errors import DataError
from gpulab.files import Stamp, Stamps, convert_read_errors, stamp

if TYPE_CHECKING:
    import av
    import av.container
    import PIL.Image

MAX_PIXELS = 1 << 27  # the largest number of pixels of a frame or an image
EXIF_ORIENTATION = 0x0112  # the number of the tag Orientation in Exif
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")  # EPS would start Ghostscript
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"}
# Formats such as playlists and lists of images are left out, because their content can name further
# files or addresses, which would be opened.
VIDEO_FORMATS = (
    "asf,avi,dv,flv,gif,h264,hevc,m4v,matroska,mjpeg,mov,mpeg,mpegts,mpegvideo,mxf,ogg,wav,"
    "yuv4mpegpipe"
)
NOT_A_VIDEO = "not a video that can be read"
DEMUXER_OPTIONS = {"protocol_whitelist": "file", "format_whitelist": VIDEO_FORMATS}
GREY_REMEDY = "use grey=True (--option grey=true) to read one channel"
ALPHA_NOT_READ = (
    "which is not read; put a background behind the frames and save the film without transparency"
)
TRANSPARENT = "has transparent pixels, and their background is unknown;"
TRANSPARENT_FILM = (
    f"{TRANSPARENT} put a background behind the frames and save the film without transparency"
)
TRANSPARENT_IMAGE = (
    f"{TRANSPARENT} save it with a background, which Pillow adds by"
    " Image.alpha_composite(Image.new('RGBA', image.size, 'white'),"
    " image.convert('RGBA')).convert('RGB')"
)
SIXTEEN_BITS = {"I;16", "I;16L", "I;16B", "I;16N"}  # Pillow's modes for 16-bit grey
GREY_MODES = {"1", "L", "LA", "La", "I", "F"}  # Pillow's modes for grey, up to a semicolon
UNREADABLE_MODES = {  # Pillow's modes whose numbers do not determine a colour on a screen
    "CMYK": (
        "holds amounts of ink (CMYK), whose colours on a screen depend on the printer; save it as"
        " RGB"
    ),
    "LAB": "holds colours as L*a*b*; save it as RGB",
    "HSV": "holds colours as hue, saturation and value; save it as RGB",
}
# Pillow's modes for 32-bit or signed integers, and for floating-point numbers.
WIDE_MODES = (
    "I",
    "F",
)
TIFF_PHOTOMETRIC = 262  # the number of the tag PhotometricInterpretation in TIFF
TIFF_WHITE_IS_ZERO = 0  # the value of that tag for negatives, in which 0 is white


class Video(Sequence):
    """A video file that PyAV can decode, centre-cropped to the shape of `size` and scaled to it.

    To reach a frame, all frames before it are decoded.
    """

    def __init__(self, file: Path, size: tuple[int, int], frames: int | None, grey: bool) -> None:
        name = f"video:{file}"
        self.file = file
        self.grey = grey
        self.stamps = {file: stamp(file)}
        count, grey_pixels = _inspect_film(file, self.stamps[file])
        if grey_pixels and not grey:
            raise DataError(f"{file}: is grey ({grey_pixels}); {GREY_REMEDY}")
        train_count, heldout_count = _split_counts(name, count, frames)
        super().__init__(name, 1 if grey else 3, size, train_count, heldout_count)

    def stream(self, start: int, stop: int) -> Iterator[Bytes]:
        """Yield frames `start` to `stop`, each decoded when it is needed."""
        with _open_film(self.file) as film:
            for frame in itertools.islice(film.decode(video=0), start, stop):
                yield _crop_and_scale(_orient_frame(self.file, frame), self.size, self.grey)


class Folder(Sequence):
    """The images of a folder in the order of their names, 2.png before 10.png, all of one size."""

    def __init__(self, folder: Path, size: tuple[int, int], frames: int | None, grey: bool) -> None:
        name = f"frames:{folder}"
        self.stamps = _image_files(folder, grey)
        self.grey = grey
        train_count, heldout_count = _split_counts(name, len(self.stamps), frames)
        super().__init__(name, 1 if grey else 3, size, train_count, heldout_count)

    def stream(self, start: int, stop: int) -> Iterator[Bytes]:
        """Yield frames `start` to `stop`, each read when it is needed."""
        for file in itertools.islice(self.stamps, start, stop):
            with _open_image(file) as image:
                yield _crop_and_scale(image, self.size, self.grey)


# --- films ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)  # each run of an experiment inspects the same film
def _inspect_film(file: Path, version: Stamp) -> tuple[int, str]:  # noqa: ARG001
    """Decode a film to count its frames, and find its pixel format if it is grey.

    The pixel format is an empty text for a film in colour. `version` only serves the cache: a film
    that has changed is inspected again.

    Raises:
        DataError: If the film has transparent pixels, or a frame is damaged or incomplete.
    """
    count = 0
    grey_pixels = ""
    with _open_film(file) as film:
        if film.streams.video[0].metadata.get("alpha_mode", "0") != "0":
            raise DataError(
                f"{file}: stores transparency separately from its frames (alpha_mode),"
                f" {ALPHA_NOT_READ}"
            )
        for frame in film.decode(video=0):
            if _has_alpha(frame.format):
                opacities = frame.to_ndarray(format="rgba")[..., 3]
                if opacities.min() < 255:
                    raise DataError(f"{file}: frame {count} {TRANSPARENT_FILM}")
            if frame.is_corrupt:
                raise DataError(
                    f"{file}: frame {count} is damaged or incomplete; repair the film, or cut"
                    " it before this frame"
                )
            count += 1
            if not grey_pixels and _is_grey(frame.format):
                grey_pixels = frame.format.name
    return count, grey_pixels


def _has_alpha(pixels: av.VideoFormat) -> bool:
    """Return whether pixels of this format, or the colours of its palette, can be transparent."""
    return pixels.has_palette or any(component.is_alpha for component in pixels.components)


def _is_grey(pixels: av.VideoFormat) -> bool:
    """Return whether pixels of this format have no colour, only a brightness."""
    colours = [component for component in pixels.components if not component.is_alpha]
    return len(colours) == 1 and not pixels.has_palette and not pixels.is_rgb


def _orient_frame(file: Path, frame: av.VideoFrame) -> PIL.Image.Image:
    """Rotate or mirror a frame as its display matrix requires.

    Phones record their orientation in this matrix and do not rotate the pixels.

    Raises:
        DataError: If the rotation is not by a multiple of 90°.
    """
    from PIL import Image

    pixels = frame.to_ndarray(format="rgb24")
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is not None:
        # A pixel at (x, y) is shown at (a x + c y, b x + d y). The numbers are fixed-point, with 16
        # bits after the point; only their signs are used. The type is ignored because PyAV's stub
        # does not declare side data as buffers.
        a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5].tolist()  # type: ignore[call-overload]
        if a == 0 and d == 0:  # a quarter turn exchanges x and y
            pixels = pixels.swapaxes(0, 1)
            x_factor, y_factor = c, b
        elif b == 0 and c == 0:
            x_factor, y_factor = a, d
        else:
            raise DataError(
                f"{file}: is displayed rotated by {frame.rotation}°; only quarter turns can be read"
            )
        # A negative factor mirrors its axis.
        row_step = -1 if y_factor < 0 else 1
        column_step = -1 if x_factor < 0 else 1
        pixels = pixels[::row_step, ::column_step]
    return Image.fromarray(np.ascontiguousarray(pixels))


@contextlib.contextmanager
def _open_film(file: Path) -> Iterator[av.container.InputContainer]:
    """Open a film for reading inside the block.

    PyAV may open only this file, and frames may have at most `MAX_PIXELS` pixels.

    Raises:
        DataError: If the file is not a readable video, or its frames are too large. Errors inside
            the block become `DataError`, too.
    """
    import av

    with (
        convert_read_errors(file, NOT_A_VIDEO),
        av.open(f"file:{file}", options=DEMUXER_OPTIONS, metadata_errors="replace") as film,
    ):
        codec = film.streams.video[0].codec_context if film.streams.video else None
        if not codec:
            raise DataError(f"{file}: holds no video, or none with a supported codec")
        pixels = codec.width * codec.height
        if pixels > MAX_PIXELS:
            raise DataError(f"{file}: frames of {pixels:,} pixels; the limit is {MAX_PIXELS:,}")
        codec.options = {"max_pixels": str(MAX_PIXELS)}
        yield film


# --- both, and folders of images ------------------------------------------------------------------


def _split_counts(name: str, count: int, frames: int | None) -> tuple[int, int]:
    """Compute how many of `count` frames to train on, and how many of the following to hold out.

    `frames` is the number of frames that the training needs, or None if it is not given.

    - Without `frames`, the last eleventh of all frames is held out, but at least two.
    - With `frames`, the frames after these are held out, up to a tenth as many, but at least two.
    - If `frames` would leave less than the last eleventh, it is ignored. The training then uses the
      frames more than once.

    >>> (
    ...     [_split_counts("film", 100, frames) for frames in (None, 30, 95)],
    ...     _split_counts("film", 22, 19),
    ... )
    ([(91, 9), (30, 3), (91, 9)], (19, 2))
    """
    if count < 4:
        raise DataError(f"{name}: {count} frames; at least 4 are needed")
    heldout_count = max(2, count // (HELD_OUT + 1))
    if frames is None or frames + heldout_count > count:
        return count - heldout_count, heldout_count
    return frames, max(2, min(count - frames, frames // HELD_OUT))


def _image_files(folder: Path, grey: bool) -> Stamps:
    """List the images of a folder in natural order, each with its stamp, and check all of them.

    Raises:
        DataError: If the folder has no images, or an image is unreadable, transparent, of another
            size than the first, or grey without `grey`.
    """
    check_folder(folder, "'frames:DIR' reads a folder of images, 'video:FILE' a film")
    images = sorted(
        (file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES),
        key=_natural_key,
    )
    if not images:
        raise DataError(f"{folder}: holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    stamps = {file: stamp(file) for file in images}
    first_size = None
    for file in images:
        with _open_image(file) as image:
            shown_size = "{}×{}".format(*_oriented_size(image))
            first_size = first_size or shown_size
            if shown_size != first_size:
                raise DataError(
                    f"{file}: is {shown_size} pixels, the images before it {first_size}; all must"
                    " have the same size"
                )
            mode = image.mode.partition(";")[0]  # without the number of bits, as in "I;16"
            if mode in UNREADABLE_MODES:
                raise DataError(f"{file}: {UNREADABLE_MODES[mode]}")
            if image.mode in WIDE_MODES:
                _check_shades(file, np.asarray(image))
            if mode in GREY_MODES and not grey:
                raise DataError(f"{file}: is grey (mode {image.mode}); {GREY_REMEDY}")
            if _is_transparent(image):
                raise DataError(f"{file}: {TRANSPARENT_IMAGE}")
    return stamps


def _check_shades(file: Path, shades: npt.NDArray[np.generic]) -> None:
    """Raise `DataError` unless all numbers can be taken as shades of grey from 0 to 255.

    If no number exceeds 1, white may be 1 instead of 255. This is an error, too, except if all
    numbers are 0.
    """
    lowest = shades.min()
    highest = shades.max()
    if (1 < highest <= 255 and lowest >= 0) or not shades.any():
        return
    raise DataError(
        f"{file}: holds numbers ({shades.dtype}) from {lowest:.3g} to {highest:.3g}, and it is"
        " unknown which is white; save it with 8 or 16 bits, or with numbers from 0 to 255"
    )


def _is_transparent(image: PIL.Image.Image) -> bool:
    """Return whether an image has transparent pixels.

    The pixels are read only if the header of the image indicates that they may be transparent.
    """
    if not image.has_transparency_data:
        return False
    if image.mode in SIXTEEN_BITS:  # the header names one shade of grey that is transparent
        return bool((np.asarray(image) == image.info["transparency"]).any())
    return bool(np.asarray(image.convert("RGBA").getchannel("A")).min() < 255)


def _natural_key(file: Path) -> tuple[list[str | int], str]:
    """Build a sorting key that orders names by the numbers in them: 2.png before 10.png."""
    key: list[str | int] = []
    # Texts and numbers alternate: the parts at odd positions are the numbers.
    for position, text in enumerate(re.split("([0-9]+)", file.name)):
        is_number = position % 2 == 1
        key.append(int(text) if is_number else text)
    return key, file.name


@contextlib.contextmanager
def _open_image(file: Path) -> Iterator[PIL.Image.Image]:
    """Open an image for reading inside the block.

    Raises:
        DataError: If the file is not an image of a known format, has too many pixels, or holds
            several pictures. Errors inside the block become `DataError`, too.
    """
    from PIL import Image

    not_an_image = f"not a complete image of a known format ({', '.join(IMAGE_FORMATS)})"
    # Pillow warns of large images, even below `MAX_PIXELS`, and of unusual metadata.
    no_warnings = warnings.catch_warnings(action="ignore")
    with (
        convert_read_errors(file, not_an_image),
        no_warnings,
        Image.open(file, formats=IMAGE_FORMATS) as image,
    ):
        if image.width * image.height > MAX_PIXELS:
            raise DataError(
                f"{file}: has {image.width:,}×{image.height:,} pixels; the limit is {MAX_PIXELS:,}"
            )
        # In a photograph (MPO) further pictures are previews, or come from another lens.
        count = getattr(image, "n_frames", 1)
        if image.format != "MPO" and count > 1:
            raise DataError(f"{file}: holds {count} pictures; save each as a separate file")
        yield image


def _oriented_size(image: PIL.Image.Image) -> tuple[int, int]:
    """Return the width and height of an image after the rotation that its Exif data require.

    The pixels are not read.
    """
    # For a TIFF, `image.size` already takes the rotation into account. For a PNG without metadata
    # before its pixels, `getexif` would read all of the pixels, so it is not called.
    has_orientation = image.format != "TIFF" and ("exif" in image.info or "xmp" in image.info)
    # The orientations 5 to 8 exchange width and height.
    is_sideways = has_orientation and image.getexif().get(EXIF_ORIENTATION, 1) > 4
    return (image.height, image.width) if is_sideways else image.size


def _crop_and_scale(image: PIL.Image.Image, size: tuple[int, int], grey: bool) -> Bytes:
    """Crop the displayed image around its centre to the shape of `size`; scale it to (C, H, W)."""
    from PIL import Image, ImageOps

    is_negative = False
    if image.format == "TIFF":
        is_negative = image.tag_v2.get(TIFF_PHOTOMETRIC) == TIFF_WHITE_IS_ZERO  # type: ignore[attr-defined]
    image = ImageOps.exif_transpose(image)
    # Pillow would clip 16-bit shades at 255, and does not invert negatives. Here 0 to 65535 is
    # scaled to 0 to 255, rounded to nearest: 65535 is 255 times 257.
    if image.mode in SIXTEEN_BITS:
        shades = np.asarray(image).astype(np.uint32)
        if is_negative:
            shades = 65535 - shades
        image = Image.fromarray(((shades + 128) // 257).astype(np.uint8))
    width_and_height = size[::-1]  # the order in which Pillow expects them
    image = ImageOps.fit(
        image.convert("L" if grey else "RGB"), width_and_height, Image.Resampling.BILINEAR
    )
    pixels = np.atleast_3d(np.asarray(image))  # a grey image has no dimension of channels
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
