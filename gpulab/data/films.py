"""Films, as PyAV (FFmpeg) reads them, and folders of images, as sequences of frames."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.content import Stamp, Stamps, stamp
from gpulab.data import pictures
from gpulab.data.base import HELD_OUT, Bytes, Sequence, check_folder
from gpulab.errors import DataError, reason

if TYPE_CHECKING:
    import PIL.Image

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"}
# Not those that open further files or addresses, which their content names: playlists, and lists of images.
FORMATS = "3g2,asf,av1,avi,dv,flv,gif,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mpeg,mpegts,mpegvideo,mxf,nut,obu,ogg,wav"
FORMATS += ",yuv4mpegpipe"
OPTIONS = {"protocol_whitelist": "file", "format_whitelist": FORMATS}
ASK_FOR_GREY = "ask for grey=True (--option grey=true) to read one channel"


class Video(Sequence):
    """A video file that PyAV can decode, centre-cropped to the shape of `size` and scaled to it.

    Frames further on are reached by decoding those before them.
    """

    def __init__(self, file: Path, size: tuple[int, int], frames: int | None, grey: bool) -> None:
        self.file, self.grey, name = file, grey, f"video:{file}"
        self.stamps = {file: stamp(file)}
        count, pixels = _look(file, self.stamps[file])
        if pixels.startswith("gray") and not grey:
            raise DataError(f"{file}: is grey ({pixels}); {ASK_FOR_GREY}")
        super().__init__(name, 1 if grey else 3, size, *_split(name, count, frames))

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """Frames `start` to `stop`, decoded as they are asked for."""
        stop = self.frames + self.held if stop is None else stop
        with _film(self.file) as film:
            for frame in itertools.islice(film.decode(video=0), start, stop):
                yield pictures.fit(_upright(self.file, frame), self.size, self.grey)


class Folder(Sequence):
    """The images of a folder in the order of their names, 2.png before 10.png, all of one size."""

    def __init__(self, folder: Path, size: tuple[int, int], frames: int | None, grey: bool) -> None:
        self.stamps, self.grey, name = _image_files(folder, grey), grey, f"frames:{folder}"
        super().__init__(name, 1 if grey else 3, size, *_split(name, len(self.stamps), frames))

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """Frames `start` to `stop`, read as they are asked for."""
        stop = self.frames + self.held if stop is None else stop
        for file in itertools.islice(self.stamps, start, stop):
            with _opened(file) as image:
                yield pictures.fit(image, self.size, self.grey)


# --- films ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)  # an experiment asks for its film once a run
def _look(file: Path, version: Stamp) -> tuple[int, str]:  # noqa: ARG001
    """How many frames a film has, all of which are decoded, and the format of their pixels."""
    with _film(file) as film:
        formats = [frame.format.name for frame in film.decode(video=0)]
    if not formats:
        raise DataError(f"{file}: holds no frames")
    return len(formats), formats[0]


def _upright(file: Path, frame: Any) -> PIL.Image.Image:
    """A frame as it is to be shown: a telephone writes down how it was held, and leaves the pixels as they are."""
    from PIL.Image import Transpose

    image, matrix = frame.to_image(), frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return image
    # A pixel at (x, y) is shown at (a x + c y, b x + d y), in numbers of 16 bits before and after the point.
    a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5].tolist()
    if not (a or d):
        image, a, d = image.transpose(Transpose.TRANSPOSE), c, b
    elif b or c:
        raise DataError(f"{file}: is to be shown turned by {frame.rotation}°; quarter turns can be read")
    image = image.transpose(Transpose.FLIP_LEFT_RIGHT) if a < 0 else image
    return image.transpose(Transpose.FLIP_TOP_BOTTOM) if d < 0 else image


@contextlib.contextmanager
def _film(file: Path) -> Iterator[Any]:
    """A film as PyAV's container, which opens nothing but this file, nor frames of more than `pictures.MOST_PIXELS`."""
    import av

    try:
        with av.open(f"file:{file}", options=OPTIONS, metadata_errors="replace") as container:
            if not container.streams.video:
                raise DataError(f"{file}: holds no video")
            codec = container.streams.video[0].codec_context
            if not codec:
                raise DataError(f"{file}: not a video that can be read: its codec is not known here")
            if (pixels := codec.width * codec.height) > pictures.MOST_PIXELS:
                raise DataError(f"{file}: frames of {pixels:,} pixels; they may have {pictures.MOST_PIXELS:,}")
            codec.options = {"max_pixels": str(pictures.MOST_PIXELS)}
            yield container
    except (av.FFmpegError, IndexError, ValueError) as error:  # the latter two are PyAV's own, at a damaged file
        raise DataError(f"{file}: not a video that can be read: {reason(error)}") from None


# --- both, and folders of images -------------------------------------------------------------------------


def _split(name: str, count: int, frames: int | None) -> tuple[int, int]:
    """How many of `count` frames to train on and to hold out: the last tenth, or as many as asked."""
    if count < 4:
        raise DataError(f"{name}: {count} frames; at least 4 are needed")
    held = max(2, count // (HELD_OUT + 1))
    if frames is None or frames + held > count:
        return count - held, held  # a shorter sequence is passed over again
    return frames, max(2, min(count - frames, frames // HELD_OUT))


def _image_files(folder: Path, grey: bool) -> Stamps:
    """The images of a folder by name, as they are now, after a look at the header of each."""
    check_folder(folder, "'frames:DIR' reads a folder of images, 'video:FILE' a film")
    files = sorted((file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES), key=_natural_key)
    if not files:
        raise DataError(f"{folder}: holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    stamps = {file: stamp(file) for file in files}
    size = None
    for file in files:
        with _opened(file) as image:
            width, height = pictures.upright_size(image)
            size = size or (width, height)
            if (width, height) != size:
                sizes = f"is {width}×{height} pixels, the images before it {size[0]}×{size[1]}"
                raise DataError(f"{file}: {sizes}; all must have one size")
            if image.mode.partition(";")[0] in ("1", "L", "LA", "I", "F") and not grey:
                raise DataError(f"{file}: is grey (mode {image.mode}); {ASK_FOR_GREY}")
    return stamps


def _natural_key(file: Path) -> tuple[list[str | int], str]:
    """Sorts names by the numbers in them: 2.png comes before 10.png."""
    parts = re.split("([0-9]+)", file.name)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)], file.name


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[PIL.Image.Image]:
    """An image whose pixels are read inside the block; whatever is wrong with it is said with its name."""
    try:
        with warnings.catch_warnings(), pictures.opened(file) as image:
            warnings.simplefilter("ignore")  # of what surrounds the pixels
            # A photograph's second picture is its preview, or what another lens saw.
            if image.format != "MPO" and (count := getattr(image, "n_frames", 1)) > 1:
                raise DataError(f"{file}: holds {count} pictures; save each as a file of its own")
            yield image
    except DataError:
        raise
    except Exception as error:  # Pillow raises almost anything at a broken file
        known = f"not a whole image of a known format ({', '.join(pictures.FORMATS)})"
        raise DataError(f"{file}: {known}: {reason(error)}") from None
