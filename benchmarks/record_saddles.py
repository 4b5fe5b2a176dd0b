"""Record on this machine the Hessian's spectrum along trainings, and escapes from a known saddle.

python benchmarks/record_saddles.py cuda --seeds 8 --minutes 9

What is there already is not made again, so it can be stopped and called again; it stops by itself when the next
training would not end within the minutes. On a GPU several may share the work: `--part 0/3`, `--part 1/3` and so on.
The escapes alone, in four files, take about ten minutes: `--only escapes`.
"""

import argparse
import shlex
import sys
import time
from functools import partial
from pathlib import Path

import torch

import gpulab as gl
from gpulab.saddles.optimizers import OPTIMIZERS
from gpulab.store.records import write_table

# The most wanted first: network, profile, options of gpulab.saddles.curvature_along.
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
PERTURBATIONS = (0.0, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8)
# The arithmetic in which optimisers are let go: notebook 06 draws them beside its own.
ARITHMETIC = {
    "cuda": ["cuda:precision=float64", "cuda:tf32=off", "cuda:tf32=on", "cuda:precision=bfloat16"],
    "cpu": [
        *("cpu:threads=1,precision=float64", "cpu:threads=1", "cpu:threads=1,precision=bfloat16"),
        *("cpu:threads=1,emulate=tf32", "cpu:threads=1,emulate=bfloat16"),
    ],
}
LARGE_EPSILON = partial(torch.optim.Adam, eps=1e-4, foreach=False)
RATES = {
    "sgd": [8.0, 16.0, None],
    "momentum": [2.0, 4.0, 8.0, 16.0, None],
    "rmsprop": [1e-5, 1e-4, 3e-4, 1e-3, 1e-2],
    "adam": [1e-5, 1e-4, 3e-4, 1e-3, 1e-2],
    LARGE_EPSILON: [1e-3, 1e-2],
}
WITH_BATCHES = {"sgd": [1.0], "adam": [1e-3]}


def known_saddle() -> gl.saddles.LinearAutoencoderSaddle:
    """Digits of 7×7 pixels, of which components 0 and 2 are held: the way out is component 1."""
    images = torch.from_numpy(gl.load("digits").train[:500]).double() / 255
    pixels = torch.nn.functional.avg_pool2d(images, 4).flatten(1)
    return gl.saddles.linear_autoencoder_saddle(pixels - pixels.mean(0), [0, 2])


def record_escapes(folder: Path, name: str, kind: str, command: str) -> None:
    """Gradient descent pushed off and let go, and all optimisers let go, with weights in float64, with minibatches."""
    jobs = {
        name: (ESCAPES[kind], {"perturbations": PERTURBATIONS}),
        f"{name}-optimizers": (ARITHMETIC[kind], {"optimizers": RATES}),
        f"{name}-master-weights": (ARITHMETIC[kind], {"optimizers": list(OPTIMIZERS), "master_weights": True}),
        f"{name}-minibatches": (ARITHMETIC[kind], {"optimizers": WITH_BATCHES, "batch_sizes": [20], "steps": 5_000}),
    }
    for title, (settings, options) in jobs.items():
        if (file := folder / f"{title}.parquet").is_file():
            continue
        started = time.perf_counter()
        table = gl.saddles.escape_table(known_saddle(), settings, seeds=3, **options).table
        write_table(file, table, {"passport": dict(gl.passport()), "command": command})
        print(f"{title}: {len(table)} escapes in {time.perf_counter() - started:.0f} s", flush=True)


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
                frame = gl.saddles.curvature_along(net, **own, **options, progress=False)
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
    parser.add_argument("--only", help="networks and profiles, such as prednet:paper,autoencoder:quick; or escapes")
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
        record_escapes(arguments.output / "escapes", name, arguments.kind, words)
    record_curvature(
        arguments.output / "curvature", SETTINGS[arguments.kind], list(range(part, arguments.seeds, parts)), end, words
    )
