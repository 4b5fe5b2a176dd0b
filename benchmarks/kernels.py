"""What an update of PredNet spends its time on, kernel by kernel, in groups: what stands in the way of the peak.

    python benchmarks/kernels.py cuda:tf32=off cuda:tf32=on --size paper --record data/measured/kernels-my-gpu.json

A window of the fast path as `prednet.py` trains it, under torch's profiler; on a CPU the time of operations.
"""

import re
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import prednet
import torch
import typer
from torch.profiler import ProfilerActivity, profile

import gpulab as gl
from gpulab.settings import Setting
from gpulab.store import records

GROUPS = {  # the first that fits a name
    "weight gradients": r"wgrad|convolution_backward",
    "changes of layout": r"nchwToNhwc|nhwcToNchw|convertTensor|AddPadding|reorder",
    "the LSTM's cell": r"lstm_cell",
    "Adam": r"adam|multi_tensor|FusedOptimizer",
    "pooling": r"pool",
    "convolutions": r"fprop|dgrad|gemm|cutlass|convol|winograd|fft|direct|im2col|conv2d|aten::mm",
    "copies": r"copy|Memcpy|Memset|FillFunctor|CatArray|flip|aten::(cat|zero|fill|stack)",
    "sums": r"reduce|aten::(sum|mean)",
}
STEPS = 3


def group(name: str) -> str:
    """What kind of work a kernel does."""
    return next((what for what, words in GROUPS.items() if re.search(words, name)), "element by element")


def measure(size: str, setting: Setting) -> list[dict[str, Any]]:
    """A row a group: milliseconds of a window, and how many kernels."""
    step = prednet.gpulabs(size, setting, True)
    on_gpu = setting.kind == "cuda"
    for _ in range(STEPS):
        step()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    events = profiled.key_averages()
    found = [(group(e.key), e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count) for e in events]
    frame = pd.DataFrame(found, columns=["what", "ms", "count"]).groupby("what").sum() / [1e3 * STEPS, STEPS]
    frame = frame[frame.ms > 0].sort_values("ms", ascending=False).reset_index()
    return frame.assign(size=size, setting=str(setting)).to_dict("records")


def main(
    settings: list[str],
    size: Annotated[list[str] | None, typer.Option(help="quick, paper or kitti; several times")] = None,
    record: Annotated[Path | None, typer.Option(help="JSON file, such as data/measured/kernels-my-gpu.json")] = None,
) -> None:
    rows = []
    for text in settings:
        with gl.setting(text) as setting:
            rows += [row for one in size or ["quick"] for row in measure(one, setting)]
    print(pd.DataFrame(rows).to_string())
    if record:
        records.write_json(record, records.measured(settings[0].partition(":")[0], rows=rows))


if __name__ == "__main__":
    typer.run(main)
