"""What notebook 08 shows, each small; and what a whole atlas costs."""

import numpy as np
import pandas as pd
import pytest

from companion import scale_out
from companion.benchmarks import benchmark
from gpulab.errors import UsageError
from gpulab.store import records

plan_atlas = benchmark("plan_atlas")


@pytest.fixture(scope="module")
def measured():
    return scale_out.scaling_table((1, 2), batch_size=4, frames=3, updates=3, progress=False)


@pytest.fixture(scope="module")
def batches():
    return scale_out.large_batches(0.045, (4, 16, 64), (1e-3, 2e-3), most=600, progress=False)


def scaling(**columns):
    """What one device and two would do, twice as fast on two, which compute half of the time."""
    rows = pd.DataFrame({"devices": [1, 2] * 2, "batch": [4, 4, 4, 8], "ideal": [1, 2] * 2, "speedup": [1.0, 2.0] * 2})
    rows = rows.assign(scaling=["strong"] * 2 + ["weak"] * 2, seconds=1.0, compute=2.0, wait=1.0, communicate=1.0)
    usual = {"size": "small", "setting": "cpu:threads=1", "machine": "a CPU", "recorded": False}
    return rows.assign(**(usual | columns))


GPU = {"setting": "cuda:tf32=off", "machine": "a GPU", "recorded": True, "size": "paper"}


@pytest.mark.slow("starts several processes")
@pytest.mark.parametrize(("kind", "batch"), [("strong", [4, 4]), ("weak", [4, 8])])
def test_scaling_says_where_the_time_goes(measured, kind, batch):
    table = measured[measured.scaling == kind].reset_index(drop=True)
    assert (table.batch.tolist(), table.ideal.tolist()) == (batch, [1, 2])
    assert (table[["seconds", "compute"]] > 0).all(axis=None)
    assert (table.wait[0], table.communicate[0], table.speedup[0]) == (0, 0, 1)
    assert table.communicate[1] > 0
    assert table.efficiency[1] == pytest.approx(table.frames_per_second[1] / table.frames_per_second[0] / 2)


def test_curves_of_a_descent_are_means_of_as_many_updates():
    seconds = np.arange(1.0, 41.0)
    history = pd.DataFrame({"way": "lock-free", "seed": 0, "seconds": seconds, "loss": 1 / seconds})
    histories = pd.concat([history, history.assign(seed=1, seconds=3 * seconds)])
    curves = scale_out.descent_curves(histories, 4)
    assert curves.step.tolist() == [4.5, 14.5, 24.5, 34.5]
    assert curves.seconds.tolist() == [11.0, 31.0, 51.0, 71.0]
    assert curves.loss.tolist() == pytest.approx([(1 / some).mean() for some in np.split(seconds, 4)])
    assert "lock-free is done first, in 80 s" in scale_out.descent_losses(histories).alt


def test_larger_batches_gain_ever_less(batches):
    table, found = batches
    assert table.steps.is_monotonic_decreasing
    assert (table.steps * table.batch_size).is_monotonic_increasing
    assert (found[["least_steps", "critical_batch", "noise_begin", "noise_target"]] > 0).all(axis=None)
    assert found.law_off[0] == pytest.approx((table.law / table.steps - 1).abs().max())
    gains = scale_out.batch_gains(24.0, 8, (1, 3, 1000))
    assert gains.speedup.tolist() == pytest.approx([1, 2, 4], rel=0.01)
    assert (gains.price * gains.speedup).tolist() == pytest.approx(gains.devices.tolist())


def test_figures_and_finding_have_their_numbers_from_the_tables(batches):
    here, gpu = scaling(), scaling(**GPU)
    assert "2 devices do 2.00 times what one does" in scale_out.scaling_lines(pd.concat([here, gpu])).alt
    assert "Devices compute 50%" in scale_out.update_shares(gpu).alt
    assert f"A batch of {batches[1].critical_batch[0]:.0f} takes" in scale_out.batch_law(*batches).alt
    ends = pd.DataFrame({"precision": ["float32", "float64"], "weights": [2e-7, 3e-16], "devices": 2})
    rows = {"synchronous": (10.0, 0.0, 0.0), "lock-free": (15.0, 1.5, 0.125)}
    columns = ["updates_per_second", "staleness", "lost_share"]
    descents = pd.DataFrame.from_dict(rows, "index", columns=columns).rename_axis("way").reset_index()
    said = scale_out.scale_finding(ends, here.assign(speedup=[1, 1.5, 1, 1.8]), descents, batches[1])
    assert "no weight is off by more than 2.0e-07 in float32 and 3.0e-16 in float64" in said
    assert "Here, 2 devices train a small PredNet on 1.50 times the frames a second" in said
    assert "1.80 times where each has as large a batch" in said
    assert "Descent lock-free: 1.50 times the synchronous updates" in said
    assert "12.5% are overwritten" in said
    assert "Recorded" not in said
    both = scale_out.scale_finding(ends, pd.concat([here, gpu]), descents, batches[1])
    assert "Recorded on a GPU, cuda:tf32=off: 2 devices train a paper PredNet on 2.00 times" in both
    assert "25% is waiting and 25% communication" in both
    for table in ("scaling", "ends", "parts"):
        assert scale_out.recorded_scale_out(table).recorded.all()


def test_two_gpus_or_more_are_compared_beside_the_cpu(monkeypatch):
    cpu, gpus = {"cpu:threads=1": [1, 2]}, {"cuda:tf32=off": [1, 2, 4]}
    for count, device, expected in ((1, "cuda", cpu), (4, "auto", cpu | gpus), (4, "cuda", gpus), (8, "cpu", cpu)):
        monkeypatch.setattr(scale_out.torch.cuda, "device_count", lambda count=count: count)
        assert scale_out.device_counts(device) == expected


# --- what an atlas costs ---------------------------------------------------------------------------------


def rates(seconds, at_a_time):
    """Of an experiment whose runs take so long in one setting, and twice as long in another."""
    return {"prednet": plan_atlas.Rate({"one": [seconds] * 2, "two": [2 * seconds] * 2}, at_a_time, seconds, "a GPU")}


def test_the_plan_adds_up_and_says_where_it_ends():
    plan = plan_atlas.atlas_plan(2.0, settings=3, seeds=2, gpus=(1, 4, 100), rates=rates(1800.0, 1.0)).set_index("gpus")
    assert plan.hours_low[1] == pytest.approx((2 * 0.5 + 2 * 1.0) + 2 * 0.5)
    assert plan.hours_high[1] == pytest.approx((2 * 0.5 + 2 * 1.0) + 2 * 1.0)
    assert plan.money_high[1] == pytest.approx(2 * plan.hours_high[1])
    assert plan.idle[1] == pytest.approx(0)
    assert plan.hours_high[100] == pytest.approx(1.0)
    assert plan.idle[100] == pytest.approx(1 - 5 / 100)
    two = plan_atlas.atlas_plan(2.0, settings=3, seeds=2, gpus=(1,), rates=rates(1800.0, 2.5))
    assert two.hours_high[0] == pytest.approx(5 / 2)
    limits = " ".join(plan_atlas.atlas_limits(2.5, 3, 4, rates(60.0, 2.0)))
    for said in (
        "2 of 3 settings were measured (one, two)",
        "differ 2.00-fold",
        "needs 2.5 s to start",
        "than 6 (",
    ):
        assert said in limits


def test_what_is_recorded_for_notebook_08_is_what_the_recorded_runs_give():
    (document,) = records.read_measured("atlas_plan")
    found = plan_atlas.atlas_rates()
    recorded_rates, plan, limits = scale_out.atlas_plan(2.0)
    pd.testing.assert_frame_equal(plan, plan_atlas.atlas_plan(2.0, document["beside"], rates=found))
    pd.testing.assert_frame_equal(recorded_rates, plan_atlas.rates_table(found))
    assert limits == plan_atlas.atlas_limits(document["beside"], rates=found)
    assert (recorded_rates["of a GPU"] <= recorded_rates["seconds of a run"]).all()
    assert (recorded_rates["at a time"] >= 1).all()
    dearer = scale_out.atlas_plan(6.0)[1]
    assert (dearer.money_low == 6.0 * plan.gpus * plan.hours_low).all()
    assert (dearer.money_high == 3 * plan.money_high).all()


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: scale_out.scaling_table(sizes=["small", "huge"]), "sizes huge: expected some of small, quick, paper"),
        (lambda: scale_out.atlas_plan(0), "price=0"),
        (lambda: plan_atlas.atlas_plan(0, rates=rates(60.0, 1.0)), "price=0"),
    ],
)
def test_what_there_is_not_is_refused(refused, said):
    with pytest.raises(UsageError, match=said):
        refused()
