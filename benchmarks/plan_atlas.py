"""What the whole atlas costs: settings × seeds of both experiments by the paper's protocol, in hours and in money.

    python benchmarks/plan_atlas.py --price 3 --write benchmarks/atlas_plan.md
    python benchmarks/plan_atlas.py --price 3 --record data/measured/atlas_plan-my-cpu.json

The times are those of the recorded runs in `data/runs`. Where several runs shared a GPU their records overlap in time,
which says how many did, and so what a run costs of a GPU. The price of a GPU's hour is yours to give. What is recorded
is what notebook 08 shows: `companion.atlas_plan`.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import pandas as pd
import typer
from measuring import keep, markdown, run, show

from gpulab.errors import DataError, UsageError
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
    """What the recorded runs of each experiment took, at the paper's size on one GPU of one machine."""
    return {experiment: _rate(experiment) for experiment in EXPERIMENTS}


def _rate(experiment: str) -> Rate:
    frame = recorded_runs().query("profile == 'paper' and device == 'cuda' and loader == 'window'")
    frame = frame[(frame.experiment == experiment) & (frame.status == "finished")]
    runs = list(frame.itertuples())
    gpus = {len(record_of(one)["passport"]["gpus"]) for one in runs}
    if frame.machine.nunique() != 1 or gpus != {1}:
        raise DataError(f"the recorded runs of {experiment} are not of one machine with one GPU")
    walls: dict[str, list[float]] = {}
    spans = []
    for one in runs:
        begin = datetime.fromisoformat(record_of(one)["started"]).timestamp()
        walls.setdefault(one.setting, []).append(one.seconds)
        spans.append((begin, begin + one.seconds))
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
    """What was measured, for reading: a row an experiment; `seconds of a run` are the median."""
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
    """Hours and money of the atlas on several numbers of GPUs, at the price of one for one hour.

    From low to high: the settings that nobody measured as fast as the fastest, and as slow as the slowest measured one.
    Every free place takes the next run; an idle GPU is paid until the last run ends. `beside` are the seconds of a run
    beside its training, from `startup`; `idle` is the share of the paid time (of the high guess) in which GPUs have
    nothing left to do.
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


def main(
    price: Annotated[float, typer.Option(help="of one GPU for one hour, in any currency")],
    settings: int = 12,
    seeds: int = 100,
    gpus: list[int] = (1, 8, 64),
    beside: Annotated[
        float | None, typer.Option(help="seconds of a run beside its training  [default: measured]")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="page of Markdown, between its marks")] = None,
    record: Path | None = None,
) -> None:
    """Hours and money of the whole atlas, from the times of the recorded runs, and where that ends."""
    rates, beside = atlas_rates(), startup() if beside is None else beside
    size = {"settings": settings, "seeds": seeds, "rates": rates}
    plan, limits, measured = (
        atlas_plan(price, beside, gpus=gpus, **size),
        atlas_limits(beside, **size),
        rates_table(rates),
    )
    asked = (
        f"{settings} settings × {seeds} seeds × {len(EXPERIMENTS)} experiments, the `paper` profile: "
        f"{settings * seeds * len(EXPERIMENTS):,} runs. One GPU is an {measured.machine[0]}; its hour costs {price:g}, "
        "a number that was put in and is no quotation."
    )
    ends = "\n".join(f"- {limit}" for limit in limits)
    parts = {"rates": f"{asked}\n\n{markdown(measured.round(1))}", "plan": markdown(plan.round(3))}
    show("What the whole atlas costs", write, **parts, limits=ends)
    tables = {"rates": measured.to_dict("records"), "plan": plan.to_dict("records")}
    keep(record, "cpu", **tables, price=price, beside=beside, limits=limits)


if __name__ == "__main__":
    run(lambda: typer.run(main))
