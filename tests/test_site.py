"""The site that `make site` builds, opened from disk: links and alternative texts; the slides.

These tests are skipped if the extra `site` is not installed.
"""

import html.parser
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

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


def test_slides_exist_for_every_notebook(slides):
    decks = {"single", *(file.stem for file in (ROOT / "notebooks").glob("*.ipynb"))}
    written = list(slides.glob("*.slides.html"))
    assert all("reveal" in file.read_text(encoding="utf-8") for file in written)
    assert decks == {file.name.removesuffix(".slides.html") for file in written}
