"""The companion: executes the notebooks and binds the results into one report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpulab import files, signals
from gpulab.errors import DataError, GpulabError, UsageError, in_one_line
from gpulab.training.protocol import PROFILES

KERNEL = "python3"
QUIET = ["--log-level=ERROR"]  # a kernel warns of its own local connection each time it starts
CELL_SECONDS = 4 * 3600  # a cell that takes longer hangs


@dataclass
class Result:
    """What came of one notebook: its first heading, findings as text, figures as base64 PNG with alternative text."""

    name: str
    title: str
    seconds: float
    peak_memory_bytes: int
    error: str | None
    notebook: Path
    findings: list[str]
    figures: list[dict[str, str]]


def find_notebooks(folder: Path, only: str | None) -> list[Path]:
    """The notebooks of a folder in order; `only` names some by how they begin (`04` or `03,04`)."""
    if not folder.is_dir():
        raise GpulabError(f"{folder}: no such folder; run this where the notebooks are")
    found = sorted(file for file in folder.glob("*.ipynb") if re.match(r"\d\d_", file.name))
    if only:
        prefixes = tuple(part.strip() for part in only.split(",") if part.strip())
        for prefix in prefixes:
            if not any(file.name.startswith(prefix) for file in found):
                there = ", ".join(file.stem for file in found)
                raise UsageError(f"only={only!r}: no notebook begins with {prefix!r}; there are {there}")
        found = [file for file in found if file.name.startswith(prefixes)]
    if not found:
        raise GpulabError(f"{folder}: holds no notebooks")
    return found


def execute(
    notebooks: Path, output: Path, profile: str, device: str, only: str | None = None, store: Path | None = None
) -> list[Result]:
    """Execute notebooks one after the other; one that fails does not stop the others.

    The executed copies go to `output`/notebooks, the runs they make to `store` (`output`/runs).
    """
    import tqdm

    if profile not in PROFILES:
        raise UsageError(f"profile {profile!r}: expected one of {', '.join(PROFILES)}")
    if device not in ("auto", "cpu", "cuda", "mps", "xpu"):
        raise UsageError(f"device {device!r}: expected auto, cpu, cuda, mps or xpu")
    sources = find_notebooks(notebooks, only)
    for source in sources:
        _read(source)
        files.check_writable(output / "notebooks" / source.name)
    files.check_writable(output / "report" / "index.html")
    parameters = {"profile": profile, "device": device, "store": str((store or output / "runs").resolve())}
    results = []
    form = "{l_bar}{bar}| {n_fmt}/{total_fmt} {elapsed} {postfix}"
    for file in (bar := tqdm.tqdm(sources, unit="notebook", bar_format=form)):
        bar.set_postfix_str(name := files.printable(file.stem))
        results.append(result := _execute_one(file, output / "notebooks" / file.name, parameters))
        state, memory = "FAILED" if result.error else "ok", f"{result.peak_memory_bytes / 2**20:.0f} MiB"
        bar.write(f"{name}: {state}, {result.seconds:.0f} s, peak memory {memory}")
    return results


def execute_in_place(notebooks: Path, only: str | None = None) -> list[Path]:
    """Execute the notebooks where they are, with the parameters they have, ready to be committed."""
    sources = find_notebooks(notebooks, only)
    for file in sources:
        files.check_writable(file)
        notebook = _read(file)
        try:
            _run(notebook, file.parent)
        except GpulabError as error:
            raise GpulabError(f"{file}: {error}") from None
        _write(notebook, file)
    return sources


def _read(file: Path) -> Any:
    import nbformat

    try:
        return nbformat.reads(files.read(file).decode(), as_version=4)
    except (ValueError, KeyError, TypeError, AttributeError, nbformat.ValidationError) as error:
        raise DataError(f"{file}: not a notebook: {in_one_line(error)}") from None


def _write(notebook: Any, file: Path) -> None:
    import nbformat

    tidy(notebook)
    files.write(file, (nbformat.writes(notebook).rstrip("\n") + "\n").encode())


class _Loop(asyncio.SelectorEventLoop):
    """One in which nbclient leaves signals to this process, and which is quiet when it is ended by one."""

    def call_exception_handler(self, context: Any) -> None:
        if not signals.heard:
            super().call_exception_handler(context)

    def add_signal_handler(self, *_: Any) -> None:  # type: ignore[override]
        raise RuntimeError("as in a thread")


def _run(notebook: Any, folder: Path, **environment: str) -> None:
    """Execute a notebook's cells in a folder; what came until an error is in the notebook.

    Raises:
        GpulabError: With the cell that failed, or with the last words of a kernel that died.
    """
    import nbclient

    client = nbclient.NotebookClient(
        notebook,
        resources={"metadata": {"path": str(folder)}},
        timeout=CELL_SECONDS,
        kernel_name=KERNEL,
        extra_arguments=QUIET,
    )
    with tempfile.TemporaryFile("w+", errors="replace") as words, asyncio.Runner(loop_factory=_Loop) as runner:
        try:
            runner.run(client.async_execute(env={**os.environ, **environment}, stderr=words))
        except nbclient.exceptions.CellExecutionError as failure:
            last = max(cell.get("execution_count") or 0 for cell in notebook.cells)
            raise GpulabError(f"cell {last}: {failure.ename}: {failure.evalue}") from None
        except (RuntimeError, OSError, ValueError, TimeoutError) as failure:
            words.seek(0)
            said = " ".join(words.read().split()[-30:])
            raise GpulabError(f"{type(failure).__name__}: {failure}{': ' * bool(said)}{said}") from None


def _execute_one(source: Path, target: Path, parameters: dict[str, Any]) -> Result:
    import papermill

    executed, error = papermill.iorw.load_notebook_node(str(source)), None
    started = time.perf_counter()
    with _peak_memory() as peak:
        try:
            accepted = papermill.inspect_notebook(source)
            given = {name: value for name, value in parameters.items() if name in accepted}
            parameterize = papermill.parameterize.parameterize_notebook
            executed = parameterize(executed, given, kernel_name=KERNEL, language="python")
            _run(executed, source.parent, GPULAB_PROFILE=parameters["profile"])
        except (GpulabError, ValueError) as failure:  # such as a notebook that says no language
            error = str(failure)
    seconds = time.perf_counter() - started
    _write(executed, target)
    headings = (re.match(r"# (.+)", cell.source) for cell in executed.cells if cell.cell_type == "markdown")
    findings, figures = [], []
    for cell in executed.cells:
        outputs = cell.get("outputs", [])
        printed = "".join(output.text for output in outputs if output.get("name") == "stdout").strip()
        if "finding" in cell.metadata.get("tags", []) and printed:
            findings.append(printed)
        for output in outputs:
            data = output.get("data", {})
            if "image/png" in data:
                alt = output.metadata.get("image/png", {}).get("alt") or data.get("text/plain", "")
                figures.append({"png": data["image/png"].replace("\n", ""), "alt": alt})
    title = next((heading[1] for heading in headings if heading), source.stem)
    return Result(source.stem, title, seconds, peak[0], error, target, findings, figures)


def tidy(notebook: Any) -> None:
    """Take out what execution leaves behind and nobody reads: bars, warnings on stderr, timings."""
    for part in (notebook, *notebook.cells):
        for name in ("papermill", "execution", "widgets"):
            part.metadata.pop(name, None)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        outputs, cell.outputs = cell.outputs, []
        for output in outputs:
            data = output.get("data", {})
            widget = data.pop("application/vnd.jupyter.widget-view+json", None)
            if output.get("name") != "stderr" and (widget is None or "image/png" in data):  # its still picture
                cell.outputs.append(output)


def write_report(results: list[Result], output: Path, profile: str) -> Path:
    """One self-contained page: what failed, the findings, the figures, the passport."""
    from gpulab.passports import passport
    from gpulab.report import render

    folder = output / "report"
    page = render(
        "companion.html",
        results=results,
        failed=[result for result in results if result.error],
        profile=profile,
        passport=passport(),
        seconds=sum(result.seconds for result in results),
        peak=max(result.peak_memory_bytes for result in results),
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        back=os.path.relpath(output / "notebooks", folder),
    )
    report = folder / "index.html"
    files.write(report, page.encode())
    rows = [vars(result) | {"notebook": result.notebook.name} for result in results]
    rows = [{name: value for name, value in row.items() if name != "figures"} for row in rows]
    files.write(folder / "results.json", (json.dumps(rows, indent=1) + "\n").encode())
    return report.resolve()


@contextlib.contextmanager
def _peak_memory() -> Iterator[list[int]]:
    """The largest memory that all processes below this one held at one time.

    Where the system tells (Linux), what processes share is counted once, by proportional set size.
    """
    import psutil

    peak, stop = [0], threading.Event()
    this = psutil.Process()
    already = {process.pid for process in this.children(recursive=True)}

    def watch() -> None:
        while not stop.wait(0.25):
            total = 0
            for process in this.children(recursive=True):
                if process.pid not in already:
                    with contextlib.suppress(psutil.Error):
                        memory = process.memory_full_info()
                        total += getattr(memory, "pss", memory.rss)
            peak[0] = max(peak[0], total)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        stop.set()
        watcher.join()
