"""What all trainings have in common before they run: `PlannedRun`, and what they leave: `TrainingOutcome`."""

from __future__ import annotations

import contextlib
import json
import shlex
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpulab.errors import UsageError, check_count
from gpulab.passports import Passport
from gpulab.settings import Setting
from gpulab.store.identities import Identity, identified
from gpulab.store.runs import History, StoredRun
from gpulab.training.loop import WindowNote

if TYPE_CHECKING:
    from gpulab.data.base import Data
    from gpulab.models.base import Trainable

Watch = Callable[["Trainable", int], None]  # called with the model and the number of updates so far
Options = dict[str, Any]  # by name, with values of any type that JSON can carry


@dataclass
class TrainingOutcome:
    """What a training left, or what a store kept of it.

    Attributes:
        history: One note for each window, or the columns of such a table.
        results: The part of the record that is known at the end: the status, the summary and further results. Empty
            for a stored run, whose record is complete.
        model: The network on the CPU; None for a function, and where no weights were kept.
        data: What it learned from; None for a function.
    """

    history: list[WindowNote] | History
    results: dict[str, Any] = field(default_factory=dict)
    model: Trainable | None = None
    data: Data | None = None


@dataclass(kw_only=True)
class PlannedRun(ABC):
    """One training as it was asked for, with every argument checked. `gpulab.train` does it.

    Attributes:
        experiment: The name of the network, or of the user's function.
        setting: Where and how to compute.
        seed: What the weights and the order of the images are drawn from.
        profile: How large the training is; `own` for a function.
        rerun: The number of this repetition, from 0.
        command_net: The network or function as a command line names it; None where it cannot, because the model or the
            data are objects.
        command_options: The options that were given, for the command line.
    """

    experiment: str
    setting: Setting
    seed: int
    profile: str
    rerun: int = 0
    command_net: str | None = None
    command_options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("seed", self.seed, least=0)
        check_count("rerun", self.rerun, least=0)
        self.seed, self.rerun = int(self.seed), int(self.rerun)  # integers of NumPy have no JSON

    # What a network and a function answer differently

    @property
    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """What is trained, on what and for how long, as the record keeps it."""

    @property
    @abstractmethod
    def contents(self) -> dict[str, str]:
        """Digests of what names in the configuration stand for, by name."""

    @property
    @abstractmethod
    def unknown_content(self) -> str:
        """What of the training cannot be identified by its content; empty where everything can."""

    @property
    def unusual_factors(self) -> Options:
        """The factors among the arguments of `gpulab.train` that have another than their usual value."""
        return {}

    @abstractmethod
    def train(self, checkpoint: Path | None, watch: Watch | None, progress: bool) -> TrainingOutcome:
        """Train, with the setting activated.

        Args:
            checkpoint: The file that keeps the training meanwhile, and from which an interrupted one goes on.
            watch: As for `gpulab.train`.
            progress: As for `gpulab.train`.
        """

    @abstractmethod
    def restore(self, stored: StoredRun, keep_weights: bool) -> TrainingOutcome | None:
        """Return what a store kept of this run; None if weights are asked for that it did not keep."""

    # What they have in common

    @contextlib.contextmanager
    def activated(self) -> Iterator[None]:
        """Activate the setting. Random numbers that are drawn inside leave the caller's as they were."""
        with self.setting.apply(), torch.random.fork_rng(devices=[]):
            yield

    def identity(self, passport: Passport, kept: bool = True) -> Identity:
        """Return what identifies this run, on the machine of a passport.

        Raises:
            UsageError: If the run is to be kept in a store but its content has no digest.
        """
        if kept and self.unknown_content:
            why = "its content cannot be known, so that a store might take another run for this one"
            raise UsageError(f"{self.unknown_content}: {why}; train it without a store")
        asked = {
            "setting": str(self.setting),
            "experiment": self.experiment,
            "profile": self.profile,
            "seed": self.seed,
            "rerun": self.rerun,
            "configuration": self.configuration,
        }
        asked |= self.unusual_factors
        contents = dict(self.contents)
        if self.unknown_content:
            contents["unknown"] = uuid.uuid4().hex  # equal to no other run
        return identified(asked, passport, contents)

    def command(self) -> str | None:
        """Return the command line that makes this run, or None where there is none."""
        if self.command_net is None:
            return None
        parts = ["gpulab", "train", self.command_net, *self._command_profile()]
        parts += ["--setting", str(self.setting), "--seed", str(self.seed)]
        if self.rerun:
            parts += ["--rerun", str(self.rerun)]
        for flag, options in self._command_flags().items():
            for name, value in options.items():
                parts += [flag, f"{name}={value if isinstance(value, str) else as_json(value)}"]
        return shlex.join(parts)

    def _command_profile(self) -> list[str]:
        return []

    def _command_flags(self) -> dict[str, Options]:
        return {"--option": self.command_options}


def check_options(name: str, options: object) -> None:
    """Raise `UsageError` unless these are options by name."""
    if not isinstance(options, dict):
        raise UsageError(f"{name}={options!r}: expected a dictionary of options by name")


def as_json(value: object) -> str:
    """Write a value as JSON.

    What JSON does not have goes by its name, or by how it is written unless that holds an address.
    """

    def as_text(item: object) -> str:
        text = repr(item)
        return getattr(item, "__qualname__", type(item).__qualname__ if " at 0x" in text else text)

    return json.dumps(value, default=as_text, sort_keys=True, skipkeys=True)
