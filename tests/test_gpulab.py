import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import companion
import gpulab as gl
from gpulab import errors

PACKAGE = Path(gl.__file__).parent


def test_import_of_gpulab_is_light(python):
    code = """
    import sys
    import gpulab

    print(*sorted({name.partition(".")[0] for name in sys.modules}))
    print(gpulab.Setting.parse("cpu:threads=1"), "torch" in sys.modules)
    """
    loaded, setting = python(code).stdout.splitlines()
    heavy = {
        "torch",
        "numpy",
        "pandas",
        "av",
        "PIL",
        "matplotlib",
        "seaborn",
        "sklearn",
        "pyarrow",
        "typer",
        "tqdm",
    }
    assert heavy & set(loaded.split()) == set()
    assert setting == "cpu:threads=1 False", "the environment of a setting can still be applied"


def test_import_of_drawing_libraries_waits_until_something_is_drawn(python):
    code = """
    import sys
    import pandas as pd
    import torch
    import gpulab as gl

    net, batch = torch.nn.Linear(4, 1), torch.ones(5, 4)
    with gl.guard():
        net(batch).sum().backward()
    step = gl.Step(net, (batch, torch.ones(5, 1)), torch.nn.functional.mse_loss)
    print(bool(str(gl.audit(step, "cpu", "cpu:emulate=bfloat16", progress=False))))
    runs = pd.DataFrame({"seed": range(6), "final_loss": [0.3, 0.1, 0.2, 0.5, 0.4, 0.6]})
    both = pd.concat([runs.assign(setting=setting) for setting in ("cpu", "cuda")])
    verdict = gl.verdict(both)
    print(bool(verdict.words()), {"seaborn", "matplotlib"} & set(sys.modules))
    verdict.plot()
    print({"seaborn", "matplotlib"} <= set(sys.modules), "gpulab.audits" in sys.modules)
    """
    said = python(code).stdout.splitlines()
    assert said == ["True", "True set()", "True True"]


def packages():
    return [gl, companion, *(getattr(gl, name) for name in gl.PACKAGES)]


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.__name__)
def test_public_names_exist_and_are_documented(package):
    for name in package.__all__:
        public = getattr(package, name)
        assert inspect.getdoc(public) or name.isupper(), name
        if inspect.isfunction(public) and package is not companion:
            parts = ["Args:"] if inspect.signature(public).parameters else []
            missing = [part for part in (*parts, ">>>") if part not in public.__doc__]
            assert not missing, f"{name}: the docstring has no {' and no '.join(missing)}"
    assert set(package.__all__) == set(dir(package))


def test_public_names_that_are_modules_are_the_packages():
    assert tuple(name for name in gl.__all__ if inspect.ismodule(getattr(gl, name))) == gl.PACKAGES


MISSING = [("gpulab.plots", "losses", "seaborn"), ("companion", "bit_explorer", "ipywidgets")]


@pytest.mark.parametrize(("package", "name", "library"), MISSING)
def test_public_names_that_need_a_missing_library_say_which_extra_installs_it(
    python, package, name, library
):
    code = f"""
    import sys
    import gpulab
    import {package}

    sys.modules["{library}"] = None  # as if it were not installed
    try:
        {package}.{name}
    except gpulab.GpulabError as error:
        print(error)
    """
    (message,) = python(code).stdout.splitlines()
    assert message.startswith(f"{library} is not installed")
    assert message.endswith("pip install 'gpulab[notebooks]'")


INSTALLED_BY = {  # for each missing module, what to install, inside `extra("notebooks")`
    "seaborn": "'gpulab[notebooks]'",
    "PIL.Image": "'gpulab[notebooks]'",
    "sklearn": "'gpulab[notebooks]'",
    "ray": "'gpulab[cluster]'",
    "xgboost": "'gpulab[trees]'",
    "pandas.core": "gpulab",
    "cpuinfo": "gpulab",
    "kiwisolver": "'gpulab[notebooks]'",  # a dependency of a library of the extra
}


@pytest.mark.parametrize("module", INSTALLED_BY)
def test_extra_error_names_a_missing_library_and_its_source(module, monkeypatch):
    library = module.partition(".")[0]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(gl.GpulabError) as caught, errors.extra("notebooks"):
        raise ModuleNotFoundError(name=module)
    assert re.match(rf"{library}( \(the package [\w-]+\))? is not installed", str(caught.value))
    assert str(caught.value).endswith(f": pip install {INSTALLED_BY[module]}")


def test_extra_error_for_a_missing_module_asks_for_a_newer_library():
    with (
        pytest.raises(
            gl.GpulabError,
            match=r"^numpy \(.*numpy.__init__.py\) has no module numpy\.new: pip install --up",
        ),
        errors.extra("notebooks"),
    ):
        raise ModuleNotFoundError(name="numpy.new")


def test_extra_error_is_not_raised_for_a_missing_module_of_gpulab():
    with pytest.raises(ModuleNotFoundError), errors.extra("notebooks"):
        importlib.import_module("gpulab.no_such_module")


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.__name__)
def test_public_functions_have_no_module_of_their_name(package):
    modules = {path.stem for path in Path(package.__file__).parent.iterdir()} - set(gl.PACKAGES)
    assert set(package.__all__) & modules == set()


def test_gpulab_does_not_mention_companion():
    files = [file for file in PACKAGE.rglob("*") if file.suffix in (".py", ".pyi", ".html", ".css")]
    assert len(files) > 60
    assert [file.name for file in files if "companion" in file.read_text(encoding="utf-8")] == []
