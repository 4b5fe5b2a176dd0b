"""Every format of gpulab's own: how an undamaged one is made, and what reading it says.

Reading gives facts, each a name and a value, as far as it comes: those of an undamaged file are what all others are
held against. A fact that is missing must have been missed with a word, unless it is one of `REQUIRED`: those must be
there always.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from attacks import damage

import gpulab as gl
from gpulab.store import runs as stores

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
    whole = stores.history(frame)
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
    stores.pack(folder / "store", folder / "packed.parquet")


def read_packed(folder: Path) -> Facts:
    frame = gl.runs(folder / "packed.parquet")
    yield from rows(frame).items()
    yield from histories(frame).items()


def _of_run(run: str, file: str, what: str, hostile: Callable[[bytes], damage.Strategy]) -> Format:
    pattern = f"store/{run}*-seed0-*/{file}"
    return Format(f"{file} of {what}", pattern, make_store, functools.partial(read_store, what), hostile)


FORMATS = [
    _of_run("autoencoder", "run.json", "autoencoder", damage.json_text),
    _of_run("autoencoder", "results.safetensors", "autoencoder", damage.safetensors),
    _of_run("fn.py", "run.json", "function", damage.json_text),
    _of_run("fn.py", "results.safetensors", "function", damage.safetensors),
    Format("checkpoint", "store/.unfinished/*.safetensors", make_checkpoint, read_checkpoint, damage.safetensors),
    Format("packed runs", "packed.parquet", make_packed, read_packed, damage.blind),
]
BY_NAME = {form.name: form for form in FORMATS}
