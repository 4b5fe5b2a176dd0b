"""The authors' network, window by window, with a single-threaded process for each run.

    python -m benchmarks.recording.published_windows run NET --minutes 24 --output FOLDER
    python -m benchmarks.recording.published_windows collect FOLDER --write FILE

The first command starts the runs and ends them when the time is up. Each run appends a line to its
own file after each window, so that nothing is lost if the machine is lost. The second command
combines the files into one record. The plans are `published-size-on-a-cpu.md` and
`half-size-cpu-against-gpu.md` in `data/registered/`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.measuring import command_line, keep, run
from gpulab.errors import DataError
from gpulab.run_options import whole_numbers

app = command_line(__doc__)
SIZE = "160x120"  # width and height of a frame, as published
CHANNELS = (3, 48, 96, 192)
WINDOW = 20
SPEED = 2.0
MAX_FRAMES = 5000
Net = Annotated[Path, typer.Argument(help="the authors' net.py, or its folder")]


@app.command("run")
def run_all(
    net: Net,
    output: Annotated[Path, typer.Option(help="folder for a file of each run")],
    minutes: float = 24.0,
    reused: Annotated[int, typer.Option(help="how many seeds on the CPU, as published")] = 8,
    copied: Annotated[int, typer.Option(help="how many seeds on the CPU, frames copied")] = 4,
    gpu: Annotated[int, typer.Option(help="how many seeds on the GPU, as published")] = 0,
    gpu_processes: Annotated[int, typer.Option(help="how many of these at the same time")] = 8,
    first_seed: int = 100,
    size: Annotated[str, typer.Option(help="width and height of a frame")] = SIZE,
) -> None:
    """Train all seeds, those on the CPU at the same time, until the time is up."""
    output.mkdir(parents=True, exist_ok=True)
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    deadline = time.time() + 60 * minutes
    script = [sys.executable, "-m", "benchmarks.recording.published_windows", "one", str(net)]

    def train(kind: str, loader: str, seed: int) -> int:
        """Start a process for a run, and wait for it."""
        file = output / f"{kind}-{loader}-{seed}.jsonl"
        command = [*script, kind, loader, str(seed), size, str(file), str(deadline)]
        return subprocess.run(command, env=os.environ | one_thread, check=False).returncode

    on_cpu = [("cpu", "reused", seed) for seed in range(first_seed, first_seed + reused)]
    on_cpu += [("cpu", "copied", seed) for seed in range(first_seed, first_seed + copied)]
    on_gpu = [("cuda", "reused", seed) for seed in range(first_seed, first_seed + gpu)]
    with (
        ThreadPoolExecutor(max(1, len(on_cpu))) as cpu_pool,
        ThreadPoolExecutor(gpu_processes) as gpu_pool,
    ):
        processes = [cpu_pool.submit(train, *job) for job in on_cpu]
        processes += [gpu_pool.submit(train, *job) for job in on_gpu]
    codes = [process.result() for process in processes]
    if any(codes):
        raise SystemExit(f"exit statuses {codes}")


@app.command("one")
def run_one(
    net: Net, kind: str, loader: str, seed: int, size: str, file: Path, deadline: float
) -> None:
    """Train one seed until the deadline, in seconds since 1970, or until all frames are used."""
    from benchmarks.peers import published
    from gpulab.data import load
    from gpulab.data._base import Sequence

    width, height = whole_numbers(size)
    source = load("walk", MAX_FRAMES, (height, width), speed=SPEED)
    assert isinstance(source, Sequence)
    training = published.Published(net, kind, seed, (height, width), CHANNELS, loader)
    windows = itertools.islice(published.windows(source, WINDOW), MAX_FRAMES // WINDOW)
    started = time.perf_counter()
    with file.open("w") as lines:
        for number, (frames, restart) in enumerate(windows):
            if time.time() > deadline:
                break
            if restart:
                training.restart(frames[0])
            before = frames[:-1] if restart else np.concatenate([training.seen, frames[:-1]])
            coming = frames[1:] if restart else frames
            row = {
                "seed": seed,
                "kind": kind,
                "loader": loader,
                "size": size,
                "window": number,
                "repeat_loss": float(np.square(coming - before).mean()),
            }
            row["loss"] = float(np.mean(training.window(coming)))
            row["seconds"] = time.perf_counter() - started
            lines.write(json.dumps(row) + "\n")
            lines.flush()


@app.command("collect")
def collect(
    folder: Annotated[Path, typer.Argument(help="the --output of `run`")],
    write: Annotated[Path, typer.Option(help="JSON file in data/measured")],
    command: Annotated[str, typer.Option(help="the command that made the runs")] = "",
) -> None:
    """Combine the files of all runs into one record, with the passport of this machine.

    The record has a row for each run, with the loss of each window. (`published_cpu-xeon.json` is
    older, and has a row for each window.)
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise DataError(f"{folder}: expected files *.jsonl of runs, found none")
    rows = []
    for file in files:
        windows = []
        for line in file.read_text().splitlines():
            try:
                windows.append(json.loads(line))
            except json.JSONDecodeError:  # the last line of a process that was terminated
                continue
        run = {name: windows[0][name] for name in ("seed", "kind", "loader", "size")}
        run["losses"] = [window["loss"] for window in windows]
        rows.append(run | {"seconds": windows[-1]["seconds"]})
    keep(write, "cpu", rows=rows, made_by=command)


if __name__ == "__main__":
    run(app)
