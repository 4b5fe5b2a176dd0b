"""Films of every common container."""

from fractions import Fraction

import av
import numpy as np
import pytest

import gpulab as gl

SIZE = (24, 32)
FRAMES = 60
X264 = {"g": "12", "bf": "2"}
OPEN = X264 | {"x264-params": "open-gop=1:keyint=12:min-keyint=12:bframes=2:scenecut=0"}
KINDS = {  # codec, its options, the container's, the codec of a sound; sizes of frames that vary in time; the first one
    "mp4": ("libx264", X264, {}, "aac"),
    "fast.mp4": ("libx264", X264, {"movflags": "faststart"}),
    "late.mp4": ("libx264", X264, {}, None, False, 500),
    "fragments.mp4": ("libx264", X264, {"movflags": "frag_keyframe+empty_moov"}),
    "mkv": ("libx264", X264, {}, "aac"),
    "open.mkv": ("libx264", OPEN, {}, None, True, 700),
    "live.mkv": ("libx264", X264, {"live": "1"}),
    "webm": ("libvpx", {"g": "12", "deadline": "realtime", "cpu-used": "8"}, {}, "libopus"),
    "vp9.webm": ("libvpx-vp9", {"g": "30", "auto-alt-ref": "1", "lag-in-frames": "16", "cpu-used": "8"}),
    "ts": ("libx264", X264, {}, "aac"),
    "open.ts": ("libx264", OPEN),
    "mpg": ("mpeg2video", X264 | {"b": "4M"}, {}, "mp2"),
    "avi": ("mpeg4", X264),
    "flv": ("libx264", X264),
    "wmv": ("wmv2", {"g": "12"}),
    "gif": ("gif", {}),
    "m2v": ("mpeg2video", X264),
}


def write_film(file, codec, options=(), container=(), sound=None, vary=False, first=0, frames=FRAMES):
    rng, unit = np.random.default_rng(0), Fraction(1, 1000 if vary else 25)
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    with av.open(str(file), "w", options=dict(container)) as output:
        stream = output.add_stream(codec, rate=25, options=dict(options))
        stream.height, stream.width = SIZE
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.codec_context.time_base = unit
        track = output.add_stream(sound, rate=48000) if sound else None
        time, heard = first, 0
        for number in range(frames):
            picture = np.stack([x * 7 + number * 5, y * 9 + number * 3, (x + y) * 3 + number * 11], -1).astype(np.uint8)
            picture[number % 16 :][:8, number % 24 :][:, :8] = rng.integers(0, 256, 3)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=stream.pix_fmt)
            frame.pts, frame.time_base = time, unit
            time += int(rng.integers(15, 90)) if vary else 1
            output.mux(stream.encode(frame))
            while track and heard < (number + 1) * 1920:
                layout = track.codec_context.format
                kind = np.float32 if layout.name.startswith("flt") else np.int16
                samples = track.codec_context.frame_size or 1024
                silence = np.zeros((2, samples) if layout.is_planar else (1, 2 * samples), kind)
                piece = av.AudioFrame.from_ndarray(silence, layout.name, "stereo")
                piece.rate, piece.pts = 48000, heard
                heard += piece.samples
                output.mux(track.encode(piece))
        output.mux(stream.encode())
        if track:
            output.mux(track.encode())
    return file


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("films")
    return {kind: write_film(folder / f"film.{kind}", *how) for kind, how in KINDS.items()}


def load(file):
    return gl.load(f"video:{file}", size=SIZE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_film_is_read_from_any_frame_on(made, kind):
    data = load(made[kind])
    frames = list(data.stream())
    assert len(frames) == FRAMES
    for start in (1, 30, 59):
        again = list(data.stream(start, min(start + 3, FRAMES)))
        assert len(again) == min(3, FRAMES - start)
        assert all((a == b).all() for a, b in zip(again, frames[start:], strict=False)), start


def count(file):
    """How many frames are read of a film; 0 where it is refused, with the file named in one line."""
    try:
        return len(list(load(file).stream()))
    except gl.DataError as error:
        return 0 if str(error).startswith(f"{file}: ") and "\n" not in str(error) else -1


@pytest.mark.parametrize("kind", KINDS)
def test_a_film_that_was_cut_is_read_as_far_as_it_goes_or_named_in_one_line(made, tmp_path, kind):
    content, file = made[kind].read_bytes(), tmp_path / made[kind].name
    file.write_bytes(content[: int(len(content) * 0.6)])
    assert 0 <= count(file) < FRAMES


def remuxed(source, file, ahead):
    """The packets of a film, shown `ahead` frames earlier."""
    with av.open(str(source)) as given, av.open(str(file), "w", options={"avoid_negative_ts": "disabled"}) as output:
        stream = output.add_stream_from_template(given.streams.video[0])
        for packet in [packet for packet in given.demux(video=0) if packet.dts is not None]:
            packet.pts -= int(ahead / 25 / packet.time_base)
            packet.dts -= int(ahead / 25 / packet.time_base)
            packet.stream = stream
            output.mux(packet)
    return file


def test_frames_that_an_edit_list_leaves_out_are_not_missed(made, tmp_path):
    file = remuxed(made["mp4"], tmp_path / "edited.mp4", ahead=20)
    frames = list(load(file).stream())
    assert len(frames) == FRAMES - 20
    assert (frames[0] == next(load(made["mp4"]).stream(20))).all()
