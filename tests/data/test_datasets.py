import functools
import gzip
import hashlib
import http.server
import io
import itertools
import os
import struct
import threading
import tracemalloc
import zlib
from types import SimpleNamespace

import av
import numpy as np
import pytest
from PIL import Image

import gpulab as gl
from gpulab.data import images, pictures
from gpulab.data.base import Sequence
from gpulab.data.datasets import NAMES
from gpulab.data.images import Images
from gpulab.errors import printable

SMALL, ODD = (24, 32), (45, 61)


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def write_video(file, frames, codec="ffv1", pixels="bgr0"):
    """Encode colour (T, H, W, 3) or grey (T, H, W) frames; FFV1 and PNG lose nothing."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(frame, format="gray" if frame.ndim == 2 else "rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return file


def write_images(folder, frames, suffix="png"):
    folder.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"{number:03}.{suffix}")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Noise of an odd size, 44 × 45 × 61 × 3, as three lossless videos and as a folder of images."""
    folder, frames = tmp_path_factory.mktemp("files"), noise(44, 45, 61, 3)
    return SimpleNamespace(
        frames=frames.transpose(0, 3, 1, 2),
        mkv=write_video(folder / "a.mkv", frames),
        mp4=write_video(folder / "a.mp4", frames, "png", "rgb24"),
        avi=write_video(folder / "a.avi", frames),
        images=write_images(folder / "images", frames[:22]),
    )


def taken(windows, count):
    return list(itertools.islice(windows, count))


class Counter(Sequence):
    """A sequence whose frames hold their own number, to see which are used, and how often."""

    def __init__(self, frames, held=20):
        super().__init__("counter", 1, (1, 1), frames, held)
        self.decoded = []

    def stream(self, start=0, stop=None):
        for number in range(start, self.frames + self.held if stop is None else stop):
            self.decoded.append(number)
            yield np.full((1, 1, 1), number, dtype=np.int64)


def numbers(window):
    return window.frames[:, 0, 0, 0].tolist()


# --- names ---------------------------------------------------------------------------------------------


def test_every_kind_of_name_loads_and_describes_itself(tmp_path, files):
    write_idx(tmp_path / "t10k-images-idx3-ubyte", noise(30, 28, 28))
    names = ["digits", f"mnist:{tmp_path}", "walk", "moving-digits", "jpeg:walk"]
    names += [f"video:{files.mkv}", f"frames:{files.images}"]
    assert {name.partition(":")[0] for name in names} == {name.partition(":")[0] for name in NAMES}
    for name in names:
        data = gl.load(name, size=SMALL)
        window = next(data.windows(4))
        assert window.restart
        assert window.frames.dtype == np.uint8
        assert window.frames.shape == (4, data.channels, *data.size)
        assert len(next(data.heldout(2)).frames) == 2
        assert f"{len(data):,}" in repr(data)
        assert "held out" in repr(data)
        assert data.size == ((28, 28) if data.channels == 1 else SMALL)


@pytest.mark.parametrize(
    "name", ["", "imagenet", "digits:7", "walk:x", "moving-digits:x", "video", "video:", "frames:", "jpeg:"]
)
def test_an_unknown_name_is_refused_with_a_list_of_the_known_ones(name):
    with pytest.raises(gl.UsageError) as error:
        gl.load(name)
    assert f"{name!r}" in str(error.value)
    assert all(known in str(error.value) for known in NAMES)


@pytest.mark.parametrize(
    "nonsense",
    [
        *({"size": size} for size in [(0, 32), (24, -1), (24,), (24, 32, 3), 48, (24.5, 32)]),
        *({"frames": frames} for frames in [0, -5, 2.5]),
        *({"speed": speed} for speed in [0, -1.0, float("nan"), float("inf")]),
        {"seed": -1},
    ],
    ids=str,
)
def test_nonsense_is_a_usage_error(nonsense):
    with pytest.raises(gl.UsageError):
        gl.load("walk", **nonsense)


@pytest.mark.parametrize("place", ["a\0b", 300 * "x", "films\udcff"], ids=["NUL", "long", "no UTF-8"])
@pytest.mark.parametrize("kind", ["video", "frames", "mnist", "jpeg:video"])
def test_a_path_that_can_be_none_is_one_clear_line(kind, place):
    with pytest.raises(gl.GpulabError) as error:
        gl.load(f"{kind}:{place}")
    assert str(error.value).startswith((printable(place), f"{kind}:{printable(place)}: this name is not UTF-8"))
    assert "\n" not in str(error.value)


# --- windows of a sequence -------------------------------------------------------------------------------


def test_the_published_protocol_has_250_windows_of_20_frames():
    data = gl.load("walk", frames=5000, size=(3, 4))
    windows = taken(data.windows(20), 251)
    assert [len(window.frames) for window in windows] == [20] + 249 * [21] + [20]
    assert [window.restart for window in windows] == [True] + 249 * [False] + [True]
    assert sum(len(window.frames) - 1 for window in windows[:250]) == 4999  # predictions
    every = np.concatenate([windows[0].frames, *(window.frames[1:] for window in windows[1:250])])
    assert (every == np.stack(list(data.stream(0, 5000)))).all()
    for before, after in itertools.pairwise(windows[:250]):
        assert (after.frames[0] == before.frames[-1]).all()


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_short_sequence_is_passed_over_again_and_no_frame_is_read_before_it_is_needed(length):
    whole = [(numbers(window), window.restart) for window in taken(Counter(frames=11).windows(length), 20)]
    for number, (frames, restart) in enumerate(whole):
        begin = number % (11 // length) * length
        assert frames == list(range(max(0, begin - 1), begin + length))
        assert restart == (begin == 0)
    for start in range(12):
        data = Counter(frames=11)
        later = taken(data.windows(length, start=start), 1)
        assert data.decoded == whole[start][0], "starting at a window is skipping those before"
        later += taken(Counter(frames=11).windows(length, start=start + 1), 7)
        assert [(numbers(window), window.restart) for window in later] == whole[start : start + 8]


@pytest.mark.parametrize(("held", "length"), [(20, 20), (20, 7), (20, 30), (45, 20), (2, 20)])
def test_held_out_frames_are_those_after_the_training_part(held, length):
    data = Counter(frames=40, held=held)
    trained = {number for window in taken(data.windows(10), 8) for number in numbers(window)}
    windows = list(data.heldout(length))
    seen = [number for window in windows for number in numbers(window)[not window.restart :]]
    assert trained == set(range(40))
    assert seen == list(range(40, 40 + len(windows) * min(length, held)))
    assert [window.restart for window in windows] == [True] + (len(windows) - 1) * [False]


def test_the_loss_of_repeating_the_last_frame_is_that_of_the_held_out_part():
    data = gl.load("walk", frames=40, size=SMALL)
    frames = np.stack(list(data.stream(40, 60))) / 255
    assert data.repeat_loss() == pytest.approx(np.square(frames[1:] - frames[:-1]).mean(), rel=1e-12)
    assert data.repeat_loss(length=7) == pytest.approx(np.square(frames[1:14] - frames[:13]).mean(), rel=1e-12)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: next(Counter(frames=5).windows(20)), "5 frames to train on; a window needs 20"),
        (lambda: next(Counter(frames=40, held=1).heldout(20)), "1 held-out frames"),
    ],
)
def test_what_cannot_be_is_an_error(ask, words):
    with pytest.raises(gl.GpulabError, match=words):
        ask()


def test_a_scene_has_as_many_frames_as_asked_and_the_scene_of_its_seed_and_speed():
    data = gl.load("walk", frames=300, size=SMALL, seed=3, speed=2.0)
    assert data.options() == {"size": [24, 32], "frames": 300, "heldout": 30, "scene_seed": 3, "speed": 2.0}
    speed = gl.load("jpeg:walk", frames=300, size=SMALL, seed=3, speed=2).options()["speed"]
    assert isinstance(speed, float), "2 and 2.0 give one record"
    first = next(data.windows(4)).frames
    for seed, speed, same in [(3, 2.0, True), (4, 2.0, False), (3, 1.0, False)]:
        other = next(gl.load("walk", size=SMALL, seed=seed, speed=speed).windows(4, seed=9)).frames
        assert (other == first).all() == same


def test_moving_digits_are_real_digits():
    digits = gl.load("digits")
    (frame,) = gl.load("moving-digits", size=(28, 28)).stream(0, 1)  # no room to move: both fill the square
    everything = np.concatenate([digits.train, digits.held])[:, 0]
    inside = (everything <= frame[0]).all((1, 2))  # the digits of which each pixel is at most that of the frame
    covered = functools.reduce(np.maximum, everything[inside])
    assert (covered == frame[0]).all()


# --- images ----------------------------------------------------------------------------------------------


def numbered_images(count):
    return Images("numbered", np.arange(count)[:, None, None, None], np.arange(count, count + 7)[:, None, None, None])


@pytest.mark.parametrize("length", [1, 4, 7, 30])
def test_every_pass_over_the_images_shows_each_once_in_an_order_of_its_own(length):
    data = numbered_images(20)
    stream = [number for window in taken(data.windows(length), 120 // length) for number in numbers(window)]
    passes = [stream[start : start + 20] for start in range(0, len(stream) - 19, 20)]
    assert len(passes) >= 5
    assert all(sorted(one) == list(range(20)) for one in passes)
    assert len({tuple(one) for one in passes}) == len(passes)


@pytest.mark.parametrize("start", [0, 1, 2, 3, 11])
def test_each_seed_has_its_order_and_resumes_in_the_middle_of_a_pass(start):
    import torch

    state = torch.get_rng_state()
    orders = set()
    for seed in range(10):
        windows = taken(numbered_images(20).windows(7, seed), 20)
        later = taken(numbered_images(20).windows(7, seed, start), 5)
        assert [numbers(window) for window in later] == [numbers(window) for window in windows[start : start + 5]]
        assert all(window.restart for window in windows)
        shown = [number for window in windows for number in numbers(window)]
        orders |= {tuple(shown[begin : begin + 20]) for begin in (0, 20, 40)}
    assert len(orders) == 30, "nor is the second pass the first one of the next seed"
    assert (torch.get_rng_state() == state).all(), "the random numbers of torch are left alone"
    assert [numbers(window) for window in numbered_images(20).heldout(4)] == [[20, 21, 22, 23], [24, 25, 26]]


def test_digits_are_the_real_ones_enlarged_each_in_one_part_only():
    from sklearn.datasets import load_digits

    data = gl.load("digits")
    assert (data.train.shape, data.held.shape) == ((1500, 1, 28, 28), (297, 1, 28, 28))
    spoiled = gl.load("digits")
    spoiled.held[:] = 0
    assert gl.load("digits").held.any(), "what one caller writes no other reads"
    assert data.train.min() == 0
    assert data.train.max() > 240
    every, small = np.concatenate([data.train, data.held])[:, 0], load_digits().images
    shrunk = np.stack([np.asarray(Image.fromarray(digit).resize((8, 8), Image.Resampling.BOX)) for digit in every])
    alike = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(shrunk, small, strict=True)]
    assert min(alike) > 0.95  # in scikit-learn's order: no image is in both parts


# --- MNIST -----------------------------------------------------------------------------------------------


def idx(images, magic=2051):
    return struct.pack(">4I", magic, *images.shape) + images.tobytes()


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_idx(file, images):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(idx(images)) if file.suffix == ".gz" else idx(images))


def test_real_mnist_where_only_the_test_split_is_there(shared):
    data = gl.load(f"mnist:{shared / 'mnist'}")
    assert (data.train.shape, data.held.shape) == ((9000, 1, 28, 28), (1000, 1, 28, 28))
    every = np.concatenate([data.train, data.held])
    assert (every.min(), every.max()) == (0, 255)
    assert 0.1 < every.mean() / 255 < 0.16
    assert every.tobytes() == gzip.decompress((shared / "mnist" / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_has_both_splits_as_they_are_or_packed(tmp_path, suffix):
    train, test = noise(12, 28, 28), noise(5, 28, 28) // 2
    write_idx(tmp_path / f"train-images-idx3-ubyte{suffix}", train)
    write_idx(tmp_path / f"t10k-images-idx3-ubyte{suffix}", test)
    data = gl.load(f"mnist:{tmp_path}")
    assert data.name == "mnist"
    assert (data.train[:, 0] == train).all()
    assert (data.held[:, 0] == test).all()


WHOLE = idx(noise(30, 28, 28))
PACKED = gzip.compress(WHOLE)


def damaged(content, place):
    return content[:place] + b"\xff\xff\xff\xff" + content[place + 4 :]


TEST = "t10k-images-idx3-ubyte"
DAMAGED_MNIST = {
    "half a .gz": (f"{TEST}.gz", PACKED[: len(PACKED) // 2], "cannot be unpacked"),
    "changed .gz": (f"{TEST}.gz", damaged(PACKED, len(PACKED) // 2), "cannot be unpacked"),
    "changed block": (f"{TEST}.gz", damaged(PACKED, 12), "cannot be unpacked"),
    "not a .gz": (f"{TEST}.gz", WHOLE, "cannot be unpacked"),
    "empty .gz": (f"{TEST}.gz", b"", "begins with 0"),
    "empty": (TEST, b"", "begins with 0"),
    "labels": (TEST, idx(noise(30, 28, 28), magic=2049), "2049"),
    "too short": (TEST, WHOLE[:-1], "30 images of 28×28"),
    "too long": (TEST, WHOLE + b"x", "30 images of 28×28"),
    "half a header": ("train-images-idx3-ubyte", WHOLE[:10], "30 images of 0×0"),
    "far too much": (f"{TEST}.gz", gzip.compress(WHOLE[:4] + struct.pack(">3I", 2**31, 28, 28)), "2147483648 images"),
    "no images": ("train-images-idx3-ubyte", idx(noise(0, 28, 28)), "0 images"),
    "none to hold out": (TEST, idx(noise(9, 28, 28)), "9 images"),
}


@pytest.mark.parametrize(("name", "content", "reason"), DAMAGED_MNIST.values(), ids=DAMAGED_MNIST)
def test_a_damaged_mnist_file_is_named(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(gl.DataError) as error:
        gl.load(f"mnist:{tmp_path}")
    assert str(tmp_path / name) in str(error.value)
    assert reason in str(error.value)


def test_a_folder_without_mnist_or_with_images_of_two_sizes_is_named(tmp_path):
    with pytest.raises(gl.DataError, match="neither train-images-idx3-ubyte nor t10k-images-idx3-ubyte") as error:
        gl.load(f"mnist:{tmp_path}")
    assert str(tmp_path) in str(error.value)
    write_idx(tmp_path / "train-images-idx3-ubyte", noise(12, 28, 28))
    write_idx(tmp_path / "t10k-images-idx3-ubyte", noise(12, 8, 8))
    with pytest.raises(gl.DataError, match=r"t10k-images-idx3-ubyte: images of another size"):
        gl.load(f"mnist:{tmp_path}")


def test_a_small_archive_cannot_ask_for_much_memory(tmp_path):
    """100 kB that unpack to 100 MB are read as far as the header says."""
    (tmp_path / f"{TEST}.gz").write_bytes(gzip.compress(WHOLE[:16] + bytes(100 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(gl.DataError, match=r"promises 30 images of 28×28 and holds more"):
            gl.load(f"mnist:{tmp_path}")
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A mirror of MNIST on this machine, after one that has nothing, and a cache to download to."""
    served = tmp_path / "mirror"
    write_idx(served / "train-images-idx3-ubyte.gz", noise(30, 28, 28))
    write_idx(served / "t10k-images-idx3-ubyte.gz", noise(10, 28, 28))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=served)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(images, "MIRRORS", [f"{address}nowhere/", address])
        monkeypatch.setattr(images, "SHA256", {name: sha256(served / name) for name in images.SHA256})
        monkeypatch.setattr(images, "cache_folder", lambda: tmp_path / "cache")
        yield served
        server.shutdown()


@pytest.mark.parametrize("name", images.SHA256)
@pytest.mark.parametrize("how", ["missing", "of another content"])
def test_mnist_is_downloaded_once_both_files_or_none(mirror, tmp_path, name, how):
    good = (mirror / name).read_bytes()
    if how == "missing":
        (mirror / name).unlink()
    else:
        write_idx(mirror / name, noise(30, 28, 28) // 2)
    for _ in range(2):  # what is there of it is not taken for the whole
        with pytest.raises(gl.DataError, match=rf"{name} could not be downloaded.*nowhere.*http://127"):
            gl.load("mnist")
    assert not (tmp_path / "cache" / "mnist" / name).exists()
    (mirror / name).write_bytes(good)
    data = gl.load("mnist")
    assert (data.train[:, 0] == noise(30, 28, 28)).all()
    assert (data.held[:, 0] == noise(10, 28, 28)).all()
    (tmp_path / "cache" / "mnist" / name).write_bytes(good[:-1])
    assert (gl.load("mnist").train == data.train).all(), "a damaged one is fetched again"
    for file in mirror.iterdir():
        file.unlink()
    assert (gl.load("mnist").held == data.held).all()


def test_mnist_comes_from_https_alone_and_is_what_it_was(shared):
    assert all(mirror.startswith("https://") for mirror in images.MIRRORS)
    file = shared / "mnist" / "t10k-images-idx3-ubyte.gz"
    assert sha256(file) == images.SHA256[file.name]


# --- video -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mkv", "mp4", "avi"])
def test_the_frames_of_a_lossless_video_of_odd_size_come_back_exactly(files, kind):
    data = gl.load(f"video:{getattr(files, kind)}", size=ODD)
    assert (len(data), data.options()["heldout"]) == (40, 4)
    assert (np.stack(list(data.stream())) == files.frames).all()
    assert (np.stack(list(data.stream(5, 9))) == files.frames[5:9]).all()


def test_a_video_is_cut_in_the_middle_and_scaled(tmp_path):
    frames = np.zeros((5, 40, 120, 3), dtype=np.uint8)
    frames[:, :, 40:80] = (200, 100, 50)  # the middle third, a square, is all that a square shows
    write_video(tmp_path / "a.mkv", frames)
    (frame,) = gl.load(f"video:{tmp_path / 'a.mkv'}", size=(10, 10)).stream(0, 1)
    assert (frame[:, :, 1:-1] == np.array([200, 100, 50])[:, None, None]).all()  # edges are blended with what is beyond


def test_a_grey_video_must_be_asked_for_in_grey_and_any_may(tmp_path, files):
    frames = noise(20, 45, 61)
    write_video(tmp_path / "grey.mkv", frames, pixels="gray")
    with pytest.raises(gl.DataError, match=r"grey\.mkv: is grey .*grey=True"):
        gl.load(f"video:{tmp_path / 'grey.mkv'}")
    data = gl.load(f"video:{tmp_path / 'grey.mkv'}", size=(45, 61), grey=True)
    assert data.channels == 1
    assert (np.stack(list(data.stream()))[:, 0] == frames).all()
    assert next(gl.load(f"video:{files.mkv}", size=SMALL, grey=True).windows(5)).frames.shape == (5, 1, 24, 32)


@pytest.mark.parametrize(("asked", "trained", "held"), [(None, 40, 4), (20, 20, 2), (1000, 40, 4), (41, 40, 4)])
def test_a_video_gives_as_many_frames_as_asked_and_holds_the_next_ones_out(files, asked, trained, held):
    data = gl.load(f"video:{files.mkv}", frames=asked, size=ODD)
    assert data.options() == {"size": [45, 61], "frames": trained, "heldout": held}
    assert (next(data.heldout(20)).frames == files.frames[trained : trained + held]).all()


def test_a_real_video(shared):
    data = gl.load(f"video:{shared / 'video' / 'road_camera.mp4'}", size=SMALL)
    assert (len(data), data.options()["heldout"], data.channels) == (201, 20, 3)
    frames = np.stack(list(data.stream()))
    assert frames.shape == (221, 3, 24, 32)
    change = np.abs(np.diff(frames.astype(int), axis=0)).mean((1, 2, 3))
    assert 0 < change.mean() < 20 < frames.std()  # a picture that moves a little from frame to frame
    assert [window.restart for window in taken(data.windows(20), 12)] == [True] + 9 * [False] + [True, False]


def test_a_real_video_with_a_hole_is_named_with_the_frame(shared, tmp_path):
    content = bytearray((shared / "video" / "road_camera.mp4").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 20_000] = bytes(20_000)
    (tmp_path / "hole.mp4").write_bytes(content)
    data = gl.load(f"video:{tmp_path / 'hole.mp4'}", size=SMALL)
    with pytest.raises(gl.DataError, match=r"hole\.mp4: frame 1\d\d cannot be decoded"):
        list(data.stream())


def write_sound(file):
    with av.open(str(file), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), dtype=np.int16), format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))


NO_FILMS = {
    "text.mp4": (lambda file: file.write_text("Call me Ishmael.\n" * 100), "not a video"),
    "empty.mp4": (lambda file: file.touch(), "not a video"),
    "zeros.mp4": (lambda file: file.write_bytes(bytes(10_000)), "not a video"),
    "short.mkv": (lambda file: write_video(file, noise(3, 24, 32, 3)), "3 frames; at least 4"),
    "sound.wav": (write_sound, "no video"),
    "missing.mp4": (lambda _: None, "no such file"),
    "folder": (lambda file: file.mkdir(), "not a file, but a folder"),
}


@pytest.mark.parametrize("name", NO_FILMS)
def test_what_is_not_a_film_to_learn_from_is_named(tmp_path, name):
    make, why = NO_FILMS[name]
    make(tmp_path / name)
    with pytest.raises(gl.DataError, match=rf"{name}: .*{why}"):
        gl.load(f"video:{tmp_path / name}")


def test_frames_of_too_many_pixels_are_refused(files, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_PIXELS", 1000)
    with pytest.raises(gl.DataError, match=r"a\.mkv: frames of 2,745 pixels; they may have 1,000"):
        gl.load(f"video:{files.mkv}")


# --- folders of frames -----------------------------------------------------------------------------------


def test_the_images_of_a_folder_come_back_exactly_in_the_order_of_their_names(files):
    (files.images / "notes.txt").write_text("not a frame")
    data = gl.load(f"frames:{files.images}", size=ODD)
    assert (len(data), data.options()["heldout"]) == (20, 2)
    assert (np.stack(list(data.stream())) == files.frames[:22]).all()


@pytest.mark.parametrize("suffix", ["jpg", "webp", "bmp", "tiff"])
def test_other_formats_are_read_and_truncated_ones_named(tmp_path, suffix):
    write_images(tmp_path, noise(6, 24, 32, 3), suffix)
    assert len(list(gl.load(f"frames:{tmp_path}", size=SMALL).stream())) == 6
    file = tmp_path / f"004.{suffix}"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(gl.DataError, match=f"004.{suffix}"):
        list(gl.load(f"frames:{tmp_path}", size=SMALL).stream())


@pytest.mark.parametrize("suffix", ["png", "tiff"])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16, ">u2", np.float32])
def test_grey_images_must_be_asked_for_in_grey_and_keep_their_shades(tmp_path, kind, suffix):
    if suffix == "png" and kind in (">u2", np.float32):
        pytest.skip("PNG stores no such numbers")
    ramp = np.linspace(0, 255, 24 * 32).astype(np.uint8).reshape(24, 32)
    wide = {np.uint8: ramp, np.float32: ramp.astype(np.float32)}
    shades = wide[kind] if kind in wide else (ramp.astype(np.uint16) * 257).astype(kind)
    write_images(tmp_path, np.stack(6 * [shades]), suffix)
    with pytest.raises(gl.DataError, match=r"000\.\w+: is grey .*grey=True"):
        gl.load(f"frames:{tmp_path}")
    (frame,) = gl.load(f"frames:{tmp_path}", size=SMALL, grey=True).stream(0, 1)
    assert (frame[0] == ramp).all()


def encoded(*pictures, suffix="png"):
    file, (first, *more) = io.BytesIO(), map(Image.fromarray, pictures)
    first.save(file, suffix, **({"save_all": True, "append_images": more} if more else {}))
    return file.getvalue()


def shifted(content):
    """The length of the first chunk of pixels is wrong, so the next chunk begins in the wrong place."""
    place = content.index(b"IDAT") - 1
    return content[:place] + b"\x07" + content[place + 1 :]


DAMAGED_IMAGES = {
    "empty": (lambda _: b"", "not a whole image"),
    "text": (lambda _: b"Call me Ishmael.\n" * 20, "not a whole image"),
    "half a header": (lambda content: content[:20], "not a whole image"),
    "bytes changed": (lambda content: damaged(content, len(content) // 2), "not a whole image"),
    "chunk": (shifted, "not a whole image"),
    "another size": (lambda _: encoded(noise(20, 32, 3)), "is 32×20 pixels, the images before it 32×24"),
    "several png": (lambda _: encoded(*noise(3, 24, 32, 3)), "3 pictures"),
    "several tiff": (lambda _: encoded(*noise(3, 24, 32, 3), suffix="tiff"), "3 pictures"),
}


@pytest.mark.parametrize(("spoil", "why"), DAMAGED_IMAGES.values(), ids=DAMAGED_IMAGES)
def test_a_damaged_image_is_named(tmp_path, spoil, why):
    write_images(tmp_path, noise(6, 24, 32, 3))
    (tmp_path / "004.png").write_bytes(spoil((tmp_path / "004.png").read_bytes()))
    with pytest.raises(gl.DataError, match=rf"004\.png: .*{why}") as error:
        list(gl.load(f"frames:{tmp_path}", size=SMALL).stream())
    assert "object at 0x" not in str(error.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
def test_a_folder_without_images_is_named_and_a_pipe_not_waited_for(tmp_path):
    for folder, why in [(tmp_path / "missing", "no such folder"), (tmp_path, "holds no images")]:
        with pytest.raises(gl.DataError, match=f"{folder}: {why}"):
            gl.load(f"frames:{folder}")
    os.mkfifo(write_images(tmp_path, noise(6, 24, 32, 3)) / "006.png")
    for name in (f"frames:{tmp_path}", f"video:{tmp_path / '006.png'}"):
        with pytest.raises(gl.DataError, match=r"006\.png: .*a pipe"):
            gl.load(name)


def test_only_the_decoders_that_are_meant_are_asked(tmp_path, monkeypatch):
    """Pillow hands an EPS file, whatever its name, to Ghostscript, which runs it."""
    write_images(tmp_path, noise(6, 24, 32, 3))
    Image.fromarray(noise(24, 32, 3)).save(tmp_path / "004.eps")
    (tmp_path / "004.eps").replace(tmp_path / "004.png")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("Ghostscript was started"))
    with pytest.raises(gl.DataError, match=r"004\.png: not a whole image of a known format \(PNG, JPEG"):
        list(gl.load(f"frames:{tmp_path}", size=SMALL).stream())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("edge", [12_000, 16_000])  # more than gpulab allows, and than Pillow does
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path, edge):
    """A PNG of 84 bytes."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">2I5B", edge, edge, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(bomb)
    with pytest.raises(gl.DataError, match=r"0\.png: not a whole image .*(12,000×12,000|256000000) pixels"):
        gl.load(f"frames:{tmp_path}")
