"""Training runs of gpulab's networks: the request, and the network and data that follow from it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from gpulab.data._base import Data, Window
from gpulab.data._datasets import load
from gpulab.data._feed import Loader, has_exclusive_device, prefetch
from gpulab.errors import UsageError
from gpulab.models import MODELS
from gpulab.models._base import Trainable, check_weight, flip_bit
from gpulab.run_options import FACTORS, check_option, factors_of_run
from gpulab.settings import Setting
from gpulab.store._run_identity import weights_digest
from gpulab.store._run_store import StoredRun
from gpulab.training._checkpoints import resume_checkpoint
from gpulab.training._engine_selection import select_engine
from gpulab.training._evaluation import heldout_loss
from gpulab.training._planned_run import (
    Options,
    PlannedRun,
    RestoredRun,
    TrainingOutcome,
    Watch,
    as_json,
    check_options,
    check_repetition,
)
from gpulab.training._profiles import FINAL_LOSS_DIVISOR, Protocol, protocol
from gpulab.training._supervision import LOSS_SYNC_SECONDS, supervise
from gpulab.training.loop import AutogradEngine, Engine, Training

# The version of all code that affects the result of training: loop, optimiser, engines, models,
# data, arithmetic. Increase it whenever the same request gives other losses, so that a store does
# not return runs of the old code. Until this is done, the test
# `test_code_version_is_that_of_the_noted_losses` fails.
CODE_VERSION = 1


@dataclass(kw_only=True)
class NetworkRun(PlannedRun):
    """One run of a built-in network, with the model created and the data loaded.

    Attributes:
        model: The network. `draw_weights` draws its weights, unless it has loaded weights.
        model_options: The description of the network in the record.
        data: The data to train on.
        data_content: The digest of the files that the data are read from, empty if there are none;
            None if the data are of a user's class, whose content cannot be known.
        frames: The number of frames or images to train on.
        window: The number of frames or images in a window, for which one loss is recorded.
        learning_rate: The learning rate of Adam.
        factors: The value of each factor that is an argument of `gpulab.train`.
        command_data_options: The options of the data that were given, for the command line.
    """

    can_be_watched: ClassVar[bool] = True

    model: Trainable
    model_options: Options
    data: Data
    data_content: str | None
    frames: int
    window: int
    learning_rate: float
    factors: Options
    command_data_options: Options

    @classmethod
    def plan(
        cls,
        net: object,
        data: Data | str | None = None,
        setting: Setting | str = "cpu",
        seed: int = 0,
        profile: str = "quick",
        *,
        frames: int | None = None,
        window: int | None = None,
        learning_rate: float | None = None,
        rerun: int = 0,
        data_options: Options | None = None,
        model_options: Options | None = None,
        **factors: Any,
    ) -> NetworkRun:
        """Check the arguments of a network's training, make the model and load the data.

        Args:
            net: A name of `gpulab.models.MODELS`, or a network of one of these classes.
            data: As for `gpulab.train`.
            setting: As for `gpulab.train`.
            seed: As for `gpulab.train`.
            profile: As for `gpulab.train`.
            frames: As for `gpulab.train`.
            window: As for `gpulab.train`.
            learning_rate: As for `gpulab.train`.
            rerun: As for `gpulab.train`.
            data_options: As for `gpulab.train`.
            model_options: As for `gpulab.train`.
            **factors: As for `gpulab.train`. None stands for the default value.

        Raises:
            UsageError: If arguments are invalid.
            DataError: If the data cannot be read.

        Examples:
            >>> NetworkRun.plan("prednet", profile="smoke", seed=3, flip=0).command()
            'gpulab train prednet --profile smoke --setting cpu --seed 3 --option flip=0'
        """
        seed, rerun = check_repetition(seed, rerun)
        setting = Setting.parse(setting)
        model_options = check_options("model_options", model_options)
        data_options = check_options("data_options", data_options)
        net = _check_net(net, model_options)
        experiment = net if isinstance(net, str) else type(net).__name__.lower()
        defaults = protocol(experiment, profile)
        lengths: Options = {"frames": frames, "window": window, "learning_rate": learning_rate}
        given_options = {
            name: value for name, value in (lengths | factors).items() if value is not None
        }
        frames = check_option("frames", defaults.frames if frames is None else frames)
        window = check_option("window", defaults.window if window is None else window)
        rate = check_option(
            "learning_rate", defaults.learning_rate if learning_rate is None else learning_rate
        )
        _check_lengths(frames, window, rate)
        given_factors = {name: value for name, value in factors.items() if value is not None}
        factors = factors_of_run(**given_factors)
        model, model_description = _make_model(net, defaults, model_options)
        check_weight(model, factors["flip"])
        _check_loader(factors["loader"], model)
        loaded_data = _load_data(data, model, defaults, frames, data_options)
        # A command line can name networks and data, but not hold objects.
        command_net = net if isinstance(net, str) and not isinstance(data, Data) else None
        named_data = {"data": data} if isinstance(data, str) else {}
        has_known_content = type(loaded_data).__module__.startswith("gpulab.")
        return cls(
            experiment=experiment,
            setting=setting,
            seed=seed,
            profile=profile,
            rerun=rerun,
            command_net=command_net,
            command_options=named_data | given_options | model_options,
            command_data_options=data_options,
            model=model,
            model_options=model_description,
            data=loaded_data,
            data_content=loaded_data.content if has_known_content else None,
            frames=frames,
            window=window,
            learning_rate=rate,
            factors=factors,
        )

    @property
    def configuration(self) -> dict[str, Any]:
        """The model, the data, the length of the training and the learning rate."""
        return {
            "model": self.experiment,
            "model_options": self.model_options,
            "data": self.data.name,
            "data_options": self.data.options(),
            "frames": self.frames,
            "window": self.window,
            "learning_rate": self.learning_rate,
        }

    @property
    def contents(self) -> dict[str, str]:
        """The version of the code, and the digest of the files that the data are read from."""
        return {"code": str(CODE_VERSION), "content": self.data_content or ""}

    @property
    def unknown_content(self) -> str:
        """The data, if they are of a user's class; otherwise an empty text."""
        return f"data {self.data.name!r}" if self.data_content is None else ""

    @property
    def unusual_factors(self) -> Options:
        """The factors whose value is not the default."""
        return {
            name: value for name, value in self.factors.items() if value != FACTORS[name].default
        }

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Activate the setting, limit the number of threads, and compile the model if required.

        The number of threads is limited to what the model can use, unless the setting gives it.

        >>> from gpulab.settings import setting
        >>> with (
        ...     setting("cpu:threads=2"),
        ...     NetworkRun.plan("autoencoder", profile="smoke").activate(),
        ... ):
        ...     torch.get_num_threads()  # further threads would only cost time
        1
        """
        with super().activate(), contextlib.ExitStack() as stack:
            if self.setting.threads is None and self.model.threads:
                torch.set_num_threads(min(self.model.threads, torch.get_num_threads()))
            if self.setting.compile:
                attribute = self.model.compiled_part
                compiled_method = self.setting.compiled(getattr(self.model, attribute))
                setattr(self.model, attribute, compiled_method)
                # The compiled function is removed at the end, because a copy of the model would
                # call the function of this model.
                stack.callback(delattr, self.model, attribute)
            yield

    def draw_weights(self) -> None:
        """Draw the model's weights from the seed, unless it has loaded weights, and flip a bit.

        The last bit of one weight is changed if the factor `flip` names a weight.
        """
        if self.model.fresh:
            device = self.setting.device if self.factors["draws"] == "device" else "cpu"
            self.model.draw_weights(torch.Generator(device).manual_seed(self.seed))
        if self.factors["flip"] is not None:
            flip_bit(self.model, self.factors["flip"])

    def init_training(self) -> Training:
        """Draw the weights, move the network to its device, and return the training."""
        self.draw_weights()
        return Training(self.model.to(self.setting.device, self.setting.dtype), self.learning_rate)

    def select_engine(self, training: Training) -> Engine:
        """Return the fastest engine, unless autograd's gradients are required."""
        autograd_engine = AutogradEngine(training, Loader(self.factors["loader"], self.setting))
        return select_engine(autograd_engine, self.setting, self.factors["fast"])

    def remaining_windows(self, training: Training) -> Iterator[Window]:
        """Yield the windows that a training run has not seen yet."""
        n_done = len(training.history)
        n_left = self.frames // self.window - n_done
        windows = self.data.windows(self.window, self.seed, n_done)
        return itertools.islice(prefetch(windows, self.setting, self.data), n_left)

    def train(
        self, checkpoint: Path | None, watch: Watch | None, progress: bool
    ) -> TrainingOutcome:
        """Train the network with gpulab's loop and evaluate it on the held-out data.

        The arguments are those of `PlannedRun.train`.
        """
        training = self.init_training()
        is_resumed = resume_checkpoint(training, checkpoint)
        resumed_at = len(training.history)
        # Losses are copied from a GPU to the host only from time to time. `watch` has to be called
        # after each window, so with a `watch` they are copied after each window, too.
        training.loss_sync_interval = (
            LOSS_SYNC_SECONDS if watch is None and self.setting.kind != "cpu" else 0.0
        )
        supervise(
            training,
            self.remaining_windows(training),
            self.select_engine(training),
            window=self.window,
            total=self.frames // self.window * self.window,  # without an incomplete last window
            watch=watch,
            checkpoint=checkpoint,
            progress=progress,
        )
        results = self.summarize(training, self.evaluate(training))
        if is_resumed:
            results = {"resumed_at": resumed_at} | results
        self.data.check_unchanged()
        self.model.fresh = False  # Further training would start from the trained weights.
        return TrainingOutcome(training.history, results, self.model.cpu(), self.data)

    def evaluate(self, training: Training) -> float:
        """Compute the held-out loss of a trained network; NaN if the training diverged.

        If the held-out loss is not finite, the training is marked as diverged at its last update.
        That update ruined the weights, and no later training loss could show it.
        """
        if training.diverged_at is not None:
            return math.nan
        loss = heldout_loss(
            training.model, self.data, self.window, self.setting, self.factors["fast"]
        )
        if not math.isfinite(loss):
            training.diverged_at = training.step
        return loss

    def summarize(self, training: Training, heldout: float) -> dict[str, Any]:
        """Build the results for the record: status, losses, times and how gradients were computed.

        Losses of a diverged training are None, because JSON has no NaN. The speed is None if other
        training runs shared the GPU.
        """
        diverged = training.diverged_at is not None
        history = training.history
        n_last = max(1, len(history) // FINAL_LOSS_DIVISOR)
        last_losses = [record.loss for record in history[-n_last:]]
        seconds = history[-1].seconds
        # If other training runs share the device, the speed depends on them.
        is_alone = has_exclusive_device(self.setting)
        results: dict[str, Any] = {
            "status": "diverged" if diverged else "finished",
            "gradients": " and ".join(sorted(training.gradient_methods - {"captured"})),
            "captured": "captured" in training.gradient_methods,
            "diverged_at": training.diverged_at,
            "summary": {
                "final_loss": None if diverged else math.fsum(last_losses) / len(last_losses),
                "heldout_loss": None if diverged else heldout,
                "seconds": seconds,
                "frames_per_second": len(history) * self.window / seconds if is_alone else None,
                "weights": weights_digest(training.model.state_dict()),
            },
        }
        if diverged:
            results["windows_after_divergence"] = training.windows_after_divergence
        if not is_alone:
            results["shared"] = True
        return results

    def restore(self, stored: StoredRun, keep_weights: bool) -> RestoredRun | None:
        """Load the stored weights into the model.

        Without stored weights the result has no model. It is None if weights are to be kept, so
        that the run is trained again.
        """
        if stored.weights:
            self.model.to(dtype=self.setting.dtype).load_state_dict(stored.weights)
            return RestoredRun(self.model, self.data)
        return None if keep_weights else RestoredRun(None, self.data)

    def _command_profile(self) -> list[str]:
        return ["--profile", self.profile]

    def _command_flags(self) -> dict[str, Options]:
        return super()._command_flags() | {"--data-option": self.command_data_options}


def _check_net(net: object, model_options: Options) -> Trainable | str:
    """Return the name of a network, or a built-in network without options; else `UsageError`."""
    if isinstance(net, str):
        return net
    if isinstance(net, Trainable) and type(net) in MODELS.values() and not model_options:
        return net
    raise UsageError(
        f"net is a {type(net).__name__}, model_options={model_options}: expected one of"
        f" {', '.join(MODELS)}, a network of these kinds without options, or your own training"
        " function, train(seed, setting)"
    )


def _check_lengths(frames: int, window: int, learning_rate: float) -> None:
    """Raise `UsageError` unless 2 <= window <= frames and the learning rate is in [0, ∞)."""
    if 2 <= window <= frames and 0 <= learning_rate < math.inf:
        return
    lengths = f"window={window}, frames={frames}, learning_rate={learning_rate}"
    raise UsageError(
        f"{lengths}: expected window >= 2, frames >= window and a finite learning_rate >= 0"
    )


def _check_loader(loader: str, model: Trainable) -> None:
    """Raise `UsageError` if a loader of single frames is used with a model of larger batches."""
    batch_size = getattr(model, "batch_size", 1)
    if loader != "window" and batch_size > 1:
        raise UsageError(
            f"loader {loader!r} passes one frame at a time, but {type(model).__name__} takes"
            f" {batch_size} at a time: use batch_size=1, or loader 'window'"
        )


def _make_model(
    net: Trainable | str, defaults: Protocol, options: Options
) -> tuple[Trainable, Options]:
    """Copy the given network or create a new one by name, and describe it for the record.

    A network given by name is described by its options. A network given as an object is described
    by its layers, its attributes and the digest of its loaded weights.

    >>> own = MODELS["prednet"](channels=(3, 4), size=(16, 16))
    >>> _make_model(own, protocol("prednet", "smoke"), {})[1]["held"]
    {'channels': [3, 4], 'size': [16, 16], 'truncation': 'loss'}
    """
    if not isinstance(net, str):
        model = copy.deepcopy(net)
        # Attributes such as sizes, without those that every `torch.nn.Module` has.
        attributes = {
            name: value
            for name, value in vars(model).items()
            if name[0] != "_" and name != "training"
        }
        # A fresh network gets weights from the seed, so its present weights are not recorded.
        weights = None if model.fresh else weights_digest(model.state_dict())
        return model, {
            "layers": repr(model),
            "held": json.loads(as_json(attributes)),
            "weights": weights,
        }
    model_options = {"size": defaults.size, **defaults.model, **options}
    try:
        with torch.random.fork_rng(devices=[]):  # the caller's random generator is not advanced
            model = MODELS[net](**model_options)
    except TypeError as error:
        raise UsageError(f"model {net!r} with {options}: {error}") from None
    factors = {
        name: getattr(model, name, option.default)
        for name, option in FACTORS.items()
        if option.argument_group == "model"
    }
    # JSON has lists, but no tuples. Factors with their default value are not recorded.
    description = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in (model_options | factors).items()
        if name not in factors or value != FACTORS[name].default
    }
    return model, description


def _load_data(
    data: Data | str | None, model: Trainable, defaults: Protocol, frames: int, options: Options
) -> Data:
    """Load the data to train on, and check that they fit the model.

    If a sequence is shorter than the training run, it is repeated, and a warning is issued.

    Raises:
        UsageError: If options are wrong, or the data do not fit the model.
    """
    if not isinstance(data, Data):
        # The profile's options are those of its own data. Options that were given take precedence.
        usual_options = defaults.data_options if data in (None, defaults.data) else {}
        load_options = {"frames": frames, "size": model.size, **usual_options, **options}
        try:
            data = load(data or defaults.data, **load_options)
        except TypeError as error:
            raise UsageError(f"data_options {options}: {error}") from None
    elif options:
        raise UsageError(
            f"data_options {options}: expected the name of a data set, got loaded data; pass the"
            " options to gpulab.load"
        )
    if data.sequential != model.sequential:
        kinds = {True: "a sequence of frames", False: "a set of images"}
        raise UsageError(
            f"{data.name} is {kinds[data.sequential]}; {type(model).__name__} learns from"
            f" {kinds[model.sequential]}"
        )
    # The first of PredNet's channels are those of the frames. Autoencoders take grey images.
    expected_shape = (getattr(model, "channels", (1,))[0], *model.size)
    shape = (data.channels, *data.size)
    if shape != expected_shape:
        raise UsageError(
            f"{data.name} has frames of shape {shape}; the model takes {expected_shape}"
        )
    if data.sequential and len(data) < frames:
        shortage = (
            f"{data.name}: {len(data)} frames to train on, fewer than the {frames} of this training"
        )
        warnings.warn(f"{shortage}: they are used more than once", stacklevel=5)
    return data
