"""Replaying a linear map: step by step, or on a GPU as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpulab.saddles._forward.linear_maps import LinearMap

WARM_UPS = 2
LIVE = 5  # of the tangents of a map, about one in five is there at a time


class GraphedMap:
    """A linear map of tangents (k, …).

    On a GPU a product is thousands of small kernels, and launching them takes longer than running them.
    So the map is captured in a CUDA graph, one for each k, at the first product of that k.
    """

    def __init__(self, linear_map: LinearMap) -> None:
        self.linear_map, self.bytes = linear_map, linear_map.bytes // LIVE
        self.graphs: dict[int, tuple[Any, list[Tensor], list[Tensor]]] = {}
        self.pool: Any = None

    def __call__(self, *tangents: Tensor) -> list[Tensor]:
        """The map of tangents; on a GPU, the next call overwrites what it returns."""
        if not tangents[0].is_cuda:
            return self.linear_map(*tangents)
        k = len(tangents[0])
        if k not in self.graphs:
            self.graphs[k] = self._graph(tangents)
        graph, inputs, outputs = self.graphs[k]
        for place, tangent in zip(inputs, tangents, strict=True):
            place.copy_(tangent)
        graph.replay()
        return outputs

    def _graph(self, tangents: Sequence[Tensor]) -> tuple[Any, list[Tensor], list[Tensor]]:
        """The graph for as many tangents, with its own inputs and outputs."""
        inputs = [torch.zeros_like(tangent, memory_format=torch.contiguous_format) for tangent in tangents]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.linear_map(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="relaxed"):
            outputs = self.linear_map(*inputs)
        return graph, inputs, outputs
