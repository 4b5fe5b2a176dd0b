"""The same trainings in PyTorch, JAX and Keras: how far a first step differs, and frames per second.

    python benchmarks/frameworks.py cpu:threads=1 --write benchmarks/frameworks.md
    python benchmarks/frameworks.py cuda:tf32=off --size paper --write benchmarks/frameworks_cuda.md

Needs the extras jax and keras; --libraries jax leaves the other out. Trainings take turns; a speed is the median of the
rounds, each of which is the median window of a training without its first two, in which JAX and TensorFlow compile.
"""

import argparse
import sys
from pathlib import Path

import gpulab as gl
from gpulab.companion import library_speeds, one_step
from gpulab.passports import LIBRARIES

NETWORKS = ("autoencoder", "prednet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", help="such as cpu:threads=1 or cuda:tf32=off")
    parser.add_argument("--size", default="quick", help="smoke, quick or paper")
    parser.add_argument("--libraries", nargs="+", default=["jax", "keras"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    here = gl.passport()
    versions = [f"{name} {here['software'][name]}" for name in LIBRARIES if name in here["software"]]
    lines = [
        "# The library as a factor",
        "",
        f"`python {' '.join(sys.argv)}` on {', '.join([here.summary(), *versions])}.",
        "",
        "| network | library | losses of the first window, roundings off torch | gradient, roundings off torch |",
        "|---|---|---|---|",
    ]
    for net in NETWORKS:
        for row in one_step(net, asked.setting, size=asked.size, libraries=asked.libraries).itertuples():
            lines.append(f"| {net} | {row.library} | {row.loss_roundings:.2g} | {row.gradient_roundings:.2g} |")
    lines += [
        "",
        f"| network | library | frames/s, median of {asked.rounds} | lowest to highest | first two windows, s |",
    ]
    lines.append("|---|---|---|---|---|")
    for net in NETWORKS:
        options = {"rounds": asked.rounds, "windows": asked.windows, "libraries": ["torch", *asked.libraries]}
        table = library_speeds(net, asked.setting, asked.size, **options)
        for library, some in table.groupby("library", sort=False):
            speed = some.frames_per_second
            spread = f"{speed.min():.0f} to {speed.max():.0f}"
            lines.append(f"| {net} | {library} | {speed.median():.0f} | {spread} | {some.first_two.iloc[0]:.1f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.write:
        asked.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
