"""The findings of a guard, and how they are phrased."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from torch import Tensor

from gpulab._torch_internals import Span
from gpulab.guards._call_sites import Line
from gpulab.guards._holders import Holder

SAVED_HEADLINE = (
    "the backward pass of {function} ({operation}) was given {operand}, {tensor}, which was"
    " overwritten after it was saved"
)
READ_HEADLINE = "{function} read a tensor, {tensor}: "
COPIED_HEADLINE = "a pinned tensor, {tensor}: "
FOREIGN_WRITE = (
    "something other than torch wrote to its memory, and another tensor was created over it"
)
COPY_REMEDY = (
    "copy the data when you create the tensor: torch.tensor(array) or"
    " torch.from_numpy(array.copy())"
)
COPY_IS_QUEUED = "with non_blocking=True a copy may still be running after the call has returned"
WRITER_NOT_KNOWN = "; the line that wrote is not known"
WRITER_UNKNOWN = WRITER_NOT_KNOWN + ", only that it ran after the tensor was saved or created"
HINT_IF_NOT_TRACED = ' (gpulab.guard(reads="any") tries to find it)'
HINT_IF_TRACED = (
    ' (gpulab.guard(on="warn", reads="any") may find it when the program writes there again)'
)
CAUSES = {  # what happened, why, and what to do
    "inplace": (
        SAVED_HEADLINE,
        "an in-place operation changed it",
        "use the out-of-place operation, or give autograd a copy: .clone()",
    ),
    "replaced": (
        SAVED_HEADLINE,
        "other values were assigned to its `.data`",
        "assign to it after backward",
    ),
    "numpy": (
        SAVED_HEADLINE,
        "NumPy wrote into its memory",
        "copy it: torch.tensor(array) or torch.as_tensor(array.copy())",
    ),
    "step": (
        SAVED_HEADLINE,
        (
            "it is a parameter that was changed in place after the forward pass, as an optimizer's"
            " step does"
        ),
        (
            "step after backward: before the step, call `backward` on every loss that was computed"
            " with the parameter, or recompute that loss after the step"
        ),
    ),
    "data": (
        SAVED_HEADLINE,
        (
            "something that autograd does not see wrote into its memory: a write through .data or"
            " .numpy(), or a loader that keeps refilling one buffer"
        ),
        "copy it before it is overwritten: .clone()",
    ),
    "stale": (
        READ_HEADLINE + "its memory was overwritten before it was read again",
        FOREIGN_WRITE,
        COPY_REMEDY,
    ),
    "together": (
        READ_HEADLINE + "several tensors that should differ share one memory",
        FOREIGN_WRITE,
        COPY_REMEDY,
    ),
    "leaving": (
        COPIED_HEADLINE
        + "its memory was overwritten before the program waited for its copy to the GPU",
        COPY_IS_QUEUED,
        (
            "wait before you write to it again (record an event after the copy and call"
            " `event.synchronize()`), or fill another buffer each time"
        ),
    ),
    "arriving": (
        COPIED_HEADLINE + "it was read before the program waited for its copy from the GPU",
        COPY_IS_QUEUED,
        (
            "leave out non_blocking=True, or wait before you read it:"
            " torch.cuda.current_stream().synchronize()"
        ),
    ),
}


class OptimizerStep(NamedTuple):
    """A step of an optimizer.

    Attributes:
        number: The number of the step, counted over all optimizers.
        optimizer: The name of the optimizer's class.
        line: The line that called `step`.
        changed: The memory of the parameters that the step changed.
    """

    number: int
    optimizer: str
    line: Line
    changed: list[Span]


# Where a word begins in the name of a node of autograd's graph. Torch capitalises each word of the
# function's name and each letter after a digit, such as the D of `MaxPool2DWithIndices`. Such a
# letter does not begin a word, except in `smooth_l1_loss`. In `grid_sampler_2d`, a digit does.
WORD_START = re.compile(r"(?<=[A-Za-z])(?=[A-Z])|(?<=L1)(?=Loss)|(?<=GridSampler)(?=\d)")


@functools.cache
def _function_name(node: str) -> str:
    """Return the name of the function to which a node of autograd's graph belongs.

    For a `torch.autograd.Function`, this is the name of the class. For other operations, such as
    copies, it is the given name itself.

    >>> _function_name("MseLossBackward0"), _function_name("MyFunctionBackward")
    ('mse_loss', 'MyFunction')
    >>> _function_name("MaxPool2DWithIndicesBackward0"), _function_name("NllLoss2DBackward0")
    ('max_pool2d_with_indices', 'nll_loss2d')
    >>> _function_name("SmoothL1LossBackward0"), _function_name("GridSampler2DBackward0")
    ('smooth_l1_loss', 'grid_sampler_2d')

    Args:
        node: The name of the node.
    """
    match = re.fullmatch(r"(.*)Backward\d+", node)
    if match:
        return WORD_START.sub("_", match[1]).lower()
    return node.removesuffix("Backward")


@dataclass(frozen=True)
class Overwritten:
    """A finding of a guard: an operation used memory that was, or was about to be, overwritten.

    `print` shows it on several lines.

    Attributes:
        cause: The kind of cause, one of `CAUSES`.
        operation: The operation that used the memory. In a backward pass this is the name of
            autograd's node, such as `MulBackward0`.
        function: The corresponding function of torch, such as `mul`.
        operand: The name of the function's operand that was overwritten; None if it is not known.
        shape: The shape of the tensor.
        dtype: The type of the tensor, such as `float32`.
        device: The device of the tensor, such as `cpu`.
        lines: The lines of your program that were involved, keyed by what they did. The first one,
            `line`, is the one to correct.
        explanation: Why the memory was overwritten, and what shares it.
        remedy: What to do about it.
        count: The number of times that the guard found it.
        writes: The lines that wrote into the memory between the tensor's first and last byte since
            it was saved or created. Each item is a tuple of one line. If several threads were
            running, it is a tuple of several lines, one of which wrote. Empty if no line is known,
            as is always the case with `reads="backward"`.
        unnamed: How often no line that wrote is known, at most `count`.
        writers: All lines in `writes`.

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> import gpulab as gl
        >>> frame, weight = np.ones(3, np.float32), torch.ones(3, requires_grad=True)
        >>> try:
        ...     with gl.guard():
        ...         loss = (weight * torch.from_numpy(frame)).sum()
        ...         frame[:] = 2
        ...         loss.backward()
        ... except gl.OverwrittenError as error:
        ...     print(error.finding.cause, list(error.finding.lines), error.finding.remedy)
        numpy ['saved by'] copy it: torch.tensor(frame) or torch.as_tensor(frame.copy())
    """

    cause: str
    operation: str
    function: str
    operand: str | None
    shape: tuple[int, ...]
    dtype: str
    device: str
    lines: dict[str, Line]
    explanation: str
    remedy: str
    count: int = 1
    writes: tuple[tuple[Line, ...], ...] = ()
    unnamed: int = 0

    @classmethod
    def of(
        cls,
        cause: str,
        operation: str,
        tensor: Tensor,
        lines: dict[str, Line],
        operand: str | None = None,
    ) -> Self:
        """Make a finding with the explanation and the remedy of its cause."""
        _, explanation, remedy = CAUSES[cause]
        return cls(
            cause=cause,
            operation=operation,
            function=_function_name(operation),
            operand=operand,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            lines=lines,
            explanation=explanation,
            remedy=remedy,
        )

    @property
    def line(self) -> Line:
        """The line that saved the tensor for backward, created it, or requested its copy."""
        return next(iter(self.lines.values()))

    @property
    def writers(self) -> tuple[Line, ...]:
        """The lines that wrote into the memory or, with several threads, may have written."""
        return tuple(dict.fromkeys(line for lines in self.writes for line in lines))

    def with_cause(self, cause: str) -> Overwritten:
        """Return the same finding with the explanation and the remedy of another cause."""
        _, explanation, remedy = CAUSES[cause]
        return replace(self, cause=cause, explanation=explanation, remedy=remedy)

    def with_optimizer_step(self, step: OptimizerStep) -> Overwritten:
        """Return the same finding, attributed to the step of an optimizer."""
        changer = f"the step of the optimizer {step.optimizer}"
        explanation = f"it is a parameter, which {changer} changed after the forward pass"
        return replace(
            self.with_cause("step"),
            lines={**self.lines, "changed by": step.line},
            explanation=explanation,
        )

    def with_writers(self, writes: Iterable[tuple[Line, ...]], hint: str) -> Overwritten:
        """Return the same finding with the lines that wrote, each a tuple as in `writes`.

        If there are none, the explanation states that the line is not known. `hint` says how to
        find it.
        """
        writes = _distinct_writes(writes)
        if writes:
            return replace(self, writes=writes)
        explanation = self.explanation + WRITER_UNKNOWN + hint
        return replace(self, explanation=explanation, unnamed=1)

    def merged_with(self, later: Overwritten) -> Overwritten:
        """Return this finding, found once more, with the lines that wrote then."""
        count, unnamed = self.count + 1, self.unnamed + later.unnamed
        explanation = self.explanation
        if unnamed < count:
            explanation = explanation.partition(WRITER_NOT_KNOWN)[0]
            if unnamed:
                explanation += f"{WRITER_NOT_KNOWN} for {unnamed} of {count} times"
        return replace(
            self,
            writes=_distinct_writes([*self.writes, *later.writes]),
            count=count,
            unnamed=unnamed,
            explanation=explanation,
        )

    def with_holder(self, holder: Holder) -> Overwritten:
        """Return the same finding with the variable that shares the memory.

        If the variable is a NumPy array, a write of unknown origin is attributed to NumPy.
        """
        finding = self.with_cause("numpy") if holder.array and self.cause == "data" else self
        return replace(
            finding,
            explanation=f"{finding.explanation}; it shares memory with {holder.words}",
            remedy=finding.remedy.replace("array", holder.array or "array"),
        )

    def __str__(self) -> str:
        """Return the finding as text of several lines.

        >>> import torch
        >>> step = {"saved by": Line("train.py", 7, "step")}
        >>> found = Overwritten.of("replaced", "MulBackward0", torch.ones(3), step)
        >>> print(str(found).partition(" was given ")[2])
        a tensor, float32 of shape (3,) on cpu, which was overwritten after it was saved
          saved by step, train.py:7
          why: other values were assigned to its `.data`
          do: assign to it after backward
        >>> print(
        ...     str(replace(found, operand="self", count=2))
        ...     .splitlines()[0]
        ...     .partition(" was given ")[2]
        ... )
        its `self`, float32 of shape (3,) on cpu, which was overwritten after it was saved (2 times)
        """
        operand = f"its `{self.operand}`" if self.operand else "a tensor"
        tensor = f"{self.dtype} of shape {self.shape} on {self.device}"
        headline_template, _, _ = CAUSES[self.cause]
        headline = headline_template.format_map(
            {**vars(self), "operand": operand, "tensor": tensor}
        )
        times = f" ({self.count} times)" if self.count > 1 else ""
        lines = [f"  {role} {line}" for role, line in self.lines.items()]
        if self.line.text:
            lines.insert(1, f"      {self.line.text}")
        for possible_writers in self.writes:
            role = "written by" if len(possible_writers) == 1 else "written by this line"
            for line in possible_writers:
                lines.append(f"  {role} {line}")
                if line.text:
                    lines.append(f"      {line.text}")
                role = "or by"
        return "\n".join(
            [headline + times, *lines, f"  why: {self.explanation}", f"  do: {self.remedy}"]
        )


def _distinct_writes(writes: Iterable[tuple[Line, ...]]) -> tuple[tuple[Line, ...], ...]:
    """Return each group of lines once, without groups that contain a line known to have written.

    >>> first, second, third = (Line("train.py", number, "step") for number in (1, 2, 3))
    >>> _distinct_writes([(first,), (second, first), (second, third), (third, second)]) == (
    ...     (first,),
    ...     (second, third),
    ... )
    True
    """
    groups = {frozenset(lines): lines for lines in reversed(list(writes))}
    known = {lines[0] for lines in groups.values() if len(lines) == 1}
    return tuple(
        lines for lines in reversed(groups.values()) if len(lines) == 1 or known.isdisjoint(lines)
    )
