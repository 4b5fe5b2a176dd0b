import pytest

import gpulab as gl
from gpulab.companion.growths import FLIPPED, OTHER_SEED, flipped

SMALL = {"profile": "smoke", "frames": 40, "progress": False}


def test_a_flipped_bit_begins_as_one_bit():
    table = gl.companion.growth("prednet", seeds=2, **SMALL)
    first = table[(table.change == "one bit of one weight") & (table.step == 0)]
    weights = sum(p.numel() for p in gl.models.PredNet(channels=(3, 8, 16), size=(24, 32)).parameters())
    assert len(first) == 2
    assert first.changed.tolist() == pytest.approx([1 / weights] * 2)
    assert (table[table.change == "float64"].query("step == 0").distance == 0).all()
    assert (table[table.change == OTHER_SEED].distance > 1).all()


def test_nothing_changed_stays_nothing():
    table = gl.companion.growth("autoencoder", seeds=1, changes={"nothing": {}}, **SMALL)
    assert table.change.unique().tolist() == ["nothing"]
    assert (table[["distance", "changed", "ulps"]] == 0).all(axis=None)
    assert table.step.tolist() == [0, 20, 40]


@pytest.mark.parametrize("net", FLIPPED)
def test_the_flipped_weight_is_the_first_of_its_layer(net):
    small = {
        "prednet": gl.models.PredNet(channels=(3, 8, 16), size=(24, 32)),
        "autoencoder": gl.models.Autoencoder(hidden=(64, 16)),
    }
    before = {name: p.clone() for name, p in small[net].named_parameters()}
    gl.models.flip_bit(small[net], flipped(net, "smoke"))
    changed = {name: p != before[name] for name, p in small[net].named_parameters()}
    assert {name for name, apart in changed.items() if apart.any()} == {FLIPPED[net]}
    assert changed[FLIPPED[net]].flatten()[0]


def test_growth_needs_a_seed():
    with pytest.raises(gl.UsageError, match="seeds=0"):
        gl.companion.growth(seeds=0)


def test_its_figure_is_drawn():
    picture = gl.companion.growth_figure(gl.companion.growth("autoencoder", seeds=2, **SMALL))
    assert len(picture.png()) < 150_000
    assert "one bit of one weight" in picture.alt
