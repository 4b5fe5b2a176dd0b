import contextlib
import copy
import shlex

import pytest

import gpulab as gl
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
    with pytest.raises(gl.UsageError, match=r"'huge': prednet has smoke, quick, motion, paper"):
        protocol("prednet", "huge")
    with pytest.raises(gl.UsageError, match=r"'motion': autoencoder has smoke, quick, paper"):
        protocol("autoencoder", "motion")
    with pytest.raises(gl.UsageError, match=r"'resnet'.*autoencoder, prednet"):
        protocol("resnet", "quick")


def test_a_profile_may_have_options_of_its_data_that_a_run_can_override():
    usual, chosen = (
        planned("prednet", profile="motion", setting="cpu", data_options=options) for options in ({}, {"speed": 2.0})
    )
    speeds = [run.record["configuration"]["data_options"]["speed"] for run in (usual, chosen)]
    assert speeds == [4.0, 2.0]


# --- specifications ----------------------------------------------------------------------------------------

SPECIFICATIONS = {
    "nothing": Specification("autoencoder", profile="smoke", options={"frames": 20}),
    "a learning rate": Specification(
        "autoencoder", "cpu:threads=1", 3, "smoke", 1, {"frames": 20, "learning_rate": 3e-4}
    ),
    "factors": Specification("prednet", profile="smoke", options={"frames": 20, "loader": "reused", "flip": 3}),
    "model and data": Specification(
        "prednet",
        profile="smoke",
        options={
            "frames": 20,
            "data_options": {"speed": 2.0, "seed": 5},
            "model_options": {"size": (8, 12), "channels": [3, 4], "kernel_size": 1},
        },
    ),
    "JPEG": Specification(
        "prednet",
        "cpu",
        1,
        "smoke",
        0,
        {"frames": 20, "data": "jpeg:walk", "data_options": {"decoder": "pillow", "quality": 50}},
    ),
    "a whitener": Specification(
        "whitener", profile="smoke", options={"frames": 200, "model_options": {"covariance": "centred", "hidden": 16}}
    ),
}


@pytest.fixture(scope="module")
def rerun(tmp_path_factory):
    """Each specification trained, then again by the command that its run keeps, all in one process."""
    from gpulab import cli

    store = tmp_path_factory.mktemp("store")
    runs = {
        name: gl.train(**s.arguments(), store=store / "first", progress=False) for name, s in SPECIFICATIONS.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        for run in runs.values():
            patch.setattr("sys.argv", [*shlex.split(run.record["command"]), "--store", str(store / "again")])
            with contextlib.suppress(SystemExit):
                cli.main()
    return runs, gl.runs(store / "again").set_index("id")


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_the_kept_command_makes_the_run_again(name, rerun):
    runs, again = rerun
    record = runs[name].record
    assert record["id"] in again.index
    assert again.weights[record["id"]] == record["summary"]["weights"]


def test_a_record_older_than_truncation_was_made_with_the_whole_state_cut_off(rerun):
    record = copy.deepcopy(rerun[0]["factors"].record)
    assert factors_of_record(record)["truncation"] == "loss"
    assert record["configuration"]["model_options"].pop("truncation") == "loss"
    assert factors_of_record(record)["truncation"] == "state"
    assert Specification.from_record(record).options["model_options"]["truncation"] == "state"
    assert "truncation" not in record["configuration"]["model_options"]
    asked = {"frames": 20, "model_options": {"truncation": "state"}}
    again = gl.train("prednet", profile="smoke", progress=False, **asked).record
    assert "truncation" not in again["configuration"]["model_options"], "so that an older run can stand for it"
    assert "--option truncation=state" in Specification.from_record(again).command()
    recorded = gl.recorded_runs()
    assert set(recorded[recorded.experiment == "prednet"].truncation) <= {"state", "loss"}
    assert recorded[recorded.experiment != "prednet"].truncation.isna().all()


@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_a_record_gives_its_specification_back(name, rerun):
    record = rerun[0][name].record
    assert planned(**Specification.from_record(record).arguments()).id == record["id"]


def test_a_grey_film_is_specified_again(tmp_path):
    from PIL import Image

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
