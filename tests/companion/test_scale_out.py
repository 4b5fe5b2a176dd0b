"""What notebook 08 shows, each small."""

import pytest

from companion import scale_out


@pytest.fixture(scope="module")
def measured():
    return scale_out.scaling_table((1, 2), batch_size=4, frames=3, updates=3, progress=False)


@pytest.fixture(scope="module")
def batches():
    return scale_out.large_batches(0.045, (4, 16, 64), (1e-3, 2e-3), most=600, progress=False)


@pytest.mark.slow("starts several processes")
@pytest.mark.parametrize(("kind", "batch"), [("strong", [4, 4]), ("weak", [4, 8])])
def test_scaling_says_where_the_time_goes(measured, kind, batch):
    table = measured[measured.scaling == kind].reset_index(drop=True)
    assert (table.batch.tolist(), table.ideal.tolist()) == (batch, [1, 2])
    assert (table[["seconds", "compute"]] > 0).all(axis=None)
    assert (table.wait[0], table.communicate[0], table.speedup[0]) == (0, 0, 1)
    assert table.communicate[1] > 0
    assert table.efficiency[1] == pytest.approx(table.frames_per_second[1] / table.frames_per_second[0] / 2)


def test_larger_batches_gain_ever_less(batches):
    table, found = batches
    assert table.steps.is_monotonic_decreasing
    assert (table.steps * table.batch_size).is_monotonic_increasing
    assert (found[["least_steps", "critical_batch", "noise_begin", "noise_target"]] > 0).all(axis=None)
    assert found.law_off[0] == pytest.approx((table.law / table.steps - 1).abs().max())
    gains = scale_out.batch_gains(24.0, 8, (1, 3, 1000))
    assert gains.speedup.tolist() == pytest.approx([1, 2, 4], rel=0.01)
    assert (gains.price * gains.speedup).tolist() == pytest.approx(gains.devices.tolist())


def test_two_gpus_or_more_are_compared_beside_the_cpu(monkeypatch):
    cpu, gpus = {"cpu:threads=1": [1, 2]}, {"cuda:tf32=off": [1, 2, 4]}
    for count, device, expected in ((1, "cuda", cpu), (4, "auto", cpu | gpus), (4, "cuda", gpus), (8, "cpu", cpu)):
        monkeypatch.setattr(scale_out.torch.cuda, "device_count", lambda count=count: count)
        assert scale_out.device_counts(device) == expected
