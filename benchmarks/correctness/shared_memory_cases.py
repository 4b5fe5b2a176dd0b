"""Correct and faulty programs that share memory, under `gl.guard(reads="any")`.

    python benchmarks/correctness/shared_memory_cases.py --write benchmarks/results/shared_memory.md

Twelve programs of our own have the fault of a public thread; twelve similar programs are correct.
The expected answers were written down before the guard was tried on any of them. A fault is
*placed* (located) if the finding names the line that created the tensor, or saved it, which ends in
`# here`.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.correctness.guarded_programs import Program, guarded, show_guarded


class Camera:
    """A simulator that keeps its observation in one array, which each step overwrites."""

    def __init__(self, shape: tuple[int, ...] = (6,)) -> None:
        self.screen = np.zeros(shape, np.float32)

    def step(self) -> np.ndarray:
        """Return the same array again, with the current observation."""
        self.screen += 1
        return self.screen


def network() -> nn.Module:
    """A small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


# --- faulty programs ------------------------------------------------------------------------------


def replay_memory() -> None:
    """A transition table keeps the states that the policy saw."""
    camera, q, memory = Camera(), network(), collections.deque(maxlen=16)
    for _ in range(6):
        state = torch.from_numpy(camera.step())  # here
        with torch.no_grad():
            action = q(state).argmax()
        memory.append((state, action))
    for state, action in memory:
        q(state)[action].square().backward()


def before_and_after() -> None:
    """The difference of two observations that share one array."""
    camera, value = Camera(), network()
    before = torch.from_numpy(camera.step())  # here
    after = torch.from_numpy(camera.step())
    (value(after) - value(before)).square().sum().backward()


def rollout_stacked() -> Tensor:
    """A rollout of a vector of environments that is stacked at its end."""
    camera, rollout = Camera((4, 6)), []
    for _ in range(5):
        rollout.append(torch.as_tensor(camera.step()))  # here
    return network()(torch.stack(rollout)).sum()


def agents_of_one_array() -> Tensor:
    """Every agent is given the same array, which is overwritten each time."""
    camera = Camera()
    return torch.cat([torch.as_tensor(camera.step()) for _ in range(4)])  # here


def next_observation() -> None:
    """A learner's batch of pairs that is assembled later from a list of tensors."""
    camera, pairs, model = Camera(), [], network()
    seen = torch.from_numpy(camera.step())  # here
    for _ in range(4):
        following = torch.from_numpy(camera.step())
        pairs.append((seen, following))
        seen = following
    for seen, following in pairs:
        F.mse_loss(model(seen), model(following).detach()).backward()


def states_kept_by_an_agent() -> Tensor:
    """An agent appends its observations, and updates after the episode."""
    camera, states = Camera(), []
    for _ in range(3):
        states.append(torch.frombuffer(camera.step(), dtype=torch.float32))  # here
    return torch.vstack(states).mean()


def learner_behind() -> None:
    """A learner that is one step behind reads what the simulator has overwritten."""
    camera, model, behind = Camera(), network(), None
    for _ in range(4):
        seen = torch.from_dlpack(camera.step())  # here
        if behind is not None:
            model(behind).sum().backward()
        behind = seen


def loader_with_one_buffer() -> None:
    """A loader fills one buffer, and two batches are compared."""
    buffer = np.empty((3, 6), np.float32)

    def batches() -> Any:
        for number in range(4):
            buffer[:] = number
            yield torch.from_numpy(buffer)  # here

    first, *others = batches()
    for other in others:
        (network()(first) - network()(other)).square().sum().backward()


def memory_bank() -> None:
    """A loader with two buffers, whose user keeps three batches."""
    banks = [np.zeros(6, np.float32), np.zeros(6, np.float32)]
    held = []
    for number in range(3):
        banks[number % 2][:] = number
        held.append(torch.as_tensor(banks[number % 2]))  # here
    network()(held[0]).sum().backward()


def published_loop() -> None:
    """Backpropagation through time over one array of frames."""
    camera, model, loss = Camera(), network(), torch.zeros(())
    for _ in range(4):
        frame = torch.as_tensor(camera.step())
        loss = loss + model(frame).square().sum()  # here
    loss.backward()


def slot_reused() -> None:
    """A slot that the gradient needs is reused before the gradient is computed."""
    slot = np.ones(6, np.float32)
    weights = torch.ones(6, requires_grad=True)
    loss = (weights * torch.from_numpy(slot)).sum()  # here
    np.multiply(slot, 7500, out=slot)
    loss.backward()


def written_after_from_numpy() -> None:
    """NumPy writes between the forward and the backward pass."""
    inputs = np.ones((2, 6), np.float32)
    loss = network()(torch.from_numpy(inputs)).sum()  # here
    inputs -= inputs.mean()
    loss.backward()


# --- correct programs -----------------------------------------------------------------------------


def replay_of_copies() -> None:
    """Like `replay_memory`, with a copy."""
    camera, q, memory = Camera(), network(), collections.deque(maxlen=16)
    for _ in range(6):
        memory.append(torch.from_numpy(camera.step().copy()))
    for state in memory:
        q(state).sum().backward()


def replay_in_one_tensor() -> Tensor:
    """A replay memory that is one tensor, into which each observation is copied."""
    camera, memory = Camera(), torch.empty(8, 6)
    for number in range(8):
        memory[number] = torch.from_numpy(camera.step())
    return network()(memory).sum()


def difference_at_once() -> None:
    """Two observations, the older one cloned."""
    camera, value = Camera(), network()
    before = torch.from_numpy(camera.step()).clone()
    (value(torch.from_numpy(camera.step())) - value(before)).square().sum().backward()


def rollout_by_numpy() -> Tensor:
    """A rollout that NumPy copies into one array first."""
    camera = Camera((4, 6))
    return network()(torch.from_numpy(np.stack([camera.step().copy() for _ in range(5)]))).sum()


def rows_of_one_array() -> Tensor:
    """Each agent has its own row."""
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)
    return torch.stack([torch.from_numpy(row) for row in rows]).sum()


def step_by_step() -> None:
    """A gradient is computed after each observation, and no observation is kept."""
    camera, model = Camera(), network()
    for _ in range(5):
        model(torch.from_numpy(camera.step())).sum().backward()


def staging_buffer() -> None:
    """One tensor over one array that is refilled for every batch: an intended view."""
    array = np.zeros((3, 6), np.float32)
    batch, model = torch.from_numpy(array), network()
    for number in range(4):
        array[:] = number
        model(batch).sum().backward()


def double_buffer() -> None:
    """Two buffers, and never more than the last two batches in use."""
    banks, model, before = [np.zeros(6, np.float32) for _ in range(2)], network(), None
    for number in range(6):
        banks[number % 2][:] = number
        now = torch.from_numpy(banks[number % 2])
        if before is not None:
            (model(now) - model(before)).square().sum().backward()
        before = now


def data_loader() -> None:
    """`torch.utils.data` over an array, shuffled."""
    data = torch.utils.data.TensorDataset(
        torch.from_numpy(np.arange(60, dtype=np.float32).reshape(10, 6))
    )
    kept = [batch for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)]
    network()(torch.cat(kept)).sum().backward()


def written_by_torch() -> None:
    """Torch itself writes, and its version counter changes."""
    inputs = torch.from_numpy(np.ones(6, np.float32))
    for _ in range(3):
        inputs.add_(1)
        network()(inputs).sum().backward()


def same_tensor_twice() -> Tensor:
    """One observation that is intentionally used several times."""
    seen = torch.from_numpy(Camera().step())
    return torch.stack([seen] * 4).sum() + torch.cat([seen, seen]).sum()


def normalised_in_place() -> None:
    """NumPy normalises before torch sees the array."""
    inputs = np.arange(12, dtype=np.float32).reshape(2, 6)
    inputs -= inputs.mean()
    network()(torch.from_numpy(inputs)).sum().backward()


STALE, TOGETHER, BACKWARD = "stale", "together", "numpy"
CASES = [
    Program(replay_memory, "Kaixhin/Atari#11", STALE),
    Program(before_and_after, "dm_control#34", STALE),
    Program(rollout_stacked, "openai/baselines#418", TOGETHER),
    Program(agents_of_one_array, "MultiAgentLearning/playground#234", TOGETHER),
    Program(next_observation, "SuperSuit#116", STALE),
    Program(states_kept_by_an_agent, "tensorforce#115", TOGETHER),
    Program(learner_behind, "Motphys/UniLab#799", STALE),
    Program(loader_with_one_buffer, "DALI#5617", STALE),
    Program(memory_bank, "ffcv#37", STALE),
    Program(published_loop, "eijwat/prednet_in_chainer_py3", BACKWARD),
    Program(slot_reused, "ggml#1501", BACKWARD),
    Program(written_after_from_numpy, "pytorch#6597", BACKWARD),
    *(
        Program(program, "", "")
        for program in (
            *(
                replay_of_copies,
                replay_in_one_tensor,
                difference_at_once,
                rollout_by_numpy,
                rows_of_one_array,
            ),
            *(
                step_by_step,
                staging_buffer,
                double_buffer,
                data_loader,
                written_by_torch,
                same_tensor_twice,
            ),
            normalised_in_place,
        )
    ),
]


def tried(case: Program) -> dict[str, Any]:
    """Return the guard's report on a program that has also run without it."""
    case.program()
    return guarded(case)


def main(
    write: Annotated[
        Path | None, typer.Option("--write", "--record", help="page of Markdown, between its marks")
    ] = None,
) -> None:
    """Run all programs under the guard."""
    show_guarded("Shared memory", write, [tried(case) for case in CASES])


if __name__ == "__main__":
    typer.run(main)
