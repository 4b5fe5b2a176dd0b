"""The authors' network in stock Chainer: what is said without it, and, where it is, that it is theirs."""

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import companion
import gpulab as gl
from companion.benchmarks import SCRIPTS, benchmark
from gpulab.data.datasets import load
from gpulab.settings import Setting
from gpulab.store.listing import record_of

published, stock_chainer = map(benchmark, ("published", "stock_chainer"))
SMALL = {"frames": 160, "size": "32x24", "channels": "3,8,16", "speed": 2.0}


@pytest.fixture(scope="session")
def net():
    """The authors' folder; the tests that need it and Chainer are skipped without."""
    folder = os.environ.get("GPULAB_CHAINER_PREDNET")
    if not folder or not importlib.util.find_spec("chainer"):
        pytest.skip("no Chainer, or GPULAB_CHAINER_PREDNET names no copy of the authors' network")
    return folder


def run(net, folder, seed=3, setting="cpu", **options):
    return published.published(seed, Setting.parse(setting), Path(folder), net=net, **{**SMALL, **options})


def test_windows_are_those_of_the_published_loop():
    walk = load("walk", 100, (24, 32))
    frames = np.stack(list(walk.stream(0, 100))) / np.float32(255)
    found = list(itertools.islice(published.windows(walk, 20), 6))
    assert [restart for _, restart in found] == [True, False, False, False, False, True]
    assert np.array_equal(np.concatenate([window for window, _ in found[:5]]), frames)
    assert np.array_equal(found[5][0], frames[:20])
    every = list(itertools.islice(published.windows(walk, 20, every=3), 3))
    assert [np.array_equal(window, frames[offset::3][:20]) for offset, (window, _) in enumerate(every)] == [True] * 3
    with pytest.raises(gl.UsageError, match="14 frames, of every 7"):
        next(published.windows(walk, 20, every=7))


def test_one_reused_buffer_changes_the_gradient_and_not_the_first_losses(net):
    cells = [published.Cell("cpu", loader) for loader in published.LOADERS]
    np.random.seed(1)
    rows = published.published_windows(net, [(cells[1], cells[0]), (cells[0], cells[2])], count=2)
    assert np.random.random() == np.random.RandomState(1).random_sample(), "the caller's random numbers go on"
    first, second, *same = rows.to_dict("records")
    assert (first["same_losses"], second["same_losses"]) == (19, 0)
    assert first["gradient_difference"] > 1e-3
    assert all(row["gradient_difference"] == 0 and row["same_losses"] == row["losses"] for row in same)
    assert "19 of 19 forward losses have the same bits; the gradient is off" in companion.published_network(net)


def test_gradients_are_those_that_chainer_gave_on_its_own_python(net, shared):
    """The network saved by Chainer 7.8.1 under NumPy 1.23 and Python 3.11, with its gradients of one window."""
    expected = np.load(shared / "chainer" / "prednet_small_expected.npz")
    for loader in ("copied", "reused"):
        trained = published.Published(net, "cpu", 0, (24, 32), (3, 8, 16), loader)
        trained.chainer.serializers.load_npz(shared / "chainer" / "prednet_small.model", trained.model)
        trained.restart(expected["frames"][0])
        gradients = {}
        losses = trained.window(expected["frames"][1:], lambda g=gradients, t=trained: g.update(t.gradients()))
        np.testing.assert_allclose(losses, expected["losses"], rtol=1e-5)
        names = [name for name in expected if name.startswith(f"grad_{loader}/")]
        assert len(names) > 20
        for name in names:
            right = expected[name]
            wrong = gradients["/" + name.split("/", 1)[1]]
            assert np.linalg.norm(wrong - right) <= 1e-4 * np.linalg.norm(right), name


@pytest.fixture
def clip(tmp_path):
    """A film of 47 frames: two windows of 20, and 7 that fill none."""
    file = tmp_path / "clip.mkv"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "bgr0"
        for frame in load("walk", 47, (24, 32), speed=2.0).stream(0, 47):
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame.transpose(1, 2, 0)), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return file


def authors_updates(net, clip, interpreter):
    """The losses and weights of four updates, in two passes over the film, by the authors' `main.py` itself."""
    frames = list(load(f"video:{clip}", None, (24, 32)).stream(0, 47))
    for number, frame in enumerate(frames):
        Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0))).save(clip.with_name(f"{number}.png"))
    clip.with_name("list.txt").write_text("".join(f"{number}.png\n" for number in range(len(frames))))
    script, path = str(Path(net) / "main.py"), [str(net)]
    code = f"import runpy, numpy; numpy.random.seed(3); runpy.run_path({script!r}, run_name='__main__')"
    if interpreter == sys.executable:
        code, path = f"import stock_chainer as s; s.chainer(); {code}", [*path, str(SCRIPTS), *sys.path]
    update = len(frames) - 1 + 38  # predictions before the last of the fourth window: it counts them from 0
    options = f"-i list.txt -s 32,24 -c 3,8,16 --save {update} --period {update + 1}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [interpreter, "-c", code, *options.split()], cwd=clip.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split(", ")[1]) for line in clip.with_name("log.txt").read_text().splitlines()]
    return losses, dict(np.load(clip.with_name("models") / f"{update}.model"))


def our_updates(net, clip, loader, monkeypatch):
    """The same by `published`, whose last checkpoint has the weights."""
    monkeypatch.setattr(published, "CHECKPOINT_SECONDS", -1.0)
    folder = clip.with_name(loader)
    folder.mkdir()
    rows = run(net, folder, setting="cpu:threads=1", loader=loader, data=str(clip), frames=100)
    losses = [row["last_frame"] for row in itertools.islice(rows, 4)]
    state = load_file(folder / "checkpoint.safetensors")
    return losses, {name.removeprefix("model/"): array for name, array in state.items() if name.startswith("model/")}


@pytest.mark.slow("trains in Chainer")
@pytest.mark.parametrize("variable", ["", "GPULAB_CHAINER_PYTHON"])
def test_the_authors_own_script_gives_the_same_bits(net, clip, variable, monkeypatch):
    """In this Python; and in one without gpulab, with the authors' versions, whose place a variable has."""
    if variable and variable not in os.environ:
        pytest.skip(f"{variable} names no other Python with Chainer 7.8")
    losses, weights = authors_updates(net, clip, os.environ[variable] if variable else sys.executable)
    our_losses, our_weights = our_updates(net, clip, "reused", monkeypatch)
    assert our_losses == losses
    assert our_weights.keys() == weights.keys()
    assert all(np.array_equal(our_weights[name], weights[name]) for name in weights)


def test_an_interrupted_run_goes_on_bit_for_bit(net, tmp_path, monkeypatch):
    whole = list(run(net, tmp_path / "whole"))
    monkeypatch.setattr(published, "CHECKPOINT_SECONDS", -1.0)
    (tmp_path / "cut").mkdir()
    first = list(itertools.islice(run(net, tmp_path / "cut"), 5))
    assert first == whole[:5]
    assert [file.name for file in (tmp_path / "cut").iterdir()] == ["checkpoint.safetensors"]
    monkeypatch.setattr(published, "CHECKPOINT_SECONDS", 1e9)
    assert list(run(net, tmp_path / "cut")) == whole
    assert not list((tmp_path / "cut").iterdir())


def test_its_runs_are_kept_like_all_others(net, tmp_path):
    options = {**SMALL, "net": str(Path(net) / "net.py"), "frames": 60}
    training, variants = f"{SCRIPTS}/published.py:published", [{"loader": "reused"}, {"loader": "copied"}]
    experiment = gl.Experiment(training, ["cpu"], 2, store=tmp_path, options=options, variants=variants, workers=2)
    frame = experiment.run(progress=False)
    assert sorted(frame.loader) == ["copied"] * 2 + ["reused"] * 2
    assert set(frame.speed) == {2.0}
    assert frame.beats_repeating.dtype == bool
    assert (frame.repeat_loss > 0).all()
    record = record_of(next(frame.itertuples()))
    assert record["passport"]["software"]["chainer"] == stock_chainer.chainer().__version__
