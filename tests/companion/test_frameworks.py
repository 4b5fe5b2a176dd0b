"""The library as a factor: JAX and Keras do what torch does, from the same weights, and refuse what they cannot."""

import doctest
import sys

import numpy as np
import pandas as pd
import pytest
import torch

import gpulab as gl
from companion.benchmarks import SCRIPTS, benchmark

SIZE = {"size": "smoke"}
frameworks, same_start = benchmark("frameworks"), benchmark("same_start")
LIBRARIES = pytest.mark.slow("trains in other frameworks")


@pytest.fixture(params=[pytest.param(name, marks=LIBRARIES) for name in frameworks.LIBRARIES])
def library(request):
    """The module of a library that is installed here."""
    pytest.importorskip({"keras": "tensorflow"}.get(request.param, request.param))
    return benchmark(f"in_{request.param}")


def name_of(library):
    return library.__name__.rpartition("_")[2]


def training(library, net):
    """As `gpulab.train` and `gpulab.Experiment` know it."""
    return f"{library.__file__}:{net}"


@pytest.mark.parametrize("net", ["autoencoder", "prednet"])
def test_a_step_is_torchs_to_rounding(library, net):
    (row,) = frameworks.one_step(net, libraries=[name_of(library)], **SIZE).itertuples()
    assert row.loss_difference < 1e-6
    assert 0 < row.gradient_difference < 3e-6
    (row,) = frameworks.one_step(net, "cpu:precision=float64", libraries=[name_of(library)], **SIZE).itertuples()
    assert row.loss_difference < 1e-14
    assert row.gradient_difference < 1e-14


@pytest.mark.parametrize("what", ["autoencoder", "prednet", "prednet truncation=state"])
def test_a_training_follows_torchs(library, what):
    """In float64, where what is left of a difference is the protocol's, and what Keras keeps in float32 of Adam.

    A later window follows only where it is cut off from the one before at the same place.
    """
    net, _, truncation = what.partition(" truncation=")
    options = {"truncation": truncation} if truncation else {}
    common = {"setting": "cpu:precision=float64", "seed": 2, "progress": False}
    usual = gl.train(net, profile="smoke", model_options=options, **common)
    other = gl.train(training(library, net), model_options=SIZE | options, **common)
    near = {"jax": 1e-12, "keras": 2e-5}[name_of(library)]
    assert other.history.loss.to_numpy() == pytest.approx(usual.history.loss.to_numpy(), rel=near)
    assert other.final_loss == pytest.approx(usual.final_loss, rel=near)


@pytest.mark.parametrize(
    "option", ["emulate=tf32", "order=pairwise", "denormals=off", "deterministic=on", "precision=bfloat16", "cudnn=off"]
)
def test_a_setting_of_torchs_alone_is_refused_by_name(option):
    device = "cuda" if "cudnn" in option else "cpu"
    named = option if "precision" in option else option.partition("=")[0]
    with pytest.raises(gl.UsageError, match=f"{named} is torch's alone"):
        same_start.begun("prednet", 0, gl.Setting.parse(f"{device}:{option}"), "smoke")


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
    ("refused", "said"),
    [
        (lambda: frameworks.library_verdicts(runs(experiment="whitener")), "runs of whitener"),
        (lambda: frameworks.library_verdicts(runs(frames=400)), "400 frames of walk: expected the profile's, 200 of"),
        (lambda: frameworks.library_verdicts(pd.concat([runs(), in_jax(truncation="state")])), "the frame mixes"),
        (lambda: frameworks.library_speeds(windows=2), "windows=2"),
        (lambda: frameworks.library_speeds(libraries=["mxnet"]), "library 'mxnet': expected one of jax, keras"),
    ],
)
def test_what_cannot_be_compared_is_refused(refused, said):
    with pytest.raises(gl.UsageError, match=said):
        refused()


def test_speeds_are_of_trainings_in_turn(library):
    table = frameworks.library_speeds("autoencoder", "cpu", "smoke", ["torch", name_of(library)], rounds=2, windows=4)
    assert table.library.tolist() == ["torch", name_of(library)] * 2
    assert (table.frames_per_second > 0).all()
