"""If a file is damaged, cut off, too large or of the wrong kind, an error names the file and what
is wrong with it.
"""

import gzip
import os
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpulab as gl
from tests.data._helpers import (
    SMALL,
    encoded,
    every_frame,
    idx,
    noise,
    write_images,
    write_sound,
    write_video,
)

WHOLE = idx(noise(30, 28, 28))
PACKED = gzip.compress(WHOLE, mtime=0)
IMAGE = encoded(noise(24, 32, 3))
TRAIN, TEST = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"
PROSE = b"Call me Ishmael.\n" * 100
NO_IMAGE = "not a complete image"


def damaged(content, place, by=b"\xff\xff\xff\xff"):
    return content[:place] + by + content[place + len(by) :]


def a_png_of(edge):
    """Return a PNG file of 84 bytes whose header declares `edge` × `edge` pixels."""

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">2I5B", edge, edge, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


MALFORMED = [
    (f"{TEST}.gz", damaged(PACKED, 12), "cannot be unpacked"),
    (f"{TEST}.gz", b"", "begins with 0"),
    (
        f"{TEST}.gz",
        gzip.compress(WHOLE[:4] + struct.pack(">3I", 2**31, 28, 28)),
        "2147483648 images",
    ),
    (TEST, idx(noise(30, 28, 28), magic=2049), "2049"),
    (TEST, WHOLE + b"x", "30 images of 28×28"),
    (TRAIN, WHOLE[:10], "30 images of 0×0"),
    ("004.png", PROSE, NO_IMAGE),
    # a wrong length: the next chunk begins elsewhere
    (
        "004.png",
        damaged(IMAGE, IMAGE.index(b"IDAT") - 1, b"\x07"),
        NO_IMAGE,
    ),
    ("004.png", encoded(noise(20, 32, 3)), "is 32×20 pixels, the images before it 32×24"),
    ("004.png", encoded(*noise(3, 24, 32, 3)), "3 pictures"),
    # Pillow would pass an EPS file, whatever its name, to Ghostscript, which runs it.
    (
        "004.png",
        encoded(noise(24, 32, 3), suffix="eps"),
        f"{NO_IMAGE} of a known format (PNG, JPEG",
    ),
    ("004.png", a_png_of(12_000), "12,000×12,000 pixels"),  # more pixels than gpulab allows
    ("004.png", a_png_of(16_000), "256000000 pixels"),  # more pixels than Pillow allows
    ("text.mp4", PROSE, "not a video"),
    # a list that would open another file
    (
        "list.mp4",
        b"ffconcat version 1.0\nfile 'film.mkv'\n",
        "not a video",
    ),
    (
        "hls.mp4",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfilm.mkv\n#EXT-X-ENDLIST\n",
        "not a video",
    ),
    ("short.mkv", lambda file: write_video(file, noise(3, 24, 32, 3)), "3 frames; at least 4"),
    (
        "grey.mkv",
        lambda file: write_video(file, noise(20, 45, 61), pixels="gray"),
        "is grey (gray); use grey=True",
    ),
    ("sound.wav", write_sound, "no video"),
    ("missing.mp4", lambda _: None, "No such file"),
    ("folder", os.mkdir, "a folder"),
]
if hasattr(os, "mkfifo"):  # Windows has no pipes in folders
    MALFORMED += [("a pipe", os.mkfifo, "a pipe"), ("005.png", os.mkfifo, "a pipe")]


def load(file):
    """Load everything from the folder of an image or IDX file, or from a film."""
    if "idx" in file.name:
        data = gl.load(f"mnist:{file.parent}")
        return np.concatenate([data.train, data.heldout_images])
    name = f"frames:{file.parent}" if file.name.startswith("00") else f"video:{file}"
    return every_frame(gl.load(name, size=SMALL))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "content", "why"), MALFORMED, ids=lambda value: value if type(value) is str else ""
)
def test_malformed_file_is_named_with_what_is_wrong(tmp_path, monkeypatch, name, content, why):
    monkeypatch.setattr(
        "PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("Ghostscript was started")
    )
    write_video(tmp_path / "film.mkv", noise(5, 24, 32, 3))
    write_images(tmp_path, noise(5, 24, 32, 3))
    file = tmp_path / name
    content(file) if callable(content) else file.write_bytes(content)
    with pytest.raises(gl.DataError) as error:
        load(file)
    assert [word for word in (str(file), why) if word not in str(error.value)] == []
    assert "object at 0x" not in str(error.value)


# These files contain a checksum. In other files, only a wrong length can be detected.
SUMMED = [
    "004.png",
    f"{TEST}.gz",
]
ENDING = [*SUMMED, TEST, *(f"004.{suffix}" for suffix in ("jpg", "webp", "bmp", "tiff"))]


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Files in separate folders, their contents, and the data loaded from them."""
    found = {}
    for name in ENDING:
        file = tmp_path_factory.mktemp("valid") / name
        if "idx" in name:
            file.write_bytes(PACKED if name.endswith("gz") else WHOLE)
        else:
            write_images(file.parent, noise(5, 24, 32, 3), file.suffix[1:])
        found[name] = file, file.read_bytes(), load(file)
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(st.sampled_from(SUMMED), st.binary(min_size=1, max_size=9))
    | st.tuples(st.sampled_from(ENDING)),
    st.floats(0, 1, exclude_max=True),
)
def test_malformed_file_damaged_or_cut_anywhere_never_loads_as_another(valid, damage, share):
    name, *by = damage
    file, content, expected = valid[name]
    place = int(share * len(content))
    file.write_bytes(damaged(content, place, *by) if by else content[:place])
    try:
        found, said = load(file), ""
    except gl.DataError as error:
        found, said = None, str(error)
    assert (str(file) in said and "\n" not in said) if said else np.array_equal(found, expected)


OTHER_SIZE = f"{TEST}: a single image, or images of a different size"
FOLDERS = [  # the name of the data, the files in the folder, and the error
    ("frames:{}/missing", {}, "missing: no such folder"),
    ("frames:{}", {}, "holds no images"),
    (
        "mnist:{}",
        {"a.csv": b""},
        f"holds a.csv, but neither {TRAIN} nor {TEST}.*MNIST/raw; 'mnist' downloads them",
    ),
    ("mnist:{}/a.csv", {"a.csv": b""}, "a.csv: a file, not a folder; 'mnist:DIR'"),
    ("mnist:{}", {TRAIN: WHOLE, TEST: idx(noise(12, 8, 8))}, OTHER_SIZE),
    ("mnist:{}", {TEST: idx(noise(1, 8, 8))}, OTHER_SIZE),
]


@pytest.mark.parametrize(("name", "files", "why"), FOLDERS)
def test_malformed_folder_without_images_or_with_images_of_two_sizes_is_named(
    tmp_path, name, files, why
):
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    with pytest.raises(gl.DataError, match=rf"(?s){tmp_path}.*{why}"):
        gl.load(name.format(tmp_path))


def test_malformed_video_with_a_hole_is_named(real_data, tmp_path):
    content = real_data("video/road_camera.mp4").read_bytes()
    (tmp_path / "hole.mp4").write_bytes(damaged(content, len(content) // 2, bytes(20_000)))
    with pytest.raises(
        gl.DataError, match=r"\A.*hole\.mp4: frame \d+ is damaged or incomplete; .*\Z"
    ):
        gl.load(f"video:{tmp_path / 'hole.mp4'}", size=SMALL)


def test_malformed_archive_of_small_size_does_not_use_much_memory(tmp_path):
    """Of 100 kB that unpack to 100 MB, only as much is read as the header declares."""
    (tmp_path / f"{TEST}.gz").write_bytes(gzip.compress(WHOLE[:16] + bytes(100 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(gl.DataError, match=r"declares 30 images of 28×28 but holds more"):
            gl.load(f"mnist:{tmp_path}")
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
