import functools
import linecache
import sys
import types

import gpulab as gl
from gpulab.training.functions import TrainingFunction

PACKAGE = {
    "__init__": "",
    "model": "from .deep import SIZE\nfrom os import path\n",
    "deep/__init__": "from .sizes import *\n",
    "deep/sizes": "SIZE = 3\n",
    "train": "def train(seed):\n    from mine import model\n    import json\n    return model.SIZE\n",
}


def test_what_lies_beside_and_is_imported_belongs_to_it(tmp_path, monkeypatch):
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    sources = {}
    for changed in ["", *PACKAGE]:
        for name, text in PACKAGE.items():
            (tmp_path / "mine" / f"{name}.py").write_text(text + ("y = 0\n" if name == changed else ""))
        sources[changed] = TrainingFunction("mine.train:train").source
    assert len(set(sources.values())) == len(sources), "of a package all files count"


def test_a_function_of_a_notebook_is_what_was_typed(monkeypatch):
    """Text in no file; an edit of what it calls makes another."""
    typed = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", typed)

    def cell(number, text):
        name = f"<cell {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), vars(typed))

    cell(1, "class Net:\n    def __init__(self):\n        self.loss = WIDTH\n")
    cell(2, "def loss(net):\n    return net.loss\n")
    cell(3, "WIDTH = 2\n")
    cell(4, "def train(seed):\n    return loss(Net())\n")
    found = [TrainingFunction(typed.train).source]
    edits = [
        "class Net:\n    def __init__(self):\n        self.loss = 4\n",
        "def loss(net):\n    return 2 * net.loss\n",
    ]
    for number, text in enumerate(["WIDTH = 3\n", *edits, "WIDTH = 3\n"], 5):
        cell(number, text)
        found.append(TrainingFunction(typed.train).source)
    assert len(set(found)) == 4
    assert found[-1] == found[-2], "the same text typed again"
    assert gl.seed_runs(typed.train, seeds=1, progress=False).final_loss[0] == 8


def test_what_a_closure_and_a_partial_hold_belongs_to_it():
    def make(rate):
        return lambda seed: rate

    def partly(rate, seed):
        return rate

    for build in (make, lambda rate: functools.partial(partly, rate)):
        sources = [TrainingFunction(build(rate)).source for rate in (1, 2, 1)]
        assert sources[0] == sources[2] != sources[1]
        assert gl.seed_runs(build(2), seeds=1, progress=False).final_loss[0] == 2


def test_objects_that_train_are_known_by_no_text():
    class Trainer:
        def fit(self, seed):
            return 2

        def __call__(self, seed):
            return 2

    for train in (Trainer().fit, Trainer()):
        assert TrainingFunction(train).unknown
        assert gl.seed_runs(train, seeds=1, progress=False).final_loss[0] == 2
