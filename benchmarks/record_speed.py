"""Measure everything that notebook 07 shows on this machine, and keep it with its passport.

    python benchmarks/record_speed.py cpu:threads=2 --write data/measured/speed-my-cpu.json
    python benchmarks/record_speed.py cuda:tf32=off --write data/measured/speed-my-gpu.json

What this machine lacks is kept as a row that says so. `--parts` measures some sections only.
How many cores other programs used meanwhile is kept, too.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import pandas as pd
import psutil

import gpulab as gl
from companion.workloads import PARTS, Row, measure_speed
from gpulab.errors import in_one_line
from gpulab.store import records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", help="such as cpu:threads=2 or cuda:tf32=off")
    parser.add_argument("--sizes", nargs="+", default=["quick", "paper"], help="of smoke, quick and paper")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--wait", type=float, default=0, help="seconds, before each section, for others to end")
    parser.add_argument("--attempts", type=int, default=1, help="at a section that others disturb; the best is kept")
    parser.add_argument("--quiet", type=float, default=0.5, help="cores that others may use without another attempt")
    asked = parser.parse_args()
    frames, others, begun = [], {}, time.perf_counter()
    for size, part in itertools.product(asked.sizes, asked.parts):
        tries: list[tuple[pd.DataFrame, float]] = []
        while len(tries) < asked.attempts and not (tries and tries[-1][1] < asked.quiet):
            patience = time.perf_counter() + asked.wait
            while time.perf_counter() < patience and psutil.cpu_percent(2) * psutil.cpu_count() / 100 > asked.quiet:
                pass
            tries.append(measured(part, asked.setting, size))
        rows, others[f"{size} {part}"] = min(tries, key=lambda one: one[1])
        frames.append(rows)
        passed, busy = time.perf_counter() - begun, others[f"{size} {part}"]
        print(f"{passed:.0f} s: {size} {part}, {len(rows)} rows; others used {busy:.1f} cores", flush=True)
        write(asked.write, pd.concat(frames, ignore_index=True), others)


def measured(part: str, setting: str, size: str) -> tuple[pd.DataFrame, float]:
    """The rows of a section, and how many cores other programs used meanwhile."""
    this = records.machine(gl.passport(), gl.Setting.parse(setting).kind)

    def used() -> tuple[float, float, float]:
        all_cores, me = psutil.cpu_times(), psutil.Process()
        mine = [*me.cpu_times()[:2], *(t for child in me.children(True) for t in child.cpu_times()[:2])]
        return sum(all_cores) - all_cores.idle - getattr(all_cores, "iowait", 0.0), sum(mine), time.perf_counter()

    before = used()
    try:
        rows = measure_speed(part, [setting], size)
    except Exception as error:  # of one section, which says so: the others are worth having
        why = Row(part, note=f"failed: {in_one_line(error)[:200]}")._asdict()
        rows = pd.DataFrame(
            [{"part": part, **why, "size": size, "setting": setting, "machine": this, "recorded": False}]
        )
    busy, mine, seconds = (after - first for after, first in zip(used(), before, strict=True))
    return rows, max(0.0, (busy - mine) / seconds)


def write(file: Path, frame: pd.DataFrame, others: dict[str, float]) -> None:
    """All that there is so far, so that a recording that is cut off leaves a whole file."""
    table = frame.drop(columns=["machine", "recorded"]).astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    device = frame.setting[0].partition(":")[0]
    records.write_json(file, records.measured(device, cores_of_others=others, rows=rows))


if __name__ == "__main__":
    main()
