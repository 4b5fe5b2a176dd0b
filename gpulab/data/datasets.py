"""A data set by its name: rendered scenes, images, films and folders of images."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import itertools
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpulab.data.base import HELD_OUT, Bytes, Data, Sequence, Window, check_folder
from gpulab.data.films import Folder, Video
from gpulab.data.scenes import MovingDigits, Walk
from gpulab.errors import DataError, UsageError, check_count, extra
from gpulab.files import reading

# --- images -----------------------------------------------------------------------------------------------

MOST_BYTES = 1 << 28  # of MNIST's images, unpacked
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
SHA256 = {  # of MNIST's images, as they are downloaded
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
}


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
        shapes = repr([(images.dtype.str, images.shape) for images in parts]).encode()
        return hashlib.sha256(b"".join([shapes, *(images.tobytes() for images in parts)])).hexdigest()

    def __len__(self) -> int:
        return len(self.train)

    def windows(self, length: int, seed: int = 0, start: int = 0) -> Iterator[Window]:
        """`length` images each; every pass over the images has an order of its own."""
        import torch

        first, shown = divmod(start * length, len(self))
        generators = (torch.Generator().manual_seed(seed * 1_000_003 + number) for number in itertools.count(first))
        orders = (torch.randperm(len(self), generator=generator).tolist() for generator in generators)
        remaining = itertools.islice(itertools.chain.from_iterable(orders), shown, None)
        while True:
            yield Window(self.train[list(itertools.islice(remaining, length))], restart=True)

    def heldout(self, length: int) -> Iterator[Window]:
        """The held-out images in their stored order."""
        for start in range(0, len(self.held), length):
            yield Window(self.held[start : start + length], restart=True)

    def options(self) -> dict[str, Any]:
        """The size and the numbers of images."""
        return super().options() | {"images": len(self.train), "heldout": len(self.held)}


@functools.cache
def digits() -> Bytes:
    """The digits of scikit-learn, 8×8 in 17 shades, enlarged to 28×28: (1797, 1, 28, 28)."""
    from PIL import Image

    # Only the file is wanted; importing scikit-learn for it costs a process 70 MB and a second.
    file = importlib.metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(file), delimiter=",")
    small = map(Image.fromarray, np.minimum(table[:, :64].reshape(-1, 8, 8) * 16, 255).astype(np.uint8))
    return np.stack([np.asarray(digit.resize((28, 28), Image.Resampling.BICUBIC)) for digit in small])[:, None]


def mnist(folder: str) -> Images:
    """MNIST's images: both splits, or the test split alone, as found in a folder; with none, downloaded."""
    files = _find_mnist(Path(folder)) if folder else list(map(_downloaded, SHA256))
    parts = [_read_idx(file) for file in files]
    if len(parts) == 1:
        parts = np.split(parts[0], [-max(1, len(parts[0]) // HELD_OUT)])
    if len(parts[0]) == 0 or parts[0].shape[1:] != parts[1].shape[1:]:
        raise DataError(f"{files[-1]}: a single image, or images of another size than in {files[0]}")
    return Images("mnist", *parts)


def _find_mnist(folder: Path) -> list[Path]:
    """The files of the training and of the test images, as far as they are there, in one of their usual places."""
    check_folder(folder, "'mnist:DIR' reads a folder with MNIST's files, 'mnist' downloads them")
    for place in (folder, folder / "raw", folder / "MNIST" / "raw"):  # the latter two are torchvision's
        files: list[Path] = []
        for split in ("train", "t10k"):
            names = (f"{split}-images{dot}idx3-ubyte{suffix}" for dot in "-." for suffix in ("", ".gz"))
            files += itertools.islice(filter(os.path.isfile, map(place.joinpath, names)), 1)
        if files:
            return files
    there = ", ".join(sorted(os.listdir(folder))[:5]) or "nothing"
    neither = "neither train-images-idx3-ubyte nor t10k-images-idx3-ubyte (as they are or .gz)"
    raise DataError(f"{folder}: holds {there}, but {neither}, here or in MNIST/raw; 'mnist' downloads them")


def _downloaded(name: str) -> Path:
    """A file of MNIST in the user's cache: as it is there, or fetched from the first mirror that has it."""
    import pooch

    folder, reasons = pooch.os_cache("gpulab") / "mnist", []
    for mirror in MIRRORS:
        try:
            return Path(pooch.retrieve(mirror + name, f"sha256:{SHA256[name]}", name, folder, progressbar=True))
        except (OSError, ValueError) as error:
            reasons.append(f"{mirror}: {error!r:.200}")
    raise DataError(f"{name} could not be downloaded to {folder}: {'; '.join(reasons)}")


def _read_idx(file: Path) -> Bytes:
    """The images of an IDX file, (N, 1, H, W): the magic number 2051, three lengths, then bytes."""
    opened = gzip.open if file.suffix == ".gz" else open
    with reading(file, "cannot be unpacked"), opened(file, "rb") as stream:
        magic, count, height, width = struct.unpack(">4I", stream.read(16).ljust(16, b"\0"))
        size, promise = count * height * width, f"promises {count} images of {height}×{width}"
        if magic != 2051 or not 0 < size <= MOST_BYTES:
            found = f"begins with {magic} (expected 2051) and {promise} (1 to {MOST_BYTES:,} bytes are read)"
            raise DataError(f"{file}: no IDX file of images that can be read: {found}")
        content = stream.read(size + 1)
    if len(content) != size:
        held = f"{len(content):,} bytes" if len(content) < size else "more"
        raise DataError(f"{file}: {promise} and holds {held}")
    return np.frombuffer(content, np.uint8).reshape(count, 1, height, width)


# --- by name ----------------------------------------------------------------------------------------------

NAMES = ("digits", "mnist", "mnist:DIR", "walk", "moving-digits", "video:FILE", "frames:DIR")
READ = {"video": Video, "frames": Folder}  # what is the user's own
FORMS = {name.removesuffix("DIR").removesuffix("FILE") for name in NAMES}  # with a colon where a place follows


class Rendered(Sequence):
    """One of the project's own scenes, of any length."""

    content = ""  # the frames come from no file

    def __init__(self, name: str, scene: Walk | MovingDigits, frames: int, held: int) -> None:
        super().__init__(name, 3, scene.size, frames, held)
        self.scene = scene

    def stream(self, start: int, stop: int) -> Iterator[Bytes]:
        """Frames `start` to `stop`, rendered as they are asked for."""
        return self.scene.stream(start, stop, self.threads)

    def options(self) -> dict[str, Any]:
        """The size, the numbers of frames, the scene's seed and its speed."""
        return super().options() | {"scene_seed": self.scene.seed, "speed": self.scene.speed}


@extra("notebooks")
def load(
    name: str,
    frames: int | None = None,
    size: tuple[int, int] = (48, 64),
    seed: int = 0,
    speed: float = 1.0,
    grey: bool = False,
) -> Data:
    """Load a data set by its name: images or films to learn from, in a training part and a held-out part.

    - `digits`: scikit-learn's 1,797 handwritten digits, enlarged to 28×28, the last 297 of them held out.
    - `mnist`: MNIST's 70,000 digits, 28×28, from the original files, which are downloaded once; the test split is held
      out. `mnist:DIR` finds the files in a folder, or where torchvision keeps them below it; where only those of the
      test split are there, a tenth of it is held out.
    - `walk`: a first-person walk through a town. `moving-digits`: two digits that drift and bounce. Both are sequences
      of frames that are rendered from a seed, the same bytes on every machine.
    - `video:FILE`, `frames:DIR`: your own film, or folder of images in the order of their names (2.png before
      10.png). Each frame is turned as its file says that it is to be shown; its middle is cut out in the shape of
      `size` and scaled to it.

    Args:
        name: One of these.
        frames: How many frames to train on. A rendered scene has 1,000 by default, and the frames that follow are held
            out: a tenth as many, at least 20. Of your own frames the last eleventh is held out by default. With a
            number, those that follow are held out, up to a tenth as many; a number that leaves less than an eleventh of
            all frames counts as none. For `digits` and `mnist` the number does not matter.
        size: (height, width) of a frame in pixels. For `digits` and `mnist` it does not matter.
        seed: What a rendered scene is drawn from; for other data it has no meaning, and is refused.
        speed: How fast a rendered scene moves, as a multiple of its usual speed; for other data it is refused.
        grey: Whether to read your own frames with one channel. Without it, grey ones are refused, so that they are not
            taken for colour. For other data it is refused.

    Returns:
        The data. `data.windows(length)` gives windows of the training part without an end, `data.heldout(length)` those
        of the held-out part once. Each has `frames`, an array (t, C, H, W) of bytes, and `restart`, true where a
        sequence begins. In a sequence every later window begins with the last frame of the one before, so t is `length`
        + 1.

    Raises:
        UsageError: For an unknown name, or an option that makes no sense.
        DataError: For a file or folder that is missing, damaged or of another kind, for grey frames without `grey`, and
            for a download that fails.
        GpulabError: Where a library that reads the data is not installed.

    Examples:
        >>> import gpulab as gl
        >>> data = gl.load("walk", frames=100, size=(24, 32))
        >>> data
        walk: 100 frames of 3×24×32 to train on, 20 held out
        >>> gl.load("walk")
        walk: 1,000 frames of 3×48×64 to train on, 100 held out
        >>> next(data.windows(10)).frames.shape
        (10, 3, 24, 32)

    References:
        Alpaydin, Kaynak 1998, *Optical recognition of handwritten digits* (UCI Machine Learning Repository), of which
        scikit-learn ships a part; LeCun, Cortes, Burges, *The MNIST database of handwritten digits*.
    """
    kind, _, place = str(name).partition(":")
    if (f"{kind}:" if place else kind) not in FORMS:
        raise UsageError(f"data {name!r}: expected one of {', '.join(NAMES)}")
    if not (isinstance(size, tuple | list) and len(size) == 2):
        raise UsageError(f"data {name!r}: size={size!r} must be (height, width)")
    for option, value in {"height": size[0], "width": size[1], "frames": 1 if frames is None else frames}.items():
        check_count(f"data {name!r}: {option}", value)
    check_count(f"data {name!r}: seed", seed, least=0)
    if not 0 < speed < float("inf"):
        raise UsageError(f"data {name!r}: speed={speed!r} must be a number above 0")
    rendered, read = kind in ("walk", "moving-digits"), READ.get(kind)
    if not rendered and (seed != 0 or speed != 1):
        raise UsageError(f"data {name!r}: seed={seed}, speed={speed} are for what is rendered: walk, moving-digits")
    if grey and not read:
        raise UsageError(f"data {name!r}: grey={grey} is for frames of your own: video:FILE, frames:DIR")
    if kind == "digits":
        return Images("digits", *map(np.copy, np.split(digits(), [1500])))  # for each caller its own
    if kind == "mnist":
        return mnist(place)
    if read:
        return read(Path(place), size, frames, grey)
    speed, frames = float(speed), frames or 1000  # 2 and 2.0 are one speed, and give one record
    size = (size[0], size[1])
    scene = Walk(seed, size, speed) if kind == "walk" else MovingDigits(digits()[:, 0], seed, size, speed)
    return Rendered(kind, scene, frames, max(20, frames // HELD_OUT))
