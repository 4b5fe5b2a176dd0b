"""Adam, without what importing torch's own class costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam


class Adam:
    """Adam (Kingma, Ba 2014) with its usual constants, by torch's fused kernel.

    The same bits as `torch.optim.Adam(fused=True)`, whose class imports torch's compiler when it is
    first used: 150 MB and two seconds in every process.
    """

    CONSTANTS = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}

    def __init__(self, parameters: list[torch.nn.Parameter], learning_rate: float) -> None:
        self.parameters, self.learning_rate = parameters, learning_rate
        self.state = {
            "step": [torch.zeros((), dtype=torch.float32, device=p.device) for p in parameters],
            "exp_avg": [torch.zeros_like(p) for p in parameters],
            "exp_avg_sq": [torch.zeros_like(p) for p in parameters],
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        used = [index for index, parameter in enumerate(self.parameters) if parameter.grad is not None]
        steps, averages, squares = ([tensors[index] for index in used] for tensors in self.state.values())
        weights: list[Tensor] = [self.parameters[index] for index in used]
        gradients: Any = [parameter.grad for parameter in weights]
        options: Any = {**self.CONSTANTS, "lr": self.learning_rate, "fused": True}
        adam(weights, gradients, averages, squares, [], steps, **options)
