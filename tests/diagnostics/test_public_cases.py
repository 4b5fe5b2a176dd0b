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
LARGE = {"convolution_and_batch_norm", "convolution_on_an_rtx_3090"}
ON_A_CPU = [
    pytest.param(one, id=one.name, marks=[pytest.mark.slow("a large step")] * (one.name in LARGE))
    for one in CASES
    if one.pairs[1]
]


def test_each_of_sixty_cases_has_a_name_a_thread_a_cause_and_an_expected_answer():
    assert len({one.name for one in CASES}) == len(CASES) >= 60
    for one in CASES:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", one.thread)
        assert re.fullmatch(r"[^\n|]{20,115}\.", one.cause)
        assert one.kind in (*KINDS, public_cases.ANOTHER_ANSWER)
        re.compile(one.operation)
        cuda, cpu = one.pairs
        kinds = [gl.Setting.parse(setting).kind for setting in cpu or ()]
        assert kinds == ["cpu"] * len(kinds)
        assert kinds or [gl.Setting.parse(setting) for setting in cuda]


@pytest.mark.parametrize("one", ON_A_CPU)
def test_the_first_line_answers_the_question(one):
    row = public_cases.examined(one, one.pairs[1])
    assert row["right"], row["text"]


@pytest.mark.parametrize(
    ("kind", "operation", "right"), [("rounding", "exp", True), ("rounding", "log", False), ("mismatch", "exp", False)]
)
def test_the_table_tells_right_first_lines_from_wrong_ones_errors_and_what_was_not_run(
    kind, operation, right, monkeypatch
):
    def fails(_):
        raise ValueError("no such data")

    def exponentials(setting):
        return torch.ones(3, dtype=setting.dtype).exp()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here, there = (None, ("cpu:threads=1", "cpu:threads=1,denormals=on")), (("cpu", "cuda"), None)
    asked = [(here, exponentials), (here, fails), (there, fails)]
    cases = [public_cases.Case("plain", "a/b#1", "A step.", pairs, kind, operation, step) for pairs, step in asked]
    table = public_cases.run(cases, "auto")
    assert table.said.fillna("").tolist() == ["rounding", "error", ""]
    page = public_cases.document(table)
    assert "ValueError: no such data" in page
    assert f"Of 2 audits {int(right)} begin with the line expected" in page
    assert "| not run |" in page
