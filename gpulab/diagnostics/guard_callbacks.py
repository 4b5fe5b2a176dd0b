"""The guard as a callback, for trainings that are started by somebody else's command.

Where you call `trainer.fit()` or `trainer.train()` yourself, `with gl.guard(): trainer.fit(model)` does the same.
"""

from __future__ import annotations

from typing import Any

from gpulab.diagnostics.guards import Guard, guard


def lightning_guard(on: str = "raise", reads: str = "backward") -> Any:
    """Make a callback with which Lightning's `Trainer` trains under a guard.

    Args:
        on: What happens then: `raise` ends the training with `OverwrittenError`, `warn` lets it go on, as for `guard`.
        reads: What is compared: `backward` or `any`; as for `guard`.

    Returns:
        A `lightning.pytorch.Callback`, for `Trainer(callbacks=[...])`. Its attribute `report` is the `Guard`.

    Raises:
        UsageError: For another `on` or `reads`.
        ImportError: Where Lightning is not installed.

    Examples:
        >>> callback = lightning_guard(on="warn")  # doctest: +SKIP
        >>> lightning.Trainer(callbacks=[callback]).fit(model, batches)  # doctest: +SKIP
        >>> print(callback.report)  # doctest: +SKIP
        nothing was overwritten in 480 uses of saved tensors

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

        def on_exception(self, *args: Any) -> None:
            error = args[-1]
            if self.report.inside:
                self.report.__exit__(type(error), error, error.__traceback__)

    return Guarding()


def transformers_guard(on: str = "raise", reads: str = "backward") -> Any:
    """Make a callback with which the `Trainer` of Hugging Face's transformers trains under a guard.

    That trainer tells no callback of an exception: after one, `callback.report` is still entered in that thread.

    Args:
        on: What happens then: `raise` ends the training with `OverwrittenError`, `warn` lets it go on, as for `guard`.
        reads: What is compared: `backward` or `any`; as for `guard`.

    Returns:
        A `transformers.TrainerCallback`, for `Trainer(callbacks=[...])`. Its attribute `report` is the `Guard`.

    Raises:
        UsageError: For another `on` or `reads`.
        ImportError: Where transformers is not installed.

    Examples:
        >>> callback = transformers_guard(on="warn")  # doctest: +SKIP
        >>> Trainer(model, arguments, train_dataset=texts, callbacks=[callback]).train()  # doctest: +SKIP
        >>> print(callback.report)  # doctest: +SKIP
        nothing was overwritten in 480 uses of saved tensors

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
