"""Films, as PyAV (FFmpeg) reads them, and folders of images, as sequences of frames."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.data import pictures
from gpulab.data.base import HELD_OUT, Bytes, Sequence
from gpulab.errors import DataError, reason
from gpulab.store.identities import Stamp, Stamps, stamp

if TYPE_CHECKING:
    import PIL.Image

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"}
# Not those that open further files or addresses, which their content names: playlists, and lists of images.
FORMATS = "3g2,asf,av1,avi,dv,flv,gif,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mpeg,mpegts,mpegvideo,mxf,nut,obu,ogg,wav"
FORMATS += ",yuv4mpegpipe"
OPTIONS = {"protocol_whitelist": "file", "format_whitelist": FORMATS}


class Video(Sequence):
    """A video file that PyAV can decode, centre-cropped to the shape of `size` and scaled to it.

    Frames further on are reached by decoding those before them.
    """

    def __init__(self, file: Path, size: tuple[int, int], frames: int | None, grey: bool) -> None:
        self.file, self.grey, name = file, grey, f"video:{file}"
        self.stamps = {file: stamp(file)}
        count, pixels = _look(file, self.stamps[file])
        if pixels.startswith("gray") and not grey:
            raise DataError(f"{file}: is grey ({pixels}); ask for grey=True (--grey) to read one channel")
        super().__init__(name, 1 if grey else 3, size, *_split(name, count, frames))

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """Frames `start` to `stop`, decoded as they are asked for."""
        stop = self.frames + self.held if stop is None else stop
        with _film(self.file) as film:
            for frame in itertools.islice(film.decode(video=0), start, stop):
                yield pictures.fit(frame.to_image(), self.size, self.grey)


class Folder(Sequence):
    """The images of a folder in the order of their names, all of one size."""

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
    if not os.path.isdir(folder):  # a name too long for one is none, too
        raise DataError(f"{folder}: no such folder")
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        raise DataError(f"{folder}: holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    stamps = {file: stamp(file) for file in files}
    size = None
    for file in files:
        with _opened(file) as image:
            size = size or image.size
            if image.size != size:
                sizes = f"is {image.width}×{image.height} pixels, the images before it {size[0]}×{size[1]}"
                raise DataError(f"{file}: {sizes}; all must have one size")
            if image.mode.partition(";")[0] in ("1", "L", "LA", "I", "F") and not grey:
                raise DataError(f"{file}: is grey (mode {image.mode}); ask for grey=True (--grey) to read one channel")
    return stamps


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
