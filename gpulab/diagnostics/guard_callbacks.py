"""The guard as a callback, for trainings that are started by somebody else's command.

Where you call `trainer.fit()` or `trainer.train()` yourself, `with gl.guard(): trainer.fit(model)` does the same.
"""

from __future__ import annotations

from typing import Any

from gpulab.diagnostics.guards import Guard, guard


def lightning_guard(on: str = "raise", reads: str = "backward") -> Any:
    """A callback of Lightning's `Trainer` under which it trains; its attribute `report` is the `Guard`.

    Args:
        on: As for `guard`.
        reads: As for `guard`.

    References:
        https://lightning.ai/docs/pytorch/stable/extensions/callbacks.html
    """
    from lightning.pytorch import Callback

    class Guarding(Callback):
        report: Guard = guard(on, reads)

        def on_train_start(self, *_: Any) -> None:
            self.report.__enter__()

        def on_train_end(self, *_: Any) -> None:
            self.report.__exit__(None, None, None)

        def on_exception(self, *given: Any) -> None:
            error = given[-1]
            if self.report.inside:
                self.report.__exit__(type(error), error, error.__traceback__)

    return Guarding()


def transformers_guard(on: str = "raise", reads: str = "backward") -> Any:
    """A callback of the `Trainer` of Hugging Face's transformers under which it trains; `report` is the `Guard`.

    The trainer has no callback for an exception: after one, `callback.report` is still entered in that thread.

    Args:
        on: As for `guard`.
        reads: As for `guard`.

    References:
        https://huggingface.co/docs/transformers/main_classes/callback
    """
    from transformers import TrainerCallback

    class Guarding(TrainerCallback):
        report: Guard = guard(on, reads)

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.report.__enter__()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.report.__exit__(None, None, None)

    return Guarding()
