"""The exercises of the notebooks: how answers are checked, and what is said of wrong ones.

The checks of each notebook are a module of this package. A check computes the right answer from
recorded data or by doing the task itself, or looks it up in what was measured.
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
    """What `check` says of an answer: `passed`, and in a sentence why (not)."""

    exercise: str
    passed: bool
    said: str

    def __str__(self) -> str:
        outcome = "Open" if LEVELS[self.exercise[-1]] == "open" else "Right"
        return f"{self.exercise}. {outcome if self.passed else 'Not yet'}: {self.said}"

    __repr__ = __str__


def check(exercise: str, answer: Answer) -> Checked:
    """Whether an answer to an exercise of a notebook is right; if it is not, what is wrong with it.

    `exercise` is a name such as "05-2", of notebook 05 the second. The answer is looked at, and
    nothing in it is run. Of an open exercise only the form can pass, and then `Open` is said and
    not `Right`.

    >>> check("05-1", (210, 210)).passed
    False
    """
    if not isinstance(exercise, str) or exercise not in CHECKS:
        raise UsageError(f"exercise {shown(exercise)}: expected one of {', '.join(sorted(CHECKS))}")
    asked = CHECKS[exercise]
    try:
        need(
            answer is not None,
            "this is None. A cell whose last line prints or assigns gives nothing back",
        )
        return Checked(exercise, True, printable(asked.check(answer)))
    except (WrongAnswerError, UsageError) as wrong:
        reason = str(wrong)
    except Exception as error:  # whatever an answer does when it is looked at
        reason = f"{shown(answer)} cannot be read ({type(error).__name__})"
    reason += " " if reason.endswith("?") else ". "
    return Checked(exercise, False, printable(f"{reason}The answer is {asked.form}."))
