"""Films, as PyAV (FFmpeg) reads them: how many frames one has, whether it is as long as it says, and its frames.

What a container declares of its length is held against what is there. Many declare nothing, or what they say of a cut
film is true of the rest: `docs/command_line.md` has a list.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulab import files
from gpulab.errors import DataError

if TYPE_CHECKING:
    import av

MOST_PIXELS = 1 << 27  # of a frame or an image
# Not those that open further files or addresses, which their content names: playlists, and lists of images.
FORMATS = "3g2,asf,av1,avi,dv,flv,gif,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mpeg,mpegts,mpegvideo,mxf,nut,obu,ogg,wav"
FORMATS += ",yuv4mpegpipe"
OPTIONS = {"protocol_whitelist": "file", "format_whitelist": FORMATS}


def count_frames(file: Path, grey: bool) -> int:
    """How many frames a film shows, by a look at every packet; no more than the first frame is decoded.

    Args:
        file: The film.
        grey: Whether grey is asked for; without it a grey film is refused.

    Returns:
        The number of frames.

    Raises:
        DataError: For what is no film, is shorter than its container declares, or is grey unasked.
    """
    import av

    if not file.is_file():
        raise DataError(f"{file}: no such file")
    if not file.stat().st_size:
        raise DataError(f"{file}: the file is empty")
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


def decoded(file: Path) -> Iterator[av.VideoFrame]:
    """The frames of a film."""
    with opened(file) as container:
        yield from _frames(container)


def reason(error: Exception) -> str:
    """What another library says, in one short line that no file's text gets control of."""
    words = re.sub(r" <.*?>", "", str(error)).split()
    return files.printable(" ".join(words))[:200] or type(error).__name__


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A film as PyAV's container, which opens nothing but this file, nor frames of more than `MOST_PIXELS`."""
    import av

    try:
        with av.open(f"file:{file}", options=OPTIONS, metadata_errors="replace") as container:
            if not container.streams.video:
                raise DataError(f"{file}: holds no video")
            codec = container.streams.video[0].codec_context
            if not codec:
                raise DataError(f"{file}: not a video that can be read: its codec is not known here")
            if (pixels := codec.width * codec.height) > MOST_PIXELS:
                raise DataError(f"{file}: frames of {pixels:,} pixels; they may have {MOST_PIXELS:,}")
            codec.options = {"max_pixels": str(MOST_PIXELS)}
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
