"""`gpulab.train`: what it is asked for goes to gpulab's own loop, or to a function of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from gpulab.data.base import Data
from gpulab.errors import UsageError
from gpulab.models.base import Trainable
from gpulab.passports import Passport, passport
from gpulab.settings import Setting
from gpulab.store import identities, recorded
from gpulab.store import runs as stores
from gpulab.store.factors import FACTORS
from gpulab.training.functions import TrainingFunction, is_function, run_function
from gpulab.training.keeping import CHECKPOINT_SECONDS, Keeping
from gpulab.training.run import Run, Told, Watch, train_network, under
from gpulab.training.spec import RunSpec


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
    resume: bool = True,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    keep_weights: bool = True,
    guard: bool = False,
    watch: Watch | None = None,
    progress: Told = True,
    command: str | None = None,
    registered: str | Path | None = None,
    **factors: Any,
) -> Run:
    """Train a copy of a network from one seed under one setting, and return the run.

    gpulab's own networks, `"autoencoder"`, `"prednet"` and `"whitener"`, and modules that derive from `Trainable`, are
    trained by gpulab's own loop. It goes through the data in windows of frames or images. PredNet has one update for
    each window of 20 frames, a batch of one film, and carries its state from window to window. The autoencoder has one
    update for each image, the whitener one for 50 images. The optimiser is Adam with learning rate 1e-3, beta 0.9 and
    0.999, and eps 1e-8. The loss is noted for each window, as the mean squared error per frame or image. `final_loss`
    is the mean over the last fifth of the windows. A loss that is not finite ends the run, whose status is then
    `diverged`.

    A training of your own is a function `train(seed, setting)`, or the text `"my_training.py:train"`. Nothing of the
    protocol above is used for it. It is called by the names of its parameters, which may stand in any order:

    - `seed`: Torch's, NumPy's and Python's random numbers are drawn from it already.
    - `setting`, if wanted: The `Setting` that is in force already, with `setting.device` and `setting.dtype`.
    - `folder`, if wanted: A folder for its own checkpoints. With a `store`, the next attempt finds there what a killed
      run has left.
    - Every other parameter is an option and needs a default. Where the value of an option names a file, the file's
      content is part of what identifies the run. A change in any other file that the function opens is not noticed.

    The function returns a number, or a dictionary of numbers by name, or yields these as it goes. Of what it yields,
    the mean of the last fifth counts. A number without a name, or one named `loss`, is the run's `final_loss`. A number
    that is not finite, an `ArithmeticError` or a `LinAlgError` ends the run as `diverged`.

    With a `store`, the finished run is kept there, and an interrupted one goes on from its last checkpoint. A run that
    the store has already is returned without training, unless `keep_weights` asks for weights that were not kept.

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
        resume: Whether to go on from a checkpoint, and to take a run that is there.
        checkpoint_seconds: The time between two checkpoints.
        keep_weights: Whether the store keeps the trained weights.
        guard: Whether to train under `gpulab.guard`. The results are the same bits. A run that the store has already is
            trained again, because it may have been made without a guard.
        watch: A function that is called with the model and the number of updates, before the first update and after
            each window. For gpulab's own loop in this process only.
        progress: True for a progress bar, False for none; or a function that is called with what is done so far
            (frames, or what your function has yielded) and the loss.
        command: A command line to be noted in the run's record. By default it is the one that makes this run, where
            there is one.
        registered: A Markdown file that was written before the first run, with the headings Question, Endpoint, Margin,
            Seeds and Stopping. Its name and SHA-256 are noted in the record of a run that is made now, not of one that
            the store has already.
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
        OverwrittenError: With `guard`, where a tensor was overwritten between its saving and the backward pass.

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
    notes = {"command": command, **recorded.registration(registered)}
    keeping = Keeping(
        store=None if store is None else stores.store_folder(store),
        take_existing=resume and not guard,
        use_checkpoints=resume,
        checkpoint_seconds=checkpoint_seconds,
        weights=keep_weights,
    )
    chosen = {"frames": frames, "learning_rate": learning_rate, "window": window, **factors}
    if isinstance(net, TrainingFunction) or is_function(net):
        if watch or data_options:
            raise UsageError("watch and data_options go with gpulab's own networks")
        training = net if isinstance(net, TrainingFunction) else TrainingFunction(net)
        options = {name: value for name, value in {"data": data, **chosen}.items() if value is not None}
        options = training.checked(options | (model_options or {}))
        return run_function(training, Setting.parse(setting), seed, rerun, options, keeping, guard, progress, notes)
    chosen |= {"data_options": data_options, "model_options": model_options}
    spec = RunSpec.of(cast("Trainable | str", net), data, setting, seed, profile, rerun, **chosen)
    notes["command"] = spec.command() if command is None else command
    with under(spec.setting, spec.model.threads):
        return train_network(spec, notes, keeping, guard=guard, watch=watch, progress=progress)


# A machine of no kind: a run has one name on it, whichever machine does it.
ANYWHERE = Passport(cpu={"model": ""}, gpus=[], software={"torch": "", "gpulab": ""})


def planned(net: str | TrainingFunction, **arguments: Any) -> identities.Identity:
    """What `train` would call a run with these arguments on this machine."""
    return planned_on([passport()], net, **arguments)[0]


def planned_on(machines: list[Passport], net: str | TrainingFunction, **arguments: Any) -> list[identities.Identity]:
    """The same on each of several machines, given by their passports."""
    if isinstance(net, TrainingFunction):
        setting, seed, rerun, options = (arguments[name] for name in ("setting", "seed", "rerun", "model_options"))
        return [net.identity(here, Setting.parse(setting), seed, rerun, options) for here in machines]
    what = inspect.signature(RunSpec.of).parameters.keys() | FACTORS.keys()
    spec = RunSpec.of(net, **{name: value for name, value in arguments.items() if name in what})
    return [spec.identity(here) for here in machines]
