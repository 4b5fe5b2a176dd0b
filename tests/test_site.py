"""The site that `make site` builds, opened from disk: links and alternative texts; the slides.

These tests are skipped if the extra `site` is not installed.
"""

import ast
import html.parser
import importlib
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pandas as pd
import pytest

import companion
import gpulab as gl

pytestmark = pytest.mark.slow("builds the site")

ROOT = Path(__file__).parent.parent


class Page(html.parser.HTMLParser):
    """The elements of a page."""

    def __init__(self, file):
        super().__init__()
        self.elements = []
        self.feed(file.read_text(encoding="utf-8"))
        self.anchors = {attributes["id"] for _, attributes in self.elements if "id" in attributes}

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))


@pytest.fixture(scope="module")
def pages(site):
    return {file: Page(file) for file in sorted(site.rglob("*.html"))}


def test_site_links_lead_to_pages_and_anchors_and_load_nothing_from_a_network(site, pages):
    dead, loaded = [], set()
    for file, page in pages.items():
        named = (
            (tag, attributes.get(name))
            for tag, attributes in page.elements
            for name in ("href", "src", "srcset")
        )
        for tag, target in named:
            link = urlsplit(target or "data:")
            if link.scheme == "data":
                continue
            if link.scheme in ("http", "https", "mailto") or link.netloc:
                loaded |= {target} if tag != "a" else set()
                continue
            there = (file.parent / unquote(link.path)).resolve() if link.path else file
            if not there.is_file() or (
                link.fragment and unquote(link.fragment) not in pages[there].anchors
            ):
                dead.append(f"{file.name}: {target}")
    assert dead == []
    assert loaded == set()
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\"']*", styles)


def test_site_has_an_entry_for_every_public_name(site, pages):
    for package in [gl, companion, *(getattr(gl, name) for name in gl.PACKAGES)]:
        anchors = pages[site / "reference" / f"{package.__name__}.html"].anchors
        for name in {*package.__all__} - {*gl.PACKAGES}:
            assert {f"{package.__name__}.{name}", f"module-{package.__name__}.{name}"} & anchors, (
                name
            )


def test_site_has_entries_for_inherited_properties(site, pages):
    anchors = pages[site / "reference" / "gpulab.stats.html"].anchors
    assert {"gpulab.stats.Verdict.decision", "gpulab.stats.Verdict.plot"} <= anchors


def test_site_figures_have_words(pages):
    for file, page in pages.items():
        assert all(
            (attributes.get("alt") or "").strip()
            for tag, attributes in page.elements
            if tag == "img"
        ), file


def test_site_contents_name_each_page_once(site):
    front = (site / "index.html").read_text(encoding="utf-8")
    entries = re.findall(
        r'<li class="toctree-l\d[^"]*"><a class="reference internal" href="([^"]+)">(.+?)</a>',
        front,
    )
    assert len(entries) > 80
    assert [page for page, _ in entries if "#" in page] == []
    for column in zip(*entries, strict=True):
        assert [name for name, times in Counter(column).items() if times > 1] == []


def test_site_papers_link_each_citation_to_its_reference(site):
    """That the links lead to anchors is tested with all other links."""
    bibliography = (ROOT / "docs" / "paper" / "paper.bib").read_text(encoding="utf-8")
    keys = re.findall(r"^@\w+\{(\w+),", bibliography, re.MULTILINE)
    for name in ("paper", "rescience"):
        source = (ROOT / "docs" / "paper" / f"{name}.md").read_text(encoding="utf-8")
        cited = set(re.findall(r"@(\w+)", source)) & set(keys)
        written = (site / "docs" / "paper" / f"{name}.html").read_text(encoding="utf-8")
        assert set(re.findall(rf'href="#{name}-(\w+)"', written)) == cited
        words = html.unescape(re.sub("<[^>]+>", "", written))
        assert not re.findall(r"\[@|\{width|\\url|^: ", words, re.MULTILINE)
        assert "Lotter et al. 2016" in words
        assert "William Lotter, Gabriel Kreiman, David Cox (2016). Deep predictive coding" in words


def test_site_does_not_publish_the_letter(site):
    letter = (ROOT / "docs" / "paper" / "letter.md").read_text(encoding="utf-8")
    assert "Dear colleagues" in letter
    published = [file for file in site.rglob("*") if file.suffix in (".html", ".js", ".md")]
    assert len(published) > 80
    assert [file for file in published if "letter" in file.name] == []
    texts = (file.read_text(encoding="utf-8") for file in published)
    assert not any("Dear colleagues" in text for text in texts)


def test_slides_exist_for_every_notebook_and_begin_with_a_title(slides):
    decks = {"single", *(file.stem for file in (ROOT / "notebooks").glob("*.ipynb"))}
    written = list(slides.glob("*.slides.html"))
    assert all("reveal" in file.read_text(encoding="utf-8") for file in written)
    assert decks == {file.name.removesuffix(".slides.html") for file in written}
    for file in written:
        sections = [
            attributes for tag, attributes in Page(file).elements if tag in ("section", "aside")
        ]
        assert sections[0] == {"class": "title"}, file
        notes = [attributes == {"class": "notes"} for attributes in sections]
        assert notes == [False, True] * (len(notes) // 2), "each slide has notes"
        assert not re.search(r"<i>\d+ more", file.read_text(encoding="utf-8")), file


def test_slides_of_the_single_session_follow_its_plan(slides):
    plan = (ROOT / "docs" / "seminar" / "single.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+ to \d+) \| \*\*(.+?)\.?\*\* ([\w ]+)", plan, re.MULTILINE)
    assert len(rows) > 4
    deck = (slides / "single.slides.html").read_text(encoding="utf-8")
    shown = re.findall(
        r'<p class="part">(.+?)</p>.+?<aside class="notes">(.+?)</aside>', deck, re.DOTALL
    )
    assert list(dict.fromkeys(part for part, _ in shown)) == [part for _, part, _ in rows]
    for minutes, part, begin in rows:
        for notes in (notes for name, notes in shown if name == part):
            assert f"Minutes {minutes}," in notes
            assert begin in html.unescape(notes)


def made_by(cell, cells):
    """The code cells on which a cell depends: those that assign the names it uses, and so on."""
    needed, waiting = [], [cell]
    while waiting:
        needed.append(waiting.pop())
        names = {node.id for node in ast.walk(parsed(needed[-1])) if isinstance(node, ast.Name)}
        for other in cells[: cells.index(needed[-1])]:
            bound = {
                node.id
                for node in ast.walk(parsed(other))
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            if names & bound and other not in [*needed, *waiting]:
                waiting.append(other)
    return needed


def parsed(cell):
    return ast.parse("".join(cell.source))


def trains(cell, cells):
    """Whether a cell shows training runs that its notebook makes."""
    calls = [
        ast.unparse(node.func)
        for each in made_by(cell, cells)
        for node in ast.walk(parsed(each))
        if isinstance(node, ast.Call)
    ]
    return bool({"gl.train", "gl.Experiment", "companion.run_program"} & set(calls))


@pytest.mark.usefixtures("slides")
def test_slides_of_the_single_session_show_only_runs_of_the_session(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_tools"))
    tool = importlib.import_module("slides")
    notebooks = {
        file.stem[:2]: nbformat.read(file, 4) for file in (ROOT / "notebooks").glob("*.ipynb")
    }
    code = {
        number: [cell for cell in notebook.cells if cell.cell_type == "code"]
        for number, notebook in notebooks.items()
    }
    training = {cell.id: trains(cell, cells) for cells in code.values() for cell in cells}
    known = {"00-13": True, "09-lost": True, "what-matters": False, "02-06": False}
    assert {cell: training[cell] for cell in known} == known
    page = (ROOT / "docs" / "seminar" / "single.md").read_text(encoding="utf-8")
    decks = {number: tool.slides(notebook) for number, notebook in notebooks.items()}
    shown = [cell for slide in tool.planned(page, decks) for cell in slide["cells"]]
    assert "02-06" in shown
    assert [cell for cell in shown if training.get(cell)] == []


@pytest.mark.usefixtures("slides")
def test_slides_show_long_findings_in_parts_and_refuse_a_part_without_a_slide(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_tools"))
    tool = importlib.import_module("slides")
    sentences = [f"{number} " + "word " * 29 for number in range(6)]
    pages = tool.found_pages(sentences)
    assert [page.count("<p>") for page in pages] == [2, 2, 2]
    assert re.findall(r"<p>(\d)", "".join(pages)) == list("012345")
    table = pd.DataFrame({"number": range(tool.ROWS + 2)}).to_html()
    assert "2 more rows" in tool.first_rows(table)
    assert tool.first_rows(table).count("<tr") == 1 + tool.ROWS
    page = "# Session: why?\n\n## Plan\n|a|b|c|d|\n|-|-|-|-|\n|0 to 9|**Part.** Say.|you| |\n"
    with pytest.raises(SystemExit, match="'Part'"):
        tool.planned(page, {})
