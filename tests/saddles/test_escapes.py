import math

import numpy as np
import pytest
import torch
from saddle_problems import FLOAT64, SIX_SCALES, escape, scaled_data
from torch import nn

import gpulab as gl
from gpulab import plots


@pytest.fixture(scope="module")
def saddle():
    return gl.saddles.linear_autoencoder_saddle(SIX_SCALES, [1, 2])


@pytest.fixture(scope="module")
def alone(saddle):
    return escape(saddle)


def test_they_leave_when_theory_says(saddle):
    pushed = gl.saddles.escape_table(saddle, [FLOAT64], perturbations=[1e-2, 1e-5, 1e-8, 1e-11], progress=False)
    for row in pushed.table.itertuples():
        assert row.left
        assert row.start == pytest.approx(row.perturbation, rel=1e-3)
        assert abs(row.steps - row.expected) < 2
        assert row.law == pytest.approx(
            math.log(0.1 / row.perturbation) / (row.learning_rate * -row.curvature), rel=1e-3
        )
    slope, low, high = pushed.slope()
    assert low <= slope <= high
    assert slope == pytest.approx(1, abs=0.05)


def test_coarser_products_leave_sooner_and_float64_by_nothing_but_its_own_rounding(saddle, alone):
    tf32, bfloat16 = (escape(saddle, f"cpu:emulate={name}") for name in ("tf32", "bfloat16"))
    assert 1e-17 < alone.noise < 1e-13
    assert alone.start == alone.noise
    assert alone.left or alone.held
    assert 1e6 * alone.noise < tf32.noise < bfloat16.noise
    assert bfloat16.steps < tf32.steps
    for one in (tf32, bfloat16):
        assert 0.5 < one.steps / one.expected < 2


def test_minibatches_leave_when_their_noise_says(saddle, alone):
    first, again, *others = (escape(saddle, batch_size=10, seed=seed, learning_rate=0.05) for seed in (0, 0, 1, 2))
    for one in (first, *others):
        assert one.noise > 1e6 * alone.noise
        assert 0.5 < one.steps / one.expected < 2
    assert again.history.equals(first.history)
    assert not others[0].history.equals(first.history)


def test_the_history_ends_where_the_radius_is_passed(saddle):
    seen = escape(saddle, perturbation=1e-4)
    history = seen.history
    assert history.distance[0] == pytest.approx(1e-4)
    assert (history.along <= history.unstable + 1e-15).all()
    assert (history.unstable <= history.distance + 1e-15).all()
    assert history.unstable.iloc[-1] > seen.radius >= history.unstable.iloc[-2]
    assert history.loss[0] == pytest.approx(saddle.loss)
    assert escape(saddle, perturbation=1e-4, steps=20).history.equals(history[:21])


def test_a_zero_unit_is_a_way_out_too(saddle):
    spare = gl.saddles.linear_autoencoder_saddle(saddle.data, [0], hidden=2)
    seen = escape(spare, perturbation=1e-6)
    assert abs(seen.steps - seen.expected) < 2
    never = escape(spare)  # zeros stay zeros: nothing is rounded
    assert never.expected == math.inf


def test_from_a_saddle_that_was_found():
    x = scaled_data(30, 2.0, 1.6, 1.2)
    net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Tanh(), nn.Linear(2, 3, bias=False))
    torch.nn.utils.vector_to_parameters(0.01 * torch.ones(12), net.parameters())  # near one: that of no weights
    found = gl.saddles.find_critical_point(net, nn.functional.mse_loss, (x, x), progress=False)
    seen = escape(found, perturbation=1e-4, radius=1e-2)
    assert abs(seen.steps - seen.expected) <= 0.05 * seen.expected
    escapes = gl.saddles.escape_table(found, [FLOAT64], perturbations=[1e-4], progress=False)
    assert escapes.table.left.all(), "it has one set of weights, whatever the seed"


def test_a_table_has_a_row_for_each_training_and_its_figure_says_who_never_left(saddle):
    options = {"batch_sizes": [None, 20], "seeds": 2, "optimizers": {"sgd": [0.3]}, "progress": False}
    escapes = gl.saddles.escape_table(saddle, [FLOAT64, "cpu:emulate=bfloat16"], **options)
    assert escapes.table.emulated.sum() == 4
    assert len(escapes.paths.groupby(["setting", "perturbation", "batch_size", "seed"])) == 8
    assert escapes.table[(escapes.table.setting == FLOAT64) & (escapes.table.batch_size == 0)].noise.nunique() == 2
    assert "theory expects" in escapes.plot().alt
    assert "8 never left" in plots.escape_law(escapes.table.assign(left=False, steps=np.nan)).alt
