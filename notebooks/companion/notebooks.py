"""Notebooks as files: finding, reading, writing, copying for a class, and tidying for commits."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from gpulab import files
from gpulab.errors import DataError, GpulabError, UsageError, describe_error, extra

if TYPE_CHECKING:
    from nbformat import NotebookNode


ANSWER = re.compile(r"^\*\*In short:\*\* .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
PROGRAM_LINK = re.compile(r"\]\((?=programs[/)])")
FOLD = r"<details><summary>The answer. Guess first.</summary>\n\n\g<0>\n\n</details>"


def find_notebooks(folder: Path, only: str | None) -> list[Path]:
    """The notebooks of a folder in order; `only` selects some by prefix (`04` or `03,04`)."""
    if not folder.is_dir():
        raise GpulabError(f"{folder}: no such folder; pass the folder that contains the notebooks")
    notebooks = sorted(file for file in folder.glob("*.ipynb") if re.match(r"\d\d_", file.name))
    if not notebooks:
        raise GpulabError(f"{folder}: contains no notebooks")
    prefixes = [name.strip() for name in (only or "").split(",") if name.strip()]
    for prefix in prefixes:
        if not any(file.name.startswith(prefix) for file in notebooks):
            names = ", ".join(file.stem for file in notebooks)
            raise UsageError(
                f"only={only!r}: no notebook begins with {prefix!r}; there are {names}"
            )
    return [file for file in notebooks if not prefixes or file.name.startswith(tuple(prefixes))]


def read_notebook(file: Path) -> NotebookNode:
    """Read a notebook from a file; `DataError` if it is not a notebook."""
    import nbformat

    try:
        return nbformat.reads(files.read(file).decode(), as_version=4)
    except (ValueError, KeyError, TypeError, AttributeError, nbformat.ValidationError) as error:
        raise DataError(f"{file}: not a notebook: {describe_error(error)}") from None


def write_notebook(notebook: NotebookNode, file: Path) -> None:
    """Write a notebook to a file, whole or not at all."""
    import nbformat

    files.write(file, (nbformat.writes(notebook).rstrip("\n") + "\n").encode())


def tidy(notebook: NotebookNode) -> None:
    """Remove what execution leaves behind and nobody reads: bars, warnings on stderr, timings."""
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
            # a still picture or a table
            has_still = "image/png" in data or "text/html" in data
            if output.get("name") != "stderr" and (widget is None or has_still):
                cell.outputs.append(output)


def fold_answer(text: str) -> str:
    r"""Fold the paragraph that answers a notebook's question, for readers who guess first.

    >>> print(fold_answer("# Why?\n\n**In short:** because.\n\nNow you can say why."))
    # Why?
    <BLANKLINE>
    <details><summary>The answer. Guess first.</summary>
    <BLANKLINE>
    **In short:** because.
    <BLANKLINE>
    </details>
    <BLANKLINE>
    Now you can say why.
    """
    return ANSWER.sub(FOLD, text)


def link_to_programs(text: str, notebooks: Path, folder: Path) -> str:
    """Let links to `programs`, which are not copied, lead from `folder` to the originals.

    The notebooks run the originals, so a copy that somebody edits would have no effect.

    >>> link_to_programs("[one](programs/serve.py)", Path("notebooks"), Path("lab"))
    '[one](../notebooks/programs/serve.py)'
    """
    path = Path(os.path.relpath(notebooks.resolve(), folder.resolve())).as_posix()
    return PROGRAM_LINK.sub(f"]({path}/", text)


@extra("notebooks")
def copy_without_outputs(notebooks: Path, folder: Path) -> list[Path]:
    """Copy the notebooks without outputs and with their answers folded; returns the new copies.

    A copy that already exists is left as it is: it may contain somebody's work. The solutions are
    copied with their outputs. Links to `programs` lead to the programs of the original notebooks.
    """
    import nbformat

    copies = []
    for source in [
        *find_notebooks(notebooks, None),
        *sorted((notebooks / "solutions").glob("*.ipynb")),
    ]:
        copy = folder / source.relative_to(notebooks)
        if copy.exists():
            continue
        notebook = read_notebook(source)
        if source.parent == notebooks:
            notebook.cells[0].source = fold_answer(notebook.cells[0].source)
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    cell.outputs, cell.execution_count = [], None
                else:
                    cell.source = link_to_programs(cell.source, notebooks, folder)
            notebook.cells.append(nbformat.v4.new_code_cell("# Your answers to the exercises"))
        write_notebook(notebook, copy)
        copies.append(copy)
    return copies
