"""The companion: executes the notebooks and binds the results into one report."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from gpulab import files
from gpulab.errors import DataError, GpulabError, UsageError, extra, in_one_line
from gpulab.report import DPI, IN_WORDS, image
from gpulab.training.protocol import PROFILES

if TYPE_CHECKING:
    import psutil

KERNEL = "python3"
QUIET = ["--log-level=ERROR"]  # a kernel warns of its own local connection each time it starts
CELL_SECONDS = 4 * 3600  # a cell that takes longer hangs
HERE, RECORDED, BOTH = "here", "recorded", "both"  # where the numbers of a finding were made
SUMMARY = {  # of a report: what is said of each
    HERE: ("Found here", "On this machine, when this report was made."),
    RECORDED: ("Recorded elsewhere", "On other machines, by runs that come with gpulab."),
    BOTH: ("Here and elsewhere", "Numbers made here, beside recorded ones; the notebooks say which are which."),
}
CITATION = Path(__file__).parents[2] / "CITATION.cff"
GLOSSARY = CITATION.parent / "docs" / "glossary.md"
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
TIMED = ("01", "07", "08")  # how notebooks begin that time things, beside which nothing else is executed
LAST = ("10",)  # and that read what the others have left in the store
LONGEST = ("06", "08", "04")  # these begin first, so that none of them is left running alone at the end
NOTEBOOK_BYTES = 3 << 29  # of memory that a notebook may need, its worker processes included
FOLD = re.compile(r"<details>.*?</summary>(.*?)</details>", re.S)  # as `companion.finding` has its statistics


@dataclass
class NotebookFinding:
    """What a notebook found: sentences, where their numbers were made, and the statistics behind them."""

    origin: str
    said: str
    statistics: list[str] = field(default_factory=list)


@dataclass
class Result:
    """What came of one notebook. Figures are base64 `png` with their `alt`, and the `section` that they stand in."""

    name: str
    title: str
    seconds: float
    peak_memory_bytes: int
    error: str | None
    notebook: Path
    findings: list[NotebookFinding]
    figures: list[dict[str, str]]
    warnings: list[str] = field(default_factory=list)

    def said(self, origin: str) -> list[str]:
        """The sentences whose numbers were made there."""
        return [finding.said for finding in self.findings if finding.origin == origin]


def find_notebooks(folder: Path, only: str | None) -> list[Path]:
    """The notebooks of a folder in order; `only` names some by how they begin (`04` or `03,04`)."""
    if not folder.is_dir():
        raise GpulabError(f"{folder}: no such folder; run this where the notebooks are")
    notebooks = sorted(file for file in folder.glob("*.ipynb") if re.match(r"\d\d_", file.name))
    if not notebooks:
        raise GpulabError(f"{folder}: holds no notebooks")
    prefixes = [name.strip() for name in (only or "").split(",") if name.strip()]
    for prefix in prefixes:
        if not any(file.name.startswith(prefix) for file in notebooks):
            names = ", ".join(file.stem for file in notebooks)
            raise UsageError(f"only={only!r}: no notebook begins with {prefix!r}; there are {names}")
    return [file for file in notebooks if not prefixes or file.name.startswith(tuple(prefixes))]


def shares_of_cores(jobs: int | None) -> list[set[int]]:
    """The cores of each of the notebooks that are executed at the same time; by default of two, if there is room.

    Threads of two programs that share cores wait for one another: a training of two threads took 115 seconds beside
    others, and 9 on a core of its own. An empty set is all cores, where a system cannot share them out.
    """
    if not hasattr(os, "sched_setaffinity"):
        return [set() for _ in range(jobs or 1)]
    from joblib import cpu_count  # a container's quota counts

    cores = sorted(os.sched_getaffinity(0))
    jobs = jobs or max(1, min(2, cpu_count(), free_memory() // NOTEBOOK_BYTES))
    if jobs > len(cores):
        raise UsageError(f"jobs={jobs}: at most one notebook a core, of which there are {len(cores)}")
    return [{*cores[job * len(cores) // jobs : (job + 1) * len(cores) // jobs]} for job in range(jobs)]


def free_memory() -> int:
    """Bytes of memory that are free, on this machine and in this control group (Linux, version 2)."""
    import psutil

    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no such group, or one without a limit ("max")
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free


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

    As many as `jobs` are executed at the same time, each on its share of the cores (`shares_of_cores`).
    Those that time things have the machine for themselves, but for the profile `smoke`, which says nothing of speed.
    """
    from gpulab.progress import Progress

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
    alone_prefixes = () if profile == "smoke" else TIMED + LAST
    shares = shares_of_cores(jobs)
    form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {elapsed} {desc}"
    bar = Progress(total=len(sources), unit="notebook", bar_format=form)
    running: list[str] = []

    async def execute_on(cores: set[int], source: Path) -> Result:
        name = files.printable(source.stem)
        running.append(name)
        bar.set_description_str(", ".join(running))
        result = await _execute_one(source, output / "notebooks" / source.name, parameters, cores)
        running.remove(name)
        state, memory = "FAILED" if result.error else "ok", f"{result.peak_memory_bytes / 2**20:.0f} MiB"
        bar.write(f"{name}: {state}, {result.seconds:.0f} s, peak memory {memory}", file=sys.stderr)
        bar.set_description_str(", ".join(running), refresh=False)
        bar.update()
        return result

    async def let_the_clock_run() -> None:
        while sys.stderr.isatty():
            await asyncio.sleep(1)
            bar.refresh()

    async def execute_all() -> list[Result]:
        clock = asyncio.create_task(let_the_clock_run())
        waiting = [source for source in sources if not source.name.startswith(alone_prefixes)]
        waiting.sort(key=lambda source: (source.name.startswith(LAST), not source.name.startswith(LONGEST)))

        async def execute_next(cores: set[int]) -> list[Result]:
            return [await execute_on(cores, waiting.pop(0)) for _ in iter(lambda: len(waiting), 0)]

        results = [
            result for share_results in await asyncio.gather(*map(execute_next, shares)) for result in share_results
        ]
        all_cores = set[int]().union(*shares)
        results += [await execute_on(all_cores, source) for source in sources if source.name.startswith(alone_prefixes)]
        clock.cancel()
        return sorted(results, key=lambda result: result.name)

    with bar, asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(execute_all())


@extra("notebooks")
def execute_in_place(notebooks: Path, only: str | None = None) -> Iterator[Path]:
    """Execute the notebooks where they are, with the parameters they have, ready to be committed; yields each."""
    sources = find_notebooks(notebooks, only)
    for file in sources:
        files.check_writable(file)
        notebook = _read(file)
        try:
            with asyncio.Runner(loop_factory=_Loop) as runner:
                runner.run(_run(notebook, file.parent))
        except GpulabError as error:
            raise GpulabError(f"{file}: {error}") from None
        _write(notebook, file)
        yield file


@extra("notebooks")
def copy_without_outputs(notebooks: Path, folder: Path) -> list[Path]:
    """Copies of the notebooks with nothing executed, in which guesses come before answers; the new ones.

    A copy that is there already stays as it is: it may hold somebody's work. The solutions are copied with their
    outputs.
    """
    import nbformat

    copies = []
    for source in [*find_notebooks(notebooks, None), *sorted((notebooks / "solutions").glob("*.ipynb"))]:
        copy = folder / source.relative_to(notebooks)
        if copy.exists():
            continue
        notebook = _read(source)
        for cell in notebook.cells:
            if cell.cell_type == "code" and source.parent == notebooks:
                cell.outputs, cell.execution_count = [], None
        if source.parent == notebooks:
            notebook.cells.append(nbformat.v4.new_code_cell("# Your answers to the exercises"))
        _write(notebook, copy)
        copies.append(copy)
    return copies


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
    """One in which nbclient leaves signals to this process."""

    def add_signal_handler(self, *_: Any) -> None:  # type: ignore[override]
        raise RuntimeError("as in a thread")


async def _run(
    notebook: Any, folder: Path, started: Callable[[int], object] = lambda _: None, **environment: str
) -> None:
    """Execute a notebook's cells in a folder. `GpulabError` names the cell that failed, or a kernel's last words.

    `started` hears the kernel's process id.
    """
    import nbclient
    from traitlets.config import Config

    with (
        tempfile.TemporaryFile("w+", errors="replace") as kernel_stderr,
        tempfile.TemporaryDirectory(prefix="gpulab") as socket_folder,
    ):
        client: Any = nbclient.NotebookClient(
            notebook,
            resources={"metadata": {"path": str(folder)}},
            timeout=CELL_SECONDS,
            kernel_name=KERNEL,
            extra_arguments=QUIET,
            config=Config(KernelManager=_without_ports(socket_folder) if os.name == "posix" else {}),
            on_notebook_start=lambda **_: started(client.km.provisioner.pid),
        )
        try:
            await client.async_execute(env={**os.environ, **environment}, stderr=kernel_stderr)
        except nbclient.exceptions.CellExecutionError as failure:
            last = max(cell.get("execution_count") or 0 for cell in notebook.cells)
            raise GpulabError(f"cell {last}: {failure.ename}: {failure.evalue}") from None
        except (RuntimeError, OSError, ValueError, TimeoutError) as failure:
            kernel_stderr.seek(0)
            last_words = " ".join(kernel_stderr.read().split()[-30:])
            raise GpulabError(f"{type(failure).__name__}: {failure}{': ' * bool(last_words)}{last_words}") from None


def _without_ports(folder: str) -> dict[str, str]:
    """How a kernel is spoken to through sockets in a folder.

    A port is chosen by trying one and letting it go; until the kernel takes it, another server may choose the same.
    Of thirty that choose at the same moment two do so every other time.
    """
    return {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}


async def _execute_one(source: Path, target: Path, parameters: dict[str, Any], cores: set[int]) -> Result:
    import papermill

    def begin(kernel: int) -> None:
        memory.watch(kernel)
        if cores:
            os.sched_setaffinity(kernel, cores)  # before it starts threads or loads torch, which counts them

    executed, error = papermill.iorw.load_notebook_node(str(source)), None
    started = time.perf_counter()
    async with _peak_memory() as memory:
        try:
            accepted = papermill.inspect_notebook(source)
            accepted_values = {name: value for name, value in parameters.items() if name in accepted}
            parameterize = papermill.parameterize.parameterize_notebook
            executed = parameterize(executed, accepted_values, kernel_name=KERNEL, language="python")
            await _run(executed, source.parent, begin, GPULAB_PROFILE=parameters["profile"])
        except (GpulabError, ValueError) as failure:  # such as a notebook that says no language
            error = str(failure)
    seconds = time.perf_counter() - started
    result = Result(source.stem, source.stem, seconds, memory.peak, error, target, [], [])
    collect(executed, result)
    _write(executed, target)
    return result


def collect(notebook: Any, result: Result) -> None:
    """Put into a result what an executed notebook says of itself, before it is tidied."""
    section = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            if title := re.match(r"# (.+)", cell.source):
                result.title = title[1]
            *_, section = section, *re.findall(r"^##+ (.+)", cell.source, re.M)
            continue
        outputs = cell.get("outputs", [])
        result.figures += [{**figure_data, "section": section} for figure_data in filter(None, map(figure, outputs))]
        stderr_text = "".join(output.text for output in outputs if output.get("name") == "stderr")
        result.warnings += [w for w in re.findall(r"\b\w*Warning: .+", stderr_text) if w not in result.warnings]
        tags = cell.metadata.get("tags", [])
        if "finding" in tags:
            result.findings += _findings(outputs, next((tag for tag in tags if tag in (HERE, RECORDED)), BOTH))


def figure(output: Any) -> dict[str, str] | None:
    """The figure that a cell put out, as base64 `png` with its words as `alt`; None where it is none."""
    data = output.get("data", {})
    if "image/png" not in data:
        return None
    alt = output.metadata.get("image/png", {}).get("alt") or data.get("text/plain", "")
    return {"png": data["image/png"].replace("\n", ""), "alt": alt}


def _is_fold_of_figure(output: Any) -> bool:
    """Whether this is what `Picture.show` puts below a figure: its words again."""
    return output.get("data", {}).get("text/plain", "").startswith(IN_WORDS)


def _findings(outputs: list[Any], origin: str) -> Iterator[NotebookFinding]:
    """What a cell found, in paragraphs: a line, and those below it that are indented; the last has the statistics."""
    for output in outputs:
        data = output.get("data", {})
        text = output.get("text", "") if output.get("name") == "stdout" else data.get("text/plain", "")
        if figure(output) or _is_fold_of_figure(output) or not text.strip():
            continue
        paragraphs = re.split(r"\n\n+|(?<=[.:;])\n(?=\S)", text.strip())
        findings = [NotebookFinding(origin, re.sub(r"\n(?=\S)", " ", paragraph)) for paragraph in paragraphs]
        for fold in FOLD.findall(data.get("text/html", "")):
            lines = re.sub(r"<[^>]*>", "", fold.replace("</p>", "\n")).splitlines()
            findings[-1].statistics = [html.unescape(line) for line in lines if line]
        yield from findings


def tidy(notebook: Any) -> None:
    """Take out what execution leaves behind and nobody reads: bars, warnings on stderr, timings."""
    for node in (notebook, *notebook.cells):
        for name in ("papermill", "execution", "widgets"):
            node.metadata.pop(name, None)
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
    """One page that needs no other file, a letter that one can mail.

    What gpulab is and its main finding; what was found here and elsewhere, what failed, the figures, the passport.
    """
    from companion import anomaly
    from gpulab.passports import passport

    folder = output / "report"
    published = anomaly.published_runs()
    main_figure = anomaly.published_figure(published)
    page = render(
        "report.html",
        main_finding=anomaly.main_finding(published, anomaly.published_table(published)),
        main_figure=Markup(image(main_figure.png(), main_figure.alt, DPI)),
        words=glossary(),
        repository=repository(),
        results=results,
        summary=SUMMARY,
        failed=[result for result in results if result.error],
        profile=profile,
        passport=passport(),
        seconds=sum(result.seconds for result in results),
        peak=max(result.peak_memory_bytes for result in results),
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    report = folder / "index.html"
    files.write(report, page.encode())
    rows = [asdict(result) | {"notebook": result.notebook.name} for result in results]
    for row in rows:
        del row["figures"]
    files.write(folder / "results.json", (json.dumps(rows, indent=1) + "\n").encode())
    return report.resolve()


def glossary() -> Markup:
    """The table of words that findings use; its links, which lead to files beside it, are left out."""
    from nbconvert.filters import markdown2html

    if not GLOSSARY.is_file():  # the notebooks lie outside of a clone
        return Markup()
    text = GLOSSARY.read_text(encoding="utf-8")
    return Markup(markdown2html(LINK.sub(r"\1", text[text.index("|") :])))


def repository() -> str | None:
    """The address of the public repository; None as long as there is none."""
    citation = CITATION.read_text(encoding="utf-8") if CITATION.is_file() else ""
    match = re.search(r'^repository-code: "(.+)"', citation, re.M)
    return match[1] if match else None


def render(template: str, **values: Any) -> Markup:
    """A page of `companion/templates`, in gpulab's style. Whatever is not `Markup` is escaped."""
    import jinja2

    loader = jinja2.ChoiceLoader([jinja2.PackageLoader("companion"), jinja2.PackageLoader("gpulab")])
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return Markup(templates.get_template(template).render(values))


class _Memory:
    """What a process and those below it hold; on Linux, memory that they share counts once."""

    def __init__(self) -> None:
        self.peak = 0
        self.process: psutil.Process | None = None

    def watch(self, process_id: int) -> None:
        """Look at this one from now on."""
        import psutil

        with contextlib.suppress(psutil.Error):
            self.process = psutil.Process(process_id)

    async def look(self) -> None:
        """Look again and again, and keep the largest sum."""
        import psutil

        while True:
            total = 0
            with contextlib.suppress(psutil.Error):
                for process in [self.process, *self.process.children(recursive=True)] if self.process else []:
                    memory = process.memory_full_info()
                    total += getattr(memory, "pss", memory.rss)
            self.peak = max(self.peak, total)
            await asyncio.sleep(0.25)


@contextlib.asynccontextmanager
async def _peak_memory() -> AsyncIterator[_Memory]:
    memory = _Memory()
    watcher = asyncio.create_task(memory.look())
    try:
        yield memory
    finally:
        watcher.cancel()
