import functools

import pytest

import gpulab as gl
from gpulab.store import sources
from gpulab.training.functions import TrainingFunction

PACKAGE = {
    "__init__": "",
    "model": "from .deep import SIZE\nfrom os import path\n",
    "deep/__init__": "from .sizes import *\n",
    "deep/sizes": "SIZE = 3\n",
    "unused": "x = 1\n",
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
    assert {name for name, source in sources.items() if source == sources[""]} == {"", "unused"}


@pytest.mark.parametrize(("parts", "another"), [("", False), ('GPULAB_PARTS = ("data",)', True)])
def test_a_file_may_name_what_of_gpulab_it_depends_on(parts, another, tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(f"{parts}\ndef train(seed):\n    return float(seed)\n")
    before = TrainingFunction(f"{file}:train").source
    monkeypatch.setattr(sources, "of_gpulab", lambda *names: f"another text of {names}")
    assert (TrainingFunction(f"{file}:train").source != before) == another


CELLS = r"""
    import linecache, sys
    import torch
    import gpulab as gl
    from gpulab.training.functions import TrainingFunction

    def cell(number, text):  # as a notebook has it: text in no file
        name = f"<cell {number} of {sys.argv[1]}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), globals())

    cell(1, "class Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(WIDTH, 1)\n")
    cell(2, "def loss(net):\n    return net.weight.square().sum()\n")
    cell(3, "WIDTH = 2\n")
    cell(4, "def train(seed):\n    return {'loss': loss(Net()).item()}\n")
    sources = [TrainingFunction(train).source]
    edits = {5: "def loss(net):\n    return 2 * net.weight.square().sum()\n", 6: "WIDTH = 3\n"}
    edits[7] = "class Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 1)\n"
    for number, text in edits.items():
        cell(number, text)
        sources.append(TrainingFunction(train).source)
    print(*sources)
    if sys.argv[1] == "2":
        raise SystemExit
    frame = gl.Experiment(train, ["cpu:threads=1"], 2, store=sys.argv[2]).run(progress=False)
    print(*frame.id, *frame.experiment)
"""


@pytest.mark.slow("starts processes")
def test_a_function_of_a_notebook_is_what_was_typed(python, tmp_path):
    first, second = (python(CELLS, number, tmp_path).stdout.splitlines() for number in (1, 2))
    assert first[:1] == second, "the same in another process"
    assert len(set(first[0].split())) == 4, "an edit of what it calls makes another"
    assert first[1].endswith("train train")


def test_what_a_closure_and_a_partial_hold_belongs_to_it():
    def make(rate):
        return lambda seed: rate

    class Trainer:
        def __init__(self, rate):
            self.rate = rate

        def fit(self, seed):
            return self.rate

        def __call__(self, seed):
            return self.rate

    def partly(rate, seed):
        return rate

    for build in (make, lambda rate: functools.partial(partly, rate), lambda rate: Trainer(rate).fit, Trainer):
        sources = [TrainingFunction(build(rate)).source for rate in (1, 2, 1)]
        assert sources[0] == sources[2] != sources[1]
        assert gl.seed_runs(build(2), seeds=1, progress=False).final_loss[0] == 2
