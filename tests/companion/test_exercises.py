"""Every notebook has three exercises with a hint, a check that says what is wrong, and a solution that runs."""

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

import gpulab as gl
from gpulab.companion.exercises import CHECKS, LEVELS

ROOT = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = {file.name[:2]: file for file in sorted(ROOT.glob("[0-9][0-9]_*.ipynb"))}
ITEM = re.compile(
    r"^\*\*(\d\d-\d)\*\*, (\w+), (\d+) minutes\. (.+?)\n\n<details><summary>Hint</summary>\n\n(.+?)\n\n</details>$",
    re.M | re.S,
)


def cells(file, kind):
    return [
        "".join(cell["source"])
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == kind
    ]


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_a_notebook_has_three_exercises_and_their_checks(number):
    (text,) = [
        text.partition("## Exercises\n")[2] for text in cells(NOTEBOOKS[number], "markdown") if "## Exerc" in text
    ]
    found = ITEM.findall(text)
    assert [(name, level) for name, level, *_ in found] == [(f"{number}-{n}", level) for n, level in LEVELS.items()]
    assert {name for name, *_ in found} == {name for name in CHECKS if name.startswith(number)}
    assert text.count("<details>") == 3
    for name in re.findall(r"\bgl\.([\w.]*\w)", text):
        functools.reduce(getattr, name.split("."), gl)  # an AttributeError names what there is not
    assert f"](solutions/{number}_solutions.ipynb)" in text


@pytest.fixture(scope="module", params=NOTEBOOKS)
def solved(request, tmp_path_factory):
    """The number of a notebook, and each answer of its solutions with what was said of it."""
    answers, names = {}, {}
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(tmp_path_factory.mktemp("solutions")):
        patch.setenv("GPULAB_PROFILE", "smoke")
        real = gl.companion.check
        patch.setattr(gl.companion, "check", lambda name, answer: answers.update({name: answer}) or real(name, answer))
        said = {}
        for code in cells(ROOT / "solutions" / f"{request.param}_solutions.ipynb", "code"):
            before, _, last = code.rpartition("\n")
            exec(compile(before, "solution", "exec"), names)
            if last.startswith("gl.companion.check("):
                checked = eval(compile(last, "solution", "eval"), names)
                said[checked.exercise] = checked
            else:
                exec(compile(last, "solution", "exec"), names)
    return request.param, answers, said


@pytest.mark.slow
def test_each_solution_passes_and_wrong_answers_are_told_why(solved):
    number, answers, said = solved
    assert list(answers) == [f"{number}-{n}" for n in LEVELS]
    for name, checked in said.items():
        assert checked.passed, checked
        assert str(checked).startswith(f"{name}. {'Open' if name.endswith('3') else 'Right'}: ")
    for name in answers:
        wrong, sentences = WRONG[name](answers[name]), set()
        for expected, answer in wrong.items():
            checked = gl.companion.check(name, answer)
            assert not checked.passed, (name, expected)
            assert str(checked).startswith(f"{name}. Not yet: ")
            assert expected in checked.said, (name, checked.said)
            sentences.add(checked.said)
        assert len(sentences) == len(wrong) >= 3


def changed(verdict, column, value):
    """The verdict with another value in its table."""
    return replace(verdict, table=verdict.table.assign(**{column: value}))


def of_runs(verdict, **columns):
    return replace(verdict, runs=verdict.runs.assign(**columns))


FEWER = "cannot answer this, whatever they say"
WRONG = {  # by exercise: of the right answer, wrong ones, by what must be said of them
    "00-1": lambda right: {
        "half a chance": right - 1,
        "the fewest for 5 %": 6,
        "the probability": 2.0 ** (1 - right),
        "is too large": 50,
    },
    "00-2": lambda right: {
        "of the same runs": (right[0], right[0]),
        "2 seeds are in both": (right[0], right[1][right[1].seed < 2]),
        "nothing can be compared": (right[0], right[1].assign(setting="cpu:threads=2")),
        "not two things": right[0],
    },
    "00-3": lambda right: {
        "was run once only": right[right["rerun"] == 0],
        "one setting": right[right.setting == "cpu:threads=1"],
        "1 seeds": right[right.seed == 0],
        "no column weights": right.drop(columns="weights"),
    },
    "01-1": lambda right: {
        "that of one image": 0.4954,
        "half of it": right / 2,
        "count bytes": 4 * right,
        "read once": 64 * 0.4954,
        "look at the units": right * 1000,
        "is a text": "20",
    },
    "01-2": lambda right: {
        "no rows of cpu:threads=1": (right[0][right[0].setting == "cpu"], right[1]),
        "all threads over one": (right[0], "memory" if right[1] == "arithmetic" else "arithmetic"),
        "is not one of memory, arithmetic": (right[0], "bandwidth"),
        "not two things": right[0],
        "no column gflops": (right[0].drop(columns="gflops"), right[1]),
    },
    "01-3": lambda right: {
        "near the GPU's peak": {**right, "cuda": {"gflops": 50_000, "watts": 700}},
        "no power in watts": {**right, "cuda": {**right["cuda"], "watts": 0.7}},
        "lacks watts": {**right, "cpu": {"gflops": 3}},
        "lacks cuda": {"cpu": right["cpu"]},
    },
    "02-1": lambda right: {
        "those of x itself": 78,
        "how many different sums": 149,
        "that miss the exact sum": 1000 - right,
        "was the exact sum left in float64": 0,
        "is too large": 20,
    },
    "02-2": lambda right: {
        "TF32 is not among": replace(right, table=right.table.assign(change="float64")),
        "one bit of one weight is not among": replace(right, reference="float64"),
        "the first step": of_runs(right, step=0),
        "is on 'final_loss'": replace(right, metric="final_loss"),
        FEWER: changed(right, "seeds", 3),
        "is no verdict": right.runs,
    },
    "02-3": lambda right: {
        "are the same float32": {**right, "neighbour": right["start"]},
        "float32 numbers apart": {**right, "neighbour": right["start"] + 0.01},
        "decides nothing": {**right, "end": right["neighbour_end"]},
        "less than 1 %": {**right, "end": right["neighbour_end"] * (1 + 1e-5)},
        "lacks end": {name: value for name, value in right.items() if name != "end"},
    },
    "03-1": lambda _: {
        "those that are equivalent": 1,
        "with the usual margin": 0,
        "all of them": 5,
        "not compared with itself": 6,
    },
    "03-2": lambda right: {
        "emulate rounds products": changed(right, "setting", "cpu:emulate=bfloat16"),
        "bfloat16 is not among": changed(right, "setting", "cpu:precision=float64"),
        FEWER: changed(right, "seeds", 5),
        "bfloat16 is the reference": replace(right, reference="cpu:precision=bfloat16"),
        "another network": of_runs(right, experiment="prednet"),
        "is no verdict": right.table,
    },
    "03-3": lambda right: {
        "of one protocol": {1: right[32], 32: right[32]},
        "lacks 32": {1: right[1]},
        "no setting uses TF32": {**right, 32: changed(right[32], "setting", "cpu:threads=2")},
        "no setting computes in float32": {**right, 32: replace(right[32], reference="cuda:tf32=on")},
    },
    "04-1": lambda right: {
        "those that learned": 32 - right,
        "a seed was run on each": 2 * right,
        "the share of the seeds": right / 32,
        "do not beat repeating": 32,
    },
    "04-2": lambda right: {
        "take heldout_loss": (right[0], right[0].final_loss / right[0].data.repeat_loss()),
        "the inverse": (right[0], 1 / right[1]),
        "the loss itself": (right[0], right[0].heldout_loss),
        "is no run": (right[0].record, right[1]),
        "a run of autoencoder": (gl.train("autoencoder", profile="smoke", progress=False), right[1]),
        "this is the walk": (gl.train("prednet", profile="smoke", frames=40, progress=False), right[1]),
    },
    "04-3": lambda right: {
        "says how well": replace(right, metric="final_loss"),
        FEWER: changed(right, "seeds", 4),
        "compares 'loader'": replace(right, factor="loader"),
        "before the first frame": of_runs(right, left_at=0),
        "is no verdict": right.runs,
    },
    "05-1": lambda right: {
        "the other way round": right[::-1],
        "share the buffer's memory": (210, 210),
        "a copy does not change": (400, 400),
        "the window has twenty": (380, 210),
        "frames 0 to 19": (400, 190),
        "holds 20 numbers": (torch.full((20,), 20.0), 210),
    },
    "05-2": lambda right: {
        "this is one trace": right.b,
        "neither trace was overwritten": gl.audit(right.a, right.a),
        "both traces were overwritten": gl.audit(right.b, right.b),
        "is no audit": str(right),
    },
    "05-3": lambda right: {
        "measured from what is right": replace(right, reference="reused"),
        "these runs saw the walk": of_runs(right, data="walk"),
        FEWER: changed(right, "seeds", 3),
        "compares 'setting'": replace(right, factor="setting"),
        "reused is not among": changed(right, "loader", "imitated"),
    },
    "06-1": lambda right: {
        "in this table float64 left": (right[0], "float32"),
        "another push": (right[0].table.assign(perturbation=1e-6), right[1]),
        "lacks float32 or float64": (right[0].table[:1], right[1]),
        "no row is of sgd": (right[0].table.assign(optimizer="adam"), right[1]),
        "is not one of float32": (right[0], "bfloat16"),
    },
    "06-2": lambda right: {
        "both are needed": right[~right.master_weights],
        "no row has weights in bfloat16": right.assign(setting="cpu"),
        "try larger rates": right[right.learning_rate < 1e-3],
        "try smaller rates": right[right.learning_rate > 1e-4],
        "more than a factor of ten": right.assign(learning_rate=right.learning_rate.replace(1e-3, 1e-2)),
        "was not tried": right[~right.master_weights | (right.learning_rate > 1e-4)],
    },
    "06-3": lambda right: {
        "still rounded away": right.table.assign(step_ratio=0.2),
        "neither another precision": right.table.assign(setting="cpu:precision=float64"),
        "nobody left": right.table.assign(left=False),
        "times the steps": right.table.assign(steps=10 * right.table.steps),
    },
    "07-1": lambda right: {
        "how many times as dear": 10 * right,
        "the wrong way round": 0.01 / right,
        "the slower of the two CPU settings": 0.2015,
        "multiplied by the price of the GPU": 30 * right,
        "a thousand times": 1000 * right,
    },
    "07-2": lambda right: {
        "'words' does": {**right, "words": right["usual"]},
        "'width' does": {**right, "width": right["words"]},
        "lacks width": {"usual": right["usual"], "words": right["words"]},
        "no placement": {**right, "usual": right["usual"].intensity},
        "of several settings": {**right, "usual": replace(right["usual"], setting="cuda")},
        "counts no FLOP": {**right, "usual": replace(right["usual"], unknown=("lstm",))},
    },
    "07-3": lambda right: {
        "the inverse": right[::-1],
        "two devices are compared": (right[0], right[0]),
        "one network": (right[0], {**right[1], "what": "LSTM"}),
        "two times in seconds": (right[0], {**right[1], "unit": "images/s"}),
        "not the same work": (right[0], {**right[1], "size": "paper"}),
        "more than 2 %": ({**right[0], "value": 2 * right[0]["value"]}, right[1]),
    },
    "08-1": lambda right: {
        "the price is 2": right - 1,
        "not the fewest": 16,
        "a batch is the critical one": 8,
        "the speedup passes 2": 3,
    },
    "08-2": lambda right: {
        "as many weights": (right[0], right[0]),
        "the smaller network comes first": right[::-1],
        "no rows of lock-free": (right[0][right[0].way == "synchronous"], right[1]),
        "2 seeds": (right[0][right[0].seed < 2], right[1]),
    },
    "08-3": lambda _: {
        "does not grow": [(64, 1), (64, 2)],
        "for the same price": [(8, 6), (32, 2), (128, 1)],
        "the number of devices stays": [(8, 2), (32, 2)],
        "is whole": [(8, 1), (32, 2.5)],
        "two are the fewest": [(8, 1)],
    },
    "09-1": lambda _: {
        "the mean": 138 / 37,
        "how many became NaN": 37,
        "how many survived": 3,
        "the last one to fail": 27,
        "NaN or infinite": float("nan"),
    },
    "09-2": lambda right: {
        "a control is missing": right[right.covariance == "centred"],
        "no run is centred": right[right.covariance == "one-pass"],
        "one arithmetic": right[right.setting.str.contains("ampere")],
        "5 seeds in one of the cells": right[right.seed < 5],
        "the control must fail": right.assign(status="finished"),
        "no run has fewer bits": right.assign(setting="cpu"),
    },
    "09-3": lambda right: {
        "that is one pass": one_pass("tf32"),
        "no product was in TF32": torch.cov(CODES.T, correction=0),
        "divided by 49": right * 50 / 49,
        "its shape is (24,)": right.diagonal(),
        "the product of the means is still": CODES.T @ CODES / 50,
        "not quite the mean": (CODES - 0.5).T @ (CODES - 0.5) / 50,
    },
    "10-1": lambda right: {
        "that none of them does": 0.95**20,
        "a bound": 1.0,
        "that of one comparison": 0.05,
        "that all of them do": 0.05**20,
        "per cent": 100 * right,
    },
    "10-2": lambda right: {
        "some of these runs are the recorded ones": right.assign(recorded=True),
        "2 seeds": right[right.seed < 2],
        "take quick": right.assign(protocol="other", profile="smoke"),
        "no run is under cpu:threads=1": right.assign(setting="cpu:threads=2"),
    },
    "10-3": lambda right: {
        "no column of gl.runs": {**right, "metric": "loss"},
        "not a time or an order": {**right, "metric": "seconds"},
        "is no setting": {**right, "reference": "the old one"},
        "'a quarter': a number above 0": {**right, "margin": "a quarter"},
        "six are the fewest": {**right, "seeds": 3},
        "this margin takes": {**right, "seeds": 8},
        "lacks margin": {name: value for name, value in right.items() if name != "margin"},
    },
}
assert WRONG.keys() == CHECKS.keys()
CODES = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)) * 0.003 + 0.5


def one_pass(arithmetic):
    with gl.emulate(arithmetic):
        return CODES.T @ CODES / 50 - torch.outer(CODES.mean(0), CODES.mean(0))


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
        checked = gl.companion.check(name, answer)
        assert not checked.passed
        assert CHECKS[name][0] in checked.said
        assert len(checked.said) < 500
        assert "\x1b" not in checked.said


def test_an_unknown_exercise_names_those_there_are():
    for name in ("01-4", "1-1", 12, None, Spiteful()):
        with pytest.raises(gl.UsageError, match=r"expected one of 0\d-1, .+"):
            gl.companion.check(name, 1)
