"""Which parameters the steps of optimizers have changed, and which line made the step."""

from __future__ import annotations

from typing import NamedTuple

from torch.optim import Optimizer

from gpulab.guards.memory import Line, Span, overlap, span_of, user_line
from gpulab.guards.own_work import own_work


class Step(NamedTuple):
    """A step of an optimizer."""

    number: int  # of all steps, in order
    optimizer: str
    line: Line
    changed: list[Span]


class OptimizerSteps:
    """The latest step of each optimizer whose steps are given to `note`."""

    def __init__(self) -> None:
        self.count = 0
        self.latest: dict[int, Step] = {}  # by the identity of the optimizer

    @own_work
    def note(self, optimizer: Optimizer, *_: object) -> None:
        """A step was made: it changed the parameters that have a gradient."""
        self.count += 1
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        changed = [span_of(parameter) for parameter in parameters if parameter.grad is not None]
        self.latest[id(optimizer)] = Step(self.count, type(optimizer).__name__, user_line(), changed)

    def since(self, count: int, span: Span) -> Step | None:
        """A step that changed something in a piece of memory after the first `count` steps."""
        steps = (step for step in self.latest.values() if step.number > count)
        return next((step for step in steps if any(overlap(span, changed) for changed in step.changed)), None)
