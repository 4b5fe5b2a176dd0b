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
from gpulab.training.objective import Lab

if TYPE_CHECKING:
    import pandas as pd

FEWEST = 3  # seeds of the search, and as many fresh ones
BY_RATIO = ("learning_rate", "batch_size")
ENUMERABLE = 20_000  # points of a space that are listed
UNCHANGED = "nothing"


@dataclass(frozen=True)
class Factor:
    """One thing that may change: what it is now, and what else it could be."""

    name: str
    original: Any
    others: tuple[Any, ...]  # values, or for a range the two ends
    is_range: bool = False
    by_ratio: bool = False
    is_option: bool = False  # of the setting

    @property
    def values(self) -> tuple[Any, ...]:
        """What a list offers, the original first."""
        return (self.original, *self.others)

    def distance(self, value: Any) -> float:
        """How far a value is from the original."""
        if value == self.original:
            return 0.0
        if self.is_option or not all(_is_number(some) for some in (value, *self.values)):
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
        whole = isinstance(self.original, int)
        steps = {self.original * 2.0**n for n in range(-60, 61)} | {low, high}
        inside = {round(value) if whole else value for value in steps if low <= value <= high}
        yield from sorted(inside - {self.original})

    def distribution(self, within: float) -> Any:
        """What Optuna draws from; a range no further than `within` from the original."""
        import optuna

        if not self.is_range:
            return optuna.distributions.CategoricalDistribution(self.values)
        low, high = self.others
        near = 2.0 ** min(within, 60)
        low, high = max(low, self.original / near), min(high, self.original * near)
        if isinstance(self.original, int):
            return optuna.distributions.IntDistribution(math.ceil(low), math.floor(high), log=True)
        return optuna.distributions.FloatDistribution(low, high, log=True)


def factor_of(name: str, given: Any, lab: Lab, setting: Setting) -> Factor:
    """A factor of the search, checked."""
    if name in OPTIONS and name not in lab.names:
        texts = [_option_value(name, value, setting) for value in given]
        original = _options(setting).get(name)
        return Factor(name, original, _without(texts, original), is_option=True)
    original = _plain(lab.original(name))
    values = [_plain(value) for value in given]
    for value in values:
        _check_like(name, value, original)
    by_ratio = name in BY_RATIO or isinstance(given, tuple)
    if by_ratio and not (_is_number(original) and all(value > 0 for value in [*values, original])):
        raise UsageError(
            f"search {name}={given!r}: compared by ratio with the original {original!r}, so all must be numbers above 0"
        )
    if isinstance(given, tuple):
        if len(values) != 2 or not values[0] < values[1]:
            raise UsageError(f"search {name}={given!r}: a range is (low, high); give a list for single values")
        return Factor(name, original, (min(values[0], original), max(values[1], original)), True, True)
    return Factor(name, original, _without(values, original), by_ratio=by_ratio)


def _option_value(name: str, value: Any, setting: Setting) -> str | None:
    """A value of a setting's option as a setting writes it; None leaves the option out."""
    if value is None:
        return None
    shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    return _options(Setting.parse(f"{setting.device}:{name}={shown}"))[name]


def _changed_setting(setting: Setting, options: dict[str, str | None]) -> str:
    """The setting with options replaced."""
    parts = {name: value for name, value in (_options(setting) | options).items() if value is not None}
    options_text = ",".join(f"{name}={value}" for name, value in parts.items())
    return str(Setting.parse(f"{setting.device}:{options_text}" if parts else setting.device))


def _options(setting: Setting) -> dict[str, str]:
    """The options of a setting as it writes them."""
    text = str(setting).removeprefix(setting.device).removeprefix(":")
    return dict(part.split("=", 1) for part in text.split(",")) if text else {}


def _without(values: list[Any], original: Any) -> tuple[Any, ...]:
    return tuple(value for value in dict.fromkeys(values) if value != original)


def _plain(value: Any) -> Any:
    """A NumPy scalar as Python's own."""
    return value.item() if isinstance(value, np.generic) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_like(name: str, value: Any, original: Any) -> None:
    """Raise `UsageError` unless a value is of the kind that the original is."""
    whole = isinstance(original, int) and not isinstance(original, bool)
    if _is_number(original):
        fine = _is_number(value) and math.isfinite(value) and (not whole or value == int(value))
        wanted = "whole numbers" if whole else "numbers"
    elif original is None:
        fine, wanted = value is None or isinstance(value, str | int | float), "numbers, words or None"
    else:
        fine, wanted = isinstance(value, type(original)), f"values of type {type(original).__name__}"
    if not fine:
        raise UsageError(f"search {name}: {value!r} where the original is {original!r}; expected {wanted}")


def checked_search(search: Any) -> dict[str, Sequence[Any]]:
    """Names with lists of values, or with a tuple for a range; `UsageError` for anything else."""
    if not isinstance(search, Mapping) or not search:
        raise UsageError(f"search {search!r}: expected what may change, such as {{'learning_rate': [1e-4, 3e-4]}}")
    checked = {}
    for name, given in search.items():
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
            raise UsageError(f"search {name}={given!r}: expected a list of values, or (low, high)")
        values: Sequence[Any] = given if isinstance(given, tuple) else list(given)
        if len(values) == 0:
            raise UsageError(f"search {name}={given!r}: no value to try; leave {name} out")
        checked[str(name)] = values
    return checked


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
    lost = first.seed[~np.isfinite(first[metric].to_numpy(float))].tolist()
    if lost:
        raise UsageError(f"target: no finite {metric} for seed {', '.join(map(str, lost))}; leave diverged runs out")
    if len(first) < 2 * FEWEST:
        raise UsageError(
            f"target has {len(first)} seed(s); at least {2 * FEWEST} are needed, half to search and half to confirm"
        )
    return first.sort_values("seed", ignore_index=True)


class Question:
    """All that a search asks, checked; its digest names the study."""

    def __init__(
        self,
        runs: pd.DataFrame,
        metric: str,
        margin: str | float,
        alpha: float,
        setting: Setting,
        factors: list[Factor],
        lab: Lab,
        prune: bool = True,
    ) -> None:
        self.metric, self.margin_asked, self.alpha = metric, margin, alpha
        self.setting, self.factors, self.lab = setting, factors, lab
        self.target = str(runs.setting.iloc[0])
        self.losses = {int(seed): float(loss) for seed, loss in zip(runs.seed, runs[metric], strict=True)}
        seeds = list(self.losses)
        self.seeds, self.fresh = seeds[: -(len(seeds) // 2)], seeds[-(len(seeds) // 2) :]
        # All of the target's seeds say how large the margin is: they were there before any search.
        self.margin = float(self.verdict(dict.fromkeys(seeds, 0.0)).table.margin.iloc[0])
        if not self.margin > 0:
            raise UsageError(f"margin {margin!r}: the target's losses are all the same; give a number above 0")
        self.text = {
            "target": {str(seed): loss for seed, loss in self.losses.items()},
            "space": {f.name: [f.original, *f.others, "range" if f.is_range else "list"] for f in factors},
            "setting": str(setting),
            "way of judging": {"metric": metric, "margin": margin, "alpha": alpha, "prune": prune},
            "training": lab.identity,
            "machine": _machine(setting),
        }
        self.digest = _digest(self.text)

    def verdict(self, losses: Mapping[int, float], alpha: float | None = None) -> Verdict:
        """The target against losses of the new setting, paired on the seeds that both have."""
        import pandas as pd

        def rows(level: str, some: Mapping[int, float]) -> pd.DataFrame:
            frame = pd.DataFrame({"runs": level, "seed": list(some), self.metric: list(some.values())})
            return frame.assign(status=np.where(np.isfinite(frame[self.metric]), "finished", "diverged"))

        both = pd.concat([rows("target", self.losses), rows("changed", losses)], ignore_index=True)
        return verdict(
            both, self.metric, "runs", margin=self.margin_asked, alpha=alpha or self.alpha, reference="target"
        )

    def changes(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What differs from the original."""
        return {f.name: values[f.name] for f in self.factors if values[f.name] != f.original}

    def distance(self, values: Mapping[str, Any]) -> float:
        """How far a point of the space is from the original."""
        return math.fsum(factor.distance(values[factor.name]) for factor in self.factors)

    def words(self, values: Mapping[str, Any]) -> str:
        """The changes in words."""
        parts = []
        for factor in self.factors:
            if (value := values[factor.name]) != factor.original:
                parts.append(f"{factor.name} {_shown(factor.original)} → {_shown(value)}")
        return ", ".join(parts) or UNCHANGED

    def arguments(self, changes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The setting to train under, and what the training is told."""
        options = {f.name for f in self.factors if f.is_option}
        setting = _changed_setting(self.setting, {k: v for k, v in changes.items() if k in options})
        return setting, {k: v for k, v in changes.items() if k not in options}

    def original(self) -> dict[str, Any]:
        """The point at which nothing is changed."""
        return {factor.name: factor.original for factor in self.factors}

    def alone(self) -> list[dict[str, Any]]:
        """Every point with one factor changed, nearest first."""
        points = [self.original() | {factor.name: value} for factor in self.factors for value in factor.alone()]
        return sorted(points, key=self.distance)

    def points(self) -> list[dict[str, Any]] | None:
        """Every point, nearest first; None where there are too many to list."""
        if any(factor.is_range for factor in self.factors):
            return None
        if math.prod(len(factor.values) for factor in self.factors) > ENUMERABLE:
            return None
        names = [factor.name for factor in self.factors]
        every = itertools.product(*(factor.values for factor in self.factors))
        return sorted((dict(zip(names, values, strict=True)) for values in every), key=self.distance)


def _machine(setting: Setting) -> list[Any]:
    """What, besides the question, decides a loss: on another chip or torch it is another one."""
    here = passport()
    chip = here["cpu"]["model"] if setting.kind == "cpu" else here["gpus"]
    return [chip, here["software"]["torch"]]


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def key(values: Mapping[str, Any]) -> str:
    """A point of the space as text, to compare it by."""
    return json.dumps(values, sort_keys=True)


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
