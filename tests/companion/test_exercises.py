"""Every notebook has three exercises. Each has a hint, a check that says what is wrong, and a
solution that runs.
"""

import contextlib
import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import companion
import gpulab as gl
from companion.exercises import CHECKS, LEVELS

ROOT = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = {file.name[:2]: file for file in sorted(ROOT.glob("[0-9][0-9]_*.ipynb"))}
ITEM = re.compile(
    r"^\*\*(\d\d-\d)\*\*, (\w+), (\d+) minutes\."
    r" (.+?)\n\n<details><summary>Hint</summary>\n\n(.+?)\n\n</details>$",
    re.MULTILINE | re.DOTALL,
)


def cells(file, kind):
    return [
        "".join(cell["source"])
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == kind
    ]


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_exercises_are_three_in_each_notebook_with_their_checks(number):
    (text,) = [
        text.partition("## Exercises\n")[2]
        for text in cells(NOTEBOOKS[number], "markdown")
        if "## Exerc" in text
    ]
    found = ITEM.findall(text)
    assert [(name, level) for name, level, *_ in found] == [
        (f"{number}-{n}", level) for n, level in LEVELS.items()
    ]
    assert {name for name, *_ in found} == {name for name in CHECKS if name.startswith(number)}
    assert text.count("<details>") == 3
    for name in re.findall(r"\bgl\.([\w.]*\w)", text):
        functools.reduce(getattr, name.split("."), gl)  # an AttributeError names what is missing
    assert f"](solutions/{number}_solutions.ipynb)" in text


@pytest.fixture(scope="module", params=NOTEBOOKS)
def solved(request, tmp_path_factory):
    """The number of a notebook, the answers in its solutions, and what `check` said of each."""
    answers, said, names, check = {}, {}, {}, companion.check

    def kept(name, answer):
        answers[name], said[name] = answer, check(name, answer)
        return said[name]

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(tmp_path_factory.mktemp("solutions")),
    ):
        patch.setenv("GPULAB_PROFILE", "smoke")
        patch.setattr(companion, "check", kept)
        for code in cells(ROOT / "solutions" / f"{request.param}_solutions.ipynb", "code"):
            exec(compile(code, "solution", "exec"), names)
    return request.param, answers, said


@pytest.mark.slow("executes a notebook of solutions")
def test_check_accepts_each_solution_and_says_why_an_answer_is_wrong(solved):
    number, answers, said = solved
    assert list(answers) == [f"{number}-{n}" for n in LEVELS]
    for name, checked in said.items():
        assert checked.passed, checked
        assert str(checked).startswith(f"{name}. {'Open' if name.endswith('3') else 'Right'}: ")
        expected, mistaken = WRONG[name]
        wrong = companion.check(name, mistaken(answers[name]))
        assert not wrong.passed, (name, expected)
        assert str(wrong).startswith(f"{name}. Not yet: ")
        assert expected in wrong.said, (name, wrong.said)


def with_level(verdict, level):
    """The verdict with all of its levels renamed to `level`."""
    return replace(verdict, rows=tuple(replace(row, level=level) for row in verdict.rows))


def of_runs(verdict, **columns):
    return replace(verdict, runs=verdict.runs.assign(**columns))


# For each exercise: what `check` must say about a wrong answer, and how to make one from the right
# answer.
WRONG = {
    "00-1": ("half of the chance", lambda right: right - 1),
    "00-2": ("2 seeds are in both", lambda right: (right[0], right[1][right[1].seed < 2])),
    "00-3": ("was run only once", lambda right: right[right["rerun"] == 0]),
    "01-1": ("count bytes", lambda right: 4 * right),
    "01-2": (
        "with all threads",
        lambda right: (right[0], {"memory", "arithmetic"}.difference([right[1]]).pop()),
    ),
    "01-3": (
        "near the GPU's peak",
        lambda right: {**right, "cuda": {"gflops": 50_000, "watts": 700}},
    ),
    "02-1": ("for x itself", lambda _: 78),
    "02-2": ("the first step", lambda right: of_runs(right, step=0)),
    "02-3": ("float32 numbers apart", lambda right: {**right, "neighbour": right["start"] + 0.01}),
    "03-1": ("with the usual margin", lambda _: 0),
    "03-2": ("use precision=bfloat16", lambda right: with_level(right, "cpu:emulate=bfloat16")),
    "03-3": ("the same protocol", lambda right: {1: right[32], 32: right[32]}),
    "04-1": ("both settings", lambda right: 2 * right),
    "04-2": (
        "use heldout_loss",
        lambda right: (right[0], right[0].final_loss / right[0].data.repeat_loss()),
    ),
    "04-3": ("says how well", lambda right: replace(right, metric="final_loss")),
    "05-1": ("share the buffer's memory", lambda _: (210, 210)),
    "05-2": ("neither trace has overwritten frames", lambda right: gl.audit(right.a, right.a)),
    "05-3": ("the reference is 'reused'", lambda right: replace(right, reference="reused")),
    "06-1": ("in this table float64 left", lambda right: (right[0], "float32")),
    "06-2": (
        "was not tried",
        lambda right: right[~right.master_weights | (right.learning_rate > 1e-4)],
    ),
    "06-3": ("still rounded away", lambda right: right.table.assign(step_ratio=0.2)),
    "07-1": ("ratio of hourly prices", lambda right: 10 * right),
    "07-2": ("'width' should", lambda right: {**right, "width": right["words"]}),
    "07-3": ("the slow one first", lambda right: right[::-1]),
    "08-1": ("the price is 2", lambda right: right - 1),
    "08-2": ("the smaller network", lambda right: right[::-1]),
    "08-3": ("for the same price", lambda _: [(8, 6), (32, 2), (128, 1)]),
    "09-1": ("the mean", lambda _: 138 / 37),
    "09-2": ("the control must fail", lambda right: right.assign(status="finished")),
    "09-3": ("as in the one-pass form", lambda _: one_pass("tf32")),
    "10-1": ("that none of them is", lambda _: 0.95**20),
    "10-2": ("pass only the runs that you made", lambda right: right.assign(recorded=True)),
    "10-3": ("'the old one'", lambda right: {**right, "reference": "the old one"}),
    "11-1": ("which holds the third", lambda _: (5, 5)),
    "11-2": ("the first guard found nothing", lambda right: right[::-1]),
    "11-3": ("True or False", lambda right: {**right, "shares": "yes"}),
}
assert WRONG.keys() == CHECKS.keys()


CODES = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)) * 0.003 + 0.5


def one_pass(arithmetic):
    with gl.emulate(arithmetic):
        return CODES.T @ CODES / 50 - torch.outer(CODES.mean(0), CODES.mean(0))


STRANGE = [
    None,
    "",
    "\x1b[31m",
    float("nan"),
    -np.inf,
    [],
    {},
    [0] * 10**6,
    object(),
    int,
    10**400,
    1j,
    -1,
    np.True_,
]
STRANGE += [
    torch.ones(3, requires_grad=True),
    np.array([]),
    pd.DataFrame(),
    (None, None),
    {"cpu": 1j, "cuda": None},
]


@pytest.mark.parametrize("name", CHECKS)
def test_check_says_what_was_expected_of_a_strange_answer(name):
    for answer in STRANGE:
        checked = companion.check(name, answer)
        assert not checked.passed
        assert CHECKS[name].form in checked.said
        assert len(checked.said) < 500
        assert "\x1b" not in checked.said


def test_check_of_an_unknown_exercise_names_the_known_ones():
    for name in ("01-4", "1-1", 12, None):
        with pytest.raises(gl.UsageError, match=r"expected one of 0\d-1, .+"):
            companion.check(name, 1)
