"""Sets of images: scikit-learn's digits and MNIST."""

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

import numpy as np

from gpulab.data._base import HELD_OUT, Bytes, Data, Window, check_folder
from gpulab.errors import DataError
from gpulab.files import JSON, convert_read_errors

MAX_UNPACKED_BYTES = 1 << 28  # the largest size of an unpacked file of images
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SHA256 = {  # the digests of the files that are downloaded
    "train-images-idx3-ubyte.gz": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
    ),
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
}


class Images(Data):
    """A set of images of shape (N, 1, H, W), whose random order depends on the seed."""

    sequential = False

    def __init__(self, name: str, train: Bytes, heldout: Bytes) -> None:
        self.name = name
        self.train = train
        self.heldout_images = heldout
        self.channels = train.shape[1]
        self.size = (train.shape[2], train.shape[3])

    @functools.cached_property
    def content(self) -> str:
        """The SHA-256 (hex) of the training and held-out images."""
        parts = self.train, self.heldout_images
        # Types and shapes are part of the digest, since the same bytes may form other images.
        shapes = repr([(images.dtype.str, images.shape) for images in parts]).encode()
        content = b"".join([shapes, *(images.tobytes() for images in parts)])
        return hashlib.sha256(content).hexdigest()

    def __len__(self) -> int:
        return len(self.train)

    def windows(self, length: int, seed: int = 0, start: int = 0) -> Iterator[Window]:
        """Yield windows of `length` images indefinitely; each pass has a different random order."""
        import torch

        # Each pass has its own generator, so that a resumed training can begin at any window. The
        # factor, a large prime, keeps the generators of different seeds and passes apart. The
        # orders of all passes form one endless sequence, which is cut into windows.
        first_pass, images_done = divmod(start * length, len(self))
        generators = (
            torch.Generator().manual_seed(seed * 1_000_003 + number)
            for number in itertools.count(first_pass)
        )
        orders = (
            torch.randperm(len(self), generator=generator).tolist() for generator in generators
        )
        remaining = itertools.islice(itertools.chain.from_iterable(orders), images_done, None)
        while True:
            yield Window(self.train[list(itertools.islice(remaining, length))], restart=True)

    def heldout(self, length: int) -> Iterator[Window]:
        """Yield windows of the held-out images in their stored order."""
        for start in range(0, len(self.heldout_images), length):
            yield Window(self.heldout_images[start : start + length], restart=True)

    def options(self) -> dict[str, JSON]:
        """Return the size and the numbers of training and held-out images."""
        return super().options() | {"images": len(self.train), "heldout": len(self.heldout_images)}


@functools.cache
def digits() -> Bytes:
    """Load the digits of scikit-learn, enlarged from 8×8 to 28×28; shape (1797, 1, 28, 28).

    Their 17 shades, 0 to 16, are scaled to 0 to 255.
    """
    from PIL import Image

    # The file is read without importing scikit-learn, which would take 70 MB and a second.
    file = importlib.metadata.distribution("scikit-learn").locate_file(
        "sklearn/datasets/data/digits.csv.gz"
    )
    table = np.loadtxt(str(file), delimiter=",")
    shades = table[:, :64].reshape(-1, 8, 8)
    pixels = np.minimum(shades * 16, 255).astype(np.uint8)  # 16 would become 256
    small_digits = map(Image.fromarray, pixels)
    large_digits = [digit.resize((28, 28), Image.Resampling.BICUBIC) for digit in small_digits]
    return np.stack([np.asarray(digit) for digit in large_digits])[:, None]


def mnist(folder: str) -> Images:
    """Load MNIST's images from a folder, or download them if `folder` is an empty text.

    The training images of MNIST are trained on, and its test images are held out. If a folder has
    only one of these two splits, the last tenth of its images is held out.

    Raises:
        DataError: If files are missing or damaged, if they have a single image or images of
            different sizes, or if they cannot be downloaded.
    """
    # One or two files; the training images come first.
    files = _find_mnist(Path(folder)) if folder else list(map(_download, SHA256))
    parts = [_read_idx(file) for file in files]
    if len(parts) == 1:
        (images,) = parts
        heldout_count = max(1, len(images) // HELD_OUT)
        parts = np.split(images, [-heldout_count])
    train, heldout = parts
    if len(train) == 0 or train.shape[1:] != heldout.shape[1:]:
        raise DataError(
            f"{files[-1]}: a single image, or images of a different size than in {files[0]}"
        )
    return Images("mnist", train, heldout)


def _find_mnist(folder: Path) -> list[Path]:
    """Find the files of MNIST's training and test images.

    They are searched for in the folder and in the subfolders that torchvision uses. The first of
    these with a file counts.

    Returns:
        The file of the training images, that of the test images, or both in this order.

    Raises:
        DataError: If there is no such file.
    """
    check_folder(folder, "'mnist:DIR' reads a folder with MNIST's files, 'mnist' downloads them")
    # torchvision stores the files in the last two of these folders.
    for location in (folder, folder / "raw", folder / "MNIST" / "raw"):
        files: list[Path] = []
        for split in ("train", "t10k"):
            names = (
                f"{split}-images{dot}idx3-ubyte{suffix}" for dot in "-." for suffix in ("", ".gz")
            )
            existing_files = filter(os.path.isfile, map(location.joinpath, names))
            files += itertools.islice(existing_files, 1)  # one file for each split
        if files:
            return files
    listing = ", ".join(sorted(os.listdir(folder))[:5]) or "nothing"
    missing = "neither train-images-idx3-ubyte nor t10k-images-idx3-ubyte (as they are or .gz)"
    raise DataError(
        f"{folder}: holds {listing}, but {missing}, here or in MNIST/raw; 'mnist' downloads them"
    )


def _download(name: str) -> Path:
    """Return a file of MNIST from the user's cache; download it from a mirror if it is missing."""
    import pooch

    folder = pooch.os_cache("gpulab") / "mnist"
    reasons = []
    for mirror in MIRRORS:
        try:
            return Path(
                pooch.retrieve(
                    mirror + name, f"sha256:{SHA256[name]}", name, folder, progressbar=True
                )
            )
        except (OSError, ValueError) as error:
            reasons.append(f"{mirror}: {error!r:.200}")
    raise DataError(f"{name} could not be downloaded to {folder}: {'; '.join(reasons)}")


def _read_idx(file: Path) -> Bytes:
    """Read the images of an IDX file, shape (N, 1, H, W).

    The file consists of the magic number 2051, the three lengths (N, H, W) and the bytes of the
    images.

    Raises:
        DataError: If the file is not of this form, is too large, or has the wrong number of bytes.
    """
    open_file = gzip.open if file.suffix == ".gz" else open
    with convert_read_errors(file, "cannot be unpacked"), open_file(file, "rb") as stream:
        # An incomplete header is filled up with zeros, and then rejected below.
        header_bytes = stream.read(16).ljust(16, b"\0")
        magic, count, height, width = struct.unpack(">4I", header_bytes)
        size = count * height * width
        promise = f"declares {count} images of {height}×{width}"
        if magic != 2051 or not 0 < size <= MAX_UNPACKED_BYTES:
            header = (
                f"begins with {magic} (expected 2051) and {promise} (1 to {MAX_UNPACKED_BYTES:,}"
                " bytes are read)"
            )
            raise DataError(f"{file}: not an IDX file of images that can be read: {header}")
        content = stream.read(size + 1)  # one byte more, to detect a file that is too long
    if len(content) != size:
        length_found = f"{len(content):,} bytes" if len(content) < size else "more"
        raise DataError(f"{file}: {promise} but holds {length_found}")
    return np.frombuffer(content, np.uint8).reshape(count, 1, height, width)
