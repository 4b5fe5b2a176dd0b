"""What the last frame, blurred, would lose on the real films of the published network's runs: it takes no motion.

python benchmarks/record_blurred.py data/measured/blurred-my-cpu.json films/pavement.mp4 films/people.mp4

Over the windows that a final loss is the mean of: the last fifth of 250, of every fifth frame, at 160×120.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
from published import windows

from companion.learning import blurred_loss
from gpulab.data.base import Sequence
from gpulab.data.datasets import load
from gpulab.store import records


def best_blur(film: str) -> float:
    source = load(f"video:{film}", None, (120, 160))
    assert isinstance(source, Sequence)
    before, coming, seen = [], [], []
    for frames, restart in itertools.islice(windows(source, 20, every=5), 250):
        whole = frames if restart else np.concatenate([*seen, frames])
        seen = [frames[-1:]]
        before.append(whole[:-1])
        coming.append(whole[1:])
    last, there = (np.concatenate(parts[-50:]) for parts in (before, coming))
    print(f"{film}: repeated {np.square(last - there).mean():.6f}", flush=True)
    return blurred_loss(last, there)


if __name__ == "__main__":
    file, *films = sys.argv[1:]
    rows = [{"film": Path(film).stem, "loss": best_blur(film)} for film in films]
    print(rows)
    records.write_json(Path(file), records.measured("cpu", rows=rows))
