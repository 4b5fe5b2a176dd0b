"""What notebook 08 shows, each small."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from companion import scale_out
from companion.scale_out import WAYS
from gpulab.errors import UsageError
from gpulab.store import records

ROOT = Path(__file__).parents[2]


def test_two_devices_end_as_one():
    table = scale_out.same_end((2,), "cpu:threads=1", frames=60)
    assert table.precision.tolist() == ["float32", "float64"]
    distance = table.set_index("precision")[["weights", "final_loss", "heldout_loss"]].max(axis=1)
    assert distance.float32 < 1e-5
    assert distance.float64 < 1e-10


@pytest.fixture(scope="module")
def scaling():
    return scale_out.scaling_table((1, 2), batch_size=4, frames=3, updates=3, progress=False)


@pytest.fixture(scope="module")
def descents():
    return scale_out.descent_runs(range(2), updates=40, hidden=(8,), progress=False)


@pytest.fixture(scope="module")
def batches():
    return scale_out.large_batches(0.045, (4, 16, 64), (1e-3, 2e-3), most=600, progress=False)


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_scaling_says_where_the_time_goes(scaling, kind):
    table = scaling[scaling.scaling == kind].reset_index(drop=True)
    assert table.batch.tolist() == ([4, 8] if kind == "weak" else [4, 4])
    assert table.ideal.tolist() == [1, 2]
    assert (table[["seconds", "compute"]] > 0).all(axis=None)
    assert (table.wait[0], table.communicate[0]) == (0, 0)
    assert table.communicate[1] > 0
    assert table.speedup[0] == 1
    assert table.efficiency[1] == pytest.approx(table.frames_per_second[1] / table.frames_per_second[0] / 2)


def test_what_there_is_not_is_refused():
    with pytest.raises(UsageError, match="sizes huge: expected some of small, quick, paper"):
        scale_out.scaling_table(sizes=["small", "huge"])
    with pytest.raises(UsageError, match="price=0"):
        scale_out.atlas_plan(0)


def test_two_gpus_or_more_are_compared_beside_the_cpu(monkeypatch):
    cpu = {"cpu:threads=1": [1, 2]}
    for gpus, device, expected in (
        (0, "auto", cpu),
        (1, "cuda", cpu),
        (4, "auto", cpu | {"cuda:tf32=off": [1, 2, 4]}),
        (2, "cuda", {"cuda:tf32=off": [1, 2]}),
        (8, "cpu", cpu),
    ):
        monkeypatch.setattr(scale_out.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert scale_out.device_counts(device) == expected


def test_descent_is_judged_over_seeds(descents):
    summaries, histories = descents
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


def test_larger_batches_gain_ever_less(batches):
    table, found = batches
    assert table.steps.is_monotonic_decreasing
    assert (table.steps * table.batch_size).is_monotonic_increasing
    assert (found[["least_steps", "critical_batch", "noise_begin", "noise_target"]] > 0).all(axis=None)
    off = (table.law / table.steps - 1).abs().max()
    assert found.law_off[0] == pytest.approx(off)


def test_devices_gain_up_to_the_law_and_pay_for_the_rest():
    table = scale_out.batch_gains(24.0, 8, (1, 3, 1000))
    assert table.speedup.tolist() == pytest.approx([1, 2, 4], rel=0.01)
    assert (table.price * table.speedup).tolist() == pytest.approx(table.devices.tolist())


def gpu(scaling):
    """The same table as if it were recorded on GPUs, twice as fast on two."""
    exact = {"speedup": scaling.ideal, "efficiency": 1.0, "wait": 1.0, "communicate": 1.0, "compute": 2.0}
    return scaling.assign(**exact, setting="cuda:tf32=off", machine="a GPU", recorded=True, size="paper")


def test_every_figure_says_what_it_shows(scaling, descents, batches):
    both = pd.concat([scaling, gpu(scaling)])
    figures = {
        "2 devices do ": scale_out.scaling_lines(both),
        "Devices compute 50%": scale_out.update_shares(gpu(scaling)),
        "As many updates: ": scale_out.descent_losses(descents[1]),
        f"A batch of {batches[1].critical_batch[0]:.0f} takes": scale_out.batch_law(*batches),
    }
    for words, figure in figures.items():
        assert words in figure.alt
        assert len(figure.png()) < 300_000
    assert "2.00 times what one does" in scale_out.scaling_lines(gpu(scaling)).alt


def test_the_finding_has_its_numbers_from_the_tables(scaling, descents, batches):
    row = {"devices": 2, "final_loss": 0.0, "heldout_loss": 0.0}
    ends = pd.DataFrame(
        [{"precision": "float32", "weights": 2e-7, **row}, {"precision": "float64", "weights": 3e-16, **row}]
    )
    here = scale_out.scale_finding(ends, scaling, descents[0], batches[1])
    strong = scaling.query("scaling == 'strong' and devices == 2").iloc[0]
    assert "no weight is off by more than 2.0e-07 in float32 and 3.0e-16 in float64" in here
    assert f"Here, 2 devices train a small PredNet on {strong.speedup:.2f} times the frames a second" in here
    assert "Recorded" not in here
    lost = descents[0].groupby("way").lost_share.mean()
    assert f"{lost['lock-free']:.1%} are overwritten" in here
    both = scale_out.scale_finding(ends, pd.concat([scaling, gpu(scaling)]), descents[0], batches[1])
    assert both.startswith(here)
    assert "Recorded on a GPU, cuda:tf32=off: 2 devices train a paper PredNet on 2.00 times" in both
    assert "25% is waiting and 25% communication" in both


def test_a_recording_is_read_as_it_was_measured(tmp_path, monkeypatch):
    file = tmp_path / "measured" / "scale_out-here.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "record.py"), "scale_out", "cpu:threads=1", "--devices", "1,2"]
    small = ["--batch-size", "4", "--frames", "3", "--updates", "2"]
    done = subprocess.run([*script, *small, "--record", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records.write_json(tmp_path / "measured" / "scale_out-other.json", {"plan": []})
    monkeypatch.setattr(records, "DATA", tmp_path)
    found = scale_out.recorded_scale_out()
    assert found.recorded.all()
    assert found[["scaling", "devices", "batch"]].values.tolist() == [
        ["strong", 1, 4],
        ["strong", 2, 4],
        ["weak", 1, 4],
        ["weak", 2, 8],
    ]
    ends = scale_out.recorded_scale_out("ends")
    assert ends.network.tolist() == ["autoencoder"] * 2 + ["prednet"] * 2
    assert (ends.weights < 1e-5).all()
    assert scale_out.recorded_scale_out("parts").empty
    document = records.read_json(file)
    assert document["command"].endswith(f"--record {file}")
    assert document["passport"]["cpu"]["model"] == found.machine[0]


def test_the_plan_of_an_atlas_takes_its_price_from_whoever_asks():
    rates, plan, limits = scale_out.atlas_plan(3.0)
    assert rates.experiment.tolist() == ["autoencoder", "prednet"]
    dearer = scale_out.atlas_plan(6.0)[1]
    assert (dearer.money_high == 2 * plan.money_high).all()
    assert (plan.money_low == 3.0 * plan.gpus * plan.hours_low).all()
    assert any("save nothing" in limit for limit in limits)
