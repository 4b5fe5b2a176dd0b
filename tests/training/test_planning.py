"""Planning of runs: profiles, requests, and registrations by their digests."""

import copy
import hashlib
import math
import shlex
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import gpulab as gl
from gpulab.cli import app
from gpulab.run_options import LOADERS
from gpulab.store import recorded
from gpulab.store._records import factors_of_record
from gpulab.training._experiment import plan_job
from gpulab.training._networks import CODE_VERSION
from gpulab.training._planning import plan_run
from gpulab.training._profiles import protocol


def planned(net, **options):
    return plan_job({"net": net, **options}).identity(gl.passport())


def test_protocol_paper_is_the_published_protocol():
    plan = protocol("prednet", "paper")
    assert (plan.frames, plan.window, plan.frames // plan.window) == (5_000, 20, 250)
    assert (plan.size, plan.model) == ((120, 160), {"channels": [3, 48, 96, 192]})
    assert (plan.learning_rate, plan.seeds) == (1e-3, 10)
    assert (protocol("autoencoder", "paper").data, protocol("autoencoder", "paper").frames) == (
        "mnist",
        60_000,
    )


def test_profile_of_the_environment_takes_precedence(monkeypatch):
    monkeypatch.setenv("GPULAB_PROFILE", "smoke")
    assert gl.profile("paper") == "smoke"


def test_profile_options_of_data_can_be_overridden_by_a_run():
    for options, speed in (({}, 4.0), ({"speed": 2.0}, 2.0)):
        assert (
            plan_run("prednet", profile="motion", data_options=options).data.options()["speed"]
            == speed
        )


# Final and held-out losses of short trainings, by gpulab.training._networks.CODE_VERSION.
LOSSES = {
    1: {
        "autoencoder": [0.05730396277619025, 0.059785226488824804],
        "prednet": [0.22601152829905655, 0.21129522336667614],
        "prednet, reused": [0.22599694242591095, 0.2112829332821346],
        "prednet, no fast": [0.22600944217867097, 0.2112943401047919],
        "whitener": [0.12901718916592167, 0.12273354178785717],
    },
}
REQUESTS = {
    "autoencoder": {"frames": 100},
    "prednet": {"frames": 60},
    "prednet, reused": {"frames": 60, "loader": "reused"},
    "prednet, no fast": {"frames": 60, "fast": False, "model_options": {"truncation": "state"}},
    "whitener": {"frames": 600},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_code_version_is_that_of_the_noted_losses(name):
    options = {"profile": "smoke", "setting": "cpu:threads=1,precision=float64", "progress": False}
    run = gl.train(name.partition(",")[0], seed=3, **options, **REQUESTS[name])
    found, noted = (
        [run.final_loss, run.heldout_loss],
        LOSSES.get(CODE_VERSION, {}).get(name, [math.nan, math.nan]),
    )
    assert found == pytest.approx(noted, rel=1e-9), (
        f"trainings give other losses: increase CODE_VERSION, and add {found} for {name!r} under"
        " the new number"
    )


def test_learning_rate_as_a_whole_number_gives_the_same_run_as_its_float():
    one, other = (plan_run("autoencoder", profile="smoke", learning_rate=rate) for rate in (1, 1.0))
    assert one.identity(gl.passport()) == other.identity(gl.passport())


OPTIONAL = {
    "learning_rate": st.floats(0, 1),
    "window": st.sampled_from([10, 20]),
    "flip": st.integers(0, 9),
    "fast": st.just(False),
    "draws": st.just("device"),
}
PER_MODEL = {
    "autoencoder": {"model_options": st.sampled_from([{"hidden": [16]}, {"batch_size": 5}])},
    "prednet": {
        "loader": st.sampled_from(LOADERS),
        "data": st.just("walk"),
        "data_options": st.fixed_dictionaries(
            {}, optional={"speed": st.floats(0.5, 4), "seed": st.integers(0, 9)}
        ),
        "model_options": st.sampled_from(
            [{"size": (8, 12), "channels": [3, 4]}, {"truncation": "state"}]
        ),
    },
    "whitener": {"model_options": st.just({"covariance": "centred", "hidden": 16})},
}


@st.composite
def requests(draw):
    model = draw(st.sampled_from([*PER_MODEL]))
    frames = {"frames": st.sampled_from([200, 400])}
    options = draw(st.fixed_dictionaries(frames, optional=OPTIONAL | PER_MODEL[model]))
    own = {
        "setting": draw(st.sampled_from(["cpu", "cpu:threads=1"])),
        "seed": draw(st.integers(0, 9)),
    }
    return {"net": model, "profile": "smoke", "rerun": draw(st.integers(0, 2)), **own, **options}


@settings(max_examples=40, deadline=None)
@given(requests())
def test_command_gives_the_same_run(request):
    spec = plan_run(**request)
    with mock.patch("gpulab.training._run.train") as train:
        CliRunner().invoke(app, shlex.split(spec.command())[1:])
    assert (
        planned(*train.call_args.args, **train.call_args.kwargs).id
        == spec.identity(gl.passport()).id
    )


def test_factors_of_record_without_truncation_have_the_whole_state_cut_off():
    record = copy.deepcopy(planned("prednet", profile="smoke", loader="reused").record)
    assert factors_of_record(record)["truncation"] == "loss"
    assert record["configuration"]["model_options"].pop("truncation") == "loss"
    assert factors_of_record(record)["truncation"] == "state"


REGISTERED = Path(__file__).parents[2] / "data" / "registered"


def test_registered_runs_keep_the_digest_of_their_registration(tmp_path):
    """The registration is recorded but is not part of a run's identity."""
    plan, store, options = (
        tmp_path / "a-plan.md",
        tmp_path / "store",
        {"profile": "smoke", "frames": 20},
    )
    plan.write_text("# A plan\n\nTen seeds.\n")
    made = {"registered": str(plan), "options": {"frames": 20}, "store": store}
    gl.Experiment("autoencoder", ["cpu:threads=1"], 1, "smoke", **made).run(progress=False)
    gl.train(lambda seed: seed / 2, store=store, registered=plan, progress=False)
    gl.train("autoencoder", seed=1, store=store, progress=False, **options)
    gl.store.pack(store, tmp_path / "packed.parquet")
    runs = gl.runs(tmp_path / "packed.parquet")
    assert set(runs[runs.seed == 0].registered) == {
        f"a-plan {hashlib.sha256(plan.read_bytes()).hexdigest()}"
    }
    assert runs[runs.seed == 1].registered.isna().all()
    assert planned("autoencoder", setting="cpu:threads=1", **options).id in set(runs.id)


def test_registered_runs_that_are_recorded_have_their_registration_here():
    names = set()
    for study in recorded.recorded_folder("studies").glob("*.parquet"):
        for registered in gl.runs(study).registered.dropna().unique():
            name, digest = registered.split()
            file = REGISTERED / f"{name}.md"
            assert digest == hashlib.sha256(file.read_bytes()).hexdigest(), (
                "the plan was changed afterwards"
            )
            names.add(name)
    # The runs of these plans are recorded as measurements, which contain no registration.
    measured = {"published-size-on-a-cpu", "half-size-cpu-against-gpu"}
    assert len(recorded.recorded_table("published_cpu"))
    assert len(recorded.recorded_table("published_half"))
    assert {file.stem for file in REGISTERED.glob("*.md")} == names | measured


WRONG = [
    {"seed": "x"},
    {"seed": 1.5},
    {"rerun": "x"},
    {"model_options": "a"},
    {"data_options": 3},
    {"data": 3},
]
WRONG += [{"model_options": []}, {"data_options": 0}]
WRONG += [
    {"flip": True},
    {"flip": 1.0},
    {"learning_rate": "fast"},
    {"learning_rate": True},
    {"store": 3},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_train_refuses_arguments_of_other_types_by_name(wrong):
    with pytest.raises(gl.UsageError, match=f"^{next(iter(wrong))}"):
        gl.train("prednet", profile="smoke", progress=False, **wrong)


@pytest.mark.parametrize(
    "wrong", [{"seed": -1}, {"rerun": 0.5}, {"setting": "cpu:nonsense=1"}], ids=str
)
def test_train_refuses_wrong_numbers_and_settings_before_it_reads_data(wrong):
    with pytest.raises(gl.UsageError):
        gl.train("prednet", "video:not-there.mp4", profile="smoke", progress=False, **wrong)


@pytest.mark.parametrize(("model", "profile"), [("prednett", "smoke"), ("prednet", "nope")])
def test_experiment_refuses_an_unknown_network_or_profile_whatever_its_seeds(
    model, profile, tmp_path
):
    with pytest.raises(gl.UsageError, match=f"model '{model}', profile '{profile}'"):
        gl.Experiment(model, ["cpu"], seeds=2, profile=profile, store=tmp_path)
