"""Execute the notebooks with papermill: in place for a commit, or with parameters for a report."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING

from companion.notebooks import find_notebooks, read_notebook, tidy, write_notebook
from gpulab import files
from gpulab.errors import GpulabError, UsageError, extra, printable

if TYPE_CHECKING:
    from nbformat import NotebookNode

KERNEL = "python3"
# prefixes of the notebooks that measure time, during which nothing else is executed
TIMED = (
    "01",
    "07",
    "08",
)
LAST = ("10",)  # prefixes of those that read what the others have left in the store
# started first, so that none of them is left running alone at the end
LONGEST = (
    "04",
    "06",
    "08",
    "09",
)
NOTEBOOK_BYTES = 3 << 29  # memory that a notebook may need, including its worker processes


@dataclass
class Result:
    """The result of one notebook: its executed copy, its duration, and its error if any."""

    notebook: Path
    seconds: float
    peak_bytes: int
    error: str | None

    @property
    def name(self) -> str:
        """The notebook's file without its ending, as a terminal can show it."""
        return printable(self.notebook.stem)


@extra("notebooks")
def execute(
    notebooks: Path,
    output: Path,
    profile: str,
    device: str,
    only: str | None = None,
    store: Path | None = None,
    jobs: int | None = None,
) -> list[Result]:
    """Execute notebooks into `output`/notebooks; one that fails does not stop the others.

    Up to `jobs` notebooks are executed at the same time, each on its share of the cores
    (`shares_of_cores`). Those that measure time have the machine to themselves, except with the
    profile `smoke`, which says nothing about speed.
    """
    from gpulab.report import Progress

    sources = find_notebooks(notebooks, only)
    for source in sources:
        read_notebook(source)
        files.check_writable(output / "notebooks" / source.name)
    files.check_writable(output / "report" / "index.html")
    parameters = {
        "profile": profile,
        "device": device,
        "store": str((store or output / "runs").resolve()),
    }
    alone = [
        source
        for source in sources
        if source.name.startswith(LAST if profile == "smoke" else TIMED + LAST)
    ]
    together = [source for source in sources if source not in alone]
    together.sort(key=lambda source: not source.name.startswith(LONGEST))
    shares = shares_of_cores(jobs)
    results = []
    form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {elapsed}"
    with Progress(total=len(sources), unit="notebook", bar_format=form) as bar:
        for group, group_shares in ((together, shares), (alone, [set().union(*shares)])):
            for result in _execute_group(
                group, output / "notebooks", parameters, group_shares, bar.refresh
            ):
                state = "FAILED" if result.error else "ok"
                memory = (
                    f", peak memory {result.peak_bytes / 2**20:.0f} MiB"
                    if result.peak_bytes
                    else ""
                )
                bar.write(
                    f"{result.name}: {state}, {result.seconds:.0f} s{memory}", file=sys.stderr
                )
                bar.update()
                results.append(result)
    return sorted(results, key=lambda result: result.name)


def shares_of_cores(jobs: int | None) -> list[set[int]]:
    """The cores for each notebook that is executed at a time; by default two notebooks if possible.

    Threads of two programs that share cores wait for one another: a training with two threads took
    115 seconds next to others, and 9 on a core of its own. An empty set stands for all cores, on
    systems that cannot assign them.
    """
    import psutil
    from joblib import cpu_count  # a container's quota counts

    free = psutil.virtual_memory().available
    # no control group of Linux, or one without a limit ("max")
    with contextlib.suppress(OSError, ValueError):
        limit, used = (
            int(Path("/sys/fs/cgroup", name).read_text())
            for name in ("memory.max", "memory.current")
        )
        free = min(free, limit - used)
    jobs = jobs or max(1, min(2, cpu_count(), free // NOTEBOOK_BYTES))
    if not hasattr(os, "sched_setaffinity"):
        return [set() for _ in range(jobs)]
    cores = sorted(os.sched_getaffinity(0))
    if jobs > len(cores):
        raise UsageError(f"expected jobs <= {len(cores)}, one notebook per core; got jobs={jobs}")
    return [
        {*cores[job * len(cores) // jobs : (job + 1) * len(cores) // jobs]} for job in range(jobs)
    ]


def _execute_group(
    group: list[Path],
    folder: Path,
    parameters: dict[str, str],
    shares: list[set[int]],
    wake: Callable[[], object],
) -> Iterator[Result]:
    """Execute notebooks, one on each share of cores; `wake` is called every second."""
    # one process per notebook, so that each has a peak memory of its own
    context = multiprocessing.get_context("spawn")
    with (
        context.Manager() as manager,
        ProcessPoolExecutor(len(shares), context, max_tasks_per_child=1) as pool,
    ):
        free_shares = manager.Queue()
        for share in shares:
            free_shares.put(share)
        waiting = {
            pool.submit(_execute_one, file, folder / file.name, parameters, free_shares)
            for file in group
        }
        try:
            while waiting:
                finished, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
                wake()
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C no other notebook begins


def _execute_one(
    source: Path, target: Path, parameters: dict[str, str], free_shares: Queue[set[int]]
) -> Result:
    """Execute a copy of a notebook with parameters, in a process that does nothing else."""
    import papermill

    cores = free_shares.get()
    if cores:
        os.sched_setaffinity(0, cores)  # the kernel inherits it
    os.environ["GPULAB_PROFILE"] = parameters["profile"]
    target.parent.mkdir(parents=True, exist_ok=True)
    accepted = papermill.inspect_notebook(source)
    started, error = time.perf_counter(), None
    try:
        _papermill(
            source, target, {name: value for name, value in parameters.items() if name in accepted}
        )
    except GpulabError as failure:
        error = str(failure)
    free_shares.put(cores)
    return Result(target, time.perf_counter() - started, _peak_bytes(), error)


def _papermill(source: Path, target: Path | None, parameters: dict[str, str]) -> NotebookNode:
    """Execute a notebook in its folder. A `GpulabError` names the cell that failed.

    The kernel communicates through sockets in a folder. A port would be chosen by opening and
    closing it; before the kernel opens it, another server can choose the same one, which happens
    every other time if thirty start at once.
    """
    import papermill
    from traitlets.config import Config

    with tempfile.TemporaryDirectory(prefix="gpulab") as sockets:
        manager = {"transport": "ipc", "connection_file": f"{sockets}/kernel.json"}
        try:
            return papermill.execute_notebook(
                source,
                target,
                parameters,
                kernel_name=KERNEL,
                language="python",
                progress_bar=False,
                cwd=source.parent,
                # a kernel is interrupted when it is shut down, and logs this
                extra_arguments=["--log-level=CRITICAL"],
                config=Config(KernelManager=manager if os.name == "posix" else {}),
            )
        except papermill.PapermillExecutionError as failure:
            raise GpulabError(
                f"cell {failure.exec_count}: {failure.ename}: {failure.evalue}"
            ) from None
        except (RuntimeError, OSError, ValueError, TimeoutError) as failure:
            # For example, the kernel died.
            raise GpulabError(f"{type(failure).__name__}: {failure}") from None


def _peak_bytes() -> int:
    """The peak memory of the largest child process where the system counts it, else 0."""
    with contextlib.suppress(ImportError):  # Windows
        import resource

        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0


@extra("notebooks")
def execute_in_place(notebooks: Path, only: str | None = None) -> Iterator[Path]:
    """Execute the notebooks in place with their own parameters, ready for a commit; yields each."""
    for file in find_notebooks(notebooks, only):
        files.check_writable(file)
        read_notebook(file)
        try:
            notebook = _papermill(file, None, {})
        except GpulabError as error:
            raise GpulabError(f"{file}: {error}") from None
        tidy(notebook)
        write_notebook(notebook, file)
        yield file
