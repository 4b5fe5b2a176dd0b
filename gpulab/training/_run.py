"""One run: one training, from one seed, under one setting, in this process.

`train` plans the run, asks the store whether it is there, trains if it is not, and keeps the
result.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpulab import files
from gpulab.data._base import Data
from gpulab.errors import UsageError
from gpulab.models._base import Trainable
from gpulab.passports import passport
from gpulab.settings import Setting
from gpulab.store._run_identity import Identity
from gpulab.store._run_store import (
    WORK_FOLDER,
    History,
    begin_record,
    find_run,
    store_folder,
    write_run,
)
from gpulab.training._functions import TrainingFunction
from gpulab.training._planned_run import PlannedRun, Watch
from gpulab.training._planning import plan_run

if TYPE_CHECKING:
    import pandas as pd

HISTORY_DTYPE = np.dtype(
    [("window", "int64"), ("step", "int64"), ("loss", "float64"), ("seconds", "float32")]
)  # the fields of a `WindowRecord`


@dataclass
class Run:
    """The result of `gpulab.train`: the trained model, the losses along the way, and the record.

    `print(run)` says it in one line.

    Attributes:
        model: The network on the CPU, as it was trained. None for a training of your own, and where
            the run comes from a store that kept no weights.
        data: What the network learned from; None for a training of your own.
        columns: The history as a table of `window`, `step`, `loss` and `seconds`; see `history`.
        record: Everything that a store writes into the run's `run.json`, as a dictionary: what was
            asked for, the passport of the machine, the command, and the results.
        path: The run's folder in the store; None where it was not kept.
        status: How the training ended, `finished` or `diverged`.
        final_loss: The mean of the loss over the last fifth of the windows; NaN when the run
            diverged. For a training of your own it is what that gave under the name `final_loss` or
            `loss`, or without a name, else NaN.
        heldout_loss: The mean squared error per held-out frame after training; NaN when the run
            diverged. For a training of your own it is what that gave under this name, else NaN.
        metrics: The numbers that a training of your own gave, by name; empty when it diverged, and
            for gpulab's networks.

    Examples:
        >>> import gpulab as gl
        >>> run = gl.train("autoencoder", profile="smoke", progress=False)
        >>> list(run.history)
        ['window', 'step', 'loss', 'seconds']
        >>> images, reconstructions = run.predict()
        >>> reconstructions.shape
        torch.Size([297, 1, 28, 28])
    """

    model: Trainable | None
    data: Data | None
    columns: History
    record: Mapping[str, Any]
    path: Path | None = None

    def __post_init__(self) -> None:
        self.status: str = self.record["status"]
        self.metrics: dict[str, float] = self.record.get("metrics") or {}
        # In a record a loss that is NaN is None, because JSON has no NaN.
        losses = (self.record["summary"][name] for name in ("final_loss", "heldout_loss"))
        self.final_loss, self.heldout_loss = (math.nan if loss is None else loss for loss in losses)

    @functools.cached_property
    def history(self) -> pd.DataFrame:
        """A data frame with a row for each window.

        Its columns are `window` (from 0), `step` (updates so far), `loss` (the mean squared error
        per frame, averaged over the window) and `seconds` (since the beginning). A training of your
        own has a single row.
        """
        # pandas is imported only when it is needed: loading it takes a third as long as torch.
        import pandas as pd

        return pd.DataFrame(self.columns)

    @torch.no_grad()
    def predict(self) -> tuple[Tensor, Tensor]:
        """Compute the trained model's output on the held-out data, in float32 on the CPU.

        Returns:
            Two tensors of numbers in [0, 1]. For a sequence both have the shape (T, 1, C, H, W) and
            are the frames from the second on, and the prediction of each from the frames before it.
            For images both have the shape (N, C, H, W) and are the images, and their
            reconstructions.

        Raises:
            UsageError: For a run of a training of your own, whose network gpulab does not have, and
                for one whose weights the store did not keep.
            DataError: For data that cannot be read.
        """
        if self.model is None or self.data is None:
            reason = (
                "gpulab does not know that of your own function, and a store keeps one only with"
                " keep_weights=True"
            )
            raise UsageError(
                f"{self.record['experiment']}: no network is left to predict: {reason}"
            )
        model = copy.deepcopy(self.model).float().eval()
        length = self.record["configuration"]["window"]
        windows = [w.frames if w.restart else w.frames[1:] for w in self.data.heldout(length)]
        inputs = torch.from_numpy(np.concatenate(windows)).float().div(255)
        if not self.data.sequential:
            return inputs, model(inputs)
        predicted, _ = model(inputs[:-1, None])
        return inputs[1:, None], predicted

    def __repr__(self) -> str:
        record = self.record
        summary = record["summary"]
        identity = f"{record['experiment']} under {record['setting']}, seed {record['seed']}"
        if self.status == "diverged":
            step = record.get("diverged_at")  # a function does not say
            n_later = record.get("windows_after_divergence")
            computed = (
                f" ({n_later} more windows were computed before it was noticed)" if n_later else ""
            )
            place = f" at step {step}" if step else ""
            return f"{identity}: diverged{place}{computed}"
        numbers = [f"{name} {value:.5g}" for name, value in self.metrics.items()]
        losses = [f"final loss {self.final_loss:.5f}, held out {self.heldout_loss:.5f}"]
        speed = (
            f" ({summary['frames_per_second']:.0f} frames/s)"
            if summary.get("frames_per_second")
            else ""
        )
        return f"{identity}: {', '.join(numbers or losses)}, {summary['seconds']:.1f} s{speed}"


def train(
    net: Trainable | TrainingFunction | Callable[..., Any] | str,
    data: Data | str | None = None,
    setting: Setting | str = "cpu",
    seed: int = 0,
    profile: str = "quick",
    *,
    frames: int | None = None,
    learning_rate: float | None = None,
    window: int | None = None,
    data_options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    rerun: int = 0,
    store: str | Path | None = None,
    keep_weights: bool = True,
    watch: Watch | None = None,
    progress: bool = True,
    registered: str | Path | None = None,
    **factors: Any,
) -> Run:
    """Train a copy of a network from one seed under one setting, and return the run.

    gpulab's own networks, `"autoencoder"`, `"prednet"` and `"whitener"`, are trained by gpulab's
    own loop. It goes through the data in windows of frames or images. PredNet has one update for
    each window of 20 frames, a batch of one film, and carries its state from window to window. The
    autoencoder has one update for each image, the whitener one for 50 images. The optimiser is Adam
    with learning rate 1e-3, beta 0.9 and 0.999, and eps 1e-8. The loss is noted for each window, as
    the mean squared error per frame or image. `final_loss` is the mean over the last fifth of the
    windows. A loss that is not finite ends the run, whose status is then `diverged`.

    A training of your own is a function `train(seed, setting)`, or the text
    `"my_training.py:train"`. Nothing of the protocol above is used for it. It is called by the
    names of its parameters, which may stand in any order:

    - `seed`: Torch's, NumPy's and Python's random numbers are drawn from it already.
    - `setting`, if wanted: The `Setting` that is in force already, with `setting.device` and
      `setting.dtype`.
    - Every other parameter is an option and needs a default. Where the value of an option names a
      file, the file's content is part of what identifies the run. A change in any other file that
      the function opens is not noticed.

    The function returns a number, or a dictionary of numbers by name. A number without a name, or
    one named `loss`, is the run's `final_loss`. A number that is not finite, an `ArithmeticError`
    or a `LinAlgError` makes the run one that `diverged`.

    With a `store`, the finished run is kept there. Training of gpulab's own networks leaves a
    checkpoint there every ten seconds, and when it is interrupted; asked for again, it goes on from
    that. A run that the store has already is returned without training, unless `keep_weights` asks
    for weights that were not kept. To train one again, delete its folder, or give another `rerun`.

    Args:
        net: A name or module as above, or a training of your own. The weights of a fresh network
            are drawn from `seed`; a network that holds loaded weights starts from those. A module
            is copied and itself left as it was.
        data: What to learn from: a name that `gpulab.load` knows, or loaded data. By default the
            profile says.
        setting: Where and how to compute, such as `cuda:tf32=off`.
        seed: What the initial weights and the order of images are drawn from.
        profile: How long to train, on what, and with which sizes, where the other arguments do not
            say: `smoke`, `quick` or `paper`; for PredNet also `motion`.
        frames: How many frames or images to train on. By default the profile says.
        learning_rate: Adam's. By default the profile says: 1e-3, and 3e-3 in `motion`.
        window: How many frames or images a window has, from 2; for PredNet these give one update.
            By default the profile says: 20, and 200 for the whitener.
        data_options: Options of `gpulab.load`, by name, for data that are named.
        model_options: Options of a network that is named, or of a training of your own. The latter
            can also be given as keywords of this function.
        rerun: The number of this repetition, from 0: the same run again, kept beside the first.
        store: A folder in which runs are kept. By default nothing is kept.
        keep_weights: Whether the store keeps the trained weights.
        watch: A function that is called with the model and the number of updates, before the first
            update and after each window. For gpulab's own loop in this process only.
        progress: Whether to show a progress bar. Custom training functions report no progress.
        registered: A file that was written before the first run and says what is asked, and how it
            will be answered, such as those in `data/registered`. Its name and SHA-256 are noted in
            the record of a run that is made now, not of one that the store has already.
        **factors: Options of your own training. Or, of gpulab's own loop, what a device may do in
            another way while what is to be learned stays the same:

            - `loader`: How frames reach the device. `window`: a whole window in one copy.
                `reused`: frame by frame, each written into one NumPy buffer, which is wrapped; a
                CPU goes on using that buffer. `copied`: the same, with a copy of the buffer.
                `imitated`: what `reused` does on a CPU, on any device.
            - `flip`: The number of the initial weight whose last bit is changed.
            - `fast`: False has autograd compute every gradient. By default PredNet's gradient is
              computed in fewer operations, equal up to rounding, unless a guard, a trace or an
              emulation has to see each of them.
            - `draws`: Whose generator draws the initial weights: `cpu`, or `device`, which gives
              other numbers from the same seed.

    Returns:
        The `Run`, with the trained model, its history and its record.

    Raises:
        UsageError: For arguments that make no sense, before anything is trained.
        DataError: For a file of the data that is missing, damaged, or changed during the training.
        GpulabError: For a setting that cannot run here, or a store that cannot be written. Also
            where a function of your own raises, or gives something else than numbers.

    Examples:
        >>> import gpulab as gl
        >>> run = gl.train("autoencoder", profile="smoke", progress=False)
        >>> run.status, len(run.history)
        ('finished', 20)
        >>> gl.train(
        ...     lambda seed, power=1: (seed + 1) ** -power, seed=1, power=2, progress=False
        ... ).final_loss
        0.25

    References:
        Lotter, Kreiman, Cox 2016, *Deep predictive coding networks* (arXiv 1605.08104), for
        PredNet; Pietrowski et al. 2021, *Impact of GPU uncertainty on the training of predictive
        deep neural networks* (arXiv 2109.01451), for its protocol; Kingma, Ba 2014, *Adam: a method
        for stochastic optimization* (arXiv 1412.6980).
    """
    planned = plan_run(
        net,
        data,
        setting,
        seed,
        profile,
        frames=frames,
        learning_rate=learning_rate,
        window=window,
        data_options=data_options,
        model_options=model_options,
        rerun=rerun,
        **factors,
    )
    if watch is not None and not planned.can_be_watched:
        raise UsageError("watch goes with gpulab's own networks")
    folder = None if store is None else store_folder(store)
    notes = {"command": planned.command()}
    if registered:
        notes["registered"] = (
            f"{Path(registered).stem} {hashlib.sha256(files.read(registered)).hexdigest()}"
        )
    with planned.activate():
        identity = planned.identity(passport(), is_stored=folder is not None)
        if folder is None:
            return _train_planned(
                planned, begin_record(identity, passport(), **notes), None, watch, progress
            )
        checkpoint = folder / WORK_FOLDER / f"{identity.id}.safetensors"
        run = _load_stored(planned, folder, identity, keep_weights)
        if run is None:
            run = _train_planned(
                planned, begin_record(identity, passport(), **notes), checkpoint, watch, progress
            )
            weights = run.model.state_dict() if keep_weights and run.model else None
            run.path = write_run(folder, run.record, run.columns, weights)
    # The run is stored. A checkpoint may remain from this training, or from an earlier one that was
    # killed after it had stored the run.
    with files.convert_write_errors(checkpoint):
        checkpoint.unlink(missing_ok=True)
    return run


def _load_stored(
    planned: PlannedRun, folder: Path, identity: Identity, keep_weights: bool
) -> Run | None:
    """Return the stored run; None if there is none, or if it lacks weights that are to be kept."""
    stored = find_run(folder, identity)
    restored_run = planned.restore(stored, keep_weights) if stored else None
    if stored is None or restored_run is None:
        return None
    return Run(
        restored_run.model, restored_run.data, stored.history, stored.record, folder / identity.id
    )


def _train_planned(
    planned: PlannedRun,
    record: dict[str, Any],
    checkpoint: Path | None,
    watch: Watch | None,
    progress: bool,
) -> Run:
    """Train, and return the run, whose record is `record` with the results added."""
    outcome = planned.train(checkpoint, watch, progress)
    columns = np.array(outcome.history, HISTORY_DTYPE)
    return Run(outcome.model, outcome.data, columns, record | outcome.results)
