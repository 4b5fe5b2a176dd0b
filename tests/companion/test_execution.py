import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import gpulab as gl
from gpulab.companion.run import execute, execute_in_place, find_notebooks, tidy, write_report

PARAMETERS = 'profile = "quick"  # a size\nstore = "runs"'
FINDING = (
    "import os, sys\nprint(profile, os.environ['GPULAB_PROFILE'], store != 'runs')\nprint('a bar', file=sys.stderr)"
)


@pytest.fixture
def notebooks(tmp_path):
    metadata = {"kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3"}}
    cells = [
        new_markdown_cell("# What is it?"),
        new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        new_code_cell(FINDING, metadata={"tags": ["finding"]}),
        new_code_cell("raise ValueError('no such thing')"),
    ]
    folder = tmp_path / "notebooks"
    folder.mkdir()
    nbformat.write(new_notebook(cells=cells, metadata=metadata), folder / "01_one.ipynb")
    nbformat.write(new_notebook(cells=cells[1:2], metadata=metadata), folder / "02_two.ipynb")
    (folder / "notes.ipynb").write_text("not one of them")
    return folder


def test_notebooks_are_executed_and_bound_into_a_report(notebooks, tmp_path):
    (result,) = execute(notebooks, tmp_path / "build", "smoke", "cpu", only="01")
    assert (result.title, result.error) == ("What is it?", "cell 4: ValueError: no such thing")
    assert result.findings == ["smoke smoke True"]
    assert result.peak_memory_bytes > 1e6
    executed = nbformat.read(result.notebook, as_version=4)
    assert not any("papermill" in part.metadata for part in (executed, *executed.cells))
    assert [output.name for cell in executed.cells[:-1] for output in cell.get("outputs", [])] == ["stdout"]
    page = write_report([result], tmp_path / "build", "smoke")
    assert "smoke smoke True" in page.read_text()
    (row,) = json.loads((page.parent / "results.json").read_text())
    assert (row["name"], row["notebook"]) == ("01_one", "01_one.ipynb")


def test_a_kernel_that_dies_is_reported_with_its_last_words(notebooks, tmp_path):
    cells = [new_code_cell("import os; os.write(2, b'out of luck'); os._exit(3)")]
    nbformat.write(new_notebook(cells=cells), notebooks / "03_three.ipynb")
    (result,) = execute(notebooks, tmp_path / "build", "smoke", "cpu", only="03")
    assert result.error == "DeadKernelError: Kernel died: out of luck"
    with pytest.raises(gl.GpulabError, match=r"03_three.ipynb: DeadKernelError"):
        execute_in_place(notebooks, "03")


def test_a_notebook_is_executed_where_it_lies(notebooks):
    assert execute_in_place(notebooks, "02") == [notebooks / "02_two.ipynb"]
    (cell,) = nbformat.read(notebooks / "02_two.ipynb", as_version=4).cells
    assert (cell.source, cell.execution_count) == (PARAMETERS, 1)


def test_an_executed_notebook_keeps_pictures_of_widgets_and_leaves_bars_out():
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
    outputs = [new_output("display_data", {**view, **more}) for more in ({}, {"image/png": "AAAA"})]
    notebook = new_notebook(cells=[new_code_cell("gl.bit_explorer()", outputs=outputs)])
    tidy(notebook)
    assert [output.data for output in notebook.cells[0].outputs] == [{"image/png": "AAAA"}]


def test_what_cannot_be_executed_is_named(notebooks, tmp_path):
    assert [file.stem for file in find_notebooks(notebooks, None)] == ["01_one", "02_two"]
    with pytest.raises(gl.UsageError, match="no notebook begins with '07'; there are 01_one, 02_two"):
        find_notebooks(notebooks, "01,07")
    with pytest.raises(gl.GpulabError, match="no such folder"):
        find_notebooks(tmp_path / "missing", None)
    with pytest.raises(gl.GpulabError, match="holds no notebooks"):
        find_notebooks(tmp_path, None)
    (notebooks / "03_three.ipynb").write_text("{")
    with pytest.raises(gl.DataError, match=r"03_three.ipynb: not a notebook"):
        execute(notebooks, tmp_path, "smoke", "cpu")
    with pytest.raises(gl.GpulabError, match="cannot be written: a part of its path is a file"):
        execute(notebooks, notebooks / "03_three.ipynb", "smoke", "cpu", only="01")
    assert not (tmp_path / "notebooks" / "notebooks").exists()
    for profile, device in (("huge", "cpu"), ("smoke", "tpu")):
        with pytest.raises(gl.UsageError, match=r"huge|tpu"):
            execute(notebooks, tmp_path, profile, device)
