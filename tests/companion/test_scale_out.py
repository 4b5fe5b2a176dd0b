"""What notebook 08 shows, each small."""

import pandas as pd
import pytest

from gpulab.companion import scale_out
from gpulab.companion.scale_out import WAYS


def test_two_devices_end_as_one():
    table = scale_out.same_end((2,), "cpu:threads=1", frames=60)
    assert table.precision.tolist() == ["float32", "float64"]
    distance = table.set_index("precision")[["weights", "final_loss", "heldout_loss"]].max(axis=1)
    assert distance.float32 < 1e-5
    assert distance.float64 < 1e-10


@pytest.mark.parametrize("weak", [False, True])
def test_scaling_says_where_the_time_goes(weak):
    table = scale_out.scaling_table((1, 2), batch_size=4, frames=3, weak=weak, updates=3, progress=False)
    assert table.batch.tolist() == ([4, 8] if weak else [4, 4])
    assert table.ideal.tolist() == [1, 2]
    assert (table[["seconds", "compute"]] > 0).all(axis=None)
    assert (table.wait[0], table.communicate[0]) == (0, 0)
    assert table.communicate[1] > 0
    assert table.speedup[0] == 1
    assert table.efficiency[1] == pytest.approx(table.frames_per_second[1] / table.frames_per_second[0] / 2)


def test_descent_is_judged_over_seeds():
    summaries, histories = scale_out.descent_runs(range(2), updates=40, hidden=(8,), progress=False)
    assert summaries.way.tolist() == [*WAYS] * 2
    assert len(histories) == 40 * 6
    said = scale_out.descent_verdict(summaries)
    assert said.reference == "synchronous"
    curves = scale_out.descent_curves(histories, 4)
    assert len(curves) == 12
    assert curves.groupby("way").step.first().tolist() == [4.5] * 3
    assert (curves.groupby("way").seconds.diff().dropna() > 0).all()


def test_the_guard_speaks_of_shared_memory():
    words = scale_out.what_the_guard_says()
    assert "overwritten since it was saved" in words
    assert "autoencoders.py" in words


def test_parts_have_the_same_losses_and_less_memory_each():
    table = scale_out.parts_table(frames=20)
    assert table.network.tolist() == ["autoencoder"] * 2 + ["prednet"] * 2
    assert (table.whole - table.parts).abs().max() < 1e-6
    assert (table[["weights", "optimizer", "activations"]] > 0).all(axis=None)


def test_larger_batches_gain_ever_less():
    table, found = scale_out.large_batches(0.045, (4, 16, 64), (1e-3, 2e-3), most=600, progress=False)
    assert table.steps.is_monotonic_decreasing
    assert (table.steps * table.batch_size).is_monotonic_increasing
    assert isinstance(found, pd.DataFrame)
    assert (found[["least_steps", "critical_batch", "noise_begin", "noise_target"]] > 0).all(axis=None)
