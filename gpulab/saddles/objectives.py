"""What a loss is computed on: which batches `hessian`, `find_critical_point` and `landscape` accept, decided once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader

from gpulab.audits.steps import loss_of
from gpulab.errors import UsageError

Loss = Callable[..., Tensor]
Batch = Any


@dataclass(frozen=True)
class Objective:
    """A loss as a function of the model alone.

    Attributes:
        loss: The loss, as it was given.
        batches: What it is computed on: one batch, or all those of a `DataLoader`. Empty where the loss is a function
            of nothing, which asks the model itself.
    """

    loss: Loss
    batches: tuple[Batch, ...] = ()

    @classmethod
    def of(cls, loss: Loss, batch: Batch) -> Objective:
        """The objective of a loss and a batch; `UsageError` where the two do not fit."""
        if batch is None:
            if not _takes(loss, 0):
                raise UsageError(f"{_name(loss)} takes arguments, and there is no batch: give (inputs, targets)")
            return cls(loss)
        if isinstance(batch, DataLoader):
            with torch.random.fork_rng(devices=[]):
                batches = tuple(batch)  # drawn once: the loss is the same each time
            if not batches:
                raise UsageError("the DataLoader given as a batch has none")
        else:
            batches = (batch,)
        alone = isinstance(batches[0], Tensor)
        if not _takes(loss, 1 if alone else 2):
            lack = "needs targets, and the batch is a tensor" if alone else "does not take outputs and targets"
            raise UsageError(f"{_name(loss)} {lack}: the batch is (inputs, targets), or fits the loss")
        return cls(loss, tuple(dict(one) if isinstance(one, Mapping) else one for one in batches))

    def __call__(self, model: nn.Module) -> Tensor:
        """Compute the loss, a scalar; of several batches the mean over all their examples."""
        if len(self.batches) < 2:
            return self._of_batch(model, *self.batches)
        sizes = [_examples(batch) for batch in self.batches]
        losses = [size * self._of_batch(model, batch) for size, batch in zip(sizes, self.batches, strict=True)]
        return torch.stack(losses).sum() / sum(sizes)

    def _of_batch(self, model: nn.Module, batch: Batch = None) -> Tensor:
        if batch is None:
            value: Any = self.loss()
        else:
            value = self.loss(model(batch)) if isinstance(batch, Tensor) else loss_of(model, batch, self.loss)[0]
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UsageError(f"the loss is {getattr(value, 'shape', type(value).__name__)}: expected a scalar tensor")
        return value

    def double(self) -> Objective:
        """The same on numbers in float64."""
        batches = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, self.batches)
        return replace(self, batches=batches)


def check_keeps_weights(name: str, module: nn.Module) -> None:
    """Raise `UsageError` for an embedding that changes its weights when it is used: the loss would be another then."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise UsageError(
            f"{name or 'the model'} shortens its own weights each time that it is used (max_norm={module.max_norm})"
            ": shorten them once, weight.data.renorm_(norm_type, 0, max_norm), and set max_norm = None"
        )


def _takes(loss: Loss, count: int) -> bool:
    """Whether a function takes so many arguments; yes where it does not say."""
    try:
        inspect.signature(getattr(loss, "forward", loss)).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # as of some functions that are written in C
        pass
    return True


def _name(loss: Loss) -> str:
    return f"loss={getattr(loss, '__name__', type(loss).__name__)}"


def _examples(batch: Batch) -> int:
    """How many examples a batch has: the first size of its first tensor."""
    sizes = [len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if not sizes:
        raise UsageError(
            f"a batch of the DataLoader, a {type(batch).__name__}, has no tensor with a row for each example"
        )
    return sizes[0]
