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

MAX_PIXELS = 1 << 27  # of a frame or an image
EXIF_ORIENTATION = 0x0112  # the number of this note in Exif
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")  # EPS would start Ghostscript
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"}
# Not those that open further files or addresses, which their content names: playlists, and lists of
# images.
VIDEO_FORMATS = (
    "asf,avi,dv,flv,gif,h264,hevc,m4v,matroska,mjpeg,mov,mpeg,mpegts,mpegvideo,mxf,ogg,wav,"
    "yuv4mpegpipe"
)
NOT_A_VIDEO = "not a video that can be read"
DEMUXER_OPTIONS = {"protocol_whitelist": "file", "format_whitelist": VIDEO_FORMATS}
GREY_REMEDY = "ask for grey=True (--option grey=true) to read one channel"
ALPHA_NOT_READ = (
    "which is not read; put a background behind the frames and save the film without transparency"
)
TRANSPARENT = "has transparent places, and nothing says what is behind them;"
TRANSPARENT_FILM = (
    f"{TRANSPARENT} put a background behind the frames and save the film without transparency"
)
TRANSPARENT_IMAGE = (
    f"{TRANSPARENT} save it with a background, which Pillow adds by"
    " Image.alpha_composite(Image.new('RGBA', image.size, 'white'),"
    " image.convert('RGBA')).convert('RGB')"
)
SIXTEEN_BITS = {"I;16", "I;16L", "I;16B", "I;16N"}  # modes of Pillow
GREY_MODES = {"1", "L", "LA", "La", "I", "F"}  # of Pillow, without what follows a semicolon
UNREADABLE_MODES = {  # their numbers do not determine a shade
    "CMYK": (
        "holds amounts of ink (CMYK), and a screen's colours depend on the printer; save it as RGB"
    ),
    "LAB": "holds colours as L*a*b*; save it as RGB",
    "HSV": "holds colours as hue, saturation and value; save it as RGB",
}
# of Pillow: whole numbers of 32 bits or with a sign, and floating-point numbers
WIDE_MODES = (
    "I",
    "F",
)
TIFF_PHOTOMETRIC = 262  # the number of a tag in TIFF
TIFF_WHITE_IS_ZERO = 0  # a value of that tag


class Video(Sequence):
    """A video file that PyAV can decode, centre-cropped to the shape of `size` and scaled to it.

    Frames further on are reached by decoding those before them.
    """

    def __init__(self, file: Path, size: tuple[int, int], frames: int | None, grey: bool) -> None:
        name = f"video:{file}"
        self.file = file
        self.grey = grey
        self.stamps = {file: stamp(file)}
        count, grey_pixels = _inspect_film(file, self.stamps[file])
        if grey_pixels and not grey:
            raise DataError(f"{file}: is grey ({grey_pixels}); {GREY_REMEDY}")
        super().__init__(name, 1 if grey else 3, size, *_split_counts(name, count, frames))

    def stream(self, start: int, stop: int) -> Iterator[Bytes]:
        """Frames `start` to `stop`, decoded as they are asked for."""
        with _open_film(self.file) as film:
            for frame in itertools.islice(film.decode(video=0), start, stop):
                yield _crop_and_scale(_orient_frame(self.file, frame), self.size, self.grey)


class Folder(Sequence):
    """The images of a folder in the order of their names, 2.png before 10.png, all of one size."""

    def __init__(self, folder: Path, size: tuple[int, int], frames: int | None, grey: bool) -> None:
        name = f"frames:{folder}"
        self.stamps = _image_files(folder, grey)
        self.grey = grey
        super().__init__(
            name, 1 if grey else 3, size, *_split_counts(name, len(self.stamps), frames)
        )

    def stream(self, start: int, stop: int) -> Iterator[Bytes]:
        """Frames `start` to `stop`, read as they are asked for."""
        for file in itertools.islice(self.stamps, start, stop):
            with _open_image(file) as image:
                yield _crop_and_scale(image, self.size, self.grey)


# --- films ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)  # an experiment asks for its film once a run
def _inspect_film(file: Path, version: Stamp) -> tuple[int, str]:  # noqa: ARG001
    """Decode a film to count its frames; also return its grey pixel format, "" if it has colour.

    Raises:
        DataError: For a film with transparent places, or one that ends within a frame.
    """
    count = 0
    grey_pixels = ""
    with _open_film(file) as film:
        if film.streams.video[0].metadata.get("alpha_mode", "0") != "0":
            raise DataError(
                f"{file}: says beside its frames what is transparent (alpha_mode), {ALPHA_NOT_READ}"
            )
        for frame in film.decode(video=0):
            if _has_alpha(frame.format) and frame.to_ndarray(format="rgba")[..., 3].min() < 255:
                raise DataError(f"{file}: frame {count} {TRANSPARENT_FILM}")
            if frame.is_corrupt:
                raise DataError(
                    f"{file}: frame {count} is damaged or incomplete; cut the film before it, or"
                    " mend it"
                )
            count += 1
            if not grey_pixels and _is_grey(frame.format):
                grey_pixels = frame.format.name
    return count, grey_pixels


def _has_alpha(pixels: av.VideoFormat) -> bool:
    """Whether pixels of this format say how transparent they are, or their palette does."""
    return pixels.has_palette or any(component.is_alpha for component in pixels.components)


def _is_grey(pixels: av.VideoFormat) -> bool:
    """Whether pixels of this format have only a brightness."""
    colours = [component for component in pixels.components if not component.is_alpha]
    return len(colours) == 1 and not pixels.has_palette and not pixels.is_rgb


def _orient_frame(file: Path, frame: av.VideoFrame) -> PIL.Image.Image:
    """Rotate a frame for display: phones record their orientation and do not rotate the pixels."""
    from PIL import Image

    pixels = frame.to_ndarray(format="rgb24")
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is not None:
        # A pixel at (x, y) is shown at (a x + c y, b x + d y), in numbers of 16 bits before and
        # after the point. PyAV's stub knows of motion vectors only, and not that side data are
        # buffers.
        a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5].tolist()  # type: ignore[call-overload]
        if not (a or d):
            pixels = pixels.swapaxes(0, 1)
            a = c
            d = b
        elif b or c:
            raise DataError(
                f"{file}: is to be shown turned by {frame.rotation}°; quarter turns can be read"
            )
        pixels = pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
    return Image.fromarray(np.ascontiguousarray(pixels))


@contextlib.contextmanager
def _open_film(file: Path) -> Iterator[av.container.InputContainer]:
    """A film as PyAV's container, limited to this one file and to frames of `MAX_PIXELS`."""
    import av

    with (
        convert_read_errors(file, NOT_A_VIDEO),
        av.open(f"file:{file}", options=DEMUXER_OPTIONS, metadata_errors="replace") as film,
    ):
        codec = film.streams.video[0].codec_context if film.streams.video else None
        if not codec:
            raise DataError(f"{file}: holds no video, or none whose codec is known here")
        pixels = codec.width * codec.height
        if pixels > MAX_PIXELS:
            raise DataError(f"{file}: frames of {pixels:,} pixels; they may have {MAX_PIXELS:,}")
        codec.options = {"max_pixels": str(MAX_PIXELS)}
        yield film


# --- both, and folders of images ------------------------------------------------------------------


def _split_counts(name: str, count: int, frames: int | None) -> tuple[int, int]:
    """How many of `count` frames to train on and to hold out: the last tenth, or as many as asked.

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
        return count - heldout_count, heldout_count  # a shorter sequence is passed over again
    return frames, max(2, min(count - frames, frames // HELD_OUT))


def _image_files(folder: Path, grey: bool) -> Stamps:
    """The images of a folder by name, as they are now, after a look at the header of each."""
    check_folder(folder, "'frames:DIR' reads a folder of images, 'video:FILE' a film")
    images = sorted(
        (file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES),
        key=_natural_key,
    )
    if not images:
        raise DataError(f"{folder}: holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    stamps = {file: stamp(file) for file in images}
    size = None
    for file in images:
        with _open_image(file) as image:
            shown_size = "{}×{}".format(*_oriented_size(image))
            size = size or shown_size
            if shown_size != size:
                raise DataError(
                    f"{file}: is {shown_size} pixels, the images before it {size}; all must have"
                    " one size"
                )
            mode = image.mode.partition(";")[0]
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
    """Raise `DataError` unless numbers of any size can be taken as shades of grey, 0 to 255."""
    lowest = shades.min()
    highest = shades.max()
    # If no number exceeds 1, white may be 1.
    if (1 < highest <= 255 and lowest >= 0) or not shades.any():
        return
    raise DataError(
        f"{file}: holds numbers ({shades.dtype}) from {lowest:.3g} to {highest:.3g}, and nothing"
        " says which is white; save it with 8 or 16 bits, or with numbers from 0 to 255"
    )


def _is_transparent(image: PIL.Image.Image) -> bool:
    """Whether an image has transparent pixels; they are read only if it may have some."""
    if not image.has_transparency_data:
        return False
    if image.mode in SIXTEEN_BITS:  # one shade of grey stands for nothing
        return bool((np.asarray(image) == image.info["transparency"]).any())
    return bool(np.asarray(image.convert("RGBA").getchannel("A")).min() < 255)


def _natural_key(file: Path) -> tuple[list[str | int], str]:
    """Sorts names by the numbers in them: 2.png comes before 10.png."""
    key: list[str | int] = []
    for position, text in enumerate(re.split("([0-9]+)", file.name)):
        is_number = position % 2 == 1
        key.append(int(text) if is_number else text)
    return key, file.name


@contextlib.contextmanager
def _open_image(file: Path) -> Iterator[PIL.Image.Image]:
    """Open an image for reading inside the block; errors name its file."""
    from PIL import Image

    not_an_image = f"not a whole image of a known format ({', '.join(IMAGE_FORMATS)})"
    # Pillow warns of sizes below the bound and of metadata.
    no_warnings = warnings.catch_warnings(action="ignore")
    with (
        convert_read_errors(file, not_an_image),
        no_warnings,
        Image.open(file, formats=IMAGE_FORMATS) as image,
    ):
        if image.width * image.height > MAX_PIXELS:
            raise DataError(
                f"{file}: has {image.width:,}×{image.height:,} pixels; it may have {MAX_PIXELS:,}"
            )
        # A photograph's second picture is its preview, or what another lens saw.
        count = getattr(image, "n_frames", 1)
        if image.format != "MPO" and count > 1:
            raise DataError(f"{file}: holds {count} pictures; save each as a file of its own")
        yield image


def _oriented_size(image: PIL.Image.Image) -> tuple[int, int]:
    """(width, height) of an image as displayed, after the rotation that Exif states."""
    # Pillow says the size of a TIFF so already. Of a PNG without a note before its pixels it would
    # read all of them.
    has_orientation = image.format != "TIFF" and ("exif" in image.info or "xmp" in image.info)
    is_sideways = has_orientation and image.getexif().get(EXIF_ORIENTATION, 1) > 4
    return (image.height, image.width) if is_sideways else image.size


def _crop_and_scale(image: PIL.Image.Image, size: tuple[int, int], grey: bool) -> Bytes:
    """Crop the centre of the displayed image to the shape of `size` and scale it to (C, H, W)."""
    from PIL import Image, ImageOps

    is_negative = False
    if image.format == "TIFF":
        is_negative = image.tag_v2.get(TIFF_PHOTOMETRIC) == TIFF_WHITE_IS_ZERO  # type: ignore[attr-defined]
    image = ImageOps.exif_transpose(image)
    # Pillow would cut 16 bits off at 255, and leaves a negative as it is
    if image.mode in SIXTEEN_BITS:
        shades = np.asarray(image).astype(np.uint32)
        if is_negative:
            shades = 65535 - shades
        image = Image.fromarray(((shades + 128) // 257).astype(np.uint8))
    image = ImageOps.fit(
        image.convert("L" if grey else "RGB"), size[::-1], Image.Resampling.BILINEAR
    )
    return np.ascontiguousarray(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1))
