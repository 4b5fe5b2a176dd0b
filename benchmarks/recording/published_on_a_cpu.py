"""The authors' network at the published size on a CPU, with a single-threaded process per run.

    python -m benchmarks.recording.published_on_a_cpu NET --minutes 24 --output FOLDER
    python -m benchmarks.recording.published_on_a_cpu NET --collect FOLDER --write FILE

The first command starts the runs and ends them when the time is up. Each run appends a line to its
own file after each window, so that nothing is lost if the machine is lost. The second command
combines the files into one record. The plan is in
`data/registered/published-size-on-a-cpu.md`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.measuring import command_line, keep, run
from gpulab.errors import DataError

app = command_line(__doc__)
SIZE = (120, 160)  # height and width of a frame, as published
CHANNELS = (3, 48, 96, 192)
WINDOW = 20
SPEED = 2.0
MAX_FRAMES = 5000
LOADERS = ("reused", "copied")
Net = Annotated[Path, typer.Argument(help="the authors' net.py, or its folder")]


@app.command("run")
def run_all(
    net: Net,
    output: Annotated[Path, typer.Option(help="folder for a file of each run")],
    minutes: float = 24.0,
    reused: Annotated[int, typer.Option(help="how many seeds, from 100 on")] = 8,
    copied: Annotated[int, typer.Option(help="how many seeds, from 100 on")] = 4,
) -> None:
    """Train all seeds at the same time, until the time is up."""
    output.mkdir(parents=True, exist_ok=True)
    seeds = {"reused": reused, "copied": copied}
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-m", "benchmarks.recording.published_on_a_cpu", "one", str(net)]
    deadline = time.time() + 60 * minutes
    processes = [
        subprocess.Popen(
            [*command, loader, str(seed), str(output / f"{loader}-{seed}.jsonl"), str(deadline)],
            env=os.environ | one_thread,
        )
        for loader in LOADERS
        for seed in range(100, 100 + seeds[loader])
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"exit statuses {codes}")


@app.command("one")
def run_one(net: Net, loader: str, seed: int, file: Path, deadline: float) -> None:
    """Train one seed until the deadline, in seconds since 1970, or until all frames are used."""
    from benchmarks.peers import published
    from gpulab.data import load
    from gpulab.data._base import Sequence

    source = load("walk", MAX_FRAMES, SIZE, speed=SPEED)
    assert isinstance(source, Sequence)
    training = published.Published(net, "cpu", seed, SIZE, CHANNELS, loader)
    windows = itertools.islice(published.windows(source, WINDOW), MAX_FRAMES // WINDOW)
    started = time.perf_counter()
    with file.open("w") as lines:
        for number, (frames, restart) in enumerate(windows):
            if restart:
                training.restart(frames[0])
            before = frames[:-1] if restart else np.concatenate([training.seen, frames[:-1]])
            coming = frames[1:] if restart else frames
            row = {
                "seed": seed,
                "loader": loader,
                "window": number,
                "repeat_loss": float(np.square(coming - before).mean()),
            }
            row["loss"] = float(np.mean(training.window(coming)))
            row["seconds"] = time.perf_counter() - started
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            if time.time() > deadline:
                break


@app.command("collect")
def collect(
    folder: Annotated[Path, typer.Argument(help="the --output of `run`")],
    write: Annotated[Path, typer.Option(help="JSON file in data/measured")],
    command: Annotated[str, typer.Option(help="the command that made the runs")] = "",
) -> None:
    """Combine the files of all runs into one record, with the passport of this machine."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise DataError(f"{folder}: expected files *.jsonl of runs, found none")
    rows = []
    for file in files:
        for line in file.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:  # the last line of a process that was terminated
                continue
    keep(write, "cpu", rows=rows, made_by=command)


if __name__ == "__main__":
    run(app)
