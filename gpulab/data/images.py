"""Sets of images: scikit-learn's digits, and MNIST's from their original files."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.util
import itertools
import math
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpulab.data.base import HELD_OUT, Bytes, Data, Window, check_folder
from gpulab.errors import DataError, reason
from gpulab.files import cache_folder

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


@functools.cache
def digits() -> Bytes:
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


def mnist(folder: str) -> Images:
    """MNIST's images: both splits, or the test split alone, as found in a folder; with none, downloaded."""
    files = _find_mnist(Path(folder)) if folder else list(map(_downloaded, SHA256))
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
    """The files of the training and of the test images, as far as they are there, in one of their usual places."""
    check_folder(folder, "'mnist:DIR' reads a folder with MNIST's files, 'mnist' downloads them")
    for place in (folder, folder / "raw", folder / "MNIST" / "raw"):  # the latter two are torchvision's
        files: list[Path] = []
        for split in ("train", "t10k"):
            names = (f"{split}-images{dot}idx3-ubyte{suffix}" for dot in "-." for suffix in ("", ".gz"))
            files += itertools.islice(filter(os.path.isfile, map(place.joinpath, names)), 1)
        if files:
            return files
    there = ", ".join(sorted(file.name for file in itertools.islice(folder.iterdir(), 5))) or "nothing"
    neither = "neither train-images-idx3-ubyte nor t10k-images-idx3-ubyte (as they are or .gz)"
    raise DataError(f"{folder}: holds {neither}, here or in MNIST/raw, but {there}; 'mnist' downloads them")


def _downloaded(name: str) -> Path:
    """A file of MNIST in the user's cache: as it is there, or fetched from the first mirror that has it."""
    import pooch

    folder, reasons = cache_folder() / "mnist", []
    for mirror in MIRRORS:
        try:
            return Path(pooch.retrieve(mirror + name, f"sha256:{SHA256[name]}", name, folder, progressbar=True))
        except (OSError, ValueError) as error:
            reasons.append(f"{mirror}: {reason(error)}")
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
            content = stream.read(promised + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be unpacked: {reason(error)}") from None
    if len(content) != promised:
        held = f"{len(content):,} bytes" if len(content) < promised else "more"
        raise DataError(f"{file}: promises {shape[0]} images of {shape[1]}×{shape[2]} and holds {held}")
    return np.frombuffer(content, np.uint8).reshape(shape[0], 1, *shape[1:])
