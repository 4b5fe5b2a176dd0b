"""The slides of the notebooks, in Chromium: what stands on them can be read from the last row."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "sphinx_revealjs", reason="reveal.js is not installed: no slides are made (pip install gpulab[site])"
)

pytestmark = pytest.mark.slow("starts a browser")

ROOT = Path(__file__).parents[1]
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
    if (!slide.querySelector("img, table, pre") && slide.innerText.split(/\\s+/).length < 2) found.push("empty");
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
    for number in range(total := page.evaluate("Reveal.getTotalSlides()")):
        faults += page.evaluate(FAULTS, SMALLEST)
        file = ROOT / "build" / "screenshots" / "slides" / f"{notebook.stem}-{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=file)
        page.evaluate("Reveal.next()")
    page.close()
    assert total > 10
    assert f'href="{notebook.stem}.slides.html"' in (decks / "index.html").read_text(encoding="utf-8")
    assert faults == []
    assert complaints == []
    assert all(url.startswith(("file:", "data:")) for url in asked)
