"""The page of an audit: its layout, the escaping of all texts, and the display in a notebook."""

import dataclasses
import html.parser
import math

import pandas as pd
import pytest
import torch
from torch import nn

import gpulab as gl
from gpulab.audits import _page as page
from gpulab.audits._findings import FIELDS, Finding
from gpulab.audits._page import AnswerPage
from tests.audits._helpers import audited, with_a_function

HOSTILE = (
    "</p><script>alert(1)</script>\"'><img src=x"
    " onerror=alert(1)>{{7*7}}<style>*{display:none}</style>"
)
PASSPORT = {
    "cpu": {"model": "Some CPU"},
    "gpus": [{"name": "Some GPU"}],
    "software": {"gpulab": "1.0", "torch": "2.11"},
}
ELSEWHERE = PASSPORT | {"cpu": {"model": "Another CPU"}}


class Page(html.parser.HTMLParser):
    """The elements of a page with their attributes and texts, and all text except the styles."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""
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
        if not self.open or self.open[-1]["tag"] != "style":
            self.text += data

    def all(self, tag, look=""):
        named = [element for element in self.elements if element["tag"] == tag]
        return [
            element for element in named if look in (element.get("class") or "").split() or not look
        ]


class Made(AnswerPage):
    """A result with given findings and a given table."""

    def __init__(
        self, *findings, titles=("cpu", "cuda"), passports=(PASSPORT, PASSPORT), table=None
    ):
        self.findings, self.titles, self.passports = list(findings), titles, passports
        self.table = operations(1) if table is None else table

    @property
    def headline(self):
        return (
            f"{self.titles[0]} against {self.titles[1]}: {len(self.findings)} × {self.kind}. More"
            " was said. And more."
        )

    def _rows(self):
        return page.operation_rows(self.table, self.findings, self.titles)


def finding(kind="mismatch", operation="mul", line="net.py:12: y = 2 * x", **others):
    known = {"setting": "cuda", "phase": "forward", "module": "", "ratio": 3.0, "share": 0.5}
    known |= {"detail": "seen so", "advice": "mend it"}
    return Finding(kind=kind, operation=operation, line=line, **known | others)


def operations(count, **columns):
    """Return a table with the columns of `Audit.table`."""
    names = {"phase": "forward", "module": "", "line": "", "kind": "rounding", "same_bits": False}
    numbers = dict.fromkeys(
        ("error_a", "bound_a", "ratio_a", "error_b", "bound_b", "ratio_b", "difference"), 0.5
    )
    rows = {"operation": [f"op{n}" for n in range(count)], **names, **numbers, **columns}
    return pd.DataFrame(rows)


def saved(answer, folder, **options):
    answer.save(folder / "page.html", **options)
    return Page((folder / "page.html").read_text(encoding="utf-8"))


def heads(shown):
    """Return the texts of the cards up to the advice."""
    return [
        " ".join(card["text"].split("What to do")[0].split())
        for card in shown.all("details", "ga-card")
    ]


@pytest.fixture(scope="module")
def of_two_layers():
    """Return an audit with a finding of reduced precision and the user's line."""
    return audited(with_a_function(lambda h: h.tanh()), "cpu", "cpu:emulate=bfloat16")


# --- what stands where ----------------------------------------------------------------------------


def test_audit_page_has_title_step_settings_date_versions_and_machine(of_two_layers, tmp_path):
    of_two_layers.step_name = "train.py:step"
    shown = saved(of_two_layers, tmp_path)
    titles = [element["text"] for element in (*shown.all("title"), *shown.all("h1"))]
    assert titles == ["Audit: cpu against cpu:emulate=bfloat16"] * 2
    (about,) = shown.all("p", "faint")
    here = gl.passport()
    for known in (
        "train.py:step",
        "CPU against CPU, emulating bfloat16",
        f"gpulab {gl.__version__}, torch {here['software']['torch']}",
        here["cpu"]["model"],
        f"{pd.Timestamp.now():%B %Y}",
    ):
        assert about["text"].count(known) == 1, known
    mine = saved(of_two_layers, tmp_path, title="My own")
    assert [element["text"] for element in (*mine.all("title"), *mine.all("h1"))] == ["My own"] * 2


def test_audit_page_names_machines_separately_where_they_differ(tmp_path):
    def about(*passports, titles=("cpu", "cuda")):
        (line,) = saved(Made(finding(), titles=titles, passports=passports), tmp_path).all(
            "p", "faint"
        )
        return line["text"]

    assert about(PASSPORT, PASSPORT).endswith(
        "gpulab 1.0, torch 2.11\N{NO-BREAK SPACE}· Some CPU and Some GPU"
    )
    assert about(PASSPORT, ELSEWHERE, titles=("cpu", "cpu (there)")).endswith(
        "gpulab 1.0, torch 2.11\N{NO-BREAK SPACE}· cpu: Some CPU\N{NO-BREAK SPACE}· cpu (there):"
        " Another CPU"
    )
    newer = PASSPORT | {"software": {"gpulab": "1.0", "torch": "2.12"}}
    assert "cuda: Some GPU, gpulab 1.0, torch 2.12" in about(PASSPORT, newer)
    assert "unknown machine" in about({}, PASSPORT), (
        "a trace from someone else may have no passport"
    )


@pytest.mark.parametrize(
    ("kinds", "badge"),
    [
        (["mismatch", "rounding"], "Fault"),
        (["reduced precision", "not finite"], "Fault"),
        (["reduced precision", "rounding"], "Explained"),
        (["nondeterminism"], "Explained"),
        (["rounding"], "No fault"),
    ],
)
def test_audit_page_answer_is_a_badge_and_one_sentence(kinds, badge):
    shown = Page(Made(*map(finding, kinds)).words())
    (answer,) = shown.all("p", "ga-answer")
    assert answer["text"] == f"{badge} {len(kinds)} × {kinds[0]}."
    assert "More was said. And more." in shown.text
    assert ("First finding" in shown.text) == (badge != "No fault")


def test_audit_page_findings_are_cards_in_their_order_with_the_first_open():
    shown = Page(
        Made(
            finding(share=0.53, setting="cuda", module="encoder.1"),
            finding("nondeterminism", "bmm", line="", module="encoder.2", share=0.004),
            finding("overwritten", "add", line="", share=math.nan, has_bound=False),
            finding("rounding", "mm", line="", ratio=0.051, advice="nothing"),
        ).words()
    )
    assert [("open" in card) for card in shown.all("details", "ga-card")] == [
        True,
        False,
        False,
        False,
    ]
    first, second, third, last = heads(shown)
    assert first == "mismatch mul (forward) at net.py:12 53% of the difference y = 2 * x Seen so."
    assert second.startswith(
        "nondeterminism bmm (forward) in module encoder.2 less than 1% of the difference"
    )
    assert third.startswith("overwritten add (forward) could explain all")
    assert last.startswith("rounding mm (forward) 0.05 of what rounding explains")
    assert [bar["style"] for bar in shown.all("span") if "style" in bar] == [
        "width: 53%",
        "width: 0%",
    ]
    assert [code["text"] for code in shown.all("pre")] == ["y = 2 * x"]
    assert shown.text.count("What to do:") == 3, "rounding needs no action"
    (facts, *_) = shown.all("dl")
    assert facts["text"].split("\n") == [
        "",
        "settingcuda",
        "phaseforward",
        "moduleencoder.1",
        "own error3.00 times what rounding explains",
        "",
    ]


def test_audit_page_findings_of_one_kind_and_line_are_one_card():
    same = [finding(operation=name, module="0") for name in ("mul", "add", "add")]
    other = finding(operation="sub", detail="something else")
    shown = Page(
        Made(*same, other, finding(line="net.py:13: z = y"), finding("overwritten")).words()
    )
    assert len(heads(shown)) == 3
    assert [entry["text"] for entry in shown.all("li")] == [
        "2 × add (forward) in 0",
        "sub (forward): something else",
    ]
    assert "3 more operations in this line" in shown.text


def test_audit_page_folds_many_findings():
    shown = Page(Made(*(finding(line=f"net.py:{n}: y") for n in range(40))).words())
    assert len(heads(shown)) == 40
    assert "28 more findings" in shown.text


def test_audit_page_advice_names_code_by_its_place_and_marks_settings_as_code():
    text = "see why net.py:12: y = 2 * x is another under cuda: it is"
    shown = Page(Made(finding(advice=text)).words())
    assert "What to do: See why net.py:12 is another under cuda: it is." in shown.text
    assert "cuda" in [code["text"] for code in shown.all("code")]


def names_of_rows(shown):
    return [cell["text"] for cell in shown.all("td") if cell["text"].startswith("op")]


def test_audit_page_table_has_findings_first_and_then_the_largest_ratios():
    kinds = ["rounding", "reduced precision", "rounding", "mismatch", "rounding"]
    ratios = [0.1, 900.0, math.nan, math.nan, 0.7]
    table = operations(5, kind=kinds, ratio_b=ratios, ratio_a=0.01)
    found = [
        finding("mismatch", "op3", ""),
        finding("reduced precision", "op1", ""),
        finding("rounding", "op2", ""),
    ]
    shown = Page(Made(*found, table=table).words())
    assert names_of_rows(shown) == [f"op{n} (forward)" for n in (3, 1, 4, 0, 2)]


def test_audit_page_table_rounds_numbers_to_sensible_digits():
    table = operations(
        1, error_a=1.26e-7, ratio_a=0.0512, error_b=2e-3, ratio_b=12345.6, difference=math.nan
    )
    shown = Page(Made(finding(), table=table).words())
    assert [cell["text"] for cell in shown.all("td", "ga-number")] == [
        "1.3e-07",
        "0.05",
        "2.0e-03",
        "12,346",
        "–",
    ]
    assert [cell["text"] for cell in shown.all("td", "ga-strong")] == ["12,346"]
    texts = [head["text"] for head in shown.all("th")]
    assert texts[:5] == [
        "operation",
        "finding",
        "own error undercpu",
        "own error undercuda",
        "difference",
    ]
    equal = Page(
        Made(
            finding(), table=table.assign(same_bits=True, module="encoder", line="net.py:12: y")
        ).words()
    )
    assert [cell["text"] for cell in equal.all("td")][-3:] == ["same bits", "encoder", "net.py:12"]


def test_audit_page_table_folds_rows_after_the_twentieth():
    shown = Page(Made(finding("rounding"), table=operations(25)).words())
    assert len(names_of_rows(shown)) == 25
    (fold,) = [entry for entry in shown.all("details") if entry["text"].startswith("5 more rows")]
    assert fold["text"].count("(forward)") == 5


def test_audit_page_table_of_a_compiled_audit_has_wrong_results_first():
    numbers = {
        "difference": [0.1, 0.5, 0.2, 0.0],
        "tolerance": [1.0, 1.0, 0.1, 1.0],
        "error": 0.25,
        "plain_error": 0.5,
    }
    flags = {"wrong": [False, False, True, False], "finite": [True, True, True, False]}
    rows = page.result_rows(pd.DataFrame({"result": ["a", "b", "c", "d"], **numbers, **flags})).rows
    shown = [[Page(cell.text).text for cell in row] for row in rows]
    assert shown == [
        ["c", "wrong", "2.0e-01", "2.00", "2.5e-01", "5.0e-01"],
        ["d", "not finite", "0", "0", "2.5e-01", "5.0e-01"],
        ["b", "", "5.0e-01", "0.50", "2.5e-01", "5.0e-01"],
        ["a", "", "1.0e-01", "0.10", "2.5e-01", "5.0e-01"],
    ]


def test_audit_page_of_a_compiled_audit_has_the_same_form(tmp_path):
    step = gl.Step(
        nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.linspace(-1, 1, 12).reshape(4, 3)
    )
    shown = saved(audited(step, b="cpu:compile=aot_eager"), tmp_path)
    assert [element["text"] for element in shown.all("h1")] == [
        "Audit: cpu against cpu:compile=aot_eager"
    ]
    assert [element["text"] for element in shown.all("h2")] == ["Findings", "Results"]
    assert "No fault Identical to the last bit." in shown.text
    assert not shown.all("figure")


# --- safety ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in FIELDS if name not in ("size", "share", "ratio")]
)
@pytest.mark.parametrize("is_first", [True, False])
def test_audit_page_escapes_every_field_of_a_finding(name, is_first):
    hostile = dataclasses.replace(finding(), **{name: HOSTILE})
    kind = {"kind": hostile.kind} if name != "detail" else {}
    shown = Page(Made(hostile if is_first else finding(**kind), hostile).words())
    assert_harmless(shown, styles=1)


@pytest.mark.parametrize("name", ["operation", "phase", "module", "line", "kind"])
def test_audit_page_escapes_every_text_of_the_table(name):
    assert_harmless(
        Page(Made(finding(), table=operations(2).assign(**{name: HOSTILE})).words()), styles=1
    )


def test_audit_page_escapes_titles_machines_and_step(tmp_path):
    hostile = {
        "cpu": {"model": HOSTILE},
        "gpus": [],
        "software": {"gpulab": HOSTILE, "torch": HOSTILE},
    }
    answer = Made(finding(), titles=(HOSTILE, "b" + HOSTILE), passports=(hostile, PASSPORT))
    answer.step_name = HOSTILE
    for options in ({}, {"title": HOSTILE}):
        shown = saved(answer, tmp_path, **options)
        assert_harmless(shown, styles=1)
        assert shown.text.count("{{7*7}}") > 8
    results = operations(1).assign(
        result=HOSTILE, tolerance=1.0, error=0.0, plain_error=0.0, wrong=True, finite=True
    )
    assert HOSTILE in Page(page.result_rows(results).rows[0][0].text).text


def test_audit_page_writes_out_characters_that_turn_the_direction_of_a_line(tmp_path):
    answer = Made(finding(line="net.py:1: a = '\u202e' \x1b \ud800"))
    assert "a = '\\u202e' \\x1b \\ud800" in saved(answer, tmp_path).text


def assert_harmless(shown, styles):
    """Assert that foreign text appears only as text, and not as an element or attribute."""
    tags = [element["tag"] for element in shown.elements]
    assert (tags.count("script"), tags.count("style"), tags.count("img")) == (0, styles, 0)
    assert not [element for element in shown.elements if "onerror" in element]
    assert "{{7*7}}" in shown.text
    assert "<script>alert(1)</script>" in shown.text


# --- notebooks ------------------------------------------------------------------------------------


def test_audit_in_a_notebook_shows_answer_figure_and_findings_in_this_order(
    of_two_layers, outputs_of
):
    answer, figure, words, findings = outputs_of(of_two_layers)
    assert answer.data["text/plain"] == str(of_two_layers)
    assert "ga-answer" in answer.data["text/html"]
    assert "ga-card" not in answer.data["text/html"].partition("</style>")[2]
    assert "image/png" in figure.data
    assert "In words" in words.data["text/html"]
    assert "ga-card" in findings.data["text/html"].partition("</style>")[2]
    assert "text/plain" not in findings.data, "a terminal prints the answer once"
    assert not Page(answer.data["text/html"] + findings.data["text/html"]).all("h1")


def test_audit_in_a_notebook_shows_a_compiled_audit_in_one_piece(outputs_of):
    (output,) = outputs_of(Made(finding()))
    assert output.data["text/html"].count("<style>") == 1
    assert "What to do" in output.data["text/html"]


def test_audit_html_needs_no_other_file(of_two_layers):
    piece = str(of_two_layers.html())
    assert (
        piece.index("ga-answer")
        < piece.index("<figure>")
        < piece.index("<h2>Findings")
        < piece.index("<table")
    )
    shown = Page(piece)
    assert all(image["src"].startswith("data:image/png;base64,") for image in shown.all("img"))
    (narrow,) = shown.all("source")
    assert narrow["srcset"].startswith("data:image/png;base64,")
    assert narrow["srcset"].partition(",")[2] != shown.all("img")[0]["src"].partition(",")[2]
