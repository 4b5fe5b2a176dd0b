"""The curvature of a loss during training: how many directions lead down, and how steeply.

The networks are trained under different settings. The measurement is the same for all of them: the
Hessian of one fixed batch, in float32 without TF32, on the device used for training. The method is
that of Dauphin, Pascanu, Gulcehre, Cho, Ganguli, Bengio 2014, *Identifying and attacking the saddle
point problem* (arXiv 1406.2572).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpulab.data._feed import Loader
from gpulab.errors import UsageError, check_count
from gpulab.models._base import Trainable
from gpulab.passports import machine, passport
from gpulab.report import Progress
from gpulab.saddles._hessian import hessian
from gpulab.saddles._spectrum import ZERO_SHARE, spectral_density
from gpulab.settings import Setting
from gpulab.store import _run_identity as identities
from gpulab.store.recorded import read_table, read_tables, recorded_folder, write_table
from gpulab.training._networks import NetworkRun
from gpulab.training._run import Run, train

if TYPE_CHECKING:
    import pandas as pd

# The setting under which the Hessian is computed, by the kind of device. With one thread, the bits
# are the same on every CPU with the same instructions, and nothing waits for a busy second core.
INSTRUMENT_SETTINGS = {"cpu": "{}:threads=1", "cuda": "{}:tf32=off"}
# The size of the batch whose Hessian is computed.
SEQUENCE_BATCH_FRAMES = 10
IMAGE_BATCH_FRAMES = 200
MEASUREMENTS = ("loss", "index_fraction", "index_error", "zero_fraction", "smallest", "largest")
SPECTRUM_COLUMNS = ("nodes", "node_weights")  # arrays (probes, steps); flat lists in files


def curvature_along(
    net: str = "autoencoder",
    *,
    setting: str | Iterable[str] = "cpu",
    seeds: int | Iterable[int] = 3,
    profile: str = "quick",
    snapshots: int = 5,
    probes: int = 4,
    steps: int = 60,
    store: str | Path | None = None,
    command: str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Train a network from several seeds and settings, and measure the curvature of its loss.

    The curvature is measured at logarithmically spaced steps, from before the first update to the
    end of the training. Each measurement is the spectrum of the Hessian of the training's objective
    on one fixed batch: 200 training images, or the first 10 training frames, for which the network
    starts from an empty state. (PredNet's objective is the sum over the frames.) All measurements
    are made in float32, on the device used for training, with one thread on a CPU and without TF32
    on a GPU, so they do not depend on the setting of the training.

    Args:
        net: The name of the network: `autoencoder`, `prednet` or `whitener`.
        setting: One setting to train under, or several, such as `["cpu", "cpu:precision=float64"]`.
        seeds: The seeds to train from, or their number: 3 means 0, 1 and 2.
        profile: The size of the training: `smoke`, `quick` or `paper`, as for `gpulab.train`.
        snapshots: The number of measurements. Measurements that fall on the same step are made only
            once. If the number is 1, the measurement is made at the end of the training.
        probes: The number of random vectors of `gpulab.saddles.spectral_density`.
        steps: The number of Lanczos steps from each random vector.
        store: A folder for the measurements. A training run whose measurements are already in the
            folder is not repeated.
        command: The command that makes the measurements, to be recorded with them.
        progress: Whether to show a progress bar.

    Returns:
        A data frame with a row for each setting, seed and snapshot.

        - The training: `experiment` (the network), `profile`, `frames`, `setting`, `seed`,
          `machine`, `id`, `weights` (the SHA-256 of the trained weights), `status` (`finished` or
          `diverged`), `recorded` (False).
        - The snapshot: `step` (updates so far); `final`, whether it is the training's last row.
          `gpulab.verdict` takes `frame[frame.final]`.
        - The batch: `loss`, the mean squared error per frame or image.
        - The Hessian: `size`, the number of its rows; `smallest` and `largest`, the outermost
          nodes of its spectrum; `index_fraction`, the share of eigenvalues below −1e-2 of the
          largest |λ|, with its standard error `index_error`; `zero_fraction`, the share of those
          closer to zero; `nodes` and `node_weights`, the estimated spectrum, arrays (probes,
          steps).

        The last row of a training run that diverged has no numbers, and its `size` is 0.

    Raises:
        UsageError: If the network, the profile or a setting is unknown, if no setting or no seed is
            given, or if numbers are not positive integers.
        DataError: If a file in the store is damaged. The message names it.
        GpulabError: If a setting cannot run on this machine.

    Examples:
        >>> import gpulab as gl
        >>> small = {"profile": "smoke", "seeds": 1, "snapshots": 2, "steps": 5}
        >>> frame = gl.saddles.curvature_along("autoencoder", **small, progress=False)
        >>> len(frame), bool((frame.largest > 0).all())
        (2, True)

    References:
        Dauphin, Pascanu, Gulcehre, Cho, Ganguli, Bengio 2014, *Identifying and attacking the saddle
        point problem* (arXiv 1406.2572).
    """
    import pandas as pd

    settings = [setting] if isinstance(setting, str) else setting
    trainings = list(itertools.product(settings, range(seeds) if isinstance(seeds, int) else seeds))
    if not trainings:
        raise UsageError(
            f"setting={setting!r}, seeds={seeds!r}: expected at least one setting and one seed"
        )
    options = {"snapshots": snapshots, "probes": probes, "steps": steps}
    for name, value in options.items():
        check_count(name, value)
    tables = []
    for text, seed in Progress(trainings, unit="training", leave=False, disable=not progress):
        with torch.random.fork_rng(devices=[]):
            planned = NetworkRun.plan(net, setting=text, seed=seed, profile=profile)
        batch_size = SEQUENCE_BATCH_FRAMES if planned.data.sequential else IMAGE_BATCH_FRAMES
        measurement = options | {"evaluated": batch_size}
        tables.append(_curvature_of_training(planned, measurement, store, command))
    return pd.concat(tables, ignore_index=True)


def recorded_curvature() -> pd.DataFrame:
    """Load the curvatures along training runs that were recorded elsewhere and ship with gpulab.

    The files are in `data/saddles/curvature`.

    Returns:
        A data frame like that of `gpulab.saddles.curvature_along`, in which `recorded` is True.

    Examples:
        >>> import gpulab as gl
        >>> bool(gl.saddles.recorded_curvature().recorded.all())
        True
    """
    import pandas as pd

    frames = [_frame(*stored) for stored in read_tables(recorded_folder("saddles") / "curvature")]
    return pd.concat(frames, ignore_index=True).assign(recorded=True)


def _curvature_of_training(
    planned: NetworkRun, measuring: dict[str, int], store: str | Path | None, command: str | None
) -> pd.DataFrame:
    """Return the rows of one training run: stored ones if there are any, otherwise new ones.

    Args:
        planned: The training run.
        measuring: The numbers of snapshots, probes, Lanczos steps and evaluated examples.
        store: The folder for the measurements; None to store nothing.
        command: The command to record.
    """
    machine_passport = passport()
    planned.draw_weights()  # The identity of a run includes its initial weights.
    run_identity = planned.identity(machine_passport).record
    # The measurements have an id of their own. It also depends on how they are made, which files
    # store under the key `looked`.
    identity = {**run_identity, "id": identities.run_id({**run_identity, "looked": measuring})}
    file = None if store is None else Path(store) / f"{identity['id']}.parquet"
    if file is not None and file.is_file():
        return _frame(*read_table(file))
    table, run = _train_and_measure(planned, measuring)
    record = {
        **identity,
        "looked": measuring,
        "tolerance": ZERO_SHARE,
        "status": run.status,
        "command": command,
        "passport": dict(machine_passport),
        "weights": run.record["summary"]["weights"],
    }
    if file is not None:
        write_table(file, table, record)
    return _frame(table, record)


def _train_and_measure(planned: NetworkRun, measuring: dict[str, int]) -> tuple[pd.DataFrame, Run]:
    """Train and measure the snapshots; return a row for each, as stored in files, and the run.

    Snapshots with a weight that is not finite are left out. The last row of a run that diverged has
    no numbers.
    """
    import pandas as pd

    window_count = 1 + planned.frames // planned.window
    # `watch` is called before the first window and after each window. A moment is the number of a
    # call, counted from 0. Moments are spaced from the end to the start, so a single moment is the
    # end of the training.
    moments = set(np.geomspace(window_count, 1, measuring["snapshots"]).round() - 1)
    watch_count = itertools.count()
    snapshots: dict[int, dict[str, Tensor]] = {}  # weights, by the number of updates

    def watch(model: Trainable, step: int) -> None:
        """Copy the weights if this call is one of the moments and all weights are finite."""
        if next(watch_count) in moments:
            copies = {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in model.state_dict().items()
            }
            if all(tensor.isfinite().all() for tensor in copies.values()):
                snapshots[step] = copies

    arguments = planned.experiment, planned.data, planned.setting, planned.seed, planned.profile
    run = train(*arguments, frames=planned.frames, watch=watch, progress=False)
    rows = [
        {"step": step, **_measure(planned, snapshot, measuring)}
        for step, snapshot in snapshots.items()
    ]
    if run.status == "diverged":
        rows.append({"step": run.record["diverged_at"], "size": 0})  # without numbers
    return pd.DataFrame(rows, columns=["step", "size", *MEASUREMENTS, *SPECTRUM_COLUMNS]), run


def _measure(
    planned: NetworkRun, state: dict[str, Tensor], measuring: dict[str, int]
) -> dict[str, float | np.ndarray]:
    """Measure the loss and the spectrum of its Hessian at these weights."""
    device = planned.setting.device
    setting_template = INSTRUMENT_SETTINGS.get(planned.setting.kind, "{}")
    with Setting.parse(setting_template.format(device)).apply() as instrument:
        model = planned.model.to(device, torch.float32)
        # The network's own `load_state_dict` would also make a later training start from these.
        torch.nn.Module.load_state_dict(model, state)
        first_window = next(planned.data.windows(measuring["evaluated"], seed=0))
        batch = Loader("window", instrument).window(first_window.frames)
        if model.sequential:
            batch = next(iter(model.batches(batch)))  # all frames of the window are one batch

        def objective() -> Tensor:
            """Compute the objective of the training on this batch, from an empty state."""
            loss, _example_losses, _state = model.training_loss(batch, None)
            return loss

        H = hessian(model, objective)
        with torch.no_grad():
            _loss, example_losses, _state = model.training_loss(batch, None)
        spectrum = spectral_density(
            H, probes=measuring["probes"], steps=measuring["steps"], progress=False
        )
    index = spectrum.index()
    smallest, largest = spectrum.extremes
    return {
        "loss": float(example_losses.double().mean()),
        "index_fraction": index.value / index.size,
        "index_error": index.error / index.size,
        "zero_fraction": index.zero / index.size,
        "smallest": smallest,
        "largest": largest,
        "size": spectrum.size,
        "nodes": spectrum.nodes.ravel(),
        "node_weights": spectrum.weights.ravel(),
    }


# `Any`, because a record is JSON from a file.
def _frame(table: pd.DataFrame, record: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of a stored training, with the columns that its record holds for all rows."""
    shape = record["looked"]["probes"], record["looked"]["steps"]
    # Files hold the spectra as flat lists. `np.resize` also turns the missing value of a run that
    # diverged into an array of this shape.
    spectra = {
        name: [np.resize(row, shape).astype(float) for row in table[name]]
        for name in SPECTRUM_COLUMNS
    }
    names = ("experiment", "profile", "setting", "seed", "status", "weights", "id")
    return table.assign(
        **spectra,
        **{name: record[name] for name in names},
        frames=record["configuration"]["frames"],
        machine=machine(record["passport"], Setting.parse(record["setting"]).kind),
        recorded=False,
        final=np.arange(len(table)) == len(table) - 1,
    )
