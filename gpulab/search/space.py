"""The space of a search: which parameters may change, to what, and how far each change is from the original."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpulab.errors import UsageError
from gpulab.settings import OPTIONS, Setting

BY_RATIO = ("learning_rate", "batch_size")
ENUMERABLE = 20_000  # points of a space that are listed
DRAWN = 1024  # points that are drawn from a space that cannot be listed

Point = dict[str, Any]  # a value for each dimension


@dataclass(frozen=True)
class Dimension:
    """One parameter that may change.

    Its `values` are what it is, and then what else it could be, each tried alone; of a range the doublings and
    halvings of the original in it, and its ends.
    """

    name: str
    values: tuple[Any, ...]
    ends: tuple[float, float] | None = None  # of a range, within which combinations are drawn
    by_ratio: bool = False  # whether distances are those of logarithms
    is_option: bool = False  # of the setting

    @property
    def original(self) -> Any:
        """What the parameter is."""
        return self.values[0]

    def distance(self, value: Any) -> float:
        """How far a value is from the original."""
        if value == self.original:
            return 0.0
        if self.by_ratio:
            return abs(math.log2(value / self.original))
        if self.is_option or not all(_is_number(candidate) for candidate in self.values):
            return 1.0
        order = sorted(self.values)
        return float(abs(order.index(value) - order.index(self.original)))

    def at(self, share: float) -> Any:
        """The value that lies at a share, from 0 to below 1, of a list, or of the logarithm of a range."""
        if self.ends is None:
            return self.values[int(share * len(self.values))]
        low, high = self.ends
        value = low * (high / low) ** share
        return round(value) if isinstance(self.original, int) else value

    def text(self, value: Any) -> str:
        """A value in words."""
        if value is None:
            return "unset"
        if self.is_option and isinstance(value, bool):
            return "on" if value else "off"
        return f"{value:.3g}" if isinstance(value, float) else str(value)


def checked_dimension(name: str, offered: Any, originals: Mapping[str, Any], setting: Setting) -> Dimension:
    """The dimension for {name: offered} of a search; `UsageError` for values that make no sense."""
    if isinstance(offered, str | bytes | Mapping) or not isinstance(offered, Iterable):
        raise UsageError(f"search {name}={offered!r}: expected a list of values, or (low, high)")
    values = [value.item() if isinstance(value, np.generic) else value for value in offered]
    if not values:
        raise UsageError(f"search {name}={offered!r}: no value to try; leave {name} out")
    if name not in originals:
        if name not in OPTIONS:
            names = ", ".join([*originals, *OPTIONS])
            raise UsageError(f"search: nothing named {name!r} can be changed; there are {names}")
        values = [getattr(setting, name), *(_option(setting, name, value) for value in values)]
        return Dimension(name, _distinct(values), is_option=True)
    original = originals[name]
    for value in values:
        if not _is_alike(value, original):
            type_name = type(original).__name__
            raise UsageError(f"search {name}: {value!r} where the original is {original!r}; expected type {type_name}")
    ends = None
    by_ratio = isinstance(offered, tuple) or name in BY_RATIO
    if by_ratio and not all(_is_number(value) and value > 0 for value in [original, *values]):
        raise UsageError(
            f"search {name}={offered!r}: compared by ratio with the original {original!r}, so all must be numbers "
            "above 0"
        )
    if isinstance(offered, tuple):
        if len(values) != 2 or not values[0] < values[1]:
            raise UsageError(f"search {name}={offered!r}: a range is (low, high); give a list for single values")
        ends = low, high = min(values[0], original), max(values[1], original)
        doublings = [original * 2.0**n for n in range(-60, 61)]
        inside = {low, high, *(value for value in doublings if low <= value <= high)}
        values = sorted({round(value) if isinstance(original, int) else float(value) for value in inside})
    return Dimension(name, _distinct([original, *values]), ends, by_ratio)


def _distinct(values: list[Any]) -> tuple[Any, ...]:
    """The values, each once; some may be lists, which no set can hold."""
    return tuple(value for number, value in enumerate(values) if value not in values[:number])


class Space:
    """The parameters that a search may change under a new setting, options of that setting among them."""

    def __init__(self, search: Any, originals: Mapping[str, Any], setting: Setting) -> None:
        """Check what the user's `search` says of the parameters that are in `originals`, or of the setting."""
        if not isinstance(search, Mapping) or not search:
            raise UsageError(f"search {search!r}: expected what may change, such as {{'learning_rate': [1e-4, 3e-4]}}")
        self.setting = setting
        self.dimensions = [
            checked_dimension(str(name), offered, originals, setting) for name, offered in search.items()
        ]
        self.original: Point = {d.name: d.original for d in self.dimensions}

    def points(self) -> list[Point] | None:
        """Every point, nearest first; None where there are too many to list."""
        values = [d.values for d in self.dimensions]
        if any(d.ends for d in self.dimensions) or math.prod(map(len, values)) > ENUMERABLE:
            return None
        points = [dict(zip(self.original, combination, strict=True)) for combination in itertools.product(*values)]
        return sorted(points, key=self.distance)

    def candidates(self, limit: Callable[[], float]) -> Iterator[Point]:
        """The points in the order in which a search tries them, each once: the same order in every process.

        `limit` says whenever it is asked how near a point must be to the original to be worth a try.
        """
        from scipy.stats import qmc

        alone = [self.original | {d.name: value} for d in self.dimensions for value in d.values[1:]]
        combinations = self.points()
        if combinations is None:
            drawn = qmc.Halton(len(self.dimensions), seed=0).random(DRAWN)
            combinations = [
                {d.name: d.at(float(share)) for d, share in zip(self.dimensions, shares, strict=True)}
                for shares in drawn
            ]
        yielded = set()
        for point in [self.original, *sorted(alone, key=self.distance), *combinations]:
            if repr(point) not in yielded and self.distance(point) < limit():
                yielded.add(repr(point))
                yield point

    def count_nearer(self, limit: float, tried: list[Point]) -> int | None:
        """How many points nearer to the original than a limit were not tried; None where they cannot be counted."""
        if limit == 0:
            return 0
        points = self.points()
        return None if points is None else sum(self.distance(point) < limit and point not in tried for point in points)

    def distance(self, point: Point) -> float:
        """How far a point is from the original."""
        return math.fsum(d.distance(point[d.name]) for d in self.dimensions)

    def changes(self, point: Point) -> dict[str, Any]:
        """What differs from the original."""
        return {name: value for name, value in point.items() if value != self.original[name]}

    def words(self, point: Point) -> str:
        """The changes in words."""
        changed = [d for d in self.dimensions if point[d.name] != d.original]
        return ", ".join(f"{d.name} {d.text(d.original)} → {d.text(point[d.name])}" for d in changed) or "nothing"

    def arguments(self, point: Point) -> tuple[str, dict[str, Any]]:
        """The setting to train under, and the changes that the training is told."""
        changes = self.changes(point)
        options = {d.name: changes.pop(d.name) for d in self.dimensions if d.is_option and d.name in changes}
        return str(with_options(self.setting, **options)), changes


def with_options(setting: Setting, **options: Any) -> Setting:
    """The setting with options replaced; `UsageError` where they have no meaning together."""
    return Setting.parse(str(replace(setting, **options)))


def _option(setting: Setting, name: str, value: Any) -> Any:
    """A value of an option as the setting would have it; None leaves the option out."""
    if value is None:
        return None
    text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    return getattr(with_options(setting, **{name: OPTIONS[name].parse(name, text)}), name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_alike(value: Any, original: Any) -> bool:
    """Whether a value is of the kind that the original is: of None nobody knows."""
    if _is_number(original):
        return _is_number(value) and math.isfinite(value) and (isinstance(original, float) or value == int(value))
    return original is None or isinstance(value, type(original))
