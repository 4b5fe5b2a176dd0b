"""Notebook 09: an H200 behaves as its emulation does."""

import math
import re

import pandas as pd
import pytest
import torch
from torch.nn.functional import mse_loss

import gpulab as gl
from companion import old_gpu
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


@pytest.mark.parametrize(
    ("shift", "lost", "counts"),
    [
        (0.0, 0, [1, 1, 0, 0, 10]),
        (9.0, 0, [0, 1, 0, 0, 10]),
        (0.0, 10, [0, 1, 0, 10, 10]),
    ],
)
def test_describe_kernels_counts_outcomes_and_runs_that_became_nan(shift, lost, counts):
    """The numbers of the sentence: kernels that restored the old losses, all kernels, runs that
    became NaN, all runs.
    """
    losses = [1.0 + 0.1 * seed for seed in range(10)]
    tried = [math.nan if seed < lost else loss + shift for seed, loss in enumerate(losses)]
    rows = [("old card", seed, loss, "finished") for seed, loss in enumerate(losses)]
    for seed, loss in enumerate(tried):
        rows.append(("kernel 3", seed, loss, "diverged" if math.isnan(loss) else "finished"))
    frame = pd.DataFrame(rows, columns=["retuning", "seed", "final_loss", "status"])
    kernels = gl.verdict(frame, factor="retuning", reference="old card", margin="1sd")
    (sentence,) = old_gpu._describe_kernels(kernels)
    assert [int(number) for number in re.findall(r"\d+", sentence)] == counts
