import json

import pytest

import gpulab as gl
from gpulab.training.protocol import PROFILES, PROTOCOLS, protocol


def test_the_paper_profile_is_the_published_protocol():
    plan = protocol("prednet", "paper")
    assert (plan.frames, plan.window, plan.frames // plan.window) == (5_000, 20, 250)
    assert (plan.size, plan.model) == ((120, 160), {"channels": [3, 48, 96, 192]})
    assert (plan.learning_rate, plan.seeds) == (1e-3, 10)
    assert (protocol("autoencoder", "paper").data, protocol("autoencoder", "paper").frames) == ("mnist", 60_000)


@pytest.mark.parametrize("model", PROTOCOLS)
def test_each_model_has_each_profile_and_they_grow(model):
    plans = [protocol(model, name) for name in PROFILES]
    for attribute in ("frames", "seeds", "size"):
        values = [getattr(plan, attribute) for plan in plans]
        assert values == sorted(values)
    for plan in plans:
        assert plan.frames >= 5 * plan.window
        assert json.loads(json.dumps(plan.as_dict()))["size"] == list(plan.size)


def test_the_environment_has_the_last_word(monkeypatch):
    monkeypatch.delenv("GPULAB_PROFILE", raising=False)
    assert [gl.profile(name) for name in PROFILES] == list(PROFILES)
    monkeypatch.setenv("GPULAB_PROFILE", "")
    assert gl.profile("paper") == "paper"
    monkeypatch.setenv("GPULAB_PROFILE", "smoke")
    assert gl.profile("paper") == "smoke"


def test_unknown_names_are_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("GPULAB_PROFILE", "huge")
    with pytest.raises(gl.UsageError, match=r"'huge'.*smoke, quick, paper"):
        gl.profile("quick")
    with pytest.raises(gl.UsageError, match=r"'huge'.*smoke, quick, paper"):
        protocol("prednet", "huge")
    with pytest.raises(gl.UsageError, match=r"'resnet'.*autoencoder, prednet"):
        protocol("resnet", "quick")
