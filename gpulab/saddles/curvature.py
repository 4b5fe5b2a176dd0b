"""The curvature of a loss along a training: how many directions lead down, and how steeply, from beginning to end.

The trainings are real ones under a setting; the instrument is the same for all: the Hessian of one fixed batch,
in float32 without TF32, on the device that trained. The picture is that of Dauphin, Pascanu, Gulcehre, Cho, Ganguli,
Bengio 2014, *Identifying and attacking the saddle point problem* (arXiv 1406.2572).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpulab.data.feed import Loader
from gpulab.errors import DataError, UsageError, check_count
from gpulab.models.base import Trainable
from gpulab.passports import machine, passport
from gpulab.report import Progress
from gpulab.saddles.hessians import hessian
from gpulab.saddles.spectrum import ZERO, SpectralDensity, estimated_index, spectral_density
from gpulab.settings import Setting
from gpulab.store import identities
from gpulab.store.recorded import read_table, read_tables, recorded_folder, write_table
from gpulab.training.run import train
from gpulab.training.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

# One thread gives the same bits on every CPU with the same instructions, and does not wait for a busy second core.
INSTRUMENT = {"cpu": "{}:threads=1", "cuda": "{}:tf32=off"}
EVALUATED = {True: 10, False: 200}  # frames of a sequence, or images, in the batch whose Hessian is looked at
MEASURED = (
    *("loss", "gradient_norm", "index_fraction", "index_error", "zero_fraction", "negative_share"),
    *("smallest", "largest"),
)
KEYS = ("experiment", "profile", "frames", "setting", "seed", "status", "machine", "torch", "evaluated", "recorded")


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
    store: str | Path | None = None,
    command: str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Train a network from several seeds under one or more settings, and measure its loss's curvature along the way.

    At moments spaced logarithmically, from before the first update to the end of the training, it looks at the Hessian
    of the training's objective on one fixed batch: 200 training images, or the first 10 training frames, for which the
    network begins with an empty state (of PredNet, the sum over the frames). That is always measured in the
    same way, whatever the training's setting is: in float32, on the device that trained, with one thread on a CPU and
    without TF32 on a GPU.

    Args:
        net: The name of the network: `autoencoder`, `prednet` or `whitener`.
        setting: One setting to train under, or several, such as `["cpu", "cpu:precision=float64"]`.
        seeds: The seeds to train from, or how many: 3 stands for 0, 1 and 2.
        profile: How long to train and on what: `smoke`, `quick` or `paper`, as for `gpulab.train`.
        frames: How many frames or images to train on; by default the profile's.
        snapshots: At how many moments to look. Moments that coincide are one; a single one is the end.
        probes: How many random vectors `gpulab.saddles.spectral_density` begins with.
        steps: How many steps of Lanczos it makes from each.
        store: A folder in which what was seen of each training is kept. A training that is there is not made again.
        command: Noted in what is kept: how it was made.
        progress: Whether to show a progress bar.

    Returns:
        A data frame with a row for each setting, seed and snapshot.

        - Which training: `experiment` (the network), `profile`, `frames`, `setting`, `seed`, `machine`, `torch` (its
          version), `id`, `weights` (the SHA-256 of the trained weights), `status` (`finished` or `diverged`),
          `recorded` (False).
        - Which moment: `step` (updates so far); `final`, whether it is the training's last row: `frame[frame.final]` is
          what `gpulab.verdict` takes.
        - Of the batch, which has `evaluated` frames or images: `loss`, the mean squared error per frame or image;
          `gradient_norm`, the length of the gradient.
        - Of the Hessian: `size`, the number of its rows; `smallest` and `largest`, the outermost nodes of its spectrum;
          `index_fraction`, the share of eigenvalues below −1e-2 of the largest |λ|, with its standard error
          `index_error`; `zero_fraction`, the share of those closer to zero; `negative_share`, how much of the sum of
          |λ| is of the former; `nodes` and `node_weights`, the estimated spectrum, arrays (probes, steps).

        A training that diverged has a last row without numbers, whose `size` is 0.

    Raises:
        UsageError: For an unknown network, profile or setting, for no setting or no seed, and for numbers that are no
            whole numbers from 1.
        DataError: For a damaged file in the store; the message names it.
        GpulabError: For a setting that cannot run here.

    Examples:
        >>> import gpulab as gl
        >>> small = {"profile": "smoke", "frames": 40, "seeds": 1, "snapshots": 2, "steps": 5}
        >>> frame = gl.saddles.curvature_along("autoencoder", **small, progress=False)
        >>> frame.step.tolist(), bool((frame.largest > 0).all())
        ([0, 40], True)

    References:
        Dauphin, Pascanu, Gulcehre, Cho, Ganguli, Bengio 2014, *Identifying and attacking the saddle point problem*
        (arXiv 1406.2572).
    """
    import pandas as pd

    settings = [str(Setting.parse(text)) for text in ([setting] if isinstance(setting, str) else setting)]
    numbers = list(range(seeds) if isinstance(seeds, int) else seeds)
    if not settings or not numbers:
        raise UsageError(f"setting={setting!r}, seeds={seeds!r}: expected one or more of each")
    options: dict[str, Any] = {"snapshots": snapshots, "probes": probes, "steps": steps}
    for name, value in options.items():
        check_count(name, value)
    tables = []
    with Progress(total=len(settings) * len(numbers) * (1 + snapshots), leave=False, disable=not progress) as bar:
        for text, seed in itertools.product(settings, numbers):
            bar.set_description(f"{text} seed {seed}", refresh=False)
            with torch.random.fork_rng(devices=[]):
                spec = RunSpec.of(net, setting=text, seed=seed, profile=profile, frames=frames)
            options["evaluated"] = EVALUATED[spec.data.sequential]
            tables.append(_along_training(spec, options, store, command, bar))
    return pd.concat(tables, ignore_index=True)


def recorded_curvature() -> pd.DataFrame:
    """Read the curvature along trainings that was recorded on other machines and is shipped with gpulab.

    The files are in `data/saddles/curvature`.

    Returns:
        A data frame as `gpulab.saddles.curvature_along` returns it, in which `recorded` is True.

    Examples:
        >>> import gpulab as gl
        >>> bool(gl.saddles.recorded_curvature().recorded.all())
        True
    """
    return read_curvature(recorded_folder("saddles") / "curvature").assign(recorded=True)


def read_curvature(store: str | Path) -> pd.DataFrame:
    """What `curvature_along` kept in a folder; `DataError`, naming the file, for a damaged one."""
    import pandas as pd

    frames = [_unpacked(rows, record) for rows, record in read_tables(Path(store))]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*KEYS, *MEASURED])


def row_spectra(frame: pd.DataFrame) -> Iterator[tuple[Any, SpectralDensity]]:
    """The rows of such a frame that have numbers, each with its spectrum."""
    for row in frame[frame["size"] > 0].itertuples():
        yield row, SpectralDensity(row.nodes, row.node_weights, int(row.size))


def _along_training(
    spec: RunSpec, options: dict[str, Any], store: str | Path | None, command: str | None, bar: Progress
) -> pd.DataFrame:
    """The rows of one training: those that are kept, or new ones."""
    machine_passport = passport()
    spec.draw_weights()
    planned = spec.identity(machine_passport)
    identity = {**planned.record, "id": identities.run_id({**planned.record, "looked": options})}
    file = None if store is None else Path(store) / f"{identity['id']}.parquet"
    if file is not None and file.is_file():
        try:
            stored_frame = _unpacked(*read_table(file))
        except DataError as error:
            raise DataError(f"{error}; without this file, the training is made and looked at again") from None
        bar.update(1 + options["snapshots"])
        return stored_frame
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    last = 1 + spec.frames // spec.window
    moments = set(np.geomspace(last, 1, options["snapshots"]).round() - 1)  # a single one is the end of the training
    passed = 0
    snapshots: dict[int, dict[str, Tensor]] = {}  # weights, by the number of updates

    def watch(model: Trainable, step: int) -> None:
        nonlocal passed
        if passed in moments:
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
            if all(tensor.isfinite().all() for tensor in copies.values()):
                snapshots[step] = copies
        passed += 1

    arguments = spec.experiment, spec.data, spec.setting, spec.seed, spec.profile
    run = train(*arguments, frames=spec.frames, watch=watch, progress=False)
    bar.update()
    rows = []
    for step, snapshot in snapshots.items():
        rows.append({"step": step, **_measure(spec, snapshot, options)})
        bar.update()
    if run.status == "diverged":
        empty = dict.fromkeys(("nodes", "node_weights"), np.full((options["probes"], options["steps"]), math.nan))
        rows.append({"step": run.record["diverged_at"], **dict.fromkeys(MEASURED, math.nan), "size": 0, **empty})
    bar.update(options["snapshots"] - len(snapshots))
    record = {**identity, "looked": options, "tolerance": ZERO, "status": run.status, "command": command}
    record |= {"started": started, "passport": dict(machine_passport), "weights": run.record["summary"]["weights"]}
    frame = _frame(rows, record)
    if file is not None:
        flat = {name: [row.ravel().astype(np.float32) for row in frame[name]] for name in ("nodes", "node_weights")}
        write_table(file, frame[["step", "size", *MEASURED]].assign(**flat), record)
    return frame


def _measure(spec: RunSpec, state: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """What the instrument says of these weights."""
    device = spec.setting.device
    with Setting.parse(INSTRUMENT.get(spec.setting.kind, "{}").format(device)).apply() as instrument:
        model = spec.model.to(device, torch.float32)
        torch.nn.Module.load_state_dict(model, state)
        batch = Loader("window", instrument).window(next(spec.data.windows(options["evaluated"], 0)).frames)
        if model.sequential:
            batch = next(iter(model.batches(batch)))
        H = hessian(model, lambda: model.training_loss(batch, None)[0])
        with torch.no_grad():
            losses = model.training_loss(batch, None)[1]
        spectrum = spectral_density(H, probes=options["probes"], steps=options["steps"], progress=False)
    index, nodes, weights = estimated_index(spectrum), spectrum.nodes, spectrum.weights
    below = np.where(nodes < -index.threshold, -nodes, 0.0)
    return {
        "loss": float(losses.double().mean()),
        "gradient_norm": float(H.gradient.double().norm()),
        "index_fraction": index.fraction,
        "index_error": index.error / index.size,
        "zero_fraction": index.zero / index.size,
        "negative_share": float((weights * below).sum() / (weights * np.abs(nodes)).sum()),
        **dict(zip(("smallest", "largest"), spectrum.extremes, strict=True)),
        "size": spectrum.size,
        "nodes": nodes,
        "node_weights": weights,
    }


def _frame(rows: list[dict[str, Any]], record: dict[str, Any]) -> pd.DataFrame:
    """Rows with what is common to them."""
    import pandas as pd

    return pd.DataFrame(rows).assign(
        **{key: record[key] for key in ("experiment", "profile", "setting", "seed", "status", "weights", "id")},
        frames=record["configuration"]["frames"],
        machine=machine(record["passport"], Setting.parse(record["setting"]).kind),
        torch=record["passport"]["software"]["torch"],
        evaluated=record["looked"]["evaluated"],
        recorded=False,
        final=np.arange(len(rows)) == len(rows) - 1,
    )


def _unpacked(table: pd.DataFrame, record: dict[str, Any]) -> pd.DataFrame:
    """The frame that a file holds, in which the nodes of all probes lie in one list."""
    shape = record["looked"]["probes"], record["looked"]["steps"]
    rows = table.to_dict("records")
    for row in rows:
        row |= {name: np.array(row[name], float).reshape(shape) for name in ("nodes", "node_weights")}
    return _frame(rows, record)
