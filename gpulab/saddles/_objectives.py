"""The objective: which batches `hessian`, `find_critical_point` and `landscape` accept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gpulab._torch_internals import Nested, tree_leaves, tree_map_only
from gpulab.errors import UsageError
from gpulab.steps import loss_of

Loss = Callable[..., Tensor]
Batch: TypeAlias = Nested  # a tensor, a pair, a mapping, or a DataLoader of these
MISMATCHES = (  # of a loss that does not take so many arguments
    "takes arguments, and there is no batch: give (inputs, targets)",
    "needs targets, and the batch is a tensor: the batch is (inputs, targets), or fits the loss",
    "does not take outputs and targets: the batch is (inputs, targets), or fits the loss",
)


@dataclass(frozen=True)
class Objective:
    """A loss as a function of the model alone.

    Attributes:
        loss: The loss, as it was given.
        batches: What it is computed on: one batch, or all those of a `DataLoader`. Empty where the
            loss is a function of nothing, which asks the model itself.
    """

    loss: Loss
    batches: tuple[Batch, ...] = ()

    @classmethod
    def of(cls, loss: Loss, batch: Batch) -> Objective:
        """The objective of a loss and a batch; `UsageError` where the two do not fit."""
        batches: tuple[Batch, ...] = () if batch is None else (batch,)
        if isinstance(batch, DataLoader):
            with torch.random.fork_rng(devices=[]):
                batches = tuple(batch)  # drawn once: the loss is the same each time
        # A tokenizer, for instance, returns a mapping that is no dict.
        batches = tuple(dict(item) if isinstance(item, Mapping) else item for item in batches)
        with_tensors = [
            any(isinstance(leaf, Tensor) for leaf in tree_leaves(item)) for item in batches
        ]
        if batch is not None and not (batches and all(with_tensors)):
            raise UsageError(
                f"batch is a {type(batch).__name__} without tensors: expected (inputs, targets)"
            )
        count = 0
        if batch is not None:
            count = 1 if isinstance(batches[0], Tensor) else 2
        if not _accepts_arguments(loss, count):
            raise UsageError(
                f"loss={getattr(loss, '__name__', type(loss).__name__)} {MISMATCHES[count]}"
            )
        return cls(loss, batches)

    def __call__(self, model: nn.Module) -> Tensor:
        """Compute the loss, a scalar; of several batches the mean over all their examples."""
        if len(self.batches) < 2:
            return self._batch_loss(model, *self.batches)
        sizes = [_count_examples(batch) for batch in self.batches]
        losses = [
            size * self._batch_loss(model, batch)
            for size, batch in zip(sizes, self.batches, strict=True)
        ]
        return torch.stack(losses).sum() / sum(sizes)

    def _batch_loss(self, model: nn.Module, batch: Batch = None) -> Tensor:
        if batch is None:
            value = self.loss()
        else:
            value = (
                self.loss(model(batch))
                if isinstance(batch, Tensor)
                else loss_of(model, batch, self.loss)[0]
            )
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UsageError(
                f"the loss is {getattr(value, 'shape', type(value).__name__)}: expected a scalar"
                " tensor"
            )
        return value

    def double(self) -> Objective:
        """The same objective with its batches in float64."""
        batches = tree_map_only(
            Tensor, lambda x: x.double() if x.is_floating_point() else x, self.batches
        )
        return replace(self, batches=batches)


def _accepts_arguments(loss: Loss, count: int) -> bool:
    """Whether a function accepts `count` arguments; true if it has no signature."""
    try:
        inspect.signature(getattr(loss, "forward", loss)).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # Some functions written in C have no signature.
        pass
    return True


def _count_examples(batch: Batch) -> int:
    """How many examples a batch has: the first size of its tensors."""
    sizes = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim}
    if len(sizes) != 1:
        raise UsageError(
            f"a batch of the DataLoader has tensors of {sorted(sizes)} rows: expected one for each"
            " example"
        )
    return sizes.pop()
