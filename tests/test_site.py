"""The site of `make site`, opened from disk: its links, its words, its width on a telephone, its search; the slides.

Without the extra `site` all of this is skipped, and without a browser what needs one.
"""

import html.parser
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import companion
import gpulab as gl

for library in ("sphinx", "myst_nb", "furo", "sphinx_revealjs"):
    pytest.importorskip(library, reason=f"{library} is not installed: the site is not built (pip install gpulab[site])")

pytestmark = pytest.mark.slow("builds the site")

ROOT = Path(__file__).parent.parent
TELEPHONE = {"width": 390, "height": 844}
LAPTOP = {"width": 1280, "height": 800}
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


def test_every_public_name_has_an_entry(site, pages):
    for package in [gl, companion, *(getattr(gl, name) for name in gl.PACKAGES)]:
        anchors = pages[site / "reference" / f"{package.__name__}.html"].anchors
        for name in {*package.__all__} - {*gl.PACKAGES}:
            assert {f"{package.__name__}.{name}", f"module-{package.__name__}.{name}"} & anchors, name


def test_every_figure_has_words(pages):
    for file, page in pages.items():
        assert all((attributes.get("alt") or "").strip() for tag, attributes in page.elements if tag == "img"), file


@pytest.fixture
def look(site, browser):
    """Open a page of the site from disk; the page, and what the browser asked for or complained of."""
    opened = []

    def go(name, size=TELEPHONE):
        context = browser.new_context(viewport=size)
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


# --- the slides: what stands on them can be read from the last row ------------------------------------------

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECTOR = {"width": 1280, "height": 720}
# Of the slide in view: what stands outside of the picture, is smaller than SMALLEST, or has no words.
SMALLEST = 24
FAULTS = """smallest => {
    const slide = Reveal.getCurrentSlide(), found = [];
    for (const part of slide.querySelectorAll("*")) {
        if (part.closest("math, .anchor-link") || !part.getClientRects().length) continue;
        const box = part.getBoundingClientRect(), name = part.localName + " " + (part.innerText ?? "").slice(0, 60);
        if (box.bottom > innerHeight || box.right > innerWidth + 1 || part.scrollWidth > part.clientWidth + 1 &&
            part.clientWidth && getComputedStyle(part).display != "inline") found.push("outside: " + name);
        if (part.localName == "img" && !part.alt) found.push("no words: " + name);
        const written = [...part.childNodes].some(node => node.nodeType == 3 && node.data.trim());
        if (written && parseFloat(getComputedStyle(part).fontSize) < smallest) found.push("small: " + name);
    }
    const text = [...slide.querySelectorAll("p")].map(part => part.innerText).join(" ");
    if (!slide.querySelector("img, table, pre") && !/[.?!]$/.test(text.trim())) found.push("no sentence: " + text);
    if (/\\d+%\\|/.test(slide.innerText)) found.push("a progress bar");
    const words = [...slide.querySelectorAll("p, li, h2")].map(part => part.innerText).join(" ");
    if (words.includes("$")) found.push("a formula? " + words);
    return found.map(fault => location.hash + " " + fault);
}"""


@pytest.fixture(scope="module")
def decks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    subprocess.run([sys.executable, ROOT / "docs" / "slides.py", folder], check=True, timeout=300)
    return folder


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_slides_can_be_read(notebook, decks, browser):
    page, asked, complaints, faults = browser.new_page(viewport=PROJECTOR), [], [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((decks / f"{notebook.stem}.slides.html").as_uri())
    page.wait_for_function("window.Reveal && Reveal.isReady()")
    total = page.evaluate("Reveal.getTotalSlides()")
    for number in range(total):
        page.evaluate("number => Reveal.slide(number, 0, 0)", number)  # with its answer, where it has one
        faults += page.evaluate(FAULTS, SMALLEST)
        file = ROOT / "build" / "screenshots" / "slides" / f"{notebook.stem}-{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=file)
    page.close()
    assert 6 <= total <= 20
    assert f'href="{notebook.stem}.slides.html"' in (decks / "index.html").read_text(encoding="utf-8")
    assert faults == []
    assert complaints == []
    assert all(url.startswith(("file:", "data:")) for url in asked)
