"""Notebook 11: programs of five fields in which one array is filled again while somebody still needs what was in it.

A source hands over the same array each time, as recorders, servers, loaders and simulators do. Whether its user keeps
the array (`torch.as_tensor`) or a copy (`torch.tensor`) is the user's one line.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpulab as gl
from companion.benchmarks import benchmark
from companion.cartpole import cartpole as learn_cartpole  # noqa: F401 (the module has the other name)
from companion.findings import CheckedSentences, finding, listed
from gpulab.plots import style
from gpulab.plots.names import OWN_MEMORY, SHARED_MEMORY
from gpulab.report import Picture
from gpulab.store.recorded import recorded_table
from gpulab.store.runs import recorded_runs

MEMORY = {"as_tensor": SHARED_MEMORY, "tensor": OWN_MEMORY}  # by the function of torch that keeps what is observed
UPRIGHT = "time upright (steps)"
UNDER_WAY = {"leaving": "overwritten too early", "arriving": "read too early"}
RATE, CHUNK = 8000, 512  # samples in a second, and in what a microphone hands over at a time
ASKED = {
    "Ada": "my password is swordfish",
    "Ben": "what is the weather",
    "Cem": "write a poem on rain",
    "Dot": "is seven a prime",
}
QUESTIONS = (  # of benchmarks/public_cases.py
    *("times one", "long short term memory", "drawn in another type", "basis of equal singular values"),
    *("reset gate before or after", "one buffer for every frame"),
)


# --- sources, each with one array ------------------------------------------------------------------------


def microphone() -> Iterator[np.ndarray]:
    """Two seconds of a rising tone, in chunks of 512 samples, shape (512,)."""
    buffer = np.empty(CHUNK, np.float32)
    time = np.arange(2 * RATE // CHUNK * CHUNK) / RATE
    for chunk in np.sin(2 * np.pi * (200 + 700 * time) * time).reshape(-1, CHUNK):
        buffer[:] = chunk
        yield buffer


def inbox() -> Iterator[np.ndarray]:
    """What four users ask, as numbers of characters, shape (32,), blanks at the end."""
    buffer = np.empty(32, np.uint8)
    for text in ASKED.values():
        buffer[:] = np.frombuffer(text.ljust(len(buffer)).encode(), np.uint8)
        yield buffer


def pendulum(steps: int = 400) -> Iterator[np.ndarray]:
    """The angle and the speed of a pendulum that somebody pushes at random, shape (2,), every tenth of a second."""
    state, push = np.array([1.0, 0.0]), np.random.default_rng(0)
    for _ in range(steps):
        state[1] += 0.1 * (-np.sin(state[0]) - 0.1 * state[1]) + 0.05 * push.normal()
        state[0] += 0.1 * state[1]
        yield state


def image_loader(batch: int = 32) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Batches of scanned digits, shape (32, 64), with labels of their own, shape (32,)."""
    images, labels = _digits()
    buffer = np.empty((batch, images.shape[1]), np.float32)
    for first in range(0, 1280, batch):
        buffer[:] = images[first : first + batch]
        yield buffer, labels[first : first + batch]


@functools.cache
def _digits() -> tuple[np.ndarray, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return (digits.data[order] / 16).astype(np.float32), torch.tensor(digits.target[order])


# --- what is made of it ----------------------------------------------------------------------------------


@style.themed
def spectrograms(kept: Mapping[str, Sequence[Tensor]]) -> Picture:
    """How much of each frequency is in every chunk that was kept, for each way of keeping."""
    figure, panels = style.canvas(len(kept), height=3.0, sharey=True)
    pitches = {}
    for axes, (name, chunks) in zip(panels, kept.items(), strict=True):
        loudness = torch.fft.rfft(torch.stack(list(chunks)) * torch.hann_window(CHUNK)).abs()
        edges = (0, len(chunks) * CHUNK / RATE, 0, RATE / 2)
        axes.imshow(loudness.T.numpy(), origin="lower", aspect="auto", extent=edges, cmap="magma")
        axes.set(title=_memory_name(name), xlabel="second", ylim=(0, 3200))
        pitches[_memory_name(name)] = int(loudness.argmax(1).unique().numel())
    panels[0].set_ylabel("frequency (Hz)")
    pitch_counts = listed(f"{count} with {name}" for name, count in pitches.items())
    return style.finished(
        figure,
        f"Pitches that can be heard: {pitch_counts}",
        "Spectrograms of a rising tone, as it was kept chunk by chunk.",
    )


def delivered(kept: Mapping[str, Sequence[Tensor]]) -> pd.DataFrame:
    """What a model is given as each user's question, for each way of keeping."""
    table = {
        _memory_name(name): [bytes(line.tolist()).decode().strip() for line in lines] for name, lines in kept.items()
    }
    return pd.DataFrame({"asked": ASKED.values(), **table}, index=pd.Index(ASKED, name="user"))


def accuracies(kept: Mapping[str, Sequence[tuple[Tensor, Tensor]]]) -> pd.Series:
    """The share of new digits that a linear classifier knows, trained on what was kept of an epoch."""
    images, labels = _digits()
    shares = {}
    for name, batches in kept.items():
        torch.manual_seed(0)
        model = nn.Linear(images.shape[1], 10)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(20):
            for batch, batch_labels in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(batch), batch_labels).backward()
                optimizer.step()
        shares[_memory_name(name)] = float(
            (model(torch.tensor(images[1280:])).argmax(1) == labels[1280:]).float().mean()
        )
    return pd.Series(shares, name="share of new digits that are known")


def foreseen(kept: Mapping[str, Sequence[Tensor]]) -> pd.DataFrame:
    """The error of a model of the pendulum on the states that were kept, to which it is fitted, and on the true ones.

    Both are root mean squares of what it misses of a change. It is linear in the sine of the angle and the speed.
    """
    truth = torch.stack([torch.tensor(state) for state in pendulum()])
    errors = {}
    for name, states in kept.items():
        kept_states = torch.stack(list(states))
        model = torch.linalg.lstsq(_features(kept_states), kept_states.diff(dim=0)).solution
        errors_of_change = [states.diff(dim=0) - _features(states) @ model for states in (kept_states, truth)]
        errors[_memory_name(name)] = [float(error.square().mean().sqrt()) for error in errors_of_change]
    return pd.DataFrame(errors, index=["error on what was kept", "error on the true motion"]).T


def _features(states: Tensor) -> Tensor:
    return torch.stack([states[:-1, 0].sin(), states[:-1, 1]], 1)


def _memory_name(name: str) -> str:
    return MEMORY.get(name, name)


# --- what is recorded, and what is asked -----------------------------------------------------------------


def cartpole_runs(runs: pd.DataFrame | None = None) -> pd.DataFrame:
    """Runs of `cartpole`, by default the recorded ones, with the columns `memory` and `time upright (steps)`."""
    runs = recorded_runs("cartpole") if runs is None else runs
    runs = runs.assign(memory=runs.keep.map(MEMORY)).drop(columns="options")  # which say what `memory` says
    return runs.rename(columns={"steps_up": UPRIGHT})


def copies_under_way() -> pd.DataFrame:
    """What the guard said of programs whose copies from and to a GPU go on, recorded on one: a row a program."""
    table = recorded_table("copies_under_way", "programs").replace({"said": UNDER_WAY})
    return table.assign(thread=table.thread.str.rpartition("/")[2]).set_index("program")


def public_questions(names: Iterable[str] = QUESTIONS) -> pd.DataFrame:
    """The first line of the audit of some questions that people asked in public, beside the cause confirmed there."""
    cases = benchmark("public_cases")
    chosen_cases = [case for case in cases.CASES if case.name.replace("_", " ") in set(names)]
    first_lines = cases.run(chosen_cases).set_index("case").rename_axis("question")
    words = {"a": "setting", "b": "against", "at": "first at", "cause": "confirmed there"}
    return first_lines.rename(columns=words)[["thread", "setting", "against", "said", "first at", "confirmed there"]]


def wild_finding(runs: pd.DataFrame) -> CheckedSentences:
    """What sharing observations cost on CartPole."""
    judged = gl.verdict(runs, metric=UPRIGHT, factor="memory", reference=OWN_MEMORY)
    return finding({f"CartPole, on {listed(runs.machine.unique())}": judged})
