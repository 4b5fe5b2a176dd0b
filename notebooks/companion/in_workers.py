"""What other processes do for notebook 02. They load this file, so it loads neither tables nor plots."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from companion.first_windows import FirstWindow


def first_step(setting: str, net: str, profile: str, seeds: int, options: dict[str, Any]) -> dict[str, np.ndarray]:
    """The first step's `losses` (seeds, frames) and `gradient` (seeds, weights)."""
    losses, gradients = [], []
    for seed in range(seeds):
        computed = FirstWindow(net, seed=seed, profile=profile, setting=setting, **options).gradient(setting)
        losses.append(computed.losses.float())
        gradients.append(torch.cat([g.reshape(-1) for _, g in sorted(computed.gradient.items())]))
    return {"losses": torch.stack(losses).numpy(), "gradient": torch.stack(gradients).numpy()}
