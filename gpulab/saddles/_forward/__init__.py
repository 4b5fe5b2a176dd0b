"""doc"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gpulab.errors import UnsupportedError
from gpulab.saddles._forward.capture import capture_gradient
from gpulab.saddles._forward.graphed_map import GraphedMap
from gpulab.saddles._forward.jvp_rules import Builder, ByTorch
from gpulab.saddles._forward.linear_maps import LinearMap

__all__ = ["linearize_gradient"]


def linearize_gradient(
    objective: Callable[[], Tensor], points: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], GraphedMap]:
    """(loss, gradients, H)."""
    try:
        return _linearize(objective, points, create_graph=False)
    except UnsupportedError:
        return _linearize(objective, points, create_graph=True)


def _linearize(objective, points, create_graph):
    builder = Builder(len(points))
    loss, gradients, tangents = capture_gradient(objective, points, builder.linearize, create_graph)
    for step in builder.steps:
        if isinstance(step.function, ByTorch):
            step.function.settle()
    linear_map = LinearMap(builder.steps, tangents, builder.bytes)
    return loss, gradients, GraphedMap(linear_map.optimized(points[0].dtype))
