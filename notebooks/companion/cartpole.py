"""REINFORCE on CartPole, with observations that share one array or are copied (notebook 11)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

# environments; steps before an update; updates; last updates, whose episodes are counted
WORLDS, STEPS, UPDATES, LAST = (
    8,
    200,
    60,
    10,
)


def cartpole(seed: int, keep: str = "as_tensor") -> dict[str, float]:
    """Train REINFORCE on eight CartPoles, and return how long a pole stays up at the end.

    The observations are kept until the update.

    Gymnasium's vector environment hands over one array (`copy=False`), and writes the next
    observation into it.

    Args:
        seed: Seeds the policy's weights, its actions, and the environments.
        keep: The function of torch that makes a tensor of an observation, `as_tensor` or `tensor`.

    References:
        Williams 1992, *Simple statistical gradient-following algorithms for connectionist
        reinforcement learning*. Barto, Sutton, Anderson 1983, *Neuronlike adaptive elements that
        can solve difficult learning control problems*.
    """
    import gymnasium

    options = {"copy": False, "autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    worlds = gymnasium.make_vec(
        "CartPole-v1", WORLDS, vectorization_mode="sync", vector_kwargs=options
    )
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), 0.01)
    observed, _ = worlds.reset(seed=seed)
    age, lengths = np.zeros(WORLDS), []
    for update in range(UPDATES):
        seen, done, ended = [], [], []
        for _ in range(STEPS):
            seen.append(getattr(torch, keep)(observed))  # the line in question
            with torch.no_grad():
                done.append(Categorical(logits=policy(seen[-1])).sample())
            observed, _, fallen, over, _ = worlds.step(done[-1].numpy())
            ended.append(fallen | over)
            age += 1
            if update >= UPDATES - LAST:
                lengths += [*age[ended[-1]]]
            age[ended[-1]] = 0
        chances = Categorical(logits=policy(torch.stack(seen))).log_prob(torch.stack(done))
        optimizer.zero_grad()
        (-chances * _returns(np.array(ended))).mean().backward()
        optimizer.step()
    return {"steps_up": float(np.mean([*lengths, *age]))}


def _returns(ended: np.ndarray) -> Tensor:
    """The return of each step, discounted by 0.99 until the pole falls; shape (steps, worlds)."""
    returns, following = np.zeros(ended.shape, np.float32), np.zeros(ended.shape[1])
    for step in reversed(range(len(ended))):
        following = 1 + 0.99 * following * ~ended[step]
        returns[step] = following
    return torch.from_numpy((returns - returns.mean()) / (returns.std() + 1e-8))
