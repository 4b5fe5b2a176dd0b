"""Data: streams of frames or sets of images, as bytes, with a training and a held-out part."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpulab.errors import DataError
from gpulab.files import JSON, Stamps, check_unchanged, content_digest

Bytes = npt.NDArray[np.uint8]

HELD_OUT = 10  # one frame in this many is held out, where the data's length is given
HELDOUT_WINDOW = 20  # frames of a window in which losses to compare with are computed


def check_folder(folder: Path, expected: str) -> None:
    """Raise `DataError`, stating what is expected, unless this is a folder."""
    if not os.path.isdir(folder):  # also false for a name that is too long
        problem = "a file, not a folder" if os.path.isfile(folder) else "no such folder"
        raise DataError(f"{folder}: {problem}; {expected}")


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
    threads: int = 0  # how many may prefetch frames for a device that would wait for them
    stamps: Stamps = {}  # of the files that are read later, as they were when the data were loaded

    @property
    def content(self) -> str | None:
        """The SHA-256 (hex) of the sources: `""` without a file, `None` if it cannot be known."""
        # Of the images of a folder the names count, too: they say in which order the frames come.
        return content_digest(self.stamps) if self.stamps else None

    def check_unchanged(self) -> None:
        """Raise `DataError`, with the file's name, if a source has changed since loading."""
        check_unchanged(self.stamps)

    @abstractmethod
    def windows(self, length: int, seed: int = 0, start: int = 0) -> Iterator[Window]:
        """Training windows from number `start` on, endlessly; `length` frames are new in each."""

    @abstractmethod
    def heldout(self, length: int) -> Iterator[Window]:
        """The held-out frames, once, in windows."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of training frames or images."""

    def options(self) -> dict[str, JSON]:
        """What, besides the name, makes this data: JSON-ready, for the record of a run."""
        return {"size": list(self.size)}

    def __repr__(self) -> str:
        noun = "frames" if self.sequential else "images"
        heldout_count = self.options()["heldout"]
        shape = f"{self.channels}×{self.size[0]}×{self.size[1]}"
        return (
            f"{self.name}: {len(self):,} {noun} of {shape} to train on, {heldout_count:,} held out"
        )


class Sequence(Data):
    """Frames (C, H, W) in order: `frames` to train on, then `heldout_count` held-out ones.

    As in the published loop, the first window of a pass has `length` frames, and each later one
    begins with the last frame of the one before. A sequence shorter than the training is passed
    over again.
    """

    sequential = True

    def __init__(
        self, name: str, channels: int, size: tuple[int, int], frames: int, heldout_count: int
    ) -> None:
        self.name = name
        self.channels = channels
        self.size = size
        self.frames = frames
        self.heldout_count = heldout_count

    def __len__(self) -> int:
        return self.frames

    @abstractmethod
    def stream(self, start: int, stop: int) -> Iterator[Bytes]:
        """Frames `start` to `stop` in order, training part and held-out part together."""

    def windows(self, length: int, seed: int = 0, start: int = 0) -> Iterator[Window]:  # noqa: ARG002
        """Windows in order, endlessly, whatever the seed."""
        windows_per_pass = self.frames // length
        if windows_per_pass == 0:
            raise DataError(
                f"{self.name}: {self.frames} frames to train on; a window needs {length}"
            )
        for number in itertools.chain([start % windows_per_pass], itertools.repeat(0)):
            yield from self._iterate_windows(length, number, windows_per_pass, offset=0)

    def heldout(self, length: int) -> Iterator[Window]:
        """The held-out frames in windows, the state beginning anew at the first."""
        if self.heldout_count < 2:
            raise DataError(
                f"{self.name}: {self.heldout_count} held-out frames; a prediction needs 2"
            )
        length = min(length, self.heldout_count)
        yield from self._iterate_windows(
            length, 0, self.heldout_count // length, offset=self.frames
        )

    def repeat_loss(self) -> float:
        """The mean squared error, in [0, 1], of repeating the last held-out frame."""
        frames = (window.frames / 255 for window in self.heldout(HELDOUT_WINDOW))
        losses = [np.square(np.diff(window, axis=0)).mean((1, 2, 3)) for window in frames]
        return float(np.concatenate(losses).mean())

    def missing_colour_loss(self) -> float:
        """The least held-out loss of a network with one dead output channel.

        >>> import gpulab as gl
        >>> walk = gl.load("walk", frames=300, size=(24, 32))
        >>> round(walk.missing_colour_loss(), 6), round(walk.repeat_loss(), 6)
        (0.069993, 0.007511)
        """
        squares = [
            np.square(window.frames / 255).mean((0, 2, 3))
            for window in self.heldout(HELDOUT_WINDOW)
        ]
        return float(np.mean(squares, axis=0).min() / self.channels)

    def options(self) -> dict[str, JSON]:
        """The size and the numbers of frames."""
        return super().options() | {"frames": self.frames, "heldout": self.heldout_count}

    def _iterate_windows(
        self, length: int, first_window: int, stop: int, offset: int
    ) -> Iterator[Window]:
        """Windows `first_window` to `stop` of `length` new frames each, from frame `offset` on."""
        frames = self.stream(offset + max(0, first_window * length - 1), offset + stop * length)
        window = [next(frames)] if first_window else []
        for number in range(first_window, stop):
            window = [*window[-1:], *itertools.islice(frames, length)]
            yield Window(np.stack(window), restart=number == 0)
