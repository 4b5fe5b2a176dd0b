import functools
import json
import math
import os
import pickle
import random
import sys
import textwrap

import numpy as np
import pytest
import torch

import gpulab as gl
from gpulab.store import _tables as tables
from gpulab.training import _workers as workers
from gpulab.training._functions import TrainingFunction

QUIET = {"progress": False}
ONE = "cpu:threads=1"

# A usual training: a data set, loaders and an optimiser.
USUAL = """
    from __future__ import annotations
    from dataclasses import dataclass
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset, random_split

    @dataclass
    class Config:
        width: int = 16

    def train(seed, setting, width=16, epochs=5):
        x = torch.randn(200, 2)
        some, others = random_split(TensorDataset(x, (x.norm(dim=1) > 1.2).long()), [150, 50])
        layers = nn.Linear(2, Config(width).width), nn.ReLU(), nn.Linear(width, 2)
        model = nn.Sequential(*layers).to(setting.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for epoch in range(epochs):
            for x, y in DataLoader(some, 32, shuffle=True):
                optimizer.zero_grad()
                out = model(x.to(setting.device))
                nn.functional.cross_entropy(out, y.to(setting.device)).backward()
                optimizer.step()
        ((x, y),) = DataLoader(others, 50)
        out = model.eval()(x).detach()
        loss = nn.functional.cross_entropy(out, y)
        return {"loss": loss, "accuracy": (out.argmax(1) == y).double().mean()}

    if __name__ == "__main__":
        raise SystemExit("it is imported, not run")
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files into an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    before, modules = list(sys.path), set(sys.modules)

    def put(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))

    yield put
    sys.path[:] = before
    for name in sys.modules.keys() - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def once(train, **more):
    return gl.train(train, setting=ONE, store="runs", **QUIET, **more)


def test_training_function_gives_runs_that_a_verdict_compares(write):
    write(usual=USUAL)
    settings = [ONE, "cpu:threads=1,precision=float64"]
    frame = gl.Experiment("usual.py:train", settings, 2, store="runs").run(progress=False)
    assert frame[["setting", "seed"]].values.tolist() == [
        [setting, seed] for setting in settings for seed in (0, 1)
    ]
    assert set(frame.status) == {"finished"}
    assert set(frame.experiment) == {"usual.py:train"}
    assert (frame.final_loss == frame.loss).all()
    assert frame.accuracy.between(0.3, 1).all()
    assert frame.final_loss.nunique() > 2
    assert gl.verdict(frame, "accuracy").table.seeds.tolist() == [2]
    ((record, _),) = tables.read_histories(frame.iloc[[1]])
    assert record["command"] == f"gpulab train usual.py:train --setting {ONE} --seed 1"
    run = once("usual.py:train", seed=1)
    assert (run.record["id"], run.metrics["accuracy"]) == (frame.id[1], frame.accuracy[1])


def test_seed_runs_without_torch_draws_random_numbers_from_the_seed():
    def score(seed):
        return random.random() + np.random.rand()

    state, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    scores = [gl.seed_runs(score, seeds=[3, 4, 5], **QUIET) for _ in range(2)]
    assert scores[0].equals(scores[1])
    assert scores[0].final_loss.nunique() == 3
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpys).all()


WAYS = [
    lambda seed: seed + 1.0,
    lambda setting, seed: seed + (setting.device == "cpu"),
    lambda seed, a=1: np.float32(seed + a),
    functools.partial(lambda a, seed: seed + a, 1.0),
    lambda seed: {"loss": seed + 1, "good": True},
]


@pytest.mark.parametrize("train", WAYS)
def test_seed_runs_takes_every_form_of_seed_argument_and_result(train):
    frame = gl.seed_runs(train, ONE, seeds=[2, 0], **QUIET)
    assert frame.final_loss.tolist() == [3.0, 1.0]


@pytest.mark.parametrize("value", [math.inf, {"loss": 1.0, "other": math.nan}])
def test_train_keeps_a_function_run_that_is_not_finite_as_diverged(value, tmp_path):
    run = gl.train(lambda seed: value, store=tmp_path, **QUIET)
    assert (run.status, run.metrics, math.isnan(run.final_loss)) == ("diverged", {}, True)
    assert gl.runs(tmp_path).status.tolist() == ["diverged"]
    json.loads((run.path / "run.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "value", [None, torch.ones(2, 2), {"loss": "1.0"}, {"width": 1.0}], ids=str
)
def test_train_refuses_a_result_that_is_no_number_or_names_a_column_of_runs(value):
    with pytest.raises(
        gl.GpulabError,
        match=r"(?s)returned .*; expected a number|'width', .* column of gpulab",
    ):
        gl.train(lambda seed, width=3, loss="mse": value, **QUIET)


def wrong(seed, setting):
    """Fail for some seeds; for the others, print, and read from standard input."""
    if seed == 1:
        json.loads("no data")
    if seed == 2:
        sys.exit("enough")
    os.write(1, b"from C\n")
    print("to standard output")
    sys.stdin.read()
    return seed


def test_experiment_names_seeds_that_fail_with_the_line_and_keeps_the_others(tmp_path):
    with pytest.raises(gl.GpulabError, match="2 of 4 runs failed") as error:
        gl.Experiment(wrong, [ONE], 4, store=tmp_path).run(progress=False)
    line = wrong.__code__.co_firstlineno
    assert "seed 1: json.decoder.JSONDecodeError: Expecting value" in str(error.value)
    assert f"(test_functions.py:{line + 3})" in str(error.value), (
        "the line is in the function, not in the library"
    )
    assert f"seed 2: SystemExit: enough (test_functions.py:{line + 5})" in str(error.value)
    assert gl.runs(tmp_path)[["seed", "final_loss"]].values.tolist() == [[0, 0], [3, 3]]
    with pytest.raises(gl.GpulabError, match="JSONDecodeError") as error:
        gl.seed_runs(wrong, seeds=[1], **QUIET)
    assert isinstance(error.value.__cause__, json.JSONDecodeError), (
        "in this process, the traceback is available"
    )


def test_experiment_refuses_a_file_that_begins_an_experiment_when_imported(write):
    begins = "gl.Experiment(train, ['cpu'], 1, store='runs').run()"
    write(bare=f"import gpulab as gl\n\ndef train(seed):\n    return seed\n\n{begins}\n")
    with pytest.raises(gl.UsageError, match="if __name__ == '__main__'"):
        gl.Experiment("bare.py:train", [ONE], 1, store="runs")


REFUSED = [
    (lambda: 0.0, "it takes no seed"),
    (lambda seed, status=1: 0.0, "option 'status' is a column"),
    ("broken.py:train", r"broken\.py cannot be imported: NameError: .*\(broken\.py:2\)"),
    ("tidy.py:train", r"SystemExit: 2 \(tidy\.py:3\)"),
]


@pytest.mark.parametrize(("train", "words"), REFUSED)
def test_experiment_refuses_what_cannot_be_trained_before_any_worker_starts(
    train, words, write, monkeypatch
):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", None)
    write(broken="\nx = undefined\n", tidy="import sys\n\nsys.exit(2)\n")
    with pytest.raises(gl.UsageError, match=words):
        gl.Experiment(train, [ONE], 2, store="runs").run(progress=False)
    assert not {"broken", "tidy"} & set(sys.modules), "incomplete modules are removed"


@pytest.mark.parametrize(
    "given", [{"colour": 1}, {"data_options": {"a": 1}}, {"watch": print}, {"flip": 0}]
)
def test_train_refuses_options_that_a_function_does_not_have(given):
    with pytest.raises(gl.UsageError, match=r"colour|watch|flip|data_options"):
        gl.train(lambda seed, width=3: 0.0, **given, **QUIET)


def test_train_refuses_an_option_that_json_cannot_carry_with_its_value():
    with pytest.raises(gl.UsageError, match=r"option width=tensor\(\[1\., 1\.\]\): .* JSON"):
        gl.train(lambda seed, width=3: 0.0, width=torch.ones(2), **QUIET)


def test_experiment_options_are_columns_and_make_other_runs(tmp_path):
    def train(seed, width=8, layers=(3, 4), make=torch.nn.Linear, learning_rate=0.1):
        assert make is torch.nn.Linear
        return seed + 1 / width + learning_rate * isinstance(layers, tuple)

    variants = [{}, {"width": 16}, {"width": 8, "layers": [5]}]
    jobs = gl.Experiment(train, [ONE], 6, store=tmp_path, variants=variants).jobs()
    frame = [gl.train(**job, **QUIET) for job in jobs] and gl.runs(tmp_path)
    assert len(frame) == 18
    assert gl.train(train, setting=ONE, width=8, store=tmp_path, **QUIET).record["id"] in set(
        frame.id
    )
    assert gl.train(train, setting=ONE, learning_rate=1.0, **QUIET).final_loss == 1 + 1 / 8
    assert json.dumps({"width": 8, "layers": [5], "make": "Linear", "learning_rate": 0.1}) in set(
        frame.options
    )
    assert gl.verdict(frame[frame.layers == "[3, 4]"], factor="width").decision.startswith(
        "different"
    )


def test_training_function_source_is_the_text_when_a_training_begins(write):
    text = "import parts\n\ndef train(seed):\n    return parts.loss + 0\n"
    write(usual=text, parts="loss = 1.0\n")
    training = TrainingFunction("usual.py:train")
    before = once(training)
    assert once("usual.py:train").record == before.record
    write(usual=text.replace("+ 0", "+ 1"))  # of the same length, within the same second
    assert once("usual.py:train").final_loss == 2
    # of another length: Python recognises outdated compiled files by second and length
    write(parts="loss = 2.00\n")
    del sys.modules["parts"]
    assert once("usual.py:train").final_loss == 3
    assert sorted(gl.runs("runs").final_loss) == [1, 2, 3]
    assert pickle.loads(pickle.dumps(training)).source != training.source, (
        "another process reads the file itself"
    )


EDITS_ITSELF = """
import pathlib

def train(seed):
    with open(__file__, "a") as file:
        file.write("# edited\\n")
    return seed
"""


def test_experiment_names_a_function_that_was_edited_while_it_ran(write):
    write(edits=EDITS_ITSELF)
    with pytest.raises(gl.GpulabError, match="were changed while the experiment ran"):
        gl.Experiment("edits.py:train", [ONE], 2, store="runs").run(progress=False)


def test_train_takes_none_as_the_value_of_an_option_of_a_function():
    def training(seed, rate=1.0, frames=3):
        return float(frames) if rate is None else -1.0

    assert gl.train(training, rate=None, seed=np.int64(1), progress=False).final_loss == 3
    assert gl.train(training, frames=5, progress=False).final_loss == -1
