"""Films, as PyAV (FFmpeg) reads them, and folders of images, as sequences of frames.

What a container declares of its length is held against what is there. Many declare nothing, or what they say of a cut
film is true of the rest: `docs/command_line.md` has a list.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab.data import pictures
from gpulab.data.base import HELD_OUT, Bytes, Sequence
from gpulab.errors import DataError, reason
from gpulab.store.identities import Stamps, stamp

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
        super().__init__(name, 1 if grey else 3, size, *_split(name, count_frames(file, grey), frames))

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """Frames `start` to `stop`, decoded as they are asked for."""
        import av

        stop, count = self.frames + self.held if stop is None else stop, 0
        try:
            with opened(self.file) as film:
                for frame in itertools.islice(_frames(film), stop):
                    count += 1
                    if count > start:
                        yield pictures.fit(frame.to_image(), self.size, self.grey)
        except av.FFmpegError as error:
            raise DataError(f"{self.file}: frame {count} cannot be decoded: {reason(error)}") from None
        if count < stop:
            raise DataError(f"{self.file}: ends after frame {count} of {stop}: is it truncated?")


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


def count_frames(file: Path, grey: bool) -> int:
    """How many frames a film shows, by a look at every packet; `DataError` for one that is cut, or grey unasked."""
    import av

    try:
        with opened(file) as container:
            first = next(_frames(container), None)
        if first is None:
            raise DataError(f"{file}: holds no frames")
        with opened(file) as container:
            shown, missing = _look(container, first.pts)
    except (av.FFmpegError, OSError) as error:
        raise DataError(
            f"{file}: not a video that can be read (truncated, or another format): {reason(error)}"
        ) from None
    if missing:
        raise DataError(f"{file}: truncated: {missing}")
    if first.format.name.startswith("gray") and not grey:
        raise DataError(f"{file}: is grey ({first.format.name}); ask for grey=True (--grey) to read one channel")
    return shown


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
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
    except av.FFmpegError:
        raise
    except (IndexError, ValueError) as error:  # PyAV's own, such as at a stream that begins in the midst of a file
        raise DataError(f"{file}: not a video that can be read: {reason(error)}") from None


def _frames(container: Any) -> Iterator[Any]:
    """The frames of a film; what comes before its first keyframe may lack what it refers to."""
    import av

    begun = False
    for packet in container.demux(video=0):
        begun, frames = begun or packet.is_keyframe, []
        try:
            frames = packet.decode()
        except av.FFmpegError:
            if begun:
                raise
        yield from frames


def _look(container: Any, begin: int | None) -> tuple[int, str]:
    """How many frames are shown from the time `begin` on, and why the film is not whole, if that can be told."""
    video = container.streams.video[0]
    hides_frames = video.codec_context.name == "vp8"
    packets, shown, ends, whole, begun = 0, 0, 0.0, True, False
    for packet in container.demux():
        if packet.size and packet.time_base:
            time = (packet.dts or 0) if packet.pts is None else packet.pts
            ends = max(ends, float((time + (packet.duration or 0)) * packet.time_base))
        if packet.stream.index != video.index or (not packet.size and packet.dts is None):  # the end is such a packet
            continue
        packets, whole, begun = packets + 1, not packet.is_corrupt, begun or packet.is_keyframe
        # What is shown before the first frame that can be decoded refers to what is missing.
        early = not begun if packet.pts is None or begin is None else packet.pts < begin
        hidden = hides_frames and packet.size and not memoryview(packet)[0] & 16  # RFC 6386, 9.1: show_frame
        if packet.size and not (packet.is_discard or early or hidden):
            shown += 1
    if not whole:
        return shown, "it ends within a frame"
    if 0 < video.frames <= packets:
        return shown, ""
    # Of a film in MP4 some packets may be left out by a list of edits, but it lasts as long as it says.
    if video.frames and not container.format.name.startswith("mov"):
        return shown, f"its header promises {video.frames} frames, it holds {packets}"
    lasts = (container.duration or 0) * 1e-6
    if lasts - ends > max(0.5, 0.01 * lasts):
        return shown, f"its header promises {lasts:.1f} s, it ends at {ends:.1f} s"
    return shown, ""


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
