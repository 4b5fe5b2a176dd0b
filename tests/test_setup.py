"""The files around gpulab, the README and docs/ agree with pyproject.toml, which is the only list
of dependencies, and with the code.
"""

import ast
import importlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from typer.main import get_command

import companion
import gpulab as gl
from companion.__main__ import app as notebooks
from gpulab import files
from gpulab.audits import _rounding as rounding
from gpulab.audits import _tolerances as tolerances
from gpulab.cli import app
from gpulab.settings import OPTIONS
from gpulab.training._profiles import PROTOCOLS
from gpulab.user_code import find_function

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
RUNTIME = [Requirement(text) for text in PROJECT["dependencies"]]
NOTEBOOKS = [Requirement(text) for text in PROJECT["optional-dependencies"]["notebooks"]]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = {
    file.name: file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md"))
}
PAGES = {"README.md": README, **DOCS}
SEMINAR = [
    file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs" / "seminar").glob("*.md"))
]
ALL_PAGES = "\n".join([*PAGES.values(), *SEMINAR])
# Names on conda-forge, where they differ. The -base packages come without a GUI toolkit.
NOTEBOOKS_TORCH = "torch>=2.11"  # which docs/install.md states, for torchvision>=0.26
CONDA_NAMES = {
    "matplotlib": "matplotlib-base",
    "seaborn": "seaborn-base",
    "xxhash": "python-xxhash",
}


def script(name):
    """Import a script from docs/_tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("file", "torch"), [("environment.yml", "pytorch"), ("binder/environment.yml", "pytorch-cpu")]
)
def test_conda_environments_ask_for_what_pyproject_asks_for(file, torch):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(r"^channels:\n  - conda-forge\ndependencies:$", text, re.MULTILINE)
    listed = re.findall(r"^  - (.+)$", text.partition("\ndependencies:\n")[2], re.MULTILINE)
    mapped = CONDA_NAMES | {"torch": torch}
    # The library runs with an older torch; the notebooks need the one that torchvision matches.
    library = [requirement for requirement in RUNTIME if requirement.name != "torch"]
    asked = [*library, Requirement(NOTEBOOKS_TORCH), *NOTEBOOKS]
    wanted = [
        f"{mapped.get(requirement.name, requirement.name)}{requirement.specifier}"
        for requirement in asked
    ]
    assert sorted(listed) == sorted([*wanted, "python=3.12", "pip"])
    assert "3.12" in Requirement(f"python{PROJECT['requires-python']}").specifier


def test_install_page_states_the_torch_of_the_notebooks():
    assert f"needs torch {NOTEBOOKS_TORCH.removeprefix('torch>=')}" in DOCS["install.md"]
    assert "torchvision>=0.26" in map(str, NOTEBOOKS)


def test_binder_start_sets_one_thread_and_a_small_profile():
    """A session on Binder shares its cores; values that the user has set take precedence."""
    start = ROOT / "binder" / "start"
    show = [str(start), "printenv", "OMP_NUM_THREADS", "GPULAB_PROFILE"]
    environment = {key: value for key, value in os.environ.items() if key != "GPULAB_PROFILE"}
    printed = subprocess.run(show, env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == ["1", "smoke"]
    environment["GPULAB_PROFILE"] = "quick"
    printed = subprocess.run(show, env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == ["1", "quick"]


def test_pages_name_only_commands_that_exist():
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", ALL_PAGES, re.MULTILINE)) <= targets
    beside = get_command(notebooks)
    for commands, used in (
        (get_command(app).commands, r"(?:^\$ |(?<!^\| )`|\\)gpulab( [a-z]+)([^`\n]*)"),
        ({"": beside, **beside.commands}, r"python -m companion((?: [a-z]+)?)([^`\n]*)"),
    ):
        found = [
            (name.strip(), arguments)
            for name, arguments in re.findall(used, ALL_PAGES, re.MULTILINE)
        ]
        assert {name for name, _ in found} == commands.keys()
        for name, arguments in found:
            options = {option for parameter in commands[name].params for option in parameter.opts}
            assert set(re.findall(r"(?<!\S)--[a-z-]+", arguments)) <= options, name + arguments


def test_command_line_page_has_the_tables_of_the_commands():
    commands = script("commands")
    written = commands.MARKS.findall(DOCS["command_line.md"])
    assert written == [commands.tables()], "rewrite them: python docs/_tools/commands.py"


# The page whose code blocks build on each other and whose printed output is compared.
WORKED_EXAMPLE = ROOT / "docs" / "audit.md"
EXAMPLES = [
    pytest.param(code, id=f"{name}-{number}")
    for name, text in PAGES.items()
    if name != WORKED_EXAMPLE.name
    for number, code in enumerate(re.findall(r"```python\n(.+?)```", text, re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example, tmp_path, python, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert python(example).stdout


SESSIONS = [
    *sorted((ROOT / "docs" / "seminar").glob("session*.md")),
    ROOT / "docs" / "seminar" / "single.md",
]
HERE = "text here"  # marks output that depends on the machine and is not compared
BLOCK = re.compile(
    rf"^```python\n(.+?)^```\n+(?:^```(text|{HERE})\n(.+?)^```)", re.MULTILINE | re.DOTALL
)

# Execute all blocks of a page in one process, as in a lecture, and report what each one prints.
# Given the name of a file, the blocks are treated as parts of that file.
RUN = """
import contextlib, io, json, sys
from pathlib import Path

codes = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
file = sys.argv[2] if len(sys.argv) > 2 else ""
if file:
    Path(file).write_text("".join(codes), encoding="utf-8")
printed, names, line = [], {}, 0
for number, code in enumerate(codes):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile("\\n" * line + code, file or f"block {number}", "exec"), names)
    printed.append(out.getvalue())
    line += code.count("\\n") if file else 0
print(json.dumps(printed))
"""
# Sizes, shares and ratios of rounding errors, which differ between processors.
ROUNDED = re.compile(r"\d\.\de[+-]\d\d|\b\d+%|\b0\.\d\d\b")


def folded(text):
    """A text on a single line, because pages break long lines."""
    return " ".join(text.split())


def printed_by(blocks, python, folder, *file):
    """The printed output of each block of a page, in order."""
    codes = folder / "codes.json"
    codes.write_text(json.dumps([code for code, _, _ in blocks]), encoding="utf-8")
    return json.loads(python(RUN, codes, *file, OMP_NUM_THREADS="1").stdout.splitlines()[-1])


@pytest.mark.slow("executes the demonstrations of each page in a separate process")
@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.stem)
def test_demonstrations_print_what_the_page_shows(page, python, tmp_path, monkeypatch):
    text = page.read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") >= 2, (
        "each demonstration is followed by what it prints"
    )
    assert {kind for _, kind, _ in blocks} >= {"text"}, (
        "at least one block prints the same on every machine"
    )
    monkeypatch.chdir(tmp_path)
    for (code, kind, shown), got in zip(blocks, printed_by(blocks, python, tmp_path), strict=True):
        assert got.strip(), code
        if kind != HERE:
            assert folded(shown) == folded(got), code


def test_audit_example_page_shows_what_its_example_prints(python, tmp_path, monkeypatch):
    """Sizes of rounding errors may differ. `GPULAB_RECORD=1` rewrites the output in the page."""
    text = WORKED_EXAMPLE.read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python"), "each block is followed by what it prints"
    monkeypatch.chdir(tmp_path)
    printed = printed_by(blocks, python, tmp_path, "example.py")
    if os.environ.get("GPULAB_RECORD"):
        outputs = iter(printed)
        text = BLOCK.sub(
            lambda block: f"```python\n{block[1]}```\n```{block[2]}\n{next(outputs).strip()}\n```",
            text,
        )
        WORKED_EXAMPLE.write_text(text, encoding="utf-8")
        return
    for (code, kind, shown), got in zip(blocks, printed, strict=True):
        assert got.strip(), code
        if kind != HERE:
            assert ROUNDED.sub("…", folded(shown)) == ROUNDED.sub("…", folded(got)), code


def test_audit_page_lists_the_thresholds_of_the_code():
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \|", DOCS["audit.md"], re.MULTILINE)
    assert len(rows) > 5
    for name, shown in rows:
        value = getattr(rounding if name == "SAFETY_FACTOR" else tolerances, name)
        values = value if isinstance(value, tuple) else (value,)
        assert [float(number) for number in shown.split(" and ")] == pytest.approx(
            values, rel=0.05
        ), name


def anchors(page):
    """The anchors that a link into a page can name: its headings as GitHub writes them or, for a
    notebook, as Jupyter writes them.
    """
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [
            "".join(cell["source"])
            for cell in json.loads(text)["cells"]
            if cell["cell_type"] == "markdown"
        ]
        return {
            heading.replace(" ", "-")
            for cell in cells
            for heading in re.findall(r"^#+ (.+)$", cell, re.MULTILINE)
        }
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "folder", [".", "docs", "docs/seminar", "data", "benchmarks", "benchmarks/results"]
)
def test_links_of_pages_lead_somewhere(folder):
    pages = sorted((ROOT / folder).glob("*.md"))
    assert pages
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            if not re.match(r"https?:|mailto:", link):
                there = page.parent / path if path else page
                assert there.exists(), f"{page.name}: {link}"
                assert not anchor or anchor in anchors(there), f"{page.name}: {link}"


# What the sessions emphasise and begin with a capital letter, but is no section of a notebook.
OTHER_NAMES = {
    "TF32",
    "CPU, one thread",
    "What every computer scientist should know about floating-point arithmetic",
}


@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.stem)
def test_sessions_name_sections_that_the_notebooks_have(page):
    sections = set()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            names = re.findall(r"^#+ (.+)$|\*\*(?:\d\. )?(.+?)\*\*", text, re.MULTILINE)
            sections |= {name.rstrip(".") for name in itertools.chain(*names)}
    text = page.read_text(encoding="utf-8")
    for kind in (r"```.*?```", r"\*\*.+?\*\*"):  # code, and what is not emphasis
        text = re.sub(kind, "", text, flags=re.DOTALL)
    named = {name.rstrip(".,") for name in re.findall(r"\*([A-Z][^*\n]{3,80})\*", text)}
    assert named - sections - OTHER_NAMES == set()
    for name, anchor in re.findall(r"\*([^*]+)\*\]\([^()\s]+\.ipynb#([^()\s]+)\)", text):
        assert name == anchor.replace("-", " ") or "-" in name


def test_readme_shows_the_drawing_of_the_published_loop():
    answer = script("answer")
    drawn = companion.draw_published_loop()
    assert f"![{drawn.alt}](docs/_static/loop.svg)" in README
    assert f"<dc:title>{drawn.alt}</dc:title>" in answer.LOOP.read_text(encoding="utf-8")


def test_readme_shows_the_figure_that_the_recorded_runs_give(tmp_path):
    answer = script("answer")
    drawn = answer.picture()
    assert re.findall(r"!\[(.+)\]\((docs/_static/answer.svg)\)", README) == [
        (drawn.alt, "docs/_static/answer.svg")
    ]
    answer.write(drawn, tmp_path / "answer.svg")
    kept, anew = (
        answer.FILE.read_text(encoding="utf-8"),
        (tmp_path / "answer.svg").read_text(encoding="utf-8"),
    )
    assert len(kept) <= 200_000
    assert f"<dc:title>{drawn.alt}</dc:title>" in kept
    point = r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill: #ffffff'
    places = [
        [float(number) for place in re.findall(point, text) for number in place]
        for text in (kept, anew)
    ]
    assert len(places[0]) == 2 * len(answer.pairs())
    assert places[0] == pytest.approx(places[1], abs=1), "redraw it: python docs/_tools/answer.py"


def test_public_names_page_lists_the_names_and_parameters_that_there_are():
    names = script("names")
    assert names.PAGE.read_text(encoding="utf-8") == names.page(), (
        "a name or parameter has changed: python docs/_tools/names.py"
    )


def test_paper_numbers_are_those_of_the_recorded_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_tools"))
    paper = script("paper")
    for file in paper.PAPERS:
        assert file.read_text(encoding="utf-8") == paper.paper(file), (
            "rewrite it: python docs/_tools/paper.py"
        )
    cited = {name for file in paper.PAPERS for name in re.findall(r"@(\w+)", paper.paper(file))}
    assert cited == set(
        re.findall(r"^@\w+\{(\w+),", paper.PAPER.with_name("paper.bib").read_text(), re.MULTILINE)
    )


def test_address_is_written_into_every_file_that_names_it(tmp_path):
    (tmp_path / "notebooks").mkdir()
    for name in ("README.md", "CITATION.cff", "pyproject.toml", "notebooks/00_start_here.ipynb"):
        shutil.copy(ROOT / name, tmp_path / name)
    address = script("address")
    address.settle("github.com/first/name", tmp_path)
    address.settle("https://github.com/second/other.git", tmp_path)
    texts = {
        file.name: file.read_text(encoding="utf-8")
        for file in tmp_path.rglob("*.*")
        if file.is_file()
    }
    assert [name for name, text in texts.items() if "first/name" in text] == []
    public = "https://github.com/second/other"
    assert yaml.safe_load(texts["CITATION.cff"])["repository-code"] == public
    urls = tomllib.loads(texts["pyproject.toml"])["project"]["urls"]
    added = {
        "Repository": public,
        "Issues": f"{public}/issues",
        "Changelog": f"{public}/blob/HEAD/CHANGELOG.md",
    }
    assert urls == PROJECT["urls"] | added
    badges = re.findall(r"\]\((docs/[\w/]+\.svg)\)\]\(https:", texts["README.md"])
    assert len(badges) == 2
    assert [badge for badge in badges if not (ROOT / badge).is_file()] == []
    with pytest.raises(SystemExit, match="OWNER/NAME"):
        address.settle("example.org/name", tmp_path)


@pytest.fixture
def for_colab(tmp_path):
    """The notebooks that are written for Colab, by their names."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for name in ("README.md", "CITATION.cff", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    address = script("address")
    for _ in range(2):  # writing twice changes nothing
        address.settle("github.com/owner/name", tmp_path)
    for file in (tmp_path / "notebooks").glob("*.ipynb"):
        assert file.read_bytes() == (ROOT / "notebooks" / file.name).read_bytes()
    copies = (tmp_path / "notebooks" / "colab").glob("*.ipynb")
    return {file.name: json.loads(file.read_text(encoding="utf-8")) for file in copies}


def test_colab_notebooks_have_links_that_lead_to_the_repository(for_colab):
    assert for_colab.keys() == {file.name for file in (ROOT / "notebooks").glob("*.ipynb")}
    on_colab = "https://colab.research.google.com/github/owner/name/blob/HEAD/notebooks/colab/"
    on_github = "https://github.com/owner/name/blob/HEAD/"
    ways = set()
    for name, notebook in for_colab.items():
        text = "\n".join(
            "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
        )
        for link in re.findall(r"\]\(([^()\s]+)\)", text):
            assert link.startswith(("https://", "http://", "#")), f"{name}: {link}"
            if link.startswith(on_colab):
                ways.add("notebook")
                assert link.removeprefix(on_colab) in for_colab, f"{name}: {link}"
            if link.startswith(on_github):
                ways.add("page")
                path, _, anchor = link.removeprefix(on_github).partition("#")
                assert (ROOT / path).exists(), f"{name}: {link}"
                assert not anchor or anchor in anchors(ROOT / path), f"{name}: {link}"
    assert ways == {"notebook", "page"}


def test_first_cell_on_colab_installs_and_says_when_to_restart(for_colab, python):
    for notebook in for_colab.values():
        assert all(not cell.get("outputs") for cell in notebook["cells"])
    title, first, *_ = for_colab["00_start_here.ipynb"]["cells"]
    assert title["cell_type"] == "markdown"
    assert first["metadata"]["tags"] == ["colab"]
    source = "".join(first["source"])
    assert len(source.splitlines()) <= 17
    assert "git clone -q https://github.com/owner/name " in source
    for package in ("numpy", "pandas", "torchvision"):
        (asked,) = [str(each) for each in [*RUNTIME, *NOTEBOOKS] if each.name == package]
        assert asked.replace(">=", " ") in source
        assert asked.replace(">=", " ") in DOCS["install.md"]
    # Stand-ins for Colab: pip replaces one package that is in use, and one that is not.
    stand_in = """
import importlib.metadata, sys, types
versions = iter([{"numpy": "1.0", "unused": "1"}, {"numpy": "2.0", "unused": "2", "new": "1"}])
named = lambda found: [types.SimpleNamespace(name=n, version=v) for n, v in found.items()]
importlib.metadata.distributions = lambda: named(next(versions))
sys.modules["google.colab"] = types.ModuleType("colab")
"""
    code = re.sub(r"^    [!%].+\n", "", source, flags=re.MULTILINE)
    assert code.count("\n") == source.count("\n") - 3
    printed = python(f"{stand_in}\nsys.modules['numpy'] = sys\n{code}").stdout
    assert "replaced: numpy 1.0 by 2.0\nreplaced: unused 1 by 2\n" in printed
    assert "restart the session" in printed
    assert "restart" not in python(stand_in + code).stdout
    assert not python(code).stdout


@pytest.mark.parametrize(
    "file", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda file: file.name
)
def test_workflows_name_what_exists(file):
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert workflow["jobs"]
    for name, job in workflow["jobs"].items():
        commands = "\n".join(step.get("run", "") for step in job["steps"])
        named = re.findall(r"\btests/[\w/.]+", commands)
        called = set(re.findall(r"^make ([a-z-]+)", commands, re.MULTILINE))
        assert named or called, f"{name} tests nothing"
        assert called <= targets, name
        assert [path for path in named if not (ROOT / path).exists()] == [], name


def test_dependabot_looks_at_every_kind_of_dependency_once_a_week():
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text(encoding="utf-8"))[
        "updates"
    ]
    assert {update["package-ecosystem"] for update in updates} == {"pip", "github-actions"}
    assert {update["schedule"]["interval"] for update in updates} == {"weekly"}
    assert all(update["groups"] for update in updates)


def test_settings_page_lists_every_option():
    table = dict(re.findall(r"^\| `(\w+)=[^|]*\| ([a-z, ]+) \|", DOCS["settings.md"], re.MULTILINE))
    assert {name: tuple(devices.split(", ")) for name, devices in table.items()} == {
        name: option.devices for name, option in OPTIONS.items()
    }


def test_wheel_contains_recorded_data():
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {
        source: f"gpulab/recorded/{source.partition('/')[2]}" for source in included
    }
    for source in included:
        there = ROOT / source
        assert there.is_file() or any(there.iterdir()), (
            f"{source} is empty: git does not keep empty folders, so the build would fail"
        )
    sources = [file for folder in ("gpulab", "notebooks") for file in (ROOT / folder).rglob("*.py")]
    code = "".join(file.read_text(encoding="utf-8") for file in sources)
    examples = re.findall(r"^\$ .*\bdata/(\w+)/", ALL_PAGES, re.MULTILINE)
    read = {*re.findall(r"recorded_folder\(\"(\w+)\"", code), *examples}
    assert {source.split("/")[1] for source in included if source.startswith("data/")} == read


def test_wheel_contains_what_the_examples_read(monkeypatch, tmp_path):
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    commands = "".join(re.findall(r"^\$ (.+\n)", ALL_PAGES, re.MULTILINE))
    read = set(re.findall(r"\bdata/[\w./-]+", commands))
    assert read
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "gpulab")
    monkeypatch.chdir(tmp_path)
    for file in read:
        assert str(files.find_shipped(file)) == file
        copy = tmp_path / included[file]
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
        assert files.find_shipped(file) == copy


def test_find_function_finds_the_steps_of_gpulab_that_the_examples_record(monkeypatch, tmp_path):
    recorded = re.findall(r"^\$ gpulab record (gpulab\.\S+) ", ALL_PAGES, re.MULTILINE)
    assert recorded
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in recorded:
        assert isinstance(find_function(name, "step"), gl.Step)


BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
COMMANDS = [
    file for file in BENCHMARKS if 'if __name__ == "__main__":' in file.read_text(encoding="utf-8")
]
# A path after "COMMIT:" or before "(commit …)" belongs to an earlier commit.
BENCHMARK_PATH = re.compile(r"(?<![:\w])benchmarks/[\w./-]+\.(?:py|md|png)\b(?![^`\n]*`\s\(commit)")
FORMER_PATHS = {"benchmarks/networks.py"}  # gpulab knows the present path


@pytest.mark.parametrize("folder", ["gpulab", "notebooks", "docs", "benchmarks"])
def test_benchmarks_that_are_named_exist(folder):
    files = [
        file
        for kind in ("py", "pyi", "md", "in", "ipynb")
        for file in (ROOT / folder).rglob(f"*.{kind}")
    ]
    # the results also name older scripts
    files = [file for file in files if file.parent != ROOT / "benchmarks" / "results"]
    for file in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "data" / "README.md"]:
        named = set(BENCHMARK_PATH.findall(file.read_text(encoding="utf-8"))) - FORMER_PATHS
        missing = sorted(path for path in named if not (ROOT / path).exists())
        assert not missing, f"{file.relative_to(ROOT)}: {', '.join(missing)}"


@pytest.mark.parametrize(
    "script", BENCHMARKS, ids=lambda script: script.relative_to(ROOT).as_posix()
)
def test_benchmarks_import_what_is_there(script):
    """Imports name members of this repository's packages, or scripts in the same folder."""
    beside = {file.stem for file in script.parent.glob("*.py")}
    elsewhere = {file.stem for file in BENCHMARKS} - beside
    for node in ast.walk(ast.parse(script.read_bytes())):
        if isinstance(node, ast.Import):
            assert elsewhere.isdisjoint(name.name for name in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.module not in elsewhere
            if (node.module or "").partition(".")[0] in ("gpulab", "companion", "benchmarks"):
                module = importlib.import_module(node.module)
                for name in (name.name for name in node.names):
                    assert hasattr(module, name) or importlib.util.find_spec(
                        f"{node.module}.{name}"
                    ), name


@pytest.mark.slow("starts a process per script")
@pytest.mark.parametrize("script", COMMANDS, ids=lambda script: script.relative_to(ROOT).as_posix())
def test_benchmarks_start(script):
    command = [sys.executable, script.relative_to(ROOT), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def gpulab_imports(code):
    """Yield the names that code imports from gpulab and companion, each with its module."""
    for node in ast.walk(ast.parse(re.sub(r"^\s*[%!].*$", "", code, flags=re.MULTILINE))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in (
            "gpulab",
            "companion",
        ):
            yield from ((node.module, alias.name) for alias in node.names)


def is_importable(module, name):
    """Whether `from module import name` works."""
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "notebooks").rglob("*.ipynb")), ids=lambda path: path.stem
)
def test_notebooks_import_what_is_there(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    missing = [
        f"{module}.{name}"
        for module, name in itertools.chain.from_iterable(map(gpulab_imports, code))
        if not is_importable(module, name)
    ]
    assert missing == []


def test_prednet_notebook_states_the_protocols_of_its_profiles():
    text = (ROOT / "notebooks" / "04_prednet.ipynb").read_text(encoding="utf-8")
    cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads(text)["cells"]}
    rows = re.findall(r"^\| ([a-z].+?) \| (.+) \|$", cells["04-loss-text"], re.MULTILINE)
    stated = {name: values.split(" | ") for name, values in rows}
    for column, profile in enumerate(("quick", "motion", "paper")):
        protocol = PROTOCOLS["prednet", profile]
        channels = "-".join(map(str, protocol.model["channels"]))
        height, width = protocol.size
        assert {name: values[column] for name, values in stated.items()} == {
            "frames, updates": f"{protocol.frames:,}, {protocol.frames // protocol.window}",
            "size, channels": f"{width}×{height}, {channels}",
            "learning rate of Adam": f"{protocol.learning_rate:g}",
        }
