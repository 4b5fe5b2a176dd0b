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

HELD_OUT = 10  # one frame is held out for every ten frames to train on
HELDOUT_WINDOW = 20  # the length of the windows for reference losses on held-out frames


def check_folder(folder: Path, expected: str) -> None:
    """Raise `DataError`, stating what is expected, unless this is a folder."""
    if not os.path.isdir(folder):  # also false for a name that is too long
        problem = "a file, not a folder" if os.path.isfile(folder) else "no such folder"
        raise DataError(f"{folder}: {problem}; {expected}")


class Window(NamedTuple):
    """A window of frames to train on.

    Attributes:
        frames: Bytes of shape (t, C, H, W).
        restart: Whether the network's state is reset before this window.
    """

    frames: Bytes
    restart: bool


class Data(ABC):
    """A data set with a training part and a held-out part.

    Attributes:
        name: The name of the data.
        channels: The number of channels of a frame.
        size: The height and width of a frame.
        sequential: Whether the frames are a sequence rather than a set of images.
        threads: The number of threads that may prepare frames in advance.
        stamps: The stamps of the source files when the data were loaded.
    """

    name: str
    channels: int
    size: tuple[int, int]
    sequential: bool
    threads: int = 0
    stamps: Stamps = {}

    @property
    def content(self) -> str | None:
        """The SHA-256 (hex) of the sources: `""` without a file, `None` if it cannot be known."""
        # For a folder of images, the names are part of the digest, since they determine the order.
        return content_digest(self.stamps) if self.stamps else None

    def check_unchanged(self) -> None:
        """Raise `DataError`, with the file's name, if a source has changed since loading."""
        check_unchanged(self.stamps)

    @abstractmethod
    def windows(self, length: int, seed: int = 0, start: int = 0) -> Iterator[Window]:
        """Yield training windows indefinitely, from number `start` on.

        Each window has `length` new frames.
        """

    @abstractmethod
    def heldout(self, length: int) -> Iterator[Window]:
        """Yield the held-out frames in windows, each frame once."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of training frames or images."""

    def options(self) -> dict[str, JSON]:
        """Return what determines the data besides the name, in JSON types, for a run's record."""
        return {"size": list(self.size)}

    def __repr__(self) -> str:
        noun = "frames" if self.sequential else "images"
        heldout_count = self.options()["heldout"]
        shape = f"{self.channels}×{self.size[0]}×{self.size[1]}"
        return (
            f"{self.name}: {len(self):,} {noun} of {shape} to train on, {heldout_count:,} held out"
        )


class Sequence(Data):
    """A sequence of frames (C, H, W): `frames` to train on, followed by `heldout_count` others.

    As in the published training loop, the first window of a pass has `length` frames. Each later
    window has one more: it begins with the last frame of the window before it. If the sequence is
    shorter than the training, it is repeated from the beginning.
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
        """Yield frames `start` to `stop`; held-out frames are numbered after the training part."""

    def windows(self, length: int, seed: int = 0, start: int = 0) -> Iterator[Window]:  # noqa: ARG002
        """Yield windows in order indefinitely; the seed is ignored.

        Frames at the end that do not fill a window are left out of each pass.
        """
        windows_per_pass = self.frames // length
        if windows_per_pass == 0:
            raise DataError(
                f"{self.name}: {self.frames} frames to train on; a window needs {length}"
            )
        # The first pass may begin in the middle. All later passes begin at window 0.
        first_windows = itertools.chain([start % windows_per_pass], itertools.repeat(0))
        for first_window in first_windows:
            yield from self._iterate_windows(length, first_window, windows_per_pass, offset=0)

    def heldout(self, length: int) -> Iterator[Window]:
        """Yield the held-out frames in windows; the first one resets the network's state.

        Frames at the end that do not fill a window are left out.
        """
        if self.heldout_count < 2:
            raise DataError(
                f"{self.name}: {self.heldout_count} held-out frames; a prediction needs 2"
            )
        length = min(length, self.heldout_count)
        window_count = self.heldout_count // length
        yield from self._iterate_windows(length, 0, window_count, offset=self.frames)

    def repeat_loss(self) -> float:
        """Compute the held-out loss of predicting each frame by the frame before it.

        It is the mean squared error of frames scaled to [0, 1].
        """
        scaled_windows = (window.frames / 255 for window in self.heldout(HELDOUT_WINDOW))
        losses = [np.square(np.diff(frames, axis=0)).mean((1, 2, 3)) for frames in scaled_windows]
        return float(np.concatenate(losses).mean())

    def missing_colour_loss(self) -> float:
        """Compute the least held-out loss that a network with one dead output channel can have.

        The dead channel is always 0, and all others are predicted without error. The error of the
        dead channel is therefore its mean square, and the loss is this error divided by the number
        of channels. The least loss is that of the darkest channel.

        >>> import gpulab as gl
        >>> walk = gl.load("walk", frames=300, size=(24, 32))
        >>> round(walk.missing_colour_loss(), 6), round(walk.repeat_loss(), 6)
        (0.069993, 0.007511)
        """
        mean_squares = [  # of each channel, in each window
            np.square(window.frames / 255).mean((0, 2, 3))
            for window in self.heldout(HELDOUT_WINDOW)
        ]
        return float(np.mean(mean_squares, axis=0).min() / self.channels)

    def options(self) -> dict[str, JSON]:
        """Return the size and the numbers of training and held-out frames."""
        return super().options() | {"frames": self.frames, "heldout": self.heldout_count}

    def _iterate_windows(
        self, length: int, first_window: int, stop: int, offset: int
    ) -> Iterator[Window]:
        """Yield windows `first_window` to `stop` of `length` new frames each.

        Frame `offset` is the first frame of window 0.
        """
        # Each window but the first begins with the last frame of the window before it. So unless
        # the stream begins with window 0, it begins one frame earlier.
        first_frame = max(0, first_window * length - 1)
        frames = self.stream(offset + first_frame, offset + stop * length)
        previous_window = [next(frames)] if first_window > 0 else []
        for number in range(first_window, stop):
            window = [*previous_window[-1:], *itertools.islice(frames, length)]
            yield Window(np.stack(window), restart=number == 0)
            previous_window = window
