from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import companion
import gpulab as gl
from companion import old_gpu
from gpulab.models.autoencoders import COVARIANCES, EPSILON

CPU, TF32 = "cpu:threads=1", "cpu:threads=1,tf32=on,emulate=ampere"


@pytest.fixture(scope="module")
def spectrum():
    return companion.covariance_spectrum([CPU, TF32], seeds=range(6))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def here(store):
    for setting in (CPU, TF32):
        for seed in range(6):
            gl.train("whitener", setting=setting, seed=seed, profile="smoke", store=store, progress=False)
    return gl.runs(store)


@pytest.fixture(scope="module")
def recorded():
    return gl.recorded_runs().query("experiment == 'whitener'")


def test_only_one_pass_in_tf32_loses_its_smallest_eigenvalues_and_below_epsilon_becomes_nan(spectrum, here):
    groups = spectrum.groupby(["setting", "covariance", "seed"])
    assert len(groups) == 2 * len(COVARIANCES) * 6
    for _, one in groups:
        assert one["rank"].tolist() == list(range(1, 25))
        assert (np.diff(one.eigenvalue) <= 0).all()
    smallest = groups.eigenvalue.min().unstack("seed")
    exact = smallest.loc[CPU, "centred"]
    for setting, way in smallest.index:
        off = (smallest.loc[setting, way] / exact - 1).abs().max()
        assert (off > 0.5) == ((setting, way) == (TF32, "one-pass")), (setting, way, off)
    lost = here[here.setting == TF32].set_index("seed").diverged_at == 1
    assert (lost == (smallest.loc[TF32, "one-pass"] < -EPSILON)).all()


def test_the_table_counts_runs_that_became_nan(here):
    table = companion.cards_table(here).set_index("setting")
    assert (table.loc[CPU, "diverged"], table.loc[TF32, "diverged"]) == (0, 6)
    assert table.seeds.tolist() == [6, 6]
    assert table.loc[CPU, "final_loss"] == pytest.approx(here[here.setting == CPU].final_loss.mean())


def test_an_h200_did_what_the_emulation_does(recorded):
    table = companion.cards_table(recorded).set_index(["setting", "covariance"])
    assert table.loc[("cuda:tf32=on", "one-pass"), "diverged"] > 0.9 * table.loc[("cuda:tf32=on", "one-pass"), "seeds"]
    assert table.diverged.sum() == table.loc[("cuda:tf32=on", "one-pass"), "diverged"]
    report = companion.recorded_cards_audit()
    emulated = gl.audit(companion.FirstWindow("whitener", seed=7, frames=50), CPU, TF32, progress=False)
    for found in (report.findings[0], emulated.findings[0]):
        assert (found.kind, found.operation) == ("reduced precision", "mm")
        assert "codes.T @ codes" in found.line
    assert report.findings[0].op.error == pytest.approx(emulated.findings[0].op.error, rel=1e-3)


@pytest.mark.slow("searches for the old losses")
def test_the_finding_says_what_the_numbers_say(here, recorded, store):
    old = here[here.setting == CPU]
    search = {"learning_rate": [2e-3], "tf32": ["off"]}
    found = gl.reproduce(old, search, TF32, margin="1sd", store=store, progress=False)
    report, conversions = companion.recorded_cards_audit(), companion.recorded_measurements("conversions")
    finding = companion.cards_finding(pd.concat([here, recorded]), report, found, conversions)
    text = str(finding)
    assert f"0 of 6 seeds under {CPU}, here." in text
    assert f"6 of 6 seeds under {TF32}, here." in text
    assert "37 of 40 seeds under cuda:tf32=on, recorded on NVIDIA H200." in text
    assert "The audit blames mm (forward), reduced precision" in text
    assert "centred under cuda:tf32=on: 0 of 40 seeds became NaN" in text
    assert "Of 1 retunings of the training 0 gave the old losses back, 0 did not, 1 left it open." in text
    assert "Of 1 changes of the arithmetic 1 gave the old losses back, 0 did not, 0 left it open." in text
    assert "All 256 return as they were in 100% of the ways, formats and devices tried." in text
    assert "of 256 have the bits of a division on this CPU" in text
    assert any(line.startswith("centred under cuda:tf32=on against") for line in finding.statistics())


def test_a_change_that_settles_nothing_is_not_counted_as_a_failure():
    tried = pd.DataFrame(
        {
            "state": ["finished", "finished", "pruned", "finished", "finished"],
            "decision": ["equivalent", "inconclusive", "", "different", "equivalent"],
            "confirmed": [True, False, False, False, False],
        }
    ).assign(distance=1)
    (said,) = old_gpu._outcomes(SimpleNamespace(table=tried, original={}))
    assert said == "Of 5 retunings of the training 1 gave the old losses back, 2 did not, 2 left it open."


def test_the_figures_count_what_they_show(spectrum, here, recorded):
    both = pd.concat([here, recorded.query("covariance == 'one-pass' and seed < 6")])
    fast = both.setting.isin([TF32, "cuda:tf32=on"])
    became = (both.status == "diverged")[fast].sum()
    words = f"Of the old card's runs 0 of 12 became NaN, of the new card's {became} of 12"
    assert words in companion.divergence(both[~fast], both[fast]).alt
    failing = (spectrum.setting == TF32) & (spectrum.covariance == "one-pass") & (spectrum.seed < 4)
    moved = spectrum.assign(eigenvalue=spectrum.eigenvalue - 1e-3 * failing)
    said = "in one pass 4 of 6 covariances have an eigenvalue too negative"
    assert said in companion.spectrum(moved).figure._suptitle.get_text()
    prices = companion.recorded_prices()
    assert (prices.ms_low <= prices.ms).all()
    assert (prices.ms <= prices.ms_high).all()
    assert "NVIDIA H200" in companion.prices(prices).alt
