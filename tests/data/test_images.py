"""Images and films are read as they are displayed, or rejected: transparency, wide numbers,
negatives, ink and animations.
"""

import struct
import zlib

import av
import numpy as np
import pytest
from PIL import Image

import gpulab as gl
from tests.data._helpers import SMALL, every_frame, noise

PICTURE = noise(*SMALL, 3)
OPAQUE = np.full((*SMALL, 1), 255, np.uint8)
HIDDEN = OPAQUE.copy()
HIDDEN[5, 7] = 0
FAINT = OPAQUE.copy()
FAINT[5, 7] = 254
GREY = np.linspace(0, 65535, SMALL[0] * SMALL[1]).astype(np.uint16).reshape(SMALL)


def colour(alpha=None):
    return Image.fromarray(PICTURE if alpha is None else np.concatenate([PICTURE, alpha], -1))


def grey(alpha=OPAQUE):
    image = colour().convert("LA")
    image.putalpha(Image.fromarray(alpha[..., 0]))
    return image


def palette():
    return colour().quantize(32)


def write_png16(file, kind, numbers, transparent=b""):
    """Write a PNG with 16 bits, which Pillow can write only in grey.

    `transparent` is the colour that is transparent.
    """

    def chunk(name, content):
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    height, width = numbers.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in numbers)
    head = chunk(b"IHDR", struct.pack(">2I5B", width, height, 16, kind, 0, 0, 0))
    note = chunk(b"tRNS", transparent) if transparent else b""
    file.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + head
        + note
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def write_negative(file, image):
    """Write a TIFF in which zero is white."""
    image.save(file)
    before, after = (struct.pack("<2HIH", 262, 3, 1, value) for value in (1, 0))
    content = file.read_bytes()
    assert before in content
    file.write_bytes(content.replace(before, after))


def load_images(folder, write, suffix, **options):
    for number in range(4):
        write(folder / f"{number}.{suffix}")
    return gl.load(f"frames:{folder}", size=SMALL, **options)


def saved(image, **options):
    return lambda file: image.save(file, **options)


FIRST = tuple(map(int, PICTURE[0, 0]))
WIDE = np.concatenate([PICTURE, OPAQUE], -1).astype(np.uint16) * 257
ALMOST = WIDE.copy()
ALMOST[5, 7, 3] -= 300
TRANSPARENT = {
    "rgba": (saved(colour(HIDDEN)), "png", {}),
    "faint": (saved(colour(FAINT)), "png", {}),
    "webp": (saved(colour(HIDDEN), lossless=True), "webp", {}),
    "tiff": (saved(colour(HIDDEN)), "tiff", {}),
    "shade of a palette": (saved(palette(), transparency=palette().getpixel((0, 0))), "png", {}),
    "faint shade of a palette": (
        saved(palette(), transparency=bytes([255] * 3 + [9] + [255] * 28)),
        "png",
        {},
    ),
    "one colour": (saved(colour(), transparency=FIRST), "png", {}),
    "16 bits": (lambda file: write_png16(file, 6, ALMOST), "png", {}),
    "one colour of 16 bits": (
        lambda f: write_png16(f, 2, WIDE[..., :3], WIDE[0, 0, :3].astype(">u2").tobytes()),
        "png",
        {},
    ),
    "grey": (saved(grey(HIDDEN)), "png", {"grey": True}),
    "one shade": (
        saved(colour().convert("L"), transparency=colour().convert("L").getpixel((3, 3))),
        "png",
        {"grey": True},
    ),
    "one shade of 16 bits": (
        lambda f: write_png16(f, 0, GREY, struct.pack(">H", GREY[3, 3])),
        "png",
        {"grey": True},
    ),
    "black or white": (saved(colour().convert("1"), transparency=0), "png", {"grey": True}),
}


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_images_with_transparent_places_are_refused(tmp_path, kind):
    write, suffix, options = TRANSPARENT[kind]
    with pytest.raises(
        gl.DataError, match=rf"0\.{suffix}: has transparent pixels, and their background"
    ):
        load_images(tmp_path, write, suffix, **options)


READ = {
    "an alpha channel that hides nothing": (saved(colour(OPAQUE)), "png", {}, PICTURE),
    "a palette": (saved(palette()), "png", {}, np.asarray(palette().convert("RGB"))),
    "a transparent shade that does not occur": (
        saved(palette(), transparency=40),
        "png",
        {},
        np.asarray(palette().convert("RGB")),
    ),
    "a palette with alpha": (
        saved(palette().convert("PA")),
        "tiff",
        {},
        np.asarray(palette().convert("RGB")),
    ),
    "16 bits in colour": (lambda file: write_png16(file, 2, WIDE[..., :3]), "png", {}, PICTURE),
    "16 bits and alpha": (lambda file: write_png16(file, 6, WIDE), "png", {}, PICTURE),
    "grey with alpha": (saved(grey()), "png", {"grey": True}, np.asarray(colour().convert("L"))),
    "black or white": (
        saved(colour().convert("1")),
        "png",
        {"grey": True},
        np.asarray(colour().convert("1")).astype(np.uint8) * 255,
    ),
    "16 bits in a negative": (
        lambda file: write_negative(file, Image.fromarray(65535 - GREY)),
        "tiff",
        {"grey": True},
        ((GREY.astype(int) + 128) // 257).astype(np.uint8),
    ),
    "8 bits in a negative": (
        lambda file: write_negative(file, Image.fromarray(255 - PICTURE[..., 0])),
        "tiff",
        {"grey": True},
        PICTURE[..., 0],
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_images_of_every_kind_are_read_as_they_are_shown(tmp_path, kind):
    write, suffix, options, shown = READ[kind]
    (frame,) = load_images(tmp_path, write, suffix, **options).stream(0, 1)
    assert np.array_equal(frame, np.atleast_3d(shown).transpose(2, 0, 1))


def tiff(numbers):
    return saved(Image.fromarray(numbers))


UNREADABLE = {
    "amounts of ink": (saved(colour().convert("CMYK")), "jpg", {}, r"amounts of ink \(CMYK\)"),
    "amounts of ink, in grey": (
        saved(colour().convert("CMYK")),
        "tiff",
        {"grey": True},
        r"amounts of ink \(CMYK\)",
    ),
    "L*a*b*": (saved(Image.new("LAB", SMALL[::-1])), "tiff", {}, r"L\*a\*b\*"),
    "up to 1": (
        tiff(np.float32(GREY) / 65535),
        "tiff",
        {"grey": True},
        r"\(float32\) from 0 to 1, .* 8 or 16 bits",
    ),
    "above 255": (
        tiff(np.float32(GREY)),
        "tiff",
        {"grey": True},
        r"\(float32\) from 0 to 6.55e\+04, .* 8 or 16 bits",
    ),
    "below 0": (
        tiff(np.float32(GREY) / 300 - 9),
        "tiff",
        {"grey": True},
        r"\(float32\) from -9 to 209, ",
    ),
    "not a number": (
        tiff(np.full(SMALL, np.nan, np.float32)),
        "tiff",
        {"grey": True},
        "from nan to nan",
    ),
    "32 bits": (
        tiff(GREY.astype(np.int32)),
        "tiff",
        {"grey": True},
        r"\(int32\) from 0 to 6.55e\+04",
    ),
    "two pages": (
        saved(colour(), save_all=True, append_images=[colour().rotate(180)]),
        "tiff",
        {},
        "2 pictures",
    ),
    "animated PNG": (
        saved(colour(), save_all=True, append_images=[colour().rotate(180)]),
        "png",
        {},
        "2 pictures",
    ),
    "animated WebP": (
        saved(colour(), save_all=True, append_images=[colour().rotate(180)]),
        "webp",
        {},
        "2 pictures",
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_images_that_do_not_say_how_they_are_shown_are_refused(tmp_path, kind):
    write, suffix, options, words = UNREADABLE[kind]
    with pytest.raises(gl.DataError, match=rf"0\.{suffix}: holds .*{words}"):
        load_images(tmp_path, write, suffix, **options)


# --- films ----------------------------------------------------------------------------------------


def write_film(file, codec, pixels, alpha, options=()):
    content = np.kron(np.concatenate([PICTURE, alpha], -1), np.ones((4, 4, 1), np.uint8))
    with av.open(str(file), "w") as output:
        stream = output.add_stream(codec, rate=25, options=dict(options))
        stream.height, stream.width = content.shape[:2]
        stream.pix_fmt = pixels
        for number in range(6):
            frame = av.VideoFrame.from_ndarray(content, format="rgba").reformat(format=pixels)
            frame.pts = number
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file


def write_gif(file, alpha):
    first, *others = (
        Image.fromarray(np.roll(np.concatenate([PICTURE, alpha], -1), n, 1)) for n in range(6)
    )
    first.save(file, save_all=True, append_images=others, disposal=2)
    return file


FILMS = {
    "png.mov": ("png", "rgba"),
    "rle.mov": ("qtrle", "argb"),
    "ffv1.mkv": ("ffv1", "bgra"),
    "deep.mov": ("png", "rgba64be"),
}


@pytest.mark.parametrize("kind", FILMS)
def test_films_with_transparent_places_are_refused_and_opaque_ones_read(tmp_path, kind):
    file = write_film(tmp_path / kind, *FILMS[kind], HIDDEN)
    with pytest.raises(gl.DataError, match="frame 0 has transparent pixels, and their background"):
        gl.load(f"video:{file}", size=SMALL)
    film = gl.load(f"video:{write_film(tmp_path / kind, *FILMS[kind], OPAQUE)}", size=(96, 128))
    assert np.array_equal(every_frame(film)[0][:, ::4, ::4], PICTURE.transpose(2, 0, 1))


def test_gif_with_transparent_places_is_refused_and_an_opaque_one_read(tmp_path):
    with pytest.raises(gl.DataError, match="has transparent pixels"):
        gl.load(f"video:{write_gif(tmp_path / 'a.gif', HIDDEN)}")
    assert len(every_frame(gl.load(f"video:{write_gif(tmp_path / 'b.gif', OPAQUE)}"))) == 6


def test_film_whose_transparency_lies_beside_its_frames_is_refused(tmp_path):
    file = write_film(tmp_path / "a.webm", "libvpx-vp9", "yuva420p", HIDDEN, {"auto-alt-ref": "0"})
    with pytest.raises(gl.DataError, match=r"transparency .*\(alpha_mode\), which is not read"):
        gl.load(f"video:{file}")


@pytest.mark.parametrize(
    ("codec", "pixels"), [("ffv1", "gray16le"), ("png", "ya8"), ("png", "monob")]
)
def test_grey_films_of_every_format_must_be_asked_for_in_grey(tmp_path, codec, pixels):
    file = write_film(
        tmp_path / "a.mov" if codec == "png" else tmp_path / "a.mkv", codec, pixels, OPAQUE
    )
    with pytest.raises(gl.DataError, match=rf"is grey \({pixels}\); use grey=True"):
        gl.load(f"video:{file}")
    assert gl.load(f"video:{file}", grey=True).channels == 1
