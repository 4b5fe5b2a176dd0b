"""The cases of `benchmarks/public_cases.py`: each says where it was asked and why, and the audit answers on a CPU."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import gpulab as gl
from gpulab.diagnostics.findings import KINDS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
public_cases = importlib.import_module("public_cases")
CASES = public_cases.CASES
ON_A_CPU = [pytest.param(one, id=one.name) for one in CASES if one.pairs[1]]


def test_there_are_sixty_cases_and_no_two_of_one_name():
    assert len(CASES) >= 60
    assert len({one.name for one in CASES}) == len(CASES)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_a_case_has_a_thread_a_cause_and_an_expected_answer(one):
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", one.thread)
    assert re.fullmatch(r"[^\n|]{20,115}\.", one.cause)
    assert one.kind in (*KINDS, public_cases.ANOTHER_ANSWER)
    re.compile(one.operation)
    cuda, cpu = one.pairs
    assert cuda or cpu
    for setting in (*(cuda or ()), *(cpu or ())):
        gl.Setting.parse(setting)
    assert all(gl.Setting.parse(setting).kind == "cpu" for setting in cpu or ())


@pytest.mark.parametrize("one", ON_A_CPU)
def test_the_first_line_answers_the_question(one):
    row = public_cases.examined(one, one.pairs[1])
    assert row["right"], row["text"]


def asked(kind, operation, function):
    pairs = None, ("cpu:threads=1", "cpu:threads=1,denormals=on")
    return public_cases.Case("plain", "a/b#1", "A plain step.", pairs, kind, operation, function)


@pytest.mark.parametrize(
    ("kind", "operation", "right"), [("rounding", "exp", True), ("rounding", "log", False), ("mismatch", "exp", False)]
)
def test_a_first_line_is_right_where_kind_and_operation_are_the_expected_ones(kind, operation, right):
    one = asked(kind, operation, lambda setting: torch.ones(3, dtype=setting.dtype).exp())
    row = public_cases.examined(one, one.pairs[1])
    assert (row["said"], row["at"], row["right"]) == ("rounding", "exp", right)


def test_a_step_that_fails_is_an_error_in_the_table_and_what_needs_a_gpu_is_not_run(monkeypatch):
    def fails(_):
        raise ValueError("no such data")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    needs_gpu = public_cases.Case("far", "a/b#2", "Far away.", (("cpu", "cuda"), None), "rounding", "", fails)
    table = public_cases.run([asked("rounding", "", fails), needs_gpu], "auto")
    assert table.said.fillna("").tolist() == ["error", ""]
    page = public_cases.document(table)
    assert "ValueError: no such data" in page
    assert "Of 1 audits 0 begin with the line expected" in page
    assert "| not run |" in page
