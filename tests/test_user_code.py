import functools
import linecache
import math
import sys
import types

import pytest

import gpulab as gl
from gpulab.training._functions import TrainingFunction
from gpulab.user_code import UnknownSourceError, find_function, source_of


def test_find_function_by_module_and_by_file(tmp_path, monkeypatch):
    (tmp_path / "my_steps_here.py").write_text(
        "def step(setting):\n    return setting\n\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert find_function("my_steps_here:step", "step")("x") == "x"
    assert find_function(f"{tmp_path / 'my_steps_here.py'}:step", "step")("y") == "y"
    for name in ("my_steps_here", "my_steps_here:number", "no_such_module_anywhere:step"):
        with pytest.raises(gl.UsageError, match=name):
            find_function(name, "step")


def test_find_function_by_the_former_file_of_the_example_steps(tmp_path, monkeypatch):
    """Recorded commands name `benchmarks/networks.py`; a user's file of this name takes
    precedence.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    former, current = (
        find_function(f"{where}:lstm", "step")
        for where in ("benchmarks/networks.py", "gpulab.models.example_steps")
    )
    assert isinstance(former, gl.Step)
    assert former.batch.equal(current.batch)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "networks.py").write_text("def lstm(setting):\n    return 3\n")
    assert find_function("benchmarks/networks.py:lstm", "step")(None) == 3


def test_source_of_names_the_library_as_before_its_modules_became_private():
    """Stored runs are found by a digest of the user's code, which names library functions."""
    code = "def step(seed):\n    return train, guard, Experiment\n"
    scope = {
        "train": gl.train,
        "guard": gl.guard,
        "Experiment": gl.Experiment,
        "__name__": "__main__",
    }
    file = "<console of a user>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    exec(compile(code, file, "exec"), scope)
    _, referenced = source_of(scope["step"])
    assert referenced == {
        "train": ["gpulab.training.run", "train"],
        "guard": ["gpulab.guards.guards", "guard"],
        "Experiment": ["gpulab.training.experiment", "Experiment"],
    }


# --- the source text of a function ----------------------------------------------------------------

PACKAGE = {
    "__init__": "",
    "model": "from .deep import SIZE\nfrom os import path\n",
    "deep/__init__": "from .sizes import *\n",
    "deep/sizes": "SIZE = 3\n",
    "train": (
        "def train(seed):\n    from mine import model\n    import json\n    return model.SIZE\n"
    ),
}


def test_source_of_a_function_in_a_file_is_all_that_it_imports_from_beside(tmp_path, monkeypatch):
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    sources = set()
    for changed in ["", *PACKAGE]:
        for name, text in PACKAGE.items():
            (tmp_path / "mine" / f"{name}.py").write_text(
                text + ("y = 0\n" if name == changed else "")
            )
        sources.add(TrainingFunction("mine.train:train").source)
    assert len(sources) == 1 + len(PACKAGE)


def test_source_of_a_function_in_a_notebook_is_what_was_typed(monkeypatch):
    """The text is in no file; editing anything that the function calls changes its source."""
    typed = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", typed)
    net = "class Net:\n    def __init__(self):\n        self.loss = WIDTH\n"
    loss, train = (
        "def loss(net):\n    return net.loss\n",
        "def train(seed):\n    return loss(Net())\n",
    )
    edits = [
        "WIDTH = 3\n",
        net.replace("WIDTH", "4"),
        loss.replace("net.loss", "2 * net.loss"),
        "WIDTH = 3\n",
    ]
    found = []
    for number, text in enumerate([net, loss, "WIDTH = 2\n", train, *edits]):
        name = f"<cell {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), vars(typed))
        if hasattr(typed, "train"):
            found.append(TrainingFunction(typed.train).source)
    assert len(set(found)) == 4
    assert found[-1] == found[-2], "the same text typed again"
    assert gl.seed_runs(typed.train, seeds=1, progress=False).final_loss[0] == 8


def test_source_of_a_closure_and_a_partial_has_what_they_hold():
    def make(rate):
        return lambda seed: rate

    def partly(rate, seed):
        return rate

    for build in (make, lambda rate: functools.partial(partly, rate)):
        sources = [TrainingFunction(build(rate)).source for rate in (1, 2, 1)]
        assert sources[0] == sources[2] != sources[1]


def test_source_of_an_object_that_trains_is_unknown():
    class Trainer:
        def __call__(self, seed):
            return 2

    assert TrainingFunction(Trainer()).unknown_source
    assert gl.seed_runs(Trainer(), seeds=1, progress=False).final_loss[0] == 2


def test_source_of_a_function_that_is_not_written_in_python_is_unknown():
    with pytest.raises(UnknownSourceError, match="sqrt has no source code"):
        source_of(math.sqrt)
