import math

import numpy as np
import pytest
import torch
from torch import nn

import gpulab as gl
from gpulab.models import Autoencoder
from gpulab.models.base import Trainable
from gpulab.training.batches import fit_law, noise_scale, steps_to_target


class Mean(Trainable):
    """It learns the mean of its examples: a gradient of w − x for each."""

    def __init__(self, width):
        super().__init__()
        self.w = nn.Parameter(torch.full((width,), 0.5))

    def training_loss(self, batch, state):  # noqa: ARG002
        loss = (self.w - batch).square().sum(1).mean() / 2
        return loss, loss.detach().expand(len(batch)), None


def test_the_noise_scale_is_known_in_closed_form():
    """Normal examples of deviation 0.3 in 50 dimensions: |G|² = 50 × 0.25, tr Σ = 50 × 0.09."""
    examples = 0.3 * torch.randn(20_000, 50, generator=torch.Generator().manual_seed(0))
    found = noise_scale(Mean(50), examples, 10)
    assert found.gradient == pytest.approx(12.5, rel=0.01)
    assert found.variance == pytest.approx(4.5, rel=0.03)
    assert found.scale == pytest.approx(0.36, rel=0.03)


def test_the_estimates_have_no_bias_with_few_examples():
    generator = torch.Generator().manual_seed(1)
    found = [noise_scale(Mean(5), torch.randn(8, 5, generator=generator), 2) for _ in range(2000)]
    assert np.mean([each.gradient for each in found]) == pytest.approx(1.25, abs=0.06)
    assert np.mean([each.variance for each in found]) == pytest.approx(5.0, abs=0.15)


def test_a_gradient_lost_in_noise_has_no_scale():
    net = Mean(5)
    nn.init.zeros_(net.w)
    examples = torch.cat([torch.eye(5), -torch.eye(5)])
    assert noise_scale(net, examples[torch.tensor([0, 5, 1, 6, 2, 7, 3, 8])], 1).scale == math.inf


def test_larger_batches_take_fewer_steps_to_a_target_and_more_examples():
    net, data = Autoencoder((16,)), gl.load("digits", size=(28, 28))
    table = steps_to_target(net, data, 0.04, (1, 8, 64), (1e-3, 3e-3), most=1500, progress=False)
    best = table[table.best].drop_duplicates("batch_size").set_index("batch_size")
    assert best.steps.is_monotonic_decreasing
    assert best.examples.is_monotonic_increasing
    assert math.isnan(steps_to_target(net, data, 1e-6, (1,), (1e-3,), most=5, progress=False).steps[0])


def test_the_law_is_found_again():
    sizes = [1, 2, 4, 8, 16, 32, 64]
    assert fit_law(sizes, [30 * (1 + 12 / size) for size in sizes]) == pytest.approx((30, 12), rel=1e-4)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: noise_scale(Mean(2), torch.rand(10, 2), 10), "10 examples in batches of 10"),
        (lambda: noise_scale(Mean(2), torch.rand(10, 2), 3), "10 examples in batches of 3"),
        (lambda: noise_scale(Mean(2), torch.rand(10, 2), 0), "10 examples in batches of 0"),
        (lambda: steps_to_target(Autoencoder(), gl.load("walk"), 0.04), "walk is a sequence"),
        (lambda: fit_law([1, 2, 4], [math.nan] * 3), "three or more, all finite"),
    ],
)
def test_nonsense_is_refused(refused, words):
    with pytest.raises(gl.UsageError, match=words):
        refused()
