"""What the whole atlas costs: settings × seeds of both experiments by the paper's protocol, in hours and in money.

    python benchmarks/plan_atlas.py --price 3 --write benchmarks/atlas_plan.md

The times are those of the recorded runs in `data/runs`. Where several runs shared a GPU their records overlap in time,
which says how many did, and so what a run costs of a GPU. The price of a GPU's hour is yours to give.
"""

import argparse
import heapq
import itertools
import random
import statistics
import time
from datetime import datetime
from pathlib import Path

import gpulab as gl
from gpulab.training.store import record_of
from gpulab.training.workers import Worker

EXPERIMENTS = ("autoencoder", "prednet")


def measured(experiment):
    """{setting: wall seconds of each run}, how many runs shared the GPU, GPU-seconds a run, and the machine."""
    frame = gl.recorded_runs().query("profile == 'paper' and device == 'cuda' and loader == 'window'")
    frame = frame[(frame.experiment == experiment) & (frame.status == "finished")]
    (machine,) = set(frame.machine)
    assert all(len(record_of(run)["passport"]["gpus"]) == 1 for run in frame.itertuples()), "they shared one GPU"
    walls, spans = {}, []
    for run in frame.itertuples():
        begin = datetime.fromisoformat(record_of(run)["started"]).timestamp()
        walls.setdefault(run.setting, []).append(run.seconds)
        spans.append((begin, begin + run.seconds))
    busy = sum(end - begin for begin, end in union(sorted(spans)))
    wall = sum(end - begin for begin, end in spans)
    return walls, wall / busy, busy / len(spans), machine


def union(spans):
    """Spans of time, those that touch put together."""
    begin, end = spans[0]
    for next_begin, next_end in spans[1:]:
        if next_begin > end:
            yield begin, end
            begin = next_begin
        end = max(end, next_end)
    yield begin, end


def startup():
    """Seconds that a fresh worker needs beside the training, here and now: the least of three."""
    beside = []
    for seed in range(3):
        job = {"net": "autoencoder", "setting": "cpu:threads=1", "seed": seed, "profile": "smoke"}
        begin = time.perf_counter()
        worker = Worker(job["setting"], 1)
        told = []
        worker.train(job, lambda *_, told=told: told.append(time.perf_counter()))
        beside.append(told[0] - begin)
        worker.close()
    return min(beside)


def makespan(durations, slots):
    """Hours until all is done where each free slot takes the next run, and the share of that that slots are idle."""
    free = [0.0] * min(slots, len(durations))
    for seconds in durations:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free) / 3600, 1 - sum(durations) / (max(free) * slots)


def runs_of(walls, settings, seeds, guess, beside):
    """The seconds of every run: of settings that were measured as measured, of the others by a guess."""
    draw = random.Random(0)
    known = [*walls.values()][:settings]
    guessed = [guess([statistics.median(times) for times in walls.values()])] * (settings - len(known))
    return [beside + draw.choice(times) for times in known for _ in range(seeds)] + [
        beside + seconds for seconds in guessed for _ in range(seeds)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--price", type=float, required=True, help="of one GPU for one hour, in any currency")
    parser.add_argument("--settings", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    beside = startup()
    found = {name: measured(name) for name in EXPERIMENTS}
    (machine,) = {machine for *_, machine in found.values()}
    runs = given.settings * given.seeds
    lines = [
        "# What the whole atlas costs",
        "",
        f"{given.settings} settings × {given.seeds} seeds × {len(EXPERIMENTS)} experiments, the `paper` profile: "
        f"{runs * len(EXPERIMENTS):,} runs. One GPU is an {machine}; its hour costs {given.price:g}, a number that was "
        "put in and is no quotation.",
        "",
        "| experiment | settings measured | runs recorded | at a time on the GPU | seconds of a run | of the GPU |",
        "|---|---|---|---|---|---|",
    ]
    for name, (walls, shared, cost, _) in found.items():
        times = [*itertools.chain(*walls.values())]
        lines.append(
            f"| {name} | {len(walls)} | {len(times)} | {shared:.1f} | {statistics.median(times):.0f} "
            f"({min(times):.0f} to {max(times):.0f}) | {cost:.0f} |"
        )
    lines += [
        "",
        "From low to high: the settings that nobody measured as fast as the fastest, and as slow as the slowest "
        "measured one. Every free place takes the next run; an idle GPU is paid until the last run ends.",
        "",
        "| GPUs | hours | money | idle at the end |",
        "|---|---|---|---|",
    ]
    for gpus in given.gpus:
        cells = []
        for guess in (min, max):
            hours = idle = 0.0
            for walls, shared, *_ in found.values():
                slots = gpus * max(1, int(shared))
                h, lost = makespan(runs_of(walls, given.settings, given.seeds, guess, beside), slots)
                hours, idle = hours + h, idle + lost * h
            cells.append((hours, hours * gpus * given.price, idle / hours))
        (low, cheap, _), (high, dear, lost) = cells
        lines.append(f"| {gpus} | {low:.2f} to {high:.2f} | {cheap:,.0f} to {dear:,.0f} | {lost:.1%} |")
    most = {name: -(-runs // max(1, int(shared))) for name, (_, shared, *_) in found.items()}
    longest = {name: max(itertools.chain(*walls.values())) + beside for name, (walls, *_) in found.items()}
    lines += [
        "",
        "## Where these assumptions end",
        "",
        *(
            f"- {name}: {len(walls)} of {given.settings} settings were measured ({', '.join(sorted(walls))}); what the "
            f"others cost is a guess between the fastest and the slowest of them, which differ "
            f"{max(map(statistics.median, walls.values())) / min(map(statistics.median, walls.values())):.2f}-fold."
            for name, (walls, *_) in found.items()
        ),
        "- Settings of a CPU are none of these: no run of the `paper` profile was recorded on one.",
        f"- As many runs share a GPU as on the recorded {machine}, and each keeps a core of the CPU busy beside. With "
        "other numbers of runs at a time, and on another GPU, the seconds are others. How many there were is seen from "
        "when they began, which is recorded to the second.",
        f"- Beside its training a run needs {beside:.1f} s to start its process (measured on the machine that wrote "
        "this, on one with a slow file system more); that is in the hours.",
        f"- More GPUs than {' and '.join(f'{count:,} ({name})' for name, count in most.items())} save nothing: there "
        f"are no more runs, and the longest takes {' and '.join(f'{s / 60:.1f} min' for s in longest.values())}.",
        "- A node that dies costs at most what its runs have done since their last checkpoint, which is kept every "
        "10 s in a shared folder; in a store on s3:// they begin anew.",
        "- Waiting in a queue, moving data, and the hours that a provider counts in full are not in it.",
        "",
        f"Made by `benchmarks/plan_atlas.py --price {given.price:g}`"
        f" from `data/runs`, recorded with gpulab {', '.join(sorted(set(gl.recorded_runs().query(PAPER).gpulab)))}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.write:
        given.write.write_text(text, encoding="utf-8")


PAPER = "profile == 'paper'"

if __name__ == "__main__":
    main()
