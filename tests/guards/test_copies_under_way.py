"""Copies between the host and a GPU that nobody has waited for: told where the host uses their memory, else not."""

import contextlib
import importlib
import sys
import warnings
from pathlib import Path

import pytest
import torch

import gpulab as gl

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
CASES = importlib.import_module("copies_under_way_cases")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA's")
UNSEEN = ["view_made_before"]  # NumPy reads it without torch


@CUDA
@pytest.mark.parametrize("case", CASES.CASES, ids=lambda case: case.program.__name__)
def test_faults_are_caught_where_they_are_and_right_programs_left_alone(case):
    row = CASES.tried(case)
    seen = case.program.__name__ not in UNSEEN
    assert (row["as expected"], row["placed"]) == (seen, seen if case.cause else None), row


def guarded(program, *given):
    with gl.guard(reads="any"):
        return program(*given)


def refilled(host):
    there = host.to("cuda", non_blocking=True)
    host.numpy()[:] = 1
    return there.sum().item()


@CUDA
def test_the_error_names_the_copy_and_the_cure():
    with pytest.raises(gl.OverwrittenError, match="overwritten before its copy to the GPU") as told:
        guarded(refilled, torch.zeros(1 << 20, pin_memory=True))
    for words in ("copied by refilled", 'there = host.to("cuda", non_blocking=True)', "event.synchronize()"):
        assert words in str(told.value)


@CUDA
def test_after_an_error_nothing_is_looked_at_any_more():
    host = torch.zeros(1 << 20, pin_memory=True)
    guard = gl.guard(on="warn", reads="any")
    with contextlib.suppress(ZeroDivisionError), guard:
        host.to("cuda", non_blocking=True)
        raise ZeroDivisionError
    host.fill_(1)
    torch.cuda.synchronize()
    assert guard._shared.copies.copies == guard._shared.copies.untold == guard.findings == []


@CUDA
def test_what_is_overwritten_and_never_waited_for_is_told_at_the_end():
    host = torch.zeros(1 << 20, pin_memory=True)
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        there = host.to("cuda", non_blocking=True)
        host.numpy()[:] = 1
    assert [finding.operation for finding in report.findings] == ["the end of the guard"]
    assert there.is_cuda


@pytest.mark.parametrize("inner", ["any", "backward"])
def test_what_the_guard_replaces_in_torch_is_torchs_own_again_afterwards(inner):
    def own():
        names = [(torch.Tensor, "numpy"), (torch.Tensor, "tolist"), (torch, "frombuffer"), (torch.cuda.Event, "query")]
        return [getattr(owner, name) for owner, name in names]

    before = own()
    with gl.guard(reads="any"):
        assert own()[0] is not before[0]
        with gl.guard(reads=inner):
            assert torch.ones(2).tolist() == torch.ones(2).numpy().tolist() == [1, 1]
    assert own() == before
