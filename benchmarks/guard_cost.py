"""What `gpulab.guard` costs: a training step under it over the same step without it.

    python benchmarks/guard_cost.py --write benchmarks/guard_cost.md
    python benchmarks/guard_cost.py --device cuda --write benchmarks/guard_cost_cuda.md

Steps with and without the guard take turns; a ratio is the median of the paired ratios.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import gpulab as gl
from gpulab.diagnostics.fingerprints import fingerprint


class LSTM(nn.Module):
    """A cell of two layers and a linear layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(64, 256, num_layers=2), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x)[0][-1])


class Transformer(nn.Module):
    """Four layers of an encoder and a linear layer on the mean."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
        self.body, self.out = nn.TransformerEncoder(layer, 4), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x).mean(1))


CASES = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), (8, 3, 224, 224)),
    "resnet18, batch 16": (lambda: torchvision.models.resnet18(num_classes=10), (16, 3, 224, 224)),
    "mobilenet_v3_small": (lambda: torchvision.models.mobilenet_v3_small(num_classes=10), (8, 3, 224, 224)),
    "vit_b_16": (lambda: torchvision.models.vit_b_16(num_classes=10), (2, 3, 224, 224)),
    "LSTM": (LSTM, (50, 16, 64)),
    "Transformer encoder": (Transformer, (8, 64, 256)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", help="cases whose names begin so")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    lines = [
        "# What the guard costs",
        "",
        f"`python {' '.join(sys.argv)}` on {machine(given.device)}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads.",
        "",
        "| one step of SGD | input | without, ms | with, ms | ratio | lowest to highest |",
        "|---|---|---|---|---|---|",
    ]
    for name, (build, shape) in CASES.items():
        if not given.only or name.startswith(given.only):
            lines.append(row(name, build, shape, given.device, given.repeats))
            print(lines[-1], flush=True)
    lines += ["", "| fingerprint of | GB/s |", "|---|---|"]
    lines += [rate(size, given.device) for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)]
    print("\n".join(lines))
    if given.write:
        given.write.write_text("\n".join(lines) + "\n")


def machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else gl.passport()["cpu"]["model"]


def row(name: str, build: object, shape: tuple[int, ...], device: str, repeats: int) -> str:
    torch.manual_seed(0)
    net, x = build().to(device), torch.rand(shape, device=device)
    target = torch.zeros(F.relu(net(x)).shape[0], dtype=torch.long, device=device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), target).backward()
        optimizer.step()

    def guarded() -> None:
        with gl.guard():
            step()

    step(), guarded()
    pairs = [(seconds(step, device), seconds(guarded, device)) for _ in range(repeats)]
    without, under = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    ratios = sorted(b / a for a, b in pairs)
    size = "×".join(map(str, shape))
    return (
        f"| {name} | {size} | {without:.1f} | {under:.1f} | {statistics.median(ratios):.2f} "
        f"| {ratios[0]:.2f} to {ratios[-1]:.2f} |"
    )


def seconds(work: object, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rate(size: int, device: str) -> str:
    x = torch.rand(size // 4, device=device)
    fingerprint(x)
    times = [seconds(lambda: fingerprint(x), device) for _ in range(15)]
    return f"| {size:,} bytes | {size / statistics.median(times) / 1e9:.2f} |"


if __name__ == "__main__":
    main()
