"""What the whole atlas costs: settings × seeds of both experiments by the paper's protocol, in hours and in money.

    python benchmarks/plan_atlas.py --price 3 --write benchmarks/atlas_plan.md
    python benchmarks/plan_atlas.py --price 3 --record data/measured/atlas_plan-my-cpu.json

The times are those of the recorded runs in `data/runs`. Where several runs shared a GPU their records overlap in time,
which says how many did, and so what a run costs of a GPU. The price of a GPU's hour is yours to give. What is recorded
is what notebook 08 shows: `companion.atlas_plan`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pandas as pd

import gpulab as gl
from gpulab.errors import DataError, UsageError
from gpulab.store import records
from gpulab.store.listing import record_of, recorded_runs
from gpulab.training.workers import Worker

EXPERIMENTS = ("autoencoder", "prednet")
HOUR = 3600


class Rate(NamedTuple):
    """What the recorded runs of an experiment took."""

    walls: dict[str, list[float]]  # seconds of each run, by setting
    shared: float  # how many ran at a time on the GPU
    cost: float  # seconds of a GPU for a run
    machine: str

    @property
    def slots(self) -> int:
        """How many runs a GPU does at a time."""
        return max(1, int(self.shared))


def atlas_rates() -> dict[str, Rate]:
    """What the recorded runs of each experiment took, at the paper's size on one GPU.

    Raises:
        DataError: Where they are of several machines, or of one with several GPUs, of which this says nothing.
    """
    return {experiment: _rate(experiment) for experiment in EXPERIMENTS}


def _rate(experiment: str) -> Rate:
    frame = recorded_runs().query("profile == 'paper' and device == 'cuda' and loader == 'window'")
    frame = frame[(frame.experiment == experiment) & (frame.status == "finished")]
    runs = list(frame.itertuples())
    gpus = {len(record_of(run)["passport"]["gpus"]) for run in runs}
    if frame.machine.nunique() != 1 or gpus != {1}:
        raise DataError(f"the recorded runs of {experiment} are not of one machine with one GPU")
    walls: dict[str, list[float]] = {}
    spans = []
    for run in runs:
        begin = datetime.fromisoformat(record_of(run)["started"]).timestamp()
        walls.setdefault(run.setting, []).append(run.seconds)
        spans.append((begin, begin + run.seconds))
    busy = sum(end - begin for begin, end in _union(sorted(spans)))
    wall = sum(end - begin for begin, end in spans)
    return Rate(walls, wall / busy, busy / len(spans), frame.machine.iloc[0])


def _union(spans: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Spans of time, those that touch put together."""
    begin, end = spans[0]
    for next_begin, next_end in spans[1:]:
        if next_begin > end:
            yield begin, end
            begin = next_begin
        end = max(end, next_end)
    yield begin, end


def startup(tries: int = 3) -> float:
    """Seconds that a fresh worker needs beside the training, here and now: the least of some."""
    beside = []
    for seed in range(tries):
        job = {"net": "autoencoder", "setting": "cpu:threads=1", "seed": seed, "profile": "smoke"}
        told: list[float] = []
        begin = time.perf_counter()
        worker = Worker("cpu:threads=1", 1)
        worker.train(job, lambda *_, told=told: told.append(time.perf_counter()))
        beside.append(told[0] - begin)
        worker.close()
    return min(beside)


def rates_table(rates: dict[str, Rate]) -> pd.DataFrame:
    """What was measured, for reading: a row an experiment.

    `settings measured`, `runs recorded`, how many `at a time` on the GPU, `seconds of a run` (the median), from the
    `least` to the `most`, and the seconds `of a GPU` that it cost.
    """
    rows = []
    for name, rate in rates.items():
        times = [*itertools.chain(*rate.walls.values())]
        row = {"experiment": name, "machine": rate.machine, "settings measured": len(rate.walls)}
        row |= {"runs recorded": len(times), "at a time": rate.shared, "seconds of a run": statistics.median(times)}
        rows.append(row | {"least": min(times), "most": max(times), "of a GPU": rate.cost})
    return pd.DataFrame(rows)


def atlas_plan(
    price: float,
    beside: float = 0.0,
    settings: int = 12,
    seeds: int = 100,
    gpus: Iterable[int] = (1, 8, 64),
    rates: dict[str, Rate] | None = None,
) -> pd.DataFrame:
    """Hours and money of the atlas on several numbers of GPUs.

    From low to high: the settings that nobody measured as fast as the fastest, and as slow as the slowest measured one.
    Every free place takes the next run; an idle GPU is paid until the last run ends.

    Args:
        price: Of one GPU for one hour, in any currency.
        beside: Seconds of a run beside its training, from `startup`.
        settings: How many.
        seeds: For each setting.
        gpus: Numbers of GPUs.
        rates: From `atlas_rates`, by default.

    Returns:
        A row for each number of `gpus`: `hours_low`, `hours_high`, `money_low`, `money_high`, and `idle`, the share of
        the paid time (of the high guess) in which GPUs have nothing left to do.

    Raises:
        UsageError: For numbers that make no sense.
    """
    if not price > 0 or min(settings, seeds, *(counts := list(gpus))) < 1 or beside < 0:
        raise UsageError(f"price={price}, beside={beside}, settings={settings}, seeds={seeds}: expected more than 0")
    rates, rows = rates or atlas_rates(), []
    for count in counts:
        row: dict[str, float] = {"gpus": count}
        for label, guess in (("low", min), ("high", max)):
            hours = idle = 0.0
            for rate in rates.values():
                runs = _runs_of(rate.walls, settings, seeds, guess, beside)
                some, lost = _makespan(runs, count * rate.slots)
                hours, idle = hours + some, idle + lost * some
            row |= {f"hours_{label}": hours, f"money_{label}": hours * count * price, "idle": idle / hours}
        rows.append(row)
    columns = ["gpus", "hours_low", "hours_high", "money_low", "money_high", "idle"]
    return pd.DataFrame(rows)[columns].astype({"gpus": int})


def _makespan(durations: Sequence[float], slots: int) -> tuple[float, float]:
    """Hours until all is done where each free slot takes the next run, and the share of that that slots are idle."""
    free = [0.0] * min(slots, len(durations))
    for seconds in durations:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free) / HOUR, 1 - sum(durations) / (max(free) * slots)


def _runs_of(
    walls: dict[str, list[float]], settings: int, seeds: int, guess: Callable[[list[float]], float], beside: float
) -> list[float]:
    """The seconds of every run: of settings that were measured as measured, of the others by a guess."""
    draw = random.Random(0)
    known = [*walls.values()][:settings]
    guessed = [guess([statistics.median(times) for times in walls.values()])] * (settings - len(known))
    return [beside + draw.choice(times) for times in known for _ in range(seeds)] + [
        beside + seconds for seconds in guessed for _ in range(seeds)
    ]


def atlas_limits(
    beside: float = 0.0, settings: int = 12, seeds: int = 100, rates: dict[str, Rate] | None = None
) -> list[str]:
    """Where the assumptions of `atlas_plan` end, in sentences."""
    rates = rates or atlas_rates()
    machine = next(iter(rates.values())).machine
    most = {name: -(-settings * seeds // rate.slots) for name, rate in rates.items()}
    longest = {name: max(itertools.chain(*rate.walls.values())) + beside for name, rate in rates.items()}
    lines = []
    for name, rate in rates.items():
        medians = [statistics.median(times) for times in rate.walls.values()]
        lines.append(
            f"{name}: {len(rate.walls)} of {settings} settings were measured ({', '.join(sorted(rate.walls))}); what "
            "the others cost is a guess between the fastest and the slowest of them, which differ "
            f"{max(medians) / min(medians):.2f}-fold."
        )
    return [
        *lines,
        "Settings of a CPU are none of these: no run of the `paper` profile was recorded on one.",
        f"As many runs share a GPU as on the recorded {machine}, and each keeps a core of the CPU busy beside. With "
        "other numbers of runs at a time, and on another GPU, the seconds are others. How many there were is seen from "
        "when they began, which is recorded to the second.",
        f"Beside its training a run needs {beside:.1f} s to start its process (measured on the machine that wrote "
        "this, on one with a slow file system more); that is in the hours.",
        f"More GPUs than {' and '.join(f'{count:,} ({name})' for name, count in most.items())} save nothing: there "
        f"are no more runs, and the longest takes {' and '.join(f'{s / 60:.1f} min' for s in longest.values())}.",
        "A node that dies costs at most what its runs have done since their last checkpoint, which is kept every "
        "10 s in a shared folder; in a store on s3:// they begin anew.",
        "Waiting in a queue, moving data, and the hours that a provider counts in full are not in it.",
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--price", type=float, required=True, help="of one GPU for one hour, in any currency")
    parser.add_argument("--settings", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--beside", type=float, help="seconds of a run beside its training; by default measured here")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    beside, rates = startup() if given.beside is None else given.beside, atlas_rates()
    size = {"settings": given.settings, "seeds": given.seeds, "rates": rates}
    plan = atlas_plan(given.price, beside, gpus=given.gpus, **size)
    lines = [
        "# What the whole atlas costs",
        "",
        f"{given.settings} settings × {given.seeds} seeds × {len(EXPERIMENTS)} experiments, the `paper` profile: "
        f"{given.settings * given.seeds * len(EXPERIMENTS):,} runs. One GPU is an {rates[EXPERIMENTS[0]].machine}; its "
        f"hour costs {given.price:g}, a number that was put in and is no quotation.",
        "",
        "| experiment | settings measured | runs recorded | at a time on the GPU | seconds of a run | of the GPU |",
        "|---|---|---|---|---|---|",
    ]
    for _, row in rates_table(rates).iterrows():
        seconds = f"{row['seconds of a run']:.0f} ({row.least:.0f} to {row.most:.0f})"
        lines.append(
            f"| {row.experiment} | {row['settings measured']} | {row['runs recorded']} | {row['at a time']:.1f} | "
            f"{seconds} | {row['of a GPU']:.0f} |"
        )
    lines += [
        "",
        "From low to high: the settings that nobody measured as fast as the fastest, and as slow as the slowest "
        "measured one. Every free place takes the next run; an idle GPU is paid until the last run ends.",
        "",
        "| GPUs | hours | money | idle at the end |",
        "|---|---|---|---|",
    ]
    for row in plan.itertuples():
        hours, money = f"{row.hours_low:.2f} to {row.hours_high:.2f}", f"{row.money_low:,.0f} to {row.money_high:,.0f}"
        lines.append(f"| {row.gpus} | {hours} | {money} | {row.idle:.1%} |")
    lines += ["", "## Where these assumptions end", ""]
    lines += [f"- {limit}" for limit in atlas_limits(beside, **size)]
    versions = ", ".join(sorted(set(gl.recorded_runs().query("profile == 'paper'").gpulab)))
    lines += [
        "",
        f"Made by `benchmarks/plan_atlas.py --price {given.price:g}`"
        f" from `data/runs`, recorded with gpulab {versions}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.write:
        given.write.write_text(text, encoding="utf-8")
    if given.record:
        tables = {"rates": rates_table(rates), "plan": plan}
        document = {name: table.to_dict("records") for name, table in tables.items()}
        document |= {"price": given.price, "beside": beside, "limits": atlas_limits(beside, **size)}
        records.write_json(given.record, records.measured("cpu", **document))


if __name__ == "__main__":
    main()
