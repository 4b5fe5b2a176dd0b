"""Running a linear program: step by step, or on a GPU as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpulab.saddles._forward.linear_maps import Program

WARM_UPS = 2
LIVE = 5  # of the tangents of a program, about one in five is there at a time


class Products:
    """Products of a linear program with tangents of `points`, k at a time; zeros where nothing depends on them.

    On a GPU a product is thousands of small kernels, and launching them takes longer than running them.
    So the program is captured in a CUDA graph, one for each k, at the first product of that k.
    """

    def __init__(self, program: Program, points: Sequence[Tensor]) -> None:
        self.program, self.points = program, [point.detach() for point in points]
        self.bytes = program.bytes // LIVE
        self.captures: dict[int, _Capture] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.points[0].is_cuda else None

    def __call__(self, *tangents: Tensor) -> list[Tensor]:
        """Products with tangents of shapes (k, …)."""
        if self.pool is None:
            return self.run(*tangents)
        k = len(tangents[0])
        if k not in self.captures:
            self.captures[k] = _Capture(self, tangents)
        return self.captures[k](*tangents)

    def run(self, *tangents: Tensor) -> list[Tensor]:
        """The same, step by step."""
        made = self.program(*tangents)
        return [torch.zeros_like(t) if m is None else m for t, m in zip(tangents, made, strict=True)]


class _Capture:
    """The program for one k, as a CUDA graph with its own inputs and outputs."""

    def __init__(self, products: Products, tangents: Sequence[Tensor]) -> None:
        self.inputs = [torch.zeros_like(tangent, memory_format=torch.contiguous_format) for tangent in tangents]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                products.run(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=products.pool, capture_error_mode="relaxed"):
            self.outputs = products.run(*self.inputs)

    def __call__(self, *tangents: Tensor) -> list[Tensor]:
        for place, tangent in zip(self.inputs, tangents, strict=True):
            place.copy_(tangent)
        self.graph.replay()
        return self.outputs
