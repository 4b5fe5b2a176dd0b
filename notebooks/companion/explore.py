"""Pages without code: each shows a widget in a kernel of its own, served locally by Voilà."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat

from companion.run import KERNEL

HOST = "127.0.0.1"  # which no other machine reaches
TEMPLATE = "explore"  # in the folder `voila/templates` of the following data directory of Jupyter
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
        """The page as Voilà wants it: a notebook of a text and one cell."""
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
        "The buffer that is written over",
        "buffer_explorer",
        "Type numbers: each is a frame, written into one buffer over the one before. Then tick"
        " *copy each frame*.",
        "Each loss is right, because it is computed while its frame is there. Watch which frame the"
        " gradient finds.",
        "05_the_anomaly",
    ),
    "bits": Page(
        "The bits of a number",
        "bit_explorer",
        "Type a number, or click a bit, and choose the format that it is rounded to.",
        "Below the bits stands what is left of the number, and by how much that is off.",
        "02_floating_point",
    ),
    "saddle": Page(
        "A ball on a saddle",
        "saddle_explorer",
        "Choose an optimiser and an arithmetic, press play to let the ball roll, and turn the"
        " saddle.",
        "The surface is the whole loss of a network of two weights; where every step is rounded"
        " away, the ball stays.",
        "06_saddle_points",
    ),
    "seeds": Page(
        "The verdict, seed by seed",
        "seeds_explorer",
        "Press play: recorded runs come in one seed at a time, in the order you choose, with a"
        " verdict each time.",
        "An interval without zero shows a difference; see which differences are still there when"
        " all seeds are in.",
        "04_prednet",
    ),
}


def serve(port: int) -> int:
    """Build the pages and serve them until a signal comes; the exit status is Voilà's."""
    with tempfile.TemporaryDirectory(prefix="gpulab-") as folder:
        for name, page in PAGES.items():
            nbformat.write(page.source(), Path(folder) / f"{name}.ipynb")
        options = [f"--Voila.ip={HOST}", f"--port={port}", "--no-browser", f"--template={TEMPLATE}"]
        data_directories = filter(None, [str(TEMPLATES), os.environ.get("JUPYTER_PATH")])
        environment = os.environ | {"JUPYTER_PATH": os.pathsep.join(data_directories)}
        voila = subprocess.Popen([sys.executable, "-m", "voila", folder, *options], env=environment)
        signal.signal(signal.SIGTERM, lambda *_: voila.terminate())
        try:
            return voila.wait()
        except KeyboardInterrupt:  # Voilà has it, too, and ends its kernels
            return voila.wait()
