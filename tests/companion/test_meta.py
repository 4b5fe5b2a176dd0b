import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.meta_analysis import combine_effects

from companion.meta import meta_analysis

# Thirteen trials of the BCG vaccine (Colditz et al. 1994; van Houwelingen, Arends, Stijnen 2002): with tuberculosis
# and without, vaccinated and not.
BCG = np.array(
    [
        *[(4, 119, 11, 128), (6, 300, 29, 274), (3, 228, 11, 209), (62, 13536, 248, 12619), (33, 5036, 47, 5761)],
        *[(180, 1361, 372, 1079), (8, 2537, 10, 619), (505, 87886, 499, 87892), (29, 7470, 45, 7232)],
        *[(17, 1699, 65, 1600), (186, 50448, 141, 27197), (5, 2493, 3, 2338), (27, 16886, 29, 17825)],
    ],
    float,
)
ODDS = np.log(BCG[:, 0] * BCG[:, 3] / (BCG[:, 1] * BCG[:, 2])), np.sqrt((1 / BCG).sum(1))
EIGHT_SCHOOLS = [28, 8, -3, 7, -1, 1, 18, 12], [15, 10, 16, 11, 9, 11, 10, 18]  # Rubin 1981


def test_published_numbers_of_the_bcg_trials():
    found = meta_analysis(*ODDS)
    assert found.studies == 13
    assert found.q == pytest.approx(163.16, abs=0.01)
    assert found.i2 == pytest.approx(0.9265, abs=1e-4)
    # metafor's confint by Q-profile, from its replication of van Houwelingen et al., searched to 1e-4
    assert (found.tau_low**2, found.tau_high**2) == pytest.approx((0.1302, 1.1812), abs=1e-4)
    effects, errors = ODDS
    for tau, quantile in ((found.tau_low, 23.336664), (found.tau_high, 4.403789)):  # chi-squared's, of 12 degrees
        weights = 1 / (errors**2 + tau**2)
        assert weights @ (effects - np.average(effects, weights=weights)) ** 2 == pytest.approx(quantile, rel=1e-6)


@pytest.mark.parametrize("data", [ODDS, EIGHT_SCHOOLS])
def test_it_is_statsmodels(data):
    found = meta_analysis(*data)
    effects, errors = (np.asarray(values, float) for values in data)
    theirs = combine_effects(effects, errors**2, method_re="pm", use_t=True, atol=1e-10)
    assert found.effect == pytest.approx(theirs.mean_effect_re, rel=1e-6)
    assert found.tau**2 == pytest.approx(theirs.tau2, rel=1e-6)
    assert found.q == pytest.approx(theirs.q, rel=1e-9)
    assert found.i2 == pytest.approx(max(0, theirs.i2), abs=1e-9)
    if found.tau:  # else Hartung and Knapp's interval would be narrower than the errors make it
        ends = theirs.conf_int()[3]
        assert (found.low, found.high) == pytest.approx(ends, rel=1e-6)


def test_the_prediction_is_of_another_study():
    found = meta_analysis(*ODDS)
    error = (found.high - found.effect) / 2.178813
    assert found.predicted_high - found.effect == pytest.approx(2.200985 * math.hypot(error, found.tau), rel=1e-5)
    assert math.isnan(meta_analysis([0.0, 1.0], [1.0, 1.0]).predicted_low)


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(0.01, 1)), min_size=2, max_size=12),
    st.sampled_from([1e-9, 1.0, 1e6]),
)
def test_it_holds_in_any_unit_and_order(studies, unit):
    effects, errors = np.array(studies).T
    found, other = meta_analysis(effects, errors), meta_analysis(effects[::-1] * unit, errors[::-1] * unit)
    assert other.effect == pytest.approx(found.effect * unit, abs=1e-6 * unit)
    assert other.tau == pytest.approx(found.tau * unit, abs=2e-5 * unit)
    assert found.low <= found.effect <= found.high
    assert found.tau_low <= found.tau + 1e-9
    assert found.tau <= found.tau_high + 1e-9
