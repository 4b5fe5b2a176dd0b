import importlib
import sys
from pathlib import Path

import pandas as pd
import pytest

from companion.scale_out import atlas_plan
from gpulab.errors import UsageError
from gpulab.store import records

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
plan_atlas = importlib.import_module("plan_atlas")


def rate(seconds, at_a_time):
    return plan_atlas.Rate({"one": [seconds] * 2, "two": [2 * seconds] * 2}, at_a_time, seconds, "a GPU")


def test_the_plan_adds_up():
    rates = {"prednet": rate(1800.0, 1.0)}
    plan = plan_atlas.atlas_plan(2.0, settings=3, seeds=2, gpus=(1, 4, 100), rates=rates).set_index("gpus")
    assert plan.hours_low[1] == pytest.approx((2 * 0.5 + 2 * 1.0) + 2 * 0.5)
    assert plan.hours_high[1] == pytest.approx((2 * 0.5 + 2 * 1.0) + 2 * 1.0)
    assert plan.money_high[1] == pytest.approx(2 * plan.hours_high[1])
    assert plan.idle[1] == pytest.approx(0)
    assert plan.hours_high[100] == pytest.approx(1.0)
    assert plan.idle[100] == pytest.approx(1 - 5 / 100)
    two = plan_atlas.atlas_plan(2.0, settings=3, seeds=2, gpus=(1,), rates={"prednet": rate(1800.0, 2.5)})
    assert two.hours_high[0] == pytest.approx(5 / 2)
    with pytest.raises(UsageError, match="price=0"):
        plan_atlas.atlas_plan(0, rates=rates)


def test_the_plan_says_where_it_ends():
    limits = plan_atlas.atlas_limits(2.5, 3, 4, {"prednet": rate(60.0, 2.0)})
    assert "2 of 3 settings were measured (one, two)" in limits[0]
    assert "differ 2.00-fold" in limits[0]
    assert any("needs 2.5 s to start" in limit for limit in limits)
    assert any("More GPUs than 6 (prednet) save nothing" in limit for limit in limits)


def test_the_rates_are_those_of_the_recorded_runs():
    rates = plan_atlas.atlas_rates()
    table = plan_atlas.rates_table(rates).set_index("experiment")
    assert (table["of a GPU"] <= table["seconds of a run"]).all()
    assert (table["at a time"] >= 1).all()
    assert (table.least <= table["seconds of a run"]).all()


def test_what_is_recorded_for_notebook_08_is_what_the_recorded_runs_give():
    (document,) = records.read_measured("atlas_plan")
    rates = plan_atlas.atlas_rates()
    plan = plan_atlas.atlas_plan(2.0, document["beside"], rates=rates)
    recorded_rates, recorded_plan, limits = atlas_plan(2.0)
    pd.testing.assert_frame_equal(recorded_plan, plan)
    pd.testing.assert_frame_equal(recorded_rates, plan_atlas.rates_table(rates))
    assert limits == plan_atlas.atlas_limits(document["beside"], rates=rates)
