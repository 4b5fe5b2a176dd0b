"""The objective: a loss with its batches, as `hessian` and other functions accept them."""

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
# The errors for a loss that cannot be called with 0, 1 or 2 arguments, by this number.
MISMATCHES = (
    "takes arguments, but there is no batch: pass a batch (inputs, targets)",
    "needs targets, but the batch is a tensor: pass a batch (inputs, targets), or another loss",
    "does not take outputs and targets: pass a loss that does, or a batch that fits the loss",
)


@dataclass(frozen=True)
class Objective:
    """A loss as a function of the model alone.

    Attributes:
        loss: The loss as given.
        batches: The data that the loss is computed on: one batch, or all batches of a `DataLoader`.
            Empty for a loss without arguments, which calls the model itself.
    """

    loss: Loss
    batches: tuple[Batch, ...] = ()

    @classmethod
    def of(cls, loss: Loss, batch: Batch) -> Objective:
        """Build the objective from a loss and a batch.

        Raises:
            UsageError: For a batch without tensors, and for a loss that does not take the batch.
        """
        batches = _as_batches(batch)
        # A loss takes no arguments if there is no batch, the outputs if a batch is a tensor of
        # inputs, and otherwise the outputs and the targets.
        argument_count = 0
        if batch is not None:
            argument_count = 1 if isinstance(batches[0], Tensor) else 2
        if not _accepts_arguments(loss, argument_count):
            name = getattr(loss, "__name__", type(loss).__name__)
            raise UsageError(f"loss={name} {MISMATCHES[argument_count]}")
        return cls(loss, batches)

    def __call__(self, model: nn.Module) -> Tensor:
        """Compute the loss, a scalar: for several batches, the mean over all their examples."""
        if not self.batches:
            return self._batch_loss(model, None)
        if len(self.batches) == 1:
            (batch,) = self.batches
            return self._batch_loss(model, batch)
        sizes = [_count_examples(batch) for batch in self.batches]
        losses = [
            size * self._batch_loss(model, batch)
            for size, batch in zip(sizes, self.batches, strict=True)
        ]
        return torch.stack(losses).sum() / sum(sizes)

    def _batch_loss(self, model: nn.Module, batch: Batch | None) -> Tensor:
        """Compute the loss of one batch, or of a loss that takes none.

        Raises:
            UsageError: If it is not a scalar tensor.
        """
        if batch is None:
            value = self.loss()
        elif isinstance(batch, Tensor):
            value = self.loss(model(batch))
        else:
            value, _ = loss_of(model, batch, self.loss)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UsageError(
                f"the loss is {getattr(value, 'shape', type(value).__name__)}: expected a scalar"
                " tensor"
            )
        return value

    def double(self) -> Objective:
        """Return the same objective with the floating-point tensors of its batches in float64."""
        batches = tree_map_only(
            Tensor, lambda x: x.double() if x.is_floating_point() else x, self.batches
        )
        return replace(self, batches=batches)


def _as_batches(batch: Batch | None) -> tuple[Batch, ...]:
    """Return a batch, or all batches of a `DataLoader`, as a tuple; empty if there is no batch.

    Raises:
        UsageError: If a batch has no tensors, or a `DataLoader` no batches.
    """
    if batch is None:
        return ()
    drawn: tuple[Batch, ...] = (batch,)
    if isinstance(batch, DataLoader):
        with torch.random.fork_rng(devices=[]):
            drawn = tuple(batch)  # Drawn only once, so that the loss is always the same.
    # Mappings of other types, such as a tokenizer's, become dictionaries.
    batches = tuple(dict(item) if isinstance(item, Mapping) else item for item in drawn)
    has_tensors = [any(isinstance(leaf, Tensor) for leaf in tree_leaves(item)) for item in batches]
    if not batches or not all(has_tensors):
        raise UsageError(
            f"batch is a {type(batch).__name__} without tensors: expected (inputs, targets)"
        )
    return batches


def _accepts_arguments(loss: Loss, count: int) -> bool:
    """Return whether a loss accepts `count` arguments; True if it has no signature.

    The signature of a module is that of its `forward`.
    """
    any_arguments = range(count)  # `bind` compares only their number with the signature.
    try:
        inspect.signature(getattr(loss, "forward", loss)).bind(*any_arguments)
    except TypeError:
        return False
    except ValueError:  # Some functions written in C have no signature.
        pass
    return True


def _count_examples(batch: Batch) -> int:
    """Return how many examples a batch has: the first size of its tensors.

    Raises:
        UsageError: If its tensors differ in their first size.
    """
    sizes = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim}
    if len(sizes) != 1:
        raise UsageError(
            f"a batch of the DataLoader has tensors of {sorted(sizes)} rows: expected tensors with"
            " one row for each example"
        )
    return sizes.pop()
