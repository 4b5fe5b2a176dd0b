"""Sets of images: scikit-learn's digits, and MNIST's as torchvision downloads and reads them."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import platformdirs

from gpulab import files
from gpulab.data.base import HELD_OUT, Bytes, Data, Window, check_folder
from gpulab.errors import DataError


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
    """MNIST's images: both splits, or the test split alone, as torchvision keeps them below a folder, or downloads."""
    from torchvision.datasets.mnist import MNIST, read_image_file

    if folder:
        check_folder(Path(folder), "'mnist:DIR' reads a folder with MNIST's files, 'mnist' downloads them")
    root = Path(folder) if folder else platformdirs.user_cache_path("gpulab")
    if not folder:
        with files.reading(root, "MNIST could not be downloaded to here"):
            MNIST(root, download=True)
    raw = root / "MNIST" / "raw"
    found = [file for file in (raw / f"{split}-images-idx3-ubyte" for split in ("train", "t10k")) if file.is_file()]
    if not found:
        raise DataError(
            f"{raw}: holds neither train-images-idx3-ubyte nor t10k-images-idx3-ubyte; 'mnist' downloads them"
        )
    parts = []
    for file in found:
        with files.reading(file, "not a whole file of MNIST's images"):
            parts.append(read_image_file(str(file)).numpy()[:, None])
    if len(parts) == 1:
        parts = np.split(parts[0], [len(parts[0]) - len(parts[0]) // HELD_OUT])
    if parts[0].shape[1:] != parts[1].shape[1:]:
        raise DataError(f"{found[1]}: images of another size than in {found[0]}")
    return Images("mnist", *parts)
