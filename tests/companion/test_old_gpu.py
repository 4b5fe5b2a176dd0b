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


def test_an_undecided_retuning_is_not_counted_as_a_failure():
    decisions = ["equivalent", "inconclusive", "different", "different but negligible"]
    judged = SimpleNamespace(table=pd.DataFrame({"decision": decisions}))
    assert old_gpu._outcomes(judged) == "2 gave the old losses back, 1 did not, 1 left it open"
