"""The page of a verdict: its content and its order, in a file and in a notebook."""

import html.parser
import math

import numpy as np
import pandas as pd
import pytest

import gpulab as gl
from tests.stats._helpers import BASE, TINY, WIDE, logged, runs_of, shifted

LEVELS = {
    "cpu": BASE,
    "cuda": [*shifted(0.3)[:8], math.inf, math.inf],
    "mps": shifted(TINY),
    "xpu": shifted(WIDE)[:4],
}


class Page(html.parser.HTMLParser):
    """The elements of a page in their order, each with its text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(str(text))

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.elements.append(element)
        if tag not in ("meta", "img", "source", "wbr", "br", "link"):
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag, "every element is closed"

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, look=""):
        named = [element for element in self.elements if element["tag"] == tag]
        return [
            element for element in named if not look or look in (element.get("class") or "").split()
        ]

    def place(self, tag, look=""):
        return self.elements.index(self.all(tag, look)[0])


def saved(verdict, folder, **options):
    verdict.save(folder / "page.html", **options)
    return Page((folder / "page.html").read_text(encoding="utf-8"))


def test_verdict_page_says_what_was_compared_decides_and_shows(tmp_path):
    verdict = gl.verdict(runs_of(LEVELS, torch="2.15.0", gpulab="1.0", machine="Some CPU"))
    page = saved(verdict, tmp_path)
    titles = [element["text"] for element in (*page.all("title"), *page.all("h1"))]
    assert titles == ["Verdict on final loss: cuda, mps, xpu against cpu"] * 2
    (about,) = page.all("p", "faint")
    for known in (
        "34 runs, 10 seeds, by setting",
        f"{pd.Timestamp.now():%B %Y}",
        f"gpulab {gl.__version__}",
        "runs: torch 2.15.0, gpulab 1.0",
        "Some CPU",
    ):
        assert about["text"].count(known) == 1, known
    order = [
        page.place("h1"),
        page.place("p", "ga-answer"),
        page.place("table"),
        page.place("figure"),
        page.place("h2"),
    ]
    assert order == sorted(order)
    (answer,) = page.all("p", "ga-answer")
    assert (
        answer["text"]
        == "different 3 levels of setting against cpu: 1 different, 1 inconclusive, 1 equivalent."
    )
    rows = [
        [" ".join(cell["text"].split()) for cell in cells_of(page, row)]
        for row in page.all("tr")[2:]
    ]
    assert [row[:3] for row in rows] == [
        ["cuda", "different", "8"],
        ["mps", "equivalent", "10"],
        ["xpu", "inconclusive", "4 of 10"],
    ]
    assert rows[0][3] == "+0.3"
    assert rows[0][-1] == "2 (0)"
    text = page.all("body")[0]["text"]
    assert "Missing: seeds 4, 5, 6, 7, 8 and 9 under xpu." in text
    assert "nan" not in text


def cells_of(page, row):
    start = page.elements.index(row) + 1
    later = [
        place for place in range(start, len(page.elements)) if page.elements[place]["tag"] == "tr"
    ]
    inside = page.elements[start : later[0] if later else None]
    return [element for element in inside if element["tag"] == "td"]


def test_verdict_page_of_one_level_begins_with_its_sentence_and_names_the_source(tmp_path):
    logged().to_csv(tmp_path / "logs.csv", index=False)
    frame = gl.stats.read_table(tmp_path / "logs.csv")
    page = saved(gl.verdict(frame, "val_loss", "optimizer", last="epoch"), tmp_path)
    assert page.all("h1")[0]["text"] == "Verdict on val loss: sgd against adam"
    assert page.all("p", "faint")[0]["text"].startswith(str(tmp_path / "logs.csv"))
    assert "With sgd the val loss is" in page.all("p", "ga-answer")[0]["text"]
    remarks = [element["text"] for element in page.all("li")]
    (remark,) = remarks
    assert remark.startswith("From 216 rows, the last epoch with val_loss")
    assert remark.endswith("epoch 5.")


def test_verdict_source_of_a_store_or_an_experiment_is_its_folder(tmp_path):
    frame = gl.Experiment(lambda seed: 0.1 * seed, ["cpu", "cpu:threads=1"], 2, store=tmp_path).run(
        progress=False
    )
    assert gl.verdict(frame).source == str(tmp_path)
    assert gl.verdict(gl.runs(tmp_path)).source == str(tmp_path)


def test_verdict_page_of_the_reference_alone_has_the_given_title(tmp_path):
    page = saved(gl.verdict(runs_of({"cpu": BASE})), tmp_path, title="Mine")
    assert [element["text"] for element in page.all("h1")] == ["Mine"]
    assert "there is nothing to compare" in page.all("p", "ga-answer")[0]["text"]
    assert not page.all("figure")
    assert not page.all("table")


def test_verdict_page_and_figure_write_truth_values_with_their_factor(tmp_path):
    runs = runs_of(LEVELS).query("setting in ('cpu', 'mps')")
    verdict = gl.verdict(runs.assign(amp=np.array(runs.setting == "mps")), factor="amp")
    page = saved(verdict, tmp_path)
    assert page.all("h1")[0]["text"] == "Verdict on final loss: amp=True against amp=False"
    ticks = [
        tick.get_text()
        for axes in verdict.plot().figure.axes[:1]
        for tick in axes.get_yticklabels()
    ]
    assert ticks == ["amp=False", "amp=True"]


def test_verdict_in_a_notebook_shows_title_decision_table_figure_and_words(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    verdict = gl.verdict(runs_of(LEVELS))
    verdict._ipython_display_()
    first, picture, *_, last = shown
    assert first["text/plain"] == str(verdict)
    page = Page(first["text/html"])
    assert page.all("h3")[0]["text"] == "Verdict on final loss: cuda, mps, xpu against cpu"
    assert len(page.all("table")) == 1
    assert "image/png" in picture
    assert "In words" in Page(last["text/html"]).all("h2")[0]["text"]


@pytest.mark.parametrize("width", [7.2, 3.9])
def test_verdict_figure_that_is_narrow_has_one_panel_below_the_other(width):
    verdict = gl.verdict(runs_of(LEVELS))
    left, right = verdict._draw(width=width).figure.axes
    boxes = [axes.get_subplotspec() for axes in (left, right)]
    assert (boxes[0].rowspan.start != boxes[1].rowspan.start) == (width < 7)
