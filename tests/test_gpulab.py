import graphlib
import inspect
from pathlib import Path

import pytest
from house import ARROWS, FILES, FLOOR, PICTURE, picture, room

import companion
import gpulab as gl
from gpulab.training.plan import TRAINING_FILES

PACKAGE = Path(gl.__file__).parent


def test_importing_gpulab_is_light(python):
    code = """
    import sys
    import gpulab

    print(*sorted({name.partition(".")[0] for name in sys.modules}))
    print(gpulab.Setting.parse("cpu:threads=1"), "torch" in sys.modules)
    """
    loaded, setting = python(code).stdout.splitlines()
    heavy = {"torch", "numpy", "pandas", "av", "PIL", "matplotlib", "seaborn", "sklearn", "pyarrow", "typer", "tqdm"}
    assert heavy & set(loaded.split()) == set()
    assert setting == "cpu:threads=1 False", "the environment of a setting can still be put in force"


def packages():
    return [gl, companion, *(getattr(gl, name) for name in gl.PACKAGES)]


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.__name__)
def test_every_public_name_is_there_and_documented(package):
    for name in package.__all__:
        assert inspect.getdoc(getattr(package, name)) or name.isupper(), name
    assert set(package.__all__) <= set(dir(package)) | set(getattr(package, "NAMES", ()))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'gpulab' has no attribute 'nonsense'"):
        _ = gl.nonsense


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.__name__)
def test_no_module_bears_the_name_of_a_public_function(package):
    modules = {path.stem for path in Path(package.__file__).parent.iterdir()} - set(gl.PACKAGES)
    assert set(package.__all__) & modules == set()


def test_gpulab_knows_nothing_of_the_notebooks_companion():
    files = [file for file in PACKAGE.rglob("*") if file.suffix in (".py", ".pyi", ".html", ".css")]
    assert len(files) > len(FILES)
    assert [file.name for file in files if "companion" in file.read_text(encoding="utf-8")] == []


# --- the house -------------------------------------------------------------------------------------------


def test_the_test_sees_imports():
    assert ("gpulab.training.experiment", "gpulab.store.listing", False) in ARROWS
    assert any(late for _, _, late in ARROWS)


def test_every_room_has_a_floor():
    assert {room(name) for name in FILES if name != "gpulab"} == set(FLOOR)


def test_imports_run_downwards():
    upwards = sorted(
        f"{name} (floor {FLOOR[room(name)]}) imports {other} (floor {FLOOR[room(other)]})"
        for name, other, late in ARROWS
        if FLOOR[room(other)] > FLOOR[room(name)]
    )
    assert upwards == []


def test_what_computes_a_run_is_part_of_its_identity():
    """An engine, or an optimiser, that `TRAINING_FILES` did not name would have the runs of the one before."""
    computes, waiting = set(), {"gpulab.training.engines", "gpulab.training.loop"}
    while waiting:
        computes |= waiting
        arrows = {other for name, other, _ in ARROWS if name in waiting and other.startswith("gpulab.training.")}
        waiting = arrows - computes - {"gpulab.training.plan", "gpulab.training.protocol"}
    files = {f"training/{name.rpartition('.')[2]}.py" for name in computes}
    assert files | {"training/data_parallel.py"} == set(TRAINING_FILES)


def test_the_core_knows_nothing_of_what_comes_to_it():
    """From these files nobody comes to an engine, to several processes, to an object store or to a search."""
    core = [f"gpulab.training.{name}" for name in ("protocol", "plan", "loop", "run")]
    outside = ("engines", "capture", "written_out", "replicas", "parallel", "data_parallel", "uploads", "functions")
    reached, waiting = set(), set(core)
    while waiting:
        reached |= waiting
        waiting = {other for name, other, _ in ARROWS if name in waiting} - reached
    assert set(core) < reached
    assert reached & {f"gpulab.training.{name}" for name in outside} == set()
    assert [name for name in reached if name == "gpulab.store.object_store" or room(name) == "search"] == []


@pytest.mark.parametrize("level", ["files", "rooms"])
def test_nothing_imports_in_a_circle(level):
    arrows = {(one, other) for one, other, _ in ARROWS}
    if level == "rooms":
        arrows = {(room(one), room(other)) for one, other in arrows if room(one) != room(other)}
    else:  # a package's own list of names is not what its files import
        arrows = {(one, other) for one, other in arrows if FILES[one].name != "__init__.py"}
    graph = graphlib.TopologicalSorter()
    for one, other in arrows:
        graph.add(one, other)
    graph.prepare()  # a circle is an error that names it


def test_the_map_of_the_house_is_that_of_the_source():
    assert PICTURE.read_text(encoding="utf-8") == picture(), "draw it anew: python tests/house.py"
