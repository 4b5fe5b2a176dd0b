import functools
import math

import pytest
import torch
from saddle_problems import SIX_SCALES, escape

import gpulab as gl
from gpulab import plots
from gpulab.saddles.optimizers import Law, step_ratio

FLOAT32, BFLOAT16 = "cpu", "cpu:precision=bfloat16"
LARGE_EPSILON = functools.partial(torch.optim.Adam, eps=1.0)


@pytest.fixture(scope="module")
def saddle():
    """Mixed, so that all weights take part in what leads down."""
    return gl.saddles.linear_autoencoder_saddle(SIX_SCALES, [1, 2]).mixed(1)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("curvature", [1e-6, 0.01, 0.3, 3.0])
def test_growth_is_the_eigenvalue_of_the_recursion(momentum, curvature):
    law = Law(0.5, momentum)
    step = torch.tensor([[1 + momentum + 0.5 * curvature, -momentum], [1.0, 0.0]], dtype=torch.float64)
    largest = torch.linalg.eigvals(step).real.max().item()
    value = torch.tensor([curvature], dtype=torch.float64)
    assert law.growth(value).item() == pytest.approx(largest, rel=1e-13)
    assert law.gain(value).item() == pytest.approx(largest - 1, rel=1e-9)


def test_a_push_adds_what_the_recursion_makes_of_it():
    law, curvature = Law(0.1, 0.8), torch.tensor([0.5], dtype=torch.float64)
    before, now = 0.0, 1.0
    for _ in range(300):
        before, now = now, now + 0.8 * (now - before) + 0.05 * now
    rest, moved = 1.0, 1.05  # a displacement of 1 at rest, and after a step
    for _ in range(300):
        rest, moved = moved, moved + 0.8 * (moved - rest) + 0.05 * moved
    growth = law.growth(curvature)
    assert now / moved == pytest.approx((law.impulse(curvature) / growth).item(), rel=1e-12)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
@pytest.mark.parametrize("perturbation", [1e-2, 1e-5, 1e-9])
def test_momentum_leaves_when_the_law_says(saddle, momentum, perturbation):
    made = functools.partial(torch.optim.SGD, momentum=momentum)
    seen = escape(saddle, optimizer=made, perturbation=perturbation)
    assert abs(seen.steps - seen.expected) < 2
    assert math.isnan(seen.law)
    assert seen.expected < 0.8 * escape(saddle, perturbation=perturbation).expected


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_steps_of_one_size_leave_after_the_radius_over_that_size(saddle, optimizer):
    seen = {rate: escape(saddle, optimizer=optimizer, learning_rate=rate, perturbation=1e-5) for rate in (1e-4, 1e-5)}
    for rate, one in seen.items():
        assert one.expected == pytest.approx(0.1 / (rate * float(saddle.direction.abs().sum())), rel=0.1)
        assert 0.4 < one.steps / one.expected < 1.6
        assert math.isnan(one.expected_rate)
    assert 6 < seen[1e-5].steps / seen[1e-4].steps < 20


def test_an_optimiser_without_a_law_says_so(saddle):
    seen = escape(saddle, optimizer=torch.optim.AdamW, steps=300)
    assert math.isnan(seen.expected)
    assert "no theory" in repr(seen)
    assert Law.of(torch.optim.Adam([torch.zeros(1, requires_grad=True)], eps=0.0)) is None
    assert math.isnan(escape(saddle, optimizer="adam", batch_size=10, steps=5).expected)


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [("sgd", 1e-3 * 0.2), ("momentum", 1e-2 * 0.2), ("adam", 1e-3), ("rmsprop", 1e-3), (LARGE_EPSILON, 1e-3 / 6)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_ratio_is_that_of_the_settled_step(optimizer, step, dtype):
    weights = torch.tensor([1.0, -1.5, 1.99, 1.25], dtype=dtype)
    places = torch.nextafter(weights[:1], torch.full((1,), 9.0, dtype=dtype)) - weights[:1]
    ratio = step_ratio(optimizer, 1e-3, [weights], [torch.full((4,), -0.2)])
    assert ratio == pytest.approx(step / (places.item() / 2), rel=0.01)


def test_the_optimiser_and_its_rate_decide_what_a_format_holds(saddle):
    held, scaled = (escape(saddle, FLOAT32, optimizer=name) for name in ("sgd", "adam"))
    small, large = (escape(saddle, BFLOAT16, optimizer="adam", learning_rate=rate) for rate in (1e-5, 1e-2))
    assert all(one.held and one.step_ratio < 0.2 for one in (held, small))
    assert all(one.left and one.step_ratio > 1 for one in (scaled, large))


def test_what_is_rounded_away_is_the_update(saddle):
    """Float32's gradients lead away in the law's time, if only the weights have the digits to follow them."""
    held = escape(saddle, BFLOAT16)
    free = escape(saddle, BFLOAT16, master_weights=True)
    assert held.held
    assert 0.5 < free.steps / free.expected < 2
    assert free.step_ratio > 1e6 * held.step_ratio
    assert "weights in float64" in repr(free)


def test_a_table_has_every_optimiser_with_its_rates_and_only_a_law_is_drawn(saddle):
    rates = {"sgd": [None], "adam": [1e-5, 1e-2]}
    escapes = gl.saddles.escape_table(saddle, [FLOAT32, BFLOAT16], optimizers=rates, progress=False)
    table = escapes.table
    assert table.groupby("optimizer").learning_rate.nunique().to_dict() == {"adam": 2, "sgd": 1}
    with pytest.raises(gl.UsageError, match="no escape by sgd or momentum"):
        plots.escape_law(table[table.optimizer == "adam"])
