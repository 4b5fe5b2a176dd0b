"""Training without a lock on a quiet and on a busy machine: the changes lost, and their effect.

    python benchmarks/recording/lock_free.py --write data/measured/lock_free-my-cpu.json

`notebooks/programs/hogwild.py` is run several times: first alone, then beside a busy process on
each core. Nothing else should run at the same time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from benchmarks.measuring import keep, run
from companion.scale_out import compare_lock_free, run_program


def main(
    write: Annotated[
        Path | None, typer.Option(help="JSON file, such as data/measured/lock_free-my-cpu.json")
    ] = None,
    seeds: int = 10,
    updates: int = 400,
    repetitions: int = 3,
) -> None:
    """Run the program on a quiet and on a busy machine."""
    frames = []
    for condition, is_busy in {"quiet": False, "busy": True}.items():
        for repetition in range(repetitions):
            with busy_processes(os.cpu_count() or 1 if is_busy else 0):
                tables = run_program("hogwild", "--seeds", seeds, "--updates", updates)
            descents = tables["descents"].drop(columns=["machine", "recorded"])
            frames.append(descents.assign(condition=condition, repetition=repetition))
            print(f"{condition}, repetition {repetition + 1}", flush=True)
    rows = pd.concat(frames, ignore_index=True)
    print(compare_lock_free(rows).to_string(index=False))
    keep(write, "cpu", rows=rows.to_dict("records"), updates=updates)


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` processes busy inside the block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    run(lambda: typer.run(main))
