"""What notebook 08 shows, each small."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gpulab.models._base import Trainable

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "08_scale_out.ipynb"


@pytest.fixture(scope="module")
def noise_scale():
    """The function as it stands in the notebook."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (source,) = (
        text for cell in cells if (text := "".join(cell["source"])).startswith("def noise_scale(")
    )
    names = {"torch": torch, "np": np, "parameters_to_vector": torch.nn.utils.parameters_to_vector}
    exec(compile(source, str(NOTEBOOK), "exec"), names)
    return names["noise_scale"]


class Mean(Trainable):
    """It learns the mean of its examples: a gradient of w − x for each."""

    def __init__(self, width):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((width,), 0.5))

    def training_loss(self, batch, state):  # noqa: ARG002
        loss = (self.w - batch).square().sum(1).mean() / 2
        return loss, loss.detach().expand(len(batch)), None


def test_noise_scale_agrees_with_its_closed_form(noise_scale):
    """Normal examples of deviation 0.3 in 50 dimensions: |G|² = 50 × 0.25, tr Σ = 50 × 0.09."""
    examples = 0.3 * torch.randn(20_000, 50, generator=torch.Generator().manual_seed(0))
    assert noise_scale(Mean(50), examples, 10) == pytest.approx(0.36, rel=0.03)
    # the mean is no longer than its noise
    nearly_balanced = torch.tensor([[0.0], [0.0], [1.0], [0.8]])
    assert noise_scale(Mean(1), nearly_balanced, 2) == np.inf
