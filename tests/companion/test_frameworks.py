"""The library as a factor: JAX and Keras compute what torch computes, from the same weights, and
refuse settings that they do not support.
"""

import pytest

import gpulab as gl
from companion.benchmarks import benchmark

SIZE = {"size": "smoke"}
frameworks, same_start = benchmark("peers/frameworks"), benchmark("peers/same_start")
LIBRARIES = pytest.mark.slow("trains in other frameworks")


@pytest.fixture(params=[pytest.param(name, marks=LIBRARIES) for name in frameworks.LIBRARIES])
def library(request):
    """The benchmark module of a library, if the library is installed."""
    pytest.importorskip({"keras": "tensorflow"}.get(request.param, request.param))
    return benchmark(f"peers/in_{request.param}")


def name_of(library):
    return library.__name__.rpartition("_")[2]


def training(library, net):
    """The name of a training function, as `gpulab.train` and `gpulab.Experiment` take it."""
    return f"{library.__file__}:{net}"


@pytest.mark.parametrize("net", ["autoencoder", "prednet"])
def test_frameworks_one_step_agrees_with_torch_to_rounding(library, net):
    (row,) = frameworks.one_step(net, libraries=[name_of(library)], **SIZE).itertuples()
    assert row.loss_difference < 1e-6
    assert 0 < row.gradient_difference < 3e-6
    (row,) = frameworks.one_step(
        net, "cpu:precision=float64", libraries=[name_of(library)], **SIZE
    ).itertuples()
    assert row.loss_difference < 1e-14
    assert row.gradient_difference < 1e-14


@pytest.mark.parametrize("what", ["autoencoder", "prednet", "prednet truncation=state"])
def test_frameworks_training_follows_that_of_torch(library, what):
    """In float64 a remaining difference comes from the protocol, or from what Keras keeps in
    float32 for Adam.

    A later window agrees only if both libraries cut it off from the previous window at the same
    place.
    """
    net, _, truncation = what.partition(" truncation=")
    options = {"truncation": truncation} if truncation else {}
    setting = gl.Setting.parse("cpu:precision=float64")
    common = {"setting": setting, "seed": 2, "progress": False}
    usual = gl.train(net, profile="smoke", model_options=options, **common)
    other = gl.train(training(library, net), model_options=SIZE | options, **common)
    near = {"jax": 1e-12, "keras": 2e-5}[name_of(library)]
    losses = list(library.windows(net, 2, setting, "smoke", **options))
    assert losses == pytest.approx(usual.history.loss.to_list(), rel=near)
    assert other.final_loss == pytest.approx(usual.final_loss, rel=near)


@pytest.mark.parametrize(
    "option",
    [
        "emulate=tf32",
        "order=pairwise",
        "denormals=off",
        "deterministic=on",
        "precision=bfloat16",
        "cudnn=off",
    ],
)
def test_frameworks_refuse_a_setting_that_only_torch_has(option):
    device = "cuda" if "cudnn" in option else "cpu"
    named = option if "precision" in option else option.partition("=")[0]
    with pytest.raises(gl.UsageError, match=f"only torch supports {named}"):
        same_start.begun("prednet", 0, gl.Setting.parse(f"{device}:{option}"), "smoke")


def test_frameworks_use_as_many_threads_as_asked_or_refuse(library, python):
    """Count the threads that compute, which both libraries name `tf_...`, but not the threads that
    compile.
    """
    code = f"""
    import pathlib

    import gpulab as gl
    import psutil

    def train(setting, size):
        options = {{"size": size}}
        name = "{training(library, "autoencoder")}"
        gl.train(name, setting=setting, model_options=options, progress=False)

    def used():
        tasks = pathlib.Path("/proc/self/task")
        threads = psutil.Process().threads()
        names = {{each.id: (tasks / str(each.id) / "comm").read_text() for each in threads}}
        computing = [each for each in threads if names[each.id].startswith("tf_")]
        return {{thread.id: thread.user_time + thread.system_time for thread in computing}}

    before = used()
    train("cpu:threads=1", "quick")
    seconds = [now - before.get(thread, 0) for thread, now in used().items()]
    print(sum(each > 0.5 * max(seconds) for each in seconds))
    try:
        train("cpu:threads=2", "smoke")
    except gl.GpulabError as error:
        print(error)
    """
    threads, refusal = python(code).stdout.splitlines()
    assert threads == "1"
    assert "chooses its threads once per process" in refusal


def test_frameworks_trainings_in_two_libraries_give_a_verdict(library, tmp_path):
    common = {"settings": ["cpu"], "seeds": 2, "store": tmp_path}
    gl.Experiment("autoencoder", profile="smoke", **common).run(progress=False)
    gl.Experiment(training(library, "autoencoder"), options=SIZE, **common).run(progress=False)
    runs = gl.runs(tmp_path)
    runs = runs.assign(library=runs.experiment)[["seed", "library", "status", "final_loss"]]
    (row,) = gl.verdict(runs, factor="library", reference="autoencoder").table.itertuples()
    assert row.seeds == 2
    assert row.largest_difference < 1e-5
