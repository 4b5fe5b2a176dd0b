"""The notebooks as slides: `make slides`. A deck is one file that needs no network.

A cell with the tag `slide` begins a slide. A cell with the tag `fragment` appears on that slide
when the lecturer advances: first the question, then the answer. The slide of a Markdown cell shows
the text in its metadata under `slide`, a sentence or two, or the whole cell if there is none. The
slide of a code cell shows the first of these that it has: a figure, a finding, a short table, or a
few lines of code with their output. With `printed` in its metadata under `slide`, it shows what it
prints, for a figure that is too tall for a slide. A finding that is too long for one slide is shown
in parts; each part, and each further cell with the tag `fragment`, replaces the previous one. The
text of the notebook between one slide and the next becomes the speaker notes of the slide, without
what is folded there.

The deck of the single session follows the plan of docs/seminar/single.md. It begins with a title,
has at least one slide for each part of the plan, and the plan is in its notes.
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
FOUND = 80  # largest number of words of a finding that are shown at once
ROWS, COLUMNS = 12, 8  # largest size of a table, including its index but not its heading
LINES, WIDTH = 11, 80  # lines of code and output together, and characters per line
PRINTED_LINES = 13  # lines of output on a slide without the code
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?!https?:)[^()\s]+\)")
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.DOTALL)
CODE = re.compile(r"(`[^`]+`)")
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
EXPONENT = re.compile(r"\b(\d+\.?\d*)e-(\d\d)\b")
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
# The slides that a part of a plan shows, such as `05: 2 to 4, 6, demonstration 1`.
PLAN = re.compile(r"(\d\d:|demonstrations?) (\d+(?: to \d+)?(?:, \d+(?: to \d+)?(?!\d*:))*)")
DEMONSTRATION = re.compile(
    r"^\*\*(?P<number>\d+)\. (?P<heading>.+?)\*\* \([^)]*\)\. (?P<question>[^\n]+)\n\n"
    r"```python\n(?P<code>.+?)^```\n```text[^\n]*\n(?P<output>.+?)^```\n"
    r"(?P<rest>.*?)(?=^\*\*\d+\. |^## )",
    re.MULTILINE | re.DOTALL,
)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PAGE = jinja2.Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>{{ reveal_css }}</style><style>{{ slides_css }}</style></head>
<body><div class="reveal"><div class="slides">
{% for slide in slides %}<section{{ ' class="title"' if slide.is_title }}>
{% if slide.part %}<p class="part">{{ slide.part }}</p>{% endif %}
<h2>{{ slide.heading }}</h2>
<div class="{{ "asked" if slide.answers else "alone" }}">{{ slide.text }}</div>
{% if slide.answers %}<div class="answers">{% for answer in slide.answers %}
<div class="fragment {{ "" if loop.last else "current-visible " }}answer">{{ answer }}</div>
{% endfor %}</div>{% endif %}
<aside class="notes">{{ slide.notes }}</aside>
</section>
{% endfor %}</div></div>
<script>{{ reveal_js }}</script><script>{{ notes_js }}</script>
<script>
// A slide is 1280 wide and as high as the window allows, from 16:9 to 4:3.
function height() {
  const found = Math.max(720, Math.min(960, Math.round(1280 * innerHeight / innerWidth)));
  document.documentElement.style.setProperty("--slide-height", `${found}px`);
  return found;
}
Reveal.initialize({width: 1280, height: height(), margin: 0.03, center: false, hash: true,
  slideNumber: "c/t", controls: false, transition: "none", display: "flex",
  plugins: [RevealNotes]});
addEventListener("resize", () => Reveal.configure({height: height()}));
</script></body></html>
""")
INDEX = jinja2.Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Slides</title>
<style>
body { font: 1.25em/1.8 system-ui, sans-serif; max-width: 40em; margin: 2em auto }
</style></head>
<body><h1>Slides of the notebooks</h1>
<p>Space advances to the answer or to the next slide, Shift+Space goes back, S opens the speaker
notes in a second window, O shows an overview, F fills the screen.</p>
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
    formulas = []

    def placeholder(math):  # Markdown would change the `*` and the line breaks of MathML
        formulas.append(tex2mathml(math[1] or math[2], as_block=bool(math[1])))
        return f"formula{len(formulas) - 1}formula"

    parts = CODE.split(LINK.sub(r"\1", text))  # code contains no formulas
    parts[::2] = [FORMULA.sub(placeholder, part) for part in parts[::2]]
    page = markdown2html("".join(parts))
    return re.sub(r"formula(\d+)formula", lambda found: formulas[int(found[1])], page)


def lines(text):
    """The number of lines that a text takes up on a slide."""
    return sum(1 + len(line) // WIDTH for line in text.splitlines())


def shown(cell):
    """The part of a code cell's output that the audience sees, as a list of pages in HTML, of which
    each replaces the previous one.

    An empty list if the output is too large to be read from a distance.
    """
    if cell.metadata.get("slide") == "printed":
        printed = "".join(output.get("text", "") for output in cell.outputs)
        return found_pages(map(html.escape, printed.splitlines()))
    for drawn in filter(None, map(figure_of, cell.outputs)):
        return [image(base64.b64decode(drawn["png"]), drawn["alt"], DPI)]
    is_finding = "finding" in cell.metadata.get("tags", [])
    for output in cell.outputs:
        page = FOLDED.sub("", output.get("data", {}).get("text/html", ""))
        paragraphs = PARAGRAPH.findall(page)
        if "<table" in page and not (is_finding and paragraphs):
            if len(re.findall("<th[ >]", page.partition("</tr>")[0])) <= COLUMNS:
                return [first_rows(page)]
        elif paragraphs:
            return found_pages([line for found in paragraphs for line in found.split("<br>")])
    for output in cell.outputs:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        if is_finding and text:
            return found_pages([html.escape(line) for line in text.splitlines()])
        if text and lines(text) <= PRINTED_LINES:
            code = ""
            if lines(cell.source + text) <= LINES:
                code = as_html(f"```python\n{cell.source}\n```")
            return [f"{code}<pre>{html.escape(text)}</pre>"]
    return []


def shown_or_refused(cell):
    """The same as `shown`, but exit with the source of a cell that has nothing to show, so that its
    author can remove the tag.
    """
    pages = shown(cell)
    if not pages and not cell.outputs:
        raise SystemExit(f"this cell has no stored output; execute its notebook:\n{cell.source}")
    if not pages:
        raise SystemExit(
            "expected output that can be read from a distance; remove the tag of this cell, or"
            f" print less:\n{cell.source}"
        )
    return pages


def first_rows(page):
    """The rows of a table that fit on a slide, and the number of further rows in the notebook."""
    page = EXPONENT.sub("\\1e\N{WORD JOINER}-\N{WORD JOINER}\\2", page)  # numbers do not wrap
    head, body, rest = page.partition("<tbody")
    before, *rows = rest.split("<tr")
    if (more := len(rows) - ROWS) <= 0:
        return page
    kept, end = "<tr".join([before, *rows[:ROWS]]), page.rpartition("</tr>")[2]
    plural = "s" if more > 1 else ""
    return f"{head}{body}{kept}{end}<p><i>{more} more row{plural} in the notebook.</i></p>"


def found_pages(sentences):
    """The sentences of a finding, divided into pages of at most `FOUND` words if possible."""
    pages = [[]]
    for sentence in filter(None, map(str.strip, sentences)):
        if pages[-1] and len(" ".join([*pages[-1], sentence]).split()) > FOUND:
            pages.append([])
        pages[-1].append(sentence)
    return ["".join(f"<p>{sentence}</p>" for sentence in page) for page in pages if page]


def slide_text(text):
    """The text of a slide as HTML; exit if it is too long to be read from a distance."""
    if (count := len(text.split())) > WORDS:
        raise SystemExit(f"expected at most {WORDS} words on a slide, got {count}: {text}")
    return as_html(text)


def slides(notebook):
    """The slides of a notebook: each has a heading, a text, the pages of an answer that appears
    when the lecturer advances, speaker notes, and the identifiers of the cells that it shows.
    """
    section, heading, deck = "", "", []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        before, notes = "", ""
        if cell.cell_type == "markdown":
            headings = HEADING.findall(cell.source) or [section]
            heading, section = PARAGRAPH.sub(r"\1", as_html(headings[0])).strip(), headings[-1]
            before, _, after = FOLDED.sub("", cell.source).rpartition(f"# {headings[0]}\n")
            before, notes = as_html(before.rstrip("#")), as_html(after)
        if deck:
            deck[-1]["notes"] += before
        if "slide" in tags:
            slide = {"heading": heading, "answers": [], "notes": "", "cells": [cell.id]}
            if cell.cell_type == "markdown":
                text = cell.metadata.get("slide") or HEADING.sub("", cell.source)
                slide |= {"text": slide_text(text), "is_title": cell.source.startswith("# ")}
            else:
                slide["text"], *slide["answers"] = shown_or_refused(cell)
            deck.append(slide)
        elif "fragment" in tags:
            if deck[-1].get("is_title"):
                raise SystemExit(
                    "expected a slide between the title and its first answer; give the Markdown"
                    f" cell above this cell the tag `slide`:\n{cell.source}"
                )
            deck[-1]["answers"] += shown_or_refused(cell)
            deck[-1]["cells"].append(cell.id)
        if deck:
            deck[-1]["notes"] += notes
    if len(deck) > DECK:
        raise SystemExit(
            f"expected at most {DECK} slides, got {len(deck)}; remove the tag `slide` from some"
            " cells"
        )
    return deck


def demonstrations(page):
    """The demonstrations of a session as slides: the question, with the code if it is short, and
    what it prints as the answer.
    """
    deck = []
    for found in DEMONSTRATION.finditer(page):
        code = as_html(f"```python\n{found['code']}```")
        is_short = lines(found["code"] + found["output"]) <= LINES
        deck.append(
            {
                "heading": PARAGRAPH.sub(r"\1", as_html(found["heading"])).strip(),
                "text": slide_text(found["question"]) + (code if is_short else ""),
                "answers": [f"<pre>{html.escape(found['output'])}</pre>"],
                "notes": f"<p>Demonstration {found['number']}</p>{code}{as_html(found['rest'])}",
                "cells": [],
            }
        )
    return deck


def planned(page, decks):
    """The slides of the plan of a session, in order: a title, and those that the last column of the
    plan's table lists, with the plan in their notes.
    """
    title, _, question = HEADING.findall(page)[0].partition(": ")
    deck = [{"heading": question[:1].upper() + question[1:], "text": title}]
    deck[0] |= {"is_title": True, "cells": []}
    decks = decks | {"demonstration": demonstrations(page)}
    plan = page.partition("## Plan")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in plan.splitlines() if line.startswith("|")]
    for minutes, what, who, listed in rows[2:]:
        part = re.search(r"\*\*(.+?)\.?\*\*", what)[1]
        shown_slides = []
        for prefix, numbers in PLAN.findall(listed):
            source = decks[prefix.rstrip("s:")]
            for first, last in re.findall(r"(\d+)(?: to (\d+))?", numbers):
                shown_slides += source[int(first) - 1 : int(last or first)]
        if not shown_slides:
            raise SystemExit(f"expected at least one slide for the part {part!r}, got {listed!r}")
        notes = as_html(f"**Minutes {minutes.strip()}, {who.strip()}.** {what.strip()}")
        deck += [
            slide | {"part": part, "notes": f"{notes}<hr>{slide['notes']}"}
            for slide in shown_slides
        ]
    deck[0]["notes"] = deck[1]["notes"].partition("<hr>")[0]
    return deck


def main(folder):
    """Write a deck for each notebook, a deck for the single session, the hand-outs, and an index
    page.
    """
    reveal = files("sphinx_revealjs") / "_static" / "revealjs" / "dist"
    resources = {
        f"reveal_{kind}": (reveal / f"reveal.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js")
    }
    resources["notes_js"] = (reveal.parent / "plugin" / "notes" / "notes.js").read_text(
        encoding="utf-8"
    )
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
