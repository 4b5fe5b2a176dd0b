"""The library as a factor: JAX and Keras do what torch does, from the same weights, and refuse what they cannot."""

import doctest
import functools
import itertools
import sys

import numpy as np
import pandas as pd
import pytest
import torch

import gpulab as gl
from companion.benchmarks import SCRIPTS, benchmark

SIZE = {"size": "smoke"}
frameworks, same_start = benchmark("frameworks"), benchmark("same_start")
NETWORKS = ("autoencoder", "prednet")


@pytest.fixture(params=frameworks.LIBRARIES)
def library(request):
    """The module of a library that is installed here."""
    pytest.importorskip({"keras": "tensorflow"}.get(request.param, request.param))
    return benchmark(f"in_{request.param}")


def name_of(library):
    return library.__name__.rpartition("_")[2]


def training(library, net):
    """As `gpulab.train` and `gpulab.Experiment` know it."""
    return f"{library.__file__}:{net}"


@pytest.mark.parametrize("net", NETWORKS)
def test_a_step_is_torchs_to_rounding(library, net):
    (row,) = frameworks.one_step(net, libraries=[name_of(library)], **SIZE).itertuples()
    assert row.loss_difference < 1e-6
    assert 0 < row.gradient_difference < 3e-6
    (row,) = frameworks.one_step(net, "cpu:precision=float64", libraries=[name_of(library)], **SIZE).itertuples()
    assert row.loss_difference < 1e-14
    assert row.gradient_difference < 1e-14


@pytest.mark.parametrize(("net", "seed"), [("autoencoder", 1), ("autoencoder", 2), ("prednet", 1)])
def test_a_training_follows_torchs(library, net, seed):
    """In float64, where what is left of a difference is the protocol's, and what Keras keeps in float32 of Adam."""
    setting = "cpu:precision=float64"
    usual = gl.train(net, setting=setting, seed=seed, profile="smoke", progress=False)
    other = gl.train(training(library, net), setting=setting, seed=seed, model_options=SIZE, progress=False)
    near = {"jax": 1e-12, "keras": 2e-5}[name_of(library)]
    assert other.history.loss.to_numpy() == pytest.approx(usual.history.loss.to_numpy(), rel=near)
    assert other.final_loss == pytest.approx(usual.final_loss, rel=near)


@pytest.mark.slow("trains in other frameworks")
@pytest.mark.parametrize("truncation", ["loss", "state"])
def test_the_second_window_is_cut_off_from_the_first_where_torchs_is(library, truncation):
    plan = same_start.begun("prednet", 0, gl.Setting.parse("cpu:precision=float64"), "smoke", truncation=truncation)
    plan.model.double()
    (first, _), (second, _) = itertools.islice(same_start.batches(plan), 2)
    _, _, state = plan.model.training_loss(torch.from_numpy(first[0]), None)
    plan.model.training_loss(torch.from_numpy(second[0]), state)[0].backward()
    with library.on(plan.setting):
        found = SECOND[name_of(library)](library, plan, first[0], second[0])
    for (name, p), gradient in zip(plan.model.named_parameters(), found, strict=True):
        assert np.ravel(gradient).sum() == pytest.approx(p.grad.sum().item(), rel=1e-9, abs=1e-14), name


def second_in_jax(library, plan, first, second):
    weights = same_start.weights_of(plan)
    gradients = library.jax.jit(
        library.jax.grad(functools.partial(library.prednet_loss, plan.model.truncation), has_aux=True)
    )
    _, (_, state) = gradients(weights, library.blank(weights), first)
    gradient, _ = gradients(weights, state, second)
    return [gradient[name] for name in weights]


def second_in_keras(library, plan, first, second):
    model = library.begin(plan)
    first, second = (library.channels_last(frames) for frames in (first, second))
    _, _, state = model.window_loss(model.blank(), first)
    return library.gradient_of(model, state, second)[0]


SECOND = {"jax": second_in_jax, "keras": second_in_keras}


@pytest.mark.parametrize(
    ("setting", "option"),
    [
        ("cpu:emulate=tf32", "emulate"),
        ("cpu:order=pairwise", "order"),
        ("cpu:denormals=off", "denormals"),
        ("cpu:deterministic=on", "deterministic"),
        ("cpu:precision=bfloat16", "precision=bfloat16"),
        ("cuda:cudnn=off", "cudnn"),
        ("mps", "mps"),
    ],
)
def test_a_setting_of_torchs_alone_is_refused_by_name(setting, option):
    with pytest.raises(gl.UsageError, match=f"{option} is torch's alone"):
        same_start.begun("prednet", 0, gl.Setting.parse(setting), "smoke")


def test_threads_are_as_many_as_asked_or_refused(library, python):
    code = f"""
    import gpulab as gl
    from gpulab.settings import working_threads

    def train(setting, size):
        options = {{"size": size}}
        gl.train("{training(library, "autoencoder")}", setting=setting, model_options=options, progress=False)

    print(working_threads(lambda: train("cpu:threads=1", "quick"), share=0.5))
    try:
        train("cpu:threads=2", "smoke")
    except gl.GpulabError as error:
        print(error)
    """
    threads, refusal = python(code).stdout.splitlines()
    assert threads == "1"
    assert "chooses its threads once in a process" in refusal


def test_a_gpu_that_is_not_there_is_an_error(library):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(gl.GpulabError, match="'cuda' cannot run here"), library.on(gl.Setting.parse("cuda")):
        pass


@pytest.mark.parametrize(("name", "module"), [("jax", "jax"), ("keras", "tensorflow")])
def test_a_library_that_is_not_installed_is_one_sentence(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"in_{name}", raising=False)
    sentence = rf'is not installed: pip install "gpulab\[{name}\]"'
    with pytest.raises(gl.GpulabError, match=sentence):
        frameworks.one_step("autoencoder", libraries=[name], **SIZE)
    with pytest.raises(gl.GpulabError, match=sentence):
        gl.train(f"{SCRIPTS}/in_{name}.py:prednet", model_options=SIZE, progress=False)


def test_the_examples_of_a_library_run(library):
    tested = doctest.testmod(library)
    assert tested.attempted
    assert not tested.failed


# --- runs ------------------------------------------------------------------------------------------------


def test_trainings_in_two_libraries_give_a_verdict(library, tmp_path):
    common = {"settings": ["cpu"], "seeds": 2, "store": tmp_path}
    gl.Experiment("autoencoder", profile="smoke", **common).run(progress=False)
    gl.Experiment(training(library, "autoencoder"), options=SIZE, **common).run(progress=False)
    verdicts = frameworks.library_verdicts(gl.runs(tmp_path))
    assert [*verdicts] == [("autoencoder", "smoke", "cpu")]
    (row,) = verdicts["autoencoder", "smoke", "cpu"].table.itertuples()
    assert (row.library, row.seeds) == (name_of(library), 2)
    assert row.largest_difference < 1e-5


def runs(**columns):
    usual = {"experiment": "prednet", "profile": "smoke", "setting": "cpu", "seed": range(6), "status": "finished"}
    usual |= {"data": "walk", "frames": 200, "truncation": "loss", "final_loss": np.arange(6.0)}
    return pd.DataFrame({**usual, **columns})


def in_jax(**columns):
    return runs(experiment="in_jax.py:prednet", profile="own", size="smoke", data=None, frames=None, **columns)


def test_a_library_that_ends_higher_is_different():
    frame = pd.concat([runs(), in_jax(final_loss=np.arange(6.0) + 1)], ignore_index=True)
    assert set(frameworks.library_runs(frame).library) == {"torch", "jax"}
    (found,) = frameworks.library_verdicts(frame).values()
    assert found.decisions == {"jax": "different"}


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (runs(experiment="whitener"), "runs of whitener"),
        (runs(frames=400), "400 frames of walk: expected the profile's, 200 of walk"),
        (pd.concat([runs(), in_jax(truncation="state")], ignore_index=True), "the frame mixes"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(frame, said):
    with pytest.raises(gl.UsageError, match=said):
        frameworks.library_verdicts(frame)


def test_speeds_are_of_trainings_in_turn(library):
    table = frameworks.library_speeds("autoencoder", "cpu", "smoke", ["torch", name_of(library)], rounds=2, windows=4)
    assert table.library.tolist() == ["torch", name_of(library)] * 2
    assert (table.frames_per_second > 0).all()
    with pytest.raises(gl.UsageError, match="windows=2"):
        frameworks.library_speeds(windows=2)
    with pytest.raises(gl.UsageError, match="library 'mxnet': expected one of jax, keras"):
        frameworks.library_speeds(libraries=["mxnet"])
