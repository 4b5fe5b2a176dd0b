"""Ordinary networks under autocast: how often an audit reports a bug in a correct network.

    python benchmarks/correctness/autocast_networks.py --write benchmarks/results/autocast.md

The kind, widths and activations of each network, and whether an optimizer updates it, are drawn
from a seed. Each network is audited in float32 against autocast in bfloat16 and in float16, on the
CPU and, if there is one, on a GPU. An expert would expect `reduced precision` for all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from tqdm.auto import tqdm

import gpulab as gl
from benchmarks.measuring import made_by, markdown, run, show

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU, nn.ELU)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 1e-3),
}


class Residual(nn.Module):
    """Adds the output of a network to its input."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        return x + self.network(x)


class LastState(nn.Module):
    """The last output of a recurrent network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the last time step."""
        return self.network(x)[0][:, -1]


class MeanOverTime(nn.Module):
    """The mean over the second dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean."""
        return x.mean(1)


def perceptron(draw: random.Random) -> tuple[nn.Module, Tensor]:
    """Linear layers, some with normalisation or with dropout of probability 0."""
    width, act = draw.choice((16, 48, 128)), draw.choice(ACTIVATIONS)
    layers: list[nn.Module] = [nn.Linear(20, width), act()]
    for _ in range(draw.randint(0, 4)):
        layers += [
            draw.choice((nn.Identity, lambda: nn.LayerNorm(width), lambda: nn.BatchNorm1d(width)))()
        ]
        layers += [nn.Linear(width, width), act()]
    return nn.Sequential(*layers, nn.Linear(width, 5)), torch.randn(32, 20)


def residual(draw: random.Random) -> tuple[nn.Module, Tensor]:
    """Residual blocks of linear layers."""
    width, act = draw.choice((16, 64)), draw.choice(ACTIVATIONS)
    block = lambda: Residual(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), act()))  # noqa: E731
    blocks = [block() for _ in range(draw.randint(1, 4))]
    return nn.Sequential(nn.Linear(20, width), *blocks, nn.Linear(width, 5)), torch.randn(32, 20)


def convolutions(draw: random.Random) -> tuple[nn.Module, Tensor]:
    """Convolutions with normalisation and pooling, like LeNet and its successors."""
    width, act = draw.choice((6, 16)), draw.choice(ACTIVATIONS)
    norm = draw.choice((nn.Identity, lambda: nn.BatchNorm2d(width), lambda: nn.GroupNorm(2, width)))
    pool = draw.choice((lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2)))
    body = [
        nn.Conv2d(1, width, 5),
        norm(),
        act(),
        pool(),
        nn.Conv2d(width, width, 3, padding=1),
        norm(),
        act(),
        pool(),
    ]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(36 * width, 5)), torch.rand(16, 1, 28, 28)


def recurrent(draw: random.Random) -> tuple[nn.Module, Tensor]:
    """A recurrent layer and a linear one."""
    kind, width = draw.choice((nn.RNN, nn.GRU)), draw.choice((8, 24))
    return nn.Sequential(
        LastState(kind(10, width, batch_first=True)), nn.Linear(width, 5)
    ), torch.randn(16, 9, 10)


def transformer(draw: random.Random) -> tuple[nn.Module, Tensor]:
    """An embedding, one or two encoder layers, and a linear layer."""
    width, depth = draw.choice((16, 32)), draw.randint(1, 2)
    act = draw.choice(("relu", "gelu"))
    layers = [
        nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, act, batch_first=True, norm_first=draw.random() < 0.5
        )
        for _ in range(depth)
    ]
    words = torch.randint(0, 40, (8, 11))
    return nn.Sequential(
        nn.Embedding(40, width), *layers, MeanOverTime(), nn.Linear(width, 5)
    ), words


KINDS = (perceptron, residual, convolutions, recurrent, transformer)


def step_of(seed: int) -> tuple[str, Callable[..., object]]:
    """Return the name of a network and a step of it; every second step has an optimizer."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind = KINDS[seed % len(KINDS)]
    model, inputs = kind(draw)
    targets = torch.arange(len(inputs)) % 5
    if seed % 2:
        return kind.__name__, gl.Step(model, (inputs, targets), F.cross_entropy)
    name = draw.choice(sorted(OPTIMIZERS))
    weights = {key: value.clone() for key, value in model.state_dict().items()}

    def step(setting: gl.Setting) -> Tensor:
        model.load_state_dict(weights)
        there = model.to(setting.device, setting.dtype)
        optimizer = OPTIMIZERS[name](there.parameters())
        x = inputs.to(setting.device, setting.dtype if inputs.is_floating_point() else None)
        loss = F.cross_entropy(there(x), targets.to(setting.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return f"{kind.__name__}, {name}", step


def audits(seeds: int, devices: list[str]) -> pd.DataFrame:
    """Return a row for each audit: network, device, format, first finding, whether it is a bug."""
    rows = []
    for seed in tqdm(range(seeds), leave=False, disable=None):
        for device in devices:
            for autocast in ("bfloat16", "float16"):
                name, step = step_of(seed)
                plain = f"{device}:tf32=off" if device == "cuda" else device
                try:
                    answer = gl.audit(
                        step,
                        plain,
                        f"{plain}{',' if ':' in plain else ':'}autocast={autocast}",
                        progress=False,
                    )
                except (gl.GpulabError, RuntimeError) as error:
                    rows.append(
                        {
                            "network": name,
                            "device": device,
                            "autocast": autocast,
                            "said": f"error: {error}",
                        }
                    )
                    continue
                rows.append(
                    {
                        "network": name,
                        "device": device,
                        "autocast": autocast,
                        "said": answer.kind,
                        "bug": answer.faulty,
                        "all shares": sum(f.share for f in answer.findings if f.share == f.share),
                    }
                )
    return pd.DataFrame(rows)


def main(
    write: Annotated[Path | None, typer.Option(help="page of Markdown, between its marks")] = None,
    seeds: Annotated[int, typer.Option(help="the number of networks")] = 50,
) -> None:
    """Audit each network in float32 against autocast."""
    rows = audits(seeds, ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
    counts = rows.groupby(["device", "autocast", "said"]).size().rename("audits").reset_index()
    called_bugs = int(rows.bug.fillna(False).sum())
    shown = (
        f"{markdown(counts)}\n\n{called_bugs} of {len(rows)} audits report a bug.\n\n{made_by()}"
    )
    show("Ordinary networks under autocast", write, measured=shown)


if __name__ == "__main__":
    run(lambda: typer.run(main))
