"""Training steps beside each other in one process: `race` is what the benchmarks of training have in common."""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from gpulab.settings import Setting
from gpulab.store import records

Step = Callable[[], Any]
RECORDS = Path(__file__).parent.parent / "data" / "measured"
WARM_UP, STEPS = 3, 3  # steps, in each round


def race(
    made: Mapping[str, Callable[[], Step]], count: int, setting: Setting, rounds: int, label: str
) -> tuple[list[dict[str, Any]], dict[str, Step]]:
    """A row an entrant: median and quartiles of how many per second, where a step does `count`; and the steps.

    They take turns, after a warm-up. On a GPU, `memory` is the most that was allocated while one was made and warmed
    up, above what the others hold, in bytes.
    """
    wait = getattr(torch, setting.kind).synchronize
    steps: dict[str, Step] = {}
    memory: dict[str, int | None] = {}
    times: dict[str, list[float]] = {name: [] for name in made}
    for name, make in made.items():
        if setting.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        steps[name] = make()
        for _ in range(WARM_UP):
            steps[name]()
        wait()
        memory[name] = torch.cuda.max_memory_allocated() - before if setting.kind == "cuda" else None
    for _ in tqdm(range(rounds), desc=label):
        for name, step in steps.items():
            wait()
            started = time.perf_counter()
            for _ in range(STEPS):
                step()
            wait()
            times[name].append((time.perf_counter() - started) / STEPS)
    rows = []
    for name, taken in times.items():
        slow, median, fast = (count / seconds for seconds in statistics.quantiles(taken, n=4)[::-1])
        row = {"setting": str(setting), "entrant": name, "per_second": median, "quartiles": [slow, fast]}
        rows.append({**row, "memory": memory[name]})
    return rows, steps


def peak(setting: Setting) -> float:
    """FLOP/s of a large matrix product, the ceiling of all that is measured."""
    edge = 8192 if setting.kind == "cuda" else 2048
    a = torch.rand(edge, edge, device=setting.device)
    wait, times = getattr(torch, setting.kind).synchronize, []
    for _ in range(7):
        wait()
        started = time.perf_counter()
        a @ a
        wait()
        times.append(time.perf_counter() - started)
    return 2 * edge**3 / statistics.median(times[2:])


def markdown(frame: pd.DataFrame) -> str:
    """A table of Markdown."""
    header = [*frame.index.names, *frame.columns]
    rows = [header, ["---"] * len(header), *([*key, *row] for key, row in zip(frame.index, frame.values, strict=True))]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def keep(
    program: str,
    table: Callable[[list[dict[str, Any]]], str],
    document: dict[str, Any],
    setting: Setting | None,
    record: Path | None,
    write: Path | None,
) -> None:
    """Print what was measured under a setting, record it, and write the table of all that is recorded."""
    if setting:
        document = records.measured(setting.kind, **document)
        print(table([document]).partition("| machine")[2])
        if record:
            records.write_json(record, document)
    if write:
        found = [records.read_json(file) for file in sorted(RECORDS.glob(f"{program}-*.json"))]
        write.write_text(table(found), encoding="utf-8")
