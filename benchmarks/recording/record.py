"""Make the recordings in `data/` on this machine, with a subcommand for each; see `--help`.

    python benchmarks/recording/record.py roofline cuda:tf32=off cuda:tf32=on
    data/measured/rooflines-my-gpu.json python benchmarks/recording/record.py speed cuda:tf32=off
    --write data/measured/speed-my-gpu.json

`record_NAME.py` in the commands of older records is the subcommand `NAME` of this script, with the
same arguments.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer

import gpulab as gl
from benchmarks.measuring import command_line, keep, run, this_command
from companion.workloads import PARTS, Row, measure_speed
from gpulab.device import roofline
from gpulab.errors import UsageError, describe_error
from gpulab.passports import machine
from gpulab.saddles._optimizers import OPTIMIZERS
from gpulab.store import recorded

app = command_line(__doc__)
Settings = Annotated[list[str], typer.Argument(help="such as cpu:threads=2, cuda:tf32=off")]
File = Annotated[Path, typer.Argument(help="JSON file, such as data/measured/KIND-my-gpu.json")]


@app.command("roofline")
def record_roofline(settings: Settings, file: File) -> None:
    """Measure the roofline of this machine under the given settings."""
    frame = pd.concat([roofline(setting) for setting in settings], ignore_index=True)
    print(
        frame[
            ["setting", "operation", "intensity", "gflops", "gigabytes_per_second", "spread"]
        ].to_string()
    )
    keep(file, settings[0].partition(":")[0], rows=frame.to_dict("records"))


# --- notebook 07 ----------------------------------------------------------------------------------


@app.command("speed")
def record_speed(
    setting: str,
    write: Annotated[Path, typer.Option(help="JSON file, such as data/measured/speed-my-gpu.json")],
    sizes: Annotated[list[str], typer.Option(help="smoke, quick or paper; may be repeated")] = (
        "quick",
        "paper",
    ),
    parts: Annotated[list[str], typer.Option(help="only this section; may be repeated")] = PARTS,
) -> None:
    """Time the trainings of notebook 07 under one setting.

    A training that this machine does not support becomes a row that says so. The other recordings
    in the notebook were made at commit 14efec38.
    """
    frames = []
    for size, part in itertools.product(sizes, parts):
        try:
            rows = measure_speed(part, [setting], size)
        except Exception as error:  # The row of this section reports it; the others are still run.
            why = Row(part, note=f"failed: {describe_error(error)[:200]}")._asdict()
            rows = pd.DataFrame([{"part": part, **why, "size": size, "setting": setting}])
        frames.append(rows)
        print(f"{size} {part}: {len(rows)} rows", flush=True)
        table = pd.concat(frames, ignore_index=True).drop(
            columns=["machine", "recorded"], errors="ignore"
        )
        table = table.astype(object)
        found = table.where(table.notna(), None).to_dict("records")
        keep(write, setting.partition(":")[0], rows=found)  # so far, in case it is interrupted


# --- saddles --------------------------------------------------------------------------------------

# The most important first: network, profile, options of gpulab.saddles.curvature_along.
CURVATURE = [
    ("autoencoder", "quick", {}),
    ("prednet", "quick", {}),
    ("prednet", "paper", {"snapshots": 4, "steps": 40}),
    ("autoencoder", "paper", {}),
]
ALONG = {
    "cuda": ["cuda:tf32=off", "cuda:tf32=on"],
    "cpu": ["cpu", "cpu:precision=float64", "cpu:emulate=tf32", "cpu:threads=1"],
}
ESCAPES = {
    "cuda": [
        "cuda:precision=float64",
        "cuda:tf32=off",
        "cuda:tf32=on",
        "cuda:cudnn=off",
        "cuda:precision=bfloat16",
    ],
    "cpu": ["cpu:precision=float64", "cpu", "cpu:precision=bfloat16"],
}
# The arithmetic under which optimisers start at the saddle. Notebook 06 draws these escapes next to
# its own.
ONE_THREAD = ["", ",precision=float64", ",precision=bfloat16", ",emulate=tf32", ",emulate=bfloat16"]
ARITHMETIC = {
    "cuda": ["cuda:precision=float64", "cuda:tf32=off", "cuda:tf32=on", "cuda:precision=bfloat16"],
    "cpu": [f"cpu:threads=1{more}" for more in ONE_THREAD],
}
LARGE_EPSILON = partial(torch.optim.Adam, eps=1e-4, foreach=False)
RATES = {
    "sgd": [8.0, 16.0, None],
    "momentum": [2.0, 4.0, 8.0, 16.0, None],
    "rmsprop": [1e-5, 1e-4, 3e-4, 1e-3, 1e-2],
    "adam": [1e-5, 1e-4, 3e-4, 1e-3, 1e-2],
    LARGE_EPSILON: [1e-3, 1e-2],
}


@app.command("saddles")
def record_saddles(
    kind: Annotated[str, typer.Argument(help="cpu or cuda: the device that trains")],
    output: Path = Path("data/saddles"),
    seeds: int = 8,
    only: Annotated[
        str, typer.Option(help="such as prednet:paper,autoencoder:quick; or escapes")
    ] = "",
) -> None:
    """Record the Hessian's spectrum along trainings, and each optimiser's escapes from a saddle.

    Recordings that already exist are not repeated, so it can be stopped and restarted. The escapes,
    in four files, take about ten minutes.
    """
    if kind not in ALONG:
        raise UsageError(f"kind {kind!r}: expected cpu or cuda")
    gl.Setting.parse(ALONG[kind][0]).check()
    record_escapes(output / "escapes", "-".join(machine(gl.passport(), kind).lower().split()), kind)
    for net, profile, options in CURVATURE:
        wanted = not only or f"{net}:{profile}" in only.split(",")
        for seed, setting in itertools.product(range(seeds) if wanted else (), ALONG[kind]):
            own = {
                "setting": setting,
                "seeds": [seed],
                "profile": profile,
                "store": output / "curvature",
            }
            frame = gl.saddles.curvature_along(
                net, **own, **options, command=this_command(), progress=False
            )
            last = frame[
                ["setting", "seed", "status", "loss", "index_fraction", "smallest", "largest"]
            ].tail(1)
            print(net, profile, last.to_string(index=False, header=False), flush=True)


def record_escapes(folder: Path, name: str, kind: str) -> None:
    """Record escapes of gradient descent with and without a push, and of all optimisers without.

    The latter are also recorded with master weights in float64, and with minibatches.
    """
    batches = {"optimizers": {"sgd": [1.0], "adam": [1e-3]}, "batch_sizes": [20], "steps": 5_000}
    jobs = {
        name: (ESCAPES[kind], {"perturbations": (0.0, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8)}),
        f"{name}-optimizers": (ARITHMETIC[kind], {"optimizers": RATES}),
        f"{name}-master-weights": (
            ARITHMETIC[kind],
            {"optimizers": list(OPTIMIZERS), "master_weights": True},
        ),
        f"{name}-minibatches": (ARITHMETIC[kind], batches),
    }
    for title, (settings, options) in jobs.items():
        if (file := folder / f"{title}.parquet").is_file():
            continue
        table = gl.saddles.escape_table(known_saddle(), settings, seeds=3, **options).table
        recorded.write_table(
            file, table, {"passport": dict(gl.passport()), "command": this_command()}
        )
        print(f"{title}: {len(table)} escapes", flush=True)


def known_saddle() -> gl.saddles.LinearAutoencoderSaddle:
    """Return the saddle of 7×7 digits that holds components 0 and 2; component 1 leads down."""
    images = torch.from_numpy(gl.load("digits").train[:500]).double() / 255
    pixels = torch.nn.functional.avg_pool2d(images, 4).flatten(1)
    return gl.saddles.linear_autoencoder_saddle(pixels - pixels.mean(0), [0, 2])


if __name__ == "__main__":
    run(app)
