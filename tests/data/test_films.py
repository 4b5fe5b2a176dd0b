"""Films of every common container: whole ones are read, cut ones noticed, and later frames reached by seeking."""

import struct
from fractions import Fraction

import av
import numpy as np
import pytest

import gpulab as gl
from gpulab.data import films

SIZE = (24, 32)
FRAMES = 60
X264 = {"g": "12", "bf": "2"}
OPEN = X264 | {"x264-params": "open-gop=1:keyint=12:min-keyint=12:bframes=2:scenecut=0"}
VPX = {"g": "12", "deadline": "realtime", "cpu-used": "8"}
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}
KINDS = {  # codec, its options, the container's, the codec of a sound; sizes of frames that vary in time; the first one
    "mp4": ("libx264", X264, {}, "aac"),
    "fast.mp4": ("libx264", X264, {"movflags": "faststart"}),
    "vary.mp4": ("libx264", X264, {}, None, True),
    "late.mp4": ("libx264", X264, {}, None, False, 500),
    "open.mp4": ("libx264", OPEN),
    "fragments.mp4": ("libx264", X264, FRAGMENTS),
    "dash.mp4": ("libx264", X264, {"movflags": "frag_keyframe+empty_moov+default_base_moof+skip_trailer"}),
    "mkv": ("libx264", X264, {}, "aac"),
    "open.mkv": ("libx264", OPEN, {}, None, True, 700),
    "live.mkv": ("libx264", X264, {"live": "1"}),
    "webm": ("libvpx", VPX, {}, "libopus"),
    "live.webm": ("libvpx", VPX, {"live": "1"}),
    "alt.webm": ("libvpx-vp9", {"g": "30", "auto-alt-ref": "1", "lag-in-frames": "16", "cpu-used": "8"}),
    "ts": ("libx264", X264, {}, "aac"),
    "open.ts": ("libx264", OPEN),
    "mpeg2.ts": ("mpeg2video", X264),
    "m2ts": ("libx264", X264, {"mpegts_m2ts_mode": "1"}),
    "mpg": ("mpeg2video", X264 | {"b": "4M"}, {}, "mp2"),
    "small.mpg": ("mpeg2video", X264),
    "vob": ("mpeg2video", X264),
    "avi": ("mpeg4", X264),
    "flv": ("libx264", X264),
    "wmv": ("wmv2", {"g": "12"}),
    "gif": ("gif", {}),
    "m2v": ("mpeg2video", X264),
}
SAYS_NOTHING = {"m2v"}  # a bare stream
TOLERANT = {"flv", "avi"}  # a film is noticed that lacks a tenth of its time; one that lacks only its index is whole
ENTIRE = set(KINDS) - {"gif", "small.mpg"}  # where one can be sought in: not without keyframes or times


def write_film(file, codec, options=(), container=(), sound=None, vary=False, first=0, frames=FRAMES):
    rng, unit = np.random.default_rng(0), Fraction(1, 1000 if vary else 25)
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    with av.open(
        str(file), "w", format="mpegts" if file.suffix == ".m2ts" else None, options=dict(container)
    ) as output:
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


def count(file):
    """How many frames are read of a film; 0 where it is refused, with the file named in one line."""
    try:
        return len(list(load(file).stream()))
    except gl.DataError as error:
        return 0 if str(file) in str(error) and "\n" not in str(error) else -1


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_film_is_read_and_reached_anywhere(made, kind):
    data = load(made[kind])
    frames = list(data.stream())
    assert len(frames) == FRAMES
    for start in (0, 1, 11, 13, 30, 47, 59):
        again = list(data.stream(start, min(start + 3, FRAMES)))
        assert len(again) == min(3, FRAMES - start)
        assert all((a == b).all() for a, b in zip(again, frames[start:], strict=False)), start


@pytest.mark.parametrize("kind", sorted(ENTIRE))
def test_the_end_of_a_film_is_reached_without_decoding_its_beginning(made, kind):
    data = load(made[kind])
    number, frame = next(films.decoded(made[kind], data.keys, FRAMES - 1))
    assert FRAMES - 30 <= number < FRAMES
    assert frame.key_frame


@pytest.mark.parametrize("kind", sorted(set(KINDS) - SAYS_NOTHING))
def test_a_film_that_was_cut_is_noticed(made, tmp_path, kind):
    content = made[kind].read_bytes()
    file = tmp_path / made[kind].name
    parts = [0.04, 0.3, 0.6, *([] if kind in TOLERANT else [0.9, 0.99])]
    for place in [int(len(content) * part) | 1 for part in parts] + ([] if kind in TOLERANT else [len(content) - 1]):
        file.write_bytes(content[:place])
        assert count(file) == 0, place


def test_of_a_film_cut_between_packets_what_is_there_is_read(made, tmp_path):
    """It says nothing of its length."""
    content = made["ts"].read_bytes()
    (tmp_path / "cut.ts").write_bytes(content[: len(content) // 2 // 188 * 188])
    assert 0 < count(tmp_path / "cut.ts") < FRAMES


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("mpg", lambda content: content + b"\0\0\1\xb9"),
        ("mpg", lambda content: content + bytes(3000)),
        ("mkv", lambda content: content + bytes(3000)),
        ("mp4", lambda content: content + bytes(3000)),
        ("mp4", lambda content: content + b"TAG and so on" * 9),
        ("ts", lambda content: content + bytes(100)),
    ],
)
def test_what_follows_a_whole_film_is_no_matter(made, tmp_path, kind, change):
    file = tmp_path / made[kind].name
    file.write_bytes(change(made[kind].read_bytes()))
    assert count(file) == FRAMES


def remuxed(source, file, ahead=0, skip=0):
    """The packets of a film, without the first `skip`, shown `ahead` frames earlier."""
    with av.open(str(source)) as given, av.open(str(file), "w", options={"avoid_negative_ts": "disabled"}) as output:
        stream = output.add_stream_from_template(given.streams.video[0])
        for packet in [packet for packet in given.demux(video=0) if packet.dts is not None][skip:]:
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


@pytest.mark.parametrize("source", ["open.mkv", "open.ts"])
def test_a_film_that_begins_between_keyframes_begins_with_the_first(made, tmp_path, source):
    file = remuxed(made[source], tmp_path / source, skip=5)
    frames, whole = list(load(file).stream()), list(load(made[source]).stream())
    assert FRAMES - 15 <= len(frames) <= FRAMES - 10
    assert all((a == b).all() for a, b in zip(frames[3:], whole[-len(frames) :][3:], strict=True))


def test_a_sound_may_be_longer_than_its_film(tmp_path, made):
    with av.open(str(made["mkv"])) as given, av.open(str(tmp_path / "long.mkv"), "w") as output:
        streams = [output.add_stream_from_template(stream) for stream in given.streams]
        for packet in given.demux():
            keep = packet.stream.type == "audio" or packet.pts is None or packet.pts * packet.time_base < 1
            if packet.dts is not None and keep:
                packet.stream = streams[packet.stream.index]
                output.mux(packet)
    assert 10 <= count(tmp_path / "long.mkv") <= 30


def test_a_title_of_another_encoding_is_no_matter(made, tmp_path):
    content = made["mkv"].read_bytes()
    (tmp_path / "a.mkv").write_bytes(content.replace(b"Lavf", b"La\xff\xfe"))
    assert count(tmp_path / "a.mkv") == FRAMES


def test_an_index_of_fragments_says_how_many_bytes_there_are(made, tmp_path):
    content = made["dash.mp4"].read_bytes()
    place = content.index(b"moof") - 4
    for missing in (0, 1):
        size = len(content) - place + missing * 1000
        box = struct.pack(">I4sIIIIIHHIII", 44, b"sidx", 0, 1, 25, 0, 0, 0, 1, size, 60, 1 << 31)
        (tmp_path / f"{missing}.mp4").write_bytes(content[:place] + box + content[place:])
    assert count(tmp_path / "0.mp4") == FRAMES
    assert count(tmp_path / "1.mp4") == 0


def test_a_playlist_is_not_followed(made, tmp_path):
    """It would open other files, or addresses."""
    (tmp_path / "list.mp4").write_text(f"ffconcat version 1.0\nfile '{made['mkv']}'\n")
    (tmp_path / "hls.mp4").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{made['ts']}\n#EXT-X-ENDLIST\n")
    for name in ("list.mp4", "hls.mp4"):
        with pytest.raises(gl.DataError, match="not a video that can be read"):
            load(tmp_path / name)


def test_memory_does_not_grow_with_the_length_of_a_film(tmp_path, python):
    """Peak memory of counting a film of 20,000 frames, which as packets took 12 MiB."""
    file = write_film(tmp_path / "long.mkv", "mpeg4", {"g": "50"}, frames=50)
    with av.open(str(file)) as given, av.open(str(tmp_path / "longer.mkv"), "w") as output:
        stream = output.add_stream_from_template(given.streams.video[0])
        packets = [packet for packet in given.demux(video=0) if packet.dts is not None]
        for turn in range(400):
            for number, packet in enumerate(packets):
                copy = av.Packet(bytes(packet))
                copy.pts = copy.dts = (turn * 50 + number) * 40
                copy.time_base, copy.is_keyframe, copy.stream = Fraction(1, 1000), packet.is_keyframe, stream
                output.mux(copy)
    code = """
        import resource, sys
        import gpulab as gl
        size = (24, 32)
        gl.load(f"video:{sys.argv[1]}", size=size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        data = gl.load(f"video:{sys.argv[2]}", size=size)
        list(data.stream(19_990))
        print(len(data) + data.held, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    frames, grown = python(code, file, tmp_path / "longer.mkv").stdout.split()
    assert frames == "20000"
    assert float(grown) < 5
