"""Hold the first windows of the published network against one another, on a CPU and on a GPU, and keep that.

python benchmarks/record_published.py prednet_in_chainer_py3/PredNet data/published/windows-nvidia-h200.json

What is compared was registered in data/README.md; the runs themselves are made by `gpulab published`.
"""

import sys
from pathlib import Path

from gpulab import records
from gpulab.companion.first_windows import Cell, published_windows
from gpulab.passports import passport

COPIED, REUSED, SHARED = (Cell("cpu", loader) for loader in ("copied", "reused", "shared"))
ON_GPU = [Cell("cuda", loader) for loader in ("reused", "copied", "shared")]
PAIRS = [
    (ON_GPU[0], ON_GPU[1]),  # as published on a GPU, against copies there
    (COPIED, ON_GPU[0]),  # alike on both
    (REUSED, ON_GPU[2]),
    (COPIED, REUSED),  # the line, on a CPU and on a GPU
    (ON_GPU[0], ON_GPU[2]),
    (ON_GPU[0], Cell("cuda", "reused", round_trip=False)),
]

if __name__ == "__main__":
    net, file, *profile = sys.argv[1:]
    table = published_windows(net, PAIRS, count=3, seed=100, profile=(profile or ["paper"])[0], speed=2.0)
    print(table.to_string())
    command = "python benchmarks/record_published.py " + " ".join(sys.argv[1:])
    records.write_json(Path(file), {"windows": table.to_dict("list"), "passport": passport(), "command": command})
