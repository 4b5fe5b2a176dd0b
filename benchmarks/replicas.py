"""Networks that share one GPU: frames per second in sum, of 1, 2, 4, … of them in one process.

python benchmarks/replicas.py cuda:tf32=off cuda:tf32=on --write benchmarks/replicas.md

Each training goes through the loop of `gpulab.train` from its first window to its last, data and checkpoints included;
what is measured is the time in which all are under way, without the first two windows of each, in which its graph is
captured.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch
from entrants import markdown

from gpulab.passports import passport
from gpulab.training import replicas

FRAMES = {("autoencoder", "quick"): 6_000, ("prednet", "quick"): 1_200, ("prednet", "paper"): 400}
COUNTS = (1, 2, 4, 8, 16, 32)
WARM = 2  # windows


def speed(net: str, profile: str, setting: str, count: int) -> float:
    """Frames per second in sum while so many train."""
    frames, seen = FRAMES[net, profile], dict[int, list[tuple[float, int]]]()

    def answer(number: int, **message: object) -> None:
        if "error" in message:
            raise SystemExit(str(message["error"]))
        if "done" in message:
            seen.setdefault(number, []).append((time.perf_counter(), int(str(message["done"]))))

    with tempfile.TemporaryDirectory() as store:
        job = {"net": net, "profile": profile, "setting": setting, "frames": frames, "store": store}
        lines = [json.dumps({"number": seed, **job, "seed": seed, "keep_weights": False}) for seed in range(count)]
        coming = replicas.Coming(iter(lines))
        for number, first in coming:
            replicas.train_together(number, first, coming, answer, count)
    begin = max(times[WARM][0] for times in seen.values())
    end = min(times[-1][0] for times in seen.values())
    if begin >= end:
        raise SystemExit(f"{net}, {profile}: {frames} frames are too few for {count} at once")
    done = 0
    for times in seen.values():
        inside = [frames for at, frames in times if begin <= at <= end]
        done += inside[-1] - inside[0]
    return done / (end - begin)


def measure(settings: list[str], profiles: list[str], counts: list[int]) -> pd.DataFrame:
    """A row for each setting and network, a column for each number of them."""
    rows = []
    for setting in settings:
        for net, profile in FRAMES:
            if profile not in profiles:
                continue
            for count in counts:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                fps = speed(net, profile, setting, count)
                peak = torch.cuda.max_memory_allocated() / 2**30
                rows.append(
                    {"net": net, "profile": profile, "setting": setting, "count": count, "fps": fps, "GiB": peak}
                )
                print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+")
    parser.add_argument("--profiles", nargs="+", default=["quick", "paper"])
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    replicas.TELL = 0.0  # every window is told
    found = measure(asked.settings, asked.profiles, asked.counts)
    wide = found.pivot(index=["net", "profile", "setting"], columns="count", values="fps").round(0).astype("Int64")
    memory = found[found["count"] == max(asked.counts)].set_index(["net", "profile", "setting"]).GiB.round(2)
    wide[f"GiB for {max(asked.counts)}"] = memory
    text = (
        "# Networks that share a GPU\n\nFrames per second in sum, by how many of them train at once in one process "
        f"(`{Path(__file__).name}`).\n\n{markdown(wide)}\n\n{passport().summary()}\n"
    )
    print(text)
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()
