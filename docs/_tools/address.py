"""Write the public address of the repository: `python docs/_tools/address.py
github.com/OWNER/NAME`.

The README gets buttons that open the notebooks in Binder and Colab, CITATION.cff and pyproject.toml
get the address, and each notebook gets a cell below its title. The cell has an effect only on
Colab: it fetches the repository and installs gpulab, and keeps the installed torch if that is new
enough.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST = "00_start_here.ipynb"
URLS = r"(?<=\n\[project\.urls\]\n)((Repository|Issues|Changelog) = .*\n)*"
CELL = """# On Colab only: fetch the notebooks, and install gpulab; torch stays if it is new enough.
import sys

if "google.colab" in sys.modules:
    !test -d /content/gpulab || git clone -q https://{address} /content/gpulab
    %cd -q /content/gpulab/notebooks
    %pip install -q "..[notebooks]" """.rstrip()


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
    for file in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        _add_cell(file, CELL.format(address=f"github.com/{name}"))


def _buttons(name):
    binder = f"https://mybinder.org/v2/gh/{name}/HEAD?urlpath=lab/tree/notebooks/{FIRST}"
    colab = f"https://colab.research.google.com/github/{name}/blob/HEAD/notebooks/{FIRST}"
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


def _add_cell(file, source):
    notebook = json.loads(file.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if "colab" not in cell["metadata"].get("tags", [])]
    cell = {
        "cell_type": "code",
        "id": "colab",
        "metadata": {"tags": ["colab"]},
        "execution_count": None,
        "outputs": [],
    }
    notebook["cells"] = [
        *cells[:1],
        {**cell, "source": source.splitlines(keepends=True)},
        *cells[1:],
    ]
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    settle(*sys.argv[1:2] or [""])
