"""A vision transformer on handwritten digits, trained under emulated and under real TF32: curves and verdicts.

python benchmarks/emulated_training.py cpu cpu:tf32=on,emulate=ampere --output here.json
python benchmarks/emulated_training.py cuda:tf32=off cuda:tf32=on --output gpu.json    # on an NVIDIA GPU
python benchmarks/emulated_training.py --report benchmarks/emulated_training here.json gpu.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from measuring import keep, show
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torchvision.models import VisionTransformer
from tqdm.auto import tqdm

import gpulab as gl
from gpulab.store import records

SEEDS, STEPS, BATCH = 12, 200, 32


def digits() -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits as three-channel images of 16×16, and what they show."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return F.interpolate(small, scale_factor=2).expand(-1, 3, -1, -1).contiguous(), torch.tensor(labels)


def train(setting: str, seed: int, images: Tensor, labels: Tensor) -> list[float]:
    """The loss of every step. NumPy draws weights and batches: the same on every machine, whatever its torch."""
    generator = np.random.default_rng(seed)
    net = VisionTransformer(16, 4, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10)
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1:
                scale = weight[0].numel() ** -0.5
                weight.copy_(torch.from_numpy(scale * generator.standard_normal(weight.shape, np.float32)))
            elif not weight.eq(1).all():  # biases; the scales of normalisation are ones
                weight.zero_()
    batches = torch.from_numpy(generator.integers(len(labels), size=(STEPS, BATCH)))
    losses = []
    with gl.setting(setting) as chosen:
        net.to(chosen.device)
        images, labels = images.to(chosen.device), labels.to(chosen.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
        for batch in batches.to(chosen.device):
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def report(files: list[Path], stem: Path) -> None:
    """Curves and verdicts of what was trained, beside each other."""
    documents = [records.read_json(file) for file in files]
    runs = pd.DataFrame([run for document in documents for run in document["rows"]])
    runs["final_loss"] = [sum(losses[-STEPS // 5 :]) / (STEPS // 5) for losses in runs.losses]
    emulated, real = ("cpu", "cpu:tf32=on,emulate=ampere"), ("cuda:tf32=off", "cuda:tf32=on")
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axis, pair in zip(figure.subplots(1, 2, sharey=True), (emulated, real), strict=True):
        for setting, colour, style in zip(pair, ("tab:blue", "tab:orange"), ("-", "--"), strict=True):
            curves = pd.DataFrame(list(runs[runs.setting == setting].losses))
            smooth = curves.T.rolling(10, min_periods=1).mean()
            axis.plot(smooth, color=colour, alpha=0.25, lw=0.8)
            axis.plot(smooth.mean(axis=1), style, color=colour, lw=2, label=setting)
        axis.set(xlabel="step", ylabel="cross-entropy, mean of 10 steps", yscale="log")
        axis.legend()
    figure.savefig(stem.with_suffix(".png"), dpi=80)
    lines = []
    for title, (usual, other) in {
        "emulated": emulated,
        "real": real,
        "emulated against real": (real[1], emulated[1]),
    }.items():
        pair = runs[runs.setting.isin((usual, other))]
        verdict = gl.verdict(pair, metric="final_loss", margin="0.25sd", reference=usual)
        lines += [f"- {title}: {line}" for line in str(verdict).splitlines()]
    made = [f"Recorded by `{document['command']}` on {document['machine']}." for document in documents]
    text = "\n".join([*lines, "", f"![loss curves]({stem.name}.png)", "", *made])
    show("A vision transformer under emulated and real TF32", stem.with_suffix(".md"), measured=text)


def main(
    names: Annotated[list[str], typer.Argument(help="settings to train under, or files to report on")],
    output: Path = Path("emulated_training.json"),
    reported: Annotated[Path | None, typer.Option("--report", help="write STEM.md and STEM.png")] = None,
) -> None:
    """Train, or report what was trained."""
    if reported is not None:
        report([Path(name) for name in names], reported)
        return
    images, labels = digits()
    jobs = tqdm([(setting, seed) for setting in names for seed in range(SEEDS)], unit="training")
    runs = [{"setting": s, "seed": seed, "losses": train(s, seed, images, labels)} for s, seed in jobs]
    keep(output, "cpu" if all(name.startswith("cpu") for name in names) else "cuda", rows=runs)


if __name__ == "__main__":
    typer.run(main)
