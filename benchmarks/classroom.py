"""A class on one server: how long a notebook takes, and how much memory, if all students run it at the same moment.

    python benchmarks/classroom.py 00 --students 1,10,30 --profile smoke
    python benchmarks/classroom.py 00 --students 30 --prepared runs-of-the-lecturer

Each student has a kernel, a copy of the notebook and a store of their own, as on a server that they share. Memory is
that of all kernels and their workers, what they share counted once (Linux's proportional set size).
"""

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import nbformat
import psutil
import typer
from nbclient import NotebookClient

import gpulab as gl

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SPARE = 1.5e9  # bytes that are left to the machine: below, nothing is measured any more


async def study(notebook: Path, home: Path) -> float:
    """Run a copy of a notebook and return the seconds that it took."""
    home.mkdir()
    shutil.copy(notebook, home)
    begin = time.perf_counter()
    options = {"resources": {"metadata": {"path": str(home)}}, "extra_arguments": ["--log-level=ERROR"]}
    await NotebookClient(nbformat.read(home / notebook.name, as_version=4), timeout=3600, **options).async_execute()
    return time.perf_counter() - begin


def memory() -> int:
    """Bytes of all processes begun from here."""
    found = 0
    for child in psutil.Process().children(recursive=True):
        try:
            found += child.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return found


async def watch(peak: list[int]) -> None:
    """Note the most memory, until cancelled."""
    while True:
        peak[0] = max(peak[0], await asyncio.to_thread(memory))
        if psutil.virtual_memory().available < SPARE:
            raise SystemExit(f"{SPARE / 1e9:.1f} GB are left: this machine is too small for so many students")
        await asyncio.sleep(1)


async def lesson(notebook: Path, students: int) -> tuple[list[float], int]:
    """Everybody presses run: the seconds of each, and the peak of memory."""
    peak = [0]
    with tempfile.TemporaryDirectory() as folder:
        watching = asyncio.create_task(watch(peak))
        each = asyncio.gather(*(study(notebook, Path(folder, str(n))) for n in range(students)))
        done, _ = await asyncio.wait([watching, each], return_when=asyncio.FIRST_COMPLETED)
        if watching in done:
            watching.result()
        watching.cancel()
        return each.result(), peak[0]


def main(
    notebook: str,
    students: Annotated[str, typer.Option(help="how many, such as 1,10,30")] = "1,10,30",
    profile: str = "smoke",
    threads: Annotated[int, typer.Option(help="that a kernel may use; 0: as many as there are cores")] = 1,
    prepared: Annotated[Path | None, typer.Option(help="a store of finished runs, which is only read")] = None,
) -> None:
    os.environ["GPULAB_PROFILE"] = profile
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if prepared:
        os.environ["GPULAB_PREPARED"] = str(prepared.resolve())
    (file,) = NOTEBOOKS.glob(f"{notebook}_*.ipynb")
    ways = [profile, f"{threads or os.cpu_count()} threads each", "prepared runs" if prepared else "nothing prepared"]
    print(f"\n{file.stem}, {', '.join(ways)}: {gl.passport().summary()}, {os.cpu_count()} cores\n")
    print("| students | first done | half | all | memory | of one |\n|---|---|---|---|---|---|")
    for count in map(int, students.split(",")):
        seconds, peak = asyncio.run(lesson(file, count))
        times = " | ".join(f"{s:.0f} s" for s in (min(seconds), statistics.median(seconds), max(seconds)))
        print(f"| {count} | {times} | {peak / 2**30:.1f} GiB | {peak / count / 2**20:.0f} MiB |", flush=True)


if __name__ == "__main__":
    typer.run(main)
