"""Every format that gpulab reads: how an undamaged one is made, and what reading it says.

`read` fills in facts, by name, as far as it comes: those of an undamaged file are what all others are held against.
A fact that is missing must have been missed with a word, unless it is one of `REQUIRED`: those must be there always.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from attacks import mutations

import gpulab as gl
from gpulab.store import listing as stores
from gpulab.store import records

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
Facts = dict[str, Any]


class Format(NamedTuple):
    """A kind of file: its name in a case's folder (or a pattern), how it is made and read."""

    name: str
    file: str
    make: Callable[[Path], None]
    read: Callable[[Path, Facts], None]
    knows: Callable[..., Any] | None = None  # a mutation that knows the format
    foreign: bool = False  # without a checksum of gpulab's, so that nobody can know what was in it


# --- stores -------------------------------------------------------------------------------------------------------


def train(folder: Path, what: str, **options: Any) -> Any:
    if what == "function":
        return gl.train("fn.py:train", setting=SETTING, store=folder / "store", progress=False, **options)
    return gl.train(
        "autoencoder", profile="smoke", frames=20, setting=SETTING, store=folder / "store", progress=False, **options
    )


def make_store(folder: Path) -> None:
    write_function(folder)
    for what in ("function", "autoencoder"):
        for seed in (0, 1):
            train(folder, what, seed=seed)


def write_function(folder: Path) -> None:
    (folder / "fn.py").write_text(FUNCTION)


def outcome(run: Any) -> str:
    """What a run computed, to the bit."""
    weights = (
        b"" if run.model is None else b"".join(p.detach().numpy().tobytes() for p in run.model.state_dict().values())
    )
    losses = run.history[["window", "step", "loss"]].to_json(double_precision=15)
    return f"{run.status} {run.record['summary']['final_loss']!r} {_digest(losses.encode() + weights)}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def rows(frame: Any) -> dict[str, str]:
    frame = frame.drop(columns=[name for name in VOLATILE if name in frame])
    return {
        str(row["id"]): repr(sorted((k, v) for k, v in row.items() if v == v and v is not None))
        for row in frame.to_dict("records")
    }


def histories(frame: Any) -> dict[str, str]:
    whole = stores.history(frame)
    parts = whole[["window", "step", "loss"]].groupby(whole.id)
    return {str(name): _digest(part.to_csv(index=False).encode()) for name, part in parts}


def read_store(what: str, folder: Path, facts: Facts) -> None:
    """The runs of a store of which one is damaged, done again, and listed again: nothing else may be touched."""
    first = "fn.py_train-own" if what == "function" else "autoencoder-smoke"
    damaged = f"{first}-cpu_threads_1-seed0"

    def named(said: dict[str, str], first: str) -> Facts:
        return {
            (f"{first} {name}" if name.startswith(damaged) else f"other: {first} {name}"): text
            for name, text in said.items()
        }

    facts |= named(rows(frame := gl.runs(folder / "store")), "row")
    for run, part in frame.groupby("id"):
        with contextlib.suppress(gl.DataError) if str(run).startswith(damaged) else contextlib.nullcontext():
            facts |= named(histories(part), "history")
    facts["trained"] = outcome(train(folder, what, seed=0))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        frame = gl.runs(folder / "store")
        facts |= {
            f"again: {name}": text
            for name, text in (rows(frame) | {f"h {k}": v for k, v in histories(frame).items()}).items()
        }
    facts["again: reported"] = [str(warning.message) for warning in said]
    cli(["runs", "store"])


def make_checkpoint(folder: Path) -> None:
    make_store(folder)

    def stop(model: Any, updates: int) -> None:  # noqa: ARG001
        if updates >= 60:
            raise KeyboardInterrupt

    options = {"profile": "smoke", "setting": SETTING, "seed": 7, "store": folder / "store", "progress": False}
    with contextlib.suppress(KeyboardInterrupt):
        gl.train("autoencoder", frames=100, checkpoint_seconds=0, watch=stop, **options)


def read_checkpoint(folder: Path, facts: Facts) -> None:
    facts["trained"] = outcome(
        gl.train(
            "autoencoder", frames=100, profile="smoke", setting=SETTING, seed=7, store=folder / "store", progress=False
        )
    )
    facts |= {f"again: {name}": text for name, text in rows(gl.runs(folder / "store")).items()}


def make_packed(folder: Path) -> None:
    make_store(folder)
    gl.store.listing.pack(folder / "store", folder / "packed.parquet")


def read_packed(folder: Path, facts: Facts) -> None:
    facts["rows"] = rows(frame := gl.runs(folder / "packed.parquet"))
    if frame.empty:
        del facts["rows"]
        return
    facts["histories"] = histories(frame)


# --- other files of gpulab's own ----------------------------------------------------------------------------------


def make_table(folder: Path) -> None:
    import pandas as pd

    table = pd.DataFrame({"setting": ["cpu", "cuda"] * 20, "step": range(40), "value": np.linspace(0, 1, 40) ** 3})
    records.write_table(folder / "table.parquet", table, {"passport": gl.passport(), "command": "a command"})


def read_table(folder: Path, facts: Facts) -> None:
    table, record = records.read_table(folder / "table.parquet")
    facts["table"] = table.to_csv()
    facts["record"] = repr({name: record.get(name) for name in ("passport", "command")})


def step() -> Any:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    return gl.Step(model, (torch.randn(16, 8), torch.randn(16, 2)), torch.nn.functional.mse_loss)


def make_trace(folder: Path) -> None:
    gl.diagnostics.record(step(), SETTING, folder / "a.trace")


def read_trace(folder: Path, facts: Facts) -> None:
    trace = gl.diagnostics.Trace.load(folder / "a.trace")
    sketches = {name: _digest(values.tobytes()) for name, values in trace.sketches.items()}
    facts["trace"] = repr(
        (trace.setting, trace.operations, trace.reference, trace.passport, trace.arithmetic, sketches)
    )
    str(gl.audit(folder / "a.trace", folder / "a.trace"))


# --- foreign files ------------------------------------------------------------------------------------------------


def make_model(folder: Path) -> None:
    from gpulab.models.chainer import chainer_views

    net = gl.models.PredNet((3, 4), (8, 8))
    np.savez(
        folder / "net.npz",
        **{name: view.detach().numpy() for name, view in chainer_views(net, lambda p: p.data).items()},
    )
    (folder / "net.npz").rename(folder / "net.model")


def read_model(folder: Path, facts: Facts) -> None:
    net = gl.models.PredNet.from_chainer(folder / "net.model")
    values = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    facts["model"] = _digest(values)
    facts["finite"] = bool(all(p.isfinite().all() for p in net.parameters()))


def make_mnist(folder: Path) -> None:
    images = (np.arange(40 * 28 * 28) % 251).astype(np.uint8).tobytes()
    (folder / "mnist").mkdir()
    packed = gzip.compress(struct.pack(">4I", 2051, 40, 28, 28) + images)
    (folder / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(packed)


def read_mnist(folder: Path, facts: Facts) -> None:
    data = gl.load(f"mnist:{folder / 'mnist'}")
    facts["images"] = _digest(
        b"".join(w.frames.tobytes() for w in data.heldout(20)) + next(data.windows(20)).frames.tobytes()
    )


def picture(number: int) -> Any:
    from PIL import Image

    return Image.fromarray(
        (np.add.outer(np.arange(48), np.arange(64))[..., None] * [1, 2, 3] + 9 * number).astype(np.uint8)
    )


def make_images(suffix: str, folder: Path) -> None:
    (folder / "frames").mkdir()
    for number in range(6):
        picture(number).save(folder / "frames" / f"{number}{suffix}")


def read_images(folder: Path, facts: Facts) -> None:
    data = gl.load(f"frames:{folder / 'frames'}", size=(16, 16))
    facts["frames"] = _digest(b"".join(frame.tobytes() for frame in data.stream()))


def make_film(container: str, codec: str, folder: Path, frames: int = 40, **options: str) -> None:
    import av

    with av.open(str(folder / f"film.{container}"), "w", options=options) as film:
        stream = film.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.gop_size = 8
        for number in range(frames):
            for packet in stream.encode(av.VideoFrame.from_image(picture(number))):
                film.mux(packet)
        for packet in stream.encode():
            film.mux(packet)


def read_film(container: str, folder: Path, facts: Facts) -> None:
    data = gl.load(f"video:{folder / f'film.{container}'}", size=(16, 16))
    facts["frames"] = data.frames + data.held
    facts["content"] = _digest(b"".join(frame.tobytes() for frame in data.stream()))


def make_csv(folder: Path) -> None:
    lines = [
        f"{setting},{seed},{1 + seed / 7 + shift},finished"
        for setting, shift in (("cpu", 0), ("cuda", 0.01))
        for seed in range(8)
    ]
    (folder / "runs.csv").write_text("\n".join(["setting,seed,final_loss,state", *lines]) + "\n")


def read_csv(folder: Path, facts: Facts) -> None:  # noqa: ARG001
    facts["verdict"] = cli(["verdict", "runs.csv"])


class Said(gl.GpulabError):
    """What a command said before it ended with another status than 0."""


def cli(arguments: list[str]) -> str:
    """What a command prints; `Said` where it fails in one line."""
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
    if any(ord(sign) < 32 and sign not in "\n\t" for sign in out.getvalue() + err.getvalue()):
        raise AssertionError(f"control characters on the terminal: {out.getvalue()!r} {err.getvalue()!r}")
    if status:
        raise Said(err.getvalue().strip())
    return out.getvalue()


FILMS = {
    "mp4": ("mp4", "mpeg4", {}),
    "fragmented mp4": ("mp4", "mpeg4", {"movflags": "frag_keyframe+empty_moov"}),
    "mkv": ("mkv", "mpeg4", {}),
    "webm": ("webm", "libvpx", {}),
    "ts": ("ts", "mpeg2video", {}),
    "mpg": ("mpg", "mpeg2video", {}),
    "avi": ("avi", "mpeg4", {}),
}
FORMATS = [
    *(
        Format(
            f"{file} of {what}",
            f"store/{run}*-seed0-*/{file}",
            make_store,
            functools.partial(read_store, what.split()[-1]),
            knows,
        )
        for what, run in (("a network", "autoencoder"), ("a function", "fn.py"))
        for file, knows in (("run.json", mutations.json_file), ("history.parquet", mutations.parquet))
    ),
    Format(
        "weights",
        "store/autoencoder*-seed0-*/weights.safetensors",
        make_store,
        functools.partial(read_store, "network"),
        mutations.safetensors,
    ),
    Format("checkpoint", "store/.unfinished/*.safetensors", make_checkpoint, read_checkpoint, mutations.safetensors),
    Format("packed runs", "packed.parquet", make_packed, read_packed, mutations.parquet),
    Format("table", "table.parquet", make_table, read_table, mutations.parquet),
    Format("trace", "a.trace", make_trace, read_trace, mutations.parquet),
    Format("model", "net.model", make_model, read_model, mutations.npz, foreign=True),
    Format("mnist", "mnist/*.gz", make_mnist, read_mnist, mutations.idx, foreign=True),
    Format("csv", "runs.csv", make_csv, read_csv, mutations.csv, foreign=True),
    *(
        Format(
            f"image{suffix}",
            f"frames/3{suffix}",
            functools.partial(make_images, suffix),
            read_images,
            mutations.image,
            foreign=True,
        )
        for suffix in (".png", ".jpg", ".bmp", ".webp", ".tif")
    ),
    *(
        Format(
            f"film {name}",
            f"film.{end}",
            functools.partial(make_film, end, codec, **options),
            functools.partial(read_film, end),
            foreign=True,
        )
        for name, (end, codec, options) in FILMS.items()
    ),
]
BY_NAME = {form.name: form for form in FORMATS}
