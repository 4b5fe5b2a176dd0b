import copy
import shlex
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import gpulab as gl
from gpulab.cli import app
from gpulab.data.feed import LOADERS
from gpulab.training.protocol import OPTIONS, PROFILES, PROTOCOLS, Specification, factors_of_record, protocol
from gpulab.training.request import planned


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


def test_the_environment_has_the_last_word(monkeypatch):
    for environment, expected in (("", "paper"), ("smoke", "smoke")):
        monkeypatch.setenv("GPULAB_PROFILE", environment)
        assert gl.profile("paper") == expected
    monkeypatch.setenv("GPULAB_PROFILE", "huge")
    with pytest.raises(gl.UsageError, match=r"'huge'.*smoke, quick, paper"):
        gl.profile("quick")


@pytest.mark.parametrize(
    ("model", "profile", "words"),
    [
        ("prednet", "huge", "'huge': prednet has smoke, quick, motion, paper"),
        ("autoencoder", "motion", "'motion': autoencoder has smoke, quick, paper"),
        ("resnet", "quick", "'resnet'.*autoencoder, prednet"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(model, profile, words):
    with pytest.raises(gl.UsageError, match=words):
        protocol(model, profile)


def test_a_profile_may_have_options_of_its_data_that_a_run_can_override():
    usual, chosen = (
        planned("prednet", profile="motion", setting="cpu", data_options=options) for options in ({}, {"speed": 2.0})
    )
    speeds = [run.record["configuration"]["data_options"]["speed"] for run in (usual, chosen)]
    assert speeds == [4.0, 2.0]


OPTIONAL = {
    "learning_rate": st.floats(0, 1),
    "window": st.sampled_from([10, 20]),
    "flip": st.integers(0, 9),
    "fast": st.just(False),
    "draws": st.just("device"),
    "devices": st.just(2),
}
PER_MODEL = {
    "autoencoder": {"model_options": st.sampled_from([{"hidden": [16]}, {"batch_size": 5}])},
    "prednet": {
        "loader": st.sampled_from(LOADERS),
        "data": st.just("walk"),
        "data_options": st.fixed_dictionaries({}, optional={"speed": st.floats(0.5, 4), "seed": st.integers(0, 9)}),
        "model_options": st.sampled_from(
            [{"size": (8, 12), "channels": [3, 4], "kernel_size": 1}, {"truncation": "state"}]
        ),
    },
    "whitener": {"model_options": st.just({"covariance": "centred", "hidden": 16})},
}
JPEG = {"data": "jpeg:walk", "data_options": {"decoder": "pillow", "quality": 50}, "frames": 20}


@st.composite
def specifications(draw):
    model = draw(st.sampled_from([*PER_MODEL]))
    frames = {"frames": st.sampled_from([200, 400])}
    options = draw(st.fixed_dictionaries(frames, optional=OPTIONAL | PER_MODEL[model]))
    options = JPEG if model == "prednet" and draw(st.booleans()) else options
    run = draw(st.tuples(st.sampled_from(["cpu", "cpu:threads=1"]), st.integers(0, 9)))
    return Specification(model, *run, "smoke", draw(st.integers(0, 2)), options)


@settings(max_examples=40, deadline=None)
@given(specifications())
def test_command_and_record_give_the_specification_back(specification):
    identity = planned(**specification.arguments())
    with mock.patch("gpulab.training.request.train") as train:
        CliRunner().invoke(app, shlex.split(specification.command())[1:])
    assert planned(**train.call_args.kwargs).id == identity.id
    assert planned(**Specification.from_record(identity.record).arguments()).id == identity.id


def test_a_record_older_than_truncation_was_made_with_the_whole_state_cut_off():
    record = copy.deepcopy(planned("prednet", profile="smoke", loader="reused").record)
    assert factors_of_record(record)["truncation"] == "loss"
    assert record["configuration"]["model_options"].pop("truncation") == "loss"
    assert factors_of_record(record)["truncation"] == "state"
    assert Specification.from_record(record).options["model_options"]["truncation"] == "state"
    assert "truncation" not in record["configuration"]["model_options"]
    again = planned("prednet", profile="smoke", model_options={"truncation": "state"}).record
    assert "truncation" not in again["configuration"]["model_options"], "so that an older run can stand for it"
    assert "--option truncation=state" in Specification.from_record(again).command()
    recorded = gl.recorded_runs()
    assert set(recorded[recorded.experiment == "prednet"].truncation) <= {"state", "loss"}
    assert recorded[recorded.experiment != "prednet"].truncation.isna().all()


def test_a_grey_film_is_specified_again(tmp_path):
    for number in range(40):
        Image.new("L", (12, 8), 5 * number).save(tmp_path / f"{number:02}.png")
    flat = {"data": f"frames:{tmp_path}", "grey": True, "size": "8x12", "frames": 20}
    specification = Specification.from_options("prednet", "smoke", flat)
    assert specification.options["model_options"]["channels"] == [1, 8, 16]
    run = gl.train(**specification.arguments(), progress=False)
    assert planned(**Specification.from_record(run.record).arguments()).id == run.record["id"]


def test_a_loaded_network_or_film_has_no_command():
    film = gl.load("walk", frames=20, size=(24, 32))
    assert gl.train("prednet", film, profile="smoke", frames=20, progress=False).record["command"] is None


def test_an_unknown_factor_is_named():
    with pytest.raises(gl.UsageError, match="no factor 'looder'; there are loader, flip, fast, draws"):
        gl.train("autoencoder", profile="smoke", looder="copied")


def test_there_are_as_many_ways_to_reach_the_device_as_the_loader_knows():
    assert OPTIONS["loader"].choices == LOADERS
