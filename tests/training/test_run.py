import copy
import functools
import itertools
import json
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import gpulab as gl
from gpulab.store import _run_store as stores
from gpulab.store._tensors import read_tensors, write_tensors
from gpulab.training import _networks as networks
from gpulab.training._experiment import plan_job
from gpulab.training._run import train


def planned(net, **options):
    return plan_job({"net": net, **options}).identity(gl.passport())


SMALL = {"channels": [3, 4], "size": [8, 12]}
TINY = {
    "autoencoder": {"net": "autoencoder", "model_options": {"hidden": [16]}},
    "prednet": {"net": "prednet", "model_options": SMALL, "data_options": {"size": (8, 12)}},
}
USUAL = {"setting": "cpu:threads=1", "profile": "smoke", "frames": 200, "progress": False}
BOTH = pytest.mark.parametrize("model", TINY)


def trained(model="prednet", **options):
    return train(**{**TINY[model], **USUAL, **options})


@functools.cache
def reference(model="prednet", **options):
    """Return the same run, trained only once, with which other trainings are compared."""
    return trained(model, **options)


def weights(run):
    return run.record["summary"]["weights"]


def same(run, other):
    """Check that weights, losses, updates and summary are bitwise the same."""
    assert weights(run) == weights(other)
    assert run.history[["window", "step", "loss"]].equals(other.history[["window", "step", "loss"]])
    assert (run.final_loss, run.heldout_loss) == (other.final_loss, other.heldout_loss)
    for name, tensor in run.model.state_dict().items():
        assert (tensor == other.model.state_dict()[name]).all(), name
    return True


@BOTH
def test_final_loss_is_the_mean_over_the_last_fifth_of_full_windows(model):
    run, short, longer = reference(model), reference(model, frames=60), trained(model, frames=79)
    assert len(run.history) == 10
    assert run.final_loss == pytest.approx(run.history.loss[8:].mean(), rel=1e-15)
    assert short.final_loss == short.history.loss.iloc[-1]
    assert len(longer.history) == 3
    assert weights(longer) == weights(short)


@BOTH
def test_heldout_loss_is_that_of_the_trained_model_on_the_held_out_part(model):
    run = reference(model)
    truth, made = run.predict()
    assert truth.shape == made.shape
    assert len(truth) == (297 if model == "autoencoder" else 19)
    assert (made - truth).square().mean().item() == pytest.approx(run.heldout_loss, rel=1e-5)
    held = next(run.data.heldout(20)).frames[0 if model == "autoencoder" else 1]
    assert (truth.reshape(-1, *truth.shape[-3:])[0].numpy() == held / np.float32(255)).all()


@BOTH
def test_train_gives_the_same_bits_again_and_leaves_the_process_alone(model):
    options = {"seed": 3, "frames": 60, "setting": "cpu:threads=1,deterministic=on"}
    first = trained(model, **options)
    torch.manual_seed(99)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert same(first, trained(model, **options))
    assert (torch.get_rng_state() == state).all()
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    for other in ({"seed": 4}, {"learning_rate": 2e-3}, {"flip": 3}):
        assert weights(trained(model, **options | other)) != weights(first)


@BOTH
def test_train_under_another_setting_starts_from_the_same_weights_and_images(model):
    settings = {
        "cpu": 0,
        "cpu:precision=float64": 1e-3,
        "cpu:threads=1": 1e-3,
        "cpu:precision=bfloat16": 0.1,
    }
    runs = [trained(model, seed=3, frames=60, setting=text) for text in settings]
    for run, rounding in zip(runs, settings.values(), strict=True):
        assert run.history.loss.tolist() == pytest.approx(
            runs[0].history.loss.tolist(), rel=rounding
        )
    assert len(set(map(weights, runs))) >= 3
    assert runs[1].model.state_dict().popitem()[1].dtype == torch.float64
    usual = runs[0].model.threads or torch.get_num_threads()
    assert [run.record["arithmetic"]["threads"] for run in runs] == [usual, usual, 1, usual]


def test_train_leaves_a_network_handed_in_alone_and_trains_as_by_its_name():
    net = gl.models.PredNet(**SMALL)
    before = copy.deepcopy(net.state_dict())
    run = train(net, seed=5, **{**USUAL, "frames": 40})
    assert weights(run) == weights(trained(seed=5, frames=40))
    assert net.fresh
    assert all((tensor == before[name]).all() for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    net.load_state_dict(run.model.state_dict())
    kept = [train(net, seed=seed, learning_rate=0.0, **USUAL) for seed in (0, 1)]
    assert weights(kept[0]) == weights(kept[1]) == weights(run), (
        "training starts from loaded weights, whatever the seed"
    )
    assert not kept[0].model.fresh
    assert planned(net, **{**USUAL, "frames": 40}, seed=5).id != run.record["id"]


# In the last case, only the held-out loss shows the divergence.
DIVERGING = [
    ("autoencoder", 200, 2),
    ("prednet", 200, 2),
    ("prednet", 20, 1),
]


@pytest.mark.parametrize(("model", "frames", "step"), DIVERGING)
def test_train_diverges_at_too_high_a_learning_rate(model, frames, step, tmp_path):
    options = {"frames": frames, "learning_rate": 1e38, "store": tmp_path}
    run = trained(model, **options)
    assert (run.status, run.record["diverged_at"]) == ("diverged", step)
    record = json.loads((run.path / "run.json").read_text(), parse_constant=pytest.fail)
    assert (record["summary"]["final_loss"], record["summary"]["heldout_loss"]) == (None, None)
    (row,) = gl.runs(tmp_path).itertuples()
    assert (row.status, row.diverged_at) == ("diverged", step)
    assert math.isnan(row.final_loss)
    assert str(run).endswith(f": diverged at step {step}"), (
        "on a CPU, losses are checked after every window"
    )


def test_train_records_how_many_windows_were_computed_after_it_diverged(monkeypatch):
    supervise = networks.supervise

    def supervise_with_rare_looks(training, *arguments, **options):  # as on a GPU
        training.loss_sync_interval = 1000.0
        supervise(training, *arguments, **options)

    monkeypatch.setattr(networks, "supervise", supervise_with_rare_looks)
    run = trained("prednet", frames=200, learning_rate=1e38)
    assert run.record["windows_after_divergence"] == 8
    assert len(run.history) == 2
    assert str(run).endswith(
        "diverged at step 2 (8 more windows were computed before this was noticed)"
    )


def interrupted(run, after, error=KeyboardInterrupt):
    """Interrupt a run once it has trained on `after` frames."""

    def watch(model, updates):
        if updates * (20 if model.sequential else 1) >= after:
            raise error

    with pytest.raises(error):
        run({"watch": watch})


# The last interruption comes after the last window.
STOPS = [
    ("autoencoder", [80]),
    ("prednet", [40, 80, 120, 160]),
    ("prednet", [200]),
]


@pytest.mark.parametrize(("model", "stops"), STOPS)
def test_checkpoint_of_an_interrupted_run_resumes_to_the_same_bits(model, stops, tmp_path):
    for after in stops:
        interrupted(lambda watch: trained(model, store=tmp_path, **watch), after)
        assert gl.runs(tmp_path).empty
        assert len(list((tmp_path / stores.WORK_FOLDER).glob("*.safetensors"))) == 1
    resumed = trained(model, store=tmp_path)
    assert resumed.record["resumed_at"] == stops[-1] / 20
    assert same(resumed, reference(model))
    assert resumed.record["gradients"] == reference(model).record["gradients"] != ""
    assert list((tmp_path / stores.WORK_FOLDER).iterdir()) == []
    assert len(gl.runs(tmp_path)) == 1


def test_checkpoint_of_a_killed_run_is_where_it_resumes(tmp_path, monkeypatch):
    """A killed run has only its periodic checkpoints."""
    monkeypatch.setattr("gpulab.training._supervision.CHECKPOINT_SECONDS", 0)
    interrupted(lambda watch: trained(store=tmp_path, **watch), after=120, error=RuntimeError)
    run = trained(store=tmp_path)
    assert run.record["resumed_at"] == 5
    assert same(run, reference())


def test_checkpoint_with_state_of_another_shape_is_set_aside(tmp_path):
    interrupted(lambda watch: trained(store=tmp_path, **watch), after=80)
    (file,) = (tmp_path / stores.WORK_FOLDER).glob("*.safetensors")
    tensors, notes = read_tensors(file)
    tensors |= {
        name: tensor[..., :1] for name, tensor in tensors.items() if name.startswith("state.")
    }
    write_tensors(file, tensors, notes)
    with pytest.warns(UserWarning, match="state with shapes .* from the beginning") as warned:
        assert same(trained(store=tmp_path), reference())
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize("updates", [0, 47])
def test_checkpoint_within_a_window_resumes_to_the_same_bits(updates, tmp_path, monkeypatch):
    usual, count = gl.models.Autoencoder.training_loss, itertools.count()

    def pressed(self, batch, state):
        if self.training and next(count) == updates:  # of windows of twenty images
            raise KeyboardInterrupt
        return usual(self, batch, state)

    with monkeypatch.context() as patch:
        patch.setattr(gl.models.Autoencoder, "training_loss", pressed)
        with pytest.raises(KeyboardInterrupt):
            trained("autoencoder", store=tmp_path, fast=False)
    assert same(
        trained("autoencoder", store=tmp_path, fast=False), reference("autoencoder", fast=False)
    )


def test_train_returns_a_finished_run_without_training(tmp_path):
    def never(*_):
        raise AssertionError("it trains again")

    options = {"store": tmp_path, "setting": "cpu:precision=float64", "frames": 40}
    first = trained(**options)
    second = trained(**{**options, "progress": never})
    assert same(first, second)
    assert {tensor.dtype for tensor in second.model.state_dict().values()} == {torch.float64}
    assert (second.path, second.record) == (first.path, first.record)
    assert not second.model.fresh


def test_predict_refuses_a_network_whose_weights_were_not_kept(tmp_path):
    options = {"store": tmp_path, "frames": 20, "keep_weights": False}
    trained(**options)
    with pytest.raises(gl.UsageError, match="weights only with keep_weights=True"):
        trained(**options).predict()
    expected = trained(**options | {"keep_weights": True}).predict()
    assert torch.equal(trained(**options).predict()[1], expected[1]), (
        "now the weights are stored, and loaded"
    )


@BOTH
def test_run_id_is_known_before_the_training(model, tmp_path):
    options = {**TINY[model], **USUAL, "seed": 1, "frames": 20, "rerun": 1}
    assert planned(**options).id == train(**options, store=tmp_path).record["id"]
    others = [
        {},
        {"seed": 2},
        {"rerun": 0},
        {"setting": "cpu"},
        {"frames": 40},
        {"learning_rate": 1.0},
        {"flip": 0},
    ]
    others += [{"draws": "device"}, {"fast": False}, {"loader": "copied"}, {"loader": "reused"}]
    assert len({planned(**{**options, **other}).id for other in others}) == len(others)


# By the name of a case: the request, and what the message names.
WRONG = {
    "a network that is none of gpulab's": (
        {"net": nn.Linear(2, 2)},
        ["net is a Linear", "train(seed, setting)"],
    ),
    "a network with options": (
        {"net": gl.models.PredNet((3, 4), (24, 32)), "channels": (3,)},
        ["net is a PredNet", "model_options={'channels'"],
    ),
    "fewer frames than a window": ({"frames": 19}, ["window=20", "frames=19"]),
    "images for a network of sequences": ({"data": "digits"}, ["digits", "PredNet"]),
    "frames of another size": (
        {"data_options": {"size": (24, 32)}},
        ["(3, 24, 32)", "(3, 8, 12)"],
    ),
}


@pytest.mark.parametrize(("request_", "named"), WRONG.values(), ids=WRONG)
def test_train_refuses_an_invalid_request_as_a_usage_error(request_, named):
    with pytest.raises(gl.UsageError) as error:
        trained(**{"frames": 20, **request_})
    assert [words for words in named if words not in str(error.value)] == []


@pytest.mark.parametrize(("there", "said"), [(40, True), (200, False)])
def test_train_warns_of_a_sequence_shorter_than_the_training(there, said):
    data = gl.load("walk", frames=there, size=(8, 12))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trained("prednet", data=data, data_options=None)
    messages = [str(warning.message) for warning in heard]
    assert len(messages) == said
    for named in ("walk: 40 frames", "200 of this training"):
        assert all(named in message for message in messages)
    # The warning points to the caller of `gl.train`: here that is the helper of these tests.
    assert all(warning.filename == __file__ for warning in heard)
