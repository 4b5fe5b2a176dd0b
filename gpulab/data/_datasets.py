"""Load data sets by name: rendered scenes, images, films and folders of images."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpulab.data._base import HELD_OUT, Bytes, Data, Sequence
from gpulab.data._films import Folder, Video
from gpulab.data._images import Images, digits, mnist
from gpulab.data._scenes import MovingDigits, Walk
from gpulab.errors import UsageError, check_count, check_counts, extra
from gpulab.files import JSON


class OptionGroup(NamedTuple):
    """Options of `load` that only some kinds of data take.

    Attributes:
        defaults: The default of each option by name.
        purpose: The end of an error message that says which data the options are for.
    """

    defaults: Mapping[str, float]
    purpose: str


RENDERING = OptionGroup({"seed": 0, "speed": 1.0}, "are only for rendered scenes")
READING = OptionGroup({"grey": False}, "is only for your own frames")


class Rendered(Sequence):
    """A rendered scene of any length, as a sequence of frames."""

    content = ""  # the frames are not read from a file

    def __init__(
        self, name: str, scene: Walk | MovingDigits, frames: int, heldout_count: int
    ) -> None:
        super().__init__(name, 3, scene.size, frames, heldout_count)
        self.scene = scene

    def stream(self, start: int, stop: int) -> Iterator[Bytes]:
        """Yield frames `start` to `stop`, rendered when they are needed."""
        return self.scene.stream(start, stop, self.threads)

    def options(self) -> dict[str, JSON]:
        """Return the size, the numbers of frames, the scene's seed and its speed."""
        return super().options() | {"scene_seed": self.scene.seed, "speed": self.scene.speed}


class Request(NamedTuple):
    """The arguments of `load` except the kind; `location` is the text after the colon."""

    location: str
    frames: int | None
    size: tuple[int, int]
    seed: int
    speed: float
    grey: bool


def _load_digits(_: Request) -> Images:
    """Load the digits of scikit-learn; the last 297 images are held out."""
    train, heldout = np.split(digits(), [1500])
    # `digits` caches its array, so each caller gets a copy.
    return Images("digits", train.copy(), heldout.copy())


def _load_mnist(request: Request) -> Images:
    """Load MNIST from a folder, or download it."""
    return mnist(request.location)


def _load_walk(request: Request) -> Rendered:
    """Create the walk through a town."""
    return _load_scene("walk", Walk(request.seed, request.size, request.speed), request.frames)


def _load_moving_digits(request: Request) -> Rendered:
    """Create the scene of moving digits, which shows those of scikit-learn."""
    scene = MovingDigits(digits()[:, 0], request.seed, request.size, request.speed)
    return _load_scene("moving-digits", scene, request.frames)


def _load_scene(name: str, scene: Walk | MovingDigits, frames: int | None) -> Rendered:
    """Create a scene with 1,000 frames by default, and a tenth as many held out, at least 20."""
    frames = frames or 1000
    return Rendered(name, scene, frames, max(20, frames // HELD_OUT))


def _load_video(request: Request) -> Video:
    """Open a video file."""
    return Video(Path(request.location), request.size, request.frames, request.grey)


def _load_folder(request: Request) -> Folder:
    """Open a folder of images."""
    return Folder(Path(request.location), request.size, request.frames, request.grey)


class Kind(NamedTuple):
    """A kind of data: its names, its loader, and its options besides `frames` and `size`."""

    names: tuple[str, ...]
    load: Callable[[Request], Data]
    options: OptionGroup | None = None


KINDS = {
    "digits": Kind(("digits",), _load_digits),
    "mnist": Kind(("mnist", "mnist:DIR"), _load_mnist),
    "walk": Kind(("walk",), _load_walk, RENDERING),
    "moving-digits": Kind(("moving-digits",), _load_moving_digits, RENDERING),
    "video": Kind(("video:FILE",), _load_video, READING),
    "frames": Kind(("frames:DIR",), _load_folder, READING),
}
NAMES = tuple(name for data_kind in KINDS.values() for name in data_kind.names)
# The possible beginnings of names: a kind, with a colon if a file or folder follows.
PREFIXES = {name.removesuffix("DIR").removesuffix("FILE") for name in NAMES}


@extra("notebooks")
def load(
    name: str,
    frames: int | None = None,
    size: tuple[int, int] = (48, 64),
    seed: int = 0,
    speed: float = 1.0,
    grey: bool = False,
) -> Data:
    """Load a data set by its name: images or films, with a training and a held-out part.

    - `digits`: The 1,797 handwritten digits of scikit-learn, enlarged to 28×28. The last 297 are
      held out.
    - `mnist`: The 70,000 digits of MNIST, 28×28, from the original files, which are downloaded
      once. The test split is held out.
    - `mnist:DIR`: The same, from files in the folder DIR or in the subfolders that torchvision
      uses. If the folder has only the files of the test split, a tenth of it is held out.
    - `walk`: A first-person walk through a town, as a sequence of frames. The frames are rendered
      from a seed and are bitwise the same on every machine.
    - `moving-digits`: Two digits that drift and bounce, rendered in the same way.
    - `video:FILE`: Your own film.
    - `frames:DIR`: Your own folder of images, ordered by name (2.png before 10.png).

    Your own frames are rotated as their file requires, cropped around the centre to the aspect
    ratio of `size`, and scaled to it. Images whose colours are not defined are rejected: images
    with transparent pixels, whose background is unknown; images in CMYK; and images whose pixel
    values are neither from 0 to 255 nor of 16 bits.

    Args:
        name: One of these names.
        frames: The number of frames to train on. A rendered scene has 1,000 by default. The frames
            after these are held out: a tenth as many, at least 20. For your own frames, the last
            eleventh of all frames is held out by default. If `frames` is given, the frames after
            these are held out instead, up to a tenth as many. A number that would leave less than
            an eleventh of all frames is ignored. `digits` and `mnist` ignore this argument.
        size: The height and width of a frame in pixels. `digits` and `mnist` ignore this argument.
        seed: The seed of a rendered scene. Only valid for rendered scenes.
        speed: The speed of a rendered scene, as a multiple of its usual speed. Only valid for
            rendered scenes.
        grey: Whether to read your own frames with one channel. If it is false, grey frames are
            rejected, so that they are not mistaken for colour. Only valid for your own frames.

    Returns:
        The data. `data.windows(length)` yields windows of the training part indefinitely, and
        `data.heldout(length)` yields those of the held-out part once. A window has the attributes
        `frames`, an array of bytes with shape (t, C, H, W), and `restart`, which is true if a
        sequence begins with this window. In a sequence, each later window begins with the last
        frame of the window before, so that t is `length` + 1.

    Raises:
        UsageError: If the name is unknown, or an option is invalid.
        DataError: If a file or folder is missing, damaged or of the wrong kind, if frames are grey
            without `grey`, if their colours are not defined, or if a download fails.
        GpulabError: If a library that reads the data is not installed.

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
        Alpaydin, Kaynak 1998, *Optical recognition of handwritten digits* (UCI Machine Learning
        Repository), of which scikit-learn ships a part; LeCun, Cortes, Burges, *The MNIST database
        of handwritten digits*.
    """
    kind_name, _, location = str(name).partition(":")
    prefix = f"{kind_name}:" if location else kind_name
    if prefix not in PREFIXES:
        raise UsageError(f"data {name!r}: expected one of {', '.join(NAMES)}")
    height, width = check_counts(f"data {name!r}: size", size, ("height", "width"))
    if frames is not None:
        check_count(f"data {name!r}: frames", frames)
    check_count(f"data {name!r}: seed", seed, minimum=0)
    is_number = isinstance(speed, numbers.Real) and not isinstance(speed, bool)
    if not is_number or not 0 < speed < math.inf:
        raise UsageError(f"data {name!r}: speed={speed!r}: expected a number above 0")
    if not isinstance(grey, bool | np.bool_):
        raise UsageError(f"data {name!r}: grey={grey!r}: expected True or False")
    data_kind = KINDS[kind_name]
    _check_options(name, data_kind, {"seed": seed, "speed": speed, "grey": grey})
    # The conversion makes the record the same for the speeds 2 and 2.0.
    return data_kind.load(
        Request(location, frames, (height, width), seed, float(speed), bool(grey))
    )


def _check_options(name: str, data_kind: Kind, options: Mapping[str, float]) -> None:
    """Raise `UsageError` if an option that this kind does not take is not at its default value."""
    for group in (RENDERING, READING):
        option_values = {option: options[option] for option in group.defaults}
        if group != data_kind.options and option_values != group.defaults:
            values = ", ".join(f"{option}={value}" for option, value in option_values.items())
            # The message lists the data that do take these options.
            suitable_names = [
                suitable_name
                for other_kind in KINDS.values()
                if other_kind.options == group
                for suitable_name in other_kind.names
            ]
            raise UsageError(
                f"data {name!r}: {values} {group.purpose}: {', '.join(suitable_names)}"
            )
