"""The seminar's pages: each has its parts, its plan fills 90 minutes, and its demonstrations print what they show."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "seminar"
PAGES = [*sorted(FOLDER.glob("session*.md")), FOLDER / "single.md"]
HERE = "text here"  # an output that depends on the machine is shown, and not compared
BLOCK = re.compile(rf"^```python\n(.+?)^```\n+(?:^```(text|{HERE})\n(.+?)^```)", re.M | re.S)

# All blocks of a page in one process, as in a lecture; what each printed.
RUN = """
import contextlib, io, json, sys
from pathlib import Path

printed, names = [], {}
for number, code in enumerate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, f"block {number}", "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def folded(text):
    """A text without its line ends: pages break long lines."""
    return " ".join(text.split())


@pytest.mark.slow("executes every demonstration in a process of its own")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_demonstrations_print_what_the_page_shows(page, python, tmp_path, monkeypatch):
    text = page.read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") >= 2, "each demonstration is followed by what it prints"
    assert {kind for _, kind, _ in blocks} >= {"text"}, "one at least prints the same on every machine"
    codes = tmp_path / "codes.json"
    codes.write_text(json.dumps([code for code, _, _ in blocks]), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    printed = json.loads(python(RUN, codes, OMP_NUM_THREADS="1").stdout.splitlines()[-1])
    for (code, kind, shown), got in zip(blocks, printed, strict=True):
        assert got.strip(), code
        if kind != HERE:
            assert folded(shown) == folded(got), code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_parts_and_its_plan_fills_90_minutes(page):
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    parts = "Afterwards, Before, Plan, Demonstrations, What usually goes wrong, Questions to discuss, Hand-out"
    assert ", ".join(headings) == parts
    plan = [(int(start), int(end)) for start, end in re.findall(r"^\| (\d+) to (\d+) \|", text, re.M)]
    assert [plan[0][0], *(end for _, end in plan)] == [*(start for start, _ in plan), 90]
    assert text.count("<details>") == text.count("</details>") >= 3
    assert len(text.partition("## Hand-out")[2].split()) <= 400, "a hand-out is one printed page"
    assert re.search(r"\]\(\.\./\.\./notebooks/\d\d_\w+\.ipynb#", text), "name the notebook's sections"


def test_the_overview_leads_to_every_session_and_the_readme_to_the_overview():
    linked = re.findall(r"\]\(([^)#]+)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert {page.name for page in PAGES} <= set(linked)
    readme = (FOLDER.parent.parent / "README.md").read_text(encoding="utf-8")
    assert "](docs/seminar/README.md)" in readme
