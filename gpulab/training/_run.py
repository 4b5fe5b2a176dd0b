"""One run: one training, from one seed, under one setting, in this process.

`train` plans the run and looks for it in the store. If it is not there, `train` trains and stores
the result.
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
    """The result of `gpulab.train`: the trained model, the history of its losses, and the record.

    `print(run)` summarises the run in one line. A run of a custom training function has metrics,
    but no model and no data.

    Attributes:
        model: The trained network, on the CPU. None for a custom training function, and for a run
            from a store that kept no weights.
        data: The data that the network was trained on; None for a custom training function.
        columns: The history as an array or a table with the columns `window`, `step`, `loss` and
            `seconds`. `history` returns the same content as a data frame.
        record: The dictionary that a store writes into the run's `run.json`: the arguments, the
            passport of the machine, the command, and the results.
        path: The run's folder in the store; None for a run that was not stored.
        status: How the training ended, `finished` or `diverged`.
        final_loss: The mean loss over the last fifth of the windows. For a custom training function
            it is the number that the function returned as `final_loss`, as `loss`, or without a
            name. NaN if the run diverged or there is no such number.
        heldout_loss: The mean squared error per held-out frame after training. For a custom
            training function it is the number that the function returned under this name. NaN if
            the run diverged or there is no such number.
        metrics: The numbers that a custom training function returned, by name. Empty if the run
            diverged, and for gpulab's own networks.

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

        It has these columns:

        - `window`: The number of the window, from 0.
        - `step`: The number of updates up to the end of the window.
        - `loss`: The mean squared error per frame, averaged over the window.
        - `seconds`: The seconds from the beginning of the training to the end of the window.

        A custom training function has a single row.
        """
        # pandas is imported only when it is needed: loading it takes a third as long as torch.
        import pandas as pd

        return pd.DataFrame(self.columns)

    @torch.no_grad()
    def predict(self) -> tuple[Tensor, Tensor]:
        """Compute the trained model's output on the held-out data, in float32 on the CPU.

        Returns:
            Two tensors of the same shape with numbers in [0, 1], the expected and the computed
            output. For a sequence, the shape is (T, 1, C, H, W). The first tensor has all frames
            but the first, and the other has the prediction of each of them from all frames before
            it. For images, the shape is (N, C, H, W), and the tensors are the images and
            their reconstructions.

        Raises:
            UsageError: If the run has no model: it is a run of a custom training function, or the
                store kept no weights.
            DataError: If the data cannot be read.
        """
        if self.model is None or self.data is None:
            reason = (
                "your own training function gives gpulab no network, and a store keeps weights"
                " only with keep_weights=True"
            )
            raise UsageError(
                f"{self.record['experiment']}: this run has no network to predict with: {reason}"
            )
        model = copy.deepcopy(self.model).float().eval()
        length = self.record["configuration"]["window"]
        # A later window of a sequence begins with the last frame of the window before it, which is
        # dropped here.
        windows = [
            window.frames if window.restart else window.frames[1:]
            for window in self.data.heldout(length)
        ]
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
                f" ({n_later} more windows were computed before this was noticed)"
                if n_later
                else ""
            )
            place = f" at step {step}" if step else ""
            return f"{identity}: diverged{place}{computed}"
        # A training function has metrics, a network has losses.
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

    gpulab trains its own networks (`"autoencoder"`, `"prednet"` and `"whitener"`), or calls a
    custom training function.

    **gpulab's own networks.** The loop goes through the data in windows of frames or images.
    PredNet makes one update for each window of 20 frames, with a batch size of one film, and
    carries its state from window to window. The autoencoder makes one update for each image, the
    whitener one for each 50 images. The optimiser is Adam with learning rate 1e-3, betas 0.9 and
    0.999, and eps 1e-8. The loss is the mean squared error per frame or image, and is recorded for
    each window. If a loss is not finite, the training ends, and the status of the run is
    `diverged`.

    **A custom training function** is a function `train(seed, setting)`, or a string such as
    `"my_training.py:train"`. The protocol above does not apply to it. Arguments are passed by name,
    so the parameters may be in any order:

    - `seed` (required): The seed. The random generators of torch, NumPy and Python are seeded with
      it before the call.
    - `setting` (optional): The `Setting`, which is active during the call. Its attributes
      `setting.device` and `setting.dtype` are the device and the type for tensors. With
      `precision=` it also changes torch's default type, in which random numbers differ: draw
      weights with `dtype=torch.float32` and convert them.
    - Every other parameter is an option and needs a default. If the value of an option is the path
      of a file, the file's content is part of the run's identity. A change in any other file that
      the function reads is not noticed.

    The function returns a number, or a dictionary of numbers by name. A number without a name, or
    one named `loss`, becomes the run's `final_loss`. The run counts as `diverged` if a number is
    not finite, or if the function raises an `ArithmeticError` or a `LinAlgError`.

    **Stores.** With `store`, the finished run is stored in that folder. If the store already has
    the run, it is returned without training, unless `keep_weights` is true and the weights were not
    kept. To train it again, delete its folder or choose another `rerun`. While one of gpulab's own
    networks is trained, a checkpoint is written every ten seconds and on interruption. The same
    call resumes from it.

    Args:
        net: The name of one of gpulab's networks, an instance of one of their classes, or a custom
            training function. The weights of a new network are drawn from `seed`. A network that
            has loaded weights starts from them. A network is copied, and the original is not
            changed.
        data: The data to train on: a name that `gpulab.load` accepts, or loaded data. By default
            the data of the profile.
        setting: Where and how to compute, such as `cuda:tf32=off`.
        seed: The seed of the initial weights and of the order of the images.
        profile: The size of the training, `smoke`, `quick` or `paper`; for PredNet also `motion`.
            It determines the defaults of `data`, `frames`, `learning_rate` and `window`, and of the
            sizes of the network.
        frames: The number of frames or images to train on.
        learning_rate: The learning rate of Adam. By default 1e-3; 3e-3 in the profile `motion`.
        window: The number of frames or images in a window, at least 2. PredNet makes one update for
            each window. By default 20; 200 for the whitener.
        data_options: Options of `gpulab.load`, by name. Only valid if `data` is a name.
        model_options: Options of a network given by name, or of a custom training function. The
            latter may also be given as keyword arguments.
        rerun: The number of the repetition, from 0. A repetition has the same arguments as the
            first run and is stored separately.
        store: The folder in which the run is stored. By default it is not stored.
        keep_weights: Whether the trained weights are stored.
        watch: A function that is called with the model and the number of updates so far, before the
            first update and after each window. Only for gpulab's own networks.
        progress: Whether to show a progress bar. Custom training functions report no progress.
        registered: A file that states the question and the planned analysis and was written before
            the first run, such as those in `data/registered`. Its name and SHA-256 are recorded
            with the run. They are not added to a run that the store already has.
        **factors: Options of a custom training function, or factors of gpulab's own loop. A factor
            may change the arithmetic, but does not change the learning task:

            - `loader`: How frames are copied to the device. `window`: all frames of a window in one
              copy. `reused`: each frame is written into the same NumPy buffer, and the tensor
              shares its memory; on a CPU, later frames therefore overwrite earlier ones. `copied`:
              the same with a copy of the buffer for each frame. `imitated`: the effect of `reused`
              on a CPU is reproduced on any device.
            - `flip`: The number of an initial weight whose last bit is changed.
            - `fast`: Whether gradients may be computed by faster methods, which agree with autograd
              up to rounding. By default this is done for PredNet, unless a guard, a trace or an
              emulation has to see every operation.
            - `draws`: The generator of the initial weights, `cpu` or `device`. The generator of a
              device draws different numbers from the same seed.

    Returns:
        The `Run`, with the trained model, its history and its record.

    Raises:
        UsageError: If arguments are invalid. This is raised before the training begins.
        DataError: If a data file is missing or damaged, or was changed during the training.
        GpulabError: If the setting cannot run on this machine, the store cannot be written, or a
            custom training function raises an error or returns anything but numbers.

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
        raise UsageError("watch is only for gpulab's own networks; leave it out")
    folder = None if store is None else store_folder(store)
    notes = {"command": planned.command()}
    if registered:
        registered_digest = hashlib.sha256(files.read(registered)).hexdigest()
        notes["registered"] = f"{Path(registered).stem} {registered_digest}"
    with planned.activate():
        identity = planned.identity(passport(), is_stored=folder is not None)
        if folder is None:
            record = begin_record(identity, passport(), **notes)
            return _train_planned(planned, record, None, watch, progress)
        checkpoint = folder / WORK_FOLDER / f"{identity.id}.safetensors"
        run = _load_stored(planned, folder, identity, keep_weights)
        if run is None:
            record = begin_record(identity, passport(), **notes)
            run = _train_planned(planned, record, checkpoint, watch, progress)
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
    """Return the stored run; None if there is none, or if it lacks weights that are to be kept.

    In both cases the run is then trained.
    """
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
    """Train, and return the run.

    Args:
        planned: The run, whose setting is active.
        record: The part of the run's record that is known now; the results are added.
        checkpoint: As for `PlannedRun.train`.
        watch: As for `gpulab.train`.
        progress: As for `gpulab.train`.
    """
    outcome = planned.train(checkpoint, watch, progress)
    columns = np.array(outcome.history, HISTORY_DTYPE)
    return Run(outcome.model, outcome.data, columns, record | outcome.results)
