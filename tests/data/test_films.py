"""Films in every common container, and films that are rotated or mirrored for display."""

import struct
from fractions import Fraction

import av
import numpy as np
import pytest

import gpulab as gl
from tests.data._helpers import SMALL, every_frame, noise, write_video

FRAMES = 60
X264 = {"g": "12", "bf": "2"}
KINDS = {  # the codec, its options, and those of the container
    "mp4": ("libx264", X264),
    "fragments.mp4": ("libx264", X264, {"movflags": "frag_keyframe+empty_moov"}),
    "mkv": ("libx264", X264),
    "open.ts": (
        "libx264",
        X264 | {"x264-params": "open-gop=1:keyint=12:min-keyint=12:bframes=2:scenecut=0"},
    ),
    "vp9.webm": (
        "libvpx-vp9",
        {"g": "30", "auto-alt-ref": "1", "lag-in-frames": "16", "cpu-used": "8"},
    ),
    "mpg": ("mpeg2video", X264 | {"b": "4M"}),
    "avi": ("mpeg4", X264),
    "wmv": ("wmv2", {"g": "12"}),
    "gif": ("gif", {}),
}


def write_film(file, codec, options=(), container=(), times=range(FRAMES)):
    picture, unit = noise(*SMALL, 3), Fraction(1, 25)
    with av.open(str(file), "w", options=dict(container)) as output:
        stream = output.add_stream(codec, rate=25, options=dict(options))
        stream.height, stream.width = SMALL
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.codec_context.time_base = unit
        for number, time in enumerate(times):
            moved = np.roll(picture, number, axis=1)
            frame = av.VideoFrame.from_ndarray(moved, format="rgb24").reformat(
                format=stream.pix_fmt
            )
            frame.pts, frame.time_base = time, unit
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("films")
    return {kind: write_film(folder / f"film.{kind}", *how) for kind, how in KINDS.items()}


def load(file):
    return gl.load(f"video:{file}", size=SMALL)


@pytest.mark.parametrize("kind", KINDS)
def test_film_is_read_whole_from_any_frame_on(made, kind):
    data = load(made[kind])
    frames = every_frame(data)
    assert len(frames) == FRAMES
    for start in (1, 30, 59):
        again = list(data.stream(start, min(start + 3, FRAMES)))
        assert len(again) == min(3, FRAMES - start)
        assert all((a == b).all() for a, b in zip(again, frames[start:], strict=False)), start


def count(file):
    """Return the number of frames that are read from a film.

    The result is 0 if the film is rejected in one line that names the file, and −1 for any other
    message.
    """
    try:
        return len(every_frame(load(file)))
    except gl.DataError as error:
        return 0 if str(error).startswith(f"{file}: ") and "\n" not in str(error) else -1


@pytest.mark.parametrize("kind", KINDS)
def test_film_that_was_cut_is_read_as_far_as_it_goes_or_named_in_one_line(made, tmp_path, kind):
    content, file = made[kind].read_bytes(), tmp_path / made[kind].name
    file.write_bytes(content[: int(len(content) * 0.6)])
    assert 0 <= count(file) < FRAMES


def test_film_avi_with_empty_chunks_for_dropped_frames_is_read(tmp_path):
    times = [time for time in range(40) if time % 8 not in (5, 6)]
    assert count(write_film(tmp_path / "dropped.avi", "mpeg4", times=times)) == len(times)


SHOWN = {  # how a picture is displayed, by the matrix
    (0, 1, -1, 0): lambda picture: np.rot90(picture, -1),
    (-1, 0, 0, -1): lambda picture: np.rot90(picture, 2),
    (0, -1, 1, 0): np.rot90,
    (-1, 0, 0, 1): np.fliplr,
}


def write_turned(file, matrix):
    """Write a lossless film of a still picture with a display matrix, and return the picture."""
    picture = noise(*SMALL, 3)
    content = write_video(file, np.stack(6 * [picture]), "png", "rgb24").read_bytes()
    place = content.index(b"tkhd") + 44
    a, b, c, d = (65536 * number for number in matrix)
    file.write_bytes(
        content[:place]
        + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
        + content[place + 36 :]
    )
    return picture


@pytest.mark.parametrize("matrix", SHOWN)
def test_film_rotated_or_mirrored_is_read_as_it_is_shown(tmp_path, matrix):
    picture = SHOWN[matrix](write_turned(tmp_path / "a.mp4", matrix))
    (frame,) = gl.load(f"video:{tmp_path / 'a.mp4'}", size=picture.shape[:2]).stream(0, 1)
    assert (frame == picture.transpose(2, 0, 1)).all()


def test_film_rotated_by_45_degrees_is_refused(tmp_path):
    write_turned(tmp_path / "b.mp4", (1, 1, -1, 1))
    with pytest.raises(gl.DataError, match=r"b\.mp4: .* rotated by -45°"):
        every_frame(load(tmp_path / "b.mp4"))
