"""The notebooks as slides: `make slides`. A deck is one file that needs no network; a slide is one thought."""

import base64
import re
import sys
from importlib.resources import files
from pathlib import Path

import nbformat
from docutils.utils.math.latex2mathml import tex2mathml
from nbconvert import SlidesExporter

from companion.run import figure
from gpulab.report import DPI, image

ROOT = Path(__file__).parents[1]
WORDS = 60  # that a slide may have
LINES, COLUMNS = 15, 80  # of code and what it prints
ROWS = 8  # of a table
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!https?:)[^()\s]+\)")
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.S)
CODE = re.compile(r"(`[^`]+`)")
FOLDED = re.compile(r"<details>.*?</details>|^\*(?:Takes|Words).*\*$", re.S | re.M)
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.S)
BLOCK = re.compile(r"\n\s*\n(?![ \t])")
SENTENCE = re.compile(r"(?<=[a-z0-9)*`%][.?!])\s+(?=[A-Z`*\[(])")
HEADING = re.compile(r"^#+ (.*)$", re.M)
ITEM = re.compile(r"\n(?=[-*] |\d+\. |\*\*\d\d-\d\*\*)")
TEMPLATE = """{%- extends 'base.html.j2' -%}
{%- block header -%}<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ nb.metadata.title }}</title>
<style>{{ resources.reveal_css }}</style>
{% for css in resources.inlining.css %}<style>{{ css }}</style>{% endfor %}
<style>{{ resources.slides_css }}</style></head>{%- endblock -%}
{%- block body_header -%}<body><div class="reveal"><div class="slides">{%- endblock -%}
{%- block body_footer -%}</div></div>{%- endblock -%}
{%- block footer -%}<script>{{ resources.reveal_js }}</script>
<script>Reveal.initialize({width: 1280, height: 720, margin: 0.03, center: false, hash: true, slideNumber: "c/t",
  controls: false, transition: "none"});</script></body></html>{%- endblock -%}"""

INDEX = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Slides</title>
<style>body {{ font: 1.25em/1.8 system-ui, sans-serif; max-width: 40em; margin: 2em auto }}</style></head>
<body><h1>Slides of the notebooks</h1><p>Space goes on, Shift+Space back, O shows all, F fills the screen.</p>
<ul>
{}</ul></body></html>
"""


def readable(text):
    """Markdown for a slide: formulas as MathML, and no links to files that do not lie beside it."""
    text = LINK.sub(r"\1", text)
    parts = CODE.split(text)  # no formula stands in code
    parts[::2] = [
        FORMULA.sub(lambda math: tex2mathml(math[1] or math[2], as_block=bool(math[1])), part) for part in parts[::2]
    ]
    return "".join(parts)


def lines(text):
    """How many lines of a slide a text takes."""
    return sum(1 + len(line) // COLUMNS for line in text.splitlines())


def packed(pieces, joint):
    """Neighbours joined as long as a slide has room for them."""
    slides = []
    for piece in filter(str.strip, pieces):
        if slides and len(f"{slides[-1]} {piece}".split()) <= WORDS:
            slides[-1] += joint + piece
        else:
            slides.append(piece)
    return slides


def thoughts(block):
    """A paragraph, list or table, in parts that a slide has room for."""
    if block.lstrip().startswith(("|", "```", "<")):
        return [block] if len(block.splitlines()) <= ROWS + 2 else []
    if len(items := ITEM.split(block)) > 1:
        return packed(items, "\n")
    return packed(SENTENCE.split(block), " ")


def shown(cell):
    """What a code cell has for the audience: its figures, else its findings, or its few lines with what they print."""
    figures = [*filter(None, map(figure, cell.outputs))]
    if figures:
        yield from (image(base64.b64decode(drawn["png"]), drawn["alt"], DPI) for drawn in figures)
        return
    code = f"```python\n{cell.source}\n```"
    for output in cell.outputs:
        data = output.get("data", {})
        page, text = data.get("text/html", ""), output.get("text") or data.get("text/plain", "")
        if "<table" in page:  # what pandas breaks into parts is too wide to be read from a chair
            if page.count("<tr") <= ROWS + 1 and "\\\n" not in text:
                yield page
        elif page and (paragraphs := PARAGRAPH.findall(FOLDED.sub("", page))):
            yield from packed([f"<p>{line}</p>" for text in paragraphs for line in text.split("<br>")], "\n")
        elif text and "finding" in cell.metadata.get("tags", []):
            yield from packed(text.splitlines(), "\n\n")
        elif text and lines(text) + lines(cell.source) <= LINES:
            yield f"{code}\n\n<pre>{text.replace('<', '&lt;')}</pre>"


def slides(notebook):
    """The notebook as a notebook of slides, each a cell."""
    section, cells = "", []

    def add(kind, body):
        heading = f"## {section}\n\n"
        metadata = {"slideshow": {"slide_type": kind}}
        cells.append(nbformat.v4.new_markdown_cell(readable(heading + body), metadata=metadata))

    for cell in notebook.cells:
        if cell.cell_type == "code":
            housekeeping = "parameters" in cell.metadata.get("tags", []) or cell.source.startswith("import ")
            for body in () if housekeeping else shown(cell):
                add("subslide", body)
            continue
        continued, *sections = HEADING.split(FOLDED.sub("", cell.source))
        for heading, text in [(section, continued), *zip(sections[::2], sections[1::2], strict=True)]:
            kind, section = "subslide" if heading == section else "slide", heading
            for body in packed([part for block in BLOCK.split(text) for part in thoughts(block)], "\n\n"):
                add(kind, body)
                kind = "subslide"
    title = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
    return nbformat.v4.new_notebook(cells=cells, metadata={"title": title})


def main(folder):
    """Write a deck for each notebook, and a page that leads to them."""
    reveal = files("sphinx_revealjs") / "_static" / "revealjs" / "dist"
    texts = {name: (reveal / f"reveal.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    resources = {f"reveal_{name}": text for name, text in texts.items()}
    resources["slides_css"] = (ROOT / "docs" / "slides.css").read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    contents = ""
    exporter = SlidesExporter(raw_template=TEMPLATE)
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        deck = slides(nbformat.read(file, 4))
        page, _ = exporter.from_notebook_node(deck, dict(resources))
        (folder / f"{file.stem}.slides.html").write_text(page, encoding="utf-8")
        contents += (
            f'<li><a href="{file.stem}.slides.html">{file.stem[:2]} {deck.metadata.title}</a>, {len(deck.cells)}\n'
        )
    (folder / "index.html").write_text(INDEX.format(contents), encoding="utf-8")
    print(f"Open {folder / 'index.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
