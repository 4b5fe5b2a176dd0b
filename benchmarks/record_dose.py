"""Record on this machine whether the bias of a gradient predicts the loss, over lengths of window and speeds of motion.

python benchmarks/record_dose.py cpu:threads=1 --output data/dose/my-cpu.parquet --seeds 8 --minutes 30
python benchmarks/record_dose.py cuda:tf32=off --output data/dose/my-gpu.parquet --size paper --workers 6

A cell is a length and a speed. In each of the twelve a seed is trained twice: on copied frames, and on shared memory.
Seeds are done whole, one after the other, until the next would not end within the minutes; what is in the store is not
made again, so it can be stopped and called again.
"""

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import gpulab as gl
from gpulab.data.datasets import Window
from gpulab.data.feed import Loader
from gpulab.models.base import Trainable
from gpulab.training.plan import plan_run
from gpulab.training.step import Trainer
from gpulab.training.store import pack

TRAIN = "benchmarks/record_dose.py:train"
CELLS = [{"window": window, "motion": motion} for window, motion in itertools.product((2, 5, 10, 20), (1.0, 2.0, 4.0))]
LOOKS = 5  # at the bias along a training


def train(
    seed: int, setting: gl.Setting, window: int = 20, motion: float = 1.0, size: str = "quick"
) -> dict[str, float]:
    """The final loss on copied frames and on shared memory, and how far sharing turns the gradient.

    `bias` is the relative distance of the gradient with shared memory to that with copies, at the weights and the
    state of the training on copies: mean of five windows evenly along it. `bias_first` is that of the first window.
    """
    sharing = "reused" if setting.kind == "cpu" else "imitated"
    plan = plan_run("prednet", setting=setting, seed=seed, profile=size, data_options={"speed": motion})

    def trainer(loader: str) -> Trainer:
        plan.begin()  # the same weights each time
        return Trainer(dataclasses.replace(plan, window=window, factors={**plan.factors, "loader": loader}))

    biases: dict[int, float] = {}

    def look(model: Trainable, step: int) -> None:  # noqa: ARG001
        if (done := copied.windows_done) in places:
            upcoming = next(copied.data.windows(window, seed, done))
            right, wrong = (gradient(copied, upcoming, loader) for loader in ("copied", sharing))
            biases[done] = float((wrong - right).norm() / right.norm())

    copied = trainer("copied")
    places = [0, *(copied.count * (2 * number + 1) // (2 * LOOKS) for number in range(LOOKS))]
    losses = {"copied": final_loss(copied, look), "shared": final_loss(trainer(sharing))}
    first, *later = (biases.get(place, math.nan) for place in places)
    return {**losses, "bias": math.fsum(later) / LOOKS, "bias_first": first}


def gradient(trainer: Trainer, window: Window, loader: str) -> Tensor:
    """Of a window at the weights and the state that there are, flat."""
    (batch,) = Loader(loader, trainer.setting).batches(trainer.model, window.frames)
    trainer.optimizer.zero_grad()
    trainer.model.training_loss(batch, None if window.restart else trainer.state)[0].backward()  # type: ignore[arg-type]
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def final_loss(trainer: Trainer, watch: Callable[[Trainable, int], None] | None = None) -> float:
    """Train to the end; NaN for a training that diverged."""
    trainer.run(None, math.inf, False, watch)
    found = trainer.outcome()["summary"]["final_loss"]
    return math.nan if found is None else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", help="such as cpu:threads=1 or cuda:tf32=off")
    parser.add_argument("--output", type=Path, required=True, help="Parquet file, such as data/dose/NAME.parquet")
    parser.add_argument("--store", type=Path, default=Path("runs/dose"), help="folder of the runs")
    parser.add_argument("--size", default="quick", help="smoke, quick or paper")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time")
    parser.add_argument("--minutes", type=float, default=math.inf)
    asked = parser.parse_args()
    until, longest = time.monotonic() + 60 * asked.minutes, 0.0
    options = {"size": asked.size}
    for seed in range(asked.seeds):
        began = time.monotonic()
        if began + longest > until:
            break
        gl.Experiment(
            TRAIN, [asked.setting], [seed], store=asked.store, workers=asked.workers, options=options, variants=CELLS
        ).run()
        pack(asked.store, asked.output)
        longest = max(longest, time.monotonic() - began)
        print(f"seed {seed}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
