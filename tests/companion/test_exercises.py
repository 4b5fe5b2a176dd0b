"""Every exercise has a check that says what is wrong, and a solution that passes."""

import contextlib
import json
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


def cells(file, kind):
    return [
        "".join(cell["source"])
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == kind
    ]


@pytest.fixture(scope="module", params=NOTEBOOKS)
def solved(request, tmp_path_factory):
    """The number of a notebook, and each answer of its solutions with what was said of it."""
    answers, names = {}, {}
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(tmp_path_factory.mktemp("solutions")):
        patch.setenv("GPULAB_PROFILE", "smoke")
        real = companion.check
        patch.setattr(companion, "check", lambda name, answer: answers.update({name: answer}) or real(name, answer))
        said = {}
        for code in cells(ROOT / "solutions" / f"{request.param}_solutions.ipynb", "code"):
            before, _, last = code.rpartition("\n")
            exec(compile(before, "solution", "exec"), names)
            if last.startswith("companion.check("):
                checked = eval(compile(last, "solution", "eval"), names)
                said[checked.exercise] = checked
            else:
                exec(compile(last, "solution", "exec"), names)
    return request.param, answers, said


@pytest.mark.slow("executes a notebook of solutions")
def test_each_solution_passes(solved):
    number, answers, said = solved
    assert list(answers) == [f"{number}-{n}" for n in LEVELS]
    for name, checked in said.items():
        assert checked.passed, checked
        assert str(checked).startswith(f"{name}. {'Open' if name.endswith('3') else 'Right'}: ")


NUMBERS = {"half a chance": 7, "the sign": -8, "look at the units": 8000, "per cent": 800, "the inverse": 1 / 8}
NUMBERS |= {"is too large": 9, "is too small": 5, "is a text": "8", "is no number": True, "holds 2": np.ones(2)}


def test_a_number_that_is_wrong_is_told_how():
    for said, answer in NUMBERS.items():
        assert said in companion.check("00-1", answer).said
    assert companion.check("00-1", torch.tensor(8)).passed


class Spiteful:
    def __eq__(self, other):
        raise RuntimeError("no")

    __float__ = __len__ = __iter__ = __repr__ = __eq__
    __hash__ = None


STRANGE = [None, "", "\x1b[31m", float("nan"), -np.inf, True, [], {}, [0] * 10**6, Spiteful(), object(), int]
STRANGE += [torch.ones(3, requires_grad=True), torch.tensor(1.0, requires_grad=True), np.array([]), pd.DataFrame()]
STRANGE += [(None, None), (Spiteful(), Spiteful()), {"cpu": Spiteful(), "cuda": None}, 10**400, 1j, -1, np.True_]


@pytest.mark.parametrize("name", CHECKS)
def test_strange_answers_are_told_what_was_expected(name):
    for answer in STRANGE:
        checked = companion.check(name, answer)
        assert not checked.passed
        assert CHECKS[name][0] in checked.said
        assert len(checked.said) < 500
        assert "\x1b" not in checked.said


def test_an_unknown_exercise_names_those_there_are():
    for name in ("01-4", "1-1", 12, None, Spiteful()):
        with pytest.raises(gl.UsageError, match=r"expected one of 0\d-1, .+"):
            companion.check(name, 1)
