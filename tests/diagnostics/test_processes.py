import os

import pytest
import torch

import gpulab as gl
from gpulab.diagnostics.operations import fused_share
from gpulab.diagnostics.processes import measure


def test_a_setting_that_needs_a_process_gets_one(monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    if "avx2" not in gl.passport()["cpu"]["vector_extensions"]:
        pytest.skip("no such CPU")
    rows = measure(fused_share, "cpu:isa=avx2", count=100)
    assert {row["setting"] for row in rows} == {"cpu:isa=avx2"}
    assert "ATEN_CPU_CAPABILITY" not in os.environ


def test_others_are_measured_here(monkeypatch):
    monkeypatch.setattr(torch, "addcmul", lambda c, *_: c)
    rows = {row["operation"]: row for row in measure(fused_share, "cpu", count=100)}
    assert rows["torch.addcmul(c, a, b)"]["rounded_once"] < 0.5


def test_a_process_that_fails_says_why():
    if "avx2" not in gl.passport()["cpu"]["vector_extensions"]:
        pytest.skip("no such CPU")
    with pytest.raises(gl.GpulabError, match=r"ended with status 1: .*unexpected"):
        measure(fused_share, "cpu:isa=avx2", nonsense=1)
