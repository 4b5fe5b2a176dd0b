"""Change each factor alone on this machine, and keep what it does: steps in a file, trainings as recorded runs.

python benchmarks/record_factors.py cuda --workers 8 --output data/measured/factors-nvidia-h200.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from companion.floating_point import factors, step_rows, trained_levels
from gpulab.data.datasets import load
from gpulab.data.jpeg import compare_decoders
from gpulab.device.operations import byte_round_trip, fused_share, repeatability
from gpulab.errors import UsageError
from gpulab.store import records
from gpulab.training.protocol import protocol


def record_factors(
    file: str | Path,
    store: str | Path,
    net: str = "prednet",
    profile: str = "quick",
    seeds: int = 10,
    frames: int | None = None,
    workers: int = 1,
    kind: str = "cpu",
    progress: bool = True,
) -> None:
    """Measure on this machine what `companion.factor_table` shows of it elsewhere.

    Args:
        file: JSON, for all but the runs.
        store: Where the runs go.
        net, profile, seeds, frames, progress: As for `factor_table`.
        workers: How many runs go on at the same time.
        kind: The device that the factors are changed on, `cpu` or `cuda`.

    Raises:
        UsageError: Where there is no such device.
    """
    here = [factor for factor in factors(net, profile) if factor.kind == kind and factor.runs_here()]
    if not here:
        raise UsageError(f"kind {kind!r}: expected cpu, or cuda on a machine with such a GPU")
    base = here[0].base["setting"]
    settings = (base, "cuda:tf32=off,deterministic=off") if kind == "cuda" else (base, "cpu")
    tables = {
        "conversions": byte_round_trip(kind),
        "repeatability": repeatability(settings),
        "decoders": compare_decoders(next(load("walk", frames=20, size=(48, 64)).windows(20)).frames),
    }
    record = records.measured(
        kind,
        network=net,
        profile=profile,
        frames=protocol(net, profile).frames if frames is None else frames,
        kind=kind,
        recorded=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        steps=step_rows(here, net, profile, progress),
        fused=fused_share(base, 100_000),
        **{name: json.loads(table.to_json(orient="records")) for name, table in tables.items()},
    )
    records.write_json(Path(file), record)
    options = {} if frames is None else {"frames": frames}  # last: an interruption leaves what is quickly done
    trained_levels(here, net, profile, seeds, {"store": store, "workers": workers, "options": options}, progress)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["cpu", "cuda"], help="the device that the factors are changed on")
    parser.add_argument("--output", required=True, help="JSON file, such as data/measured/factors-NAME.json")
    parser.add_argument("--store", default="runs/factors", help="folder of the runs")
    parser.add_argument("--profile", default="quick")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--frames", type=int, help="to train on  [default: the profile's]")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time")
    asked = vars(parser.parse_args())
    record_factors(asked.pop("output"), **asked)
