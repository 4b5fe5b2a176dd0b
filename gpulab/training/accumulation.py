"""A batch that does not fit into memory, split by itself: its gradient is accumulated over microbatches."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gpulab.diagnostics.steps import loss_of
from gpulab.errors import GpulabError, UsageError
from gpulab.models.base import Trainable

OUT_OF_MEMORY = re.compile("(?i)out of memory|not enough memory|can't allocate memory|bad_alloc|ALLOC_FAILED")
DRAWS = (nn.modules.dropout._DropoutNd, nn.RReLU)
EXAMPLES = 3  # on which it is tried whether a batch can be split


class GradientAccumulation:
    """Compute loss and gradient of a batch in smaller parts, microbatches, where the whole does not fit into memory.

    Call it with a batch in place of `loss.backward()`. With `batch="auto"` it tries the whole batch, and while that
    does not fit, half as many examples at a time. The size that fitted is remembered. The gradients of the parts are
    added up, each weighted by its share of the examples. The sum is the gradient of the whole batch up to rounding, so
    the learning rate stays as it is. In float32 the sum of the parts is within 1e-6 of the exact gradient; the gradient
    of a whole batch of 20,000 examples may be further off. What an attempt that failed has added to `.grad` is taken
    back.

    Before a batch is split for the first time, three of its examples are computed whole and in parts. Models for which
    the two differ are refused by name. These are batch normalisation in training mode and a covariance over the batch,
    which would see other batches; dropout, which would draw other masks; and a mean over what a mask leaves of each
    example.

    Args:
        model: A network. Of one that derives from `Trainable`, `training_loss` is what is differentiated.
        loss: A function of outputs and targets, as for `gpulab.Step`. Without it, what the model calls its loss.
        batch: `"auto"`, or the most examples that a microbatch may have.
        reduction: Whether the loss is the `mean` over the examples or their `sum`. By default what the loss itself says
            (`loss.reduction`), or else the mean.

    Attributes:
        batch: The size of microbatches that fitted; `"auto"` as long as every batch fitted whole.
        model: The network.
        loss: The loss function, or None.
        reduction: `mean` or `sum`.

    Raises:
        UsageError: For another reduction or size. When called, for a model or batch that cannot be split, and for a
            batch whose tensors do not all have a row for each example.
        GpulabError: When called, where a single example does not fit into memory.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> import gpulab as gl
        >>> model = nn.Linear(3, 1)
        >>> backward = gl.training.GradientAccumulation(model, nn.functional.mse_loss, batch=2)
        >>> inputs, targets = torch.rand(5, 3), torch.rand(5, 1)
        >>> loss = backward((inputs, targets))  # adds to .grad, as loss.backward() does
        >>> torch.allclose(loss, nn.functional.mse_loss(model(inputs), targets)), model.weight.grad.shape
        (True, torch.Size([1, 3]))
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None = None,
        batch: int | Literal["auto"] = "auto",
        reduction: str | None = None,
    ) -> None:
        self.reduction = reduction or getattr(loss, "reduction", "mean")
        if self.reduction not in ("mean", "sum"):
            raise UsageError(f"reduction {self.reduction!r}: expected 'mean' or 'sum'")
        if batch != "auto" and not (type(batch) is int and batch > 0):
            raise UsageError(f"batch {batch!r}: expected 'auto', or a whole number from 1")
        self.model, self.loss, self.batch = model, loss, batch
        self._splits = False  # whether that has been tried

    def __call__(self, batch: Any) -> Tensor:
        """Add the gradient of a batch's loss to `.grad` of the parameters, and return the loss, a tensor of shape ().

        Args:
            batch: (inputs, targets), or any nesting of tensors, each with a row for each example.
        """
        batch = dict(batch) if isinstance(batch, Mapping) else batch  # such as a tokenizer's
        count = _count(batch)
        size = count if self.batch == "auto" else min(self.batch, count)
        while True:
            if size < count and not self._splits:
                if isinstance(self.model, Trainable) and self.model.sequential:
                    name = type(self.model).__name__
                    raise UsageError(f"{name} carries a state from frame to frame: a window of frames cannot be split")
                self._check(batch, count)
            try:
                return self._attempt(batch, count, size)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                why = str(error).partition("\n")[0]
            if size == 1:
                raise GpulabError(f"one example of the batch alone does not fit into memory: {why}")
            gc.collect()  # now that the error is gone, whose frames held on to tensors
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self.batch = size = -(-size // 2)

    def _attempt(self, batch: Any, count: int, size: int) -> Tensor:
        """The loss, its gradient added to what was there; where it fails, that is as it was."""
        before = [(parameter, parameter.grad) for parameter in self._parameters()]
        for parameter, _ in before:
            parameter.grad = None
        losses = []
        try:
            for start in range(0, count, size):
                part = self._loss(_rows(batch, slice(start, start + size)), count)
                part.backward()
                losses.append(part.detach())
        except BaseException:
            for parameter, gradient in before:
                parameter.grad = gradient
            raise
        for parameter, gradient in before:
            if gradient is not None and parameter.grad is not None:
                gradient.data.add_(parameter.grad)
            parameter.grad = parameter.grad if gradient is None else gradient
        return torch.stack(losses).sum()

    def _loss(self, part: Any, count: int) -> Tensor:
        """What a part of a batch of so many examples adds to its loss."""
        if isinstance(self.model, Trainable):
            loss = self.model.training_loss(part, None)[0]
        else:
            loss = loss_of(self.model, part, self.loss)
        rows = _count(part)
        return loss if rows == count or self.reduction == "sum" else loss * (rows / count)

    def _parameters(self) -> list[nn.Parameter]:
        modules = [module for module in (self.model, self.loss) if isinstance(module, nn.Module)]
        return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]

    # --- whether it can be split -----------------------------------------------------------------------------

    def _check(self, batch: Any, count: int) -> None:
        """Raise `UsageError`, with a name, for what does not give the same gradient in parts."""
        name = type(self.model).__name__
        for path, module in self.model.named_modules():
            where = f"{type(module).__name__} ({path or name})"
            batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            if batch_norm and (module.training or module.running_mean is None):
                raise UsageError(f"{where} computes with mean and variance of the whole batch, which cannot be split")
            if isinstance(module, DRAWS) and module.training and getattr(module, "p", 1.0) > 0:
                raise UsageError(f"{where} draws other numbers for a batch in parts: split it with p=0 or in eval()")
        examples = min(EXAMPLES, count)
        try:
            self._try(batch, count, examples)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            warnings.warn(f"{examples} examples do not fit: nobody has tried whether {name} can be split", stacklevel=3)
        self._splits = True

    def _try(self, batch: Any, count: int, examples: int) -> None:
        some = _rows(batch, torch.linspace(0, count - 1, examples).long())
        buffers = [(name, buffer, buffer.clone()) for name, buffer in self.model.named_buffers()]
        devices = {p.device for p in self._parameters() if p.device.type == "cuda"}
        try:
            with torch.random.fork_rng(devices=list(devices)):
                whole, again = self._gradient([some]), self._gradient([some])
                parts = self._gradient([_rows(some, slice(0, -1)), _rows(some, slice(-1, None))])
            changed = [name for name, buffer, before in buffers if not torch.equal(buffer, before)]
        finally:
            for _, buffer, before in buffers:
                buffer.data.copy_(before)
        name = type(self.model).__name__
        if changed:
            raise UsageError(f"{name} changes its {changed[0]} each time it is called: its batch cannot be split")
        if not _close(whole, again) and whole.isfinite().all():
            raise UsageError(f"{name} draws random numbers, which would be others for a batch in parts")
        if not _close(whole, parts):
            raise UsageError(
                f"the batch of {name} cannot be split: the {self.reduction} over {examples} examples has another "
                f"gradient than {examples - 1} and 1 of them, as where one sees the others or they count differently"
            )

    def _gradient(self, parts: list[Any]) -> Tensor:
        """The gradient of a batch that consists of these parts, flat."""
        count, parameters = sum(map(_count, parts)), self._parameters()
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for part in parts:
            gradients = torch.autograd.grad(
                self._loss(part, count), parameters, allow_unused=True, materialize_grads=True
            )
            total = [one + more for one, more in zip(total, gradients, strict=True)]
        return torch.cat([gradient.reshape(-1) for gradient in total])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator, of a GPU or the CPU, had too little memory.

    Examples:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(RuntimeError("a shape"))
        (True, False)
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(
        isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))
    )


def _close(one: Tensor, other: Tensor) -> bool:
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    return bool((one - other).norm() <= tolerance * one.norm())


def _count(batch: Any) -> int:
    """How many examples a batch has."""
    rows = {leaf.shape[0] if leaf.ndim else 0 for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
    if len(rows) != 1 or 0 in rows:
        raise UsageError(f"a batch of tensors with {sorted(rows)} rows: expected tensors with a row for each example")
    return rows.pop()


def _rows(batch: Any, which: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[which], batch)
