"""Record the inside of a CPU or a GPU: the microbenchmarks of notebook 01, and a description.

    python benchmarks/recording/inside.py cuda:tf32=off --write data/measured/inside-my-gpu.json

This takes less than a minute. `companion.microbenchmarks` explains what is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

import gpulab as gl
from benchmarks.measuring import keep, run
from companion.hardware import describe_devices
from companion.microbenchmarks import allowed_benchmarks, measure_inside
from gpulab.errors import describe_error


def record_inside(
    setting: Annotated[str, typer.Argument(help="such as cpu or cuda:tf32=off")],
    write: Annotated[
        Path | None, typer.Option(help="JSON file, such as data/measured/inside-my-gpu.json")
    ] = None,
    rounds: Annotated[int, typer.Option(help="how often each point is timed")] = 15,
    only: Annotated[list[str] | None, typer.Option(help="a microbenchmark; repeatable")] = None,
) -> None:
    """Run the microbenchmarks of a device, and store them with the passport and a description.

    A microbenchmark that fails is listed under `failed`; the results of the others are stored.
    """
    parsed = gl.Setting.parse(setting)
    parsed.check()
    frames = []
    failed: dict[str, str] = {}
    for name in only or allowed_benchmarks(parsed.kind):
        try:
            frames.append(measure_inside(setting, [name], rounds, progress=False))
        except Exception as problem:
            # A library may raise any error. The results of the others are still stored.
            failed[name] = describe_error(problem)[:500]
        print(f"{name}: {failed.get(name, 'measured')}", flush=True)
        document: dict[str, Any] = {"hardware": describe_devices(), "failed": failed}
        rows = pd.concat(frames, ignore_index=True).to_dict("records") if frames else []
        keep(write, parsed.kind, rows=rows, **document)
    if frames:
        table = pd.concat(frames, ignore_index=True)
        spread = (table.upper - table.lower) / table.seconds
        print(table.assign(per_second=table.amount / table.seconds, spread=spread).to_string())
    if failed:
        raise SystemExit(f"error: {len(failed)} microbenchmarks failed: {failed}")


if __name__ == "__main__":
    run(lambda: typer.run(record_inside))
