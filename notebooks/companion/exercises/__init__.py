"""The exercises of the notebooks: checks of answers, with an explanation of what is wrong.

The checks of each notebook are a module of this package. A check computes the right answer from
recorded data or by doing the task itself, or looks it up in stored measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

# Each of these modules adds its checks to `CHECKS` when it is imported.
from companion.exercises import (  # noqa: F401
    notebook_00,
    notebook_01,
    notebook_02,
    notebook_03,
    notebook_04,
    notebook_05,
    notebook_06,
    notebook_07,
    notebook_08,
    notebook_09,
    notebook_10,
    notebook_11,
)
from companion.exercises.answers import CHECKS, Answer, WrongAnswerError, need, shown
from gpulab.errors import UsageError, printable
from gpulab.report import Report

LEVELS = {"1": "easy", "2": "experiment", "3": "open"}


@dataclass(frozen=True, repr=False)
class Checked(Report):
    """The result of `check`: whether an answer passed, and a sentence that explains why."""

    exercise: str
    passed: bool
    said: str

    def __str__(self) -> str:
        outcome = "Open" if LEVELS[self.exercise[-1]] == "open" else "Right"
        return f"{self.exercise}. {outcome if self.passed else 'Not yet'}: {self.said}"

    __repr__ = __str__


def check(exercise: str, answer: Answer) -> Checked:
    """Check an answer to an exercise of a notebook, and explain what is wrong with a wrong one.

    `exercise` is a name such as "05-2", the second exercise of notebook 05. The answer is
    inspected, but nothing in it is executed. For an open exercise only the form is checked, and
    the result is `Open` instead of `Right`.

    >>> check("05-1", (210, 210)).passed
    False
    """
    if not isinstance(exercise, str) or exercise not in CHECKS:
        raise UsageError(f"exercise {shown(exercise)}: expected one of {', '.join(sorted(CHECKS))}")
    asked = CHECKS[exercise]
    try:
        need(
            answer is not None,
            "this is None. Printing a value does not return it",
        )
        return Checked(exercise, True, printable(asked.check(answer)))
    except (WrongAnswerError, UsageError) as wrong:
        reason = str(wrong)
    except Exception as error:  # inspecting an arbitrary answer can fail in any way
        reason = f"{shown(answer)} could not be checked ({type(error).__name__})"
    reason += " " if reason.endswith("?") else ". "
    return Checked(exercise, False, printable(f"{reason}The answer is {asked.form}."))
