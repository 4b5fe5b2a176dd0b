"""The notebooks as slides: `make slides`. A deck is one file that needs no network.

A cell with the tag `slide` begins a slide. A cell with the tag `fragment` appears on that slide
when the lecturer advances: first the question, then the answer. The slide of a Markdown cell shows
the text in its metadata under `slide`, a sentence or two, or the whole cell if there is none. The
slide of a code cell shows the first of these that it has: a figure, a finding, a short table, or a
few lines of code with their output.
"""

import base64
import html
import re
import sys
from importlib.resources import files
from pathlib import Path

import jinja2
import nbformat
from docutils.utils.math.latex2mathml import tex2mathml
from nbconvert.filters import markdown2html

from companion.report import figure_of
from gpulab.picture import DPI, image

ROOT = Path(__file__).parents[2]
DECK = 20  # largest number of slides: a lecture of three quarters of an hour
WORDS = 45  # largest number of words on a slide, not counting the answer
FOUND = 80  # largest number of words of a finding; the rest is in the notebook
ROWS, COLUMNS = 8, 8  # largest size of a table, including its index
LINES, WIDTH = 11, 80  # lines of code and output together, and characters per line
PRINTED_LINES = 13  # lines of output on a slide without the code
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!https?:)[^()\s]+\)")
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.DOTALL)
CODE = re.compile(r"(`[^`]+`)")
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
PLAN = re.compile(
    r"(\d\d): ((?:\d+(?: to \d+)?(?:, (?!\d\d:))?)+)"
)  # which slides of a deck a plan shows: `05: 2 to 4, 6`
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PAGE = jinja2.Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>{{ reveal_css }}</style><style>{{ slides_css }}</style></head>
<body><div class="reveal"><div class="slides">
{% for slide in slides %}<section>
<h2>{{ slide.heading }}</h2>
<div class="{{ "asked" if slide.answer else "alone" }}">{{ slide.text }}</div>
{% if slide.answer %}<div class="fragment answer">{{ slide.answer }}</div>{% endif %}
</section>
{% endfor %}</div></div>
<script>{{ reveal_js }}</script>
<script>Reveal.initialize({width: 1280, height: 720, margin: 0.03, center: false, hash: true,
  slideNumber: "c/t", controls: false, transition: "none", display: "flex"});</script></body></html>
""")
INDEX = jinja2.Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Slides</title>
<style>
body { font: 1.25em/1.8 system-ui, sans-serif; max-width: 40em; margin: 2em auto }
</style></head>
<body><h1>Slides of the notebooks</h1>
<p>Space advances to the answer or to the next slide, Shift+Space goes back, O shows an overview, F
fills the screen.</p>
<ul>
{% for name, title, count in decks %}
<li><a href="{{ name }}.slides.html">{{ title }}</a>, {{ count }}
{% endfor %}</ul>
<h1>Hand-outs of the seminar, one page each</h1>
<ul>
{% for name, title in handouts %}<li><a href="{{ name }}.handout.html">{{ title }}</a>
{% endfor %}</ul></body></html>
""")
HANDOUT = jinja2.Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Hand-out: {{ title }}</title>
<style>
@page { size: A4; margin: 18mm }
body { font: 12pt/1.6 system-ui, sans-serif; max-width: 42em; margin: 2em auto }
pre, code { font: 10.5pt/1.5 ui-monospace, monospace }
pre { background: #f3f5f8; padding: .6em; white-space: pre-wrap }
@media print { body { margin: 0; font-size: 11pt; max-width: none } }</style></head>
<body><h1>{{ title }}</h1>{{ body }}</body></html>
""")


def as_html(text):
    """Convert Markdown for a slide: formulas become MathML, and links to local files are removed,
    because those files are not next to the slides.
    """
    parts = CODE.split(LINK.sub(r"\1", text))  # code contains no formulas
    parts[::2] = [
        FORMULA.sub(lambda math: tex2mathml(math[1] or math[2], as_block=bool(math[1])), part)
        for part in parts[::2]
    ]
    return markdown2html("".join(parts))


def lines(text):
    """The number of lines that a text takes up on a slide."""
    return sum(1 + len(line) // WIDTH for line in text.splitlines())


def shown(cell):
    """The part of a code cell's output that the audience sees, as HTML.

    An empty text if the output is too large to be read from a distance.
    """
    for drawn in filter(None, map(figure_of, cell.outputs)):
        return image(base64.b64decode(drawn["png"]), drawn["alt"], DPI)
    for output in cell.outputs:
        data = output.get("data", {})
        page, text = (
            FOLDED.sub("", data.get("text/html", "")),
            output.get("text") or data.get("text/plain", ""),
        )
        is_finding = "finding" in cell.metadata.get("tags", [])
        if "<table" in page and not (is_finding and PARAGRAPH.search(page)):
            columns = len(re.findall("<th[ >]", page.partition("</tr>")[0]))
            return first_rows(page) if columns <= COLUMNS else ""
        if page and PARAGRAPH.search(page):
            return first_words(
                [line for found in PARAGRAPH.findall(page) for line in found.split("<br>")]
            )
        if is_finding:
            return first_words([html.escape(line) for line in text.splitlines()])
        if text and lines(text) <= PRINTED_LINES:
            code = (
                as_html(f"```python\n{cell.source}\n```")
                if lines(cell.source + text) <= LINES
                else ""
            )
            return f"{code}<pre>{html.escape(text)}</pre>"
    return ""


def shown_or_refused(cell):
    """The same as `shown`, but exit with the source of a cell that has nothing to show, so that its
    author can remove the tag.
    """
    body = shown(cell)
    if not body:
        raise SystemExit(
            "expected output that can be read from a distance; remove the tag of this cell, or"
            f" print less:\n{cell.source}"
        )
    return body


def first_rows(page):
    """The rows of a table that fit on a slide, and the number of further rows in the notebook."""
    before, *rows = page.split("<tr")
    if (more := len(rows) - 1 - ROWS) <= 0:  # the first row is the heading
        return page
    kept, end = "<tr".join([before, *rows[: ROWS + 1]]), page.rpartition("</tr>")[2]
    return f"{kept}{end}<p><i>{more} more row{'s' if more > 1 else ''} in the notebook.</i></p>"


def first_words(sentences):
    """The sentences of a finding that fit on a slide, and the number of further ones."""
    kept = [
        number
        for number in range(len(sentences))
        if len(" ".join(sentences[: number + 1]).split()) <= FOUND
    ]
    count = max(1, len(kept))
    more = len(sentences) - count
    rest = [f"<i>{more} more in the notebook.</i>"] if more else []
    return "".join(f"<p>{sentence}</p>" for sentence in [*sentences[:count], *rest])


def slides(notebook):
    """The slides of a notebook: each has a heading, a text, and an answer that appears when the
    lecturer advances.
    """
    section, heading, deck = "", "", []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            headings = HEADING.findall(cell.source) or [section]
            heading, section = PARAGRAPH.sub(r"\1", as_html(headings[0])).strip(), headings[-1]
        if "slide" in tags and cell.cell_type == "markdown":
            text = cell.metadata.get("slide") or HEADING.sub("", cell.source)
            if len(text.split()) > WORDS:
                raise SystemExit(
                    f"expected at most {WORDS} words on a slide, got {len(text.split())}: {text}"
                )
            deck.append({"heading": heading, "text": as_html(text), "answer": ""})
        elif "slide" in tags:
            deck.append({"heading": heading, "text": shown_or_refused(cell), "answer": ""})
        elif "fragment" in tags:
            deck[-1]["answer"] += shown_or_refused(cell)
    if len(deck) > DECK:
        raise SystemExit(
            f"expected at most {DECK} slides, got {len(deck)}; remove the tag `slide` from some"
            " cells"
        )
    return deck


def planned(page, decks):
    """The slides that the plan of a session lists in the last column of its table, in order."""
    plan = page.partition("## Plan")[2].partition("\n## ")[0]
    shown_slides = []
    for prefix, numbers in PLAN.findall(
        "\n".join(line.split("|")[-2] for line in plan.splitlines() if "|" in line)
    ):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", numbers):
            shown_slides += decks[prefix][int(first) - 1 : int(last or first)]
    return shown_slides


def main(folder):
    """Write a deck for each notebook, a deck for the single session, the hand-outs, and an index
    page.
    """
    reveal = files("sphinx_revealjs") / "_static" / "revealjs" / "dist"
    resources = {
        f"reveal_{kind}": (reveal / f"reveal.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js")
    }
    resources["slides_css"] = (ROOT / "docs" / "_static" / "slides.css").read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        file.stem: file.read_text(encoding="utf-8")
        for file in sorted((ROOT / "docs" / "seminar").glob("s*.md"))
    }
    titles, decks = {}, {}
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(file, 4)
        decks[file.stem] = slides(notebook)
        titles[file.stem] = (
            f"{file.stem[:2]} {notebook.cells[0].source.splitlines()[0].removeprefix('# ')}"
        )
    titles["single"] = "The single session"
    decks["single"] = planned(pages["single"], {name[:2]: deck for name, deck in decks.items()})
    for name, deck in decks.items():
        page = PAGE.render(title=titles[name], slides=deck, **resources)
        (folder / f"{name}.slides.html").write_text(page, encoding="utf-8")
    for name, page in pages.items():
        titles[name] = HEADING.findall(page)[0]
        body = as_html(page.partition("## Hand-out\n")[2])
        (folder / f"{name}.handout.html").write_text(
            HANDOUT.render(title=titles[name], body=body), encoding="utf-8"
        )
    counted = [(name, titles[name], len(deck)) for name, deck in decks.items()]
    index = INDEX.render(decks=counted, handouts=[(name, titles[name]) for name in pages])
    (folder / "index.html").write_text(index, encoding="utf-8")
    print(f"Open {folder / 'index.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
