"""What notebook 08 shows, each small."""

import math

import numpy as np
import pytest
import torch

import gpulab as gl
from companion import scale_out
from gpulab.models.base import Trainable


@pytest.fixture(scope="module")
def batches():
    return scale_out.large_batches(0.045, (4, 16, 64), (1e-3, 2e-3), most=600, progress=False)


def test_larger_batches_gain_ever_less(batches):
    table, found = batches
    assert table.steps.is_monotonic_decreasing
    assert (table.steps * table.batch_size).is_monotonic_increasing
    assert (found[["least_steps", "critical_batch", "noise_begin", "noise_target"]] > 0).all(axis=None)
    assert found.law_off[0] == pytest.approx((table.law / table.steps - 1).abs().max())
    gains = scale_out.batch_gains(24.0, 8, (1, 3, 1000))
    assert gains.speedup.tolist() == pytest.approx([1, 2, 4], rel=0.01)
    assert (gains.price * gains.speedup).tolist() == pytest.approx(gains.devices.tolist())


class Mean(Trainable):
    """It learns the mean of its examples: a gradient of w − x for each."""

    def __init__(self, width):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((width,), 0.5))

    def training_loss(self, batch, state):  # noqa: ARG002
        loss = (self.w - batch).square().sum(1).mean() / 2
        return loss, loss.detach().expand(len(batch)), None


def test_noise_scale_in_closed_form():
    """Normal examples of deviation 0.3 in 50 dimensions: |G|² = 50 × 0.25, tr Σ = 50 × 0.09."""
    examples = 0.3 * torch.randn(20_000, 50, generator=torch.Generator().manual_seed(0))
    gradient, variance = scale_out.noise_scale(Mean(50), examples, 10)
    assert gradient == pytest.approx(12.5, rel=0.01)
    assert variance == pytest.approx(4.5, rel=0.03)


def test_noise_scale_without_bias():
    generator = torch.Generator().manual_seed(1)
    found = [scale_out.noise_scale(Mean(5), torch.randn(8, 5, generator=generator), 2) for _ in range(2000)]
    gradients, variances = zip(*found, strict=True)
    assert np.mean(gradients) == pytest.approx(1.25, abs=0.06)
    assert np.mean(variances) == pytest.approx(5.0, abs=0.15)


def test_noise_scale_unequal_batches():
    with pytest.raises(gl.UsageError, match="10 examples in batches of 3"):
        scale_out.noise_scale(Mean(2), torch.rand(10, 2), 3)


def test_fit_law():
    sizes = [1, 2, 4, 8, 16, 32, 64]
    law = scale_out.fit_law(sizes, [30 * (1 + 12 / size) for size in sizes])
    assert law == pytest.approx((30, 12), rel=1e-4)
    with pytest.raises(gl.UsageError, match="three or more"):
        scale_out.fit_law([1, 2, 4], [4, 3, math.nan])


def test_steps_to_target_not_reached():
    assert math.isnan(scale_out.steps_to_target(gl.models.Autoencoder((16,)), 1e-6, 1, 1e-3, most=5))


# --- programs ---------------------------------------------------------------------------------------------


def test_program_source():
    source = scale_out.program_source("serve", "predict").data
    assert source.startswith("```python\n@torch.inference_mode()\ndef predict(")
    assert source.endswith("```")
    with pytest.raises(gl.UsageError, match=r"serve\.py has no predicts: expected some of predict, "):
        scale_out.program_source("serve", "predicts")


def test_recorded_scale_out_of_both_versions(monkeypatch):
    """What the programs record stands beside what an earlier version did, with the same columns."""
    earlier = scale_out.recorded_scale_out("scaling").query("origin == 'recorded by an earlier version'")
    rows = [{**row, "devices": 4} for row in earlier.drop(columns=["machine", "origin", "recorded"]).to_dict("records")]
    read = scale_out.read_measured
    document = {"machine": "a GPU", "scaling": rows}
    monkeypatch.setattr(scale_out, "read_measured", lambda kind: [document] if kind == "programs" else read(kind))
    both = scale_out.recorded_scale_out("scaling")
    assert set(both.origin) == {"recorded by an earlier version", "recorded"}
    assert both[both.origin == "recorded"].machine.unique().tolist() == ["a GPU"]
    assert both.recorded.all()
    assert "4 devices do" in scale_out.scaling_lines(both).alt
    assert scale_out.recorded_scale_out("no such table").empty


@pytest.mark.slow("starts a program")
def test_run_program(capsys):
    parts = scale_out.run_program("model_parallel", "--updates", 3)["parts"]
    assert parts.origin.tolist() == ["here", "here"]
    assert "in parts: mean loss" in capsys.readouterr().out
    with pytest.raises(gl.GpulabError, match="expected 2 arguments"):
        scale_out.run_program("model_parallel", "--devices", "cpu")
