"""The companion: executes the notebooks with papermill and binds the results into one report."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpulab.errors import GpulabError, UsageError
from gpulab.settings import PATIENCE
from gpulab.training.protocol import PROFILES

KERNEL = "python3"
QUIET = ["--log-level=ERROR"]  # a kernel warns of its own local connection each time it starts
CELL_SECONDS = 4 * 3600  # a cell that takes longer hangs


@dataclass
class Result:
    """What came of one notebook."""

    name: str
    title: str
    seconds: float
    peak_memory_bytes: int
    error: str | None
    notebook: Path
    findings: list[str] = field(default_factory=list)
    figures: list[dict[str, str]] = field(default_factory=list)


def find_notebooks(folder: Path, only: str | None) -> list[Path]:
    """The notebooks of a folder in order; `only` names some by how they begin (`04` or `03,04`)."""
    if not folder.is_dir():
        raise GpulabError(f"{folder}: no such folder; run this where the notebooks are")
    files = sorted(file for file in folder.glob("*.ipynb") if re.match(r"\d\d_", file.name))
    if only:
        wanted = [part.strip() for part in only.split(",") if part.strip()]
        for part in wanted:
            if not any(file.name.startswith(part) for file in files):
                raise UsageError(
                    f"only={only!r}: no notebook begins with {part!r}; there are "
                    f"{', '.join(file.stem for file in files)}"
                )
        files = [file for file in files if file.name.startswith(tuple(wanted))]
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
    with tqdm.tqdm(
        total=len(files), unit="notebook", bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} {elapsed} {postfix}"
    ) as bar:
        for file in files:
            bar.set_postfix_str(file.stem)
            results.append(_execute_one(file, output / "notebooks" / file.name, parameters))
            bar.write(
                f"{file.stem}: {'FAILED' if results[-1].error else 'ok'}, {results[-1].seconds:.0f} s, "
                f"peak memory {results[-1].peak_memory_bytes / 2**20:.0f} MiB"
            )
            bar.update()
    return results


def execute_in_place(notebooks: Path, only: str | None = None) -> list[Path]:
    """Execute the notebooks where they are, with the parameters they have, ready to be committed."""
    import nbclient
    import nbformat

    files = find_notebooks(notebooks, only)
    for file in files:
        notebook = nbformat.read(file, as_version=4)
        with _environment(**PATIENCE):
            resources = {"metadata": {"path": str(file.parent)}}
            nbclient.NotebookClient(
                notebook, timeout=CELL_SECONDS, kernel_name=KERNEL, resources=resources, extra_arguments=QUIET
            ).execute()
        tidy(notebook)
        nbformat.write(notebook, file)
    return files


def _execute_one(source: Path, target: Path, parameters: dict[str, Any]) -> Result:
    import nbformat
    import papermill

    notebook = nbformat.read(source, as_version=4)
    accepted = {
        name: value for name, value in parameters.items() if re.search(rf"^{name}\b *=", _parameters(notebook), re.M)
    }
    error = None
    started = time.perf_counter()
    with _peak_memory() as peak, _environment(GPULAB_PROFILE=parameters["profile"], **PATIENCE):
        try:
            papermill.execute_notebook(
                source,
                target,
                parameters=accepted,
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
    executed = nbformat.read(target, as_version=4) if target.is_file() else notebook
    tidy(executed)
    nbformat.write(executed, target)
    return Result(
        name=source.stem,
        title=_title(executed) or source.stem,
        seconds=seconds,
        peak_memory_bytes=peak[0],
        error=error,
        notebook=target,
        findings=_texts(executed, "finding"),
        figures=_figures(executed),
    )


def tidy(notebook: Any) -> None:
    """Take out what execution leaves behind and nobody reads: bars, warnings on stderr, timings."""
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [
                output for output in cell.outputs if output.get("name") != "stderr" and _keeps_without_kernel(output)
            ]
    notebook.cells = [
        cell for cell in notebook.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])
    ]
    notebook.metadata.pop("papermill", None)
    notebook.metadata.pop("widgets", None)


def _keeps_without_kernel(output: Any) -> bool:
    """Leave a widget's still picture, if it brings one, in its place."""
    data = output.get("data", {})
    return data.pop("application/vnd.jupyter.widget-view+json", None) is None or "image/png" in data


def write_report(results: list[Result], output: Path, profile: str) -> Path:
    """One self-contained page: what failed, the findings, the figures, the passport."""
    import jinja2

    from gpulab.passports import passport

    folder = output / "report"
    folder.mkdir(parents=True, exist_ok=True)
    here = passport()
    environment = jinja2.Environment(loader=jinja2.PackageLoader("gpulab.companion", "templates"), autoescape=True)
    page = environment.get_template("report.html").render(
        results=results,
        failed=[result for result in results if result.error],
        profile=profile,
        passport=here,
        seconds=sum(result.seconds for result in results),
        peak=max(result.peak_memory_bytes for result in results),
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        back=os.path.relpath(output / "notebooks", folder),
    )
    report = folder / "index.html"
    report.write_text(page, encoding="utf-8")
    kept = [
        {key: value for key, value in asdict(result).items() if key != "figures"} | {"notebook": result.notebook.name}
        for result in results
    ]
    (folder / "results.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return report.resolve()


def _tagged(notebook: Any, tag: str) -> list[Any]:
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def _parameters(notebook: Any) -> str:
    return "\n".join(cell.source for cell in _tagged(notebook, "parameters"))


def _title(notebook: Any) -> str | None:
    headings = (re.match(r"# (.+)", cell.source) for cell in notebook.cells if cell.cell_type == "markdown")
    return next((heading[1] for heading in headings if heading), None)


def _texts(notebook: Any, tag: str) -> list[str]:
    """What the cells with a tag printed."""
    found = []
    for cell in _tagged(notebook, tag):
        text = "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stdout")
        if text.strip():
            found.append(text.strip())
    return found


def _figures(notebook: Any) -> list[dict[str, str]]:
    """Every picture of a notebook: base64 PNG and its text alternative."""
    figures = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                alt = output.metadata.get("image/png", {}).get("alt") or data.get("text/plain", "")
                figures.append({"png": data["image/png"].replace("\n", ""), "alt": alt})
    return figures


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables for the kernels started inside, and put the old ones back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
