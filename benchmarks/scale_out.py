"""One training on several devices: whether it ends as on one, and how an update scales, strong and weak.

    python benchmarks/scale_out.py cpu:threads=1 --devices 1,2 --size small
    python benchmarks/scale_out.py cuda:tf32=off --devices 1,2,4 --size paper --write benchmarks/scale_out_cuda.md

The sizes are PredNet's: small (24×32), quick (48×64) and paper (120×160, four layers).
"""

import argparse
import sys
from pathlib import Path

import torch

import gpulab as gl
from gpulab.companion import scale_out
from gpulab.training.protocol import whole_numbers

SIZES = {
    "small": ([3, 8, 16], (24, 32)),
    "quick": ([3, 16, 32], (48, 64)),
    "paper": ([3, 48, 96, 192], (120, 160)),
}


def options(size: str) -> dict:
    channels, frame = SIZES[size]
    return {"model_options": {"channels": channels, "size": frame}, "data_options": {"size": frame}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting")
    parser.add_argument("--devices", default="1,2")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--frames", type=int, default=10)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    counts = whole_numbers(given.devices, name="--devices")
    here = gl.passport()
    chips = here["gpus"] if given.setting.startswith("cuda") else here["cpu"]["model"]
    lines = [
        f"Measured by `python benchmarks/scale_out.py {' '.join(sys.argv[1:])}` on {chips}, torch {torch.__version__}."
    ]

    def add(title, table):
        lines.extend(["", f"### {title}", "", "```", table.to_string(index=False), "```"])
        print("\n".join(lines[-5:]), flush=True)

    several = [count for count in counts if count > 1]
    kind = given.setting.partition(":")[0] if "cuda" in given.setting else given.setting
    films = {"net": "prednet", "model_options": {"channels": [3, 8, 16], "size": (24, 32), "batch_size": 6}}
    films |= {"data_options": {"size": (24, 32)}, "window": 60, "frames": 600}
    add("Several devices against one: largest differences, autoencoder", scale_out.same_end(several, kind))
    add("The same, PredNet with batches of 6 films", scale_out.same_end(several, kind, **films))
    what = options(given.size) | {"batch_size": given.batch_size, "frames": given.frames, "updates": given.updates}
    for weak in (False, True):
        title = f"{'Weak' if weak else 'Strong'} scaling, PredNet {given.size}, seconds an update"
        add(title, scale_out.scaling_table(counts, given.setting, weak=weak, **what))
    if given.setting.startswith("cuda") and torch.cuda.device_count() > 1:
        add("In two parts, MiB", scale_out.parts_table(("cuda:0", "cuda:1")))
    if given.write:
        given.write.write_text("\n".join(["# Many devices", "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
