"""The companion: executes the notebooks with papermill and binds the results into one report."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from gpulab.errors import GpulabError, UsageError
from gpulab.settings import PATIENCE
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
    files = sorted(file for file in folder.glob("*.ipynb") if re.match(r"\d\d_", file.name))
    if only:
        prefixes = tuple(part.strip() for part in only.split(",") if part.strip())
        for prefix in prefixes:
            if not any(file.name.startswith(prefix) for file in files):
                there = ", ".join(file.stem for file in files)
                raise UsageError(f"only={only!r}: no notebook begins with {prefix!r}; there are {there}")
        files = [file for file in files if file.name.startswith(prefixes)]
    if not files:
        raise GpulabError(f"{folder}: holds no notebooks")
    return files


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
    files = find_notebooks(notebooks, only)
    (output / "notebooks").mkdir(parents=True, exist_ok=True)
    parameters = {"profile": profile, "device": device, "store": str((store or output / "runs").resolve())}
    results = []
    form = "{l_bar}{bar}| {n_fmt}/{total_fmt} {elapsed} {postfix}"
    for file in (bar := tqdm.tqdm(files, unit="notebook", bar_format=form)):
        bar.set_postfix_str(file.stem)
        results.append(result := _execute_one(file, output / "notebooks" / file.name, parameters))
        state, memory = "FAILED" if result.error else "ok", f"{result.peak_memory_bytes / 2**20:.0f} MiB"
        bar.write(f"{file.stem}: {state}, {result.seconds:.0f} s, peak memory {memory}")
    return results


def execute_in_place(notebooks: Path, only: str | None = None) -> list[Path]:
    """Execute the notebooks where they are, with the parameters they have, ready to be committed."""
    import nbclient
    import nbformat

    files = find_notebooks(notebooks, only)
    how: dict[str, Any] = {"timeout": CELL_SECONDS, "kernel_name": KERNEL, "extra_arguments": QUIET}
    for file in files:
        notebook = nbformat.read(file, as_version=4)
        client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(file.parent)}}, **how)
        client.execute(env={**os.environ, **PATIENCE})
        tidy(notebook)
        nbformat.write(notebook, file)
    return files


def _execute_one(source: Path, target: Path, parameters: dict[str, Any]) -> Result:
    import nbformat
    import papermill

    error = None
    started = time.perf_counter()
    # papermill hands no environment on: the kernel inherits this process's
    with _peak_memory() as peak, mock.patch.dict(os.environ, GPULAB_PROFILE=parameters["profile"], **PATIENCE):
        try:
            accepted = papermill.inspect_notebook(source)
            papermill.execute_notebook(
                source,
                target,
                parameters={name: value for name, value in parameters.items() if name in accepted},
                kernel_name=KERNEL,
                cwd=source.parent,
                progress_bar={"leave": False, "desc": source.stem},
                log_output=False,
                execution_timeout=CELL_SECONDS,
                extra_arguments=QUIET,
            )
        except papermill.PapermillExecutionError as failure:
            error = f"cell {failure.exec_count}: {failure.ename}: {failure.evalue}"
        except (RuntimeError, OSError, ValueError, TimeoutError) as failure:  # a kernel that died, say
            error = f"{type(failure).__name__}: {failure}"
    seconds = time.perf_counter() - started
    executed = nbformat.read(target if target.is_file() else source, as_version=4)
    tidy(executed)
    nbformat.write(executed, target)
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
    error = "papermill-error-cell-tag"
    notebook.cells = [cell for cell in notebook.cells if error not in cell.metadata.get("tags", [])]
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
    import jinja2

    from gpulab.passports import passport

    folder = output / "report"
    folder.mkdir(parents=True, exist_ok=True)
    environment = jinja2.Environment(loader=jinja2.PackageLoader("gpulab.companion", "templates"), autoescape=True)
    page = environment.get_template("report.html").render(
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
    report.write_text(page, encoding="utf-8")
    rows = [vars(result) | {"notebook": result.notebook.name} for result in results]
    rows = [{name: value for name, value in row.items() if name != "figures"} for row in rows]
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
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
