"""One run: one training, from one seed, under one setting, in this process. `train` is all of it on a page.

It asks the store whether the run is there, goes around the loop with checkpoints, progress and interruptions, and keeps
what came of it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gpulab import files
from gpulab.data.base import Data, Window
from gpulab.data.feed import Feed, Loader, ahead, has_its_device_alone
from gpulab.errors import DataError, UsageError
from gpulab.models.base import Trainable
from gpulab.passports import passport
from gpulab.report import Progress
from gpulab.settings import Setting
from gpulab.store import runs as stores
from gpulab.store.identities import Identity, weights_digest
from gpulab.store.tensors import read_tensors, write_tensors
from gpulab.training import loop
from gpulab.training.functions import TrainingFunction
from gpulab.training.profiles import LAST_FIFTH
from gpulab.training.spec import RunSpec

if TYPE_CHECKING:
    import pandas as pd

CHECKPOINT_SECONDS = 10.0  # between two checkpoints of a run
LOOK_SECONDS = 0.1  # between two looks at the losses that a GPU computes, where nobody watches every window
HISTORY = np.dtype([("window", "int64"), ("step", "int64"), ("loss", "float64"), ("seconds", "float32")])  # of notes
Watch = Callable[[Trainable, int], None]  # called with the model and the number of updates


@dataclass
class Run:
    """What one training left: the model, the losses along the way, and the record. `gpulab.train` returns it.

    `print(run)` says it in one line.

    Attributes:
        model: The network on the CPU, as it was trained. None for a training of your own, and where the run comes from
            a store that kept no weights.
        data: What the network learned from; None for a training of your own.
        columns: The history as a table of `window`, `step`, `loss` and `seconds`; see `history`.
        record: Everything that a store writes into the run's `run.json`, as a dictionary: what was asked for, the
            passport of the machine, the command, and the results.
        path: The run's folder in the store; None where it was not kept.
        status: How the training ended, `finished` or `diverged`.
        final_loss: The mean of the loss over the last fifth of the windows; NaN when the run diverged. For a training
            of your own it is what that gave under the name `final_loss` or `loss`, or without a name, else NaN.
        heldout_loss: The mean squared error per held-out frame after training; NaN when the run diverged. For a
            training of your own it is what that gave under this name, else NaN.
        metrics: The numbers that a training of your own gave, by name; empty when it diverged, and for gpulab's
            networks.

    Examples:
        >>> import gpulab as gl
        >>> run = gl.train("autoencoder", profile="smoke", progress=False)
        >>> list(run.history)
        ['window', 'step', 'loss', 'seconds']
        >>> images, reconstructions = run.predict()
        >>> reconstructions.shape
        torch.Size([297, 1, 28, 28])
    """

    model: Any
    data: Any
    columns: stores.History
    record: dict[str, Any]
    path: Path | None = None

    def __post_init__(self) -> None:
        self.status: str = self.record["status"]
        self.metrics: dict[str, float] = self.record.get("metrics") or {}
        losses = (self.record["summary"][name] for name in ("final_loss", "heldout_loss"))  # without NaN, as in JSON
        self.final_loss, self.heldout_loss = (math.nan if loss is None else loss for loss in losses)

    @functools.cached_property
    def history(self) -> pd.DataFrame:
        """A data frame with a row for each window.

        Its columns are `window` (from 0), `step` (updates so far), `loss` (the mean squared error per frame, averaged
        over the window) and `seconds` (since the beginning). A training of your own has a single row.
        """
        import pandas as pd  # not for every process that trains: it takes a third of the time that torch takes to load

        return pd.DataFrame(self.columns)

    @torch.no_grad()
    def predict(self) -> tuple[Tensor, Tensor]:
        """Compute what the trained model makes of the held-out part of the data, in float32 on the CPU.

        Returns:
            Two tensors of numbers in [0, 1]. For a sequence both have the shape (T, 1, C, H, W) and are the frames from
            the second on, and the prediction of each from the frames before it. For images both have the shape (N, C,
            H, W) and are the images, and their reconstructions.

        Raises:
            UsageError: For a run of a training of your own, whose network gpulab does not have, and for one whose
                weights the store did not keep.
            DataError: For data that cannot be read.
        """
        if self.model is None:
            known = "gpulab does not know that of your own function, and a store keeps one only with keep_weights=True"
            raise UsageError(f"{self.record['experiment']}: no network is left to predict: {known}")
        model = copy.deepcopy(self.model).float().eval()
        length = self.record["configuration"]["window"]
        pieces = [w.frames if w.restart else w.frames[1:] for w in self.data.heldout(length)]
        inputs = torch.from_numpy(np.concatenate(pieces)).float().div(255)
        if not self.data.sequential:
            return inputs, model(inputs)
        predicted, _ = model(inputs[:-1, None])
        return inputs[1:, None], predicted

    def __repr__(self) -> str:
        record, summary = self.record, self.record["summary"]
        where = f"{record['experiment']} under {record['setting']}, seed {record['seed']}"
        if self.status == "diverged":
            step = record.get("diverged_at")  # a function does not say
            return f"{where}: diverged{f' at step {step}' if step else ''}"
        numbers = [f"{name} {value:.5g}" for name, value in self.metrics.items()]
        usual = [f"final loss {self.final_loss:.5f}, held out {self.heldout_loss:.5f}"]
        speed = f" ({summary['frames_per_second']:.0f} frames/s)" if summary.get("frames_per_second") else ""
        return f"{where}: {', '.join(numbers or usual)}, {summary['seconds']:.1f} s{speed}"


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

    gpulab's own networks, `"autoencoder"`, `"prednet"` and `"whitener"`, are trained by gpulab's own loop. It goes
    through the data in windows of frames or images. PredNet has one update for each window of 20 frames, a batch of one
    film, and carries its state from window to window. The autoencoder has one update for each image, the whitener one
    for 50 images. The optimiser is Adam with learning rate 1e-3, beta 0.9 and 0.999, and eps 1e-8. The loss is noted
    for each window, as the mean squared error per frame or image. `final_loss` is the mean over the last fifth of the
    windows. A loss that is not finite ends the run, whose status is then `diverged`.

    A training of your own is a function `train(seed, setting)`, or the text `"my_training.py:train"`. Nothing of the
    protocol above is used for it. It is called by the names of its parameters, which may stand in any order:

    - `seed`: Torch's, NumPy's and Python's random numbers are drawn from it already.
    - `setting`, if wanted: The `Setting` that is in force already, with `setting.device` and `setting.dtype`.
    - Every other parameter is an option and needs a default. Where the value of an option names a file, the file's
      content is part of what identifies the run. A change in any other file that the function opens is not noticed.

    The function returns a number, or a dictionary of numbers by name. A number without a name, or one named `loss`, is
    the run's `final_loss`. A number that is not finite, an `ArithmeticError` or a `LinAlgError` makes the run one that
    `diverged`.

    With a `store`, the finished run is kept there. Training of gpulab's own networks leaves a checkpoint there every
    ten seconds, and when it is interrupted; asked for again, it goes on from that. A run that the store has already is
    returned without training, unless `keep_weights` asks for weights that were not kept. To train one again, delete
    its folder, or give another `rerun`.

    Args:
        net: A name or module as above, or a training of your own. The weights of a fresh network are drawn from `seed`;
            a network that holds loaded weights starts from those. A module is copied and itself left as it was.
        data: What to learn from: a name that `gpulab.load` knows, or loaded data. By default the profile says.
        setting: Where and how to compute, such as `cuda:tf32=off`.
        seed: What the initial weights and the order of images are drawn from.
        profile: How long to train, on what, and with which sizes, where the other arguments do not say: `smoke`,
            `quick` or `paper`; for PredNet also `motion`.
        frames: How many frames or images to train on. By default the profile says.
        learning_rate: Adam's. By default the profile says: 1e-3, and 3e-3 in `motion`.
        window: How many frames or images a window has, from 2; for PredNet these give one update. By default the
            profile says: 20, and 200 for the whitener.
        data_options: Options of `gpulab.load`, by name, for data that are named.
        model_options: Options of a network that is named, or of a training of your own. The latter can also be given as
            keywords of this function.
        rerun: The number of this repetition, from 0: the same run again, kept beside the first.
        store: A folder in which runs are kept. By default nothing is kept.
        keep_weights: Whether the store keeps the trained weights.
        watch: A function that is called with the model and the number of updates, before the first update and after
            each window. For gpulab's own loop in this process only.
        progress: Whether to show a progress bar. Of a training of your own nobody knows how far it is.
        registered: A file that was written before the first run and says what is asked, and how it will be answered,
            such as those in `data/registered`. Its name and SHA-256 are noted in the record of a run that is made now,
            not of one that the store has already.
        **factors: Options of your own training. Or, of gpulab's own loop, what a device may do in another way while
            what is to be learned stays the same:

            - `loader`: How frames reach the device: `window`, `copied`, `reused` or `imitated`; see `gpulab.data.feed`.
            - `flip`: The number of the initial weight whose last bit is changed.
            - `fast`: False has autograd compute every gradient. By default PredNet's gradient is computed in fewer
              operations, equal up to rounding, unless a guard, a trace or an emulation has to see each of them.
            - `draws`: Whose generator draws the initial weights: `cpu`, or `device`, which gives other numbers from the
              same seed.

    Returns:
        The `Run`, with the trained model, its history and its record.

    Raises:
        UsageError: For arguments that make no sense, before anything is trained.
        DataError: For a file of the data that is missing, damaged, or changed during the training.
        GpulabError: For a setting that cannot run here, or a store that cannot be written. Also where a function of
            your own raises, or gives something else than numbers.

    Examples:
        >>> import gpulab as gl
        >>> run = gl.train("autoencoder", profile="smoke", progress=False)
        >>> run.status, len(run.history)
        ('finished', 20)
        >>> gl.train(lambda seed, power=1: (seed + 1) ** -power, seed=1, power=2, progress=False).final_loss
        0.25

    References:
        Lotter, Kreiman, Cox 2016, *Deep predictive coding networks* (arXiv 1605.08104), for PredNet; Pietrowski et al.
        2021, *Impact of GPU uncertainty on the training of predictive deep neural networks* (arXiv 2109.01451), for its
        protocol; Kingma, Ba 2014, *Adam: a method for stochastic optimization* (arXiv 1412.6980).
    """
    length = {"frames": frames, "window": window, "learning_rate": learning_rate}
    options = {"data_options": data_options, "model_options": model_options}
    spec = RunSpec.of(net, setting, seed, profile, data=data, rerun=rerun, **length, **options, **factors)
    if spec.function and watch:
        raise UsageError("watch goes with gpulab's own networks")
    folder = None if store is None else stores.store_folder(store)
    notes = {"command": spec.command()}
    if registered:
        notes["registered"] = f"{Path(registered).stem} {hashlib.sha256(files.read(registered)).hexdigest()}"
    with spec.in_force():
        identity = spec.identity(passport(), kept=folder is not None)
        checkpoint = folder and folder / stores.WORK / f"{identity.id}.safetensors"
        run = stored_run(spec, folder, identity, keep_weights) if folder else None
        if run is None:
            record = stores.begin_record(identity, passport(), **notes)
            if spec.function:
                end, history = spec.function.train(spec.asked["option"], spec.setting, spec.seed)
            else:
                end, history = train_network(spec, checkpoint, watch, progress)
            run = Run(spec.model and spec.model.cpu(), spec.data, np.array(history, HISTORY), record | end)
            if folder:
                weights = run.model.state_dict() if keep_weights and run.model else None
                run.path = stores.write_run(folder, run.record, run.columns, weights)
    if checkpoint:  # of a run that is kept now, or was when its process was killed before this
        with files.writing(checkpoint):
            checkpoint.unlink(missing_ok=True)
    return run


def stored_run(spec: RunSpec, folder: Path, identity: Identity, keep_weights: bool) -> Run | None:
    """The run as the store has it; None where it has none, or none with weights that are to be kept."""
    existing = stores.find_run(folder, identity)
    if existing is None or (existing[2] is None and spec.model and keep_weights):
        return None
    record, columns, weights = existing
    if weights:
        spec.model.to(dtype=spec.setting.dtype).load_state_dict(weights)
    return Run(spec.model if weights else None, spec.data, columns, record, folder / identity.id)


def train_network(
    spec: RunSpec, checkpoint: Path | None, watch: Watch | None, progress: bool
) -> tuple[dict[str, Any], list[loop.WindowNote]]:
    """Train as specified, `spec.in_force`.

    Args:
        spec: What to train.
        checkpoint: The file in which it is kept meanwhile; where it is there already, the training goes on from it.
        watch, progress: As of `gpulab.train`.

    Returns:
        What the record says of the end, and the history.
    """
    training, saved = set_up(spec), time.monotonic()
    end = {"resumed_at": len(training.history)} if resume_checkpoint(training, checkpoint) else {}
    training.look_every = LOOK_SECONDS if watch is None and spec.setting.kind != "cpu" else 0.0
    watch = watch or (lambda *_: None)
    total = spec.frames // spec.window * spec.window
    with Progress(total=total, unit="frame", leave=False, disable=not progress) as bar:

        def after_window() -> None:
            nonlocal saved
            bar.set_postfix(loss=f"{training.history[-1].loss:.3g}", refresh=False)
            bar.update(len(training.history) * spec.window - bar.n)
            watch(training.model, training.step)
            if time.monotonic() - saved >= CHECKPOINT_SECONDS:
                save_checkpoint(training, checkpoint)
                saved = time.monotonic()

        watch(training.model, training.step)
        try:
            loop.train(training, windows(spec, training), engine_of(spec, training), after_window)
        except KeyboardInterrupt:
            save_checkpoint(training, checkpoint)
            raise
    end |= outcome(spec, training)
    spec.data.check_unchanged()
    spec.model.fresh = False
    return end, training.history


def save_checkpoint(training: loop.Training, file: Path | None) -> None:
    """Keep a training, if nothing of it has changed since its last window ended."""
    if file is None or not training.history or training.inside_window or training.diverged_at is not None:
        return
    tensors, layers = _weights_and_moments(training), training.state or []
    for number, layer in enumerate(layers):
        tensors |= {f"state.{number}.{part}": tensor for part, tensor in enumerate(layer)}
    notes = {"history": training.history, "state": [*map(len, layers)], "ways": sorted(training.ways)}
    write_tensors(file, tensors, notes)


def resume_checkpoint(training: loop.Training, file: Path | None) -> bool:
    """Take a training to where an interrupted one was, if there is one; whether there was.

    A file that is damaged, or of another network, is set aside before anything is changed.
    """
    if file is None or not os.path.lexists(file):
        return False
    own, device = _weights_and_moments(training), next(training.model.parameters()).device
    try:
        tensors, notes = read_tensors(file)
        if any(tensors[name].shape != tensor.shape for name, tensor in own.items()):
            raise DataError("its tensors have other shapes")
        names = [[f"state.{number}.{part}" for part in range(parts)] for number, parts in enumerate(notes["state"])]
        state = [[tensors[name].to(device) for name in layer] for layer in names] or None
        training.model.check_state(state)
        history, ways = [loop.WindowNote(*note) for note in notes["history"]], set(notes["ways"])
        step = history[-1].step
    except Exception as error:  # whatever a checkpoint of another training leads to
        why = f"{file}: a damaged checkpoint, or not one of this run ({error!r:.300})"
        moved = stores.quarantine(file.parents[1], file)
        warnings.warn(f"{why}: the run starts anew (set aside in {moved})", stacklevel=4)
        return False
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    training.state, training.history, training.ways, training.step = state, history, ways, step
    return True


def _weights_and_moments(training: loop.Training) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    for name, moments in training.optimizer.state.items():
        tensors |= {f"adam.{name}.{index}": tensor for index, tensor in enumerate(moments)}
    return tensors


def set_up(spec: RunSpec) -> loop.Training:
    """The training as it begins: the weights are drawn, and the network is on its device."""
    spec.draw_weights()
    return loop.Training(spec.model.to(spec.setting.device, spec.setting.dtype), spec.configuration["learning_rate"])


def engine_of(spec: RunSpec, training: loop.Training) -> loop.Engine:
    """The fastest engine that there is for a training, unless it is asked for autograd's own gradients."""
    return _fastest(spec, loop.Plain(training, Loader(spec.factors["loader"], spec.setting)))


def _fastest(spec: RunSpec, plain: loop.Plain) -> loop.Engine:
    as_written = not spec.factors["fast"] or spec.setting.compile or spec.setting.autocast
    if as_written or find_spec("gpulab.engines") is None:  # without that folder all is only slower
        return plain
    from gpulab.engines import fastest

    return fastest(plain, has_its_device_alone(spec.setting))


def windows(spec: RunSpec, training: loop.Training) -> Iterator[Window]:
    """What is left to train on."""
    done = len(training.history)
    endless = ahead(spec.data.windows(spec.window, spec.seed, done), spec.setting, spec.data)
    return itertools.islice(endless, spec.frames // spec.window - done)


def outcome(spec: RunSpec, training: loop.Training) -> dict[str, Any]:
    """Status and summary for the record."""
    heldout = math.nan if training.diverged_at else heldout_loss(spec, training)
    if not math.isfinite(heldout) and training.diverged_at is None:
        training.diverged_at = training.step  # the last update ruined the weights, and no later loss shows it
    diverged, history = training.diverged_at is not None, training.history
    last = [note.loss for note in history[-max(1, len(history) // LAST_FIFTH) :]]
    alone = has_its_device_alone(spec.setting)  # else its speed is not that of one network
    return {
        "status": "diverged" if diverged else "finished",
        "gradients": " and ".join(sorted(training.ways - {"captured"})),
        "captured": "captured" in training.ways,
        "diverged_at": training.diverged_at,
        "summary": {
            # JSON has no NaN.
            "final_loss": None if diverged else math.fsum(last) / len(last),
            "heldout_loss": None if diverged else heldout,
            "seconds": history[-1].seconds,
            "frames_per_second": len(history) * spec.window / history[-1].seconds if alone else None,
            "weights": weights_digest(training.model.state_dict()),
        },
        **({} if alone else {"shared": True}),
    }


class Evaluation(loop.Plain):
    """Computes the losses of a window's frames, and updates nothing.

    Its gradients are never asked for, so that an engine that computes those otherwise changes nothing here.
    """

    @torch.no_grad()
    def update(self, batches: Iterable[Tensor | Feed], state: Any) -> tuple[Tensor, Any]:
        """The loss of each frame of all batches, and the state after the last."""
        losses = []
        for batch in batches:
            _, per_frame, state = self.model.training_loss(batch, state)
            losses.append(per_frame)
        return torch.cat(losses), state


def heldout_loss(spec: RunSpec, training: loop.Training) -> float:
    """The mean squared error per held-out frame."""
    training.model.eval()
    # With `ways` of its own: a run's record says how it was trained.
    engine = _fastest(spec, Evaluation(replace(training, ways=set()), Loader("window", spec.setting)))
    state, errors = None, []
    for window in ahead(spec.data.heldout(spec.window), spec.setting, spec.data):
        state = None if window.restart else state
        per_frame, state = engine.train_window(window.frames, state)
        errors.append(per_frame.clone())  # a graph writes those of the next window into the same memory
    values = torch.cat(errors).tolist()  # one look at the device, since every look waits for it
    return math.fsum(values) / len(values)
