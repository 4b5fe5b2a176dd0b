import html
import json
import re
from urllib.parse import unquote

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import gpulab as gl
from companion.notebooks import copy_without_outputs, find_notebooks
from companion.report import write_report
from companion.run import execute, execute_in_place

KERNEL = {"kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3"}}
PARAMETERS = 'profile = "quick"  # a size\nstore = "runs"'
FINDING = (
    "import os, sys\n"
    "print(profile, os.environ['GPULAB_PROFILE'], store != 'runs')\n"
    "print('<bar>', file=sys.stderr)"
)


@pytest.fixture
def notebooks(tmp_path):
    cells = [
        new_markdown_cell("# What is it?"),
        new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        new_code_cell(FINDING, metadata={"tags": ["finding"]}),
        new_code_cell("import gpulab as gl; gl.plots.roofline(gl.device.recorded_rooflines())"),
        new_code_cell("raise ValueError('no such thing')"),
    ]
    folder = tmp_path / "notebooks"
    folder.mkdir()
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), folder / "01_one.ipynb")
    nbformat.write(new_notebook(cells=cells[1:2], metadata=KERNEL), folder / "02_two.ipynb")
    (folder / "notes.ipynb").write_text("not one of them")
    return folder


def test_report_holds_findings_figures_and_the_error_of_executed_notebooks(notebooks, tmp_path):
    (result,) = execute(notebooks, tmp_path / "build", "smoke", "cpu", only="01")
    assert result.error == "cell 5: ValueError: no such thing"
    assert result.peak_bytes > 1e6
    page = write_report([result], tmp_path / "build", "smoke")
    text = page.read_text()
    assert "smoke smoke True" in text
    assert "&lt;bar&gt;" not in text, "text on stderr is not part of the finding"
    assert 'alt="Roofline:' in text
    caption = re.search(r"<p>Roofline: [^<]+</p>", text)
    assert caption, "every figure has a caption"
    assert 'href="../notebooks/01_one.ipynb"' in text
    contents = text.partition('id="Contents"')[2].partition("</ul>")[0]
    anchors = re.findall(r'href="#([^"]+)"', contents)
    assert "Passport" in anchors
    ids = set(map(html.unescape, re.findall(r'id="([^"]+)"', text)))
    assert {unquote(html.unescape(anchor)) for anchor in anchors} <= ids
    assert "no such thing" in text
    assert text.count('href="verdict.md') == 0, "the report is one file, without others next to it"
    assert "default-src 'none'" in text
    assert "<script" not in text
    (row,) = json.loads((page.parent / "results.json").read_text())
    assert (row["name"], row["notebook"]) == ("01_one", "01_one.ipynb")


def test_copy_without_outputs_is_made_once(notebooks, tmp_path):
    outputs = [nbformat.v4.new_output("stream", text="seen")]
    (notebooks / "solutions").mkdir()
    for name in ("03_three", "solutions/03_solutions"):
        cells = [
            new_markdown_cell("# Why?\n\n**In short:** because.\n\nRead on."),
            new_code_cell(
                "print('seen')", outputs=outputs, execution_count=1, metadata={"tags": ["finding"]}
            ),
        ]
        nbformat.write(new_notebook(cells=cells, metadata=KERNEL), notebooks / f"{name}.ipynb")
    made = copy_without_outputs(notebooks, tmp_path / "lab")
    assert sorted(copy.stem for copy in made) == ["01_one", "02_two", "03_solutions", "03_three"]
    top, cell, answers = nbformat.read(tmp_path / "lab" / "03_three.ipynb", 4).cells
    assert re.search(r"<details><summary>.*</summary>\n\n\*\*In short:\*\*", top.source)
    assert top.source.endswith("</details>\n\nRead on.")
    original = nbformat.read(notebooks / "03_three.ipynb", 4).cells[0].source
    assert "<details>" not in original, "the original must not change"
    assert answers.cell_type == "code"
    assert (cell.outputs, cell.execution_count, cell.metadata.tags) == ([], None, ["finding"])
    assert (
        nbformat.read(tmp_path / "lab" / "solutions" / "03_solutions.ipynb", 4).cells[1].outputs
        == outputs
    )
    (tmp_path / "lab" / "03_three.ipynb").write_text("my work")
    assert copy_without_outputs(notebooks, tmp_path / "lab") == []
    assert (tmp_path / "lab" / "03_three.ipynb").read_text() == "my work"


def test_links_to_programs_lead_to_existing_files_in_copies(notebooks, tmp_path):
    (notebooks / "programs").mkdir()
    (notebooks / "programs" / "serve.py").write_text("")
    text = "# Four\n\n[Programs](programs), [one](programs/serve.py), [a page](../docs/page.md)"
    cells = [new_markdown_cell(text), new_code_cell("lists[0](programs)")]
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), notebooks / "04_four.ipynb")
    for folder in (tmp_path / "lab", tmp_path / "class" / "lab"):
        copy_without_outputs(notebooks, folder)
        words, code, _ = nbformat.read(folder / "04_four.ipynb", 4).cells
        *programs, page = re.findall(r"\]\(([^)]+)\)", words.source)
        assert [(folder / link).resolve() for link in programs] == [
            notebooks / "programs",
            notebooks / "programs" / "serve.py",
        ]
        assert all((folder / link).exists() for link in programs)
        assert page == "../docs/page.md"
        assert code.source == "lists[0](programs)", "code is left as it is"


def test_execute_fails_only_the_notebook_whose_kernel_dies(notebooks, tmp_path):
    cells = [new_code_cell("import os; os._exit(3)")]
    nbformat.write(new_notebook(cells=cells), notebooks / "03_three.ipynb")
    (result,) = execute(notebooks, tmp_path / "build", "smoke", "cpu", only="03")
    assert result.error == "DeadKernelError: Kernel died"
    with pytest.raises(gl.GpulabError, match=r"03_three.ipynb: DeadKernelError"):
        list(execute_in_place(notebooks, "03"))
    assert list(execute_in_place(notebooks, "02")) == [notebooks / "02_two.ipynb"]
    (cell,) = nbformat.read(notebooks / "02_two.ipynb", as_version=4).cells
    assert (cell.source, cell.execution_count) == (PARAMETERS, 1)


def test_execute_names_notebooks_that_cannot_be_executed(notebooks, tmp_path):
    assert [file.stem for file in find_notebooks(notebooks, None)] == ["01_one", "02_two"]
    torn = tmp_path / "torn" / "03_three.ipynb"
    torn.parent.mkdir()
    torn.write_text("{")
    out, usual = tmp_path / "build", {"profile": "smoke", "device": "cpu"}
    for refused, named in (
        (
            lambda: find_notebooks(notebooks, "01,07"),
            "no notebook begins with '07'; there are 01_one, 02_two",
        ),
        (lambda: find_notebooks(tmp_path / "missing", None), "missing: no such folder"),
        (lambda: execute(torn.parent, out, **usual), "03_three.ipynb: not a notebook"),
        (lambda: execute(notebooks, torn, **usual), "cannot be written: Not a directory"),
    ):
        with pytest.raises(gl.GpulabError, match=named):
            refused()
    assert not out.exists()
