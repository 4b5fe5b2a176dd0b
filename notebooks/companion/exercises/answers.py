"""Parse students' answers, and say what is wrong with them. Nothing in them is executed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from companion.findings import listed, names_in_text
from gpulab.errors import printable
from gpulab.stats import Verdict
from gpulab.store import recorded_runs

# Students can hand in anything, so a check verifies what an answer is before using it.
Answer = Any


class Exercise(NamedTuple):
    """An exercise: the form of its answer, and a check that returns the reply to a right answer."""

    form: str
    check: Callable[[Answer], str]


CHECKS: dict[str, Exercise] = {}  # by the name of the exercise


class WrongAnswerError(Exception):
    """What is wrong with an answer, and where to look."""


def exercise(name: str, form: str) -> Callable[[Callable[[Answer], str]], Callable[[Answer], str]]:
    """Register the check of an exercise; it returns the reply to a right answer of this form."""

    def register(check_answer: Callable[[Answer], str]) -> Callable[[Answer], str]:
        CHECKS[name] = Exercise(form, check_answer)
        return check_answer

    return register


def need(condition: object, otherwise: str) -> None:
    """Raise `WrongAnswerError` with the text `otherwise` if the condition does not hold."""
    if not condition:
        raise WrongAnswerError(otherwise)


def shown(value: object) -> str:
    """Describe a value of any type in a few characters; texts are quoted."""
    if (type(value) is int or type(value) is float) and abs(value) < 1e15:
        return f"{value:.6g}"
    return printable(repr(value[:40])) if isinstance(value, str) else f"this {type(value).__name__}"


def number(value: Answer) -> float:
    """Convert an answer to a number; it may come from Python, NumPy, pandas or torch."""
    need(
        not isinstance(value, str),
        f"{shown(value)} is a text: leave out the quotation marks and the unit",
    )
    array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    need(
        array.size == 1,
        f"this {type(value).__name__} holds {array.size} numbers, but one is expected",
    )
    need(array.dtype.kind in "iuf", f"{shown(value)} is not a number")
    need(
        abs(array.item()) < 1e300,
        "this is NaN or infinite: look for a division by zero or an empty table",
    )
    return float(array.item())


def near(
    value: Answer,
    right: float,
    mistakes: Mapping[float, str] | Mapping[int, str],
    rel: float = 0.01,
) -> float:
    """Return the number if it is right; `mistakes` maps wrong answers to their explanations."""
    answer = number(value)
    if math.isclose(answer, right, rel_tol=rel):
        return answer
    common_mistakes = {
        -right: "the sign is wrong",
        1 / right: "this is the inverse: what is divided by what?",
    }
    common_mistakes |= dict.fromkeys(
        [1000 * right, right / 1000], "off by a factor of a thousand: check the units"
    )
    common_mistakes |= dict.fromkeys(
        [100 * right, right / 100], "off by a factor of a hundred: a share is not a percentage"
    )
    for wrong, hint in [*mistakes.items(), *common_mistakes.items()]:
        need(not math.isclose(answer, wrong, rel_tol=rel), f"{answer:.4g}: {hint}")
    raise WrongAnswerError(f"{answer:.4g} is too {'large' if answer > right else 'small'}")


def pair(value: Answer) -> tuple[Answer, Answer]:
    """Return the two elements of an answer that is a tuple or list."""
    need(isinstance(value, (tuple, list)), f"{shown(value)} is not a pair such as (a, b)")
    need(len(value) == 2, f"expected a pair such as (a, b), got {len(value)} elements")
    return value[0], value[1]


def fields(value: Answer, *names: object) -> Mapping[object, Answer]:
    """Return an answer that is a dict or a row of a table with these names."""
    need(isinstance(value, Mapping) or hasattr(value, "to_frame"), f"{shown(value)} is not a dict")
    missing = [str(name) for name in names if name not in value]
    need(not missing, f"it lacks {', '.join(missing)}")
    return value


def table(value: Answer, *columns: str) -> pd.DataFrame:
    """Return an answer that is a data frame with these columns."""
    need(isinstance(value, pd.DataFrame), f"{shown(value)} is not a table")
    missing = [name for name in columns if name not in value]
    need(
        not missing,
        f"the table has no column {', '.join(missing)}: pass the whole table from gpulab",
    )
    need(len(value), "the table is empty")
    return value


def choice(value: Answer, *names: str) -> str:
    """Return an answer that is one of these words."""
    need(
        isinstance(value, str) and value in names,
        f"{shown(value)} is not one of {', '.join(names)}",
    )
    return str(value)


def judged(value: Answer, factor: str, seeds: int = 6, metric: str = "final_loss") -> Verdict:
    """Return an answer that is a verdict on this factor and metric, from at least `seeds` seeds."""
    need(
        isinstance(value, Verdict),
        f"{shown(value)} is not a verdict: gl.verdict(…) computes one from runs",
    )
    need(
        value.factor == factor,
        f"this verdict compares {value.factor!r}, but the question is about {factor!r}",
    )
    need(
        value.metric == metric,
        f"this verdict is on {value.metric!r}, but the question is about {metric!r}",
    )
    need(len(value.table), f"the verdict compares nothing with {value.reference}")
    fewest = int(value.table.seeds.min())
    need(fewest >= seeds, f"{fewest} seeds are too few: this question needs at least {seeds}")
    return value


def recorded(experiment: str, profile: str, **columns: object) -> pd.DataFrame:
    """Return the recorded runs that have these values in their columns."""
    frame = recorded_runs()
    for name, value in {"experiment": experiment, "profile": profile, **columns}.items():
        frame = frame[frame[name] == value]
    return frame


def decisions(verdict: Verdict) -> str:
    """Describe the decision on each level in words."""
    level_names = names_in_text([verdict.reference, *verdict.decisions], verdict.factor)
    level_decisions = listed(
        f"{level_names[level]} is {decision}" for level, decision in verdict.decisions.items()
    )
    return f"compared with {level_names[verdict.reference]}, {level_decisions}"
