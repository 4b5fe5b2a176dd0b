"""How long a large store takes to be listed and filtered, in a fresh process each time, Python's own start included.

python benchmarks/many_runs.py --write benchmarks/many_runs.md
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gpulab as gl
from gpulab.store import identities, records, run_files
from gpulab.store import listing as stores

SETTINGS = [f"cpu:threads={number}" for number in range(1, 13)]
LIST = """
import sys, time
begin = time.perf_counter()
import gpulab as gl
frame = gl.runs(sys.argv[1])
listed = time.perf_counter()
some = frame[(frame.setting == "cpu:threads=7") & (frame.final_loss < 0.01)]
print(len(frame), listed - begin, time.perf_counter() - listed, len(some))
"""


def generate(store, count):
    """Folders as a real run of this machine has them, with other settings, seeds and losses."""
    run = gl.train("prednet", profile="smoke", setting="cpu:threads=1", progress=False)
    for number in range(count):
        own = {"setting": SETTINGS[number % 12], "seed": number // 12}
        record = {**run.record, **own, "summary": {**run.record["summary"], "final_loss": (number * 7919 % 1000) / 1e3}}
        record["id"] = identities.run_id({name: record[name] for name in ("experiment", "profile", "setting", "seed")})
        folder = store / record["id"]
        folder.mkdir()
        records.write_json(folder / run_files.RECORD, record)
        records.write_table(folder / run_files.HISTORY, run.history, {"run": record["id"]}, use_dictionary=False)


def listed(store):
    command = [sys.executable, "-c", LIST, str(store)]
    return json.loads(f"[{subprocess.check_output(command, text=True).strip().replace(' ', ',')}]")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        store, packed = (Path(scratch) / name for name in ("store", "packed.parquet"))
        store.mkdir()
        generate(store, given.runs)
        begin = time.perf_counter()
        stores.pack(store, packed)
        packing = time.perf_counter() - begin
        lines = [
            f"# A store of {given.runs:,} runs",
            "",
            "| store | listed, s | filtered, s | runs found |",
            "|---|---|---|---|",
        ]
        for path, what in ((store, "a folder a run"), (packed, "one packed file")):
            for _ in range(2):
                count, seconds, filtering, found = listed(path)
                assert count == given.runs
                lines.append(f"| {what} | {seconds:.2f} | {filtering:.3f} | {found} |")
        here = gl.passport()
        lines += [
            "",
            f"To pack them took {packing:.0f} s. The files were in the operating system's cache, and other "
            f"programs ran. {here.summary()}, {here['cpu']['physical_cores']} cores, "
            f"Python {here['software']['python']}.",
        ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.write:
        given.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
