"""An atlas of machines, and the meta-analysis that pools them."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.meta_analysis import combine_effects

import companion
import gpulab as gl
from companion.meta import meta_analysis
from gpulab.store.recorded import recorded_folder

OFF, ON, CUDNN = "cuda:tf32=off", "cuda:tf32=on", "cuda:cudnn=off"


@pytest.fixture(scope="module")
def row():
    runs = gl.recorded_runs()
    return runs[(runs.setting == OFF) & (runs.experiment == "prednet") & (runs.rerun == 0)].iloc[0].to_dict()


def machine(row, gpu, effects, setting=ON, **more):
    """Runs on a machine where the setting changes the logarithm of the loss by these effects, a seed each."""
    runs = []
    for seed, effect in enumerate(effects):
        loss = 0.01 * (1 + seed)
        runs.append(row | {"seed": seed, "setting": OFF, "final_loss": loss, "gpu": gpu, "weights": "a"} | more)
        runs.append(
            runs[-1] | {"setting": setting, "final_loss": loss * math.exp(effect), "weights": "b" if effect else "a"}
        )
    return pd.DataFrame(runs)


def spread(mean, sd, seeds):
    values = np.random.default_rng(seeds).standard_normal(seeds)
    return mean + sd * (values - values.mean()) / values.std(ddof=1)


def test_a_machine_has_its_effect_and_interval(row):
    table = companion.atlas_table(machine(row, "NVIDIA A100", spread(0.02, 0.01, 9)))
    assert len(table) == 1
    (found,) = table.itertuples()
    assert (found.setting, found.reference, found.seeds, found.pooled) == (ON, OFF, 9, True)
    assert (found.effect, found.error) == pytest.approx((0.02, 0.01 / 3))
    assert (found.low, found.high) == pytest.approx((0.02 - 2.306004 * 0.01 / 3, 0.02 + 2.306004 * 0.01 / 3), rel=1e-6)
    assert found.machine == "Intel Xeon + NVIDIA A100, torch 2.11.0"


def test_machines_are_pooled_by_their_errors_and_not_by_a_vote(row):
    # Three small machines say plus, one with many exact seeds says zero: a vote would be three to one.
    plus = [machine(row, f"NVIDIA {n}", spread(0.03, 0.09, 6)) for n in "ABC"]
    exact = machine(row, "NVIDIA D", spread(0.0, 0.002, 40))
    runs = pd.concat([*plus, exact], ignore_index=True)
    verdict = companion.atlas_verdict(runs)
    (found,) = verdict.pooled.itertuples()
    table = companion.atlas_table(runs)
    known = meta_analysis(table.effect, table.error)
    assert (found.effect, found.low, found.high, found.tau) == (known.effect, known.low, known.high, known.tau)
    assert found.studies == 4
    assert abs(found.effect) < 0.001
    assert "over 4 machines no change of the final loss is shown" in str(verdict)


def test_same_bits_few_seeds_and_diverged_runs_are_not_pooled(row):
    runs = [machine(row, name, spread(0.02, 0.01, 8)) for name in "AB"]
    runs += [machine(row, "SAME", [0.0] * 8), machine(row, "FEW", spread(0.5, 0.01, 4))]
    lost = machine(row, "LOST", spread(0.02, 0.01, 5))
    lost.loc[lost.index[1], ["status", "final_loss"]] = "diverged", math.nan
    verdict = companion.atlas_verdict(pd.concat([*runs, lost], ignore_index=True))
    assert verdict.pooled.studies.tolist() == [2]
    assert verdict.pooled.effect[0] == pytest.approx(0.02)
    assert sorted(verdict.machines.diverged) == [0, 0, 0, 0, 1]
    assert sorted(verdict.machines.seeds) == [4, 4, 8, 8, 8]


def test_only_runs_that_differ_in_nothing_else_are_paired_and_the_device_where_it_is_asked_for(row):
    runs = machine(row, "A", spread(0.02, 0.01, 9))
    for name, value in {"protocol": "other", "loader": "reused", "gpu": "B", "torch": "2.9.0", "rerun": 1}.items():
        assert companion.atlas_table(runs.assign(**{name: runs[name].mask(runs.setting == ON, value)})).empty, name
    runs.loc[runs.setting == OFF, ["setting", "device"]] = "cpu", "cpu"
    assert companion.atlas_table(runs).empty  # of a kind of device each by itself
    table = companion.atlas_table(runs, reference="cpu")
    assert table.effect.tolist() == pytest.approx([0.02])


def test_several_settings_are_corrected_for_their_number(row):
    effects = {ON: 0.1, CUDNN: 0.0}
    runs = [machine(row, name, spread(mean, 0.01, 8), how) for how, mean in effects.items() for name in "ABC"]
    verdict = companion.atlas_verdict(pd.concat(runs, ignore_index=True).drop_duplicates(["gpu", "setting", "seed"]))
    pooled = verdict.pooled.set_index("setting")
    assert pooled.p_holm[ON] == pytest.approx(2 * pooled.p[ON])
    assert "2 pooled, 1 shown to change the loss" in verdict.plot().alt


def test_atlas_has_shipped_and_contributed_runs():
    atlas = companion.atlas()
    assert set(atlas.id) == {*gl.recorded_runs().id, *gl.runs(recorded_folder("atlas")).id}
    assert atlas.recorded.all()
    assert len(companion.atlas_table(atlas)) > 10


# --- the meta-analysis -----------------------------------------------------------------------------------

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
