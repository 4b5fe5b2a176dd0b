"""The space of a search: which parameters may change, to what, and how far each change is from the original."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """One parameter that may change: what it is now, and what else it could be."""

    name: str
    original: Any
    others: tuple[Any, ...]  # values, or for a range the two ends
    is_range: bool = False
    by_ratio: bool = False
    is_option: bool = False  # of the setting

    @classmethod
    def checked(cls, name: str, values: Sequence[Any], originals: Mapping[str, Any], setting: Setting) -> Dimension:
        """The dimension for {name: values} of a search; `UsageError` for values that make no sense."""
        is_option = name in OPTIONS and name not in originals
        is_range = isinstance(values, tuple) and not is_option
        by_ratio = is_range or (name in BY_RATIO and not is_option)
        original: Any
        others: list[Any]
        if is_option:
            original, others = options_of(setting).get(name), [_option_text(name, value, setting) for value in values]
        else:
            if name not in originals:
                names = ", ".join([*originals, *OPTIONS])
                raise UsageError(f"search: nothing named {name!r} can be changed; there are {names}")
            each = [originals[name], *values]
            original, *others = (value.item() if isinstance(value, np.generic) else value for value in each)
            for value in others:
                _check_kind(name, value, original)
        if by_ratio and not (_is_number(original) and all(value > 0 for value in [*others, original])):
            raise UsageError(
                f"search {name}={values!r}: compared by ratio with the original {original!r}, "
                "so all must be numbers above 0"
            )
        if is_range:
            if len(others) != 2 or not others[0] < others[1]:
                raise UsageError(f"search {name}={values!r}: a range is (low, high); give a list for single values")
            low, high = map(type(original), others)
            others = [min(low, original), max(high, original)]
        else:
            others = [value for value in dict.fromkeys(others) if value != original]
        return cls(name, original, tuple(others), is_range, by_ratio, is_option)

    @property
    def values(self) -> tuple[Any, ...]:
        """What a list offers, the original first."""
        return (self.original, *self.others)

    def distance(self, value: Any) -> float:
        """How far a value is from the original."""
        if value == self.original:
            return 0.0
        if self.is_option or not all(_is_number(each) for each in self.values):
            return 1.0
        if self.by_ratio:
            return abs(math.log2(value / self.original))
        order = sorted(self.values)
        return float(abs(order.index(value) - order.index(self.original)))

    def alone(self) -> Iterator[Any]:
        """The values to try while nothing else is changed; of a range, doublings and halvings, and its ends."""
        if not self.is_range:
            yield from self.others
            return
        low, high = self.others
        steps = {self.original * 2.0**n for n in range(-60, 61)} | {low, high}
        inside = {round(v) if isinstance(self.original, int) else v for v in steps if low <= v <= high}
        yield from sorted(inside - {self.original})

    def drawn(self, share: float, limit: float) -> Any:
        """The value that lies at a share, from 0 to below 1, of a list, or of the logarithm of a range.

        Of a range only what is no further than `limit` from the original counts.
        """
        if not self.is_range:
            return self.values[int(share * len(self.values))]
        factor = 2.0 ** min(limit, 60)
        low = max(self.others[0], self.original / factor)
        high = min(self.others[1], self.original * factor)
        value = low * (high / low) ** share
        return round(value) if isinstance(self.original, int) else value


class Space:
    """The parameters that a search may change under a new setting, options of that setting among them."""

    def __init__(self, search: Any, originals: Mapping[str, Any], setting: Setting) -> None:
        """Check what the user's `search` says of the parameters that are in `originals`.

        Raises:
            UsageError: For what makes no sense.
        """
        if not isinstance(search, Mapping) or not search:
            raise UsageError(f"search {search!r}: expected what may change, such as {{'learning_rate': [1e-4, 3e-4]}}")
        self.setting = setting
        self.dimensions: list[Dimension] = []
        for name, values in search.items():
            if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
                raise UsageError(f"search {name}={values!r}: expected a list of values, or (low, high)")
            values = values if isinstance(values, tuple) else list(values)
            if not values:
                raise UsageError(f"search {name}={values!r}: no value to try; leave {name} out")
            self.dimensions.append(Dimension.checked(str(name), values, originals, setting))
        if not any(dimension.others for dimension in self.dimensions):
            raise UsageError(f"search {dict(search)!r}: every value is what it is already, so nothing can change")

    def original(self) -> Point:
        """The point at which nothing is changed."""
        return {d.name: d.original for d in self.dimensions}

    def points(self) -> list[Point] | None:
        """Every point, nearest first; None where there are too many to list."""
        values = [d.values for d in self.dimensions]
        if any(d.is_range for d in self.dimensions) or math.prod(map(len, values)) > ENUMERABLE:
            return None
        points = [dict(zip(self.original(), each, strict=True)) for each in itertools.product(*values)]
        return sorted(points, key=self.distance)

    def candidates(self, limit: Callable[[], float]) -> Iterator[Point]:
        """The points in the order in which a search tries them, each once: the same order in every process.

        Nothing changed, then one parameter at a time, nearest first, then combinations: nearest first, or where they
        cannot be listed, as they are drawn.

        Args:
            limit: Says whenever it is asked how near a point must be to the original to be worth a try.
        """
        alone = [self.original() | {d.name: value} for d in self.dimensions for value in d.alone()]
        combinations = self.points()
        seen = set()
        for point in itertools.chain(
            [self.original()],
            sorted(alone, key=self.distance),
            self._drawn(limit) if combinations is None else combinations,
        ):
            if repr(point) not in seen and self.distance(point) < limit():
                seen.add(repr(point))
                yield point

    def _drawn(self, limit: Callable[[], float]) -> Iterator[Point]:
        """Points spread evenly over the space: those of a Halton sequence, scrambled by a fixed seed."""
        from scipy.stats import qmc

        for shares in qmc.Halton(len(self.dimensions), seed=0).random(DRAWN):
            yield {d.name: d.drawn(float(share), limit()) for d, share in zip(self.dimensions, shares, strict=True)}

    def distance(self, point: Point) -> float:
        """How far a point of the space is from the original."""
        return math.fsum(d.distance(point[d.name]) for d in self.dimensions)

    def changes(self, point: Point) -> dict[str, Any]:
        """What differs from the original."""
        return {d.name: point[d.name] for d in self.dimensions if point[d.name] != d.original}

    def words(self, point: Point) -> str:
        """The changes in words."""
        original = self.original()
        changes = (f"{name} {_text(original[name])} → {_text(value)}" for name, value in self.changes(point).items())
        return ", ".join(changes) or "nothing"

    def arguments(self, point: Point) -> tuple[str, dict[str, Any]]:
        """The setting to train under, and the changes that the training is told."""
        changes = self.changes(point)
        options = {d.name: changes.pop(d.name) for d in self.dimensions if d.is_option and d.name in changes}
        return str(with_options(self.setting, options)), changes


def options_of(setting: Setting) -> dict[str, str]:
    """The options of a setting as it writes them."""
    text = str(setting).removeprefix(setting.device).removeprefix(":")
    return dict(part.split("=", 1) for part in text.split(",")) if text else {}


def with_options(setting: Setting, options: dict[str, str | None]) -> Setting:
    """The setting with options replaced; None leaves one out."""
    texts = [f"{name}={text}" for name, text in (options_of(setting) | options).items() if text is not None]
    return Setting.parse(f"{setting.device}:{','.join(texts)}".removesuffix(":"))


def _option_text(name: str, value: Any, setting: Setting) -> str | None:
    """A value of an option as a setting writes it."""
    if value is None:
        return None
    text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    return options_of(with_options(setting, {name: text}))[name]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_kind(name: str, value: Any, original: Any) -> None:
    """Raise `UsageError` unless a value is of the kind that the original is."""
    if _is_number(original):
        whole = isinstance(original, int)
        fits = _is_number(value) and math.isfinite(value) and (not whole or value == int(value))
        kind = "whole numbers" if whole else "numbers"
    elif original is None:
        fits, kind = value is None or isinstance(value, str | int | float), "numbers, words or None"
    else:
        fits, kind = isinstance(value, type(original)), f"values of type {type(original).__name__}"
    if not fits:
        raise UsageError(f"search {name}: {value!r} where the original is {original!r}; expected {kind}")


def _text(value: Any) -> str:
    if value is None:
        return "unset"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
