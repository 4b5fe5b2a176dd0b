"""Measure what the companion costs here, and put the table between the marks in docs/costs.md.

python benchmarks/budgets.py --profile smoke --profile quick --device cpu

Time: the wall clock of `python -m companion`, into an empty folder, and of each notebook in it. Memory:
the largest sum, over all processes of one notebook, that the companion saw. The start of `import
gpulab` and `gpulab --help` is the median of seven processes after one that warms the file cache.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpulab.passports import passport

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "costs.md"
MARKS = re.compile(r"(?<=<!-- budgets -->\n).*?(?=<!-- /budgets -->)", re.DOTALL)
GPULAB = [sys.executable, "-m", "gpulab.cli"]
STARTS = 7


def timed(command):
    """Seconds of a process; its failure is ours."""
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def start_seconds(command):
    timed(command)
    return statistics.median(timed(command) for _ in range(STARTS))


def companion(profile, device, only):
    """(seconds in all, the results of the notebooks) of one execution into an empty folder."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "companion", "--profile", profile, "--device", device, "--output", output]
        seconds = timed([*command, "--only", only] if only else command)
        return seconds, json.loads((Path(output) / "report" / "results.json").read_text(encoding="utf-8"))


def duration(seconds):
    """Seconds as a reader says them.

    >>> duration(0.0421), duration(7.31), duration(251)
    ('0.04 s', '7 s', '4 min 11 s')
    """
    if seconds < 1:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def mebibytes(count):
    return f"{count / 2**20:,.0f} MiB"


def table(profiles, device, only):
    """The table in Markdown, and below it where and when it was measured."""
    rows = [
        ("`import gpulab`, Python's own start included", start_seconds([sys.executable, "-c", "import gpulab"]), None),
        ("`gpulab --help`", start_seconds([*GPULAB, "--help"]), None),
    ]
    for profile in profiles:
        seconds, results = companion(profile, device, only)
        rows += [
            (f"`{result['name']}`, {profile}", result["seconds"], result["peak_memory_bytes"]) for result in results
        ]
        peak = max(result["peak_memory_bytes"] for result in results)
        rows.append((f"`python -m companion`, {profile}: all of these and the report", seconds, peak))
    here = passport()
    cpu, software = here["cpu"], here["software"]
    gpus = "".join(f", {gpu['name']}" for gpu in here["gpus"]) or ", no GPU"
    lines = ["| what | time | peak memory |", "|---|---|---|"]
    lines += [f"| {what} | {duration(time)} | {mebibytes(memory) if memory else ''} |" for what, time, memory in rows]
    lines += [
        "",
        f"Measured by `benchmarks/budgets.py --device {device}` on {time.strftime('%Y-%m-%d', time.gmtime())}: "
        f"{cpu['model']}, {cpu['physical_cores']} cores{gpus}, Python {software['python']}, torch {software['torch']}.",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description="Measure what the companion costs here; fill in the table of docs/costs.md."
    )
    parser.add_argument("--profile", action="append", choices=("smoke", "quick", "paper"), help="may be given again")
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda, mps or xpu")
    parser.add_argument("--only", help="notebooks whose names begin so; the page is left alone")
    wanted = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    if not MARKS.search(page):
        parser.error(f"{PAGE} has no marks <!-- budgets --> and <!-- /budgets -->")
    measured = table(wanted.profile or ["smoke", "quick"], wanted.device, wanted.only)
    print(measured, end="")
    if not wanted.only:
        PAGE.write_text(MARKS.sub(lambda _: measured, page), encoding="utf-8")


if __name__ == "__main__":
    main()
