"""Pages without code: each shows a widget in a kernel of its own, served locally by Voilà."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat
from markupsafe import Markup

from companion.run import KERNEL

HOST = "127.0.0.1"  # not reachable from other machines
TEMPLATE = "explore"  # a folder of `voila/templates` in the following Jupyter data directory
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Page:
    """A page: its title, its widget in `companion`, two sentences, and the notebook behind it."""

    title: str
    call: str
    move: str
    see: str
    notebook: str

    def source(self) -> nbformat.NotebookNode:
        """The page as a notebook for Voilà: a text and one code cell."""
        text = (
            f"# {self.title}\n\n{self.move} {self.see}\n\nThe notebook `{self.notebook}`"
            " explains it."
        )
        code = f"import companion\n\ncompanion.{self.call}()"
        cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell(code)]
        kernel = {"name": KERNEL, "display_name": "Python 3", "language": "python"}
        return nbformat.v4.new_notebook(
            cells=cells, metadata={"kernelspec": kernel, "title": self.title}
        )


PAGES = {
    "buffer": Page(
        "The overwritten buffer",
        "buffer_explorer",
        "Type numbers. Each stands for a frame, which is written into one buffer over the previous"
        " frame. Then tick *copy each frame*.",
        "Each loss is right, because it is computed while its frame is in the buffer. Watch which"
        " frame the gradient finds.",
        "05_the_anomaly",
    ),
    "bits": Page(
        "The bits of a number",
        "bit_explorer",
        "Type a number, or click a bit, and choose the format that it is rounded to.",
        "Below the bits you see the rounded number and its error.",
        "02_floating_point",
    ),
    "saddle": Page(
        "A ball on a saddle",
        "saddle_explorer",
        "Choose an optimiser and an arithmetic, press play to let the ball roll, and rotate the"
        " saddle.",
        "The surface is the whole loss of a network with two weights. If every step is rounded"
        " away, the ball stays.",
        "06_saddle_points",
    ),
    "seeds": Page(
        "The verdict, seed by seed",
        "seeds_explorer",
        "Press play: recorded runs are added one seed at a time, in the order that you choose, with"
        " a new verdict each time.",
        "An interval that excludes zero shows a difference. Which differences remain when all seeds"
        " have been added?",
        "04_prednet",
    ),
}


LANDING_PAGE = Markup("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Explore</title>
<style>
body {{ font: 1.1em/1.6 system-ui, sans-serif; max-width: 40em; margin: 2em auto; padding: 0 1em }}
h2 {{ font-size: 1.1em; margin: 1.6em 0 0 }}
p {{ margin: 0.2em 0 }}
</style></head>
<body><h1>Explore</h1>
<p>Pages without code. Each computes on this machine, and opens in six to ten seconds.</p>
{}
</body></html>
""")
ENTRY = Markup(
    '<h2><a href="/voila/render/{}.ipynb">{}</a></h2>\n'
    "<p>{} {}</p>\n<p>Notebook {} explains it.</p>"
)


def landing_page() -> str:
    """The page that lists the others, with what to move and what to see on each."""
    entries = []
    for name, page in PAGES.items():
        sentence = page.move.replace("*", "")
        entries.append(ENTRY.format(name, page.title, sentence, page.see, page.notebook))
    return str(LANDING_PAGE.format(Markup("\n").join(entries)))


def write_pages(folder: Path) -> tuple[Path, Path]:
    """Write the pages, and the templates that Voilà shows them with; returns the two folders."""
    pages, data = folder / "pages", folder / "jupyter"
    shutil.copytree(TEMPLATES / "voila", data / "voila")
    # Voilà shows this template in place of its list of files.
    landing_file = data / "voila" / "templates" / TEMPLATE / "tree-lab.html"
    landing_file.write_text(landing_page(), encoding="utf-8")
    pages.mkdir()
    for name, page in PAGES.items():
        nbformat.write(page.source(), pages / f"{name}.ipynb")
    return pages, data


def serve(port: int) -> int:
    """Build the pages and serve them until a signal comes; the exit status is Voilà's."""
    with tempfile.TemporaryDirectory(prefix="gpulab-") as folder:
        pages, data = write_pages(Path(folder))
        options = [f"--Voila.ip={HOST}", f"--port={port}", "--no-browser", f"--template={TEMPLATE}"]
        data_directories = filter(None, [str(data), os.environ.get("JUPYTER_PATH")])
        environment = os.environ | {"JUPYTER_PATH": os.pathsep.join(data_directories)}
        command = [sys.executable, "-m", "voila", str(pages), *options]
        voila = subprocess.Popen(command, env=environment)
        signal.signal(signal.SIGTERM, lambda *_: voila.terminate())
        try:
            return voila.wait()
        except KeyboardInterrupt:  # Voilà receives it, too, and ends its kernels
            return voila.wait()
