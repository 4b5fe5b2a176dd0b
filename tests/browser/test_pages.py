"""Pages in a real browser, at desktop and phone width: no errors, no missing pictures, no broken
links.
"""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import pandas as pd
import pytest
import torch

import gpulab as gl
from companion.report import write_report
from companion.run import Result
from gpulab.picture import DPI
from tests.browser._helpers import OpenedPage

pytestmark = pytest.mark.slow("opens pages in a browser")

ROOT = Path(__file__).parents[2]
DESKTOP, PHONE = 1280, 390  # pixels
SCREENS = [(1280, 800), (1024, 768), (1920, 1080), (1280, 720)]  # of a laptop and of projectors
READABLE = 0.9  # pixels per point of a figure's text, at least: 7 pixels for text of 8 points
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The browser must not look for updates or open connections by itself.
ARGUMENTS = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync"]
AS_ROOT = ["--no-sandbox"]  # Chromium refuses to start in its sandbox as root
# Steps through a deck, including answers, and lists the slides that do not fit in the window, or
# whose figure is too small to be read. A figure has `DPI` pixels per inch, of 72 points.
UNREADABLE_SLIDES = """([dpi, readable]) => {
    const unreadable = new Set();
    const isShown = element => {
        const width = element.getBoundingClientRect().width;
        return width > 0 && !element.closest("aside, math, .fragment:not(.visible)");
    };
    const isOutside = element => {
        const box = element.getBoundingClientRect();
        return box.left < -1 || box.right > innerWidth + 1 || box.bottom > innerHeight + 1;
    };
    const isTooSmall = picture => {
        const box = picture.getBoundingClientRect();
        const scale = Math.min(
            box.width / picture.naturalWidth, box.height / picture.naturalHeight);
        return scale * dpi / 72 < readable;
    };
    for (let isLast = false; !isLast; Reveal.next()) {
        isLast = Reveal.isLastSlide() && !Reveal.availableFragments().next;
        const slide = Reveal.getCurrentSlide();
        const shown = [...slide.querySelectorAll("*")].filter(isShown);
        const name = `${Reveal.getIndices().h + 1}: ${slide.querySelector("h2").textContent}`;
        if (shown.some(isOutside))
            unreadable.add(`${name}: does not fit`);
        if (shown.some(element => element.tagName == "IMG" && isTooSmall(element)))
            unreadable.add(`${name}: figure too small`);
    }
    return [...unreadable];
}"""
FILL_A_SLIDE = """() => document.querySelectorAll(".slides section")[2].insertAdjacentHTML(
    "beforeend", "<div style='flex: none; height: 900px'>much</div>")"""
SHRINK_A_FIGURE = "() => { document.querySelector('.slides img').style.flex = '0 0 90px'; }"
PAGES = [
    "report",
    "report_of_all_notebooks",
    "report_of_an_audit",
    "report_of_a_verdict",
    "front_page",
    "deck",
]
PICTURE_CHANGED = "source => document.querySelector('.widget-html img').src !== source"


@pytest.fixture(scope="module")
def browser():
    """The installed Chromium or Chrome, or the browser that `GPULAB_BROWSER` names."""
    missing = "Playwright is not installed: pip install playwright"
    api = pytest.importorskip("playwright.sync_api", reason=missing)
    installed = filter(None, map(shutil.which, BROWSERS))
    executable = os.environ.get("GPULAB_BROWSER") or next(installed, None)
    if executable is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed, and GPULAB_BROWSER is not set")
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    with api.sync_playwright() as playwright:
        arguments = [*ARGUMENTS, *(AS_ROOT if is_root else [])]
        opened = playwright.chromium.launch(executable_path=executable, args=arguments)
        yield opened
        opened.close()


# --- the pages ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a notebook that this fixture executes."""
    folder = tmp_path_factory.mktemp("build")
    command = [sys.executable, "-m", "companion", "--profile", "smoke", "--only", "10"]
    command += ["--output", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return (folder / "report" / "index.html").as_uri()


@pytest.fixture(scope="module")
def report_of_all_notebooks(tmp_path_factory):
    """The report of all notebooks as committed, with their figures."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "notebooks").mkdir()
    results = []
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        copy = shutil.copy(notebook, folder / "notebooks")
        results.append(Result(Path(copy), seconds=0, peak_bytes=0, error=None))
    return write_report(results, folder, "quick").as_uri()


@pytest.fixture(scope="module")
def report_of_an_audit(tmp_path_factory):
    """The report of an audit with a long setting, a long line of code and long names."""
    name = "a_module_whose_name_is_longer_than_a_phone_is_wide"
    net = torch.nn.Sequential(
        OrderedDict([(name, torch.nn.Linear(4, 3)), ("last", torch.nn.Linear(3, 2))])
    )

    def step(setting):
        inputs = torch.ones(5, 4, dtype=setting.dtype)
        loss_with_a_name_as_long_as_this = (
            net.to(setting.dtype)(inputs).square().mean() + (0 * inputs).square().sum()
        )
        loss_with_a_name_as_long_as_this.backward()

    file = tmp_path_factory.mktemp("audit") / "report.html"
    gl.audit(
        step,
        "cpu:threads=1",
        "cpu:threads=1,denormals=off,emulate=tf32,order=pairwise",
        progress=False,
    ).save(file)
    return file.as_uri()


@pytest.fixture(scope="module")
def report_of_a_verdict(tmp_path_factory):
    """The page of a verdict with long settings, a diverged run and missing seeds."""
    settings = [
        "cpu",
        "cpu:threads=1,denormals=off,emulate=tf32,order=pairwise",
        "cuda:tf32=on,deterministic=on",
    ]
    runs = [
        {"setting": name, "seed": seed, "final_loss": seed + n}
        for n, name in enumerate(settings)
        for seed in range(8)
    ]
    runs[10]["final_loss"] = float("inf")
    file = tmp_path_factory.mktemp("verdict") / "report.html"
    gl.verdict(pd.DataFrame(runs[:-2])).save(file)
    return file.as_uri()


@pytest.fixture(scope="module")
def front_page(site):
    return (site / "index.html").as_uri()


@pytest.fixture(scope="module")
def deck(slides):
    return (slides / "05_the_anomaly.slides.html").as_uri()


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("name", PAGES)
def test_page_in_a_browser_is_whole(browser, request, name, width):
    with OpenedPage(browser, request.getfixturevalue(name), width) as page:
        assert page.tab.locator("h1, h2").first.is_visible()
        assert page.tab.evaluate("document.images.length") > 0
        assert page.faults() == []


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: f"{screen[0]}x{screen[1]}")
def test_slides_fit_into_their_window(browser, slides, screen):
    decks = sorted(slides.glob("*.slides.html"))
    assert len(decks) > 10
    unreadable = {}
    for deck in decks:
        with OpenedPage(browser, deck.as_uri(), *screen) as page:
            unreadable[deck.name] = page.tab.evaluate(UNREADABLE_SLIDES, [DPI, READABLE])
            assert page.tab.evaluate("Reveal.isLastSlide()")
            assert page.faults() == []
    assert {name: found for name, found in unreadable.items() if found} == {}


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: f"{screen[0]}x{screen[1]}")
@pytest.mark.parametrize(
    ("change", "expected"), [(FILL_A_SLIDE, "does not fit"), (SHRINK_A_FIGURE, "figure too small")]
)
def test_slides_that_cannot_be_read_are_found(browser, deck, screen, change, expected):
    with OpenedPage(browser, deck, *screen) as page:
        page.tab.evaluate(change)
        unreadable = page.tab.evaluate(UNREADABLE_SLIDES, [DPI, READABLE])
    assert [slide.rpartition(": ")[2] for slide in unreadable][:1] == [expected]
    assert len({slide.partition(":")[0] for slide in unreadable}) == 1


def test_speaker_notes_open_in_a_second_window(browser, slides):
    address = (slides / "single.slides.html").as_uri()
    with OpenedPage(browser, address, DESKTOP) as page:
        page.tab.evaluate("Reveal.slide(1)")
        with page.tab.expect_popup() as opened:
            page.tab.keyboard.press("s")
        notes = opened.value.locator(".speaker-controls-notes .value")
        notes.get_by_text("hands up: who believes it?").wait_for(state="visible")


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_explorer_page_is_whole_and_a_slider_changes_its_picture(browser, explorer_server, width):
    with OpenedPage(browser, explorer_server.address("saddle"), width) as page:
        slider = page.tab.locator(".widget-slider", has_text="turn").get_by_role("slider")
        slider.wait_for(state="visible")
        picture = page.tab.locator(".widget-html img")
        picture.wait_for(state="visible")
        source, angle = picture.get_attribute("src"), float(slider.get_attribute("aria-valuenow"))
        slider.press("ArrowRight")
        page.tab.wait_for_function(PICTURE_CHANGED, arg=source)
        assert float(slider.get_attribute("aria-valuenow")) > angle
        assert page.faults() == []


# --- the checks find what they look for -----------------------------------------------------------

HEAD = """<!doctype html><meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">"""
WHOLE = "<h1 id='here'>A page</h1> <a href='#here'>here</a> <a href='other.html#there'>there</a>"
# For each case: what is added to the page, and how the faults begin that this should cause.
PLANTED = {
    "nothing": ("", []),
    "error": ("<script>console.error('planted')</script>", ["console error: planted"]),
    "exception": ("<script>throw new Error('planted')</script>", ["exception: planted"]),
    "missing picture": ("<img src='none.png'>", ["request failed: ", "missing picture: <img"]),
    "unreadable picture": ("<img src='data:image/png;base64,AAAA'>", ["missing picture: <img"]),
    "missing style": ("<link rel='stylesheet' href='none.css'>", ["request failed: "]),
    "style of another host": (
        "<link rel='stylesheet' href='https://example.invalid/a.css'>",
        ["request to another host: https://example.invalid/a.css"],
    ),
    "link to no page": ("<a href='none.html'>none</a>", ["broken link: "]),
    "link to no anchor": ("<a href='#none'>none</a>", ["broken link: "]),
    "link to no anchor elsewhere": ("<a href='other.html#none'>none</a>", ["broken link: "]),
    "wide page": ("<div style='width: 500px'>wide</div>", ["scrolls sideways: "]),
}


@pytest.fixture
def folder_server(tmp_path):
    """The address of a server that serves a temporary folder."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("is_served", [False, True], ids=["file", "server"])
@pytest.mark.parametrize("planted", PLANTED)
def test_opened_page_finds_every_planted_fault(
    browser, folder_server, tmp_path, planted, is_served
):
    text, expected = PLANTED[planted]
    (tmp_path / "index.html").write_text(f"{HEAD}{WHOLE}{text}")
    (tmp_path / "other.html").write_text("<!doctype html><h1 id='there'>Another page</h1>")
    address = folder_server if is_served else tmp_path.as_uri()
    with OpenedPage(browser, f"{address}/index.html", PHONE) as page:
        faults = page.faults()
    for start in expected:
        assert any(fault.startswith(start) for fault in faults), faults
    assert bool(faults) == bool(expected), faults
