import functools
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import gpulab as gl
from gpulab import plots
from gpulab.saddles._optimizers import EscapeLaw, step_ratio
from tests.saddles._helpers import DOUBLE, FLOAT64, SADDLE, SIX_SCALES, escape, scaled_data

FLOAT32, BFLOAT16 = "cpu", "cpu:precision=bfloat16"
LARGE_EPSILON = functools.partial(torch.optim.Adam, eps=1.0)


@pytest.fixture(scope="module")
def alone():
    return escape()


leave = functools.partial(escape, seeds=[1])  # bfloat16 can represent the weights of this seed


def test_escape_table_pushed_trainings_leave_when_the_law_says():
    pushed = gl.saddles.escape_table(
        SADDLE, [FLOAT64], perturbations=[1e-2, 1e-5, 1e-8, 1e-11], progress=False
    )
    for row in pushed.table.itertuples():
        assert row.escaped
        assert row.start == pytest.approx(row.perturbation, rel=1e-3)
        assert abs(row.steps - row.expected_steps) < 2
    # Four points on a line: the steps between two pushes, divided by those that the law predicts.
    (first, last), rate = (
        pushed.table.steps.iloc[[0, -1]],
        pushed.table.learning_rate[0] * -SADDLE.curvature,
    )
    slope, low, high = pushed.slope()
    assert low <= slope <= high
    assert slope == pytest.approx((last - first) / (math.log(1e9) / rate), rel=1e-2)


def test_escape_table_coarser_products_leave_sooner(alone):
    tf32, bfloat16 = (escape(SADDLE, f"cpu:emulate={name}") for name in ("tf32", "bfloat16"))
    assert 1e-17 < alone.noise < 1e-13
    assert alone.start == alone.noise
    assert 1e6 * alone.noise < tf32.noise < bfloat16.noise
    assert bfloat16.steps < tf32.steps
    for one in (tf32, bfloat16):
        assert 0.5 < one.steps / one.expected_steps < 2


def test_escape_table_minibatches_leave_when_their_noise_says(alone):
    first, again, other = (
        escape(SADDLE, batch_size=10, seeds=[seed], rate=0.05) for seed in (0, 0, 1)
    )
    for one in (first, other):
        assert one.noise > 1e6 * alone.noise
        assert 0.5 < one.steps / one.expected_steps < 2
    assert again.history.equals(first.history)
    assert not other.history.unstable.equals(first.history.unstable)


def test_escape_table_paths_end_where_the_radius_is_passed():
    seen = escape(SADDLE, perturbation=1e-4)
    history = seen.history
    assert history.distance[0] == pytest.approx(1e-4)
    for shorter, longer in pairwise(("along", "unstable", "distance")):
        assert (history[shorter] <= history[longer] + 1e-15).all()
    assert history.unstable.iloc[-1] > seen.radius >= history.unstable.iloc[-2]
    assert history.loss[0] == pytest.approx(SADDLE.loss)
    assert escape(SADDLE, perturbation=1e-4, steps=20).history.equals(history[:21])


def test_escape_table_leaves_by_a_zero_unit_and_never_from_zeros_alone():
    spare = gl.saddles.linear_autoencoder_saddle(SIX_SCALES, [0], hidden=2)
    seen = escape(spare, perturbation=1e-6)
    assert abs(seen.steps - seen.expected_steps) < 2
    zeros = gl.saddles.linear_autoencoder_saddle(SIX_SCALES, [])
    never = escape(zeros, steps=20)  # zeros stay zeros, because nothing is rounded
    assert never.expected_steps == math.inf
    assert never.stalled


def test_escape_table_starts_from_a_saddle_that_was_found():
    x = scaled_data(30, 2.0, 1.6, 1.2)
    net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Tanh(), nn.Linear(2, 3, bias=False))
    # near one: that of no weights
    torch.nn.utils.vector_to_parameters(0.01 * torch.ones(12), net.parameters())
    point = gl.saddles.find_critical_point(net, nn.functional.mse_loss, (x, x), progress=False)
    seen = escape(point, perturbation=1e-4)
    assert abs(seen.steps - seen.expected_steps) <= 0.05 * seen.expected_steps


def test_escape_table_of_every_optimizer_is_as_recorded(as_recorded):
    options = {
        "optimizers": ["sgd", "momentum", "rmsprop", "adam"],
        "perturbations": [1e-3],
        "batch_sizes": [None, 20],
    }
    escapes = gl.saddles.escape_table(SADDLE, [FLOAT64], **options, seeds=1, progress=False)
    table = escapes.table.drop(columns="machine")
    as_recorded(
        "escapes", table.to_csv(index=False, float_format="%.4g").splitlines(), "torch", rtol=0.02
    )
    assert escapes.paths.index.is_unique


def test_escape_table_has_a_row_for_each_training_and_its_figure_says_who_left():
    options = {
        "batch_sizes": [None, 20],
        "seeds": 2,
        "optimizers": {"sgd": [0.3]},
        "progress": False,
    }
    escapes = gl.saddles.escape_table(SADDLE, [FLOAT64, "cpu:emulate=bfloat16"], **options)
    assert escapes.table.emulated.sum() == 4
    assert len(escapes.paths.groupby(["setting", "perturbation", "batch_size", "seed"])) == 8
    assert (
        escapes.table[
            (escapes.table.setting == FLOAT64) & (escapes.table.batch_size == 0)
        ].noise.nunique()
        == 2
    )
    assert "times the expected steps" in escapes.plot().alt
    assert "8 never left" in plots.escape_law(escapes.table.assign(escaped=False, steps=np.nan)).alt


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("curvature", [1e-6, 0.3, 3.0])
def test_escape_law_growth_by_momentum_is_the_eigenvalue_of_its_recursion(momentum, curvature):
    law, λ = EscapeLaw(0.5, momentum), torch.tensor([curvature], dtype=DOUBLE)
    recursion = torch.tensor(
        [[1 + momentum + 0.5 * curvature, -momentum], [1.0, 0.0]], dtype=DOUBLE
    )
    values, vectors = torch.linalg.eig(recursion)
    growth = values.real.max().item()
    assert law.growth(λ).item() == pytest.approx(growth, rel=1e-13)
    assert law.growth_minus_one(λ).item() == pytest.approx(growth - 1, rel=1e-9)
    # In the long run a push from rest, and a displacement at rest: their parts along the
    # eigenvector that grows.
    # now, and a step before
    starts = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=DOUBLE).to(vectors)
    push, rest = torch.linalg.solve(vectors, starts)[values.real.argmax()].real.tolist()
    assert law.accumulated_push(λ).item() == pytest.approx(push / rest, rel=1e-9)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
@pytest.mark.parametrize("perturbation", [1e-2, 1e-9])
def test_escape_table_momentum_leaves_when_its_law_says(momentum, perturbation):
    made = functools.partial(torch.optim.SGD, momentum=momentum)
    seen = leave(optimizer=made, perturbation=perturbation)
    assert abs(seen.steps - seen.expected_steps) < 2
    assert seen.expected_steps < 0.8 * leave(perturbation=perturbation).expected_steps


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_escape_table_steps_of_one_size_leave_after_the_radius_over_that_size(optimizer):
    for rate in (1e-4, 1e-5):
        seen = leave(optimizer=optimizer, rate=rate, perturbation=1e-5)
        direction = SADDLE.mixed(1).direction
        assert seen.expected_steps == pytest.approx(
            0.1 / (rate * float(direction.abs().sum())), rel=0.1
        )
        assert 0.4 < seen.steps / seen.expected_steps < 1.6
        assert math.isnan(seen.expected_rate)


def test_escape_table_has_no_expected_steps_for_an_optimizer_without_a_law():
    assert math.isnan(leave(optimizer=torch.optim.AdamW, steps=5).expected_steps)
    assert (
        EscapeLaw.of_optimizer(torch.optim.Adam([torch.zeros(1, requires_grad=True)], eps=0.0))
        is None
    )
    assert math.isnan(leave(optimizer="adam", batch_size=10, steps=5).expected_steps)


STEPS = {"sgd": 2e-4, "momentum": 2e-3, "adam": 1e-3, "rmsprop": 1e-3, LARGE_EPSILON: 1e-3 / 6}


@pytest.mark.parametrize("optimizer", STEPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_step_ratio_is_that_of_the_settled_step(optimizer, dtype):
    weights = torch.tensor([1.0, -1.5, 1.99, 1.25], dtype=dtype)
    places = torch.nextafter(weights[:1], torch.full((1,), 9.0, dtype=dtype)) - weights[:1]
    ratio = step_ratio(optimizer, 1e-3, [weights], [torch.full((4,), -0.2)])
    assert ratio == pytest.approx(STEPS[optimizer] / (places.item() / 2), rel=0.01)


def test_escape_table_master_weights_follow_the_gradients_of_a_coarse_format():
    """Its gradients lead away in the time of the law, but the updates are rounded to zero."""
    held, free = (leave(setting=BFLOAT16, master_weights=masters) for masters in (False, True))
    assert held.stalled
    assert 0.5 < free.steps / free.expected_steps < 2
    assert free.step_ratio > 1e6 * held.step_ratio
