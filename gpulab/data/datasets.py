"""A data set by its name: rendered scenes, images, films, folders of images, and any of the latter as JPEG."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpulab.data import images
from gpulab.data.base import HELD_OUT, Bytes, Data, Sequence
from gpulab.data.films import Folder, Video
from gpulab.data.jpeg import Recompressed
from gpulab.data.scenes import MovingDigits, Walk
from gpulab.errors import UsageError, check_name, extra

NAMES = ("digits", "mnist", "mnist:DIR", "walk", "moving-digits", "video:FILE", "frames:DIR", "jpeg:NAME")
FORMS = {name.rstrip(string.ascii_uppercase) for name in NAMES} - {"jpeg:"}  # with a colon where a place follows


class Rendered(Sequence):
    """One of the project's own scenes, of any length."""

    content = ""  # the frames come from no file

    def __init__(self, name: str, scene: Walk | MovingDigits, frames: int, held: int) -> None:
        super().__init__(name, 3, scene.size, frames, held)
        self.scene = scene

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """Frames `start` to `stop`, without it endlessly."""
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
        return images.Images("digits", *map(np.copy, np.split(images.digits(), [1500])))  # for each caller its own
    if kind == "mnist":
        return images.mnist(place)
    if kind == "video":
        return Video(Path(place), size, frames, grey)
    if kind == "frames":
        return Folder(Path(place), size, frames, grey)
    speed, frames = float(speed), frames or 1000  # 2 and 2.0 are one speed, and give one record
    size = (size[0], size[1])
    walks = kind == "walk"
    scene = Walk(seed, size, speed) if walks else MovingDigits(images.digits()[:, 0], seed, size, speed)
    return Rendered(kind, scene, frames, max(20, frames // HELD_OUT))


def _is_whole(number: Any, least: int) -> bool:
    return isinstance(number, int | np.integer) and bool(number >= least)
