"""Configuration of the site: `make site`. Sphinx reads the files that this module gathers in its
source folder; none of them is written by hand.
"""

import base64
import functools
import importlib
import inspect
import io
import itertools
import re
import sys
import types
from pathlib import Path

import nbformat
from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from PIL import Image

import companion
import gpulab
from companion.report import figure_of
from gpulab.picture import DPI, image

sys.path.append(str(Path(__file__).parent))
citations = importlib.import_module("citations")

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s#:]+)(#[^)\s]+)?\)")
ADDRESS = re.search(
    r'^repository-code: "(.+)"$', (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE
)
BIBLIOGRAPHY = ROOT / "docs" / "paper" / "paper.bib"
UNPUBLISHED = {ROOT / "docs" / "paper" / "letter.md"}  # a draft that nobody has sent
PROJECT = ["docs/releasing"]  # pages of docs/ that belong to the part "Project"
PAGES = [f"docs/{page.stem}" for page in sorted((ROOT / "docs").glob("*.md"))]
CONTENTS = "\n```{toctree}\n:hidden:\n:glob:\n%s\n```\n"
PARTS = {
    "Notebooks": "gallery/index\nnotebooks/*",
    "Use and teach": "\n".join([page for page in PAGES if page not in PROJECT] + ["docs/*/index"]),
    "Reference": "reference/*\ngenindex",
    "Measured": "data/index\ndata/registered/*\nbenchmarks/index",
    "Project": "\n".join(["*", *PROJECT, "docs/paper/*"]),
    "Solutions": "notebooks/solutions/*",
}

project = html_title = "gpulab"
version = release = gpulab.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_title_to_header = True
default_role = "py:obj"  # in docstrings, public names such as `Setting` become links, others code
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
html_theme = "furo"
html_static_path = ["../_static/site.css"]
html_css_files = ["site.css"]
html_domain_indices = html_copy_source = html_show_copyright = html_show_sphinx = False
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
# The search shows its results in context only if the browser can read other pages, which is not
# the case for pages opened as local files.
_words = "if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false"
html_js_files = [(None, {"body": _words})]


def found(waiting):
    """Return the pages that links from these pages reach, directly or not, and their pictures."""
    pages, kinds = set(waiting), (".md", ".ipynb", ".svg", ".png")
    while waiting:
        if (page := waiting.pop()).suffix in (".md", ".ipynb"):
            linked = {
                (page.parent / path).resolve()
                for _, path, _ in LINK.findall(page.read_text(encoding="utf-8"))
            }
            unseen = linked - pages - UNPUBLISHED
            waiting |= (new := {file for file in unseen if file.suffix in kinds and file.is_file()})
            pages |= new
    return sorted(pages)


def slug(heading):
    """Return a heading as an anchor, in GitHub's style."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def adapted(page, pages):
    """Return the text of a page, with links to the site's pages, or else to the repository.

    If the repository has no address, such links become plain text.
    """

    def link(match):
        words, path, anchor = match.groups(default="")
        target = (page.parent / path).resolve()
        if target in pages:
            return f"[{words}]({path.replace('README.md', 'index.md')}{anchor[:1]}{slug(anchor)})"
        if not target.exists():
            return match[0]  # a dead link, which Sphinx reports
        return (
            f"[{words}]({ADDRESS[1]}/blob/HEAD/{target.relative_to(ROOT).as_posix()})"
            if ADDRESS
            else words
        )

    text = LINK.sub(link, page.read_text(encoding="utf-8"))
    if page.suffix == ".ipynb":
        return text.replace('"# ', f'"# {page.stem[:2]} · ', 1)
    if page.name == "README.md" and page.parent == ROOT:
        return text + "".join(
            CONTENTS % f":caption: {part}\n{inside}" for part, inside in PARTS.items()
        )
    if page.parent == BIBLIOGRAPHY.parent:
        bibliography = BIBLIOGRAPHY.read_text(encoding="utf-8")
        return citations.with_citations(text, bibliography, page.stem)
    if page.parent == ROOT / "docs" / "seminar" and page.name == "README.md":
        return text + CONTENTS % "session?\nsession??\n*"  # session 10 after session 9
    if page == ROOT / "benchmarks" / "README.md":
        return text + CONTENTS % "results/*"
    return text + CONTENTS % "*" * (
        page.name == "README.md" and len(list(page.parent.glob("*.md"))) > 1
    )


def gallery(source):
    """Write a page with every figure of the notebooks as a thumbnail, and add the figures whose
    text links to the page of the atlas to that page, in full size.
    """
    page, folder = (
        "# Gallery\n\nAll figures of the notebooks. Each links to the section that draws it.\n",
        source / "gallery",
    )
    folder.mkdir(exist_ok=True)
    names = (f"{number}.png" for number in itertools.count())
    for file in sorted((source / "notebooks").glob("*.ipynb")):
        notebook, there = nbformat.read(file, 4), f"../{file.relative_to(source).as_posix()}"
        section = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
        page += f"\n## {section}\n\n```{{container}} gallery\n"
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                text = cell.source
                for section in re.findall(r"^##+ (.+)", text, re.MULTILINE):
                    there = there.partition("#")[0] + f"#{slug(section)}"
            for drawn in filter(None, map(figure_of, cell.get("outputs", []))):
                name, png = next(names), base64.b64decode(drawn["png"])
                alt = re.sub(r"([\\`*_\[\]<>&$])", r"\\\1", drawn["alt"])
                page += f"- [![{alt}]({name}) {section}]({there})\n"
                small = Image.open(io.BytesIO(png)).convert("RGB")
                small.thumbnail((640, 640))
                small.quantize(64).save(folder / name, optimize=True)
                if "](../docs/atlas.md)" in text and "#" in there:
                    (folder / f"full-{name}").write_bytes(png)
                    with (source / "docs" / "atlas.md").open("a", encoding="utf-8") as atlas:
                        text = re.sub(r"\]\((?!\.\./|\w+:|#)", "](../notebooks/", text)
                        atlas.write(
                            f"\n{text}\n\n![{alt}](../gallery/full-{name})\n\n[In the"
                            f" notebook]({there})\n"
                        )
        page += "```\n"
    (folder / "index.md").write_text(page, encoding="utf-8")


def name_pictures(source):
    """Give each figure of a notebook its alternative text, which myst-nb omits for `image/png`."""
    for file in (source / "notebooks").rglob("*.ipynb"):
        notebook = nbformat.read(file, 4)
        for output in itertools.chain.from_iterable(
            cell.get("outputs", []) for cell in notebook.cells
        ):
            drawn = figure_of(output)
            if drawn:
                output.data = {
                    "text/html": image(base64.b64decode(drawn["png"]), drawn["alt"], DPI)
                }
        nbformat.write(notebook, file)


def documented_members(kind):
    """Return the public methods and properties of a class that have a docstring, including those
    of gpulab's base classes.
    """
    described = (types.FunctionType, property, functools.cached_property, staticmethod, classmethod)
    members = {}
    for base in kind.__mro__:
        if base.__module__.startswith(("gpulab", "companion")):
            members = vars(base) | members
    return [
        name
        for name, member in members.items()
        if name[0] != "_" and isinstance(member, described) and inspect.getdoc(member)
    ]


def reference(source):
    """Write a page for each package, with an entry for each public name.

    A name that several packages export has a full entry in the first of them.
    """
    seen, folder = {}, source / "reference"
    folder.mkdir(exist_ok=True)
    for package in [gpulab, companion, *(getattr(gpulab, name) for name in gpulab.PACKAGES)]:
        name = package.__name__
        here = f"\n.. currentmodule:: {name}\n\n"
        page = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n{here}"
        for public in [name for name in package.__all__ if name not in gpulab.PACKAGES]:
            value, full = getattr(package, public), f"{name}.{public}"
            kind = "class" if isinstance(value, type) else "function" if callable(value) else "data"
            if id(value) in seen:
                page += (
                    f".. py:{kind}:: {public}\n\n   The same as :py:obj:`{seen[id(value)]}`.\n\n"
                )
            elif inspect.ismodule(value):
                page += f".. automodule:: {value.__name__}\n   :members:\n{here}"
            elif kind == "data":
                page += (
                    f".. py:data:: {public}\n\n   Contains"
                    f" {', '.join(f'``{key}``' for key in value)}.\n\n"
                )
            else:
                seen[id(value)] = full
                page += f".. auto{kind}:: {full}\n"
                if kind == "class":
                    page += f"   :members: {', '.join(documented_members(value))}\n"
                page += "\n"
        (folder / f"{name}.rst").write_text(page, encoding="utf-8")


def gather(source):
    """Write everything that Sphinx reads."""
    pages = found({ROOT / "README.md"})
    for page in pages:
        copy = source / page.relative_to(ROOT).with_name(page.name.replace("README.md", "index.md"))
        copy.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix in (".md", ".ipynb"):
            copy.write_text(adapted(page, pages), encoding="utf-8")
        else:
            copy.write_bytes(page.read_bytes())
    gallery(source)
    name_pictures(source)
    reference(source)


def setup(app):
    """Gather the sources and register the adaptations; Sphinx calls this function."""

    def docstring(*arguments):  # escape bars, which would begin a substitution
        lines = arguments[-1]
        lines[:] = [
            line if line.lstrip().startswith((">>>", "...")) else line.replace("|", r"\|")
            for line in lines
        ]

    def signature(*arguments):  # `<factory>` of dataclasses is not Python, and would not wrap
        return (arguments[-2] or "").replace("<factory>", "...") or None, arguments[-1]

    def formula(block):  # render formulas as MathML, which needs no script
        def visit(writer, node):
            writer.body.append(tex2mathml(node.astext(), as_block=block))
            raise SkipNode

        return visit, None

    gather(Path(app.srcdir))
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-process-signature", signature)
    app.add_html_math_renderer("mathml", formula(False), formula(True))
