"""Record on this machine the Hessian's spectrum along trainings, and escapes from a known saddle.

python benchmarks/record_saddles.py cuda --seeds 8 --minutes 9

What is there already is not made again, so it can be stopped and called again; it stops by itself when the next
training would not end within the minutes. On a GPU several may share the work: `--part 0/3`, `--part 1/3` and so on.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

import torch

import gpulab as gl
from gpulab.records import write_table

# The most wanted first: network, profile, options of gpulab.curvature_along.
CURVATURE = [
    ("autoencoder", "quick", {}),
    ("prednet", "quick", {}),
    ("prednet", "paper", {"snapshots": 4, "steps": 40}),
    ("autoencoder", "paper", {}),
]
SETTINGS = {
    "cuda": ["cuda:tf32=off", "cuda:tf32=on"],
    "cpu": ["cpu", "cpu:precision=float64", "cpu:emulate=tf32", "cpu:threads=1"],
}
ESCAPES = {
    "cuda": ["cuda:precision=float64", "cuda:tf32=off", "cuda:tf32=on", "cuda:cudnn=off", "cuda:precision=bfloat16"],
    "cpu": ["cpu:precision=float64", "cpu", "cpu:precision=bfloat16"],
}
PERTURBATIONS = (None, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8)


def known_saddle() -> gl.saddles.LinearAutoencoderSaddle:
    """Digits of 7×7 pixels, of which components 0 and 2 are held: the way out is component 1."""
    images = torch.from_numpy(gl.load("digits").train[:500]).double() / 255
    pixels = torch.nn.functional.avg_pool2d(images, 4).flatten(1)
    return gl.linear_autoencoder_saddle(pixels - pixels.mean(0), [0, 2])


def record_escapes(file: Path, settings: list[str], command: str) -> None:
    if file.is_file():
        return
    started = time.perf_counter()
    escapes = gl.escape_table(known_saddle(), settings, perturbations=PERTURBATIONS, seeds=3)
    write_table(file, escapes.table, {"passport": dict(gl.passport()), "command": command})
    print(f"escapes: {len(escapes.table)} in {time.perf_counter() - started:.0f} s", flush=True)


def record_curvature(folder: Path, settings: list[str], seeds: list[int], until: float, command: str) -> None:
    for net, profile, options in CURVATURE:
        longest = 0.0
        for seed in seeds:
            for setting in settings:
                started = time.perf_counter()
                if started + longest > until:
                    print(f"{net} {profile} stops before seed {seed} under {setting}: call again for the rest")
                    return
                own = {"setting": setting, "seeds": [seed], "profile": profile, "store": folder, "command": command}
                frame = gl.curvature_along(net, **own, **options, progress=False)
                longest = max(longest, took := time.perf_counter() - started)
                last = frame.iloc[-1]
                print(
                    f"{net} {profile} {setting} seed {seed}: {took:.1f} s, {last.status}, loss {last.loss:.4g}, "
                    f"index {last.index_fraction:.2e}, λ from {last.smallest:.3g} to {last.largest:.3g}",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(SETTINGS), help="the device that trains")
    parser.add_argument("--output", type=Path, default=Path("data/saddles"))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--part", default="0/1", help="which part of the seeds, of how many")
    parser.add_argument("--only", help="networks and profiles, such as prednet:paper,autoencoder:quick")
    arguments = parser.parse_args()
    try:
        gl.Setting.parse(SETTINGS[arguments.kind][0]).check()
    except gl.GpulabError as error:
        sys.exit(str(error))
    end = time.perf_counter() + 60 * arguments.minutes
    part, parts = map(int, arguments.part.split("/"))
    if arguments.only:
        CURVATURE = [job for job in CURVATURE if f"{job[0]}:{job[1]}" in arguments.only.split(",")]
    words = shlex.join(["python", *sys.argv])
    if part == 0:
        machine = gl.passport()["gpus"][0]["name"] if arguments.kind == "cuda" else gl.passport()["cpu"]["model"]
        name = "-".join(machine.lower().split())
        record_escapes(arguments.output / "escapes" / f"{name}.parquet", ESCAPES[arguments.kind], words)
    record_curvature(
        arguments.output / "curvature", SETTINGS[arguments.kind], list(range(part, arguments.seeds, parts)), end, words
    )
