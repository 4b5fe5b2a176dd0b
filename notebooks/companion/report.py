"""One self-contained page that binds the findings of the notebooks, written by nbconvert."""

from __future__ import annotations

import base64
import json
import re
import time
from dataclasses import asdict
from importlib.resources import files as resource_files
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from markupsafe import Markup, escape

from companion.notebooks import read_notebook
from companion.run import Result
from gpulab import files
from gpulab.passports import passport

if TYPE_CHECKING:
    from nbformat import NotebookNode

HERE, RECORDED, BOTH = "here", "recorded", "both"  # where the numbers of a finding were made
SECTIONS = {
    HERE: "Found here\n\nOn this machine, when this report was made.",
    RECORDED: "Recorded elsewhere\n\nOn other machines, in runs that come with gpulab.",
    BOTH: (
        "Here and elsewhere\n\nNumbers computed here, with recorded ones; the notebooks say"
        " which are which."
    ),
}
CLONE = Path(__file__).parents[2]
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
SECTION = re.compile(r"^#{2,3} (.*)$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
INTRODUCTION = """# Does the device change what a network learns?

gpulab answers this question with evidence, in notebooks and with a small library. A
[paper of 2021](https://arxiv.org/abs/2109.01451), since retracted, reported that a network learns
better on a GPU than on a CPU. One line of its published loop writes each frame over the previous
one. A CPU goes on using that memory, so its gradients are wrong; a GPU is given a copy. The figure
shows the effect of this line of code: each line in it is one seed, recorded elsewhere.

<img alt="Every seed with copied and with overwritten frames"
 src="data:image/svg+xml;base64,{figure}">

{outcome} Below are the findings of the notebooks on this machine and on others, followed by their
figures, the words that they use, and the passport of this machine.

gpulab {version}, {profile} profile, {when}, {machine}

## Contents

{contents}
"""


def write_report(results: list[Result], output: Path, profile: str) -> Path:
    """Write `output`/report/index.html, and the measurements to `results.json` in its folder.

    The page says what gpulab is, what was found here and elsewhere, and what failed; figures and
    passport follow.
    """
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        template_name="report",
        extra_template_basedirs=[str(Path(__file__).parent / "templates")],
        exclude_input=True,
        exclude_output_prompt=True,
    )
    style = (resource_files("gpulab") / "templates" / "style.css").read_text(encoding="utf-8")
    page, _ = exporter.from_notebook_node(
        bind(results, profile), {"style": style, "profile": profile}
    )
    report = output / "report" / "index.html"
    files.write(report, page.encode())
    rows = [
        asdict(result) | {"name": result.name, "notebook": result.notebook.name}
        for result in results
    ]
    files.write(report.with_name("results.json"), (json.dumps(rows, indent=1) + "\n").encode())
    return report.resolve()


def bind(results: list[Result], profile: str) -> NotebookNode:
    """A notebook of the executed notebooks' findings, by origin, followed by their figures."""
    from nbformat.v4 import new_markdown_cell, new_notebook

    failed = [result.name for result in results if result.error]
    seconds = sum(result.seconds for result in results)
    here = passport()
    figure = CLONE / "docs" / "_static" / "answer.svg"
    cells = _finding_cells(results) + _figure_cells(results)
    rows = "\n".join(f"| {name} | {value} |" for name, value in here.rows())
    cells.append(new_markdown_cell(f"{glossary()}\n\n## Passport\n\n| | |\n|---|---|\n{rows}"))
    headings = HEADING.findall("\n".join(cell.source for cell in cells if "##" in cell.source))
    introduction = INTRODUCTION.format(
        contents="\n".join(f"- [{heading}](#{anchor(heading)})" for heading in headings),
        figure=base64.b64encode(figure.read_bytes() if figure.is_file() else b"").decode(),
        outcome=f"**{len(failed)} of {len(results)} notebooks failed: {', '.join(failed)}.**"
        if failed
        else f"All {len(results)} notebooks ran, in {seconds:.0f} s.",
        version=here["software"]["gpulab"],
        profile=profile,
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        machine=here.summary(),
    )
    return new_notebook(cells=[new_markdown_cell(introduction), *cells])


def _finding_cells(results: list[Result]) -> list[NotebookNode]:
    """The findings of the notebooks, by where their numbers were made."""
    from nbformat.v4 import new_code_cell, new_markdown_cell

    notebooks = [(result, read_notebook(result.notebook)) for result in results]
    cells = []
    for origin, heading in SECTIONS.items():
        found = [
            (title(notebook), result.notebook.name, cell)
            for result, notebook in notebooks
            for cell in notebook.cells
            if cell.get("outputs") and origin_of_finding(cell) == origin
        ]
        cells += [new_markdown_cell(f"## {heading}")] if found else []
        for name, file, cell in found:
            words = [
                output
                for output in cell.outputs
                if not figure_of(output) and output.get("name") != "stderr"
            ]
            heading = f"### {name}\n\n{notebook_link(file)}"
            cells += [new_markdown_cell(heading), new_code_cell(outputs=words)]
    return cells


def _figure_cells(results: list[Result]) -> list[NotebookNode]:
    """The figures of each notebook, each below its section and above a sentence on it."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

    cells = []
    for result in results:
        notebook = read_notebook(result.notebook)
        name = f"Figures of {result.notebook.stem[:2]}: {title(notebook)}"
        cells.append(new_markdown_cell(f"## {name}\n\n{notebook_link(result.notebook.name)}"))
        if result.error:
            cells.append(new_code_cell(outputs=[new_output("stream", text=result.error)]))
        section = ""
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                section = (SECTION.findall(cell.source) or [section])[-1]
            for output in cell.get("outputs", []):
                if drawn := figure_of(output):
                    sentence = escape(drawn["alt"])
                    if section:
                        sentence = Markup("<b>{}.</b> ").format(section.rstrip("?.")) + sentence
                    cells += [new_code_cell(outputs=[output]), new_markdown_cell(str(sentence))]
    return cells


def notebook_link(file: str) -> str:
    """A link from the report to an executed notebook beside it."""
    return f"*Notebook [{file}](../notebooks/{file})*"


def anchor(heading: str) -> str:
    """The end of a link to a heading, as nbconvert names it."""
    return quote(heading.replace(" ", "-"), safe="?$:;,/@=&")


def title(notebook: NotebookNode) -> str:
    """The heading of a notebook; papermill writes above it which cell has failed."""
    headings = (re.match(r"# (.*)", cell.source) for cell in notebook.cells)
    return next(heading[1] for heading in headings if heading)


def origin_of_finding(cell: NotebookNode) -> str | None:
    """Where the numbers of a cell's finding were made; None if the cell has no finding."""
    tags = cell.metadata.get("tags", [])
    return (
        next((tag for tag in tags if tag in (HERE, RECORDED)), BOTH) if "finding" in tags else None
    )


def figure_of(output: NotebookNode) -> dict[str, str] | None:
    """The figure in a cell's output as base64 `png` with its `alt` text; None if there is none."""
    data = output.get("data", {})
    if "image/png" not in data:
        return None
    alt = output.metadata.get("image/png", {}).get("alt") or data.get("text/plain", "")
    return {"png": data["image/png"].replace("\n", ""), "alt": alt}


def glossary() -> str:
    """The glossary of the findings, without the links of its page to neighbouring files."""
    page = CLONE / "docs" / "glossary.md"
    if not page.is_file():  # the notebooks are outside a clone
        return ""
    text = page.read_text(encoding="utf-8")
    return "## Words\n\n" + LINK.sub(r"\1", text.partition("\n\n")[2])
