"""How the quick trainings fare on a machine that others use, and inside a quota of one CPU.

python benchmarks/busy_machine.py --write benchmarks/busy_machine.md

Beside k busy loops a core the fair share of a training is 1/(k + 1) of its best speed alone; inside a quota of one CPU
it is the speed of one thread. The quota takes root and a cgroup, bound where a container would see its own; without
them its column stays empty. Trainings take turns, each in a process of its own.
"""

import argparse
import contextlib
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import joblib
import pandas as pd
from entrants import markdown

from gpulab.passports import passport

FRAMES = {"autoencoder": 1_000, "prednet": 100, "whitener": 10_000}  # a second or two each
BUSY = (0, 1, 2, 4)  # loops a core
QUOTA = "quota of one CPU"
ONE = """
import sys, warnings
warnings.filterwarnings("ignore")
import gpulab as gl
net, setting, frames = sys.argv[1], sys.argv[2], int(sys.argv[3])
gl.train(net, setting=setting, frames=frames // 4, progress=False)
print(gl.train(net, setting=setting, frames=frames, progress=False).record["summary"]["frames_per_second"])
"""
CGROUPS = {"/sys/fs/cgroup/cpu": "cpu.cfs_quota_us", "/sys/fs/cgroup": "cpu.max"}  # of version 1, of version 2


def speed(net: str, setting: str, within: list[str]) -> float:
    """Frames per second of a training in a new process."""
    command = [*within, sys.executable, "-c", ONE, net, setting, str(FRAMES[net])]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.split()[-1])


@contextlib.contextmanager
def busy(loops: int):
    """So many processes that do nothing, as fast as they can."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield []
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@contextlib.contextmanager
def quota():
    """The beginning of a command that then has one CPU of this machine; None where that cannot be had."""
    root = next((Path(root) for root, name in CGROUPS.items() if Path(root, "tasks").exists() or name == "cpu.max"))
    group = root / "gpulab-busy"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        (group / CGROUPS[str(root)]).write_text("100000" if root.name == "cpu" else "100000 100000")
        bind = f"mount --bind {group} {root} && echo $$ > {root}/cgroup.procs && exec " + shlex.quote("$0")
        yield ["unshare", "--mount", "sh", "-c", bind.replace("'$0'", '"$0" "$@"')]
    finally:
        group.rmdir()


def measure(repeats: int) -> pd.DataFrame:
    """Frames per second, a row a training."""
    rows, cores = [], joblib.cpu_count(only_physical_cores=True)
    settings = ["cpu", *(f"cpu:threads={count}" for count in (1, 2, 4, 8) if count <= cores)]
    places = [(f"{loops} loops a core" if loops else "alone", busy(loops * cores)) for loops in BUSY]
    for name, place in [*places, (QUOTA, quota())]:
        with place as within:
            for _ in range(repeats if within is not None else 0):
                for net in FRAMES:
                    rows += [{"net": net, "setting": s, "where": name, "fps": speed(net, s, within)} for s in settings]
                    print(pd.DataFrame(rows[-len(settings) :]).to_string(header=False, index=False), flush=True)
    return pd.DataFrame(rows)


def table(measured: pd.DataFrame) -> pd.DataFrame:
    """Median frames per second, and in brackets how many times slower than the fair share."""
    found = measured.groupby(["net", "setting", "where"], sort=False).fps.median().unstack("where")
    best = found["alone"].groupby("net").transform("max")
    fair = {name: best / (1 + loops) for name, loops in zip(found.columns, BUSY, strict=False)}
    fair[QUOTA] = found["alone"].xs("cpu:threads=1", level="setting").reindex(found.index, level="net")
    return pd.DataFrame(
        {name: [f"{a:.0f} ({b / a:.2f})" for a, b in zip(found[name], fair[name], strict=True)] for name in found},
        index=found.index,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    measured = measure(asked.repeats)
    here = passport()
    spread = measured.groupby(["net", "setting", "where"]).fps.agg(lambda f: (f.max() - f.min()) / f.median())
    text = (
        "# A busy machine\n\nFrames per second of the quick trainings, the median of "
        f"{asked.repeats}; in brackets how many times slower than the fair share (`{Path(__file__).name}` says what "
        f"that is).\n\n{markdown(table(measured))}\n\nLargest minus smallest over the median: "
        f"{statistics.median(spread):.0%} (median), {max(spread):.0%} at most. {here.summary()}\n"
    )
    print(text)
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()
