"""What a search may change, how far each change is from the original, and what it is compared with."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulab.errors import UsageError
from gpulab.passports import passport
from gpulab.settings import OPTIONS, Setting
from gpulab.stats.verdicts import Verdict, check_one_protocol, verdict
from gpulab.training.objective import Objective

if TYPE_CHECKING:
    import pandas as pd

FEWEST = 3  # seeds of the search, and as many fresh ones
BY_RATIO = ("learning_rate", "batch_size")
ENUMERABLE = 20_000  # points of a space that are listed

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
    def checked(cls, name: str, values: Sequence[Any], objective: Objective, setting: Setting) -> Dimension:
        """The dimension for {name: values} of a search; `UsageError` for values that make no sense."""
        is_option = name in OPTIONS and name not in objective.originals
        is_range = isinstance(values, tuple) and not is_option
        by_ratio = is_range or (name in BY_RATIO and not is_option)
        original: Any
        others: list[Any]
        if is_option:
            original, others = options_of(setting).get(name), [_option_text(name, value, setting) for value in values]
        else:
            each = [objective.original(name), *values]
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

    def from_json(self, value: Any) -> Any:
        """A value as it was before JSON, which makes a tuple a list."""
        return value if self.is_range else {json.dumps(each): each for each in self.values}[json.dumps(value)]


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


def checked_space(search: Any, objective: Objective, setting: Setting) -> list[Dimension]:
    """A dimension for each name of a search; `UsageError` for what makes no sense."""
    if not isinstance(search, Mapping) or not search:
        raise UsageError(f"search {search!r}: expected what may change, such as {{'learning_rate': [1e-4, 3e-4]}}")
    dimensions = []
    for name, values in search.items():
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise UsageError(f"search {name}={values!r}: expected a list of values, or (low, high)")
        values = values if isinstance(values, tuple) else list(values)
        if not values:
            raise UsageError(f"search {name}={values!r}: no value to try; leave {name} out")
        dimensions.append(Dimension.checked(str(name), values, objective, setting))
    if not any(dimension.others for dimension in dimensions):
        raise UsageError(f"search {dict(search)!r}: every value is what it is already, so nothing can change")
    return dimensions


def checked_target(target: Any, metric: str) -> pd.DataFrame:
    """The first runs of one setting, one a seed, all finished."""
    import pandas as pd

    if not isinstance(target, pd.DataFrame):
        raise UsageError(f"target is a {type(target).__name__}; expected a data frame of runs, as from gpulab.runs")
    for name in ("seed", metric):
        if name not in target:
            raise UsageError(f"target has no column {name!r}; there are {', '.join(map(str, target.columns))}")
    first = target[target.rerun == 0] if "rerun" in target else target
    check_one_protocol(first)
    if "setting" not in first:
        first = first.assign(setting="the target")
    if len(settings := sorted(set(first.setting))) > 1:
        raise UsageError(f"target has runs of {', '.join(settings)}; choose those of one setting")
    if first.seed.duplicated().any():
        raise UsageError(f"target has seed {first.seed[first.seed.duplicated()].iloc[0]} more than once")
    if not pd.api.types.is_numeric_dtype(first[metric]):
        raise UsageError(f"target: {metric!r} is of type {first[metric].dtype}; expected numbers")
    if seeds := ", ".join(map(str, first.seed[~np.isfinite(first[metric].to_numpy(float))])):
        raise UsageError(f"target: no finite {metric} for seed {seeds}; leave diverged runs out")
    if len(first) < 2 * FEWEST:
        raise UsageError(
            f"target has {len(first)} seed(s); at least {2 * FEWEST} are needed, half to search and half to confirm"
        )
    return first.sort_values("seed", ignore_index=True)


class SearchProblem:
    """What is searched for and where; `identity` says all of it in JSON, and its digest names the ledger."""

    def __init__(
        self,
        runs: pd.DataFrame,
        metric: str,
        margin: str | float,
        alpha: float,
        setting: Setting,
        dimensions: list[Dimension],
        objective: Objective,
        prune: bool = True,
    ) -> None:
        self.metric, self.margin_asked, self.alpha, self.prune = metric, margin, alpha, prune
        self.setting, self.dimensions = setting, dimensions
        self.target = str(runs.setting.iloc[0])
        self.losses = {int(seed): float(loss) for seed, loss in zip(runs.seed, runs[metric], strict=True)}
        seeds, half = list(self.losses), len(self.losses) // 2
        self.seeds, self.fresh = seeds[:-half], seeds[-half:]
        # All of the target's seeds say how large the margin is: they were there before any search.
        self.margin = float(self.verdict(dict.fromkeys(seeds, 0.0)).table.margin.iloc[0])
        if not self.margin > 0:
            raise UsageError(f"margin {margin!r}: the target's losses are all the same; give a number above 0")
        # On another chip or torch a loss is another one.
        chip = passport()["cpu"]["model"] if setting.kind == "cpu" else passport()["gpus"]
        text = json.dumps(
            {
                "target": {str(seed): loss for seed, loss in self.losses.items()},
                "space": {d.name: [*d.values, "range" if d.is_range else "list"] for d in dimensions},
                "setting": str(setting),
                "way of judging": {"metric": metric, "margin": margin, "alpha": alpha, "prune": prune},
                "training": objective.identity,
                "machine": [chip, passport()["software"]["torch"]],
            },
            sort_keys=True,
        )
        self.identity = json.loads(text)
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def verdict(self, losses: Mapping[int, float], alpha: float | None = None) -> Verdict:
        """The target against losses of the new setting, paired on the seeds that both have."""
        import pandas as pd

        rows = [("target", *run) for run in self.losses.items()] + [("changed", *run) for run in losses.items()]
        frame = pd.DataFrame(rows, columns=["runs", "seed", self.metric])
        frame["status"] = np.where(np.isfinite(frame[self.metric]), "finished", "diverged")
        return verdict(
            frame, self.metric, "runs", margin=self.margin_asked, alpha=alpha or self.alpha, reference="target"
        )

    def changes(self, point: Point) -> dict[str, Any]:
        """What differs from the original."""
        return {d.name: point[d.name] for d in self.dimensions if point[d.name] != d.original}

    def distance(self, point: Point) -> float:
        """How far a point of the space is from the original."""
        return math.fsum(d.distance(point[d.name]) for d in self.dimensions)

    def words(self, point: Point) -> str:
        """The changes in words."""
        before = self.original()
        parts = (f"{name} {_text(before[name])} → {_text(value)}" for name, value in self.changes(point).items())
        return ", ".join(parts) or "nothing"

    def arguments(self, point: Point) -> tuple[str, dict[str, Any]]:
        """The setting to train under, and the changes that the training is told."""
        changes = self.changes(point)
        options = {d.name: changes.pop(d.name) for d in self.dimensions if d.is_option and d.name in changes}
        return str(with_options(self.setting, options)), changes

    def original(self) -> Point:
        """The point at which nothing is changed."""
        return {d.name: d.original for d in self.dimensions}

    def alone(self) -> list[Point]:
        """Every point with one parameter changed, nearest first."""
        points = [self.original() | {d.name: value} for d in self.dimensions for value in d.alone()]
        return sorted(points, key=self.distance)

    def points(self) -> list[Point] | None:
        """Every point, nearest first; None where there are too many to list."""
        values = [d.values for d in self.dimensions]
        if any(d.is_range for d in self.dimensions) or math.prod(map(len, values)) > ENUMERABLE:
            return None
        points = [dict(zip(self.original(), each, strict=True)) for each in itertools.product(*values)]
        return sorted(points, key=self.distance)

    def from_json(self, values: Mapping[str, Any]) -> Point:
        """A point that was written as JSON; `KeyError` for one that is not of this space."""
        return {d.name: d.from_json(values[d.name]) for d in self.dimensions}


def key(point: Point) -> str:
    """A point as text, to compare it by."""
    return json.dumps(point, sort_keys=True)


def _text(value: Any) -> str:
    if value is None:
        return "unset"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
