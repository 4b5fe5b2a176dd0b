"""Every format that gpulab reads: how an undamaged one is made, and what reading it says.

Reading gives facts, each a name and a value, as far as it comes: those of an undamaged file are what all others are
held against. A fact that is missing must have been missed with a word, unless it is one of `REQUIRED`: those must be
there always.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from attacks import damage

import gpulab as gl
from gpulab.store import listing

SETTING = "cpu:threads=1"
FUNCTION = """
def train(seed, setting, rate=0.1):
    loss = 1.0 + seed
    for step in range(30):
        loss *= 1 - rate
        yield loss
"""
VOLATILE = ["seconds", "frames_per_second", "path", "recorded"]  # what a run done again does not repeat
REQUIRED = ("other", "trained", "again")  # the beginnings of the names of facts that a damage must not touch
Facts = Iterator[tuple[str, Any]]


class Format(NamedTuple):
    """A kind of file: its name in a case's folder (or a pattern), how it is made and read."""

    name: str
    file: str
    make: Callable[[Path], None]
    read: Callable[[Path], Facts]
    hostile: Callable[[bytes], damage.Strategy]  # damage that knows the format
    foreign: bool = False  # without a checksum of gpulab's, so that nobody can know what was in it
    declares: bool = False  # how long it is, so that it cannot be cut short unnoticed


# --- stores -----------------------------------------------------------------------------------------------


def train(folder: Path, what: str, **options: Any) -> Any:
    """A short training of a function or of a network, in the folder's store."""
    name, of_network = ("fn.py:train", {}) if what == "function" else (what, {"profile": "smoke", "frames": 20})
    options = {"setting": SETTING, "store": folder / "store", "progress": False, **of_network, **options}
    return gl.train(name, **options)


def make_store(folder: Path, seeds: int = 2) -> None:
    (folder / "fn.py").write_text(FUNCTION)
    for seed in range(seeds):
        train(folder, "function", seed=seed)
        train(folder, "autoencoder", seed=seed)


def outcome(run: Any) -> str:
    """What a run computed, to the bit."""
    weights = [] if run.model is None else [part.detach().numpy().tobytes() for part in run.model.parameters()]
    losses = run.history[["window", "step", "loss"]].to_json(double_precision=15)
    return f"{run.status} {run.record['summary']['final_loss']!r} {_digest(b''.join([losses.encode(), *weights]))}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def rows(frame: Any) -> dict[str, str]:
    """What a listing says of each run."""
    said = frame.drop(columns=[name for name in VOLATILE if name in frame]).to_dict("records")
    return {
        f"row {row['id']}": repr(sorted((k, v) for k, v in row.items() if v == v and v is not None)) for row in said
    }


def histories(frame: Any) -> dict[str, str]:
    """The history of each run."""
    whole = listing.history(frame)
    parts = whole[["window", "step", "loss"]].groupby(whole.id) if len(whole) else ()
    return {f"history {run}": _digest(part.to_csv(index=False).encode()) for run, part in parts}


def read_store(what: str, folder: Path) -> Facts:
    """The runs of a store of which one is damaged, done again, and listed again: nothing else may be touched."""
    damaged = ("fn.py_train-own" if what == "function" else "autoencoder-smoke") + "-cpu_threads_1-seed0"
    said = rows(frame := gl.runs(folder / "store"))
    for run, part in frame.groupby("id"):
        with contextlib.suppress(gl.DataError) if str(run).startswith(damaged) else contextlib.nullcontext():
            said |= histories(part)
    yield from ((name if damaged in name else f"other {name}", text) for name, text in said.items())
    yield "trained", outcome(train(folder, what, seed=0))
    with warnings.catch_warnings(record=True) as words:
        warnings.simplefilter("always")
        frame = gl.runs(folder / "store")
    yield "again reported", [str(word.message) for word in words]
    yield from ((f"again {name}", text) for name, text in (rows(frame) | histories(frame)).items())
    cli(["runs", "store"])


def make_checkpoint(folder: Path) -> None:
    make_store(folder)

    def stop(model: Any, updates: int) -> None:  # noqa: ARG001
        if updates >= 60:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        train(folder, "autoencoder", frames=100, seed=7, checkpoint_seconds=0, watch=stop)


def read_checkpoint(folder: Path) -> Facts:
    yield "trained", outcome(train(folder, "autoencoder", frames=100, seed=7))
    yield from ((f"again {name}", text) for name, text in rows(gl.runs(folder / "store")).items())


def make_packed(folder: Path) -> None:
    make_store(folder)
    listing.pack(folder / "store", folder / "packed.parquet")


def read_packed(folder: Path) -> Facts:
    frame = gl.runs(folder / "packed.parquet")
    yield from rows(frame).items()
    yield from histories(frame).items()


# --- other files of gpulab's own --------------------------------------------------------------------------


def step() -> Any:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    return gl.Step(model, (torch.randn(16, 8), torch.randn(16, 2)), torch.nn.functional.mse_loss)


def make_trace(folder: Path) -> None:
    gl.diagnostics.record(step(), SETTING, folder / "a.trace")


def read_trace(folder: Path) -> Facts:
    trace = gl.diagnostics.Trace.load(folder / "a.trace")
    yield "step", repr((trace.setting, trace.operations, trace.reference, trace.passport, trace.arithmetic))
    yield "numbers", {name: _digest(values.tobytes()) for name, values in trace.sketches.items()}
    str(gl.audit(folder / "a.trace", folder / "a.trace"))


# --- foreign files ----------------------------------------------------------------------------------------


def make_model(folder: Path) -> None:
    from gpulab.models.chainer import chainer_views

    views = chainer_views(gl.models.PredNet((3, 4), (8, 8)), lambda parameter: parameter.data)
    with (folder / "net.model").open("wb") as stream:
        np.savez(stream, **{name: view.numpy() for name, view in views.items()})


def read_model(folder: Path) -> Facts:
    yield "weights", len([*gl.models.PredNet.from_chainer(folder / "net.model").parameters()])


def make_mnist(folder: Path) -> None:
    images = (np.arange(40 * 28 * 28) % 251).astype(np.uint8).tobytes()
    packed = gzip.compress(struct.pack(">4I", 2051, 40, 28, 28) + images)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(packed)


def read_mnist(folder: Path) -> Facts:
    data = gl.load(f"mnist:{folder}")
    yield "images", sum(len(window.frames) for window in [*data.heldout(20), next(data.windows(20))])


def picture(number: int) -> Any:
    from PIL import Image

    shades = np.add.outer(np.arange(48), np.arange(64))[..., None] * [1, 2, 3] + 9 * number
    return Image.fromarray(shades.astype(np.uint8))


def make_images(suffix: str, folder: Path) -> None:
    (folder / "frames").mkdir()
    for number in range(6):
        picture(number).save(folder / "frames" / f"{number}{suffix}")


def read_images(folder: Path) -> Facts:
    yield "frames", len([*gl.load(f"frames:{folder / 'frames'}", size=(16, 16)).stream()])


def make_film(name: str, codec: str, options: dict[str, str], folder: Path) -> None:
    import av

    with av.open(str(folder / name), "w", options=options) as film:
        stream = film.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.gop_size = 8
        for number in range(40):
            film.mux(stream.encode(av.VideoFrame.from_image(picture(number))))
        film.mux(stream.encode())


def read_film(name: str, folder: Path) -> Facts:
    yield "frames", len([*gl.load(f"video:{folder / name}", size=(16, 16)).stream()])


def make_csv(folder: Path) -> None:
    shifts = {"cpu": 0, "cuda": 0.01}
    lines = [f"{setting},{seed},{1 + seed / 7 + shifts[setting]},finished" for setting in shifts for seed in range(8)]
    (folder / "runs.csv").write_text("\n".join(["setting,seed,final_loss,state", *lines]) + "\n")


def read_csv(folder: Path) -> Facts:  # noqa: ARG001
    yield "verdict", cli(["verdict", "runs.csv"])


def cli(arguments: list[str]) -> str:
    """What a command prints; `GpulabError` where it fails."""
    from gpulab.cli import main

    out, err, status = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["gpulab", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.argv = before
    said = out.getvalue() + err.getvalue()
    if any(ord(sign) < 32 and sign not in "\n\t" for sign in said):
        raise AssertionError(f"control characters on the terminal: {said!r}")
    if status:
        raise gl.GpulabError(f"gpulab {' '.join(arguments)}: {err.getvalue().strip()}")
    return out.getvalue()


def _of_run(run: str, file: str, what: str, hostile: Callable[[bytes], damage.Strategy]) -> Format:
    pattern = f"store/{run}*-seed0-*/{file}"
    return Format(f"{file} of {what}", pattern, make_store, functools.partial(read_store, what), hostile)


def _of_film(name: str, suffix: str, codec: str, declares: bool = False, **options: str) -> Format:
    make = functools.partial(make_film, f"film.{suffix}", codec, options)
    read = functools.partial(read_film, f"film.{suffix}")
    return Format(name, f"film.{suffix}", make, read, damage.cut, foreign=True, declares=declares)


def _of_images(suffix: str) -> Format:
    make = functools.partial(make_images, suffix)
    return Format(f"image {suffix}", f"frames/3{suffix}", make, read_images, damage.image, foreign=True)


FORMATS = [
    _of_run("autoencoder", "run.json", "autoencoder", damage.json_text),
    _of_run("autoencoder", "results.safetensors", "autoencoder", damage.safetensors),
    _of_run("fn.py", "run.json", "function", damage.json_text),
    _of_run("fn.py", "results.safetensors", "function", damage.safetensors),
    Format("checkpoint", "store/.unfinished/*.safetensors", make_checkpoint, read_checkpoint, damage.safetensors),
    Format("packed runs", "packed.parquet", make_packed, read_packed, damage.parquet),
    Format("trace", "a.trace", make_trace, read_trace, damage.parquet),
    Format("model", "net.model", make_model, read_model, damage.npz, foreign=True),
    Format("mnist", "train-images-idx3-ubyte.gz", make_mnist, read_mnist, damage.idx, foreign=True),
    Format("csv", "runs.csv", make_csv, read_csv, damage.csv, foreign=True),
    *map(_of_images, (".png", ".jpg", ".bmp", ".webp", ".tif")),
    _of_film("mp4", "mp4", "mpeg4", declares=True),
    _of_film("fragmented mp4", "mp4", "mpeg4", movflags="frag_keyframe+empty_moov"),
    _of_film("mkv", "mkv", "mpeg4", declares=True),
    _of_film("webm", "webm", "libvpx", declares=True),
    _of_film("avi", "avi", "mpeg4", declares=True),
    _of_film("ts", "ts", "mpeg2video"),
    _of_film("mpg", "mpg", "mpeg2video"),
]
BY_NAME = {form.name: form for form in FORMATS}
