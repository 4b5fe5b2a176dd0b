"""One training on several devices: whether it ends as on one, and how an update scales, strong and weak.

    python benchmarks/scale_out.py cpu:threads=1 --devices 1,2 --size small --record data/measured/scale_out-my-cpu.json
    python benchmarks/scale_out.py cuda:tf32=off --devices 1,2,4 --size paper --write benchmarks/scale_out_cuda.md

The sizes are PredNet's: small (24×32), quick (48×64) and paper (120×160, four layers).
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
import torch

import gpulab as gl
from companion import scale_out
from gpulab.store.records import measured, write_json
from gpulab.training.protocol import whole_numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting")
    parser.add_argument("--devices", default="1,2")
    parser.add_argument("--size", choices=scale_out.SIZES, default="small")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--frames", type=int, default=10)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--write", type=Path, help="a file of Markdown")
    parser.add_argument("--record", type=Path, help="JSON file, such as data/measured/scale_out-my-cpu.json")
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
    films = {"net": "prednet", "model_options": {"channels": [3, 8, 16], "size": (24, 32), "batch_size": 6}}
    films |= {"data_options": {"size": (24, 32)}, "window": 60, "frames": 600}
    ends = [scale_out.same_end(several, given.setting), scale_out.same_end(several, given.setting, **films)]
    add("Several devices against one: largest differences, batches of 7 images and of 6 films", pd.concat(ends))
    what = {"batch_size": given.batch_size, "frames": given.frames, "updates": given.updates}
    scaling = scale_out.scaling_table(counts, given.setting, [given.size], **what)
    shown = scaling.drop(columns=["size", "setting", "machine", "recorded"])
    add(f"Strong and weak scaling, PredNet {given.size}, seconds an update", shown)
    parts = pd.DataFrame()
    if given.setting.startswith("cuda") and torch.cuda.device_count() > 1:
        parts = scale_out.parts_table(("cuda:0", "cuda:1"))
        add("In two parts, MiB", parts)
    if given.write:
        given.write.write_text("\n".join(["# Many devices", "", *lines, ""]), encoding="utf-8")
    if given.record:
        tables = {"scaling": scaling, "ends": pd.concat(ends), "parts": parts}
        for name, table in tables.items():
            tables[name] = table.drop(columns=["machine", "recorded"], errors="ignore").to_dict("records")
        write_json(given.record, measured(given.setting.partition(":")[0], **tables))


if __name__ == "__main__":
    main()
