"""Asynchronous copies are reported if the host uses their memory without waiting, and only then."""

import contextlib
import warnings

import pytest
import torch

import gpulab as gl
from benchmarks.correctness import copies_under_way_cases

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA's")
UNSEEN = ["view_made_before"]  # NumPy reads it without torch


@CUDA
@pytest.mark.parametrize(
    "case", copies_under_way_cases.CASES, ids=lambda case: case.program.__name__
)
def test_guard_of_programs_that_copy_to_and_from_a_gpu(case):
    row = copies_under_way_cases.tried(case)
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
def test_guard_error_names_the_copy_to_the_gpu_and_the_remedy():
    headline = "overwritten before the program waited for its copy to the GPU"
    with pytest.raises(gl.OverwrittenError, match=headline) as told:
        guarded(refilled, torch.zeros(1 << 20, pin_memory=True))
    for words in (
        "copied by refilled",
        'there = host.to("cuda", non_blocking=True)',
        "event.synchronize()",
    ):
        assert words in str(told.value)


@CUDA
def test_guard_forgets_copies_after_an_error_in_its_block():
    host = torch.zeros(1 << 20, pin_memory=True)
    guard = gl.guard(on="warn", reads="any")
    with contextlib.suppress(ZeroDivisionError), guard:
        host.to("cuda", non_blocking=True)
        raise ZeroDivisionError
    host.fill_(1)
    torch.cuda.synchronize()
    assert (
        guard._shared_reads.async_copies.copies
        == guard._shared_reads.async_copies.unreported
        == guard.findings
        == []
    )


@CUDA
def test_guard_tells_at_its_end_of_copies_never_waited_for():
    host = torch.zeros(1 << 20, pin_memory=True)
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn", reads="any") as report:
        there = host.to("cuda", non_blocking=True)
        host.numpy()[:] = 1
    assert [finding.operation for finding in report.findings] == ["the end of the guard"]
    assert there.is_cuda
