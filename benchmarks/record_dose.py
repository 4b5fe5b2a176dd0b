"""Record on this machine whether the bias of a gradient predicts the loss, over lengths of window and speeds of motion.

python benchmarks/record_dose.py cpu:threads=1 --output data/studies/dose-my-cpu.parquet --seeds 8 --minutes 30
python benchmarks/record_dose.py cuda:tf32=off --output data/studies/dose-my-gpu.parquet --size paper --workers 6

A cell is a length and a speed. In each of the twelve a seed is trained twice: on copied frames, and on shared memory.
Seeds are done whole, one after the other, until the next would not end within the minutes; what is in the store is not
made again, so it can be stopped and called again.
"""

import argparse
import itertools
import math
import os
import time
from pathlib import Path

import gpulab as gl
from gpulab.store.listing import pack

TRAINING = f"{os.path.relpath(Path(__file__).with_name('dose_training.py'))}:bias_and_loss"
CELLS = [{"window": window, "speed": speed} for window, speed in itertools.product((2, 5, 10, 20), (1.0, 2.0, 4.0))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", help="such as cpu:threads=1 or cuda:tf32=off")
    parser.add_argument("--output", type=Path, required=True, help="such as data/studies/dose-NAME.parquet")
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
            TRAINING, [asked.setting], [seed], store=asked.store, workers=asked.workers, options=options, variants=CELLS
        ).run()
        pack(asked.store, asked.output)
        longest = max(longest, time.monotonic() - began)
        print(f"seed {seed}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
