"""Notebook 09: an H200 did what the emulation does."""

import pytest
import torch
from torch.nn.functional import mse_loss

import gpulab as gl
from gpulab.store.recorded import recorded_folder


def test_audit_of_an_h200_and_of_its_emulation_blame_the_same_line():
    traces = recorded_folder("traces")
    report = gl.audit(
        traces / "whitener-cuda-tf32-off.trace", traces / "whitener-cuda-tf32-on.trace"
    )
    net = gl.models.Whitener()
    net.draw_weights(torch.Generator().manual_seed(7))
    images = torch.from_numpy(next(gl.load("digits").windows(200, 7)).frames[:50]).float() / 255
    settings = "cpu:threads=1", "cpu:threads=1,tf32=on,emulate=ampere"
    emulated = gl.audit(gl.Step(net, (images, images), mse_loss), *settings, progress=False)
    for found in (report.findings[0], emulated.findings[0]):
        assert (found.kind, found.operation) == ("reduced precision", "mm")
        assert "codes.T @ codes" in found.line
    assert report.findings[0].op.error == pytest.approx(emulated.findings[0].op.error, rel=1e-3)
