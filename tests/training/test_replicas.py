"""Trainings that take turns: each has the result that it has alone, whatever happens to the others."""

import itertools
import json

import pytest
import torch

import gpulab as gl
from gpulab.training import replicas, run
from gpulab.training.worker import worker_loop
from gpulab.training.workers import Workers, may_share

SMOKE = {"profile": "smoke", "frames": 200}


def together(jobs, most=16, answers=None):
    """What is answered to jobs that come at once, by number."""
    answers = {} if answers is None else answers

    def answer(number, **message):
        answers.setdefault(number, []).append(message)

    lines = [json.dumps({"number": number, **job}) for number, job in enumerate(jobs)]
    coming = replicas.Coming(iter(lines))
    for number, job in coming:
        replicas.train_together(number, job, coming, answer, most)
    return answers


def jobs(tmp_path, net, seeds, setting="cpu", **more):
    return [
        {"net": net, "setting": setting, "seed": s, "store": str(tmp_path / "shared"), **SMOKE, **more} for s in seeds
    ]


def results(store):
    return gl.runs(store).set_index("seed")[["weights", "final_loss", "heldout_loss"]].sort_index()


def check_each_as_alone(tmp_path, net, seeds, setting="cpu"):
    """What was trained together, against the same trained one by one."""
    for seed in seeds:
        gl.train(net, seed=seed, setting=setting, store=tmp_path / "alone", progress=False, **SMOKE)
    assert results(tmp_path / "shared").equals(results(tmp_path / "alone"))
    assert results(tmp_path / "alone").weights.nunique() == len(seeds)


DEVICES = [
    "cpu",
    pytest.param("cuda:tf32=off", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("setting", DEVICES)
@pytest.mark.parametrize("net", ["autoencoder", "whitener", "prednet"])
def test_each_has_the_bits_that_it_has_alone_and_says_that_it_shared(tmp_path, net, setting):
    here = f"{setting}:threads=1,deterministic=on" if setting == "cpu" else f"{setting},deterministic=on"
    answers = together(jobs(tmp_path, net, range(3), here), most=2)
    assert [answer[-1].keys() for answer in answers.values()] == [{"id"}] * 3
    check_each_as_alone(tmp_path, net, range(3), here)
    for store, is_shared in (("shared", True), ("alone", False)):
        records = [json.loads(file.read_text()) for file in (tmp_path / store).glob("*/run.json")]
        assert {record.get("shared", False) for record in records} == {is_shared}
        assert gl.runs(tmp_path / store).frames_per_second.isna().tolist() == [is_shared] * 3
    again = gl.train(net, setting=here, store=tmp_path / "shared", progress=False, **SMOKE)
    assert "sharing its GPU" in repr(again)


def test_random_numbers_of_one_are_not_those_of_another(tmp_path, monkeypatch):
    """A network that draws while it trains, beside another: as alone."""

    class Noisy(gl.models.Autoencoder):
        def training_loss(self, batch, state):
            return super().training_loss(batch + 0.1 * torch.rand_like(batch), state)

    monkeypatch.setitem(replicas.MODELS, "autoencoder", Noisy)
    together(jobs(tmp_path, "autoencoder", range(3)))
    check_each_as_alone(tmp_path, "autoencoder", range(3))


def test_one_that_fails_does_not_stop_the_others(tmp_path):
    bad = jobs(tmp_path, "autoencoder", [9], data="walk")
    worse = jobs(tmp_path, "autoencoder", [9], model_options={"width": 3})
    answers = together([*jobs(tmp_path, "autoencoder", [0]), *bad, *worse, *jobs(tmp_path, "autoencoder", [1])])
    assert "sequence of frames" in answers[1][-1]["error"]
    assert "width" in answers[2][-1]["error"]
    assert [*results(tmp_path / "shared").index] == [0, 1]


def test_one_that_does_not_fit_waits_until_another_has_ended(tmp_path, monkeypatch):
    """Stands in for a GPU's memory: at most two of the trainings' windows are under way."""
    usual, going = run.carry_out, set()

    def carry_out(plan, *args, **kwargs):
        me = object()
        if len(going) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        going.add(me)
        try:
            return (yield from usual(plan, *args, **kwargs))
        finally:
            going.discard(me)

    monkeypatch.setattr(run, "carry_out", carry_out)
    together(jobs(tmp_path, "autoencoder", range(5)))
    assert len(gl.runs(tmp_path / "shared")) == 5


def test_an_interruption_saves_a_checkpoint_of_each_and_nothing_is_lost(tmp_path, monkeypatch):
    usual, turns = replicas.Replica.turn, itertools.count()

    def turn(self):
        if next(turns) == 20:
            raise KeyboardInterrupt
        usual(self)

    monkeypatch.setattr(replicas.Replica, "turn", turn)
    with pytest.raises(KeyboardInterrupt):
        together(jobs(tmp_path, "autoencoder", range(3)))
    monkeypatch.undo()
    together(jobs(tmp_path, "autoencoder", range(3)))
    records = [json.loads(file.read_text()) for file in (tmp_path / "shared").glob("*/run.json")]
    assert min(record["resumed_at"] for record in records) >= 5
    check_each_as_alone(tmp_path, "autoencoder", range(3))


def test_what_shares_a_gpu():
    job = {"net": "prednet", "setting": "cuda:tf32=off", "seed": 0}
    others = [{"setting": "cpu"}, {"net": "mine.py:train"}, {"devices": 2}, {"guard": True}]
    assert may_share(job)
    assert not any(map(may_share, [{"pickled": "", "path": []}, *(job | other for other in others)]))
    assert Workers(1, [job]).count == 16
    assert Workers(2, [job]).count == 2
    assert Workers(1, [job | {"setting": "cpu"}]).count == 1


JOB = {"net": "autoencoder", "profile": "smoke", "setting": "cpu:threads=1", "seed": 1, "frames": 40}


def test_a_worker_answers_each_job_with_lines_of_json_and_survives_bad_ones(tmp_path, capfd):
    jobs = [
        {**JOB, "store": str(tmp_path)},
        {**JOB, "setting": "cuda:77"},
        {**JOB, "model_options": {"hidden": []}},
        {**JOB, "colour": "red"},
        {**JOB, "store": str(tmp_path), "seed": 2},
    ]
    worker_loop(iter([json.dumps({"number": 10 * place, **job}) + "\n" for place, job in enumerate(jobs)]))
    said, errors = capfd.readouterr()
    answers = [json.loads(line) for line in said.splitlines()]
    assert [answer.pop("number") for answer in answers] == [0, 0, 0, 10, 20, 30, 40, 40, 40]
    frame = gl.runs(tmp_path)
    kinds = ["+".join(answer) for answer in answers]
    assert kinds == ["done+loss", "done+loss", "id", "error", "error", "error", "done+loss", "done+loss", "id"]
    assert [answer["id"] for answer in answers if "id" in answer] == frame.id.tolist()
    assert [answer["done"] for answer in answers if "done" in answer] == [20, 40, 20, 40]
    for answer, wrong in zip(answers[3:6], ("cuda:77", "hidden", "colour"), strict=True):
        assert wrong in answer["error"]
    assert "Traceback" not in errors
