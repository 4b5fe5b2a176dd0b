"""Every generated page shows untrusted input as text, whatever it contains."""

import dataclasses
import html.parser
import os

import pandas as pd
import pytest
import safetensors.torch
import torch

import gpulab as gl
from gpulab import files, report
from gpulab.steps import Step

HOSTILE = (
    "</p><script>alert(1)</script>\"'><img src=x"
    " onerror=alert(1)>{{7*7}}<style>*{display:none}</style>"
)


class Page(html.parser.HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(str(text))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def assert_harmless(text, styles=0):
    """Check that untrusted input creates no elements or attributes, and that it appears as text."""
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert "script" not in tags
    assert tags.count("style") == styles
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert tag != "img" or attributes["src"].startswith("data:image/png;base64,")
    assert "{{7*7}}" in page.text + "".join(
        attributes.get("alt", "") for _, attributes in page.elements
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """HTML files with hostile text in every text field of a trace or a run."""
    folder = tmp_path_factory.mktemp("pages")
    step = Step(torch.nn.Linear(4, 2), torch.ones(3, 4))
    traces = []
    for setting in ("cpu", "cpu:threads=1"):
        trace = gl.record(step, setting, progress=False)
        for op in trace.operations:
            more = {
                name: getattr(op, name) + HOSTILE for name in ("name", "module", "line", "dtype")
            }
            vars(op).update(more, arguments={HOSTILE: HOSTILE}, error=op.error and 1e9)
        told = [dict.fromkeys(("operation", "line", "why", "remedy"), HOSTILE)]
        traces.append(dataclasses.replace(trace, label=setting + HOSTILE, overwritten=told))
    audit = gl.audit(*traces)
    assert audit.faulty
    audit.save(folder / "audit.html")
    metric, factor = "loss" + HOSTILE, "f" + HOSTILE
    rows = [
        {HOSTILE: seed, metric: seed * 0.1 + n, factor: f"{n}{HOSTILE}"}
        for seed in range(8)
        for n in (0, 1)
    ]
    columns = {"metric": metric, "factor": factor, "block": HOSTILE}
    gl.verdict(pd.DataFrame(rows), **columns).save(folder / "verdict.html", HOSTILE)
    return folder


@pytest.mark.parametrize("name", ["audit.html", "verdict.html"])
def test_saved_page_runs_nothing_that_a_stranger_wrote(pages, name):
    text = (pages / name).read_text(encoding="utf-8")
    assert_harmless(text, styles=1)
    assert "default-src 'none'" in text


def test_html_pieces_stay_escaped_when_they_are_added():
    piece = (
        report.paragraphs([HOSTILE]) + report.table(pd.DataFrame({HOSTILE: [HOSTILE]})) + HOSTILE
    )
    assert_harmless(piece)
    assert Page(piece).text.count(HOSTILE) == 4


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_saved_files_have_the_permissions_that_the_umask_leaves(pages, tmp_path):
    (tmp_path / "as usual").touch()
    files.write(pages / "tensors.bin", safetensors.torch.save({"a": torch.ones(2)}))
    assert {file.stat().st_mode for file in pages.rglob("*.*")} == {
        (tmp_path / "as usual").stat().st_mode
    }


def test_error_message_writes_control_characters_out():
    assert (
        str(gl.UsageError("\x1b[31mred\x07\ud800\u202e.csv: no"))
        == "\\x1b[31mred\\x07\\ud800\\u202e.csv: no"
    )
