"""Each factor of notebook 02 changed on its own, on trained networks.

    python -m benchmarks.recording.factors cpu --store FOLDER
    python -m benchmarks.recording.factors cuda --store FOLDER
    python -m benchmarks.recording.factors cuda-paper --store FOLDER
    python -m benchmarks.recording.factors cuda-paper-more --store FOLDER

`--help` lists all parts. Runs that are in the store are not repeated, so it can be stopped and
restarted. The plan of each part is in `data/registered`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import gpulab as gl
from benchmarks.measuring import run

PLANS = Path("data/registered")


class Part(NamedTuple):
    """The runs that are made by one command.

    Attributes:
        models: Keyword arguments of `gpulab.Experiment` for each network.
        settings: One setting for each change, the reference first.
        options: Options of further runs under the reference, keyed by what they change.
        seeds: The planned seeds.
        beside: A setting of another device, run with the same seeds.
        plan: The name of the plan, a file in `data/registered`.
    """

    models: list[dict[str, Any]]
    settings: list[str]
    options: list[dict[str, Any]]
    seeds: range
    beside: list[str] = []
    plan: str = "factors-on-networks-that-learned"


MOTION = {"model": "prednet", "profile": "motion"}
IMAGES = {"model": "autoencoder", "profile": "quick", "options": {"frames": 10_000}}
PUBLISHED = {"model": "prednet", "profile": "paper"}
OFF = "cuda:tf32=off"
ON = "cuda:tf32=on"
PARTS = {
    "cuda": Part(
        [MOTION, IMAGES],
        [
            OFF,
            f"{OFF},deterministic=on",
            ON,
            f"{OFF},cudnn=off",
            # combinations
            f"{ON},deterministic=on",
            f"{ON},cudnn=off",
            f"{OFF},cudnn=off,deterministic=on",
            f"{ON},cudnn=off,deterministic=on",
            # formats and compilation
            f"{OFF},autocast=bfloat16",
            "cuda:precision=float64",
            f"{OFF},compile=inductor",
        ],
        [{"rerun": 1}, {"flip": 0}, {"draws": "device"}],
        range(16),
        ["cpu:threads=1"],
    ),
    "cpu": Part(
        [IMAGES, MOTION],
        [
            "cpu:threads=1",
            "cpu:threads=2",
            "cpu:threads=1,isa=avx2",
            "cpu:threads=1,deterministic=on",
            "cpu:threads=1,order=split-4",
            "cpu:threads=1,emulate=tf32",
            "cpu:threads=1,autocast=bfloat16",
            "cpu:precision=float64,threads=1",
            "cpu:threads=1,compile=inductor",
        ],
        [{"rerun": 1}, {"flip": 0}],
        range(12),
    ),
    "cuda-paper": Part(
        [PUBLISHED],
        [
            OFF,
            f"{OFF},deterministic=on",
            f"{OFF},cudnn=off,deterministic=on",
            f"{ON},deterministic=on",
        ],
        [{"rerun": 1}],
        range(12),
    ),
    "cuda-paper-more": Part(
        [PUBLISHED],
        [OFF, f"{OFF},deterministic=on", f"{ON},deterministic=on"],
        [],
        range(12, 74),
        plan="more-seeds-at-published-size",
    ),
    "cuda-autoencoder-more": Part(
        [IMAGES],
        [OFF, f"{OFF},autocast=bfloat16"],
        [],
        range(16, 96),
        plan="more-seeds-of-undecided-changes",
    ),
    "cuda-prednet-more": Part(
        [MOTION],
        [OFF, f"{OFF},autocast=bfloat16"],
        [],
        range(16, 48),
        plan="more-seeds-of-undecided-changes",
    ),
    "cpu-autoencoder-more": Part(
        [IMAGES],
        ["cpu:threads=1", "cpu:threads=1,emulate=tf32", "cpu:threads=1,autocast=bfloat16"],
        [],
        range(12, 96),
        plan="more-seeds-of-undecided-changes",
    ),
    "cpu-prednet-more": Part(
        [MOTION],
        ["cpu:threads=1", "cpu:threads=1,autocast=bfloat16"],
        [],
        range(12, 48),
        plan="more-seeds-of-undecided-changes",
    ),
}


def jobs(part: Part) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Yield the network, the setting and the options of each kind of run."""
    reference = part.settings[0]
    rows = [(setting, {}) for setting in [*part.settings, *part.beside]]
    rows[1:1] = [(reference, options) for options in part.options]
    return [(model, setting, options) for model in part.models for setting, options in rows]


def main(
    name: Annotated[str, typer.Argument(metavar="PART", help=f"one of {', '.join(PARTS)}")],
    store: Annotated[Path, typer.Option(help="folder for the runs")],
    share: Annotated[
        str, typer.Option(help="such as 2/8: of every eight planned seeds, the second")
    ] = "1/1",
    workers: Annotated[int, typer.Option(help="runs at the same time")] = 1,
    only: Annotated[str, typer.Option(help="settings that contain this text")] = "",
    model: Annotated[str, typer.Option(help="one network only")] = "",
    minutes: Annotated[float, typer.Option(help="start no new experiment after this time")] = 1e9,
) -> None:
    """Make the runs of one part that are missing from the store, in ascending order of seeds."""
    part = PARTS[name]
    position, shares = (int(number) for number in share.split("/"))
    seeds = part.seeds[position - 1 :: shares]
    deadline = time.monotonic() + 60 * minutes
    for first in range(0, len(seeds), workers):
        group = list(seeds[first : first + workers])
        for network, setting, options in jobs(part):
            if only not in setting or (model and network["model"] != model):
                continue
            if time.monotonic() > deadline:
                print("the time is up", flush=True)
                return
            asked = dict(options)
            reruns = 1 + asked.pop("rerun", 0)
            given = network | {
                "options": {"keep_weights": False, **network.get("options", {}), **asked}
            }
            begun = time.monotonic()
            try:
                table = gl.Experiment(
                    settings=[setting],
                    seeds=group,
                    store=store,
                    reruns=reruns,
                    workers=workers,
                    registered=PLANS / f"{part.plan}.md",
                    **given,
                ).run(progress=False)
            except gl.GpulabError as error:  # this machine does not support the setting
                print(f"{network['model']} {setting} {options}: {error}", flush=True)
                continue
            done = table.groupby("status").size().to_dict()
            seconds = time.monotonic() - begun
            print(
                f"{network['model']} {setting} {options}, seeds {group}: {done}, {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    run(lambda: typer.run(main))
