import functools
import hashlib
import http.server
import itertools
import os
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

import gpulab as gl
from gpulab.data import _images as images
from gpulab.data._base import Sequence
from gpulab.data._datasets import NAMES
from gpulab.data._images import Images
from tests.data._helpers import (
    SMALL,
    encoded,
    every_frame,
    noise,
    write_idx,
    write_images,
    write_video,
)

ODD = (45, 61)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Noise of an odd size, 44 × 45 × 61 × 3, as lossless videos and as a folder of images."""
    folder, frames = tmp_path_factory.mktemp("files"), noise(44, 45, 61, 3)
    return SimpleNamespace(
        frames=frames.transpose(0, 3, 1, 2),
        mkv=write_video(folder / "a.mkv", frames),
        mp4=write_video(folder / "a.mp4", frames, "png", "rgb24"),
        images=write_images(folder / "images", frames[:22]),
    )


def taken(windows, count):
    return list(itertools.islice(windows, count))


class Counter(Sequence):
    """A sequence whose frames contain their own numbers, to count how often each is used."""

    def __init__(self, frames, heldout_count=20):
        super().__init__("counter", 1, (1, 1), frames, heldout_count)
        self.decoded = []

    def stream(self, start, stop):
        for number in range(start, stop):
            self.decoded.append(number)
            yield np.full((1, 1, 1), number, dtype=np.int64)


def numbers(window):
    return window.frames[:, 0, 0, 0].tolist()


REFUSED = [
    (name, {})
    for name in ("", "imagenet", "digits:7", "walk:x", "moving-digits:x", "video", "frames:")
]
REFUSED += [
    ("walk", options)
    for options in ({"size": (24, -1)}, {"frames": 2.5}, {"seed": -1}, {"speed": 0})
]
# options that are not valid for these data
REFUSED += [
    ("digits", {"seed": 3}),
    ("mnist", {"speed": 2.0}),
    ("walk", {"grey": True}),
]


@pytest.mark.parametrize(("name", "options"), REFUSED, ids=str)
def test_load_refuses_invalid_arguments_by_name(name, options):
    with pytest.raises(gl.UsageError) as error:
        gl.load(name, **options)
    named = [f"{option}={value!r}" for option, value in options.items()] or NAMES
    named = ["width=-1"] if "size" in options else named
    assert [word for word in (repr(name), *named) if word not in str(error.value)] == []


@settings(max_examples=40, deadline=None)
@given(frames=st.integers(1, 40), length=st.integers(1, 40), start=st.integers(0, 50))
@example(frames=5000, length=20, start=0)  # the published protocol: 250 windows
def test_windows_follow_each_other_and_read_no_frame_early(frames, length, start):
    """A short sequence is repeated, and starting at a window skips the windows before it."""
    data, in_a_pass = Counter(frames), frames // length
    if in_a_pass == 0:
        with pytest.raises(
            gl.DataError, match=f"{frames} frames to train on; a window needs {length}"
        ):
            next(data.windows(length))
        return
    windows, read = data.windows(length, start=start), []
    for number in range(start, start + 2 * in_a_pass + 1):
        window, begin = next(windows), number % in_a_pass * length
        assert numbers(window) == list(range(max(0, begin - 1), begin + length))
        assert window.restart == (begin == 0)
        read += numbers(window) if number == start else range(begin, begin + length)
        assert data.decoded == read


@settings(max_examples=30, deadline=None)
@given(heldout_count=st.integers(2, 50), length=st.integers(1, 60))
def test_heldout_frames_follow_the_training_part(heldout_count, length):
    windows = list(Counter(frames=40, heldout_count=heldout_count).heldout(length))
    seen = [number for window in windows for number in numbers(window)[not window.restart :]]
    length = min(length, heldout_count)
    assert seen == list(range(40, 40 + heldout_count // length * length))
    assert [window.restart for window in windows] == [True] + (len(windows) - 1) * [False]
    with pytest.raises(gl.DataError, match="1 held-out frames"):
        next(Counter(frames=40, heldout_count=1).heldout(length))


def test_repeat_loss_is_that_of_the_held_out_part():
    data = gl.load("walk", frames=40, size=SMALL)
    frames = np.stack(list(data.stream(40, 60))) / 255
    assert data.repeat_loss() == pytest.approx(
        np.square(frames[1:] - frames[:-1]).mean(), rel=1e-12
    )


def test_load_walk_gives_the_frames_asked_for_by_seed_and_speed():
    data = gl.load("walk", frames=300, size=SMALL, seed=3, speed=2.0)
    assert data.options() == {
        "size": [24, 32],
        "frames": 300,
        "heldout": 30,
        "scene_seed": 3,
        "speed": 2.0,
    }
    first = next(data.windows(4)).frames
    for seed, speed, same in [(3, 2.0, True), (4, 2.0, False), (3, 1.0, False)]:
        other = next(gl.load("walk", size=SMALL, seed=seed, speed=speed).windows(4, seed=9)).frames
        assert (other == first).all() == same


def numbered_images(count):
    return Images(
        "numbered",
        np.arange(count)[:, None, None, None],
        np.arange(count, count + 7)[:, None, None, None],
    )


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 45), start=st.integers(0, 12), seed=st.integers(0, 2**31))
def test_windows_of_images_show_each_image_once_per_pass_in_a_new_order(length, start, seed):
    state, orders = torch.get_rng_state(), set()
    for each in range(seed, seed + 3):
        windows = taken(numbered_images(20).windows(length, each), start + 120 // length)
        later = taken(numbered_images(20).windows(length, each, start), 5)
        assert [numbers(window) for window in later][: len(windows) - start] == [
            numbers(window) for window in windows[start : start + 5]
        ]
        assert all(window.restart and len(window.frames) == length for window in windows)
        shown = [number for window in windows for number in numbers(window)]
        passes = {tuple(shown[begin : begin + 20]) for begin in (0, 20, 40, 60)}
        assert all(sorted(one) == list(range(20)) for one in passes)
        orders |= passes
    assert len(orders) == 12, (
        "and the second pass of a seed differs from the first pass of the next one"
    )
    assert (torch.get_rng_state() == state).all(), "torch's random state is unchanged"


def test_load_digits_gives_the_real_digits_enlarged_and_each_in_one_part_only():
    from sklearn.datasets import load_digits

    data, spoiled = gl.load("digits"), gl.load("digits")
    spoiled.heldout_images[:] = 0
    assert gl.load("digits").heldout_images.any(), "each caller gets a copy"
    every, small = np.concatenate([data.train, data.heldout_images])[:, 0], load_digits().images
    shrunk = np.stack(
        [np.asarray(Image.fromarray(digit).resize((8, 8), Image.Resampling.BOX)) for digit in every]
    )
    alike = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(shrunk, small, strict=True)]
    assert min(alike) > 0.95  # in scikit-learn's order: no image is in both parts


@pytest.mark.parametrize(
    "place", ["{}-images-idx3-ubyte", "{}-images.idx3-ubyte.gz", "MNIST/raw/{}-images-idx3-ubyte"]
)
def test_load_mnist_finds_files_under_their_usual_names(tmp_path, place):
    for split, count in (("train", 30), ("t10k", 20)):
        write_idx(tmp_path / place.format(split), noise(count, 28, 28))
    data = gl.load(f"mnist:{tmp_path}")
    assert (len(data.train), len(data.heldout_images)) == (30, 20)
    (tmp_path / place.format("train")).unlink()
    assert len(gl.load(f"mnist:{tmp_path}").heldout_images) == 20 // 10, (
        "the last tenth of the only part is held out"
    )


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A mirror of MNIST on this machine, listed after an empty one, and a cache for downloads."""
    served = tmp_path / "mirror"
    write_idx(served / "train-images-idx3-ubyte.gz", noise(30, 28, 28))
    write_idx(served / "t10k-images-idx3-ubyte.gz", noise(10, 28, 28))

    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=served)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(images, "MIRRORS", [f"{address}nowhere/", address])
        monkeypatch.setattr(
            images, "SHA256", {name: sha256(served / name) for name in images.SHA256}
        )
        monkeypatch.setattr("pooch.os_cache", lambda _: tmp_path / "cache")
        yield served
        server.shutdown()


@pytest.mark.parametrize("name", images.SHA256)
@pytest.mark.parametrize("how", ["missing", "of another content"])
def test_load_mnist_downloads_both_files_once_or_none(mirror, tmp_path, name, how):
    good = (mirror / name).read_bytes()
    if how == "missing":
        (mirror / name).unlink()
    else:
        write_idx(mirror / name, noise(30, 28, 28) // 2)
    for _ in range(2):  # an incomplete download is not taken for the file
        with pytest.raises(
            gl.DataError, match=rf"{name} could not be downloaded.*nowhere.*http://127"
        ):
            gl.load("mnist")
    assert not (tmp_path / "cache" / "mnist" / name).exists()
    (mirror / name).write_bytes(good)
    data = gl.load("mnist")
    assert (data.train[:, 0] == noise(30, 28, 28)).all()
    assert (data.heldout_images[:, 0] == noise(10, 28, 28)).all()
    (tmp_path / "cache" / "mnist" / name).write_bytes(good[:-1])
    assert (gl.load("mnist").train == data.train).all(), "a damaged file is downloaded again"


def test_mnist_mirrors_use_https_and_sha256_is_that_of_the_original_file(real_data):
    assert all(mirror.startswith("https://") for mirror in images.MIRRORS)
    file = real_data("mnist/t10k-images-idx3-ubyte.gz")
    assert sha256(file) == images.SHA256[file.name]


@pytest.mark.parametrize(("kind", "count"), [("mkv", 44), ("mp4", 44), ("images", 22)])
def test_load_gives_exact_frames_of_a_lossless_film_or_folder_of_odd_size(files, kind, count):
    data = gl.load(f"{'frames' if kind == 'images' else 'video'}:{getattr(files, kind)}", size=ODD)
    assert (len(data), data.options()["heldout"]) == (count - count // 11, count // 11)
    assert (every_frame(data) == files.frames[:count]).all()
    assert (np.stack(list(data.stream(5, 9))) == files.frames[5:9]).all()


def test_load_video_crops_the_middle_and_scales(tmp_path):
    frames = np.zeros((5, 40, 120, 3), dtype=np.uint8)
    frames[:, :, 40:80] = (200, 100, 50)  # the middle third, a square, is what a square crop shows
    write_video(tmp_path / "a.mkv", frames)
    (frame,) = gl.load(f"video:{tmp_path / 'a.mkv'}", size=(10, 10)).stream(0, 1)
    # pixels at the edges are blended with those beyond
    assert (frame[:, :, 1:-1] == np.array([200, 100, 50])[:, None, None]).all()


@pytest.mark.parametrize(
    ("shape", "size"), [((124, 214), (118, 26)), ((201, 386), (49, 184)), ((206, 174), (45, 42))]
)
def test_load_frames_crops_to_a_shape_that_no_number_of_pixels_has(tmp_path, shape, size):
    """The edges of such a crop lie between pixels; rounding must not move them outside."""
    write_images(tmp_path, noise(4, *shape, 3))
    assert every_frame(gl.load(f"frames:{tmp_path}", size=size)).shape == (4, 3, *size)


def test_load_frames_reads_a_folder_in_natural_order(tmp_path):
    frames = noise(12, 24, 32, 3)
    for number, frame in enumerate(frames):
        (tmp_path / f"shot_{number}.png").write_bytes(encoded(frame))
    assert (
        every_frame(gl.load(f"frames:{tmp_path}", size=SMALL)) == frames.transpose(0, 3, 1, 2)
    ).all()


# By Exif's number, 1 to 8.
SHOWN = [np.array, np.fliplr, lambda p: np.rot90(p, 2), np.flipud]
SHOWN += [
    lambda p: p.swapaxes(0, 1),
    lambda p: np.rot90(p, -1),
    lambda p: np.rot90(p, 2).swapaxes(0, 1),
    np.rot90,
]


@pytest.mark.parametrize("suffix", ["png", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_load_frames_reads_an_image_as_its_orientation_says(tmp_path, orientation, suffix):
    pixels = noise(24, 32, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for number in range(4):
        Image.fromarray(pixels).save(tmp_path / f"{number}.{suffix}", exif=exif)
    shown = SHOWN[orientation - 1](pixels)
    Image.fromarray(shown).save(tmp_path / f"upright.{suffix}")
    first, *_, upright = every_frame(gl.load(f"frames:{tmp_path}", size=shown.shape[:2]))
    assert (first == shown.transpose(2, 0, 1)).all()
    assert (upright == first).all()


def test_load_video_reads_any_video_in_grey(tmp_path):
    frames = noise(20, 45, 61)
    write_video(tmp_path / "grey.mkv", frames, pixels="gray")
    data = gl.load(f"video:{tmp_path / 'grey.mkv'}", size=(45, 61), grey=True)
    assert data.channels == 1
    assert (every_frame(data)[:, 0] == frames).all()


@pytest.mark.parametrize(
    ("asked", "trained", "heldout_count"), [(None, 40, 4), (20, 20, 2), (1000, 40, 4), (41, 40, 4)]
)
def test_load_video_gives_the_frames_asked_for_and_holds_the_next_ones_out(
    files, asked, trained, heldout_count
):
    data = gl.load(f"video:{files.mkv}", frames=asked, size=ODD)
    assert (data.channels, data.options()) == (
        3,
        {"size": [45, 61], "frames": trained, "heldout": heldout_count},
    )
    assert (next(data.heldout(20)).frames == files.frames[trained : trained + heldout_count]).all()


STORED = [
    ("png", np.uint8),
    ("png", np.uint16),
    ("tiff", np.uint8),
    ("tiff", ">u2"),
    ("tiff", np.float32),
]


@pytest.mark.parametrize(("suffix", "kind"), STORED)
def test_load_frames_requires_grey_for_grey_images_and_keeps_their_shades(tmp_path, suffix, kind):
    ramp = np.linspace(0, 255, 24 * 32).astype(np.uint8).reshape(24, 32)
    # With 16 bits, the shades are 257 apart, and a number is rounded to the nearest.
    shades = (
        ramp.astype(np.uint16) * 257 + 128 * (ramp < 255) if np.dtype(kind).itemsize == 2 else ramp
    ).astype(kind)
    write_images(tmp_path, np.stack(6 * [shades]), suffix)
    with pytest.raises(gl.DataError, match=r"000\.\w+: is grey .*grey=True"):
        gl.load(f"frames:{tmp_path}")
    data = gl.load(f"frames:{tmp_path}", size=SMALL, grey=True)
    assert data.channels == 1
    (frame,) = data.stream(0, 1)
    assert (frame[0] == ramp).all()


# --- content hashes of data -----------------------------------------------------------------------

CLIP, OTHER = noise(12, 24, 32, 3), noise(24, 24, 32, 3)[12:]


def load(where, **options):
    return gl.load(f"{'frames' if where.is_dir() else 'video'}:{where}", size=SMALL, **options)


def test_content_of_a_film_is_the_digest_of_its_bytes(tmp_path):
    film = write_video(tmp_path / "a.mkv", CLIP)
    first = load(film).content
    assert first == sha256(film)
    shutil.copy(film, tmp_path / "copy.mkv")
    assert load(tmp_path / "copy.mkv").content == first == load(film, grey=True).content
    assert load(write_video(film, OTHER)).content not in (first, "", None)


def test_content_of_a_folder_depends_on_names_bytes_and_order_of_its_images(tmp_path):
    def of(frames, folder="images"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
        return load(write_images(tmp_path / folder, frames)).content

    first = of(CLIP)
    assert of(CLIP) == of(CLIP, "elsewhere") == first
    (tmp_path / "images" / "011.png").rename(tmp_path / "images" / "012.png")
    renamed = load(tmp_path / "images").content
    assert len({first, renamed, of(OTHER), of(CLIP[::-1]), of(CLIP[:-1])}) == 5


def test_content_of_images_is_that_of_their_arrays_and_scenes_have_none(tmp_path):
    write_idx(tmp_path / "one" / "train-images-idx3-ubyte.gz", noise(30, 28, 28))
    write_idx(tmp_path / "two" / "train-images-idx3-ubyte", noise(30, 28, 28))
    one, two = (gl.load(f"mnist:{tmp_path / name}").content for name in ("one", "two"))
    assert one == two
    assert gl.load("digits").content not in ("", None, one)
    assert gl.load("walk").content == gl.load("moving-digits").content == ""


def touch(file):
    """Change the modification time of a file."""
    os.utime(file, ns=(10**18, 10**18))


@pytest.mark.parametrize("change", [touch, os.unlink], ids=["modified", "deleted"])
@pytest.mark.parametrize("kind", ["video", "frames"])
def test_check_unchanged_names_a_file_that_was_changed_since_it_was_loaded(tmp_path, kind, change):
    file = (
        write_video(tmp_path / "a.mkv", CLIP)
        if kind == "video"
        else write_images(tmp_path, CLIP) / "009.png"
    )
    data = load(file if kind == "video" else tmp_path)
    data.check_unchanged()
    change(file)
    for check in (data.check_unchanged, lambda: data.content):
        with pytest.raises(gl.DataError) as error:
            check()
        assert str(error.value).startswith(f"{file}: ")
        assert ("No such file" in str(error.value)) == (change is os.unlink)
