import pytest
import torch
from networks_drawn import weights

import gpulab as gl

SMALL = {"setting": "cpu:threads=1", "profile": "smoke", "progress": False}


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))


@pytest.mark.parametrize("weight", [0, 5, 7, 13])
@pytest.mark.parametrize("bit", [0, 23, 31])
def test_any_bit_of_any_weight_can_be_changed_alone_and_changed_back(weight, bit):
    model = network()
    before = weights(model).view(torch.int32)
    gl.models.flip_bit(model, weight, bit)
    apart = (weights(model).view(torch.int32) ^ before).to(torch.int64) & 0xFFFFFFFF
    assert apart.tolist() == [2**bit if number == weight else 0 for number in range(len(before))]
    assert (weights(gl.models.flip_bit(model, weight, bit)).view(torch.int32) == before).all()


def test_what_is_not_there_is_refused():
    for call, words in (
        (lambda: gl.models.flip_bit(network(), 14), "flip 14: .* from 0 to 13"),
        (lambda: gl.models.flip_bit(network(), -1), "flip -1"),
        (lambda: gl.models.flip_bit(network(), bit=32), "bit 32: .* from 0, the last place, to 31, the sign"),
        (lambda: gl.models.flip_bit(network().double()), "float64"),
        (lambda: gl.train("autoencoder", flip=999_999_999, **SMALL), "flip 999999999: expected the number of a weight"),
        (lambda: gl.train("autoencoder", draws="dice", **SMALL), "draws 'dice': expected one of cpu, device"),
    ):
        with pytest.raises(gl.UsageError, match=words):
            call()


def test_a_training_with_a_flipped_bit_begins_one_bit_apart():
    seen = {}
    for flip in (None, 3):
        net = gl.models.PredNet((3, 4), (12, 16))
        gl.train(net, frames=20, flip=flip, watch=lambda m, s, f=flip: seen.setdefault((f, s), weights(m)), **SMALL)
    apart = gl.numerics.ulp_distance(seen[None, 0], seen[3, 0])
    assert apart.sum() == apart[3] == 1
    assert (gl.numerics.ulp_distance(seen[None, 1], seen[3, 1]) > 0).sum() > 1


def test_the_record_says_what_was_flipped_and_who_drew_and_a_cpu_draws_as_a_device_does(tmp_path):
    runs = [gl.train("autoencoder", frames=40, draws=draws, **SMALL) for draws in ("cpu", "device")]
    assert len({run.record["summary"]["weights"] for run in runs}) == 1
    assert len({run.record["id"] for run in runs}) == 2
    gl.train("autoencoder", frames=40, flip=2, draws="device", store=tmp_path, **SMALL)
    (row,) = gl.runs(tmp_path).itertuples()
    assert (row.flip, row.draws) == (2, "device")
