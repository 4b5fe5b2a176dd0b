"""The site of `make site`, opened from disk: its links, its words, its width on a telephone, its search.

Without the extra `site` all of this is skipped, and without a browser what needs one.
"""

import html.parser
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import companion
import gpulab as gl

for library in ("sphinx", "myst_nb", "furo"):
    pytest.importorskip(library, reason=f"{library} is not installed: the site is not built (pip install gpulab[site])")

pytestmark = pytest.mark.slow("builds the site")

ROOT = Path(__file__).parent.parent
TELEPHONE = {"width": 390, "height": 844}
LAPTOP = {"width": 1280, "height": 800}
SEEN = """() => {
    const focus = document.activeElement, box = focus.getBoundingClientRect();
    return box.left >= 0 && box.right <= innerWidth && getComputedStyle(focus).outlineStyle != "none";
}"""
WIDE = """() => [...document.querySelectorAll("article *, header *")].filter(part => {
    if (part.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (let box = part.parentElement; !box.matches("article, header"); box = box.parentElement)
        if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)
            && box.getBoundingClientRect().right <= innerWidth + 1) return false;
    return true;
}).map(part => part.outerHTML.slice(0, 90))"""


class Page(html.parser.HTMLParser):
    """The elements of a page."""

    def __init__(self, file):
        super().__init__()
        self.elements = []
        self.feed(file.read_text(encoding="utf-8"))
        self.anchors = {attributes["id"] for _, attributes in self.elements if "id" in attributes}

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))


def build(docs, folder):
    """Build the site of a checkout as `make site` does."""
    (folder / "source").mkdir()
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-c", docs, "-d", folder / "doctrees"]
    return subprocess.run(
        [sys.executable, *command, folder / "source", folder / "site"], capture_output=True, text=True, timeout=400
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "docs", folder)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site):
    return {file: Page(file) for file in sorted(site.rglob("*.html"))}


def targets(page):
    """What a page leads to or shows, but for what is written into it."""
    for tag, attributes in page.elements:
        for name in ("href", "src", "srcset", "data", "poster"):
            if not attributes.get(name, "data:").startswith("data:"):
                yield tag, attributes[name]


def test_every_link_leads_to_a_page_and_an_anchor_and_nothing_comes_from_a_network(site, pages):
    dead, loaded = [], set()
    for file, page in pages.items():
        for tag, target in targets(page):
            link = urlsplit(target)
            if link.scheme in ("http", "https", "mailto") or link.netloc:
                loaded |= {target} if tag != "a" else set()
                continue
            there = (file.parent / unquote(link.path)).resolve() if link.path else file
            if not there.is_file() or (link.fragment and unquote(link.fragment) not in pages[there].anchors):
                dead.append(f"{file.name}: {target}")
    assert dead == []
    assert loaded == set()
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\"']*", styles)


def test_all_pages_notebooks_and_seminars_are_there(site):
    for source in [ROOT / "README.md", *ROOT.glob("notebooks/[0-9][0-9]_*.ipynb"), *(ROOT / "docs").rglob("*.md")]:
        page = str(source.relative_to(ROOT)).replace("README.md", "index.md")
        assert (site / page).with_suffix(".html").is_file(), source


def test_every_public_name_has_an_entry(site, pages):
    for package in [gl, companion, *(getattr(gl, name) for name in gl.PACKAGES)]:
        anchors = pages[site / "reference" / f"{package.__name__}.html"].anchors
        for name in {*package.__all__} - {*gl.PACKAGES}:
            assert {f"{package.__name__}.{name}", f"module-{package.__name__}.{name}"} & anchors, name


def test_every_figure_has_words_and_is_in_the_gallery_which_leads_to_its_section(site, pages):
    def words(page):
        return {(attributes.get("alt") or "").strip() for tag, attributes in page.elements if tag == "img"}

    assert not any("" in words(page) for page in pages.values())
    gallery = pages[site / "gallery" / "index.html"]
    notebooks = sorted((site / "notebooks").glob("*.html"))
    assert len(words(gallery)) > 50
    for notebook in notebooks:
        assert words(pages[notebook]) <= words(gallery), notebook.name
        assert any(target.startswith(f"../notebooks/{notebook.name}#") for _, target in targets(gallery))
    assert words(pages[site / "docs" / "atlas.html"]) <= words(pages[site / "notebooks" / "10_verdict.html"])


def test_a_link_leads_to_the_site_else_to_the_repository_else_nowhere(monkeypatch, tmp_path):
    specification = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    conf = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(conf)
    monkeypatch.setattr(conf, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    page, source, notebook = tmp_path / "docs" / "page.md", tmp_path / "code.py", tmp_path / "docs" / "a.ipynb"
    page.write_text("[a](../README.md#b-c) [`d`](a.ipynb#E,-f?) [g](../code.py) [h](gone.md) [i](https://j.k)\n")
    source.touch()
    pages, repository = [page, notebook, tmp_path / "README.md"], "https://github.com/o/n"
    for address, g in ((None, "g"), ((None, repository), f"[g]({repository}/blob/HEAD/code.py)")):
        monkeypatch.setattr(conf, "ADDRESS", address)
        adapted = conf.adapted(page, pages)
        assert adapted == f"[a](../index.md#b-c) [`d`](a.ipynb#e-f) {g} [h](gone.md) [i](https://j.k)\n"


def test_a_dead_link_fails_the_build(tmp_path):
    for file in ("docs/conf.py", "docs/site.css", "docs/atlas.md", "CITATION.cff"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "README.md").write_text("# Here\n[there](docs/atlas.md), [gone](docs/gone.md), [nowhere](#nowhere)\n")
    done = build(tmp_path / "docs", tmp_path)
    assert done.returncode != 0
    assert "'docs/gone.md'" in done.stderr
    assert "'nowhere'" in done.stderr


@pytest.fixture
def look(site, browser):
    """Open a page of the site from disk; the page, and what the browser asked for or complained of."""
    opened = []

    def go(name, scheme="light", size=TELEPHONE):
        context = browser.new_context(viewport=size, color_scheme=scheme)
        page, complaints = context.new_page(), []
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or complaints.append(asked.url))
        page.goto((site / name).as_uri())
        opened.append(context)
        return page, complaints

    yield go
    for context in opened:
        context.close()


def test_no_page_is_wider_than_a_telephone(look, pages):
    page, complaints = look("index.html")
    for file in pages:
        page.goto(file.as_uri())
        assert page.evaluate("document.scrollingElement.scrollWidth") <= TELEPHONE["width"], file.name
        assert page.evaluate(WIDE) == [], file.name
    assert complaints == []


def test_the_search_finds_a_word_from_disk(look):
    page, complaints = look("index.html", size=LAPTOP)
    page.get_by_placeholder("Search").first.fill("denormals")
    page.keyboard.press("Enter")
    page.locator("#search-results a").get_by_text("Settings", exact=True).first.click()
    assert "denormals" in page.locator("article").inner_text()
    assert complaints == []


@pytest.mark.parametrize("size", [TELEPHONE, LAPTOP], ids=["telephone", "laptop"])
def test_a_keyboard_reaches_the_content_first_and_sees_where_it_is(size, look):
    page, _ = look("docs/verdict.html", size=size)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent.trim()") == "Skip to content"
    for _ in range(12):
        page.keyboard.press("Tab")
        page.wait_for_function(SEEN, timeout=3000)
    page.goto(page.url.partition("#")[0])
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate(f"document.querySelector('article').contains(document.activeElement) && ({SEEN})()")


def test_dark_pages_are_dark_and_pictures_stay_readable(look):
    brightness = (
        "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    )
    for scheme, dark in (("light", False), ("dark", True)):
        page, _ = look("index.html", scheme)
        assert (page.evaluate(brightness) < 384) is dark
        picture = "document.querySelector('article img[src*=answer]')"
        assert page.evaluate(f"getComputedStyle({picture}).backgroundColor") == "rgb(255, 255, 255)"
