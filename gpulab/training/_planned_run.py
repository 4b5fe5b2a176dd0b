"""`PlannedRun`, a run whose arguments were checked, and `TrainingOutcome`, its results."""

from __future__ import annotations

import contextlib
import json
import shlex
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from gpulab.errors import UsageError, check_count
from gpulab.passports import Passport
from gpulab.settings import Setting
from gpulab.store._run_identity import Identity, identify_run
from gpulab.store._run_store import StoredRun
from gpulab.training.loop import WindowRecord

if TYPE_CHECKING:
    from gpulab.data._base import Data
    from gpulab.models._base import Trainable

Watch = Callable[["Trainable", int], None]  # called with the model and the number of updates so far
Options = dict[str, Any]  # by name, with values of any type that JSON can represent


@dataclass
class TrainingOutcome:
    """The result of a training run.

    Attributes:
        history: One record for each window.
        results: The part of the run's record that is known at the end: the status, the summary and
            further results.
        model: The network on the CPU; None for a function.
        data: The data that the network was trained on; None for a function.
    """

    history: list[WindowRecord]
    results: dict[str, Any]
    model: Trainable | None = None
    data: Data | None = None


class RestoredRun(NamedTuple):
    """The network and the data of a stored run.

    Attributes:
        model: The network with the stored weights; None for a function, and if no weights were
            kept.
        data: The data that the network was trained on; None for a function.
    """

    model: Trainable | None
    data: Data | None


@dataclass(kw_only=True)
class PlannedRun(ABC):
    """One requested run, all of whose arguments have been checked.

    Attributes:
        experiment: The name of the network or of the training function.
        setting: The setting to train under.
        seed: The seed of the initial weights and of the order of the images.
        profile: The size of the training; `own` for a function.
        rerun: The number of this repetition, from 0.
        command_net: The name of the network or function on a command line; None if the model or the
            data were given as objects.
        command_options: The options that were given, for the command line.
    """

    can_be_watched: ClassVar[bool] = False  # whether `train` calls `watch` between updates

    experiment: str
    setting: Setting
    seed: int
    profile: str
    rerun: int = 0
    command_net: str | None = None
    command_options: Options = field(default_factory=dict)

    # Defined by networks and by functions

    @property
    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """The model, the data and the length of the training, as recorded."""

    @property
    @abstractmethod
    def contents(self) -> dict[str, str]:
        """Digests of the code and the files that the configuration refers to, by name."""

    @property
    @abstractmethod
    def unknown_content(self) -> str:
        """The part of the training that has no digest of its content; empty if there is none."""

    @property
    def unusual_factors(self) -> Options:
        """The factors whose value is not the default."""
        return {}

    @abstractmethod
    def train(
        self, checkpoint: Path | None, watch: Watch | None, progress: bool
    ) -> TrainingOutcome:
        """Train, with the setting activated.

        Args:
            checkpoint: The file for checkpoints, from which an interrupted training is resumed;
                None for no checkpoints.
            watch: As for `gpulab.train`.
            progress: As for `gpulab.train`.
        """

    @abstractmethod
    def restore(self, stored: StoredRun, keep_weights: bool) -> RestoredRun | None:
        """Return the network and data of a stored run; None if requested weights are missing."""

    # Common to both

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Activate the setting. The caller's random number generators are left as they were."""
        with self.setting.apply(), torch.random.fork_rng(devices=[]):
            yield

    def identity(self, passport: Passport, is_stored: bool = True) -> Identity:
        """Return the identity of this run on the machine of a passport.

        Raises:
            UsageError: If the run is to be kept in a store but its content has no digest.
        """
        if is_stored and self.unknown_content:
            reason = (
                "its content cannot be determined, so a store might confuse this run with another"
            )
            raise UsageError(f"{self.unknown_content}: {reason}; train it without a store")
        requested = {
            "setting": str(self.setting),
            "experiment": self.experiment,
            "profile": self.profile,
            "seed": self.seed,
            "rerun": self.rerun,
            "configuration": self.configuration,
        }
        requested |= self.unusual_factors
        contents = dict(self.contents)
        if self.unknown_content:
            contents["unknown"] = uuid.uuid4().hex  # makes the identity unique
        return identify_run(requested, passport, contents)

    def command(self) -> str | None:
        """Return the command line that makes this run, or None if there is none."""
        if self.command_net is None:
            return None
        parts = ["gpulab", "train", self.command_net, *self._command_profile()]
        parts += ["--setting", str(self.setting), "--seed", str(self.seed)]
        if self.rerun:
            parts += ["--rerun", str(self.rerun)]
        for flag, options in self._command_flags().items():
            for name, value in options.items():
                text = value if isinstance(value, str) else as_json(value)
                parts += [flag, f"{name}={text}"]
        return shlex.join(parts)

    def _command_profile(self) -> list[str]:
        """Return the words of the command line that give the profile; none for a function."""
        return []

    def _command_flags(self) -> dict[str, Options]:
        """Return the options of the command line, by the flag before each of them."""
        return {"--option": self.command_options}


def check_repetition(seed: int, rerun: int) -> tuple[int, int]:
    """Return a seed and the number of a repetition as Python integers, which JSON can represent.

    Raises:
        UsageError: Unless both are whole numbers from 0.
    """
    check_count("seed", seed, minimum=0)
    check_count("rerun", rerun, minimum=0)
    return int(seed), int(rerun)


def check_options(argument: str, options: object) -> Options:
    """Check that an argument is a dictionary of options, and return it.

    Only the type is checked, not the names and values of the options.

    Args:
        argument: The name of the argument, for the error message.
        options: The value of the argument. None stands for no options.

    Returns:
        The dictionary; an empty one for None.

    Raises:
        UsageError: If the value is neither a dictionary nor None.

    Examples:
        >>> check_options("data_options", {"speed": 2}), check_options("data_options", None)
        ({'speed': 2}, {})
    """
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise UsageError(f"{argument}={options!r}: expected a dictionary of options by name")
    return options


def as_json(value: object) -> str:
    """Write a value as JSON.

    Objects that JSON cannot represent are written as their qualified name if they have one,
    otherwise as their `repr`, or as the name of their type if the `repr` contains an address.
    """

    def as_text(item: object) -> str:
        """Return the name, the `repr` or the type's name of an object."""
        if hasattr(item, "__qualname__"):
            return item.__qualname__
        text = repr(item)
        # An address would be different in every process.
        return type(item).__qualname__ if " at 0x" in text else text

    return json.dumps(value, default=as_text, sort_keys=True, skipkeys=True)
