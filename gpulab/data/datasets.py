"""Data: streams of frames, of any length, and sets of images, as bytes, with a training and a held-out part."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import importlib.util
import itertools
import math
import string
import struct
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpulab.data import films, pictures
from gpulab.data.jpeg import decode_jpeg, encode_jpeg
from gpulab.data.scenes import MovingDigits, Walk
from gpulab.errors import DataError, UsageError, check_name, extra
from gpulab.files import cache_folder
from gpulab.store.identities import Stamps, check_unchanged, content_of, stamp

if TYPE_CHECKING:
    import PIL.Image

Bytes = npt.NDArray[np.uint8]

NAMES = ("digits", "mnist", "mnist:DIR", "walk", "moving-digits", "video:FILE", "frames:DIR", "jpeg:NAME")
FORMS = {name.rstrip(string.ascii_uppercase) for name in NAMES} - {"jpeg:"}  # with a colon where a place follows
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"}
MOST_BYTES = 1 << 31  # of MNIST's images, unpacked
PIECE = 1 << 20  # bytes that are read of them at once
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
SHA256 = {  # of MNIST's images, as they are downloaded
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
}
HELD_OUT = 10  # one frame in this many is held out, where the data's length is given


class Window(NamedTuple):
    """`frames` (t, C, H, W) of bytes to train on; `restart` says that the state begins anew."""

    frames: Bytes
    restart: bool


class Data(ABC):
    """A data set, in two parts, of frames of `channels` and `size` (height, width)."""

    name: str
    channels: int
    size: tuple[int, int]
    sequential: bool
    decoder: str | None = None  # of JPEG frames: part of how they arrive, not of what is learned
    threads: int = 0  # that may make frames ahead, for a device that would wait for them
    stamps: Stamps = {}  # of the files that are read later, as they were when the data were loaded

    @property
    def content(self) -> str | None:
        """A SHA-256 (hex) of what the frames are made from; `""` if from no file, `None` if that cannot be known."""
        # Of the images of a folder the names count, too: they say in which order the frames come.
        return content_of(self.stamps, named=len(self.stamps) > 1) if self.stamps else None

    def check_unchanged(self) -> None:
        """Raise `DataError`, naming the file, if one that is read has changed since the data were loaded."""
        check_unchanged(self.stamps)

    @abstractmethod
    def windows(self, length: int, seed: int = 0, start: int = 0) -> Iterator[Window]:
        """Training windows from number `start` on, endlessly; `length` frames are new in each."""

    @abstractmethod
    def heldout(self, length: int) -> Iterator[Window]:
        """The held-out frames, once, in windows."""

    @abstractmethod
    def __len__(self) -> int:
        """How many frames or images there are to train on."""

    def options(self) -> dict[str, Any]:
        """What, besides the name, makes this data: JSON-ready, for the record of a run."""
        return {"size": list(self.size)}

    def __repr__(self) -> str:
        noun, held = "frames" if self.sequential else "images", self.options()["heldout"]
        shape = f"{self.channels}×{self.size[0]}×{self.size[1]}"
        return f"{self.name}: {len(self):,} {noun} of {shape} to train on, {held:,} held out"


class Images(Data):
    """Images (N, 1, H, W) without an order: each seed has its own."""

    sequential = False

    def __init__(self, name: str, train: Bytes, heldout: Bytes) -> None:
        self.name, self.train, self.held = name, train, heldout
        self.channels, self.size = train.shape[1], (train.shape[2], train.shape[3])

    @functools.cached_property
    def content(self) -> str:
        """The SHA-256 of the images, of both parts."""
        parts = self.train, self.held
        content = hashlib.sha256(repr([(images.dtype.str, images.shape) for images in parts]).encode())
        for images in parts:
            content.update(np.ascontiguousarray(images).data)
        return content.hexdigest()

    def __len__(self) -> int:
        return len(self.train)

    def windows(self, length: int, seed: int = 0, start: int = 0) -> Iterator[Window]:
        """`length` images each; every pass over the images has an order of its own."""
        import torch

        def order(number: int) -> npt.NDArray[np.integer]:
            return torch.randperm(len(self), generator=torch.Generator().manual_seed(seed * 1_000_003 + number)).numpy()

        number, shown = divmod(start * length, len(self))
        remaining = order(number)[shown:]
        while True:
            while len(remaining) < length:
                number += 1
                remaining = np.concatenate([remaining, order(number)])
            yield Window(self.train[remaining[:length]], restart=True)
            remaining = remaining[length:]

    def heldout(self, length: int) -> Iterator[Window]:
        """The held-out images in their stored order."""
        for start in range(0, len(self.held), length):
            yield Window(self.held[start : start + length], restart=True)

    def options(self) -> dict[str, Any]:
        """The size and the numbers of images."""
        return super().options() | {"images": len(self.train), "heldout": len(self.held)}


class Sequence(Data):
    """Frames in order, (C, H, W) each: `frames` to train on, then `held` that are held out.

    As in the published loop, the first window of a pass has `length` frames, and each later one begins with
    the last frame of the one before. A sequence shorter than the training is passed over again.
    """

    sequential = True

    def __init__(self, name: str, channels: int, size: tuple[int, int], frames: int, held: int) -> None:
        self.name, self.channels, self.size = name, channels, size
        self.frames, self.held = frames, held

    def __len__(self) -> int:
        return self.frames

    @abstractmethod
    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """Frames `start` to `stop` in order, training part and held-out part together."""

    def windows(self, length: int, seed: int = 0, start: int = 0) -> Iterator[Window]:  # noqa: ARG002
        """Windows in order, endlessly, whatever the seed."""
        in_a_pass = self.frames // length
        if in_a_pass == 0:
            raise DataError(f"{self.name}: {self.frames} frames to train on; a window needs {length}")
        for number in itertools.chain([start % in_a_pass], itertools.repeat(0)):
            yield from self._pass(length, number, in_a_pass, 0)

    def heldout(self, length: int) -> Iterator[Window]:
        """The held-out frames in windows, the state beginning anew at the first."""
        if self.held < 2:
            raise DataError(f"{self.name}: {self.held} held-out frames; a prediction needs 2")
        length = min(length, self.held)
        yield from self._pass(length, 0, self.held // length, self.frames)

    def repeat_loss(self, length: int = 20) -> float:
        """The mean squared error, of frames in [0, 1], of repeating the last held-out frame: to be beaten."""
        frames = (window.frames / 255 for window in self.heldout(length))
        return float(np.concatenate([np.square(np.diff(part, axis=0)).mean((1, 2, 3)) for part in frames]).mean())

    def missing_colour_loss(self, length: int = 20) -> float:
        """The least mean squared error, over the held-out frames, that a network with one dead output channel has."""
        squares = [np.square(window.frames / 255).mean((0, 2, 3)) for window in self.heldout(length)]
        return float(np.mean(squares, axis=0).min() / self.channels)

    def options(self) -> dict[str, Any]:
        """The size and the numbers of frames."""
        return super().options() | {"frames": self.frames, "heldout": self.held}

    def _pass(self, length: int, first: int, stop: int, offset: int) -> Iterator[Window]:
        """Windows number `first` to `stop` of the frames from `offset` on, with `length` new frames each."""
        frames = self.stream(offset + max(0, first * length - 1), offset + stop * length)
        window = [next(frames)] if first else []
        for number in range(first, stop):
            window = [*window[-1:], *itertools.islice(frames, length)]
            yield Window(np.stack(window), restart=number == 0)


class Rendered(Sequence):
    """One of the project's own scenes, of any length."""

    def __init__(self, name: str, scene: Walk | MovingDigits, frames: int, held: int) -> None:
        super().__init__(name, 3, scene.size, frames, held)
        self.scene = scene

    @property
    def content(self) -> str:
        """Nothing: the frames come from no file."""
        return ""

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """Frames `start` to `stop`, without it endlessly."""
        return self.scene.stream(start, stop, self.threads)

    def options(self) -> dict[str, Any]:
        """The size, the numbers of frames, the scene's seed and its speed."""
        return super().options() | {"scene_seed": self.scene.seed, "speed": self.scene.speed}


class Video(Sequence):
    """A video file that PyAV can decode, centre-cropped to the shape of `size` and scaled to it; see `films`.

    Frames further on are reached by decoding those before them.
    """

    def __init__(self, file: Path, size: tuple[int, int], frames: int | None, grey: bool) -> None:
        if file.is_dir():
            raise DataError(f"{file}: a folder, not a video; frames:{file} takes the images in it")
        self.file, self.grey, name = file, grey, f"video:{file}"
        self.stamps = {file: stamp(file)}
        super().__init__(name, 1 if grey else 3, size, *_split(name, films.count_frames(file, grey), frames))

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """Frames `start` to `stop`, decoded as they are asked for."""
        import av

        stop, count = self.frames + self.held if stop is None else stop, 0
        try:
            for frame in itertools.islice(films.decoded(self.file), stop):
                count += 1
                if count == stop:
                    self.check_unchanged()
                if count > start:
                    yield _fit(frame.to_image(), self.size, self.grey)
        except av.FFmpegError as error:
            self.check_unchanged()  # which would be why
            raise DataError(f"{self.file}: frame {count} cannot be decoded: {films.reason(error)}") from None
        if count < stop:
            self.check_unchanged()
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
                frame = _fit(image, self.size, self.grey)
            check_unchanged({file: self.stamps[file]})
            yield frame


class Recompressed(Sequence):
    """Another sequence, each frame encoded as a JPEG file and decoded again by a decoder."""

    def __init__(self, inner: Data, quality: int = 75, subsampling: str = "4:2:0", decoder: str = "pillow") -> None:
        # What cannot be is told now.
        decode_jpeg(encode_jpeg(np.zeros((3, 8, 8), np.uint8), quality, subsampling), decoder)
        if not isinstance(inner, Sequence):
            raise UsageError(f"data 'jpeg:{inner.name}': expected a sequence of frames after jpeg:, such as jpeg:walk")
        super().__init__(f"jpeg:{inner.name}", inner.channels, inner.size, inner.frames, inner.held)
        self.inner, self.quality, self.subsampling, self.stamps = inner, quality, subsampling, inner.stamps
        self.decoder: str = decoder

    @property
    def content(self) -> str | None:
        """That of the inner data."""
        return self.inner.content

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """Frames `start` to `stop`, encoded and decoded as they are asked for."""
        for frame in self.inner.stream(start, stop):
            yield decode_jpeg(encode_jpeg(frame, self.quality, self.subsampling), self.decoder)

    def options(self) -> dict[str, Any]:
        """What makes the inner data, and how its frames are encoded."""
        return self.inner.options() | {"quality": self.quality, "subsampling": self.subsampling}


@extra("notebooks")
def load(
    name: str,
    frames: int | None = None,
    size: tuple[int, int] = (48, 64),
    seed: int = 0,
    speed: float = 1.0,
    grey: bool = False,
    quality: int | None = None,
    subsampling: str | None = None,
    decoder: str | None = None,
) -> Data:
    """A data set by name.

    - `digits`: scikit-learn's 1,797 real handwritten digits, at 28×28.
    - `mnist`: the original files, downloaded once; `mnist:DIR`: found in a folder. Where only the test split is
      there, it serves.
    - `walk`: a first-person walk, `moving-digits`: two digits that drift and bounce; both are rendered.
    - `video:FILE`, `frames:DIR`: your own.
    - `jpeg:NAME`: the frames of one of the above, encoded as JPEG by Pillow and decoded again.

    Args:
        name: One of these.
        frames: How many to train on; a tenth as many again, those that follow, are held out.
        size: (height, width) of a frame in pixels.
        seed: What a rendered scene is drawn from.
        speed: The motion of a rendered scene, as a multiple.
        grey: Read files with one channel; without it, grey input is refused rather than passed off as colour.
        quality: Of the JPEG files, 1 to 100 (75).
        subsampling: Of their colours (`4:2:0`): see `encode_jpeg`.
        decoder: Who decodes them (`pillow`): see `decode_jpeg`.

    Returns:
        Data, whose `windows(length)` and `heldout(length)` give frames (t, C, H, W) of bytes.

    Raises:
        UsageError: For an unknown name, or an option that makes no sense.
        DataError: For a file that is missing, damaged or of another kind.

    Examples:
        >>> load("walk", frames=100, size=(24, 32))
        walk: 100 frames of 3×24×32 to train on, 20 held out
    """
    check_name(name)
    kind, _, place = name.partition(":")
    options: dict[str, Any] = {"quality": quality, "subsampling": subsampling, "decoder": decoder}
    of_jpeg = {option: value for option, value in options.items() if value is not None}
    if kind == "jpeg" and place.partition(":")[0] not in ("", "jpeg"):
        return Recompressed(load(place, frames, size, seed, speed, grey), **of_jpeg)
    if of_jpeg:
        raise UsageError(f"data {name!r}: {', '.join(of_jpeg)} goes with JPEG frames; write jpeg:{name}")
    if (f"{kind}:" if place else kind) not in FORMS:
        raise UsageError(f"data {name!r}: expected one of {', '.join(NAMES)}")
    if not (isinstance(size, tuple | list) and len(size) == 2 and all(_is_whole(edge, 1) for edge in size)):
        raise UsageError(f"data {name!r}: size={size!r} must be (height, width), two whole numbers above 0")
    if not (frames is None or _is_whole(frames, 1)) or not _is_whole(seed, 0):
        raise UsageError(f"data {name!r}: frames={frames!r} must be a whole number above 0, seed={seed!r} one from 0")
    if not 0 < speed < float("inf"):
        raise UsageError(f"data {name!r}: speed={speed!r} must be a number above 0")
    if kind == "digits":
        return Images("digits", *map(np.copy, np.split(_digits(), [1500])))  # for each caller its own
    if kind == "mnist":
        return _mnist(place)
    if kind == "video":
        return Video(Path(place), size, frames, grey)
    if kind == "frames":
        return Folder(Path(place), size, frames, grey)
    speed, frames = float(speed), frames or 1000  # 2 and 2.0 are one speed, and give one record
    height, width = size
    scene = Walk(seed, (height, width), speed) if kind == "walk" else MovingDigits(_digits()[:, 0], seed, size, speed)
    return Rendered(kind, scene, frames, max(20, frames // HELD_OUT))


def _is_whole(number: Any, least: int) -> bool:
    return isinstance(number, int | np.integer) and bool(number >= least)


# --- digits and MNIST --------------------------------------------------------------------------------


@functools.cache
def _digits() -> Bytes:
    """The digits of scikit-learn, 8×8 in 17 shades, enlarged to 28×28: (1797, 1, 28, 28)."""
    from PIL import Image

    # Only the file is wanted; importing scikit-learn for it costs a process 70 MB and a second.
    scikit_learn = importlib.util.find_spec("sklearn")
    if scikit_learn is None or scikit_learn.origin is None:
        raise ModuleNotFoundError(name="scikit-learn")
    package = Path(scikit_learn.origin).parent
    table = np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    small = map(Image.fromarray, np.minimum(table[:, :64].reshape(-1, 8, 8) * 16, 255).astype(np.uint8))
    return np.stack([np.asarray(digit.resize((28, 28), Image.Resampling.BICUBIC)) for digit in small])[:, None]


def _mnist(folder: str) -> Images:
    files = _find_mnist(Path(folder)) if folder else list(map(_downloaded, SHA256))
    if not files:
        neither = "neither train-images-idx3-ubyte nor t10k-images-idx3-ubyte (as they are or .gz)"
        raise DataError(f"{folder}: holds {neither}; 'mnist' without a folder downloads them")
    parts = [_read_idx(file) for file in files]
    if len(parts) == 1:
        count = len(parts[0])
        if count < HELD_OUT:
            raise DataError(f"{files[0]}: holds {count} images; at least {HELD_OUT} are needed")
        parts = np.split(parts[0], [count - count // HELD_OUT])
    if parts[0].shape[1:] != parts[1].shape[1:]:
        raise DataError(f"{files[1]}: images of another size than in {files[0]}")
    return Images("mnist", *parts)


def _find_mnist(folder: Path) -> list[Path]:
    """The files of the training and of the test images, as far as they are there."""
    files: list[Path] = []
    for split in ("train", "t10k"):
        folders = (folder, folder / "MNIST" / "raw", folder / "raw")  # torchvision puts them below
        names = (each / f"{split}-images-idx3-ubyte{suffix}" for each in folders for suffix in ("", ".gz"))
        files += itertools.islice(filter(Path.is_file, names), 1)
    return files


def _downloaded(name: str) -> Path:
    """A file of MNIST in the user's cache: as it is there, or fetched from the first mirror that has it."""
    import pooch

    folder, reasons = cache_folder() / "mnist", []
    for mirror in MIRRORS:
        try:
            return Path(pooch.retrieve(mirror + name, f"sha256:{SHA256[name]}", name, folder, progressbar=True))
        except (OSError, ValueError) as error:
            reasons.append(f"{mirror}: {films.reason(error)}")
    raise DataError(f"{name} could not be downloaded to {folder}: {'; '.join(reasons)}")


def _read_idx(file: Path) -> Bytes:
    """The images of an IDX file, (N, 1, H, W): the magic number 2051, three lengths, then bytes."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
            magic, *shape = struct.unpack(">4I", stream.read(16).ljust(16, b"\0"))
            promised = math.prod(shape)
            if magic != 2051 or not 0 < promised <= MOST_BYTES:
                raise DataError(
                    f"{file}: no IDX file of images that can be read: begins with {magic} (expected 2051) and promises "
                    f"{shape[0]} images of {shape[1]}×{shape[2]} (1 to {MOST_BYTES:,} bytes are read)"
                )
            # In pieces: a stream makes room at once for all that it may read.
            pieces = iter(functools.partial(stream.read, PIECE), b"")
            content = b"".join(itertools.islice(pieces, promised // PIECE + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be unpacked: {films.reason(error)}") from None
    if len(content) != promised:
        held = f"{len(content):,} bytes" if len(content) < promised else "more"
        raise DataError(f"{file}: promises {shape[0]} images of {shape[1]}×{shape[2]} and holds {held}")
    return np.frombuffer(content, np.uint8).reshape(shape[0], 1, *shape[1:])


# --- video files and folders of frames -----------------------------------------------------------------


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
    if not folder.is_dir():
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
    if not file.is_file():
        raise DataError(f"{file}: cannot be read: no such file, or a folder or a pipe")
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
        raise DataError(f"{file}: {known}: {films.reason(error)}") from None


def _fit(image: PIL.Image.Image, size: tuple[int, int], grey: bool) -> Bytes:
    """Cut the middle out in the shape of `size` and scale it: (C, H, W) bytes."""
    from PIL import Image

    scale = min(image.width / size[1], image.height / size[0])
    width, height = size[1] * scale, size[0] * scale
    left, top = (image.width - width) / 2, (image.height - height) / 2
    if image.mode.startswith("I;16"):  # Pillow would cut 16 bits off at 255
        image = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    box = (left, top, left + width, top + height)
    image = image.convert("L" if grey else "RGB").resize(size[::-1], Image.Resampling.BILINEAR, box=box)
    return pictures.channels_first(np.asarray(image))
