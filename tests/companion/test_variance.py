import math

import numpy as np
import pandas as pd
import pytest
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm

import companion
import gpulab as gl

TRUTH = {"seed": 4.0, "setting": 1.0, "seed × setting": 0.5, "rerun": 0.25}


def simulated(seed, seeds=6, settings=5, reruns=2):
    generator = np.random.default_rng(seed)
    shape = (settings, seeds, reruns)
    sources = {"seed": (1, seeds, 1), "setting": (settings, 1, 1), "seed × setting": (settings, seeds, 1)}
    loss = sum(
        math.sqrt(TRUTH[source]) * generator.standard_normal(size)
        for source, size in {**sources, "rerun": shape}.items()
    )
    setting, seed, rerun = (axis.ravel() for axis in np.indices(shape))
    return pd.DataFrame(
        {"setting": [f"s{j}" for j in setting], "seed": seed, "rerun": rerun, "final_loss": loss.ravel()}
    )


def components_of(runs):
    return companion.variance_components(runs).table.set_index("source").variance


def test_the_components_of_variance_are_those_that_were_put_in():
    """Also where only some cells were run again."""
    whole, partly = [], []
    for seed in range(12):
        runs = simulated(seed, 60, 60)
        whole.append(components_of(runs))
        partly.append(components_of(runs[(runs.rerun == 0) | (runs.setting < "s2")])["rerun"])
    assert pd.DataFrame(whole).mean().to_dict() == pytest.approx(TRUTH, rel=0.2)
    assert np.mean(partly) == pytest.approx(TRUTH["rerun"], rel=0.2)


def test_the_components_agree_with_analysis_of_variance():
    runs = simulated(12)
    found = companion.variance_components(runs)
    components = components_of(runs)
    table = anova_lm(ols("final_loss ~ C(seed) * C(setting)", runs).fit())
    square = table.sum_sq / table.df
    assert components["rerun"] == pytest.approx(square["Residual"])
    assert components["seed × setting"] == pytest.approx((square["C(seed):C(setting)"] - square["Residual"]) / 2)
    assert components["seed"] == pytest.approx((square["C(seed)"] - square["C(seed):C(setting)"]) / (2 * 5))
    assert components["setting"] == pytest.approx((square["C(setting)"] - square["C(seed):C(setting)"]) / (2 * 6))
    assert found.table.share.sum() == pytest.approx(1)
    assert "Reruns: 30 in 30 of 30 cells." in str(found)


def test_what_cannot_be_told_apart_and_seeds_that_are_left_out_are_said():
    components = companion.variance_components(simulated(14, reruns=1))
    assert components.table.source.tolist() == ["seed", "setting", "seed × setting, rerun"]
    assert "cannot be told apart" in str(components)
    runs = simulated(15)
    runs.loc[(runs.seed == 2) & (runs.setting == "s1"), "final_loss"] = math.nan
    assert "1 seed(s) did not finish under every setting" in str(companion.variance_components(runs))
    assert components_of(runs)["seed"] == components_of(runs[runs.seed != 2])["seed"]
    with pytest.raises(gl.UsageError, match=r"1 seed\(s\) finished under all of 5"):
        companion.variance_components(runs[runs.seed == 0])
