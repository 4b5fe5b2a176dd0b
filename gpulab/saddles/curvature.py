"""The curvature of a loss along a training: how many directions lead down, and how steeply, from beginning to end.

The trainings are real ones under a setting; the instrument is the same for all: the Hessian of one fixed batch,
in float32 without TF32, on the device that trained. Source of the picture: Dauphin, Pascanu, Gulcehre, Cho,
Ganguli, Bengio 2014, *Identifying and attacking the saddle point problem* (arXiv 1406.2572).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from gpulab.data.feed import Loader
from gpulab.errors import UsageError
from gpulab.models.base import Trainable
from gpulab.passports import passport
from gpulab.records import read_table, read_tables, recorded_folder, write_table
from gpulab.saddles.hessians import hessian
from gpulab.saddles.operators import check_count
from gpulab.saddles.spectrum import ZERO, SpectralDensity, estimated_index, spectral_density
from gpulab.settings import Setting
from gpulab.training import store as stores
from gpulab.training.plan import Plan, plan_run
from gpulab.training.run import Run, train

if TYPE_CHECKING:
    import pandas as pd

# One thread gives the same bits on every CPU with the same instructions, and does not wait for a busy second core.
INSTRUMENT = {"cpu": "{}:threads=1", "cuda": "{}:tf32=off"}
EVALUATED = {True: 10, False: 200}  # frames of a sequence, or images, in the batch whose Hessian is looked at
MEASURED = (
    "loss",
    "gradient_norm",
    "index_fraction",
    "index_error",
    "zero_fraction",
    "negative_share",
    "smallest",
    "largest",
)
Weights = dict[str, Tensor]


def curvature_along(
    net: str = "autoencoder",
    *,
    setting: str | Iterable[str] = "cpu",
    seeds: int | Iterable[int] = 3,
    profile: str = "quick",
    frames: int | None = None,
    snapshots: int = 5,
    probes: int = 4,
    steps: int = 60,
    evaluated: int | None = None,
    store: str | Path | None = None,
    command: str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Train from several seeds under one or more settings, and look at the Hessian at moments spaced logarithmically.

    The Hessian is that of the training's objective on one fixed batch: the first 200 images, or the first 10
    frames from a state of zero, or as many as `evaluated`; its spectrum is `gpulab.spectral_density` with `probes` and
    `steps`. With a `store` (a folder) each training is kept there, and not made again.

    A row per setting, seed and snapshot: `experiment`, `profile`, `frames`, `setting`, `seed`, `step` (updates so
    far), `final` (whether the training ended here) and its `status`; `loss` (mean squared error per frame or image of
    the batch) and `gradient_norm`; `index_fraction`, the share of eigenvalues below −1e-2 of the largest |λ|, with its
    `index_error`, and `zero_fraction`, that of those nearer to zero; `negative_share`, of the sum of |λ|; `smallest`
    and `largest` eigenvalue, the outermost nodes; `nodes` and `node_weights` (probes, steps) of the density, and
    `size`, the number of parameters; `weights`, the SHA-256 of those that were trained; `evaluated`, `machine` and
    `recorded`. Where a training diverged, its last row has no
    numbers. `frame[frame.final]` is what `gpulab.verdict` takes.

    >>> small = {"profile": "smoke", "frames": 40, "seeds": 1, "snapshots": 2, "steps": 5}
    >>> frame = curvature_along("autoencoder", **small, progress=False)
    >>> frame.step.tolist(), bool((frame.largest > 0).all())
    ([0, 40], True)
    """
    settings = [str(Setting.parse(text)) for text in ([setting] if isinstance(setting, str) else setting)]
    chosen = list(range(seeds) if isinstance(seeds, int) else seeds)
    if not settings or not chosen:
        raise UsageError(f"setting={setting!r}, seeds={seeds!r}: expected one or more of each")
    for name, value in (("snapshots", snapshots), ("probes", probes), ("steps", steps)):
        check_count(name, value)
    looked: dict[str, Any] = {"snapshots": snapshots, "probes": probes, "steps": steps}
    folder = None if store is None else Path(store)
    parts = []
    with tqdm(total=len(settings) * len(chosen) * (1 + snapshots), leave=False, disable=not progress) as bar:
        for text in settings:
            for seed in chosen:
                bar.set_description(f"{text} seed {seed}", refresh=False)
                with torch.random.fork_rng(devices=[]):
                    plan = plan_run(net, setting=text, seed=seed, profile=profile, frames=frames)
                looked["evaluated"] = EVALUATED[plan.data.sequential] if evaluated is None else evaluated
                check_count("evaluated", looked["evaluated"])
                parts.append(_one(plan, looked, folder, command, bar))
    import pandas as pd

    return pd.concat(parts, ignore_index=True)


def recorded_curvature() -> pd.DataFrame:
    """The trainings that other machines looked at, as `curvature_along` returns them, kept in `data/saddles/curvature`.

    >>> bool(recorded_curvature().recorded.all())
    True
    """
    return read_curvature(recorded_folder("saddles") / "curvature").assign(recorded=True)


def read_curvature(store: str | Path) -> pd.DataFrame:
    """What `curvature_along` kept in a folder; damaged files are named in a warning and skipped."""
    import pandas as pd

    parts = [_unpacked(rows, record) for rows, record in read_tables(Path(store))]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*KEYS, *MEASURED])


# --- one training ----------------------------------------------------------------------------------------


def _one(plan: Plan, looked: dict[str, Any], folder: Path | None, command: str | None, bar: tqdm) -> pd.DataFrame:
    """The rows of one training: those that are kept, or new ones."""
    here = passport()
    identity = plan.identity(here)
    identity["id"] = stores.run_id({**identity, "looked": looked})
    file = None if folder is None else folder / f"{identity['id']}.parquet"
    if file is not None and file.is_file():
        bar.update(1 + looked["snapshots"])
        return _unpacked(*read_table(file))
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    seen, run = _snapshots(plan, looked["snapshots"])
    bar.update()
    rows = []
    for step, weights in seen.items():
        rows.append({"step": step, **_measured(plan, weights, looked)})
        bar.update()
    if run.status == "diverged":
        rows.append({"step": run.record["diverged_at"], **_nothing(looked)})
    bar.update(looked["snapshots"] - len(seen))
    record = {**identity, "looked": looked, "tolerance": ZERO, "status": run.status, "command": command}
    record |= {"started": started, "passport": dict(here), "weights": run.record["summary"]["weights"]}
    frame = _frame(rows, record)
    if file is not None:
        write_table(file, _packed(frame), record)
    return frame


def _snapshots(plan: Plan, count: int) -> tuple[dict[int, Weights], Run]:
    """Train, and keep copies of the weights by the number of updates."""
    windows = plan.frames // plan.window
    moments = {int(moment) for moment in np.geomspace(1, windows + 1, count).round() - 1}
    moments = {windows} if count == 1 else moments
    seen: dict[int, Weights] = {}
    passed = 0

    def look(model: Trainable, step: int) -> None:
        nonlocal passed
        if passed in moments:
            weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
            if all(tensor.isfinite().all() for tensor in weights.values()):
                seen[step] = weights
        passed += 1

    run = train(
        plan.name,
        plan.data,
        plan.setting,
        plan.seed,
        plan.profile,
        frames=plan.frames,
        watch=look,
        progress=False,
    )
    return seen, run


def _measured(plan: Plan, weights: Weights, looked: dict[str, Any]) -> dict[str, Any]:
    """What the instrument says of these weights."""
    device = plan.setting.device
    with Setting.parse(INSTRUMENT.get(plan.setting.kind, "{}").format(device)).apply() as instrument:
        model = plan.model.to(device, torch.float32)
        torch.nn.Module.load_state_dict(model, weights)
        batch = _batch(plan, looked["evaluated"], instrument)
        H = hessian(model, lambda: model.training_loss(batch, None)[0])
        with torch.no_grad():
            per_frame = model.training_loss(batch, None)[1]
        spectrum = spectral_density(H, probes=looked["probes"], steps=looked["steps"], progress=False)
    low, high = spectrum.extremes
    return {
        "loss": float(per_frame.double().mean()),
        "gradient_norm": float(H.gradient.double().norm()),
        **_signs(spectrum),
        "smallest": low,
        "largest": high,
        "size": spectrum.size,
        "nodes": spectrum.nodes,
        "node_weights": spectrum.weights,
    }


def _signs(spectrum: SpectralDensity) -> dict[str, float]:
    """How much of a spectrum is negative, and how much too near to zero to tell."""
    index = estimated_index(spectrum, ZERO)
    below = np.where(spectrum.nodes < -index.threshold, -spectrum.nodes, 0.0)
    return {
        "index_fraction": index.fraction,
        "index_error": index.error / index.size,
        "zero_fraction": index.zero / index.size,
        "negative_share": float((spectrum.weights * below).sum() / (spectrum.weights * np.abs(spectrum.nodes)).sum()),
    }


def _nothing(looked: dict[str, Any]) -> dict[str, Any]:
    """The row of a training that diverged."""
    empty = np.full((looked["probes"], looked["steps"]), math.nan)
    return {**dict.fromkeys(MEASURED, math.nan), "size": 0, "nodes": empty, "node_weights": empty}


def _batch(plan: Plan, count: int, instrument: Setting) -> Tensor:
    """The fixed batch: the first images, or the first frames of the sequence."""
    frames = next(plan.data.windows(count, 0)).frames
    window = Loader("window", instrument).window(frames)
    return next(iter(plan.model.batches(window))) if plan.model.sequential else window


# --- kept ------------------------------------------------------------------------------------------------

KEYS = ("experiment", "profile", "frames", "setting", "seed", "status", "machine", "torch", "evaluated", "recorded")


def _frame(rows: list[dict[str, Any]], record: dict[str, Any]) -> pd.DataFrame:
    """Rows with what is common to them."""
    import pandas as pd

    here = record["passport"]
    on_cpu = record["setting"].startswith("cpu")
    common = {
        **{key: record[key] for key in ("experiment", "profile", "setting", "seed", "status", "weights", "id")},
        "frames": record["configuration"]["frames"],
        "machine": here["cpu"]["model"] if on_cpu else ", ".join(gpu["name"] for gpu in here["gpus"]),
        "torch": here["software"]["torch"],
        "evaluated": record["looked"]["evaluated"],
        "recorded": False,
    }
    frame = pd.DataFrame(rows).assign(**common)
    return frame.assign(final=frame.index == len(frame) - 1)


def _packed(frame: pd.DataFrame) -> pd.DataFrame:
    """What goes into a file: numbers, and the densities in a row each."""
    flat = {name: [row.ravel().astype(np.float32) for row in frame[name]] for name in ("nodes", "node_weights")}
    return frame[["step", "size", *MEASURED]].assign(**flat)


def _unpacked(rows: pd.DataFrame, record: dict[str, Any]) -> pd.DataFrame:
    """The frame that `_packed` took apart."""
    shape = record["looked"]["probes"], record["looked"]["steps"]
    whole = {name: [np.array(row, float).reshape(shape) for row in rows[name]] for name in ("nodes", "node_weights")}
    made = rows.assign(**whole).to_dict("records")
    if record.get("tolerance") != ZERO:  # counted with another one; the error is then that of the probes alone
        for row in made:
            if row["size"]:
                row |= _signs(SpectralDensity(row["nodes"], row["node_weights"], int(row["size"]), row["nodes"].size))
    return _frame(made, record)


def densities(frame: pd.DataFrame) -> Iterator[tuple[Any, SpectralDensity]]:
    """The rows of a frame that have numbers, each with its density."""
    for row in frame[frame["size"] > 0].itertuples():
        yield row, SpectralDensity(row.nodes, row.node_weights, int(row.size), row.nodes.size)
