"""Adam, without the cost of importing torch's own class."""

from __future__ import annotations

import torch
from torch import Tensor

from gpulab._torch_internals import adam


class Adam:
    """Adam (Kingma, Ba 2014) with its default constants, using torch's fused kernel.

    The results are bitwise those of `torch.optim.Adam(fused=True)`. That class is not used because
    it imports torch's compiler, which takes 150 MB and two seconds in every process.

    Args:
        parameters: The parameters to update.
        learning_rate: The learning rate.

    Attributes:
        state: The number of steps and the two moments of each parameter, by torch's names.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], learning_rate: float) -> None:
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.state = {
            "step": [torch.zeros((), dtype=torch.float32, device=p.device) for p in parameters],
            "exp_avg": [torch.zeros_like(p) for p in parameters],
            "exp_avg_sq": [torch.zeros_like(p) for p in parameters],
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        indices = [
            index for index, parameter in enumerate(self.parameters) if parameter.grad is not None
        ]
        # In the order of `state`: the number of steps, the first moments and the second moments.
        steps, averages, squares = (
            [tensors[index] for index in indices] for tensors in self.state.values()
        )
        weights: list[Tensor] = [self.parameters[index] for index in indices]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        adam(
            weights,
            gradients,
            averages,
            squares,
            [],  # the largest second moments, which only AMSGrad needs
            steps,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.learning_rate,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )
