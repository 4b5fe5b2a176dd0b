"""Write the public address of the repository: `python docs/_tools/address.py
github.com/OWNER/NAME`.

The README gets buttons that open the notebooks in Binder and Colab, and CITATION.cff and
pyproject.toml get the address. For Colab, which opens a notebook without the files around it, a
copy of each notebook is written to notebooks/colab: without outputs, with links that lead to the
other copies and to the pages of the repository, and with a cell below its title that fetches the
repository and installs gpulab. Run this program again after a change to the notebooks.
"""

import json
import os.path
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST = "00_start_here.ipynb"
URLS = r"(?<=\n\[project\.urls\]\n)((Repository|Issues|Changelog) = .*\n)*"
CELL = """# On Colab, this cell fetches the notebooks and installs gpulab. pip replaces what is
# older than {bounds}, and torch together with torchvision. If
# the cell says so, choose Runtime, Restart session, and run the cells again, beginning here.
import sys
from importlib.metadata import distributions

if "google.colab" in sys.modules:
    before = {{each.name: each.version for each in distributions()}}
    !test -d /content/gpulab || git clone -q https://github.com/{name} /content/gpulab
    %cd -q /content/gpulab/notebooks
    %pip install -q "..[notebooks]"
    after = {{each.name: each.version for each in distributions()}}
    replaced = [name for name in before if after.get(name, before[name]) != before[name]]
    for name in replaced:
        print(f"replaced: {{name}} {{before[name]}} by {{after[name]}}")
    if set(replaced) & set(sys.modules):
        print("A replaced package is in use: restart the session, then run this cell again.")"""
REPLACED = ("numpy", "pandas", "torchvision")  # what Colab has, perhaps in older versions
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s#:]+)(#[^)\s]+)?\)")  # to a file of the repository


def settle(address, root=ROOT):
    """Write the address into all files that name it, replacing any earlier one."""
    found = re.fullmatch(r"(?:https://)?github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", address)
    if not found:
        raise SystemExit(f"{address!r}: expected an address such as github.com/OWNER/NAME")
    name = found[1]
    _change(
        root / "README.md",
        r"(?<=\n## Try it\n)(\[!\[Open in Binder.*\n\n)?",
        f"{_buttons(name)}\n\n",
    )
    _change(
        root / "CITATION.cff",
        r"(?m)(^repository-code: .*\n)?^license:",
        f'repository-code: "https://github.com/{name}"\nlicense:',
    )
    _change(root / "pyproject.toml", URLS, _urls(name))
    copies = root / "notebooks" / "colab"
    shutil.rmtree(copies, ignore_errors=True)
    copies.mkdir()
    first = CELL.format(name=name, bounds=_bounds(root))
    for file in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        notebook = _for_colab(json.loads(file.read_text(encoding="utf-8")), first, name)
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        (copies / file.name).write_text(text, encoding="utf-8")


def _buttons(name):
    binder = f"https://mybinder.org/v2/gh/{name}/HEAD?urlpath=lab/tree/notebooks/{FIRST}"
    colab = _address_on_colab(name, FIRST)
    buttons = {"Binder": ("binder.svg", binder), "Colab": ("colab.svg", colab)}
    links = [
        f"[![Open in {name}](docs/_static/{badge})]({link})"
        for name, (badge, link) in buttons.items()
    ]
    return " ".join(links)


def _urls(name):
    """Return the lines of `[project.urls]` in pyproject.toml that name the repository."""
    address = f"https://github.com/{name}"
    urls = {
        "Repository": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
    }
    return "".join(f'{label} = "{url}"\n' for label, url in urls.items())


def _change(file, pattern, text):
    file.write_text(
        re.sub(pattern, lambda _: text, file.read_text(encoding="utf-8")), encoding="utf-8"
    )


def _bounds(root):
    """Return the packages that Colab has, with the oldest versions that the notebooks accept."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["notebooks"]]
    found = dict(re.findall(r"^([\w-]+)(?:\[.*\])?>=([\d.]+)", "\n".join(asked), re.MULTILINE))
    return ", ".join(f"{package} {found[package]}" for package in REPLACED)


def _address_on_colab(name, file):
    return f"https://colab.research.google.com/github/{name}/blob/HEAD/notebooks/colab/{file}"


def _for_colab(notebook, first, name):
    """Return a notebook as Colab needs it: without outputs, with the cell `first` below its title,
    and with absolute links.
    """

    def link(found):
        bang, words, path, anchor = found.groups(default="")
        there = os.path.normpath(f"notebooks/{path}").replace(os.sep, "/")
        if re.fullmatch(r"notebooks/\d\d_\w+\.ipynb", there):  # Colab knows no names of sections
            return f"[{words}]({_address_on_colab(name, there.rpartition('/')[2])})"
        view = "raw" if bang else "blob"
        return f"{bang}[{words}](https://github.com/{name}/{view}/HEAD/{there}{anchor})"

    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            source = LINK.sub(link, "".join(cell["source"])).splitlines(keepends=True)
            cells.append({**cell, "source": source})
        else:
            cells.append({**cell, "outputs": [], "execution_count": None})
    added = {"cell_type": "code", "execution_count": None, "id": "colab", "outputs": []}
    added |= {"metadata": {"tags": ["colab"]}, "source": first.splitlines(keepends=True)}
    return {**notebook, "cells": [*cells[:1], added, *cells[1:]]}


if __name__ == "__main__":
    settle(*sys.argv[1:2] or [""])
