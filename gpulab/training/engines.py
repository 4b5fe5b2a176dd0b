"""Which engine computes a window: the fastest that gives what is asked for, and lets everybody see what has to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpulab.data.feed import Loader
from gpulab.models import MODELS
from gpulab.models.base import is_plain
from gpulab.models.prednet_windows import Windows
from gpulab.training.capture import Captured
from gpulab.training.loop import Plain, Training
from gpulab.training.spec import RunSpec
from gpulab.training.written_out import WrittenOut


class Engines:
    """Computes each window by the engine that `choose` says, and notes in the training which it was.

    Args:
        spec: What was asked for.
        training: What is trained.
        alone: Whether no other training keeps the device busy.
    """

    def __init__(self, spec: RunSpec, training: Training, alone: bool = True) -> None:
        self.training, self.on_gpu = training, spec.setting.kind == "cuda"
        loader = Loader(spec.factors["loader"], spec.setting)
        # On a CPU a buffer that is reused is shown at work, by autograd; so is what that is compared with.
        followed = ("window", "copied", "imitated") if self.on_gpu else ("window",)
        self.fast = spec.factors["fast"] and loader.name in followed
        self.plain = Plain(training, loader)
        self.written_out = WrittenOut(training, loader, streams=alone)
        self.captured: dict[Plain, Captured] = {}  # by the engine whose updates each captures

    def train_window(self, frames: np.ndarray, state: Any) -> tuple[Tensor, Any]:
        """As of `Engine`."""
        engine = self.choose(state)
        self.training.ways |= engine.ways
        return engine.train_window(frames, state)

    def choose(self, state: Any) -> Plain | Captured:
        """The engine for the next window, whose state is this; another may be, once somebody watches."""
        engine = self.uncaptured()
        if not self.on_gpu or not self.may_be_fast():
            return engine
        # A graph is captured for a state of tensors; with None, a sequence begins.
        begins = self.training.model.sequential and state is None
        ours = type(self.training.model) in MODELS.values() and is_plain(self.training.model)
        return self.captured.setdefault(engine, Captured(engine)) if ours and not begins else engine

    def uncaptured(self) -> Plain:
        """The engine for the next window where each operation is launched by itself."""
        follows = self.may_be_fast() and Windows.follows(self.training.model)
        return self.written_out if follows else self.plain

    def may_be_fast(self) -> bool:
        """Whether nobody has to see every operation, and no frames have to go through a buffer."""
        window = self.plain.loader.name == "window"
        return self.fast and not _watched() and (window or Windows.follows(self.training.model))


def _watched() -> bool:
    """Whether a guard, a trace or an emulated arithmetic has to see every operation that autograd does."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return bool(modes or torch._C._autograd._top_saved_tensors_default_hooks(True))
