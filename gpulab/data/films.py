"""Films: whether one is whole, how many frames it holds, and its frames from any number on, in constant memory.

A container is asked what it can tell of its own end. A `.ts` or `.mpg` file, a live `.webm` or `.mkv` and a fragmented
`.mp4` that were cut exactly between two of their packets, and a bare stream such as `.h264`, say nothing of what is
missing, and nobody can.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from gpulab import files
from gpulab.errors import DataError

if TYPE_CHECKING:
    import av

MOST_PIXELS = 1 << 27  # of a frame or an image
# Not those that open further files or addresses, which their content names: playlists, and lists of images.
FORMATS = "3g2,asf,av1,avi,dv,flv,gif,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mpeg,mpegts,mpegvideo,mxf,nut,obu,ogg,wav"
FORMATS += ",yuv4mpegpipe"
OPTIONS = {"protocol_whitelist": "file", "format_whitelist": FORMATS}
MOST_KEYS = 1024  # keyframes to begin at that are remembered of a film


class Key(NamedTuple):
    """When a keyframe is shown and decoded, in the units of its stream, and which frame it is."""

    pts: int
    dts: int
    number: int


class Survey(NamedTuple):
    """What a look at every packet of a film finds: how many frames are shown, and keyframes to begin at."""

    shown: int
    keys: list[Key]


def survey(file: Path, grey: bool) -> Survey:
    """Look at every packet of a film, decoding no more than the first frame.

    Args:
        file: The film.
        grey: Whether grey is asked for; without it a grey film is refused.

    Returns:
        The number of frames, and where to begin to decode those that are further on.

    Raises:
        DataError: For what is no film, is truncated as far as its container tells, or is grey unasked.
    """
    import av

    if not file.is_file():
        raise DataError(f"{file}: no such file")
    if not file.stat().st_size:
        raise DataError(f"{file}: the file is empty")
    try:
        with opened(file) as container:
            if not container.streams.video:
                raise DataError(f"{file}: holds no video")
            first = next(_frames(container), None)
            kind, lasts = container.format.name, (container.duration or 0) / av.time_base
            promised = container.streams.video[0].frames
        if first is None:
            raise DataError(f"{file}: holds no frames")
        with open(file, "rb") as stream:
            if why := _cut(kind, stream):
                raise DataError(f"{file}: truncated: {why}")
        packets, ends, whole, found = _look(file, first.pts)
        if packets < promised and kind.startswith("mov"):  # some are there, but an edit list leaves them out
            packets = _look(file, None, ignore_editlist="1")[0]
    except (av.FFmpegError, OSError) as error:
        raise DataError(
            f"{file}: not a video that can be read (truncated, or another format): {reason(error)}"
        ) from None
    if not whole:
        raise DataError(f"{file}: truncated: it ends within a frame")
    if packets < promised:
        raise DataError(f"{file}: truncated: its header promises {promised} frames, it holds {packets}")
    if not promised and ends < 0.9 * lasts:  # some formats promise a duration only
        raise DataError(f"{file}: truncated: its header promises {lasts:.1f} s, it ends at {ends:.1f} s")
    if first.format.name.startswith("gray") and not grey:
        raise DataError(f"{file}: is grey ({first.format.name}); ask for grey=True (--grey) to read one channel")
    return found


def reason(error: Exception) -> str:
    """What another library says, in one short line that no file's text gets control of."""
    words = re.sub(r" <.*?>", "", str(error)).split()
    return files.printable(" ".join(words))[:200] or type(error).__name__


@contextlib.contextmanager
def opened(file: Path, **options: str) -> Iterator[Any]:
    """A film as PyAV's container, which opens nothing but this file, nor frames of more than `MOST_PIXELS`."""
    import av

    try:
        with av.open(f"file:{file}", options=OPTIONS | options, metadata_errors="replace") as container:
            for stream in container.streams.video[:1]:
                if not stream.codec_context:
                    raise DataError(f"{file}: not a video that can be read: its codec is not known here")
                if (pixels := stream.codec_context.width * stream.codec_context.height) > MOST_PIXELS:
                    raise DataError(f"{file}: frames of {pixels:,} pixels; they may have {MOST_PIXELS:,}")
                stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
            yield container
    except av.FFmpegError:
        raise
    except (IndexError, ValueError) as error:  # PyAV's own, such as at a stream that begins in the midst of a file
        raise DataError(f"{file}: not a video that can be read: {reason(error)}") from None


def decoded(file: Path, keys: list[Key], start: int) -> Iterator[tuple[int, av.VideoFrame]]:
    """(number, frame) of a film, from one at or before `start` on: a keyframe, if it is sure which one it is."""
    import av

    before = keys[: bisect_right(keys, start, key=lambda key: key.number)][-2:]
    if before:
        key = before[-1]
        for target in (key.pts, key.dts, before[0].pts):  # some containers are sought in by the one, some by the other
            with opened(file) as container:
                frame = None
                with contextlib.suppress(av.FFmpegError):  # one that cannot be sought in
                    container.seek(target, stream=container.streams.video[0])
                    frames = _frames(container)
                    frame = next((frame for frame in frames if frame.pts is None or frame.pts >= key.pts), None)
                if frame and frame.pts == key.pts and frame.key_frame and not frame.is_corrupt:
                    yield from enumerate(itertools.chain([frame], frames), key.number)
                    return
    with opened(file) as container:
        yield from enumerate(_frames(container))


def _frames(container: Any) -> Iterator[Any]:
    """The frames of a film, or of its rest: what comes before its first keyframe may lack what it refers to."""
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


def _look(file: Path, begin: int | None, **options: str) -> tuple[int, float, bool, Survey]:
    """The packets of the video, when (s) the last of any stream ends, whether the video's last is whole, the survey.

    Frames are shown in the order of their times, those before `begin` not at all: what they refer to is missing.
    """
    packets, shown, ends, newest = 0, 0, 0.0, None
    keys: list[Key] = []
    whole, begun, ordered, apart = True, False, True, 0
    with opened(file, **options) as container:
        video = container.streams.video[0]
        hidden_frames = video.codec_context.name == "vp8"
        for packet in container.demux():
            pts, size = packet.pts, packet.size
            if size and packet.time_base:
                ends = max(
                    ends, (((packet.dts or 0) if pts is None else pts) + (packet.duration or 0)) * packet.time_base
                )
            if packet.stream.index != video.index or (not size and packet.dts is None):  # the end is such a packet
                continue
            packets, whole = packets + 1, not packet.is_corrupt
            begun = begun or packet.is_keyframe
            early = not begun if pts is None or begin is None else pts < begin
            if not size or packet.is_discard or early:
                continue
            if hidden_frames and not memoryview(packet)[0] & 16:  # RFC 6386, 9.1: show_frame
                continue
            if ordered := ordered and pts is not None:
                if packet.is_keyframe and (newest is None or pts > newest):
                    if not keys or shown - keys[-1].number >= apart:
                        keys.append(Key(pts, pts if packet.dts is None else packet.dts, shown))
                elif keys and pts <= keys[-1].pts:  # one that follows the keyframe, and is shown before it
                    ordered = pts < keys[-1].pts and (len(keys) < 2 or pts > keys[-2].pts)
                    keys[-1] = keys[-1]._replace(number=keys[-1].number + 1)
                newest = pts if newest is None else max(newest, pts)
                if len(keys) > MOST_KEYS:
                    del keys[1::2]
                    apart = max(2 * apart, keys[1].number)
            shown += 1
    return packets, float(ends), whole, Survey(shown, keys if ordered else [])


# --- what containers tell of their own end ----------------------------------------------------------------


def _cut(kind: str, stream: BinaryIO) -> str:
    """Why a file ends too early, by the structure of its container; empty where it does not, or cannot be told."""
    size = os.fstat(stream.fileno()).st_size
    names = kind.split(",")
    return next((check(stream, size) for name, check in CHECKS.items() if name in names), "")


def _at(stream: BinaryIO, place: int, count: int) -> bytes:
    stream.seek(place)
    return stream.read(count)


def _cut_boxes(stream: BinaryIO, size: int) -> str:
    """ISO 14496-12: a file is boxes, each with its length; `sidx` says how long the fragments are together."""
    place, last, needed = 0, b"", 0
    known = b"ftyp styp moov moof mdat mfra sidx ssix free skip wide uuid meta emsg prft pdin pnot udta".split()
    while place + 8 <= size:
        length, last = struct.unpack(">I4s", _at(stream, place, 8))
        if length == 1:
            length = int.from_bytes(_at(stream, place + 8, 8), "big")
        if length < 8 or last not in known:  # 0: until the end of the file; else no box
            return ""
        if last == b"sidx":
            needed = max(needed, place + length + _indexed(_at(stream, place + 8, min(length, 1 << 20) - 8)))
        place += length
    place += 8 if place < size < place + 8 else 0  # it ends within the head of a box
    if size < place or size < needed:
        return f"its boxes need {max(place, needed):,} bytes, the file has {size:,}"
    return "its last fragment lacks its frames" if last == b"moof" else ""


def _indexed(content: bytes) -> int:
    """How many bytes after it a `sidx` box describes."""
    wide = 8 if content[:1] == b"\1" else 4
    offset = int.from_bytes(content[12 + wide : 12 + 2 * wide], "big")
    entries = content[16 + 2 * wide :]
    count = int.from_bytes(content[14 + 2 * wide : 16 + 2 * wide], "big")
    sizes = (int.from_bytes(entries[place : place + 4], "big") & 0x7FFFFFFF for place in range(0, 12 * count, 12))
    return offset + sum(sizes)


SEGMENT, CLUSTER = 0x18538067, 0x1F43B675


def _cut_ebml(stream: BinaryIO, size: int) -> str:
    """RFC 8794: a file is elements, each with a name and a length, which a live one's segment and clusters lack."""
    place = 0
    while place < size:
        head = _at(stream, place, 12)
        if not head[0]:
            return ""  # not an element
        named = 9 - head[0].bit_length()
        if len(head) <= named:
            return "it ends within the name of an element"
        lengthy = 9 - head[named].bit_length()
        if lengthy > 8:
            return ""
        length = int.from_bytes(head[named : named + lengthy], "big") & ((1 << 7 * lengthy) - 1)
        name, place = int.from_bytes(head[:named], "big"), place + named + lengthy
        if length == (1 << 7 * lengthy) - 1:
            if name not in (SEGMENT, CLUSTER):
                return ""
        elif place + length > size:
            return f"it has {size:,} bytes of {place + length:,}"
        elif name == SEGMENT:
            return ""
        else:
            place += length
    return ""


def _cut_packets(stream: BinaryIO, size: int) -> str:
    """ISO 13818-1: a transport stream is packets of 188 bytes (or with a time before, or a code after), from a `G`."""
    head = _at(stream, 0, 4096)
    for step in (188, 192, 204):
        for begin in range(step):
            if len(marks := head[begin::step]) > 3 and set(marks) == {0x47}:
                begin -= 4 if step == 192 else 0
                over = (size - begin) % step
                if over and _at(stream, size - over + (4 if step == 192 else 0), 1) in (b"G", b""):
                    return f"its last packet has {over} bytes of {step}"
                return ""
    return ""


def _cut_packs(stream: BinaryIO, size: int) -> str:
    """ISO 13818-1: a program stream is packs of packets with their lengths. Whether the last pack's are there."""
    begin = max(0, size - (1 << 18))
    tail = _at(stream, begin, size - begin)
    starts = [place for place in range(len(tail) - 3) if tail.startswith(b"\0\0\1\xba", place)][-64:]
    ends = [_end_of_pack(tail, place) for place in starts]
    if not ends or any(end == len(tail) for end in ends):
        return ""
    return f"its last pack needs {max(ends) - len(tail):,} more bytes" if max(ends) > len(tail) else ""


def _end_of_pack(tail: bytes, place: int) -> int:
    """Where the last packet of the packs from a place on ends: after the tail, if it is cut."""
    while place < len(tail):
        code = tail[place : place + 4]
        if code == b"\0\0\1\xba":
            fixed = 14 if tail[place + 4 : place + 5] >= b"\x40" else 12
            stuffing = tail[place + 13] & 7 if fixed == 14 and place + 13 < len(tail) else 0
            place += fixed + stuffing
        elif code == b"\0\0\1\xb9":
            place += 4
        elif code[:3] == b"\0\0\1" and code[3:] > b"\xb9":
            place += 6 + (int.from_bytes(tail[place + 4 : place + 6], "big") if place + 6 <= len(tail) else 0)
        elif not tail[place:].strip(b"\0\xff"):  # padding
            return len(tail)
        elif b"\0\0\1".startswith(code[:3]) and len(code) < 4:
            return len(tail) + 4 - len(code)
        else:
            return 0  # not a pack
    return place


def _cut_asf(stream: BinaryIO, size: int) -> str:
    """The File Properties Object of Microsoft's ASF says how long the file is."""
    head = _at(stream, 0, 1 << 16)
    place = head.find(bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365"))
    promised = int.from_bytes(head[place + 40 : place + 48], "little") if place >= 0 else 0
    return f"its header promises {promised:,} bytes, the file has {size:,}" if promised > size else ""


def _cut_gif(stream: BinaryIO, size: int) -> str:
    """GIF89a, 27: the last byte is a semicolon."""
    return "" if _at(stream, max(0, size - 64), 64).rstrip(b"\0").endswith(b";") else "its trailer is missing"


CHECKS = {"mov": _cut_boxes, "matroska": _cut_ebml, "mpegts": _cut_packets, "mpeg": _cut_packs}
CHECKS |= {"asf": _cut_asf, "gif": _cut_gif}
